"""Unsigned integers of a fixed number of bits as bytes, on the host, vectorised."""

import numpy as np

__all__ = ["pack_bits", "pack_words", "packed_size", "unpack_bits", "unpack_words"]

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


def pack_words(indices: np.ndarray, codes: np.ndarray, width: int, groups: int) -> np.ndarray:
    """What `packing.pack` makes of 32 * groups codes, of which only some are not zero: uint32[width, groups].

    Args:
        indices: of the codes that are not zero, distinct.
        codes: these, below 2^width.

    >>> unpack_words(pack_words(np.array([1, 3]), np.array([7, 9]), 5, 1))[:4]
    array([0, 7, 0, 9], dtype=uint32)
    """
    words = np.zeros((width, groups), np.uint32)
    place, group = np.divmod(np.asarray(indices, np.int64), max(groups, 1))
    row, shift = np.divmod(place * width, 32)
    value = np.asarray(codes, np.uint64) << shift.astype(np.uint64)
    np.bitwise_or.at(words, (row, group), (value & np.uint64(0xFFFFFFFF)).astype(np.uint32))
    high = (value >> np.uint64(32)).astype(np.uint32)
    over = np.flatnonzero(high)
    np.bitwise_or.at(words, (row[over] + 1, group[over]), high[over])
    return words


def unpack_words(words: np.ndarray) -> np.ndarray:
    """All codes of words uint32[width, G]: uint32[32 G]."""
    width, groups = words.shape
    rows = np.ascontiguousarray(words.T, "<u4")
    bits = np.unpackbits(rows.view(np.uint8).reshape(groups, 4 * width), axis=1, bitorder="little")
    padded = np.zeros((groups, 32, 32), np.uint8)
    padded[:, :, :width] = bits.reshape(groups, 32, width)
    codes = np.packbits(padded, axis=2, bitorder="little").view("<u4")[:, :, 0]
    return np.ascontiguousarray(codes.T).reshape(-1)
