"""Operations that XLA for GPUs needs in another form than everybody else, under the names of `backend`, which chooses.

XLA for GPUs makes a decoded vector before it cuts it into leaves, and holds the messages of all workers until the last
leaf is decoded. So leaves are decoded by themselves (`made_in_pieces`), from messages that cross in sections, each when
a leaf needs it (`Arriving`).
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomp.arrays import bounded
from jaxcomp.backend_cpu import LONG, starts_of

__all__ = ["TOGETHER", "Arriving", "all_there", "count_of_sections", "cut_apart", "made_in_pieces", "rows_apart"]

Array = jax.Array
Tree = Any
FEW = 8  # pieces of rows; fewer, as operands, make momentum_correction(sidco) hold a gradient more
APART = 256  # leaves that are decoded by themselves; each is a kernel to start, each other size one to compile
FEW_ENTRIES = 32  # what has so many times fewer entries than the vector is gathered
TOGETHER = 1024  # entries of a tile, whose codes stand side by side (`packing`)
SHARE = 32  # the vector in f32 has so many times the bytes of a section, or fewer, so that these are enough and few
SECTION = 2**23  # bytes
MOST_SECTIONS = 64


def operands(numbers: Sequence[Any]) -> list[Array]:
    """The same numbers, i32, which XLA does not know: loops that differ in nothing else are one kernel to compile."""
    return lax.optimization_barrier([jnp.asarray(number, jnp.int32) for number in numbers])


def cut_apart(rows: Array, sizes: Sequence[int]) -> list[Array]:
    """Leaves of one size are one kernel, up to some fifty of them, if XLA cuts them out of a matrix. Out of a vector
    each would be a copy that the host starts by itself. Many pieces of rows are read where they are (`operands`).
    """
    starts = starts_of(sizes)
    if rows.ndim > 1 and len(sizes) >= FEW:
        each = zip(operands(starts), sizes, strict=True)
        return [lax.dynamic_slice_in_dim(rows, start, size, -1, allow_negative_indices=False) for start, size in each]
    matrix = rows if rows.ndim > 1 else rows[None]
    each = zip(starts, sizes, strict=True)
    pieces = [lax.slice_in_dim(matrix, start, start + size, axis=-1) for start, size in each]
    return pieces if rows.ndim > 1 else [piece[0] for piece in pieces]


def rows_apart(stack: Tree) -> list[Tree]:
    """The rows of stacked arrays, of which each is read where it is (`operands`)."""
    count = jax.tree.leaves(stack)[0].shape[0]
    row = lambda number: lambda a: lax.dynamic_index_in_dim(a, number, keepdims=False, allow_negative_indices=False)
    return [jax.tree.map(row(number), stack) for number in operands(range(count))]


def count_of_sections(size: int, entries: int) -> int:
    """In how many sections an array arrives, of so many bytes of all workers together that stand for so many entries;
    1: as a whole, which short messages do, of which all together take less than a quarter of the gradient."""
    if size < entries:
        return 1
    return max(1, min(SHARE * size // (4 * max(entries, 1)), size // SECTION, MOST_SECTIONS))


class Arriving:
    """An array [n, *own.shape] of the messages of all workers that is not there yet: it crosses once it is read, as a
    whole or section by section, each of them once. It belongs to the trace in which it was made.

    own: this worker's. gather: a part [m] of it -> [n, m]. per_tile: numbers of it for a tile of `TOGETHER` entries of
    the vector, tile after tile. count: of the sections.
    """

    def __init__(self, own: Array, gather: Callable[[Array], Array], per_tile: int, count: int):
        self.own, self.gather, self.per_tile = own, gather, per_tile
        self.length = -(-own.size // per_tile // count) * per_tile  # of a section; the last may be shorter
        self.sections: list[Array] = []  # [n, length], those that have crossed

    @property
    def tiles(self) -> int:
        """Tiles of the vector."""
        return self.own.size // self.per_tile

    def whole(self) -> Array:
        """The array."""
        self.length = self.length if self.sections else self.own.size
        return self._shaped(_side_by_side(self.sections[self.fetched(0, self.tiles * TOGETHER, [])]))

    def fetched(self, start: int, stop: int, after: Tree) -> slice:
        """Numbers of the sections for entries [start, stop) of the vector. Those that have not crossed do so now, once
        `after` is computed."""
        first, end = start // TOGETHER * self.per_tile, -(-stop // TOGETHER) * self.per_tile
        if len(self.sections) * self.length < end:
            own = lax.optimization_barrier((self.own, after))[0].reshape(-1)
            begins = range(len(self.sections) * self.length, end, self.length)
            self.sections += [self.gather(own[begin : begin + self.length]) for begin in begins]
        return slice(first // self.length, -(-end // self.length))

    def among(self, sections: Sequence[Array], begin: Array) -> Array:
        """An array of which only some sections are right, which begin at number `begin`; elsewhere are zeros."""
        size, rows = self.own.size, _side_by_side(sections)
        rows = jnp.pad(rows, ((0, 0), (size, size + -rows.shape[1] % self.length)))
        return self._shaped(lax.dynamic_slice_in_dim(rows, size - begin, size, axis=1))

    def cut_out(self, section: int, wanted: np.ndarray) -> Array:
        """All wanted tiles that are in a section: [n, tiles, per_tile]."""
        rows, each = self.sections[section], self.length // self.per_tile
        here = lax.optimization_barrier(jnp.asarray(wanted[wanted // each == section] % each, jnp.int32))
        return rows.reshape(len(rows), -1, self.per_tile).at[:, here].get(mode="promise_in_bounds")

    def of_tiles(self, cut: Sequence[Array], wanted: Any) -> Array:
        """An array of which only the wanted tiles, cut out of all sections, are right; elsewhere is one of them."""
        there, number = jnp.concatenate(cut, axis=1), jnp.arange(self.tiles, dtype=jnp.int32)
        wanted = lax.optimization_barrier(jnp.asarray(wanted, jnp.int32))
        place = jnp.searchsorted(wanted, number, method="scan_unrolled")
        return self._shaped(there.at[:, place].get(mode="clip"))

    def _shaped(self, rows: Array) -> Array:
        return rows.reshape(len(rows), *self.own.shape)


def all_there(messages: Tree) -> Tree:
    """The same with arrays in place of those that are still to come."""
    return jax.tree.map(lambda x: x.whole() if isinstance(x, Arriving) else x, messages)


def made_in_pieces(
    decode: Callable[[Tree], Array], messages: Tree, sizes: Sequence[int], dtype: Any
) -> tuple[Array, ...]:
    """Pieces of these sizes of decode(messages): each of the `APART` largest by itself, if it is long. Of the others
    those that lie side by side are cut out of a vector of their own; where they are few entries, all out of one.

    Each loop decodes some entries of messages that are handed on to it (`_Reader`), from where they begin (`operands`).

    dtype: of the leaves that the pieces will be. Later loops wait for pieces that are rounded to it, as leaves are:
        what waits for a piece makes it an array.
    """
    order = np.argsort(sizes, kind="stable")[::-1][:APART].tolist()
    large = {i for i in order if sizes[i] >= LONG}
    some = [i for i in range(len(sizes)) if sizes[i]]
    small = [i for i in some if i not in large]
    starts, decode, pieces = starts_of(sizes), jax.jit(decode), {}
    gathered = bool(large) and FEW_ENTRIES * sum(sizes[i] for i in small) <= sum(sizes)
    runs = [list(run) for _, run in itertools.groupby(some, lambda i: i if i in large else -1)]
    runs = [run for run in runs if run[0] in large] if gathered else runs
    ends = [(starts[run[0]], starts[run[-1]] + sizes[run[-1]]) for run in runs]
    if any(2 * (stop - start) > sum(sizes) for start, stop in ends):  # whose sections are half of the message
        messages = all_there(messages)
    begins = operands([start for start, _ in ends])
    few = [(starts[i] // TOGETHER, -(-(starts[i] + sizes[i]) // TOGETHER)) for i in small if gathered]
    reader = _Reader(messages, sorted({tile for span in few for tile in range(*span)}))
    for run, (start, stop), begin in zip(runs, ends, begins, strict=True):
        vector = lax.dynamic_slice_in_dim(decode(reader.read(start, stop)), begin, stop - start)
        reader.done.append(vector if vector.dtype.itemsize <= jnp.dtype(dtype).itemsize else bounded(vector, dtype))
        pieces |= zip(run, cut_apart(vector, [sizes[i] for i in run]), strict=True)
    if gathered and small:
        own = [sizes[i] for i in small]
        shifts, stops = np.asarray(starts)[small] - starts_of(own), np.cumsum(own)
        shifts, stops = operands([shifts, stops])
        entries = jnp.arange(sum(own), dtype=jnp.int32)
        entries += shifts[jnp.searchsorted(stops, entries, side="right", method="scan_unrolled")]
        vector = decode(reader.read_last()).at[entries].get(mode="promise_in_bounds", indices_are_sorted=True)
        pieces |= zip(small, cut_apart(vector, own), strict=True)
    none = vector[:0]
    return tuple(pieces.get(i, none) for i in range(len(sizes)))


class _Reader:
    """Hands messages to loops that decode some entries of them each, one loop after the other: whoever asks for other
    entries than it said gets wrong ones.

    To each loop the messages are handed on by a barrier behind the loop before, or XLA would decode them once, into a
    vector, and copy the pieces out of it, or write several in one loop, which takes long to compile and does not fit
    into registers. Sections of arrays that are still to come (`Arriving`) cross for the first loop that needs them,
    after all loops before it but the last: so the sections of two loops are held, and one may cross beside a loop.

    last: numbers of the tiles, of `TOGETHER` entries, that `read_last` needs. done: what the loops made so far.
    """

    def __init__(self, messages: Tree, last: Sequence[int]):
        self.arrays, self.structure = jax.tree.flatten(messages)
        self.last, self.done = np.asarray(last, int), []
        self.cut: dict[int, list[Array]] = {i: [] for i, x in enumerate(self.arrays) if isinstance(x, Arriving)}

    def read(self, start: int, stop: int) -> Tree:
        """The messages, for entries [start, stop) of their vectors, of which there is one at least."""
        some = {i: self._fetched(i, start, stop) for i in self.cut}
        begins = {i: jnp.asarray(own.start * self.arrays[i].length, jnp.int32) for i, own in some.items()}
        parts = {i: self.arrays[i].sections[own] for i, own in some.items()}
        self._see_anew()
        parts, begins = lax.optimization_barrier((parts, begins))
        for i, own in some.items():
            self.arrays[i].sections[own] = parts[i]
        return self._messages(lambda i, x: x.among(parts[i], begins[i]))

    def read_last(self) -> Tree:
        """The messages, for entries in the tiles `last`."""
        for i, cut in self.cut.items():
            self._fetched(i, 0, self.arrays[i].tiles * TOGETHER)
            cut[:] = lax.optimization_barrier(cut)
        self._see_anew()
        return self._messages(lambda i, x: x.of_tiles(self.cut[i], self.last))

    def _fetched(self, i: int, start: int, stop: int) -> slice:
        """The sections of array i for these entries; of those that cross now the tiles `last` are cut out."""
        x, cut = self.arrays[i], self.cut[i]
        own = x.fetched(start, stop, [*self.done[:-1], *(tiles for each in self.cut.values() for tiles in each[:-1])])
        if self.last.size:
            cut += [x.cut_out(number, self.last) for number in range(len(cut), len(x.sections))]
        return own

    def _see_anew(self) -> None:
        there = lax.optimization_barrier({i: x for i, x in enumerate(self.arrays) if i not in self.cut})
        self.arrays = [there.get(i, x) for i, x in enumerate(self.arrays)]

    def _messages(self, array_of: Callable[[int, Arriving], Array]) -> Tree:
        arrays = [array_of(i, x) if i in self.cut else x for i, x in enumerate(self.arrays)]
        return jax.tree.unflatten(self.structure, arrays)


def _side_by_side(sections: Sequence[Array]) -> Array:
    return sections[0] if len(sections) == 1 else jnp.concatenate(sections, axis=1)
