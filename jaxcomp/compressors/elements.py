"""Numbers of 2 to 8 bits as codes: small floats as their bit patterns, integers in zigzag form.

A float of p bits of mantissa and least exponent e_0 is k 2^(e - p) with 0 <= k < 2^(p+1) and e >= e_0, where k < 2^p
only for e = e_0. Its code, apart from the sign, is k + ((e - e_0) << p): rounding up to k = 2^(p+1) gives the next
exponent.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.compressors.quantize import unzigzag, zigzag

__all__ = ["E2M1", "E2M3", "E3M2", "E4M3", "E5M2", "INT8", "Elements", "Float", "Integer"]

Array = jax.Array
U32 = jnp.uint32


class Float(NamedTuple):
    """bits: with the sign;  mantissa: p;  least: exponent e_0 of the smallest normal numbers;  top: largest code."""

    bits: int
    mantissa: int
    least: int
    top: int
    lopsided = False  # magnitudes are the same for both signs

    @property
    def largest(self) -> float:
        exponent, rest = divmod(self.top, 1 << self.mantissa)
        return (1 + rest / (1 << self.mantissa)) * 2.0 ** (exponent + self.least - 1)

    @property
    def smallest(self) -> float:
        """The smallest positive number, also the distance between neighbours below 2^(e_0 + 1)."""
        return 2.0 ** (self.least - self.mantissa)

    @property
    def unit(self) -> float:
        """Largest relative error to nearest of normal numbers."""
        return 2.0 ** -(self.mantissa + 1)

    @property
    def variance(self) -> float:
        """Largest relative variance of stochastic rounding among normal numbers."""
        return 4.0**-self.mantissa / (4 * (1 + 2.0**-self.mantissa))

    def ends(self, stochastic: bool) -> tuple[float, float]:
        """The largest magnitudes that do not saturate, on either side."""
        return self.largest, self.largest

    def encode(self, y: Array, noise: Array | None) -> Array:
        """Codes u32[d] of numbers f32[d]; to nearest, ties to even, or at random with noise f32[d] in (0, 1)."""
        word = lax.bitcast_convert_type(y, U32)
        size = word & U32(0x7FFFFFFF)
        exponent = jnp.maximum((size >> U32(23)).astype(jnp.int32) - 127, self.least)
        grid = lax.bitcast_convert_type(((127 + self.mantissa) - exponent) << 23, jnp.float32)
        # Exact: a power of two, and what becomes subnormal is far below one half.
        position = jnp.abs(y) * grid
        k = jnp.round(position) if noise is None else jnp.floor(position + noise)
        code = k.astype(jnp.int32) + ((exponent - self.least) << self.mantissa)
        code = jnp.minimum(code, self.top).astype(U32)
        return code | ((word >> U32(31)) << U32(self.bits - 1))

    def decode(self, codes: Array) -> Array:
        """f32[d]."""
        size = codes & U32((1 << (self.bits - 1)) - 1)
        p, offset = self.mantissa, (126 + self.least) << self.mantissa
        normal = lax.bitcast_convert_type((size + U32(offset)) << U32(23 - p), jnp.float32)
        low = size.astype(jnp.float32) * jnp.float32(self.smallest)
        value = jnp.where(size < U32(1 << p), low, normal)
        return jnp.where(codes >> U32(self.bits - 1) != 0, -value, value)


class Integer(NamedTuple):
    """bits: b;  smallest: the step s;  values k s, -(2^(b-1) - 1) <= k <= 2^(b-1);  lopsided: if not, |k| < 2^(b-1)."""

    bits: int
    smallest: float = 1.0
    lopsided: bool = True

    @property
    def largest(self) -> float:
        return self.smallest * (2 ** (self.bits - 1) - (not self.lopsided))

    @property
    def mantissa(self) -> int:
        """Bits of a value after the first."""
        return self.bits - 2

    def ends(self, stochastic: bool) -> tuple[float, float]:
        """The largest magnitudes that do not saturate, on the longer side and on the shorter one.

        To nearest, what is half a step beyond the last value is rounded to it with no more error than any other entry.
        Only where sides differ is a scale made for that.
        """
        if not self.lopsided:
            return self.largest, self.largest
        half = 0.0 if stochastic else 0.5
        return self.largest + half, self.largest - 1 + half

    def encode(self, y: Array, noise: Array | None) -> Array:
        """Codes u32[d] of numbers f32[d] (see `Float.encode`)."""
        k = y * jnp.float32(1 / self.smallest)
        k = jnp.round(k) if noise is None else jnp.floor(k + noise)
        return zigzag(jnp.clip(k, 1 - 2 ** (self.bits - 1), self.largest / self.smallest).astype(jnp.int32))

    def decode(self, codes: Array) -> Array:
        """f32[d]."""
        return unzigzag(codes).astype(jnp.float32) * jnp.float32(self.smallest)


Elements = Float | Integer

E2M1 = Float(4, 1, 0, 0x7)
E2M3 = Float(6, 3, 0, 0x1F)
E3M2 = Float(6, 2, -2, 0x1F)
E4M3 = Float(8, 3, -6, 0x7E)
E5M2 = Float(8, 2, -14, 0x7B)
INT8 = Integer(8, 2.0**-6, lopsided=False)
