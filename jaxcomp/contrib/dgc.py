"""Deep Gradient Compression: a threshold from a sample.

Momentum correction, factor masking and local clipping are `contrib.momentum_correction`, the warm-up of the ratio is
`compressors.schedule.warm_up`.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.arrays import finite, wide
from jaxcomp.base import Compressor
from jaxcomp.compressors.schedule import Ratio, Target, shown, target_of
from jaxcomp.compressors.threshold import Estimator, adjusted, by_threshold
from jaxcomp.factories import factory
from jaxcomp.select import descending, magnitude

__all__ = ["dgc"]

Array = jax.Array
TOO_MANY = 1.3  # times k: then the exact k largest are taken
TOO_FEW = 0.8  # times k: then the threshold is lowered by this factor
TRIES = 10
LAST_RATIO = 0.001  # that schedules are taken to end at, for the size of the sample


@factory
def dgc(ratio: Ratio, *, sample_ratio: float = 0.01, peak: float | None = None) -> Compressor:
    """Keeps the entries above the quantile of a strided sample.

    eta = the (n_s delta)-th largest of n_s = max(sample_ratio d, 2 / delta) magnitudes, taken at an odd stride from a
    random start. With c entries at or above it: more than 1.3 k, the exact k largest are sent (the
    hierarchical selection); fewer than 0.8 k, eta <- 0.8 eta, at most ten times. At most k are sent, the
    first by index. Biased; alpha = 1 / d (at least the largest is sent), about delta in practice.

    The rest of the method is `momentum_correction` (the algorithm) and `warm_up` (the ratio).

    Args:
        ratio: delta, target share of entries, in (0, 1], or an optax schedule.
        sample_ratio: share of the entries in the sample, in (0, 1].
        peak: largest value of the schedule; its first one if not given.

    Returns:
        Compressor with payload `Sparse` of k = max(1, floor(delta d)) entries.

    Raises:
        ValueError: an argument is out of range.

    Reference: Lin, Han, Mao, Wang, Dally 2018 (DGC), section 3 and appendix; sampling and correction as in the authors'
    code, whose K is rounded up.

    >>> import jaxcomp as jc
    >>> x = jnp.array([0.1, -3.0, 0.5, 2.0])
    >>> print(jc.roundtrip(jc.contrib.dgc(0.5), x, key=jax.random.key(0))[0])
    [ 0. -3.  0.  2.]
    """
    target = target_of("dgc", ratio, peak)
    if not 0 < sample_ratio <= 1:
        raise ValueError(f"dgc: sample_ratio must be in (0, 1]; got {sample_ratio}")
    smallest = LAST_RATIO if callable(ratio) else ratio

    def estimate(key, x, k, share, memory):
        d = x.shape[0]
        size = min(d, max(math.ceil(sample_ratio * d), math.ceil(2 / smallest)))
        eta = _sampled(key, x, size, share, target)
        few = (TOO_FEW * k.astype(jnp.float32)).astype(jnp.int32)
        lower = jnp.asarray(TOO_FEW, eta.dtype)
        return *adjusted(x, eta, lambda count: jnp.where(count < few, lower, 1), TRIES), memory

    def bounds(wanted, k):
        limit = (TOO_MANY * k.astype(jnp.float32)).astype(jnp.int32)
        return 1, jnp.where(wanted > limit, k, limit)

    return by_threshold(f"dgc({shown(ratio)})", target, Estimator(estimate, bounds=bounds), capacity=1.0)


def _sampled(key: Array, x: Array, size: int, share: Array, target: Target) -> Array:
    """Quantile of a sample of about so many magnitudes."""
    d = x.shape[0]
    stride = max(1, d // size - 1) | 1
    size = d // stride
    start = jax.random.randint(key, (), 0, min(stride, d - (size - 1) * stride), jnp.int32)
    taken = magnitude(finite(x[start + stride * lax.iota(jnp.int32, size)]))
    most = min(size, math.ceil(size * target.peak(d) / d) + 1)
    rank = jnp.clip(jnp.ceil(size * share - 1e-4).astype(jnp.int32), 1, most) - 1
    at = descending(taken, most)[rank]
    # The method keeps |x| >= eta; just below it, > is the same.
    return jnp.nextafter(at, jnp.zeros((), wide(x.dtype)))
