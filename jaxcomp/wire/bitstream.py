"""Unsigned integers of a fixed number of bits as bytes, on the host, vectorised."""

import numpy as np

from jaxcomp.codes.arrays import scatter_bits
from jaxcomp.codes.stream import read_fields

__all__ = ["pack_bits", "pack_words", "packed_size", "stream_bytes", "unpack_bits", "unpack_words", "words_of"]

CHUNK = 1 << 16  # values at a time; a multiple of 32, so each chunk starts on a word


def packed_size(count: int, width: int) -> int:
    """Bytes of `count` integers of `width` bits."""
    return (count * width + 7) // 8


def stream_bytes(words: np.ndarray, bits: int) -> bytes:
    """The first bits of a stream of words, as bytes."""
    return np.ascontiguousarray(words, "<u4").tobytes()[: (int(bits) + 7) // 8]


def words_of(data: memoryview | bytes) -> np.ndarray:
    """Bytes as a stream of words, zeros after the end: u32[ceil(len / 4)]."""
    return np.frombuffer(bytes(data) + bytes(-len(data) % 4), "<u4")


def pack_bits(values: np.ndarray, width: int) -> bytes:
    """Integer i occupies bits [i*width, (i+1)*width) of the stream, least significant bit first.

    Args:
        values: unsigned, below 2^width, any length.
        width: 1 to 32.

    >>> pack_bits(np.array([1, 2, 3]), 4).hex()
    '2103'
    """
    values = np.ascontiguousarray(values, np.uint32)
    places = width * np.arange(min(values.size, CHUNK), dtype=np.int32)
    parts = []
    for start in range(0, values.size, CHUNK):
        chunk = values[start : start + CHUNK]
        bits = width * chunk.size
        parts.append(stream_bytes(scatter_bits([(chunk, places[: chunk.size])], (bits + 31) // 32), bits))
    return b"".join(parts)


def unpack_bits(data: memoryview, count: int, width: int) -> np.ndarray:
    """Inverse of `pack_bits`; `data` has exactly `packed_size(count, width)` bytes.

    >>> unpack_bits(memoryview(bytes.fromhex("2103")), 3, 4)
    array([1, 2, 3], dtype=uint32)
    """
    values = np.empty(count, np.uint32)
    places = width * np.arange(min(count, CHUNK), dtype=np.int32)
    for start in range(0, count, CHUNK):
        size = min(CHUNK, count - start)
        first = start * width // 8
        words = words_of(data[first : first + packed_size(size, width)])
        values[start : start + size] = read_fields(words, places[:size], np.int32(width))
    return values


def pack_words(indices: np.ndarray, codes: np.ndarray, width: int, groups: int) -> np.ndarray:
    """What `packing.pack` makes of 32 * groups codes, of which only some are not zero: uint32[width, groups].

    Args:
        indices: of the codes that are not zero, distinct.
        codes: these, below 2^width.

    >>> unpack_words(pack_words(np.array([1, 3]), np.array([7, 9]), 5, 1))[:4]
    array([0, 7, 0, 9], dtype=uint32)
    """
    words = np.zeros(width * groups, np.uint32)
    place, group = np.divmod(np.asarray(indices, np.int64), max(groups, 1))
    row, shift = np.divmod(place * width, 32)
    value = np.asarray(codes, np.uint64) << shift.astype(np.uint64)
    # Bits are disjoint, so that they may be added.
    np.add.at(words, row * groups + group, value.astype(np.uint32))
    over = np.flatnonzero(shift + width > 32)
    np.add.at(words, (row[over] + 1) * groups + group[over], (value[over] >> np.uint64(32)).astype(np.uint32))
    return words.reshape(width, groups)


def unpack_words(words: np.ndarray) -> np.ndarray:
    """All codes of words uint32[width, G]: uint32[32 G]."""
    width, groups = words.shape
    codes = np.empty((32, groups), np.uint32)
    mask = np.uint64((1 << width) - 1)
    for i in range(32):
        word, shift = divmod(i * width, 32)
        both = words[word].astype(np.uint64)
        if shift + width > 32:
            both |= words[word + 1].astype(np.uint64) << np.uint64(32)
        codes[i] = (both >> np.uint64(shift)) & mask
    return codes.reshape(-1)
