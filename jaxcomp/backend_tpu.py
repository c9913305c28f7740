"""Operations that XLA for TPUs needs in another form than everybody else, under the names of `backend`, which chooses.

A TPU keeps arrays in rows of 128 lanes. XLA moves numbers between lanes, and between lanes and rows, by copies: what
was a reshape elsewhere may cost more than the arithmetic. So numbers stay in their lanes here, and what belongs to
several of them is transposed while it is small.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp import backend_tpu_kernels
from jaxcomp.arrays import is_shapes
from jaxcomp.backend_cpu import starts_of
from jaxcomp.backend_tpu_kernels import TILE

__all__ = [
    "LANES",
    "added_by_leaf",
    "along_rows",
    "cut_apart",
    "flattened",
    "in_rows",
    "leaves_joined",
    "of_columns",
    "of_short_rows",
    "over_rows",
    "rows_times_square",
    "running",
    "running_in_rows",
    "sorted_together",
    "to_columns",
    "to_short_rows",
    "zeros_if_shape",
]

Array = jax.Array
Tree = Any
LANES = 128  # an array with a shorter last axis is padded to them in memory
FEW = 8  # short rows side by side in a row of lanes, each of which is another choice for every entry
SORTED = 2**22  # entries of rows that are sorted at once
SHAPED = 2**22  # entries of messages that are given their shape one after the other
ON_CHIP = 2**24  # entries of f32 that the memory on the chip (128 MiB on a v5e) holds twice


def to_columns(x: Array, length: int) -> Array:
    """A vector in columns of so many entries, a multiple of the lanes: [length, size / length]."""
    return jnp.moveaxis(x.reshape(-1, length // LANES, LANES), 0, -1).reshape(length, -1)


def of_columns(columns: Array) -> Array:
    """Inverse of `to_columns`, as an array."""
    rows = jnp.moveaxis(columns.reshape(-1, LANES, columns.shape[1]), -1, 0)
    return lax.optimization_barrier(rows.reshape(-1))


def of_short_rows(of: Callable[[Array], Tree], x: Array, length: int) -> Tree:
    """Rows that are a part of the lanes stand in columns: an axis of their length would be padded to the lanes."""
    if x.size and length in (2, 4):
        return _of_very_short_rows(of, x, length)
    if not x.size or not _is_short(length):
        return of(x.reshape(x.size // max(length, 1), length))
    whole = x.size // (length * LANES) * LANES  # rows
    columns = to_columns(lax.optimization_barrier(x[: whole * length]), LANES * length).reshape(LANES, length, -1)
    numbers = jax.vmap(of, in_axes=-1, out_axes=-1)(columns)  # of `LANES` rows in turn
    rest = of(x[whole * length :].reshape(-1, length))
    return jax.tree.map(lambda each, more: jnp.concatenate([each.T.reshape(-1), more]), numbers, rest)


def _of_very_short_rows(of: Callable[[Array], Tree], x: Array, length: int) -> Tree:
    """Rows of lanes are turned, and so are the numbers of the rows that stood side by side in them. Turned once, or XLA
    takes what is cut out of the columns out of the lanes; and filled up, or it lays all rows out for those of the rest.
    """
    lanes = jnp.pad(x, (0, -x.size % LANES)).reshape(-1, LANES)
    columns = lax.optimization_barrier(lax.optimization_barrier(lanes).T)
    numbers = jax.vmap(of, in_axes=-1, out_axes=-1)(columns.reshape(LANES // length, length, -1))
    return jax.tree.map(lambda each: _end_to_end(each)[: x.size // length], numbers)


def to_short_rows(each: Array, length: int) -> Array:
    """The numbers are turned into those of rows of lanes first, and each row takes its own in the loop that reads them:
    broadcast to all entries at once they would be an array in another order, and copied. Where many short rows stand
    in a row of lanes the entries are made in columns.
    """
    if each.size and _is_short(length):
        return (_side_by_side if LANES // length <= FEW else _by_columns)(each, length)
    count = length // LANES
    if not each.size or length % LANES or LANES % count:
        return jnp.broadcast_to(each[:, None], (each.size, length)).reshape(-1)
    few = LANES // count
    columns = jnp.pad(each, (0, -each.size % few)).reshape(-1, few).T
    columns = jnp.broadcast_to(columns[:, None], (few, count, columns.shape[1]))
    return _in_lanes(columns.reshape(LANES, -1).T.reshape(-1)[: each.size * count]).reshape(-1)


def _by_columns(each: Array, length: int) -> Array:
    """Entries that stand one below the other are turned into rows."""
    rows = jnp.pad(each, (0, -each.size % LANES)).reshape(-1, LANES)
    columns = jnp.broadcast_to(rows.T[:, None], (LANES, length, rows.shape[0]))
    return of_columns(columns.reshape(LANES * length, -1))[: each.size * length]


def _side_by_side(each: Array, length: int) -> Array:
    """Each of a few rows that stand side by side in the lanes takes its number there."""
    few, count = LANES // length, -(-each.size * length // LANES)
    columns = jnp.pad(each, (0, -each.size % LANES)).reshape(-1, LANES).T.reshape(length, few, -1)
    first, *others = (_in_lanes(_end_to_end(columns[:, i])[:count]) for i in range(few))
    place = lax.broadcasted_iota(jnp.int32, first.shape, 1) // length
    for i, other in enumerate(others, 1):
        first = jnp.where(place == i, other, first)
    return first.reshape(-1)[: each.size * length]


def rows_times_square(x: Array, square: Array) -> Array:
    """Takes as many short rows as fill the lanes for one, with the matrix as often on the diagonal of a larger one."""
    length = len(square)
    few = LANES // length if _is_short(length) else 1
    whole = jnp.pad(x, (0, -x.size % (few * length))).reshape(-1, few * length)
    return jnp.matmul(whole, jnp.kron(jnp.eye(few, dtype=x.dtype), square), precision="highest").reshape(-1)[: x.size]


def flattened(rows: Array) -> Array:
    """Short rows are turned: as a reshape they are a program of megabytes, most of all of 8 and 16 bits."""
    if not rows.size or not _is_short(rows.shape[1]):
        return rows.reshape(-1)
    return _end_to_end(rows.T)


def _end_to_end(columns: Array) -> Array:
    """Short columns one after the other, [m, b] -> [b m]: of those that will share a row of lanes one stands below the
    other, and they are turned.
    """
    length, count = columns.shape
    few = LANES // length
    below = jnp.moveaxis(jnp.pad(columns, ((0, 0), (0, -count % few))).reshape(length, -1, few), 2, 0)
    return below.reshape(LANES, -1).T.reshape(-1)[: count * length]


def running_in_rows(join: Callable[[Array, Array], Array], x: Array, length: int) -> Array:
    """Rows of lanes are turned into columns, in which a few short rows stand one below the other."""
    if not x.size:
        return x
    if not _is_short(length):
        return running(join, x.reshape(-1, length)).reshape(-1)
    columns = jnp.pad(x, (0, -x.size % LANES)).reshape(-1, LANES).T.reshape(LANES // length, length, -1)
    each = jax.vmap(jax.vmap(functools.partial(running, join)), in_axes=-1, out_axes=-1)
    return each(lax.optimization_barrier(columns)).reshape(LANES, -1).T.reshape(-1)[: x.size]


def _in_lanes(each: Array) -> Array:
    """A number of each row of lanes, in all of them: [m] -> [m, LANES]."""
    return jnp.broadcast_to(lax.optimization_barrier(each)[:, None], (each.size, LANES))


def _is_short(length: int) -> bool:
    """Whether a few whole rows fill the lanes; of very short ones the program would be long."""
    return LANES // 16 <= length < LANES and LANES % length == 0


def along_rows(reduce: Callable[..., Array], rows: Array) -> Array:
    """Each row of lanes by itself, then, in columns, those that belong together."""
    count, length = rows.shape
    several = length // LANES
    if several < 2 or length % LANES or LANES % several:
        return reduce(rows, axis=-1)
    each = lax.optimization_barrier(reduce(rows.reshape(-1, LANES), axis=-1))
    columns = jnp.pad(each, (0, -each.size % LANES)).reshape(-1, LANES).T
    return reduce(columns.reshape(LANES // several, several, -1), axis=1).T.reshape(-1)[:count]


@functools.partial(jax.jit, static_argnums=0)  # once in a program for each shape
def running(join: Callable[[Array, Array], Array], x: Array) -> Array:
    """Within rows that fill the lanes by doubling the distance, and of the ends of these rows likewise.

    XLA's own running sum of 655,808 integers is a program that takes a minute to compile (v5e); this one takes 1.6 s.
    """
    size, least = x.shape[-1], jnp.asarray(0 if join is jnp.add else jnp.iinfo(x.dtype).min, x.dtype)
    moved = lambda x, low, high: lax.pad(x, least, [(0, 0, 0)] * (x.ndim - 1) + [(low, high, 0)])
    if size > LANES:
        ends = running(join, moved(x, 0, -size % LANES).reshape(*x.shape[:-1], -1, LANES))
        before = moved(running(join, ends[..., -1]), 1, -1)
        return join(ends, before[..., None]).reshape(*x.shape[:-1], -1)[..., :size]
    for distance in (1 << i for i in range(max(size - 1, 0).bit_length())):
        x = join(x, moved(x, distance, -distance))
    return x


def sorted_together(keys: Array, *others: Array) -> tuple[Array, ...]:
    """Vectors in the order of the first, of integers, and behind them its largest number up to a power of two: a sort
    of any other length is twice the program, which takes seconds to compile.
    """
    rest = (1 << max(keys.size - 1, 0).bit_length()) - keys.size
    keys = jnp.pad(keys, (0, rest), constant_values=jnp.iinfo(keys.dtype).max)
    return tuple(lax.sort((keys, *(jnp.pad(x, (0, rest)) for x in others)), num_keys=1, is_stable=False))


def over_rows(function: Callable[..., Tree], *rows: Tree, length: int) -> Tree:
    """Over some rows at a time (`SORTED`): to sort them takes six times their memory. The last ones overlap with those
    before them: for a rest by itself all rows would be laid out a second time.
    """
    count, most = jax.tree.leaves(rows)[0].shape[0], max(1, SORTED // max(length, 1))
    if count <= most:
        return jax.vmap(function)(*rows)
    times = -(-count // most)
    some = lambda start: jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, start, most), rows)
    starts = jnp.minimum(lax.iota(jnp.int32, times) * most, count - most)
    found = lax.map(lambda start: jax.vmap(function)(*some(start)), starts)
    whole = lambda a: a[:-1].reshape(-1, *a.shape[2:])
    return jax.tree.map(lambda a: jnp.concatenate([whole(a), a[-1, times * most - count :]]), found)


def cut_apart(vector: Array, sizes: Sequence[int], shapes: Sequence[tuple[int, ...]] = ()) -> list[Array]:
    """Columns of [n, m] are cut out of its rows of lanes: XLA would lay out all of the n side by side for it. And a
    long vector in rows of each length that leaves have, to take them from there: so a leaf is cut out before it has its
    shape, and has that before the next one is cut out, or all would be there in both forms.
    """
    starts = list(zip(starts_of(sizes), sizes, strict=True))
    if vector.ndim == 2 and vector.shape[1] % LANES == 0:
        rows = lax.optimization_barrier(in_rows(vector))
        pieces = [_columns(rows, start, start + size) for start, size in starts]
        return list(map(_each_shaped, pieces, shapes)) if shapes else pieces
    if vector.ndim > 1:
        pieces = [lax.slice_in_dim(vector, start, start + size, axis=-1) for start, size in starts]
        return list(map(_each_shaped, pieces, shapes)) if shapes else pieces
    if not shapes:
        return lax.optimization_barrier([lax.slice_in_dim(vector, start, start + size) for start, size in starts])
    leaves = []
    for (start, size), shape in zip(starts, shapes, strict=True):
        piece = lax.optimization_barrier(lax.slice_in_dim(vector, start, start + size))
        leaf, vector = lax.optimization_barrier((lax.reshape(piece, shape), vector))
        leaves.append(leaf)
    return leaves


def _each_shaped(messages: Array, shape: tuple[int, ...]) -> Array:
    """One message after the other, where rows do not fill the lanes: what begins at another lane in each row is shifted
    by a program that is as long as there are rows. Not many entries, which would be held twice.
    """
    if len(shape) < 2 or shape[-1] % LANES == 0 or messages.size > SHAPED:
        return messages.reshape(len(messages), *shape)
    return lax.map(lambda message: message.reshape(shape), messages)


def _columns(rows: Array, start: int, end: int) -> Array:
    first, last = start // LANES, -(-end // LANES)
    part = rows[:, first:last].reshape(len(rows), -1)
    return part[:, start - first * LANES : end - first * LANES]


def in_rows(messages: Array) -> Array:
    """[n, ...] as [n, m, LANES], where each of the n is a run of memory; as it is where it does not fill the rows."""
    size = math.prod(messages.shape[1:])
    return messages.reshape(len(messages), size // LANES, LANES) if size % LANES == 0 else messages


def zeros_if_shape(total: Tree, messages: Tree) -> Tree:
    """The zeros of short vectors are made once the messages are there, or those of all leaves would be there before any
    message is. Those of a longer vector would be a pass.
    """
    if not is_shapes(total):
        return total
    zero = jnp.zeros(())
    if max(leaf.size for leaf in jax.tree.leaves(total)) <= ON_CHIP:
        zero, _ = lax.optimization_barrier((zero, messages))
    return jax.tree.map(lambda leaf: jnp.full(leaf.shape, zero.astype(leaf.dtype)), total)


def added_by_leaf(
    one: Callable[..., Array], memory: Array, leaves: Sequence[Array], *others: Array, kernels: bool
) -> Array:
    """Each leaf to its part of the memory, in its place. Where a part begins XLA does not know: so leaves of one shape
    are one kernel to compile, where each would be one of its own, and all joined, and then added, a vector more.

    kernels: whether leaves go through `backend_tpu_kernels` where these take them.
    """
    after, leaves = lax.optimization_barrier(memory.reshape(-1)), [leaf for leaf in leaves if leaf.size]
    there, others = _parts(leaves), tuple(x.reshape(-1) for x in others)
    few = _rows_at_a_time(leaves, after) if kernels else [None] * len(leaves)
    for start, leaf, some in zip(there, leaves, few, strict=True):
        if some:
            after = backend_tpu_kernels.into_vector(one, some, after.size, start // TILE, leaf, (after, *others))
            continue
        part, *rest = (lax.dynamic_slice_in_dim(x, start, leaf.size) for x in (after, *others))
        now = one(part, leaf.reshape(-1).astype(memory.dtype), *rest)
        after = lax.dynamic_update_slice_in_dim(after, now, start, 0)
    return after.reshape(memory.shape)


def leaves_joined(leaves: Sequence[Array], dtype: Any) -> Array | None:
    """Leaves end to end, each written into its part, at first those that kernels take; None where they take none."""
    like = jax.ShapeDtypeStruct((sum(leaf.size for leaf in leaves),), dtype)
    if like.size >= 2**31:  # which its numbers cannot tell
        return None
    parts = list(zip(_parts(leaves), leaves, _rows_at_a_time(leaves, like), strict=True))
    whole = None
    for start, leaf, few in parts:
        if few:
            before = () if whole is None else (whole,)
            whole = backend_tpu_kernels.into_vector(_second, few, like.size, start // TILE, leaf, before)
    for start, leaf, few in parts:
        if whole is not None and not few:
            whole = lax.dynamic_update_slice_in_dim(whole, leaf.reshape(-1).astype(dtype), start, 0)
    return whole


def _second(_: Array, entries: Array) -> Array:
    return entries


def _parts(leaves: Sequence[Array]) -> list[Array]:
    """The beginnings of the parts of a vector, which XLA does not know."""
    starts = lax.optimization_barrier(jnp.asarray(starts_of([leaf.size for leaf in leaves]), jnp.int32))
    return [starts[i] for i in range(len(leaves))]


def _rows_at_a_time(leaves: Sequence[Array], vector: Any) -> list[int | None]:
    """`backend_tpu_kernels.rows_of_leaf` of each leaf, as a part of a vector that begins with a tile."""
    starts = starts_of([leaf.size for leaf in leaves])
    fits = lambda start: not (start % TILE or vector.size % TILE)
    each = zip(starts, leaves, strict=True)
    return [backend_tpu_kernels.rows_of_leaf(leaf, vector.dtype) if fits(start) else None for start, leaf in each]
