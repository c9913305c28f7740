"""Elias omega codes on the host: gaps between non-zero levels, and the levels, as a stream of bits.

`codes.stream` has the code. A message of levels is, for each non-zero level, the code of its distance from the one
before (the first counts from -1), a sign bit, and the code of its magnitude. Bits fill bytes from the least significant
one.

Where a number ends is known once it is read. So that a stream is not read number by number, the length of a number
that began there is looked up for every bit of a block; following these finds where the numbers really begin. Blocks
are as long as the numbers still to come may need, up to a bound, so that short streams cost little.

Reference: Elias 1975; for gradients Alistarh, Grubic, Li, Tomioka, Vojnovic 2017, section 3.1.
"""

import functools
from array import array
from collections.abc import Iterator

import numpy as np

from jaxcomp.arrays import bit_length
from jaxcomp.codes.arrays import scatter_bits
from jaxcomp.wire.bitstream import fields_at, look_ahead, padded_words, stream_bytes
from jaxcomp.wire.errors import WireError

__all__ = ["Records", "decode_gaps", "encode_gaps", "encode_levels"]

MOST_DIGITS = 32
LOOK = 16  # bits of the codes that a table holds
BLOCK = 1 << 10, 1 << 13  # bytes that are decoded at a time: always; where there is room
ROOM = 512  # bytes of memory that one of them takes
REACH = 32  # bytes beyond a block that its last record may touch: two codes of up to 45 bits, a sign
BAD = 255  # length of what is no code


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
        more = fields_at(words, start, 1) == 1
        length[open_] += ~more
        open_, start = open_[more], start[more]
        if not open_.size:
            break
        digits = n[open_] + 1
        wrong = digits > MOST_DIGITS
        if wrong.any():
            length[open_[wrong]] = BAD
            open_, start, digits = open_[~wrong], start[~wrong], digits[~wrong]
        n[open_] = _reversed(fields_at(words, start, digits), digits)
        length[open_] += digits
    length[open_] = BAD
    return n, length


@functools.cache
def _table() -> tuple[np.ndarray, np.ndarray]:
    """Table for every 16 bits, followed by zeros: the number of the code that they begin with, and its length.

    A code of more bits has that length, too, if it ends with a 0: which digits are its last is known within 10 bits,
    and after more than 5 digits nothing but the end may follow.
    """
    every = np.arange(2**LOOK, dtype=np.uint32)
    words = np.append(np.stack([every, np.zeros_like(every)], axis=1).reshape(-1), np.zeros(2, np.uint32))
    n, length = _numbers(words, 64 * np.arange(every.size))
    return n.astype(np.uint32), length.astype(np.uint8)


def _lookup(words: np.ndarray, look: np.ndarray, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Reads numbers as `_numbers` does, by table where it serves.

    Args:
        words: of a block, padded.
        look: the LOOK bits from each of its bits on.
    """
    numbers, lengths = _table()
    found = look[places]
    n, length = numbers[found].astype(np.int64), lengths[found].astype(np.int64)
    long = np.flatnonzero(length > LOOK)
    if long.size:
        n[long], length[long] = _numbers(words, places[long])
    return n, length


class Records:
    """The numbers of a stream, block by block. Each block comes with the places of its records.

    data: bytes that start with the stream; may be longer.  count: of records.  levels: a record is a number, a sign
    and a number, instead of one number.  room: bytes of memory that may be used.  used: bytes of the stream, known
    after the last block.
    """

    def __init__(self, data: memoryview, count: int, size: int, *, levels: bool, room: int = 0):
        self.data, self.count, self.size, self.levels = np.frombuffer(data, np.uint8), count, size, levels
        self.block, self.used = min(max(BLOCK[0], room // ROOM), BLOCK[1]), 0

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Indices i64 of each block, below `size`, and the zigzag codes u32 of their levels, empty without them.

        Raises:
            WireError: the stream ends early, a number or an index is too large, or the bits behind are not zero.
        """
        position, found, last, bits = 0, 0, -1, 8 * self.data.size
        while found < self.count and position < bits:
            numbers, levels, position = self._block(position, self.count - found)
            indices = last + np.cumsum(numbers)
            last, found = int(indices[-1]), found + indices.size
            if position > bits:
                break
            if last >= self.size:
                raise WireError("Elias index", last, f"below {self.size}")
            yield indices, levels
        if found < self.count or position > bits:
            raise WireError("Elias stream", f"{bits} bits", f"long enough for {self.count} numbers")
        if position % 8 and self.data[position // 8] >> position % 8:
            raise WireError("Elias padding", "bits that are set", "zeros")
        self.used = (position + 7) // 8

    def _follow(self, lengths: bytes, at: int, limit: int, most: int) -> tuple[np.ndarray, int]:
        """Positions where at most so many records begin, from bit `at` to the limit; and the bit after the last."""
        begins = array("i")
        append = begins.append
        for _ in range(most):
            if at >= limit:
                break
            append(at)
            at += lengths[at]
            if self.levels:
                at += lengths[at + 1] + 1
        return np.frombuffer(begins, np.int32), at

    def _block(self, position: int, most: int) -> tuple[np.ndarray, np.ndarray, int]:
        """Gaps and levels of the records that begin in the next block, and the bit after the last."""
        first = position // 8
        size = min(self.block, self.data.size - first, max(16, 3 * most))
        part = self.data[first : first + size + 2 * REACH]
        words, look = padded_words(part.tobytes()), look_ahead(part, 0, 8 * (size + REACH), LOOK)
        # Too long for a number that has more digits than can be; whoever begins there is looked at again.
        lengths = _table()[1][look]
        if not self.levels and 4 * most > 8 * self.data.size - position:
            places, at = _follow_by_four(lengths, position - 8 * first, 8 * size, most)
        else:
            places, at = self._follow(lengths.tobytes(), position - 8 * first, 8 * size, most)
        gaps, length = _lookup(words, look, places)
        levels = np.zeros(0, np.uint32)
        bad = length == BAD
        if self.levels:
            signs = places + length
            values, length = _lookup(words, look, signs + 1)
            bad |= length == BAD
            wide = 2 * values - 1 + (look[signs] & np.uint32(1)).astype(np.int64)
            levels = wide.astype(np.uint32)
            if wide.max() >= 2**32 and not bad.any():
                raise WireError("Elias level", int(wide.max()), "below 2^32")
        if bad.any():
            raise WireError("Elias number", "more digits", f"of at most {MOST_DIGITS} digits")
        return gaps, levels, 8 * first + at


def _follow_by_four(lengths: np.ndarray, at: int, limit: int, most: int) -> tuple[np.ndarray, int]:
    """Finds records as `Records._follow` does, for single numbers, in fewer steps where many lie close together."""
    place, end = np.arange(lengths.size, dtype=np.int32), lengths.size - 1
    pair = lengths + lengths[np.minimum(place + lengths, end)].astype(np.uint16)
    four = (pair + pair[np.minimum(place + pair, end)]).tolist()
    begins = array("i")
    append = begins.append
    for _ in range(-(-most // 4)):
        if at >= limit:
            break
        append(at)
        at += four[at]
    heads = np.frombuffer(begins, np.int32)
    middle = heads + pair[heads]
    last = middle + lengths[np.minimum(middle, end)]
    places = np.stack([heads, heads + lengths[heads], middle, last], axis=1).reshape(-1)
    places = places[: np.searchsorted(places, limit)][:most]
    return places, int(places[-1]) + int(lengths[places[-1]])


def decode_gaps(data: memoryview, size: int, out: np.ndarray, *, room: int = 0) -> None:
    """Inverse of `encode_gaps`: fills `out`, i32[count], with indices below `size`.

    Raises:
        WireError: the stream is not one of so many gaps.
    """
    if out.size > 8 * len(data):
        raise WireError("Elias stream", f"{8 * len(data)} bits", f"long enough for {out.size} numbers")
    records, found = Records(data, out.size, size, levels=False, room=room), 0
    for block, _ in records:
        out[found : found + block.size] = block
        found += block.size
    if records.used != len(data):
        raise WireError("Elias stream", f"{len(data)} bytes", f"the {records.used} that {out.size} gaps need")
