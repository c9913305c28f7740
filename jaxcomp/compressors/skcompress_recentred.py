"""SKCompress with MinMaxSketches whose levels are recentred on what the decoder will read.

Buckets of equally many values fall into groups of one sign each. Keys go in one list per group, with a MinMaxSketch
that holds each key's rank of distance from zero within the group. Collisions make ranks smaller, never larger, and
never change a sign. The encoder decodes its own message, and each level is the mean of the values that decode to it.

In cells and levels, bucket g * width + rank is the one with that rank of distance from zero in group g.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.compressors import minmax_sketch
from jaxcomp.compressors.minmax_sketch import Shape, list_of, places, query
from jaxcomp.compressors.quantiles import bucket_of, means, signed_splits
from jaxcomp.compressors.sketches import Coder, by_list, counts_of, level_of, ordered, packed, table_of
from jaxcomp.payloads import Sketch

__all__ = ["recentred"]

Array = jax.Array
I32 = jnp.int32


def recentred(q: int, r: int, shape: Shape) -> Coder:
    """q buckets in r groups, with sketches of the shape."""
    width = q // r

    def encode(keys, values, n, seeds):
        splits = signed_splits(ordered(values, n), n, q, r)
        bucket = bucket_of(values, splits)
        lists = jnp.where(lax.iota(I32, keys.shape[0]) < n, bucket // width, r)
        rank = jnp.where(bucket < splits.zero, width - 1 - bucket % width, bucket % width)
        lists, keys, values, rank = by_list(lists, keys, values, rank)
        counts = counts_of(lists, r)
        where = places(keys, lists, counts, shape, seeds)
        # What no key fell into is never read, so it needs no symbol of its own.
        table = minmax_sketch.insert(where, rank, shape.size(keys.shape[0], r), width - 1)
        decoded = jnp.where(lists < r, width * lists + query(table, where), q)
        cells = packed(table, width, counts, shape)
        return Sketch(means(values, decoded, q), counts, keys, cells, jnp.zeros((0,), I32))

    def decode(payload, seeds):
        lists = list_of(payload.counts, payload.keys.shape[0])
        where = places(payload.keys, lists, payload.counts, shape, seeds)
        return level_of(payload, width * lists + query(table_of(payload, shape), where))

    return Coder(encode, decode, True)
