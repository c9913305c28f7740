"""Error feedback: what was not sent is remembered and added to the next gradient."""

from typing import Any, NamedTuple

import jax

from jaxcomp.algorithms.narrow import remembered_in
from jaxcomp.arrays import decayed_sum, wide_like, zeros_like
from jaxcomp.backend import accumulated
from jaxcomp.base import Algorithm, Compressor, State, alpha_of, check_compressor
from jaxcomp.compressors.tree import each_of
from jaxcomp.factories import factory

__all__ = ["check_contracts", "error_feedback"]


class ErrorFeedbackState(NamedTuple):
    """memory: e_i, of each group, what was not sent yet.  compressor: its state, for each group."""

    memory: tuple[jax.Array, ...]
    compressor: tuple[State, ...]


@factory
def error_feedback(
    compressor: Compressor, *, decay: float = 1.0, read_by: Compressor | None = None, memory: str = "float32"
) -> Algorithm:
    """Sends C(decay e_i + g_i) and remembers the rest.

    message_i = decay e_i + g_i,   e_i <- message_i - C(message_i),   direction = (1/n) sum_i C(message_i).

    Nothing is lost: sent + memory = message, bitwise where C copies entries. Entries that overflow
    the capacity of C stay in the memory as well. Non-finite entries of a gradient count as
    zero, and sums saturate at the largest number, so no infinity enters the memory. Memories are kept in f32
    (f64 for f64 gradients), or in fewer bits (`memory`).

    Args:
        compressor: contracts (alpha known), of one array (then large leaves are joined, `jaxcomp.groups`) or of trees.
        decay: factor on the memory, in [0, 1]; 1 is the method of the references, less forgets
            old gradients.
        read_by: another compressor with the same payload, which makes the direction of the messages in place of the
            mean; what is remembered stays that of `compressor`. `demo` reads the mean over those who sent an entry.
        memory: dtype in which it is kept between rounds: "float32"; "bfloat16"; or "int8", with a scale of 32 bits for
            every 128 entries. The latter two are rounded at random, without bias, so what is not sent is remembered in
            the mean, no longer bit for bit. A step needs an array in f32 for each message all the same.

    Raises:
        ValueError: the compressor does not contract, decay is out of range, or memory is none of these.

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
    add = decayed_sum(decay)

    def init(here, like):
        like = wide_like(like)
        check_contracts("error_feedback", compressor, here.compressors, like)
        return ErrorFeedbackState(zeros_like(like), here.start(like))

    def update(here, grads, state):
        message = accumulated(add, state.memory, grads)
        sent = yield here.mean(message, state.compressor)
        direction = sent.direction if read_by is None else sent.read_by(each_of(read_by, here.groups))[0]
        return direction, ErrorFeedbackState(sent.residual, sent.states)

    roles = {"memory": "memory", "compressor": "compressor"}
    return remembered_in(memory, Algorithm(init, update, roles, compressor, pieces=True, rereads=read_by is not None))


def check_contracts(
    name: str, compressor: Compressor, each: tuple[Compressor, ...] = (), like: tuple[Any, ...] = ()
) -> None:
    """Raises ValueError unless alpha is known and, for groups of the given shapes and their compressors, positive."""
    spec = check_compressor(name, compressor)
    if spec.alpha is None:
        unbiased = f"It is unbiased: take direct({spec.name}), or wrap it: contract({spec.name})"
        if spec.omega is None and spec.remedy is None:
            own = "A compressor of your own says it in its Spec(alpha=...)"
            raise ValueError(f"{name} needs a contraction; alpha of {spec.name} is not known. {own}")
        raise ValueError(f"{name} needs a contraction; {spec.name} is not one. {spec.remedy or unbiased}")
    alpha = alpha_of(each, like)
    if not alpha > 0:
        shapes = [leaf.shape for leaf in like]
        raise ValueError(f"{name} needs a contraction; {spec.name} has alpha = {alpha:.3g} for vectors {shapes}")
