"""Everything in jaxcomp that names a `lax` collective, and how the arrays of a payload share them.

Arrays of a payload are joined into one lane per width or fewer before they cross, as plain unsigned words: fewer
launches, and no backend widens a narrow float on the way (on CPU both `psum` and `all_gather` of bf16 are compiled to
f32). Which arrays share a lane is decided in `word_lanes` and `sum_lanes`, from shapes alone: the collectives pack by
it, and the functions that count bytes count by it.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.arrays import as_words, rounded_to, sum_rows, weighted
from jaxcomp.backend import count_of_sections, cut_apart, platform, side_by_side
from jaxcomp.backend_cpu import opaque_true
from jaxcomp.backend_gpu import TOGETHER, Arriving
from jaxcomp.exchange.axes import (
    Axis,
    axis_index,
    axis_names,
    axis_size,
    is_manual,
    proven_equal,
    varying,
    varying_axes,
)
from jaxcomp.groups import in_runs

__all__ = [
    "Lane",
    "Permutation",
    "all_max",
    "all_sum_words",
    "all_to_all",
    "all_to_all_rows",
    "crossing_size",
    "fills_tiles",
    "gather_bytes",
    "gather_tree",
    "gathered",
    "gathers_for_less",
    "has_ragged",
    "permutation_schedule",
    "ragged_all_to_all",
    "send",
    "sum_arrays",
    "sum_lanes",
    "sum_scatter",
    "summed",
    "summed_size",
    "word_lanes",
]

Array = jax.Array
MOST_ARRIVING = 2**29  # numbers of a message in sections: with what `Arriving.among` adds to both sides, below 2^31


# ------------------------------------------------------------------------------------------------
# Lanes: the arrays of a payload, put together


# At most so many bytes of wide entries are split into the words of a narrow lane, to save another collective.
FEW_BYTES = 2**16
# An array of so many bytes crosses by itself: another collective costs less than putting it beside others, and cutting
# what arrives.
ALONE_BYTES = 2**23
# On GPUs so many: XLA combines small collectives, and would else fuse all that makes the words of all groups into one
# kernel, which takes as long to compile as everything else.
ALONE_BYTES_ON_GPU = 2**16
# Narrow numbers that are summed at a time, or more in one array; and from which on a tile for each worker is little.
SOME_ENTRIES = 2**24
MANY = 2**20


class Lane(NamedTuple):
    """Arrays that cross together, one after the other.

    places: their numbers in the flattened tree.
    sizes: entries of the lane that each of them fills. size: of the lane, in all.
    dtype: of the entries of the lane.
    """

    places: tuple[int, ...]
    sizes: tuple[int, ...]
    size: int
    dtype: Any


def word_lanes(tree: Any, buckets: Sequence[int] | None = None) -> list[Lane]:
    """Lanes of unsigned words, for collectives that only move bits: one for each bucket and width of entries.

    A few wide entries are split into the words of a narrower lane of their bucket, to save another collective. A
    long array has a lane of its own.

    Args:
        tree: arrays or their shapes.
        buckets: number of the bucket of each array, in whose order lanes cross; None for a single bucket.
    """
    leaves = jax.tree.leaves(tree)
    widths = [jnp.dtype(leaf.dtype).itemsize for leaf in leaves]
    held = [leaf.size * width for leaf, width in zip(leaves, widths, strict=True)]
    where, lanes = platform(), []
    on_gpu = where == "gpu"
    alone_from = ALONE_BYTES_ON_GPU if on_gpu else ALONE_BYTES
    for _, places in sorted(_grouped(buckets or [0] * len(leaves))):
        narrowest = min(widths[i] for i in places)
        # Wider ones stay together elsewhere: by themselves words of nvfp4 take 7 bytes a parameter more on a TPU.
        alone = [i for i in places if held[i] >= alone_from and (on_gpu or widths[i] == narrowest)]
        rest, others = [i for i in places if i not in alone], [[i] for i in alone]
        merged, *wider = [[rest[j] for j in group] for _, group in sorted(_grouped([widths[i] for i in rest]))] or [[]]
        for group in wider:
            if sum(held[i] for i in group) <= FEW_BYTES:
                merged = merged + group
            else:
                others.append(group)
        for group in (*filter(None, [merged]), *others):
            word = min(widths[i] for i in group)
            if where == "tpu":  # what fills its rows first, so that most begin with a row
                group = sorted(group, key=lambda i: held[i] // word % TPU_LANES != 0)
            sizes = tuple(held[i] // word for i in group)
            lanes.append(Lane(tuple(group), sizes, sum(sizes), jnp.dtype(f"uint{8 * word}")))
    return lanes


def sum_lanes(tree: Any, buckets: Sequence[int] | None = None) -> list[Lane]:
    """Lanes of numbers, for collectives that add: one for each bucket and dtype; of narrow ones several, if they are
    many, since what is on its way takes memory.
    """
    leaves, lanes = jax.tree.leaves(tree), []
    sizes = [leaf.size for leaf in leaves]
    dtypes = [jnp.dtype(leaf.dtype) for leaf in leaves]
    for _, places in sorted(_grouped(buckets or [0] * len(leaves))):
        for dtype, group in _grouped([dtypes[i] for i in places]):
            same = [places[j] for j in group]
            for part in in_runs(same, sizes, SOME_ENTRIES) if dtype.itemsize < 4 else [same]:
                held = tuple(sizes[i] for i in part)
                lanes.append(Lane(tuple(part), held, sum(held), dtype))
    return lanes


def _grouped(kinds: Sequence[Any]) -> list[tuple[Any, list[int]]]:
    """Each kind, in the order in which they occur, and the places where it does."""
    groups: dict[Any, list[int]] = {}
    for place, kind in enumerate(kinds):
        groups.setdefault(kind, []).append(place)
    return list(groups.items())


def _after(x: Any, before: Any) -> Any:
    """x, once `before` is there: XLA would else combine the collectives of all buckets into one, which waits for all.

    They share a link, so one after the other costs nothing.
    """
    return x if before is None else lax.optimization_barrier((x, before))[0]


# ------------------------------------------------------------------------------------------------
# Bits: gather, all-to-all


def _pack(lane: Lane, leaves: Sequence[Array] | dict[int, Array], lead: tuple[int, ...] = ()) -> Array:
    """[*lead, m] words of a lane, from arrays whose leading axes are `lead`."""
    words = [lax.bitcast_convert_type(leaves[i], lane.dtype).reshape(*lead, -1) for i in lane.places]
    return side_by_side(words)


def _unpack(lane: Lane, rows: Array, leaves: Sequence[Any], sizes: Sequence[int]) -> list[Array]:
    """[n, m] words as the arrays [n, *shape], where array i fills sizes[i] words of a row."""
    pairs = zip(lane.places, sizes, strict=True)
    arrays, shapes = [], [leaves[i].shape if leaves[i].size == size else (size,) for i, size in pairs]
    for i, size, words in zip(lane.places, sizes, cut_apart(rows, sizes, shapes=shapes), strict=True):
        ratio = leaves[i].dtype.itemsize // lane.dtype.itemsize
        words = words.reshape(len(rows), size // ratio, ratio) if ratio > 1 else words
        arrays.append(lax.bitcast_convert_type(words, leaves[i].dtype))
    return arrays


def gather_tree(tree: Any, axis: Axis) -> Any:
    """Every worker's arrays, stacked on a leading axis of n, in the order of the axis index."""
    return gathered(tree, axis)[0]


def gathered(
    tree: Any,
    axis: Axis,
    replicas: tuple[str, ...] = (),
    buckets: Sequence[int] | None = None,
    per_tile: Sequence[int] | None = None,
) -> tuple[Any, float]:
    """`gather_tree`, and the bytes that a device sends for it (`gather_bytes`).

    One collective for each lane. Each worker contributes exactly the bytes of its arrays.

    Args:
        tree: this worker's arrays.
        axis: mapped axis, or None.
        replicas: mapped axes on which the arrays are equal: each device there sends one part of them, and then they
            send each other what arrived.
        buckets: number of the bucket of each array; None for a single bucket.
        per_tile: for each array how it can be cut (`payloads.per_tile`), 0 where it cannot, if whoever reads the result
            knows what to do with a `backend_gpu.Arriving` in the place of a long one.
    """
    if not axis:
        return jax.tree.map(lambda a: a[None], tree), 0.0
    leaves, structure = jax.tree.flatten(varying(tree, axis))
    workers, devices, lanes = axis_size(axis), axis_size(replicas), word_lanes(leaves, buckets)
    arrived: list[Any] = [None] * len(leaves)
    before: Any = None
    for lane in lanes:
        first, *others = lane.places
        if per_tile and not others and buckets is None and devices == 1:
            arrived[first] = _arriving(leaves[first], axis, workers, per_tile[first])
        if arrived[first] is not None:
            continue
        words = _pack(lane, leaves)
        rest = crossing_size(words.size, words.dtype.itemsize) - words.size
        if rest and devices == 1:  # which would cross all the same; so what arrives is cut out of whole rows
            words = jnp.pad(words, (0, rest))
        if lane.size:
            words = words if buckets is None else _after(words, before)
            before = rows = _shared_out(words, replicas, functools.partial(_gather_lane, axis=axis))
        else:
            rows = proven_equal(jnp.broadcast_to(words, (workers, 0)), axis)
        for i, array in zip(lane.places, _unpack(lane, rows, leaves, lane.sizes), strict=True):
            arrived[i] = array.reshape(workers, *leaves[i].shape)
    return jax.tree.unflatten(structure, arrived), _bytes_gathered(lanes, workers, devices)


def _arriving(own: Array, axis: Axis, workers: int, per_tile: int) -> Arriving | None:
    """A long array of messages that cross when they are read; None for one that crosses now."""
    if not per_tile or own.size % per_tile or workers == 1 or not is_manual(axis) or own.size > MOST_ARRIVING:
        return None
    count = count_of_sections(workers * own.size * own.dtype.itemsize, own.size // per_tile * TOGETHER)
    if count < 2:
        return None

    def exchange(part: Array) -> Array:
        with jax.named_scope("jc_exchange_gather"):
            rows = _gather_lane(as_words(part), axis)
        return lax.bitcast_convert_type(rows, own.dtype)

    return Arriving(own, exchange, per_tile, count)


def gathers_for_less(workers: int, exact: bool) -> bool:
    """Whether a gather of narrow floats takes fewer bytes than their sum in two steps, whose second is wide if exact.

    Of b bytes n workers gather (n - 1) b, and add (n - 1) / n b twice, or thrice if exact. On a TPU the first step, an
    all-to-all, counts whole: between slices a chip hands over also the part that stays.
    """
    part, second = (workers - 1) / workers, 2 if exact else 1
    return workers - 1 < (1 if platform() == "tpu" else part) + second * part


def gather_bytes(tree: Any, axis: Axis, replicas: tuple[str, ...] = ()) -> float:
    """Bytes that a device sends in `gathered`, without buckets."""
    return _bytes_gathered(word_lanes(tree), axis_size(axis), axis_size(replicas))


def _bytes_gathered(lanes: Sequence[Lane], workers: int, devices: int) -> float:
    """(n - 1) times a device's part of each lane; replicas then send on the n parts."""
    widths = [lane.dtype.itemsize for lane in lanes]
    parts = [crossing_size(-(-lane.size // devices), width) * width for lane, width in zip(lanes, widths, strict=True)]
    return float(sum(parts) * ((workers - 1) + (devices - 1) * workers))


def _shared_out(rows: Array, replicas: tuple[str, ...], exchange: Callable[[Array], Array]) -> Array:
    """exchange(rows), [..., m] -> [..., m], where each replica does one part of the last axis."""
    devices = axis_size(replicas) if replicas else 1
    if devices == 1:
        return exchange(rows)
    size = -(-rows.shape[-1] // devices)
    padded = jnp.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, size * devices - rows.shape[-1])])
    start = axis_index(replicas) * size
    parts = _gather_lane(exchange(lax.dynamic_slice_in_dim(padded, start, size, axis=-1)), replicas)
    whole = jnp.moveaxis(parts, 0, -2)
    return whole.reshape(*whole.shape[:-2], size * devices)[..., : rows.shape[-1]]


def all_to_all(tree: Any, axis: Axis, replicas: tuple[str, ...] = ()) -> tuple[Any, float]:
    """Row j of every array goes to worker j: [n, ...] by destination becomes [n, ...] by origin. And the bytes that a
    device sends: all rows but its own, or its part of them; replicas then send on what arrived.

    replicas: as for `gathered`.
    """
    if not axis:
        return tree, 0.0
    leaves, structure = jax.tree.flatten(varying(tree, axis))
    workers = axis_size(axis)
    replicas = replicas if workers > 1 else ()  # else nothing arrives from others
    devices, sent = axis_size(replicas), 0
    arrived: list[Any] = [None] * len(leaves)
    for lane in word_lanes(leaves):
        part, width = -(-(lane.size // workers) // devices), lane.dtype.itemsize
        sent += (workers - 1) * crossing_size(part, width, rows_from=NEVER) * width
        sent += (devices - 1) * workers * crossing_size(part, width) * width
        rows = _pack(lane, leaves, (workers,))
        rows = _shared_out(rows, replicas, lambda part: all_to_all_rows(part, axis)) if lane.size else rows
        sizes = [size // workers for size in lane.sizes]
        for i, array in zip(lane.places, _unpack(lane, rows, leaves, sizes), strict=True):
            arrived[i] = array.reshape(leaves[i].shape)
    return jax.tree.unflatten(structure, arrived), float(sent)


# ------------------------------------------------------------------------------------------------
# Sums


def summed(
    tree: Any,
    axis: Axis,
    weights: Array | None = None,
    replicas: tuple[str, ...] = (),
    buckets: Sequence[int] | None = None,
    exact: bool = False,
    wide: Any = jnp.float32,
    share: float = 1.0,
) -> tuple[Any, float]:
    """sum_j weights_j x_j over the workers of each float array, equal on all of them, and the bytes that each sends.

    f32 and f64 use one all-reduce. Narrow floats (16 bits) would be added in their own precision, or be widened on the
    wire, depending on the backend; they are summed in two steps instead: every worker gets one n-th of the entries from
    all (all-to-all), adds them in `wide`, rounds once, and sends its part to all (all-gather): the same bytes as an
    all-reduce of 16 bits. What is rounded is the mean, so it cannot overflow; the sum comes out in `wide`. Algorithms
    with a memory of what was sent need the unrounded sum: with `exact` the second step brings the mean in `wide`.

    Args:
        tree: this worker's arrays.
        axis: mapped axis, or None.
        weights: [n], of all workers, with sum one; None for `share`, a power of two, for each.
        replicas, buckets: as for `gathered`.
        exact: nothing is rounded to less than `wide`.
        wide: f32 or f64, in which narrow floats are added.
    """
    if not axis:
        return tree if weights is None else jax.tree.map(lambda a: weighted(a, weights[0]), tree), 0.0
    leaves, structure = jax.tree.flatten(varying(tree, axis))
    mine = weights[axis_index(axis)] if weights is not None else jnp.asarray(share, wide) if share != 1 else None
    workers, devices, sent = axis_size(axis), axis_size(replicas), 0.0
    sums: list[Any] = [None] * len(leaves)
    before: Any = None
    for lane in sum_lanes(leaves, buckets):
        parts = [leaves[i] for i in lane.places]
        parts = parts if buckets is None else _after(parts, before)
        narrow = lane.dtype.itemsize < 4
        sent += _bytes_summed(lane, parts, workers, devices, exact, wide)
        if lane.size == 0:
            totals = [jnp.zeros(part.shape, wide if narrow else lane.dtype) for part in parts]
        elif not narrow and devices == 1:
            totals = sum_arrays([weighted(part, mine) for part in parts], axis)
        else:
            if narrow:  # as words, which XLA for CPU moves as they are: numbers of 16 bits it would widen before
                lane, kind = lane._replace(dtype=jnp.dtype(f"uint{8 * lane.dtype.itemsize}")), lane.dtype
                add = lambda words: _mean_in_two_steps(words, kind, axis, weights, exact, wide)  # noqa: B023
            else:
                add = lambda part: sum_arrays([weighted(part, mine)], axis)[0]
            pieces = cut_apart(
                _shared_out(_pack(lane, dict(zip(lane.places, parts, strict=True))), replicas, add), lane.sizes
            )
            if narrow:
                scale = workers * share if weights is None else 1
                numbers = lambda words: lax.bitcast_convert_type(words, wide if exact else kind)  # noqa: B023
                pieces = [numbers(piece).astype(wide) * scale for piece in pieces]
            totals = [piece.reshape(part.shape) for piece, part in zip(pieces, parts, strict=True)]
        before = totals if lane.size else before
        for i, total in zip(lane.places, totals, strict=True):
            sums[i] = total
    return jax.tree.unflatten(structure, sums), sent


def _bytes_summed(lane: Lane, parts: Sequence[Any], workers: int, devices: int, exact: bool, wide: Any) -> float:
    """(n - 1) / n of a device's part of the lane twice; r replicas then send the sum r - 1 times.

    Exact sums of narrow floats are `wide`, and so replicas send each other these.
    """
    if not lane.size:
        return 0.0
    part, width = -(-lane.size // devices), lane.dtype.itemsize
    if width < 4:
        chunk = _row_to_add(part, workers, width)
        row = crossing_size(chunk, width, rows_from=NEVER) * width
        width = jnp.dtype(wide).itemsize if exact else width
        sent = (workers - 1) * (row + crossing_size(chunk, width) * width)
    else:
        added = summed_size(parts if devices == 1 else [jax.ShapeDtypeStruct((part,), lane.dtype)])
        sent = 2 * (workers - 1) / workers * added * width
    return float(sent + ((devices - 1) * crossing_size(part, width) * width if devices > 1 else 0))


def _row_to_add(size: int, workers: int, width: int) -> int:
    """How many of so many narrow numbers each worker adds. On TPUs whole tiles, where that is little more: rows that
    begin within a tile are laid out anew by a long program.
    """
    row = -(-size // workers)
    return crossing_size(row, width, rows_from=NEVER) if MANY <= size <= SOME_ENTRIES else row


def _mean_in_two_steps(words: Array, kind: Any, axis: Axis, weights: Array | None, exact: bool, wide: Any) -> Array:
    """Words of the mean of numbers of a kind, from their words: of the same kind, or `wide` if exact."""
    workers, size = axis_size(axis), words.size
    row = _row_to_add(size, workers, words.dtype.itemsize)
    rows = all_to_all_rows(jnp.pad(words, (0, workers * row - size)).reshape(workers, row), axis)
    rows = lax.bitcast_convert_type(rows, kind).astype(wide)
    mean = sum_rows(rows) / workers if weights is None else sum_rows(rows * weights.astype(wide)[:, None])
    return _gather_lane(as_words(mean if exact else rounded_to(mean, kind)), axis).reshape(-1)[:size]


# ------------------------------------------------------------------------------------------------
# One array, and the tiles that a TPU fills


# XLA for TPU compiles a gather of anything else to an all-reduce of all n parts, at twice the bytes (libtpu 0.0.50).
TPU_LANES = 128
# TPUs keep the last two dimensions of an array in tiles, of 8 x 128 entries of 32 bits. Where they do not fill them,
# the padding crosses the network between slices, too. Entries of 8 bits that share a word lie in four different rows:
# [n, m] of them has four rows in the place of one.
TPU_SUBLANES = 8
IN_ROWS = 2**20  # 32-bit entries from which on XLA would lay a message out in rows, as it does all narrower ones
NEVER = 2**63


def _gather_lane(x: Array, axis: Axis) -> Array:
    """[n, *x.shape], typed as equal on all workers where the tracing context knows such a type.

    Under `shard_map(check_vma=True)` only the form `to="invarying"` yields a value that the out
    spec P() accepts; under vmap and pmap that form is refused, and the plain one is typed so.
    """
    size, lead, width = x.shape[-1], x.shape[:-1], x.dtype.itemsize
    whole = crossing_size(size, width)
    if whole > size:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, whole - size)])
    if size and (width < 4 or size >= IN_ROWS) and platform() == "tpu":
        x = x.reshape(*lead, -1, TPU_LANES)
    if set(axis_names(axis)) <= set(varying_axes(x)):
        rows = lax.all_gather(x, axis, to="invarying")
    else:
        rows = lax.all_gather(x, axis)
    if x.shape[:-1] != lead:
        if size % TPU_LANES == 0:
            return rows[..., : size // TPU_LANES, :].reshape(-1, *lead, size)
        rows = rows.reshape(-1, *lead, whole)
    return rows[..., :size]


def crossing_size(size: int, width: int, *, rows_from: int = IN_ROWS) -> int:
    """How many entries cross for so many, of `width` bytes each, in `_gather_lane`; or, of a row, in `all_to_all_rows`.

    Between TPUs whole lanes, or tiles of eight rows, or one of 1, 2 or 4 rows; elsewhere those that there are.

    rows_from: entries of 32 bits from which on they lie in rows; `NEVER` in an all-to-all.
    """
    if platform() != "tpu":
        return size
    held = -(-size // TPU_LANES)
    if size and (width < 4 or size >= rows_from):
        held = max(held, 4 // width)  # whole words
        held += -held % min(TPU_SUBLANES, 1 << (held - 1).bit_length())
    return TPU_LANES * held


def summed_size(arrays: Sequence[Any]) -> int:
    """How many entries cross in `sum_arrays` of arrays (or shapes) of one dtype, if all vary over the same axes."""
    if platform() != "tpu" or not _in_tiles():
        return sum(x.size for x in arrays)
    sizes = [x.size for x in arrays if not fills_tiles(x)]
    small = [size for size in sizes if size < SMALL]
    vectors = [size for size in sizes if size >= SMALL] + ([sum(small)] if small else [])
    return sum(x.size for x in arrays if fills_tiles(x)) + sum(size + _tile_padding(size) for size in vectors)


SMALL = 2**16  # entries of an array that is worth a copy, if that saves messages
IN_TURN = 2**22  # entries of one all-reduce, about; more are added by several, one after the other


def sum_arrays(arrays: list[Array], axis: Axis) -> list[Array]:
    """Sums over the workers, in the dtypes of the arrays, by one all-reduce; on CPU by one for about `IN_TURN` entries.

    There large arrays are added in turn: what was made for one sum leaves its memory to the next. And among CPU
    processes small arrays are joined: gloo reduces each array of an all-reduce by itself, in 2 (n - 1) messages one
    after the other. On TPUs small arrays are joined, too, so that what crosses fills tiles.
    """
    where = platform()
    tiles = where == "tpu" and _in_tiles()
    if where != "cpu" and not tiles:
        return lax.psum(arrays, axis)
    if not tiles and jax.process_count() == 1:
        return _sums_in_turn(arrays, axis)
    if tiles and any(map(_is_narrow, arrays)):
        turned = [jnp.swapaxes(x, -2, -1) if _is_narrow(x) else x for x in arrays]
        pairs = zip(arrays, sum_arrays(turned, axis), strict=True)
        return [jnp.swapaxes(total, -2, -1) if _is_narrow(x) else total for x, total in pairs]
    alike: dict[Any, list[int]] = {}
    for i, x in enumerate(arrays):
        alone = x.size >= SMALL or (tiles and fills_tiles(x))
        alike.setdefault(i if alone else (x.dtype, frozenset(varying_axes(x))), []).append(i)
    groups = list(alike.values())
    joined = [
        arrays[group[0]] if len(group) == 1 else jnp.concatenate([arrays[i].reshape(-1) for i in group])
        for group in groups
    ]
    if tiles:  # what does not fill tiles is one vector, padded to whole ones
        vector = lambda x: jnp.pad(x.reshape(-1), (0, _tile_padding(x.size)))
        totals = lax.psum([x if fills_tiles(x) else vector(x) for x in joined], axis)
    else:
        totals = _sums_in_turn(joined, axis)
    sums: list[Any] = [None] * len(arrays)
    for group, total in zip(groups, totals, strict=True):
        start = 0
        for i in group:
            sums[i] = lax.slice_in_dim(total.reshape(-1), start, start + arrays[i].size).reshape(arrays[i].shape)
            start += arrays[i].size
    return sums


def _in_tiles() -> bool:
    """Whether arrays that are added on TPUs are given a shape that fills their tiles.

    Not where the compiler itself shards them over a mesh axis: to join two dimensions it would gather the whole.
    """
    mesh = jax.sharding.get_abstract_mesh()
    automatic = set(mesh.axis_names) - set(mesh.manual_axes)
    return all(mesh.shape[name] == 1 for name in automatic)


def fills_tiles(x: Any) -> bool:
    """Whether the last two dimensions of an array (or shape), as it is added, fill TPU tiles; f32[11008, 32, 16] is
    padded eightfold.
    """
    rows, columns = (1, 1, *x.shape)[-2:]
    rows, columns = (columns, rows) if _is_narrow(x) else (rows, columns)
    return len(x.shape) > 1 and columns % TPU_LANES == 0 and rows % (4 * TPU_SUBLANES // x.dtype.itemsize) == 0


def _is_narrow(x: Any) -> bool:
    """Whether rows of an array (or shape) are a part of the lanes, its columns not: laid out as they stand such rows
    are a program of megabytes.
    """
    return len(x.shape) > 1 and x.shape[-1] < TPU_LANES <= x.shape[-2]


def _tile_padding(size: int) -> int:
    """Entries that are added to a vector. There is always one at least: XLA would move the reshape that follows the sum
    before it, and so add in a shape that does not fill tiles; it does not move a slice.
    """
    tile = TPU_SUBLANES * TPU_LANES
    return tile - size % tile


def _sums_in_turn(arrays: list[Array], axis: Axis) -> list[Array]:
    """`lax.psum`, of about `IN_TURN` entries at a time.

    XLA for CPU makes all operands of an all-reduce before it begins. What the next one adds depends here on a sum of
    the one before, so that it is made in the same memory; not where that sum differs over more axes of the mesh, and
    would have what comes next differ over them, too. Small arrays take little memory, and compile faster as they are.
    """
    sums: list[Array] = []
    while len(sums) < len(arrays):
        rest = arrays[len(sums) :]
        held = list(itertools.accumulate(x.size for x in rest))
        now = rest[: 1 + sum(size < IN_TURN for size in held[:-1])]
        before = next((x for x in reversed(sums) if x.size), None)
        if before is not None and all(set(varying_axes(before)) <= set(varying_axes(x)) for x in now):
            ready = opaque_true(before)
            now = [jnp.where(ready, x, jnp.zeros((), x.dtype)) if x.size >= SMALL else x for x in now]
        sums += lax.psum(now, axis)
    return sums


def sum_scatter(x: Array, axis: Axis) -> Array:
    """sum over the workers of row j of each one's x [n, ...], at worker j; added in the dtype of x."""
    return lax.psum_scatter(varying(x, axis), axis, scatter_dimension=0) if axis_names(axis) else x[0]


def all_max(x: Array, axis: Axis) -> Array:
    """The largest over the workers, equal on all of them."""
    return lax.pmax(varying(x, axis), axis) if axis_names(axis) else x


def all_sum_words(words: Array, axis: Axis) -> Array:
    """Sum of uint32 words over the workers: of bits, where only one worker has any at each place."""
    return lax.psum(words, axis)


def send(x: Array, pairs: Sequence[tuple[int, int]], axis: Axis) -> Array:
    """x of worker a at worker b for each listed pair (a, b), zeros elsewhere. Only listed pairs cost bytes.

    Under vmap, where nothing is sent, only whole permutations are allowed: the pairs are completed
    to one, and what was not asked for is dropped.
    """
    if is_manual(axis):
        return lax.ppermute(x, axis, pairs)
    workers = range(axis_size(axis))
    targets = dict(pairs)
    free = sorted(set(workers) - set(targets.values()))
    asked = jnp.asarray([worker not in free for worker in workers])[axis_index(axis)]
    whole = [(worker, targets[worker] if worker in targets else free.pop()) for worker in workers]
    arrived = lax.ppermute(x, axis, whole)
    return jnp.where(asked, arrived, jnp.zeros_like(arrived))


def has_ragged() -> bool:
    """Whether the backend compiles `ragged_all_to_all` (XLA's CPU backend does not)."""
    return platform() in ("gpu", "tpu")


def ragged_all_to_all(words: Array, counts: Sequence[int], axis: Axis) -> Array:
    """The first counts[i] words of every worker i, one after the other: u32[sum(counts)] on all."""
    n, number = len(counts), axis_index(axis)
    sizes = jnp.asarray(counts, jnp.int32)
    starts = jnp.cumsum(sizes, dtype=jnp.int32) - sizes
    return lax.ragged_all_to_all(
        words,
        varying(jnp.zeros((sum(counts),), words.dtype), varying_axes(words)),
        varying(jnp.zeros((n,), jnp.int32), axis),
        jnp.full((n,), sizes[number]),
        jnp.full((n,), starts[number]),  # where my words belong, at every receiver
        varying(sizes, axis),
        axis_name=axis,
    )


# ------------------------------------------------------------------------------------------------
# All-to-all


def all_to_all_rows(rows: Array, axis: Axis) -> Array:
    """Row j goes to worker j: [n, m] by destination becomes [n, m] by origin. Unsigned words only.

    On TPUs each row fills whole lanes, and one of narrow words whole tiles, for which it is given a shape.
    """
    # Under vmap, what is equal on all workers would come out with a wrong shape: make it differ by type.
    rows = rows ^ (axis_index(axis) * 0).astype(rows.dtype)
    if platform() == "cpu" and jax.process_count() > 1:
        return _all_to_all_by_permutations(rows, axis)
    exchange = lambda x: lax.all_to_all(x, axis, split_axis=0, concat_axis=0, tiled=True)
    (n, size), width = rows.shape, rows.dtype.itemsize
    if platform() != "tpu":
        return exchange(rows)
    tiles = jnp.pad(rows, ((0, 0), (0, crossing_size(size, width, rows_from=NEVER) - size)))
    tiles = tiles.reshape(n, -1, TPU_LANES) if width < 4 else tiles
    return exchange(tiles).reshape(n, -1)[:, :size]


class Permutation(NamedTuple):
    """targets: worker i sends to targets[i], which is a permutation; parts: which part of what it has for that one."""

    targets: tuple[int, ...]
    parts: tuple[int, ...]


def permutation_schedule(workers: int) -> tuple[list[Permutation], int]:
    """Permutations by which every worker sends what it has for every other, cut into so many equal parts.

    For links on which two workers cannot well send to each other at the same time. Gloo, which joins processes on CPU,
    writes a message into a connection before it says through the same connection that it is ready to receive one: two
    workers that exchange messages do so one after the other, and their links are used half of the time. Here each
    worker sends to one other and receives from one other at a time, and, where that can be arranged, not from the same
    one. Of four processes on links of 100 Mbit/s, two shots of bf16 take 1.13 times what their bytes need, with gloo's
    all-to-all 1.45 times: `python -m experiments network --only exchange --methods lax-two-shot-bf16
    dense-bf16:two_shot --rates 100mbit`.

    Each permutation shifts by one distance. Of an even number of workers, the distance n / 2 pairs them up. Of four
    that would be one permutation in three: there every cycle through all of them is used, with half of the content.

    Returns:
        The permutations in their order, and the number of parts.

    >>> permutation_schedule(3)
    ([Permutation(targets=(1, 2, 0), parts=(0, 0, 0)), Permutation(targets=(2, 0, 1), parts=(0, 0, 0))], 1)
    >>> len(permutation_schedule(4)[0]), permutation_schedule(4)[1]
    (6, 2)
    """
    if workers != 4:
        shifts = [tuple((i + shift) % workers for i in range(workers)) for shift in range(1, workers)]
        return [Permutation(targets, (0,) * workers) for targets in shifts], 1
    result: list[Permutation] = []
    sent: dict[tuple[int, int], int] = {}
    for rest in itertools.permutations((1, 2, 3)):
        cycle = (0, *rest)
        after: dict[int, int] = dict(zip(cycle, (*rest, 0), strict=True))
        parts = []
        for i in range(4):
            parts.append(sent.get((i, after[i]), 0))
            sent[i, after[i]] = parts[-1] + 1
        result.append(Permutation(tuple(after[i] for i in range(4)), tuple(parts)))
    return result, 2


def _all_to_all_by_permutations(rows: Array, axis: Axis) -> Array:
    """The all-to-all of rows [n, m] by `permutation_schedule`, for the same bytes."""
    workers, number = axis_size(axis), axis_index(axis)
    schedule, parts = permutation_schedule(workers)
    size = rows.shape[1]
    pieces = jnp.pad(rows, ((0, 0), (0, -size % parts))).reshape(workers, parts, -1)
    arrived = [pieces[number, part] for part in range(parts)]
    places = [[[part if j == i else 0 for part in range(parts)] for j in range(workers)] for i in range(workers)]
    for place, step in enumerate(schedule, start=parts):
        piece = pieces[jnp.asarray(step.targets)[number], jnp.asarray(step.parts)[number]]
        # A step begins when the one before is over: the number of a worker is never negative, which XLA cannot know.
        piece = piece ^ (arrived[-1][:1] & (number >> 31).astype(piece.dtype))
        arrived.append(lax.ppermute(piece, axis, list(enumerate(step.targets))))
        for origin, (target, part) in enumerate(zip(*step, strict=True)):
            places[target][origin][part] = place
    return jnp.stack(arrived)[jnp.asarray(places)[number]].reshape(workers, -1)[:, :size]
