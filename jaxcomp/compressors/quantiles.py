"""Quantile buckets: exact splits by one sort, the bucket of each value, and what a bucket stands for.

Of n values in ascending order, n / q fall into each of q buckets (equal depth), or, with weights |v|^power, buckets of
equal weight. A bucket is the interval [split_b, split_(b+1)), so bucket(v) = number of splits <= v.

Zero is a split (`signed_splits`): the negative values and the others have buckets of their own, in whole groups of
buckets, about in proportion to their number or weight. No bucket and no group mixes signs.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.arrays import exponent_of, power_of_two
from jaxcomp.backend import form, running, sorted_integers

__all__ = ["Splits", "bucket_of", "in_order", "means", "of_product", "signed_splits", "sort_floats"]

Array = jax.Array
I32 = jnp.int32
BRANCHES = 16
MOST_COMPARED = 2**20  # values with which each split is compared at once on accelerators; among more it is searched


class Splits(NamedTuple):
    """edges: float[q-1], ascending, infinite where there are fewer;  zero: i32[], the first bucket of the values
    that are not negative, or (as released, in contrib) the one that holds zero;  number: i32[], of buckets."""

    edges: Array
    zero: Array
    number: Array


def of_product(n: Array, i: Array | int, q: Array | int) -> Array:
    """floor(n i / q) in 32 bits, for q^2 < 2^31 and i <= q.

    >>> print(of_product(jnp.int32(2**31 - 1), 3, 4))
    1610612735
    """
    return (n // q) * i + (n % q) * i // q


def sort_floats(x: Array) -> Array:
    """Ascending. As integers, which XLA's CPU backend sorts eight times as fast as floats; no NaN."""
    integer = jnp.int64 if x.dtype == jnp.float64 else I32
    bits = lax.bitcast_convert_type(x, integer)
    # Below zero, larger magnitudes come first: their bits but for the sign are turned over.
    turn = lambda bits: jnp.where(bits < 0, bits ^ jnp.iinfo(integer).max, bits)
    return lax.bitcast_convert_type(turn(sorted_integers(turn(bits))), x.dtype)


def in_order(values: Array, n: Array) -> Array:
    """The first n values in ascending order, then infinities."""
    real = lax.iota(I32, values.shape[0]) < n
    return sort_floats(jnp.where(real, values, jnp.asarray(jnp.inf, values.dtype)))


def signed_splits(ordered: Array, n: Array, buckets: int, groups: int, power: float = 0.0) -> Splits:
    """Splits with zero among them.

    A group is negative if its middle value is, but each sign that occurs has at least one; its
    buckets / groups buckets then divide the values of that sign equally. With a power, "middle" and "equally" are
    by weight, and a value belongs where the middle of its own weight lies.

    Args:
        ordered: float[k], ascending; what follows the first n is padding, not negative.
        n: i32[].
        buckets: q, a multiple of groups, below 2^15.
        groups: at least 2.
        power: of the weights |v|^power, at least 0.
    """
    k, width = ordered.shape[0], buckets // groups
    real = lax.iota(I32, k) < n
    below = jnp.sum((ordered < 0) & real, dtype=I32)
    middles, j = 2 * lax.iota(I32, groups) + 1, lax.iota(I32, buckets - 1) + 1
    if power == 0:
        negative = jnp.sum(jnp.minimum(of_product(n, middles, 2 * groups), k - 1) < below, dtype=I32)

        def place_of(zero):
            share = lambda number, i, q: of_product(number, i, jnp.maximum(q, 1))
            return jnp.where(j < zero, share(below, j, zero), below + share(n - below, j - zero, buckets - zero))

    else:
        weights = _weights(jnp.where(real, ordered, jnp.zeros((), ordered.dtype)), power)
        ends = running(jnp.add, weights)
        left, total = jnp.where(below > 0, ends[jnp.maximum(below - 1, 0)], 0), ends[-1]
        negative = jnp.sum(total * (middles.astype(ends.dtype) / (2 * groups)) < left, dtype=I32)

        def place_of(zero):
            part = lambda i, q: i.astype(ends.dtype) / jnp.maximum(q, 1).astype(ends.dtype)
            goal = jnp.where(j < zero, left * part(j, zero), left + (total - left) * part(j - zero, buckets - zero))
            at_once = form(lambda: k <= MOST_COMPARED, on_cpu=lambda: False)()
            middle = ends - weights / 2
            if at_once:
                place = jnp.sum(middle[:, None] < goal[None], axis=0, dtype=I32)
            else:
                place = jnp.searchsorted(middle, goal).astype(I32)
            return jnp.where(j < zero, jnp.minimum(place, below), jnp.clip(place, below, n))

    negative = jnp.clip(negative, jnp.minimum(below, 1), groups - jnp.minimum(n - below, 1))
    zero = width * negative
    place = place_of(zero)
    edges = ordered[jnp.clip(place, 0, k - 1)]
    edges = jnp.where(j == zero, jnp.zeros((), edges.dtype), edges)
    return Splits(edges, zero, jnp.full_like(zero, buckets))


def _weights(values: Array, power: float) -> Array:
    """|v|^power, in units in which the largest is about 1."""
    exponent = jnp.clip(exponent_of(jnp.max(jnp.abs(values), initial=0)), -126, 126)
    return (jnp.abs(values) * power_of_two(-exponent, values.dtype)) ** power


def bucket_of(values: Array, splits: Splits) -> Array:
    """Number of splits that are not above each value: i32[k].

    A tree of splits, `BRANCHES` at a node: one pass with so many comparisons for each of its one to four levels. A
    binary search would be a kernel for each halving, which computes those before it once more.
    """
    number = splits.edges.shape[0] + 1
    levels = max(1, math.ceil(math.log(number, BRANCHES) - 1e-9))
    size = BRANCHES**levels
    edges = jnp.full((size,), jnp.inf, splits.edges.dtype).at[: number - 1].set(splits.edges)
    bucket = jnp.zeros(values.shape, I32)
    for level in range(levels):
        step = size // BRANCHES ** (level + 1)
        nodes = edges.reshape(-1, BRANCHES, step)[:, : BRANCHES - 1, step - 1]
        mine = nodes[:1] if level == 0 else nodes[bucket // (step * BRANCHES)]
        bucket = bucket + step * jnp.sum(mine <= values[:, None], axis=1, dtype=I32)
    return bucket


def means(values: Array, bucket: Array, buckets: int) -> Array:
    """Mean of the values of each bucket: float[q], 0 for an empty one.

    A bucket must hold values of one sign. Its mean is that of what exceeds its smallest magnitude, in units of a power
    of two near the largest: nothing overflows or cancels, and equal values have their own value as mean.

    Args:
        values: float[k], finite.
        bucket: i32[k], `buckets` for values that do not count.
    """
    exponent = jnp.clip(exponent_of(jnp.max(jnp.abs(values), initial=0)), -126, 126)
    scaled = jnp.abs(values) * power_of_two(-exponent, values.dtype)
    into = lambda start: jnp.full((buckets,), start, values.dtype).at[bucket]
    least = into(jnp.inf).min(scaled, mode="drop")
    excess = into(0).add(scaled - least.at[bucket].get(mode="fill", fill_value=0), mode="drop")
    signed = jnp.zeros((buckets,), I32).at[bucket].add(jnp.where(values < 0, -1, 1), mode="drop")  # how many
    sign, count = jnp.sign(signed).astype(values.dtype), jnp.maximum(jnp.abs(signed), 1).astype(values.dtype)
    mean = sign * (least + excess / count) * power_of_two(exponent, values.dtype)
    return jnp.where(signed == 0, jnp.zeros((), values.dtype), mean)
