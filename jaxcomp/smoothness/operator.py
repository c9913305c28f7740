"""Smoothness matrices as operators: L^(1/2) v, pseudo-inverse root, diagonal, largest eigenvalue.

Each form is a NamedTuple of arrays, so it is a pytree: it travels as an argument or in a state, and
its methods run inside jit. Every form M satisfies M >= L in the Loewner order, and any such M is a
valid smoothness matrix, so approximations cost step size and never correctness.

A stack of n operators (one per worker) has a leading axis of n on each array; `stack` makes it,
`row` takes one out. Methods act on one operator and one vector; use `jax.vmap` for a stack.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

__all__ = [
    "Blocks",
    "DenseMatrix",
    "Diagonal",
    "LowRank",
    "Operator",
    "Softmax",
    "blocks_of",
    "dense_of",
    "diagonal_of",
    "eigenbasis",
    "is_stacked",
    "pseudo_roots",
    "rotate",
    "row",
    "stack",
]

Array = Any


def _times(matrix: Array, v: Array) -> Array:
    """The product, in the precision of the arrays on every backend (the default is TF32 on GPUs, bf16 on TPUs)."""
    if isinstance(matrix, np.ndarray) and isinstance(v, np.ndarray):
        return matrix @ v
    return jnp.matmul(matrix, v, precision="highest")


class DenseMatrix(NamedTuple):
    """L = R R' for R = matrix_root [d, d], with pseudo-inverse matrix_inv_root;  diag [d] of R' R;  lambda_max [].

    R is the symmetric root L^(1/2), or L^(1/2) Q for a rotation Q. Then coordinates of Q' L^(-1/2) v are compressed:
    with the eigenvectors of L as Q (`eigenbasis`) diag holds the eigenvalues, with a random Q (`rotate`) it is
    nearly flat.
    """

    matrix_root: Array
    matrix_inv_root: Array
    diag: Array
    lambda_max: Array

    def root(self, v):
        return _times(self.matrix_root, v)

    def inv_root(self, v):
        return _times(self.matrix_inv_root, v)


class Diagonal(NamedTuple):
    """M = diag(`diag`), with factor: the safe constant c that `diag` = c Diag(L) already contains."""

    diag: Array
    lambda_max: Array
    factor: Array

    def root(self, v):
        return jnp.sqrt(self.diag) * v

    def inv_root(self, v):
        return jnp.where(self.diag > 0, v / jnp.sqrt(jnp.where(self.diag > 0, self.diag, 1)), jnp.zeros((), v.dtype))


class LowRank(NamedTuple):
    """M = U diag(sigma) U' + base I:  vectors [d, r] orthonormal, sigma [r], base [].

    O(d r) to store and apply. base is l2 plus what bounds the part of L outside of U. With base = 0
    the pseudo-inverse is taken on the range of U.
    """

    vectors: Array
    sigma: Array
    base: Array
    diag: Array
    lambda_max: Array

    def _apply(self, v, outside, inside):
        return outside * v + _times(self.vectors, (inside - outside) * _times(self.vectors.T, v))

    def root(self, v):
        return self._apply(v, jnp.sqrt(self.base), jnp.sqrt(self.sigma + self.base))

    def inv_root(self, v):
        return self._apply(v, _inverse_sqrt(self.base), _inverse_sqrt(self.sigma + self.base))


class Blocks(NamedTuple):
    """Block diagonal M, equal blocks of m entries, the last padded with zeros: [B, m, m] each.

    factor: the safe constant c that M = c blockdiag(L) already contains.
    """

    matrix_root: Array
    matrix_inv_root: Array
    diag: Array
    lambda_max: Array
    factor: Array

    def _apply(self, matrices, v):
        count, size = matrices.shape[0], matrices.shape[1]
        rows = jnp.pad(v, (0, count * size - v.shape[0])).reshape(count, size)
        return jnp.einsum("bij,bj->bi", matrices, rows, precision="highest").reshape(-1)[: v.shape[0]]

    def root(self, v):
        return self._apply(self.matrix_root, v)

    def inv_root(self, v):
        return self._apply(self.matrix_inv_root, v)


class Softmax(NamedTuple):
    """K classes: M = (I - 11'/K) x inner + (11'/K) x l2 I on K d entries, class by class.

    inner bounds (1/2) A'A/m + l2 I. This is Boehning's bound, whatever the form of `inner`.
    classes: [K], only its length counts.
    """

    inner: Any
    l2: Array
    classes: Array

    @property
    def diag(self):
        k = self.classes.shape[-1]
        one = (1 - 1 / k) * self.inner.diag + jnp.expand_dims(jnp.asarray(self.l2), -1) / k
        return jnp.concatenate([one] * k, axis=-1)

    @property
    def lambda_max(self):
        return self.inner.lambda_max

    def _apply(self, function, v, common):
        rows = v.reshape(self.classes.shape[-1], -1)
        mean = jnp.mean(rows, axis=0)
        return (jax.vmap(function)(rows - mean) + common * mean).reshape(-1)

    def root(self, v):
        return self._apply(self.inner.root, v, jnp.sqrt(self.l2))

    def inv_root(self, v):
        return self._apply(self.inner.inv_root, v, _inverse_sqrt(self.l2))


Operator = DenseMatrix | Diagonal | LowRank | Blocks | Softmax


def _inverse_sqrt(x: Array) -> Array:
    """1 / sqrt(x), 0 where x is 0 (pseudo-inverse)."""
    x = jnp.asarray(x)
    return jnp.where(x > 0, 1 / jnp.sqrt(jnp.where(x > 0, x, jnp.ones((), x.dtype))), jnp.zeros((), x.dtype))


def is_stacked(operator: Operator) -> bool:
    """True for a stack of operators, one per worker."""
    return np.ndim(operator.diag) == 2


def stack(operators: Sequence[Operator]) -> Operator:
    """One operator per worker on a leading axis of each array.

    Raises:
        ValueError: no operators, or of different forms or shapes.

    >>> stack([diagonal_of(np.ones(3)), diagonal_of(np.ones(3))]).diag.shape
    (2, 3)
    """
    if not operators:
        raise ValueError("stack: needs at least one operator")
    first = [np.shape(a) for a in jax.tree.leaves(operators[0])]
    for other in operators:
        if type(other) is not type(operators[0]) or [np.shape(a) for a in jax.tree.leaves(other)] != first:
            raise ValueError("stack: operators must have the same form and shapes")
    return jax.tree.map(lambda *arrays: np.stack([np.asarray(a) for a in arrays]), *operators)


def row(operator: Operator, worker: int) -> Operator:
    """The operator of one worker of a stack."""
    return jax.tree.map(lambda a: a[worker], operator)


# ------------------------------------------------------------------------------------------------
# From a matrix, on the host in float64


def _eigen(matrix: Array) -> tuple[np.ndarray, np.ndarray]:
    """Eigenvalues (those below d eps times the largest set to zero) and eigenvectors."""
    matrix = np.asarray(matrix, np.float64)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not np.all(np.isfinite(matrix)):
        raise ValueError(f"smoothness: needs a finite square matrix; got shape {matrix.shape}")
    values, vectors = np.linalg.eigh((matrix + matrix.T) / 2)
    largest = values[-1] if values.size else 0.0
    noise = values.size * np.finfo(np.float64).eps * max(largest, 0)
    if values.size and values[0] < -100 * noise - 1e-300:
        raise ValueError(f"smoothness: the matrix must be positive semidefinite; smallest eigenvalue {values[0]:.3g}")
    return np.where(values > noise, values, 0.0), vectors


def pseudo_roots(matrix: Array) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """L^(1/2), L^(pseudo-inverse 1/2) and the eigenvalues, in float64.

    Eigenvalues below d eps lambda_max count as zero, so L^(1/2) L^(-1/2) projects on the range of L.

    >>> pseudo_roots(np.diag([4.0, 0.0]))[1]
    array([[0.5, 0. ],
           [0. , 0. ]])
    """
    values, vectors = _eigen(matrix)
    roots = np.sqrt(values)
    inverse = np.divide(1.0, roots, out=np.zeros_like(roots), where=roots > 0)
    return (vectors * roots) @ vectors.T, (vectors * inverse) @ vectors.T, values


def dense_of(matrix: Array) -> DenseMatrix:
    """The dense form of a positive semidefinite matrix.

    Args:
        matrix: L, [d, d], symmetric; the Hessian of the loss must lie below it everywhere.

    >>> print(dense_of(np.diag([4.0, 1.0])).root(np.ones(2)))
    [2. 1.]
    """
    root, inverse, values = pseudo_roots(matrix)
    matrix = np.asarray(matrix, np.float64)
    return DenseMatrix(root, inverse, np.diag(matrix).copy(), np.float64(values[-1] if values.size else 0.0))


def diagonal_of(diag: Array, factor: float = 1.0) -> Diagonal:
    """M = factor * diag. Needs factor Diag(diag) >= L; factor = 1 and ones make whitening the identity.

    Args:
        diag: [d], finite and >= 0.
        factor: >= 0.
    """
    diag = factor * np.asarray(diag, np.float64)
    if diag.ndim != 1 or not np.all(np.isfinite(diag) & (diag >= 0)):
        raise ValueError(f"smoothness: a diagonal must be [d], finite and at least 0; got {diag}")
    return Diagonal(diag, np.float64(np.max(diag, initial=0.0)), np.float64(factor))


def blocks_of(matrix: Array, blocks: int) -> Blocks:
    """M = c blockdiag(L), blocks of ceil(d / blocks) entries, with the smallest c that gives M >= L.

    Args:
        matrix: L, [d, d], symmetric, positive semidefinite.
        blocks: their number, 1 to d.
    """
    matrix = np.asarray(matrix, np.float64)
    d = matrix.shape[0]
    if not 1 <= blocks <= d:
        raise ValueError(f"smoothness: blocks must be in 1 .. {d}; got {blocks}")
    size = -(-d // blocks)
    count = -(-d // size)
    kept = np.zeros((count * size, count * size))
    padded = kept.copy()
    padded[:d, :d] = matrix
    for b in range(count):
        cut = slice(b * size, (b + 1) * size)
        kept[cut, cut] = padded[cut, cut]
    factor = safe_factor(matrix, pseudo_roots(kept[:d, :d])[1])
    roots = [pseudo_roots(factor * kept[b * size : (b + 1) * size, b * size : (b + 1) * size]) for b in range(count)]
    largest = max(values[-1] for _, _, values in roots)
    return Blocks(
        np.stack([r for r, _, _ in roots]),
        np.stack([r for _, r, _ in roots]),
        factor * np.diag(matrix),
        np.float64(largest),
        np.float64(factor),
    )


def safe_factor(matrix: np.ndarray, inverse_root: np.ndarray) -> float:
    """c = lambda_max(M^(-1/2) L M^(-1/2)), the least c with c M >= L where M's range contains L's."""
    values, _ = _eigen(inverse_root @ matrix @ inverse_root)
    return float(values[-1]) * (1 + 1e-12)


def eigenbasis(matrix: Array) -> DenseMatrix:
    """Compresses in the eigenbasis of L: coordinates Lambda^(-1/2) V' v.

    The eigenvalues majorise the diagonal, so sparsification with optimal probabilities never has
    a larger variance than in the standard basis.

    Args:
        matrix: L, [d, d], symmetric, positive semidefinite.

    >>> print(eigenbasis(np.array([[2.0, 1.0], [1.0, 2.0]])).diag)
    [1. 3.]
    """
    values, vectors = _eigen(matrix)
    return _rotated(values, vectors, vectors)


def rotate(matrix: Array, rotation: Array) -> DenseMatrix:
    """Compresses coordinates of Q' L^(-1/2) v. A random rotation flattens the diagonal to tr(L) / d.

    Args:
        matrix: L, [d, d].
        rotation: Q, [d, d], orthogonal.
    """
    values, vectors = _eigen(matrix)
    rotation = np.asarray(rotation, np.float64)
    if rotation.shape != vectors.shape or not np.allclose(rotation.T @ rotation, np.eye(len(vectors)), atol=1e-8):
        raise ValueError(f"rotate: rotation must be an orthogonal matrix {vectors.shape}; got shape {rotation.shape}")
    return _rotated(values, vectors, rotation)


def _rotated(values: np.ndarray, vectors: np.ndarray, rotation: np.ndarray) -> DenseMatrix:
    roots = np.sqrt(values)
    inverse = np.divide(1.0, roots, out=np.zeros_like(roots), where=roots > 0)
    turned = vectors.T @ rotation
    return DenseMatrix(
        (vectors * roots) @ turned,
        (turned.T * inverse) @ vectors.T,
        np.einsum("kj,k,kj->j", turned, values, turned),
        np.float64(values[-1] if values.size else 0.0),
    )
