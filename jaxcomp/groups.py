"""A tree as groups of leaves, and back. Everything on the road is a tuple with one item for each group.

    tree --split--> (x_1, ..., x_m) --join--> tree

A group is some leaves of the tree, end to end: a vector [d]; or a stack [rows, ...], each row of which is compressed by
itself, by one instance of the compressor in the compiled program. Leaves that are not worth compressing, small ones of
which there are few, are a group, the first one, that goes as it is. A bare array is one group. Gradients, messages,
memories, payloads, states of compressors, means and directions have this one form; compile time follows the number of
groups, not of leaves.
"""

import collections
import contextlib
import dataclasses
import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.arrays import bounded, finite, like_of, wide
from jaxcomp.backend import LONG, Pieces, SparseSum, cut_apart, join_pieces
from jaxcomp.base import Compressor, Spec, State, TooLong
from jaxcomp.paths import numbers_by_path, same_leaves
from jaxcomp.payloads import Dense

__all__ = [
    "ALONE",
    "AS_IT_IS",
    "DEFAULT",
    "DENSE_BELOW",
    "FILLED_IF_LONG",
    "FIXED",
    "WHOLE_BLOCKS",
    "Buckets",
    "Choice",
    "Group",
    "Groups",
    "Layout",
    "compressors_of",
    "groups_of",
    "in_runs",
    "join",
    "row_size",
    "split",
    "warn_if_dense",
    "without_dense_warning",
]

Array = jax.Array
DENSE_BELOW = 1024  # entries
LONGEST = 2**30  # entries of a vector: indices, and the bits of their masks, are 32-bit integers
ALONE = 64  # leaves in vectors of their own, where that pays; each of them adds 0.05 to 0.2 s to compiling
KINDS = 4  # sizes of such leaves; each of them adds half a second
LARGE = 2**18  # entries of a leaf that may be a vector of its own
UNITS = ("tree", "leaf", "apart", "shape", "chunks", "square", "paths")


class Buckets(NamedTuple):
    """size: bytes of a bucket. order: paths of leaves, those whose gradients are ready first before the others; leaves
    that are not named come last, and without any they go from the last leaf to the first.
    """

    size: int
    order: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Layout:
    """How leaves become vectors.

    unit: "tree": all large leaves of one dtype end to end.
        "leaf": each large leaf by itself; leaves with equally many entries are the rows of a stack.
        "apart": each large leaf by itself, in a vector of its own.
        "shape": leaves of equal shape [r, ...] are the rows of a stack [m, r, ...]; vectors and scalars go dense.
        "paths": a tuple, with the vectors of each of `parts`, or None for a part that has no leaf here.
        "chunks": all leaves end to end, cut into `chunks` equal rows, the last one filled up with zeros.
        "square": all leaves end to end as one square matrix, a stack [1, s, s], filled up with zeros.
    dense_below: leaves with fewer entries go dense; with "tree", only if those of their dtype have fewer together, too.
    fixed: for a compressor of vectors of one length: beside a large leaf, small ones go dense however many they are.
    single: with "tree", all leaves in one vector whatever their dtypes, the widest of which it has.
    chunks: number of rows.
    bucket_bytes: leaves are put together, from the last to the first, until they have so many bytes; a vector holds
        leaves of one bucket. The gradients of the last leaves come first out of a backward pass.
    bucket_order: paths of leaves, in the order in which their gradients come, in place of that; what it does not name
        is last.
    multiple: with "tree", long vectors are filled up with zeros to a multiple of so many entries: with a shorter last
        block codes of few bits take several times as long, and a shorter last chunk makes a copy of the vector. 1024,
        which the usual blocks and words divide, is `WHOLE_BLOCKS`.
    filled_from: only vectors of so many entries or more are. `FILLED_IF_LONG`, for compressors that send a share of the
        entries, fills those of 2^22 and more, by a 4096th at most: a TPU lays vectors of other lengths out anew.
    longest: with "tree", leaves with more entries together are several vectors. One leaf with more is cut into equal
        rows; longer chunks are refused. Leaves of "shape" stay whole: they are matrices, of which no entry is numbered.
    alone: with "tree", so many of the largest leaves, of at least 2^18 entries and of at most four sizes, are vectors
        of their own: they are neither copied into a vector nor cut out of one (but for blocks that are filled up), at
        the price of their arithmetic in the compiled program.
    parts: with "paths", pairs of a pattern of paths and the layout of the leaves that it takes (`jaxcomp.paths`).
    """

    unit: str = "tree"
    dense_below: int = DENSE_BELOW
    single: bool = False
    chunks: int = 1
    bucket_bytes: int | None = None
    bucket_order: tuple[str, ...] = ()
    multiple: int = 1
    filled_from: int = 0
    longest: int = LONGEST
    alone: int = 0
    parts: tuple[tuple[Any, "Layout"], ...] = ()
    fixed: bool = False

    def together(self) -> "Layout":
        """The same without vectors of single leaves."""
        parts = tuple((pattern, part.together()) for pattern, part in self.parts)
        return dataclasses.replace(self, alone=0, parts=parts)

    def in_buckets(self, bucket_bytes: int, order: tuple[str, ...] = ()) -> "Layout":
        """The same, bucket by bucket."""
        return dataclasses.replace(self, bucket_bytes=bucket_bytes, bucket_order=order, single=False)


DEFAULT, WHOLE_BLOCKS, FIXED = Layout(), Layout(multiple=1024), Layout(fixed=True)
FILLED_IF_LONG = dataclasses.replace(WHOLE_BLOCKS, filled_from=2**22)


class Group(NamedTuple):
    """Some leaves of a tree as one array.

    leaves: their numbers. shape: of the array, [d], or [rows, ...] of a stack. each: whether each leaf is a row of it.
    small: whether it goes as it is, uncompressed. number: among the groups that are compressed, by which their keys
    differ; None for one that has the key to itself. bucket: number of its bucket. part: of `by_path`, to which it
    belongs. sizes: entries of its leaves.
    """

    leaves: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: Any
    each: bool = False
    small: bool = False
    number: int | None = None
    bucket: int = 0
    part: int = 0
    sizes: tuple[int, ...] = ()

    @property
    def like(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype of the array."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype)

    @property
    def is_stack(self) -> bool:
        """Whether it has rows that are compressed by themselves."""
        return len(self.shape) > 1


@dataclasses.dataclass(frozen=True)
class Groups:
    """The place of each leaf of a tree. Static and hashable: a state that was laid out carries it.

    structure: of the tree;  shapes, dtypes: of its leaves;  groups: in the order of the tuples on the road.
    layout: which made them: where it is the same nothing need be laid out to compare them. Another one may make equal
    groups.
    """

    structure: Any
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[Any, ...]
    groups: tuple[Group, ...]
    layout: Layout = dataclasses.field(default=Layout(), compare=False, repr=False)

    @property
    def like(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes of the arrays."""
        return tuple(group.like for group in self.groups)

    @property
    def tree(self) -> Any:
        """Shapes of the tree."""
        pairs = zip(self.shapes, self.dtypes, strict=True)
        return jax.tree.unflatten(self.structure, [jax.ShapeDtypeStruct(*pair) for pair in pairs])

    def part(self, number: int) -> "Groups":
        """The groups of one part of `by_path`."""
        return dataclasses.replace(self, groups=tuple(group for group in self.groups if group.part == number))


def _common(dtypes: Iterable[Any]) -> Any:
    """The one floating type that all fit in; f32 for none."""
    kinds = set(dtypes)
    return kinds.pop() if len(kinds) == 1 else wide(*kinds)


AS_IT_IS = Compressor(
    init=lambda shared_key, like: State(),
    compress=lambda key, x, state: (Dense(finite(x)), ()),
    decompress=lambda payload, shared, like: payload.values.astype(like.dtype),
    spec=Spec("as it is", omega=lambda d: 0.0, alpha=lambda d: 1.0, linear=True, entrywise=True),
)


class Choice(NamedTuple):
    """Compressor of the groups of a tree, or of a part of it: vectors, and stacks row by row."""

    vector: Compressor
    stack: Compressor


def compressors_of(choices: tuple[Choice, ...], groups: tuple[Group, ...]) -> tuple[Compressor, ...]:
    """The compressor of each group, by the choice of its part, or the only one; small groups go as they are."""
    compressors = []
    for group in groups:
        choice = choices[group.part if len(choices) > 1 else 0]
        compressors.append(AS_IT_IS if group.small else choice.stack if group.is_stack else choice.vector)
    return tuple(compressors)


# ------------------------------------------------------------------------------------------------
# In, and out


def split(groups: Groups, tree: Any, *, pieces: bool | tuple[bool, ...] = False) -> tuple[Any, ...]:
    """The arrays of a tree, in its own dtypes.

    Args:
        pieces: groups of several leaves are not joined, but stay `backend.Pieces`; for each part of `by_path`.

    Raises:
        ValueError: the tree is another one than was laid out; names the leaf whose shape differs.
    """
    check_fits(groups, tree)
    leaves = jax.tree.leaves(tree)

    arrays = []
    for group in groups.groups:
        own: Any = Pieces(tuple(jnp.asarray(leaves[i]) for i in group.leaves))
        unjoined = pieces[group.part] if isinstance(pieces, tuple) else pieces
        if not unjoined or len(own.leaves) == 1 or group.small:
            own = join_pieces(own, jax.ShapeDtypeStruct(group.shape, _common(leaf.dtype for leaf in own.leaves)))
        arrays.append(own)
    return tuple(arrays)


def check_fits(groups: Groups, tree: Any) -> None:
    """Raises ValueError unless the tree is the one that was laid out."""
    got = like_of(tree)
    if jax.tree.structure(got) != groups.structure and not same_leaves(got, groups.tree):
        raise ValueError(
            f"the state was made for another tree than these gradients: expected {groups.structure}, got "
            f"{jax.tree.structure(got)}"
        )
    for (path, leaf), shape in zip(jax.tree_util.tree_leaves_with_path(got), groups.shapes, strict=True):
        if leaf.shape != shape:
            where = jax.tree_util.keystr(path)
            raise ValueError(f"gradients{where} have shape {leaf.shape}; the state was made for {shape}")


def join(groups: Groups, arrays: tuple[Any, ...], like: Any = None) -> Any:
    """Inverse of `split`; an array may be a `backend.SparseSum` or `backend.Pieces`.

    What is too large for a leaf is its largest number.

    like: tree whose dtypes and containers the leaves get; None: those that were laid out.
    """
    like = groups.tree if like is None else like_of(like)
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(like)]
    leaves: list[Any] = [None] * len(groups.shapes)
    for group, array in zip(groups.groups, arrays, strict=True):
        if isinstance(array, Pieces):
            pieces = array.leaves
        else:
            array = array if isinstance(array, SparseSum) else array.reshape(-1)
            shapes = [groups.shapes[i] for i in group.leaves] if len(group.shape) == 1 else ()
            pieces = cut_apart(array, group.sizes, [dtypes[i] for i in group.leaves], shapes)
        for i, piece in zip(group.leaves, pieces, strict=True):
            leaf = lax.reshape(piece, groups.shapes[i])
            leaves[i] = leaf if leaf.dtype == dtypes[i] else bounded(leaf, dtypes[i])
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


# ------------------------------------------------------------------------------------------------
# How a tree is laid out, once


def groups_of(layout: Layout, tree: Any) -> Groups:
    """Lays out a tree of arrays or of their shapes.

    Raises:
        ValueError: a leaf is not a real floating-point array; patterns of paths that do not fit the tree.
        TooLong: chunks would be longer than `longest`.
    """
    tree = like_of(tree)
    leaves, structure = jax.tree.flatten(tree)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    shapes, dtypes = tuple(leaf.shape for leaf in leaves), tuple(leaf.dtype for leaf in leaves)
    every = dict(enumerate(leaves))
    if layout.unit == "paths":
        found = numbers_by_path("by_path", [pattern for pattern, _ in layout.parts], tree)
        groups = [
            group._replace(part=number)
            for number, (own, (_, part)) in enumerate(zip(found, layout.parts, strict=True))
            for group in (_grouped(part, {i: leaves[i] for i in own}, paths, bare=False) if own else ())
        ]
    else:
        groups = _grouped(layout, every, paths, bare=paths == [""])
    groups = [group._replace(sizes=tuple(leaves[i].size for i in group.leaves)) for group in groups]
    return Groups(structure, shapes, dtypes, tuple(groups), layout)


def _grouped(layout: Layout, leaves: dict[int, Any], paths: list[str], bare: bool) -> list[Group]:
    """The groups of some leaves, by their numbers. paths: of all leaves."""
    size = lambda some: sum(leaves[i].size for i in some)
    dtype = lambda some: _common(leaves[i].dtype for i in some)
    every = list(leaves)
    if layout.unit == "chunks":
        row = row_size(size(every), layout.chunks)
        if row > layout.longest:
            raise TooLong(
                f"{size(every)} entries in {layout.chunks} chunks, one for each worker, are {row} in each, more than "
                f'{layout.longest}. Take more workers, means of parts of the tree, or via="gather", which cuts long '
                "vectors into rows"
            )
        return [Group(tuple(every), (layout.chunks, row), dtype(every))]
    if layout.unit == "square":
        side = math.isqrt(max(size(every), 1) - 1) + 1
        return [Group(tuple(every), (1, side, side), dtype(every))]
    by_shape = layout.unit == "shape"
    is_matrix = by_shape and any(leaf.ndim > 1 for leaf in leaves.values())
    if (bare and not is_matrix) or (layout.unit == "tree" and layout.single):
        runs = [every] if bare else _runs(every, leaves, layout.longest)
        return [
            Group(tuple(run), _shape(size(run), layout), dtype(run), number=number if len(runs) > 1 else None)
            for number, run in enumerate(runs)
        ]
    is_small = lambda leaf: leaf.size < layout.dense_below or (by_shape and leaf.ndim < 2)
    small = [i for i, leaf in leaves.items() if is_small(leaf)]
    if layout.unit == "tree" and not (layout.fixed and len(small) < len(leaves)):
        held = collections.Counter()
        for i in small:
            held[leaves[i].dtype] += leaves[i].size
        small = [i for i in small if held[leaves[i].dtype] < layout.dense_below]
    kept = set(small)
    large = [i for i in leaves if i not in kept]
    buckets = _buckets(large, leaves, layout, paths)
    alone = {i: i for i in _alone(large, leaves, layout.alone)}
    together: dict[Any, list[int]] = {}
    for i in large:
        own = {"tree": alone.get(i, ()), "leaf": leaves[i].size, "shape": leaves[i].shape, "apart": i}[layout.unit]
        together.setdefault((buckets[i], own, leaves[i].dtype), []).append(i)
    made = [Group(tuple(small), (size(small),), dtype(small), small=True)] if small else []
    vectors = [
        (bucket, members)
        for (bucket, *_), found in together.items()
        for members in (_runs(found, leaves, layout.longest) if layout.unit == "tree" else [found])
    ]
    for number, (bucket, members) in enumerate(vectors):
        first, count = leaves[members[0]], len(members)
        each = by_shape or (layout.unit == "leaf" and count > 1 and first.size <= layout.longest)
        row = first.shape if by_shape else (first.size,)
        shape = (count, *row) if each else _shape(size(members), layout)
        made.append(Group(tuple(members), shape, dtype(members), each, number=number, bucket=bucket))
    return made


def warn_if_dense(name: str, *parts: Groups) -> None:
    """Warns where every leaf, of all parts of a tree, goes as it is, so that a compressor, or a matrix of it, does
    nothing.
    """
    groups = [group for part in parts for group in part.groups]
    if groups and all(group.small for group in groups):
        leaves = [leaf for part in parts for leaf in jax.tree.leaves(part.tree)]
        size = sum(leaf.size for leaf in leaves)
        warnings.warn(
            f"{name}: nothing is compressed: {len(leaves)} leaves with {size} entries together are sent as they "
            "are, since small leaves cost more to compress than they save. To compress them all the same, wrap the "
            "compressor, jc.flat(compressor), or give dense_below=0 where there is that option",
            stacklevel=3,
        )


@contextlib.contextmanager
def without_dense_warning() -> Iterator[None]:
    """A context in which `warn_if_dense` is silent: for what is traced twice, and parts that are told of together."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*nothing is compressed")
        yield


def row_size(size: int, rows: int) -> int:
    """Entries of each of so many equal rows: a multiple of 32, for whole words, unless that is too coarse.

    Long rows are multiples of 1024, which the usual blocks divide: decoding takes a quarter longer where a last block
    is shorter than the others. This adds less than one percent to the bytes.
    """
    entries = -(-size // rows)
    unit = 1024 if entries >= 2**17 else 32 if entries >= 32 else 1
    return -(-entries // unit) * unit


def in_runs(items: Sequence[int], sizes: Any, most: float, enough: float = math.inf) -> list[list[int]]:
    """Items in their order, in runs that have `enough` entries or at most `most`; one with more is by itself."""
    runs, held = [[]], 0
    for i in items:
        if runs[-1] and (held >= enough or held + sizes[i] > most):
            runs, held = [*runs, []], 0
        runs[-1].append(i)
        held += sizes[i]
    return runs


def _shape(size: int, layout: Layout) -> tuple[int, ...]:
    rows = -(-size // layout.longest)
    if rows > 1:
        return rows, row_size(size, rows)
    return (-(-size // layout.multiple) * layout.multiple if size >= max(LONG, layout.filled_from) else size,)


def _runs(members: list[int], leaves: dict[int, Any], longest: int) -> list[list[int]]:
    """The leaves in their order, as few vectors of about one length as hold `longest` entries each: rows of a stack
    would be cut out of it and put back. A leaf that is longer is by itself.
    """
    sizes = {i: leaves[i].size for i in members}
    size = sum(sizes.values())
    return in_runs(members, sizes, longest, enough=size / max(1, -(-size // longest)))


def _alone(large: list[int], leaves: dict[int, Any], most: int) -> list[int]:
    """At most so many of the largest leaves, of at most `KINDS` sizes."""
    found = sorted((i for i in large if leaves[i].size >= LARGE), key=lambda i: -leaves[i].size)
    sizes = list(dict.fromkeys(leaves[i].size for i in found))[:KINDS]
    return [i for i in found if leaves[i].size in sizes][:most]


def _buckets(large: list[int], leaves: dict[int, Any], layout: Layout, paths: list[str]) -> dict[int, int]:
    """The number of the bucket of each leaf, from 1."""
    numbers, number, held = {}, 1, 0
    ranks = {path: rank for rank, path in enumerate(layout.bucket_order)}
    if ranks and large and not any(paths[i] in ranks for i in large):
        raise ValueError(f"bucket_bytes: its order names no leaf of this tree, of which one is {paths[large[0]]}")
    for i in sorted(large, key=lambda i: (ranks.get(paths[i], len(ranks)), -i)):
        if layout.bucket_bytes is not None and held >= layout.bucket_bytes:
            number, held = number + 1, 0
        numbers[i] = number
        held += leaves[i].size * leaves[i].dtype.itemsize
    return numbers
