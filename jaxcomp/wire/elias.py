"""Elias omega codes on the host: gaps between non-zero levels, and the levels, as a stream of bits.

The code of n >= 1 is written back to front: a 0, and before it, while n > 1, the binary digits of n,
after which n becomes the number of those digits less one. 1 -> 0, 2 -> 100, 3 -> 110, 4 -> 101000.

A message of levels is, for each non-zero level, the code of its distance from the one before (the
first counts from -1), a sign bit, and the code of its magnitude. Bits fill bytes from the least
significant one.

Where a number ends is known once it is read. So that a stream is not read number by number, it is decoded as if a
number began at every bit; following the ends 1, 2, 4, ... 64 records at a time then finds where they really begin.

Reference: Elias 1975; for gradients Alistarh, Grubic, Li, Tomioka, Vojnovic 2017, section 3.1.
"""

import functools

import numpy as np

from jaxcomp.codes.arrays import bit_length, gather, scatter_bits
from jaxcomp.codes.stream import read_fields
from jaxcomp.wire.bitstream import stream_bytes, words_of
from jaxcomp.wire.errors import WireError

__all__ = ["decode_gaps", "decode_levels", "elias_length", "encode_gaps", "encode_levels"]

MOST_DIGITS = 32
LOOK = 16  # bits of the codes that a table holds
BLOCK = 1 << 14  # bytes that are decoded at a time
REACH = 32  # bytes beyond a block that its last record may touch: two codes of up to 45 bits, a sign
DOUBLINGS = 6
BAD = 255  # length of what is no code
NEVER = 2**30  # where that ends


def elias_length(n: np.ndarray) -> np.ndarray:
    """Bits of the omega code of each n >= 1.

    >>> elias_length(np.array([1, 2, 3, 4, 7, 8, 15, 16]))
    array([ 1,  3,  3,  6,  6,  7,  7, 11])
    """
    n = np.asarray(n, np.uint32)
    total = np.ones(n.shape, np.int64)
    while np.any(n > 1):
        digits = bit_length(n)
        total += np.where(n > 1, digits, 0)
        n = np.where(n > 1, digits - 1, 1).astype(np.uint32)
    return total


def _reversed(x: np.ndarray, digits: np.ndarray) -> np.ndarray:
    """The lowest `digits` (1 .. 32) bits of each number in reverse order, uint32."""
    x = x.astype(np.uint32)
    for shift, mask in ((1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F), (8, 0x00FF00FF)):
        x = ((x & np.uint32(mask)) << np.uint32(shift)) | ((x >> np.uint32(shift)) & np.uint32(mask))
    x = (x << np.uint32(16)) | (x >> np.uint32(16))
    return x >> (32 - digits).astype(np.uint32)


def _codes(n: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The code of each n as an integer whose least significant bit comes first, and its length (at most 63)."""
    n = n.astype(np.uint32)
    code, length = np.zeros(n.shape, np.uint64), np.ones(n.shape, np.int64)
    while np.any(n > 1):
        on = n > 1
        digits = bit_length(n)
        code = np.where(on, code << digits.astype(np.uint64) | _reversed(n, digits), code)
        length += np.where(on, digits, 0)
        n = np.where(on, digits - 1, 1).astype(np.uint32)
    return code, length


def _stream(codes: list[np.ndarray], lengths: list[np.ndarray]) -> bytes:
    """The first code of each list, the second of each, and so on; each from its least significant bit."""
    record = sum(lengths[1:], start=lengths[0])
    start = np.cumsum(record) - record
    parts = []
    for code, length in zip(codes, lengths, strict=True):
        code = code.astype(np.uint64)
        parts += [((code & np.uint64(0xFFFFFFFF)).astype(np.uint32), start)]
        parts += [((code >> np.uint64(32)).astype(np.uint32), start + 32)]
        start = start + length
    bits = int(record.sum())
    return stream_bytes(scatter_bits(parts, (bits + 31) // 32), bits)


def encode_gaps(indices: np.ndarray) -> bytes:
    """Distances between ascending indices, the first from -1.

    >>> encode_gaps(np.array([0, 2]))
    b'\\x02'
    """
    code, length = _codes(np.diff(indices.astype(np.int64), prepend=-1))
    return _stream([code], [length])


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
    sign = values % 2 == 0
    return where.size, _stream([gap_code, sign, level_code], [gap_length, np.ones_like(gap_length), level_length])


# ------------------------------------------------------------------------------------------------
# Decoding


def _numbers(words: np.ndarray, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The numbers that begin at these bits and the lengths of their codes, BAD for none."""
    n, length = np.ones(places.shape, np.int64), np.zeros(places.shape, np.int64)
    open_ = np.arange(places.size)  # not yet at the final 0
    for _ in range(6):  # 1, 2 .. 3, 4 .. 15, 16 .. 2^16 - 1, up to 2^32 - 1, and the 0
        start = places[open_] + length[open_]
        more = read_fields(words, start, np.int32(1)) == 1
        length[open_] += ~more
        open_, start = open_[more], start[more]
        if not open_.size:
            break
        digits = n[open_] + 1
        wrong = digits > MOST_DIGITS
        if wrong.any():
            length[open_[wrong]] = BAD
            open_, start, digits = open_[~wrong], start[~wrong], digits[~wrong]
        n[open_] = _reversed(read_fields(words, start, digits), digits)
        length[open_] += digits
    length[open_] = BAD
    return n, length


@functools.cache
def _table() -> tuple[np.ndarray, np.ndarray]:
    """For every 16 bits, followed by zeros, the number of the code that they begin with, and its length.

    A code of more bits has that length, too, if it ends with a 0: which digits are its last is known within 10 bits,
    and after more than 5 digits nothing but the end may follow.
    """
    every = np.arange(2**LOOK, dtype=np.uint32)
    words = np.stack([every, np.zeros_like(every)], axis=1).reshape(-1)
    n, length = _numbers(words, 64 * np.arange(every.size))
    return n.astype(np.uint32), length.astype(np.uint8)


def _lookup(words: np.ndarray, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """As `_numbers`, by table where it serves."""
    numbers, lengths = _table()
    look = read_fields(words, places, np.int32(LOOK))
    n, length = numbers[look].astype(np.int64), lengths[look].astype(np.int64)
    long = np.flatnonzero(length > LOOK)
    n[long], length[long] = _numbers(words, places[long])
    return n, length


def _ends(words: np.ndarray, size: int) -> np.ndarray:
    """For a number beginning at each of the first 8 `size` bits, where it ends; NEVER if none does."""
    view = np.zeros(size + 2, np.uint32)
    known = words.view(np.uint8)[: size + 2]
    view[: known.size] = known
    window = view[:size] | view[1 : size + 1] << np.uint32(8) | view[2 : size + 2] << np.uint32(16)
    look = (window[:, None] >> np.arange(8, dtype=np.uint32)) & np.uint32(2**LOOK - 1)
    length = _table()[1][look.reshape(-1)]
    long = np.flatnonzero((length > LOOK) & (length < BAD))
    goes_on = read_fields(words, long + length[long] - 1, np.int32(1)) == 1
    length[long[goes_on]] = BAD
    return np.where(length == BAD, NEVER, np.arange(8 * size, dtype=np.int32) + length)


def _records(data: memoryview, count: int, levels: bool) -> tuple[np.ndarray, int]:
    """Where `count` records begin, and the bit after the last.

    A record is a number, or a number, a sign and a number. Raises WireError if it is none, or the stream ends early.
    """
    begins, position, found = [np.zeros(0, np.int64)], 0, 0
    while found < count and position < 8 * len(data):
        first = position // 8
        size = min(BLOCK, len(data) - first)
        ends = _ends(words_of(data[first : first + size + 2 * REACH]), size + REACH)
        if levels:
            ends = gather(ends - NEVER, ends + 1) + NEVER
        chain = np.append(np.minimum(ends[: 8 * size], 8 * size), 8 * size)
        jump = chain
        for _ in range(DOUBLINGS):
            jump = jump[jump]
        heads, at = [], position - 8 * first
        while at < 8 * size and len(heads) << DOUBLINGS < count - found:
            heads.append(at)
            at = int(jump[at])
        places = [np.array(heads)]
        for _ in range(2**DOUBLINGS - 1):
            places.append(chain[places[-1]])
        places = np.stack(places, axis=1).reshape(-1)
        places = places[places < 8 * size][: count - found]
        begins.append(8 * first + places)
        found += places.size
        last = int(ends[places[-1]])
        if last >= NEVER:
            raise WireError("Elias number", "more digits", f"of at most {MOST_DIGITS} digits")
        position = 8 * first + last
    if found < count or position > 8 * len(data):
        raise WireError("Elias stream", f"{8 * len(data)} bits", f"long enough for {count} numbers")
    return np.concatenate(begins), position


def _used(data: memoryview, position: int) -> int:
    """Bytes read; the bits that fill the last one must be zero."""
    if position % 8 and data[position // 8] >> position % 8:
        raise WireError("Elias padding", "bits that are set", "zeros")
    return (position + 7) // 8


def _indices(gaps: np.ndarray, size: int) -> np.ndarray:
    indices = np.cumsum(gaps) - 1
    if indices.size and indices[-1] >= size:
        raise WireError("Elias index", int(indices[-1]), f"below {size}")
    return indices


def decode_gaps(data: memoryview, count: int, size: int) -> np.ndarray:
    """Inverse of `encode_gaps`: int32[count], below size.

    Raises:
        WireError: as `decode_levels`, or bytes are left over.
    """
    begins, position = _records(data, count, False)
    used = _used(data, position)
    if used != len(data):
        raise WireError("Elias stream", f"{len(data)} bytes", f"the {used} that {count} gaps need")
    return _indices(_lookup(words_of(data), begins)[0], size).astype(np.int32)


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
    begins, position = _records(data, count, True)
    words = words_of(data)
    gaps, length = _lookup(words, begins)
    places = begins + length
    levels = 2 * _lookup(words, places + 1)[0] - 1 + read_fields(words, places, np.int32(1)).astype(np.int64)
    if levels.size and levels.max() >= 2**32:
        raise WireError("Elias level", int(levels.max()), "below 2^32")
    return _indices(gaps, size), levels.astype(np.uint32), _used(data, position)
