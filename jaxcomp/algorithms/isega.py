"""ISEGA+: DIANA+ whose shifts are overwritten where they were sampled."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp.algorithms.method import Method, move, view
from jaxcomp.base import State, finite, wide_like
from jaxcomp.compressors.bernoulli import bernoulli
from jaxcomp.compressors.precondition import precondition
from jaxcomp.compressors.sparsify import dense_of_sparse
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
) -> Method:
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
    >>> method = jc.isega([0.5, 0.5], jc.smoothness.diagonal_of([1.0, 2.0]), 0.1)
    """
    if not isinstance(step_size, jax.Array) and not step_size > 0:
        raise ValueError(f"isega: step_size must be above 0; got {step_size}")
    # A stack of one row serves every worker.
    rows = np.ndim(probabilities) > 1
    sampling = bernoulli(probabilities if rows else [probabilities], per_worker=True)

    def without_scaling(payload, shared, like):
        chance = shared.chance[0].astype(payload.values.dtype)
        kept = payload.values * chance[jnp.minimum(payload.indices, like.size - 1)]
        return dense_of_sparse(payload._replace(values=kept), shared, like)

    compressor = precondition(sampling, smoothness, dtype=dtype)
    kept = precondition(sampling._replace(decompress=without_scaling, accumulate=None), smoothness, dtype=dtype)

    def init(shared_key, x):
        like = wide_like(x)
        state = compressor.init(shared_key, like)
        zeros = lambda: jnp.zeros(like.shape, like.dtype)
        return State(IsegaLocal(zeros(), state.local), IsegaShared(x, zeros(), state.shared))

    def step(key, state, gradient, exchange):
        local, shared = state
        mine = view(compressor, shared.compressor, exchange)
        message = finite(gradient(shared.x)).astype(local.shift.dtype) - local.shift
        payload, inner = compressor.compress(key, message, State(local.compressor, mine))
        (decode,) = exchange.meet((payload,), False)
        direction = shared.shift + decode(compressor, shared.compressor, local.shift)
        moved = decode(kept, shared.compressor, local.shift)
        own = kept.decompress(payload, mine, jax.ShapeDtypeStruct(local.shift.shape, local.shift.dtype))
        shared = IsegaShared(move(shared.x, direction, step_size, prox), shared.shift + moved, shared.compressor)
        return State(IsegaLocal(local.shift + own, inner), shared), exchange.bits((payload,))

    return Method(init, step, lambda shared: shared.x)
