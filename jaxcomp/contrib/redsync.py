"""RedSync: the threshold lies on the line between the mean and the largest magnitude."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.arrays import wide
from jaxcomp.base import Compressor
from jaxcomp.checks import is_whole
from jaxcomp.compressors.schedule import Ratio, shown, target_of
from jaxcomp.compressors.threshold import Estimator, by_threshold
from jaxcomp.factories import factory
from jaxcomp.norms import max_abs
from jaxcomp.select import count_above, excess_above, magnitude

__all__ = ["redsync"]

Array = jax.Array


@factory
def redsync(
    ratio: Ratio,
    *,
    method: str = "search",
    spacing: float = 0.2,
    reuse: int = 1,
    peak: float | None = None,
) -> Compressor:
    """Keeps the entries above a threshold between the mean and the largest magnitude.

    eta(t) = mean(a) + t (max(a) - mean(a)),  a = |x|.

    "search" (threshold binary search): t by bisection of [0, 1] until between k and 2k entries exceed eta(t),
        or the interval is not longer than `spacing`. Sends up to 2k entries.
    "trimmed" (trimmed top-k): t = 1 - spacing, 1 - 2 spacing, ... until at least k entries exceed eta(t), then the
        exact k largest of those. Sends k entries, those of `top_k`; alpha = k / d.

    Biased; alpha = 1 / d for "search".

    Args:
        ratio: delta, target share of entries, in (0, 1], or an optax schedule.
        method: "search" or "trimmed". The paper takes "trimmed" for layers of up to 4 MB.
        spacing: of the values of t, in (0, 1).
        reuse: "search" only: number of rounds for which a threshold is used again, at least 1.
        peak: largest value of the schedule; its first one if not given.

    Returns:
        Compressor with payload `Sparse` of 2k or k entries.

    Raises:
        ValueError: an argument is out of range.

    Reference: Fang, Fu, Yang, Hsieh 2019 (RedSync), algorithms 2 and 3. The public implementations move the
    interval the wrong way when between k/2 and k entries exceed the threshold, and leave out the last
    top-k of "trimmed"; here neither is so.

    >>> import jaxcomp as jc
    >>> x = jnp.array([0.1, -3.0, 0.5, 0.2])
    >>> print(jc.roundtrip(jc.contrib.redsync(0.25), x, key=jax.random.key(0))[0])
    [ 0. -3.  0.  0.]
    """
    if method not in ("search", "trimmed"):
        raise ValueError(f"redsync: method must be 'search' or 'trimmed'; got {method!r}")
    if not 0 < spacing < 1:
        raise ValueError(f"redsync: spacing must be in (0, 1); got {spacing}")
    if not is_whole(reuse):
        raise ValueError(f"redsync: reuse must be an integer of at least 1; got {reuse}")
    target, name = target_of("redsync", ratio, peak), f"redsync({shown(ratio)})"
    if method == "search":
        return by_threshold(name, target, _search(spacing, int(reuse)), capacity=2.0)
    return by_threshold(name, target, _trim(spacing), capacity=1.0, alpha=lambda d: target.least(d) / d)


def _search(spacing: float, reuse: int) -> Estimator:
    """Threshold binary search, algorithm 3. Remembers the threshold, and its age in rounds."""

    def estimate(key, x, k, share, memory):
        dtype = wide(x.dtype)

        def found():
            eta = _line(x)

            def probe(carry):
                low, high, _, _ = carry
                t = (low + high) / 2
                count = count_above(x, eta(t))
                return jnp.where(count > 2 * k, t, low), jnp.where(count < k, t, high), eta(t), count

            def unsettled(carry):
                low, high, _, count = carry
                return (high - low > spacing) & ((count < k) | (count > 2 * k))

            none = eta(jnp.zeros((), dtype))
            # Like `none`, so that they have its type under shard_map.
            start = (jnp.zeros_like(none), jnp.ones_like(none), none, jnp.zeros_like(none, jnp.int32))
            return lax.while_loop(unsettled, probe, start)[2]

        threshold, age = memory
        threshold = threshold + jnp.sum(jnp.zeros_like(x[:0], dtype))  # of the type of x under shard_map
        threshold = lax.cond(age % reuse == 0, found, lambda: threshold)
        return threshold, None, (threshold, age + 1)

    return Estimator(estimate, memory=lambda dtype: (jnp.zeros((), dtype), jnp.zeros((), jnp.int32)))


def _trim(spacing: float) -> Estimator:
    """Trimmed top-k, algorithm 2."""

    def estimate(key, x, k, share, memory):
        eta = _line(x)
        dtype = wide(x.dtype)

        def lower(carry):
            t, _ = carry
            t = jnp.maximum(t - spacing, 0)
            return t, count_above(x, eta(t))

        start = (jnp.ones((), dtype), jnp.zeros_like(eta(jnp.ones((), dtype)), jnp.int32))
        t, _ = lax.while_loop(lambda c: (c[1] < k) & (c[0] > 0), lower, start)
        return eta(t), None, memory

    return Estimator(estimate, bounds=lambda wanted, k: (k, k))


def _line(x: Array) -> Callable[[Array], Array]:
    """t -> eta(t)."""
    zero = jnp.zeros((), wide(x.dtype))
    top = max_abs(x).astype(zero.dtype)
    total, _ = excess_above(x, zero, top)
    fallback = lambda x: jnp.mean(jnp.where(magnitude(x) < jnp.inf, magnitude(x) / x.shape[0], zero)) * x.shape[0]
    mean = lax.cond(jnp.isfinite(total), lambda x: total / x.shape[0], fallback, x)
    return lambda t: mean + t * (top - mean)
