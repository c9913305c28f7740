"""Error feedback: what was not sent is remembered and added to the next gradient."""

from typing import Any, NamedTuple

import jax

from jaxcomp.arrays import decayed_sum, wide_like, zeros_like
from jaxcomp.backend import accumulated
from jaxcomp.base import Algorithm, Compressor, State, check_compressor
from jaxcomp.compressors.vector import alpha_of
from jaxcomp.factories import factory

__all__ = ["check_contracts", "error_feedback"]


class ErrorFeedbackState(NamedTuple):
    """memory: e_i, of each group, what was not sent yet.  compressor: its state, for each group."""

    memory: tuple[jax.Array, ...]
    compressor: tuple[State, ...]


@factory
def error_feedback(compressor: Compressor, *, decay: float = 1.0) -> Algorithm:
    """Sends C(decay e_i + g_i) and remembers the rest.

    message_i = decay e_i + g_i,   e_i <- message_i - C(message_i),   direction = (1/n) sum_i C(message_i).

    Nothing is lost: sent + memory = message, bitwise where C copies entries. Entries that overflow
    the capacity of C stay in the memory as well. Non-finite entries of a gradient count as
    zero, and sums saturate at the largest number, so no infinity enters the memory. Memories are kept in f32
    (f64 for f64 gradients).

    Args:
        compressor: contracts (alpha known), of one array (then large leaves are joined, `jaxcomp.groups`) or of trees.
        decay: factor on the memory, in [0, 1]; 1 is the method of the references, less forgets
            old gradients.

    Raises:
        ValueError: the compressor does not contract, or decay is out of range.

    Reference: Stich, Cordonnier, Jaggi 2018, algorithm 1; Karimireddy, Rebjock, Stich, Jaggi 2019. The
    memory holds gradients, not steps, so the step size may change from round to round.

    >>> import jaxcomp as jc
    >>> jc.error_feedback(jc.rand_k(0.1))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: error_feedback needs a contraction; rand_k(0.1) is not one. It is unbiased: take direct(...
    """
    check_contracts("error_feedback", compressor)
    if not 0 <= decay <= 1:
        raise ValueError(f"error_feedback: decay must be in [0, 1]; got {decay}")
    added = decayed_sum(decay)

    def init(here, like):
        like = wide_like(like)
        check_contracts("error_feedback", compressor, here.compressors, like)
        return ErrorFeedbackState(zeros_like(like), here.start(like))

    def update(here, grads, state):
        message = accumulated(added, state.memory, grads)
        sent = yield here.mean(message, state.compressor)
        return sent.direction, ErrorFeedbackState(sent.residual, sent.states)

    return Algorithm(init, update, {"memory": "memory", "compressor": "compressor"}, compressor, pieces=True)


def check_contracts(
    name: str, compressor: Compressor, each: tuple[Compressor, ...] = (), like: tuple[Any, ...] = ()
) -> None:
    """Raises ValueError unless alpha is known and, for groups of the given shapes and their compressors, positive."""
    spec = check_compressor(name, compressor)
    if spec.alpha is None:
        unbiased = f"It is unbiased: take direct({spec.name}), or wrap it: contract({spec.name})"
        cure = unbiased if spec.omega is not None else "Its alpha is not known."
        raise ValueError(f"{name} needs a contraction; {spec.name} is not one. {spec.remedy or cure}")
    alpha = alpha_of(each, like)
    if not alpha > 0:
        shapes = [leaf.shape for leaf in like]
        raise ValueError(f"{name} needs a contraction; {spec.name} has alpha = {alpha:.3g} for vectors {shapes}")
