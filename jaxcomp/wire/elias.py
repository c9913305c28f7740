"""Elias omega codes on the host: gaps between non-zero levels, and the levels, as a stream of bits.

The code of n >= 1 is written back to front: a 0, and before it, while n > 1, the binary digits of n,
after which n becomes the number of those digits less one. 1 -> 0, 2 -> 100, 3 -> 110, 4 -> 101000.

A message of levels is, for each non-zero level, the code of its distance from the one before (the
first counts from -1), a sign bit, and the code of its magnitude. Bits fill bytes from the least
significant one.

Reference: Elias 1975; for gradients Alistarh, Grubic, Li, Tomioka, Vojnovic 2017, section 3.1.
"""

import numpy as np

from jaxcomp.wire.errors import WireError

__all__ = ["decode_gaps", "decode_levels", "elias_length", "encode_gaps", "encode_levels"]

MOST_DIGITS = 32


def elias_length(n: np.ndarray) -> np.ndarray:
    """Bits of the omega code of each n >= 1.

    >>> elias_length(np.array([1, 2, 3, 4, 7, 8, 15, 16]))
    array([ 1,  3,  3,  6,  6,  7,  7, 11])
    """
    n = np.asarray(n, np.int64)
    total = np.ones_like(n)
    while np.any(n > 1):
        digits = np.where(n > 1, _digits(n), 0)
        total += digits
        n = np.where(n > 1, digits - 1, 1)
    return total


def _digits(n: np.ndarray) -> np.ndarray:
    return np.frexp(n.astype(np.float64))[1].astype(np.int64)


def _codes(n: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The code of each n as an integer whose least significant bit comes first, and its length (at most 63)."""
    n = n.astype(np.int64)
    code, length = np.zeros(n.shape, np.uint64), np.ones(n.shape, np.int64)
    while np.any(n > 1):
        on = n > 1
        digits = np.where(on, _digits(n), 0)
        reversed_digits = np.zeros(n.shape, np.uint64)
        for i in range(int(digits.max())):  # most significant digit first in the stream
            bit = (n >> np.maximum(digits - 1 - i, 0)) & 1
            reversed_digits |= np.where(i < digits, bit, 0).astype(np.uint64) << np.uint64(i)
        code = np.where(on, code << digits.astype(np.uint64) | reversed_digits, code)
        length += digits
        n = np.where(on, digits - 1, 1)
    return code, length


def _stream(code: np.ndarray, length: np.ndarray) -> bytes:
    """Codes one after the other, each from its least significant bit."""
    owner = np.repeat(np.arange(length.size), length)
    place = np.arange(length.sum()) - np.repeat(np.cumsum(length) - length, length)
    bits = (code[owner] >> place.astype(np.uint64)) & np.uint64(1)
    return np.packbits(bits.astype(np.uint8), bitorder="little").tobytes()


def encode_gaps(indices: np.ndarray) -> bytes:
    """Distances between ascending indices, the first from -1.

    >>> encode_gaps(np.array([0, 2]))
    b'\\x02'
    """
    return _stream(*_codes(np.diff(indices, prepend=-1)))


def encode_levels(codes: np.ndarray) -> tuple[int, bytes]:
    """Zigzag codes of levels (0, 1, -1, 2, ... -> 0, 1, 2, 3, ...) as number of non-zeros and bytes.

    Args:
        codes: uint32[n].

    >>> encode_levels(np.array([0, 1, 0, 0, 2], np.uint32))
    (2, b'a\\x01')
    """
    where = np.flatnonzero(codes)
    values = codes[where].astype(np.int64)
    gap_code, gap_length = _codes(np.diff(where, prepend=-1))
    level_code, level_length = _codes((values + 1) // 2)
    sign = (values % 2 == 0).astype(np.uint64)
    length = np.stack([gap_length, np.ones_like(gap_length), level_length], 1).reshape(-1)
    return where.size, _stream(np.stack([gap_code, sign, level_code], 1).reshape(-1), length)


class _Bits:
    """Reads numbers from a stream, checking every bit that it takes."""

    def __init__(self, data: memoryview, count: int):
        self.bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little").tolist()
        self.position, self.count = 0, count

    def bit(self) -> int:
        if self.position >= len(self.bits):
            raise WireError("Elias stream", f"{len(self.bits)} bits", f"long enough for {self.count} numbers")
        self.position += 1
        return self.bits[self.position - 1]

    def number(self, field: str) -> int:
        n = 1
        while self.bit():
            if n > MOST_DIGITS:
                raise WireError(field, f"a number of {n + 1} digits", f"at most {MOST_DIGITS} digits")
            value = 1
            for _ in range(n):
                value = 2 * value + self.bit()
            n = value
        return n

    def end(self) -> int:
        """Bytes read; the bits that fill the last one must be zero."""
        used = (self.position + 7) // 8
        if any(self.bits[self.position : 8 * used]):
            raise WireError("Elias padding", "bits that are set", "zeros")
        return used


def decode_gaps(data: memoryview, count: int, size: int) -> np.ndarray:
    """Inverse of `encode_gaps`: int32[count], below size.

    Raises:
        WireError: as `decode_levels`, or bytes are left over.
    """
    bits = _Bits(data, count)
    indices, index = [], -1
    for _ in range(count):
        index += bits.number("Elias gap")
        if index >= size:
            raise WireError("Elias index", index, f"below {size}")
        indices.append(index)
    if bits.end() != len(data):
        raise WireError("Elias stream", f"{len(data)} bytes", f"the {bits.end()} that {count} gaps need")
    return np.array(indices, np.int32)


def decode_levels(data: memoryview, count: int, size: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Inverse of `encode_levels`.

    Args:
        data: bytes that start with the stream; may be longer.
        count: number of non-zero levels.
        size: number of levels n.

    Returns:
        Indices of the non-zero levels, their zigzag codes, and the number of bytes read.

    Raises:
        WireError: the stream ends early, an index is not below n, a number is too large, or padding is set.
    """
    bits = _Bits(data, count)
    indices, codes, index = [], [], -1
    for _ in range(count):
        index += bits.number("Elias gap")
        if index >= size:
            raise WireError("Elias index", index, f"below {size}")
        negative = bits.bit()
        level = 2 * bits.number("Elias level") - 1 + negative
        if level >= 2**32:
            raise WireError("Elias level", level, "below 2^32")
        indices.append(index)
        codes.append(level)
    return np.array(indices, np.int64), np.array(codes, np.uint32), bits.end()
