"""How many entries a sparsifier keeps: a share of them that is fixed, or follows an optax schedule."""

import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp.base import count_of
from jaxcomp.checks import is_whole
from jaxcomp.factories import factory

__all__ = ["Ratio", "RoundCount", "Target", "next_round", "shown", "target_of", "warm_up"]

Array = jax.Array
Ratio = float | Callable[[Any], Any]


class RoundCount(NamedTuple):
    """count i32[]: rounds so far, for a schedule."""

    count: Array


class Target(NamedTuple):
    """How many entries to keep of d.

    peak: d -> the most, for the capacity. ratio: round -> share. scheduled: whether it changes. least: d -> the fewest.
    """

    peak: Callable[[int], int]
    ratio: Callable[[Any], Any]
    scheduled: bool
    least: Callable[[int], int]

    def of(self, d: int, round_: Any) -> tuple[Array, Array]:
        """k i32[] = floor(ratio d), between `least` and `peak`; and ratio, f32[]."""
        if not self.scheduled:
            return jnp.asarray(self.peak(d), jnp.int32), jnp.asarray(self.ratio(0), jnp.float32)
        ratio = jnp.asarray(self.ratio(round_), jnp.float32)
        return jnp.clip(jnp.floor(ratio * d).astype(jnp.int32), self.least(d), self.peak(d)), ratio

    def first_round(self) -> Any:
        """Shared state before the first round."""
        return RoundCount(jnp.zeros((), jnp.int32)) if self.scheduled else ()

    def round_of(self, shared: Any) -> Array | int:
        """The round that `first_round` and `next_round` count."""
        return shared.count if self.scheduled else 0

    @property
    def advance(self) -> Callable[[RoundCount], RoundCount] | None:
        """`Compressor.advance` for this shared state."""
        return next_round if self.scheduled else None


def next_round(shared: RoundCount) -> RoundCount:
    """Counts one round more."""
    return RoundCount(shared.count + 1)


def target_of(
    name: str,
    ratio: Ratio | None,
    peak: float | None = None,
    *,
    k: int | None = None,
    least: float | None = None,
) -> Target:
    """Checks a ratio that is a number or an optax schedule (round -> share of entries).

    Args:
        name: of the factory, for errors.
        ratio: in (0, 1], or a schedule with such values.
        peak: the largest value of the schedule, which sets the capacity (larger ones are cut to it); its
            value in round 0 if not given.
        k: number of entries instead of a ratio, where the factory has this argument.
        least: the smallest value of the schedule (smaller ones are raised to it); if not given, one entry is the least.

    Raises:
        ValueError: out of range, or peak or least for a ratio that does not change.
    """
    if not callable(ratio):
        for what, value in (("peak", peak), ("least", least)):
            if value is not None:
                raise ValueError(
                    f"{name}: {what} is for a ratio that follows a schedule; got ratio={ratio}, {what}={value}"
                )
        count = count_of(name, ratio, k)
        return Target(count, lambda round_: ratio, False, count)
    if k is not None:
        raise ValueError(f"{name}: give exactly one of ratio and k; got a schedule and k={k}")
    # A schedule computes in f32; its shortest decimal is the number that was meant.
    first = float(str(np.float32(ratio(0)))) if peak is None else peak
    most = count_of(name, first, None)
    if least is None:
        return Target(most, ratio, True, lambda d: min(1, d))
    if not isinstance(least, numbers.Real) or not 0 < least <= first or math.isnan(least):
        raise ValueError(f"{name}: least must be in (0, {first}], the peak of the schedule; got {least}")
    return Target(most, ratio, True, count_of(name, float(least), None))


def shown(ratio: Ratio | None, k: int | None = None) -> str:
    """A ratio as it stands in the name of a compressor."""
    return f"k={k}" if k is not None else "schedule" if callable(ratio) else str(ratio)


@factory
def warm_up(ratios: Sequence[float], rounds: int) -> Callable[[Any], Array]:
    """A ratio that falls step by step, as an optax schedule for any sparsifier that takes one.

    ratio(t) = ratios[min(t // rounds, len(ratios) - 1)].

    Args:
        ratios: shares of entries, in (0, 1], falling; DGC takes 0.25, 0.0625, 0.015625, 0.004, 0.001.
        rounds: how many rounds each is kept, at least 1; the last one is kept for good.

    Raises:
        ValueError: an argument is out of range.

    >>> schedule = warm_up([0.25, 0.01], 100)
    >>> print(schedule(99), schedule(100), schedule(10**6))
    0.25 0.01 0.01
    """
    table = [float(ratio) for ratio in ratios]
    if not table or not all(0 < ratio <= 1 for ratio in table) or sorted(table, reverse=True) != table:
        raise ValueError(f"warm_up: ratios must be in (0, 1] and fall; got {ratios}")
    if not is_whole(rounds):
        raise ValueError(f"warm_up: rounds must be an integer of at least 1; got {rounds}")

    def schedule(count):
        return jnp.asarray(table, jnp.float32)[jnp.minimum(count // rounds, len(table) - 1)]

    return schedule
