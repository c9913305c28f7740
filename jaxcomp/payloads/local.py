"""Ascending indices in 16 bits each, block by block of 2^16 entries."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomp.arrays import is_host
from jaxcomp.backend import running

__all__ = ["BLOCK", "LocalIndices", "global_indices", "local_indices"]

Array = Any
BLOCK = 1 << 16
I32 = jnp.int32


class LocalIndices(NamedTuple):
    """Ascending indices in 16 bits each: block by block of 2^16 entries.

    low: u16[k], the index within its block, padded with zeros;  counts: i32[ceil(d / 2^16)], how many
    indices lie in each block. What is beyond their sum is padding.
    """

    low: Array
    counts: Array


def local_indices(indices: Array, size: int) -> LocalIndices:
    """Ascending indices, padded with d, in 16 bits each. Exact.

    Args:
        indices: i32[k], ascending, padded with `size`.
        size: d.

    >>> print(local_indices(jnp.array([7, 65537, 70000, 70000]), 70000))
    LocalIndices(low=Array([7, 1, 0, 0], dtype=uint16), counts=Array([1, 1], dtype=int32))
    """
    blocks = -(-size // BLOCK)
    ends = jnp.uint32(BLOCK) * (lax.iota(jnp.uint32, blocks) + jnp.uint32(1))
    bounds = jnp.minimum(ends, jnp.uint32(size)).astype(I32)
    ends = jnp.searchsorted(indices, bounds).astype(I32)
    low = jnp.where(indices < size, indices & I32(BLOCK - 1), 0).astype(jnp.uint16)
    return LocalIndices(low, jnp.diff(ends, prepend=I32(0)))


def global_indices(local: LocalIndices, size: int) -> Array:
    """The inverse: indices i32[k] of a vector of `size` entries from `local` ones, padded with that size."""
    low, counts = local
    capacity = low.shape[0]
    if is_host(low):
        found = (np.repeat(np.arange(counts.size), np.maximum(counts, 0)) * BLOCK)[:capacity]
        padded = np.full(capacity, size, np.int32)
        padded[: found.size] = np.minimum(found + low[: found.size], size)
        return padded
    ends = running(jnp.add, jnp.maximum(counts, 0))
    block = running(jnp.add, jnp.zeros((capacity,), I32).at[ends].add(1, mode="drop", indices_are_sorted=True))
    index = BLOCK * block + low.astype(I32)
    real = lax.iota(I32, capacity) < (ends[-1] if ends.shape[0] else 0)
    return jnp.where(real & (index >= 0), jnp.minimum(index, size), size)
