"""Ascending keys as coded gaps, several lists in one array.

With k_{-1} = -1 at the start of each list, a key is its gap g_i = k_i - k_{i-1} - 1 >= 0, or, as SketchML and
SKCompress count it, D_i = g_i + 1, but D_i = k_i at the start of a list. n is the number of binary digits of D. A key
becomes a prefix and a body; all prefixes stand before all bodies, so that both are found in parallel:

    scheme                prefix                              body
    plain                 none                                32 bits
    sketchml              L - 1 in 2 bits                     L = 1, 2 or 4 bytes
    fixed m               I - 1 in log2 m bits                b I bits,  b = 32 / m,  I = ceil(n / b)
    released unary m      I, then a mark   (I + 1 bits)       b I bits
    unary m               I - 1, then a mark   (I bits)       b I bits
    huffman               n, in a canonical Huffman code      n - 1 bits, the leading 1 left out
    rice k                g >> k, then a mark                 k bits

for m in 2, 4, 8, 16. A unary number u is u zeros and a one. A stream is the number of its scheme (8 bits), the lengths
and chunks of the Huffman code if it has one (`huffman`), prefixes, bodies.

coder          schemes to choose from, by number of bits
"sketchml"     that one
"released"     plain, fixed and released unary, by the estimate of the released code, which counts floor(n / b) + 1
               intervals where ceil(n / b) are sent
"adaptive"     plain, fixed and unary, by true cost
"rice"         k from the message. The cost is convex in k, and its minimum lies within two places of
               floor(log2(2 (mean g + 1) / 3)), so three costs find it
"huffman"      that one
"best"         all but the released ones

References: Jiang, Fu, Yang, Cui 2018 (SketchML); Jiang, Fu, Yang, Shao, Cui 2020 (SKCompress); Rice 1979;
Kiely 2004 (the range of k).
"""

from typing import Any, NamedTuple

from jaxcomp.arrays import bit_length, namespace
from jaxcomp.codes.arrays import branch, gather, histogram, mark, ones, running_max, running_sum, scatter_bits
from jaxcomp.codes.huffman import (
    chunk_bits,
    code_lengths,
    decode_symbols,
    encode_symbols,
    length_codes,
    read_lengths,
)
from jaxcomp.codes.schemes import (
    CLASS_BITS,
    CLASSES,
    CODERS,
    ENTROPY,
    ESTIMATED,
    ESTIMATES,
    FIELDS,
    FIXED,
    HUFFMAN,
    RICE,
    SCHEME_BITS,
    SCHEMES,
    SYMBOLS,
    TOO_DEAR,
    UNARY,
)
from jaxcomp.codes.stream import code_starts, low_bits, read_fields

__all__ = [
    "CODERS",
    "MAX_KEYS",
    "ChosenScheme",
    "Gaps",
    "choose_scheme",
    "decode_keys",
    "decode_to_gaps",
    "encode_keys",
    "gaps_of",
    "key_bits",
    "key_words",
    "keys_from_gaps",
    "list_starts",
]

Array = Any
MAX_KEYS = 1 << 25  # of one stream: bits are counted in i32
MAX_TABLE_WIDTH = 8  # bits of the widest levels that have a Huffman table
# ------------------------------------------------------------------------------------------------
# Gaps


class Gaps(NamedTuple):
    """gaps u32[n]: g;  first bool[n]: start of a list;  valid bool[n]: what counts. In any order of places."""

    gaps: Array
    first: Array
    valid: Array

    @property
    def numbers(self) -> Array:
        """D."""
        xp = namespace(self.gaps)
        return self.gaps + xp.where(self.first, xp.uint32(0), xp.uint32(1))


def list_starts(counts: Array, size: int) -> tuple[Array, Array]:
    """Masks of the places where lists of these lengths start, and of those that count: bool[size], bool[size]."""
    xp = namespace(counts)
    starts = code_starts(counts)
    first = mark(xp.where(counts > 0, starts, size), size)
    return first, xp.arange(size, dtype=xp.int32) < xp.sum(counts, dtype=xp.int32)


def gaps_of(keys: Array, counts: Array) -> Gaps:
    """Gaps of ascending keys.

    Args:
        keys: i32[n], list after list, strictly ascending within each, 0 .. 2^31 - 1; anything behind them.
        counts: i32[r], keys of each list, with sum at most n.
    """
    xp = namespace(keys)
    first, valid = list_starts(counts, keys.shape[0])
    keys = keys.astype(xp.uint32)
    before = xp.concatenate([xp.zeros((1,), xp.uint32), keys[:-1] + xp.uint32(1)])[: keys.shape[0]]
    gaps = keys - xp.where(first, xp.uint32(0), before)
    return Gaps(xp.where(valid, gaps, xp.uint32(0)), first, valid)


# ------------------------------------------------------------------------------------------------
# Which scheme, and what it costs


class ChosenScheme(NamedTuple):
    """scheme i32[]; bits i32[] of the whole stream; lengths i32[33] of the Huffman code of n."""

    scheme: Array
    bits: Array
    lengths: Array


def choose_scheme(gaps: Gaps, coder: str = "best") -> ChosenScheme:
    """The scheme that a coder chooses for these gaps, and the bits of the stream.

    Args:
        gaps: as `gaps_of` returns them, or with numbers anywhere and `valid` saying where.
        coder: one of CODERS.

    Raises:
        ValueError: unknown coder, or more than 2^25 places.
    """
    if coder not in CODERS:
        raise ValueError(f"key coder must be one of {', '.join(CODERS)}; got {coder!r}")
    size = gaps.gaps.shape[0]
    if size > MAX_KEYS:
        raise ValueError(f"at most 2^25 = {MAX_KEYS} keys in one stream; got {size}")
    xp = namespace(gaps.gaps)
    schemes = CODERS[coder]
    classes = histogram(bit_length(gaps.numbers), CLASSES, gaps.valid)
    total = lambda table: xp.sum(xp.asarray(table) * classes[None], axis=-1, dtype=xp.int32)
    if coder == "released":
        scheme = xp.asarray(ESTIMATED)[xp.argmin(total(ESTIMATES))]
        bits = total(CLASS_BITS)[scheme]
        return ChosenScheme(scheme, SCHEME_BITS + bits, xp.zeros((CLASSES,), xp.int32))
    options = [(schemes[0], xp.asarray(TOO_DEAR, xp.int32))]  # (number, bits)
    lengths = xp.zeros((CLASSES,), xp.int32)
    plain = [number for number in schemes if number < ENTROPY]
    if plain:
        each = total(CLASS_BITS[plain])
        options += [(number, each[i]) for i, number in enumerate(plain)]
    if ENTROPY in schemes:
        lengths = code_lengths(classes)
        digits = xp.arange(CLASSES, dtype=xp.int32)
        bits = total((lengths + xp.maximum(digits - 1, 0))[None])[0] + chunk_bits(xp.sum(classes, dtype=xp.int32))
        options.append((ENTROPY, bits + xp.sum(length_codes(lengths)[1], dtype=xp.int32)))
    if RICE in schemes:
        k, bits = _rice(gaps, xp.sum(classes, dtype=xp.int32))
        options.append((RICE + k, bits))
    costs = xp.stack([xp.asarray(bits, xp.int32) for _, bits in options])
    numbers = xp.stack([xp.asarray(number, xp.int32) for number, _ in options])
    cheapest = xp.argmin(costs)
    return ChosenScheme(numbers[cheapest], SCHEME_BITS + costs[cheapest], lengths)


def _rice(gaps: Gaps, count: Array) -> tuple[Array, Array]:
    """The best parameter and its bits."""
    xp = namespace(gaps.gaps)
    g = xp.where(gaps.valid, gaps.gaps, xp.uint32(0))
    mean = xp.sum(g.astype(xp.float32), dtype=xp.float32) / xp.maximum(count, 1).astype(xp.float32)
    # A little lower than the bound, and one place more: the mean is rounded.
    least = bit_length(xp.minimum(xp.float32(0.66) * (mean + 1), xp.float32(2**31)).astype(xp.uint32)) - 1
    k = xp.clip(least + xp.arange(4, dtype=xp.int32), 0, 31)
    tops = xp.stack([xp.sum((g >> k[i].astype(xp.uint32)).astype(xp.int32), dtype=xp.int32) for i in range(4)])
    bits = tops + count * (k + 1)
    return k[xp.argmin(bits)], xp.min(bits)


def key_bits(keys: Array, counts: Array, *, coder: str = "best") -> Array:
    """Bits of the stream that `encode_keys` makes, i32[].

    >>> import numpy as np
    >>> print(key_bits(np.arange(0, 700, 7), np.array([100])))
    331
    """
    return choose_scheme(gaps_of(keys, counts), coder).bits


def key_words(size: int) -> int:
    """Words that hold the stream of any `size` keys, by any coder.

    >>> key_words(1000)
    1069
    """
    return -(-(34 * size + SCHEME_BITS + 9 + 4 * CLASSES + 12 * (size // 256)) // 32)


# ------------------------------------------------------------------------------------------------
# Streams


def encode_keys(
    keys: Array, counts: Array, *, coder: str = "best", num_words: int | None = None, chosen: ChosenScheme | None = None
) -> tuple[Array, Array]:
    """Keys as a stream of bits that says by itself how it is coded.

    Args:
        keys: i32[n], list after list, strictly ascending within each, 0 .. 2^31 - 1; anything behind them.
        counts: i32[r], keys of each list, with sum at most n; both ends know them.
        coder: one of CODERS.
        num_words: capacity; `key_words(n)` if None. What does not fit is dropped.
        chosen: choose_scheme(gaps_of(keys, counts), coder), if it is known.

    Returns:
        words u32[num_words], unused bits zero; number of bits i32[].

    Raises:
        ValueError: as `choose_scheme`.

    >>> import numpy as np
    >>> keys, counts = np.array([3, 5, 0, 9, 0]), np.array([2, 2])
    >>> words, bits = encode_keys(keys, counts)
    >>> print(decode_keys(words, counts, 5), bits)
    [3 5 0 9 0] 21
    """
    xp = namespace(keys)
    size = keys.shape[0]
    gaps = gaps_of(keys, counts)
    scheme, total, lengths = choose_scheme(gaps, coder) if chosen is None else chosen
    num_words = key_words(size) if num_words is None else num_words
    kinds = [kind for kind in (FIXED, UNARY, HUFFMAN) if any(SCHEMES[s].kind == kind for s in CODERS[coder])]
    kind, width, base, unit, rice = (xp.asarray(row)[scheme] for row in FIELDS)
    head = scatter_bits([(scheme.astype(xp.uint32).reshape(1), xp.zeros((1,), xp.int32))], num_words)

    numbers = gaps.numbers
    symbols = gather(xp.asarray(SYMBOLS).reshape(-1), xp.minimum(scheme, ENTROPY) * CLASSES + bit_length(numbers))
    if any(SCHEMES[s].rice for s in CODERS[coder]):
        numbers = xp.where(rice > 0, gaps.gaps, numbers)
        symbols = xp.where(rice > 0, (numbers >> (base & 31).astype(xp.uint32)).astype(xp.int32), symbols)
    symbols = xp.where(gaps.valid, symbols, 0)
    count = xp.sum(counts, dtype=xp.int32)
    widths = xp.where(gaps.valid, base + unit * symbols, 0)
    if ENTROPY in CODERS[coder]:
        widths = xp.where(kind == HUFFMAN, xp.maximum(symbols - 1, 0), widths)

    def fixed():
        each = xp.where(gaps.valid, width, 0)
        codes = symbols.astype(xp.uint32)
        return scatter_bits([(codes, SCHEME_BITS + code_starts(each))], num_words), SCHEME_BITS + count * width

    def unary():
        ends = SCHEME_BITS + running_sum(xp.where(gaps.valid, symbols + 1, 0).astype(xp.int32))
        marks = gaps.valid.astype(xp.uint32)
        return scatter_bits([(marks, ends - 1)], num_words), ends[-1] if size else xp.int32(SCHEME_BITS)

    def huffman():
        codes, each = length_codes(lengths)
        table = scatter_bits([(codes, SCHEME_BITS + code_starts(each))], num_words)
        start = SCHEME_BITS + xp.sum(each, dtype=xp.int32)
        words, end = encode_symbols(symbols, lengths, num_words, count=count, start=start)
        return table + words, end

    each = {FIXED: fixed, UNARY: unary, HUFFMAN: huffman}
    prefixes, end = branch(kind - kinds[0], [each[k] for k in kinds])
    bodies = scatter_bits([(low_bits(numbers, widths), end + code_starts(widths))], num_words)
    return head + prefixes + bodies, total


def decode_to_gaps(words: Array, counts: Array, size: int, *, coder: str = "best") -> tuple[Array, Array]:
    """Inverse of `encode_keys` up to the gaps.

    Returns:
        gaps u32[size], 0 beyond the lists; the bit after the stream, i32[], 2^31 - 1 if there are fewer marks than
        keys.
    """
    xp = namespace(words)
    first, valid = list_starts(counts, size)
    count = xp.sum(counts, dtype=xp.int32)
    scheme = xp.minimum((words[0] & xp.uint32(2**SCHEME_BITS - 1)).astype(xp.int32), len(SCHEMES) - 1)
    kind, width, base, unit, rice = (xp.asarray(row)[scheme] for row in FIELDS)
    kinds = [kind for kind in (FIXED, UNARY, HUFFMAN) if any(SCHEMES[s].kind == kind for s in CODERS[coder])]
    place = xp.arange(size, dtype=xp.int32)

    def fixed():
        symbols = read_fields(words, SCHEME_BITS + place * width, width).astype(xp.int32)
        return symbols, SCHEME_BITS + count * width

    def unary():
        head = xp.arange(words.shape[0], dtype=xp.int32) == 0
        ends = ones(words & ~xp.where(head, xp.uint32(2**SCHEME_BITS - 1), xp.uint32(0)), size) + 1
        symbols = ends - xp.concatenate([xp.full((1,), SCHEME_BITS, xp.int32), ends])[:size] - 1
        last = xp.max(xp.where(valid, ends, SCHEME_BITS), initial=SCHEME_BITS)
        return symbols, xp.where(last > 32 * words.shape[0], TOO_DEAR, last)

    def huffman():
        lengths, start = read_lengths(words, xp.int32(SCHEME_BITS), CLASSES)
        return decode_symbols(words, lengths, size, count=count, start=start)

    each = {FIXED: fixed, UNARY: unary, HUFFMAN: huffman}
    symbols, end = branch(xp.clip(kind - kinds[0], 0, len(kinds) - 1), [each[k] for k in kinds])
    symbols = xp.where(valid, symbols, 0)
    widths = xp.where(kind == HUFFMAN, xp.maximum(symbols - 1, 0), base + unit * symbols)
    widths = xp.where(valid, xp.clip(widths, 0, 32), 0)
    bodies = read_fields(words, xp.where(end == TOO_DEAR, 0, end) + code_starts(widths), widths)
    one = xp.uint32(1)
    tops = xp.where(rice > 0, symbols.astype(xp.uint32) << (base & 31).astype(xp.uint32), xp.uint32(0))
    tops = xp.where((kind == HUFFMAN) & (symbols > 0), one << (xp.maximum(symbols - 1, 0) & 31).astype(xp.uint32), tops)
    numbers = tops + bodies
    gaps = numbers - xp.where(first | (rice > 0), xp.uint32(0), one)
    total = xp.where(end == TOO_DEAR, TOO_DEAR, end + xp.sum(widths, dtype=xp.int32))
    return xp.where(valid, gaps, xp.uint32(0)), total


def keys_from_gaps(gaps: Array, counts: Array) -> Array:
    """Keys i32[n] from the gaps of lists, 0 beyond them."""
    xp = namespace(gaps)
    first, valid = list_starts(counts, gaps.shape[0])
    numbers = gaps + xp.where(first, xp.uint32(0), xp.uint32(1))
    # Sums over all lists wrap around, and so do the differences that restart them.
    sums = running_sum(numbers.astype(xp.uint32))
    start = running_max(xp.where(first, xp.arange(gaps.shape[0], dtype=xp.int32), 0))
    keys = sums - gather(sums - numbers, start)
    return xp.where(valid, keys, xp.uint32(0)).astype(xp.int32)


def decode_keys(words: Array, counts: Array, size: int, *, coder: str = "best") -> Array:
    """Inverse of `encode_keys`.

    Args:
        words: u32[w], the stream from its first word on.
        counts: i32[r], as they were given.
        size: n, number of places.
        coder: as it was given; or "best", which decodes them all.

    Returns:
        keys i32[size], 0 beyond the lists.
    """
    gaps, _ = decode_to_gaps(words, counts, size, coder=coder)
    return keys_from_gaps(gaps, counts)
