"""SIDCo with counts: each stage aims at k from the number of entries that the one before really left. Ours.

    n_1 = entries that are not zero,   n_m = |{j : |x_j| > eta_(m-1)}|,   r_m = (k / n_m)^(1 / (M - m + 1)).

So the error of each stage is mended in the next, and costs nothing: the counts are known anyway. The first stage is as
published. If the last threshold still misses k by more than 10 %, a line through the logarithms of the
last two counts moves it, at most three times. Since all entries are counted in the end, laws of long vectors
are fitted to a sample (`select.every`). There the sample's own count moves the threshold first, if it is off by more
than chance makes it (1 / sqrt(k / stride), at least 2 %): that costs no pass over the vector, and mends a law that
fits badly.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.compressors.sidco_published import first_ratio
from jaxcomp.compressors.tails import Sample, fitted
from jaxcomp.compressors.threshold import Estimator
from jaxcomp.select import count_above, every, marked_above

__all__ = ["counted"]

Array = jax.Array
TOLERANCE = 0.1  # relative deviation beyond which the counts correct the threshold
IN_SAMPLE = 0.02  # the smallest tolerance in a sample
TRIES = 3


class Point(NamedTuple):
    """A threshold and the number of entries above it."""

    eta: Array
    above: Array


def counted(law: str, exact: bool, stages: int, sample: int | None) -> Estimator:
    """The recursion with M = stages, fitted to about `sample` entries, or to all for None."""

    def estimate(key, x, k, ratio, memory):
        stride = max(1, x.shape[0] // sample - 1) | 1 if sample else 1
        eta, before, goal = _last_two(every(x, stride), k, stride, ratio, stages, law, exact)
        end, words = _corrected(x, before._replace(above=before.above * stride), eta, goal)
        return end.eta, words, end.above, memory

    return Estimator(estimate)


def _last_two(
    x: Array, k: Array, stride: int, ratio: Array, stages: int, law: str, exact: bool
) -> tuple[Array, Point, Array]:
    """eta_M, as the sample x corrects it, eta_(M-1) with its count there, and ln(k); infinity where there is no fit."""
    goal = lambda dtype: jnp.log(k.astype(dtype))

    def fit(sample: Sample) -> tuple[Array, Point]:
        _, _, log_first = first_ratio(sample, ratio, stages)
        in_sample = goal(sample.mean.dtype) - math.log(stride)
        eta, before = sample.first(law, log_first, exact), Point(jnp.zeros_like(sample.mean), sample.present)
        for m in range(2, stages + 1):
            above = count_above(sample.x, eta)
            log_count = jnp.log(jnp.maximum(above, 1).astype(eta.dtype))
            log_ratio = (log_count - in_sample) / (stages - m + 1)
            eta, before = sample.step(law, eta, above, log_ratio), Point(eta, above)
        if stride > 1:
            chance = jnp.maximum(jnp.exp(-in_sample / 2), IN_SAMPLE)
            eta = _corrected(sample.x, before, eta, in_sample, chance)[0].eta
        return eta, before

    eta, before = fitted(x, law, fit, lambda zero, present: (zero + jnp.inf, Point(zero, present)))
    return eta, before, goal(eta.dtype)


def _corrected(
    x: Array, before: Point, eta: Array, goal: Array, tolerance: Array | float = TOLERANCE
) -> tuple[Point, Array]:
    """Moves eta along the exponential law through the last two counts while it misses exp(goal), thrice at most.

    Returns the last point, and words_above(x, its eta).
    """
    dtype = eta.dtype
    log = lambda count: jnp.log(jnp.maximum(count.astype(dtype), 0.5))

    def misses(carry):
        tries, before, here, _ = carry
        count = jnp.exp(goal)
        off = jnp.abs(here.above.astype(dtype) - count) > tolerance * count
        return off & (tries < TRIES) & (here.above != before.above)

    def move(carry):
        tries, before, here, _ = carry
        slope = (here.eta - before.eta) / (log(before.above) - log(here.above))
        eta = jnp.maximum(here.eta + slope * (log(here.above) - goal), 0)
        return tries + 1, here, *at(eta)

    def at(eta):
        words, above = marked_above(x, eta)
        return Point(eta, above), words

    start = (jnp.zeros((), jnp.int32), before, *at(eta))
    _, _, end, words = lax.while_loop(misses, move, start)
    return end, words
