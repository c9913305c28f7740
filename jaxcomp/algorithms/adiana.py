"""ADIANA: DIANA with Nesterov's acceleration, two messages in a round."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcomp.algorithms.method import Method, move, view
from jaxcomp.base import Compressor, State, advance, finite, key_data, wide_like, wrap_key
from jaxcomp.compressors.tree import lift
from jaxcomp.prox import Prox
from jaxcomp.theory import StepSizes

__all__ = ["adiana"]


class AdianaLocal(NamedTuple):
    shift: Any
    compressor: Any


class AdianaShared(NamedTuple):
    """y, z, w: the three sequences;  shift: mean of the shifts;  key, count: of the coin;  compressor."""

    y: Any
    z: Any
    w: Any
    shift: Any
    key: Any
    count: Any
    compressor: Any


def adiana(compressor: Compressor, step_sizes: StepSizes, *, prox: Prox | None = None) -> Method:
    """Accelerated DIANA; with a preconditioned compressor, ADIANA+.

    x = theta_1 z + theta_2 w + (1 - theta_1 - theta_2) y,   g = h + (1/n) sum_i C(grad_i(x) - h_i),
    h_i <- h_i + alpha C'(grad_i(w) - h_i),   w <- y with probability q,
    y <- prox(x - eta g),   z <- beta z + (1 - beta) x + (gamma / eta)(y_new - x).

    Both messages of a round, C and C' (an independent draw), travel in one collective, and both
    are counted. omega of the compressor must be known; step sizes come from `theory.adiana(...)`.

    Args:
        compressor: unbiased, of one array or of trees.
        step_sizes: with alpha, eta, theta_1, theta_2, gamma, beta and q.
        prox: of a regulariser, for composite problems.

    Raises:
        ValueError: the compressor is biased, or the step sizes are those of another method.

    Reference: Li, Kovalev, Qian, Richtarik 2020 (ADIANA); Safaryan, Hanzely, Richtarik 2021 (ADIANA+).
    The coin is shared randomness, so it costs no bits.

    >>> import jaxcomp as jc
    >>> step_sizes = jc.theory.adiana(smoothness=1.0, mu=0.1, workers=4, omega=1.0, variance=1.0)
    >>> method = jc.adiana(jc.dithering(7), step_sizes)
    """
    if compressor.spec.omega is None:
        raise ValueError(f"adiana needs an unbiased compressor (omega known); {compressor.spec.name} is not one")
    gamma, alpha, eta, theta_1, theta_2, beta, q, _ = step_sizes
    if alpha is None or eta is None or theta_1 is None or theta_2 is None or beta is None or q is None:
        raise ValueError("adiana needs the step sizes of theory.adiana(...)")
    compressor = lift(compressor)

    def init(shared_key, x):
        compressor_key, coin_key = jax.random.split(shared_key)
        like = wide_like(x)
        state = compressor.init(compressor_key, like)
        zeros = lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)
        shared = AdianaShared(x, x, x, zeros(), key_data(coin_key), jnp.zeros((), jnp.int32), state.shared)
        return State(AdianaLocal(zeros(), state.local), shared)

    def step(key, state, gradient, exchange):
        local, shared = state
        mix = lambda z, w, y: theta_1 * z + theta_2 * w + (1 - theta_1 - theta_2) * y
        x = jax.tree.map(mix, shared.z, shared.w, shared.y)
        mine = view(compressor, shared.compressor, exchange)

        def message(point):
            return jax.tree.map(lambda g, h: g.astype(h.dtype) - h, finite(gradient(point)), local.shift)

        first_key, second_key = jax.random.split(wrap_key(key))
        first, inner = compressor.compress(first_key, message(x), State(local.compressor, mine))
        second, inner = compressor.compress(second_key, message(shared.w), State(inner, mine))
        decode_first, decode_second = exchange.meet((first, second), compressor.spec.linear)
        g = decode_first(compressor, shared.compressor, local.shift)
        moved = decode_second(compressor, shared.compressor, local.shift)
        own = compressor.decompress(second, mine, wide_like(local.shift))

        y = move(x, jax.tree.map(jnp.add, shared.shift, g), eta, prox)
        combine = lambda z, x, y: beta * z + (1 - beta) * x + (gamma / eta) * (y - x)
        z = jax.tree.map(combine, shared.z, x, y)
        coin = jax.random.bernoulli(jax.random.fold_in(wrap_key(shared.key), shared.count), q)
        w = jax.tree.map(lambda y, w: jnp.where(coin, y, w), shared.y, shared.w)
        learn = lambda h, c: h + alpha * c
        shift = jax.tree.map(learn, shared.shift, moved)
        local = AdianaLocal(jax.tree.map(learn, local.shift, own), inner)
        compressor_shared = advance(compressor, shared.compressor)
        shared = AdianaShared(y, z, w, shift, shared.key, shared.count + 1, compressor_shared)
        return State(local, shared), exchange.bits((first, second))

    return Method(init, step, lambda shared: shared.y)
