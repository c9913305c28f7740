"""LoCo: codes of few bits with a moving average of their errors, which may itself be kept in 8 bits."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcomp.algorithms.direct import check_bounded
from jaxcomp.algorithms.narrow import remembered_in
from jaxcomp.arrays import bounded, finite, wide_like, zeros_like
from jaxcomp.base import Algorithm, Compressor, State
from jaxcomp.checks import is_whole
from jaxcomp.factories import factory

__all__ = ["loco"]


class LocoState(NamedTuple):
    """memory: e_i, of each group.  rounds i32[]: so far.  compressor: its state, for each group."""

    memory: tuple[Any, ...]
    rounds: Any
    compressor: tuple[State, ...]


@factory
def loco(compressor: Compressor, *, beta: float = 0.8, reset: int | None = 1024, memory: str = "float32") -> Algorithm:
    """Sends C(g_i + e_i), where e_i is a moving average of what C left out.

    h_i = g_i + e_i,   direction = (1/n) sum_i C(h_i),   e_i <- beta e_i + (1 - beta) (h_i - C(h_i)),
    and e_i <- 0 in one of `reset` rounds.

    For codes that lose little, four bits and more: the average smooths the errors of rounding, where `error_feedback`
    sends all of them in the next round. It is not everything that was not sent, so for codes that leave entries out
    (`top_k`), or whose errors are large, take `error_feedback`. beta = 0 without resets is `error_feedback`.

    Args:
        compressor: of one array (then large leaves are joined, `jaxcomp.groups`) or of trees.
        beta: in [0, 1).
        reset: number of rounds, or None for never. One count for all parameters.
        memory: dtype in which e_i is kept between rounds: "float32", "bfloat16" or "int8" (`error_feedback`).

    Raises:
        ValueError: neither omega nor alpha of the compressor is known, or an argument is out of range.

    Reference: Xie, Lin, Toh, Zhou 2024 (LoCo: Low-bit communication adaptor), algorithm 1. There the memory is rounded
    to nearest with one scale for all.

    >>> import jaxcomp as jc
    >>> jc.loco(jc.block_scaled("int4"), memory="int8").roles["memory"]
    'narrow memory'
    """
    check_bounded("loco", compressor)
    if not 0 <= beta < 1:
        raise ValueError(f"loco: beta must be in [0, 1); got {beta}")
    if reset is not None and not (is_whole(reset) and reset < 2**31):
        raise ValueError(f"loco: reset must be None or an integer in 1 .. 2^31 - 1; got {reset}")

    def init(here, like):
        like = wide_like(like)
        return LocoState(zeros_like(like), jnp.zeros((), jnp.int32), here.start(like))

    def update(here, grads, state):
        h = jax.tree.map(lambda g, e: bounded(finite(g).astype(e.dtype) + e), grads, state.memory)
        sent = yield here.mean(h, state.compressor)
        e = jax.tree.map(lambda e, r: beta * e + (1 - beta) * r, state.memory, sent.residual)
        if reset is not None:
            last = (state.rounds + 1) % reset == 0
            e = jax.tree.map(lambda e: jnp.where(last, jnp.zeros((), e.dtype), e), e)
        return sent.direction, LocoState(e, state.rounds + 1, sent.states)

    roles = {"memory": "memory", "rounds": "coin", "compressor": "compressor"}
    return remembered_in(memory, Algorithm(init, update, roles, compressor))
