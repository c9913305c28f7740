"""How keys may be coded: the schemes, what each of them spends on a key of n digits, and who chooses among which.

`keys` has the table of schemes and coders in words.
"""

from typing import NamedTuple

import numpy as np

__all__ = [
    "CLASSES",
    "CLASS_BITS",
    "CODERS",
    "ENTROPY",
    "ESTIMATED",
    "ESTIMATES",
    "FIELDS",
    "FIXED",
    "HUFFMAN",
    "RICE",
    "SCHEMES",
    "SCHEME_BITS",
    "SYMBOLS",
    "TOO_DEAR",
    "UNARY",
]

SCHEME_BITS = 8
CLASSES = 33  # n = 0 .. 32
FIXED, UNARY, HUFFMAN = range(3)
SPLITS = (2, 4, 8, 16)


class Scheme(NamedTuple):
    """Prefix symbol s: of `width` bits, or unary, or Huffman. Body: base + unit s bits. width of a unary prefix: what
    is added to I - 1. rice: s counts multiples of 2^base."""

    kind: int
    width: int
    base: int
    unit: int
    rice: bool = False


SCHEMES = (
    Scheme(FIXED, 0, 32, 0),
    Scheme(FIXED, 2, 8, 8),
    *(Scheme(FIXED, m.bit_length() - 1, 32 // m, 32 // m) for m in SPLITS),
    *(Scheme(UNARY, 1, 0, 32 // m) for m in SPLITS),
    *(Scheme(UNARY, 0, 32 // m, 32 // m) for m in SPLITS),
    Scheme(HUFFMAN, 0, 0, 1),
    *(Scheme(UNARY, 0, k, 0, True) for k in range(32)),
)
PLAIN, SKETCHML, SPLIT, DEAD, UNARIES, ENTROPY, RICE = 0, 1, 2, 6, 10, 14, 15
CODERS = {
    "best": (PLAIN, SKETCHML, *range(SPLIT, DEAD), *range(UNARIES, len(SCHEMES))),
    "sketchml": (SKETCHML,),
    "released": (PLAIN, *range(SPLIT, UNARIES)),
    "adaptive": (PLAIN, *range(SPLIT, DEAD), *range(UNARIES, ENTROPY)),
    "rice": tuple(range(RICE, len(SCHEMES))),
    "huffman": (ENTROPY,),
}
TOO_DEAR = 2**31 - 1


def _class_symbols() -> np.ndarray:
    """The prefix symbol of a number of n digits under each scheme but Rice: i32[15, 33]."""
    digits = np.arange(CLASSES)
    table = np.zeros((RICE, CLASSES), np.int32)
    for row, scheme in enumerate(SCHEMES[:RICE]):
        if scheme.kind == HUFFMAN:
            table[row] = digits
        elif scheme.unit:
            table[row] = -(-np.maximum(digits, 1) // scheme.unit) - 1 + (scheme.width if scheme.kind == UNARY else 0)
    table[SKETCHML][table[SKETCHML] == 2] = 3  # no key has three bytes
    return table


def _class_bits() -> np.ndarray:
    """Bits of a key of n digits under each scheme but Huffman and Rice: i32[14, 33]."""
    rows = []
    for scheme, symbol in zip(SCHEMES[:ENTROPY], SYMBOLS, strict=False):
        prefix = scheme.width if scheme.kind == FIXED else symbol + 1
        rows.append(prefix + scheme.base + scheme.unit * symbol)
    return np.stack(rows).astype(np.int32)


def _estimates() -> np.ndarray:
    """Bits of a key of n digits as the released code estimates them, in its order of choice: i32[9, 33]."""
    digits = np.maximum(np.arange(CLASSES), 1)
    rows = [np.full(CLASSES, 32)]
    for m in SPLITS:
        b = 32 // m
        intervals = digits // b + 1
        rows += [b * intervals + m.bit_length() - 1, (b + 1) * intervals + 1]
    return np.stack(rows).astype(np.int32)


SYMBOLS = _class_symbols()
CLASS_BITS = _class_bits()
ESTIMATES = _estimates()
ESTIMATED = np.array([PLAIN, *(row for i in range(len(SPLITS)) for row in (SPLIT + i, DEAD + i))], np.int32)
FIELDS = np.array(list(SCHEMES), np.int32).T  # kind, width, base, unit, rice
