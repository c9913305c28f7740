"""Norms that neither overflow, nor underflow, nor meet a NaN, at the price of a plain reduction.

On CPU a reduction over `where(isfinite(x), x, 0)` takes ten times as long as one over x. The
finite case is therefore tested on the result (a NaN or an infinity anywhere makes max|x| not
finite) and the slow form stands behind a `lax.cond` that is hardly ever taken.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.base import finite

__all__ = ["Norm", "block_norms", "max_abs"]

Array = jax.Array


class Norm(NamedTuple):
    """For each row of a matrix: norm = largest * relative, with `largest` = 1 for a zero row.

    |x| / norm is to be computed as |x| / largest / relative, which stays in range for every
    norm, large or small. Rows whose largest magnitude is below the smallest normal number of the
    dtype count as zero.
    """

    norm: Array
    largest: Array
    relative: Array


def max_abs(rows: Array) -> Array:
    """Largest finite magnitude along the last axis, 0 for an empty one."""
    if rows.shape[-1] == 0:
        return jnp.zeros(rows.shape[:-1], rows.dtype)
    largest = jnp.max(jnp.abs(rows), axis=-1)
    return lax.cond(
        jnp.all(jnp.isfinite(largest)),
        lambda rows, largest: largest,
        lambda rows, largest: jnp.max(jnp.abs(finite(rows)), axis=-1),
        rows,
        largest,
    )


def block_norms(rows: Array, order: float) -> Norm:
    """Norm of each row, of the finite entries.

    Args:
        rows: float[b, m].
        order: 2 or inf.

    Returns:
        `Norm` of float[b] arrays. A norm beyond the largest number of the dtype saturates.

    >>> print(block_norms(jnp.array([[3.0, 4.0], [0.0, 0.0]]), 2).norm)
    [5. 0.]
    """
    info = jnp.finfo(rows.dtype)
    largest = max_abs(rows)
    zero = largest < info.tiny
    largest = jnp.where(zero, jnp.ones((), rows.dtype), largest)
    relative = jnp.ones_like(largest)
    if order == 2 and rows.shape[-1] > 0:
        square = lambda x: jnp.sum(jnp.square(x / largest[:, None]), axis=-1)  # noqa: E731
        squares = square(rows)
        squares = lax.cond(
            jnp.all(jnp.isfinite(squares)),
            lambda rows, squares: squares,
            lambda rows, squares: square(finite(rows)),
            rows,
            squares,
        )
        relative = jnp.where(zero, relative, jnp.sqrt(squares))
    norm = jnp.where(zero, jnp.zeros((), rows.dtype), largest * jnp.minimum(relative, info.max / largest))
    return Norm(norm, largest, relative)
