"""Canonical Huffman codes of at most 15 bits: lengths, codes, and decoding in parallel.

Lengths minimise sum_s n_s l_s subject to l_s <= 15, by package-merge. Codes are canonical (shorter codes first,
then smaller symbols), so the lengths say all; they cost 4 bits each in a header. Several tables can serve one
stream, each symbol naming its own. A code's first bit is the most significant one of its canonical number.

A coded sequence is cut into chunks of 256 symbols. The number of bits of each chunk but the last stands before
the codes, in 12 bits: 0.05 bits a symbol, for which all chunks are decoded at once.

The cells of a MinMaxSketch with rho columns per item and B buckets follow the law of `sketch_counts`, which both
ends know: a table made from it need not be sent.

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
    "sketch_counts",
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
    """bounds i32[T, 15]: aligned code above all codes of up to 1 .. 15 bits; bases i32[T, 17]: aligned first code of
    each length; offsets i32[T, 17]: symbols before it; order i32[T, S]: symbols by code."""

    bounds: Array
    bases: Array
    offsets: Array
    order: Array


def _table(lengths: Array) -> _Table:
    xp = namespace(lengths)
    each = xp.arange(1, FULL, dtype=xp.int32)
    numbers = xp.sum(lengths[:, None, :] == each[None, :, None], axis=-1, dtype=xp.int32)
    zero = xp.zeros((lengths.shape[0], 1), xp.int32)
    bounds = xp.cumsum(numbers << (FULL - each)[None], axis=-1, dtype=xp.int32)
    offsets = xp.cumsum(numbers, axis=-1, dtype=xp.int32)
    order = xp.argsort(xp.where(lengths > 0, lengths, FULL), axis=-1, stable=True)
    place = lambda x: xp.concatenate([zero, zero, x], axis=-1)
    return _Table(bounds, place(bounds), place(offsets), order.astype(xp.int32))


def _reversed(x: Array) -> Array:
    """The lowest 16 bits of each uint32 in reverse."""
    u = namespace(x).uint32
    x = ((x & u(0x5555)) << u(1)) | ((x >> u(1)) & u(0x5555))
    x = ((x & u(0x3333)) << u(2)) | ((x >> u(2)) & u(0x3333))
    x = ((x & u(0x0F0F)) << u(4)) | ((x >> u(4)) & u(0x0F0F))
    return ((x & u(0x00FF)) << u(8)) | ((x >> u(8)) & u(0x00FF))


def canonical_codes(lengths: Array) -> Array:
    """The code of each symbol, its first bit the least significant: u32 of the shape of the lengths.

    Args:
        lengths: i32[..., S] of a prefix code.

    >>> print(canonical_codes(np.array([1, 0, 2, 3, 3])))
    [0 0 1 3 7]
    """
    xp = namespace(lengths)
    flat = lengths.reshape(-1, lengths.shape[-1])
    table = _table(flat)
    rank = xp.argsort(table.order, axis=-1, stable=True).astype(xp.int32)
    of_length = lambda x: xp.take_along_axis(x, flat, axis=-1)
    aligned = of_length(table.bases) + ((rank - of_length(table.offsets)) << (FULL - flat))
    return xp.where(flat > 0, _reversed(aligned.astype(xp.uint32)), xp.uint32(0)).reshape(lengths.shape)


def sketch_counts(columns: float, buckets: int) -> np.ndarray:
    """Relative frequencies of the cells of a MinMaxSketch, in units of 2^-24, for `code_lengths`.

        P(i) = e^(-i / (rho B)) (1 - e^(-1 / (rho B))),  i < B;    P(empty) = e^(-1 / rho)

    Args:
        columns: rho, cells of a row for each item of the group.
        buckets: B, distances in a group. Symbol B is the empty cell.

    Returns:
        i32[B + 1], at least 1 each.
    """
    if not columns > 0 or not 1 <= buckets <= 510:
        raise ValueError(f"sketch_counts: columns must be above 0 and buckets in 1 .. 510; got {columns}, {buckets}")
    rate = 1 / (columns * buckets)
    law = np.append(np.exp(-rate * np.arange(buckets)) * -np.expm1(-rate), np.exp(-rate * buckets))
    return np.maximum(1, np.rint(law * 2**24)).astype(np.int32)


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
        counts, lengths: i32[..., S], of all its tables.
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
    """Encodes as `encode_symbols` does for one table, with the header before it; begins at bit 0."""
    header, bits = pack_codes(*length_codes(lengths), num_words)
    words, end = encode_symbols(symbols, lengths, num_words, count=count, start=bits)
    return header + words, end


def decode_with_table(words: Array, num_symbols: int, size: int, *, count: Array) -> tuple[Array, Array]:
    """Inverse of `encode_with_table`."""
    lengths, start = read_lengths(words, namespace(words).int32(0), num_symbols)
    return decode_symbols(words, lengths[None], size, count=count, start=start)


def _symbol_lengths(symbols: Array, lengths: Array, which: Array | None, count: Array) -> tuple[Array, Array]:
    """The place of each symbol in the flattened tables, and the length of its code, 0 beyond the count."""
    xp = namespace(symbols)
    index = symbols.astype(xp.int32) + (0 if which is None else which * lengths.shape[-1])
    valid = xp.arange(symbols.shape[0], dtype=xp.int32) < count
    return index, xp.where(valid, gather(lengths.reshape(-1), index), 0)


def encode_symbols(
    symbols: Array, lengths: Array, num_words: int, *, count: Array, start: Array | int = 0, which: Array | None = None
) -> tuple[Array, Array]:
    """Chunk lengths and codes of a sequence.

    Args:
        symbols: integers [n], each with a code.
        lengths: i32[S], or i32[T, S] for T tables.
        num_words: capacity of the stream.
        count: i32[], symbols that count, the first ones.
        start: bit of the stream where to begin.
        which: i32[n], table of each symbol; None for one table.

    Returns:
        words u32[num_words], zero outside of what is written (add it to other parts of the stream); the bit
        after the last, i32[].
    """
    xp = namespace(symbols)
    count = xp.asarray(count, xp.int32)
    n = symbols.shape[0]
    index, each = _symbol_lengths(symbols, lengths, which, count)
    codes = gather(canonical_codes(lengths).reshape(-1), index)
    codes = xp.where(each > 0, codes, xp.uint32(0))
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
    words: Array, lengths: Array, size: int, *, count: Array, start: Array | int = 0, which: Array | None = None
) -> tuple[Array, Array]:
    """Inverse of `encode_symbols`, all chunks at once.

    Args:
        words: u32[w].
        lengths, count, start, which: as they were given.
        size: n, number of places.

    Returns:
        symbols i32[size], 0 beyond the count; the bit after the last, i32[]. From a stream that `encode_symbols`
        did not make, some symbols of the table; where a chunk does not end where the next begins, 2^31 - 1.
    """
    xp = namespace(words)
    count, start = xp.asarray(count, xp.int32), xp.asarray(start, xp.int32)
    table = _table(lengths.reshape(-1, lengths.shape[-1]))
    num_chunks = -(-size // CHUNK)
    if num_chunks == 0:
        return xp.zeros((0,), xp.int32), start
    place = xp.arange(num_chunks - 1, dtype=xp.int32)
    sums = read_fields(words, start + CHUNK_BITS * place, CHUNK_BITS).astype(xp.int32)
    sums = xp.where(place < (count - 1) // CHUNK, sums, 0)
    first = start + chunk_bits(count)
    begins = first + xp.concatenate([0 * words[:1].astype(xp.int32), running_sum(sums)])
    number = CHUNK * xp.arange(num_chunks, dtype=xp.int32)
    flat = lambda x, row, column: gather(x.reshape(-1), row * x.shape[1] + column)
    which = None if which is None else which.astype(xp.int32)

    def step(state):
        position, number = state
        row = xp.int32(0) if which is None else gather(which, number)
        aligned = _reversed(read_fields(words, position, FULL)).astype(xp.int32)
        bounds = table.bounds[row]
        length = 1 + xp.sum(aligned[:, None] >= bounds.reshape(-1, bounds.shape[-1]), axis=-1, dtype=xp.int32)
        rank = flat(table.offsets, row, length) + ((aligned - flat(table.bases, row, length)) >> (FULL - length))
        symbol = flat(table.order, row, xp.clip(rank, 0, lengths.shape[-1] - 1))
        real = number < count
        position = xp.where(real, position + length, position)
        return (position, number + 1), xp.where(real, symbol, 0)

    (ends, _), symbols = scan(step, (begins, number), CHUNK, words)
    last = xp.clip((count - 1) // CHUNK, 0, num_chunks - 1)
    meet = xp.all((ends[:-1] == begins[1:]) | (place >= last))
    end = xp.where(count > 0, ends[last], start)
    return symbols.T.reshape(-1)[:size], xp.where(meet, end, xp.int32(2**31 - 1))
