"""What crosses the wire: one NamedTuple of arrays per kind of message.

A payload holds nothing that both ends know already (d, k, the number of levels, seeds). Sizes
(`bits`), bytes (`wire`) and collectives (`exchange`) dispatch on these types, never on the
compressor. A field `values` may itself hold a payload: that is how `compose` nests them.
"""

from typing import Any, NamedTuple

__all__ = ["Dense", "Leaves", "LocalIndices", "Quantized", "Scaled", "Sketch", "Sparse"]

Array = Any  # of JAX inside jit, of NumPy once decoded from bytes


class Dense(NamedTuple):
    """values: float[m]. Plain numbers: all entries, or those of an index set that both ends know."""

    values: Any


class Scaled(NamedTuple):
    """values: narrow float[d];  scale: f32[b], a power of two for each block, or f32[] for all.

    x_hat = values * scale.
    """

    values: Array
    scale: Array


class Sparse(NamedTuple):
    """values: float[k];  indices: i32[k], ascending, unique, padded with d; or `LocalIndices`.

    Padding has value zero. The first padding entry, if any, ends the message: `code_bits` and
    the wire count it, what follows costs nothing there.
    """

    values: Any
    indices: Any


class LocalIndices(NamedTuple):
    """Ascending indices in 16 bits each: block by block of 2^16 entries.

    low: u16[k], the index within its block, padded with zeros;  counts: i32[ceil(d / 2^16)], how many
    indices lie in each block. What is beyond their sum is padding.
    """

    low: Array
    counts: Array


class Quantized(NamedTuple):
    """norms: f32[b], one per block (b may be 0);  words: u32[w, ceil(d / 32)], codes of w bits.

    The layout of the words is that of `packing.pack`. A code is the level in zigzag form
    (0, 1, -1, 2, -2, ... -> 0, 1, 2, 3, 4, ...) for dithering, sign and exponent for natural.
    """

    norms: Array
    words: Array


class Sketch(NamedTuple):
    """What `skcompress` sends: keys in lists, and cells that tell each key's bucket.

    levels: float[q], what each bucket stands for;  counts: i32[r], keys in each list;  keys: i32[k], list after list,
    ascending within each, padded with d;  cells: u32[w, ceil(c / 32)], codes of w bits in the layout of
    `packing.pack`;  zero: i32[0], or, as released, i32[2]: the bucket that holds zero, and the number of buckets.
    """

    levels: Array
    counts: Array
    keys: Array
    cells: Array
    zero: Array


class Leaves(NamedTuple):
    """dense: one message with all small leaves;  leaves: a payload for each large one."""

    dense: Dense
    leaves: tuple[Any, ...]
