"""Smoothness-aware compression: whiten with the smoothness matrix, compress, take the whitening back."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxcomp.arrays import bounded, finite, one_row, row_of, wide
from jaxcomp.backend import zeros_if_shape
from jaxcomp.base import Compressor, Spec, State, accumulate, advance, check_compressor, for_worker, on_vectors
from jaxcomp.factories import factory
from jaxcomp.groups import FIXED
from jaxcomp.smoothness.operator import Blocks, DenseMatrix, Diagonal, LowRank, Operator, Softmax, is_stacked

__all__ = ["precondition", "refresh"]

Array = jax.Array


class Preconditioned(NamedTuple):
    """operator: of all workers, stacked, or the one that they have in common; compressor: shared state of C."""

    operator: Any
    compressor: Any


def refresh(state: Any, smoothness: Operator, plan: Any = None) -> Any:
    """A state with another smoothness operator, where curvature is estimated anew during training.

    Args:
        state: of `compressed_mean`, `rounds`, an optimizer or a compressor, with one preconditioned compressor.
        smoothness: operator of the same form and shape.
        plan: shared state of the compressor inside (steps, probabilities), if it changes too.

    Returns:
        The same tree with the operator replaced. Nothing recompiles: shapes and dtypes stay. The omega that
        `diana` took from the first plan stays too.

    Raises:
        ValueError: there is no preconditioned compressor in the state, shapes differ, or entries are out of the range
            of the floats in the state.

    >>> import jaxcomp as jc
    >>> S = jc.smoothness.diagonal_of(np.ones(2))
    >>> state = jc.precondition(jc.natural(), S).init(jax.random.key(0), jax.ShapeDtypeStruct((2,), jnp.float32))
    >>> print(refresh(state, jc.smoothness.diagonal_of([1.0, 4.0])).shared.operator.diag)
    [1. 4.]
    """

    def cast(new, old):
        if np.shape(new) != np.shape(old):
            raise ValueError(f"refresh: operator of shape {np.shape(new)} in place of {np.shape(old)}")
        return jnp.asarray(new, old.dtype)

    def refreshed(node):
        _check_range("refresh", smoothness, jax.tree.leaves(node.operator)[0].dtype)
        inner = node.compressor if plan is None else jax.tree.map(cast, plan, node.compressor)
        return Preconditioned(jax.tree.map(cast, smoothness, node.operator), inner)

    is_old = lambda node: isinstance(node, Preconditioned)
    nodes, structure = jax.tree.flatten(state, is_leaf=is_old)
    if not any(map(is_old, nodes)):
        raise ValueError("refresh: there is no preconditioned compressor in this state")
    return structure.unflatten([refreshed(node) if is_old(node) else node for node in nodes])


@factory
def precondition(compressor: Compressor, smoothness: Operator, *, dtype: Any = None) -> Compressor:
    """Compresses in the coordinates of a smoothness matrix, so that the error is small where it matters.

    C'(x) = L^(1/2) C(L^(-1/2) x),   E|C'(x) - x|^2 <= V(C, L) |x|^2_(L^-1).

    C' is unbiased on the range of L (everywhere when L is positive definite; gradients of a loss
    lie in the range). omega is that of C and holds in the norm |x|^2_(L^-1), which is what `diana` needs
    for its alpha; step sizes follow from V(C, L), see `theory`.

    With a stack of operators worker i whitens with the i-th, and its message is decoded with the
    i-th. With a single one the decoder adds the messages before it multiplies once, and a linear C
    stays linear, so its payloads can be summed on the way.

    Args:
        compressor: unbiased, of one array; with plans per worker where it has them.
        smoothness: an operator, or a stack of them, one per worker (`smoothness.stack`).
        dtype: floating type in which C sees the whitened vector, and so in which it sends values;
            default that of x.

    Returns:
        Compressor of one array with the payload of C. Operators are kept in `State.shared`.

    Raises:
        ValueError: C is lifted to trees or biased; at `init`, sizes that do not fit, or entries of the operator out of
            the range of the floats to compute in: f64 for x in f64, else f32.

    Reference: Safaryan, Hanzely, Richtarik 2021; Wang, Safaryan, Richtarik 2022, for any unbiased C.

    >>> import jaxcomp as jc
    >>> S = jc.smoothness.dense_of(np.diag([4.0, 1.0]))
    >>> print(jc.roundtrip(jc.precondition(jc.identity(), S), jnp.array([1.0, 2.0]), key=jax.random.key(0))[0])
    [1. 2.]
    """
    spec = check_compressor("precondition", compressor)
    if spec.lifted:
        raise ValueError(f"precondition acts on one array; {spec.name} acts on trees. Lift the result instead")
    if spec.omega is None:
        raise ValueError(f"precondition needs an unbiased compressor (omega known); {spec.name} is not one")
    if not hasattr(smoothness, "inv_root"):
        raise ValueError(f"precondition: smoothness must be an operator; got {type(smoothness).__name__}")
    stacked, size = is_stacked(smoothness), np.shape(smoothness.diag)[-1]

    def inner(like: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((size,), like.dtype if dtype is None else jnp.dtype(dtype))

    def operator_of(shared: Preconditioned) -> Operator:
        return one_row("precondition", shared.operator) if stacked else shared.operator

    def init(shared_key, like):
        if like.size != size:
            raise ValueError(f"precondition: operators of {size} entries for an array of {like.size}")
        state = compressor.init(shared_key, inner(like))
        kind = wide(like.dtype)
        _check_range("precondition", smoothness, kind)
        return State(
            state.local, Preconditioned(jax.tree.map(lambda a: jnp.asarray(a, kind), smoothness), state.shared)
        )

    def compress(key, x, state):
        white = operator_of(state.shared).inv_root(finite(x).astype(wide(x.dtype)))
        return compressor.compress(key, bounded(white, inner(x).dtype), State(state.local, state.shared.compressor))

    def decompress(payload, shared, like):
        white = compressor.decompress(payload, shared.compressor, inner(like))
        return bounded(operator_of(shared).root(white.astype(wide(like.dtype))), like.dtype)

    def add(total, payloads, weights, shared):
        zeros = jnp.zeros((size,), wide(total.dtype))
        white = accumulate(compressor, zeros, payloads, weights, shared.compressor)
        return zeros_if_shape(total, payloads) + shared.operator.root(white).astype(total.dtype)

    def pick(shared, worker, workers):
        operator = row_of("precondition", shared.operator, worker, workers) if stacked else shared.operator
        return Preconditioned(operator, for_worker(compressor, shared.compressor, worker, workers))

    def norm(x, shared):
        white = operator_of(shared).inv_root(x)
        return jnp.sum(jnp.square(white))

    return on_vectors(
        init=init,
        compress=compress,
        decompress=decompress,
        spec=Spec(
            f"precondition({spec.name})",
            omega=spec.omega,
            alpha=None,
            linear=spec.linear and not stacked,
            norm=norm,
            layout=FIXED,
        ),
        accumulate=None if stacked else add,
        advance=None
        if compressor.advance is None
        else lambda shared: shared._replace(compressor=advance(compressor, shared.compressor)),
        for_worker=pick if stacked or compressor.for_worker is not None else None,
        overflow=compressor.overflow,
    )


def _check_range(name: str, operator: Operator, dtype: Any) -> None:
    """Whether what is multiplied with, or divided by, is a normal float of this type: smaller ones would count as 0."""
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(operator)):
        return
    least, most = float(jnp.finfo(dtype).tiny), float(jnp.finfo(dtype).max)
    for what, values, low, high in _entries(operator, least, most):
        values = np.abs(np.asarray(values, np.float64)).reshape(-1)
        wrong = values[~((values == 0) | (values >= low) & (values <= high))]
        if wrong.size:
            raise ValueError(
                f"{name}: {what} of the smoothness operator must be 0 or in [{low:.3g}, {high:.3g}] to compute in "
                f"{jnp.dtype(dtype).name}; got {wrong[0]:.3g}. Rescale the loss, or compute in float64"
            )


def _entries(operator: Operator, least: float, most: float) -> list[tuple[str, Any, float, float]]:
    """Name, values, and range of what an operator computes with.

    In a matrix any small entry may be rounding, and may be lost. Of its two roots one has a large entry where the
    other has lost an eigenvalue.
    """
    if isinstance(operator, Diagonal):
        return [("the diagonal", operator.diag, least, most)]
    if isinstance(operator, LowRank):
        base = np.asarray(operator.base, np.float64)
        inside = base[..., None] + np.asarray(operator.sigma, np.float64)
        return [("base", base, least, most), ("sigma + base", inside, least, most)]
    if isinstance(operator, Softmax):
        return [("l2", operator.l2, least, most), *_entries(operator.inner, least, most)]
    if isinstance(operator, DenseMatrix | Blocks):
        return [
            ("the root", operator.matrix_root, 0.0, 1 / least),
            ("the inverse root", operator.matrix_inv_root, 0.0, 1 / least),
        ]
    return []
