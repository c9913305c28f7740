"""Unsigned integers of a fixed number of bits as bytes, on the host, vectorised."""

import numpy as np

__all__ = ["pack_bits", "packed_size", "unpack_bits"]

CHUNK = 1 << 16  # values at a time; a multiple of 8, so each chunk starts on a byte


def packed_size(count: int, width: int) -> int:
    """Bytes of `count` integers of `width` bits."""
    return (count * width + 7) // 8


def pack_bits(values: np.ndarray, width: int) -> bytes:
    """Integer i occupies bits [i*width, (i+1)*width) of the stream, least significant bit first.

    Args:
        values: unsigned, below 2^width, any length.
        width: 1 to 32.

    >>> pack_bits(np.array([1, 2, 3]), 4).hex()
    '2103'
    """
    values = np.ascontiguousarray(values, "<u4")
    parts = []
    for start in range(0, values.size, CHUNK):
        chunk = values[start : start + CHUNK]
        bits = np.unpackbits(chunk.view(np.uint8).reshape(-1, 4), axis=1, bitorder="little")[:, :width]
        parts.append(np.packbits(bits, bitorder="little").tobytes())
    return b"".join(parts)


def unpack_bits(data: memoryview, count: int, width: int) -> np.ndarray:
    """Inverse of `pack_bits`; `data` has exactly `packed_size(count, width)` bytes.

    >>> unpack_bits(memoryview(bytes.fromhex("2103")), 3, 4)
    array([1, 2, 3], dtype=uint32)
    """
    values = np.empty(count, np.uint32)
    stream = np.frombuffer(data, np.uint8)
    for start in range(0, count, CHUNK):
        size = min(CHUNK, count - start)
        first = start * width // 8
        bits = np.unpackbits(stream[first : first + packed_size(size, width)], count=size * width, bitorder="little")
        padded = np.zeros((size, 32), np.uint8)
        padded[:, :width] = bits.reshape(size, width)
        values[start : start + size] = np.packbits(padded, axis=1, bitorder="little").view("<u4")[:, 0]
    return values
