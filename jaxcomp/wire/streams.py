"""Streams of keys and of Huffman codes on the host, decoded in little memory.

The same streams as in `jaxcomp.codes`, whose functions decode them in one piece with arrays of all entries. A message
may hold a key for every bit, so that each such array is 32 or 64 times as long as the message. Here a few thousand
entries at a time are decoded, in time that is proportional to the bytes, and nothing is trusted.
"""

import functools
from array import array
from collections.abc import Iterator

import numpy as np

from jaxcomp.codes import schemes
from jaxcomp.codes.huffman import CHUNK, CHUNK_BITS, LENGTH_BITS, LIMIT, USED_BITS, is_prefix_code
from jaxcomp.codes.keys import MAX_KEYS
from jaxcomp.wire.bitstream import SOME, fields_at, look_ahead, padded_words
from jaxcomp.wire.errors import WireError
from jaxcomp.wire.frame import Reader
from jaxcomp.wire.limits import MAX_STREAM

__all__ = ["Keys", "Symbols", "read_keys"]

MANY = 64  # chunks from which on decoding them all at once is faster than one code after the other
GROUP = 128  # chunks that are decoded at once


class _Blocks:
    """Arrays of any lengths, handed out in the lengths that are asked for."""

    def __init__(self, blocks: Iterator[np.ndarray]):
        self.blocks, self.rest = blocks, np.zeros(0, np.int32)

    def take(self, count: int) -> np.ndarray:
        parts, found = [self.rest], self.rest.size
        while found < count:
            parts.append(next(self.blocks))
            found += parts[-1].size
        whole = parts[-1] if parts[0].size == 0 and len(parts) == 2 else np.concatenate(parts)
        self.rest = whole[count:]
        return whole[:count]


def _fields(data: memoryview, places: np.ndarray, widths: np.ndarray | int) -> np.ndarray:
    """Numbers at ascending places of a stream, without a copy of all of it."""
    if not places.size:
        return np.zeros(0, np.int64)
    first = int(places[0]) >> 3
    return fields_at(padded_words(data[first : (int(places[-1]) >> 3) + 8]), places - 8 * first, widths)


def _check_end(field: str, data: memoryview, bits: int) -> None:
    """The stream ends with its last bit, and zeros fill its last byte."""
    if (bits + 7) // 8 != len(data):
        raise WireError(f"{field} bytes", len(data), f"the {(bits + 7) // 8} that it needs")
    if bits % 8 and data[-1] >> bits % 8:
        raise WireError(f"{field} padding", "bits that are set", "zeros")


# ------------------------------------------------------------------------------------------------
# Huffman codes


@functools.cache
def _reversal(width: int) -> np.ndarray:
    """The lowest `width` bits of each number below 2^width in reverse."""
    numbers = np.arange(1 << width)
    reverse = np.zeros(numbers.size, np.uint16)
    for i in range(width):
        reverse |= ((numbers >> i & 1) << (width - 1 - i)).astype(np.uint16)
    return reverse


def _read_lengths(data: memoryview, start: int, num_symbols: int) -> tuple[np.ndarray, int]:
    """`codes.read_lengths`, from few bytes."""
    words = padded_words(data[: (start + USED_BITS + LENGTH_BITS * num_symbols) // 8 + 1])
    used = int(fields_at(words, np.array([start]), USED_BITS)[0])
    places = start + USED_BITS + LENGTH_BITS * np.arange(num_symbols)
    lengths = fields_at(words, places, LENGTH_BITS)
    lengths[used:] = 0
    return lengths, start + USED_BITS + LENGTH_BITS * used


def _lookup_table(field: str, lengths: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Table for every next `width` bits: the symbol and the length of its code, u8[2^width]; and the width."""
    if not is_prefix_code(lengths):
        if count or np.any(lengths):
            got = lengths[lengths > 0].tolist()[:64]
            raise WireError(f"{field} table", got, "the lengths of a complete prefix code")
        return np.zeros(2, np.uint8), np.ones(2, np.uint8), 1
    width = int(lengths.max())
    order = np.argsort(np.where(lengths > 0, lengths, LIMIT + 1), kind="stable")[: np.count_nonzero(lengths)]
    if order.size == 1:
        order = np.repeat(order, 2)  # its other bit is not used, and means the same
    each = lengths[order]
    symbols = np.repeat(order.astype(np.uint8), 1 << (width - each))
    bits = np.repeat(each.astype(np.uint8), 1 << (width - each))
    return symbols[_reversal(width)], bits[_reversal(width)], width


class Symbols(_Blocks):
    """A sequence of `encode_symbols`, in one table whose header begins at bit `start`.

    Args:
        field: for errors.
        data: the stream.
        num_symbols: of the table, at most 256.
        count: of the sequence.

    `end` is the bit after it. `take(n)` gives the next n symbols, u8.

    Raises:
        WireError: the table is not that of a complete prefix code, or a chunk does not end where the next begins.
    """

    def __init__(self, field: str, data: memoryview, num_symbols: int, count: int, start: int = 0):
        self.field, self.stream, self.data = field, data, np.frombuffer(data, np.uint8)
        lengths, first = _read_lengths(data, start, num_symbols)
        self.table = _lookup_table(field, lengths, count)
        self.full = max((count - 1) // CHUNK, 0)  # chunks before the last
        sums = _fields(data, first + CHUNK_BITS * np.arange(self.full), CHUNK_BITS)
        first += CHUNK_BITS * self.full
        self.begins = first + np.concatenate([np.zeros(1, np.int64), np.cumsum(sums)])
        if self.begins[-1] > 8 * len(data):
            raise self._wrong(int(self.begins[-1]))
        self.last, ends = self._one_by_one(int(self.begins[-1]), count - CHUNK * self.full)
        self.end = int(ends[-1]) if ends.size else int(self.begins[-1])
        super().__init__(self._decoded())

    def _wrong(self, bits: int) -> WireError:
        return WireError(f"{self.field} bytes", self.data.size, f"those of its chunks, which do not end at bit {bits}")

    def _decoded(self) -> Iterator[np.ndarray]:
        for first in range(0, self.full, GROUP):
            begins = self.begins[first : min(first + GROUP, self.full) + 1]
            if begins.size <= MANY:
                symbols, ends = self._one_by_one(int(begins[0]), CHUNK * (begins.size - 1))
                ends = ends[CHUNK - 1 :: CHUNK]
            else:
                symbols, ends = self._side_by_side(begins)
            if np.any(ends != begins[1:]):
                raise self._wrong(int(ends[np.argmax(ends != begins[1:])]))
            yield symbols
        yield self.last

    def _one_by_one(self, position: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The next symbols, and where each ends."""
        symbols, lengths, width = self.table
        values: list[np.ndarray] = [np.zeros(0, np.uint8)]
        ends: list[np.ndarray] = [np.zeros(0, np.int64)]
        while count:
            size = min(SOME, width * count)
            look = look_ahead(self.data, position, size, width)
            each, begins, at = lengths[look].tobytes(), array("i"), 0
            append = begins.append
            for _ in range(min(count, size)):
                if at >= size:
                    break
                append(at)
                at += each[at]
            places = np.frombuffer(begins, np.int32)
            found = look[places]
            values.append(symbols[found])
            ends.append(position + places + lengths[found])
            count -= places.size
            position += at
        return np.concatenate(values), np.concatenate(ends)

    def _side_by_side(self, begins: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Chunks between these bits: their symbols, and where each ends."""
        symbols, lengths, width = self.table
        first = int(begins[0]) >> 5 << 2
        words = padded_words(self.stream[first : (int(begins[-1]) >> 3) + 8]).astype(np.uint64)
        pairs = words[:-1] | words[1:] << np.uint64(32)
        position, mask = begins[:-1] - 8 * first, np.uint64((1 << width) - 1)
        found = np.empty((CHUNK, position.size), np.uint8)
        for i in range(CHUNK):
            word = np.minimum(position >> 5, pairs.size - 1)
            look = (pairs[word] >> (position & 31).astype(np.uint64) & mask).astype(np.intp)
            found[i] = symbols[look]
            position = position + lengths[look]
        return found.T.reshape(-1), position + 8 * first

    def check_end(self) -> None:
        """The stream ends with the sequence."""
        _check_end(self.field, self.stream, self.end)


# ------------------------------------------------------------------------------------------------
# Keys


class _Fixed(_Blocks):
    """Prefixes of `width` bits."""

    def __init__(self, data: memoryview, count: int, width: int):
        self.end = schemes.SCHEME_BITS + count * width
        places = lambda i: schemes.SCHEME_BITS + width * np.arange(i, min(i + SOME, count))
        super().__init__(_fields(data, places(i), width) for i in range(0, count, SOME))


class _Unary(_Blocks):
    """Prefixes of zeros and a mark; `end` is the bit after the mark numbered `count`, None if there are fewer."""

    def __init__(self, data: np.ndarray, count: int):
        self.data, self.end = data, None
        if count == 0:
            self.end = schemes.SCHEME_BITS
        found, size = 0, SOME // 8
        for first in range(1, data.size, size):
            marks = int(np.sum(np.bitwise_count(data[first : first + size]), dtype=np.int64))
            if found < count <= found + marks:
                self.end = int(self._marks(first)[count - found - 1]) + 1
                break
            found += marks
        super().__init__(self._symbols())

    def _marks(self, first: int) -> np.ndarray:
        bits = np.unpackbits(self.data[first : first + SOME // 8], bitorder="little")
        return 8 * first + np.flatnonzero(bits)

    def _symbols(self) -> Iterator[np.ndarray]:
        before = schemes.SCHEME_BITS - 1
        for first in range(1, self.data.size, SOME // 8):
            marks = self._marks(first)
            if marks.size:
                yield np.diff(marks, prepend=before) - 1
                before = int(marks[-1])


class Keys:
    """Ascending keys of a stream of `codes.encode_keys`.

    Args:
        field: for errors.
        data: the stream.
        count: of keys, in all lists.
        limit: all keys are below.
        counts: keys of each list; None for one list.

    Iterating gives blocks of keys, i64, each of SOME keys but the last.

    Raises:
        WireError: the stream is not one of so many keys, or one is not below the limit.
    """

    def __init__(self, field: str, data: memoryview, count: int, limit: int, counts: np.ndarray | None = None):
        self.field, self.data, self.count, self.limit = field, data, count, limit
        if count > min(8 * len(data), MAX_KEYS):
            most = min(8 * len(data), MAX_KEYS)
            raise WireError(f"{field} count", count, f"at most {most} in {len(data)} bytes")
        number = data[0] if len(data) else -1
        if not 0 <= number < len(schemes.SCHEMES):
            raise WireError(f"{field} scheme", number, f"below {len(schemes.SCHEMES)}")
        self.scheme = schemes.SCHEMES[number]
        if self.scheme.kind == schemes.FIXED:
            self.prefixes = _Fixed(data, count, self.scheme.width)
        elif self.scheme.kind == schemes.UNARY:
            self.prefixes = _Unary(np.frombuffer(data, np.uint8), count)
        else:
            self.prefixes = Symbols(field, data, schemes.CLASSES, count, schemes.SCHEME_BITS)
        self.starts = np.zeros(1, np.int64) if counts is None else _starts(counts)

    def __iter__(self) -> Iterator[np.ndarray]:
        if self.prefixes.end is None:
            raise WireError(f"{self.field} bytes", len(self.data), f"enough for {self.count} keys")
        position, last = self.prefixes.end, -1
        for place in range(0, self.count, SOME):
            symbols = self.prefixes.take(min(SOME, self.count - place)).astype(np.int64)
            heads = self.starts[slice(*np.searchsorted(self.starts, [place, place + symbols.size]))] - place
            keys, position = self._keys(symbols, heads, last, position)
            last = int(keys[-1])
            yield keys
        _check_end(self.field, self.data, position)

    def _keys(self, symbols: np.ndarray, heads: np.ndarray, last: int, position: int) -> tuple[np.ndarray, int]:
        """Keys of these prefixes, after the key `last`, with bodies that begin at this bit; and the bit after them."""
        scheme = self.scheme
        if scheme.kind == schemes.HUFFMAN:
            widths = np.maximum(symbols - 1, 0)
            tops = np.where(symbols > 0, np.int64(1) << widths, 0)
        else:
            widths = scheme.base + scheme.unit * symbols
            tops = symbols << scheme.base if scheme.rice else np.zeros_like(symbols)
            if widths.max() > 32:
                raise WireError(f"{self.field} prefix", int(symbols.max()), "one of a key of at most 32 bits")
        ends = position + np.cumsum(widths)
        if ends[-1] > 8 * len(self.data):
            raise WireError(f"{self.field} bytes", len(self.data), f"at least {(int(ends[-1]) + 7) // 8}")
        steps = tops + _fields(self.data, ends - widths, widths)
        if scheme.rice:
            steps += 1
        else:
            steps[heads] += 1  # the first number of a list is its key, the others are distances
        if steps.min() < 1:
            raise WireError(f"{self.field} distance", int(steps.min()), "at least 1")
        sums = last + np.cumsum(steps)
        if heads.size:
            before = np.concatenate([[last], sums])[heads] + 1
            segment = np.zeros(sums.size, np.int64)
            segment[heads] = 1
            sums -= np.concatenate([[0], before])[np.cumsum(segment)]
        if sums.max() >= self.limit:
            raise WireError(f"{self.field} key", int(sums.max()), f"below {self.limit}")
        return sums, int(ends[-1])


def read_keys(reader: Reader, field: str, count: int, limit: int) -> Keys:
    """So many keys, all below the limit, of the stream that begins here."""
    return Keys(field, reader.stream(field, MAX_STREAM - 1), count, limit)


def _starts(counts: np.ndarray) -> np.ndarray:
    """Positions where the lists begin that are not empty."""
    full = counts[counts > 0].astype(np.int64)
    return np.cumsum(full) - full
