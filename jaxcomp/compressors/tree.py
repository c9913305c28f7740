"""Compressors of trees: leaf by leaf, or all leaves as one vector. `jaxcomp.layout` says how trees become vectors."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxcomp.backend import zeros_if_shape
from jaxcomp.base import Compressor, Lifted, accumulate, check_compressor, lengths
from jaxcomp.compressors.checks import is_whole
from jaxcomp.compressors.vector import lift
from jaxcomp.layout import DENSE_BELOW, Layout, Plan, join, plan_of, split
from jaxcomp.payloads import Leaves

__all__ = ["flat", "per_leaf", "with_layout"]


def per_leaf(compressor: Compressor, *, dense_below: int = DENSE_BELOW) -> Compressor:
    """Compresses each leaf of a tree by itself; small leaves go dense in one message.

    Each leaf has its own state, its own keys and its own payload. Leaves with fewer than
    `dense_below` entries (biases, norms) are concatenated and sent as they are. A bare array, a
    tree that is itself a leaf, is compressed whatever its size, with the compressor's own payload.

    omega is the largest, alpha the smallest over the leaves (1 for dense ones).

    Leaves with equally many entries are compressed by one instance in the compiled program, one after the other. So
    compile time grows with the number of different sizes; where that is too much, leave `per_leaf` out: by default
    large leaves are one vector, or with `dithering` and `cast` few.

    Args:
        compressor: of one array.
        dense_below: number of entries, at least 0; 0 compresses every leaf.

    Returns:
        Compressor of trees with payload `Leaves`.

    Raises:
        ValueError: the compressor acts on trees already, or dense_below is negative.

    >>> import jaxcomp as jc
    >>> tree = {"b": jnp.ones(2), "w": jnp.arange(6.0)}
    >>> x_hat, payload = jc.roundtrip(jc.per_leaf(jc.top_k(k=1), dense_below=3), tree, key=jax.random.key(0))
    >>> print(x_hat["b"], x_hat["w"], payload.dense.values)
    [1. 1.] [0. 0. 0. 0. 0. 5.] [1. 1.]
    """
    if not is_whole(dense_below, 0):
        raise ValueError(f"per_leaf: dense_below must be an integer of at least 0; got {dense_below}")
    unit = "leaf" if compressor.lengths is None else "apart"
    return with_layout("per_leaf", compressor, Layout(unit, int(dense_below)))


def flat(compressor: Compressor) -> Compressor:
    """Compresses all leaves of a tree as one vector, in the order of `jax.tree.leaves`.

    One threshold or one norm for the whole model, one message. omega and alpha are those of the
    compressor at the total number of entries.

    Args:
        compressor: of one array.

    Returns:
        Compressor of trees with the compressor's own payload.

    Raises:
        ValueError: the compressor acts on trees already.

    >>> import jaxcomp as jc
    >>> tree = {"a": jnp.ones(2), "b": jnp.array(3.0)}
    >>> x_hat, payload = jc.roundtrip(jc.flat(jc.top_k(k=1)), tree, key=jax.random.key(0))
    >>> print(x_hat["a"], x_hat["b"], payload.indices)
    [0. 0.] 3.0 [2]
    """
    return with_layout("flat", compressor, Layout("tree", 0, single=True))


def with_layout(name: str, compressor: Compressor, layout: Layout) -> Compressor:
    """A compressor of trees that are laid out so."""
    spec = check_compressor(name, compressor)
    if spec.lifted:
        raise ValueError(f"{name}: {spec.name} acts on trees already")
    lifted = Lifted(layout, compressor)
    inner = lift(compressor._replace(spec=spec._replace(lifted=lifted)))

    def init(shared_key, like):
        return inner.init(shared_key, plan_of(layout, like).like)

    def compress(key, tree, state):
        plan = plan_of(layout, tree)
        payload, local = inner.compress(key, split(plan, tree), state)
        return _by_leaf(plan, payload), local

    def decompress(payload, shared, like):
        plan = plan_of(layout, like)
        return join(plan, inner.decompress(_by_group(plan, payload, 0), shared, plan.like))

    def add(total, payloads, weights, shared):
        plan = plan_of(layout, total)
        weights = _by_group(plan, weights, None) if isinstance(weights, Leaves) else weights
        total = split(plan, zeros_if_shape(total, payloads))
        return join(plan, accumulate(inner, total, _by_group(plan, payloads, 1), weights, shared))

    def bound(of_size, pick, of_dense):
        def of(sizes):
            if not isinstance(sizes, tuple):
                return of_size(sizes)
            if layout.single:
                return of_size(sum(sizes))
            return pick([of_size(d) if d >= layout.dense_below else of_dense for d in sizes], default=of_dense)

        return None if of_size is None else of

    return inner._replace(
        init=init,
        compress=compress,
        decompress=decompress,
        accumulate=add,
        entries=None,
        lengths=None if compressor.lengths is None else lambda like: lengths(inner, plan_of(layout, like).like),
        spec=spec._replace(
            name=f"{name}({spec.name})",
            omega=bound(spec.omega, max, 0.0),
            alpha=bound(spec.alpha, min, 1.0),
            selects=False,
            lifted=lifted,
        ),
    )


def _by_leaf(plan: Plan, payload: Any) -> Any:
    """The payload of each leaf in the order of the leaves, out of those of the vectors."""
    if plan.bare:
        return payload
    found = {}
    for group, part in zip(plan.groups, payload.leaves, strict=True):
        for row, i in enumerate(group.leaves if group.rows else group.leaves[:1]):
            found[i] = jax.tree.map(lambda a: a[row], part) if group.rows else part  # noqa: B023
    return payload._replace(leaves=tuple(found[i] for i in sorted(found)))


def _by_group(plan: Plan, payload: Any, axis: int | None) -> Any:
    """Inverse of `_by_leaf`, stacking rows along `axis`; None: what stands for a group is that of its first leaf."""
    if plan.bare:
        return payload
    numbers = sorted(i for group in plan.groups for i in (group.leaves if group.rows else group.leaves[:1]))
    found = dict(zip(numbers, payload.leaves, strict=True))

    def part(group):
        if axis is None or not group.rows:
            return found[group.leaves[0]]
        along = axis
        return jax.tree.map(lambda *rows: jnp.stack(rows, along), *(found[i] for i in group.leaves))

    return payload._replace(leaves=tuple(map(part, plan.groups)))
