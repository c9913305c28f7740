"""Bodies to payloads: one reader per node, each of which trusts nothing. `nodes` has the format."""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxcomp.codes import keys as keycodes
from jaxcomp.codes.huffman import decode_with_table, is_prefix_code, read_lengths
from jaxcomp.payloads import Dense, Leaves, LocalIndices, Quantized, Scaled, Sparse
from jaxcomp.wire.bitstream import pack_words, packed_size, unpack_bits, words_of
from jaxcomp.wire.elias import decode_gaps, decode_levels
from jaxcomp.wire.errors import WireError
from jaxcomp.wire.frame import Reader
from jaxcomp.wire.nodes import (
    ARRAY,
    CODED_LEVELS,
    CODED_LOCAL,
    CODED_NONZEROS,
    CODED_SPARSE,
    DENSE,
    DTYPES,
    ELIAS_QUANTIZED,
    ELIAS_SPARSE,
    LEAVES,
    MAX_BYTES,
    MAX_DEPTH,
    MAX_DIMS,
    MAX_LEAVES,
    MAX_STREAM,
    PAD_BYTES,
    QUANTIZED,
    SCALED,
    SKETCH,
    SPARSE,
    SPARSE_LOCAL,
    filler_bytes,
)
from jaxcomp.wire.sketch import read_sketch

__all__ = ["read"]


def read(reader: Reader, depth: int) -> Any:
    """The array or payload of the node that begins here.

    Args:
        reader: of a body, at the first byte of a node; afterwards at the byte behind it.
        depth: levels of nesting that are still allowed.

    Raises:
        WireError: no node that a writer could have made; says which field was wrong.
    """
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
    values = read(reader, depth)
    _check_values("Dense.values", values)
    return Dense(values)


def _check_values(field: str, values: Any) -> None:
    if isinstance(values, Leaves):
        raise WireError(field, "Leaves", "numbers or the payload of one array")


def _read_scaled(reader: Reader, depth: int) -> Scaled:
    values = _read_array(reader, "Scaled.values", kind=jnp.floating)
    scale = _read_array(reader, "Scaled.scale", kind=jnp.floating)
    if scale.ndim > 1:
        raise WireError("Scaled.scale ndim", scale.ndim, "0 or 1")
    return Scaled(values, scale)


def _read_quantized(reader: Reader, depth: int) -> Quantized:
    norms = _read_array(reader, "Quantized.norms", ndim=1, kind=jnp.floating)
    words = _read_array(reader, "Quantized.words", ndim=2, kind=jnp.unsignedinteger)
    return Quantized(norms, words)


def _read_leaves(reader: Reader, depth: int) -> Leaves:
    dense = read(reader, depth)
    if not isinstance(dense, Dense) or not isinstance(dense.values, np.ndarray):
        raise WireError("Leaves.dense", type(dense).__name__, "Dense numbers")
    number = reader.varint("Leaves number", min(reader.left, MAX_LEAVES))
    leaves = []
    for _ in range(number):
        leaf = read(reader, depth)
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
        values, itemsize = read(reader, depth), 0
        _check_values("Sparse.values", values)
    _zeros(reader, "Sparse filler", filler_bytes(padding, itemsize))
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
