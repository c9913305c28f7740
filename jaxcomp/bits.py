"""Three measures of the size of a payload, never mixed.

lane_bytes: what a collective moves, from the shapes alone, exact.
code_bits: what the best code we have for this payload needs, from its content.
Wire bytes are the third: len(wire.encode(payload)) = code_bits / 8, rounded up to whole bytes in
each array, plus the frame.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.codes.arrays import histogram
from jaxcomp.codes.huffman import table_bits
from jaxcomp.codes.keys import MAX_KEYS, MAX_TABLE_WIDTH, Gaps, key_bits, plan
from jaxcomp.packing import unpack, width_for
from jaxcomp.payloads import Dense, Leaves, LocalIndices, Quantized, Scaled, Sketch, Sparse
from jaxcomp.select import global_indices

__all__ = ["SketchBits", "code_bits", "lane_bytes", "sketch_bits"]

Array = jax.Array
CODES = ("fixed", "elias", "best")


def lane_bytes(payload: Any) -> int:
    """Bytes that one worker contributes to the collective: sum of size * itemsize of the arrays.

    Args:
        payload: of arrays or of `jax.ShapeDtypeStruct`.

    Returns:
        A Python int: it follows from the shapes.

    >>> lane_bytes(Sparse(jnp.zeros(3), jnp.zeros(3, jnp.int32)))
    24
    """
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(payload))


def code_bits(payload: Any, *, code: str = "fixed") -> Array | int:
    """Bits of the code that `wire.encode` uses for this payload, without frame and byte padding.

    With code="fixed":
    Dense, Scaled, Quantized: the bits of the arrays (32 codes of w bits fill w words).
    Sparse: m (value bits + w), with m the entries up to the first padding and w the bit length of the
    largest index. With a payload in place of `values`: that payload's bits plus m w. With `LocalIndices`:
    w = 16, m the entries without padding, and 32 bits for each block's count.
    Leaves: the sum of the parts.
    Sketch: the parts of `sketch_bits`, which are entropy-coded whatever `code` says.

    With code="best" each Sparse and Quantized takes the shortest that `wire.encode` has: as with "fixed"; its indices
    as a key stream (`jaxcomp.codes`), with m the entries before the padding; its levels as with "elias", or Huffman
    coded, all of them or those that are not zero after a stream of their places.

    With code="elias" there are other bits for
    Quantized: the norms, and for each non-zero level the Elias omega code of its distance from the one
    before (the first counts from -1), a sign and the code of its magnitude;
    Sparse: for each entry before the padding the code of its distance, and its value.

    Args:
        payload: concrete or traced.
        code: "fixed", "elias" or "best", as for `wire.encode`.

    Returns:
        A Python int where it follows from the shapes; else a scalar, i32 when the largest
        possible result is below 2^31, f32 otherwise.

    >>> print(code_bits(Sparse(jnp.array([1.0, 2.0, 0.0, 0.0]), jnp.array([1, 5, 9, 9]))))
    108
    """
    if code not in CODES:
        raise ValueError(f"code_bits: code must be one of {', '.join(CODES)}; got {code!r}")
    if isinstance(payload, Leaves):
        return sum((code_bits(part, code=code) for part in payload.leaves), code_bits(payload.dense, code=code))
    if isinstance(payload, Sparse):
        return _sparse_bits(payload, code)
    if isinstance(payload, Sketch):
        return sum(sketch_bits(payload))
    if isinstance(payload, Dense) and not _is_array(payload.values):
        return code_bits(payload.values, code=code)
    if isinstance(payload, Quantized) and code != "fixed":
        elias = _elias_quantized_bits(payload)
        return elias if code == "elias" else jnp.minimum(8 * lane_bytes(payload), _best_quantized_bits(payload, elias))
    if isinstance(payload, Dense | Scaled | Quantized):
        return 8 * lane_bytes(payload)
    raise TypeError(f"code_bits: unknown payload type {type(payload).__name__}")


def _is_array(values: Any) -> bool:
    return jax.tree.structure(values) == jax.tree.structure(0)


def _sparse_bits(payload: Sparse, code: str) -> Array | int:
    if isinstance(payload.indices, LocalIndices):
        return _local_bits(payload, code)
    if code == "elias":
        return _elias_sparse_bits(payload)
    capacity = payload.indices.shape[-1]
    plain = _is_array(payload.values)
    if capacity == 0:
        return 0 if plain else code_bits(payload.values, code=code)
    # The message ends at the first entry of the padding, which repeats one index up to the end.
    indices = payload.indices
    padding = indices == indices[-1]
    count = jnp.argmax(padding).astype(jnp.int32) + 1
    whole = jnp.sum(padding, dtype=jnp.int32) != capacity - count + 1
    if plain:
        whole |= jnp.any((lax.iota(jnp.int32, capacity) >= count) & (payload.values != 0))
    count = jnp.where(whole, capacity, count)
    width = jnp.maximum(32 - lax.clz(jnp.max(indices).astype(jnp.uint32)).astype(jnp.int32), 1)
    value_bits = 8 * payload.values.dtype.itemsize if plain else 0
    dtype = jnp.int32 if capacity * (value_bits + 32) < 2**31 else jnp.float32
    bits = count.astype(dtype) * (width + value_bits).astype(dtype)
    if code == "best" and capacity <= MAX_KEYS:
        sent, ascend = _entries(payload)
        keys = plan(_gaps(payload.indices, sent)).bits.astype(dtype)
        coded = keys + jnp.sum(sent, dtype=jnp.int32).astype(dtype) * value_bits
        bits = jnp.where(ascend, jnp.minimum(bits, coded), bits)
    return bits if plain else bits + code_bits(payload.values, code=code)


def _entries(payload: Sparse) -> tuple[Array, Array]:
    """Which entries stand before the padding, whose index the header has; whether these ascend."""
    values, indices = payload
    sent = indices != indices[-1]
    if _is_array(values):  # a last entry that is not padding
        sent |= (lax.iota(jnp.int32, indices.shape[-1]) == indices.shape[-1] - 1) & (values[-1] != 0)
    rising = jnp.diff(indices, prepend=jnp.full((1,), -1, indices.dtype)) > 0
    return sent, jnp.all(rising | ~sent)


def _gaps(indices: Array, sent: Array) -> Gaps:
    """Of the indices that are sent, which stand at the front."""
    before = jnp.concatenate([jnp.full((1,), -1, jnp.int32), indices[:-1]])
    return Gaps((indices - before - 1).astype(jnp.uint32), before == -1, sent)


def _local_bits(payload: Sparse, code: str) -> Array | int:
    low, counts = payload.indices
    capacity = low.shape[-1]
    plain = _is_array(payload.values)
    value_bits = 8 * payload.values.dtype.itemsize if plain else 0
    # The message ends after the entries that the blocks count, unless something stands behind them.
    rank = lax.iota(jnp.int32, capacity)
    count = jnp.clip(jnp.sum(counts, dtype=jnp.int32), 0, capacity)
    behind = low != 0
    if plain:
        behind |= payload.values != 0
    count = jnp.where(jnp.any((rank >= count) & behind), capacity, count)
    fixed = 8 * lane_bytes(counts)
    dtype = jnp.int32 if capacity * (value_bits + 16) + fixed < 2**31 else jnp.float32
    bits = count.astype(dtype) * (16 + value_bits) + fixed
    if code == "best" and 0 < capacity <= MAX_KEYS:
        total = jnp.sum(counts, dtype=jnp.int32)
        sent = rank < total
        indices = global_indices(payload.indices, 2**31 - 1)
        rising = jnp.diff(indices, prepend=jnp.full((1,), -1, indices.dtype)) > 0
        canonical = jnp.all(rising | ~sent) & jnp.all(counts >= 0) & (total <= capacity) & ~jnp.any(~sent & behind)
        coded = plan(_gaps(indices, sent)).bits.astype(dtype) + total.astype(dtype) * value_bits
        bits = jnp.where(canonical, jnp.minimum(bits, coded), bits)
    return bits if plain else bits + code_bits(payload.values, code=code)


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
    """What `wire.encode` spends on keys, values and tables."""
    levels, counts, keys, cells, zero = payload
    present = jnp.sum(levels != 0, dtype=jnp.int32)
    tables = levels.shape[0] + 8 * levels.dtype.itemsize * present
    tables += counts.shape[0] * width_for(keys.shape[0] + 1) + 32 * zero.shape[0]
    coder = "released" if zero.shape[0] else "best"
    return SketchBits(key_bits(keys, counts, coder=coder), _cell_bits(cells), tables)


def _cell_bits(cells: Array) -> Array:
    width, size = cells.shape[0], 32 * cells.shape[1]
    symbols = unpack(cells, size).astype(jnp.int32)
    used = jnp.max(jnp.where(symbols != 0, lax.iota(jnp.int32, size) + 1, 0), initial=0)
    fixed = width * used
    if width > MAX_TABLE_WIDTH:
        return fixed
    _, coded = table_bits(histogram(symbols, 1 << width, lax.iota(jnp.int32, size) < used))
    return jnp.minimum(fixed, coded)


# ------------------------------------------------------------------------------------------------
# Huffman coded levels


def _levels(payload: Quantized) -> tuple[Array, Array]:
    """All codes, and the place of the last one before each that is not zero, -1 for none: i32[n]."""
    size = 32 * payload.words.shape[1]
    codes = unpack(payload.words, size).astype(jnp.int32)
    marks = jnp.where(codes != 0, lax.iota(jnp.int32, size), -1)
    return codes, jnp.concatenate([jnp.full((1,), -1, jnp.int32), lax.cummax(marks)[:-1]]) if size else marks


def _best_quantized_bits(payload: Quantized, elias: Array) -> Array:
    width, groups = payload.words.shape
    if width > MAX_TABLE_WIDTH or 32 * groups > MAX_KEYS:
        return elias
    codes, before = _levels(payload)
    counts = histogram(codes, 1 << width, codes >= 0)
    _, dense = table_bits(counts)
    _, nonzeros = table_bits(counts.at[0].set(0))
    gaps = (lax.iota(jnp.int32, codes.shape[0]) - before - 1).astype(jnp.uint32)
    keys = plan(Gaps(gaps, before == -1, codes != 0)).bits
    shortest = jnp.minimum(dense, nonzeros + keys) + 8 * lane_bytes(payload.norms)
    return jnp.minimum(elias, shortest.astype(elias.dtype))


# ------------------------------------------------------------------------------------------------
# Elias omega codes


def _elias_length(n: Array) -> Array:
    """Bits of the omega code of each n >= 1, i32."""
    total = jnp.ones_like(n)
    for _ in range(5):  # 2^31 has 32 digits, 31 has 5, 4 has 3, 2 has 2
        digits = 32 - lax.clz(n.astype(jnp.uint32)).astype(jnp.int32)
        total += jnp.where(n > 1, digits, 0)
        n = jnp.where(n > 1, digits - 1, 1)
    return total


def _total(bits: Array, most: int) -> Array:
    return jnp.sum(bits, dtype=jnp.int32 if most < 2**31 else jnp.float32)


def _elias_quantized_bits(payload: Quantized) -> Array:
    codes, before = _levels(payload)
    size = codes.shape[0]
    place = lax.iota(jnp.int32, size)
    each = _elias_length(jnp.maximum(place - before, 1)) + 1 + _elias_length(jnp.maximum((codes + 1) // 2, 1))
    return _total(jnp.where(codes != 0, each, 0), 80 * size) + 8 * lane_bytes(payload.norms)


def _elias_sparse_bits(payload: Sparse) -> Array | int:
    capacity = payload.indices.shape[-1]
    plain = _is_array(payload.values)
    if capacity == 0:
        return 0 if plain else code_bits(payload.values, code="elias")
    indices = payload.indices
    sent, _ = _entries(payload)
    gaps = jnp.diff(indices, prepend=jnp.full((1,), -1, indices.dtype))
    value_bits = 8 * payload.values.dtype.itemsize if plain else 0
    bits = _total(jnp.where(sent, _elias_length(jnp.maximum(gaps, 1)) + value_bits, 0), capacity * (value_bits + 40))
    return bits if plain else bits + code_bits(payload.values, code="elias")
