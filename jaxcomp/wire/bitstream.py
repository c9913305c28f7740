"""Unsigned integers of a fixed number of bits as bytes, on the host, vectorised."""

from typing import Any

import numpy as np

from jaxcomp.codes.arrays import scatter_bits
from jaxcomp.packing import tile_of

__all__ = [
    "SOME",
    "fields_at",
    "look_ahead",
    "pack_bits",
    "pack_words",
    "packed_size",
    "padded_words",
    "set_words",
    "stream_bytes",
    "unpack_bits",
    "unpack_words",
]

CHUNK = 1 << 16  # values at a time; a multiple of 32, so each chunk starts on a word
FEW = 8
SOME = 1 << 12  # the same where memory is counted: decoding takes the same room for any length


def packed_size(count: int, width: int) -> int:
    """Bytes of `count` integers of `width` bits."""
    return (count * width + 7) // 8


def stream_bytes(words: np.ndarray, bits: int) -> bytes:
    """The first bits of a stream of words, as bytes."""
    return np.ascontiguousarray(words, "<u4").tobytes()[: (int(bits) + 7) // 8]


def padded_words(data: memoryview | bytes) -> np.ndarray:
    """Bytes as a stream of words with two of zeros behind them, for `fields_at`."""
    return np.frombuffer(bytes(data) + bytes(-len(data) % 4 + 8), "<u4")


def fields_at(words: np.ndarray, places: np.ndarray, widths: Any) -> np.ndarray:
    """Numbers of at most 32 bits at given bits, as `codes.read_fields`, for few places in a long stream: int64.

    Args:
        words: u32[w], the last two of them zero. Places beyond read as zero.
    """
    word = np.minimum(places >> 5, words.size - 2)
    both = words[word].astype(np.uint64) | words[word + 1].astype(np.uint64) << np.uint64(32)
    mask = (np.uint64(1) << np.uint64(widths)) - np.uint64(1)
    return (both >> (places & 31).astype(np.uint64) & mask).astype(np.int64)


def look_ahead(data: np.ndarray, position: int, size: int, width: int) -> np.ndarray:
    """The `width` bits from each of `size` bits on: u32[size].

    Args:
        data: u8[n], bytes of a stream, zeros behind it.
        position: the first bit.
        width: at most 16.
    """
    first, spare = position >> 3, position & 7
    count = (spare + size + 7) >> 3
    view = np.zeros(count + 2, np.uint32)
    known = data[first : first + count + 2]
    view[: known.size] = known
    window = view[:count] | view[1 : count + 1] << np.uint32(8) | view[2:] << np.uint32(16)
    look = window[:, None] >> np.arange(8, dtype=np.uint32)
    look &= np.uint32((1 << width) - 1)
    return look.reshape(-1)[spare : spare + size]


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


def unpack_bits(data: memoryview, count: int, width: int, *, out: np.ndarray | None = None) -> np.ndarray:
    """Inverse of `pack_bits`; `data` has exactly `packed_size(count, width)` bytes. Fills `out` u32[count] if given.

    >>> unpack_bits(memoryview(bytes.fromhex("2103")), 3, 4)
    array([1, 2, 3], dtype=uint32)
    """
    values = np.empty(count, np.uint32) if out is None else out
    if count <= FEW:
        number, mask = int.from_bytes(data, "little"), (1 << width) - 1
        values[:] = [number >> i * width & mask for i in range(count)]
        return values
    places = width * np.arange(min(count, SOME), dtype=np.int32)
    for start in range(0, count, SOME):
        size = min(SOME, count - start)
        first = start * width // 8
        words = padded_words(data[first : first + packed_size(size, width)])
        values[start : start + size] = fields_at(words, places[:size], width)
    return values


def pack_words(indices: np.ndarray, codes: np.ndarray, width: int, groups: int) -> np.ndarray:
    """Packs 32 * groups codes, of which only some are not zero, as `packing.pack` does: uint32[width, groups].

    Args:
        indices: of the codes that are not zero, distinct.
        codes: these, below 2^width.

    >>> unpack_words(pack_words(np.array([1, 3]), np.array([7, 9]), 5, 1))[:4]
    array([0, 7, 0, 9], dtype=uint32)
    """
    words = np.zeros((width, groups), np.uint32)
    for start in range(0, len(indices), SOME):
        set_words(words, indices[start : start + SOME], codes[start : start + SOME])
    return words


def set_words(words: np.ndarray, indices: np.ndarray, codes: np.ndarray) -> None:
    """Writes codes into places of words u32[width, groups] that are zero so far. `SOME` at a time need little room."""
    width, groups = words.shape
    flat = words.reshape(-1)
    size = max(tile_of(groups, width), 1)
    tile, inside = np.divmod(np.asarray(indices, np.int64), 32 * size)
    place, group = np.divmod(inside, size)
    row, shift = np.divmod(place * width, 32)
    word = (tile * width + row) * size + group
    value = np.asarray(codes, np.uint64) << shift.astype(np.uint64)
    # Bits are disjoint, so that they may be added.
    np.add.at(flat, word, value.astype(np.uint32))
    over = np.flatnonzero(shift + width > 32)
    np.add.at(flat, word[over] + size, (value[over] >> np.uint64(32)).astype(np.uint32))


def unpack_words(words: np.ndarray) -> np.ndarray:
    """All codes of words uint32[width, G]: uint32[32 G]."""
    width, groups = words.shape
    size = max(tile_of(groups, width), 1)
    words = words.reshape(groups // size, width, size)
    codes = np.empty((groups // size, 32, size), np.uint32)
    mask = np.uint64((1 << width) - 1)
    for i in range(32):
        word, shift = divmod(i * width, 32)
        both = words[:, word].astype(np.uint64)
        if shift + width > 32:
            both |= words[:, word + 1].astype(np.uint64) << np.uint64(32)
        codes[:, i] = (both >> np.uint64(shift)) & mask
    return codes.reshape(-1)
