"""ISEGA+: DIANA+ whose shifts are overwritten where they were sampled."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp.algorithms.method import check_step_size, move, zeros_of
from jaxcomp.arrays import finite, wide_like
from jaxcomp.base import Algorithm, State
from jaxcomp.compressors.bernoulli import bernoulli
from jaxcomp.compressors.precondition import precondition
from jaxcomp.compressors.tree import each_of
from jaxcomp.factories import factory
from jaxcomp.prox import Prox
from jaxcomp.smoothness.operator import Operator

__all__ = ["isega"]


class IsegaState(NamedTuple):
    """x: the iterate.  shift: h_i, and their mean h.  compressor: its state, for each group."""

    x: Any
    shift: State
    compressor: tuple[State, ...]


@factory
def isega(
    probabilities: Any,
    smoothness: Operator,
    step_size: float | jax.Array,
    *,
    prox: Prox | None = None,
    dtype: Any = None,
) -> Algorithm:
    """Sends sampled coordinates of the whitened difference to the shift, which takes them over.

    u_i = L_i^(-1/2) (grad_i - h_i),   g = h + (1/n) sum_i L_i^(1/2) (u_i / p_i on S_i),
    h_i <- h_i + L_i^(1/2) (u_i on S_i).

    The same message as DIANA+ with independent sampling (omega = max 1 / p - 1), but no alpha to choose.

    Args:
        probabilities: [workers, d], or [d] for all workers, in (0, 1].
        smoothness: operator, or a stack of them.
        step_size: gamma (a JAX array is not checked); `theory.isega(...)`.
        prox: of a regulariser.
        dtype: floating type of the values that are sent, default that of x.

    Raises:
        ValueError: step_size is not above 0; probabilities or sizes that do not fit.

    Reference: Safaryan, Hanzely, Richtarik 2021; Mishchenko, Hanzely, Richtarik 2019 (ISEGA).

    >>> import jaxcomp as jc
    >>> method = jc.methods.isega([0.5, 0.5], jc.smoothness.diagonal_of([1.0, 2.0]), 0.1)
    """
    check_step_size("isega", step_size)
    # A stack of one row serves every worker.
    rows = np.ndim(probabilities) > 1
    sampling = bernoulli(probabilities if rows else [probabilities], per_worker=True)

    def without_scaling(payload, shared, like):
        chance = shared.chance[0].astype(payload.values.dtype)
        kept = payload.values * chance[jnp.minimum(payload.indices, like.size - 1)]
        return sampling.decompress(payload._replace(values=kept), shared, like)

    as_they_are = sampling._replace(decompress=without_scaling, accumulate=None, entries=None)
    compressor = precondition(sampling, smoothness, dtype=dtype)
    kept = precondition(as_they_are, smoothness, dtype=dtype)

    def init(here, x):
        return IsegaState(x, State(zeros_of(x), zeros_of(x)), here.start(wide_like(x)))

    def update(here, gradient, state):
        x, (own, mean), states = state
        message = jax.tree.map(lambda g, h: finite(g).astype(h.dtype) - h, gradient(x), own)
        sent = yield here.mean(message, states)
        moved, mine = sent.read_by(each_of(kept, here.groups))
        direction = jax.tree.map(jnp.add, mean, sent.mean)
        shift = State(jax.tree.map(jnp.add, own, mine), jax.tree.map(jnp.add, mean, moved))
        x = move(x, direction, step_size, prox)
        return x, IsegaState(x, shift, sent.states)

    roles = {"x": "iterate", "shift": "shift", "compressor": "compressor"}
    return Algorithm(init, update, roles, compressor, point=lambda state: state.x, rereads=True)
