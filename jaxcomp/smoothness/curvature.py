"""Estimated smoothness of networks: a diagonal, or a number per layer, from curvature at the current point.

These are estimates, not bounds: a network has no smoothness matrix that holds everywhere. Multiply
by a safety factor, refresh every few hundred steps (`jaxcomp.state.refresh`), and prefer methods that stay unbiased
whatever the operator is, as `precondition` does: a poor estimate costs variance, never correctness.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp.allocate.workers import number_of
from jaxcomp.smoothness.operator import Diagonal, diagonal_of

__all__ = ["ggn_diagonal", "hutchinson_diagonal", "network_operator"]

Array = jax.Array


def _total(name: str, part: Callable[[Array], Any], params: Any, key: Array, samples: int) -> Any:
    """Sum of part(key), a tree like params, over so many keys."""
    if not (number_of(samples) >= 1 and number_of(samples) % 1 == 0):
        raise ValueError(f"{name}: samples must be an integer of at least 1; got {samples!r}")
    add = lambda total, key: (jax.tree.map(jnp.add, total, part(key)), None)
    zeros = jax.tree.map(jnp.zeros_like, params)
    return jax.lax.scan(add, zeros, jax.random.split(key, int(samples)))[0]


def _signs(key: Array, tree: Any) -> Any:
    structure = jax.tree.structure(tree)
    keys = structure.unflatten(jax.random.split(key, structure.num_leaves))
    return jax.tree.map(lambda k, a: jax.random.rademacher(k, a.shape, a.dtype), keys, tree)


def hutchinson_diagonal(loss: Callable[[Any], Array], params: Any, key: Array, *, samples: int = 16) -> Any:
    """Estimate of the diagonal of the Hessian: mean of z * (H z) over random signs z. May be negative.

    E z_j (H z)_j = H_jj; the variance of one sample is sum_(k != j) H_jk^2.

    Args:
        loss: params -> scalar.
        params: tree of arrays.
        key: of the signs.
        samples: number of Hessian-vector products, at least 1.

    Returns:
        Tree like params.

    Raises:
        ValueError: samples is not an integer of at least 1.

    Reference: Bekas, Kokiopoulou, Saad 2007.

    >>> loss = lambda x: x[0] ** 2 + 3 * x[1] ** 2
    >>> print(hutchinson_diagonal(loss, jnp.ones(2), jax.random.key(0)))
    [2. 6.]
    """
    gradient = jax.grad(loss)

    def part(key):
        z = _signs(key, params)
        _, image = jax.jvp(gradient, (params,), (z,))
        return jax.tree.map(lambda a, b: a * b / samples, z, image)

    return _total("hutchinson_diagonal", part, params, key, samples)


def ggn_diagonal(logits: Callable[[Any], Array], params: Any, key: Array, *, samples: int = 16) -> Any:
    """Estimate of the diagonal of the generalised Gauss-Newton matrix of softmax cross-entropy; never negative.

    With p = softmax(logits) and y drawn from p, E (J' (p - e_y))^2 = J' (diag(p) - p p') J, entry by entry on the
    diagonal. Random signs per row keep rows apart, so one backward pass serves the whole batch.

    Args:
        logits: params -> [batch, classes].
        params: tree of arrays.
        key: of labels and signs.
        samples: number of backward passes, at least 1.

    Returns:
        Tree like params: diagonal of the mean over the batch.

    Raises:
        ValueError: samples is not an integer of at least 1.

    Reference: Martens 2014 (the matrix); Schraudolph 2002.

    >>> print(ggn_diagonal(lambda w: w[None], jnp.zeros(2), jax.random.key(0), samples=64))
    [0.25 0.25]
    """

    def part(key):
        first, second = jax.random.split(key)
        scores, backward = jax.vjp(logits, params)
        drawn = jax.random.categorical(first, scores)
        residual = jax.nn.softmax(scores) - jax.nn.one_hot(drawn, scores.shape[-1], dtype=scores.dtype)
        sign = jax.random.rademacher(second, (scores.shape[0], 1), scores.dtype)
        (pulled,) = backward(sign * residual)
        scale = 1 / (samples * scores.shape[0])
        return jax.tree.map(lambda g: scale * jnp.square(g), pulled)

    return _total("ggn_diagonal", part, params, key, samples)


def network_operator(diagonal: Any, *, per_layer: bool = False, damping: float = 0.1, safety: float = 1.0) -> Diagonal:
    """A diagonal operator for `flat(...)` of a network's parameters, from an estimated diagonal. An estimate.

    M_jj = safety (max(D_jj, 0) + damping mean(D)), in the order of `jax.tree.leaves`. Per layer, D_jj is replaced by
    the mean of its leaf: M is then a multiple of the identity on each leaf, and whitening commutes with compression.

    Args:
        diagonal: tree as `ggn_diagonal` or `hutchinson_diagonal` return it.
        per_layer: one number for each leaf.
        damping: above 0, keeps whitening away from division by zero.
        safety: factor, above 0.

    Raises:
        ValueError: damping or safety is not above 0, or the diagonal has no entries or is not finite.

    >>> print(network_operator({"a": jnp.array([1.0, 3.0]), "b": jnp.array([2.0])}, per_layer=True, damping=0.5).diag)
    [3. 3. 3.]
    """
    if not (number_of(damping) > 0 and number_of(safety) > 0):
        raise ValueError(f"network_operator: damping and safety must be above 0; got {damping!r} and {safety!r}")
    leaves = [np.maximum(np.asarray(a, np.float64).reshape(-1), 0) for a in jax.tree.leaves(diagonal)]
    if not any(a.size for a in leaves):
        raise ValueError(f"network_operator: the diagonal must have at least one entry; got {diagonal!r}")
    if not all(np.all(np.isfinite(a)) for a in leaves):
        raise ValueError("network_operator: the diagonal must be finite")
    mean = max(float(np.mean(np.concatenate(leaves))), 1e-30)
    leaves = [np.full_like(a, a.mean()) if per_layer and a.size else a for a in leaves]
    return diagonal_of(safety * (np.concatenate(leaves) + damping * mean))
