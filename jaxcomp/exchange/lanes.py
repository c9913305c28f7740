"""The arrays of a payload, joined into few lanes for a collective, and the bytes that this makes a device send.

Arrays of a payload are joined into one lane per width or fewer before they cross, as plain unsigned words: fewer
launches, and no backend widens a narrow float on the way (on CPU both `psum` and `all_gather` of bf16 are compiled to
f32). Which arrays share a lane is decided in `word_lanes` and `sum_lanes`, from shapes alone: the collectives pack by
it, and the functions that count bytes count by it.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.arrays import as_words, sum_rows, weighted
from jaxcomp.backend import cut_apart, side_by_side
from jaxcomp.exchange.collectives import all_to_all_rows, exchanged_size, gather, gathered_size, sum_arrays, summed_size
from jaxcomp.exchange.varying import Axis, axis_index, axis_names, axis_size, proven_equal, varying
from jaxcomp.floats import rounded_to
from jaxcomp.payloads import Leaves

__all__ = [
    "Lane",
    "all_gather",
    "all_sum",
    "all_to_all",
    "all_to_all_bytes",
    "buckets_of_arrays",
    "gather_bytes",
    "gathered",
    "sum_bytes",
    "sum_lanes",
    "summed",
    "word_lanes",
]

Array = jax.Array

# At most so many bytes of wide entries are split into the words of a narrow lane, to save another collective.
FEW_BYTES = 2**16
# An array of so many bytes crosses by itself: another collective costs less than putting it beside others, and cutting
# what arrives.
ALONE_BYTES = 2**23
# Narrow numbers that are summed at a time, or more in one array.
SOME_ENTRIES = 2**24


class Lane(NamedTuple):
    """Arrays that cross together, one after the other.

    places: their numbers in the flattened tree.
    sizes: entries of the lane that each of them fills.
    dtype: of the entries of the lane.
    bucket: number of the bucket.
    """

    places: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: Any
    bucket: int

    @property
    def size(self) -> int:
        return sum(self.sizes)

    @property
    def width(self) -> int:
        """Bytes of an entry."""
        return self.dtype.itemsize

    @property
    def starts(self) -> list[int]:
        return [sum(self.sizes[:i]) for i in range(len(self.sizes))]


def buckets_of_arrays(payload: Any, buckets: Sequence[int] | None) -> list[int] | None:
    """Bucket of each array of a payload of several vectors, from that of each vector; small leaves are in bucket 0."""
    if buckets is None or not (isinstance(payload, Leaves) or type(payload) is tuple):
        return None
    vectors = payload.leaves if isinstance(payload, Leaves) else payload
    dense = [0] * len(jax.tree.leaves(payload.dense)) if isinstance(payload, Leaves) else []
    return dense + [bucket for vector, bucket in zip(vectors, buckets, strict=True) for _ in jax.tree.leaves(vector)]


def word_lanes(tree: Any, buckets: Sequence[int] | None = None) -> list[Lane]:
    """Lanes of unsigned words, for collectives that only move bits: one for each bucket and width of entries.

    A few wide entries are split into the words of a narrower lane of their bucket, to save another collective. A very
    long array has a lane of its own.

    Args:
        tree: arrays or their shapes.
        buckets: number of the bucket of each array; None for a single bucket.
    """
    leaves = jax.tree.leaves(tree)
    width = lambda i: jnp.dtype(leaves[i].dtype).itemsize
    num_bytes = lambda places: sum(math.prod(leaves[i].shape) * width(i) for i in places)
    lanes = []
    for bucket, places in _grouped(range(len(leaves)), _number_of(buckets)):
        narrowest, *wider = [group for _, group in sorted(_grouped(places, width))]
        few = [group for group in wider if num_bytes(group) <= FEW_BYTES]
        merged = narrowest + [i for group in few for i in group]
        alone = [[i] for i in merged if num_bytes([i]) >= ALONE_BYTES]
        rest = [i for i in merged if [i] not in alone]
        for group in (*alone, *filter(None, [rest]), *(group for group in wider if group not in few)):
            word = min(map(width, group))
            sizes = tuple(num_bytes([i]) // word for i in group)
            lanes.append(Lane(tuple(group), sizes, jnp.dtype(f"uint{8 * word}"), bucket))
    return _in_order(lanes)


def sum_lanes(tree: Any, buckets: Sequence[int] | None = None) -> list[Lane]:
    """Lanes of numbers, for collectives that add: one for each bucket and dtype; of narrow ones several, if they are
    many, since what is on its way takes memory.
    """
    leaves, number = jax.tree.leaves(tree), _number_of(buckets)
    size, lanes = lambda i: math.prod(leaves[i].shape), []
    for (bucket, dtype), group in _grouped(range(len(leaves)), lambda i: (number(i), jnp.dtype(leaves[i].dtype))):
        for part in _parted(group, size, SOME_ENTRIES) if dtype.itemsize < 4 else [group]:
            lanes.append(Lane(tuple(part), tuple(map(size, part)), dtype, bucket))
    return _in_order(lanes)


def _parted(items: list[int], size: Callable[[int], int], most: int) -> list[list[int]]:
    """Items one after the other, in parts of about `most` in all."""
    parts, held = [[]], 0
    for item in items:
        if parts[-1] and held + size(item) > most:
            parts, held = [*parts, []], 0
        parts[-1].append(item)
        held += size(item)
    return parts


def _number_of(buckets: Sequence[int] | None) -> Callable[[int], int]:
    return lambda i: 0 if buckets is None else buckets[i]


def _grouped(items: Iterable[int], key: Callable[[int], Any]) -> list[tuple[Any, list[int]]]:
    groups: dict[Any, list[int]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.items())


def _in_order(lanes: list[Lane]) -> list[Lane]:
    """By the number of the bucket; bucket 0, of small leaves from everywhere, is the last to be ready."""
    return sorted(lanes, key=lambda lane: (lane.bucket == 0, lane.bucket))


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
    arrays = []
    for i, size, words in zip(lane.places, sizes, cut_apart(rows, sizes), strict=True):
        ratio = leaves[i].dtype.itemsize // lane.width
        words = words.reshape(len(rows), size // ratio, ratio) if ratio > 1 else words
        arrays.append(lax.bitcast_convert_type(words, leaves[i].dtype))
    return arrays


def all_gather(tree: Any, axis: Axis, replicas: tuple[str, ...] = (), buckets: Sequence[int] | None = None) -> Any:
    """Every worker's arrays, stacked on a leading axis of n, in the order of the axis index.

    One collective for each lane. Each worker contributes exactly the bytes of its arrays.

    Args:
        tree: this worker's arrays.
        axis: mapped axis, or None.
        replicas: mapped axes on which the arrays are equal: each device there sends one part of them, and then they
            send each other what arrived.
        buckets: number of the bucket of each array; None for a single bucket.
    """
    if not axis_names(axis):
        return jax.tree.map(lambda a: a[None], tree)
    leaves, structure = jax.tree.flatten(varying(tree, axis))
    gathered: list[Any] = [None] * len(leaves)
    before: Any = None
    for lane in word_lanes(leaves, buckets):
        words = _pack(lane, leaves)
        if lane.size:
            words = words if buckets is None else _after(words, before)
            before = rows = _shared_out(words, replicas, lambda part: gather(part, axis))
        else:
            rows = proven_equal(jnp.broadcast_to(words, (axis_size(axis), 0)), axis)
        for i, array in zip(lane.places, _unpack(lane, rows, leaves, lane.sizes), strict=True):
            gathered[i] = array.reshape(len(rows), *leaves[i].shape)
    return jax.tree.unflatten(structure, gathered)


def gathered(
    payload: Any, axis: Axis, replicas: tuple[str, ...] = (), buckets: Sequence[int] | None = None
) -> tuple[Any, float]:
    """`all_gather` of a payload, and the bytes that a device sends for it. buckets: number of that of each vector."""
    buckets = buckets_of_arrays(payload, buckets)
    return all_gather(payload, axis, replicas, buckets), gather_bytes(payload, axis, replicas, buckets)


def gather_bytes(tree: Any, axis: Axis, replicas: tuple[str, ...] = (), buckets: Sequence[int] | None = None) -> float:
    """Bytes that a device sends in `all_gather`: (n - 1) times its part; replicas then send on the n parts."""
    workers, devices = axis_size(axis), axis_size(replicas)
    sent = 0
    for lane in word_lanes(tree, buckets):
        part = gathered_size(-(-lane.size // devices), lane.width)
        sent += part * lane.width * ((workers - 1) + (devices - 1) * workers)
    return float(sent)


def _shared_out(lane: Array, replicas: tuple[str, ...], exchange: Callable[[Array], Array]) -> Array:
    """exchange(lane), [m] -> [..., m], where each replica does one part of the lane."""
    devices = axis_size(replicas)
    if devices == 1:
        return exchange(lane)
    size = -(-lane.size // devices)
    padded = jnp.pad(lane, (0, size * devices - lane.size))
    start = axis_index(replicas) * size
    parts = gather(exchange(lax.dynamic_slice_in_dim(padded, start, size)), replicas)
    whole = jnp.moveaxis(parts, 0, -2)
    return whole.reshape(*whole.shape[:-2], size * devices)[..., : lane.size]


def all_to_all(tree: Any, axis: Axis) -> Any:
    """Row j of every array goes to worker j: [n, ...] by destination becomes [n, ...] by origin."""
    if not axis_names(axis):
        return tree
    leaves, structure = jax.tree.flatten(varying(tree, axis))
    workers = axis_size(axis)
    arrived: list[Any] = [None] * len(leaves)
    for lane in word_lanes(leaves):
        rows = _pack(lane, leaves, (workers,))
        rows = all_to_all_rows(rows, axis) if lane.size else rows
        sizes = [size // workers for size in lane.sizes]
        for i, array in zip(lane.places, _unpack(lane, rows, leaves, sizes), strict=True):
            arrived[i] = array.reshape(leaves[i].shape)
    return jax.tree.unflatten(structure, arrived)


def all_to_all_bytes(tree: Any, axis: Axis) -> float:
    """Bytes that a device sends in `all_to_all`: all rows but its own."""
    workers = axis_size(axis)
    rows = sum(exchanged_size(lane.size // workers, lane.width) * lane.width for lane in word_lanes(tree))
    return float((workers - 1) * rows)


# ------------------------------------------------------------------------------------------------
# Sums


def all_sum(
    tree: Any,
    axis: Axis,
    weights: Array | None = None,
    replicas: tuple[str, ...] = (),
    buckets: Sequence[int] | None = None,
    exact: bool = False,
    wide: Any = jnp.float32,
    share: float = 1.0,
) -> Any:
    """sum_j weights_j x_j over the workers of each float array, equal on all of them.

    f32 and f64 use one all-reduce. Narrow floats (16 bits) would be added in their own precision, or be widened on the
    wire, depending on the backend; they are summed in two steps instead: every worker gets one n-th of the entries from
    all (all-to-all), adds them in `wide`, rounds once, and sends its part to all (all-gather): the same bytes as an
    all-reduce of 16 bits. What is rounded is the mean, so it cannot overflow; the sum comes out in `wide`. Algorithms
    with a memory of what was sent need the unrounded sum: with `exact` the second step brings the mean in `wide`.

    Args:
        tree: this worker's arrays.
        axis: mapped axis, or None.
        weights: [n], of all workers, with sum one; None for `share`, a power of two, for each.
        replicas, buckets: as for `all_gather`.
        exact: nothing is rounded to less than `wide`.
        wide: f32 or f64, in which narrow floats are added.
    """
    if not axis_names(axis):
        return tree if weights is None else jax.tree.map(lambda a: weighted(a, weights[0]), tree)
    leaves, structure = jax.tree.flatten(varying(tree, axis))
    mine = weights[axis_index(axis)] if weights is not None else jnp.asarray(share, wide) if share != 1 else None
    summed: list[Any] = [None] * len(leaves)
    before: Any = None
    for lane in sum_lanes(leaves, buckets):
        parts = [leaves[i] for i in lane.places]
        parts = parts if buckets is None else _after(parts, before)
        narrow = _is_narrow(lane)
        if lane.size == 0:
            totals = [jnp.zeros(part.shape, wide if narrow else lane.dtype) for part in parts]
        elif not narrow and axis_size(replicas) == 1:
            totals = sum_arrays([weighted(part, mine) for part in parts], axis)
        else:
            if narrow:  # as words, which XLA for CPU moves as they are: numbers of 16 bits it would widen before
                lane, kind = lane._replace(dtype=jnp.dtype(f"uint{8 * lane.width}")), lane.dtype
                add = lambda words: _mean_in_two_steps(words, kind, axis, weights, exact, wide)  # noqa: B023
            else:
                add = lambda part: sum_arrays([weighted(part, mine)], axis)[0]
            pieces = cut_apart(
                _shared_out(_pack(lane, dict(zip(lane.places, parts, strict=True))), replicas, add), lane.sizes
            )
            if narrow:
                scale = axis_size(axis) * share if weights is None else 1
                numbers = lambda words: lax.bitcast_convert_type(words, wide if exact else kind)  # noqa: B023
                pieces = [numbers(piece).astype(wide) * scale for piece in pieces]
            totals = [piece.reshape(part.shape) for piece, part in zip(pieces, parts, strict=True)]
        before = totals if lane.size else before
        for i, total in zip(lane.places, totals, strict=True):
            summed[i] = total
    return jax.tree.unflatten(structure, summed)


def summed(
    payload: Any,
    axis: Axis,
    weights: Array | None = None,
    replicas: tuple[str, ...] = (),
    buckets: Sequence[int] | None = None,
    exact: bool = False,
    wide: Any = jnp.float32,
    share: float = 1.0,
) -> tuple[Any, float]:
    """`all_sum` of a payload, and the bytes that a device sends for it. buckets: number of that of each vector."""
    buckets = buckets_of_arrays(payload, buckets)
    total = all_sum(payload, axis, weights, replicas, buckets, exact, wide, share)
    return total, sum_bytes(payload, axis, replicas, buckets, exact, wide)


def sum_bytes(
    tree: Any,
    axis: Axis,
    replicas: tuple[str, ...] = (),
    buckets: Sequence[int] | None = None,
    exact: bool = False,
    wide: Any = jnp.float32,
) -> float:
    """Bytes that a device sends in `all_sum`: (n - 1) / n of its part twice; r replicas then send the sum r - 1 times.

    Exact sums of narrow floats are `wide`, and so replicas send each other these.
    """
    workers, devices, whole = axis_size(axis), axis_size(replicas), jnp.dtype(wide).itemsize
    leaves, sent = jax.tree.leaves(tree), 0.0
    for lane in sum_lanes(tree, buckets):
        part = -(-lane.size // devices)
        if _is_narrow(lane):
            chunk, width = -(-part // workers), whole if exact else lane.width
            row = exchanged_size(chunk, lane.width) * lane.width
            sent += (workers - 1) * (row + gathered_size(chunk, width) * width)
        else:
            width, one = lane.width, [jax.ShapeDtypeStruct((part,), lane.dtype)]
            added = summed_size([leaves[i] for i in lane.places] if devices == 1 else one)
            sent += 2 * (workers - 1) / workers * added * width
        sent += (devices - 1) * gathered_size(part, width) * width
    return sent


def _is_narrow(lane: Lane) -> bool:
    return lane.width < 4


def _mean_in_two_steps(words: Array, kind: Any, axis: Axis, weights: Array | None, exact: bool, wide: Any) -> Array:
    """Words of the mean of numbers of a kind, from their words: of the same kind, or `wide` if exact."""
    workers, size = axis_size(axis), words.size
    rows = all_to_all_rows(jnp.pad(words, (0, -size % workers)).reshape(workers, -1), axis)
    rows = lax.bitcast_convert_type(rows, kind).astype(wide)
    mean = sum_rows(rows) / workers if weights is None else sum_rows(rows * weights.astype(wide)[:, None])
    return gather(as_words(mean if exact else rounded_to(mean, kind)), axis).reshape(-1)[:size]
