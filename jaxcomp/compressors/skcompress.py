"""SKCompress: a sparse gradient by quantile buckets, a MinMaxSketch of them, and coded keys.

The values that a sparsifier selected are replaced by the number of a bucket and a table of what each bucket
stands for. The numbers travel by position ("quantile"), or in sketches that the keys themselves are hashed into
("recentred", "paper"). Keys (indices) are exact. How the message is coded is `bits` and `wire`.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.base import (
    Compressor,
    Spec,
    State,
    advance,
    check_compressor,
    finite,
    fold,
    for_worker,
    key_data,
    like_of,
    weighted,
    wide,
)
from jaxcomp.compressors import minmax_sketch
from jaxcomp.compressors.minmax_sketch import Shape, list_of, places, query
from jaxcomp.compressors.quantiles import (
    Splits,
    bucket_of,
    means,
    midpoints,
    released_splits,
    signed_splits,
    sort_floats,
)
from jaxcomp.compressors.sparsify import Draw
from jaxcomp.compressors.threshold import hard_threshold
from jaxcomp.compressors.vector import is_whole, on_vectors
from jaxcomp.packing import pack, unpack, width_for
from jaxcomp.payloads import LocalIndices, Sketch, Sparse

__all__ = ["skcompress"]

Array = jax.Array
I32 = jnp.int32
BUCKETS = {"quantile": 16, "recentred": 256, "paper": 256}
LEAST_COLUMNS = 8  # of a short list, so that a few keys do not all share one cell
MOST_BUCKETS = 1 << 14
CAPACITY = 0.25


def skcompress(
    sparsifier: Compressor | None = None,
    *,
    mode: str = "quantile",
    buckets: int | None = None,
    power: float = 1.0,
    groups: int = 8,
    rows: int = 2,
    columns: float = 0.3,
    capacity: float | None = None,
) -> Compressor:
    """Compresses values and keys of a sparse gradient.

    C(x)_j = level[bucket of x_j] if the sparsifier selects j, else 0.

    "quantile": zero is a split, so no bucket mixes signs, and a level is the mean of its bucket. Buckets hold equal
        parts of sum |x_j|^power: with power=1 of the L1 norm, with power=0 equally many values, as the others do. The
        bucket of each value travels as a number of ceil(log2(buckets)) bits, Huffman-coded on the wire.
    "recentred": the buckets, of equally many values, fall into `groups` groups of one sign each. Keys go in one list
        per group, and a MinMaxSketch of `rows` rows and ceil(columns * keys) columns holds each key's rank of distance
        from zero within the group. Collisions make ranks smaller, never larger, and never change a sign. The encoder
        decodes its own message and lets each level be the mean of the values that decode to it.
    "paper": as released. Quantiles of all values together, midpoints as levels, edges of groups aligned with
        the bucket of zero. Decoded values are too short on average, or many times too long where tails are heavy
        (the midpoint of the outermost bucket), and the bucket of zero, or the last group if 94 % of the values
        are negative, may change signs. For comparison.

    On the gradients that we measured "quantile" has the smaller error at equal bits, already with power=0: keys
    travel anyway, so values can be told by their place, and lists per group cost log2(groups) bits a key. With power=1
    large values have narrow buckets, which heavy tails need, and bucket numbers are no longer uniform, so that they can
    be coded. It is the default.

    Contraction: "quantile" and "recentred" replace values by means, so |x - C(x)|^2 = |x|^2 - |C(x)|^2 for
    what is selected. The mean of m values of one sign has m mean^2 >= sum of squares / m, hence alpha is at
    least that of the sparsifier over the number of places k; measured, it is far larger. "paper" can expand: its
    alpha is not known.

    Where the message has place for no more values than there are buckets, they travel as they are. An empty
    selection sends nothing. Entries that are not finite count as zero.

    Args:
        sparsifier: a compressor with payload `Sparse` (top_k, sidco, hard_threshold, ...), or None: whatever is
            not zero. Values beyond the capacity are left out, smallest first, and counted as overflow.
        mode: "quantile", "recentred" or "paper".
        buckets: q, 2 .. 16384 and a multiple of groups where there are groups; 16 for "quantile", else 256.
        power: of the weights in "quantile", in [0, 2].
        groups: r, of the sketches, at least 2.
        rows: s, hash tables in each sketch, 1 .. 16.
        columns: rho, cells in a row over keys in the group, in (0, 4], a multiple of 1e-4.
        capacity: without a sparsifier, the share of the entries that the message has room for, in (0, 1]; 0.25.

    Returns:
        Compressor with payload `Sketch` (`Sparse` for short vectors).

    Raises:
        ValueError: an argument is out of range, or the sparsifier sends something else.

    Reference: Jiang, Fu, Yang, Cui 2018 (SketchML); Jiang et al. 2020 (SKCompress), and the released code of the
    former. "paper" departs from that code where it fails or leaves results to chance: exact quantiles instead of a
    streaming sketch, seeded fmix32 instead of hash functions drawn without a seed, groups no more than buckets,
    ties between signs in a group of both go to the positive bucket, and a maximum below zero is found.

    >>> import jaxcomp as jc
    >>> x = jnp.array([0.0, 1.0, -3.0, 0.0, 2.0, -5.0, 9.0, 0.0])
    >>> print(jc.roundtrip(jc.skcompress(jc.top_k(k=5), buckets=4), x, key=jax.random.key(0))[0])
    [ 0.   1.5 -3.   0.   1.5 -5.   9.   0. ]
    """
    name = "skcompress"
    if mode not in BUCKETS:
        raise ValueError(f"{name}: mode must be one of {', '.join(map(repr, BUCKETS))}; got {mode!r}")
    q = BUCKETS[mode] if buckets is None else buckets
    if not is_whole(q, 2) or q > MOST_BUCKETS:
        raise ValueError(f"{name}: buckets must be an integer in 2 .. {MOST_BUCKETS}; got {buckets}")
    if not 0 <= power <= 2:
        raise ValueError(f"{name}: power must be in [0, 2]; got {power}")
    if not is_whole(groups, 2):
        raise ValueError(f"{name}: groups must be an integer of at least 2, one for each sign; got {groups}")
    if mode != "quantile" and q % groups:
        raise ValueError(f"{name}: buckets must be a multiple of groups; got {q} buckets in {groups} groups")
    if not is_whole(rows) or rows > 16:
        raise ValueError(f"{name}: rows must be an integer in 1 .. 16; got {rows}")
    if not 1e-4 <= columns <= 4:
        raise ValueError(f"{name}: columns must be in [1e-4, 4] cells for each key; got {columns}")
    if sparsifier is None:
        share = CAPACITY if capacity is None else capacity
        if not 0 < share <= 1:
            raise ValueError(f"{name}: capacity must be in (0, 1]; got {capacity}")
        selector, selects = hard_threshold(0.0, ratio=share), "nonzero"
    elif capacity is not None:
        raise ValueError(f"{name}: capacity is for skcompress without a sparsifier; got capacity={capacity} with one")
    else:
        selector, selects = sparsifier, check_compressor(name, sparsifier).name
    inner = selector.spec
    if inner.lifted:
        raise ValueError(f"{name}: {inner.name} acts on trees; sketch the compressor of one array and lift the result")
    shape = Shape(int(rows), float(columns), 1 if mode == "paper" else LEAST_COLUMNS)
    coder = _coder(mode, int(q), float(power), int(groups), shape)

    def selected(like):
        """Shape of what the sparsifier sends."""

        def one(key):
            state = selector.init(key, like)
            shared = for_worker(selector, state.shared, 0)
            return selector.compress(key, jnp.zeros(like.shape, like.dtype), State(state.local, shared))[0]

        payload = jax.eval_shape(one, jax.random.key(0))
        plain = isinstance(payload, Sparse) and isinstance(payload.values, jax.ShapeDtypeStruct)
        if not plain or isinstance(payload.indices, LocalIndices):
            raise ValueError(
                f"{name} needs a sparsifier that sends values and 32-bit indices (payload Sparse); {inner.name} sends "
                f"{type(payload).__name__}"
            )
        return payload.indices.shape[0]

    def init(shared_key, like):
        like = like_of(like)
        selected(like)
        key, seed = jax.random.split(shared_key)
        state = selector.init(key, like)
        draw = Draw(key_data(seed), jnp.zeros((), I32)) if coder.hashes else ()
        return State(state.local, (state.shared, draw))

    def seeds_of(shared):
        if not coder.hashes:
            return None
        draw = shared[1]
        return jax.random.bits(jax.random.fold_in(jax.random.wrap_key_data(draw.key), draw.count), (rows,), jnp.uint32)

    def compress(key, x, state):
        payload, local = selector.compress(key, x, State(state.local, state.shared[0]))
        keys = payload.indices
        if keys.shape[0] <= q:
            return payload, local
        values = finite(payload.values.astype(wide(payload.values.dtype)))
        return coder.encode(keys, values, jnp.sum(keys < x.shape[0], dtype=I32), seeds_of(state.shared)), local

    def entries(payload, shared):
        if isinstance(payload, Sparse):
            return payload.indices, payload.values
        return payload.keys, coder.decode(payload, seeds_of(shared))

    def decompress(payload, shared, like):
        keys, values = entries(payload, shared)
        return jnp.zeros(like.shape, like.dtype).at[keys].set(values.astype(like.dtype), mode="drop")

    def add(total, payloads, weights, shared):
        workers = jax.tree.leaves(payloads)[0].shape[0]

        def add_one(total, message):
            payload, weight, worker = message
            keys, values = entries(payload, for_worker(compressor, shared, worker, workers))
            return total.at[keys].add(weighted(values.astype(total.dtype), weight), mode="drop")

        return fold(add_one, total, (payloads, weights, jnp.arange(workers)))

    def next_round(shared):
        inner_shared, draw = shared
        return advance(selector, inner_shared), draw._replace(count=draw.count + 1) if coder.hashes else draw

    def pick(shared, worker, workers):
        return for_worker(selector, shared[0], worker, workers), shared[1]

    def alpha(d):
        k = selected(jax.ShapeDtypeStruct((d,), jnp.float32)) if d else 0
        assert inner.alpha is not None
        return inner.alpha(d) / (k if k > q else 1)

    compressor = on_vectors(
        init=init,
        compress=compress,
        decompress=decompress,
        accumulate=add,
        advance=next_round if coder.hashes or selector.advance is not None else None,
        for_worker=pick if selector.for_worker is not None else None,
        spec=Spec(
            f"skcompress({selects})" if mode == "quantile" else f"skcompress({selects}, {mode})",
            omega=None,
            alpha=None if mode == "paper" or inner.alpha is None else alpha,
            linear=False,
            weights=inner.weights,
            remedy='Midpoints can expand: take mode="recentred" or "quantile".' if mode == "paper" else None,
        ),
    )
    return compressor


class _Coder(NamedTuple):
    """encode(keys, values, n, seeds) -> Sketch;  decode(payload, seeds) -> float[k];  hashes: whether seeds matter."""

    encode: Callable[..., Sketch]
    decode: Callable[..., Array]
    hashes: bool


def _coder(mode: str, q: int, power: float, r: int, shape: Shape) -> _Coder:
    if mode == "quantile":
        decode = lambda payload, seeds: _level_of(payload, _codes(payload))
        return _Coder(partial(_quantile, q=q, power=power), decode, False)
    if mode == "recentred":
        return _Coder(
            partial(_recentred, q=q, r=r, shape=shape), partial(_decode_recentred, width=q // r, shape=shape), True
        )
    return _Coder(partial(_released, q=q, r=r, shape=shape), partial(_decode_released, r=r, shape=shape), True)


def _ordered(values: Array, n: Array) -> Array:
    real = lax.iota(I32, values.shape[0]) < n
    return sort_floats(jnp.where(real, values, jnp.asarray(jnp.inf, values.dtype)))


def _codes(payload: Sketch) -> Array:
    return unpack(payload.cells, payload.keys.shape[0]).astype(I32)


def _level_of(payload: Sketch, bucket: Array) -> Array:
    return payload.levels.at[bucket].get(mode="fill", fill_value=0)


def _counts(lists: Array, r: int) -> Array:
    return jnp.zeros((r,), I32).at[lists].add(1, mode="drop")


def _by_list(lists: Array, *arrays: Array) -> tuple[Array, ...]:
    """Entries list after list, in their order within each."""
    lists, order = lax.sort((lists, lax.iota(I32, lists.shape[0])), num_keys=1, is_stable=True)
    return lists, *(a[order] for a in arrays)


def _table_size(payload: Sketch, shape: Shape) -> int:
    return shape.size(payload.keys.shape[0], payload.counts.shape[0])


def _packed(table: Array, symbols: int, counts: Array, shape: Shape) -> Array:
    used = shape.rows * jnp.sum(shape.widths(counts), dtype=I32)
    used_cells = jnp.where(lax.iota(I32, table.shape[0]) < used, table, 0)
    return pack(used_cells.astype(jnp.uint32), width_for(symbols))


# ------------------------------------------------------------------------------------------------
# "quantile"


def _quantile(keys: Array, values: Array, n: Array, seeds: None, *, q: int, power: float) -> Sketch:
    real = lax.iota(I32, keys.shape[0]) < n
    bucket = bucket_of(values, signed_splits(_ordered(values, n), n, q, q, power))
    levels = means(values, jnp.where(real, bucket, q), q)
    cells = pack(jnp.where(real, bucket, 0).astype(jnp.uint32), width_for(q))
    return Sketch(levels, n[None], keys, cells, jnp.zeros((0,), I32))


# ------------------------------------------------------------------------------------------------
# "recentred": bucket g * width + rank is the one with that rank of distance from zero in group g, in cells and levels


def _recentred(keys: Array, values: Array, n: Array, seeds: Array, *, q: int, r: int, shape: Shape) -> Sketch:
    width = q // r
    splits = signed_splits(_ordered(values, n), n, q, r)
    bucket = bucket_of(values, splits)
    lists = jnp.where(lax.iota(I32, keys.shape[0]) < n, bucket // width, r)
    counts = _counts(lists, r)
    rank = jnp.where(bucket < splits.zero, width - 1 - bucket % width, bucket % width)
    lists, keys, values, rank = _by_list(lists, keys, values, rank)
    where = places(keys, lists, counts, shape, seeds)
    # What no key fell into is never read, so it needs no symbol of its own.
    table = minmax_sketch.insert(where, rank, shape.size(keys.shape[0], r), width - 1)
    decoded = jnp.where(lists < r, width * lists + query(table, where), q)
    cells = _packed(table, width, counts, shape)
    return Sketch(means(values, decoded, q), counts, keys, cells, jnp.zeros((0,), I32))


def _decode_recentred(payload: Sketch, seeds: Array, *, width: int, shape: Shape) -> Array:
    lists = list_of(payload.counts, payload.keys.shape[0])
    where = places(payload.keys, lists, payload.counts, shape, seeds)
    table = unpack(payload.cells, _table_size(payload, shape)).astype(I32)
    return _level_of(payload, width * lists + query(table, where))


# ------------------------------------------------------------------------------------------------
# "paper": bucket b of all values; a cell holds the place of b in its group, counted away from zero


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


def _released(keys: Array, values: Array, n: Array, seeds: Array, *, q: int, r: int, shape: Shape) -> Sketch:
    ordered = _ordered(values, n)
    splits = released_splits(ordered, n, q)
    bucket = bucket_of(values, splits)
    lists = jnp.searchsorted(_edges(splits, r), bucket, side="right").astype(I32)
    lists = jnp.where(lax.iota(I32, keys.shape[0]) < n, lists, r)
    counts = _counts(lists, r)
    lists, keys, bucket = _by_list(lists, keys, bucket)
    off = bucket - splits.zero
    size, empty = shape.size(keys.shape[0], r), jnp.iinfo(I32).max
    distance = 2 * jnp.abs(off) + (off < 0).astype(I32)
    table = minmax_sketch.insert(places(keys, lists, counts, shape, seeds), distance, size, empty)
    base, sign = _frame(list_of(shape.rows * shape.widths(counts), size), splits, r)
    place = sign * (splits.zero + jnp.where(table % 2 == 1, -(table // 2), table // 2) - base)
    widest = _widest(q, r)
    cells = _packed(jnp.where(table == empty, widest, place), widest + 1, counts, shape)
    zero = jnp.where(n > 0, jnp.stack([splits.zero, splits.number]), 0)
    return Sketch(midpoints(ordered, n, splits), counts, keys, cells, zero)


def _decode_released(payload: Sketch, seeds: Array, *, r: int, shape: Shape) -> Array:
    zero, number = payload.zero
    lists = list_of(payload.counts, payload.keys.shape[0])
    where = places(payload.keys, lists, payload.counts, shape, seeds)
    table = unpack(payload.cells, _table_size(payload, shape)).astype(I32)
    base, sign = _frame(lists, Splits(payload.levels, zero, number), r)
    read = base + sign * table.at[where].get(mode="fill", fill_value=0)
    farthest = jnp.argmax(jnp.abs(read - zero), axis=0)  # the first row of those that are as far
    return _level_of(payload, jnp.take_along_axis(read, farthest[None], axis=0)[0])
