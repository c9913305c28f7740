"""Parts that the modes of `skcompress` share: a coder, and keys in lists with a sketch for each."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.compressors.minmax_sketch import Shape
from jaxcomp.compressors.quantiles import sort_floats
from jaxcomp.packing import pack, unpack, width_for
from jaxcomp.payloads import Sketch

__all__ = ["Coder", "by_list", "codes", "level_of", "list_sizes", "ordered", "pack_table", "table_of"]

Array = jax.Array
I32 = jnp.int32


class Coder(NamedTuple):
    """How values are coded.

    encode(keys, values, n, seeds) -> Sketch
        keys: i32[k], values: float[k], finite, of which the first n are real; seeds: u32[s] of this round, or None.
    decode(payload, seeds) -> float[k]
        values in the order of `payload.keys`.
    hashes: whether seeds are needed.
    """

    encode: Callable[..., Sketch]
    decode: Callable[..., Array]
    hashes: bool


def ordered(values: Array, n: Array) -> Array:
    """The first n values in ascending order, then infinities."""
    real = lax.iota(I32, values.shape[0]) < n
    return sort_floats(jnp.where(real, values, jnp.asarray(jnp.inf, values.dtype)))


def codes(payload: Sketch) -> Array:
    """The cells of a message without sketches, one for each key: i32[k]."""
    return unpack(payload.cells, payload.keys.shape[0]).astype(I32)


def level_of(payload: Sketch, bucket: Array) -> Array:
    """The level of each bucket; 0 for numbers beyond the last."""
    return payload.levels.at[bucket].get(mode="fill", fill_value=0)


def list_sizes(lists: Array, r: int) -> Array:
    """Entries of each of r lists: i32[r]; r itself counts nowhere."""
    return jnp.zeros((r,), I32).at[lists].add(1, mode="drop")


def by_list(lists: Array, *arrays: Array) -> tuple[Array, ...]:
    """Entries list after list, in their order within each."""
    lists, order = lax.sort((lists, lax.iota(I32, lists.shape[0])), num_keys=1, is_stable=True)
    return lists, *(a[order] for a in arrays)


def pack_table(table: Array, symbols: int, counts: Array, shape: Shape) -> Array:
    """The cells of the sketches, in as many bits as so many symbols need; what no sketch uses is zero."""
    used = shape.rows * jnp.sum(shape.widths(counts), dtype=I32)
    used_cells = jnp.where(lax.iota(I32, table.shape[0]) < used, table, 0)
    return pack(used_cells.astype(jnp.uint32), width_for(symbols))


def table_of(payload: Sketch, shape: Shape) -> Array:
    """The inverse of `pack_table`: i32[cells]."""
    return unpack(payload.cells, shape.size(payload.keys.shape[0], payload.counts.shape[0])).astype(I32)
