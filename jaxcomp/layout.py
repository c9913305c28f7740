"""A tree as few flat vectors, and back. Algorithms, memories and compressors see only the vectors.

    tree --split--> Parts(dense, vectors) --join--> tree

`dense` holds the leaves that are too small to be worth compressing, end to end. `vectors` are one-dimensional, or
stacks: arrays with a leading axis of rows, each of which is compressed by itself, by one instance of the compressor
in the compiled program. Compile time follows the number of vectors, not the number of leaves.

Where there is only one vector and nothing dense (a bare array, `flat`), it stands for itself, without `Parts`.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.arrays import bounded, is_array, like_of, wide
from jaxcomp.backend import LONG, Pieces, SparseSum, cut_apart, end_to_end, joined
from jaxcomp.paths import numbers_by_path

__all__ = [
    "ALONE",
    "DEFAULT",
    "DENSE_BELOW",
    "WHOLE_BLOCKS",
    "Group",
    "Layout",
    "Parts",
    "Plan",
    "TooLong",
    "dense_of",
    "join",
    "layout_of",
    "plan_of",
    "row_size",
    "rows_of",
    "split",
]

Array = jax.Array
DENSE_BELOW = 1024  # entries
LONGEST = 2**30  # entries of a vector: indices, and the bits of their masks, are 32-bit integers
ALONE = 64  # leaves in vectors of their own, where that pays; each of them adds 0.05 to 0.2 s to compiling
KINDS = 4  # sizes of such leaves; each of them adds half a second
LARGE = 2**18  # entries of a leaf that may be a vector of its own
UNITS = ("tree", "leaf", "apart", "shape", "chunks", "paths")


class TooLong(ValueError):
    """A vector has more entries than its indices can number: other messages can still be sent."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """How leaves become vectors.

    unit: "tree": all large leaves of one dtype end to end.
        "leaf": each large leaf by itself; leaves with equally many entries are the rows of a stack.
        "apart": each large leaf by itself, in a vector of its own.
        "shape": leaves of equal shape [r, ...] are the rows of a stack [m, r, ...]; vectors and scalars go dense.
        "paths": a tuple, with the vectors of each of `parts`, or None for a part that has no leaf here.
        "chunks": all leaves end to end, cut into `chunks` equal rows, the last one filled up with zeros.
    dense_below: leaves with fewer entries go dense.
    single: with "tree", all leaves in one vector whatever their dtypes, the widest of which it has.
    chunks: number of rows.
    bucket_bytes: leaves are put together, from the last to the first, until they have so many bytes; a vector holds
        leaves of one bucket. The gradients of the last leaves come first out of a backward pass.
    whole_blocks: with "tree", long vectors are filled up with zeros to a multiple of 1024 entries, which the usual
        blocks and words divide: with a shorter last block codes of few bits take several times as long.
    longest: vectors with more entries are cut into equal rows; longer chunks are refused. Leaves of "shape" stay whole:
        they are matrices, of which no entry is numbered.
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
    whole_blocks: bool = False
    longest: int = LONGEST
    alone: int = 0
    parts: tuple[tuple[str, "Layout"], ...] = ()

    def together(self) -> "Layout":
        """The same without vectors of single leaves."""
        parts = tuple((pattern, part.together()) for pattern, part in self.parts)
        return dataclasses.replace(self, alone=0, parts=parts)

    def in_buckets(self, bucket_bytes: int) -> "Layout":
        """The same, bucket by bucket."""
        return dataclasses.replace(self, bucket_bytes=bucket_bytes, single=False)


DEFAULT, WHOLE_BLOCKS = Layout(), Layout(whole_blocks=True)


def layout_of(algorithm: Any) -> Layout:
    """How an algorithm lays out trees: as its lifted compressor says, if it has one."""
    layout, lifted = algorithm.layout or DEFAULT, algorithm.compressor
    return layout if lifted is None or lifted.spec.lifted is None else lifted.spec.lifted.layout


class Parts(NamedTuple):
    """dense: [m], small leaves end to end, or () where no leaf is small;  vectors: [d] or [rows, ...] each.

    Without small leaves there is no array of no entries: memories are laid out alike, and Orbax writes none.
    """

    dense: Any
    vectors: tuple[Any, ...]


class Group(NamedTuple):
    """leaves: their numbers;  shape: of the vector;  rows: whether each leaf is a row of it;  bucket: its number."""

    leaves: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: Any
    rows: bool
    bucket: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """Where each leaf of a tree lies. Static and hashable: a state that was laid out carries it.

    structure: of the tree;  shapes, dtypes: of its leaves;  dense: numbers of the small ones;  bare: no `Parts`;
    parts: of a layout by paths, each with the numbers of its leaves and their own plan, or None without any. Such a
    plan has no groups of its own.
    """

    structure: Any
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[Any, ...]
    dense: tuple[int, ...]
    groups: tuple[Group, ...]
    bare: bool
    parts: "tuple[tuple[tuple[int, ...], Plan | None], ...]" = ()

    @property
    def like(self) -> Any:
        """Shapes of the vectors."""
        if self.parts:
            return tuple(None if part is None else part.like for _, part in self.parts)
        vectors = tuple(jax.ShapeDtypeStruct(group.shape, group.dtype) for group in self.groups)
        if self.bare:
            return vectors[0]
        if not self.dense:
            return Parts((), vectors)
        size = sum(math.prod(self.shapes[i]) for i in self.dense)
        return Parts(jax.ShapeDtypeStruct((size,), _common(self.dtypes[i] for i in self.dense)), vectors)

    @property
    def tree(self) -> Any:
        """Shapes of the tree."""
        pairs = zip(self.shapes, self.dtypes, strict=True)
        return jax.tree.unflatten(self.structure, [jax.ShapeDtypeStruct(*pair) for pair in pairs])

    @property
    def buckets(self) -> tuple[int, ...]:
        """Number of the bucket of each vector."""
        return tuple(group.bucket for group in self.groups)


def with_dtypes(plan: Plan, tree: Any) -> Plan:
    """The same vectors for a tree whose leaves have other dtypes, say gradients of other precision than parameters."""
    dtypes = tuple(leaf.dtype for leaf in jax.tree.leaves(like_of(tree)))
    groups = tuple(group._replace(dtype=_common(dtypes[i] for i in group.leaves)) for group in plan.groups)
    leaves = jax.tree.leaves(like_of(tree))
    parts = tuple(
        (numbers, None if part is None else with_dtypes(part, tuple(leaves[i] for i in numbers)))
        for numbers, part in plan.parts
    )
    return dataclasses.replace(plan, dtypes=dtypes, groups=groups, parts=parts)


def _common(dtypes: Iterable[Any]) -> Any:
    """The one floating type that all fit in; f32 for none."""
    kinds = set(dtypes)
    return kinds.pop() if len(kinds) == 1 else wide(*kinds)


def plan_of(layout: Layout, tree: Any) -> Plan:
    """Lays out a tree of arrays or of their shapes.

    Raises:
        ValueError: a leaf is not a real floating-point array; patterns of paths that do not fit the tree.
        TooLong: chunks would be longer than `longest`.
    """
    tree = like_of(tree)
    leaves, structure = jax.tree.flatten(tree)
    shapes, dtypes = tuple(leaf.shape for leaf in leaves), tuple(leaf.dtype for leaf in leaves)
    plan = functools.partial(Plan, structure, shapes, dtypes)
    if layout.unit == "paths":
        found = numbers_by_path("by_path", [pattern for pattern, _ in layout.parts], tree)
        each = [
            (numbers, plan_of(part, tuple(leaves[i] for i in numbers)) if numbers else None)
            for numbers, (_, part) in zip(found, layout.parts, strict=True)
        ]
        return plan((), (), False, tuple(each))
    if layout.unit == "chunks":
        size = sum(leaf.size for leaf in leaves)
        row = row_size(size, layout.chunks)
        if row > layout.longest:
            raise TooLong(
                f"{size} entries in {layout.chunks} chunks, one for each worker, are {row} in each, more than "
                f'{layout.longest}. Take more workers, means of parts of the tree, or via="gather", which cuts long '
                "vectors into rows"
            )
        return plan((), (Group(tuple(range(len(leaves))), (layout.chunks, row), _common(dtypes), False, 0),), True)
    is_matrix = layout.unit == "shape" and any(leaf.ndim > 1 for leaf in leaves[:1])
    if (is_array(tree) and not is_matrix) or (layout.unit == "tree" and layout.single):
        every = tuple(range(len(leaves)))
        size = sum(leaf.size for leaf in leaves)
        return plan((), (Group(every, _shape(size, layout), _common(dtypes), False, 0),), True)
    small = lambda leaf: leaf.size < layout.dense_below or (layout.unit == "shape" and leaf.ndim < 2)
    large = [i for i, leaf in enumerate(leaves) if not small(leaf)]
    buckets = _buckets(large, leaves, layout.bucket_bytes)
    groups: dict[Any, list[int]] = {}
    alone = {i: i for i in _alone(large, leaves, layout.alone)}
    for i in large:
        own = {"tree": alone.get(i, ()), "leaf": leaves[i].size, "shape": leaves[i].shape, "apart": i}[layout.unit]
        groups.setdefault((buckets[i], own, leaves[i].dtype), []).append(i)
    made = []
    for (bucket, _, dtype), members in groups.items():
        each, count = leaves[members[0]], len(members)
        stacked = layout.unit == "shape" or (layout.unit == "leaf" and count > 1)
        if layout.unit == "shape":
            shape = (count, *each.shape)
        elif stacked and each.size <= layout.longest:
            shape = (count, each.size)
        else:
            stacked = False
            shape = _shape(sum(leaves[i].size for i in members), layout)
        made.append(Group(tuple(members), shape, dtype, stacked, bucket))
    return plan(tuple(i for i, leaf in enumerate(leaves) if small(leaf)), tuple(made), False)


def row_size(size: int, rows: int) -> int:
    """Entries of each of so many equal rows: a multiple of 32, for whole words, unless that is too coarse.

    Long rows are multiples of 1024, which the usual blocks divide: decoding takes a quarter longer where a last block
    is shorter than the others. This adds less than one percent to the bytes.
    """
    entries = -(-size // rows)
    unit = 1024 if entries >= 2**17 else 32 if entries >= 32 else 1
    return -(-entries // unit) * unit


def _shape(size: int, layout: Layout) -> tuple[int, ...]:
    rows = -(-size // layout.longest)
    if rows > 1:
        return rows, row_size(size, rows)
    return (row_size(size, 1) if layout.whole_blocks and size >= LONG else size,)


def _alone(large: list[int], leaves: list[Any], most: int) -> list[int]:
    """At most so many of the largest leaves, of at most `KINDS` sizes."""
    found = sorted((i for i in large if leaves[i].size >= LARGE), key=lambda i: -leaves[i].size)
    sizes = list(dict.fromkeys(leaves[i].size for i in found))[:KINDS]
    return [i for i in found if leaves[i].size in sizes][:most]


def _buckets(large: list[int], leaves: list[Any], bucket_bytes: int | None) -> dict[int, int]:
    numbers, number, held = {}, 1, 0
    for i in reversed(large):
        if bucket_bytes is not None and held >= bucket_bytes:
            number, held = number + 1, 0
        numbers[i] = number
        held += leaves[i].size * leaves[i].dtype.itemsize
    return numbers


# ------------------------------------------------------------------------------------------------
# In, and out


def split(plan: Plan, tree: Any, *, pieces: bool | tuple[bool, ...] = False) -> Any:
    """The vectors of a tree.

    Args:
        pieces: vectors of several leaves are not joined, but stay `Pieces`; for each part, with a layout by paths.

    Raises:
        ValueError: the tree is another one than was laid out; names the leaf whose shape differs.
    """
    check_fits(plan, tree)
    plan, leaves = with_dtypes(plan, tree), jax.tree.leaves(tree)

    def vector(group: Group) -> Any:
        own = Pieces(tuple(jnp.reshape(leaves[i], (leaves[i].size,)) for i in group.leaves))
        return own if pieces and len(own.leaves) > 1 else joined(own, jax.ShapeDtypeStruct(group.shape, group.dtype))

    if plan.parts:
        own = lambda numbers: tuple(leaves[i] for i in numbers)
        each = pieces if isinstance(pieces, tuple) else (pieces,) * len(plan.parts)
        return tuple(
            None if part is None else split(part, own(numbers), pieces=in_pieces)
            for (numbers, part), in_pieces in zip(plan.parts, each, strict=True)
        )
    vectors = tuple(map(vector, plan.groups))
    if plan.bare:
        return vectors[0]
    if not plan.dense:
        return Parts((), vectors)
    return Parts(end_to_end([leaves[i] for i in plan.dense], plan.like.dense.dtype), vectors)


def dense_of(parts: Parts) -> Any:
    """What is dense as an array (or its shape), with no entries where no leaf is small: as it travels."""
    return jnp.zeros((0,), jnp.float32) if isinstance(parts.dense, tuple) else parts.dense


def check_fits(plan: Plan, tree: Any) -> None:
    """Raises ValueError unless the tree is the one that was laid out."""
    got = like_of(tree)
    if jax.tree.structure(got) != plan.structure:
        raise ValueError(
            f"the state was made for another tree than these gradients: expected {plan.structure}, got "
            f"{jax.tree.structure(got)}"
        )
    for (path, leaf), shape in zip(jax.tree_util.tree_leaves_with_path(got), plan.shapes, strict=True):
        if leaf.shape != shape:
            where = jax.tree_util.keystr(path)
            raise ValueError(f"gradients{where} have shape {leaf.shape}; the state was made for {shape}")


def join(plan: Plan, parts: Any) -> Any:
    """Inverse of `split`; a vector may be a `SparseSum`. Leaves have their own dtypes; what is too large for one is its
    largest number."""
    leaves: list[Any] = [None] * len(plan.shapes)
    if plan.parts:
        for (numbers, part), vectors in zip(plan.parts, parts, strict=True):
            pieces = () if part is None else join(part, vectors)
            for i, piece in zip(numbers, pieces, strict=True):
                leaves[i] = piece
        return jax.tree.unflatten(plan.structure, leaves)
    dense, vectors = (None, (parts,)) if plan.bare else parts
    flat = lambda vector: vector if isinstance(vector, SparseSum) else vector.reshape(-1)
    members = [(group.leaves, flat(vector)) for group, vector in zip(plan.groups, vectors, strict=True)]
    for numbers, vector in [*members, *([(plan.dense, dense)] if plan.dense else [])]:
        pieces = cut_apart(vector, [math.prod(plan.shapes[i]) for i in numbers])
        for i, piece in zip(numbers, pieces, strict=True):
            leaves[i] = lax.reshape(piece, plan.shapes[i])
    leaves = [x if x.dtype == dtype else bounded(x, dtype) for x, dtype in zip(leaves, plan.dtypes, strict=True)]
    return jax.tree.unflatten(plan.structure, leaves)


def rows_of(x: Any) -> int | None:
    """Number of rows of a stack, None for a vector."""
    return x.shape[0] if len(x.shape) > 1 else None
