"""SKCompress as released (mode="paper"), for comparison.

Quantiles of all values together, midpoints as levels, edges of groups aligned with the bucket of zero. Decoded values
are too short on average, or many times too long where tails are heavy (the midpoint of the outermost bucket), and the
bucket of zero, or the last group if 94 % of the values are negative, may change signs.

It departs from the released code where that fails or leaves results to chance: exact quantiles instead of a streaming
sketch, seeded fmix32 instead of hash functions drawn without a seed, groups no more than buckets, ties between signs in
a group of both go to the positive bucket, and a maximum below zero is found.

Bucket b is one of all values; a cell holds the place of b in its group, counted away from zero.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.compressors import minmax_sketch
from jaxcomp.compressors.minmax_sketch import Shape, by_list, list_of, list_sizes, pack_table, places, table_of
from jaxcomp.compressors.quantiles import Splits, bucket_of, in_order, of_product
from jaxcomp.compressors.skcompress import Coder, level_of
from jaxcomp.payloads import Sketch

__all__ = ["released_coder"]

Array = jax.Array
I32 = jnp.int32


def released_coder(q: int, r: int, shape: Shape) -> Coder:
    """A coder with at most q buckets in r groups and sketches of the shape."""
    return Coder(partial(_encode, q=q, r=r, shape=shape), partial(_decode, r=r, shape=shape), True)


def _splits(ordered: Array, n: Array, buckets: int) -> Splits:
    """Splits of all values together: the values of rank min(floor(n i / q), n - 1), each once."""
    k = ordered.shape[0]
    ranks = jnp.minimum(of_product(n, lax.iota(I32, buckets - 1) + 1, buckets), n - 1)
    splits = ordered[jnp.clip(ranks, 0, k - 1)]
    place = jnp.cumsum(jnp.concatenate([jnp.zeros((1,), I32), (splits[1:] > splits[:-1]).astype(I32)]), dtype=I32)
    edges = jnp.full_like(splits, jnp.inf).at[place].set(splits)
    number = place[-1] + 2
    last = ordered[jnp.clip(n - 1, 0, k - 1)]
    zero = jnp.where(ordered[0] > 0, 0, jnp.where(last < 0, number - 1, jnp.sum(edges < 0, dtype=I32)))
    return Splits(edges, zero, number)


def _midpoints(ordered: Array, n: Array, splits: Splits) -> Array:
    """(e_b + e_(b+1)) / 2 with e the splits between the least and the largest value: float[q], 0 beyond the last."""
    last = ordered[jnp.clip(n - 1, 0, ordered.shape[0] - 1)][None]
    ends = jnp.concatenate([ordered[:1], jnp.minimum(splits.edges, last), last])
    # XLA would add before it halves, and the sum may overflow.
    halves = lax.optimization_barrier(jnp.asarray(0.5, ends.dtype) * ends)
    inside = lax.iota(I32, ends.shape[0] - 1) < jnp.where(n > 0, splits.number, 0)
    return jnp.where(inside, halves[:-1] + halves[1:], jnp.zeros((), ends.dtype))


def _edges(splits: Splits, r: int) -> Array:
    """End of each group, i32[r]: congruent to the bucket of zero modulo the width of a group, the last apart."""
    zero, number = splits.zero, splits.number
    groups = jnp.minimum(r, number)
    width = number // groups
    off = zero % width
    first = jnp.where(zero < width, zero, jnp.where(off < width // 2, width + off, off))
    first = jnp.where(groups == 2, zero, first)
    i = lax.iota(I32, r)
    return jnp.where(i < groups - 1, first + i * width, number)


def _widest(q: int, r: int) -> int:
    """Buckets in the largest group: also the symbol of an empty cell."""
    return q if r == 2 else 2 * (q // r) + r - 1


def _frame(lists: Array, splits: Splits, r: int) -> tuple[Array, Array]:
    """(base, sign) with bucket = base + sign * place: places count from zero in groups that lie below it."""
    edges = _edges(splits, r)
    start = jnp.concatenate([jnp.zeros((1,), I32), edges]).at[lists].get(mode="clip")
    end = edges.at[lists].get(mode="clip")
    below = end <= splits.zero
    return jnp.where(below, end - 1, start), jnp.where(below, -1, 1)


def _encode(keys: Array, values: Array, n: Array, seeds: Array, *, q: int, r: int, shape: Shape) -> Sketch:
    ascending = in_order(values, n)
    splits = _splits(ascending, n, q)
    bucket = bucket_of(values, splits)
    lists = jnp.searchsorted(_edges(splits, r), bucket, side="right").astype(I32)
    lists = jnp.where(lax.iota(I32, keys.shape[0]) < n, lists, r)
    counts = list_sizes(lists, r)
    lists, keys, bucket = by_list(lists, keys, bucket)
    off = bucket - splits.zero
    size, empty = shape.size(keys.shape[0], r), jnp.iinfo(I32).max
    distance = 2 * jnp.abs(off) + (off < 0).astype(I32)
    table = minmax_sketch.insert(places(keys, lists, counts, shape, seeds), distance, size, empty)
    base, sign = _frame(list_of(shape.rows * shape.widths(counts), size), splits, r)
    place = sign * (splits.zero + jnp.where(table % 2 == 1, -(table // 2), table // 2) - base)
    widest = _widest(q, r)
    cells = pack_table(jnp.where(table == empty, widest, place), widest + 1, counts, shape)
    zero = jnp.where(n > 0, jnp.stack([splits.zero, splits.number]), 0)
    return Sketch(_midpoints(ascending, n, splits), counts, keys, cells, zero)


def _decode(payload: Sketch, seeds: Array, *, r: int, shape: Shape) -> Array:
    zero, number = payload.zero
    lists = list_of(payload.counts, payload.keys.shape[0])
    where = places(payload.keys, lists, payload.counts, shape, seeds)
    table = table_of(payload, shape)
    base, sign = _frame(lists, Splits(payload.levels, zero, number), r)
    read = base[None] + sign[None] * table.at[where].get(mode="fill", fill_value=0)
    farthest = jnp.argmax(jnp.abs(read - zero), axis=0)  # the first row of those that are as far
    return level_of(payload, jnp.take_along_axis(read, farthest[None], axis=0)[0])
