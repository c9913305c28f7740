"""Payloads to the parts of a body: one writer per payload type and code. `nodes` has the format.

A new payload type joins with a writer in `_WRITERS`, a reader in `reading` and a number in `nodes`.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from jaxcomp.codes import keys as keycodes
from jaxcomp.codes.huffman import encode_with_table, table_bits
from jaxcomp.payloads import Dense, Leaves, LocalIndices, Quantized, Scaled, Sketch, Sparse
from jaxcomp.wire.bitstream import pack_bits, stream_bytes, unpack_words
from jaxcomp.wire.elias import elias_length, encode_gaps, encode_levels
from jaxcomp.wire.frame import varint
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
    MAX_DIMS,
    MAX_LEAVES,
    PAD_BYTES,
    QUANTIZED,
    SCALED,
    SKETCH,
    SPARSE,
    SPARSE_LOCAL,
    filler_bytes,
)
from jaxcomp.wire.sketch import write_sketch

__all__ = ["CODES", "write"]


def write(node: Any, parts: list[bytes], writers: dict) -> None:
    """Appends the bytes of a node to `parts`.

    Args:
        node: NumPy array, or payload of them.
        parts: of the body so far.
        writers: of a code, from `CODES`: payload type -> writer.

    Raises:
        TypeError: not a payload, or an array of a dtype that no payload has.
    """
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
    write(payload.values, parts, writers)


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
    write(payload.dense, parts, writers)
    parts.append(varint(len(payload.leaves)))
    for leaf in payload.leaves:
        write(leaf, parts, writers)


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
        parts.append(bytes(filler_bytes(capacity - count, values.dtype.itemsize)))
    else:
        write(values, parts, writers)
        parts.append(bytes(filler_bytes(capacity - count, 0)))


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
    _write_entries(ELIAS_SPARSE, payload, count, last, encode_gaps(np.asarray(payload.indices[:count])), parts, writers)


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

CODES = {
    "fixed": _WRITERS,
    "elias": _WRITERS | {Quantized: _write_elias_quantized, Sparse: _write_elias_sparse},
    "best": _WRITERS | {Quantized: _write_best_quantized, Sparse: _write_best_sparse},
}
