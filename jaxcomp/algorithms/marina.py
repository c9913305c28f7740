"""MARINA: compresses differences of gradients, with a full gradient now and then; for non-convex losses."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.algorithms.method import Method, move, view
from jaxcomp.base import Compressor, State, advance, finite, key_data, wide_like, wrap_key
from jaxcomp.compressors.dense import identity
from jaxcomp.compressors.tree import lift
from jaxcomp.prox import Prox

__all__ = ["marina"]


class MarinaLocal(NamedTuple):
    """gradient: of this worker at the last point."""

    gradient: Any
    compressor: Any


class MarinaShared(NamedTuple):
    x: Any
    direction: Any
    key: Any
    count: Any
    compressor: Any


def marina(compressor: Compressor, step_size: float, full: float, *, prox: Prox | None = None) -> Method:
    """x <- prox(x - gamma g);  g <- mean gradient with probability `full`, else g + mean of C(change of the gradient).

    With a preconditioned compressor it is MARINA+, whose error counts in the norm of the smoothness
    matrix. There are no shifts, and it needs no convexity. omega of the compressor must be known. The first
    round is a full one; its point is where the run started.

    Args:
        compressor: unbiased, of one array or of trees.
        step_size: gamma; `theory.marina(...)`.
        full: probability of a full round, in (0, 1]; usually the share of bits that a compressed one needs.
        prox: of a regulariser (`jaxcomp.prox`), for composite problems.

    Raises:
        ValueError: the compressor is biased, or a number is out of range.

    Reference: Gorbunov, Burlachenko, Li, Richtarik 2021 (MARINA), algorithm 1. The preconditioned form is ours.

    >>> import jaxcomp as jc
    >>> method = jc.marina(jc.dithering(7), 0.1, 0.2)
    """
    if compressor.spec.omega is None:
        raise ValueError(f"marina needs an unbiased compressor (omega known); {compressor.spec.name} is not one")
    if not step_size > 0:
        raise ValueError(f"marina: step_size must be above 0; got {step_size}")
    if not 0 < full <= 1:
        raise ValueError(f"marina: full must be in (0, 1]; got {full}")
    compressor, whole = lift(compressor), lift(identity())

    def init(shared_key, x):
        compressor_key, coin_key = jax.random.split(shared_key)
        like = wide_like(x)
        state = compressor.init(compressor_key, like)
        zeros = lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)
        shared = MarinaShared(x, zeros(), key_data(coin_key), jnp.zeros((), jnp.int32), state.shared)
        return State(MarinaLocal(zeros(), state.local), shared)

    def step(key, state, gradient, exchange):
        local, shared = state
        x = move(shared.x, shared.direction, step_size, prox)
        new = jax.tree.map(lambda g, old: g.astype(old.dtype), finite(gradient(x)), local.gradient)
        like = wide_like(new)

        def everything(inner):
            payload, _ = whole.compress(key, new, whole.init(key, like))
            (decode,) = exchange.meet((payload,), True)
            return decode(whole, whole.init(key, like).shared, like), inner, exchange.bits((payload,))

        def difference(inner):
            mine = view(compressor, shared.compressor, exchange)
            change = jax.tree.map(jnp.subtract, new, local.gradient)
            payload, inner = compressor.compress(wrap_key(key), change, State(inner, mine))
            (decode,) = exchange.meet((payload,), compressor.spec.linear)
            moved = decode(compressor, shared.compressor, like)
            return jax.tree.map(jnp.add, shared.direction, moved), inner, exchange.bits((payload,))

        coin = jax.random.bernoulli(jax.random.fold_in(wrap_key(shared.key), shared.count), full)
        coin |= shared.count == 0
        direction, inner, bits = lax.cond(coin, everything, difference, local.compressor)
        compressor_shared = advance(compressor, shared.compressor)
        shared = MarinaShared(x, direction, shared.key, shared.count + 1, compressor_shared)
        return State(MarinaLocal(new, inner), shared), bits

    return Method(init, step, lambda shared: shared.x)
