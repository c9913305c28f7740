"""MinMaxSketch: a hash table of several rows that forgets upwards, so what is read is never too large.

Each of s rows has t cells and a hash function h_a of its own. Of the ranks that are inserted into one cell the
smallest stays; a key reads the largest of its s cells:

    insert(key, rank):  T[a, h_a(key)] <- min(T[a, h_a(key)], rank)
    query(key) = max_a T[a, h_a(key)] <= rank.

Keys come in lists (groups) with a sketch each, t = ceil(rho g) columns for a list of g keys; all tables lie in
one flat array, list after list, row after row. Minima do not depend on the order of insertion.

Reference: Jiang, Fu, Yang, Cui 2018 (SketchML). Hashes are murmur3's fmix32 of key xor seed, brought to
the range by multiply-high: the released ones lose cells where their multiplier divides t.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.hashing import fmix32, multiply_high
from jaxcomp.packing import pack, unpack, width_for
from jaxcomp.payloads import Sketch

__all__ = ["Shape", "by_list", "insert", "list_of", "list_sizes", "pack_table", "places", "query", "table_of"]

Array = jax.Array
I32, U32 = jnp.int32, jnp.uint32
PARTS = 10_000  # columns are a multiple of 1 / PARTS


class Shape(NamedTuple):
    """rows: s;  columns: rho;  least: columns of a list with as many keys or more, which short lists need."""

    rows: int
    columns: float
    least: int = 1

    def size(self, capacity: int, lists: int) -> int:
        """Cells that always suffice for `capacity` keys in so many lists."""
        return self.rows * (-(-capacity * self._parts() // PARTS) + lists * self.least)

    def widths(self, counts: Array) -> Array:
        """t of each list: i32, exact."""
        parts = self._parts()
        share = (counts // PARTS) * parts + ((counts % PARTS) * parts + PARTS - 1) // PARTS
        return jnp.maximum(share, jnp.minimum(counts, self.least))

    def _parts(self) -> int:
        return round(self.columns * PARTS)


def list_of(counts: Array, capacity: int) -> Array:
    """Number of the list of each place, i32[capacity], when they lie one after the other; len(counts) beyond."""
    ends = jnp.cumsum(counts, dtype=I32)
    return jnp.sum(lax.iota(I32, capacity)[:, None] >= ends[None], axis=1, dtype=I32)


def places(keys: Array, lists: Array, counts: Array, shape: Shape, seeds: Array) -> Array:
    """Cell of each key in each row: i32[s, k], beyond the table for keys of no list.

    Args:
        keys: i32[k].
        lists: i32[k], number of each key's list; len(counts) for none.
        counts: i32[r], keys in each list.
        shape: of the sketch.
        seeds: u32[s].
    """
    t = shape.widths(counts)
    starts = jnp.cumsum(shape.rows * t, dtype=I32) - shape.rows * t
    mine = lambda table, beyond: table.at[lists].get(mode="fill", fill_value=beyond)
    start, width = mine(starts, shape.size(keys.shape[0], counts.shape[0])), mine(t, 0)
    column = multiply_high(fmix32(keys.astype(U32)[None] ^ seeds[:, None]), width.astype(U32)[None]).astype(I32)
    return start[None] + lax.iota(I32, shape.rows)[:, None] * width[None] + column


def insert(where: Array, ranks: Array, size: int, empty: int) -> Array:
    """The table i32[size]: the smallest rank that fell into each cell; `empty` where none did."""
    table = jnp.full((size,), empty, I32)
    return table.at[where].min(jnp.broadcast_to(ranks, where.shape), mode="drop")


def query(table: Array, where: Array) -> Array:
    """The largest of each key's cells: i32[k]."""
    return jnp.max(table.at[where].get(mode="fill", fill_value=0), axis=0)


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
