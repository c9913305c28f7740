"""Some entries of a vector and where they stand: type, codings, words. `sparse_records` has the bytes.

With m entries before the padding, values of v bits and, where a message stops with padding, the first of it counted:

    coding          bits
    fixed           m (v + w), w the bit length of the largest index;
                    with `LocalIndices` m (v + 16), and 32 for the count of each block
    elias           for each entry the Elias omega code of its distance from the one before, and v
    keys            a key stream of `jaxcomp.codes`, and m v

With a payload in the place of `values` v is 0 and that payload's bits are added. Elias codes and key streams hold
indices that ascend, followed by nothing but padding. In jit a message is

    number of entries before the padding, index of the padding | key stream | values of the entries

where a `Dense` of the values, which narrow floats are, counts as the values themselves.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomp.arrays import as_words, bit_length, is_host, namespace
from jaxcomp.base import Lengths
from jaxcomp.codes.keys import MAX_KEYS, Gaps, choose_scheme, decode_to_gaps, encode_keys, keys_from_gaps
from jaxcomp.codes.stream import elias_length
from jaxcomp.payloads import sparse_records as records
from jaxcomp.payloads.local import BLOCK, LocalIndices, global_indices, local_indices
from jaxcomp.payloads.registry import (
    WORDS,
    Choices,
    Coding,
    Dense,
    Family,
    Scaled,
    code_bits,
    count_type,
    encode_message,
    register,
    same_everywhere,
    unpack_message,
)
from jaxcomp.payloads.sparse_records import Entries, Sparse
from jaxcomp.payloads.words import (
    Coded,
    Cursor,
    coded,
    from_words,
    joined,
    num_words,
    to_words,
    uncoded,
    uncoded_like,
    whole_array,
)

__all__ = ["Sparse"]

Array = Any
I32, U32 = jnp.int32, jnp.uint32


# ------------------------------------------------------------------------------------------------
# What a message says


def _not_zero(values: Array) -> Array:
    """Mask of the numbers that have a bit set: padding has none, not even a sign."""
    return (values.view(f"u{values.itemsize}") if is_host(values) else as_words(values)) != 0


def _bare(payload: Sparse) -> Sparse:
    """The same payload, with the values themselves in place of a `Dense` of them."""
    values, indices = payload
    if not isinstance(values, Dense) or not hasattr(values.values, "dtype"):
        return payload
    size = (indices.low if isinstance(indices, LocalIndices) else indices).shape
    return Sparse(values.values, indices) if values.values.shape == size else payload


def _extent(payload: Sparse) -> tuple[Array, Entries]:
    """How many entries a message of fixed width has, and those before the padding; for at least one place.

    The first padding entry ends the message: it says which index padding has.
    """
    values, indices = payload
    if isinstance(indices, LocalIndices):
        return _local_extent(payload)
    xp, capacity = namespace(indices), indices.shape[-1]
    place, last = xp.arange(capacity, dtype=xp.int32), indices[-1]
    padding = indices == last
    first = xp.min(xp.where(padding, place, capacity)).astype(xp.int32)
    in_full = xp.sum(padding, dtype=xp.int32) != capacity - first  # padding is not only at the end
    filled = _not_zero(values) if hasattr(values, "dtype") else None
    if filled is not None:
        in_full |= xp.max(xp.where(filled, place, -1)) > first
    stop = xp.where(in_full, capacity, first + 1)
    spare = True if filled is None else ~filled[stop - 1]
    count = stop - xp.where(spare, 1, 0)
    sent = place < count
    rising = indices > xp.concatenate([xp.full((1,), -1, xp.int32), indices[:-1]])
    fits = xp.all(xp.where(sent, rising, padding))
    return stop, Entries(indices, count, last, fits)


def _local_extent(payload: Sparse) -> tuple[Array, Entries]:
    values, (low, counts) = payload
    xp, capacity = namespace(low), low.shape[-1]
    size = min(BLOCK * counts.shape[0], 2**31 - 1)
    place = xp.arange(capacity, dtype=xp.int32)
    total = xp.sum(counts, dtype=xp.int64 if is_host(counts) else xp.int32)
    behind = low != 0
    if hasattr(values, "dtype"):
        behind |= _not_zero(values)
    filled = xp.any((place >= total) & behind)
    stop = xp.where(filled, capacity, xp.clip(total, 0, capacity)).astype(xp.int32)
    fits = (total <= capacity) & xp.all(counts >= 0) & ~filled
    if is_host(low) and not fits:
        return stop, Entries(low, stop, size, fits)
    indices = global_indices(payload.indices, size)
    before = xp.concatenate([xp.full((1,), -1, xp.int32), indices[:-1]])
    fits &= xp.all((place >= stop) | ((indices > before) & (indices < size)))
    return stop, Entries(indices, stop, size, fits)


def _gaps(entries: Entries) -> Gaps:
    """Distances of the entries that are sent, which stand at the front."""
    indices, count = entries.indices, entries.count
    xp = namespace(indices)
    if is_host(indices):
        indices = indices[: int(count)]
    before = xp.concatenate([xp.full((1,), -1, xp.int32), indices[:-1]])[: indices.shape[0]]
    place = xp.arange(indices.shape[0], dtype=xp.int32)
    return Gaps((indices - before - 1).astype(xp.uint32), place == 0, place < count)


# ------------------------------------------------------------------------------------------------
# Bits


def _codings(payload: Sparse, code: str) -> Choices:
    values, indices = payload = _bare(payload) if code == WORDS else payload
    local, plain = isinstance(indices, LocalIndices), hasattr(values, "dtype")
    low = indices.low if local else indices
    capacity, each = low.shape[-1], 8 * values.dtype.itemsize if plain else 0
    rest = None if plain else (lambda: code_bits(values, code=code))
    kind = records.SPARSE_LOCAL if local else records.SPARSE
    extra = 32 * indices.counts.shape[0] if local else 0
    if capacity == 0:
        none = Entries(np.zeros(0, np.int32), np.int32(0), 0, True)
        elias = [Coding(records.ELIAS_SPARSE, ("elias",), 0, plan=none)] if code == "elias" and not local else []
        keys = choose_scheme(_gaps(none))
        best = [Coding(records.CODED_LOCAL, ("best",), int(keys.bits), plan=(none, keys))] if local else []
        return Choices([Coding(kind, ("fixed", "best"), extra, plan=(0, none)), *elias, *best], rest)
    stop, entries = _extent(payload)
    xp, dtype = namespace(low), count_type(low, capacity * (each + 40) + extra)
    if local:
        width = 16
    else:
        width = xp.maximum(bit_length(xp.max(indices).astype(xp.uint32)), 1).astype(dtype)
    bits = stop.astype(dtype) * (width + each) + extra
    codings = [Coding(kind, ("fixed", "best"), bits, plan=(stop, entries))]
    sent = entries.count.astype(dtype) * each
    if code == "elias" and not local and _may_fit(entries.fits):
        gaps = _gaps(entries)
        lengths = elias_length(xp.where(gaps.valid, gaps.gaps, xp.uint32(0)) + xp.uint32(1))
        total = xp.sum(xp.where(gaps.valid, lengths, 0), dtype=dtype) + sent
        codings.append(Coding(records.ELIAS_SPARSE, ("elias",), total, entries.fits, entries))
    if code in ("best", WORDS) and capacity <= MAX_KEYS and _may_fit(entries.fits):
        keys = choose_scheme(_gaps(entries))
        kind = records.CODED_LOCAL if local else records.CODED_SPARSE
        bits = keys.bits.astype(dtype) + sent
        codings.append(Coding(kind, ("best", WORDS), bits, entries.fits, (entries, keys)))
    return Choices(codings, rest, entries.count)


def _may_fit(fits: Any) -> bool:
    """False only where it is known already that a coding cannot hold the payload."""
    return bool(fits) if is_host(fits) or isinstance(fits, bool) else True


# ------------------------------------------------------------------------------------------------
# Words


def _key_room(size: int) -> int:
    """Words of the shortest stream of any keys: 32 bits each and a byte."""
    return size + 1


def _has_key_stream(capacity: int, blocks: int) -> bool:
    """Whether words of such a message hold its indices as a key stream."""
    return 0 < capacity <= MAX_KEYS and BLOCK * blocks < 2**31


def _pack(payload: Sparse) -> Coded:
    values, indices = payload = _bare(payload)
    local = isinstance(indices, LocalIndices)
    if not _has_key_stream((indices.low if local else indices).shape[0], indices.counts.shape[0] if local else 0):
        return uncoded(payload)
    _, entries = _extent(payload)
    indices, count, last, fits = entries
    head = jnp.stack([count, jnp.asarray(last, I32)]).astype(U32)
    words, bits = encode_keys(indices, count.reshape(1), num_words=_key_room(indices.shape[0]))
    parts = [whole_array(head), coded(words, bits, fits)]
    if hasattr(values, "dtype"):
        used = -(-count * values.dtype.itemsize // 4)
        parts.append(Coded(to_words(values), used, jnp.asarray(True)))
    else:
        parts.append(encode_message(values))
    return joined(parts)


def _unpack(cursor: Cursor, like: Sparse) -> Sparse:
    values, indices = _bare(like)
    local = isinstance(indices, LocalIndices)
    capacity = (indices.low if local else indices).shape[0]
    if not _has_key_stream(capacity, indices.counts.shape[0] if local else 0):
        return uncoded_like(cursor, like)
    count, last = cursor.take(2).astype(I32)
    counts = count.reshape(1)
    gaps = cursor.bits(_key_room(capacity), lambda words: decode_to_gaps(words, counts, capacity))
    keys = jnp.where(lax.iota(I32, capacity) < count, keys_from_gaps(gaps, counts), last)
    if hasattr(values, "dtype"):
        used = -(-count * values.dtype.itemsize // 4)
        words = cursor.take(num_words(values), used)
        values = from_words(jnp.where(lax.iota(I32, words.size) < used, words, U32(0)), values)
        values = values if hasattr(like.values, "dtype") else Dense(values)
    else:
        values = unpack_message(cursor, values)
    return Sparse(values, local_indices(keys, BLOCK * indices.counts.shape[0]) if local else keys)


# ------------------------------------------------------------------------------------------------


def _entries(payload: Sparse) -> Array | int:
    low = payload.indices.low if isinstance(payload.indices, LocalIndices) else payload.indices
    return _extent(payload)[1].count if low.shape[-1] else 0


def _limits(payload: Sparse, lengths: Any) -> list:
    values, indices = payload
    plain = hasattr(values, "dtype")
    if not isinstance(lengths, Lengths) or not (plain or isinstance(values, Dense | Scaled)):
        return same_everywhere(payload, lengths)
    first = [(lengths, 0), *([] if plain else [None] * (len(values) - 1))]
    if isinstance(indices, LocalIndices):
        return [*first, (lengths, 0), None]
    return [*first, (lengths, lengths.size)]


def _highest_index(payload: Sparse) -> int:
    indices = payload.indices
    return int(indices.max(initial=0)) if isinstance(indices, np.ndarray) else 0  # `LocalIndices` say nothing of it


register(
    Family(
        type=Sparse,
        codings=_codings,
        check=records.check_sparse,
        write=records.write,
        readers=records.READERS,
        pack=_pack,
        unpack=_unpack,
        entries=_entries,
        limits=_limits,
        plain=lambda payload: (payload.values, payload.indices),
        highest_index=_highest_index,
    )
)
