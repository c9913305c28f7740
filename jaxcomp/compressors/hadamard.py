"""Random rotations of blocks: R = H D / sqrt(B), with the Walsh-Hadamard matrix H and random signs D.

The matrix is a Kronecker product of matrices of at most 64 x 64, H_B = H_a x H_b, so that a block as a matrix X [a, b]
becomes H_a X H_b: products with small matrices, in O(d log B) for factors of fixed size. The result stays transposed,
as (X H_b)^T H_a, which is a rotation as well.

A vector whose length d is no multiple of B is rotated twice: first the whole blocks from its beginning, then the last B
entries as they are by then. Both are orthogonal, so nothing is padded, whatever d; B is at most the largest power of
two in d.

Every entry of a rotated block is a sum of the block's entries with random signs, over sqrt(B), whatever its place. By
Khinchine's inequality its moments are at most those of a normal number of the same variance, E y^2k <= (2k - 1)!!
|x|^2k / B^k, and E|y| >= |x| / sqrt(2 B) (Szarek 1976).
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.backend import cut_apart, end_to_end, form, in_tiles, materialized, rotated
from jaxcomp.backend_tpu import LANES, of_columns, to_columns
from jaxcomp.hashing import random_bits
from jaxcomp.norms import block_norms

__all__ = ["Rotation", "ScaledRows", "rotation_of"]

Array = jax.Array
U32 = jnp.uint32
FACTOR = 6  # log2 of the largest factor
MANY = 2**20  # entries for which other units pay
EXACT = lax.DotAlgorithmPreset.BF16_BF16_F32_X6
CODES = 1024  # of a tile (`packing`)
TILE = 2**18  # entries that are rotated at a time on CPU, in its cache


class ScaledRows(NamedTuple):
    """Rows times a number each.  rows: [m, l], in float16 too, which scales make wider;  scales: [m], None for ones."""

    rows: Array
    scales: Array | None

    @property
    def values(self) -> Array:
        """[m, l]."""
        return self.rows if self.scales is None else self.rows.astype(self.scales.dtype) * self.scales[:, None]


class Rotation(NamedTuple):
    """size: d;  block: B, a power of two, or 0 for no entries;  rows: whole blocks;  tail: d - B rows."""

    size: int
    block: int
    rows: int
    tail: int

    def forward(self, x: Array, key: Array) -> Array:
        """R x.  x: finite, f[d];  key: shared."""
        return end_to_end(self.forward_in_pieces(x, key), x.dtype)

    def forward_in_pieces(self, x: Array, key: Array) -> list[Array]:
        """The same, cut into pieces whose entries have one distribution, those of equal length as the rows of one
        matrix: whole blocks, what was left of the last of them, and the last B entries.
        """
        if not self.size:
            return []
        first, second = self._signs(key)
        if not self.tail:
            return [_blockwise(x, first, self.block, True).reshape(self.rows, self.block)]
        (start, stop), whole = self._alone, (self.rows - 1) * self.block
        most = _blockwise(x, first[: start // 32], self.block, True)
        rest = _blockwise(x[start:stop], first[start // 32 :], self.block, True)
        rest = jnp.concatenate([rest, x[stop:]])
        most, rest = (most if start else rest[:whole]), rest[whole - start :]
        last = _blockwise(rest[self.tail :], second, self.block, True)
        pieces = [most.reshape(self.rows - 1, self.block)] if self.rows > 1 else []
        return [*pieces, rest[None, : self.tail], last[None]]

    def backward(self, y: Array, key: Array) -> Array:
        """R^T y."""
        pieces = cut_apart(y, [math.prod(shape) for shape in self.shapes])
        pieces = [ScaledRows(each.reshape(shape), None) for each, shape in zip(pieces, self.shapes, strict=True)]
        return self.backward_of_pieces(pieces, key, y.dtype)

    def backward_of_pieces(self, pieces: Sequence[ScaledRows], key: Array, dtype: Any) -> Array:
        """The same of a vector in pieces, in a dtype: the inverse of `forward_in_pieces`."""
        if not self.size:
            return jnp.zeros((0,), dtype)
        first, second = self._signs(key)
        if not self.tail:
            return _rows_back(pieces[0], first).astype(dtype)
        start, stop = self._alone
        *most, tail, last = pieces
        rest = [tail.values.reshape(-1), _rows_back(last, second)]
        rest = jnp.concatenate(rest if start else [*(piece.values.reshape(-1) for piece in most), *rest])
        block = _blockwise(rest[: stop - start], first[start // 32 :], self.block, False)
        whole = [_rows_back(most[0], first[: start // 32])] if start else []
        return end_to_end([*whole, block, rest[stop - start :]], dtype)

    @property
    def _alone(self) -> tuple[int, int]:
        """Start and stop of the last whole block, which is rotated by itself, so that a reader of the others reads
        what the products wrote, not a part of it. Where there is no other one, or words of signs would be cut, all
        whole blocks are rotated together, from 0 on.
        """
        stop = self.rows * self.block
        return (stop - self.block if self.block >= 32 and self.rows > 1 else 0), stop

    def _signs(self, key: Array) -> tuple[Array, Array]:
        """Bits of the signs of all whole blocks, and of the last one."""
        whole = -(-self.rows * self.block // 32)
        words = random_bits(key, whole + -(-self.block // 32))
        return words[:whole], words[whole:]

    @property
    def pieces(self) -> int:
        """How many pieces there are."""
        return self.rows + (self.tail > 0)

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Shapes of the matrices of `forward_in_pieces`: how many pieces, and their length."""
        if not self.tail:
            return [(self.rows, self.block)] if self.rows else []
        whole = [(self.rows - 1, self.block)] if self.rows > 1 else []
        return [*whole, (1, self.tail), (1, self.block)]

    def deviations(self, x: Array, pieces: list[Array]) -> list[Array]:
        """Root mean square of the blocks of which the pieces are parts, [rows] for each matrix of pieces.

        Rotating keeps norms, so those of the whole blocks are those of x.
        """
        if not self.rows:
            return []
        of = lambda blocks: block_norms(blocks.reshape(-1, self.block), 2) / math.sqrt(self.block)
        ends = [0, self.rows * self.block]
        if self.tail and self.rows > 1:
            ends.insert(1, (self.rows - 1) * self.block)
        whole = [of(x[start:stop]) for start, stop in itertools.pairwise(ends)]
        return [*whole, of(pieces[-1])] if self.tail else whole


def rotation_of(size: int, block: int) -> Rotation:
    """How vectors of so many entries are rotated in blocks of at most `block`."""
    if not size:
        return Rotation(0, 0, 0, 0)
    block = min(block, 1 << (size.bit_length() - 1))
    return Rotation(size, block, size // block, size % block)


# ------------------------------------------------------------------------------------------------
# Whole blocks


def _factors(block: int) -> list[int]:
    """Powers of two of about equal size, at most 2^6 each, whose product is `block`."""
    log = block.bit_length() - 1
    count = max(1, -(-log // FACTOR))
    return [1 << (log // count + (i < log % count)) for i in range(count)]


def _matrix(size: int, dtype: Any) -> Array:
    """Walsh-Hadamard matrix over sqrt(size)."""
    i = lax.iota(U32, size)
    odd = (lax.population_count(i[:, None] & i[None, :]) & U32(1)).astype(dtype)
    return (1 - 2 * odd) * jnp.asarray(1 / math.sqrt(size), dtype)


def _times(x: Array, size: int) -> Array:
    """x H / sqrt(size)."""
    return _along("...f,fg->...g", x, size)


def _along(how: str, x: Array, size: int) -> Array:
    """`_times` along any axis, as in `einsum`. Of few entries XLA would split the sums, and write their parts."""
    if not _fits(x):
        return jnp.einsum(how, x, _matrix(size, x.dtype), precision=lax.Precision.HIGHEST)
    signs = jnp.sign(_matrix(size, x.dtype))
    products = jnp.einsum(how, x, signs, precision=_exactly(x), preferred_element_type=jnp.float32)
    return products * jnp.float32(1 / math.sqrt(size))


def _fits(x: Array) -> bool:
    """Whether products in 16 bits are exact for these numbers, and pay; on a CPU they do not."""
    pay = form(lambda: x.size >= MANY, on_cpu=lambda: False)()
    return pay and x.dtype in (jnp.float16, jnp.float32)


def _exactly(x: Array) -> Any:
    """How numbers are multiplied by signs before they are added up in f32: as they are in float16, which holds signs,
    else as three numbers in bfloat16, which hold an f32. Of the six products of such numbers that the algorithm adds
    up, three are not zero, and these are exact.
    """
    return EXACT if x.dtype == jnp.float32 else lax.Precision.DEFAULT


def _forward(rows: Array) -> Array:
    """[m, B] -> [m, B]: the product with all factors."""
    count, block = rows.shape
    factors = _factors(block)
    for place, f in enumerate(reversed(factors)):
        rows = _times(rows.reshape(count, block // f, f), f)
        rows = rows.swapaxes(1, 2) if place < len(factors) - 1 else rows
    return rows.reshape(count, block)


def _backward(rows: Array) -> Array:
    """Inverse of `_forward`."""
    count, block = rows.shape
    for place, f in enumerate(_factors(block)):
        rows = rows if place == 0 else rows.reshape(count, f, block // f).swapaxes(1, 2)
        rows = _times(rows.reshape(count, block // f, f), f)
    return rows.reshape(count, block)


def _forward_in_place(rows: Array) -> Array:
    """`_forward` on a GPU: for three factors and more, the products in between leave their results where they read.

    To XLA these are products of many small matrices: the result of one with a single matrix it would transpose, in a
    pass of its own.
    """
    count, block = rows.shape
    factors = _factors(block)
    if not _fits(rows) or len(factors) < 3:
        return _forward(rows)
    rows, after = _times(rows.reshape(-1, factors[-1]), factors[-1]), factors[-1]
    for f in reversed(factors[1:-1]):
        rows, after = _each("mca,mar->mcr", rows.reshape(-1, f, after), f), f * after
    return _each("mca,mar->mrc", rows.reshape(count, factors[0], after), factors[0]).reshape(count, block)


def _backward_in_place(rows: Array) -> Array:
    """`_backward` on a GPU: for two factors and more, the last product is not one, but sums in the loop that flips
    signs behind it. Of a single factor, sums would compute the rows as often as they read them.
    """
    count, block = rows.shape
    factors = _factors(block)
    if not _fits(rows) or len(factors) == 1:
        return _backward(rows)
    after = block // factors[0]
    rows = _each("mca,mra->mcr", rows.reshape(count, after, factors[0]), factors[0])
    for f in factors[1:-1]:
        after //= f
        rows = _each("mca,mar->mcr", rows.reshape(-1, f, after), f)
    return _sums(rows.reshape(-1, factors[-1])).reshape(count, block)


def _each(how: str, rows: Array, size: int) -> Array:
    """Products H / sqrt(size) with each of many small matrices, in f32."""
    signs = jnp.broadcast_to(jnp.sign(_matrix(size, rows.dtype)), (rows.shape[0], size, size))
    products = jnp.einsum(how, signs, rows, precision=_exactly(rows), preferred_element_type=jnp.float32)
    return products * jnp.float32(1 / math.sqrt(size))


def _sums(rows: Array) -> Array:
    """Short rows times H / sqrt(f), by additions: [m, f] -> [m, f].

    An entry of a row is a sum of all its entries, each read by itself: a GPU's loop makes four neighbours at a time,
    reads the row once for them, in words of 16 bytes, and has all sums but the last two in common. Columns are
    gathered, with signs for at most four neighbours: XLA would write to memory columns that are cut out, and longer
    signs. Gathered by their number alone, columns would be rows, and this loop transpose them; and if XLA knew the
    numbers of the rows, it would compute all 2 m f^2 indices while it compiles.
    """
    count, f = rows.shape
    near = min(f, 4)
    shape = (count, f // near, near)
    row = lax.broadcast_in_dim(materialized(lax.iota(jnp.int32, count)), (count, f, 1), (0,))
    by = lax.GatherDimensionNumbers(offset_dims=(), collapsed_slice_dims=(0, 1), start_index_map=(0, 1))
    at = lambda i: lax.concatenate([row, lax.full((count, f, 1), i, jnp.int32)], 2)
    read = lambda i: lax.gather(rows, at(i), by, (1, 1), mode="promise_in_bounds").reshape(shape)
    parts = [read(i) for i in range(f)]
    far, close = (lax.broadcasted_iota(U32, shape, axis) for axis in (1, 2))
    half = f // 2
    while half:
        odd = (far & U32(half // near) if half >= near else close & U32(half)) > 0
        sign = jnp.where(odd, jnp.float32(-1), jnp.float32(1)).astype(rows.dtype)
        parts = [a + sign * b for a, b in zip(parts[:half], parts[half:], strict=True)]
        half //= 2
    return parts[0].reshape(count, f) * jnp.asarray(1 / math.sqrt(f), rows.dtype)


def _flipped(x: Array, words: Array) -> Array:
    """Entries with the signs that bits say: bit i of word w is of entry 32 w + i."""
    bits = (words[:, None] >> lax.iota(U32, 32)[None]) & U32(1)
    signs = 1 - 2 * bits.reshape(-1)[: x.shape[0]].astype(x.dtype)
    return x * signs


def _rows_back(piece: ScaledRows, words: Array) -> Array:
    """Rotates back whole blocks, [m B]. A GPU, whose products read what was written before, scales their results, but
    not those of blocks whose codes do not fill tiles: XLA would write such codes before it looks them up.
    """
    shape = piece.rows.shape
    dtype = piece.rows.dtype if piece.scales is None else piece.scales.dtype
    back = lambda rows: _blockwise(rows.reshape(-1), words, shape[1], False, dtype)
    scaled_after = lambda: ScaledRows(back(piece.rows).reshape(shape), piece.scales).values.reshape(-1)
    return form(lambda: back(piece.values), on_gpu=scaled_after if shape[1] % CODES == 0 else None)()


def _blockwise(x: Array, words: Array, block: int, forward: bool, dtype: Any = None) -> Array:
    """Transforms whole blocks, [m B], from the beginning of x, as many as there are words for; dtype: of the result,
    None for that of x.
    """
    done = rotated(x, words, block, forward)
    if done is not None:
        return done.astype(x.dtype if dtype is None else dtype)
    x = x[: 32 * words.size]
    if dtype is None:
        dtype = x.dtype
    elif not _fits(x):
        x = x.astype(dtype)
    turned = form(_in_columns, on_cpu=_in_rows, on_gpu=_in_rows)
    return in_tiles(lambda args: turned(*args, block, forward), max(block, TILE), x, words).astype(dtype)


def _in_rows(x: Array, words: Array, block: int, forward: bool) -> Array:
    """[m B] -> [m B], with the signs that the words say, before the products or after them."""
    if forward:
        turn = form(_forward, on_gpu=_forward_in_place)
        return turn(_flipped(x, words).reshape(-1, block)).reshape(-1)
    turn = form(_backward, on_gpu=_backward_in_place)
    return _flipped(turn(x.reshape(-1, block)).reshape(-1), words)


def _in_columns(x: Array, words: Array, block: int, forward: bool) -> Array:
    """The same on a TPU, which would pad each axis of a factor, and of the bits of a word, to its lanes: blocks stand
    side by side, as columns, and what their entries have in common is read along them.
    """
    if not x.size or block % (32 * LANES):
        return _in_rows(x, words, block, forward)
    bits = to_columns(words[: x.shape[0] // 32], block // 32)[:, None] >> lax.iota(U32, 32)[None, :, None]
    signs = (1 - 2 * (bits & U32(1)).astype(x.dtype)).reshape(block, -1)
    columns, factors = to_columns(x, block), _factors(block)
    columns = columns * signs if forward else columns
    for place, f in enumerate(reversed(factors) if forward else factors):
        last, first = place == len(factors) - 1, place == 0
        if forward:
            shape, how = (block // f, f, -1), "afm,fg->agm" if last else "afm,fg->gam"
        else:
            shape, how = ((block // f, f, -1), "afm,fg->agm") if first else ((f, block // f, -1), "fam,fg->agm")
        columns = _along(how, columns.reshape(shape), f).reshape(block, -1)
    return of_columns(columns if forward else columns * signs)
