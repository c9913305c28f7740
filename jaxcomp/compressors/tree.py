"""Compressors of trees: leaf by leaf, or all leaves as one vector."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcomp.base import (
    Compressor,
    Spec,
    State,
    accumulate,
    advance,
    check_compressor,
    finite,
    fold,
    for_worker,
    is_array,
    lengths,
    like_of,
    overflow,
    weighted,
    wide,
)
from jaxcomp.compressors.vector import is_whole
from jaxcomp.payloads import Dense, Leaves

__all__ = ["PerLeaf", "dtype_of", "flat", "lift", "per_leaf", "ravel", "unravel"]

Array = jax.Array
DENSE_BELOW = 1024


class PerLeaf(NamedTuple):
    """States of the leaves of a tree, in the order of `jax.tree.leaves`; None for those that go dense."""

    leaves: tuple[Any, ...]


def ravel(leaves: list[Any], dtype: Any) -> Array:
    """The entries of all leaves, end to end."""
    if not leaves:
        return jnp.zeros((0,), dtype)
    return jnp.concatenate([leaf.reshape(-1).astype(dtype) for leaf in leaves])


def unravel(vector: Array, likes: list[Any]) -> list[Array]:
    """Inverse of `ravel`; what is left of the vector is dropped."""
    leaves, start = [], 0
    for like in likes:
        leaves.append(vector[start : start + like.size].reshape(like.shape).astype(like.dtype))
        start += like.size
    return leaves


def dtype_of(likes: list[Any]) -> Any:
    """The one floating type that all leaves fit in; f32 for an empty tree."""
    dtypes = {like.dtype for like in likes}
    return dtypes.pop() if len(dtypes) == 1 else wide(*dtypes)


def lift(compressor: Compressor) -> Compressor:
    """The compressor itself if it acts on trees, else `per_leaf` of it with the default rule."""
    return compressor if compressor.spec.lifted else per_leaf(compressor)


def per_leaf(compressor: Compressor, *, dense_below: int = DENSE_BELOW) -> Compressor:
    """Compresses each leaf of a tree by itself; small leaves go dense in one fused message.

    Each leaf has its own state, its own keys and its own payload. Leaves with fewer than
    `dense_below` entries (biases, norms) are concatenated and sent as they are. A bare array, a
    tree that is itself a leaf, is compressed whatever its size, with the compressor's own payload.

    omega is the largest, alpha the smallest over the leaves (1 for dense ones).

    Args:
        compressor: of one array.
        dense_below: number of entries, at least 0; 0 compresses every leaf.

    Returns:
        Compressor of trees with payload `Leaves`.

    Raises:
        ValueError: the compressor is lifted already, or dense_below is negative.

    >>> import jaxcomp as jc
    >>> tree = {"b": jnp.ones(2), "w": jnp.arange(6.0)}
    >>> x_hat, payload = jc.roundtrip(jc.per_leaf(jc.top_k(k=1), dense_below=3), tree, key=jax.random.key(0))
    >>> print(x_hat["b"], x_hat["w"], payload.dense.values)
    [1. 1.] [0. 0. 0. 0. 0. 5.] [1. 1.]
    """
    spec = check_compressor("per_leaf", compressor)
    if spec.lifted:
        raise ValueError(f"per_leaf: {spec.name} acts on trees already")
    if not is_whole(dense_below, 0):
        raise ValueError(f"per_leaf: dense_below must be an integer of at least 0; got {dense_below}")

    def split(tree):
        """The small leaves, and the large ones with their place in the tree."""
        leaves = jax.tree.leaves(tree)
        small = [leaf for leaf in leaves if leaf.size < dense_below]
        return small, [(i, leaf) for i, leaf in enumerate(leaves) if leaf.size >= dense_below]

    def every(tree, large):
        """One for each leaf, of those that the large ones have."""
        large = iter(large)
        return PerLeaf(tuple(next(large) if leaf.size >= dense_below else None for leaf in jax.tree.leaves(tree)))

    def join(tree, small, large):
        small, large = iter(small), iter(large)
        leaves, structure = jax.tree.flatten(tree)
        return jax.tree.unflatten(structure, [next(small if x.size < dense_below else large) for x in leaves])

    def init(shared_key, like):
        like = like_of(like)
        if is_array(like):
            return compressor.init(shared_key, like)
        _, large = split(like)
        states = [compressor.init(jax.random.fold_in(shared_key, i), leaf) for i, leaf in large]
        return State(every(like, (s.local for s in states)), every(like, (s.shared for s in states)))

    def compress(key, tree, state):
        like_of(tree)
        if is_array(tree):
            return compressor.compress(key, tree, state)
        small, large = split(tree)
        dense = Dense(finite(ravel(small, dtype_of(small))))
        done = [
            compressor.compress(jax.random.fold_in(key, i), leaf, State(state.local.leaves[i], state.shared.leaves[i]))
            for i, leaf in large
        ]
        return Leaves(dense, tuple(payload for payload, _ in done)), every(tree, (local for _, local in done))

    def decompress(payload, shared, like):
        if is_array(like):
            return compressor.decompress(payload, shared, like)
        small, large = split(like)
        leaves = [
            compressor.decompress(part, shared.leaves[i], leaf)
            for part, (i, leaf) in zip(payload.leaves, large, strict=True)
        ]
        return join(like, unravel(payload.dense.values, small), leaves)

    def add(total, payloads, weights, shared):
        if is_array(total):
            return accumulate(compressor, total, payloads, weights, shared)
        if not isinstance(weights, Leaves):
            weights = Leaves(Dense(weights), (weights,) * len(payloads.leaves))
        small, large = split(total)
        vector = ravel(small, dtype_of(small))
        vector = fold(
            lambda t, message: t + weighted(message[0].astype(t.dtype), message[1]),
            vector,
            (payloads.dense.values, weights.dense.values),
        )
        leaves = [
            accumulate(compressor, leaf, part, weight, shared.leaves[i])
            for (i, leaf), part, weight in zip(large, payloads.leaves, weights.leaves, strict=True)
        ]
        return join(total, unravel(vector, small), leaves)

    def advance_(shared):
        if not isinstance(shared, PerLeaf):
            return advance(compressor, shared)
        return PerLeaf(tuple(None if s is None else advance(compressor, s) for s in shared.leaves))

    def lengths_(like):
        like = like_of(like)
        if is_array(like):
            return lengths(compressor, like)
        _, large = split(like)
        return Leaves(Dense(None), tuple(lengths(compressor, leaf) for _, leaf in large))

    def pick(shared, worker, workers):
        if not isinstance(shared, PerLeaf):
            return for_worker(compressor, shared, worker, workers)
        return PerLeaf(tuple(None if s is None else for_worker(compressor, s, worker, workers) for s in shared.leaves))

    def overflow_(local):
        if not isinstance(local, PerLeaf):
            return overflow(compressor, local)
        none = jnp.zeros((), jnp.int32)
        return sum((overflow(compressor, one) for one in local.leaves if one is not None), none)

    def over_leaves(bound, pick, dense_value):
        if bound is None:
            return None

        def of(d):
            if not isinstance(d, tuple):
                return bound(d)
            return pick([bound(size) if size >= dense_below else dense_value for size in d], default=dense_value)

        return of

    return Compressor(
        init,
        compress,
        decompress,
        Spec(
            f"per_leaf({spec.name})",
            omega=over_leaves(spec.omega, max, 0.0),
            alpha=over_leaves(spec.alpha, min, 1.0),
            linear=spec.linear,
            lifted=True,
            dense_below=int(dense_below),
            weights=spec.weights,
            remedy=spec.remedy,
        ),
        accumulate=add,
        advance=None if compressor.advance is None else advance_,
        lengths=None if compressor.lengths is None else lengths_,
        for_worker=None if compressor.for_worker is None else pick,
        overflow=None if compressor.overflow is None else overflow_,
    )


def flat(compressor: Compressor) -> Compressor:
    """Compresses all leaves of a tree as one vector, in the order of `jax.tree.leaves`.

    One threshold or one norm for the whole model, one message. omega and alpha are those of the
    compressor at the total number of entries.

    Args:
        compressor: of one array.

    Returns:
        Compressor of trees with the compressor's own payload.

    Raises:
        ValueError: the compressor is lifted already.

    >>> import jaxcomp as jc
    >>> tree = {"a": jnp.ones(2), "b": jnp.array(3.0)}
    >>> x_hat, payload = jc.roundtrip(jc.flat(jc.top_k(k=1)), tree, key=jax.random.key(0))
    >>> print(x_hat["a"], x_hat["b"], payload.indices)
    [0. 0.] 3.0 [2]
    """
    spec = check_compressor("flat", compressor)
    if spec.lifted:
        raise ValueError(f"flat: {spec.name} acts on trees already")

    def vector_like(tree):
        likes = jax.tree.leaves(like_of(tree))
        return jax.ShapeDtypeStruct((sum(like.size for like in likes),), dtype_of(likes))

    def join(tree):
        return ravel(jax.tree.leaves(tree), vector_like(tree).dtype)

    def cut(vector, like):
        return jax.tree.unflatten(jax.tree.structure(like), unravel(vector, jax.tree.leaves(like_of(like))))

    total = lambda bound: None if bound is None else lambda d: bound(sum(d) if isinstance(d, tuple) else d)
    return Compressor(
        init=lambda shared_key, like: compressor.init(shared_key, vector_like(like)),
        compress=lambda key, tree, state: compressor.compress(key, join(tree), state),
        decompress=lambda payload, shared, like: cut(compressor.decompress(payload, shared, vector_like(like)), like),
        spec=spec._replace(name=f"flat({spec.name})", omega=total(spec.omega), alpha=total(spec.alpha), lifted=True),
        accumulate=lambda total, payloads, weights, shared: cut(
            accumulate(compressor, join(total), payloads, weights, shared), total
        ),
        advance=compressor.advance,
        lengths=None if compressor.lengths is None else lambda like: lengths(compressor, vector_like(like)),
        for_worker=compressor.for_worker,
        overflow=compressor.overflow,
    )
