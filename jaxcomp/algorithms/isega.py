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
from jaxcomp.compressors.vector import lift
from jaxcomp.prox import Prox
from jaxcomp.smoothness.operator import Operator

__all__ = ["isega"]


class IsegaLocal(NamedTuple):
    shift: Any
    compressor: Any


class IsegaShared(NamedTuple):
    x: Any
    shift: Any
    compressor: Any


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

    compressor = lift(precondition(sampling, smoothness, dtype=dtype))
    kept = lift(
        precondition(
            sampling._replace(decompress=without_scaling, accumulate=None, entries=None), smoothness, dtype=dtype
        )
    )

    def init(shared_key, x):
        state = compressor.init(shared_key, wide_like(x))
        return State(IsegaLocal(zeros_of(x), state.local), IsegaShared(x, zeros_of(x), state.shared))

    def update(key, gradient, state, exchange):
        x, mean, _ = state.shared
        own = state.local.shift
        message = jax.tree.map(lambda g, h: g.astype(h.dtype) - h, finite(gradient(x)), own)
        sent = exchange.mean(key, compressor, message, state.part("compressor"))
        moved, mine = sent.read_by(kept)
        direction = jax.tree.map(jnp.add, mean, sent.mean)
        shift = State(jax.tree.map(jnp.add, own, mine), jax.tree.map(jnp.add, mean, moved))
        x = move(x, direction, step_size, prox)
        return x, state.replace(x=x, shift=shift, compressor=sent.state)

    roles = {"x": "iterate", "shift": "shift", "compressor": "compressor"}
    return Algorithm(init, update, roles, compressor, point=lambda shared: shared.x)
