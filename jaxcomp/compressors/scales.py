"""The scales of blocks: how they follow from the largest entries, in which type they travel, how they are read."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.arrays import bounded, power_of_two, rounded_to
from jaxcomp.compressors.elements import E4M3, Elements
from jaxcomp.compressors.quantize import up_to_bfloat16

__all__ = ["SCALES", "BlockScales", "Scale"]

Array = jax.Array
I32, U32 = jnp.int32, jnp.uint32
TINY = float(jnp.finfo(jnp.float32).tiny)
Extremes = tuple[Array, Array]


class BlockScales(NamedTuple):
    """norms: scales as they are sent;  scale: what they are, f32[count], or i32[count] exponents of powers of two;
    factor: of the array, f32[1], or None."""

    norms: Array
    scale: Array
    factor: Array | None = None


class Scale(NamedTuple):
    """name: see `block_scaled`;  released: the rule of a release;  best: the next smaller scale is tried as well."""

    name: str
    released: bool = False
    best: bool = False

    @property
    def saturates(self) -> bool:
        """Whether elements may be too small for what they stand for."""
        return self.released or self.best

    @property
    def power(self) -> bool:
        """Whether scales are powers of two, 2^-127 to 2^127, which are known by their exponents."""
        return self.name.startswith("e8m0")

    def of(self, extremes: Extremes, elements: Elements, stochastic: bool) -> BlockScales:
        """The scales of blocks with these largest entries, and minus the smallest; 0 for a block without a scale.

        For powers of two the first of both is the largest magnitude, which may be subnormal.
        """
        if self.power:
            return _e8m0(extremes[0], elements.ends(stochastic)[1], self.released)
        if self.name.startswith("e4m3"):
            return _e4m3(jnp.maximum(*extremes), elements.ends(stochastic)[1], elements.mantissa, self.released)
        return _plain(extremes, elements, stochastic, self.name == "bfloat16")

    def lower(self, made: BlockScales) -> BlockScales:
        """The next smaller scales, where there are any."""
        byte = lax.bitcast_convert_type(made.norms, jnp.uint8)
        less = jnp.maximum(byte, jnp.uint8(1)) - jnp.uint8(1)
        norms = lax.bitcast_convert_type(less, made.norms.dtype)
        return BlockScales(norms, self.read(norms, made.factor), made.factor)

    def read(self, norms: Array, factor: Array | None) -> Array:
        """The scales that were sent, as `BlockScales.scale` has them."""
        if self.power:
            return lax.bitcast_convert_type(norms, jnp.uint8).astype(I32) - 127
        if self.name.startswith("e4m3"):
            values = E4M3.decode(lax.bitcast_convert_type(norms, jnp.uint8).astype(U32))
            return values if factor is None else values * factor
        return norms.astype(jnp.float32)

    def divided(self, x: Array, scale: Array) -> Array:
        """x / scale of finite x, f32; zero where a block has no scale. Exact for powers of two."""
        if self.power:
            return _over_power(x, scale)
        # By entry: instead of dividing by the scale of a block, XLA would multiply by its inverse, which is rounded.
        divisor = jnp.where((scale == 0) | (x == 0), jnp.float32(1), scale)
        return jnp.where(scale == 0, jnp.float32(0), x / divisor)

    def times(self, element: Array, scale: Array) -> Array:
        """element scale, f32, at most the largest number. Exact: an element has so few bits."""
        return _times_power(element, scale) if self.power else bounded(element * scale)

    def reach(self, elements: Elements, stochastic: bool) -> tuple[float, float]:
        """The least max|x| / s of a block, and the largest relative error of what saturates."""
        end = elements.ends(stochastic)[1]
        if self.name in ("e8m0", "e8m0-best"):
            return end / 2, 0.0
        if self.name == "e8m0-floor":
            top = 2.0 ** math.floor(math.log2(end))
            return top, 1 - end / (2 * top)
        if self.name in ("e4m3", "e4m3-best"):
            return end / (1 + 2.0**-3), 0.0
        if self.name == "e4m3-nearest":
            return end / (1 + 2.0**-4), 1 - 1 / (1 + 2.0**-4)
        return end / (1 + (2.0**-7 if self.name == "bfloat16" else 2.0 ** -(22 - elements.mantissa))), 0.0

    def least_share(self, elements: Elements, stochastic: bool) -> float:
        """The least scale that a block may have, over max|x| of the array; 0 if there is none.

        To nearest, scales of up to 8 of the smallest steps are off by up to half a step: as much as a scale of that
        size, and what saturates.
        """
        if not self.name.startswith("e4m3"):
            return 0.0
        end = elements.ends(stochastic)[1]
        least = E4M3.smallest / (E4M3.largest * end)
        return least * (math.hypot(8, end / elements.smallest) if self.released else 1)


def _up(x: Array, bits: int) -> Array:
    """The next f32 with so many zeros at its end that is not smaller, at most the largest; 0 below normal numbers."""
    spare = U32((1 << bits) - 1)
    word = (lax.bitcast_convert_type(x, U32) + spare) & ~spare
    largest = jnp.float32(jnp.finfo(jnp.float32).max)
    up = jnp.minimum(lax.bitcast_convert_type(word, jnp.float32), largest)
    return jnp.where(x < jnp.float32(TINY), jnp.float32(0), up)


def _e8m0(peak: Array, end: float, floor: bool) -> BlockScales:
    """The least E with peak <= end 2^E, from the bits; or floor(log2 peak) - floor(log2 end)."""
    mantissa, top = math.frexp(end)
    above = 0 if floor else (1 << 23) - 1 - int((2 * mantissa - 1) * 2**23)
    bits, shift = _normal(lax.bitcast_convert_type(peak, I32))
    exponent = jnp.clip(((bits + above) >> 23) - shift - 127 - (top - 1), -127, 127)
    byte = (exponent + 127).astype(jnp.uint8)
    return BlockScales(lax.bitcast_convert_type(byte, jnp.float8_e8m0fnu), exponent)


# Products with powers of two, by the bits: a scale may be subnormal (2^-127), and so may entries and what they are
# decoded to, which many backends take for zero in arithmetic, conversions and comparisons.


def _normal(size: Array) -> tuple[Array, Array]:
    """A positive f32 x by its bits i32: bits of a normal number y (or zero), and s with x = y 2^-s."""
    small = size < I32(1 << 23)  # x = size 2^-149
    bits = lax.bitcast_convert_type(size.astype(jnp.float32), I32)
    return jnp.where(small, bits, size), jnp.where(small, I32(149), I32(0))


def _over_power(x: Array, exponent: Array) -> Array:
    """x 2^-exponent, f32; zero with the sign of x where that would be subnormal."""
    word = lax.bitcast_convert_type(x, I32)
    bits, shift = _normal(word & I32(0x7FFFFFFF))
    less = exponent + shift
    size = jnp.where((bits >> 23) > less, bits - (less << 23), I32(0))
    return lax.bitcast_convert_type(size | (word & I32(-(2**31))), jnp.float32)


def _times_power(y: Array, exponent: Array) -> Array:
    """y 2^exponent, f32, of y with at most 16 bits before and 22 after the point; NaN for the exponent of NaN, 128."""
    word = lax.bitcast_convert_type(y, U32)
    sign = word & U32(1 << 31)
    normal = (word ^ sign) + (exponent.astype(U32) << U32(23))
    normal = jnp.where((normal >> U32(23)).astype(I32) > 254, U32(0x7F7FFFFF), normal)  # TPUs have no unsigned minimum
    steps = jnp.abs(y) * power_of_two(jnp.minimum(exponent + 149, 127), jnp.float32)  # of 2^-149
    small = steps < 2.0**23
    size = jnp.where(small, jnp.where(small, steps, 0).astype(U32), normal)
    return lax.bitcast_convert_type(jnp.where(exponent > 127, U32(0x7FC00000), size | sign), jnp.float32)


def _e4m3(peak: Array, end: float, mantissa: int, nearest: bool) -> BlockScales:
    """Two levels: one f32 for the array, with which the largest block has the largest e4m3 number."""
    whole = jnp.max(peak, initial=0) / jnp.float32(end) / jnp.float32(E4M3.largest)
    factor = _up(whole, E4M3.mantissa + mantissa + 2)
    ratio = peak / jnp.float32(end) / jnp.where(factor == 0, jnp.float32(1), factor)
    ratio = jnp.where(factor == 0, jnp.float32(0), ratio)
    codes = E4M3.encode(ratio, None if nearest else jnp.zeros_like(ratio))
    if not nearest:  # down so far
        codes = jnp.minimum(codes + (E4M3.decode(codes) < ratio).astype(U32), U32(E4M3.top))
    norms = lax.bitcast_convert_type(codes.astype(jnp.uint8), jnp.float8_e4m3fn)
    return BlockScales(norms, E4M3.decode(codes) * factor, factor.reshape(1))


def _plain(extremes: Extremes, elements: Elements, stochastic: bool, short: bool) -> BlockScales:
    """max|x| over the largest element; for integers each side over its end, signed like the longer side."""
    most, least = extremes
    if elements.lopsided:
        far, near = elements.ends(stochastic)
        longer, shorter = jnp.maximum(most, least), jnp.minimum(most, least)
        size = jnp.maximum(longer / jnp.float32(far), shorter / jnp.float32(near))
    else:
        size = jnp.maximum(most, least) / jnp.float32(elements.largest)
    size = _up(size, 16 if short else elements.mantissa + 1)
    size = up_to_bfloat16(size) if short else size
    signed = jnp.where(least > most, -size, size) if elements.lopsided else size
    return BlockScales(rounded_to(signed, jnp.bfloat16 if short else jnp.float32), signed)


SCALES: dict[str, Scale] = {
    scale.name: scale
    for scale in (
        Scale("e8m0"),
        Scale("e8m0-floor", released=True),
        Scale("e8m0-best", best=True),
        Scale("e4m3"),
        Scale("e4m3-nearest", released=True),
        Scale("e4m3-best", best=True),
        Scale("bfloat16"),
        Scale("float32"),
    )
}
