"""MARINA: compresses differences of gradients, with a full gradient now and then; for non-convex losses."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcomp.algorithms.adiana import Coin
from jaxcomp.algorithms.method import check_step_size, check_unbiased, move, zeros_of
from jaxcomp.arrays import bounded, finite, key_data, wide_like, wrap_key
from jaxcomp.backend import step_in_place
from jaxcomp.base import Algorithm, Compressor, State
from jaxcomp.compressors.vector import lift
from jaxcomp.prox import Prox

__all__ = ["marina"]


class MarinaLocal(NamedTuple):
    """gradient: of this worker at the last point."""

    gradient: Any
    compressor: Any


class MarinaShared(NamedTuple):
    x: Any
    direction: Any
    coin: Any
    compressor: Any


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
    compressor = lift(compressor)

    def init(shared_key, x):
        compressor_key, coin_key = jax.random.split(shared_key)
        state = compressor.init(compressor_key, wide_like(x))
        coin = Coin(key_data(coin_key), jnp.zeros((), jnp.int32))
        return State(MarinaLocal(zeros_of(x), state.local), MarinaShared(x, zeros_of(x), coin, state.shared))

    def update(key, gradient, state, exchange):
        coin = state.shared.coin
        x = move(state.shared.x, state.shared.direction, step_size, prox)
        new = jax.tree.map(lambda g, old: g.astype(old.dtype), finite(gradient(x)), state.local.gradient)

        def everything(inner):
            return exchange.sum(jax.tree.map(lambda g: g / exchange.size, new)), inner  # a sum could overflow

        def difference(inner):
            change = jax.tree.map(lambda g, old: bounded(g - old), new, state.local.gradient)
            sent = exchange.mean(key, compressor, change, inner)
            return step_in_place(state.shared.direction, 1.0, sent.mean), sent.state

        tossed = jax.random.bernoulli(jax.random.fold_in(wrap_key(coin.key), coin.count), full) | (coin.count == 0)
        direction, inner = exchange.cond(tossed, everything, difference, state.part("compressor"))
        coin = coin._replace(count=coin.count + 1)
        return x, state.replace(x=x, gradient=new, direction=direction, coin=coin, compressor=inner)

    roles = {
        "x": "iterate",
        "direction": "momentum",
        "gradient": "gradient",
        "coin": "coin",
        "compressor": "compressor",
    }
    return Algorithm(init, update, roles, compressor, point=lambda shared: shared.x)
