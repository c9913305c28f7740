"""Compressors that send every entry, each by itself: identity, narrower floats, natural compression."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.arrays import bounded, exponent_of, finite, power_of_two, wide
from jaxcomp.base import Compressor, Spec, on_vectors
from jaxcomp.checks import check_like
from jaxcomp.compressors.blocks import BLOCK_SIZE, BlockSizes, block_sizes
from jaxcomp.factories import factory
from jaxcomp.groups import ALONE, WHOLE_BLOCKS, Layout
from jaxcomp.hashing import random_bits
from jaxcomp.packing import pack, unpack
from jaxcomp.payloads import Dense, Quantized, Scaled

__all__ = ["cast", "identity", "natural"]

Array = jax.Array


@factory
def identity() -> Compressor:
    """Sends everything.  C(x) = x,  omega = 0,  alpha = 1.  Payload: `Dense`, the bits of x.

    >>> import jaxcomp as jc
    >>> print(jc.roundtrip(jc.identity(), jnp.array([1.0, 2.0]), key=jax.random.key(0))[0])
    [1. 2.]
    """
    return on_vectors(
        compress=lambda key, x, state: (Dense(finite(x)), state.local),
        decompress=lambda payload, shared, like: payload.values.astype(like.dtype),
        spec=Spec("identity", omega=lambda d: 0.0, alpha=lambda d: 1.0, linear=True, layout=Layout("apart", 0)),
    )


def narrow_type(what: str, dtype: Any) -> Any:
    """The floating type of 8 or 16 bits that a user means; ValueError says what it should have been."""
    try:
        kind = jnp.dtype({"bf16": "bfloat16", "f16": "float16"}.get(dtype, dtype) if isinstance(dtype, str) else dtype)
        info = jnp.finfo(kind)
        ok = info.bits in (8, 16) and info.min == -info.max
    except (TypeError, ValueError):
        kind, ok = dtype, False
    if not ok:
        raise ValueError(f"{what} must be bfloat16, float16 or a float8 type; got {kind}")
    return kind


@factory
def cast(dtype: Any, *, scaled: bool | None = None, block_size: int | None = BLOCK_SIZE) -> Compressor:
    """Rounds each entry to the nearest number of a narrower floating type.

    C(x)_j = s * round_dtype(x_j / s), with s = 1, or, when scaled, the power of two that brings
    max|x| of the entry's block into the top binade of the type. Biased.

    With u the unit roundoff of the type (half the spacing at 1) and t half its smallest
    subnormal over the least that max|x| / s can be, the error of an entry is at most
    max(u |x_j|, t max|x|), so alpha = 1 - u^2 - t^2 m for blocks of m entries. Without a scale alpha = 1 - u^2 where
    the type has the exponent range of f32 (bf16); otherwise alpha is unknown, since
    entries beyond the range saturate and entries below it vanish.

    Args:
        dtype: bfloat16, float16, or one of the float8 types of `jax.numpy`; or its name ("bf16", "f16" for short).
        scaled: send scales (32 bits each). Default: for every type with less exponent range than f32.
        block_size: m, entries for each scale; the last block takes what is left. None: one scale for all.

    Returns:
        Compressor with payload `Dense` (linear: see `exchange.sums`) or, scaled, `Scaled` with scales f32[b], or f32[]
        for one scale.

    Raises:
        ValueError: dtype is not a floating type of 8 or 16 bits, or block_size is not an integer of at least 1.

    Reference: Higham 2002, Accuracy and Stability of Numerical Algorithms, section 2.1.

    >>> import jaxcomp as jc
    >>> x_hat, payload = jc.roundtrip(jc.cast("bfloat16"), jnp.array([1.0, 1.001]), key=jax.random.key(0))
    >>> print(x_hat, jc.lane_bytes(payload))
    [1. 1.] 4
    """
    kind = narrow_type("cast: dtype", dtype)
    info = jnp.finfo(kind)
    full_range = float(info.max) > 1e38
    layout = block_sizes("cast", 1 if block_size is None else None, block_size, None)
    if scaled or (scaled is None and not full_range):
        return _cast_scaled(kind, layout, block_size)
    unit = float(info.eps) / 2

    def decompress(payload, shared, like):
        return bounded(bounded(payload.values.astype(wide(like.dtype))), like.dtype)

    return on_vectors(
        compress=lambda key, x, state: (Dense(bounded(finite(x), kind)), state.local),
        decompress=decompress,
        spec=Spec(
            f"cast({kind.name})",
            omega=None,
            alpha=(lambda d: 1 - unit**2) if full_range else None,
            linear=True,
            layout=Layout(alone=ALONE),
        ),
    )


def _cast_scaled(kind: Any, layout: Callable[[int], BlockSizes], block_size: int | None) -> Compressor:
    info = jnp.finfo(kind)
    top = math.frexp(float(info.max))[1] - 1  # max|x| of a block comes to [2^(top-1), 2^top), below the largest
    unit, tiny = float(info.eps) / 2, float(info.smallest_subnormal) / 2 / 2.0 ** (top - 1)

    def each(cut: BlockSizes, values: Array, scale: Array) -> Array:
        """Values times the scale of their block."""
        scale = scale.reshape(-1).astype(values.dtype)
        if cut.tail not in (0, cut.length) or cut.count <= 1:
            return values * cut.spread(scale)
        return (values.reshape(cut.count, cut.length) * scale[:, None]).reshape(-1)

    def compress(key, x, state):
        x, cut = x.astype(wide(x.dtype)), layout(x.shape[0])
        largest = cut.norms(x, math.inf)
        largest = jnp.max(largest, initial=0) if block_size is None else largest
        exponent = jnp.clip(exponent_of(largest) - top, -126, 126)
        scaled = each(cut, finite(x), power_of_two(-exponent, jnp.float32))
        return Scaled(bounded(scaled, kind), power_of_two(exponent, jnp.float32)), state.local

    def decompress(payload, shared, like):
        values = payload.values.astype(wide(like.dtype))
        return bounded(bounded(each(layout(like.size), values, payload.scale)), like.dtype)

    return on_vectors(
        compress=compress,
        decompress=decompress,
        spec=Spec(
            f"cast({kind.name}, scaled{'' if block_size == BLOCK_SIZE else f', block_size={block_size}'})",
            omega=None,
            alpha=lambda d: 1 - unit**2 - tiny**2 * layout(d).largest,
            linear=False,
            layout=WHOLE_BLOCKS,
            entrywise=True,
        ),
    )


@factory
def natural() -> Compressor:
    """Natural compression: rounds each magnitude to one of the two nearest powers of two, unbiased.

    For 2^a <= |x_j| < 2^(a+1):  C(x)_j = sign(x_j) 2^(a+1) with probability |x_j| 2^-a - 1,
    else sign(x_j) 2^a.   omega = 1/8.

    Adding 23 random bits to the mantissa and dropping it does exactly this. Sign and exponent
    travel: 9 bits per entry, `Quantized` without norms. Magnitudes above 2^127 are sent as 2^127;
    those below 2^-126 count as zero.

    Reference: Horvath, Ho, Horvath, Sahu, Canini, Richtarik 2019, definition 1 and theorem 1.

    >>> import jaxcomp as jc
    >>> print(jc.roundtrip(jc.natural(), jnp.array([4.0, -0.5, 0.0]), key=jax.random.key(0))[0])
    [ 4.  -0.5  0. ]
    """
    u32 = jnp.uint32

    def compress(key, x, state):
        x = jnp.clip(finite(x).astype(jnp.float32), -(2.0**127), 2.0**127)
        bits = lax.bitcast_convert_type(x, u32)
        magnitude = bits & u32(0x7FFFFFFF)
        magnitude = jnp.where(magnitude < u32(1 << 23), u32(0), magnitude)
        rounded = (magnitude + (random_bits(key, x.shape[0]) >> u32(9))) >> u32(23)
        exponent = jnp.where(magnitude == 0, u32(0), rounded)
        sign = jnp.where(exponent == 0, u32(0), bits >> u32(31))
        return Quantized(jnp.zeros((0,), jnp.float32), pack((sign << u32(8)) | exponent, 9)), state.local

    def decompress(payload, shared, like):
        check_like("natural", payload.words.shape, (9, -(-like.size // 32)))
        codes = unpack(payload.words, like.size)
        bits = ((codes >> u32(8)) << u32(31)) | ((codes & u32(0xFF)) << u32(23))
        return bounded(lax.bitcast_convert_type(bits, jnp.float32), like.dtype)

    return on_vectors(
        compress=compress,
        decompress=decompress,
        spec=Spec(
            "natural",
            lambda d: 1 / 8,
            alpha=lambda d: 1 - 1 / 8,
            linear=False,
            layout=WHOLE_BLOCKS,
            entrywise=True,
        ),
    )
