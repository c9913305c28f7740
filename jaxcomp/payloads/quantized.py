"""Codes of a few bits for all entries, and norms.

Bits, besides those of the norms, for n codes of w bits:

    coding          bits
    fixed           n w
    elias           for each code that is not zero the Elias omega code of its distance from the one before (the first
                    counts from -1), a sign, and the code of its magnitude
    all             Huffman table and codes of all levels
    some            a key stream of the places of those that are not zero, Huffman table and their codes

Records on the wire:

    4 fixed       array norms | array words
    7 elias       array norms | width u8 | groups varint | non-zeros varint | filler varint | Elias stream | filler
   11 all         array norms | width u8 | groups varint | level stream
   12 some        array norms | width u8 | groups varint | non-zeros varint | filler varint | key stream | level stream
                  | filler

In jit a message is norms | which of two forms, then

    Huffman table and codes of all levels; or
    number of levels that are not zero | key stream of their places | Huffman table and their codes
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomp.arrays import is_host, namespace
from jaxcomp.codes.arrays import histogram, running_max
from jaxcomp.codes.huffman import decode_with_table, encode_with_table, table_bits
from jaxcomp.codes.keys import (
    MAX_KEYS,
    MAX_TABLE_WIDTH,
    Gaps,
    choose_scheme,
    decode_to_gaps,
    encode_keys,
    keys_from_gaps,
)
from jaxcomp.codes.stream import elias_length
from jaxcomp.packing import TILE, pack, tile_of, unpack
from jaxcomp.payloads.registry import (
    WORDS,
    Choices,
    Coding,
    Family,
    count_type,
    lane_bytes,
    register,
    shortest,
)
from jaxcomp.payloads.sparse_records import key_stream
from jaxcomp.payloads.words import Coded, Cursor, coded, joined, uncoded, uncoded_like, whole_array
from jaxcomp.select import indices_of_words, mask_words
from jaxcomp.wire.bitstream import SOME, set_words, stream_bytes, unpack_words
from jaxcomp.wire.elias import Records, encode_levels
from jaxcomp.wire.errors import WireError
from jaxcomp.wire.format import FLOATS, check_array, check_words, read_array, write_array
from jaxcomp.wire.frame import Reader, Writer
from jaxcomp.wire.limits import MAX_GROUPS, MAX_STREAM, PAD_BYTES, STREAM_BYTES, unpaid
from jaxcomp.wire.streams import Symbols, read_keys

__all__ = [
    "CODED_LEVELS",
    "CODED_NONZEROS",
    "ELIAS_QUANTIZED",
    "QUANTIZED",
    "Quantized",
    "level_room",
    "level_stream",
]

Array = Any
I32, U32 = jnp.int32, jnp.uint32
QUANTIZED, ELIAS_QUANTIZED, CODED_LEVELS, CODED_NONZEROS = 4, 7, 11, 12


class Quantized(NamedTuple):
    """norms: f32[b], one per block (b may be 0);  words: u32[w, ceil(d / 32)], codes of w bits, 1 to 32.

    The layout of the words is that of `packing.pack`; `eden` has several such vectors side by side. A code is the level
    in zigzag form (0, 1, -1, 2, -2, ... -> 0, 1, 2, 3, 4, ...) for dithering, sign and exponent for natural.
    """

    norms: Array
    words: Array


def _check(payload: Quantized) -> None:
    check_array("Quantized.norms", payload.norms, FLOATS, 1, "a vector of floats")
    check_words("Quantized", payload.words)


# ------------------------------------------------------------------------------------------------
# Bits


class _Levels(NamedTuple):
    """codes i32[n] or u32[n], all of them;  some: those that are not zero, or all again where `sent` tells;
    gaps: of their places."""

    codes: Array
    some: Array
    gaps: Gaps


def _levels(words: Array) -> _Levels:
    size = 32 * words.shape[1]
    if is_host(words):
        codes = unpack_words(words)
        where = np.flatnonzero(codes)
        gaps = np.diff(where, prepend=-1) - 1
        return _Levels(codes, codes[where], Gaps(gaps.astype(np.uint32), np.arange(where.size) == 0, where >= 0))
    codes = unpack(words, size).astype(I32)
    place = lax.iota(I32, size)
    marks = jnp.where(codes != 0, place, -1)
    before = jnp.concatenate([jnp.full((1,), -1, I32), running_max(marks)[:-1]]) if size else marks
    return _Levels(codes, codes, Gaps((place - before - 1).astype(U32), before == -1, codes != 0))


def _elias_bits(levels: _Levels, dtype: Any) -> Array:
    xp = namespace(levels.codes)
    gaps, some = levels.gaps, levels.some.astype(xp.uint32)
    one = xp.uint32(1)
    magnitudes = xp.maximum((some >> one) + (some & one), one)
    each = elias_length(gaps.gaps + one) + 1 + elias_length(magnitudes)
    return xp.sum(xp.where(gaps.valid, each, 0), dtype=dtype)


def _coded(width: int, size: int) -> bool:
    return width <= MAX_TABLE_WIDTH and size <= MAX_KEYS


def _codings(payload: Quantized, code: str) -> Choices:
    norms, words = payload
    width, groups = words.shape
    size = 32 * groups
    rest = lambda: 8 * lane_bytes(norms)
    fixed = Coding(QUANTIZED, ("fixed", "best"), width * size)
    if code == "fixed":
        return Choices([fixed], rest)
    dtype, levels = count_type(words, 80 * size), _levels(words)
    codings = [fixed]
    if code != WORDS:
        codings.append(Coding(ELIAS_QUANTIZED, ("elias", "best"), _elias_bits(levels, dtype), plan=levels))
    if code != "elias" and _coded(width, size):
        codes = levels.codes.astype(namespace(words).int32)
        counts = histogram(codes, 1 << width, codes >= 0)
        dense, bits = table_bits(counts)
        codings.append(Coding(CODED_LEVELS, ("best", WORDS), bits.astype(dtype), plan=(levels, dense)))
        xp = namespace(words)
        sparse, bits = table_bits(xp.where(xp.arange(1 << width) > 0, counts, 0))
        keys = choose_scheme(levels.gaps)
        total = keys.bits.astype(dtype) + bits.astype(dtype)
        codings.append(Coding(CODED_NONZEROS, ("best", WORDS), total, plan=(levels, sparse, keys)))
    return Choices(codings, rest)


# ------------------------------------------------------------------------------------------------
# Words


def level_room(size: int, width: int) -> int:
    """Words of a table and the levels that it suits: at most `width` bits each, and chunk lengths."""
    return -(-(9 + 4 * (1 << width) + width * size + 12 * (size // 256)) // 32)


def _pack(payload: Quantized) -> Coded:
    norms, words = payload
    width, groups = words.shape
    size = 32 * groups
    if not _coded(width, size) or size == 0:
        return uncoded(payload)
    codings = _codings(payload, WORDS).codings
    chosen, _ = shortest(codings, WORDS)
    (levels, dense), (_, sparse, _) = codings[1].plan, codings[2].plan
    codes, room = levels.codes, level_room(size, width)
    places, count = indices_of_words(mask_words(codes != 0), size, size)

    def nonzeros():
        keys = coded(*encode_keys(places, count.reshape(1), num_words=size + 1))
        symbols = codes.at[places].get(mode="fill", fill_value=0, indices_are_sorted=True)
        head = whole_array(jnp.stack([U32(1), count.astype(U32)]))
        return joined([head, keys, coded(*encode_with_table(symbols, sparse, room, count=count))])

    def everything():
        levels = coded(*encode_with_table(codes, dense, room, count=jnp.asarray(size, I32)))
        message = joined([whole_array(jnp.zeros((1,), U32)), levels])
        return message._replace(words=jnp.pad(message.words, (0, size + 2)))

    return joined([whole_array(norms), lax.cond(chosen == 2, nonzeros, everything)])


def _unpack(cursor: Cursor, like: Quantized) -> Quantized:
    width, groups = like.words.shape
    size = 32 * groups
    if not _coded(width, size) or size == 0:
        return uncoded_like(cursor, like)
    norms = cursor.array(like.norms)
    room, start = level_room(size, width), cursor.position
    words = cursor.look(room + size + 3)

    def levels(count):
        return lambda words: decode_with_table(words, 1 << width, size, count=count)

    def nonzeros(words):
        inner = Cursor(words, room + size + 1)
        count = inner.take(2)[1].astype(I32)
        counts = count.reshape(1)
        gaps = inner.bits(size + 1, lambda words: decode_to_gaps(words, counts, size))
        symbols = inner.bits(room, levels(count))
        places = jnp.where(lax.iota(I32, size) < count, keys_from_gaps(gaps, counts), size)
        return jnp.zeros((size,), I32).at[places].set(symbols, mode="drop", indices_are_sorted=True), inner.position

    def everything(words):
        inner = Cursor(words, room)
        inner.take(1)
        symbols = inner.bits(room, levels(jnp.asarray(size, I32)))
        return symbols, inner.position

    codes, used = lax.cond(words[0] == 1, nonzeros, everything, words)
    cursor.position = start + used
    return Quantized(norms, pack(codes.astype(U32), width))


# ------------------------------------------------------------------------------------------------
# Bytes


def _write(out: Writer, payload: Quantized, coding: Coding) -> None:
    norms, words = payload
    width, groups = words.shape
    write_array(out, norms)
    if coding.kind == QUANTIZED:
        write_array(out, words)
        return
    out.byte(width)
    out.varint(groups)
    codes, some, _ = coding.plan if coding.kind == ELIAS_QUANTIZED else coding.plan[0]
    if coding.kind == ELIAS_QUANTIZED:
        count, stream = encode_levels(codes)
        filler = unpaid(words.nbytes, len(stream) + norms.nbytes)
        out.varint(count, filler)
        out.add(stream, bytes(filler))
        out.work += STREAM_BYTES
    elif coding.kind == CODED_LEVELS:
        out.stream(level_stream(codes, coding.plan[1]))
    else:
        keys = key_stream(np.flatnonzero(codes).astype(np.int32), coding.plan[2])
        stream = level_stream(some, coding.plan[1])
        filler = unpaid(words.nbytes, len(keys) + len(stream) + norms.nbytes)
        out.varint(some.size, filler)
        out.stream(keys)
        out.stream(stream)
        out.add(bytes(filler))


def level_stream(codes: np.ndarray, lengths: np.ndarray) -> bytes:
    """A table of these lengths, and codes of levels by it."""
    room = -(-(9 + 4 * lengths.size + 15 * codes.size + 12 * (codes.size // 256)) // 32)
    words, bits = encode_with_table(codes.astype(np.int32), lengths, room, count=np.int32(codes.size))
    return stream_bytes(words, int(bits))


def _read_fixed(reader: Reader) -> Quantized:
    return Quantized(read_array(reader, "Quantized.norms"), read_array(reader, "Quantized.words"))


def _read_shape(reader: Reader, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Norms, and room for the words, checked against what the rest of the message can pay for."""
    norms = read_array(reader, "Quantized.norms")
    width = reader.byte("Quantized width", 1, most)
    groups = reader.varint("Quantized groups", MAX_GROUPS)
    if 4 * width * groups > PAD_BYTES * (reader.left + norms.nbytes):
        raise WireError("Quantized groups", groups, f"paid for by {reader.left} bytes")
    reader.make("Quantized groups", 4 * width * groups)
    return norms, np.zeros((width, groups), np.uint32)


def _read_elias(reader: Reader) -> Quantized:
    norms, words = _read_shape(reader, 32)
    width, size = words.shape[0], 32 * words.shape[1]
    count = reader.varint("Quantized non-zeros", size)
    filler = reader.varint("Quantized filler", reader.left)
    reader.part(STREAM_BYTES)
    records = Records(reader.body[reader.position :], count, size, levels=True, room=reader.spare)
    for places, codes in records:
        if int(codes.max()) >> width:
            raise WireError("Quantized level", int(codes.max()), f"below 2^{width}")
        for i in range(0, places.size, SOME):
            set_words(words, places[i : i + SOME], codes[i : i + SOME])
    reader.take("Elias stream", records.used)
    reader.zeros("Quantized filler", filler)
    return Quantized(norms, words)


def _level_reader(reader: Reader, count: int, width: int) -> Symbols:
    field = "Quantized level stream"
    stream = reader.stream(field, MAX_STREAM - 1)
    most = min(8 * len(stream), MAX_KEYS)
    if count > most:
        raise WireError(f"{field} count", count, f"at most {most} in {len(stream)} bytes")
    return Symbols(field, stream, 1 << width, count)


def _read_all(reader: Reader) -> Quantized:
    norms, words = _read_shape(reader, MAX_TABLE_WIDTH)
    size = 32 * words.shape[1]
    symbols = _level_reader(reader, size, words.shape[0])
    for i in range(0, size, SOME):
        places = np.arange(i, min(i + SOME, size))
        set_words(words, places, symbols.take(places.size))
    symbols.check_end()
    return Quantized(norms, words)


def _read_some(reader: Reader) -> Quantized:
    norms, words = _read_shape(reader, MAX_TABLE_WIDTH)
    width, size = words.shape[0], 32 * words.shape[1]
    count = reader.varint("Quantized non-zeros", size)
    filler = reader.varint("Quantized filler", reader.left)
    keys = read_keys(reader, "Quantized key stream", count, size)
    symbols = _level_reader(reader, count, width)
    for places in keys:
        set_words(words, places, symbols.take(places.size))
    symbols.check_end()
    reader.zeros("Quantized filler", filler)
    return Quantized(norms, words)


def _per_tile(payload: Quantized) -> list[int]:
    width, groups = payload.words.shape
    return [0, TILE * width if groups and tile_of(groups, width) == TILE else 0]


register(
    Family(
        type=Quantized,
        codings=_codings,
        check=_check,
        write=_write,
        readers={
            QUANTIZED: _read_fixed,
            ELIAS_QUANTIZED: _read_elias,
            CODED_LEVELS: _read_all,
            CODED_NONZEROS: _read_some,
        },
        pack=_pack,
        unpack=_unpack,
        entries=lambda payload: None,
        per_tile=_per_tile,
    )
)
