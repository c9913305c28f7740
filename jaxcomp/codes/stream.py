"""Codes of varying length as a stream of bits in uint32 words.

Bit p of a stream is bit p % 32 of word p // 32, counted from the least significant one; a code starts with its
least significant bit. As little-endian bytes this is the order of `wire.bitstream`.

The Elias omega code of n >= 1 is written back to front: a 0, and before it, while n > 1, the binary digits of n, after
which n becomes the number of those digits less one. 1 -> 0, 2 -> 100, 3 -> 110, 4 -> 101000. `wire.elias` writes and
reads it.

Reference: Elias 1975.
"""

from typing import Any

from jaxcomp.arrays import bit_length, namespace
from jaxcomp.codes.arrays import gather, running_sum, scatter_bits

__all__ = ["code_starts", "elias_length", "low_bits", "pack_codes", "read_fields"]

Array = Any


def code_starts(lengths: Array) -> Array:
    """Exclusive running sum: where each code starts. i32[n]."""
    return running_sum(lengths.astype(namespace(lengths).int32)) - lengths


def low_bits(x: Array, widths: Array) -> Array:
    """The lowest `widths` (0 .. 32) bits of each uint32."""
    xp = namespace(x)
    widths = xp.asarray(widths).astype(xp.uint32)
    mask = xp.where(widths >= 32, xp.uint32(0xFFFFFFFF), (xp.uint32(1) << (widths & xp.uint32(31))) - xp.uint32(1))
    return x & mask


def pack_codes(codes: Array, lengths: Array, num_words: int) -> tuple[Array, Array]:
    """Codes one after the other.

    Args:
        codes: u32[n]; bits beyond the length are dropped.
        lengths: i32[n], 0 .. 32; 0 leaves a code out.
        num_words: capacity. What does not fit is dropped.

    Returns:
        words u32[num_words], unused bits zero, and the number of bits i32[], which may exceed the capacity. Their
        sum must be below 2^31.

    >>> import jax.numpy as jnp
    >>> words, bits = pack_codes(jnp.array([1, 2, 3], jnp.uint32), jnp.array([1, 5, 2]), 1)
    >>> print(words, bits)
    [197] 8
    """
    xp = namespace(codes)
    words = scatter_bits([(low_bits(codes, lengths), code_starts(lengths))], num_words)
    return words, xp.sum(lengths, dtype=xp.int32)


def read_fields(words: Array, starts: Array, widths: Array) -> Array:
    """Numbers of given widths at given places of a stream; bits beyond its end read as zero.

    Args:
        words: u32[w].
        starts: i32[...], not negative.
        widths: i32, 0 .. 32, of the same shape or a scalar.

    Returns:
        u32[...].

    >>> import jax.numpy as jnp
    >>> print(read_fields(jnp.array([197], jnp.uint32), jnp.array([0, 1, 6]), jnp.array([1, 5, 2])))
    [1 2 3]
    """
    xp = namespace(words)
    word, shift = starts >> 5, (starts & 31).astype(xp.uint32)
    low = gather(words, word) >> shift
    # A shift by 32 is undefined.
    high = xp.where(shift == 0, xp.uint32(0), gather(words, word + 1) << ((xp.uint32(32) - shift) & xp.uint32(31)))
    return low_bits(low | high, widths)


def elias_length(n: Array) -> Array:
    """Bits of the omega code of each n in 1 .. 2^32 - 1: i32.

    >>> import numpy as np
    >>> elias_length(np.array([1, 2, 3, 4, 7, 8, 15, 16]))
    array([ 1,  3,  3,  6,  6,  7,  7, 11], dtype=int32)
    """
    xp = namespace(n)
    n = n.astype(xp.uint32)
    total = xp.ones(n.shape, xp.int32)
    for _ in range(5):  # 2^31 has 32 digits, 31 has 5, 4 has 3, 2 has 2
        digits = bit_length(n)
        total = total + xp.where(n > 1, digits, 0)
        n = xp.where(n > 1, digits - 1, 1).astype(xp.uint32)
    return total
