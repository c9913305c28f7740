"""Momentum correction: workers accumulate velocities instead of gradients (Deep Gradient Compression)."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcomp.base import (
    Algorithm,
    Compressor,
    State,
    advance,
    bounded,
    check_compressor,
    finite,
    like_of,
    residual,
    size_of,
    wide_like,
)
from jaxcomp.compressors.tree import lift

__all__ = ["momentum_correction"]


class MomentumLocal(NamedTuple):
    """velocity v_i and momentum u_i, trees in f32 (zeros for leaves that go dense)."""

    velocity: Any
    momentum: Any
    compressor: Any


class MomentumShared(NamedTuple):
    """momentum: of the leaves that go dense, after averaging (zeros for the others)."""

    momentum: Any
    compressor: Any


def momentum_correction(
    compressor: Compressor,
    *,
    momentum: float = 0.9,
    nesterov: bool = False,
    masking: bool = True,
    clip_norm: float | None = None,
    workers: int | None = None,
) -> Algorithm:
    """Error feedback on velocities, so that what is delayed has the momentum it would have had.

    g_i <- g_i min(1, clip_norm / (sqrt(n) |g_i|)),      the norm over all leaves, before accumulation;
    u_i <- m u_i + g_i,          v_i <- v_i + u_i          (Nesterov: u_i <- m (u_i + g_i),  v_i <- v_i + u_i + g_i);
    send C(v_i);                 v_i <- v_i - C(v_i),      u_i <- 0 where something was sent (factor masking);
    direction = (1/n) sum_i C(v_i).

    The direction holds the momentum already: chain it into plain SGD, with weight decay after it. Leaves
    that `per_leaf` sends dense get theirs after averaging: u <- m u + g, direction u, for the mean gradient g
    (Nesterov: u <- m (u + g), direction u + g).

    Args:
        compressor: contracts (alpha known), of one array or of trees; `dgc` in the paper, any sparsifier will do.
        momentum: m, in [0, 1).
        nesterov: which of the two forms.
        masking: set u_i to zero where v_i was sent.
        clip_norm: bound on the norm of the mean gradient, > 0, or None. Each worker keeps to
            clip_norm / sqrt(n), because the sum of n independent gradients grows like sqrt(n).
        workers: n, needed with clip_norm.

    Raises:
        ValueError: the compressor does not contract, or an argument is out of range.

    Reference: Lin, Han, Mao, Wang, Dally 2018 (DGC), sections 3.2 and 3.3, algorithm 4.

    >>> import jaxcomp as jc
    >>> algorithm = jc.momentum_correction(jc.dgc(jc.warm_up([0.25, 0.05, 0.001], 500)), clip_norm=1.0, workers=4)
    """
    spec = check_compressor("momentum_correction", compressor)
    if spec.alpha is None:
        raise ValueError(
            f"momentum_correction needs a contraction; {spec.name} is not known to be one. {spec.remedy or ''}".rstrip()
        )
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum_correction: momentum must be in [0, 1); got {momentum}")
    if clip_norm is not None and not 0 < clip_norm < math.inf:
        raise ValueError(f"momentum_correction: clip_norm must be positive and finite, or None; got {clip_norm}")
    if (clip_norm is None) != (workers is None) or (workers is not None and workers < 1):
        raise ValueError(
            "momentum_correction: give clip_norm and workers (at least 1) together, or neither; "
            f"got clip_norm={clip_norm}, workers={workers}"
        )
    given, compressor = compressor, lift(compressor)
    bound = compressor.spec.alpha or (lambda sizes: 0.0)
    dense_below = compressor.spec.dense_below

    def dense(tree):
        """For each leaf, whether it is sent as it is."""
        lone = jax.tree.structure(tree) == jax.tree.structure(0)
        return jax.tree.map(lambda leaf: leaf.size < dense_below and not lone, tree)

    def clipped(grads):
        grads = finite(grads)
        if clip_norm is None or workers is None:
            return grads
        norm = _norm(grads)
        factor = jnp.minimum(1, clip_norm / math.sqrt(workers) / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny))
        return jax.tree.map(lambda g: g * factor.astype(g.dtype), grads)

    def heavy_ball(u, g):
        """The new momentum, and what is added to the velocity."""
        if nesterov:
            u = momentum * (u + g)
            return u, u + g
        u = momentum * u + g
        return u, u

    def moved(grads, local):
        """The new momentum and velocity; for dense leaves a momentum of zero and the gradient itself."""
        grads = jax.tree.map(lambda g, v: g.astype(v.dtype), clipped(grads), local.velocity)

        def one(g, u, v, is_dense):
            if is_dense:
                return jnp.zeros_like(u), g
            u, step = heavy_ball(u, g)
            return bounded(u), bounded(v + step)

        return _unzip(grads, jax.tree.map(one, grads, local.momentum, local.velocity, dense(grads)))

    def init(shared_key, like):
        like = wide_like(like)
        alpha = bound(size_of(like))
        if not alpha > 0:
            raise ValueError(f"momentum_correction needs a contraction; {spec.name} has alpha = {alpha:.3g}")
        state = compressor.init(shared_key, like)
        zeros = lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)
        after = jax.tree.map(
            lambda leaf, is_dense: jnp.zeros(leaf.shape if is_dense else (0,), leaf.dtype), like, dense(like)
        )
        return State(MomentumLocal(zeros(), zeros(), state.local), MomentumShared(after, state.shared))

    def send(key, grads, state):
        u, v = moved(grads, state.local)
        shared = state.shared.compressor
        payload, local = compressor.compress(key, v, State(state.local.compressor, shared))
        rest = residual(compressor, v, payload, shared)
        if masking:
            sent = compressor.decompress(payload, shared, like_of(v))
            u = jax.tree.map(lambda u, s: jnp.where(s != 0, jnp.zeros((), u.dtype), u), u, sent)
        return payload, MomentumLocal(rest, u, local)

    def receive(mean, shared):
        def one(g, u, is_dense):
            return heavy_ball(u, g) if is_dense else (u, g)

        after, direction = _unzip(mean, jax.tree.map(one, mean, shared.momentum, dense(mean)))
        return direction, MomentumShared(after, advance(compressor, shared.compressor))

    def over(wrap):
        return momentum_correction(
            wrap(given),
            momentum=momentum,
            nesterov=nesterov,
            masking=masking,
            clip_norm=clip_norm,
            workers=workers,
        )

    return Algorithm(init, send, receive, compressor, lambda grads, local: moved(grads, local)[1], over)


def _norm(tree: Any) -> jax.Array:
    """Euclidean norm of all leaves together, without overflow."""
    leaves = [leaf.astype(jnp.float32).reshape(-1) for leaf in jax.tree.leaves(tree) if leaf.size]
    largest = jnp.max(jnp.stack([jnp.zeros((), jnp.float32), *(jnp.max(jnp.abs(x)) for x in leaves)]))
    unit = jnp.where(largest > 0, largest, 1)
    squares = [jnp.sum(jnp.square(jnp.clip(x / unit, -1, 1))) for x in leaves]
    return unit * jnp.sqrt(jnp.sum(jnp.stack([jnp.zeros((), jnp.float32), *squares])))


def _unzip(like: Any, pairs: Any) -> tuple[Any, Any]:
    """A tree of pairs as a pair of trees."""
    return jax.tree.transpose(jax.tree.structure(like), jax.tree.structure((0, 0)), pairs)
