"""Everything in jaxcomp that names a `lax` collective: one array over one axis.

How the arrays of a payload are put together for a collective stands in `lanes`.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.arrays import bounded
from jaxcomp.backend import SparseSum, platform
from jaxcomp.backend_cpu import opaque_true
from jaxcomp.exchange.varying import Axis, axis_index, axis_names, axis_size, varying, varying_axes

__all__ = [
    "Permutation",
    "all_max",
    "all_sum_words",
    "all_to_all_rows",
    "exchanged_size",
    "fills_tiles",
    "gather",
    "gathered_size",
    "has_ragged",
    "permutation_schedule",
    "ragged_all_to_all",
    "send",
    "share_of",
    "sum_arrays",
    "sum_scatter",
    "summed_size",
    "whole_of",
]

Array = jax.Array


# XLA for TPU compiles a gather of anything else to an all-reduce of all n parts, at twice the bytes (libtpu 0.0.50).
TPU_LANES = 128
# TPUs keep the last two dimensions of an array in tiles, of 8 x 128 entries of 32 bits. Where they do not fill them,
# the padding crosses the network between slices, too. Entries of 8 bits that share a word lie in four different rows:
# [n, m] of them has four rows in the place of one.
TPU_SUBLANES = 8


def gather(x: Array, axis: Axis) -> Array:
    """[n, *x.shape], typed as equal on all workers where the tracing context knows such a type.

    Under `shard_map(check_vma=True)` only the form `to="invarying"` yields a value that the out
    spec P() accepts; under vmap and pmap that form is refused, and the plain one is typed so.
    """
    size, width, lead = x.shape[-1], x.dtype.itemsize, x.shape[:-1]
    extra = gathered_size(size, width) - size
    if extra:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, extra)])
    if platform() == "tpu" and width < 4 and size:
        x = x.reshape(*lead, -1, TPU_LANES)
    if set(axis_names(axis)) <= set(varying_axes(x)):
        rows = lax.all_gather(x, axis, to="invarying")
    else:
        rows = lax.all_gather(x, axis)
    rows = rows if x.shape[:-1] == lead else rows.reshape(-1, *lead, size + extra)
    return rows[..., :size]


def gathered_size(size: int, width: int) -> int:
    """How many entries cross in `gather` of so many, of `width` bytes each."""
    return size + -size % (TPU_LANES * max(1, 4 // width)) if platform() == "tpu" else size


def exchanged_size(size: int, width: int) -> int:
    """How many entries of a row of so many, of `width` bytes each, cross in `all_to_all_rows`."""
    return gathered_size(size, width) if width < 4 else size


def summed_size(arrays: Sequence[Any]) -> int:
    """How many entries cross in `sum_arrays` of arrays (or shapes) of one dtype, if all vary over the same axes."""
    if not _in_tiles():
        return sum(math.prod(x.shape) for x in arrays)
    sizes = [math.prod(x.shape) for x in arrays if not fills_tiles(x)]
    small = [size for size in sizes if size < SMALL]
    vectors = [size for size in sizes if size >= SMALL] + ([sum(small)] if small else [])
    return sum(math.prod(x.shape) for x in arrays if fills_tiles(x)) + sum(
        size + _tile_padding(size) for size in vectors
    )


SMALL = 2**16  # entries of an array that is worth a copy, if that saves messages
IN_TURN = 2**22  # entries of one all-reduce, about; more are added by several, one after the other


def sum_arrays(arrays: list[Array], axis: Axis) -> list[Array]:
    """Sums over the workers, in the dtypes of the arrays, by one all-reduce; on CPU by one for about `IN_TURN` entries.

    There large arrays are added in turn: what was made for one sum leaves its memory to the next. And among CPU
    processes small arrays are joined: gloo reduces each array of an all-reduce by itself, in 2 (n - 1) messages one
    after the other. On TPUs small arrays are joined, too, so that what crosses fills tiles.
    """
    tiles = _in_tiles()
    if platform() != "cpu" and not tiles:
        return lax.psum(arrays, axis)
    if not tiles and jax.process_count() == 1:
        return _sums_in_turn(arrays, axis)
    alike: dict[Any, list[int]] = {}
    for i, x in enumerate(arrays):
        alone = x.size >= SMALL or (tiles and fills_tiles(x))
        alike.setdefault(i if alone else (x.dtype, frozenset(varying_axes(x))), []).append(i)
    groups = list(alike.values())
    joined = [
        arrays[group[0]] if len(group) == 1 else jnp.concatenate([arrays[i].reshape(-1) for i in group])
        for group in groups
    ]
    totals = lax.psum([_filling_tiles(x) for x in joined], axis) if tiles else _sums_in_turn(joined, axis)
    sums: list[Any] = [None] * len(arrays)
    for group, total in zip(groups, totals, strict=True):
        start = 0
        for i in group:
            sums[i] = lax.slice_in_dim(total.reshape(-1), start, start + arrays[i].size).reshape(arrays[i].shape)
            start += arrays[i].size
    return sums


def _in_tiles() -> bool:
    """Whether arrays that are added are given a shape that fills the tiles of a TPU.

    Not where the compiler itself shards them over a mesh axis: to join two dimensions it would gather the whole.
    """
    mesh = jax.sharding.get_abstract_mesh()
    automatic = set(mesh.axis_names) - set(mesh.manual_axes)
    return platform() == "tpu" and all(mesh.shape[name] == 1 for name in automatic)


def fills_tiles(x: Any) -> bool:
    """Whether the last two dimensions of an array (or shape) fill TPU tiles; f32[11008, 32, 16] is padded eightfold."""
    rows, columns = (1, 1, *x.shape)[-2:]
    return len(x.shape) > 1 and columns % TPU_LANES == 0 and rows % (4 * TPU_SUBLANES // x.dtype.itemsize) == 0


def _filling_tiles(x: Array) -> Array:
    """x as it is if it fills tiles; else as one vector, padded to whole ones."""
    return x if fills_tiles(x) else jnp.pad(x.reshape(-1), (0, _tile_padding(x.size)))


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


def share_of(axis: Axis, weights: Any = None) -> float:
    """Weight of each message where it is added, if there are no weights: 2^-k, at most 1/n.

    1/n comes in two parts, this one and that of `whole_of`. Products with it are exact, so that sums are the same bit
    for bit wherever they are compiled, and none overflows.
    """
    return 1.0 if weights is not None else 0.5 ** (axis_size(axis) - 1).bit_length()


def whole_of(total: Any, axis: Axis, weights: Any = None) -> Any:
    """The mean, from a sum of such shares (an array or a `SparseSum`): times 2^k/n < 2, and saturated."""
    last = 1.0 if weights is not None else 1 / (axis_size(axis) * share_of(axis))
    if last == 1 or isinstance(total, SparseSum):  # which is saturated when it is made
        return total if last == 1 else total * last
    return bounded(total * last)


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
    if set(axis_names(axis)) <= set(getattr(jax.sharding.get_abstract_mesh(), "manual_axes", ())):
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

    On TPUs each row of narrow words is given a shape that fills tiles.
    """
    # Under vmap, what is equal on all workers would come out with a wrong shape: make it differ by type.
    rows = rows ^ (axis_index(axis) * 0).astype(rows.dtype)
    if platform() == "cpu" and jax.process_count() > 1:
        return _all_to_all_by_permutations(rows, axis)
    exchange = lambda x: lax.all_to_all(x, axis, split_axis=0, concat_axis=0, tiled=True)
    (n, size), width = rows.shape, rows.dtype.itemsize
    if platform() != "tpu" or width >= 4:
        return exchange(rows)
    tiles = jnp.pad(rows, ((0, 0), (0, exchanged_size(size, width) - size))).reshape(n, -1, TPU_LANES)
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
