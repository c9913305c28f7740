"""PowerSGD: gradients of matrices as products of two thin factors, which are summed on the way."""

import functools
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcomp.algorithms.low_rank import (
    as_matrices,
    factored,
    factors,
    limited,
    matrix_shape,
    product,
)
from jaxcomp.algorithms.narrow import remembered_in
from jaxcomp.arrays import bounded, decayed_sum, finite, key_data, wide, wide_like, wrap_key, zeros_like
from jaxcomp.backend import accumulated, in_place
from jaxcomp.base import Algorithm, Cond
from jaxcomp.checks import is_whole
from jaxcomp.factories import factory
from jaxcomp.groups import Layout

__all__ = ["power_sgd"]

Array = jax.Array


class PowerState(NamedTuple):
    """memory: e_i, of each group; () without error feedback.  q: the right factors of the last round, [m, c, rank] for
    each stack of m matrices, or the words of a key from which those of each round are drawn; () for what goes dense.
    rounds i32[]: so far.
    """

    memory: tuple[Array, ...]
    q: tuple[Any, ...]
    rounds: Array


@factory
def power_sgd(
    rank: int | Mapping[int, int] = 1,
    *,
    min_ratio: float = 2.0,
    start: int = 0,
    dense_below: int = 1024,
    error_feedback: bool = True,
    warm_start: bool = True,
    batched: bool = False,
    memory: str = "float32",
) -> Algorithm:
    """One step of subspace iteration a round, from where the last one ended, with error feedback.

    For each matrix, M_i = g_i + e_i [r, c], Q [c, k] from the last round:

        1.  P = basis(sum_i M_i basis(Q))       [r, k]
        2.  Q = (1/n) sum_i M_i^T P             [c, k]
        3.  direction = P Q^T,   e_i = M_i - P Q^T.

    Both sums are linear, so they are all-reduces: 2 (n - 1) / n (r + c) k numbers leave each worker, whatever n.
    Matrices of equal shape are one batch. A leaf with more axes is a matrix by the cut at which r + c is least. With
    `sharded` parameters each device has the factors of its own shard.

    What goes dense, in the sum of step 1: vectors and scalars, leaves with fewer than `dense_below` entries, and
    matrices with k (r + c) min_ratio >= r c, k = min(rank, r, c).

    What is not sent stays in the memory: sum_i e_i + n direction = sum_i M_i, up to rounding. Entries of Q, and of
    what goes dense, are cut where sums would overflow, and the rest is remembered. So nothing is lost of M_i up to
    half of the largest number; e_i and M_i saturate at that number. What is not finite counts as zero.

    Args:
        rank: of the factors, at least 1; or {round: rank}, a schedule that begins with round 0. A lower rank goes on
            with the leading columns of Q, a higher one with further ones at random. Each rank is a branch of the
            compiled program, and what is sent is counted by the branch that is taken.
        min_ratio: by how much factors must be smaller than their matrix.
        start: rounds in the beginning in which everything goes dense (torch's hook has 10).
        dense_below: number of entries.
        error_feedback: whether what is not sent is remembered; without, e_i = 0, and it is lost.
        warm_start: whether a round begins with the Q of the last one; without, with a normal Q of its own, the same on
            all workers.
        batched: all leaves end to end, vectors and small ones too, are one square matrix, filled up with zeros; then
            `dense_below` says nothing. One pair of factors whatever the tree, 4 k sqrt(d) numbers for d entries, and a
            mean that is far less accurate, since its rows are no rows of any leaf.
        memory: dtype in which e_i is kept between rounds: "float32", "bfloat16" or "int8" (`error_feedback`).

    Raises:
        ValueError: an argument is out of range.

    Reference: Vogels, Karimireddy, Jaggi 2019 (PowerSGD), algorithms 1 and 2; min_ratio, start, error_feedback and
    warm_start as in torch's `powerSGD_hook`, batched as in its `batched_powerSGD_hook`, whose matrix is that of a
    bucket: give the leaves in its order for the same one. Bases by Gram-Schmidt with a second projection and with
    replacement (`low_rank.bases_of`), where the references divide by the norm of what may be zero. Q is made
    orthonormal before it is used, as the hook does: products neither overflow nor lose the smaller directions.

    >>> import jaxcomp as jc
    >>> tx = jc.compressed_mean(jc.power_sgd(1, dense_below=0, min_ratio=1), None)
    >>> grads = {"w": jnp.outer(jnp.arange(1.0, 4), jnp.array([1.0, 2.0, 2.0]))}
    >>> direction, state = tx.update(grads, tx.init(grads))
    >>> print(bool(jnp.allclose(direction["w"], grads["w"], atol=1e-5)))
    True
    """
    ranks = _ranks(rank)
    if not 0 < min_ratio < math.inf:
        raise ValueError(f"power_sgd: min_ratio must be positive and finite; got {min_ratio}")
    for what, value in (("start", start), ("dense_below", dense_below)):
        if not is_whole(value, 0):
            raise ValueError(f"power_sgd: {what} must be an integer of at least 0; got {value}")
    for what, value in (("error_feedback", error_feedback), ("warm_start", warm_start), ("batched", batched)):
        if not isinstance(value, bool):
            raise ValueError(f"power_sgd: {what} must be True or False; got {value!r}")
    if memory != "float32" and not error_feedback:
        raise ValueError(f"power_sgd: memory must be 'float32' without error feedback; got {memory!r}")
    most = max(value for _, value in ranks)
    before = [value for at, value in ranks if at <= start][-1]
    schedule = [(start, before), *((at, value) for at, value in ranks if at > start)]
    schedule = [(0, 0), *schedule] if start else schedule  # rank 0: everything goes dense

    def init(here, like):
        like, numbers = wide_like(like), itertools.count()  # of the stacks
        q_of = (lambda key, x: _first(key, x, most)) if warm_start else (lambda key, x: key_data(key))
        key = lambda: jax.random.fold_in(here.key, next(numbers))
        q = tuple(q_of(key(), x) if len(x.shape) > 2 else () for x in like)
        return PowerState(zeros_like(like) if error_feedback else (), q, jnp.zeros((), jnp.int32))

    def update(here, grads, state):
        message = accumulated(decayed_sum(1.0), state.memory, grads) if error_feedback else tuple(map(_alone, grads))
        draw = lambda key, x: _first(jax.random.fold_in(wrap_key(key), state.rounds), x, most)
        new = lambda: tuple(draw(key, x) if len(x.shape) > 2 else () for key, x in zip(state.q, message, strict=True))
        branches = {at: functools.partial(_round, rank, min_ratio, here.size) for at, rank in schedule}
        run = branches.pop(0)
        for at, other in branches.items():
            run = functools.partial(_either, state.rounds >= at, other, run)
        direction, memory, q = yield from run(message, state.q if warm_start else new())
        kept = memory if error_feedback else ()
        return direction, PowerState(kept, q if warm_start else state.q, state.rounds + 1)

    roles = {"memory": "memory", "q": "coin", "rounds": "coin"}
    layout = Layout("square") if batched else Layout("shape", int(dense_below))
    pieces = error_feedback and not batched
    return remembered_in(memory, Algorithm(init, update, roles, layout=layout, pieces=pieces))


def _ranks(rank: int | Mapping[int, int]) -> list[tuple[int, int]]:
    """A rank, or {first round: rank}, as pairs in the order of the rounds, the first of which begins at 0."""
    pairs = sorted(rank.items()) if isinstance(rank, Mapping) else [(0, rank)]
    for start, value in pairs:
        if not is_whole(value):
            raise ValueError(f"power_sgd: rank must be an integer of at least 1; got {value}")
        if not is_whole(start, 0):
            raise ValueError(
                f"power_sgd: a schedule of ranks is {{round: rank}}, with rounds of at least 0; got {start}"
            )
    if not pairs or pairs[0][0] != 0:
        raise ValueError(f"power_sgd: a schedule of ranks needs one for round 0; got {dict(pairs)}")
    return [(int(start), int(value)) for start, value in pairs]


def _alone(g: Array) -> Array:
    """Finite g, in the dtype of sums."""
    return finite(g).astype(wide(g.dtype))


def _first(key: Array, like: Any, rank: int) -> Array:
    """A normal Q for a stack; the columns are those of any lower rank, and more."""
    rows, columns = matrix_shape(like.shape[1:])
    shape = (min(rank, rows, columns), like.shape[0], columns)
    return jnp.moveaxis(jax.random.normal(key, shape, like.dtype), 0, 2)


def _either(predicate: Array, yes: Callable, no: Callable, message: Any, q: Any) -> Any:
    return (yield Cond(predicate, yes, no, (message, q)))


def _round(rank: int, min_ratio: float, size: int, message: tuple[Array, ...], q: tuple[Any, ...]) -> Any:
    """Direction, memory and Q after a round at one rank; 0: everything goes dense."""
    is_low = lambda x: bool(rank) and x.ndim > 2 and factored(x.shape[1:], rank, min_ratio)
    low = [i for i, x in enumerate(message) if is_low(x)]
    dense = [i for i in range(len(message)) if i not in low]
    matrices = [as_matrices(message[i]) for i in low]
    start = [q[i][:, :, :rank] for i in low]

    also = [limited(message[i], size) for i in dense]
    left, right, totals = yield from factors(matrices, start, also, size)
    means = {i: total / size for i, total in zip(dense, totals, strict=True)}
    means |= {i: product(p, q) for i, p, q in zip(low, left, right, strict=True)}
    direction = tuple(means[i].reshape(x.shape) for i, x in enumerate(message))

    apart = lambda m, pq: [bounded(x - product(*each).reshape(x.shape)) for x, each in zip(m, pq, strict=True)]
    left_over = in_place(apart, [message[i] for i in low], list(zip(left, right, strict=True)))
    kept = dict(zip(low, left_over, strict=True))
    kept |= {i: message[i] - sent for i, sent in zip(dense, also, strict=True)}
    pad = lambda new, old: jnp.pad(new, ((0, 0), (0, 0), (0, old.shape[2] - new.shape[2])))
    done = {i: jnp.swapaxes(q, 1, 2) for i, q in zip(low, right, strict=True)}
    after = tuple(pad(done[i], old) if i in done else old for i, old in enumerate(q))
    return direction, tuple(kept[i] for i in range(len(message))), after
