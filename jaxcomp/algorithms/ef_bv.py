"""EF21, its forms with momentum and with a choice (EF21+), and EF-BV, which has DIANA and EF21 as its two ends."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcomp.algorithms.diana import after_shift, from_shift
from jaxcomp.algorithms.direct import check_bounded
from jaxcomp.algorithms.error_feedback import check_contracts
from jaxcomp.algorithms.narrow import remembered_in
from jaxcomp.arrays import bounded, wide_like, zeros_like
from jaxcomp.backend import step_in_place
from jaxcomp.base import (
    Algorithm,
    Compressor,
    Cond,
    Round,
    State,
    Sum,
    for_worker,
    keys_of,
    omega_of,
    residual,
)
from jaxcomp.checks import is_number
from jaxcomp.factories import factory

__all__ = ["ef21", "ef_bv"]

Array = jax.Array


class ShiftedState(NamedTuple):
    """shift: h_i, and their mean h.  memory: v_i - h_i, what was not sent yet of the average that momentum takes; ()
    without momentum.  rounds i32[]: so far.  compressor: its state, for each group.
    """

    shift: State
    memory: Any
    rounds: Array
    compressor: tuple[State, ...]


@factory
def ef21(
    compressor: Compressor,
    *,
    momentum: float = 0.0,
    plus: bool = False,
    whole_start: bool = True,
    memory: str = "float32",
) -> Algorithm:
    """Sends C(g_i - h_i) and adds all of it to the shift: for biased compressors what DIANA is for unbiased ones.

    v_i <- momentum v_i + (1 - momentum) g_i   (the gradient itself by default),
    h_i <- h_i + C(v_i - h_i),   direction = (1/n) sum_i h_i,   v_i, h_i = g_i in the first round.

    Unlike `error_feedback`, whose memory delays gradients, it converges for different losses of the workers and
    whole gradients at the rate of gradient descent, up to a factor of 1 / alpha. Stochastic gradients need momentum
    (0.9): without it, their noise does not vanish however many workers there are.

    Args:
        compressor: contracts (alpha known), of one array (then large leaves are joined, `jaxcomp.groups`) or of trees.
        momentum: in [0, 1); 1 - momentum is the reference's eta (EF21-SGDM).
        plus: EF21+, sends C(v_i) instead where that is nearer to v_i. All workers choose alike, by the sums of
            |C(v_i) - v_i|^2 and |h_i + C(v_i - h_i) - v_i|^2 (8 bytes), so that the mean of the shifts stays known to
            all; the bound of the reference, which is on the mean of these distances, holds for this choice too. Two
            compressions more in each round.
        whole_start: the first gradient is sent whole. Otherwise C of it.
        memory: dtype in which what momentum has to remember is kept between rounds: "float32", "bfloat16" or "int8"
            (`error_feedback`). The shifts stay as they are, since all workers must know their mean.

    Raises:
        ValueError: the compressor does not contract, or momentum or memory is out of range.

    Reference: Richtarik, Sokolov, Fatkhullin 2021 (EF21, algorithm 2; EF21+, algorithm 3, where each worker chooses and
    a server stores all shifts); Fatkhullin, Tyurin, Richtarik 2023 (EF21-SGDM). Step sizes: `theory.ef21`.

    >>> import jaxcomp as jc
    >>> jc.ef21(jc.rand_k(0.1))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: ef21 needs a contraction; rand_k(0.1) is not one. It is unbiased: take direct(...
    """
    check_contracts("ef21", compressor)
    if not is_number(momentum) or not 0 <= momentum < 1:
        raise ValueError(f"ef21: momentum must be a Python number in [0, 1); got {momentum!r}")
    if memory != "float32" and not momentum:
        raise ValueError(f"ef21: memory must be 'float32' without momentum, which alone is remembered; got {memory!r}")

    def init(here, like):
        like = wide_like(like)
        check_contracts("ef21", compressor, here.compressors, like)
        return _start(here, like, bool(momentum))

    def update(here, grads, state):
        rounds = state.rounds
        fresh = jnp.where(rounds == 0, 1.0, 1 - momentum)
        message = from_shift(grads, state.shift.local)
        if momentum:
            blend = lambda d, u: bounded(fresh.astype(d.dtype) * d + momentum * u)
            message = jax.tree.map(blend, message, state.memory)

        def whole(inner, message, own, mean):
            change = yield Sum(jax.tree.map(lambda x: x / here.size, message))  # a sum could overflow
            left = jax.tree.map(jnp.subtract, message, message) if momentum else ()
            return _plus(own, message), _plus(mean, change), left, inner

        def compressed(inner, message, own, mean):
            if plus:
                message, own, mean = yield from _nearer(here, inner, message, own, mean)
            sent = yield here.mean(message, inner)
            rest = sent.residual if momentum else ()
            return sent.add_to(own, 1.0), step_in_place(mean, 1.0, sent.mean), rest, sent.states

        given = (state.compressor, message, *state.shift)
        if whole_start:
            done = yield Cond(rounds == 0, whole, compressed, given)
        else:
            done = yield from compressed(*given)
        own, mean, rest, inner = done
        return mean, ShiftedState(State(own, mean), rest, rounds + 1, inner)

    return remembered_in(memory, Algorithm(init, update, _ROLES, compressor))


@factory
def ef_bv(compressor: Compressor, *, shift_step: float | None = None, mean_step: float | None = None) -> Algorithm:
    """EF-BV: sends C(g_i - h_i), and takes a step of its own for the shifts and for the direction.

    d_i = C(g_i - h_i),   direction = h + (nu/n) sum_i d_i,   h_i <- h_i + lambda d_i,   h <- h + (lambda/n) sum_i d_i.

    lambda = 1 / (1 + omega), nu = 1 is `diana`; lambda = nu = 1 is `ef21` whose first message is compressed too.

    Args:
        compressor: with omega or alpha known, of one array or of trees.
        shift_step: lambda, in (0, 1]; default 1 / (1 + omega) if omega is known, else 1.
        mean_step: nu, in (0, 1]; default 1 / (1 + omega / n) for n workers if omega is known, else 1.

    Raises:
        ValueError: neither omega nor alpha is known, or a step is out of range.

    Reference: Condat, Li, Richtarik 2022 (EF-BV), algorithm 1; the defaults are its lambda* and nu* for unbiased
    compressors with independent errors, and those of EF21 for contractions, of which bias and variance are not
    known apart.

    >>> import jaxcomp as jc
    >>> algorithm = jc.methods.ef_bv(jc.dithering(7))
    """
    spec = check_bounded("ef_bv", compressor)
    for name, value in (("shift_step", shift_step), ("mean_step", mean_step)):
        if value is not None and not (is_number(value) and 0 < value <= 1):
            raise ValueError(f"ef_bv: {name} must be a Python number in (0, 1]; got {value!r}")

    def init(here, like):
        like = wide_like(like)
        if spec.omega is None:
            check_contracts("ef_bv", compressor, here.compressors, like)
        return _start(here, like, False)

    def update(here, grads, state):
        message = from_shift(grads, state.shift.local)
        omega = omega_of(here.compressors, message)
        by = 1 / (1 + omega) if shift_step is None else shift_step
        nu = 1 / (1 + omega / here.size) if mean_step is None else mean_step
        sent = yield here.mean(message, state.compressor)
        direction, shift = after_shift(sent, state.shift, by, nu)
        return direction, state._replace(shift=shift, rounds=state.rounds + 1, compressor=sent.states)

    return Algorithm(init, update, _ROLES, compressor)


_ROLES = {"shift": "shift", "memory": "memory", "rounds": "coin", "compressor": "compressor"}


def _start(here: Round, like: Any, momentum: bool) -> ShiftedState:
    zeros = zeros_like(like)
    return ShiftedState(State(zeros, zeros), zeros if momentum else (), jnp.zeros((), jnp.int32), here.start(like))


def _plus(a: Any, b: Any) -> Any:
    return jax.tree.map(lambda x, y: bounded(x + y), a, b)


def _nearer(here: Round, states: tuple[State, ...], message: Any, own: Any, mean: Any) -> Any:
    """The message of EF21+, and what it is added to: v - h to the shifts, or v to zero, whichever leaves less on all
    workers.
    """

    def missed(x: Any) -> Array:
        squares, keys = [], keys_of(here.key, here.groups)
        for c, key, part, state in zip(here.compressors, keys, x, states, strict=True):
            mine = for_worker(c, state.shared, here.index, here.size)
            payload, _ = c.compress(key, part, State(state.local, mine))
            squares.append(jnp.sum(jnp.square(residual(c, part, payload, mine))))
        return jnp.sum(jnp.stack(squares)) if squares else jnp.zeros(())

    v = _plus(own, message)
    by_itself, shifted = yield Sum((missed(v), missed(message)))
    anew = by_itself < shifted
    pick = lambda a, b: jax.tree.map(lambda x, y: jnp.where(anew, x, y), a, b)
    none = lambda h: jax.tree.map(jnp.subtract, h, h)
    return pick(v, message), pick(none(own), own), pick(none(mean), mean)
