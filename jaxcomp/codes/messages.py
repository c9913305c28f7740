"""Payloads as words in jit: what `wire` does for bytes on the host, for a collective.

A message is a sequence of streams, each beginning at a word:

    Dense, Scaled    the bits of their arrays
    Sparse           number of entries before the padding, index of the padding | key stream | values of the entries
    LocalIndices     the same, as global indices
    Quantized        norms | which of two forms | Huffman table and codes of all levels, or
                     number of levels that are not zero | key stream of their places | Huffman table and their codes
    Sketch           number of keys in each list, padding key, number of cells | key stream | levels | zero
                     | Huffman table and codes of the cells
    Leaves           dense | leaves

Capacities are static, and so large that whatever can be coded fits; how many words are in use depends on the content.
What a form cannot hold (indices that do not ascend, padding that is not zero) is reported, not coded.

A new type of payload joins with one entry in `_WRITERS` and one in `_READERS`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.codes.arrays import histogram
from jaxcomp.codes.huffman import decode_with_table, encode_with_table, table_bits
from jaxcomp.codes.keys import MAX_KEYS, MAX_TABLE_WIDTH, decode_gaps, encode_keys, key_words, keys_of
from jaxcomp.packing import as_words, pack, unpack
from jaxcomp.payloads import Dense, Leaves, LocalIndices, Quantized, Scaled, Sketch, Sparse
from jaxcomp.select import BLOCK, global_indices, indices_of_words, local_indices, mask_words

__all__ = ["Coded", "decode_message", "encode_message", "from_words", "to_words"]

Array = jax.Array
I32, U32 = jnp.int32, jnp.uint32


class Coded(NamedTuple):
    """words u32[capacity], zero beyond what is used;  used i32[], words;  fits bool[], false if no code can hold it."""

    words: Array
    used: Array
    fits: Array


# ------------------------------------------------------------------------------------------------
# Arrays as words, and back


def to_words(array: Array) -> Array:
    """The bits of an array as uint32 words; the first entries are in the first words."""
    flat = array.reshape(-1)
    per = 4 // flat.dtype.itemsize
    if per > 1:
        flat = jnp.pad(flat, (0, -flat.size % per)).reshape(-1, per)
    return lax.bitcast_convert_type(flat, U32).reshape(-1)


def from_words(words: Array, like: Any) -> Array:
    """[..., words] back as [..., *like.shape]."""
    lead = words.shape[:-1]
    if like.dtype.itemsize == 8:
        words = words.reshape(*lead, -1, 2)
    flat = lax.bitcast_convert_type(words, like.dtype).reshape(*lead, -1)
    return flat[..., : like.size].reshape(*lead, *like.shape)


def num_words(like: Any) -> int:
    """uint32 words that an array of this shape and dtype fills, the last one padded."""
    return -(-like.size * like.dtype.itemsize // 4)


def _whole(array: Array) -> Coded:
    words = to_words(array)
    return Coded(words, jnp.asarray(words.size, I32), jnp.asarray(True))


def _joined(parts: list[Coded]) -> Coded:
    """One stream after the other."""
    room = sum(part.words.size for part in parts)
    words, start = jnp.zeros((room,), U32), jnp.zeros((), I32)
    for part in parts:
        # The zeros after what is used are overwritten by the next stream.
        words = lax.dynamic_update_slice(words, part.words, (start,))
        start = start + part.used
    return Coded(words, start, jnp.all(jnp.stack([part.fits for part in parts])))


class _Cursor:
    """Reads streams front to back. `position` is traced."""

    def __init__(self, words: Array, room: int):
        self.words, self.position = jnp.pad(words, (0, room)), jnp.zeros((), I32)

    def look(self, size: int) -> Array:
        return lax.dynamic_slice(self.words, (self.position,), (size,))

    def take(self, size: int, used: Array | int | None = None) -> Array:
        words = self.look(size)
        self.position = self.position + (size if used is None else used)
        return words

    def bits(self, size: int, decode: Callable[[Array], tuple[Any, Array]]) -> Any:
        """decode(words) -> (what it read, the bit after it)."""
        result, end = decode(self.look(size))
        self.position = self.position + (end + 31) // 32
        return result


# ------------------------------------------------------------------------------------------------
# Messages


def encode_message(payload: Any) -> Coded:
    """A payload as words; the capacity follows from its shapes.

    >>> message = encode_message(Sparse(jnp.array([1.0, 2.0, 0.0]), jnp.array([4, 5, 9])))
    >>> print(message.used, message.words.size)
    5 9
    """
    writer = _WRITERS.get(type(payload))
    if writer is None:
        raise TypeError(f"encode_message: {type(payload).__name__} is not a payload")
    return writer(payload)


def decode_message(words: Array, like: Any) -> Any:
    """The payload of a message whose `fits` was true.

    Args:
        words: u32[w], the words in use or more; what is missing counts as zeros.
        like: payload of arrays or of `jax.ShapeDtypeStruct`.
    """
    room = jax.eval_shape(encode_message, like).words.size
    return _read(_Cursor(words, room), like)


def _read(cursor: _Cursor, like: Any) -> Any:
    return _READERS[type(like)](cursor, like)


def _is_array(values: Any) -> bool:
    return jax.tree.structure(values) == jax.tree.structure(0)


def _write_arrays(payload: Any) -> Coded:
    if isinstance(payload, Dense) and not _is_array(payload.values):
        return encode_message(payload.values)
    return _joined([_whole(array) for array in jax.tree.leaves(payload)])


def _read_arrays(cursor: _Cursor, like: Any) -> Any:
    if isinstance(like, Dense) and not _is_array(like.values):
        return Dense(_read(cursor, like.values))
    return jax.tree.map(lambda leaf: from_words(cursor.take(num_words(leaf)), leaf), like)


def _write_leaves(payload: Leaves) -> Coded:
    return _joined([encode_message(payload.dense), *map(encode_message, payload.leaves)])


def _read_leaves(cursor: _Cursor, like: Leaves) -> Leaves:
    dense = _read(cursor, like.dense)
    return Leaves(dense, tuple(_read(cursor, leaf) for leaf in like.leaves))


def _key_room(size: int) -> int:
    """Words of the shortest stream of any keys: 32 bits each and a byte."""
    return size + 1


def _keys(indices: Array, count: Array) -> Coded:
    words, bits = encode_keys(indices, count.reshape(1), num_words=_key_room(indices.shape[0]))
    return Coded(words, (bits + 31) // 32, jnp.asarray(True))


def _read_keys(cursor: _Cursor, count: Array, size: int) -> Array:
    counts = count.reshape(1)
    gaps = cursor.bits(_key_room(size), lambda words: decode_gaps(words, counts, size))
    return keys_of(gaps, counts)


def _write_sparse(payload: Sparse) -> Coded:
    values, indices = payload
    fits = jnp.asarray(True)
    if isinstance(indices, LocalIndices):
        low, counts = indices
        size = BLOCK * counts.shape[0]
        if size >= 2**31:
            return _uncoded(payload)
        indices = global_indices(indices, size)
        again = local_indices(indices, size)
        fits = jnp.all(again.low == low) & jnp.all(again.counts == counts)
    capacity = indices.shape[0]
    if not 0 < capacity <= MAX_KEYS:
        return _uncoded(payload)
    place = lax.iota(I32, capacity)
    last = indices[-1]
    count = jnp.sum(indices != last, dtype=I32)
    if _is_array(values):  # a last entry that is not padding
        bits = to_words(values[-1:])
        count = jnp.where((count == capacity - 1) & (bits[0] != 0), capacity, count)
    sent = place < count
    before = jnp.concatenate([jnp.full((1,), -1, I32), indices[:-1]])
    fits &= jnp.all(jnp.where(sent, indices > before, indices == last))
    head = jnp.stack([count, last]).astype(U32)
    parts = [_whole(head), _keys(indices, count)]
    if _is_array(values):
        fits &= jnp.all(sent | (as_words(values) == 0))
        parts.append(Coded(to_words(values), -(-count * values.dtype.itemsize // 4), fits))
    else:
        parts.append(encode_message(values))
    joined = _joined(parts)
    return joined._replace(fits=joined.fits & fits)


def _read_sparse(cursor: _Cursor, like: Sparse) -> Sparse:
    values, indices = like
    local = isinstance(indices, LocalIndices)
    capacity = (indices.low if local else indices).shape[0]
    if not 0 < capacity <= MAX_KEYS or (local and BLOCK * indices.counts.shape[0] >= 2**31):
        return _read_uncoded(cursor, like)
    count, last = cursor.take(2).astype(I32)
    keys = _read_keys(cursor, count, capacity)
    keys = jnp.where(lax.iota(I32, capacity) < count, keys, last)
    if _is_array(values):
        used = -(-count * values.dtype.itemsize // 4)
        words = cursor.take(num_words(values), used)
        values = from_words(jnp.where(lax.iota(I32, words.size) < used, words, U32(0)), values)
    else:
        values = _read(cursor, values)
    return Sparse(values, local_indices(keys, BLOCK * indices.counts.shape[0]) if local else keys)


def _write_quantized(payload: Quantized) -> Coded:
    norms, words = payload
    width, groups = words.shape
    size = 32 * groups
    if width > MAX_TABLE_WIDTH or size > MAX_KEYS or size == 0:
        return _uncoded(payload)
    codes = unpack(words, size).astype(I32)
    number = 1 << width
    counts = histogram(codes, number, codes >= 0)
    dense, dense_bits = table_bits(counts)
    sparse, sparse_bits = table_bits(counts.at[0].set(0))
    places, count = indices_of_words(mask_words(codes != 0), size, size)
    keys = _keys(places, count)
    rare = (keys.used + (sparse_bits + 31) // 32 + 1) < (dense_bits + 31) // 32
    room = _level_room(size, width)

    def levels(symbols, lengths, count):
        coded, bits = encode_with_table(symbols, lengths, room, count=count)
        return Coded(coded, (bits + 31) // 32, jnp.asarray(True))

    def nonzeros():
        symbols = codes.at[places].get(mode="fill", fill_value=0, indices_are_sorted=True)
        return _joined([_whole(jnp.stack([U32(1), count.astype(U32)])), keys, levels(symbols, sparse, count)])

    def everything():
        joined = _joined([_whole(jnp.zeros((1,), U32)), levels(codes, dense, jnp.asarray(size, I32))])
        return joined._replace(words=jnp.pad(joined.words, (0, _key_room(size) + 1)))

    return _joined([_whole(norms), lax.cond(rare, nonzeros, everything)])


def _level_room(size: int, width: int) -> int:
    """Words of a table and the levels that it suits: at most `width` bits each, and chunk lengths."""
    return -(-(9 + 4 * (1 << width) + width * size + 12 * (size // 256)) // 32)


def _read_quantized(cursor: _Cursor, like: Quantized) -> Quantized:
    width, groups = like.words.shape
    size = 32 * groups
    if width > MAX_TABLE_WIDTH or size > MAX_KEYS or size == 0:
        return _read_uncoded(cursor, like)
    norms = from_words(cursor.take(num_words(like.norms)), like.norms)
    room, start = _level_room(size, width), cursor.position
    words = cursor.look(room + _key_room(size) + 2)

    def levels(count):
        return lambda words: decode_with_table(words, 1 << width, size, count=count)

    def nonzeros(words):
        inner = _Cursor(words, room + _key_room(size))
        count = inner.take(2)[1].astype(I32)
        places = _read_keys(inner, count, size)
        symbols = inner.bits(room, levels(count))
        places = jnp.where(lax.iota(I32, size) < count, places, size)
        return jnp.zeros((size,), I32).at[places].set(symbols, mode="drop"), inner.position

    def everything(words):
        inner = _Cursor(words, room)
        inner.take(1)
        symbols = inner.bits(room, levels(jnp.asarray(size, I32)))
        return symbols, inner.position

    codes, used = lax.cond(words[0] == 1, nonzeros, everything, words)
    cursor.position = start + used
    return Quantized(norms, pack(codes.astype(U32), width))


def _uncoded(payload: Any) -> Coded:
    return _joined([_whole(array) for array in jax.tree.leaves(payload)])


def _read_uncoded(cursor: _Cursor, like: Any) -> Any:
    return jax.tree.map(lambda leaf: from_words(cursor.take(num_words(leaf)), leaf), like)


def _write_sketch(payload: Sketch) -> Coded:
    levels, counts, keys, cells, zero = payload
    width, size, capacity = cells.shape[0], 32 * cells.shape[1], keys.shape[0]
    if width > MAX_TABLE_WIDTH or max(size, capacity) > MAX_KEYS or 0 in (size, capacity):
        return _uncoded(payload)
    n = jnp.sum(counts, dtype=I32)
    coder = "released" if zero.shape[0] else "best"
    words, bits = encode_keys(keys, counts, coder=coder, num_words=key_words(capacity))
    symbols = unpack(cells, size).astype(I32)
    used = jnp.max(jnp.where(symbols != 0, lax.iota(I32, size) + 1, 0))
    lengths, _ = table_bits(histogram(symbols, 1 << width, lax.iota(I32, size) < used))
    coded, end = encode_with_table(symbols, lengths, _level_room(size, width), count=used)
    return _joined(
        [
            _whole(jnp.concatenate([counts, jnp.stack([keys[-1], used])])),
            Coded(words, (bits + 31) // 32, _in_lists(keys, counts, n)),
            _whole(levels),
            _whole(zero),
            Coded(coded, (end + 31) // 32, jnp.asarray(True)),
        ]
    )


def _in_lists(keys: Array, counts: Array, n: Array) -> Array:
    """Whether the first n keys ascend in each list, and one key fills the places behind them."""
    rank = lax.iota(I32, keys.shape[0])
    start = jnp.zeros((keys.shape[0],), bool).at[jnp.cumsum(counts, dtype=I32)].set(True, mode="drop")
    ascends = jnp.concatenate([jnp.ones((1,), bool), keys[1:] > keys[:-1]]) | start
    return (n <= keys.shape[0]) & jnp.all(jnp.where(rank < n, ascends & (keys >= 0), keys == keys[-1]))


def _read_sketch(cursor: _Cursor, like: Sketch) -> Sketch:
    width, size, capacity = like.cells.shape[0], 32 * like.cells.shape[1], like.keys.shape[0]
    if width > MAX_TABLE_WIDTH or max(size, capacity) > MAX_KEYS or 0 in (size, capacity):
        return _read_uncoded(cursor, like)
    lists = like.counts.shape[0]
    head = cursor.take(lists + 2).astype(I32)
    counts, last, used = head[:lists], head[lists], head[lists + 1]
    coder = "released" if like.zero.shape[0] else "best"
    gaps = cursor.bits(key_words(capacity), lambda words: decode_gaps(words, counts, capacity, coder=coder))
    keys = jnp.where(lax.iota(I32, capacity) < jnp.sum(counts, dtype=I32), keys_of(gaps, counts), last)
    levels, zero = (from_words(cursor.take(num_words(part)), part) for part in (like.levels, like.zero))
    read = lambda words: decode_with_table(words, 1 << width, size, count=used)
    symbols = cursor.bits(_level_room(size, width), read)
    return Sketch(levels, counts, keys, pack(symbols.astype(U32), width), zero)


_WRITERS: dict[type, Callable[[Any], Coded]] = {
    Dense: _write_arrays,
    Scaled: _write_arrays,
    Sparse: _write_sparse,
    Quantized: _write_quantized,
    Sketch: _write_sketch,
    Leaves: _write_leaves,
}
_READERS: dict[type, Callable[[_Cursor, Any], Any]] = {
    Dense: _read_arrays,
    Scaled: _read_arrays,
    Sparse: _read_sparse,
    Quantized: _read_quantized,
    Sketch: _read_sketch,
    Leaves: _read_leaves,
}
