"""SIDCo as published: stage ratios fixed beforehand, and a number of stages that may adapt.

    r_1 = 1/4,  r_m = (4 delta)^(1 / (M - 1)),  m = 2 .. M,   so that their product is delta;
    eta_1 = Q(a, r_1),   eta_m = eta_(m-1) + Q(a - eta_(m-1) | a > eta_(m-1), r_m).

With one stage, or delta >= 1/4, eta = Q(a, delta).

Adaptation: every 5 rounds, with rho the mean of (entries above the threshold) / k over them,

    "paper"   M <- M - 1 if rho > 1.2,  M + 1 if rho < 0.8;
    "climb"   the same in a direction that turns around whenever |rho - 1| has grown since the window before:
              for heavy tails more stages, not fewer, are the cure. The released code has this rule, too.

Reference: Abdelmoniem, Elzanaty, Alouini, Canini 2021 (SIDCo), algorithm 1. The location of a stage is the previous
threshold, not the smallest exceedance as in the released code, which keeps nothing when one entry is left.
"""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.compressors.sidco import FIRST_RATIO, first_ratio
from jaxcomp.compressors.tails import Sample, fitted
from jaxcomp.compressors.threshold import Estimator
from jaxcomp.select import count_above

__all__ = ["Stages", "adaptive", "published"]

Array = jax.Array
WINDOW = 5  # rounds between two changes of the number of stages
BAND = 0.2  # relative deviation from the target that changes it


def published(law: str, exact: bool, stages: int) -> Estimator:
    """The recursion with a fixed number of stages."""

    def estimate(key, x, k, ratio, memory):
        return _threshold(x, ratio, stages, law, exact), None, memory

    return Estimator(estimate)


def _threshold(x: Array, ratio: Array, stages: Array | int, law: str, exact: bool) -> Array:
    """eta_M for M = stages; infinity where there is no fit."""

    def fit(sample: Sample) -> Array:
        share, one_stage, log_first = first_ratio(sample, ratio, stages)
        further = jnp.maximum(jnp.asarray(stages, share.dtype) - 1, 1)
        log_later = jnp.where(one_stage, 0, jnp.log(FIRST_RATIO / share) / further)

        def stage(m, eta):
            return sample.step(law, eta, count_above(sample.x, eta), log_later)

        eta = sample.first(law, log_first, exact)
        if not isinstance(stages, int):
            return lax.fori_loop(2, stages + 1, stage, eta)
        for m in range(2, stages + 1):
            eta = stage(m, eta)
        return eta

    return fitted(x, law, fit, lambda zero, present: zero + jnp.inf)


# ------------------------------------------------------------------------------------------------
# Adaptation of the number of stages


class Stages(NamedTuple):
    """State by which the number of stages adapts.

    achieved f32[]: sum over the window of (entries above the threshold) / k;  last f32[]: its mean over the
    window before, 0 at first;  calls i32[]: rounds of this window;  stages i32[];  direction i32[]: +1 or -1.
    """

    achieved: Array
    last: Array
    calls: Array
    stages: Array
    direction: Array


def adaptive(law: str, exact: bool, stages: int, *, climb: bool) -> Estimator:
    """The recursion with a number of stages that begins with `stages` and adapts."""

    def estimate(key, x, k, ratio, memory):
        return _threshold(x, ratio, memory.stages, law, exact), None, memory

    def memory(dtype):
        real, integer = jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32)
        return Stages(real, real, integer, integer + stages, integer + 1)

    return Estimator(estimate, memory, partial(_adapted, climb=climb))


def _adapted(memory: Stages, wanted: Array, k: Array, ratio: Array, *, climb: bool) -> Stages:
    """The state after a round in which `wanted` entries exceeded the threshold."""
    achieved = memory.achieved + wanted.astype(jnp.float32) / k.astype(jnp.float32)
    calls = memory.calls + 1
    mean = achieved / WINDOW
    direction = memory.direction
    if climb:
        worse = (memory.last > 0) & (jnp.abs(mean - 1) > jnp.abs(memory.last - 1))
        direction = jnp.where(worse, -direction, direction)
    change = jnp.where(mean > 1 + BAND, -direction, jnp.where(mean < 1 - BAND, direction, 0))
    most = jnp.ceil(jnp.log(ratio) / math.log(0.5)).astype(jnp.int32)
    zero = jnp.zeros_like
    moved = Stages(
        zero(achieved), mean, zero(calls), jnp.clip(memory.stages + change, 1, jnp.maximum(most, 1)), direction
    )
    waits = Stages(achieved, memory.last, calls, memory.stages, memory.direction)
    return jax.tree.map(lambda a, b: jnp.where(calls == WINDOW, a, b), moved, waits)
