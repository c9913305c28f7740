"""The entries that were selected in each chunk of a vector: values, and gaps between their places in few bits.

All chunks have equally many entries, so the places in a chunk of 4096 need 12 bits. Both ends know the size of a chunk
and how many entries each of them sends.

Bits, besides those of the values, for words of w bits for n gaps, n filled up to a multiple of 32:

    coding          bits
    fixed           n w
    keys            a key stream of `jaxcomp.codes` of the gaps up to the last one that is not zero

Records on the wire:

   30 fixed       record or array values | array words
   31 keys        record or array values | width u8 | groups varint | gaps varint | filler varint | key stream | filler

In jit a message is

    number of gaps | key stream | values
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomp.arrays import is_host, namespace
from jaxcomp.codes.arrays import running_sum
from jaxcomp.codes.keys import MAX_KEYS, Gaps, choose_scheme, decode_to_gaps, encode_keys
from jaxcomp.packing import pack, unpack
from jaxcomp.payloads.registry import (
    WORDS,
    Choices,
    Coding,
    Family,
    count_type,
    message_bits,
    num_entries,
    pack_message,
    read_record,
    register,
    unpack_message,
    write_record,
)
from jaxcomp.payloads.words import Coded, Cursor, coded, joined, uncoded, uncoded_like, whole_array
from jaxcomp.wire.bitstream import set_words, stream_bytes, unpack_words
from jaxcomp.wire.errors import WireError
from jaxcomp.wire.format import check_words, dtype_code, read_array, write_array
from jaxcomp.wire.frame import Reader, Writer
from jaxcomp.wire.limits import MAX_GROUPS, PAD_BYTES, unpaid
from jaxcomp.wire.streams import read_keys

__all__ = ["CHUNKS", "CODED_CHUNKS", "Chunks"]

Array = Any
I32, U32 = jnp.int32, jnp.uint32
CHUNKS, CODED_CHUNKS = 30, 31
FURTHEST = 2**30  # what the gaps of a key stream may add up to: its keys are counted in i32


class Chunks(NamedTuple):
    """values: f[n], chunk after chunk, or a payload of them;  words: u32[w, ceil(n / 32)], gaps (`packing.pack`).

    A gap is the number of entries of the chunk that are left out before the next one that is sent. Where a chunk
    sends less than it may, its gaps lead behind its end.
    """

    values: Any
    words: Array


def _check(payload: Chunks) -> None:
    values, words = payload
    check_words("Chunks", words)
    groups = words.shape[1]
    if isinstance(values, np.ndarray):
        if values.ndim != 1 or -(-values.size // 32) != groups:
            raise WireError("Chunks.values", f"of shape {values.shape}", f"one for each of {32 * groups} gaps")
        dtype_code(values.dtype)


# ------------------------------------------------------------------------------------------------
# Bits


class _SentGaps(NamedTuple):
    """gaps u32[n], all of them;  count: up to the last that is not zero;  total f[]: what these add up to."""

    gaps: Array
    count: Array
    total: Array

    @property
    def listed(self) -> Gaps:
        """The gaps as `codes.keys` takes them."""
        xp = namespace(self.gaps)
        place = xp.arange(self.gaps.shape[0], dtype=xp.int32)
        return Gaps(self.gaps, place == 0, place < self.count)

    @property
    def keys(self) -> Array:
        """The same gaps as ascending keys of one list; of no use behind `count`."""
        xp = namespace(self.gaps)
        return (running_sum((self.gaps + xp.uint32(1)).astype(xp.uint32)) - xp.uint32(1)).astype(xp.int32)


def _sent(words: Array) -> _SentGaps:
    size = 32 * words.shape[1]
    if is_host(words):
        gaps = unpack_words(words)
        where = np.flatnonzero(gaps)
        count = np.int32(where[-1] + 1 if where.size else 0)
        return _SentGaps(gaps[: int(count)], count, np.float32(np.sum(gaps, dtype=np.float64) + count))
    gaps = unpack(words, size)
    count = jnp.max(jnp.where(gaps != 0, lax.iota(I32, size) + 1, 0), initial=0)
    return _SentGaps(gaps, count, jnp.sum(gaps.astype(jnp.float32)) + count.astype(jnp.float32))


def _codings(payload: Chunks, code: str) -> Choices:
    values, words = payload
    width, groups = words.shape
    size = 32 * groups
    rest = lambda: message_bits(values, code)
    fixed = Coding(CHUNKS, ("fixed", "elias", "best"), width * size)
    if code not in ("best", WORDS) or not 0 < size <= MAX_KEYS:
        return Choices([fixed], rest)
    sent = _sent(words)
    keys = choose_scheme(sent.listed)
    bits = keys.bits.astype(count_type(words, 80 * size))
    return Choices([fixed, Coding(CODED_CHUNKS, ("best", WORDS), bits, sent.total < FURTHEST, (sent, keys))], rest)


# ------------------------------------------------------------------------------------------------
# Words


def _pack(payload: Chunks) -> Coded:
    values, words = payload
    size = 32 * words.shape[1]
    if not 0 < size <= MAX_KEYS:
        return uncoded(payload)
    sent = _sent(words)
    count = sent.count.reshape(1)
    keys = coded(*encode_keys(sent.keys, count, num_words=size + 1), sent.total < FURTHEST)
    return joined([whole_array(count), keys, pack_message(values)])


def _unpack(cursor: Cursor, like: Chunks) -> Chunks:
    width, groups = like.words.shape
    size = 32 * groups
    if not 0 < size <= MAX_KEYS:
        return uncoded_like(cursor, like)
    count = cursor.take(1).astype(I32)
    gaps = cursor.bits(size + 1, lambda words: decode_to_gaps(words, count, size))
    return Chunks(unpack_message(cursor, like.values), pack(gaps, width))


# ------------------------------------------------------------------------------------------------
# Bytes


def _write(out: Writer, payload: Chunks, coding: Coding) -> None:
    values, words = payload
    write_record(out, values)
    if coding.kind == CHUNKS:
        write_array(out, words)
        return
    sent, keys = coding.plan
    counts = np.array([sent.count], np.int32)
    stream, bits = encode_keys(sent.keys, counts, num_words=(int(keys.bits) + 31) // 32, chosen=keys)
    data = stream_bytes(stream, bits)
    filler = unpaid(words.nbytes, len(data))
    width, groups = words.shape
    out.byte(width)
    out.varint(groups, int(sent.count), filler)
    out.stream(data)
    out.add(bytes(filler))


def _read_fixed(reader: Reader) -> Chunks:
    return Chunks(read_record(reader), read_array(reader, "Chunks.words"))


def _read_coded(reader: Reader) -> Chunks:
    values = read_record(reader)
    width = reader.byte("Chunks width", 1, 32)
    groups = reader.varint("Chunks groups", MAX_GROUPS)
    if 4 * width * groups > PAD_BYTES * reader.left:
        raise WireError("Chunks groups", groups, f"paid for by {reader.left} bytes")
    count = reader.varint("Chunks gaps", 32 * groups)
    filler = reader.varint("Chunks filler", reader.left)
    keys = read_keys(reader, "Chunks key stream", count, 2**31)
    reader.make("Chunks words", 4 * width * groups)
    words, place, last = np.zeros((width, groups), np.uint32), 0, -1
    for block in keys:
        gaps = np.diff(block, prepend=last) - 1
        if int(gaps.max()) >> width:
            raise WireError("Chunks gap", int(gaps.max()), f"below 2^{width}")
        places = np.arange(place, place + gaps.size)
        set_words(words, places, gaps.astype(np.uint32))
        place, last = place + gaps.size, int(block[-1])
    reader.zeros("Chunks filler", filler)
    return Chunks(values, words)


def _entries(payload: Chunks) -> Any:
    values = payload.values
    if not hasattr(values, "dtype"):  # all places, filled up to a whole number of words, where that does not tell
        inside = num_entries(values)
        return 32 * payload.words.shape[1] if inside is None else inside
    xp = namespace(values)
    return xp.sum(values != 0, dtype=xp.int32)


register(
    Family(
        type=Chunks,
        codings=_codings,
        check=_check,
        write=_write,
        readers={CHUNKS: _read_fixed, CODED_CHUNKS: _read_coded},
        pack=_pack,
        unpack=_unpack,
        entries=_entries,
    )
)
