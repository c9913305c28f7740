"""Operations that XLA for CPU needs in another form than everybody else, under the names of `backend`, which chooses.

XLA for CPU drops `lax.optimization_barrier` before it fuses and orders what it computes, so that each reader of a value
may compute it again, within its own loop. It keeps a condition that it does not know to hold always, a loop of one
step, and a call that says that it is not to be inlined: of these the forms here are made.
"""

import contextlib
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

from jaxcomp.arrays import finite, is_shapes, wide, zeros_like

__all__ = [
    "FEW",
    "LONG",
    "added_once",
    "all_finite",
    "calls",
    "computed_once",
    "concatenated",
    "cut_apart",
    "in_parts",
    "in_place",
    "in_tiles",
    "largest_finite",
    "made_apart",
    "opaque_true",
    "piece_by_piece",
    "side_by_side",
    "starts_of",
    "unless_mapped",
    "zeros_after",
]

Array = jax.Array
Tree = Any
FEW = 16  # slices that may be kernels of their own
LONG = 2**18  # entries of a vector that is worth a branch, or a loop, of its own
LOOPS = 64  # leaves that are made by a loop of their own; each adds 0.02 s to compiling
ROWS = 2048  # numbers that slow forms make at a time


def opaque_true(x: Array) -> Array:
    """bool[], true whatever is in x (one entry at least), which XLA does not know."""
    first = x.reshape(-1)[0].astype(jnp.float32)
    return (first <= jnp.inf) | jnp.isnan(first)


def unless_mapped(function: Callable[..., Tree], of_row: Callable[..., Tree], then: Any = None) -> Callable[..., Tree]:
    """The function; under vmap `jax.vmap(of_row)` in its place, or what `then` makes of that."""
    once = jax.custom_batching.custom_vmap(function)

    @once.def_vmap
    def rule(size, batched, *args):
        flags, structure = jax.tree.flatten(tuple(batched))
        each = jax.vmap(of_row, structure.unflatten([0 if flag else None for flag in flags]), axis_size=size)
        leaves, structure = jax.tree.flatten((each if then is None else then(each))(*args))
        return structure.unflatten(leaves), structure.unflatten([True] * len(leaves))

    return once


# ------------------------------------------------------------------------------------------------
# What is computed once, in place, or compiled once


def computed_once(function: Callable[..., Tree], *args: Any) -> Tree:
    """XLA for CPU would compute args within every loop that reads them, and then find their places entry by entry."""

    def made(*args):
        shapes = jax.eval_shape(function, *args)

        def other(*args):
            """Arrays that nobody sees, typed as differing over the same axes of a mesh."""
            one = jnp.asarray(sum(a.reshape(-1)[0].astype(jnp.float32) for a in jax.tree.leaves(args)))
            return jax.tree.map(lambda a: jnp.full(a.shape, one.astype(a.dtype)), shapes)

        return lax.cond(opaque_true(jax.tree.leaves(args)[0]), function, other, *args)

    return unless_mapped(made, function, lambda each: functools.partial(computed_once, each))(*args)


def in_place(function: Callable[..., Tree], memory: Tree, *x: Tree) -> Tree:
    """XLA for CPU would compute what several passes read again in each of them, and keep its terms for that. A loop of
    one step writes it where the memory was, if that is not read any more (a donated state, or zeros made for it), and
    everything else reads it from there.
    """
    # What the function closes over must be an argument: custom_vmap refuses what a further vmap would map.
    traced, shape = jax.make_jaxpr(function, return_shape=True)(memory, *x)
    # Apart: the rule for vmap outlives the trace that the constants are of. From JAX 0.12 on a program holds them, and
    # without them they are its first arguments.
    jaxpr, consts, holds = traced.jaxpr, traced.consts, hasattr(traced.jaxpr, "with_consts")
    jaxpr = jaxpr.with_consts(()) if holds else jaxpr  # pyright: ignore[reportAttributeAccessIssue]

    def of(consts, memory, x):
        first = ((), *consts) if holds else (consts,)
        return jax.core.eval_jaxpr(jaxpr, *first, *memory, *x)  # pyright: ignore[reportAttributeAccessIssue]

    def once(consts, memory, x):
        steps = jnp.where(opaque_true(next(a for a in x if a.size)), 1, 0)

        def step(carry):
            i, memory, x = carry
            # What depends on x alone would be computed before the loop, into an array of its own.
            now = [jnp.where(i < steps, a, jnp.zeros((), a.dtype)) for a in x]
            return i + 1, of(consts, memory, now), x

        return lax.while_loop(lambda carry: carry[0] < steps, step, (jnp.zeros((), jnp.int32), memory, x))[1]

    after = unless_mapped(once, of)(consts, jax.tree.leaves(memory), jax.tree.leaves(x))
    return jax.tree.unflatten(jax.tree.structure(shape), after)


def calls(*, inlined: bool) -> contextlib.AbstractContextManager[Any]:
    """Calls made inside: XLA for CPU leaves those that are not inlined in the program, with the same kernels in each,
    and fuses them with nothing before or after. Either is said, since vmap and grad would forget None.
    """
    return set_xla_metadata(inlineable="true" if inlined else "false")


def zeros_after(tree: Tree, like: Tree) -> Tree:
    """Zeros, made once the arrays of a tree are there: earlier they would only take memory."""
    arrays = [a for a in jax.tree.leaves(tree) if a.size]
    if not arrays:
        return zeros_like(like)
    there = functools.reduce(jnp.logical_and, map(opaque_true, arrays))
    zero = jnp.where(there, jnp.float32(0), jnp.float32(1))
    leaves, structure = jax.tree.flatten(like)
    return structure.unflatten([jnp.full(leaf.shape, zero.astype(leaf.dtype)) for leaf in leaves])


def added_once(add_all: Callable[[Tree, Tree], Tree], total: Tree, messages: Tree) -> Tree:
    """The sum is computed in one branch, which no reader of it can repeat."""
    first = next(a for a in jax.tree.leaves(messages) if a.size)
    if is_shapes(total):
        zeros = lambda m: zeros_after(m, total)
        return lax.cond(opaque_true(first), lambda m: add_all(total, m), zeros, messages)
    return lax.cond(opaque_true(first), add_all, lambda total, messages: total, total, messages)


def all_finite(rows: Array, *_: Array) -> Array:
    """XLA for CPU (of JAX 0.10.2 and 0.12.0) forgets a NaN in a maximum of many entries, and those that came before it;
    in a sum it does not. A sum that overflows takes the slow way for nothing.
    """
    return jnp.isfinite(jnp.sum(rows, dtype=wide(rows.dtype)))


def largest_finite(rows: Array) -> Array:
    """XLA for CPU sets memory aside for the operand of a reduction that it knows; of rows of one entry it takes any
    reduction for nothing.
    """
    if rows.shape[-1] == 1:
        return jnp.abs(finite(rows[..., 0]))
    larger = lambda a, b: jnp.maximum(jnp.abs(finite(a)), jnp.abs(finite(b)))
    return lax.reduce(rows, np.zeros((), rows.dtype), larger, (rows.ndim - 1,))


def in_parts(function: Callable[..., Array], out: Array, *rows: Array) -> Array:
    """XLA for CPU makes an array of what it adds up, and sets memory aside for that even where it is not computed: in
    parts, written over `out`, it is a small one.
    """
    count = rows[0].shape[0]
    if out.ndim == 0 or count <= ROWS:
        return function(*rows)

    def step(i, out):
        start = jnp.minimum(i * ROWS, count - ROWS)  # the last part may overlap the one before
        part = [lax.dynamic_slice_in_dim(each, start, ROWS) for each in rows]
        return lax.dynamic_update_slice_in_dim(out, function(*part), start, 0)

    return lax.fori_loop(0, -(-count // ROWS), step, out)


def in_tiles(function: Callable[[Tree], Array], tile: int, x: Array, words: Array) -> Array:
    """All passes of a tile but the first and the last run in the cache."""
    tiles = x.shape[0] // tile
    body = tiles * tile
    done = lax.map(function, (x[:body].reshape(tiles, tile), words[: body // 32].reshape(tiles, tile // 32)))
    done = done.reshape(-1)
    return done if body == x.shape[0] else jnp.concatenate([done, function((x[body:], words[body // 32 :]))])


# ------------------------------------------------------------------------------------------------
# Leaves end to end, and vectors cut apart


def concatenated(vectors: Sequence[Array]) -> Array:
    """XLA for CPU fuses few vectors with what follows, entry by entry: ten times as slow."""
    return side_by_side(vectors) if 1 < len(vectors) < FEW else lax.concatenate(vectors, 0)


def side_by_side(arrays: Sequence[Array]) -> Array:
    """XLA for CPU would compute words within their concatenation, in one thread and four times as slowly. What a
    condition that it does not know takes is made before, and it fuses nothing into a branch.
    """
    shape = (*arrays[0].shape[:-1], sum(each.shape[-1] for each in arrays))
    if shape[-1] < LONG:
        return jnp.concatenate(arrays, axis=-1)
    # Typed as differing over the axes of a mesh over which some arrays differ.
    any_of = lambda arrays: functools.reduce(operator.add, (each[(0,) * each.ndim] for each in arrays if each.size))
    other = lambda *arrays: jnp.broadcast_to(any_of(arrays), shape)
    together = lambda *arrays: jnp.concatenate(arrays, axis=-1)
    return lax.cond(opaque_true(max(arrays, key=jnp.size)), together, other, *arrays)


def cut_apart(vector: Array, sizes: Sequence[int]) -> list[Array]:
    """XLA for CPU compiles every static slice of a long vector as a kernel of its own, 30 ms each. Slices whose starts
    it does not know are one kernel for each size.
    """
    starts = starts_of(sizes)
    if len(sizes) < FEW or not 0 < vector.size < 2**31:
        return [lax.slice_in_dim(vector, at, at + size, axis=-1) for at, size in zip(starts, sizes, strict=True)]
    dynamic = zip(_unknown(starts, vector), sizes, strict=True)
    return [lax.dynamic_slice_in_dim(vector, start, size, axis=-1) for start, size in dynamic]


def _unknown(starts: Sequence[int], vector: Array) -> Sequence[Array]:
    """The same numbers, out of a condition that XLA cannot decide."""
    as_arrays = [functools.partial(jax.tree.map, jnp.int32, numbers) for numbers in (starts, [0] * len(starts))]
    return lax.cond(opaque_true(vector), *as_arrays)


@functools.partial(jax.jit, static_argnums=0)  # traced once for each size
def _with_piece(one: Callable[..., Array], memory: Array, start: Array, piece: Array, *others: Array) -> Array:
    part, *rest = (lax.dynamic_slice_in_dim(x, start, piece.size) for x in (memory, *others))
    now = one(part, piece, *rest)
    return lax.dynamic_update_slice_in_dim(memory, now, start, 0)


def piece_by_piece(one: Callable[..., Array], memory: Array, pieces: Any, *others: Array) -> Array:
    """Joining leaves is a pass that reads and one that writes, before anything is computed. A memory that is a vector
    already needs neither: each leaf is added to its part of the memory, in the memory's place.

    pieces: `backend.Pieces`.
    """

    def added(memory, leaves, others):
        there = [x for x in leaves if x.size]
        starts = _unknown(starts_of([x.size for x in there]), there[0])
        after, others = _computed(memory, starts[0]).reshape(-1), [x.reshape(-1) for x in others]
        for start, piece in zip(starts, there, strict=True):
            after = _with_piece(one, after, start, piece, *others)
        return after.reshape(memory.shape)

    def joined(memory, leaves, others):
        whole = jnp.concatenate([x.reshape(-1).astype(memory.dtype) for x in leaves])
        whole = jnp.pad(whole, (0, memory.size - whole.size)).reshape(memory.shape)
        return in_place(one, memory, whole, *others)

    return unless_mapped(added, joined)(memory, tuple(x.reshape(-1) for x in pieces.leaves), others)


def _computed(x: Array, zero: Array) -> Array:
    """x, as something that was computed before: XLA for CPU writes in place into that, not into a row of an argument.

    zero: i32[], 0, which XLA does not know.
    """
    return lax.fori_loop(0, zero, lambda _, x: -x, x)


def starts_of(sizes: Sequence[int]) -> list[int]:
    """Begin of each of consecutive pieces."""
    return (np.cumsum(sizes, dtype=np.int64) - np.asarray(sizes, np.int64)).tolist()


# ------------------------------------------------------------------------------------------------
# Sums of sparse messages, leaf by leaf


def made_apart(found: Any, sizes: Sequence[int]) -> list[Array]:
    """The pieces of a `backend.SparseSum`, whose vector is never made: each large leaf by itself, from the entries that
    lie in it. The others are cut out of one vector of them.
    """
    large = sorted(i for i in np.argsort(sizes, kind="stable")[::-1][:LOOPS].tolist() if sizes[i] >= LONG)
    rest = sorted(set(range(len(sizes))) - set(large))
    starts, rest_sizes = starts_of(sizes), [sizes[i] for i in rest]

    def apart(found):
        edges = jnp.asarray([*starts, sum(sizes)], jnp.int32)
        runs = _runs(found.indices, edges)
        zero = jnp.where(opaque_true(found.values), 0, 1).astype(found.values.dtype)
        entries = found.indices.reshape(-1), found.values.reshape(-1)
        like = lambda size: jax.ShapeDtypeStruct((size,), found.values.dtype)
        made: list[Array] = [zero] * len(sizes)
        for i, number in zip(large, _unknown(large, found.values), strict=True):
            with calls(inlined=False):
                made[i] = _of_piece(*entries, runs, edges, zero, number, like(sizes[i]))
        if rest:
            shifts = np.asarray(starts)[rest] - starts_of(rest_sizes)
            pieces = jnp.asarray([rest, shifts], jnp.int32)
            together = _of_pieces(*entries, runs, zero, pieces, like(sum(rest_sizes)))
            for i, piece in zip(rest, cut_apart(together, rest_sizes), strict=True):
                made[i] = piece
        return tuple(map(found.scaled, made))

    return list(unless_mapped(apart, lambda found: tuple(cut_apart(found.made(), sizes)))(found))


class _Runs(NamedTuple):
    """Places of the entries of each of m pieces among those of n messages of k entries, end to end.

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


@functools.partial(jax.jit, static_argnums=6)
def _of_piece(indices, values, runs, edges, zero, number, like):
    """A piece, which begins at edges[number]. zero: f[], which XLA does not know."""
    with calls(inlined=True):
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
