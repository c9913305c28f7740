"""Turns a mask over d entries into sorted indices at a fixed capacity: no sort, and but for many of them on a GPU no
scatter of size d.

1. The mask is packed into d/32 words: one pass over the data, fused with whatever made the mask.
2. Population counts and their running sum give the rank of the first entry of each word.
3. Each non-empty word writes its number at that rank (a scatter of d/32 words, unique targets,
   so deterministic everywhere); a running maximum spreads it to the ranks that follow.
   Where there are few ranks this is done for blocks of 4 or 16 words, along which each rank finds its word.
   On GPUs each rank finds its word down a tree of counts, in fewer kernels; where there are many
   ranks, each entry writes its own.
4. Within its word each rank finds its bit by five halvings.

Cost O(d + capacity): the d entries are read once, everything else touches d/32 words.
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp import select_cpu
from jaxcomp.arrays import finite, wide
from jaxcomp.backend import each_entry, form, lanes, materialized, of_short_rows, only_if, running
from jaxcomp.norms import max_abs

__all__ = [
    "count_above",
    "count_words",
    "descending",
    "every",
    "excess_above",
    "first_bits",
    "indices_of_words",
    "largest_in_row",
    "magnitude",
    "marked_above",
    "mask_words",
    "select_largest",
    "take",
    "top_set",
    "words_above",
]

Array = jax.Array
U32 = jnp.uint32
I32 = jnp.int32
FANS = ((16, 16), (4, 0.5))  # words of a block, and for how many words a place, at least
TILE = 32 * 128  # entries
FEW, LONG = 15, 1 << 12  # thresholds in one pass over rows, and entries from which a pass takes 255
CHILDREN, ROOT = 64, 512  # blocks of a node, and at most of the root, in the search of a rank
RUN = 4  # entries
PARTS = 8  # of the lanes of a TPU, from as many rows
LONG_SAMPLE = 1 << 14  # entries of a sample that is taken in runs
SAMPLED = 128  # entries of the sample that are expected among the `capacity` largest


def mask_words(mask: Array) -> Array:
    """Bit j % 32 of word j // 32 is mask[j].

    Args:
        mask: bool[d].

    Returns:
        uint32[ceil(d / 32)], unused bits zero.

    >>> print(mask_words(jnp.array([True, False, True])))
    [5]
    """

    if mask.shape[0] < TILE:
        return _words_of_rows(mask)
    in_tiles = lambda mask: _in_tiles(_words_of_columns, mask)
    return form(in_tiles, on_cpu=_words_of_rows, on_gpu=lambda mask: _in_tiles(_words_by_halves, mask))(mask)


def _words_of_rows(mask: Array) -> Array:
    """Computes them as the formula says: the form for CPUs, and for masks that are shorter than a tile."""
    row_words = lambda bits: jnp.sum(bits.reshape(-1, 32).astype(U32) << lax.iota(U32, 32)[None], axis=1, dtype=U32)
    # The last word apart: with all of a mask padded, XLA takes five times as long.
    whole = mask.shape[0] // 32 * 32
    rest = jnp.pad(mask[whole:], (0, -mask.shape[0] % 32))
    return jnp.concatenate([row_words(mask[:whole]), row_words(rest)]) if rest.shape[0] else row_words(mask)


@functools.partial(jax.jit, static_argnums=0)  # once in a program, however often it is called
def _in_tiles(words: Callable[[Array], Array], mask: Array) -> Array:
    """The same of whole tiles of 32 x 128 entries, in which neighbours stay neighbours: first words of 32 entries that
    stand below one another, then these bits in their order.
    """
    tiles = jnp.pad(mask, (0, -mask.shape[0] % TILE)).reshape(-1, 32, 128)
    return words(tiles).reshape(-1)[: -(-mask.shape[0] // 32)]


def _words_of_columns(tiles: Array) -> Array:
    """For TPUs, which pad an axis of 32 at the end to 128 lanes: tiles stand there instead."""
    place = lax.iota(U32, 32)
    below = jnp.sum(materialized(tiles).astype(U32) << place[None, :, None], axis=1, dtype=U32)  # [tiles, 128]
    entry = below.T.reshape(1, 4, 32, -1)  # of the words of 32 rows; in each bit one of a row
    bits = (entry >> place[:, None, None, None]) & U32(1)
    words = jnp.sum(bits << place[None, None, :, None], axis=2, dtype=U32)  # [32, 4, tiles]
    return words.reshape(128, -1).T


def _words_by_halves(tiles: Array) -> Array:
    """For GPUs, which take twice as long for sums over 32 neighbours."""
    below = _joined_bits(tiles.astype(U32), 1)  # [tiles, 1, 128], which is d / 32 words
    below = materialized(below).reshape(-1, 1, 4, 32)
    bits = (below >> lax.iota(U32, 32)[None, :, None, None]) & U32(1)  # [tiles, 32, 4, 32]
    return _joined_bits(bits, 3)


def _joined_bits(bits: Array, axis: int) -> Array:
    """32 bits along an axis as one word, in five halvings."""
    for half in (16, 8, 4, 2, 1):
        low, high = jnp.split(bits, 2, axis)
        bits = low | (high << U32(half))
    return bits


def count_words(words: Array) -> Array:
    """Number of set bits, i32[]. Exact below 2^31, and faster than summing a mask.

    >>> print(count_words(jnp.array([5, 1], jnp.uint32)))
    3
    """
    portable = lambda words: jnp.sum(lax.population_count(words).astype(I32), dtype=I32)
    return form(portable, on_cpu=select_cpu.count_words)(words)


def indices_of_words(words: Array, capacity: int, size: int) -> tuple[Array, Array]:
    """Positions of the set bits, ascending.

    Args:
        words: uint32[ceil(size / 32)] from `mask_words`.
        capacity: number of places, fixed.
        size: d, below 2^31; also the padding value.

    Returns:
        indices i32[capacity]: the first `capacity` set positions, then d;
        count i32[]: number of set bits, which may exceed the capacity.

    >>> indices, count = indices_of_words(jnp.array([0b1101], jnp.uint32), 4, 9)
    >>> print(indices, count)
    [0 2 3 9] 3
    """
    if capacity == 0 or words.shape[0] == 0:
        return jnp.full((capacity,), size, I32), count_words(words)
    on_gpu = _written if capacity > words.shape[0] else _found
    return form(_found_by_packs, on_cpu=_found, on_gpu=on_gpu)(words, capacity, size)


def _found_by_packs(words: Array, capacity: int, size: int) -> tuple[Array, Array]:
    """`indices_of_words` for TPUs, which pad an axis of few words to 128 lanes: one number for each four words, and one
    for four such fours, says how many bits are below each of them.
    """
    words = jnp.pad(words, (0, -words.shape[0] % 16))
    counts, packs = lax.population_count(words), []
    for bits, (_, places) in zip((8, 10), reversed(FANS), strict=True):  # of a sum of four counts, or of sixteen
        if places * capacity > words.shape[0]:
            break
        pack, counts = of_short_rows(functools.partial(_packed, bits=bits), counts, 4)
        packs.append((pack, bits))
    block, start, total = select_cpu.block_of_rank(counts.astype(I32), capacity)
    rank = lax.iota(I32, capacity)
    left = rank - start
    for pack, bits in reversed(packs):
        block, left = each_entry(functools.partial(_one_of_four, bits=bits), pack[block], block, left)
    return jnp.where(rank < total, 32 * block + _bit_of_rank(words[block], left), size), total


def _one_of_four(pack: Array, block: Array, left: Array, bits: int) -> tuple[Array, Array]:
    """The one of the four blocks that make up a block in which so many ones are left to pass, and how many there."""
    below = [((pack >> U32(i * bits)) & U32(2**bits - 1)).astype(I32) for i in range(3)]
    block = 4 * block + sum((left >= each).astype(I32) for each in below)
    return block, left - functools.reduce(jnp.maximum, [jnp.where(left >= each, each, 0) for each in below])


def _packed(rows: Array, bits: int) -> tuple[Array, Array]:
    """The sums of the first one, two and three counts of each row, u32[b, 4], in one number; and of all four."""
    own = [sum(2 ** (bits * later) for later in range(i, 3)) for i in range(4)]  # in which sums a count is
    return jnp.sum(rows * jnp.asarray([own], U32), axis=-1, dtype=U32), jnp.sum(rows, axis=-1, dtype=U32)


def _written(words: Array, capacity: int, size: int) -> tuple[Array, Array]:
    """`indices_of_words` for GPUs and many places, for each of which a search would hold a row of counts: all entries
    know their places, and those that are set write their numbers there, neighbours side by side.
    """
    counts = lax.population_count(words).astype(I32)
    ends = running(jnp.add, counts)
    words, lane = words[:, None], lax.iota(U32, 32)[None]
    below = lax.population_count(words & ((U32(1) << lane) - U32(1))).astype(I32)
    number = lax.iota(U32, 32 * words.shape[0])
    place = ((ends - counts)[:, None] + below).reshape(-1).astype(U32)
    place = jnp.where(((words >> lane) & U32(1)).reshape(-1) > 0, place, U32(capacity) + number)  # beyond all: dropped
    indices = jnp.full((capacity,), size, I32)
    return indices.at[place].set(number.astype(I32), mode="drop", unique_indices=True), ends[-1]


def _found(words: Array, capacity: int, size: int) -> tuple[Array, Array]:
    """`indices_of_words` for CPUs, and for GPUs and few places, place by place."""
    # Of few places each looks for its word in a block of words; of many, one for each word is found at once.
    fan = next((fan for fan, places in FANS if places * capacity <= words.shape[0]), 1)
    blocks = -(-words.shape[0] // fan)
    words = jnp.pad(words, (0, fan * blocks - words.shape[0])).reshape(blocks, fan)
    counts = jnp.sum(lax.population_count(words).astype(I32), axis=1, dtype=I32)
    of_rank = form(select_cpu.block_of_rank, on_gpu=_block_of_rank)
    block, start, total = of_rank(counts, capacity)
    rank = lax.iota(I32, capacity)
    word, place, left = form(_word_of_rank, on_gpu=_word_of_rank_in_two)(words, block, rank - start)
    index = 32 * place + _bit_of_rank(word, left)
    return jnp.where(rank < total, index, size), total


def _word_of_rank(words: Array, block: Array, left: Array) -> tuple[Array, Array, Array]:
    """The word with the bit that has so many below it in its block, its number, and how many are below it in the word.

    Args:
        words: uint32[b, fan].
        block, left: i32[capacity].
    """
    row, fan = words[block], words.shape[1]
    word, place, below, before = row[:, 0], fan * block, jnp.zeros_like(left), jnp.zeros_like(left)
    for i in range(1, fan):
        below = below + lax.population_count(row[:, i - 1]).astype(I32)
        later = left >= below
        word, place = jnp.where(later, row[:, i], word), jnp.where(later, fan * block + i, place)
        before = jnp.where(later, below, before)
    return word, place, left - before


def _word_of_rank_in_two(words: Array, block: Array, left: Array) -> tuple[Array, Array, Array]:
    """`_word_of_rank` for GPUs: first the quarter. A walk along all sixteen words takes XLA half a second to fuse."""
    quarter = words.shape[1] // 4
    if quarter < 2:
        return _word_of_rank(words, block, left)
    counts = jnp.sum(lax.population_count(words[block]).astype(I32).reshape(-1, 4, quarter), axis=2, dtype=I32)
    number, below, before = jnp.zeros_like(left), jnp.zeros_like(left), jnp.zeros_like(left)
    for i in range(1, 4):
        below = below + counts[:, i - 1]
        later = left >= below
        number, before = jnp.where(later, i, number), jnp.where(later, below, before)
    return _word_of_rank(words.reshape(-1, quarter), 4 * block + number, left - before)


@functools.partial(jax.jit, static_argnums=1)
def _block_of_rank(counts: Array, capacity: int) -> tuple[Array, Array, Array]:
    """Places of the rank-th of all ones, for ranks below the capacity.

    Args:
        counts: i32[b], ones in each block.

    Returns:
        the number of its block and how many ones lie before that, both i32[capacity], of ranks that do not occur
        those of any block; how many there are in all, i32[].
    """
    block, start, total = _descend(counts, lax.iota(I32, capacity))
    return jnp.minimum(block, counts.shape[0] - 1), start, total


def _descend(counts: Array, rank: Array) -> tuple[Array, Array, Array]:
    """`_block_of_rank` down a tree with `CHILDREN` blocks at each node, along which each rank is compared with all."""
    if counts.shape[0] <= ROOT:
        ends = _ends(counts)
        passed = ends[None] <= rank[:, None]
        start = jnp.max(jnp.where(passed, ends, 0), axis=1)
        return jnp.sum(passed, axis=1, dtype=I32), start, ends[-1]
    rows = jnp.pad(counts, (0, -counts.shape[0] % CHILDREN)).reshape(-1, CHILDREN)
    ends = _ends(rows)
    node, before, total = _descend(ends[:, -1], rank)
    mine = ends[jnp.minimum(node, rows.shape[0] - 1)]
    passed = mine <= (rank - before)[:, None]
    start = before + jnp.max(jnp.where(passed, mine, 0), axis=1)
    return node * CHILDREN + jnp.sum(passed, axis=1, dtype=I32), start, total


def _ends(counts: Array) -> Array:
    """Running sums along a short last axis. As one sum for each end, compared with all, XLA for GPUs makes tiles of it
    that no register holds.
    """
    return running(jnp.add, counts)


def _bit_of_rank(words: Array, ranks: Array) -> Array:
    """Position of the set bit with so many set bits below it, of each word."""
    return each_entry(_bit_of_word, words, ranks)


def _bit_of_word(word: Array, rank: Array) -> Array:
    position = jnp.zeros_like(rank)
    for half in (16, 8, 4, 2, 1):
        below = lax.population_count(word & U32((1 << half) - 1)).astype(I32)
        upper = rank >= below
        rank = jnp.where(upper, rank - below, rank)
        word = jnp.where(upper, word >> U32(half), word)
        position = jnp.where(upper, position + half, position)
    return position


def take(x: Array, indices: Array) -> Array:
    """x at sorted unique indices, zero at padding (index d) and where x is not finite."""
    values = x.at[indices].get(mode="fill", fill_value=0, indices_are_sorted=True)
    return jnp.where(jnp.isfinite(values), values, jnp.zeros((), x.dtype))


# ------------------------------------------------------------------------------------------------
# Single passes over memory. XLA would merge neighbouring passes that share |x|, or a broadcast
# constant, into one fusion that is ten times slower on CPU, or write a broadcast of size d to
# memory. `optimization_barrier` keeps them apart and costs nothing.


def magnitude(x: Array) -> Array:
    """|x| in f32, or f64."""
    return jnp.abs(x).astype(wide(x.dtype))


def words_above(x: Array, threshold: Array) -> Array:
    """Mask words of the finite entries with |x| > threshold; a threshold that is negative or NaN counts as zero."""
    threshold = jnp.where(threshold > 0, threshold, jnp.zeros((), threshold.dtype))
    x, threshold = lax.optimization_barrier((x, threshold))
    a = magnitude(x)
    return mask_words((a > threshold) & (a < jnp.inf))


def marked_above(x: Array, threshold: Array) -> tuple[Array, Array]:
    """words_above(x, threshold), and the number of their bits, i32[]."""
    words = words_above(x, threshold)
    return words, count_words(words)


def count_above(x: Array, threshold: Array) -> Array:
    """Number of finite entries with |x| > threshold, i32[]."""
    return form(_count_above, on_cpu=lambda x, threshold: marked_above(x, threshold)[1])(x, threshold)


def _count_above(x: Array, threshold: Array) -> Array:
    a, threshold = magnitude(x), jnp.where(threshold > 0, threshold, jnp.zeros((), threshold.dtype))
    return jnp.sum((a > threshold) & (a < jnp.inf), dtype=I32)


def excess_above(
    x: Array, threshold: Array, after: Array, *, scale: Array | None = None, power: int = 1
) -> tuple[Array, Array]:
    """sum_j max(s |x_j| - s threshold, 0)^power, computed once `after` is; returns it and `after`.

    Args:
        x: float[d].
        threshold: float[], dtype of `magnitude(x)`, not negative.
        after: any array; a result of the pass before, so that the two passes stay apart.
        scale: s, a power of two (exact); None for 1.
        power: 1 or 2.
    """
    zero = jnp.zeros((), threshold.dtype)
    apart = form(lambda args: args, on_cpu=lax.optimization_barrier)  # elsewhere passes become one where they can
    x, threshold, scale, zero, after = apart((x, threshold, scale, zero, after))
    a = magnitude(x)
    if scale is not None:
        a, threshold = a * scale, threshold * scale
    # The maximum stands between the scaling and the square, which XLA would exchange (see `norms`).
    excess = jnp.maximum(a - threshold, zero)
    return jnp.sum(excess if power == 1 else jnp.square(excess)), after


# ------------------------------------------------------------------------------------------------
# The largest entries


def first_bits(words: Array, count: Array) -> Array:
    """The words with only their first `count` set bits.

    >>> print(first_bits(jnp.array([0b1101, 0b11], jnp.uint32), 2))
    [5 0]
    """
    return form(_first_bits, on_cpu=select_cpu.first_bits)(words, count)


@jax.jit
def _first_bits(words: Array, count: Array | int) -> Array:
    counts = lax.population_count(words).astype(I32)
    left = count - (running(jnp.add, counts) - counts)
    part = words & ((U32(1) << _bit_of_rank(words, left).astype(U32)) - U32(1))
    return jnp.where(left >= counts, words, jnp.where(left > 0, part, U32(0)))


def top_set(
    x: Array,
    threshold: Array,
    least: Array | int,
    most: Array | int,
    *,
    enough: Array | int = 1,
    known: tuple[Array, Array] | None = None,
) -> Array:
    """Mask words of the entries above a threshold, which is moved only if they are too few or too many.

    If fewer than `enough` magnitudes exceed the threshold, or more than `most`, a search on the
    bits of floats finds another one that between `least` and `most` exceed (and no more than a quarter
    above `least`, if there were too few). Where equal magnitudes make
    that impossible, the first of them by index fill up to `least`. So whatever is selected is at
    least as large as whatever is not, which is what makes a selection contract. Zeros and entries
    that are not finite are never selected.

    One pass over x when the threshold serves; about five more, at most 64, when it does not.

    Args:
        x: float[d].
        threshold: float[], dtype of `magnitude(x)`. Negative or NaN counts as zero.
        least: number of entries to find when the threshold does not serve, i32[] or int, 1 .. most.
        most: capacity, i32[] or int.
        enough: number of entries for which the threshold serves, 1 .. least.
        known: marked_above(x, threshold), if it is known.

    Returns:
        uint32[ceil(d / 32)].

    >>> words = top_set(jnp.array([3.0, -5.0, 5.0, 1.0]), jnp.float32(2), 1, 2)
    >>> print(indices_of_words(words, 2, 4)[0])
    [1 2]
    """
    least, most = jnp.asarray(least, I32), jnp.asarray(most, I32)
    words, wanted = marked_above(x, threshold) if known is None else known
    serves = (wanted >= enough) & (wanted <= most)
    return only_if(~serves, lambda words, x, *rest: _moved(x, *rest), words, x, threshold, wanted, least, most)


class _Bracket(NamedTuple):
    """Thresholds, as bits, that too many (`low`) and too few (`high`) exceed, and those counts."""

    low: Array
    num_low: Array
    high: Array
    num_high: Array
    found: Array
    steps: Array


def _moved(x: Array, threshold: Array, wanted: Array, least: Array, most: Array) -> Array:
    bits = jnp.uint64 if threshold.dtype == jnp.float64 else jnp.uint32
    as_bits = lambda t: lax.bitcast_convert_type(t, bits)
    as_float = lambda b: lax.bitcast_convert_type(b, threshold.dtype)
    log = lambda count: jnp.log(jnp.maximum(count.astype(jnp.float32), 0.5))

    zero = jnp.zeros((), threshold.dtype)
    threshold = jnp.where(threshold > 0, threshold, zero)
    too_many = wanted > most
    most = jnp.where(too_many, most, jnp.minimum(most, least + least // 4))
    low = jnp.where(too_many, threshold, zero)
    num_low = jnp.where(too_many, wanted, count_above(x, zero))
    known = ~too_many & (wanted > 0)
    start = _Bracket(
        as_bits(low),
        num_low,
        as_bits(jnp.where(known, threshold, max_abs(x).astype(threshold.dtype))),
        jnp.where(known, wanted, 0),
        num_low <= most,
        jnp.zeros((), I32),
    )
    aim = (log(least) + log(most)) / 2

    def step(b):
        # The bits of a float grow like its logarithm, so this line is a power law between the two
        # counts. Every other step halves the bracket instead, which bounds their number.
        share = (log(b.num_low) - aim) / jnp.maximum(log(b.num_low) - log(b.num_high), 1e-6)
        width = b.high - b.low
        guess = (jnp.clip(share, 0.01, 0.99).astype(threshold.dtype) * width.astype(threshold.dtype)).astype(bits)
        jump = jnp.where(b.steps % 2 == 0, guess, width // bits(2))
        middle = b.low + jnp.clip(jump, bits(1), width - bits(1))
        count = count_above(x, as_float(middle))
        few, many = count < least, count > most
        found = ~(few | many)
        return _Bracket(
            jnp.where(few, b.low, middle),
            jnp.where(few, b.num_low, count),
            jnp.where(few, middle, b.high),
            jnp.where(few, count, b.num_high),
            found,
            b.steps + 1,
        )

    end = lax.while_loop(lambda b: ~b.found & (b.high > b.low + bits(1)), step, start)
    words = words_above(x, as_float(end.low))

    def with_ties(words):
        above = words_above(x, as_float(end.high))
        return above | first_bits(words & ~above, least - count_words(above))

    return only_if(~end.found, with_ties, words)


def every(x: Array, stride: int) -> Array:
    """A sample of a vector: about one in `stride` entries, spread evenly.

    Of long vectors runs of `RUN` entries that follow one another, `RUN * stride` apart: they stand in one line of the
    cache, so the sample takes less than half of the time. An odd stride does not run along the columns of a matrix.
    On TPUs whole rows of lanes are read, since shorter runs would be cut out of a copy of the vector, by a program of
    megabytes; of each an eighth is taken, so that a row of large entries does not stand for its neighbours.

    >>> print(every(jnp.arange(10), 3))
    [0 3 6 9]
    """
    run = max(RUN, lanes())
    whole = x.shape[0] // (run * stride) * (run * stride)
    if stride == 1 or whole < LONG_SAMPLE * stride:
        return x[::stride]
    runs = x[:whole].reshape(-1, run)
    if run == RUN:
        return runs[::stride].reshape(-1)
    parts = [runs[part * stride // PARTS :: stride] for part in range(PARTS)]
    which = lax.broadcasted_iota(I32, parts[0].shape, 1) // (run // PARTS)
    return lax.select_n(which, *parts).reshape(-1)


def descending(x: Array, count: int) -> Array:
    """The `count` largest numbers. Of one of them alone XLA would make a sort of all (0.10), fifty times as slow."""
    return lax.optimization_barrier(lax.top_k(x, count)[0])


def select_largest(x: Array, count: Array | int, capacity: int) -> Array:
    """Indices of the `count` entries of largest magnitude, ascending, without a sort.

    A strided sample gives a threshold that a few more than `count` exceed (`top_set` mends it where
    the sample misled); among those few, the same search finds the exact one.

    Args:
        x: float[d].
        count: i32[] or int, 1 .. capacity.
        capacity: number of places.

    Returns:
        i32[capacity], padded with d. Ties go to the lowest index. Zeros are not selected.

    >>> print(jax.jit(select_largest, static_argnums=2)(jnp.array([3.0, -5.0, 5.0, 1.0, 5.0]), 2, 3))
    [1 2 5]
    """
    d = x.shape[0]
    most = min(d, capacity + capacity // 2 + 64)
    sampled = max(1, round(SAMPLED * d / max(capacity, SAMPLED)))
    stride = max(1, d // sampled) | 1
    sample = magnitude(finite(every(x, stride)))
    # Aim for a quarter more than `count`: over two standard deviations from too few, and from too many.
    rank = jnp.clip(jnp.asarray(count, jnp.float32) * 1.25 / stride, 0, sample.shape[0] - 1).astype(I32)
    threshold = form(_near_rank, on_cpu=select_cpu.of_rank)(sample, rank, math.ceil(capacity * 1.25 / stride))
    words = top_set(x, threshold, count, most, enough=count)
    return _exact_of(words, x, count, most, capacity)


def _exact_set(x: Array, count: Array | int) -> Array:
    """Mask words of the `count` largest magnitudes of a short vector; the first of equal ones by index, no zeros.

    The bits of the smallest of them are found: for vectors that stay in cache, and a fifth of the program that
    `top_set` would be.
    """
    bits, count = _bits_of(magnitude(x)), jnp.asarray(count, I32)
    threshold = form(_reached_by, on_cpu=select_cpu.reached_by)(bits, count)
    above = mask_words(bits > threshold)
    ties = mask_words((bits == threshold) & (threshold > 0))
    return above | first_bits(ties, count - count_words(above))


def _bits_of(magnitudes: Array) -> Array:
    """Magnitudes as integers, which are in the same order."""
    return lax.bitcast_convert_type(magnitudes, jnp.uint64 if magnitudes.dtype == jnp.float64 else U32)


def _near_rank(x: Array, rank: Array, most: int) -> Array:
    """About the number with `rank` larger ones, of numbers that are not negative: at most that, by 2^-11 of it."""
    del most
    return lax.bitcast_convert_type(_reached_by(_bits_of(x), rank + 1, jnp.finfo(x.dtype).nmant - 11), x.dtype)


@functools.partial(jax.jit, static_argnums=2)
def _reached_by(bits: Array, count: Array, spared: int = 0) -> Array:
    """The largest number that at least so many reach, or 0: digit by digit, each in one pass that compares with all.
    spared: of so many of the last bits whole digits are zeros instead.
    """
    kind, whole, digit = bits.dtype.type, jnp.iinfo(bits.dtype).bits - 1, 8 if bits.shape[0] >= LONG else 4
    found = jnp.zeros_like(bits, shape=())
    for low in range((whole - 1) // digit * digit, spared - digit, -digit):
        most = (1 << min(digit, whole - low)) - 1
        if digit == 8:
            at = found | ((lax.iota(bits.dtype, most) + kind(1)) << kind(low))
            counts = jnp.sum(bits[:, None] >= at[None], axis=0, dtype=I32)
        else:
            counts = _counts_from(bits, [found | kind(i << low) for i in range(1, most + 1)])
        found = found | (jnp.sum(counts >= count).astype(bits.dtype) << kind(low))
    return found


@jax.jit
def _counts_from(bits: Array, thresholds: list[Array]) -> Array:
    """How many entries of a short vector are not below each of a few thresholds, i32[n], in one pass."""
    # XLA makes one kernel of eight sums, so two counts share one: short vectors have less than 2^16 entries.
    pairs = [(a, b) for a, b in itertools.zip_longest(thresholds[::2], thresholds[1::2], fillvalue=thresholds[-1])]
    both = [jnp.sum((bits >= a).astype(U32) | ((bits >= b).astype(U32) << U32(16)), dtype=U32) for a, b in pairs]
    counts = jnp.stack([part for word in both for part in (word & U32(0xFFFF), word >> U32(16))])
    return counts[: len(thresholds)].astype(I32)


# ------------------------------------------------------------------------------------------------
# The largest entries of many short rows


class _Edges(NamedTuple):
    """Numbers that at least (`low`) and fewer than (`high`) `count` entries reach, how many reach `low`, and turns."""

    low: Array
    num_low: Array
    high: Array
    turns: Array


def largest_in_row(x: Array, count: Array | int, capacity: int) -> Array:
    """`select_largest` for one row of many, mapped by vmap, without a sample: a pass counts above `FEW` thresholds.

    The first thresholds lie half an octave apart below the largest magnitude, later ones in equal parts of the bits
    that are left, until at most twice as many entries as there are places reach the lower end. Rows that are done wait
    for the others: typically two turns, at most nine. Among those entries a search digit by digit finds the exact set.
    """
    bits_of = lambda x: _bits_of(magnitude(finite(x)))
    bits, count = bits_of(lax.optimization_barrier(x)), jnp.maximum(jnp.asarray(count, I32), 1)
    kind, most = bits.dtype.type, min(x.shape[0], 2 * capacity)
    octave = kind(1 << jnp.finfo(wide(x.dtype)).nmant)
    peak, present = jnp.max(bits), jnp.sum(bits > 0, dtype=I32)
    start = _Edges(jnp.ones_like(peak), present, peak + kind(1), jnp.zeros_like(present))

    def unsure(e):
        return (e.num_low > most) & (e.high > e.low + kind(1))

    def turn(e):
        rows, e = lax.optimization_barrier((x, e))  # else their bits would be an array of their own
        width = e.high - e.low
        part = jnp.maximum(width // kind(FEW + 1), kind(1))
        below = jnp.minimum(octave // kind(2), part)  # never more than there is
        first = [e.high - kind(1) - kind(i) * below for i in range(FEW, 0, -1)]
        later = [e.low + kind(i) * part for i in range(1, FEW + 1)]
        at = [jnp.where(e.turns == 0, a, b) for a, b in zip(first, later, strict=True)]
        counts, at = _counts_from(bits_of(rows), at), jnp.stack(at)
        reached = counts >= count
        low = jnp.max(jnp.where(reached, at, e.low))
        num_low = jnp.min(jnp.where(reached, counts, e.num_low))
        return _Edges(low, num_low, jnp.min(jnp.where(reached, e.high, at)), e.turns + 1)

    end = lax.while_loop(unsure, turn, start)
    x, end = lax.optimization_barrier((x, end))
    words = mask_words(bits_of(x) >= end.low)

    def with_ties(words, x, end):
        x, end = lax.optimization_barrier((x, end))
        above = mask_words(bits_of(x) >= end.high)
        return above | first_bits(words & ~above, count - count_words(above))

    words = only_if(end.num_low > most, with_ties, words, x, end)
    return _exact_of(words, x, count, most, capacity)


def _exact_of(words: Array, x: Array, count: Array | int, most: int, capacity: int) -> Array:
    """Indices of the largest among at most `most` marked entries: see `select_largest`."""
    d = x.shape[0]
    candidates, _ = indices_of_words(words, most, d)
    exact = _exact_set(take(x, candidates), count)
    places, _ = indices_of_words(exact, capacity, most)
    return candidates.at[places].get(mode="fill", fill_value=d, indices_are_sorted=True)
