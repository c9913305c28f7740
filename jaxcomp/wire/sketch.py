"""`Sketch` as bytes.

    capacity | lists | counts, packed | padding key | length | key stream (`codes.keys`)
    | dtype u8 | number of levels | which are not zero, a bit each | those, raw | zero u8, and 2 x i32 if it is 1
    | width u8 | groups | cells used | coding u8 | length | cells, packed or as a Huffman table and stream | filler

Lengths and numbers without a type are varints. Cells behind the last that is not zero are not sent; keys behind the
lists repeat the padding key. The shorter coding of the cells is taken.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from jaxcomp.codes.huffman import decode_with_table, encode_with_table, is_prefix_code, read_lengths, table_bits
from jaxcomp.codes.keys import MAX_TABLE_WIDTH, decode_gaps, encode_keys, keys_of
from jaxcomp.packing import width_for
from jaxcomp.payloads import Sketch
from jaxcomp.wire.bitstream import (
    pack_bits,
    pack_words,
    packed_size,
    stream_bytes,
    unpack_bits,
    unpack_words,
    words_of,
)
from jaxcomp.wire.errors import WireError
from jaxcomp.wire.frame import Reader, varint

__all__ = ["read_sketch", "write_sketch"]

FIXED, HUFFMAN = range(2)


def write_sketch(payload: Sketch, dtype_code: Callable[[np.dtype], int], pad_bytes: int) -> bytes:
    """The bytes of the node behind its type.

    Args:
        payload: of NumPy arrays.
        dtype_code: number of a dtype.
        pad_bytes: bytes that the decoder may make of one.

    Raises:
        TypeError: not what `skcompress` makes.
    """
    levels, counts, keys, cells, zero = payload
    _check(payload)
    n, capacity = int(counts.sum(dtype=np.int64)), keys.size
    last = int(keys[n]) if n < capacity else 0
    words, bits = encode_keys(keys[:n], counts, coder="released" if zero.size else "best")
    stream = stream_bytes(words, int(bits))
    present = levels.view(f"u{levels.dtype.itemsize}") != 0
    out = [varint(capacity), varint(counts.size), pack_bits(counts.astype(np.uint32), width_for(capacity + 1))]
    out += [varint(last), varint(len(stream)), stream]
    out += [bytes([dtype_code(levels.dtype)]), varint(levels.size), np.packbits(present, bitorder="little").tobytes()]
    out += [levels[present].tobytes(), bytes([zero.size // 2]), zero.astype("<i4").tobytes()]
    symbols = unpack_words(cells)
    symbols = symbols[: np.max(np.flatnonzero(symbols), initial=-1) + 1]
    coding, packed = _code_cells(symbols, cells.shape[0])
    out += [bytes([cells.shape[0]]), varint(cells.shape[1]), varint(symbols.size), bytes([coding])]
    out += [varint(len(packed)), packed]
    body = b"".join(out)
    return body + bytes(_filler(capacity - n, cells.nbytes, len(body), pad_bytes))


def _check(payload: Sketch) -> None:
    levels, counts, keys, cells, zero = payload
    kinds = [("counts", counts, np.int32, 1), ("keys", keys, np.int32, 1), ("cells", cells, np.uint32, 2)]
    for name, array, dtype, ndim in [*kinds, ("zero", zero, np.int32, 1)]:
        if array.dtype != dtype or array.ndim != ndim:
            kind = f"{np.dtype(dtype)} of {ndim} dimensions"
            raise TypeError(f"wire.encode: Sketch.{name} must be {kind}; got {array.dtype}{list(array.shape)}")
    if levels.ndim != 1 or levels.dtype.kind != "f" or zero.size not in (0, 2) or not 1 <= cells.shape[0] <= 32:
        raise TypeError("wire.encode: Sketch.levels must be float[q], zero i32[0] or i32[2], and cells of 1 .. 32 bits")
    n = counts.sum(dtype=np.int64)
    if np.any(counts < 0) or n > keys.size or np.any(keys[n:] != keys[-1:]):
        raise TypeError(f"wire.encode: Sketch has {n} keys in lists, room for {keys.size}, and one key of padding")
    if not _ascending(keys[:n], counts) or np.any(keys < 0):
        raise TypeError("wire.encode: Sketch.keys must ascend in each list and not be negative")


def _ascending(keys: np.ndarray, counts: np.ndarray) -> bool:
    starts = np.zeros(keys.size + 1, bool)
    starts[np.cumsum(counts)] = True
    return bool(np.all((np.diff(keys.astype(np.int64)) > 0) | starts[1 : keys.size]))


def _code_cells(symbols: np.ndarray, width: int) -> tuple[int, bytes]:
    if width <= MAX_TABLE_WIDTH:
        counts = np.bincount(symbols, minlength=1 << width).astype(np.int32)
        lengths, bits = table_bits(counts)
        if bits < symbols.size * width:
            words, end = encode_with_table(symbols, lengths, -(-int(bits) // 32), count=np.int32(symbols.size))
            return HUFFMAN, stream_bytes(words, int(end))
    return FIXED, pack_bits(symbols, width)


def _filler(padding: int, cell_bytes: int, paid: int, pad_bytes: int) -> int:
    return max(0, -(-(4 * padding + cell_bytes) // pad_bytes) - paid)


def read_sketch(reader: Reader, read_dtype: Callable[[Reader, str], np.dtype], pad_bytes: int) -> Sketch:
    """The inverse; a stream of n bits may stand for n keys or cells, and other memory is paid for as in `codec`.

    Raises:
        WireError: not what `write_sketch` makes.
    """
    begin = reader.position
    capacity = reader.varint("Sketch capacity", 2**31 - 1)
    lists = reader.varint("Sketch lists", 8 * reader.left)
    width = width_for(capacity + 1)
    counts = unpack_bits(reader.take("Sketch counts", packed_size(lists, width)), lists, width).astype(np.int64)
    n = int(counts.sum())
    last = reader.varint("Sketch padding key", 2**31 - 1)
    stream = reader.take("Sketch keys", reader.varint("Sketch key bytes", reader.left))
    if not stream or n > min(capacity, 8 * len(stream)):
        raise WireError("Sketch counts", n, f"at most the capacity {capacity} and the bits of the stream")
    counts = counts.astype(np.int32)
    keys = _read_keys(stream, counts, n)
    dtype = read_dtype(reader, "Sketch.levels")
    if dtype.kind != "f":
        raise WireError("Sketch.levels dtype", dtype, "a float of 16, 32 or 64 bits")
    buckets = reader.varint("Sketch levels", 8 * reader.left)
    marks = np.frombuffer(reader.take("Sketch levels", packed_size(buckets, 1)), np.uint8)
    present = np.unpackbits(marks, count=buckets, bitorder="little").astype(bool)
    values = np.frombuffer(reader.take("Sketch levels", int(present.sum()) * dtype.itemsize), dtype)
    _no_bits_behind("Sketch levels", marks, buckets)
    levels = np.zeros(buckets, dtype)
    levels[present] = values
    released = reader.byte("Sketch zero")
    if released > 1:
        raise WireError("Sketch zero", released, "0 or 1")
    zero = np.frombuffer(reader.take("Sketch zero", 8 * released), "<i4").astype(np.int32)
    width = reader.byte("Sketch width")
    if not 1 <= width <= 32:
        raise WireError("Sketch width", width, "1 .. 32")
    groups = reader.varint("Sketch groups", 2**31)
    used = reader.varint("Sketch cells", 32 * groups)
    coding = reader.byte("Sketch coding")
    stream = reader.take("Sketch cells", reader.varint("Sketch cell bytes", reader.left))
    if used > 8 * len(stream):
        raise WireError("Sketch cells", used, f"at most the {8 * len(stream)} bits of the stream")
    symbols = _read_cells(stream, coding, used, width)
    filler = reader.take("Sketch filler", _filler(capacity - n, 4 * width * groups, reader.position - begin, pad_bytes))
    if filler.tobytes().strip(b"\0"):
        raise WireError("Sketch filler", "bytes that are not zero", "zeros")
    where = np.flatnonzero(symbols)
    cells = pack_words(where, symbols[where], width, groups)
    return Sketch(levels, counts, np.concatenate([keys, np.full(capacity - n, last, np.int32)]), cells, zero)


def _no_bits_behind(field: str, data: Any, bits: int) -> None:
    """The stream ends with its last bit, and zeros fill its last byte."""
    data = np.frombuffer(data, np.uint8)
    if data.size != packed_size(bits, 1) or (bits % 8 and data[-1] >> bits % 8):
        raise WireError(field, f"{data.size} bytes", f"{bits} bits and zeros up to the next byte")


def _read_keys(stream: memoryview, counts: np.ndarray, n: int) -> np.ndarray:
    gaps, end = decode_gaps(words_of(stream), counts, n)
    _no_bits_behind("Sketch keys", stream, int(end))
    keys = keys_of(gaps, counts)
    if not _ascending(keys, counts) or np.any(keys < 0):
        raise WireError("Sketch keys", "keys out of order", "ascending below 2^31")
    return keys


def _read_cells(stream: memoryview, coding: int, used: int, width: int) -> np.ndarray:
    if coding == FIXED:
        if len(stream) != packed_size(used, width):
            raise WireError("Sketch cells", f"{len(stream)} bytes", f"{packed_size(used, width)} for {used} cells")
        _no_bits_behind("Sketch cells", stream, used * width)
        symbols = unpack_bits(stream, used, width)
    elif coding == HUFFMAN:
        if width > MAX_TABLE_WIDTH:
            raise WireError("Sketch width", width, f"at most {MAX_TABLE_WIDTH} with a Huffman table")
        words = words_of(stream)
        if not is_prefix_code(read_lengths(words, np.int32(0), 1 << width)[0]):
            raise WireError("Sketch table", "lengths that are not those of a prefix code", "a complete code")
        symbols, end = decode_with_table(words, 1 << width, used, count=np.int32(used))
        _no_bits_behind("Sketch cells", stream, int(end))
    else:
        raise WireError("Sketch coding", coding, f"{FIXED} or {HUFFMAN}")
    if used and symbols[-1] == 0:
        raise WireError("Sketch cells", "a last cell of zero", "one that is not zero")
    return symbols.astype(np.uint32)
