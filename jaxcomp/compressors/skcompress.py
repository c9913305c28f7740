"""SKCompress: a sparse gradient by quantile buckets, a MinMaxSketch of them, and coded keys.

The values that a sparsifier selected are replaced by the number of a bucket and a table of what each bucket stands for.
Keys (indices) are exact. They travel anyway, so values can be told by their place, without hashing. Zero is a split, so
no bucket mixes signs.

In sketches keys go in one list per group of buckets, with a MinMaxSketch that holds each key's rank of distance from
zero within the group. Collisions make ranks smaller, never larger, and never change a sign. The encoder decodes its own
message, and each level is the mean of the values that decode to it (recentred). In cells and levels, bucket
g * width + rank is the one with that rank in group g. The sketches as released are `contrib.skcompress_released`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.arrays import finite, like_of, wide
from jaxcomp.base import Compressor, Spec, State, advance, check_compressor, for_worker, on_vectors
from jaxcomp.checks import is_whole
from jaxcomp.compressors import minmax_sketch
from jaxcomp.compressors.minmax_sketch import Shape, by_list, list_of, list_sizes, pack_table, places, query, table_of
from jaxcomp.compressors.quantiles import bucket_of, in_order, means, signed_splits
from jaxcomp.compressors.rand_k import Draw, next_draw
from jaxcomp.compressors.roundtrip import payload_like
from jaxcomp.compressors.schedule import target_of
from jaxcomp.compressors.threshold import by_threshold, fixed
from jaxcomp.factories import factory
from jaxcomp.packing import pack, unpack, width_for
from jaxcomp.payloads import LocalIndices, Sketch, Sparse

__all__ = ["Coder", "level_of", "skcompress"]

Array = jax.Array
I32 = jnp.int32
BUCKETS = {"quantile": 16, "recentred": 256, "paper": 256}
LEAST_COLUMNS = 8  # of a short list, so that a few keys do not all share one cell
MOST_BUCKETS = 1 << 14
ROOM = 0.25


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


@factory
def skcompress(
    sparsifier: Compressor | None = None,
    *,
    mode: str = "quantile",
    buckets: int | None = None,
    power: float = 1.0,
    groups: int = 8,
    rows: int = 2,
    columns: float = 0.3,
    room: float | None = None,
) -> Compressor:
    """Compresses values and keys of a sparse gradient.

    C(x)_j = level[bucket of x_j] if the sparsifier selects j, else 0.

    "quantile": buckets of equal parts of sum |x_j|^power; the bucket of each value travels as a number of
        ceil(log2(buckets)) bits, Huffman-coded on the wire. With power=1 large values have narrow buckets, which heavy
        tails need, and bucket numbers are not uniform, so that they can be coded. It has the smallest error at equal
        bits on the gradients that we measured.
    "recentred": buckets of equally many values in `groups` groups, one MinMaxSketch of `rows` rows and
        ceil(columns * keys) columns for each.
    "paper": as released, for comparison.

    Contraction: "quantile" and "recentred" replace values by means, so |x - C(x)|^2 = |x|^2 - |C(x)|^2 for
    what is selected. The mean of m values of one sign has m mean^2 >= sum of squares / m, hence alpha is at
    least that of the sparsifier over the number of places k; measured, it is far larger. "paper" can expand: its
    alpha is unknown.

    Where the message has place for no more values than there are buckets, they travel as they are. An empty
    selection sends nothing. Entries that are not finite count as zero.

    Args:
        sparsifier: a compressor with payload `Sparse` (top_k, sidco, ...), or None: whatever is
            not zero. Values beyond the room are left out, smallest first, and counted as overflow.
        mode: "quantile", "recentred" or "paper".
        buckets: q, 2 .. 16384 and a multiple of groups where there are groups; 16 for "quantile", else 256.
        power: of the weights in "quantile", in [0, 2].
        groups: r, of the sketches, at least 2.
        rows: s, hash tables in each sketch, 1 .. 16.
        columns: rho, cells in a row over keys in the group, in (0, 4], a multiple of 1e-4.
        room: without a sparsifier, the share of the entries that the message has room for, in (0, 1]; 0.25.

    Returns:
        Compressor with payload `Sketch` (`Sparse` for short vectors).

    Raises:
        ValueError: an argument is out of range, or the sparsifier sends something else.

    Reference: Jiang, Fu, Yang, Cui 2018 (SketchML); Jiang et al. 2020 (SKCompress).

    >>> import jaxcomp as jc
    >>> x = jnp.array([0.0, 1.0, -3.0, 0.0, 2.0, -5.0, 9.0, 0.0])
    >>> print(jc.roundtrip(jc.skcompress(jc.top_k(k=5), buckets=4), x, key=jax.random.key(0))[0])
    [ 0.   1.5 -3.   0.   1.5 -5.   9.   0. ]
    """
    selector, selects = _selector(sparsifier, room)
    q = _checked(mode, buckets, power, groups, rows, columns)
    coder = _coder(mode, q, float(power), int(groups), int(rows), float(columns))
    name = f"skcompress({selects})" if mode == "quantile" else f"skcompress({selects}, {mode})"
    remedy = 'Midpoints can expand: take mode="recentred" or "quantile".' if mode == "paper" else None
    return _compressor(name, selector, coder, q, int(rows), remedy)


def _selector(sparsifier: Compressor | None, room: float | None) -> tuple[Compressor, str]:
    if sparsifier is None:
        share = ROOM if room is None else room
        if not 0 < share <= 1:
            raise ValueError(f"skcompress: room must be in (0, 1]; got {room}")
        return by_threshold("nonzero", target_of("skcompress", float(share)), fixed(0.0), capacity=1.0), "nonzero"
    if room is not None:
        raise ValueError(f"skcompress: room is for skcompress without a sparsifier; got room={room} with one")
    spec = check_compressor("skcompress", sparsifier)
    if spec.lifted:
        raise ValueError(f"skcompress: {spec.name} acts on trees; sketch a compressor of one array and lift the result")
    return sparsifier, spec.name


def _checked(mode: str, buckets: int | None, power: float, groups: int, rows: int, columns: float) -> int:
    """The number of buckets, once all arguments are in their ranges."""
    if mode not in BUCKETS:
        raise ValueError(f"skcompress: mode must be one of {', '.join(map(repr, BUCKETS))}; got {mode!r}")
    q = BUCKETS[mode] if buckets is None else buckets
    if not is_whole(q, 2) or q > MOST_BUCKETS:
        raise ValueError(f"skcompress: buckets must be an integer in 2 .. {MOST_BUCKETS}; got {buckets}")
    if not 0 <= power <= 2:
        raise ValueError(f"skcompress: power must be in [0, 2]; got {power}")
    if not is_whole(groups, 2):
        raise ValueError(f"skcompress: groups must be an integer of at least 2, one for each sign; got {groups}")
    if mode != "quantile" and q % groups:
        raise ValueError(f"skcompress: buckets must be a multiple of groups; got {q} buckets in {groups} groups")
    if not is_whole(rows) or rows > 16:
        raise ValueError(f"skcompress: rows must be an integer in 1 .. 16; got {rows}")
    if not 1e-4 <= columns <= 4:
        raise ValueError(f"skcompress: columns must be in [1e-4, 4] cells for each key; got {columns}")
    return int(q)


def _coder(mode: str, q: int, power: float, groups: int, rows: int, columns: float) -> Coder:
    if mode == "quantile":
        return by_position(q, power)
    if mode == "recentred":
        return recentred(q, groups, Shape(rows, columns, LEAST_COLUMNS))
    from jaxcomp.contrib.skcompress_released import released_coder  # only where the option asks for it

    return released_coder(q, groups, Shape(rows, columns))


def _compressor(name: str, selector: Compressor, coder: Coder, q: int, rows: int, remedy: str | None) -> Compressor:
    """Shared state: that of the sparsifier, and a `Draw` where the coder hashes. remedy: where it may expand."""

    def init(shared_key, like):
        like = like_of(like)
        _num_selected(selector, like)
        key, seed = jax.random.split(shared_key)
        state = selector.init(key, like)
        return State(state.local, (state.shared, Draw.first(seed) if coder.hashes else ()))

    def seeds_of(shared):
        return shared[1].words(rows) if coder.hashes else None

    def compress(key, x, state):
        payload, local = selector.compress(key, x, State(state.local, state.shared[0]))
        keys = payload.indices
        if keys.shape[0] <= q:
            return payload, local
        values = finite(payload.values.astype(wide(payload.values.dtype)))
        number = jnp.sum(keys < x.shape[0], dtype=jnp.int32)
        return coder.encode(keys, values, number, seeds_of(state.shared)), local

    def entries(payload, shared, like):
        if isinstance(payload, Sparse):
            return payload.indices, payload.values
        return payload.keys, coder.decode(payload, seeds_of(shared))

    def next_round(shared):
        return advance(selector, shared[0]), next_draw(shared[1]) if coder.hashes else ()

    def pick(shared, worker, workers):
        return for_worker(selector, shared[0], worker, workers), shared[1]

    def alpha(d):
        k = _num_selected(selector, jax.ShapeDtypeStruct((d,), jnp.float32)) if d else 0
        assert selector.spec.alpha is not None
        return selector.spec.alpha(d) / (k if k > q else 1)

    return on_vectors(
        init=init,
        compress=compress,
        entries=entries,
        ascending=not coder.hashes,  # keys that are hashed come in several lists
        advance=next_round if coder.hashes or selector.advance is not None else None,
        for_worker=pick if selector.for_worker is not None else None,
        overflow=selector.overflow,
        spec=Spec(
            name,
            omega=None,
            alpha=None if remedy or selector.spec.alpha is None else alpha,
            linear=False,
            layout=selector.spec.layout,
            weights=selector.spec.weights,
            remedy=remedy,
        ),
    )


def _num_selected(selector: Compressor, like: Any) -> int:
    """Places in what the sparsifier sends; ValueError if that has no plain values and indices."""
    payload = payload_like(selector, like)
    plain = isinstance(payload, Sparse) and isinstance(payload.values, jax.ShapeDtypeStruct)
    if not plain or isinstance(payload.indices, LocalIndices):
        raise ValueError(
            "skcompress needs a sparsifier that sends values and 32-bit indices (payload Sparse); "
            f"{selector.spec.name} sends {type(payload).__name__}"
        )
    return payload.indices.shape[0]


# ------------------------------------------------------------------------------------------------
# Coders


def level_of(payload: Sketch, bucket: Array) -> Array:
    """The level of each bucket; 0 for numbers beyond the last."""
    return payload.levels.at[bucket].get(mode="fill", fill_value=0)


def by_position(q: int, power: float) -> Coder:
    """A coder with q buckets of equal weight |x_j|^power."""

    def encode(keys, values, n, seeds):
        real = lax.iota(I32, keys.shape[0]) < n
        bucket = bucket_of(values, signed_splits(in_order(values, n), n, q, q, power))
        levels = means(values, jnp.where(real, bucket, q), q)
        cells = pack(jnp.where(real, bucket, 0).astype(jnp.uint32), width_for(q))
        return Sketch(levels, n[None], keys, cells, jnp.zeros((0,), I32))

    def decode(payload, seeds):
        return level_of(payload, unpack(payload.cells, payload.keys.shape[0]).astype(I32))

    return Coder(encode, decode, False)


def recentred(q: int, r: int, shape: Shape) -> Coder:
    """A coder with q buckets in r groups and sketches of the shape."""
    width = q // r

    def encode(keys, values, n, seeds):
        splits = signed_splits(in_order(values, n), n, q, r)
        bucket = bucket_of(values, splits)
        lists = jnp.where(lax.iota(I32, keys.shape[0]) < n, bucket // width, r)
        rank = jnp.where(bucket < splits.zero, width - 1 - bucket % width, bucket % width)
        lists, keys, values, rank = by_list(lists, keys, values, rank)
        counts = list_sizes(lists, r)
        where = places(keys, lists, counts, shape, seeds)
        # What no key fell into is never read, so it needs no symbol of its own.
        table = minmax_sketch.insert(where, rank, shape.size(keys.shape[0], r), width - 1)
        decoded = jnp.where(lists < r, width * lists + query(table, where), q)
        cells = pack_table(table, width, counts, shape)
        return Sketch(means(values, decoded, q), counts, keys, cells, jnp.zeros((0,), I32))

    def decode(payload, seeds):
        lists = list_of(payload.counts, payload.keys.shape[0])
        where = places(payload.keys, lists, payload.counts, shape, seeds)
        return level_of(payload, width * lists + query(table_of(payload, shape), where))

    return Coder(encode, decode, True)
