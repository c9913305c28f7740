"""Compressors that keep a few entries: the largest, random ones, or each with its own probability."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomp.base import (
    Compressor,
    Spec,
    State,
    Tally,
    bounded,
    finite,
    fold,
    key_data,
    one_row,
    row_of,
    weighted,
    wide,
)
from jaxcomp.compressors.combine import narrow
from jaxcomp.compressors.vector import check_like, count_of, on_vectors
from jaxcomp.hashing import random_bits, random_subset
from jaxcomp.payloads import Dense, Sparse
from jaxcomp.select import indices_of_words, largest, magnitude, mask_words, take

__all__ = ["add_sparse", "bernoulli", "dense_of_sparse", "rand_k", "top_k"]

Array = jax.Array
UNSORTED_FROM = 1 << 14  # entries; below, a sort is as fast


def dense_of_sparse(payload: Sparse, shared: Any, like: jax.ShapeDtypeStruct) -> Array:
    """Scatters values into zeros; padding (index d) falls away."""
    return (
        jnp.zeros(like.shape, like.dtype)
        .at[payload.indices]
        .set(payload.values.astype(like.dtype), mode="drop", indices_are_sorted=True)
    )


def add_sparse(total: Array, payloads: Sparse, weights: Array, shared: Any) -> Array:
    """total + sum_j weights_j scatter(payload_j): O(k) per message, one message after the other."""

    def add(total, message):
        payload, weight = message
        values = weighted(payload.values.astype(total.dtype), weight)
        return total.at[payload.indices].add(values, mode="drop", indices_are_sorted=True)

    return fold(add, total, (payloads, weights))


def top_k(ratio: float | None = None, *, k: int | None = None, values: Any = None, indices: Any = None) -> Compressor:
    """Keeps the k entries of largest magnitude.

    C(x)_j = x_j if j is among the k largest |x_j|, else 0. Ties go to the lowest index. Biased,
    alpha = k / d. Zeros are not sent: where fewer than k entries differ from zero the message ends in padding.

    Long vectors are not sorted: see `select.largest`.

    Args:
        ratio: k = max(1, floor(ratio d)), in (0, 1].
        k: number of entries instead; k >= d keeps all.
        values, indices: narrower lanes, see `narrow`.

    Returns:
        Compressor with payload `Sparse` of k values and k indices.

    Raises:
        ValueError: neither or both of ratio and k, or out of range.

    Reference: Stich, Cordonnier, Jaggi 2018, definition 2.1.

    >>> import jaxcomp as jc
    >>> print(jc.roundtrip(jc.top_k(0.5), jnp.array([1.0, -3.0, 2.0, 0.5]), key=jax.random.key(0))[0])
    [ 0. -3.  2.  0.]
    """
    count = count_of("top_k", ratio, k)

    def compress(key, x, state):
        d = x.shape[0]
        if d >= UNSORTED_FROM:
            positions = largest(x, count(d), count(d))
        else:
            top, positions = lax.top_k(magnitude(finite(x)), count(d))
            positions = jnp.sort(jnp.where(top > 0, positions, d).astype(jnp.int32))
        return Sparse(take(x, positions), positions), state.local

    compressor = on_vectors(
        compress=compress,
        decompress=dense_of_sparse,
        accumulate=add_sparse,
        spec=Spec(
            f"top_k({ratio if k is None else f'k={k}'})",
            omega=None,
            alpha=lambda d: count(d) / d if d else 1.0,
            linear=False,
            selects=True,
        ),
    )
    return narrow(compressor, values=values, indices=indices)


class Draw(NamedTuple):
    """Shared randomness of one round: key uint32[2], count i32[] of rounds so far."""

    key: Array
    count: Array


def rand_k(ratio: float | None = None, *, k: int | None = None) -> Compressor:
    """Keeps k entries chosen uniformly at random, the same on all workers, scaled to be unbiased.

    C(x)_j = (d / k) x_j if j in S, else 0;  S uniform among subsets of size k.
    omega = d / k - 1. Linear: the index set comes from the shared key and the round, so only
    k values travel, and they can be summed on the way.

    The expectation is over the shared draw: workers draw the same S, so their errors do not
    average out as those of private compressors do.

    Args:
        ratio: k = max(1, floor(ratio d)), in (0, 1].
        k: number of entries instead; k >= d keeps all, unscaled.

    Returns:
        Compressor with payload `Dense` of k values.

    Raises:
        ValueError: neither or both of ratio and k, or out of range.

    Reference: Stich, Cordonnier, Jaggi 2018, definition 2.1, with the scaling d / k.

    >>> import jaxcomp as jc
    >>> x_hat, payload = jc.roundtrip(jc.rand_k(k=1), jnp.ones(4), key=jax.random.key(0))
    >>> print(jnp.sum(x_hat), payload.values)
    4.0 [1.]
    """
    count = count_of("rand_k", ratio, k)

    def indices_of(shared: Draw, d: int) -> Array:
        return random_subset(jax.random.fold_in(jax.random.wrap_key_data(shared.key), shared.count), d, count(d))

    def init(shared_key, like):
        return State(shared=Draw(key_data(shared_key), jnp.zeros((), jnp.int32)))

    def compress(key, x, state):
        return Dense(finite(x[indices_of(state.shared, x.shape[0])])), state.local

    def add(total, payloads, weights, shared):
        d = total.shape[0]
        check_like("rand_k", payloads.values.shape[1:], (count(d),))
        indices = indices_of(shared, d)
        scale = d / max(count(d), 1)

        def add_one(total, message):
            payload, weight = message
            # The barrier keeps the product from being contracted with the addition (`accumulate`).
            values = lax.optimization_barrier(bounded(payload.values.astype(total.dtype) * scale))
            values = weighted(values, weight)
            return total.at[indices].add(values, unique_indices=True)

        return fold(add_one, total, (payloads, weights))

    def decompress(payload, shared, like):
        zeros = jnp.zeros(like.shape, wide(like.dtype))
        stacked = jax.tree.map(lambda a: a[None], payload)
        return add(zeros, stacked, None, shared).astype(like.dtype)

    return on_vectors(
        init=init,
        compress=compress,
        decompress=decompress,
        accumulate=add,
        advance=lambda shared: Draw(shared.key, shared.count + 1),
        spec=Spec(
            f"rand_k({ratio if k is None else f'k={k}'})",
            omega=lambda d: d / count(d) - 1 if d else 0.0,
            alpha=None,
            linear=True,
        ),
    )


class Chances(NamedTuple):
    """An entry is kept when a random uint32 is at most `limit`, so with `chance` = (limit + 1) / 2^32."""

    limit: Array
    chance: Array


def bernoulli(probabilities: Any, *, per_worker: bool = False) -> Compressor:
    """Keeps each entry independently with its own probability.

    C(x)_j = x_j / p_j with probability p_j, else 0.   omega = max_j 1 / p_j - 1.
    Each p_j is rounded to a multiple of 2^-32, and that is what x_j is divided by.

    The draw is private, so errors of different workers are independent. The payload has room
    for the expected count plus eight standard deviations plus eight; a draw beyond that has
    probability below 1e-12, keeps its first entries and is counted as overflow.

    Args:
        probabilities: one number in (0, 1], or an array with the shape of x. Kept in
            `State.shared`, because decoders need the array's length and encoders its values.
        per_worker: the leading axis of `probabilities` counts workers; worker i uses row i.

    Returns:
        Compressor with payload `Sparse`.

    Raises:
        ValueError: a probability is outside (0, 1], the length does not match x, or per_worker
            without a matrix.

    Reference: Safaryan, Hanzely, Richtarik 2021, independent sampling.

    >>> import jaxcomp as jc
    >>> print(jc.roundtrip(jc.bernoulli([1.0, 1.0, 0.5]), jnp.array([1.0, 2.0, 0.0]), key=jax.random.key(0))[0])
    [1. 2. 0.]
    """
    if per_worker and np.ndim(probabilities) < 2:
        raise ValueError(
            f"bernoulli: per_worker needs a row of probabilities per worker; got shape {np.shape(probabilities)}"
        )
    p = np.asarray(probabilities, np.float64)
    p = p.reshape(p.shape[0], -1) if per_worker else p.reshape(-1) if p.ndim else float(p)
    smallest = float(np.min(p, initial=1.0))
    if not (smallest > 0 and np.all(np.asarray(p) <= 1)):
        raise ValueError(f"bernoulli: probabilities must be in (0, 1]; got {probabilities}")

    def capacity_of(d: int) -> int:
        rows = p if per_worker else np.broadcast_to(p, (1, d))
        mean, variance = np.sum(rows, 1), np.sum(rows * (1 - rows), 1)
        most = np.max(np.where(variance == 0, d, mean + 8 * np.sqrt(variance) + 8), initial=0)
        return min(d, math.ceil(most))

    def init(shared_key, like):
        if np.ndim(p) and np.shape(p)[-1] != like.size:
            raise ValueError(f"bernoulli: {np.shape(p)[-1]} probabilities for an array of {like.size} entries")
        limit = np.clip(np.rint(np.asarray(p) * 2.0**32), 1, 2.0**32) - 1
        kept = (limit + 1) / 2.0**32
        dtype = wide(like.dtype)
        return State(
            local=Tally(jnp.zeros((), jnp.int32)),
            shared=Chances(jnp.asarray(limit.astype(np.uint32)), jnp.asarray(kept, dtype)),
        )

    def compress(key, x, state):
        d = x.shape[0]
        limit, chance = one_row("bernoulli", state.shared) if per_worker else state.shared
        capacity = capacity_of(d)
        indices, chosen = indices_of_words(mask_words(random_bits(key, d) <= limit), capacity, d)
        if chance.ndim and d:
            chance = chance[jnp.minimum(indices, d - 1)]
        values = bounded(take(x, indices).astype(chance.dtype) / chance)
        return Sparse(bounded(values.astype(x.dtype)), indices), Tally(jnp.maximum(chosen - capacity, 0))

    return on_vectors(
        init=init,
        compress=compress,
        decompress=dense_of_sparse,
        accumulate=add_sparse,
        spec=Spec(
            f"bernoulli({probabilities})" if np.ndim(p) == 0 else f"bernoulli({np.shape(p)[-1]} probabilities)",
            omega=lambda d: 1 / smallest - 1,
            alpha=None,
            linear=False,
        ),
        for_worker=functools.partial(row_of, "bernoulli") if per_worker else None,
    )
