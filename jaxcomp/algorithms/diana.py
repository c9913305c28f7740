"""DIANA: compresses the difference to a learned shift, so the compression error vanishes."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcomp.arrays import bounded, finite, wide_like, zeros_like
from jaxcomp.backend import computed_once, step_in_place
from jaxcomp.base import Algorithm, Compressor, Sent, State, check_compressor
from jaxcomp.compressors.checks import is_number
from jaxcomp.compressors.vector import lift, omega_of

__all__ = ["after_shift", "diana", "from_shift"]


class DianaLocal(NamedTuple):
    shift: Any
    compressor: Any


class DianaShared(NamedTuple):
    shift: Any
    compressor: Any


def diana(compressor: Compressor, *, alpha: float | jax.Array | None = None) -> Algorithm:
    """Sends C(g_i - h_i) and moves the shift h_i towards the gradient.

    delta_i = C(g_i - h_i),   direction = h + (1/n) sum_i delta_i,
    h_i <- h_i + alpha delta_i,   h <- h + (alpha/n) sum_i delta_i.

    h, the mean of the shifts, is known to all workers without being sent. Each worker's shift
    learns its own gradient at the optimum, so unlike `direct` there is no neighbourhood. Shifts
    are kept in f32 (f64 for f64 gradients). Non-finite entries of a gradient count as zero.

    Args:
        compressor: unbiased (omega known), of one array (then large leaves are joined, `jaxcomp.layout`) or of trees.
        alpha: step of the shifts, in (0, 1 / (1 + omega)]; that bound is the default. A JAX array (for
            sweeps inside jit) is not checked.

    Raises:
        ValueError: the compressor is biased, or alpha is out of range (when omega is known only
            for the shapes at hand, at `init`).

    Reference: Mishchenko, Gorbunov, Takac, Richtarik 2019 (DIANA), algorithm 1; the range of alpha as in
    Horvath, Kovalev, Mishchenko, Richtarik, Stich 2019.

    >>> import jaxcomp as jc
    >>> jc.diana(jc.top_k(0.1))
    Traceback (most recent call last):
    ValueError: diana needs an unbiased compressor; top_k(0.1) is not one. Use error_feedback(top_k(0.1)) instead
    """
    spec = check_compressor("diana", compressor)
    if spec.omega is None:
        contracts = spec.alpha is not None and spec.alpha(1) > 0
        cure = f"Use error_feedback({spec.name}) instead" if contracts else spec.remedy or "Its omega is not known"
        raise ValueError(f"diana needs an unbiased compressor; {spec.name} is not one. {cure}")
    fixed = None if isinstance(alpha, jax.Array) else alpha
    if fixed is not None and not (is_number(fixed) and 0 < fixed <= 1):
        raise ValueError(f"diana: alpha must be a Python number or a jax.Array in (0, 1 / (1 + omega)]; got {alpha!r}")
    compressor = lift(compressor)

    def step_of(like):
        return 1 / (1 + omega_of(compressor, like)) if alpha is None else alpha

    def init(shared_key, like):
        like = wide_like(like)
        bound = 1 / (1 + omega_of(compressor, like))
        if fixed is not None and fixed > bound * (1 + 1e-6):
            raise ValueError(f"diana: alpha must be in (0, 1 / (1 + omega)] = (0, {bound:.6g}]; got {alpha}")
        state = compressor.init(shared_key, like)
        local, shared = DianaLocal(zeros_like(like), state.local), DianaShared(zeros_like(like), state.shared)
        return State(local, shared)

    def update(key, grads, state, exchange):
        own, mean = state.part("shift")
        message = from_shift(grads, own)
        sent = exchange.mean(key, compressor, message, state.part("compressor"))
        direction, shift = after_shift(sent, own, mean, step_of(message))
        return direction, state.replace(shift=shift, compressor=sent.state)

    return Algorithm(init, update, {"shift": "shift", "compressor": "compressor"}, compressor)


def from_shift(grads: Any, own: Any) -> Any:
    """g_i - h_i, computed once."""
    difference = lambda g, h: bounded(finite(g).astype(h.dtype) - h)
    return jax.tree.map(lambda g, h: computed_once(difference, g, h), grads, own)


def after_shift(sent: Sent, own: Any, mean: Any, step: Any, nu: Any = 1.0) -> tuple[Any, State]:
    """h + nu m for the mean m of what was sent, and the shifts: h_i + step delta_i in the place of h_i, h + step m in
    that of h.
    """
    plus = lambda h, m, by: bounded(h + jnp.asarray(by, h.dtype) * bounded(m))
    less = is_number(step) and is_number(nu) and nu < step
    direction = jax.tree.map(lambda h, m: plus(h, m, nu), mean, sent.mean) if less else None
    own, mean = sent.add_to(own, step), step_in_place(mean, step, sent.mean)
    if direction is None:  # from h as it is now: the one before would have to be kept beside it
        further = lambda h, m: plus(h, m, nu - jnp.asarray(step, h.dtype))
        direction = jax.tree.map(further, mean, sent.mean)
    return direction, State(own, mean)
