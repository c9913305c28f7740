"""Payloads as bytes: one encoder and one decoder per payload type, both by dispatch.

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

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp.codes import keys as keycodes
from jaxcomp.codes.huffman import decode_with_table, encode_with_table, is_prefix_code, read_lengths, table_bits
from jaxcomp.payloads import Dense, Leaves, LocalIndices, Quantized, Scaled, Sketch, Sparse
from jaxcomp.wire.bitstream import (
    pack_bits,
    pack_words,
    packed_size,
    stream_bytes,
    unpack_bits,
    unpack_words,
    words_of,
)
from jaxcomp.wire.elias import decode_gaps, decode_levels, elias_length, encode_gaps, encode_levels
from jaxcomp.wire.errors import WireError
from jaxcomp.wire.frame import Reader, seal, unseal, varint
from jaxcomp.wire.sketch import read_sketch, write_sketch

__all__ = ["decode", "encode"]

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


def encode(payload: Any, *, code: str = "fixed") -> bytes:
    """The message as it travels between hosts: framed, versioned, checksummed.

    Args:
        payload: of one worker, with concrete arrays.
        code: "fixed": levels and indices in a fixed number of bits; "elias": gaps and levels in
            Elias omega codes; "best": for each part of the message whatever is shortest of these and the
            key coders and Huffman codes of `jaxcomp.codes`.

    Returns:
        bytes; `8 * len` is `code_bits(payload, code=code)` plus at most 7 bits per array and the frame.

    Raises:
        ValueError: unknown code.
        TypeError: not a payload, or an array of a dtype that no payload has.

    >>> import jaxcomp as jc
    >>> message = jc.wire.encode(jc.payloads.Dense(np.float32([1, 2])))
    >>> len(message), jc.wire.decode(message).values
    (30, array([1., 2.], dtype=float32))
    """
    payload = jax.tree.map(np.asarray, jax.device_get(payload))
    parts: list[bytes] = []
    if code not in _CODES:
        raise ValueError(f"wire.encode: code must be one of {', '.join(_CODES)}; got {code!r}")
    if type(payload) not in _WRITERS:
        raise TypeError(f"wire.encode: {type(payload).__name__} is not a payload")
    _write(payload, parts, _CODES[code])
    return seal(b"".join(parts))


def decode(data: bytes) -> Any:
    """The payload of a message, with NumPy arrays.

    Memory stays below PAD_BYTES times the length of the message, whatever it claims.

    Raises:
        WireError: the bytes are not a message that `encode` could have made. Says which field
            was wrong, what was found and what is allowed.
    """
    reader = Reader(unseal(data))
    payload = _read(reader, MAX_DEPTH)
    if isinstance(payload, np.ndarray):
        raise WireError("payload type", ARRAY, "a payload, not a bare array")
    reader.end()
    return payload


# ------------------------------------------------------------------------------------------------
# Writing


def _write(node: Any, parts: list[bytes], writers: dict) -> None:
    if isinstance(node, np.ndarray):
        parts.append(bytes([ARRAY]))
        _write_array(node, parts)
        return
    writer = writers.get(type(node))
    if writer is None:
        raise TypeError(f"wire.encode: {type(node).__name__} is not a payload")
    writer(node, parts, writers)


def _dtype_code(dtype: np.dtype) -> int:
    try:
        return DTYPES.index(dtype)
    except ValueError:
        raise TypeError(f"wire.encode: no payload has arrays of dtype {dtype}") from None


def _raw(array: np.ndarray) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def _write_array(array: np.ndarray, parts: list[bytes]) -> None:
    if array.ndim > MAX_DIMS:
        raise TypeError(f"wire.encode: at most {MAX_DIMS} dimensions; got {array.ndim}")
    parts.append(bytes([_dtype_code(array.dtype), array.ndim]) + b"".join(varint(n) for n in array.shape))
    parts.append(_raw(array))


def _write_dense(payload: Dense, parts: list[bytes], writers: dict) -> None:
    parts.append(bytes([DENSE]))
    _write(payload.values, parts, writers)


def _write_scaled(payload: Scaled, parts: list[bytes], writers: dict) -> None:
    parts.append(bytes([SCALED]))
    _write_array(payload.values, parts)
    _write_array(payload.scale, parts)


def _write_quantized(payload: Quantized, parts: list[bytes], writers: dict) -> None:
    parts.append(bytes([QUANTIZED]))
    _write_array(payload.norms, parts)
    _write_array(payload.words, parts)


def _write_leaves(payload: Leaves, parts: list[bytes], writers: dict) -> None:
    if len(payload.leaves) > MAX_LEAVES:
        raise TypeError(f"wire.encode: at most {MAX_LEAVES} leaves in one message; got {len(payload.leaves)}")
    parts.append(bytes([LEAVES]))
    _write(payload.dense, parts, writers)
    parts.append(varint(len(payload.leaves)))
    for leaf in payload.leaves:
        _write(leaf, parts, writers)


def _write_sketch(payload: Sketch, parts: list[bytes], writers: dict) -> None:
    parts += [bytes([SKETCH]), write_sketch(payload, _dtype_code, PAD_BYTES)]


def _check_sparse(payload: Sparse) -> bool:
    """Whether the values are plain numbers, after checking the indices."""
    values, indices = payload
    if indices.ndim != 1 or indices.dtype != np.int32:
        raise TypeError(f"wire.encode: Sparse.indices must be i32[k]; got {indices.dtype}{list(indices.shape)}")
    plain = isinstance(values, np.ndarray)
    if plain and values.shape != indices.shape:
        raise TypeError(f"wire.encode: Sparse has {values.shape} values for {indices.shape} indices")
    if indices.size and indices.min() < 0:
        raise TypeError(f"wire.encode: Sparse.indices must not be negative; got {indices.min()}")
    return plain


def _write_sparse(payload: Sparse, parts: list[bytes], writers: dict) -> None:
    values, indices = payload
    if isinstance(indices, LocalIndices):
        _write_local(values, indices, parts, writers)
        return
    plain = _check_sparse(payload)
    capacity = indices.size
    count = _stop(indices, values if plain else None)
    width = max(1, int(indices.max(initial=0)).bit_length())
    parts.append(bytes([SPARSE]) + varint(capacity) + varint(count) + bytes([width]))
    parts.append(pack_bits(indices[:count], width))
    _write_values(values, count, capacity, parts, writers)


def _write_local(values: Any, indices: LocalIndices, parts: list[bytes], writers: dict) -> None:
    low, counts = indices
    if low.ndim != 1 or low.dtype != np.uint16 or counts.ndim != 1 or counts.dtype != np.int32:
        raise TypeError(
            "wire.encode: LocalIndices must be u16[k] and i32[b]; got "
            f"{low.dtype}{list(low.shape)} and {counts.dtype}{list(counts.shape)}"
        )
    plain = isinstance(values, np.ndarray)
    if plain and values.shape != low.shape:
        raise TypeError(f"wire.encode: Sparse has {values.shape} values for {low.shape} indices")
    count = int(np.clip(np.sum(counts, dtype=np.int64), 0, low.size))
    if low[count:].any() or (plain and _raw(values[count:]).strip(b"\0")):
        count = low.size
    parts.append(bytes([SPARSE_LOCAL]) + varint(low.size) + varint(count) + varint(counts.size))
    parts.append(_raw(counts))
    parts.append(_raw(low[:count]))
    _write_values(values, count, low.size, parts, writers)


def _write_values(values: Any, count: int, capacity: int, parts: list[bytes], writers: dict) -> None:
    """The first `count` of them, or all of a nested payload, and what the padding behind them costs."""
    if isinstance(values, np.ndarray):
        parts.append(bytes([ARRAY, _dtype_code(values.dtype)]))
        parts.append(_raw(values[:count]))
        parts.append(bytes(_filler(capacity - count, values.dtype.itemsize)))
    else:
        _write(values, parts, writers)
        parts.append(bytes(_filler(capacity - count, 0)))


def _stop(indices: np.ndarray, values: np.ndarray | None) -> int:
    """Entries up to the first of the padding, which repeats one index with value zero."""
    if not indices.size:
        return 0
    padding = indices == indices[-1]
    count = int(np.argmax(padding)) + 1
    whole = not padding[count - 1 :].all()
    if values is not None:
        whole |= bool(np.any(_raw(values[count:]).strip(b"\0")))
    return indices.size if whole else count


def _filler(padding: int, itemsize: int) -> int:
    return -(-padding * (itemsize + 4) // PAD_BYTES)


def _write_elias_quantized(payload: Quantized, parts: list[bytes], writers: dict) -> None:
    width, groups = payload.words.shape
    count, stream = encode_levels(unpack_words(payload.words))
    filler = _unpaid(payload.words.nbytes, len(stream) + payload.norms.nbytes)
    parts.append(bytes([ELIAS_QUANTIZED]))
    _write_array(payload.norms, parts)
    parts.append(bytes([width]) + varint(groups) + varint(count) + varint(filler))
    parts.append(stream + bytes(filler))


def _unpaid(size: int, paid: int) -> int:
    """Filler without which `paid` bytes would ask for an array of `size` bytes."""
    return max(0, -(-size // PAD_BYTES) - paid)


def _ascending(payload: Sparse) -> tuple[int, int] | None:
    """Entries before the padding, and its index; None if they do not ascend."""
    plain = _check_sparse(payload)
    values, indices = payload
    count = _stop(indices, values if plain else None)
    last = int(indices[-1]) if indices.size else 0
    if count < indices.size or (count and not (plain and _raw(values[count - 1 : count]).strip(b"\0"))):
        count -= 1  # the first padding entry is not sent either: its index is in the header
    return None if np.any(np.diff(indices[:count], prepend=-1) < 1) else (count, last)


def _write_elias_sparse(payload: Sparse, parts: list[bytes], writers: dict) -> None:
    entries = None if isinstance(payload.indices, LocalIndices) else _ascending(payload)
    if entries is None:
        _write_sparse(payload, parts, writers)
        return
    count, last = entries
    _write_entries(ELIAS_SPARSE, payload, count, last, encode_gaps(payload.indices[:count]), parts, writers)


def _write_entries(
    kind: int, payload: Sparse, count: int, last: int, stream: bytes, parts: list[bytes], writers: dict
) -> None:
    capacity = payload.indices.size
    parts.append(bytes([kind]) + varint(capacity) + varint(count) + varint(last) + varint(len(stream)))
    parts.append(stream)
    _write_values(payload.values, count, capacity, parts, writers)


# ------------------------------------------------------------------------------------------------
# The shortest of several codes. `code_bits(payload, code="best")` makes the same choices.


def _key_plan(indices: np.ndarray) -> tuple[Any, np.ndarray]:
    counts = np.array([indices.size], np.int32)
    return keycodes.plan(keycodes.gaps_of(indices, counts)), counts


def _key_stream(indices: np.ndarray, plan: Any, counts: np.ndarray) -> bytes:
    words, bits = keycodes.encode_keys(indices, counts, num_words=(int(plan.bits) + 31) // 32, chosen=plan)
    return stream_bytes(words, bits)


def _level_stream(codes: np.ndarray, lengths: np.ndarray, bits: int) -> bytes:
    words, _ = encode_with_table(codes.astype(np.int32), lengths, (int(bits) + 31) // 32, count=np.int32(codes.size))
    return stream_bytes(words, bits)


def _write_best_sparse(payload: Sparse, parts: list[bytes], writers: dict) -> None:
    if isinstance(payload.indices, LocalIndices):
        _write_best_local(payload, parts, writers)
        return
    entries = _ascending(payload) if payload.indices.size <= keycodes.MAX_KEYS else None
    if entries is not None:
        (count, last), values = entries, payload.values
        indices = payload.indices[:count]
        plan, counts = _key_plan(indices)
        fixed = _stop(payload.indices, values if isinstance(values, np.ndarray) else None)
        each = 8 * values.itemsize if isinstance(values, np.ndarray) else 0
        width = max(1, int(payload.indices.max(initial=0)).bit_length())
        if int(plan.bits) + each * count < (each + width) * fixed:
            _write_entries(CODED_SPARSE, payload, count, last, _key_stream(indices, plan, counts), parts, writers)
            return
    _write_sparse(payload, parts, writers)


def _write_best_local(payload: Sparse, parts: list[bytes], writers: dict) -> None:
    values, (low, counts) = payload
    blocks, count = counts.size, int(np.sum(counts, dtype=np.int64))
    plain = isinstance(values, np.ndarray)
    canonical = low.size <= keycodes.MAX_KEYS and counts.min(initial=0) >= 0 and count <= low.size
    if canonical and not low[count:].any() and not (plain and _raw(values[count:]).strip(b"\0")):
        indices = (np.repeat(np.arange(blocks), counts) << 16) + low[:count]
        if indices.max(initial=0) < 2**31 and not np.any(np.diff(indices, prepend=-1) < 1):
            plan, lists = _key_plan(indices.astype(np.int32))
            if int(plan.bits) < 16 * count + 32 * blocks:
                stream = _key_stream(indices.astype(np.int32), plan, lists)
                filler = _unpaid(counts.nbytes, len(stream))
                head = varint(low.size) + varint(count) + varint(blocks) + varint(filler) + varint(len(stream))
                parts.append(bytes([CODED_LOCAL]) + head + stream)
                _write_values(values, count, low.size, parts, writers)
                parts.append(bytes(filler))
                return
    _write_sparse(payload, parts, writers)


def _write_best_quantized(payload: Quantized, parts: list[bytes], writers: dict) -> None:
    width, groups = payload.words.shape
    size = 32 * groups
    codes = unpack_words(payload.words)
    where = np.flatnonzero(codes)
    levels = codes[where].astype(np.int64)
    gaps = np.diff(where, prepend=-1)
    options = {
        QUANTIZED: width * size,
        ELIAS_QUANTIZED: int(np.sum(elias_length(gaps) + 1 + elias_length((levels + 1) // 2))),
    }
    if width <= keycodes.MAX_TABLE_WIDTH and size <= keycodes.MAX_KEYS:
        each = np.bincount(codes, minlength=1 << width).astype(np.int32)
        dense, options[CODED_LEVELS] = table_bits(each)
        each[0] = 0
        sparse, nonzeros = table_bits(each)
        plan, lists = _key_plan(where.astype(np.int32))
        options[CODED_NONZEROS] = int(plan.bits) + int(nonzeros)
    kind = min(options, key=lambda kind: options[kind])
    if kind in (QUANTIZED, ELIAS_QUANTIZED):
        (_write_quantized if kind == QUANTIZED else _write_elias_quantized)(payload, parts, writers)
        return
    parts.append(bytes([kind]))
    _write_array(payload.norms, parts)
    parts.append(bytes([width]) + varint(groups))
    if kind == CODED_LEVELS:
        stream = _level_stream(codes, dense, options[kind])
        parts.append(varint(len(stream)) + stream)
        return
    keys, stream = _key_stream(where.astype(np.int32), plan, lists), _level_stream(levels, sparse, nonzeros)
    filler = _unpaid(payload.words.nbytes, len(keys) + len(stream) + payload.norms.nbytes)
    parts.append(varint(where.size) + varint(filler) + varint(len(keys)) + keys + varint(len(stream)) + stream)
    parts.append(bytes(filler))


_WRITERS: dict[type, Callable[[Any, list[bytes], dict], None]] = {
    Dense: _write_dense,
    Scaled: _write_scaled,
    Sparse: _write_sparse,
    Quantized: _write_quantized,
    Leaves: _write_leaves,
    Sketch: _write_sketch,
}

_CODES = {
    "fixed": _WRITERS,
    "elias": _WRITERS | {Quantized: _write_elias_quantized, Sparse: _write_elias_sparse},
    "best": _WRITERS | {Quantized: _write_best_quantized, Sparse: _write_best_sparse},
}


# ------------------------------------------------------------------------------------------------
# Reading


def _read(reader: Reader, depth: int) -> Any:
    if depth == 0:
        raise WireError("nesting", f"more than {MAX_DEPTH} levels", f"at most {MAX_DEPTH}")
    kind = reader.byte("payload type")
    if kind == ARRAY:
        return _read_array(reader, "array")
    read = _READERS.get(kind)
    if read is None:
        raise WireError("payload type", kind, f"one of {ARRAY}, {', '.join(map(str, _READERS))}")
    return read(reader, depth - 1)


def _read_dtype(reader: Reader, field: str) -> np.dtype:
    code = reader.byte(f"{field} dtype")
    if code >= len(DTYPES):
        raise WireError(f"{field} dtype", code, f"below {len(DTYPES)}")
    return DTYPES[code]


def _read_numbers(reader: Reader, field: str, dtype: np.dtype, count: int) -> np.ndarray:
    return np.frombuffer(reader.take(f"{field} values", count * dtype.itemsize), dtype).copy()


def _read_array(reader: Reader, field: str, ndim: int | None = None, kind: type | None = None) -> np.ndarray:
    dtype = _read_dtype(reader, field)
    dims = reader.byte(f"{field} ndim")
    if dims > MAX_DIMS or (ndim is not None and dims != ndim):
        raise WireError(f"{field} ndim", dims, f"{ndim}" if ndim is not None else f"at most {MAX_DIMS}")
    if kind is not None and not jnp.issubdtype(dtype, kind):
        raise WireError(f"{field} dtype", dtype, kind.__name__)
    count, shape = 1, []
    for axis in range(dims):
        length = reader.varint(f"{field} dim {axis}")
        shape.append(length)
        count *= length
    # An empty array may have long dimensions; they must not overflow an index.
    if math.prod(max(length, 1) for length in shape) * dtype.itemsize > MAX_BYTES:
        raise WireError(f"{field} shape", shape, f"at most {MAX_BYTES} bytes")
    return _read_numbers(reader, field, dtype, count).reshape(shape)


def _read_dense(reader: Reader, depth: int) -> Dense:
    values = _read(reader, depth)
    _check_values("Dense.values", values)
    return Dense(values)


def _check_values(field: str, values: Any) -> None:
    if isinstance(values, Leaves):
        raise WireError(field, "Leaves", "numbers or the payload of one array")


def _read_scaled(reader: Reader, depth: int) -> Scaled:
    values = _read_array(reader, "Scaled.values", kind=jnp.floating)
    return Scaled(values, _read_array(reader, "Scaled.scale", ndim=0, kind=jnp.floating))


def _read_quantized(reader: Reader, depth: int) -> Quantized:
    norms = _read_array(reader, "Quantized.norms", ndim=1, kind=jnp.floating)
    words = _read_array(reader, "Quantized.words", ndim=2, kind=jnp.unsignedinteger)
    return Quantized(norms, words)


def _read_leaves(reader: Reader, depth: int) -> Leaves:
    dense = _read(reader, depth)
    if not isinstance(dense, Dense) or not isinstance(dense.values, np.ndarray):
        raise WireError("Leaves.dense", type(dense).__name__, "Dense numbers")
    number = reader.varint("Leaves number", min(reader.left, MAX_LEAVES))
    leaves = []
    for _ in range(number):
        leaf = _read(reader, depth)
        if isinstance(leaf, np.ndarray):
            raise WireError("Leaves leaf", "a bare array", "a payload")
        leaves.append(leaf)
    return Leaves(dense, tuple(leaves))


def _read_sparse(reader: Reader, depth: int) -> Sparse:
    capacity = reader.varint("Sparse capacity", 2**31)
    count = reader.varint("Sparse count", capacity)
    width = reader.byte("Sparse index width")
    if not 1 <= width <= 31:
        raise WireError("Sparse index width", width, "1 .. 31")
    if capacity and not count:
        raise WireError("Sparse count", count, f"at least 1 of {capacity}")
    packed = reader.take("Sparse indices", packed_size(count, width))
    values = _read_values(reader, count, capacity, depth)
    indices = unpack_bits(packed, count, width).astype(np.int32)
    return Sparse(values, _padded(indices, capacity, indices[-1] if count else 0))


def _padded(indices: np.ndarray, capacity: int, last: int) -> np.ndarray:
    return np.concatenate([indices, np.full(capacity - indices.size, last, np.int32)])


def _read_local(reader: Reader, depth: int) -> Sparse:
    capacity = reader.varint("Sparse capacity", 2**31)
    count = reader.varint("Sparse count", capacity)
    blocks = reader.varint("LocalIndices blocks", 2**15)
    counts = _read_numbers(reader, "LocalIndices counts", np.dtype(np.int32), blocks)
    low = _read_numbers(reader, "LocalIndices low", np.dtype(np.uint16), count)
    values = _read_values(reader, count, capacity, depth)
    low = np.concatenate([low, np.zeros(capacity - count, np.uint16)])
    return Sparse(values, LocalIndices(low, counts))


def _read_values(reader: Reader, count: int, capacity: int, depth: int) -> Any:
    """`count` numbers and zeros up to the capacity, or a nested payload."""
    padding = capacity - count
    plain = reader.peek("Sparse values type") == ARRAY
    if plain:
        reader.byte("Sparse values type")
        dtype = _read_dtype(reader, "Sparse.values")
        values = _read_numbers(reader, "Sparse", dtype, count)
        itemsize = dtype.itemsize
    else:
        values, itemsize = _read(reader, depth), 0
        _check_values("Sparse.values", values)
    _zeros(reader, "Sparse filler", _filler(padding, itemsize))
    return np.concatenate([values, np.zeros(padding, values.dtype)]) if plain and padding else values


def _zeros(reader: Reader, field: str, size: int) -> None:
    if reader.take(field, size).tobytes().strip(b"\0"):
        raise WireError(field, "bytes that are not zero", "zeros")


def _read_shape(reader: Reader, most: int) -> tuple[np.ndarray, int, int]:
    """Norms, width and groups, checked against what the rest of the message can pay for."""
    norms = _read_array(reader, "Quantized.norms", ndim=1, kind=jnp.floating)
    width = reader.byte("Quantized width")
    if not 1 <= width <= most:
        raise WireError("Quantized width", width, f"1 .. {most}")
    groups = reader.varint("Quantized groups", 2**36)
    if 4 * width * groups > PAD_BYTES * (reader.left + norms.nbytes):
        raise WireError("Quantized groups", groups, f"paid for by {reader.left} bytes")
    return norms, width, groups


def _scattered(indices: np.ndarray, codes: np.ndarray, width: int, groups: int) -> np.ndarray:
    if codes.size and int(codes.max()) >> width:
        raise WireError("Quantized level", int(codes.max()), f"below 2^{width}")
    return pack_words(indices, codes, width, groups)


def _read_elias_quantized(reader: Reader, depth: int) -> Quantized:
    norms, width, groups = _read_shape(reader, 32)
    count = reader.varint("Quantized non-zeros", 32 * groups)
    filler = reader.varint("Quantized filler", reader.left)
    indices, codes, used = decode_levels(reader.body[reader.position :], count, 32 * groups)
    reader.take("Elias stream", used)
    _zeros(reader, "Quantized filler", filler)
    return Quantized(norms, _scattered(indices, codes, width, groups))


def _read_elias_sparse(reader: Reader, depth: int) -> Sparse:
    capacity = reader.varint("Sparse capacity", 2**31)
    count = reader.varint("Sparse count", capacity)
    last = reader.varint("Sparse padding index", 2**31 - 1)
    stream = reader.take("Sparse gaps", reader.varint("Sparse gap bytes", reader.left))
    indices = decode_gaps(stream, count, 2**31)
    values = _read_values(reader, count, capacity, depth)
    return Sparse(values, _padded(indices, capacity, last))


def _read_stream(reader: Reader, field: str, count: int) -> tuple[np.ndarray, int]:
    """The words of a stream of `count` numbers, each of at least one bit, and its bytes."""
    size = reader.varint(f"{field} bytes", min(reader.left, MAX_STREAM - 1))
    if count > min(8 * size, keycodes.MAX_KEYS):
        raise WireError(f"{field} count", count, f"at most {min(8 * size, keycodes.MAX_KEYS)} in {size} bytes")
    return words_of(reader.take(field, size)), size


def _check_end(field: str, words: np.ndarray, bits: int, size: int) -> None:
    if (bits + 7) // 8 != size:
        raise WireError(f"{field} bytes", size, f"the {(bits + 7) // 8} that it needs")
    if bits % 32 and int(words[bits // 32]) >> bits % 32:
        raise WireError(f"{field} padding", "bits that are set", "zeros")


def _check_table(field: str, words: np.ndarray, start: int, num_symbols: int, count: int) -> None:
    lengths, end = read_lengths(words, np.int32(start), num_symbols)
    if end > 32 * words.size or (count and not is_prefix_code(lengths)):
        raise WireError(f"{field} table", lengths[lengths > 0].tolist()[:64], "the lengths of a complete prefix code")


def _read_keys(reader: Reader, field: str, count: int, limit: int) -> np.ndarray:
    """Ascending keys below the limit: int64[count]."""
    words, size = _read_stream(reader, field, count)
    scheme = int(words[0]) & 255 if size else -1
    if not 0 <= scheme < len(keycodes.SCHEMES):
        raise WireError(f"{field} scheme", scheme, f"below {len(keycodes.SCHEMES)}")
    if scheme == keycodes.ENTROPY:
        _check_table(field, words, keycodes.SCHEME_BITS, keycodes.CLASSES, count)
    gaps, bits = keycodes.decode_gaps(words, np.array([count], np.int32), count)
    _check_end(field, words, int(bits), size)
    keys = np.cumsum(gaps.astype(np.int64) + 1) - 1
    if count and keys[-1] >= limit:
        raise WireError(f"{field} key", int(keys[-1]), f"below {limit}")
    return keys


def _read_levels(reader: Reader, field: str, count: int, width: int) -> np.ndarray:
    words, size = _read_stream(reader, field, count)
    _check_table(field, words, 0, 1 << width, count)
    levels, bits = decode_with_table(words, 1 << width, count, count=np.int32(count))
    _check_end(field, words, int(bits), size)
    return levels


def _read_coded_sparse(reader: Reader, depth: int) -> Sparse:
    capacity = reader.varint("Sparse capacity", 2**31)
    count = reader.varint("Sparse count", capacity)
    last = reader.varint("Sparse padding index", 2**31 - 1)
    indices = _read_keys(reader, "Sparse key stream", count, 2**31).astype(np.int32)
    values = _read_values(reader, count, capacity, depth)
    return Sparse(values, _padded(indices, capacity, last))


def _read_coded_local(reader: Reader, depth: int) -> Sparse:
    capacity = reader.varint("Sparse capacity", 2**31)
    count = reader.varint("Sparse count", capacity)
    blocks = reader.varint("LocalIndices blocks", 2**15)
    filler = reader.varint("LocalIndices filler", reader.left)
    if 4 * blocks > PAD_BYTES * reader.left:
        raise WireError("LocalIndices blocks", blocks, f"paid for by {reader.left} bytes")
    indices = _read_keys(reader, "Sparse key stream", count, blocks << 16)
    values = _read_values(reader, count, capacity, depth)
    _zeros(reader, "LocalIndices filler", filler)
    low = np.concatenate([indices.astype(np.uint16), np.zeros(capacity - count, np.uint16)])
    return Sparse(values, LocalIndices(low, np.bincount(indices >> 16, minlength=blocks).astype(np.int32)))


def _read_coded_levels(reader: Reader, depth: int) -> Quantized:
    norms, width, groups = _read_shape(reader, keycodes.MAX_TABLE_WIDTH)
    levels = _read_levels(reader, "Quantized level stream", 32 * groups, width)
    return Quantized(norms, pack_words(np.arange(levels.size), levels, width, groups))


def _read_coded_nonzeros(reader: Reader, depth: int) -> Quantized:
    norms, width, groups = _read_shape(reader, keycodes.MAX_TABLE_WIDTH)
    count = reader.varint("Quantized non-zeros", 32 * groups)
    filler = reader.varint("Quantized filler", reader.left)
    indices = _read_keys(reader, "Quantized key stream", count, 32 * groups)
    levels = _read_levels(reader, "Quantized level stream", count, width)
    _zeros(reader, "Quantized filler", filler)
    return Quantized(norms, _scattered(indices, levels, width, groups))


_READERS: dict[int, Callable[[Reader, int], Any]] = {
    DENSE: _read_dense,
    SCALED: _read_scaled,
    SPARSE: _read_sparse,
    QUANTIZED: _read_quantized,
    LEAVES: _read_leaves,
    SPARSE_LOCAL: _read_local,
    ELIAS_QUANTIZED: _read_elias_quantized,
    ELIAS_SPARSE: _read_elias_sparse,
    CODED_SPARSE: _read_coded_sparse,
    CODED_LOCAL: _read_coded_local,
    CODED_LEVELS: _read_coded_levels,
    CODED_NONZEROS: _read_coded_nonzeros,
    SKETCH: lambda reader, depth: read_sketch(reader, _read_dtype, PAD_BYTES),
}
