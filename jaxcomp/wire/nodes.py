"""The format of a body: what every node holds, and the limits that both sides keep.

A body is a node. A node is a byte that says its type, then its parts:

    0 array       dtype u8 | ndim u8 | dims varint... | raw bytes
    1 Dense       node
    2 Scaled      array values | array scale
    3 Sparse      capacity | count | width u8 | indices, width bits each | values (see below)
    4 Quantized   array norms | array words
    5 Leaves      node dense | number varint | nodes
    6 Sparse      with local indices: capacity | count | blocks | counts i32 | low u16 | values
    7 Quantized   array norms | width u8 | groups varint | non-zeros varint | filler varint | Elias stream | filler
    8 Sparse      capacity | count | padding index | gap stream length varint | Elias stream | values | filler

    9 Sparse      capacity | count | padding index | key stream | values
   10 Sparse      with local indices: capacity | count | blocks | filler varint | key stream | values | filler
   11 Quantized   array norms | width u8 | groups varint | level stream
   12 Quantized   array norms | width u8 | groups varint | non-zeros varint | filler varint | key stream
                  | level stream | filler
   13 Sketch      see `sketch`

7 and 8 are written by `encode(payload, code="elias")`: gaps and levels in Elias omega codes (`elias`), which pays where
most levels are zero or indices lie close. From 8 on, a sparse message ends before the padding.

9 to 12 are written by `encode(payload, code="best")`, where they are the shortest. A stream is its number of
bytes (varint) and these; what is in it is that of `jaxcomp.codes`: keys, or a Huffman table and the codes of all levels
(11) or of those that are not zero (12).

Sparse stops at the first padding entry; what follows repeats it and is rebuilt by the decoder.
Values are a raw array of `count` numbers, or the node of a nested payload. So that a short
message cannot ask for a long array, every PAD_BYTES of rebuilt padding cost one filler byte.
Numbers are little-endian, as on every machine that JAX runs on.
"""

import jax.numpy as jnp
import numpy as np

__all__ = [
    "ARRAY",
    "CODED_LEVELS",
    "CODED_LOCAL",
    "CODED_NONZEROS",
    "CODED_SPARSE",
    "DENSE",
    "DTYPES",
    "ELIAS_QUANTIZED",
    "ELIAS_SPARSE",
    "LEAVES",
    "MAX_BYTES",
    "MAX_DEPTH",
    "MAX_DIMS",
    "MAX_LEAVES",
    "MAX_STREAM",
    "PAD_BYTES",
    "QUANTIZED",
    "SCALED",
    "SKETCH",
    "SPARSE",
    "SPARSE_LOCAL",
    "filler_bytes",
]

ARRAY, DENSE, SCALED, SPARSE, QUANTIZED, LEAVES, SPARSE_LOCAL, ELIAS_QUANTIZED, ELIAS_SPARSE = range(9)
CODED_SPARSE, CODED_LOCAL, CODED_LEVELS, CODED_NONZEROS, SKETCH = range(9, 14)
MAX_DEPTH = 8
MAX_DIMS = 8
PAD_BYTES = 64
MAX_LEAVES = 4096
MAX_STREAM = 2**27  # bytes of a key or level stream: its bits are counted in i32
MAX_BYTES = 2**48  # of an array, zero dimensions counted as one

DTYPES = [
    np.dtype(name)
    for name in (
        "float32",
        "float64",
        "float16",
        jnp.bfloat16,
        jnp.float8_e4m3fn,
        jnp.float8_e5m2,
        jnp.float8_e4m3b11fnuz,
        jnp.float8_e4m3fnuz,
        jnp.float8_e5m2fnuz,
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "int8",
        "int16",
        "int32",
        "int64",
        jnp.float8_e3m4,
        jnp.float8_e4m3,
    )
]


def filler_bytes(padding: int, itemsize: int) -> int:
    """What this many entries of padding cost."""
    return -(-padding * (itemsize + 4) // PAD_BYTES)
