"""Momentum correction: workers accumulate velocities instead of gradients (Deep Gradient Compression)."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcomp.algorithms.error_feedback import check_contracts
from jaxcomp.algorithms.narrow import remembered_in
from jaxcomp.arrays import bounded, exponent_of, finite, power_of_two, wide, wide_like, zeros_like
from jaxcomp.backend import accumulated, in_place
from jaxcomp.base import Algorithm, Compressor, State
from jaxcomp.checks import is_number, is_whole
from jaxcomp.factories import factory

__all__ = ["momentum_correction"]


class MomentumState(NamedTuple):
    """velocity v_i and momentum u_i of each group, in f32 (zeros for small leaves, which go dense).  dense_momentum: of
    the small leaves, after averaging; () for the large ones.  compressor: its state, for each group.
    """

    velocity: tuple[jax.Array, ...]
    momentum: tuple[jax.Array, ...]
    dense_momentum: tuple[Any, ...]
    compressor: tuple[State, ...]


@factory
def momentum_correction(
    compressor: Compressor,
    *,
    momentum: float = 0.9,
    nesterov: bool = False,
    masking: bool = True,
    clip_norm: float | None = None,
    workers: int | None = None,
    memory: str = "float32",
) -> Algorithm:
    """Error feedback on velocities, so that what is delayed has the momentum it would have had.

    g_i <- g_i min(1, clip_norm / (sqrt(n) |g_i|)),      the norm over all leaves, before accumulation;
    u_i <- m u_i + g_i,          v_i <- v_i + u_i          (Nesterov: u_i <- m (u_i + g_i),  v_i <- v_i + u_i + g_i);
    send C(v_i);                 v_i <- v_i - C(v_i),      u_i <- 0 where something was sent (factor masking);
    direction = (1/n) sum_i C(v_i).

    The direction holds the momentum already: chain it into plain SGD, with weight decay after it. Leaves
    that are too small to be compressed get theirs after averaging: u <- m u + g, direction u, for the mean gradient g
    (Nesterov: u <- m (u + g), direction u + g).

    Args:
        compressor: contracts (alpha known), of one array or of trees; `dgc` in the paper, any sparsifier will do.
        momentum: m, in [0, 1).
        nesterov: which of the two forms.
        masking: set u_i to zero where v_i was sent.
        clip_norm: bound on the norm of the mean gradient, > 0, or None. Each worker keeps to
            clip_norm / sqrt(n), because the sum of n independent gradients grows like sqrt(n).
        workers: n, needed with clip_norm.
        memory: dtype in which u_i and v_i are kept between rounds: "float32", "bfloat16" or "int8" (`error_feedback`).

    Raises:
        ValueError: the compressor does not contract, or an argument is out of range.

    Reference: Lin, Han, Mao, Wang, Dally 2018 (DGC), sections 3.2 and 3.3, algorithm 4.

    >>> import jaxcomp as jc
    >>> sparsifier = jc.contrib.dgc(jc.warm_up([0.25, 0.05, 0.001], 500))
    >>> algorithm = jc.contrib.momentum_correction(sparsifier, clip_norm=1.0, workers=4)
    """
    check_contracts("momentum_correction", compressor)
    if not is_number(momentum) or not 0 <= momentum < 1:
        raise ValueError(f"momentum_correction: momentum must be a Python number in [0, 1); got {momentum!r}")
    if clip_norm is not None and not (is_number(clip_norm) and 0 < clip_norm < math.inf):
        raise ValueError(
            f"momentum_correction: clip_norm must be a Python number, positive and finite, or None; got {clip_norm!r}"
        )
    if (clip_norm is None) != (workers is None) or not (workers is None or is_whole(workers)):
        raise ValueError(
            "momentum_correction: give clip_norm and workers (at least 1) together, or neither; "
            f"got clip_norm={clip_norm}, workers={workers}"
        )
    heavy_ball = functools.partial(_heavy_ball, momentum, nesterov)

    def init(here, like):
        like = wide_like(like)
        check_contracts("momentum_correction", compressor, here.compressors, like)
        zeros = zeros_like(like)
        dense = tuple(zero if group.small else () for group, zero in zip(here.groups, zeros, strict=True))
        return MomentumState(zeros, zeros, dense, here.start(like))

    def momentum_after(u, g):
        return bounded(heavy_ball(u, finite(g).astype(u.dtype))[0])

    def velocity_after(v, g, u):
        return bounded(v + (u + finite(g).astype(u.dtype) if nesterov else u))

    def update(here, grads, state):
        """One round by the formulas above; small leaves, which go dense, wait for nothing and keep no velocity."""
        is_small = [group.small for group in here.groups]
        each = lambda function, *args: tuple(map(function, is_small, *args))
        grads = _clipped(grads, clip_norm, workers)
        u = accumulated(momentum_after, state.momentum, grads)
        v = accumulated(velocity_after, state.velocity, grads, u)
        v = each(lambda small, v, g: finite(g).astype(v.dtype) if small else v, v, grads)
        u = each(lambda small, u: jnp.zeros_like(u) if small else u, u)
        sent = yield here.mean(v, state.compressor)
        if masking:
            u = jax.tree.map(lambda u, s: in_place(_unsent, u, s), u, sent.own)
        turn = lambda small, u, g: tuple(map(bounded, heavy_ball(u, g))) if small else ((), g)
        pairs = each(turn, state.dense_momentum, sent.direction)
        dense, direction = tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs)
        return direction, MomentumState(sent.residual, u, dense, sent.states)

    roles = {"velocity": "memory", "momentum": "memory", "dense_momentum": "momentum", "compressor": "compressor"}
    return remembered_in(memory, Algorithm(init, update, roles, compressor, pieces=True))


def _heavy_ball(momentum: float, nesterov: bool, u: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The new momentum, and what is added to the velocity."""
    if nesterov:
        u = momentum * (u + g)
        return u, u + g
    u = momentum * u + g
    return u, u


def _unsent(u: jax.Array, sent: jax.Array) -> jax.Array:
    """u where nothing was sent, else zero."""
    return jnp.where(sent != 0, jnp.zeros((), u.dtype), u)


def _clipped(grads: Any, clip_norm: float | None, workers: int | None) -> Any:
    """Gradients whose norm is at most that of one of the workers, wide; no square, and no norm, overflows."""
    if clip_norm is None or workers is None:
        return grads
    grads = jax.tree.map(lambda g: finite(g).astype(wide(g.dtype)), grads)
    leaves = [leaf.reshape(-1) for leaf in jax.tree.leaves(grads) if leaf.size]
    if not leaves:
        return grads
    dtype = wide(*(leaf.dtype for leaf in leaves))
    info, bound = jnp.finfo(dtype), jnp.asarray(clip_norm / math.sqrt(workers), dtype)
    largest = jnp.max(jnp.stack([jnp.max(jnp.abs(x)).astype(dtype) for x in leaves]))
    unit = power_of_two(-jnp.clip(exponent_of(largest), info.minexp, -info.minexp), dtype)
    square = lambda x: jnp.sum(jnp.square(jnp.clip(x.astype(dtype) * unit, -4, 4)))
    norm = jnp.sqrt(jnp.sum(jnp.stack([square(x) for x in leaves])))  # times the unit, a power of two
    factor = bound / jnp.maximum(norm, info.tiny)
    one = lambda g: jnp.where(norm > bound * unit, g * unit.astype(g.dtype) * factor.astype(g.dtype), g)
    return jax.tree.map(one, grads)
