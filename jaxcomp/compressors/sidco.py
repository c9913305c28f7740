"""SIDCo: a threshold from a fitted sparsity-inducing distribution, in a few passes, without a sort.

Magnitudes a = |x| of gradients follow heavy-peaked laws. Fit one to all of a, and its (1 - delta)
quantile is a threshold that about delta d entries exceed. Far tails are fitted badly by the bulk,
so it is done in stages (peaks over threshold): the first stage keeps a quarter, each further one
fits the excesses over the previous threshold, and the product of the stage ratios is delta.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.base import Compressor, finite, wide
from jaxcomp.compressors import tails
from jaxcomp.compressors.threshold import by_threshold, shown, target_of
from jaxcomp.compressors.vector import is_whole
from jaxcomp.norms import exponent_of, power_of_two
from jaxcomp.select import count_above, count_words, excess_above, magnitude, words_above

__all__ = ["sidco"]

Array = jax.Array
FIRST_RATIO = 0.25  # of the first stage
STAGES = 3  # what "auto" means without a rule that changes it
WINDOW = 5  # rounds between two changes of the number of stages
BAND = 0.2  # relative deviation from the target that changes it
SAMPLE = 1 << 18  # entries that "count" fits to
TOLERANCE = 0.1  # relative deviation beyond which the counts correct the threshold
LAWS = ("exponential", "gamma", "pareto")
ADAPTS = ("count", "paper", "climb", None)
QUANTILES = ("newton", "approximate")


class Stages(NamedTuple):
    """What adapts the number of stages.

    achieved f32[]: sum over the window of (entries above the threshold) / k;  last f32[]: its mean over the
    window before, 0 at first;  calls i32[]: rounds of this window;  stages i32[];  direction i32[]: +1 or -1.
    """

    achieved: Array
    last: Array
    calls: Array
    stages: Array
    direction: Array


def sidco(
    ratio: float | Callable[[Any], Any],
    *,
    law: str = "exponential",
    stages: int | str = "auto",
    adapt: str | None = "count",
    capacity: float = 1.25,
    quantile: str = "newton",
    sample: int | None = SAMPLE,
    peak: float | None = None,
    values: Any = None,
    indices: Any = None,
) -> Compressor:
    """Keeps the entries above a threshold estimated from a fitted distribution.

    C(x)_j = x_j if |x_j| > eta_M, else 0. With n_m the number of entries above eta_(m-1), n_1 that of
    the entries that are not zero, and Q(e, r) the (1 - r) quantile of the law fitted to the excesses e:

        eta_1 = Q(a, 1 / 4),   eta_m = eta_(m-1) + Q(a - eta_(m-1) | a > eta_(m-1), r_m).

    Laws: "exponential" (SIDCo-E) mean(e) ln(1 / r); "pareto" (SIDCo-P) the generalised Pareto law,
    fitted by moments; "gamma" (SIDCo-GP) a gamma law for eta_1 and the Pareto law afterwards.

    Stage ratios: r_m = (4 delta)^(1 / (M - 1)) as published; with adapt="count" r_m =
    (k / n_m)^(1 / (M - m + 1)), which mends the error of each stage in the next, and if the last threshold
    still misses k by more than 10 %, a line through the logarithms of the last two counts moves it, at most three
    times. Since it is counted in the end, the laws of long vectors are fitted to a strided sample.
    With one stage, or delta >= 1/4, eta = Q(a, delta).

    Exact zeros are left out of the fit, and the ratios refer to the entries that are not zero, so delta is still a
    share of all entries. Fits are free of scale. If no entry exceeds the threshold about k are sent, and
    whatever is sent is at least as large as whatever is not, so alpha = 1 / d is certain, and about delta in practice.
    Biased. Equal magnitudes: the first k by index. NaN and infinities count as zeros. Where the sum of magnitudes
    overflows there is no fit: about the k largest are sent. A zero vector sends nothing.

    Args:
        ratio: delta, target share of entries, in (0, 1], or an optax schedule.
        law: "exponential", "pareto" or "gamma".
        stages: M, number of fits, at least 1. "auto": 3, or, where `adapt` moves it, 1 at first.
        adapt: "count" as above; None for the published recursion with M stages; "paper" and "climb" for the
            published recursion with an M that changes when the mean of (sent / k) over 5 rounds leaves [0.8, 1.2].
            "paper": fewer stages when too many were sent, more when too few. "climb": the same in a
            direction that turns around whenever the deviation has grown, since for heavy tails more stages,
            not fewer, are the cure.
        capacity: room in the message as a multiple of k = max(1, floor(delta d)), at least 1. When
            more entries exceed the threshold it rises until they fit; the others stay in the
            memory of the algorithm and are counted as overflow.
        quantile: of the gamma law: "newton" (exact) or "approximate" (closed form).
        sample: with adapt="count", the least number of entries to fit to; None for all of them. The count is
            always that of all entries.
        peak: largest value of a schedule; its first one if not given.
        values, indices: narrower lanes, see `narrow`.

    Returns:
        Compressor with payload `Sparse` of ceil(capacity k) entries.

    Raises:
        ValueError: an argument is out of range.

    Reference: Abdelmoniem, Elzanaty, Alouini, Canini 2021 (SIDCo), algorithm 1. The location of a stage
    is the previous threshold, not the smallest exceedance as in the released code, which keeps nothing when
    one entry is left. adapt="count" is ours.

    >>> import jaxcomp as jc
    >>> x = jnp.array([0.1, -0.2, 5.0, 0.1, 0.0, -0.1, 0.2, 0.1])
    >>> print(jc.roundtrip(jc.sidco(1 / 8), x, key=jax.random.key(0))[0])
    [0. 0. 5. 0. 0. 0. 0. 0.]
    """
    target = target_of("sidco", ratio, peak)
    if law not in LAWS:
        raise ValueError(f"sidco: law must be one of {', '.join(map(repr, LAWS))}; got {law!r}")
    if adapt not in ADAPTS:
        raise ValueError(f"sidco: adapt must be one of {', '.join(map(repr, ADAPTS))}; got {adapt!r}")
    if quantile not in QUANTILES:
        raise ValueError(f"sidco: quantile must be one of {', '.join(map(repr, QUANTILES))}; got {quantile!r}")
    if sample is not None and not is_whole(sample):
        raise ValueError(f"sidco: sample must be an integer of at least 1, or None; got {sample!r}")
    moves = adapt in ("paper", "climb")
    if stages != "auto" and not is_whole(stages):
        raise ValueError(f'sidco: stages must be an integer of at least 1, or "auto"; got {stages!r}')
    num_stages = int(stages) if stages != "auto" else 1 if moves else STAGES
    if not callable(ratio) and ratio >= FIRST_RATIO:
        num_stages = 1

    counted = adapt == "count"

    def estimate(key, x, k, ratio, memory):
        number = memory.stages if moves else num_stages
        # Odd, so that the sample does not run along the columns of a matrix.
        stride = max(1, x.shape[0] // sample - 1) | 1 if counted and sample else 1
        y = finite(x[::stride])
        zero = jnp.zeros((), wide(x.dtype))
        total, present = excess_above(y, zero, count_above(y, zero))
        mean = total / jnp.maximum(present, 1).astype(total.dtype)
        goal = jnp.log(k.astype(mean.dtype)) if counted else None
        # Sums that overflow and means below 2^-116 are beyond a fit: `top_set` then searches.
        plain = jnp.isfinite(total) & (mean > 2.0 ** (jnp.finfo(mean.dtype).minexp + 10))
        eta, before = lax.cond(
            plain,
            lambda y, mean: _threshold(
                *(y, mean, present, None if goal is None else goal - math.log(stride), ratio, number),
                law=law,
                exact=quantile == "newton",
            ),
            lambda y, mean: (jnp.full_like(mean, jnp.inf), _Point(jnp.zeros_like(mean), present)),
            *(y, mean),
        )
        words = words_above(x, eta)
        if goal is not None:
            before = before._replace(above=before.above * stride)
            eta, words = _corrected(x, before, eta, words, goal)
        return eta, words, memory

    def first_memory(dtype):
        real, integer = jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32)
        return Stages(real, real, integer, integer + num_stages, integer + 1) if moves else ()

    return by_threshold(
        f"sidco({shown(ratio)})" if law == "exponential" else f"sidco({shown(ratio)}, {law})",
        target,
        estimate,
        capacity=capacity,
        memory=first_memory,
        learn=partial(_adapted, climb=adapt == "climb") if moves else lambda memory, wanted, k, ratio: memory,
        values=values,
        indices=indices,
    )


def _threshold(
    x: Array,
    mean: Array,
    present: Array,
    goal: Array | None,
    ratio: Array,
    number: Array | int,
    *,
    law: str,
    exact: bool,
) -> tuple[Array, "_Point"]:
    """eta_M, and eta_(M-1) with its count.

    mean: of the magnitudes that are not zero, `present` of them. All entries are finite. number: M.
    goal: logarithm of the number of entries to find; None for the published stage ratios.
    """
    dtype = mean.dtype
    # Everything in units of 2^e, about the mean: squares neither overflow nor vanish. Plain sums do neither.
    exponent = exponent_of(mean) if law != "exponential" else jnp.zeros((), jnp.int32)
    scale, unit = power_of_two(-exponent, dtype), power_of_two(exponent, dtype)
    excess = partial(excess_above, x, scale=None if law == "exponential" else scale)
    size = jnp.asarray(x.shape[0], dtype)
    share = jnp.minimum(ratio.astype(dtype) * size / jnp.maximum(present, 1).astype(dtype), 1)
    one_stage = (share >= FIRST_RATIO) | (jnp.asarray(number) == 1)
    later = jnp.where(one_stage, 0, jnp.log(FIRST_RATIO / share) / jnp.maximum(jnp.asarray(number, dtype) - 1, 1))

    def moments(eta, above, total):
        """Of the excesses over eta, in units; total: their sum, if known."""
        count = jnp.maximum(above, 1).astype(dtype)
        if total is None:
            total, above = excess(eta, above)
        result = tails.Moments(count, total / count)
        if law != "exponential":
            squares, _ = excess(eta, total, power=2)
            spread = jnp.maximum(squares - total * result.mean, 0)
            result = result._replace(variance=spread / jnp.maximum(count - 1, 1))
        return result

    first = jnp.where(one_stage, -jnp.log(share), -math.log(FIRST_RATIO))
    if law == "gamma":
        start = tails.Moments(present.astype(dtype), mean / unit, mean_log=_mean_log(x, scale, present))
        eta = tails.gamma(start, first, exact=exact) * unit
    elif law == "pareto":
        zero = jnp.zeros((), dtype)
        eta = tails.pareto(moments(zero, present, mean / unit * present.astype(dtype)), first) * unit
    else:
        eta = tails.exponential(tails.Moments(present.astype(dtype), mean), first)
    tail = tails.exponential if law == "exponential" else tails.pareto

    def stage(m, eta, before):
        above = count_above(x, eta)
        log_ratio = later
        if goal is not None:
            left = jnp.asarray(number, dtype) - m + 1
            log_ratio = (jnp.log(jnp.maximum(above, 1).astype(dtype)) - goal) / left
        step = tail(moments(eta, above, None), log_ratio) * unit
        # One excess has no spread to speak of, none has no mean: the threshold stays.
        return jnp.where(above >= 2, jnp.maximum(eta + step, 0), eta), _Point(eta, above)

    before = _Point(jnp.zeros_like(mean), present)
    if isinstance(number, int):
        for m in range(2, number + 1):
            eta, before = stage(m, eta, before)
    else:
        eta, before = lax.fori_loop(2, number + 1, lambda m, c: stage(m, *c), (eta, before))
    return eta, before


class _Point(NamedTuple):
    """A threshold and the number of entries above it."""

    eta: Array
    above: Array


def _corrected(x: Array, before: _Point, eta: Array, words: Array, goal: Array) -> tuple[Array, Array]:
    """Moves eta along the exponential law through the last two counts while it misses the goal, thrice at most."""
    dtype = eta.dtype
    log = lambda count: jnp.log(jnp.maximum(count.astype(dtype), 0.5))

    def misses(carry):
        tries, before, here, _ = carry
        count = jnp.exp(goal)
        off = jnp.abs(here.above.astype(dtype) - count) > TOLERANCE * count
        return off & (tries < 3) & (here.above != before.above)

    def move(carry):
        tries, before, here, _ = carry
        slope = (here.eta - before.eta) / (log(before.above) - log(here.above))
        eta = jnp.maximum(here.eta + slope * (log(here.above) - goal), 0)
        words = words_above(x, eta)
        return tries + 1, here, _Point(eta, count_words(words)), words

    start = (jnp.zeros((), jnp.int32), before, _Point(eta, count_words(words)), words)
    _, _, end, words = lax.while_loop(misses, move, start)
    return end.eta, words


def _mean_log(x: Array, scale: Array, present: Array) -> Array:
    """Mean of ln(scale |x_j|) over the entries that are not zero."""
    x, scale, present = lax.optimization_barrier((x, scale, present))
    tiny = jnp.finfo(scale.dtype).tiny
    # Zeros contribute exactly nothing to this sum.
    total = jnp.sum(jnp.log(jnp.maximum(magnitude(x) * scale, tiny)) - math.log(tiny))
    return total / jnp.maximum(present, 1).astype(scale.dtype) + math.log(tiny)


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
