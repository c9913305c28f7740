"""DIANA: compresses the difference to a learned shift, so the compression error vanishes."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcomp.arrays import bounded, finite, wide_like, zeros_like
from jaxcomp.backend import computed_once, step_in_place
from jaxcomp.base import Algorithm, Compressor, Sent, State, check_compressor, omega_of
from jaxcomp.checks import is_number
from jaxcomp.factories import factory

__all__ = ["after_shift", "diana", "from_shift"]


class DianaState(NamedTuple):
    """shift: h_i, and their mean h.  compressor: its state, for each group."""

    shift: State
    compressor: tuple[State, ...]


@factory
def diana(compressor: Compressor, *, alpha: float | jax.Array | None = None) -> Algorithm:
    """Sends C(g_i - h_i) and moves the shift h_i towards the gradient.

    delta_i = C(g_i - h_i),   direction = h + (1/n) sum_i delta_i,
    h_i <- h_i + alpha delta_i,   h <- h + (alpha/n) sum_i delta_i.

    h, the mean of the shifts, is known to all workers without being sent. Each worker's shift
    learns its own gradient at the optimum, so unlike `direct` there is no neighbourhood. Shifts
    are kept in f32 (f64 for f64 gradients). Non-finite entries of a gradient count as zero.

    Args:
        compressor: unbiased (omega known), of one array (then large leaves are joined, `jaxcomp.groups`) or of trees.
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

    def init(here, like):
        like = wide_like(like)
        bound = 1 / (1 + omega_of(here.compressors, like))
        if fixed is not None and fixed > bound * (1 + 1e-6):
            raise ValueError(f"diana: alpha must be in (0, 1 / (1 + omega)] = (0, {bound:.6g}]; got {alpha}")
        return DianaState(State(zeros_like(like), zeros_like(like)), here.start(like))

    def update(here, grads, state):
        message = from_shift(grads, state.shift.local)
        step = 1 / (1 + omega_of(here.compressors, message)) if alpha is None else alpha
        sent = yield here.mean(message, state.compressor)
        direction, shift = after_shift(sent, state.shift, step)
        return direction, DianaState(shift, sent.states)

    return Algorithm(init, update, {"shift": "shift", "compressor": "compressor"}, compressor)


def from_shift(grads: Any, own: Any) -> Any:
    """g_i - h_i, computed once."""
    difference = lambda g, h: bounded(finite(g).astype(h.dtype) - h)
    return jax.tree.map(lambda g, h: computed_once(difference, g, h), grads, own)


def after_shift(sent: Sent, shift: State, step: Any, nu: Any = 1.0) -> tuple[Any, State]:
    """h + nu m for the mean m of what was sent, and the shifts: h_i + step delta_i in the place of h_i, h + step m in
    that of h.
    """
    plus = lambda h, m, by: bounded(h + jnp.asarray(by, h.dtype) * bounded(m))
    less = is_number(step) and is_number(nu) and nu < step
    direction = jax.tree.map(lambda h, m: plus(h, m, nu), shift.shared, sent.mean) if less else None
    own, mean = sent.add_to(shift.local, step), step_in_place(shift.shared, step, sent.mean)
    if direction is None:  # from h as it is now: the one before would have to be kept beside it
        further = lambda h, m: plus(h, m, nu - jnp.asarray(step, h.dtype))
        direction = jax.tree.map(further, mean, sent.mean)
    return direction, State(own, mean)
