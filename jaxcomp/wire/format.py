"""The format of a body, version 1: records, and the arrays in them.

A body is one record. A record is a byte that says its kind, then its fields; some fields are records. Which kinds there
are stands with each family of payloads (`jaxcomp.payloads`); kind 0 is an array:

    0 array       dtype u8 | ndim u8 | dims varint... | raw bytes

A stream is its number of bytes (varint) and these: keys, or a Huffman table and the codes of levels, as in
`jaxcomp.codes`. Filler is zeros, so that a short message cannot ask for a long array: `limits`.
Numbers are little-endian, as on every machine that JAX runs on.
"""

import math
from collections.abc import Collection
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxcomp.wire.errors import WireError
from jaxcomp.wire.frame import Reader, Writer, varint
from jaxcomp.wire.limits import MAX_BYTES, MAX_DIMS, MAX_GROUPS

__all__ = [
    "ARRAY",
    "DTYPES",
    "FLOATS",
    "check_array",
    "check_words",
    "dtype_code",
    "is_float",
    "raw",
    "read_array",
    "read_dtype",
    "read_numbers",
    "write_array",
]

ARRAY = 0
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
        jnp.float8_e8m0fnu,
    )
]
NUMBERS = {dtype: number for number, dtype in enumerate(DTYPES)}
FLOATS = {dtype for dtype in DTYPES if jnp.issubdtype(dtype, jnp.floating)}


def is_float(dtype: np.dtype) -> bool:
    """Whether it is one of the floats that arrays of a message may have."""
    return dtype in FLOATS


def check_array(field: str, array: Any, dtypes: Collection[np.dtype | type], ndim: int, allowed: str) -> None:
    """Raises WireError unless it is an array of one of these dtypes and so many dimensions."""
    if not isinstance(array, np.ndarray) or array.ndim != ndim or array.dtype not in dtypes:
        got = f"{array.dtype}{list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
        raise WireError(field, got, allowed)


def check_words(name: str, words: Any) -> None:
    """Raises WireError unless these are codes of 1 to 32 bits in the layout of `packing.pack`."""
    check_array(f"{name}.words", words, [np.uint32], 2, "u32[w, ceil(n / 32)]")
    width, groups = words.shape
    if not 1 <= width <= 32:
        raise WireError(f"{name} width", width, "1 .. 32")
    if groups > MAX_GROUPS:
        raise WireError(f"{name} groups", groups, f"at most {MAX_GROUPS}")


def dtype_code(dtype: np.dtype) -> int:
    """Number of a dtype on the wire.

    Raises:
        WireError: no payload has arrays of it.
    """
    number = NUMBERS.get(dtype)
    if number is None:
        raise WireError("dtype of an array", dtype, "a float of up to 64 bits or an integer of 8 to 64")
    return number


def raw(array: np.ndarray) -> bytes:
    """Bytes of an array, row after row."""
    return np.ascontiguousarray(array).tobytes()


def write_array(out: Writer, array: np.ndarray) -> None:
    """An array without the byte that says its kind."""
    if array.ndim > MAX_DIMS:
        raise WireError("number of dimensions", array.ndim, f"at most {MAX_DIMS}")
    out.add(bytes([dtype_code(array.dtype), array.ndim]), *map(varint, array.shape), raw(array))


def read_dtype(reader: Reader, field: str) -> np.dtype:
    """The dtype that a byte stands for; WireError for a byte that stands for none."""
    code = reader.byte(f"{field} dtype")
    if code >= len(DTYPES):
        raise WireError(f"{field} dtype", code, f"below {len(DTYPES)}")
    return DTYPES[code]


def read_numbers(reader: Reader, field: str, dtype: np.dtype, count: int, room: int | None = None) -> np.ndarray:
    """`count` numbers from raw bytes, then zeros up to `room`."""
    room = count if room is None else room
    data = reader.take(f"{field} values", count * dtype.itemsize)
    reader.make(f"{field} values", room * dtype.itemsize)
    numbers = np.empty(room, dtype)
    numbers[:count] = np.frombuffer(data, dtype)
    numbers[count:] = 0
    return numbers


def read_array(reader: Reader, field: str) -> np.ndarray:
    """An array without the byte that says its kind.

    Raises:
        WireError: unknown dtype, too many dimensions, too long.
    """
    dtype = read_dtype(reader, field)
    dims = reader.byte(f"{field} ndim")
    if dims > MAX_DIMS:
        raise WireError(f"{field} ndim", dims, f"at most {MAX_DIMS}")
    shape = [reader.varint(f"{field} dim {axis}") for axis in range(dims)]
    # An empty array may have long dimensions; they must not overflow an index.
    if math.prod(max(length, 1) for length in shape) * dtype.itemsize > MAX_BYTES:
        raise WireError(f"{field} shape", shape, f"at most {MAX_BYTES} bytes")
    return read_numbers(reader, field, dtype, math.prod(shape)).reshape(shape)
