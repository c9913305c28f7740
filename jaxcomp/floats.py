"""Floating-point numbers by their bits: exponents, powers of two, and roundings that every backend keeps.

Within one program XLA may leave out a conversion to a narrower type and back (`xla_allow_excess_precision`, on by
default): compiled for a GPU, x - f32(bf16(x)) is zero. A worker that so computes what its message lost remembers
nothing of it. Here a number is rounded by arithmetic before it is converted: the compiler may remove the conversion,
the value is already rounded.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

__all__ = ["exponent_of", "loses", "power_of_two", "rounded_to", "stored"]

Array = jax.Array


def exponent_of(x: Array) -> Array:
    """e with 2^(e-1) <= x < 2^e for positive normal numbers; the least exponent for what is smaller.

    Read from the bits: `jnp.frexp` loses the types of shard_map under vmap (JAX 0.12.0).

    >>> print(exponent_of(jnp.array([1.0, 0.75, 8.0])))
    [1 0 4]
    """
    info = jnp.finfo(x.dtype)
    bits = lax.bitcast_convert_type(x, jnp.int64 if info.bits == 64 else jnp.int32)
    return ((bits >> info.nmant) + (info.minexp)).astype(jnp.int32)


def power_of_two(exponent: Array, dtype: Any) -> Array:
    """2^exponent for exponents of normal numbers, exactly (exp2 is not, on every backend).

    >>> print(power_of_two(jnp.array([-1, 3]), jnp.float32))
    [0.5 8. ]
    """
    info = jnp.finfo(dtype)
    integer = jnp.int64 if info.bits == 64 else jnp.int32
    bits = (exponent.astype(integer) + (1 - info.minexp)) << info.nmant
    return lax.bitcast_convert_type(bits, dtype)


def loses(source: Any, target: Any) -> bool:
    """Whether some numbers of one floating type are none of another.

    >>> loses(jnp.float32, jnp.bfloat16), loses(jnp.bfloat16, jnp.float32), loses(jnp.bfloat16, jnp.float16)
    (True, False, True)
    """
    a, b = jnp.finfo(source), jnp.finfo(target)
    return a.nmant > b.nmant or a.minexp < b.minexp or a.maxexp > b.maxexp or float(a.max) > float(b.max)


def rounded_to(x: Array, dtype: Any) -> Array:
    """x in another floating type, to nearest, ties to even: `x.astype(dtype)`, also where a compiler removes that
    conversion and the one back.

    Beyond the largest number of the type (after rounding) stand infinities, or NaN where the type has none. Where the
    backend takes subnormal numbers for zero, so are results that are subnormal. The derivative is that of `astype`.

    Reference: Higham 2002, Accuracy and Stability of Numerical Algorithms, section 2.1 and theorem 2.2.

    >>> print(rounded_to(jnp.array([1.0, 1.001, 3.3e4]), jnp.float16))
    [1.000e+00 1.001e+00 3.299e+04]
    """
    dtype = jnp.dtype(dtype)
    if x.dtype == dtype or not loses(x.dtype, dtype):
        return x.astype(dtype)
    return _to_nearest(x, dtype)


def stored(x: Array) -> Array:
    """x, rounded to its own narrow type now. XLA may compute sums and products of narrow floats in f32, and round only
    what it stores: what is computed on from such a result would not be what the next step finds.

    >>> print(stored(jnp.bfloat16(1) + jnp.bfloat16(0.001)))
    1
    """
    return x if x.dtype.itemsize >= 4 else _to_nearest(x, x.dtype)


@functools.partial(jax.jit, static_argnums=1)  # by this name a jaxpr shows that what is converted was rounded before
def _to_nearest(x: Array, dtype: Any) -> Array:
    return _by_arithmetic(x, dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _by_arithmetic(x: Array, dtype: Any) -> Array:
    x = x.astype(jnp.float32) if x.dtype.itemsize < 4 else x
    if x.dtype == jnp.float32 and dtype == jnp.bfloat16:
        return lax.reduce_precision(x, 8, 7).astype(dtype)
    # `reduce_precision` takes subnormal numbers of a type with fewer bits of exponent for zero, and the largest
    # numbers of float8 types without infinities for such.
    info = jnp.finfo(dtype)
    place = jnp.clip(exponent_of(jnp.abs(x)) - 1, info.minexp, info.maxexp) - info.nmant
    x = jnp.round(x * power_of_two(-place, x.dtype)) * power_of_two(place, x.dtype)
    beyond = jnp.asarray(np.asarray(np.inf, dtype), x.dtype)
    x = jnp.where(jnp.abs(x) > jnp.asarray(float(info.max), x.dtype), jnp.copysign(beyond, x), x)
    if dtype.name.endswith("fnuz"):  # whose bits of -0 are NaN
        x = jnp.where(x == 0, jnp.zeros((), x.dtype), x)
    return x.astype(dtype)


@_by_arithmetic.defjvp
def _derivative(dtype: Any, primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    """Derivative of `astype`, which is one; that of `jnp.round` would be zero."""
    return _by_arithmetic(primals[0], dtype), tangents[0].astype(dtype)
