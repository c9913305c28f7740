"""Canonical Huffman codes of at most 15 bits: lengths, codes, and decoding in parallel.

Lengths minimise sum_s n_s l_s subject to l_s <= 15, by package-merge. Codes are canonical (shorter codes first,
then smaller symbols), so the lengths say all; they cost 4 bits each in a header. A code's first bit is the most
significant one of its canonical number.

A coded sequence is cut into chunks of 256 symbols. The number of bits of each chunk but the last stands before
the codes, in 12 bits: 0.05 bits a symbol, for which all chunks are decoded at once.

References: Huffman 1952; Larmore and Hirschberg 1990 (package-merge); Schwartz and Kallick 1964 (canonical codes).
"""

from typing import Any, NamedTuple

import numpy as np

from jaxcomp.arrays import bit_length, namespace
from jaxcomp.codes.arrays import gather, running_sum, scan, scatter_bits
from jaxcomp.codes.stream import code_starts, pack_codes, read_fields

__all__ = [
    "CHUNK",
    "LIMIT",
    "canonical_codes",
    "chunk_bits",
    "code_lengths",
    "decode_symbols",
    "decode_with_table",
    "encode_symbols",
    "encode_with_table",
    "is_prefix_code",
    "length_codes",
    "read_lengths",
    "symbol_bits",
    "table_bits",
]

Array = Any
LIMIT = 15
LENGTH_BITS = 4
CHUNK = 256
CHUNK_BITS = 12
USED_BITS = 9  # of the number of lengths in a header: at most 511 symbols
FULL = LIMIT + 1  # bits to which codes are aligned while they are compared
NEVER = 2**30 - 1  # weight of what is not there; two of them are below 2^31


def code_lengths(counts: Array) -> Array:
    """Lengths of an optimal code of at most 15 bits.

    Args:
        counts: i32[..., S], how often each symbol occurs, S <= 511. Beyond a total of 2^26 they are halved until
            they fit.

    Returns:
        i32[..., S], 0 for symbols that do not occur; 1 for one that is alone.

    >>> print(code_lengths(np.array([5, 0, 2, 1, 1])))
    [1 0 2 3 3]
    """
    xp = namespace(counts)
    size = counts.shape[-1]
    if not 1 <= size <= 511:
        raise ValueError(f"code_lengths: 1 .. 511 symbols; got {size}")
    counts = counts.astype(xp.int32)
    total = xp.sum(counts.astype(xp.float32), axis=-1, keepdims=True)
    spare = xp.maximum(bit_length(xp.minimum(total, xp.float32(2**31)).astype(xp.uint32)) - 26, 0)
    weights = xp.where(counts > 0, xp.maximum(counts >> spare, 1), NEVER)
    order = xp.argsort(weights, axis=-1, stable=True)
    ascending = xp.take_along_axis(weights, order, axis=-1)

    def merge(before):
        pairs = xp.minimum(before[..., 0::2] + before[..., 1::2], NEVER)
        both = xp.concatenate([ascending, pairs], axis=-1)
        place = xp.argsort(both, axis=-1, stable=True)
        return xp.take_along_axis(both, place, axis=-1), place >= size

    # 0 times the data, so that inside `shard_map` the start has the type of what follows.
    nothing = 0 * xp.concatenate([ascending, ascending], axis=-1) + NEVER
    _, is_pair = scan(merge, nothing, LIMIT, counts)
    # Of the last list the first 2 (n - 1) items are taken; of each list before it the halves of the pairs taken.
    present = xp.sum(counts > 0, axis=-1, keepdims=True, dtype=xp.int32)
    taken, rank = 2 * present - 2, xp.arange(2 * size, dtype=xp.int32)
    lengths = xp.zeros(counts.shape, xp.int32)
    for level in range(LIMIT - 1, -1, -1):
        singles = xp.sum(~is_pair[level] & (rank < taken), axis=-1, keepdims=True, dtype=xp.int32)
        lengths = lengths + (rank[:size] < singles).astype(xp.int32)
        taken = 2 * (taken - singles)
    lengths = xp.where(present == 1, (rank[:size] == 0).astype(xp.int32), lengths)
    return xp.take_along_axis(lengths, xp.argsort(order, axis=-1, stable=True), axis=-1)


def is_prefix_code(lengths: np.ndarray) -> np.ndarray:
    """Whether lengths are those of a complete prefix code, or of one symbol alone: bool[...], on the host."""
    kraft = np.sum(np.where(lengths > 0, 1 << (LIMIT - np.minimum(lengths, LIMIT)), 0), axis=-1)
    alone = (np.sum(lengths > 0, axis=-1) == 1) & (np.sum(lengths, axis=-1) == 1)
    return np.all((lengths >= 0) & (lengths <= LIMIT), axis=-1) & ((kraft == 1 << LIMIT) | alone)


class _Table(NamedTuple):
    """bounds i32[15]: aligned code above all codes of up to 1 .. 15 bits; bases i32[17]: aligned first code of
    each length; offsets i32[17]: symbols before it; order i32[S]: symbols by code."""

    bounds: Array
    bases: Array
    offsets: Array
    order: Array


def _table(lengths: Array) -> _Table:
    xp = namespace(lengths)
    each = xp.arange(1, FULL, dtype=xp.int32)
    numbers = xp.sum(lengths[None] == each[:, None], axis=1, dtype=xp.int32)
    bounds = xp.cumsum(numbers << (FULL - each), dtype=xp.int32)
    offsets = xp.cumsum(numbers, dtype=xp.int32)
    order = xp.argsort(xp.where(lengths > 0, lengths, FULL), stable=True)
    shifted = lambda x: xp.concatenate([xp.zeros((2,), xp.int32), x])
    return _Table(bounds, shifted(bounds), shifted(offsets), order.astype(xp.int32))


def _reversed(x: Array) -> Array:
    """The lowest 16 bits of each uint32 in reverse."""
    u = namespace(x).uint32
    x = ((x & u(0x5555)) << u(1)) | ((x >> u(1)) & u(0x5555))
    x = ((x & u(0x3333)) << u(2)) | ((x >> u(2)) & u(0x3333))
    x = ((x & u(0x0F0F)) << u(4)) | ((x >> u(4)) & u(0x0F0F))
    return ((x & u(0x00FF)) << u(8)) | ((x >> u(8)) & u(0x00FF))


def canonical_codes(lengths: Array) -> Array:
    """The code of each symbol, its first bit the least significant: u32[S].

    Args:
        lengths: i32[S] of a prefix code.

    >>> print(canonical_codes(np.array([1, 0, 2, 3, 3])))
    [0 0 1 3 7]
    """
    xp = namespace(lengths)
    table = _table(lengths)
    rank = xp.argsort(table.order, stable=True).astype(xp.int32)
    of_length = lambda x: xp.take_along_axis(x, lengths, axis=0)
    aligned = of_length(table.bases) + ((rank - of_length(table.offsets)) << (FULL - lengths))
    return xp.where(lengths > 0, _reversed(aligned.astype(xp.uint32)), xp.uint32(0))


# ------------------------------------------------------------------------------------------------
# Headers and sequences


def length_codes(lengths: Array) -> tuple[Array, Array]:
    """The header of a table as codes for `pack_codes`: how many lengths (9 bits), and these, 4 bits each.

    Args:
        lengths: i32[S]. Those after the last that is not zero are left out.

    Returns:
        codes u32[1 + S], their lengths i32[1 + S].
    """
    xp = namespace(lengths)
    place = xp.arange(1, lengths.shape[0] + 1, dtype=xp.int32)
    used = xp.max(xp.where(lengths > 0, place, 0), keepdims=True)
    widths = xp.where(place <= used, LENGTH_BITS, 0).astype(xp.int32)
    return (
        xp.concatenate([used, lengths]).astype(xp.uint32),
        xp.concatenate([xp.full((1,), USED_BITS, xp.int32), widths]),
    )


def read_lengths(words: Array, start: Array, size: int) -> tuple[Array, Array]:
    """Lengths i32[size] from a header that starts at a bit, and the bit after it."""
    xp = namespace(words)
    used = read_fields(words, xp.asarray(start, xp.int32), USED_BITS).astype(xp.int32)
    place = xp.arange(size, dtype=xp.int32)
    lengths = read_fields(words, start + USED_BITS + LENGTH_BITS * place, LENGTH_BITS).astype(xp.int32)
    return xp.where(place < used, lengths, 0), start + USED_BITS + LENGTH_BITS * used


def chunk_bits(count: Array) -> Array:
    """Bits that the chunk lengths of `count` symbols take."""
    return CHUNK_BITS * namespace(count).maximum((count - 1) // CHUNK, 0)


def symbol_bits(counts: Array, lengths: Array) -> Array:
    """Bits of a coded sequence, its chunk lengths among them, i32[].

    Args:
        counts, lengths: i32[S].
    """
    xp = namespace(counts)
    return xp.sum(counts * lengths, dtype=xp.int32) + chunk_bits(xp.sum(counts, dtype=xp.int32))


def table_bits(counts: Array) -> tuple[Array, Array]:
    """The lengths that suit these counts, and the bits of header and coded sequence, i32[].

    Args:
        counts: i32[S].
    """
    xp = namespace(counts)
    lengths = code_lengths(counts)
    return lengths, xp.sum(length_codes(lengths)[1], dtype=xp.int32) + symbol_bits(counts, lengths)


def encode_with_table(symbols: Array, lengths: Array, num_words: int, *, count: Array) -> tuple[Array, Array]:
    """Encodes as `encode_symbols` does, with the header of the table before it; begins at bit 0."""
    header, bits = pack_codes(*length_codes(lengths), num_words)
    words, end = encode_symbols(symbols, lengths, num_words, count=count, start=bits)
    return header + words, end


def decode_with_table(words: Array, num_symbols: int, size: int, *, count: Array) -> tuple[Array, Array]:
    """Inverse of `encode_with_table`."""
    lengths, start = read_lengths(words, namespace(words).int32(0), num_symbols)
    return decode_symbols(words, lengths, size, count=count, start=start)


def encode_symbols(
    symbols: Array, lengths: Array, num_words: int, *, count: Array, start: Array | int = 0
) -> tuple[Array, Array]:
    """Chunk lengths and codes of a sequence.

    Args:
        symbols: integers [n], each with a code.
        lengths: i32[S] of the table.
        num_words: capacity of the stream.
        count: i32[], symbols that count, the first ones.
        start: bit of the stream where to begin.

    Returns:
        words u32[num_words], zero outside of what is written (add it to other parts of the stream); the bit
        after the last, i32[].
    """
    xp = namespace(symbols)
    count = xp.asarray(count, xp.int32)
    n = symbols.shape[0]
    index = symbols.astype(xp.int32)
    each = xp.where(xp.arange(n, dtype=xp.int32) < count, gather(lengths, index), 0)
    codes = xp.where(each > 0, gather(canonical_codes(lengths), index), xp.uint32(0))
    chunks = xp.pad(each, (0, -n % CHUNK)).reshape(-1, CHUNK)[: max((n - 1) // CHUNK, 0)]
    sums = xp.sum(chunks, axis=1, dtype=xp.int32)
    place = xp.arange(sums.shape[0], dtype=xp.int32)
    sums = xp.where(place < (count - 1) // CHUNK, sums, 0)
    first = start + chunk_bits(count)
    words = scatter_bits(
        [(sums.astype(xp.uint32), start + CHUNK_BITS * place), (codes, first + code_starts(each))], num_words
    )
    return words, first + xp.sum(each, dtype=xp.int32)


def decode_symbols(
    words: Array, lengths: Array, size: int, *, count: Array, start: Array | int = 0
) -> tuple[Array, Array]:
    """Inverse of `encode_symbols`, all chunks at once.

    Args:
        words: u32[w].
        lengths, count, start: as they were given.
        size: n, number of places.

    Returns:
        symbols i32[size], 0 beyond the count; the bit after the last, i32[]. From a stream that `encode_symbols`
        did not make, some symbols of the table; where a chunk does not end where the next begins, 2^31 - 1.
    """
    xp = namespace(words)
    count, start = xp.asarray(count, xp.int32), xp.asarray(start, xp.int32)
    table = _table(lengths)
    num_chunks = -(-size // CHUNK)
    if num_chunks == 0:
        return xp.zeros((0,), xp.int32), start
    place = xp.arange(num_chunks - 1, dtype=xp.int32)
    sums = read_fields(words, start + CHUNK_BITS * place, CHUNK_BITS).astype(xp.int32)
    sums = xp.where(place < (count - 1) // CHUNK, sums, 0)
    first = start + chunk_bits(count)
    begins = first + xp.concatenate([0 * words[:1].astype(xp.int32), running_sum(sums)])
    number = CHUNK * xp.arange(num_chunks, dtype=xp.int32)

    def step(state):
        position, number = state
        aligned = _reversed(read_fields(words, position, FULL)).astype(xp.int32)
        length = 1 + xp.sum(aligned[:, None] >= table.bounds[None], axis=1, dtype=xp.int32)
        rank = gather(table.offsets, length) + ((aligned - gather(table.bases, length)) >> (FULL - length))
        symbol = gather(table.order, xp.clip(rank, 0, lengths.shape[0] - 1))
        real = number < count
        position = xp.where(real, position + length, position)
        return (position, number + 1), xp.where(real, symbol, 0)

    (ends, _), symbols = scan(step, (begins, number), CHUNK, words)
    last = xp.clip((count - 1) // CHUNK, 0, num_chunks - 1)
    meet = xp.all((ends[:-1] == begins[1:]) | (place >= last))
    end = xp.where(count > 0, ends[last], start)
    return symbols.T.reshape(-1)[:size], xp.where(meet, end, xp.int32(2**31 - 1))
