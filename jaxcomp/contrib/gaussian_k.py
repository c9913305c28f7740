"""Gaussian-k: the threshold is a quantile of a normal law, corrected at most twice."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.special import ndtri

from jaxcomp.arrays import exponent_of, finite, power_of_two, wide
from jaxcomp.base import Compressor
from jaxcomp.compressors.schedule import Ratio, shown, target_of
from jaxcomp.compressors.threshold import Estimator, adjusted, by_threshold
from jaxcomp.factories import factory
from jaxcomp.norms import max_abs

__all__ = ["gaussian_k"]

Array = jax.Array
TRIES = 2  # thresholds after the first


@factory
def gaussian_k(ratio: Ratio, *, peak: float | None = None, capacity: float = 1.5) -> Compressor:
    """Keeps the entries above the quantile of a normal law.

    eta = mean(x) + Phi^-1(1 - delta / 2) std(x). It is evaluated at most three times: halved when fewer
    than 2k/3 entries exceed it, times 1.5 when more than 4k/3 do. Biased; alpha = 1 / d.

    Args:
        ratio: delta, target share of entries, in (0, 1], or an optax schedule.
        peak: largest value of the schedule; its first one if not given.
        capacity: room in the message as a multiple of k. Heavy tails can exceed any: the threshold
            then rises until the entries fit, and the others are counted as overflow.

    Returns:
        Compressor with payload `Sparse` of ceil(capacity k) entries.

    Raises:
        ValueError: an argument is out of range.

    Reference: Shi, Chu, Cheung, See 2019, Understanding top-k sparsification, algorithm 1 (Gaussian-k).

    >>> import jaxcomp as jc
    >>> x = jnp.array([0.1, -3.0, 0.5, 0.2])
    >>> print(jc.roundtrip(jc.contrib.gaussian_k(0.25), x, key=jax.random.key(0))[0])
    [ 0. -3.  0.  0.]
    """
    target = target_of("gaussian_k", ratio, peak)
    return by_threshold(f"gaussian_k({shown(ratio)})", target, Estimator(_estimate), capacity=capacity)


def _estimate(key, x, k, share, memory):
    factor_of = lambda count: jnp.where(3 * count < 2 * k, 0.5, jnp.where(3 * count > 4 * k, 1.5, 1.0))
    return *adjusted(x, _quantile(x, share), factor_of, TRIES), memory


def _quantile(x: Array, share: Array) -> Array:
    """mean + Phi^-1(1 - share / 2) std of the finite entries."""
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
    return (mean + z * deviation) / scale
