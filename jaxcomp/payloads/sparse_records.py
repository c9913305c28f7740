"""`Sparse` as bytes. Records on the wire:

    3 fixed       capacity | count | width u8 | indices, width bits each | values | filler
    6             with local indices: capacity | count | blocks | counts i32 | low u16 | values | filler
    8 elias       capacity | count | padding index | gap stream | values | filler
    9 keys        capacity | count | padding index | key stream | values | filler
   10             with local indices: capacity | count | blocks | filler varint | key stream | values | filler | filler

3 and 6 stop at the first padding entry, 8 to 10 before it; what follows repeats it and is rebuilt by the decoder.
Values are a raw array of `count` numbers, or the record of a payload. Every PAD_BYTES of rebuilt padding cost one byte
of filler. Lengths and numbers without a type are varints.
"""

from typing import Any, NamedTuple

import numpy as np

from jaxcomp.codes import keys as keycodes
from jaxcomp.payloads.local import LocalIndices
from jaxcomp.payloads.registry import Coding, read_record, write_record
from jaxcomp.wire.bitstream import pack_bits, packed_size, stream_bytes, unpack_bits
from jaxcomp.wire.elias import decode_gaps, encode_gaps
from jaxcomp.wire.errors import WireError
from jaxcomp.wire.format import ARRAY, check_array, dtype_code, raw, read_dtype, read_numbers
from jaxcomp.wire.frame import Reader, Writer
from jaxcomp.wire.limits import unpaid
from jaxcomp.wire.streams import read_keys

__all__ = [
    "CODED_LOCAL",
    "CODED_SPARSE",
    "ELIAS_SPARSE",
    "READERS",
    "SPARSE",
    "SPARSE_LOCAL",
    "Entries",
    "Sparse",
    "check_sparse",
    "key_stream",
    "write",
]

Array = Any
SPARSE, SPARSE_LOCAL, ELIAS_SPARSE, CODED_SPARSE, CODED_LOCAL = 3, 6, 8, 9, 10


class Sparse(NamedTuple):
    """values: float[k];  indices: i32[k], ascending, unique, padded with d; or `LocalIndices`.

    Padding has value zero. The first padding entry, if any, ends the message: `code_bits` and
    the wire count it, what follows costs nothing there. `values` may also be a payload of numbers.
    """

    values: Any
    indices: Any


class Entries(NamedTuple):
    """indices i32[k], of the whole vector;  count i32[], those before the padding;  last: index of the padding;
    fits: whether they ascend, and nothing but padding follows."""

    indices: Array
    count: Array
    last: Array | int
    fits: Array | bool


def check_sparse(payload: Sparse) -> None:
    """Shapes, dtypes, indices that are not negative, and counts of those that there are."""
    values, indices = payload
    if isinstance(indices, LocalIndices):
        low, counts = indices
        check_array("LocalIndices.low", low, [np.uint16], 1, "a vector of uint16")
        check_array("LocalIndices.counts", counts, [np.int32], 1, "a vector of int32")
        total = int(counts.sum(dtype=np.int64))
        if counts.min(initial=0) < 0 or total > low.size:
            raise WireError("LocalIndices.counts", f"{total} in all", f"none negative, and at most {low.size} in all")
        indices = low
    else:
        check_array("Sparse.indices", indices, [np.int32], 1, "i32[k] or LocalIndices")
        if indices.min(initial=0) < 0:
            raise WireError("Sparse.indices", int(indices.min()), "not negative")
    if isinstance(values, np.ndarray):
        if values.shape != indices.shape:
            raise WireError("Sparse.values", f"of shape {values.shape}", f"one for each of {indices.size} indices")
        dtype_code(values.dtype)


# ------------------------------------------------------------------------------------------------
# Writing


def write(out: Writer, payload: Sparse, coding: Coding) -> None:
    """The record of a sparse payload in the coding that was chosen."""
    _WRITERS[coding.kind](out, payload, coding.plan)


def _filler(padding: int, itemsize: int = 0) -> int:
    """Bytes that so many entries of padding cost."""
    return unpaid(padding * (itemsize + 4), 0)


def _write_values(out: Writer, values: Any, count: int, capacity: int) -> None:
    """The first `count` of them, or all of a nested payload, and what the padding behind them costs."""
    if hasattr(values, "dtype"):
        out.add(bytes([ARRAY, dtype_code(values.dtype)]), raw(values[:count]))
        out.add(bytes(_filler(capacity - count, values.dtype.itemsize)))
    else:
        write_record(out, values)
        out.add(bytes(_filler(capacity - count)))


def _write_fixed(out: Writer, payload: Sparse, plan: Any) -> None:
    values, indices = payload
    count = int(plan[0])
    width = max(1, int(indices.max(initial=0)).bit_length())
    out.varint(indices.size, count)
    out.byte(width)
    out.add(pack_bits(indices[:count], width))
    _write_values(out, values, count, indices.size)


def _write_local(out: Writer, payload: Sparse, plan: Any) -> None:
    values, (low, counts) = payload
    count = int(plan[0])
    out.varint(low.size, count, counts.size)
    out.add(raw(counts), raw(low[:count]))
    _write_values(out, values, count, low.size)


def key_stream(indices: np.ndarray, plan: Any) -> bytes:
    """Keys in the way that a plan says."""
    counts = np.array([indices.size], np.int32)
    words, bits = keycodes.encode_keys(indices, counts, num_words=(int(plan.bits) + 31) // 32, chosen=plan)
    return stream_bytes(words, bits)


def _write_entries(out: Writer, payload: Sparse, entries: Entries, stream: bytes) -> None:
    capacity = payload.indices.size
    out.varint(capacity, int(entries.count), int(entries.last))
    out.stream(stream)
    _write_values(out, payload.values, int(entries.count), capacity)


def _write_elias(out: Writer, payload: Sparse, entries: Entries) -> None:
    _write_entries(out, payload, entries, encode_gaps(entries.indices[: int(entries.count)]))


def _write_coded(out: Writer, payload: Sparse, plan: Any) -> None:
    entries, keys = plan
    _write_entries(out, payload, entries, key_stream(entries.indices[: int(entries.count)], keys))


def _write_coded_local(out: Writer, payload: Sparse, plan: Any) -> None:
    (indices, count, _, _), keys = plan
    low, counts = payload.indices
    stream = key_stream(indices[: int(count)], keys)
    filler = unpaid(counts.nbytes, len(stream))
    out.varint(low.size, int(count), counts.size, filler)
    out.stream(stream)
    _write_values(out, payload.values, int(count), low.size)
    out.add(bytes(filler))


_WRITERS = {
    SPARSE: _write_fixed,
    SPARSE_LOCAL: _write_local,
    ELIAS_SPARSE: _write_elias,
    CODED_SPARSE: _write_coded,
    CODED_LOCAL: _write_coded_local,
}


# ------------------------------------------------------------------------------------------------
# Reading


def _read_size(reader: Reader) -> tuple[int, int]:
    capacity = reader.varint("Sparse capacity", 2**31)
    return capacity, reader.varint("Sparse count", capacity)


def _read_values(reader: Reader, count: int, capacity: int) -> Any:
    """`count` numbers and zeros up to the capacity, or a payload."""
    padding = capacity - count
    if reader.peek("Sparse values type") != ARRAY:
        values = read_record(reader)
        reader.zeros("Sparse filler", _filler(padding))
        return values
    reader.byte("Sparse values type")
    dtype = read_dtype(reader, "Sparse.values")
    values = read_numbers(reader, "Sparse", dtype, count, capacity)
    reader.zeros("Sparse filler", _filler(padding, dtype.itemsize))
    return values


def _indices(reader: Reader, capacity: int) -> np.ndarray:
    reader.make("Sparse.indices", 4 * capacity)
    return np.empty(capacity, np.int32)


def _read_fixed(reader: Reader) -> Sparse:
    capacity, count = _read_size(reader)
    width = reader.byte("Sparse index width", 1, 31)
    if capacity and not count:
        raise WireError("Sparse count", count, f"at least 1 of {capacity}")
    packed = reader.take("Sparse indices", packed_size(count, width))
    indices = _indices(reader, capacity)
    unpack_bits(packed, count, width, out=indices[:count].view(np.uint32))
    indices[count:] = indices[count - 1] if count else 0
    return Sparse(_read_values(reader, count, capacity), indices)


def _read_local(reader: Reader) -> Sparse:
    capacity, count = _read_size(reader)
    blocks = reader.varint("LocalIndices blocks", 2**15)
    counts = read_numbers(reader, "LocalIndices counts", np.dtype(np.int32), blocks)
    low = read_numbers(reader, "LocalIndices low", np.dtype(np.uint16), count, capacity)
    return Sparse(_read_values(reader, count, capacity), LocalIndices(low, counts))


def _read_elias(reader: Reader) -> Sparse:
    capacity, count = _read_size(reader)
    last = reader.varint("Sparse padding index", 2**31 - 1)
    stream = reader.stream("Sparse gap")
    indices = _indices(reader, capacity)
    decode_gaps(stream, 2**31, indices[:count], room=reader.spare)
    indices[count:] = last
    return Sparse(_read_values(reader, count, capacity), indices)


def _read_coded(reader: Reader) -> Sparse:
    capacity, count = _read_size(reader)
    last = reader.varint("Sparse padding index", 2**31 - 1)
    keys = read_keys(reader, "Sparse key stream", count, 2**31)
    indices, place = _indices(reader, capacity), 0
    for block in keys:
        indices[place : place + block.size] = block
        place += block.size
    indices[count:] = last
    return Sparse(_read_values(reader, count, capacity), indices)


def _read_coded_local(reader: Reader) -> Sparse:
    capacity, count = _read_size(reader)
    blocks = reader.varint("LocalIndices blocks", 2**15)
    filler = reader.varint("LocalIndices filler", reader.left)
    keys = read_keys(reader, "Sparse key stream", count, blocks << 16)
    reader.make("LocalIndices", 2 * capacity + 4 * blocks)
    low, counts, place = np.zeros(capacity, np.uint16), np.zeros(blocks, np.int32), 0
    for block in keys:
        low[place : place + block.size] = block & 0xFFFF
        first, last = int(block[0]) >> 16, int(block[-1]) >> 16
        counts[first : last + 1] += np.bincount((block >> 16) - first, minlength=last - first + 1)
        place += block.size
    values = _read_values(reader, count, capacity)
    reader.zeros("LocalIndices filler", filler)
    return Sparse(values, LocalIndices(low, counts))


READERS = {
    SPARSE: _read_fixed,
    SPARSE_LOCAL: _read_local,
    ELIAS_SPARSE: _read_elias,
    CODED_SPARSE: _read_coded,
    CODED_LOCAL: _read_coded_local,
}
