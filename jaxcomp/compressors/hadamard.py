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

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.backend import form, in_tiles
from jaxcomp.hashing import random_bits
from jaxcomp.norms import block_norms

__all__ = ["Rotation", "rotation_of"]

Array = jax.Array
U32 = jnp.uint32
FACTOR = 6  # log2 of the largest factor
MANY = 2**20  # entries for which other units pay
TILE = 2**18  # entries that are rotated at a time on CPU, in its cache


class Rotation(NamedTuple):
    """size: d;  block: B, a power of two, or 0 for no entries;  rows: whole blocks;  tail: d - B rows."""

    size: int
    block: int
    rows: int
    tail: int

    def forward(self, x: Array, key: Array) -> Array:
        """R x.  x: finite, f[d];  key: shared."""
        if not self.size:
            return x
        first, second = self._signs(key)
        y = _blockwise(x[: self.rows * self.block], first, self.block, True)
        if not self.tail:
            return y
        y = jnp.concatenate([y, x[self.rows * self.block :]])
        last = _blockwise(y[-self.block :], second, self.block, True)
        return lax.dynamic_update_slice(y, last, (self.size - self.block,))

    def backward(self, y: Array, key: Array) -> Array:
        """R^T y."""
        if not self.size:
            return y
        first, second = self._signs(key)
        if self.tail:
            last = _blockwise(y[-self.block :], second, self.block, False)
            y = lax.dynamic_update_slice(y, last, (self.size - self.block,))
        x = _blockwise(y[: self.rows * self.block], first, self.block, False)
        return jnp.concatenate([x, y[self.rows * self.block :]]) if self.tail else x

    def _signs(self, key: Array) -> tuple[Array, Array]:
        """Bits of the signs of all whole blocks, and of the last one."""
        words = random_bits(key, -(-self.rows * self.block // 32) + -(-self.block // 32))
        return words[: -(-self.rows * self.block // 32)], words[-(-self.block // 32) :]

    # Pieces of a rotated vector whose entries have one distribution: whole blocks, what was left of the last of them,
    # and the last B entries.

    @property
    def pieces(self) -> int:
        """How many there are."""
        return self.rows + (self.tail > 0)

    @property
    def lengths(self) -> list[int]:
        """Length of each piece."""
        if not self.tail:
            return [self.block] * self.rows
        return [self.block] * (self.rows - 1) + [self.tail, self.block]

    def cut(self, y: Array) -> list[Array]:
        """The pieces, those of equal length as the rows of one matrix."""
        if not self.tail:
            return [y.reshape(self.rows, self.block)] if self.rows else []
        whole = (self.rows - 1) * self.block
        parts = [y[:whole].reshape(self.rows - 1, self.block)] if whole else []
        return [*parts, y[whole : self.size - self.block][None], y[self.size - self.block :][None]]

    def deviations(self, x: Array, y: Array) -> list[Array]:
        """Root mean square of the blocks of which the pieces are parts, [rows] for each of `cut`.

        Rotating keeps norms, so those of the whole blocks are those of x.
        """
        if not self.rows:
            return []
        of = lambda blocks: block_norms(blocks, 2) / math.sqrt(self.block)
        whole = of(x[: self.rows * self.block].reshape(self.rows, self.block))
        if not self.tail:
            return [whole]
        last = of(y[None, self.size - self.block :])
        return [*([whole[:-1]] if self.rows > 1 else []), whole[-1:], last]


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


def _times_in_f32(x: Array, size: int) -> Array:
    """x H / sqrt(size)."""
    return jnp.matmul(x, _matrix(size, x.dtype), precision=lax.Precision.HIGHEST)


def _times(x: Array, size: int) -> Array:
    """The same, on units that take bfloat16. Entries of H are exact in it, and three such numbers hold an f32: of the
    six products that the algorithm adds up in f32, three are not zero, and these are exact. Of few entries XLA would
    split the sums, and write their parts.
    """
    if x.dtype != jnp.float32 or x.size < MANY:
        return _times_in_f32(x, size)
    signs = jnp.sign(_matrix(size, x.dtype))
    return jnp.matmul(x, signs, precision=lax.DotAlgorithmPreset.BF16_BF16_F32_X6) * jnp.float32(1 / math.sqrt(size))


def _hadamard(rows: Array, forward: bool) -> Array:
    """[m, B] -> [m, B]: the product with all factors. Backward is the inverse of forward."""
    count, block = rows.shape
    factors = _factors(block)
    times = form(_times, on_cpu=_times_in_f32)
    if forward:
        for place, f in enumerate(reversed(factors)):
            rows = times(rows.reshape(count, block // f, f), f)
            rows = rows.swapaxes(1, 2) if place < len(factors) - 1 else rows
    else:
        for place, f in enumerate(factors):
            rows = rows if place == 0 else rows.reshape(count, f, block // f).swapaxes(1, 2)
            rows = times(rows.reshape(count, block // f, f), f)
    return rows.reshape(count, block)


def _flipped(x: Array, words: Array) -> Array:
    """Entries with the signs that bits say: bit i of word w is of entry 32 w + i."""
    bits = (words[:, None] >> lax.iota(U32, 32)[None]) & U32(1)
    signs = 1 - 2 * bits.reshape(-1)[: x.shape[0]].astype(x.dtype)
    return x * signs


def _blockwise(x: Array, words: Array, block: int, forward: bool) -> Array:
    """Transforms whole blocks, [m B]."""

    def some(args: tuple[Array, Array]) -> Array:
        x, words = args
        x = _flipped(x, words) if forward else x
        x = _hadamard(x.reshape(-1, block), forward).reshape(-1)
        return x if forward else _flipped(x, words)

    return in_tiles(some, max(block, TILE), x, words)
