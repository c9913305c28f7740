"""MARINA: compresses differences of gradients, with a full gradient now and then; for non-convex losses."""

from typing import Any, NamedTuple

import jax

from jaxcomp.algorithms.method import check_step_size, check_unbiased, move, zeros_of
from jaxcomp.arrays import bounded, finite, wide_like
from jaxcomp.backend import step_in_place
from jaxcomp.base import Algorithm, Compressor, Cond, State, Sum
from jaxcomp.compressors.rand_k import Draw, next_draw
from jaxcomp.factories import factory
from jaxcomp.prox import Prox

__all__ = ["marina"]


class MarinaState(NamedTuple):
    """x: the iterate.  direction: g.  gradient: of this worker at the last point.  coin: of full rounds.
    compressor: its state, for each group.
    """

    x: Any
    direction: Any
    gradient: Any
    coin: Draw
    compressor: tuple[State, ...]


@factory
def marina(compressor: Compressor, step_size: float, full: float, *, prox: Prox | None = None) -> Algorithm:
    """x <- prox(x - gamma g);  g <- mean gradient with probability `full`, else g + mean of C(change of the gradient).

    With a preconditioned compressor it is MARINA+, whose error counts in the norm of the smoothness
    matrix. There are no shifts, and it needs no convexity. omega of the compressor must be known. The first
    round is a full one; its point is where the run started. Non-finite entries of a gradient count as zero, and sums
    saturate at the largest number.

    Args:
        compressor: unbiased, of one array or of trees.
        step_size: gamma; `theory.marina(...)`.
        full: probability of a full round, in (0, 1]; usually the share of bits that a compressed one needs.
        prox: of a regulariser (`jaxcomp.prox`), for composite problems.

    Raises:
        ValueError: the compressor is biased, or a number is out of range.

    Reference: Gorbunov, Burlachenko, Li, Richtarik 2021 (MARINA), algorithm 1. The preconditioned form is ours.

    >>> import jaxcomp as jc
    >>> method = jc.methods.marina(jc.dithering(7), 0.1, 0.2)
    """
    check_unbiased("marina", compressor)
    check_step_size("marina", step_size)
    if not 0 < full <= 1:
        raise ValueError(f"marina: full must be in (0, 1]; got {full}")

    def init(here, x):
        compressor_key, coin_key = jax.random.split(here.key)
        states = here._replace(key=compressor_key).start(wide_like(x))
        return MarinaState(x, zeros_of(x), zeros_of(x), Draw.first(coin_key), states)

    def update(here, gradient, state):
        coin = state.coin
        x = move(state.x, state.direction, step_size, prox)
        new = jax.tree.map(lambda g, old: finite(g).astype(old.dtype), gradient(x), state.gradient)

        def everything(inner):
            mean = yield Sum(jax.tree.map(lambda g: g / here.size, new))  # a sum could overflow
            return mean, inner

        def difference(inner):
            change = jax.tree.map(lambda g, old: bounded(g - old), new, state.gradient)
            sent = yield here.mean(change, inner)
            return step_in_place(state.direction, 1.0, sent.mean), sent.states

        tossed = jax.random.bernoulli(coin.round_key(), full) | (coin.count == 0)
        direction, inner = yield Cond(tossed, everything, difference, (state.compressor,))
        return x, MarinaState(x, direction, new, next_draw(coin), inner)

    roles = {
        "x": "iterate",
        "direction": "momentum",
        "gradient": "gradient",
        "coin": "coin",
        "compressor": "compressor",
    }
    return Algorithm(init, update, roles, compressor, point=lambda state: state.x)
