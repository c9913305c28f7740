"""Error feedback: what was not sent is remembered and added to the next gradient."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcomp.base import (
    Algorithm,
    Compressor,
    State,
    advance,
    bounded,
    check_compressor,
    finite,
    residual,
    size_of,
    wide_like,
)
from jaxcomp.compressors.tree import lift

__all__ = ["error_feedback"]


class ErrorFeedbackLocal(NamedTuple):
    memory: Any
    compressor: Any


class ErrorFeedbackShared(NamedTuple):
    compressor: Any


def error_feedback(compressor: Compressor, *, decay: float = 1.0) -> Algorithm:
    """Sends C(decay e_i + g_i) and remembers the rest.

    message_i = decay e_i + g_i,   e_i <- message_i - C(message_i),   direction = (1/n) sum_i C(message_i).

    Nothing is lost: sent + memory = message, bitwise where C copies entries. Entries that overflow
    the capacity of C stay in the memory as well. Non-finite entries of a gradient count as
    zero, and sums saturate at the largest number, so no infinity enters the memory. Memories are kept in f32
    (f64 for f64 gradients).

    Args:
        compressor: contracts (alpha known), of one array (then `per_leaf` of it is used for
            trees) or of trees.
        decay: factor on the memory, in [0, 1]; 1 is the method of the references, less forgets
            old gradients.

    Raises:
        ValueError: the compressor does not contract, or decay is out of range.

    Reference: Stich, Cordonnier, Jaggi 2018, algorithm 1; Karimireddy, Rebjock, Stich, Jaggi 2019. The
    memory holds gradients, not steps, so the step size may change from round to round.

    >>> import jaxcomp as jc
    >>> jc.error_feedback(jc.rand_k(0.1))
    Traceback (most recent call last):
    ValueError: error_feedback needs a contraction; rand_k(0.1) is not one. Wrap it: contract(rand_k(0.1))
    """
    spec = check_compressor("error_feedback", compressor)
    if spec.alpha is None:
        cure = f"Wrap it: contract({spec.name})" if spec.omega is not None else "Its alpha is not known."
        cure = spec.remedy or cure
        raise ValueError(f"error_feedback needs a contraction; {spec.name} is not one. {cure}")
    if not 0 <= decay <= 1:
        raise ValueError(f"error_feedback: decay must be in [0, 1]; got {decay}")
    given, compressor = compressor, lift(compressor)
    bound = compressor.spec.alpha or (lambda sizes: 0.0)

    def init(shared_key, like):
        like = wide_like(like)
        alpha = bound(size_of(like))
        if not alpha > 0:
            raise ValueError(
                f"error_feedback needs a contraction; {spec.name} has alpha = {alpha:.3g} for leaves of "
                f"sizes {size_of(like)}"
            )
        state = compressor.init(shared_key, like)
        memory = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)
        return State(ErrorFeedbackLocal(memory, state.local), ErrorFeedbackShared(state.shared))

    def message(grads, local):
        return jax.tree.map(lambda g, e: bounded(g.astype(e.dtype) + decay * e), finite(grads), local.memory)

    def send(key, grads, state):
        whole = message(grads, state.local)
        payload, local = compressor.compress(key, whole, State(state.local.compressor, state.shared.compressor))
        rest = residual(compressor, whole, payload, state.shared.compressor)
        return payload, ErrorFeedbackLocal(rest, local)

    def receive(mean, shared):
        return mean, ErrorFeedbackShared(advance(compressor, shared.compressor))

    over = lambda wrap: error_feedback(wrap(given), decay=decay)
    return Algorithm(init, send, receive, compressor, message, over)
