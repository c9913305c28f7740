"""Sparsifiers that estimate a threshold: what they share, and SIDCo's rivals.

All of them guess a threshold eta and send the entries with |x_j| > eta, so their cost is O(d). They
differ in the guess. What they share is here: a target that may follow a schedule, a message of
fixed capacity, and `select.top_set`, which sees to it that at least one entry is sent and that what
is sent fits and is at least as large as what is not. So each of them contracts.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.special import ndtri

from jaxcomp.base import Compressor, Spec, State, Tally, finite, wide
from jaxcomp.compressors.combine import narrow
from jaxcomp.compressors.sparsify import add_sparse, dense_of_sparse
from jaxcomp.compressors.vector import count_of, is_whole, on_vectors
from jaxcomp.norms import exponent_of, max_abs, power_of_two
from jaxcomp.payloads import Sparse
from jaxcomp.select import (
    count_above,
    count_words,
    excess_above,
    first_bits,
    indices_of_words,
    magnitude,
    take,
    top_set,
    words_above,
)

__all__ = ["Target", "by_threshold", "gaussian_k", "hard_threshold", "redsync", "shown", "target_of"]

Array = jax.Array
Ratio = float | Callable[[Any], Any]


class Target(NamedTuple):
    """How many entries to keep of d.

    peak: d -> the most, for the capacity. ratio: round -> share. scheduled: whether it changes.
    """

    peak: Callable[[int], int]
    ratio: Callable[[Any], Any]
    scheduled: bool

    def of(self, d: int, round_: Any) -> tuple[Array, Array]:
        """k i32[] = max(1, floor(ratio d)), at most peak; and ratio, f32[]."""
        if not self.scheduled:
            return jnp.asarray(self.peak(d), jnp.int32), jnp.asarray(self.ratio(0), jnp.float32)
        ratio = jnp.asarray(self.ratio(round_), jnp.float32)
        return jnp.clip(jnp.floor(ratio * d).astype(jnp.int32), 1, self.peak(d)), ratio


def target_of(name: str, ratio: Ratio, peak: float | None = None) -> Target:
    """Checks a ratio that is a number or an optax schedule (round -> share of entries).

    Args:
        ratio: in (0, 1], or a schedule with such values.
        peak: the largest value of the schedule, which sets the capacity (larger ones are cut to it); its
            value in round 0 if not given.

    Raises:
        ValueError: out of range, or a peak for a ratio that does not change.
    """
    if not callable(ratio):
        if peak is not None:
            raise ValueError(f"{name}: peak is for a ratio that follows a schedule; got ratio={ratio}, peak={peak}")
        return Target(count_of(name, ratio, None), lambda round_: ratio, False)
    # A schedule computes in f32; its shortest decimal is the number that was meant.
    first = float(str(np.float32(ratio(0)))) if peak is None else peak
    return Target(count_of(name, first, None), ratio, True)


class Round(NamedTuple):
    """count i32[]: rounds so far, for a schedule."""

    count: Array


class ThresholdLocal(NamedTuple):
    """tally: of this round; memory: what the estimate remembers."""

    tally: Tally
    memory: Any


def by_threshold(
    name: str,
    target: Target,
    estimate: Callable[..., tuple[Array, Array, Any]],
    *,
    capacity: float,
    memory: Callable[[Any], Any] = lambda dtype: (),
    learn: Callable[..., Any] = lambda memory, wanted, k, ratio: memory,
    bounds: Callable[[Array, Array], tuple[Any, Any]] | None = None,
    alpha: Callable[[int], float] = lambda d: 1 / d,
    values: Any = None,
    indices: Any = None,
) -> Compressor:
    """A compressor from an estimate of a threshold.

    Args:
        name: for errors and tables.
        target: how many entries to keep.
        estimate: (key, x, k, ratio, memory) -> (eta, words_above(x, eta), memory). x is float[d]
            with d > 0 and may hold NaN and infinities; eta may be anything.
        capacity: room in the message as a multiple of k.
        memory: dtype -> what the estimate remembers at first.
        learn: (memory, number of entries above eta, k, ratio) -> memory, after each round with an
            entry that is not zero.
        bounds: (number of entries above eta, k) -> how many are enough, and at most how many to keep;
            where it is not so, the threshold moves until at least k and at most that many are left; the
            first k by index are sent. Not given: one is enough, and as many as the capacity are kept, the
            others being counted as overflow.
        alpha: of the compressor.
        values, indices: see `narrow`.
    """
    if not 1 <= capacity < math.inf:
        raise ValueError(f"{name.split('(')[0]}: capacity must be at least 1; got {capacity}")

    def places(d: int) -> int:
        return min(d, math.ceil(capacity * target.peak(d)))

    def init(shared_key, like):
        local = ThresholdLocal(Tally(jnp.zeros((), jnp.int32)), memory(wide(like.dtype)))
        return State(local, Round(jnp.zeros((), jnp.int32)) if target.scheduled else ())

    def compress(key, x, state):
        d = x.shape[0]
        if d == 0:
            return Sparse(x, jnp.zeros((0,), jnp.int32)), state.local
        k, ratio = target.of(d, state.shared.count if target.scheduled else 0)
        eta, words, remembered = estimate(key, x, k, ratio, state.local.memory)
        wanted = count_words(words)
        enough, most = (1, places(d)) if bounds is None else bounds(wanted, k)
        words = top_set(x, eta, k, most, enough=enough, words=words)
        chosen = count_words(words)
        if bounds is None:
            room, chosen = places(d), jnp.maximum(chosen, wanted)
        else:
            room, words = k, first_bits(words, k)
        positions, _ = indices_of_words(words, places(d), d)
        overflow = Tally(jnp.maximum(chosen - room, 0))
        learnt = learn(remembered, wanted, k, ratio)
        learnt = jax.tree.map(lambda new, old: jnp.where(chosen > 0, new, old), learnt, state.local.memory)
        return Sparse(take(x, positions), positions), ThresholdLocal(overflow, learnt)

    compressor = on_vectors(
        init=init,
        compress=compress,
        decompress=dense_of_sparse,
        accumulate=add_sparse,
        advance=(lambda shared: Round(shared.count + 1)) if target.scheduled else None,
        spec=Spec(name, omega=None, alpha=lambda d: alpha(d) if d else 1.0, linear=False, selects=True),
    )
    return narrow(compressor, values=values, indices=indices)


def _peeled(estimate: Callable[..., tuple[Array, Any]]) -> Callable[..., tuple[Array, Array, Any]]:
    """For estimates of a threshold alone: (eta, memory) -> (eta, words, memory)."""

    def with_words(key, x, k, ratio, memory):
        eta, memory = estimate(key, x, k, ratio, memory)
        return eta, words_above(x, eta), memory

    return with_words


def hard_threshold(threshold: float, *, ratio: float = 0.01, values: Any = None, indices: Any = None) -> Compressor:
    """Keeps the entries above a fixed threshold.

    C(x)_j = x_j if |x_j| > threshold, else 0. If none exceeds it the largest is sent, so that the
    compressor contracts: alpha = 1 / d. Biased.

    Args:
        threshold: at least 0.
        ratio: share of the entries that the message has room for, in (0, 1]. When more exceed the
            threshold it rises until they fit; the others are counted as overflow.
        values, indices: narrower lanes, see `narrow`.

    Returns:
        Compressor with payload `Sparse` of max(1, floor(ratio d)) entries.

    Raises:
        ValueError: an argument is out of range.

    Reference: Dutta et al. 2020; Sahu et al. 2021, Rethinking gradient sparsification as total error minimization.

    >>> import jaxcomp as jc
    >>> x = jnp.array([0.1, -3.0, 0.5, 2.0])
    >>> print(jc.roundtrip(jc.hard_threshold(0.4, ratio=1), x, key=jax.random.key(0))[0])
    [ 0.  -3.   0.5  2. ]
    """
    if not 0 <= threshold < math.inf:
        raise ValueError(f"hard_threshold: threshold must be at least 0 and finite; got {threshold}")

    def estimate(key, x, k, ratio, memory):
        return jnp.asarray(threshold, wide(x.dtype)), memory

    return by_threshold(
        f"hard_threshold({threshold})",
        target_of("hard_threshold", ratio),
        _peeled(estimate),
        capacity=1.0,
        values=values,
        indices=indices,
    )


def gaussian_k(
    ratio: Ratio,
    *,
    peak: float | None = None,
    capacity: float = 1.5,
    values: Any = None,
    indices: Any = None,
) -> Compressor:
    """Keeps the entries above the quantile of a normal law.

    eta = mean(x) + Phi^-1(1 - delta / 2) std(x). It is evaluated at most three times: halved when fewer
    than 2k/3 entries exceed it, times 1.5 when more than 4k/3 do. Biased; alpha = 1 / d.

    Args:
        ratio: delta, target share of entries, in (0, 1], or an optax schedule.
        peak: largest value of the schedule; its first one if not given.
        capacity: room in the message as a multiple of k. Heavy tails can exceed any: the threshold
            then rises until the entries fit, and the others are counted as overflow.
        values, indices: narrower lanes, see `narrow`.

    Returns:
        Compressor with payload `Sparse` of ceil(capacity k) entries.

    Raises:
        ValueError: an argument is out of range.

    Reference: Shi, Chu, Cheung, See 2019, Understanding top-k sparsification, algorithm 1 (Gaussian-k).

    >>> import jaxcomp as jc
    >>> x = jnp.array([0.1, -3.0, 0.5, 0.2])
    >>> print(jc.roundtrip(jc.gaussian_k(0.25), x, key=jax.random.key(0))[0])
    [ 0. -3.  0.  0.]
    """

    def estimate(key, x, k, share, memory):
        dtype = wide(x.dtype)
        exponent = exponent_of(max_abs(x).astype(dtype))
        scale = power_of_two(jnp.clip(-exponent, -126, 126), dtype)
        first = lambda x: jnp.mean(x.astype(dtype) * scale)
        second = lambda x: jnp.mean(jnp.square(jnp.clip(x.astype(dtype) * scale, -2, 2)))
        mean = first(x)  # finite only if all entries are
        mean, square = lax.cond(
            jnp.isfinite(mean), lambda x: (mean, second(x)), lambda x: (first(finite(x)), second(finite(x))), x
        )
        deviation = jnp.sqrt(jnp.maximum(square - jnp.square(mean), 0))
        # Past 2^-25 the quantile is infinite in f32.
        z = ndtri(1 - jnp.clip(share, 2.0**-24, 1).astype(dtype) / 2)
        eta = (mean + z * deviation) / scale
        words = words_above(x, eta)

        def again(carry):
            tries, eta, words, factor = carry
            eta = eta * factor
            words = words_above(x, eta)
            return tries + 1, eta, words, factor_of(words)

        def factor_of(words):
            count = 3 * count_words(words)
            return jnp.where(count < 2 * k, 0.5, jnp.where(count > 4 * k, 1.5, 1.0)).astype(dtype)

        start = (jnp.zeros((), jnp.int32), eta, words, factor_of(words))
        _, eta, words, _ = lax.while_loop(lambda c: (c[0] < 2) & (c[3] != 1), again, start)
        return eta, words, memory

    return by_threshold(
        f"gaussian_k({shown(ratio)})",
        target_of("gaussian_k", ratio, peak),
        estimate,
        capacity=capacity,
        values=values,
        indices=indices,
    )


def redsync(
    ratio: Ratio,
    *,
    method: str = "search",
    step: float = 0.2,
    reuse: int = 1,
    peak: float | None = None,
    values: Any = None,
    indices: Any = None,
) -> Compressor:
    """Keeps the entries above a threshold between the mean and the largest magnitude.

    eta(t) = mean(a) + t (max(a) - mean(a)),  a = |x|.

    "search" (threshold binary search): t by bisection of [0, 1] until between k and 2k entries exceed eta(t),
        or the interval is not longer than `step`. Sends up to 2k entries.
    "trimmed" (trimmed top-k): t = 1 - step, 1 - 2 step, ... until at least k entries exceed eta(t), then the
        exact k largest of those. Sends k entries, those of `top_k`; alpha = k / d.

    Biased; alpha = 1 / d for "search".

    Args:
        ratio: delta, target share of entries, in (0, 1], or an optax schedule.
        method: "search" or "trimmed". The paper takes "trimmed" for layers of up to 4 MB.
        step: of t, in (0, 1).
        reuse: "search" only: number of rounds for which a threshold is used again, at least 1.
        peak: largest value of the schedule; its first one if not given.
        values, indices: narrower lanes, see `narrow`.

    Returns:
        Compressor with payload `Sparse` of 2k or k entries.

    Raises:
        ValueError: an argument is out of range.

    Reference: Fang, Fu, Yang, Hsieh 2019 (RedSync), algorithms 2 and 3. The public implementations move the
    interval the wrong way when between k/2 and k entries exceed the threshold, and leave out the last
    top-k of "trimmed"; here neither is so.

    >>> import jaxcomp as jc
    >>> x = jnp.array([0.1, -3.0, 0.5, 0.2])
    >>> print(jc.roundtrip(jc.redsync(0.25), x, key=jax.random.key(0))[0])
    [ 0. -3.  0.  0.]
    """
    if method not in ("search", "trimmed"):
        raise ValueError(f"redsync: method must be 'search' or 'trimmed'; got {method!r}")
    if not 0 < step < 1:
        raise ValueError(f"redsync: step must be in (0, 1); got {step}")
    if not is_whole(reuse):
        raise ValueError(f"redsync: reuse must be an integer of at least 1; got {reuse}")
    trimmed = method == "trimmed"
    target = target_of("redsync", ratio, peak)

    def line(x):
        """t -> eta(t)."""
        zero = jnp.zeros((), wide(x.dtype))
        top = max_abs(x).astype(zero.dtype)
        total, _ = excess_above(x, zero, top)
        fallback = lambda x: jnp.mean(jnp.where(magnitude(x) < jnp.inf, magnitude(x) / x.shape[0], zero)) * x.shape[0]
        mean = lax.cond(jnp.isfinite(total), lambda x: total / x.shape[0], fallback, x)
        return lambda t: mean + t * (top - mean)

    def search(key, x, k, share, memory):
        dtype = wide(x.dtype)

        def found():
            eta = line(x)

            def probe(carry):
                low, high, _, _ = carry
                t = (low + high) / 2
                count = count_above(x, eta(t))
                return jnp.where(count > 2 * k, t, low), jnp.where(count < k, t, high), eta(t), count

            def unsettled(carry):
                low, high, _, count = carry
                return (high - low > step) & ((count < k) | (count > 2 * k))

            none = eta(jnp.zeros((), dtype))
            # Like `none`, so that they have its type under shard_map.
            start = (jnp.zeros_like(none), jnp.ones_like(none), none, jnp.zeros_like(none, jnp.int32))
            return lax.while_loop(unsettled, probe, start)[2]

        threshold, age = memory
        threshold = threshold + jnp.sum(jnp.zeros_like(x[:0], dtype))  # of the type of x under shard_map
        threshold = lax.cond(age % reuse == 0, found, lambda: threshold)
        return threshold, (threshold, age + 1)

    def trim(key, x, k, share, memory):
        eta = line(x)
        dtype = wide(x.dtype)

        def lower(carry):
            t, _ = carry
            t = jnp.maximum(t - step, 0)
            return t, count_above(x, eta(t))

        start = (jnp.ones((), dtype), jnp.zeros_like(eta(jnp.ones((), dtype)), jnp.int32))
        t, _ = lax.while_loop(lambda c: (c[1] < k) & (c[0] > 0), lower, start)
        return eta(t), memory

    return by_threshold(
        f"redsync({shown(ratio)})",
        target,
        _peeled(trim if trimmed else search),
        capacity=1.0 if trimmed else 2.0,
        memory=lambda dtype: () if trimmed else (jnp.zeros((), dtype), jnp.zeros((), jnp.int32)),
        bounds=(lambda wanted, k: (k, k)) if trimmed else None,
        alpha=(lambda d: target.peak(d) / d) if trimmed and not target.scheduled else (lambda d: 1 / d),
        values=values,
        indices=indices,
    )


def shown(ratio: Ratio) -> str:
    """A ratio as it stands in the name of a compressor."""
    return "schedule" if callable(ratio) else str(ratio)
