"""Matrices as products of two thin factors: how leaves are matrices, and bases that survive whatever lacks rank.

`power_sgd` and `dion` share this. A stack [m, r, ...] of leaves of one shape is m matrices, and all that is done to
them is done to the whole stack at once.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.compressors.vector import is_whole
from jaxcomp.hashing import fmix32
from jaxcomp.layout import Parts

__all__ = [
    "as_matrices",
    "basis_of",
    "check_low_rank",
    "factored",
    "factors",
    "matrix_shape",
    "ranks_of",
    "stacks_of",
    "times",
    "transposed_times",
]

Array = jax.Array


# ------------------------------------------------------------------------------------------------
# Leaves as matrices


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of a leaf as a matrix: cut between those two axes where rows + columns are fewest.

    A matrix stays what it is, a kernel [out, in, 3, 3] has `out` rows, and a kernel [3, 3, in, out] has `out` columns.

    >>> matrix_shape((64, 16, 3, 3)), matrix_shape((3, 3, 16, 64)), matrix_shape((5,))
    ((64, 144), (144, 64), (5, 1))
    """
    cuts = [(math.prod(shape[:i]), math.prod(shape[i:])) for i in range(1, max(2, len(shape)))]
    return min(cuts, key=sum)


def as_matrices(x: Array) -> Array:
    """[m, r, ...] as [m, rows, columns]."""
    return x.reshape(x.shape[0], *matrix_shape(x.shape[1:]))


def factored(shape: tuple[int, ...], rank: int, min_ratio: float) -> bool:
    """Whether two factors of a leaf have fewer entries than one in `min_ratio` of its own."""
    rows, columns = matrix_shape(shape)
    return min(rank, rows, columns) * (rows + columns) * min_ratio < rows * columns


def stacks_of(parts: Any) -> Parts:
    """A bare vector, which no factors can hold, as `Parts` with a stack of one row."""
    if isinstance(parts, Parts):
        return parts
    if hasattr(parts, "reshape"):
        return Parts((), (parts[None],))
    like = jax.ShapeDtypeStruct
    return Parts((), (like((1, *parts.shape), parts.dtype),))


def ranks_of(name: str, rank: Any) -> tuple[tuple[int, int], ...]:
    """A rank, or {first round: rank}, as pairs in the order of the rounds, the first of which begins at 0.

    Raises:
        ValueError: a rank below 1, no rank for round 0.
    """
    pairs = sorted(rank.items()) if isinstance(rank, Mapping) else [(0, rank)]
    for start, value in pairs:
        if not is_whole(value):
            raise ValueError(f"{name}: rank must be an integer of at least 1; got {value}")
        if not is_whole(start, 0):
            raise ValueError(f"{name}: a schedule of ranks is {{round: rank}}, with rounds of at least 0; got {start}")
    if not pairs or pairs[0][0] != 0:
        raise ValueError(f"{name}: a schedule of ranks needs one for round 0; got {dict(pairs)}")
    return tuple((int(start), int(value)) for start, value in pairs)


def check_low_rank(name: str, min_ratio: float, start: int, dense_below: int) -> None:
    """Raises ValueError for what is out of range."""
    if not 0 < min_ratio < math.inf:
        raise ValueError(f"{name}: min_ratio must be positive and finite; got {min_ratio}")
    for what, value in (("start", start), ("dense_below", dense_below)):
        if not is_whole(value, 0):
            raise ValueError(f"{name}: {what} must be an integer of at least 0; got {value}")


# ------------------------------------------------------------------------------------------------
# Products


def times(m: Array, q: Array) -> Array:
    """M Q of each matrix of a stack, in the precision of the arrays on every backend."""
    return jnp.matmul(m, q, precision="highest")


def transposed_times(m: Array, p: Array) -> Array:
    """M^T P of each matrix of a stack."""
    return jnp.einsum("mrc,mrk->mck", m, p, precision="highest")


def factors(stacks: list[Array], start: list[Array], also: Any, exchange: Any) -> tuple[list, list, Any]:
    """One step of subspace iteration on the mean matrices: mean M = P (M^T P)^T in the span of P.

        P = basis(sum_i M_i basis(Q)),    Q = (1/n) sum_i M_i^T P.

    Entries beyond 2^-32 of the largest number are cut there, so that no product and no sum overflows. What is cut is
    not lost: it stays in the memory of the caller.

    Args:
        stacks: [m, r, c] each, of this worker.
        start: Q [m, c, k] of the last round, equal on all workers.
        also: arrays that go into the first sum.
        exchange: `base.Exchange`.

    Returns:
        P [m, r, k] with orthonormal columns and Q [m, c, k] of each stack, and the sum of `also`.
    """
    limit = lambda x: jnp.finfo(x.dtype).max * 2.0**-32
    stacks = [jnp.clip(x, -limit(x), limit(x)) for x in stacks]
    p, also = exchange.sum(([times(m, basis_of(q)) for m, q in zip(stacks, start, strict=True)], also))
    p = [basis_of(each) for each in p]
    q = exchange.sum([transposed_times(m, each) for m, each in zip(stacks, p, strict=True)])
    return p, [total / exchange.size for total in q], also


# ------------------------------------------------------------------------------------------------
# Bases


@jax.jit  # so that it is compiled once where it is called outside
def basis_of(x: Array) -> Array:
    """Orthonormal columns that span those of each [r, k] matrix of a stack, k <= r, whatever its rank and scale.

    Gram-Schmidt, column after column, each projected three times onto the complement of those before it: it is then
    orthogonal to working precision. A column is replaced by a pseudo-random one if the first projection leaves no more
    of it than 8 eps of the longest column, or the second takes away more than half of what the first has left: then all
    of it is rounding, or zero. A matrix is divided by its largest
    magnitude before any norm is taken, so squares neither overflow nor vanish. What lacks rank must not be filled up
    with unit vectors or with rounding errors, as a Householder QR does: where the first rows and columns of a matrix
    are zero (of tokens that never occur), an iteration would stay at zero for ever.

    Args:
        x: [m, r, k], finite.

    Returns:
        [m, r, k] in the dtype of x, |B^T B - I| of the order of its precision.

    Reference: Daniel, Gragg, Kaufman, Stewart 1976 (replacement, and the test); Giraud, Langou, Rozloznik, van den
    Eshof 2005 (twice is enough).

    >>> x = jnp.array([[[1.0, 1.0, 0.0], [1e-30, 1e-30, 0.0], [0.0, 1e-9, 0.0]]])
    >>> b = basis_of(x)
    >>> print(bool(jnp.allclose(jnp.swapaxes(b, 1, 2) @ b, jnp.eye(3), atol=1e-6)))
    True
    """
    rows = jnp.swapaxes(x, 1, 2)  # columns as rows [m, k, r], which are contiguous
    largest = jnp.max(jnp.abs(rows), axis=(1, 2), keepdims=True, initial=0)
    rows = rows / jnp.where(largest > 0, largest, 1)
    least = 8 * jnp.finfo(x.dtype).eps * jnp.max(_length(rows), axis=1, keepdims=True, initial=0)

    def add(j: Any, basis: Array) -> Array:
        taken = lax.dynamic_slice_in_dim(rows, j, 1, 1)
        v = _apart(basis, jnp.concatenate([taken, _pseudo_random(x, j)], axis=1))
        left = _length(v)
        v = _apart(basis, v / jnp.where(left > 0, left, 1))
        apart = (left > least) & (_length(v) > 0.5)
        v = jnp.where(apart[:, :1], v[:, :1], v[:, 1:])
        v = _apart(basis, v / _length(v))
        return lax.dynamic_update_slice_in_dim(basis, v / _length(v), j, 1)

    zeros = rows - rows  # typed as x is, where it differs over a mesh axis
    basis = add(0, zeros) if rows.shape[1] == 1 else lax.fori_loop(0, rows.shape[1], add, zeros)
    return jnp.swapaxes(basis, 1, 2)


def _apart(basis: Array, v: Array) -> Array:
    """Rows v [m, j, r] without what lies in the span of the rows of a basis [m, k, r], each of length one or zero."""
    along = jnp.einsum("mjr,mkr->mjk", v, basis, precision="highest")
    return v - jnp.einsum("mjk,mkr->mjr", along, basis, precision="highest")


def _length(v: Array) -> Array:
    return jnp.sqrt(jnp.sum(v * v, axis=-1, keepdims=True))


def _pseudo_random(x: Array, j: Any) -> Array:
    """Numbers in (-1, 1), [m, 1, r] for x [m, r, k]: the same ones every time, and in no relation to anything."""
    places = lax.iota(jnp.uint32, x.shape[0] * x.shape[1]).reshape(x.shape[0], 1, x.shape[1])
    words = fmix32(fmix32(places) + jnp.uint32(0x9E3779B9) * (jnp.asarray(j, jnp.uint32) + jnp.uint32(1)))
    signed = lax.bitcast_convert_type(words, jnp.int32).astype(x.dtype)
    return signed * jnp.asarray(2.0**-31, x.dtype)
