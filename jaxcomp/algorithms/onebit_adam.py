"""1-bit Adam: after a warm-up the variance stands still, and workers exchange compressed momenta."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcomp.algorithms.error_feedback import check_contracts
from jaxcomp.algorithms.narrow import remembered_in
from jaxcomp.arrays import bounded, finite, wide, wide_like, zeros_like
from jaxcomp.base import Algorithm, Compressor, Cond, State, Sum
from jaxcomp.factories import factory

__all__ = ["check_adam", "onebit_directions", "scaled_by_variance"]

Array = jax.Array


class OnebitState(NamedTuple):
    """memory: e_i, what was not sent of the momentum.  momentum m and variance v, in f32.  steps: so far.
    compressor: its state, for each group.
    """

    memory: tuple[Array, ...]
    momentum: tuple[Array, ...]
    variance: tuple[Array, ...]
    steps: Array
    compressor: tuple[State, ...]


@factory
def onebit_directions(
    compressor: Compressor,
    *,
    freeze_step: int,
    b1: float,
    b2: float,
    eps: float,
    bias_correction: bool,
    memory: str = "float32",
) -> Algorithm:
    """Directions m / (sqrt v + eps) of 1-bit Adam, t counted from one.

    t <= freeze_step:   g = mean_i g_i,   m <- b1 m + (1 - b1) g,   v <- b2 v + (1 - b2) g^2;
    afterwards:         c_i = b1 m + (1 - b1) g_i + e_i,   m <- mean_i C(c_i),   e_i <- c_i - C(c_i).

    Entries whose v is zero had no gradient in the warm-up (rows of an embedding, say): they stay where they are, and
    nothing is remembered of them; m / eps would throw them far away.
    """
    check_contracts("onebit_adam", compressor)

    def init(here, like):
        zeros = zeros_like(wide_like(like))
        return OnebitState(zeros, zeros, zeros, jnp.zeros((), jnp.int32), here.start(wide_like(like)))

    def update(here, grads, state):
        m, v, steps = state.momentum, state.variance, state.steps
        grads = jax.tree.map(lambda g, m: finite(g).astype(m.dtype), grads, m)

        def warm_up(memory, inner):
            mean = yield Sum(jax.tree.map(lambda g: g / here.size, grads))  # a sum could overflow
            new = jax.tree.map(lambda m, g: bounded(b1 * m + (1 - b1) * g), m, mean)
            return new, jax.tree.map(lambda v, g: bounded(b2 * v + (1 - b2) * jnp.square(g)), v, mean), memory, inner

        def compressed(memory, inner):
            message = jax.tree.map(lambda m, g, e: bounded(b1 * m + (1 - b1) * g + e), m, grads, memory)
            sent = yield here.mean(message, inner)
            moved = lambda x: jax.tree.map(lambda x, v: jnp.where(v > 0, x, jnp.zeros((), x.dtype)), x, v)
            return moved(sent.mean), v, moved(sent.residual), sent.states

        m, v, memory, inner = yield Cond(steps < freeze_step, warm_up, compressed, (state.memory, state.compressor))
        steps = steps + 1
        powers = (steps, jnp.minimum(steps, freeze_step)) if bias_correction else None
        return scaled_by_variance(m, v, b1, b2, eps, powers), OnebitState(memory, m, v, steps, inner)

    roles = {
        "memory": "memory",
        "momentum": "momentum",
        "variance": "momentum",
        "steps": "coin",
        "compressor": "compressor",
    }
    return remembered_in(memory, Algorithm(init, update, roles, compressor))


def scaled_by_variance(
    m: Any, v: Any, b1: float, b2: float, eps: float, powers: tuple[Array | int, Array | int] | None
) -> Any:
    """m / (sqrt v + eps), zero where v is; corrected for their start at zero after so many updates of m and of v."""

    def one(m, v):
        dtype = wide(m.dtype)
        first = second = jnp.ones((), dtype)
        if powers is not None:
            # 1 - b^p, which 1 minus a power of f32 would give to three digits
            first, second = (
                -jnp.expm1(jnp.asarray(p, dtype) * (math.log(b) if b else -math.inf))
                for b, p in zip((b1, b2), powers, strict=True)
            )
        step = (m / first) / (jnp.sqrt(v / second) + jnp.asarray(eps, dtype))
        return bounded(jnp.where(v > 0, step, jnp.zeros((), dtype)))

    return jax.tree.map(one, m, v)


def check_adam(name: str, b1: float, b2: float, eps: float) -> None:
    """Raises ValueError unless these are decay rates and a positive number."""
    for what, value in (("b1", b1), ("b2", b2)):
        if not 0 <= value < 1:
            raise ValueError(f"{name}: {what} must be in [0, 1); got {value}")
    if not 0 < eps < float("inf"):
        raise ValueError(f"{name}: eps must be positive and finite; got {eps}")
