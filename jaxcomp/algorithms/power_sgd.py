"""PowerSGD: gradients of matrices as products of two thin factors, which are summed on the way."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcomp.base import Algorithm, State, bounded, finite, wide_like, zeros_like
from jaxcomp.compressors.vector import is_whole
from jaxcomp.layout import Layout, Parts

__all__ = ["orthogonal", "power_sgd"]

Array = jax.Array


class PowerLocal(NamedTuple):
    memory: Any


class PowerShared(NamedTuple):
    """q: the right factors, [m, c, r] for each stack of m matrices."""

    q: tuple[Array, ...]


def power_sgd(rank: int, *, dense_below: int = 1024) -> Algorithm:
    """One step of subspace iteration a round, from where the last one ended, with error feedback.

    For each matrix, M_i = g_i + e_i [r, c] (axes behind the first one flattened), Q from the last round:

        1.  P = orthogonal(sum_i M_i Q)         [r, rank]
        2.  Q = (1/n) sum_i M_i^T P             [c, rank]
        3.  direction = P Q^T,   e_i = M_i - P Q^T.

    Both sums are linear, so 2 (n - 1) / n (r + c) rank numbers leave each worker, whatever n. Matrices of equal shape
    are one batch. Vectors, scalars, leaves with fewer than `dense_below` entries, and matrices for which two factors
    are no smaller than the matrix, go dense.

    Args:
        rank: of the factors, at least 1.
        dense_below: number of entries.

    Raises:
        ValueError: an argument is out of range.

    Reference: Vogels, Karimireddy, Jaggi 2019 (PowerSGD), algorithms 1 and 2. Factors are made orthogonal by a
    Householder QR, which stays orthogonal for matrices that lack rank.

    >>> import jaxcomp as jc
    >>> tx = jc.compressed_mean(jc.power_sgd(1, dense_below=0), None)
    >>> grads = {"w": jnp.outer(jnp.arange(1.0, 4), jnp.array([1.0, 2.0, 2.0]))}
    >>> direction, state = tx.update(grads, tx.init(grads))
    >>> print(bool(jnp.allclose(direction["w"], grads["w"], atol=1e-5)))
    True
    """
    if not is_whole(rank):
        raise ValueError(f"power_sgd: rank must be an integer of at least 1; got {rank}")
    if not is_whole(dense_below, 0):
        raise ValueError(f"power_sgd: dense_below must be an integer of at least 0; got {dense_below}")

    def factored(like: Any) -> bool:
        """Whether two factors of a stack of matrices are smaller than the matrices."""
        rows, columns = _matrix(like.shape)
        return min(rank, rows, columns) * (rows + columns) < rows * columns

    def init(shared_key, like):
        memory, like = zeros_like(wide_like(like)), wide_like(_stacks(like))
        q = tuple(
            jax.random.normal(jax.random.fold_in(shared_key, i), _q_shape(x.shape, rank), x.dtype)
            for i, x in enumerate(like.vectors)
        )
        return State(PowerLocal(memory), PowerShared(q))

    def update(key, grads, state, exchange):
        grads, bare = _stacks(grads), not isinstance(grads, Parts)
        before = _stacks(state.local.memory)
        message = jax.tree.map(lambda g, e: bounded(g.astype(e.dtype) + e), finite(grads), before)
        stacks = [x.reshape(x.shape[0], *_matrix(x.shape)) for x in message.vectors]
        low = [i for i, x in enumerate(message.vectors) if factored(x)]
        whole = [i for i in range(len(stacks)) if i not in low]

        p = exchange.sum((message.dense, [stacks[i] for i in whole], [stacks[i] @ state.shared.q[i] for i in low]))
        dense, rest, p = jax.tree.map(lambda total: total / exchange.size, p)
        p = [orthogonal(each) for each in p]
        q = exchange.sum([jnp.swapaxes(stacks[i], 1, 2) @ each for i, each in zip(low, p, strict=True)])
        q = [total / exchange.size for total in q]

        means = dict(zip(whole, rest, strict=True))
        means |= {i: p_i @ jnp.swapaxes(q_i, 1, 2) for i, p_i, q_i in zip(low, p, q, strict=True)}
        sent = lambda i, x: means[i].reshape(x.shape) if i in low else x
        vectors = tuple(means[i].reshape(x.shape) for i, x in enumerate(message.vectors))
        memory = Parts(jnp.zeros_like(message.dense), tuple(x - sent(i, x) for i, x in enumerate(message.vectors)))
        factors = dict(zip(low, q, strict=True))
        new = tuple(factors.get(i, old) for i, old in enumerate(state.shared.q))
        direction = vectors[0][0] if bare else Parts(dense, vectors)
        return direction, state.replace(memory=memory.vectors[0][0] if bare else memory, q=new)

    layout = Layout("shape", int(dense_below))
    return Algorithm(init, update, {"memory": "memory", "q": "coin"}, layout=layout)


def _matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of each matrix of a stack [m, r, ...]."""
    return shape[1], math.prod(shape[2:])


def _q_shape(shape: tuple[int, ...], rank: int) -> tuple[int, int, int]:
    rows, columns = _matrix(shape)
    return shape[0], columns, min(rank, rows, columns)


def _stacks(parts: Any) -> Parts:
    """A bare vector, which no factors can hold, as `Parts` with a stack of one row."""
    if isinstance(parts, Parts):
        return parts
    row = parts[None] if hasattr(parts, "reshape") else jax.ShapeDtypeStruct((1, *parts.shape), parts.dtype)
    empty = jnp.zeros((0,), parts.dtype) if hasattr(parts, "reshape") else jax.ShapeDtypeStruct((0,), parts.dtype)
    return Parts(empty, (row,))


def orthogonal(p: Array) -> Array:
    """An orthonormal basis of the columns of each [r, k] matrix of a stack, in the dtype of p.

    By Householder reflections (`jnp.linalg.qr`): the result is orthogonal to working precision whatever the rank of p,
    zeros included, where Gram-Schmidt would divide by a vanishing norm.
    """
    return jnp.linalg.qr(p)[0]
