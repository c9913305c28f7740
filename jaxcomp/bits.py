"""Three measures of the size of a payload, never mixed.

lane_bytes: what a collective moves, from the shapes alone, exact.
code_bits: what the best code we have for this payload needs, from its content.
Wire bytes are the third: len(wire.encode(payload)) = code_bits / 8, rounded up to whole bytes in
each array, plus the frame.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.payloads import Dense, Leaves, LocalIndices, Quantized, Scaled, Sparse

__all__ = ["code_bits", "lane_bytes"]

Array = jax.Array


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


def code_bits(payload: Any) -> Array | int:
    """Bits of the code that `wire.encode` uses for this payload, without frame and byte padding.

    Dense, Scaled, Quantized: the bits of the arrays (32 codes of w bits fill w words).
    Sparse: m (value bits + w), with m the entries up to the first padding and w the bit length of the
    largest index. With a payload in place of `values`: that payload's bits plus m w. With `LocalIndices`:
    w = 16, m the entries without padding, and 32 bits for each block's count.
    Leaves: the sum of the parts.

    Args:
        payload: concrete or traced.

    Returns:
        A Python int where it follows from the shapes; else a scalar, i32 when the largest
        possible result is below 2^31, f32 otherwise.

    >>> print(code_bits(Sparse(jnp.array([1.0, 2.0, 0.0, 0.0]), jnp.array([1, 5, 9, 9]))))
    108
    """
    if isinstance(payload, Leaves):
        return sum((code_bits(part) for part in payload.leaves), code_bits(payload.dense))
    if isinstance(payload, Sparse):
        return _sparse_bits(payload)
    if isinstance(payload, Dense) and not _is_array(payload.values):
        return code_bits(payload.values)
    if isinstance(payload, Dense | Scaled | Quantized):
        return 8 * lane_bytes(payload)
    raise TypeError(f"code_bits: unknown payload type {type(payload).__name__}")


def _is_array(values: Any) -> bool:
    return jax.tree.structure(values) == jax.tree.structure(0)


def _sparse_bits(payload: Sparse) -> Array | int:
    if isinstance(payload.indices, LocalIndices):
        return _local_bits(payload)
    capacity = payload.indices.shape[-1]
    plain = _is_array(payload.values)
    if capacity == 0:
        return 0 if plain else code_bits(payload.values)
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
    return bits if plain else bits + code_bits(payload.values)


def _local_bits(payload: Sparse) -> Array | int:
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
    return bits if plain else bits + code_bits(payload.values)
