"""SIDCo: a threshold from a fitted sparsity-inducing distribution, in a few passes, without a sort.

Magnitudes a = |x| of gradients follow heavy-peaked laws. Fit one to all of a, and its (1 - delta)
quantile is a threshold that about delta d entries exceed. Far tails are fitted badly by the bulk,
so it is done in stages (peaks over threshold): the first stage keeps a quarter, each further one
fits the excesses over the previous threshold, and the product of the stage ratios is delta.

`tails` has the laws. The stages here are those to use; `contrib.sidco_published` has those of the paper, which the
option `adapt` chooses.

With counts each stage aims at k from the number of entries that the one before really left. Ours.

    n_1 = entries that are not zero,   n_m = |{j : |x_j| > eta_(m-1)}|,   r_m = (k / n_m)^(1 / (M - m + 1)).

So the error of each stage is mended in the next, and costs nothing: the counts are known anyway. The first stage is as
published. If the last threshold still misses k by more than 10 %, a line through the logarithms of the
last two counts moves it, at most three times. Since all entries are counted in the end, laws of long vectors
are fitted to a sample (`select.every`). There the sample's own count moves the threshold first, if it is off by more
than chance makes it (1 / sqrt(k / stride), at least 2 %): that costs no pass over the vector, and mends a law that
fits badly. No such line helps where a tail is none (uniform, clipped or discrete entries): if the count is still not
between 4/5 and 5/4 of k, `select.top_set` searches for a threshold between two known ones, and of equal magnitudes
takes the first. That costs passes only there.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.base import Compressor
from jaxcomp.checks import is_whole
from jaxcomp.compressors import tails
from jaxcomp.compressors.schedule import Ratio, shown, target_of
from jaxcomp.compressors.tails import Sample, fitted
from jaxcomp.compressors.threshold import Estimator, by_threshold
from jaxcomp.factories import factory
from jaxcomp.select import count_above, every, marked_above

__all__ = ["FIRST_RATIO", "counting_estimator", "first_ratio", "sidco"]

Array = jax.Array
FIRST_RATIO = 0.25  # of the first stage
STAGES = 3  # what "auto" means without a rule that changes it
SAMPLE = 1 << 18  # entries that "count" fits to
ADAPTS = ("count", "paper", "climb", None)
QUANTILES = ("newton", "approximate")
TOLERANCE = 0.1  # relative deviation beyond which the counts correct the threshold
IN_SAMPLE = 0.02  # the smallest tolerance in a sample
TRIES = 3


@factory
def sidco(
    ratio: Ratio,
    *,
    law: str = "exponential",
    stages: int | str = "auto",
    adapt: str | None = "count",
    capacity: float = 1.25,
    quantile: str = "newton",
    sample: int | None = SAMPLE,
    peak: float | None = None,
) -> Compressor:
    """Keeps the entries above a threshold estimated from a fitted distribution.

    C(x)_j = x_j if |x_j| > eta_M, else 0. With Q(e, r) the (1 - r) quantile of the law fitted to the excesses e:

        eta_1 = Q(a, 1 / 4),   eta_m = eta_(m-1) + Q(a - eta_(m-1) | a > eta_(m-1), r_m).

    Laws: "exponential" (SIDCo-E) mean(e) ln(1 / r); "pareto" (SIDCo-P) the generalised Pareto law,
    fitted by moments; "gamma" (SIDCo-GP) a gamma law for eta_1 and the Pareto law afterwards.

    Stage ratios: those published are r_m = (4 delta)^(1 / (M - 1)); with adapt="count" they follow from the number of
    entries that each stage really left, and a last threshold that misses k by more than 10 % is corrected. Then between
    4 k / 5 and 5 k / 4 entries are sent whatever the law is (all that are not zero, if there are fewer).

    Exact zeros are left out of the fit; delta is a share of all entries. Fits are free of scale. If no entry exceeds
    the threshold about k are sent, and whatever is sent is at least as large as whatever is not, so alpha = 1 / d is
    certain, and about delta in practice. Biased. Equal magnitudes: the first k by index. NaN and infinities count as
    zeros. Where the sum of magnitudes overflows the k largest are sent, about. A zero vector sends nothing.

    Args:
        ratio: delta, target share of entries, in (0, 1], or an optax schedule.
        law: "exponential", "pareto" or "gamma".
        stages: M, number of fits, at least 1. "auto": 3, or, where `adapt` moves it, 1 at first.
        adapt: "count" as above; None for the published recursion with M stages; "paper" and "climb" for the
            published recursion with an M that changes when the mean of (sent / k) over 5 rounds leaves [0.8, 1.2]:
            see `contrib.sidco_published`.
        capacity: room in the message as a multiple of k = max(1, floor(delta d)), at least 1. When
            more entries exceed the threshold (with adapt="count": more than that, or than 5 k / 4) it rises until they
            fit; the others stay in the memory of the algorithm and are counted as overflow.
        quantile: of the gamma law: "newton" (exact) or "approximate" (closed form).
        sample: with adapt="count", the least number of entries to fit to; None for all of them. The count is
            always that of all entries.
        peak: largest value of a schedule; its first one if not given.

    Returns:
        Compressor with payload `Sparse` of ceil(capacity k) entries.

    Raises:
        ValueError: an argument is out of range.

    Reference: Abdelmoniem, Elzanaty, Alouini, Canini 2021 (SIDCo), algorithm 1. adapt="count" is ours.

    >>> import jax, jax.numpy as jnp, jaxcomp as jc
    >>> x = jnp.array([0.1, -0.2, 5.0, 0.1, 0.0, -0.1, 0.2, 0.1])
    >>> print(jc.roundtrip(jc.sidco(1 / 8), x, key=jax.random.key(0))[0])
    [0. 0. 5. 0. 0. 0. 0. 0.]
    """
    target = target_of("sidco", ratio, peak)
    _check(law, stages, adapt, quantile, sample)
    first = (1 if adapt in ("paper", "climb") else STAGES) if stages == "auto" else int(stages)
    number = 1 if not callable(ratio) and ratio >= FIRST_RATIO else first
    name = f"sidco({shown(ratio)})" if law == "exponential" else f"sidco({shown(ratio)}, {law})"
    return by_threshold(name, target, _estimator(law, adapt, quantile == "newton", number, sample), capacity=capacity)


def _estimator(law: str, adapt: str | None, exact: bool, stages: int, sample: int | None) -> Estimator:
    if adapt == "count":
        return counting_estimator(law, exact, stages, sample)
    from jaxcomp.contrib.sidco_published import adaptive, published  # only where the option asks for them

    if adapt is None:
        return published(law, exact, stages)
    return adaptive(law, exact, stages, climb=adapt == "climb")


def _check(law: str, stages: int | str, adapt: str | None, quantile: str, sample: int | None) -> None:
    for name, value, allowed in (
        ("law", law, tails.LAWS),
        ("adapt", adapt, ADAPTS),
        ("quantile", quantile, QUANTILES),
    ):
        if value not in allowed:
            raise ValueError(f"sidco: {name} must be one of {', '.join(map(repr, allowed))}; got {value!r}")
    if sample is not None and not is_whole(sample):
        raise ValueError(f"sidco: sample must be an integer of at least 1, or None; got {sample!r}")
    if stages != "auto" and not is_whole(stages):
        raise ValueError(f'sidco: stages must be an integer of at least 1, or "auto"; got {stages!r}')


# ------------------------------------------------------------------------------------------------
# Stages


def first_ratio(sample: Sample, ratio: Array, stages: Array | int) -> tuple[Array, Array, Array]:
    """delta as a share of the entries that are not zero; whether one stage is enough; -ln(r_1)."""
    dtype = sample.mean.dtype
    size = jnp.asarray(sample.x.shape[0], dtype)
    share = jnp.minimum(ratio.astype(dtype) * size / jnp.maximum(sample.present, 1).astype(dtype), 1)
    one_stage = (share >= FIRST_RATIO) | (jnp.asarray(stages) == 1)
    return share, one_stage, jnp.where(one_stage, -jnp.log(share), -math.log(FIRST_RATIO))


class Point(NamedTuple):
    """A threshold and the number of entries above it."""

    eta: Array
    above: Array


def counting_estimator(law: str, exact: bool, stages: int, sample: int | None) -> Estimator:
    """The recursion with M = stages, fitted to about `sample` entries, or to all for None."""

    def estimate(key, x, k, ratio, memory):
        stride = max(1, x.shape[0] // sample - 1) | 1 if sample else 1
        eta, before, goal = _last_two(every(x, stride), k, stride, ratio, stages, law, exact)
        end, words = _corrected(x, before._replace(above=before.above * stride), eta, goal)
        return end.eta, (words, end.above), memory

    return Estimator(estimate, near=True)


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
