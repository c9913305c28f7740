"""Keeps each entry independently, with its own probability."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp.arrays import bounded, one_row, row_of, wide
from jaxcomp.base import Compressor, Spec, State, on_vectors
from jaxcomp.compressors.sparsify import entries_of
from jaxcomp.factories import factory
from jaxcomp.groups import FIXED
from jaxcomp.hashing import random_bits
from jaxcomp.payloads import Sparse
from jaxcomp.select import indices_of_words, mask_words, take

__all__ = ["bernoulli"]

Array = jax.Array


class Chances(NamedTuple):
    """An entry is kept when a random uint32 is at most `limit`, so with `chance` = (limit + 1) / 2^32."""

    limit: Array
    chance: Array


@factory
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
    p = _checked(probabilities, per_worker)
    capacity_of = _capacity(p)
    limit = (np.clip(np.rint(p * 2.0**32), 1, 2.0**32) - 1).astype(np.uint32)
    smallest = float(np.min(p, initial=1.0))

    def init(shared_key, like):
        if p.ndim and p.shape[-1] != like.size:
            raise ValueError(f"bernoulli: {p.shape[-1]} probabilities for an array of {like.size} entries")
        kept = (limit.astype(np.float64) + 1) / 2.0**32
        return State(jnp.zeros((), jnp.int32), Chances(jnp.asarray(limit), jnp.asarray(kept, wide(like.dtype))))

    def compress(key, x, state):
        d = x.shape[0]
        limit, chance = one_row("bernoulli", state.shared) if per_worker else state.shared
        capacity = capacity_of(d)
        indices, chosen = indices_of_words(mask_words(random_bits(key, d) <= limit), capacity, d)
        if chance.ndim and d:
            chance = chance[jnp.minimum(indices, d - 1)]
        values = bounded(take(x, indices).astype(chance.dtype) / chance)
        return Sparse(bounded(values, x.dtype), indices), jnp.maximum(chosen - capacity, 0)

    return on_vectors(
        init=init,
        compress=compress,
        entries=entries_of,
        overflow=lambda local: local,
        spec=Spec(
            f"bernoulli({p.shape[-1]} probabilities)" if p.ndim else f"bernoulli({probabilities})",
            omega=lambda d: 1 / smallest - 1,
            alpha=None,
            linear=False,
            layout=FIXED if p.ndim else None,
        ),
        for_worker=functools.partial(row_of, "bernoulli") if per_worker else None,
    )


def _checked(probabilities: Any, per_worker: bool) -> np.ndarray:
    """float64: a scalar, [d], or [n, d] for plans of n workers."""
    p = np.asarray(probabilities, np.float64)
    if per_worker and p.ndim < 2:
        raise ValueError(f"bernoulli: per_worker needs a row of probabilities per worker; got shape {p.shape}")
    if not (np.min(p, initial=1.0) > 0 and np.all(p <= 1)):
        raise ValueError(f"bernoulli: probabilities must be in (0, 1]; got {probabilities}")
    return p.reshape(p.shape[0], -1) if per_worker else p.reshape(-1) if p.ndim else p


def _capacity(p: np.ndarray) -> Any:
    """d -> entries that the message has room for: the mean plus eight standard deviations plus eight, of any worker."""
    mean, variance = p, p * (1 - p)
    if p.ndim:
        mean, variance = np.sum(mean, -1), np.sum(variance, -1)

    def of(d: int) -> int:
        repeats = 1 if p.ndim else d
        most = repeats * mean + 8 * np.sqrt(repeats * variance) + 8
        return min(d, math.ceil(np.max(np.where(variance == 0, d, most), initial=0)))

    return of
