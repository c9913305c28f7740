"""The payload of `skcompress`: keys in lists, cells that tell each key's bucket, and the levels of the buckets.

Keys and cells are entropy-coded whatever the code; `sketch_bits` has the parts. The cells have two codings: a fixed
number of bits, or a Huffman table and codes. Record on the wire:

   13 Sketch      capacity | lists | counts, packed | padding key | key stream (`codes.keys`)
                  | dtype u8 | number of levels | which are not zero, a bit each | those, raw
                  | zero u8, and 2 x i32 if it is 1
                  | width u8 | groups | cells used | coding u8 | stream of cells, packed or as a Huffman table and codes
                  | filler

Lengths and numbers without a type are varints. Cells behind the last that is not zero are not sent; keys behind the
lists repeat the padding key. In jit a message is

    number of keys in each list, padding key, number of cells | key stream | levels | zero | Huffman table and cells
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomp.arrays import is_host, namespace
from jaxcomp.backend import running
from jaxcomp.codes.arrays import histogram
from jaxcomp.codes.huffman import decode_with_table, encode_with_table, table_bits
from jaxcomp.codes.keys import (
    MAX_KEYS,
    MAX_TABLE_WIDTH,
    decode_to_gaps,
    encode_keys,
    key_bits,
    key_words,
    keys_from_gaps,
)
from jaxcomp.packing import pack, unpack, width_for
from jaxcomp.payloads.quantized import level_room, level_stream
from jaxcomp.payloads.registry import Choices, Coding, Family, register, shortest
from jaxcomp.payloads.words import Coded, Cursor, coded, joined, uncoded, uncoded_like, whole_array
from jaxcomp.wire.bitstream import SOME, pack_bits, packed_size, set_words, stream_bytes, unpack_bits, unpack_words
from jaxcomp.wire.errors import WireError
from jaxcomp.wire.format import check_array, dtype_code, read_dtype
from jaxcomp.wire.frame import Reader, Writer
from jaxcomp.wire.limits import unpaid
from jaxcomp.wire.streams import Keys, Symbols

__all__ = ["SKETCH", "Sketch", "SketchBits", "sketch_bits"]

Array = Any
I32, U32 = jnp.int32, jnp.uint32
SKETCH = 13
FIXED, HUFFMAN = range(2)
LEVEL_TYPES = np.float16, np.float32, np.float64


class Sketch(NamedTuple):
    """The payload of `skcompress`: keys in lists, and cells that tell each key's bucket.

    levels: float[q], what each bucket stands for;  counts: i32[r], keys in each list;  keys: i32[k], list after list,
    ascending within each, padded with d;  cells: u32[w, ceil(c / 32)], codes of w bits in the layout of
    `packing.pack`;  zero: i32[0], or, as released, i32[2]: the bucket that holds zero, and the number of buckets.
    """

    levels: Array
    counts: Array
    keys: Array
    cells: Array
    zero: Array


def _check(payload: Sketch) -> None:
    levels, counts, keys, cells, zero = payload
    kinds = [("counts", counts, np.int32, 1), ("keys", keys, np.int32, 1), ("cells", cells, np.uint32, 2)]
    for name, array, dtype, ndim in [*kinds, ("zero", zero, np.int32, 1)]:
        check_array(f"Sketch.{name}", array, [dtype], ndim, f"{np.dtype(dtype)} of {ndim} dimensions")
    check_array("Sketch.levels", levels, LEVEL_TYPES, 1, "a vector of floats of 16 to 64 bits")
    if zero.size not in (0, 2):
        raise WireError("Sketch.zero", f"{zero.size} numbers", "none or two")
    if not 1 <= cells.shape[0] <= 32:
        raise WireError("Sketch width", cells.shape[0], "1 .. 32")
    n = int(counts.sum(dtype=np.int64))
    if counts.min(initial=0) < 0 or n > keys.size:
        raise WireError("Sketch.counts", n, f"not negative, with a sum of at most {keys.size}")
    if any(np.any(keys[i : i + SOME] != keys[-1]) for i in range(n, keys.size, SOME)):
        raise WireError("Sketch.keys", "several keys of padding", "one")
    if keys.min(initial=0) < 0 or not _ascend(keys[:n], counts):
        raise WireError("Sketch.keys", "keys out of order", "ascending in each list, not negative")


def _ascend(keys: np.ndarray, counts: np.ndarray) -> bool:
    """Whether keys grow but where a list starts, looked at in parts of `SOME` keys."""
    full = counts[counts > 0]
    starts = np.cumsum(full, dtype=np.int32)
    for i in range(0, keys.size - 1, SOME):
        part = keys[i : i + SOME + 1]
        rising = part[1:] > part[:-1]
        among = starts[slice(*np.searchsorted(starts, [i + 1, i + part.size]))] - (i + 1)
        rising[among] = True
        if not rising.all():
            return False
    return True


# ------------------------------------------------------------------------------------------------
# Bits


class SketchBits(NamedTuple):
    """Bits of the parts of a `Sketch`, i32[].

    keys: coded gaps, list by list;  values: cells, in Huffman codes with their table or in a fixed number of bits,
    whichever is shorter;  tables: levels (a bit each, and those that are not zero), the number of keys in each list,
    and the two numbers of the released form.
    """

    keys: Array
    values: Array
    tables: Array


def sketch_bits(payload: Sketch) -> SketchBits:
    """Bits that `wire.encode` spends on keys, values and tables of a payload, a `Sketch`."""
    levels, counts, keys, cells, zero = payload
    present = namespace(levels).sum(levels != 0, dtype=np.int32)
    tables = levels.shape[0] + 8 * levels.dtype.itemsize * present
    tables += counts.shape[0] * width_for(keys.shape[0] + 1) + 32 * zero.shape[0]
    return SketchBits(key_bits(keys, counts, coder=_coder(zero)), shortest(_cell_codings(cells), "best")[1], tables)


def _coder(zero: Array) -> str:
    return "released" if zero.shape[0] else "best"


def _cell_codings(cells: Array) -> list[Coding]:
    """The cells up to the last that is not zero, in a fixed number of bits, or with a Huffman table."""
    (width, groups), xp = cells.shape, namespace(cells)
    size = 32 * groups
    symbols = (unpack_words(cells) if is_host(cells) else unpack(cells, size)).astype(xp.uint32)
    place = xp.arange(size, dtype=xp.int32)
    used = xp.max(xp.where(symbols != 0, place + 1, 0), initial=0)
    codings = [Coding(FIXED, ("best",), width * used, plan=(symbols, used))]
    if width <= MAX_TABLE_WIDTH:
        lengths, bits = table_bits(histogram(symbols.astype(xp.int32), 1 << width, place < used))
        codings.append(Coding(HUFFMAN, ("best",), bits, plan=lengths))
    return codings


def _codings(payload: Sketch, code: str) -> Choices:
    return Choices([Coding(SKETCH, (code,), 0)], lambda: sum(sketch_bits(payload)))


# ------------------------------------------------------------------------------------------------
# Words


def _coded(like: Sketch) -> bool:
    width, size, capacity = like.cells.shape[0], 32 * like.cells.shape[1], like.keys.shape[0]
    return width <= MAX_TABLE_WIDTH and max(size, capacity) <= MAX_KEYS and 0 not in (size, capacity)


def _pack(payload: Sketch) -> Coded:
    if not _coded(payload):
        return uncoded(payload)
    levels, counts, keys, cells, zero = payload
    width, size = cells.shape[0], 32 * cells.shape[1]
    n = jnp.sum(counts, dtype=I32)
    words, bits = encode_keys(keys, counts, coder=_coder(zero), num_words=key_words(keys.shape[0]))
    fixed, huffman = _cell_codings(cells)
    symbols, used = fixed.plan
    symbols = encode_with_table(symbols.astype(I32), huffman.plan, level_room(size, width), count=used)
    head = whole_array(jnp.concatenate([counts, jnp.stack([keys[-1], used])]))
    return joined(
        [head, coded(words, bits, _in_lists(keys, counts, n)), whole_array(levels), whole_array(zero), coded(*symbols)]
    )


def _in_lists(keys: Array, counts: Array, n: Array) -> Array:
    """Whether the first n keys ascend in each list, and one key fills the places behind them."""
    rank = lax.iota(I32, keys.shape[0])
    start = jnp.zeros((keys.shape[0],), bool).at[running(jnp.add, counts.astype(I32))].set(True, mode="drop")
    ascends = jnp.concatenate([jnp.ones((1,), bool), keys[1:] > keys[:-1]]) | start
    return (n <= keys.shape[0]) & jnp.all(jnp.where(rank < n, ascends & (keys >= 0), keys == keys[-1]))


def _unpack(cursor: Cursor, like: Sketch) -> Sketch:
    if not _coded(like):
        return uncoded_like(cursor, like)
    width, size, capacity = like.cells.shape[0], 32 * like.cells.shape[1], like.keys.shape[0]
    lists = like.counts.shape[0]
    head = cursor.take(lists + 2).astype(I32)
    counts, last, used = head[:lists], head[lists], head[lists + 1]
    coder = _coder(like.zero)
    gaps = cursor.bits(key_words(capacity), lambda words: decode_to_gaps(words, counts, capacity, coder=coder))
    keys = jnp.where(lax.iota(I32, capacity) < jnp.sum(counts, dtype=I32), keys_from_gaps(gaps, counts), last)
    levels, zero = cursor.array(like.levels), cursor.array(like.zero)
    read = lambda words: decode_with_table(words, 1 << width, size, count=used)
    symbols = cursor.bits(level_room(size, width), read)
    return Sketch(levels, counts, keys, pack(symbols.astype(U32), width), zero)


# ------------------------------------------------------------------------------------------------
# Bytes


def _write(out: Writer, payload: Sketch, coding: Coding) -> None:
    levels, counts, keys, cells, zero = payload
    begin = len(out.parts)
    n, capacity = int(counts.sum(dtype=np.int64)), keys.size
    words, bits = encode_keys(keys[:n], counts, coder=_coder(zero))
    out.varint(capacity, counts.size)
    out.add(pack_bits(counts.astype(np.uint32), width_for(capacity + 1)))
    out.varint(int(keys[n]) if n < capacity else 0)
    out.stream(stream_bytes(words, int(bits)))
    present = levels.view(f"u{levels.dtype.itemsize}") != 0
    out.byte(dtype_code(levels.dtype))
    out.varint(levels.size)
    out.add(np.packbits(present, bitorder="little").tobytes(), levels[present].tobytes())
    out.byte(zero.size // 2)
    out.add(zero.astype("<i4").tobytes())
    codings = _cell_codings(cells)
    symbols, used = codings[0].plan
    chosen = codings[int(shortest(codings, "best")[0])]
    out.byte(cells.shape[0])
    out.varint(cells.shape[1], int(used))
    out.byte(chosen.kind)
    if chosen.kind == FIXED:
        out.stream(pack_bits(symbols[:used], cells.shape[0]))
    else:
        out.stream(level_stream(symbols[:used], chosen.plan))
    paid = sum(map(len, out.parts[begin:]))
    out.add(bytes(unpaid(4 * (capacity - n) + cells.nbytes, paid)))


def _read(reader: Reader) -> Sketch:
    begin = reader.position
    counts, keys, n = _read_keys(reader)
    levels = _read_levels(reader)
    released = reader.byte("Sketch zero", 0, 1)
    zero = np.frombuffer(reader.take("Sketch zero", 8 * released), "<i4").astype(np.int32)
    reader.make("Sketch zero", zero.nbytes)
    cells = _read_cells(reader)
    reader.zeros("Sketch filler", unpaid(4 * (keys.size - n) + cells.nbytes, reader.position - begin))
    return Sketch(levels, counts, keys, cells, zero)


def _read_keys(reader: Reader) -> tuple[np.ndarray, np.ndarray, int]:
    capacity = reader.varint("Sketch capacity", 2**31 - 1)
    lists = reader.varint("Sketch lists", 8 * reader.left)
    width = width_for(capacity + 1)
    packed = reader.take("Sketch counts", packed_size(lists, width))
    reader.make("Sketch counts", 4 * lists)
    counts = np.empty(lists, np.int32)
    unpack_bits(packed, lists, width, out=counts.view(np.uint32))
    n = int(counts.sum(dtype=np.int64))
    last = reader.varint("Sketch padding key", 2**31 - 1)
    stream = reader.stream("Sketch key")
    if not stream or n > min(capacity, 8 * len(stream)) or counts.min(initial=0) < 0:
        raise WireError("Sketch counts", n, f"at most the capacity {capacity} and the bits of the stream")
    reader.make("Sketch keys", 4 * capacity)
    keys, place = np.empty(capacity, np.int32), 0
    for block in Keys("Sketch keys", stream, n, 2**31, counts):
        keys[place : place + block.size] = block
        place += block.size
    keys[n:] = last
    return counts, keys, n


def _read_levels(reader: Reader) -> np.ndarray:
    dtype = read_dtype(reader, "Sketch.levels")
    if dtype not in LEVEL_TYPES:
        raise WireError("Sketch.levels dtype", dtype, "a float of 16, 32 or 64 bits")
    size = reader.varint("Sketch levels", 8 * reader.left)
    marks = np.frombuffer(reader.take("Sketch levels", packed_size(size, 1)), np.uint8)
    if size % 8 and marks[-1] >> size % 8:
        raise WireError("Sketch levels", "bits that are set behind the last", "zeros")
    numbers = int(np.sum(np.bitwise_count(marks), dtype=np.int64))
    values = np.frombuffer(reader.take("Sketch levels", numbers * dtype.itemsize), dtype)
    reader.make("Sketch levels", size * dtype.itemsize)
    levels, found = np.zeros(size, dtype), 0
    for i in range(0, size, SOME):
        count = min(SOME, size - i)
        present = np.flatnonzero(np.unpackbits(marks[i // 8 : (i + count + 7) // 8], count=count, bitorder="little"))
        levels[i + present] = values[found : found + present.size]
        found += present.size
    return levels


def _read_cells(reader: Reader) -> np.ndarray:
    width = reader.byte("Sketch width", 1, 32)
    groups = reader.varint("Sketch groups", 2**31)
    used = reader.varint("Sketch cells", 32 * groups)
    coding = reader.byte("Sketch coding")
    stream = reader.stream("Sketch cell")
    if used > 8 * len(stream):
        raise WireError("Sketch cells", used, f"at most the {8 * len(stream)} bits of the stream")
    reader.make("Sketch cells", 4 * width * groups)
    cells, symbols, last = np.zeros((width, groups), np.uint32), None, 1
    if coding == FIXED:
        size, spare = packed_size(used, width), used * width % 8
        if len(stream) != size or (spare and stream[-1] >> spare):
            raise WireError("Sketch cells", f"{len(stream)} bytes", f"{size} for {used} cells, and zeros behind")
    elif coding == HUFFMAN:
        if width > MAX_TABLE_WIDTH:
            raise WireError("Sketch width", width, f"at most {MAX_TABLE_WIDTH} with a Huffman table")
        symbols = Symbols("Sketch cell", stream, 1 << width, used)
    else:
        raise WireError("Sketch coding", coding, f"{FIXED} or {HUFFMAN}")
    for i in range(0, used, SOME):
        count = min(SOME, used - i)
        if symbols is None:
            part = stream[i * width // 8 : i * width // 8 + packed_size(count, width)]
            codes = unpack_bits(part, count, width)
        else:
            codes = symbols.take(count)
        set_words(cells, np.arange(i, i + count), codes)
        last = int(codes[-1])
    if symbols is not None:
        symbols.check_end()
    if used and last == 0:
        raise WireError("Sketch cells", "a last cell of zero", "one that is not zero")
    return cells


register(
    Family(
        type=Sketch,
        codings=_codings,
        check=_check,
        write=_write,
        readers={SKETCH: _read},
        pack=_pack,
        unpack=_unpack,
        entries=lambda payload: namespace(payload.counts).sum(payload.counts, dtype=np.int32),
        entropy=True,
    )
)
