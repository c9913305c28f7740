"""Vectors of many leaves that are never joined: gradients, added leaf by leaf to a memory; sums, made leaf by leaf.

Joining leaves is a pass that reads and one that writes, before anything is computed. A memory that is a vector already
needs neither: on CPU each leaf is added to its part of the memory, in the memory's place. So it is with a sum of sparse
messages, which would be a vector of zeros first, and be cut apart in the end: each large leaf is made by itself, from
the entries that lie in it.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from jaxcomp.arrays import bounded, fold, like_of, weighted
from jaxcomp.backend import platform
from jaxcomp.compiled import always, called, computed, in_place

__all__ = ["LONG", "Pieces", "SparseSum", "accumulated", "cut_apart", "end_to_end", "joined", "of_entries"]
__all__ += ["WithEntries", "with_entries"]

Array = jax.Array
Tree = Any
FEW = 16  # slices that may be kernels of their own
LONG = 2**18  # entries of a vector that is worth a branch, or a loop, of its own
LOOPS = 64  # leaves that are made by a loop of their own; each adds 0.02 s to compiling


class Pieces(NamedTuple):
    """leaves: [d_1], ..., [d_m] of any dtypes, end to end the first entries of a vector, whose others are zero."""

    leaves: tuple[Array, ...]


def joined(pieces: Pieces, like: Any) -> Array:
    """The vector of shape and dtype `like` that the pieces are."""
    leaves = list(pieces.leaves)
    rest = like.size - sum(leaf.size for leaf in leaves)
    leaves += [jnp.zeros((rest,), like.dtype)] if rest else []
    return end_to_end(leaves, like.dtype).reshape(like.shape)


def accumulated(one: Callable[..., Array], memory: Tree, grads: Tree, *others: Tree) -> Tree:
    """one(e, g, *others) for each entry, with shapes and dtypes of the memory: computed once, and in its place.

    Args:
        one: of entries, which are zero where all are zero. The same object each time: outside of any program it is
            compiled.
        memory, others: arrays. grads: arrays of the same shapes, or `Pieces` of them.
    """

    def each(e: Array, g: Any, *others: Array) -> Array:
        if not isinstance(g, Pieces):
            return in_place(_of_several(one), e, (g, *others))
        if platform() != "cpu" or not isinstance(e, Tracer) or not 0 < e.size < 2**31:
            return in_place(_of_several(one), e, (joined(g, e), *others))
        return _piece_by_piece(one, e, g, *others)

    return jax.tree.map(each, memory, grads, *others)


@functools.cache
def _of_several(one: Callable[..., Array]) -> Callable[..., Array]:
    return lambda e, x: one(e, *x)


@functools.partial(jax.jit, static_argnums=0)  # traced once for each size
def _with_piece(one: Callable[..., Array], memory: Array, start: Array, piece: Array, *others: Array) -> Array:
    there = lambda x: lax.dynamic_slice_in_dim(x, start, piece.size)
    now = one(there(memory), piece, *map(there, others))
    return lax.dynamic_update_slice_in_dim(memory, now, start, 0)


def _piece_by_piece(one: Callable[..., Array], memory: Array, pieces: Pieces, *others: Array) -> Array:
    @jax.custom_batching.custom_vmap
    def added(memory, pieces, others):
        leaves = [x for x in pieces.leaves if x.size]
        starts = _unknown(_starts([x.size for x in leaves]), leaves[0])
        after, others = computed(memory, starts[0]).reshape(-1), [x.reshape(-1) for x in others]
        for start, piece in zip(starts, leaves, strict=True):
            after = _with_piece(one, after, start, piece, *others)
        return after.reshape(memory.shape)

    @added.def_vmap
    def _(size, batched, *args):
        of = lambda memory, pieces, others: in_place(_of_several(one), memory, (joined(pieces, memory), *others))
        axes = jax.tree.map(lambda is_batched: 0 if is_batched else None, tuple(batched))
        return jax.vmap(of, axes, axis_size=size)(*args), True

    return added(memory, pieces, others)


# ------------------------------------------------------------------------------------------------
# End to end, and apart


def end_to_end(leaves: Sequence[Array], dtype: Any) -> Array:
    """Leaves of any shapes as one vector of a dtype; no entries for no leaves."""
    if len(leaves) == 1:
        return leaves[0].reshape(-1).astype(dtype)
    if not leaves:
        return jnp.zeros((0,), dtype)
    vectors = [lax.reshape(jnp.asarray(leaf, dtype), (leaf.size,)) for leaf in leaves if leaf.size]
    size = sum(leaf.size for leaf in leaves)
    if not 1 < len(vectors) < FEW or size < LONG or platform() != "cpu":
        return lax.concatenate(vectors, 0) if vectors else jnp.zeros((0,), dtype)
    # XLA for CPU fuses few leaves with what follows, entry by entry: ten times as slow. It fuses nothing into a branch.
    other = lambda *vectors: jnp.broadcast_to(sum(vector[0] for vector in vectors), (size,))
    return lax.cond(always(vectors[0]), lambda *vectors: lax.concatenate(vectors, 0), other, *vectors)


def cut_apart(vector: "Array | SparseSum", sizes: Sequence[int]) -> list[Array]:
    """Consecutive pieces of a vector, or of each row [..., d]; what is left of it is dropped."""
    if isinstance(vector, SparseSum):
        return _made_apart(vector, sizes)
    few = len(sizes) < FEW or not isinstance(vector, Tracer)
    if few or platform() != "cpu" or not 0 < vector.size < 2**31:
        static = zip(_starts(sizes), sizes, strict=True)
        return [lax.slice_in_dim(vector, start, start + size, axis=-1) for start, size in static]
    dynamic = zip(_unknown(_starts(sizes), vector), sizes, strict=True)
    return [lax.dynamic_slice_in_dim(vector, start, size, axis=-1) for start, size in dynamic]


def _starts(sizes: Sequence[int]) -> list[int]:
    return (np.cumsum(sizes, dtype=np.int64) - np.asarray(sizes, np.int64)).tolist()


def _unknown(starts: list[int], vector: Array) -> Sequence[Array]:
    """The same numbers, out of a condition that XLA cannot decide.

    On CPU it compiles every static slice of a long vector as a kernel of its own, 30 ms each. Slices whose starts it
    does not know are one kernel for each size.
    """
    constants = lambda numbers: lambda: tuple(jnp.asarray(number, jnp.int32) for number in numbers)
    return lax.cond(always(vector), constants(starts), constants([0] * len(starts)))


# ------------------------------------------------------------------------------------------------
# Sums of sparse messages


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SparseSum:
    """A vector [size] that is not made yet: factor times the sum of n messages of k entries each, added in their order.
    What the factor makes too large for the dtype is its largest number.

    indices: i32[n, k], ascending in each row, and behind them padding, at least `size`. values: f[n, k]. factor: f[],
    or None for one, which costs no pass.
    """

    indices: Array
    values: Array
    factor: Array | None
    size: int = dataclasses.field(metadata={"static": True})

    def __mul__(self, factor: float) -> "SparseSum":
        own = jnp.ones((), self.values.dtype) if self.factor is None else self.factor
        return dataclasses.replace(self, factor=own * factor)

    def scaled(self, total: Array) -> Array:
        """Entries of the sum, times the factor."""
        return total if self.factor is None else bounded(self.factor * total)

    def made(self) -> Array:
        """f[size]."""
        add = lambda total, message: total.at[message[0]].add(message[1], mode="drop", indices_are_sorted=True)
        like = jax.ShapeDtypeStruct((self.size,), self.values.dtype)
        return self.scaled(fold(add, like, (self.indices, self.values)))


@dataclasses.dataclass(frozen=True)
class WithEntries:
    """`accumulate` of a `base.Compressor`, and what it adds to zeros as entries that are not added up yet.

    entries: (payloads, weights, shared, like) -> the same as add(zeros, payloads, weights, shared), `SparseSum` in the
        place of vectors. A wrapper that puts another `accumulate` in this place has no entries, unless it says them.
    """

    add: Callable[..., Tree]
    entries: Callable[..., Tree]

    def __call__(self, total: Tree, payloads: Tree, weights: Tree, shared: Tree) -> Tree:
        return self.add(total, payloads, weights, shared)


def with_entries(add: Callable[..., Tree], entries: Callable[..., Tree], inner: Callable | None) -> Callable[..., Tree]:
    """An `accumulate`, `WithEntries` where that of the compressor inside is."""
    return WithEntries(add, entries) if isinstance(inner, WithEntries) else add


def of_entries(entries: Callable[..., tuple[Array, Array]], ascending: bool = True) -> tuple[Callable, Callable]:
    """`decompress` and `accumulate` of a `base.Compressor` of vectors, from the entries of one message.

    entries: (payload, shared, like) -> indices i32[k], behind them padding of `like.size`, and values [k].
    ascending: whether the indices are; if not, there is no `SparseSum`.
    """

    def decompress(payload: Tree, shared: Tree, like: jax.ShapeDtypeStruct) -> Array:
        indices, values = entries(payload, shared, like)
        zeros = jnp.zeros(like.shape, like.dtype)
        return zeros.at[indices].set(values.astype(like.dtype), mode="drop", indices_are_sorted=ascending)

    def with_weight(payload: Tree, weight: Array | None, shared: Tree, like: Any) -> tuple[Array, Array]:
        indices, values = entries(payload, shared, like)
        return indices, weighted(values.astype(like.dtype), weight)

    def accumulate(total: Any, payloads: Tree, weights: Tree, shared: Tree) -> Array:
        like = like_of(total)

        def add(total: Array, message: tuple[Tree, Tree]) -> Array:
            indices, values = with_weight(*message, shared, like)
            return total.at[indices].add(values, mode="drop", indices_are_sorted=ascending)

        return fold(add, total, (payloads, weights))

    def all_entries(payloads: Tree, weights: Tree, shared: Tree, like: jax.ShapeDtypeStruct) -> SparseSum:
        every = jax.vmap(lambda payload, weight: with_weight(payload, weight, shared, like))
        return SparseSum(*every(payloads, weights), None, like.size)

    return decompress, WithEntries(accumulate, all_entries) if ascending else accumulate


def _made_apart(found: SparseSum, sizes: Sequence[int]) -> list[Array]:
    """The pieces of the vector, which is never made. Leaves that are not large are cut out of one vector of them."""
    large = sorted(i for i in np.argsort(sizes, kind="stable")[::-1][:LOOPS].tolist() if sizes[i] >= LONG)
    if len(sizes) == 1 or not large or not isinstance(found.values, Tracer):
        return cut_apart(found.made(), sizes)
    rest = [i for i in range(len(sizes)) if i not in set(large)]
    starts, rest_sizes = _starts(sizes), [sizes[i] for i in rest]

    @jax.custom_batching.custom_vmap
    def apart(found):
        edges = jnp.asarray([*starts, sum(sizes)], jnp.int32)
        runs = _runs(found.indices, edges)
        zero = jnp.where(always(found.values), 0, 1).astype(found.values.dtype)
        entries, like = (found.indices.reshape(-1), found.values.reshape(-1)), lambda size: _like(size, found)
        made: list[Array] = [zero] * len(sizes)
        for i, number in zip(large, _unknown(large, found.values), strict=True):
            made[i] = called(_of_piece)(*entries, runs, edges, zero, number, like(sizes[i]))
        if rest:
            shifts = np.asarray(starts)[rest] - _starts(rest_sizes)
            pieces = jnp.asarray([rest, shifts], jnp.int32)
            together = _of_pieces(*entries, runs, zero, pieces, like(sum(rest_sizes)))
            for i, piece in zip(rest, cut_apart(together, rest_sizes), strict=True):
                made[i] = piece
        return tuple(map(found.scaled, made))

    @apart.def_vmap
    def _(size, batched, found):
        axes = jax.tree.map(lambda is_batched: 0 if is_batched else None, batched[0])
        out = jax.vmap(lambda found: tuple(cut_apart(found.made(), sizes)), (axes,), axis_size=size)(found)
        return out, jax.tree.map(lambda _: True, out)

    return list(apart(found))


def _like(size: int, found: SparseSum) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((size,), found.values.dtype)


class _Runs(NamedTuple):
    """Where the entries of each of m pieces are among those of n messages of k entries, end to end.

    first, count: i32[m], the first of them, and how many. following: i32[n k], the place of the next one of the piece.
    """

    first: Array
    count: Array
    following: Array


def _runs(indices: Array, edges: Array) -> _Runs:
    messages, entries = indices.shape
    bounds = jax.vmap(lambda row: jnp.searchsorted(row, edges).astype(jnp.int32))(indices)
    bounds += entries * jnp.arange(messages, dtype=jnp.int32)[:, None]
    begins, ends = bounds[:, :-1], bounds[:, 1:]

    def before(later, row):
        begin, end = row
        return jnp.where(end > begin, begin, later), later

    first, later = lax.scan(before, jnp.zeros_like(begins[0]), (begins, ends), reverse=True)
    last = jnp.where(ends > begins, ends - 1, indices.size)
    following = jnp.arange(1, indices.size + 1, dtype=jnp.int32)
    return _Runs(first, jnp.sum(ends - begins, 0), following.at[last].set(later, mode="drop"))


def _of_piece(indices, values, runs, edges, zero, number, like):
    """A piece, which begins at edges[number]. zero: f[], which XLA does not know."""
    return _added_up(indices, values, runs, number, _at(edges, number), jnp.full(like.shape, zero))


def _of_pieces(indices, values, runs, zero, pieces, like):
    """Several pieces end to end. pieces: i32[2, r], their numbers, and how much further on they begin in the sum."""

    def add(i, total):
        number, shift = pieces[:, i]
        return _added_up(indices, values, runs, number, shift, total)

    return lax.fori_loop(0, pieces.shape[1], add, jnp.full(like.shape, zero))


def _added_up(indices, values, runs, number, shift, total):
    """total, to which the entries of a piece are added, each at its index less the shift."""

    def add(_, carry):
        place, total = carry
        where = _at(indices, place) - shift
        now = (_at(total, where) + _at(values, place)).reshape(1)
        total = lax.dynamic_update_slice(total, now, (where,), allow_negative_indices=False)
        return _at(runs.following, place), total

    return lax.fori_loop(0, _at(runs.count, number), add, (_at(runs.first, number), total))[1]


def _at(x: Array, place: Array) -> Array:
    return lax.dynamic_index_in_dim(x, place, keepdims=False, allow_negative_indices=False)
