"""Matrices as products of two thin factors: how leaves are matrices, and bases that survive whatever lacks rank.

Used by `power_sgd`. A stack [m, r, ...] of leaves of one shape is m matrices, and all that is done to
them is done to the whole stack at once.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomp.backend import form, rows_times
from jaxcomp.base import Sum
from jaxcomp.hashing import fmix32
from jaxcomp.norms import room

__all__ = [
    "as_matrices",
    "bases_of",
    "factored",
    "factors",
    "limited",
    "matrix_shape",
    "product",
    "transposed_times",
]

Array = jax.Array
FEW = 8  # columns of factors whose product need not be an array of its own


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


# ------------------------------------------------------------------------------------------------
# Products


def _times(m: Array, q: Array) -> Array:
    """M Q of each matrix of a stack, in the precision of the arrays on every backend."""
    rows = rows_times(q.swapaxes(1, 2), m, 2)
    return jnp.matmul(m, q, precision="highest") if rows is None else rows.swapaxes(1, 2)


def transposed_times(m: Array, p: Array) -> Array:
    """P^T M of each matrix of a stack, [m, k, c]. XLA on CPU computes M^T P in seven times the time."""
    rows = rows_times(p.swapaxes(1, 2), m, 1)
    return jnp.einsum("mrk,mrc->mkc", p, m, precision="highest") if rows is None else rows


def product(p: Array, q: Array) -> Array:
    """P Q of each pair [m, r, k], [m, k, c]. Of few columns term by term, so that who reads it can compute it."""
    if p.shape[2] > FEW:
        return _times(p, q)
    return sum(p[:, :, j, None] * q[:, None, j, :] for j in range(1, p.shape[2])) + p[:, :, 0, None] * q[:, None, 0, :]


def limited(x: Array, terms: float) -> Array:
    """x, cut so that the sum of so many of its kind does not overflow."""
    most = jnp.asarray(float(jnp.finfo(x.dtype).max) * room(terms), x.dtype)
    return jnp.clip(x, -most, most)


def factors(stacks: list[Array], start: list[Array], also: Any, size: int) -> Any:
    """One step of subspace iteration on the mean matrices: mean M = P (P^T M) in the span of P.

        P = basis(sum_i M_i basis(Q)),    Q^T = (1/n) sum_i P^T M_i.

    Both bases are multiplied with a power of two at first, `room` for all that is added up, so nothing overflows
    whatever M_i holds, and no entry of M_i need be touched. Q is cut so that the entries of P Q^T are numbers too.

    Args:
        stacks: [m, r, c] each, of this worker, finite.
        start: Q [m, c, k] of the last round, equal on all workers.
        also: arrays that go into the first sum.
        size: number of workers.

    Returns:
        P [m, r, k] with orthonormal columns and Q^T [m, k, c] of each stack, and the sum of `also`.
    """
    units = [room(2 * size * math.sqrt(max(m.shape[1:]))) for m in stacks]  # columns of bases have length 1
    right = zip(stacks, bases_of(start), units, strict=True)
    p, also = yield Sum(([_times(m, q * unit) for m, q, unit in right], also))
    p = bases_of(p)
    left = zip(stacks, p, units, strict=True)
    q = yield Sum([transposed_times(m, each * unit) for m, each, unit in left])
    whole = lambda total, unit: limited(total / (size * unit), 2 * total.shape[1])
    return p, list(map(whole, q, units)), also


# ------------------------------------------------------------------------------------------------
# Bases


BLOCK = 128  # rows of a matrix that stand together where matrices of several shapes are one batch


@jax.jit  # so that it is compiled once where it is called outside
def bases_of(stacks: Sequence[Array]) -> list[Array]:
    """Orthonormal columns that span those of each [r, k] matrix of each stack, k <= r, whatever its rank and scale.

    Gram-Schmidt, column after column, each projected three times onto the complement of those before it: it is then
    orthogonal to working precision. A column is replaced by a pseudo-random one if the first projection leaves no more
    of it than 8 eps of the longest column, or the second takes away more than half of what the first has left: then all
    of it is rounding, or zero. A matrix is divided by its largest
    magnitude before any norm is taken, so squares neither overflow nor vanish. What lacks rank must not be filled up
    with unit vectors or with rounding errors, as a Householder QR does: where the first rows and columns of a matrix
    are zero (of tokens that never occur), an iteration would stay at zero for ever.

    All matrices with one k are cut into blocks of `BLOCK` rows and make one batch: one loop for a whole tree. Its small
    products are sums on TPUs: at full precision each is six products, whose program is long.

    Args:
        stacks: [m, r, k] each, finite.

    Returns:
        [m, r, k] each, in the dtype of its stack, |B^T B - I| of the order of its precision.

    Reference: Daniel, Gragg, Kaufman, Stewart 1976 (replacement, and the test); Giraud, Langou, Rozloznik, van den
    Eshof 2005 (twice is enough).

    >>> x = jnp.array([[[1.0, 1.0, 0.0], [1e-30, 1e-30, 0.0], [0.0, 1e-9, 0.0]]])
    >>> (b,) = bases_of([x])
    >>> print(bool(jnp.allclose(jnp.swapaxes(b, 1, 2) @ b, jnp.eye(3), atol=1e-6)))
    True
    """
    bases = {}
    for kind in dict.fromkeys((x.shape[2], x.dtype) for x in stacks):
        alike = [i for i, x in enumerate(stacks) if (x.shape[2], x.dtype) == kind]
        cut = _ColumnBlocks([stacks[i].shape for i in alike])
        basis = _gram_schmidt(cut.join([_scaled(stacks[i]) for i in alike]), cut)
        bases |= zip(alike, cut.split(basis), strict=True)
    return [bases[i] for i in range(len(stacks))]


def _scaled(x: Array) -> Array:
    largest = jnp.max(jnp.abs(x), axis=(1, 2), keepdims=True, initial=0)
    return x / jnp.where(largest > 0, largest, 1)


class _ColumnBlocks:
    """Columns of n matrices [r, k] of several shapes as one array [b, k, BLOCK], with zeros behind the last rows."""

    def __init__(self, shapes: Sequence[tuple[int, ...]]):
        self.shapes = shapes
        of_stack = [-(-shape[1] // BLOCK) for shape in shapes]
        each = lambda values: np.repeat(values, [shape[0] for shape in shapes])
        counts, rows = each(of_stack), each([shape[1] for shape in shapes])
        first = np.cumsum(counts) - counts
        place = np.arange(max(of_stack))
        blocks = int(counts.sum())
        self.matrix = np.repeat(np.arange(len(counts)), counts)  # [b]: whose block this is
        self.blocks = np.where(place < counts[:, None], first[:, None] + place, blocks)  # [n, most]; b: none
        self.rows = rows[self.matrix] - BLOCK * (np.arange(blocks) - first[self.matrix])  # [b]: from here on

    def join(self, stacks: Sequence[Array]) -> Array:
        cut = lambda x: jnp.pad(x, ((0, 0), (0, -x.shape[1] % BLOCK), (0, 0))).reshape(-1, BLOCK, x.shape[2])
        return jnp.concatenate([cut(x) for x in stacks]).swapaxes(1, 2)

    def split(self, joined: Array) -> list[Array]:
        parts, start = [], 0
        for m, r, k in self.shapes:
            end = start + m * -(-r // BLOCK)
            parts.append(joined[start:end].swapaxes(1, 2).reshape(m, -1, k)[:, :r])
            start = end
        return parts

    def dots(self, u: Array, v: Array) -> Array:
        """Products of columns [b, i, BLOCK] and [b, j, BLOCK] of the same matrix, at each of its blocks: [b, i, j]."""
        product = lambda u, v: jnp.einsum("bix,bjx->bij", u, v, precision="highest")
        by_sums = lambda u, v: jnp.sum(u[:, :, None] * v[:, None], axis=3)
        return self._sum(form(by_sums, on_cpu=product, on_gpu=product)(u, v))

    def lengths(self, v: Array) -> Array:
        """Lengths of columns [b, i, BLOCK]: [b, i, 1]."""
        return jnp.sqrt(self._sum(jnp.sum(v * v, axis=2, keepdims=True)))

    def pseudo_random(self, dtype: Any, j: Any) -> Array:
        """Numbers in (-1, 1), [b, 1, BLOCK]: the same ones every time, and in no relation to anything."""
        shape = (len(self.rows), 1, BLOCK)
        block, row = lax.broadcasted_iota(jnp.uint32, shape, 0), lax.broadcasted_iota(jnp.int32, shape, 2)
        words = fmix32(block * BLOCK + row.astype(jnp.uint32))
        words = fmix32(words + jnp.uint32(0x9E3779B9) * (jnp.asarray(j, jnp.uint32) + jnp.uint32(1)))
        signed = lax.bitcast_convert_type(words, jnp.int32).astype(dtype) * jnp.asarray(2.0**-31, dtype)
        return jnp.where(row < jnp.asarray(self.rows[:, None, None], jnp.int32), signed, jnp.zeros((), dtype))

    def _sum(self, parts: Array) -> Array:
        """Sums [b, i, j] over the blocks of each matrix, in an order that does not vary, handed to each of them."""
        parts = jnp.pad(parts, ((0, 1), (0, 0), (0, 0)))
        return jnp.sum(parts[self.blocks], axis=1)[self.matrix]


def _gram_schmidt(columns: Array, cut: _ColumnBlocks) -> Array:
    def apart(basis: Array, v: Array) -> Array:
        """Columns v without what lies in the span of a basis, whose columns have length one or zero."""
        product = lambda u, basis: jnp.einsum("bij,bjx->bix", u, basis, precision="highest")
        by_sums = lambda u, basis: jnp.sum(u[..., None] * basis[:, None], axis=2)
        return v - form(by_sums, on_cpu=product, on_gpu=product)(cut.dots(v, basis), basis)

    longest = jnp.max(cut.lengths(columns), axis=1, keepdims=True, initial=0)
    least = 8 * jnp.finfo(columns.dtype).eps * longest

    def add(j: Any, basis: Array) -> Array:
        taken = lax.dynamic_slice_in_dim(columns, j, 1, 1)
        v = apart(basis, jnp.concatenate([taken, cut.pseudo_random(taken.dtype, j)], axis=1))
        left = cut.lengths(v)
        v = apart(basis, v / jnp.where(left > 0, left, 1))
        own = (left > least) & (cut.lengths(v) > 0.5)
        v = jnp.where(own[:, :1], v[:, :1], v[:, 1:])
        v = apart(basis, v / cut.lengths(v))
        return lax.dynamic_update_slice_in_dim(basis, v / cut.lengths(v), j, 1)

    zeros = columns - columns  # typed as columns are, where they differ over a mesh axis
    k = columns.shape[1]
    return add(0, zeros) if k == 1 else lax.fori_loop(0, k, add, zeros)
