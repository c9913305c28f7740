"""Operations that each backend does in another way: the one place that asks for which devices a program is made.

Each function here has a portable form of a line or two. Where XLA for CPUs, GPUs or TPUs needs another one that is
long, that stands under the same name in `backend_cpu`, `backend_gpu` or `backend_tpu`, with the reason, and is chosen
here, and only while a program is traced. Collectives that differ stand in `exchange.collectives`.

Three kinds of arrays are not made before somebody reads them: `Pieces`, leaves that are not joined, `SparseSum`,
messages that are not added up, and `backend_gpu.Arriving`, messages that have not crossed. These files hold all
that knows how to make them.
"""

import contextlib
import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from jaxcomp import backend_cpu, backend_gpu, backend_tpu, backend_tpu_kernels
from jaxcomp.arrays import as_words, bounded, check_decoded, finite, is_shapes, like_of, weighted, zeros_like

__all__ = [
    "LONG",
    "Pieces",
    "SparseSum",
    "accumulated",
    "add_each",
    "added_at",
    "all_finite",
    "all_there",
    "along_rows",
    "computed_once",
    "count_of_sections",
    "cut_apart",
    "each_entry",
    "either",
    "end_to_end",
    "fast_if",
    "flattened",
    "fold",
    "fold_in_one_pass",
    "fold_in_rows",
    "for_each_row",
    "form",
    "has_kernels",
    "in_parts",
    "in_place",
    "in_tiles",
    "is_lazy",
    "join_pieces",
    "lanes",
    "largest_finite",
    "made",
    "mapped_as",
    "materialized",
    "not_before",
    "of_entries",
    "of_short_rows",
    "one_of",
    "only_if",
    "over_rows",
    "platform",
    "recomputes",
    "rotated",
    "rows_at_once",
    "rows_times",
    "rows_times_square",
    "running",
    "running_in_rows",
    "seen_anew",
    "shared_program",
    "side_by_side",
    "sorted_integers",
    "step_in_place",
    "to_short_rows",
    "whole_vectors",
    "zeros_if_shape",
]

Array = jax.Array
Tree = Any


def platform() -> str:
    """ "cpu", "gpu" or "tpu": of the devices that the program being traced will run on.

    These are the devices of the mesh that is bound (inside `jax.shard_map`, `jax.pmap` or `jax.set_mesh`, also where a
    program is compiled ahead of time for devices that are not there); elsewhere (under `vmap`, on one device) those of
    `jax.default_device`, or of the default backend. A mesh of shapes alone (`AbstractMesh` without a device) says
    nothing.

    >>> platform()
    'cpu'
    """
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    device = device or jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    name = device if isinstance(device, str) else getattr(device, "platform", None)
    name = name or jax.default_backend()
    return "gpu" if name in ("cuda", "rocm") else name


def has_kernels() -> bool:
    """Whether a program may hold kernels here (`backend_tpu_kernels`): on TPUs, where each device has its
    own arrays, within a `shard_map` over all axes of a mesh, or without a mesh on the only device. XLA cannot cut a
    kernel up for several.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if platform() != "tpu":
        return False
    return set(mesh.manual_axes) == set(mesh.axis_names) if mesh.axis_names else jax.device_count() == 1


def lanes() -> int:
    """How many neighbours a register holds: an array with a shorter last axis is padded to it in memory."""
    return backend_tpu.LANES if platform() == "tpu" else 1


def of_short_rows(of: Callable[[Array], Tree], x: Array, length: int) -> Tree:
    """of(rows), for the rows of `length` entries that a vector holds one after the other: [b, m] -> [b] each."""
    if platform() == "tpu":
        return backend_tpu.of_short_rows(of, x, length)
    return of(x.reshape(x.size // max(length, 1), length))


def to_short_rows(each: Array, length: int) -> Array:
    """A number of each row, repeated over its `length` entries: [b] -> [b length], as in `of_short_rows`."""
    if platform() == "tpu":
        return backend_tpu.to_short_rows(each, length)
    return jnp.broadcast_to(each[:, None], (each.size, length)).reshape(-1)


def flattened(rows: Array) -> Array:
    """Rows end to end: [b, m] -> [b m]."""
    return backend_tpu.flattened(rows) if platform() == "tpu" else rows.reshape(-1)


def along_rows(reduce: Callable[..., Array], rows: Array) -> Array:
    """`jnp.sum` or `jnp.max` along the last axis: [b, m] -> [b]."""
    return backend_tpu.along_rows(reduce, rows) if platform() == "tpu" else reduce(rows, axis=-1)


def _on_cpu(*trees: Tree) -> bool:
    """Whether a program for a CPU is traced, with some of these arrays in it."""
    return platform() == "cpu" and any(isinstance(a, Tracer) for a in jax.tree.leaves(trees))


# ------------------------------------------------------------------------------------------------
# What is computed once, in place, or traced once


def computed_once(function: Callable[..., Tree], *args: Any) -> Tree:
    """function(*args), computed before whatever reads it, not again within each of its readers."""
    arrays = jax.tree.leaves(args)
    if not all(a.size for a in arrays) or not _on_cpu(arrays):
        return function(*args)
    return backend_cpu.computed_once(function, *args)


def materialized(tree: Tree) -> Tree:
    """The same arrays behind an optimization barrier: each reader reads memory, where it would compute them again
    within its own loop, and nothing that two readers compute alike is kept from one to the other.

    It does nothing on CPUs, where XLA drops barriers; there `fold_in_one_pass` sees to it for sums.
    """
    return tree if platform() == "cpu" else lax.optimization_barrier(tree)


def whole_vectors(tree: Tree) -> Tree:
    """Arrays of a state, before they get axes of workers. XLA for TPUs would else give these to all that a vector is
    joined of, and lay it out anew: two gradients with `ef21` and `majority_vote`.
    """
    return lax.optimization_barrier(tree) if platform() == "tpu" else tree


def recomputes(grads: Sequence[Any]) -> bool:
    """Whether vectors that are a little arithmetic on joined leaves are better computed again by each reader than kept:
    on GPUs, which wait for memory, as long as one loop reads all leaves. A TPU would lay them all out again each time.
    """
    traced = any(isinstance(a, Tracer) for a in jax.tree.leaves(grads))
    few = all(len(g.leaves) <= MOST_OPERANDS for g in grads if isinstance(g, Pieces))
    return platform() == "gpu" and traced and few


def seen_anew(tree: Tree) -> Tree:
    """The same arrays for another reader: what is computed of the result is not kept from one reader to the next.

    Each reader takes it from that of the reader before, not from the first: XLA makes equal barriers one.
    """
    return lax.optimization_barrier(tree)


def in_place(function: Callable[..., Tree], memory: Tree, *x: Tree, with_readers: bool = False) -> Tree:
    """function(memory, *x), with shapes and dtypes of the memory: computed once, and in its place.

    Outside of any program it is computed operation by operation.

    with_readers: an array that XLA for GPUs may write in one loop with what is computed of it, which it does where no
        barrier stands between them. One stays for 16 bits, whose sum XLA rounds only there.
    """
    traced = any(isinstance(a, Tracer) for a in jax.tree.leaves((memory, x)))
    if not traced or not any(a.size for a in jax.tree.leaves(x)):
        return function(memory, *x)
    if platform() == "cpu":
        return backend_cpu.in_place(function, memory, *x)
    if with_readers and platform() == "gpu" and memory.dtype.itemsize >= 4:
        return function(memory, *x)
    return lax.optimization_barrier(function(memory, *x))


def step_in_place(tree: Tree, step: Any, change: Tree) -> Tree:
    """tree + step change, saturated, in the place of the tree."""
    one = lambda h, m: bounded(h + jnp.asarray(step, h.dtype) * m)
    return jax.tree.map(lambda h, m: in_place(one, h, m, with_readers=True), tree, change)


def shared_program(function: Callable[..., Tree]) -> Callable[..., Tree]:
    """The same function, traced once for all equal shapes, as a call; a CPU compiles it once for them, too."""

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def body(structure: Any, fixed: tuple[Any, ...], *arrays: Array) -> Tree:
        given = iter(arrays)
        leaves = [next(given) if shape is None else shape for shape in fixed]
        with _calls(inlined=True):
            return function(*jax.tree.unflatten(structure, leaves))

    def call(*args: Any) -> Tree:
        leaves, structure = jax.tree.flatten(args)
        if not any(isinstance(a, Tracer) for a in leaves):
            return function(*args)
        fixed = tuple(a if is_shapes(a) else None for a in leaves)
        with _calls(inlined=False):
            return body(structure, fixed, *(a for a, shape in zip(leaves, fixed, strict=True) if shape is None))

    return call


def _calls(*, inlined: bool) -> contextlib.AbstractContextManager[Any]:
    return backend_cpu.calls(inlined=inlined) if platform() == "cpu" else contextlib.nullcontext()


def fast_if(condition: Array, fast: Callable[..., Tree], general: Callable[..., Tree], *operands: Any) -> Tree:
    """general(*operands). On CPU, fast(*operands) where the condition holds; both are equal there.

    XLA for CPU takes ten times as long for the general form. Elsewhere it costs nothing more, while a condition makes a
    GPU wait for its host, and libtpu (0.0.42 to 0.0.50) crashes where a branch hands on operands that are computed in
    the same program.
    """
    return lax.cond(condition, fast, general, *operands) if platform() == "cpu" else general(*operands)


def form(portable: Callable[..., Tree], *, on_cpu: Any = None, on_gpu: Any = None) -> Callable[..., Tree]:
    """The first one, unless there is another in programs for CPUs or for GPUs; all give the same, up to rounding."""
    return {"cpu": on_cpu, "gpu": on_gpu}.get(platform()) or portable


def each_entry(function: Callable[..., Tree], *vectors: Array) -> Tree:
    """function(*vectors), of vectors of 32 bits, entry by entry: on TPUs, where it is much arithmetic, in a kernel."""
    if has_kernels() and vectors[0].ndim == 1 and vectors[0].size >= LONG:
        return backend_tpu_kernels.each_entry(function, *vectors)
    return function(*vectors)


def running(join: Callable[[Array, Array], Array], x: Array) -> Array:
    """Running sums (`jnp.add`), or maxima (`jnp.maximum`) of integers, along the last axis, in their dtype."""
    if has_kernels() and backend_tpu_kernels.runs(x):
        return backend_tpu_kernels.running(join, x)
    if platform() == "tpu":
        return backend_tpu.running(join, x)
    return jnp.cumsum(x, -1, x.dtype) if join is jnp.add else lax.cummax(x, x.ndim - 1)


def running_in_rows(join: Callable[[Array, Array], Array], x: Array, length: int) -> Array:
    """The same in each of the rows of `length` entries that a vector holds one after the other: [b m] -> [b m]."""
    if platform() == "tpu":
        return backend_tpu.running_in_rows(join, x, length)
    return running(join, x.reshape(x.size // max(length, 1), length)).reshape(-1)


def for_each_row(function: Callable[[Tree], Tree], rows: Tree) -> Tree:
    """function(row) for each row of stacked arrays: on a GPU all at once, elsewhere one after another."""
    return jax.vmap(function)(rows) if platform() == "gpu" else lax.map(function, rows)


def rows_at_once() -> int:
    """How many equal vectors are compressed as one stack, to compile fewer loops. On GPUs what reads the stack reads
    the vectors: sixteen differences of two arrays are below `OPERANDS`. Other backends would write the stack.
    """
    return 16 if platform() == "gpu" else 1


def over_rows(function: Callable[..., Tree], *rows: Tree, length: int) -> Tree:
    """`jax.vmap` of the function over rows of `length` entries, which it may sort."""
    if platform() == "tpu":
        return backend_tpu.over_rows(function, *rows, length=length)
    return jax.vmap(function)(*rows)


def mapped_as(function: Callable[..., Tree], of_rows: Callable[..., Tree]) -> Callable[..., Tree]:
    """The function. Under vmap, on a GPU, what `of_rows` of a single row is under vmap: a TPU pads short rows."""
    if platform() != "gpu":
        return function
    return backend_cpu.unless_mapped(function, of_rows)


def only_if(condition: Array, function: Callable[..., Tree], x: Tree, *operands: Any) -> Tree:
    """function(x, *operands), with the shapes and dtypes of x, where the condition holds, else x.

    On a GPU it is a loop of at most one step, which under vmap is not taken unless a row needs it, where a condition
    would become a choice between both. A TPU would copy what the loop reads.
    """
    if platform() != "gpu":
        return lax.cond(condition, function, lambda x, *_: x, x, *operands)
    step = lambda carry: (carry[0] & False, function(carry[1], *operands))
    return lax.while_loop(lambda carry: carry[0], step, (condition, x))[1]


def one_of(condition: Array, yes: Callable[..., Tree], no: Callable[..., Tree], *operands: Any) -> Tree:
    """yes(*operands) where the condition holds, which it nearly always does, else no(*operands), which is little.

    A GPU, whose host would wait for the condition, computes both. And where types tell what differs between workers JAX
    (0.10.2) maps no `lax.cond` whose condition differs and one of whose operands does not.
    """
    if platform() != "gpu":
        return lax.cond(condition, yes, no, *operands)
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes(*operands), no(*operands))


def either(now: Any, yes: Callable[..., Tree], no: Callable[..., Tree], x: Tree, *operands: Any) -> Tree:
    """yes(x, *operands) if `now`, a bool or an array, else no(x); yes must make the same of no(x) as of x.

    XLA for GPUs copies what goes into the arms of a conditional and comes out of them, whichever arm runs: with int4 a
    step of `local_updates` without an exchange moved 14.5 copies of the tree. What a loop changes is changed in place.
    TPUs take as long for either (estimates), and hold with a loop a tenth more or a third less, as the exchange is.
    """
    if isinstance(now, bool):
        return yes(x, *operands) if now else no(x)
    if platform() != "gpu":
        return lax.cond(now, yes, lambda x, *_: no(x), x, *operands)
    return only_if(now, yes, no(x), *operands)


def not_before(first: Tree, then: Tree) -> Tree:
    """The arrays of `then`, in programs for GPUs no sooner than those of `first`, leaf by leaf.

    What is computed of `then` may lie in the place of an array that is read for `first`, which is copied if read later.
    """
    if platform() != "gpu":
        return then
    return jax.tree.map(lambda before, x: lax.optimization_barrier((before, x))[1], first, then)


def all_finite(rows: Array, *ends: Array) -> Array:
    """Whether no entry is a NaN or an infinity. ends: extremes along the last axis, of which these would be some."""
    return form(lambda _, *ends: jnp.all(jnp.isfinite(jnp.stack(ends))), on_cpu=backend_cpu.all_finite)(rows, *ends)


def largest_finite(rows: Array) -> Array:
    """The largest finite magnitude along the last axis."""
    return form(lambda rows: jnp.max(jnp.abs(finite(rows)), axis=-1), on_cpu=backend_cpu.largest_finite)(rows)


def in_parts(function: Callable[..., Array], out: Array, *rows: Array) -> Array:
    """function(*rows), a number for each row; `out` has the same shape and may be written over."""
    if platform() != "cpu":
        return function(*rows)
    return backend_cpu.in_parts(function, out, *rows)


def in_tiles(function: Callable[[Tree], Array], tile: int, x: Array, words: Array) -> Array:
    """function((x, words)), which does each block of a tile by itself; words: one for 32 entries of x."""
    if platform() != "cpu" or x.shape[0] < 2 * tile:
        return function((x, words))
    return backend_cpu.in_tiles(function, tile, x, words)


def rotated(x: Array, words: Array, block: int, forward: bool) -> Array | None:
    """`hadamard` rotations of as many blocks of a vector as there are words of signs, by a kernel; None where there is
    none for them.
    """
    if not (has_kernels() and backend_tpu_kernels.rotates(x, block, words.size * 32 // block)):
        return None
    return backend_tpu_kernels.blocks_rotated(x, words, forward)


def rows_times_square(x: Array, square: Array) -> Array:
    """Rows [b, m] that a vector holds one after the other times a matrix [m, m], in the precision of both: [b m]."""
    if not x.size:
        return x
    if platform() == "tpu":
        return backend_tpu.rows_times_square(x, square)
    return jnp.matmul(x.reshape(-1, len(square)), square, precision="highest").reshape(-1)


def rows_times(rows: Array, m: Array, axis: int) -> Array | None:
    """Rows [n, k, l] times matrices [n, r, c] along their axis 1 or 2, [n, k, c] or [n, k, r], by a kernel; None where
    there is none for them.
    """
    if not (has_kernels() and backend_tpu_kernels.multiplies(rows, m, axis)):
        return None
    return backend_tpu_kernels.few_rows_times(rows, m, axis)


# ------------------------------------------------------------------------------------------------
# Leaves end to end, and vectors cut apart


class Pieces(NamedTuple):
    """leaves: of any shapes and dtypes, end to end the first entries of a vector, whose others are zero."""

    leaves: tuple[Array, ...]


def join_pieces(pieces: Pieces, like: Any) -> Array:
    """The vector of shape and dtype `like` that the pieces are."""
    leaves = list(pieces.leaves)
    rest = like.size - sum(leaf.size for leaf in leaves)
    leaves += [jnp.zeros((rest,), like.dtype)] if rest else []
    return end_to_end(leaves, like.dtype).reshape(like.shape)


def end_to_end(leaves: Sequence[Array], dtype: Any) -> Array:
    """Leaves of any shapes as one vector of a dtype; no entries for no leaves."""
    if len(leaves) == 1:
        return leaves[0].reshape(-1).astype(dtype)
    vectors = [jnp.asarray(lax.reshape(leaf, (leaf.size,)), dtype) for leaf in leaves if leaf.size]
    if not vectors:
        return jnp.zeros((0,), dtype)
    whole = backend_tpu.leaves_joined([leaf for leaf in leaves if leaf.size], dtype) if has_kernels() else None
    if whole is not None:
        return whole
    return backend_cpu.concatenated(vectors) if platform() == "cpu" else lax.concatenate(vectors, 0)


def side_by_side(words: Sequence[Array]) -> Array:
    """Arrays of words, which may differ in their last axis alone, along that axis."""
    if len(words) == 1:
        return words[0]
    if words[0].dtype.itemsize == 2 and has_kernels() and backend_tpu_kernels.joins(words):
        return backend_tpu_kernels.laid_end_to_end(words)
    return backend_cpu.side_by_side(words) if platform() == "cpu" else jnp.concatenate(words, axis=-1)


def cut_apart(
    vector: "Array | SparseSum",
    sizes: Sequence[int],
    dtypes: Sequence[Any] = (),
    shapes: Sequence[tuple[int, ...]] = (),
) -> list[Array]:
    """Consecutive pieces of a vector, or of each row [..., d]; what is left of it is dropped.

    dtypes: of the leaves that the pieces will be, to which those of a `SparseSum` may have been rounded already.
    """
    if isinstance(vector, SparseSum):
        least = LONG if platform() == "cpu" else vector.least_apart
        if len(sizes) > 1 and max(sizes) >= least and any(isinstance(a, Tracer) for a in jax.tree.leaves(vector)):
            return backend_cpu.made_apart(vector, sizes) if platform() == "cpu" else vector.made_apart(sizes, dtypes)
        vector = vector.made()
    if len(sizes) == 1 and sizes[0] == vector.shape[-1]:
        return [vector]
    if _on_cpu(vector):
        return backend_cpu.cut_apart(vector, sizes)
    if platform() == "gpu":
        return backend_gpu.cut_apart(vector, sizes)
    if platform() == "tpu" and (vector.ndim == 2 or vector.size >= LONG):
        return backend_tpu.cut_apart(vector, sizes, shapes)
    starts = zip(backend_cpu.starts_of(sizes), sizes, strict=True)
    return [lax.slice_in_dim(vector, start, start + size, axis=-1) for start, size in starts]


def is_apart(size: int, sizes: Sequence[int]) -> bool:
    """Whether the leaves of a vector are decoded apart: on GPUs, where XLA makes the whole of it before it cuts it."""
    return platform() == "gpu" and size >= LONG and len(sizes) > 1


def count_of_sections(size: int, entries: int) -> int:
    """In how many sections an array arrives, of so many bytes of all workers together that stand for so many entries;
    1: as a whole."""
    return backend_gpu.count_of_sections(size, entries) if platform() == "gpu" else 1


def all_there(messages: Tree) -> Tree:
    """The same with arrays in place of those that are still to come."""
    return backend_gpu.all_there(messages) if platform() == "gpu" else messages


def made_in_pieces(decode: Callable[[Tree], Array], messages: Tree, sizes: Sequence[int], dtype: Any) -> Pieces:
    """`Pieces` of these sizes of decode(messages), where they are decoded apart. dtype: of the leaves that they will
    be, not of these."""
    return Pieces(backend_gpu.made_in_pieces(decode, messages, sizes, dtype))


OPERANDS = 40  # leaves that one loop reads at most: XLA for GPUs splits some loops over 48, into an array of their own
MOST_OPERANDS = 60  # and every loop over more than about 64


def _added_in_parts(one: Callable[..., Array], memory: Array, pieces: Pieces, *others: Array) -> Array:
    """So many leaves at a time, joined in the loop that adds them to their part of the memory, in its place."""
    after, start = materialized(memory.reshape(-1)), 0  # else the first part is copied out of it
    count = len(pieces.leaves)
    several = math.ceil(count / math.ceil(count / OPERANDS))  # in loops of about equal size
    for i in range(0, count, several):
        leaves = pieces.leaves[i : i + several]
        end = start + sum(leaf.size for leaf in leaves)
        there = [lax.slice_in_dim(x.reshape(-1), start, end) for x in (after, *others)]
        now = one(there[0], end_to_end(leaves, memory.dtype), *there[1:])
        after, start = lax.dynamic_update_slice_in_dim(after, now, start, 0), end
    return after.reshape(memory.shape)


def accumulated(one: Callable[..., Array], memory: Tree, grads: Tree, *others: Tree) -> Tree:
    """one(e, g, *others) for each entry, with shapes and dtypes of the memory: computed once, and in its place.

    Args:
        one: of entries, which are zero where all are zero. The same object each time: outside of any program it is
            compiled.
        memory, others: arrays. grads: arrays of the same shapes, or `Pieces` of them.
    """

    def each(e: Array, g: Any, *others: Array) -> Array:
        if isinstance(g, Pieces):
            if _on_cpu(e) and 0 < e.size < 2**31:
                return backend_cpu.piece_by_piece(one, e, g, *others)
            if len(g.leaves) > {"cpu": math.inf, "gpu": OPERANDS}.get(platform(), 1):
                if platform() == "tpu" and e.size < 2**31:  # which its numbers can tell
                    return materialized(backend_tpu.added_by_leaf(one, e, g.leaves, *others, kernels=has_kernels()))
                return materialized(_added_in_parts(one, e, g, *others))
            g = join_pieces(g, e)
        return in_place(one, e, g, *others, with_readers=True)

    return jax.tree.map(each, memory, grads, *others)


# ------------------------------------------------------------------------------------------------
# Messages of several workers, stacked on a leading axis and added in their order


def zeros_if_shape(total: Tree, messages: Tree) -> Tree:
    """A total to add messages to: itself, or zeros where it has shapes alone, made once the messages are there."""
    if not is_shapes(total):
        return total
    if platform() == "cpu":
        return backend_cpu.zeros_after(messages, total)
    return zeros_like(total)


def fold(add: Callable[[Tree, Tree], Tree], total: Tree, messages: Tree) -> Tree:
    """`lax.scan` of `add` over stacked messages; no loop is built for a single one. total: see `zeros_if_shape`."""
    total = zeros_if_shape(total, messages)
    add, messages = _in_slices(add, messages)
    if jax.tree.leaves(messages)[0].shape[0] == 1:
        return add(total, jax.tree.map(operator.itemgetter(0), messages))
    total, _ = lax.scan(lambda t, m: (add(t, m), None), total, messages)
    return total


# So many messages of dense codes are added in one pass over the total, on CPU in about half the time of a pass for each
# (`python -m experiments bench compressors --log2-size 20`: "add" against so many times "decompress"). With 20 bf16
# and f32 lose, and compiling takes a second.
ONE_PASS = 8


def fold_in_one_pass(
    add: Callable[[Tree, Tree], Tree],
    total: Tree,
    messages: Tree,
    *,
    least: int = 2,
    one_at_a_time: bool = False,
    entrywise: bool = True,
) -> Tree:
    """`fold` in one pass over the total: of a few messages, on a GPU of any number.

    least: on a CPU, from so many messages on the sum is computed once, however many loops read it (`computed_once`);
        fewer are decoded within each of those loops.
    one_at_a_time: a pass for each message, one after the other: its codes are an array, of which one is held at a
        time.
    entrywise: an entry is decoded from few numbers of its message (`Spec.entrywise`). If not, all messages that are
        decoded at once would be held as vectors, so they are added one after the other.
    """
    count = jax.tree.leaves(messages)[0].shape[0]
    if platform() == "gpu" and entrywise and is_shapes(total) and count > 1:
        return _summed(add, total, messages)
    if not least <= count <= ONE_PASS:
        return fold(add, total, messages)
    add, messages = _in_slices(add, messages)

    def add_all(total: Tree, messages: Tree) -> Tree:
        total = zeros_if_shape(total, messages)  # in here zeros are no pass of their own
        for j in range(count):
            message = jax.tree.map(lambda a: a[j], messages)  # noqa: B023
            total = add(*(materialized((total, message)) if one_at_a_time and j else (total, message)))
        return total

    if platform() != "cpu" or not any(a.size for a in jax.tree.leaves(messages)):
        return add_all(total, messages)
    # Each user of the total would else decode all messages for itself.
    return backend_cpu.added_once(add_all, total, messages)


def fold_in_rows(add: Callable[[Tree, Tree], Tree], total: Tree, messages: Tree) -> Tree:
    """`fold` for TPUs of codes whose words fill rows of lanes: each message is then a run of memory, and one loop adds
    them all, where a pass for each is a kernel of its own to compile and a total of its own to hold.
    """
    shapes = jax.tree.map(lambda a: a.shape[1:], messages)
    total = backend_tpu.zeros_if_shape(total, messages)
    each = lambda total, message: add(total, jax.tree.map(jnp.reshape, message, shapes))
    return fold(each, total, jax.tree.map(backend_tpu.in_rows, messages))


def _summed(add: Callable[[Tree, Tree], Tree], like: Tree, messages: Tree) -> Tree:
    """The sum of all messages in one pass: a reduction, which XLA for GPUs compiles in half of the time of a sum that
    is written out. It adds them in their order; from 32 of them on, in an order of its own."""
    zeros = zeros_if_shape(like, messages)
    each = jax.vmap(lambda message: add(zeros, message))(messages)
    return jax.tree.map(lambda a: lax.reduce(a, jnp.zeros((), a.dtype), lax.add, (0,)), each)


def _in_slices(add: Callable[[Tree, Tree], Tree], messages: Tree) -> tuple[Callable[[Tree, Tree], Tree], Tree]:
    """Both for messages with 8-bit floats as words: XLA for CPU slices such floats more slowly."""
    kinds = {a.dtype for a in jax.tree.leaves(messages)}
    narrow = {kind for kind in kinds if jnp.issubdtype(kind, jnp.floating) and jnp.finfo(kind).bits == 8}
    if not narrow:
        return add, messages
    kinds = jax.tree.map(lambda a: a.dtype, messages)
    back = lambda a, kind: a if a.dtype == kind else lax.bitcast_convert_type(a, kind)
    words = jax.tree.map(lambda a: as_words(a) if a.dtype in narrow else a, messages)
    return lambda total, message: add(total, jax.tree.map(back, message, kinds)), words


def add_each(
    decompress: Callable[[Tree, Tree, Tree], Tree],
    pick: Callable[[Array], Tree],
    total: Tree,
    payloads: Tree,
    weights: Tree,
    entrywise: bool,
    name: str = "",
) -> Tree:
    """Decompresses each message, with pick(j) for the j-th, and adds it: the default of `base.accumulate`.

    name: of the compressor, for errors.
    """
    like = like_of(total)

    def add(total: Tree, message: Tree) -> Tree:
        payload, weight, worker = message
        x_hat = decompress(payload, pick(worker), like)
        check_decoded(name, x_hat, like)
        return jax.tree.map(lambda t, x: t + weighted(x.astype(t.dtype), weight), total, x_hat)

    workers = jnp.arange(jax.tree.leaves(payloads)[0].shape[0])
    messages = payloads, weights, workers
    # For TPUs a loop; of 8-bit floats, which are as many as the entries, it would hold all messages a second time.
    if platform() == "tpu" and all(a.dtype.itemsize > 1 for a in jax.tree.leaves(payloads)):
        return fold(add, total, messages)
    return fold_in_one_pass(add, total, messages, entrywise=entrywise, one_at_a_time=platform() == "tpu")


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
        """The vector, f[size]."""
        add = lambda total, message: total.at[message[0]].add(message[1], mode="drop", indices_are_sorted=True)
        return self.scaled(fold(add, self._zeros(self.size), (self.indices, self.values)))

    @property
    def least_apart(self) -> int:
        """Entries of a piece that is made by itself, which costs a pass over all messages."""
        return max(LONG, self.indices.size)

    def made_apart(self, sizes: Sequence[int], dtypes: Sequence[Any] = ()) -> list[Array]:
        """Consecutive pieces of the vector, which is never made as a whole.

        A piece with more entries than all messages is made by itself, which saves that its part of a vector is made and
        cut out. So are 128 pieces at most; the others are cut out of one vector of them.

        dtypes: of the leaves that the pieces will be. A vector for narrower ones is rounded here, as leaves are, and
            made once the one before it is rounded: one loop over the messages would hold all of their sums.
        """
        order = np.argsort(sizes, kind="stable")[::-1][:128].tolist()
        large = sorted(i for i in order if sizes[i] >= self.least_apart)
        rest = sorted(set(range(len(sizes))) - set(large))
        starts, rest_sizes = backend_cpu.starts_of(sizes), [sizes[i] for i in rest]
        ends = np.asarray(starts) + np.asarray(sizes)
        # How much further on each piece begins in the vector than among the rest; -1 for what is not among them.
        shifts = np.full(len(sizes) + 1, -1, np.int32)
        shifts[rest] = np.asarray(starts)[rest] - backend_cpu.starts_of(rest_sizes)

        def added(total: Array, message: tuple[Array, Array], inside: Array, shift: Any) -> Array:
            indices, values = message
            return total.at[jnp.where(inside, indices - shift, total.size)].add(values, mode="drop")

        def add_piece(i: int, total: Array, message: tuple[Array, Array]) -> Array:
            return added(total, message, (message[0] >= starts[i]) & (message[0] < ends[i]), starts[i])

        def add_rest(total: Array, message: tuple[Array, Array]) -> Array:
            among = materialized(jnp.asarray(ends, jnp.int32))  # or XLA computes the first step when it compiles
            number = jnp.searchsorted(among, message[0], side="right", method="scan_unrolled")
            shift = jnp.asarray(shifts)[number]
            return added(total, message, shift >= 0, shift)

        kinds = [jnp.dtype(dtype) for dtype in dtypes] or [self.values.dtype] * len(sizes)
        vectors: list[tuple[Callable[..., Array], int, Any]] = []
        vectors += [(functools.partial(add_piece, i), sizes[i], kinds[i]) for i in large]
        if rest:
            common = {kinds[i] for i in rest}
            vectors.append((add_rest, sum(rest_sizes), common.pop() if len(common) == 1 else self.values.dtype))
        made = self._each_made(vectors)
        pieces = dict(zip(large, made, strict=False))
        if rest:
            pieces |= dict(zip(rest, cut_apart(made[-1], rest_sizes), strict=True))
        return [pieces[i] for i in range(len(sizes))]

    def _each_made(self, vectors: Sequence[tuple[Callable[..., Array], int, Any]]) -> list[Array]:
        """Vectors of parts of the messages: what adds a message to each of them, its entries, and its dtype."""
        messages, made = (self.indices, self.values), {}
        narrow = [i for i, (*_, dtype) in enumerate(vectors) if dtype.itemsize < self.values.dtype.itemsize]
        wide = [i for i in range(len(vectors)) if i not in narrow]
        if wide:
            adds, sizes, _ = zip(*(vectors[i] for i in wide), strict=True)
            add = lambda totals, message: [add(total, message) for add, total in zip(adds, totals, strict=True)]
            totals = fold(add, [self._zeros(size) for size in sizes], messages)
            made |= zip(wide, map(self.scaled, totals), strict=True)
        zero, before = jnp.zeros_like(self.values, shape=()), []
        for i in narrow:
            add, size, dtype = vectors[i]
            # Zeros are made anew, too: XLA would make those of one length once, and copy them.
            zero, messages, _ = lax.optimization_barrier((zero, messages, before))
            before = [bounded(self.scaled(fold(add, jnp.broadcast_to(zero, (size,)), messages)), dtype)]
            made |= zip([i], before, strict=True)
        return [made[i] for i in range(len(vectors))]

    def _zeros(self, size: int) -> Any:
        """Zeros, typed as the values are over the axes of a mesh; on a CPU they are made after the values."""
        if platform() == "cpu":
            return jax.ShapeDtypeStruct((size,), self.values.dtype)
        return jnp.zeros_like(self.values, shape=(size,))


LONG = backend_cpu.LONG  # entries of a vector that is worth a branch, or a loop, of its own
SPARSE = 8  # a sum stays unmade if the vector has at least so many times the entries of its messages together


def made(arrays: Tree) -> Tree:
    """The same with vectors in the place of sums that are not made yet."""
    is_sum = lambda node: isinstance(node, SparseSum)
    return jax.tree.map(lambda x: x.made() if is_sum(x) else x, arrays, is_leaf=is_sum)


def added_at(total: Array, indices: Array, values: Array) -> Array:
    """A vector with values added at distinct indices, i32[k] in any order."""
    if platform() == "tpu":  # where XLA sorts all that is not said to be sorted
        indices, values = backend_tpu.sorted_together(indices, values)
        return total.at[indices].add(values, mode="drop", indices_are_sorted=True)
    return total.at[indices].add(values, unique_indices=True)


def sorted_integers(x: Array) -> Array:
    """A vector of integers, sorted."""
    return backend_tpu.sorted_together(x)[0][: x.size] if platform() == "tpu" else jnp.sort(x, stable=False)


def is_lazy(messages: SparseSum) -> bool:
    """Whether a sum of messages, a vector of `LONG` entries or more, is worth to be left unmade, for leaves that are
    made by themselves.

    Not on TPUs, which add entries one after the other: each leaf would take as long as the vector.
    """
    return SPARSE * messages.indices.size <= messages.size and platform() != "tpu"


def of_entries(entries: Callable[..., tuple[Array, Array]], ascending: bool = True) -> tuple[Callable, Callable, Any]:
    """`decompress`, `accumulate` and `entries` of a `base.Compressor` of vectors, from the entries of one message.

    entries: (payload, shared, like) -> indices i32[k], behind them padding of `like.size`, and values [k].
    ascending: whether the indices are; if not, no sum is left unmade, and the third is None.
    """

    def decompress(payload: Tree, shared: Tree, like: jax.ShapeDtypeStruct) -> Array:
        indices, values = entries(payload, shared, like)
        zeros = jnp.zeros(like.shape, like.dtype)
        return zeros.at[indices].set(values.astype(like.dtype), mode="drop", indices_are_sorted=ascending)

    def with_weight(payload: Tree, weight: Array | None, shared: Tree, like: Any) -> tuple[Array, Array]:
        indices, values = entries(payload, shared, like)
        return indices, weighted(values.astype(like.dtype), weight)

    def accumulate(total: Any, payloads: Tree, weights: Tree, shared: Tree) -> Array:
        like = jax.ShapeDtypeStruct(total.shape, total.dtype)

        def add(total: Array, message: tuple[Tree, Tree]) -> Array:
            indices, values = with_weight(*message, shared, like)
            return total.at[indices].add(values, mode="drop", indices_are_sorted=ascending)

        return fold(add, total, (payloads, weights))

    def every_entry(payloads: Tree, weights: Tree, shared: Tree, like: jax.ShapeDtypeStruct) -> SparseSum:
        each = jax.vmap(functools.partial(with_weight, shared=shared, like=like))
        return SparseSum(*each(payloads, weights), None, like.size)

    return decompress, accumulate, every_entry if ascending else None
