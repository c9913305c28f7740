"""ADIANA: DIANA with Nesterov's acceleration, two messages in a round."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcomp.algorithms.bidirectional import check_down, send_down, start_down
from jaxcomp.algorithms.diana import from_shift
from jaxcomp.algorithms.method import check_unbiased, move, zeros_of
from jaxcomp.arrays import bounded, wide_like, wrap_key
from jaxcomp.backend import step_in_place
from jaxcomp.base import Algorithm, Compressor, State
from jaxcomp.compressors.rand_k import Draw, next_draw
from jaxcomp.factories import factory
from jaxcomp.prox import Prox
from jaxcomp.theory import StepSizes

__all__ = ["adiana"]


class AdianaState(NamedTuple):
    """y, z, w: three sequences.  shift: h_i, and their mean h.  coin: decides when w follows y.  compressor: its state,
    for each group.  down: of `send_down`.
    """

    y: Any
    z: Any
    w: Any
    shift: State
    coin: Draw
    compressor: tuple[State, ...]
    down: Any


@factory
def adiana(
    compressor: Compressor,
    step_sizes: StepSizes,
    *,
    prox: Prox | None = None,
    down: Compressor | None = None,
    code: str = "fixed",
) -> Algorithm:
    """Accelerated DIANA; with a preconditioned compressor, ADIANA+.

    x = theta_1 z + theta_2 w + (1 - theta_1 - theta_2) y,   g = h + (1/n) sum_i C(grad_i(x) - h_i),
    h_i <- h_i + alpha C'(grad_i(w) - h_i),   w <- y with probability q,
    y <- prox(x - eta g),   z <- beta z + (1 - beta) x + (gamma / eta)(y_new - x).

    Both messages of a round, C and C' (an independent draw), are counted. omega of the compressor must be known; step
    sizes come from `theory.adiana(...)`. Non-finite entries of a gradient count as zero, and sums saturate at the
    largest number.

    Args:
        compressor: unbiased, of one array or of trees.
        step_sizes: with alpha, eta, theta_1, theta_2, gamma, beta and q.
        prox: of a regulariser, for composite problems.
        down: what a server compresses g with before it sends it back (`bidirectional`), unbiased; None: g goes whole.
            Everyone's y, z and w follow from what arrives. Step sizes: `theory.adiana(..., down_omega=...)`.
        code: in which the bits of that are counted.

    Raises:
        ValueError: a compressor is biased, or steps are those of another method.

    Reference: Li, Kovalev, Qian, Richtarik 2020 (ADIANA); Safaryan, Hanzely, Richtarik 2021 (ADIANA+).
    The coin is shared randomness, so it costs no bits.

    >>> import jaxcomp as jc
    >>> step_sizes = jc.theory.adiana(smoothness=1.0, mu=0.1, workers=4, omega=1.0, variance=1.0)
    >>> method = jc.methods.adiana(jc.dithering(7), step_sizes)
    """
    check_unbiased("adiana", compressor)
    if not isinstance(step_sizes, StepSizes):
        raise TypeError(f"adiana: step_sizes must be those of jc.theory.adiana(...); got {step_sizes!r}")
    gamma, alpha, eta, theta_1, theta_2, beta, q, _ = step_sizes
    if alpha is None or eta is None or theta_1 is None or theta_2 is None or beta is None or q is None:
        raise ValueError("adiana needs the step sizes of theory.adiana(...)")
    if down is not None:
        check_down("adiana", down)

    def init(here, x):
        compressor_key, coin_key = jax.random.split(here.key)
        below = () if down is None else start_down(here._replace(key=jax.random.fold_in(here.key, 2)), down, x)
        states = here._replace(key=compressor_key).start(wide_like(x))
        return AdianaState(x, x, x, State(zeros_of(x), zeros_of(x)), Draw.first(coin_key), states, below)

    def update(here, gradient, state):
        y, z, w, (own, mean), coin, states, below = state
        x = jax.tree.map(lambda z, w, y: theta_1 * z + theta_2 * w + (1 - theta_1 - theta_2) * y, z, w, y)
        difference = lambda point: from_shift(gradient(point), own)
        first_key, second_key = jax.random.split(wrap_key(here.key))
        first = yield here.mean(difference(x), states, first_key)
        second = yield here.mean(difference(w), first.states, second_key)
        g = jax.tree.map(lambda h, m: bounded(h + m), mean, first.mean)
        if down is not None:
            g, below = send_down(here, down, below, g, code)

        new_y = move(x, g, eta, prox)
        combine = lambda z, x, y: beta * z + (1 - beta) * x + (gamma / eta) * (y - x)
        new_z = jax.tree.map(combine, z, x, new_y)
        tossed = jax.random.bernoulli(coin.round_key(), q)
        new_w = jax.tree.map(lambda y, w: jnp.where(tossed, y, w), y, w)
        shift = State(second.add_to(own, alpha), step_in_place(mean, alpha, second.mean))
        return new_y, AdianaState(new_y, new_z, new_w, shift, next_draw(coin), second.states, below)

    roles = dict.fromkeys("yzw", "iterate") | {
        "shift": "shift",
        "coin": "coin",
        "compressor": "compressor",
        "down": "coin",
    }
    return Algorithm(init, update, roles, compressor, point=lambda state: state.y)
