"""Loss scales that follow the range of 16-bit gradients.

    g_i = grad(s L_i) / s     in f32, before anything is compressed: memories are in the units of the gradient
    ok  = all entries of all g_i are finite, at all workers; agreed by one number beside the loss
    s   = growth s after `interval` steps that went well, backoff s after one that did not

A step that did not go well changes nothing but s: no memory, no shift, no count of rounds.

Reference: Micikevicius et al. 2018, section 3.2, and the dynamic form of Apex and jmp.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp.checks import is_integer, is_number

__all__ = ["DynamicScale", "LossScale", "after_step", "check_scale", "fresh_scale", "select"]

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class DynamicScale:
    """A loss scale that grows until gradients overflow, for `value_and_grad(loss_scale=...)`.

    s_0 = initial;  s <- min(growth s, largest) after `interval` finite steps in a row;  s <- max(backoff s, smallest)
    after a step with an entry that is NaN or infinite at any worker.

    Powers of two leave gradients as they are to the last bit, as long as nothing is subnormal.

    Args:
        initial, growth, backoff, interval, smallest, largest: see above.

    Raises:
        ValueError: growth <= 1, backoff outside (0, 1), interval < 1, or not 0 < smallest <= initial <= largest.

    >>> import jaxcomp as jc
    >>> jc.DynamicScale(interval=100).initial
    32768.0
    """

    initial: float = 2.0**15
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    smallest: float = 1.0
    largest: float = 2.0**24

    def __post_init__(self):
        if not 1 < self.growth < np.inf:
            raise ValueError(f"DynamicScale: growth must be > 1; got {self.growth!r}")
        if not 0 < self.backoff < 1:
            raise ValueError(f"DynamicScale: backoff must be in (0, 1); got {self.backoff!r}")
        if not is_integer(self.interval):
            raise ValueError(f"DynamicScale: interval must be an integer of at least 1; got {self.interval!r}")
        if not 0 < self.smallest <= self.initial <= self.largest < 2.0**127:
            raise ValueError(
                "DynamicScale: must have 0 < smallest <= initial <= largest < 2^127; got "
                f"{self.smallest!r}, {self.initial!r}, {self.largest!r}"
            )


class LossScale(NamedTuple):
    """scale: f32[];  steps: i32[], finite ones since the scale moved;  skipped: i32[], steps so far that changed
    nothing;  finite: bool[], whether the last step was finite at all workers."""

    scale: Array
    steps: Array
    skipped: Array
    finite: Array


def check_scale(name: str, scale: Any) -> float | DynamicScale | None:
    """Raises ValueError unless it is a number > 0, a `DynamicScale` or None."""
    if scale is None or isinstance(scale, DynamicScale):
        return scale
    if not (is_number(scale) and 0 < scale < np.inf):
        raise ValueError(f"{name}: loss_scale must be a number > 0 or a jc.DynamicScale; got {scale!r}")
    return float(scale)


def fresh_scale(how: DynamicScale) -> LossScale:
    """The scale to begin with."""
    zero = jnp.zeros((), jnp.int32)
    return LossScale(jnp.asarray(how.initial, jnp.float32), zero, zero, jnp.ones((), bool))


def after_step(how: DynamicScale, old: LossScale, finite: Array) -> LossScale:
    """The scale of the next step."""
    steps = jnp.where(finite, old.steps + 1, 0)
    grown = steps >= how.interval
    up = jnp.where(grown, jnp.minimum(old.scale * how.growth, how.largest), old.scale)
    scale = jnp.where(finite, up, jnp.maximum(old.scale * how.backoff, how.smallest))
    skipped = old.skipped + (~finite).astype(jnp.int32)
    return LossScale(scale, jnp.where(grown, 0, steps), skipped, finite)


def select(finite: Array, new: tuple[Any, Any], old: Any) -> tuple[Any, Any]:
    """Direction and state after a step: zeros and the old state where it was not finite."""
    direction, state = new
    direction = jax.tree.map(lambda g: jnp.where(finite, g, jnp.zeros_like(g)), direction)
    return direction, jax.tree.map(lambda a, b: jnp.where(finite, a, b), state, old)
