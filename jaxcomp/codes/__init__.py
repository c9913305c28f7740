"""Entropy codes in jit: fields of varying length, keys, Huffman. Static shapes, no host, no loop over elements.

How to use them, for a message with keys in lists and cells::

    words, bits = codes.encode_keys(keys, counts, coder="best")       # u32[key_words(n)], i32[]
    keys = codes.decode_keys(words, counts, n)                        # the stream says how it is coded

    lengths = codes.code_lengths(cell_counts)                         # i32[S], the table
    words, end = codes.encode_symbols(cells, lengths, num_words, count=num_cells)
    cells, end = codes.decode_symbols(words, lengths, size, count=num_cells)

A stream begins at bit `start` (0) and ends at bit `end`; words that two calls make for one stream are added.
`codes.length_codes(lengths)` and `codes.read_lengths` are the header of a table; `codes.pack_codes` and
`codes.read_fields` write and read whatever else there is. `codes.key_bits` and `codes.symbol_bits` give the bits
without coding.

Every function takes NumPy arrays as well and then runs on the host, to the same bits: `wire.encode` calls these very
functions, `wire.streams` decodes the same streams in little memory. Capacities are static; counts and bits are traced.
Streams hold at most 2^31 bits.
"""

from jaxcomp.codes.huffman import (
    canonical_codes,
    code_lengths,
    decode_symbols,
    encode_symbols,
    length_codes,
    read_lengths,
    symbol_bits,
)
from jaxcomp.codes.keys import decode_keys, encode_keys, key_bits, key_words
from jaxcomp.codes.schemes import CODERS
from jaxcomp.codes.stream import pack_codes, read_fields

__all__ = [
    "CODERS",
    "canonical_codes",
    "code_lengths",
    "decode_keys",
    "decode_symbols",
    "encode_keys",
    "encode_symbols",
    "key_bits",
    "key_words",
    "length_codes",
    "pack_codes",
    "read_fields",
    "read_lengths",
    "symbol_bits",
]
