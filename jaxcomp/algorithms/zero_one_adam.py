"""0/1 Adam: variances at fewer and fewer steps, local steps between compressed exchanges of what they added up to."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxcomp.algorithms.error_feedback import check_contracts
from jaxcomp.algorithms.narrow import remembered_in
from jaxcomp.algorithms.onebit_adam import scaled_by_variance
from jaxcomp.arrays import bounded, finite, wide_like, zeros_like
from jaxcomp.base import Algorithm, Compressor, Cond, State, Sum
from jaxcomp.factories import factory

__all__ = ["Times", "zero_one_updates"]

Array = jax.Array


class Times(NamedTuple):
    """When variances are taken, and when workers exchange; steps counted from zero.

    freeze_step: from this step on variances stand still; before, workers exchange at every step.
    variance_repeat: the interval between variances doubles after so many of them.
    double_every, longest: from freeze_step on workers exchange at every H-th step; H starts at 1, doubles every
        `double_every` steps, and is at most `longest`.
    """

    freeze_step: int
    variance_repeat: int
    double_every: int
    longest: int


class Clock(NamedTuple):
    """count: steps so far;  variances: taken so far;  next_variance, next_exchange: their steps;  total f32[]: sum of
    the step sizes since the last exchange."""

    count: Array
    variances: Array
    next_variance: Array
    next_exchange: Array
    total: Array


class ZeroOneState(NamedTuple):
    """momentum: m_i;  buffer: u_i, steps times momenta since the last exchange;  memory: e_i;  point: that all workers
    shared last;  variance: v;  clock;  compressor: its state, for each group.
    """

    momentum: tuple[Array, ...]
    buffer: tuple[Array, ...]
    memory: tuple[Array, ...]
    point: tuple[Array, ...]
    variance: tuple[Array, ...]
    clock: Clock
    compressor: tuple[State, ...]


@factory
def zero_one_updates(
    compressor: Compressor,
    times: Times,
    *,
    b1: float,
    b2: float,
    eps: float,
    bias_correction: bool,
    memory: str = "float32",
) -> Algorithm:
    """Updates of a worker's own parameters; `grads` is (gradients, parameters, step size). See `zero_one_adam`."""
    check_contracts("zero_one_adam", compressor)

    def init(here, point):
        like = wide_like(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), point))
        zeros, none = zeros_like(like), jnp.zeros((), jnp.int32)
        clock = Clock(none, none, none, none, jnp.zeros((), jnp.float32))
        point = jax.tree.map(lambda x, z: x.astype(z.dtype), point, zeros)
        return ZeroOneState(zeros, zeros, zeros, point, zeros, clock, here.start(like))

    def update(here, given, state):
        grads, params, step_size = given
        clock = state.clock
        grads = jax.tree.map(lambda g, m: finite(g).astype(m.dtype), grads, state.momentum)

        def measured(v):
            mean = yield Sum(jax.tree.map(lambda g: g / here.size, grads))  # a sum could overflow
            return jax.tree.map(lambda v, g: bounded(b2 * v + (1 - b2) * jnp.square(g)), v, mean)

        due = (clock.count < times.freeze_step) & (clock.count >= clock.next_variance)
        variance = yield Cond(due, measured, lambda v: v, (state.variance,))
        clock = _after_variance(clock, due, times)
        corrected = (clock.count + 1, clock.variances) if bias_correction else None
        scaled = lambda m, size: jax.tree.map(
            lambda d: size.astype(d.dtype) * d, scaled_by_variance(m, variance, b1, b2, eps, corrected)
        )
        momentum = jax.tree.map(lambda m, g: bounded(b1 * m + (1 - b1) * g), state.momentum, grads)
        buffer = jax.tree.map(lambda u, m: bounded(u + step_size.astype(u.dtype) * m), state.buffer, momentum)
        total = clock.total + step_size

        def together(momentum, buffer, memory, inner):
            average = lambda u, m: jnp.where(total > 0, u / jnp.where(total > 0, total, 1).astype(u.dtype), m)
            message = jax.tree.map(lambda u, m, e: bounded(average(u, m) + e), buffer, momentum, memory)
            sent = yield here.mean(message, inner)
            moved = lambda x: jax.tree.map(lambda x, v: jnp.where(v > 0, x, jnp.zeros((), x.dtype)), x, variance)
            mean = moved(sent.mean)
            point = jax.tree.map(lambda x, d: bounded(x - d), state.point, scaled(mean, total))
            updates = jax.tree.map(lambda new, x: new - x.astype(new.dtype), point, params)
            return updates, point, mean, moved(sent.residual), sent.states

        def apart(momentum, buffer, memory, inner):
            updates = jax.tree.map(jnp.negative, scaled(momentum, step_size))
            return updates, state.point, jax.tree.map(jnp.zeros_like, variance), memory, inner

        meet = clock.count >= clock.next_exchange
        updates, point, mean, memory, inner = yield Cond(
            meet, together, apart, (momentum, buffer, state.memory, state.compressor)
        )
        momentum = jax.tree.map(lambda m, mean: jnp.where(meet, mean, m), momentum, mean)
        buffer = jax.tree.map(lambda u: jnp.where(meet, jnp.zeros((), u.dtype), u), buffer)
        clock = _after_exchange(clock, meet, total, times)
        return updates, ZeroOneState(momentum, buffer, memory, point, variance, clock, inner)

    roles = {
        "momentum": "average",
        "buffer": "memory",
        "memory": "memory",
        "point": "iterate",
        "variance": "momentum",
        "clock": "coin",
        "compressor": "compressor",
    }
    return remembered_in(memory, Algorithm(init, update, roles, compressor), "memory")


def _after_variance(clock: Clock, due: Array, times: Times) -> Clock:
    """The next one comes 2^floor(j / variance_repeat) steps later, after j of them."""
    taken = clock.variances + due.astype(jnp.int32)
    interval = jnp.left_shift(jnp.int32(1), jnp.minimum(taken // times.variance_repeat, 30))
    next_one = jnp.where(due, clock.count + interval, clock.next_variance)
    return clock._replace(variances=taken, next_variance=next_one)


def _after_exchange(clock: Clock, met: Array, total: Array, times: Times) -> Clock:
    since = jnp.maximum(clock.count + 1 - times.freeze_step, 0)
    doubled = jnp.left_shift(jnp.int32(1), jnp.minimum(since // times.double_every, 30))
    interval = jnp.where(since > 0, jnp.minimum(doubled, times.longest), 1)
    next_one = jnp.where(met, clock.count + interval, clock.next_exchange)
    total = jnp.where(met, jnp.zeros((), total.dtype), total)
    return clock._replace(count=clock.count + 1, next_exchange=next_one, total=total)
