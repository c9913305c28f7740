"""Norms that neither overflow, nor underflow, nor meet a NaN, at the price of a plain reduction.

On CPU a reduction over `where(isfinite(x), x, 0)` takes ten times as long as one over x. The finite case is therefore
tested apart (`backend.all_finite`), and the slow form stands behind a `lax.cond` that is hardly ever taken. On
accelerators arithmetic costs nothing beside reading x, and a condition does: there nothing is tested.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.arrays import bounded, exponent_of, finite, power_of_two, wide
from jaxcomp.backend import all_finite, along_rows, fast_if, form, in_parts, largest_finite

__all__ = ["block_norms", "finite_sizes", "max_abs", "norms_along", "room"]

Array = jax.Array
MARGIN = 2.0**40  # of a sum of m squares that is so many least normal numbers at most the m 2^-40-th part was lost


def max_abs(rows: Array) -> Array:
    """Largest finite magnitude along the last axis, 0 for an empty one."""
    return _largest(rows)[0]


def _largest(rows: Array) -> tuple[Array, Array]:
    """Largest finite magnitude of each row, and whether all entries of all rows are finite."""
    if rows.shape[-1] == 0:
        return jnp.zeros(rows.shape[:-1], rows.dtype), jnp.array(True)
    peaks = jnp.max(jnp.abs(rows), axis=-1)
    clean = all_finite(rows, peaks)
    return fast_if(clean, lambda rows, peaks: peaks, lambda rows, _: largest_finite(rows), rows, peaks), clean


def room(terms: float) -> float:
    """The share of the largest number, a power of two, of which so many terms add up to no more than that number."""
    return 2.0 ** -math.ceil(math.log2(terms))


def block_norms(rows: Array, order: float) -> Array:
    """Norm of each row, of its finite entries.

    Args:
        rows: f32 or f64[b, m].
        order: 2 or inf.

    Returns:
        float[b]. Where squares of the entries would overflow or vanish, those of scaled ones are added. A norm beyond
        the largest number of the dtype saturates; one that is no normal number is zero. On CPUs that of a row without a
        normal number is zero, too; accelerators may add up its subnormal numbers.

    >>> print(block_norms(jnp.array([[3.0, 4.0], [0.0, 0.0]]), 2))
    [5. 0.]
    """
    if order != 2 or rows.shape[-1] == 0:
        return _scaled_norms(rows, order)
    return form(_norms_in_three_scales, on_cpu=_norms_on_cpu)(rows)


def _norms_on_cpu(rows: Array) -> Array:
    """One pass where no square can have overflowed or vanished; a NaN anywhere fails the test."""
    info = jnp.finfo(rows.dtype)
    squares = jnp.sum(jnp.square(rows), axis=-1)
    plain = jnp.all((squares > info.tiny * MARGIN) & (squares < info.max))
    return fast_if(plain, lambda _, squares: jnp.sqrt(squares), lambda rows, _: _scaled_norms(rows, 2), rows, squares)


def norms_along(along: Callable[..., Array], x: Array, order: float) -> Array:
    """Norms of blocks, of their finite entries, as an accelerator computes them.

    Args:
        along: (jnp.sum or jnp.max, entries) -> a number of each block, in place of `backend.along_rows`.
        order: 2 or inf.
    """
    if order == 2:
        return _norms_in_three_scales(x, along)
    largest = along(jnp.max, finite_sizes(x))
    return jnp.where(largest < jnp.finfo(x.dtype).tiny, jnp.zeros((), x.dtype), largest)


def _norms_in_three_scales(rows: Array, along: Callable[..., Array] = along_rows) -> Array:
    """One pass without a condition: squares are added three times, of entries as they are, and made smaller and larger
    by 2^(3/4 e), where 2^e is above all numbers. Of the three sums each row takes one that neither overflows nor loses
    what counts.

    Reference: Blue 1978, A portable Fortran program to find the Euclidean norm of a vector, where each entry is added
    to one of three sums.
    """
    dtype, size = rows.dtype, finite_sizes(rows.astype(wide(rows.dtype)))
    info = jnp.finfo(size.dtype)
    scale, most = 2.0 ** (3 * info.maxexp // 4), 2.0 ** (info.maxexp // 2 - 2)
    # The minimum keeps XLA from rewriting (x s)^2 as x^2 s^2. A sum that no row takes may overflow.
    squares = lambda scale: along(jnp.sum, jnp.square(jnp.minimum(size * jnp.asarray(scale, size.dtype), most)))
    small, plain, large = squares(scale), along(jnp.sum, jnp.square(size)), squares(1 / scale)
    is_small, is_large = plain <= info.tiny * MARGIN, plain >= info.max
    root = jnp.sqrt(jnp.where(is_small, small, jnp.where(is_large, large, plain)))
    unit = jnp.where(is_small, 1 / scale, jnp.where(is_large, scale, 1.0)).astype(size.dtype)
    norms = unit * jnp.minimum(root, info.max / unit)
    return bounded(jnp.where(norms < info.tiny, jnp.zeros((), size.dtype), norms), dtype)


def finite_sizes(x: Array) -> Array:
    """|x|, and zero for what is not finite. By its bits: XLA for GPUs would make an array of what is compared."""
    info = jnp.finfo(x.dtype)
    bits = lax.bitcast_convert_type(jnp.abs(x), jnp.dtype(f"uint{info.bits}"))
    one_if_not = ((bits >> info.nmant) + 1) >> (info.bits - info.nmant - 1)  # all bits of its exponent are ones
    return lax.bitcast_convert_type(bits & (one_if_not - 1), x.dtype)


def _scaled_norms(rows: Array, order: float) -> Array:
    info = jnp.finfo(rows.dtype)
    largest, _ = _largest(rows)
    zero = largest < info.tiny
    if order == 2 and rows.shape[-1] > 0:
        exponent = jnp.clip(exponent_of(largest), info.minexp, -info.minexp)
        scale = power_of_two(-exponent, rows.dtype)
        # |x * scale| is below 4 anyway. The clip keeps XLA from rewriting (x s)^2 as x^2 s^2, which
        # overflows (seen with constant x; likewise (x / s)^2 as x^2 / s^2).
        square = lambda x, scale: jnp.sum(jnp.square(jnp.clip(finite(x) * scale[:, None], -4, 4)), axis=-1)
        squares = in_parts(square, largest, rows, scale)
        unit = power_of_two(exponent, rows.dtype)
        largest = unit * jnp.minimum(jnp.sqrt(squares), info.max / unit)
    return jnp.where(zero, jnp.zeros((), rows.dtype), largest)
