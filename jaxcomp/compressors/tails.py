"""Laws of magnitudes and of excesses over a threshold: fits by moments, and their quantiles.

`exponential`, `pareto` and `gamma` take statistics of a sample of excesses e >= 0 (of magnitudes themselves in the
first stage, where the threshold is 0) and -ln(delta), and return the (1 - delta) quantile of the
fitted law, in the units of the mean. All are scalars, all are equivariant: statistics of s e give
s times the quantile. A negative -ln(delta) extrapolates below the threshold.

`Sample` takes these statistics of the magnitudes of a vector: `first` is the threshold of the first stage, `step` how
far that of a later stage lies above the one before. SIDCo-E fits exponential laws, SIDCo-P Pareto laws, and SIDCo-GP a
gamma law first and Pareto laws afterwards, since excesses of a gamma law are not gamma.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.special import gammaincc, gammaln

from jaxcomp.arrays import exponent_of, finite, power_of_two, wide
from jaxcomp.backend import one_of
from jaxcomp.select import count_above, excess_above, magnitude

__all__ = ["LAWS", "Moments", "Sample", "exponential", "fitted", "gamma", "gamma_shape", "pareto"]

Array = jax.Array
LAWS = ("exponential", "gamma", "pareto")
FEW = 8  # a variance of fewer excesses than this is noise; the exponential law then serves


class Moments(NamedTuple):
    """count f[], how many excesses; mean f[]; variance f[] (n - 1); mean_log f[] of their logarithms."""

    count: Array
    mean: Array
    variance: Any = None
    mean_log: Any = None


def exponential(moments: Moments, log_ratio: Array) -> Array:
    """mean * ln(1 / delta): the maximum-likelihood exponential.

    >>> print(exponential(Moments(jnp.float32(9), jnp.float32(2)), jnp.float32(1.5)))
    3.0
    """
    return moments.mean * log_ratio


def pareto(moments: Moments, log_ratio: Array) -> Array:
    """(sigma / xi) (delta^-xi - 1): the generalised Pareto law, fitted by moments.

    With q = mean^2 / variance:  xi = (1 - q) / 2,  sigma = mean (1 + q) / 2. The limit xi -> 0 is
    the exponential. xi stays below 1/2, whatever the sample. From fewer than 8 excesses, and where
    they are all equal, it is the exponential.

    Reference: Hosking, Wallis 1987, section 3 (there with the shape -xi).
    """
    count, mean, variance, _ = moments
    fits = (count >= FEW) & (variance > 1e-6 * mean * mean)
    q = jnp.where(fits, mean * mean / jnp.where(fits, variance, 1), 1)
    xi, sigma = (1 - q) / 2, mean * (1 + q) / 2
    curved = jnp.abs(xi) > 1e-5
    bend = jnp.where(curved, xi, 1)
    return sigma * jnp.where(curved, jnp.expm1(bend * log_ratio) / bend, log_ratio)


def gamma_shape(moments: Moments) -> Array:
    """Shape of the gamma law with the given mean and mean logarithm, kept within [0.02, 10].

    With s = ln(mean) - mean_log:  (3 - s + sqrt((s - 3)^2 + 24 s)) / (12 s), which is within 1.5 % of
    the maximum-likelihood shape.

    Reference: Minka 2002, Estimating a gamma distribution (its starting point); SIDCo, equation for the shape.
    """
    s = jnp.maximum(jnp.log(moments.mean) - moments.mean_log, 1e-3)
    return jnp.clip((3 - s + jnp.sqrt(jnp.square(s - 3) + 24 * s)) / (12 * s), 0.02, 10.0)


def gamma(moments: Moments, log_ratio: Array, *, exact: bool = True) -> Array:
    """Quantile of the gamma law with the given mean and mean logarithm.

    exact: five Newton steps on ln Q(alpha, x) = ln(delta), rising from x_0 = (Gamma(alpha + 1) (1 -
    delta))^(1 / alpha), which is below the root and where ln Q is convex for alpha <= 1. For larger alpha
    it is concave, and the Chernoff bound alpha + l + sqrt(2 alpha l), l = ln(1 / delta), stops a step
    from going too far.
    Otherwise the closed form ln(1 / delta) - ln Gamma(alpha), exact for alpha = 1 only, and kept
    from falling below 0, which it does for small alpha.
    """
    alpha = gamma_shape(moments)
    unit = moments.mean / alpha
    if not exact:
        return unit * jnp.maximum(log_ratio - gammaln(alpha), 0)
    # -expm1(-l) = 1 - delta without cancellation.
    start = (gammaln(alpha + 1) + jnp.log(jnp.maximum(-jnp.expm1(-log_ratio), 1e-30))) / alpha
    x = jnp.maximum(jnp.exp(start), 1e-30)
    bound = alpha + log_ratio + jnp.sqrt(2 * alpha * jnp.maximum(log_ratio, 0))

    def newton(_, x):
        log_density = (alpha - 1) * jnp.log(x) - x - gammaln(alpha)
        log_tail = jnp.log(jnp.maximum(gammaincc(alpha, x), 1e-37))
        return jnp.minimum(x + (log_tail + log_ratio) * jnp.exp(log_tail - log_density), bound)

    return jnp.where(log_ratio > 0, unit * lax.fori_loop(0, 5, newton, x), 0)


class Sample(NamedTuple):
    """Magnitudes that are fitted.

    x: float[n], finite;  mean: f[], of the magnitudes that are not zero, i32[] `present` of them;  unit: f[], a power
    of two near the mean, and scale its inverse: in these units squares neither overflow nor vanish. Plain sums do
    neither, and the exponential law takes no others.
    """

    x: Array
    mean: Array
    present: Array
    unit: Array
    scale: Array | None

    def first(self, law: str, log_ratio: Array, exact: bool) -> Array:
        """eta_1: quantile of the law fitted to all magnitudes that are not zero."""
        count = self.present.astype(self.mean.dtype)
        if law == "exponential":
            return exponential(Moments(count, self.mean), log_ratio)
        if law == "pareto":
            mean = self.mean / self.unit
            moments = self._moments(law, jnp.zeros_like(self.mean), self.present, mean * count)
            return pareto(moments, log_ratio) * self.unit
        moments = Moments(count, self.mean / self.unit, mean_log=self._mean_log())
        return gamma(moments, log_ratio, exact=exact) * self.unit

    def step(self, law: str, eta: Array, above: Array, log_ratio: Array) -> Array:
        """eta_m from eta_(m-1), which `above` entries exceed: eta plus the quantile of a law of the excesses."""
        tail = exponential if law == "exponential" else pareto
        further = tail(self._moments(law, eta, above, None), log_ratio) * self.unit
        # One excess has no spread to speak of, none has no mean: the threshold stays.
        return jnp.where(above >= 2, jnp.maximum(eta + further, 0), eta)

    def _moments(self, law: str, eta: Array, above: Array, total: Array | None) -> Moments:
        """Moments of the excesses over eta, in units; total: their sum, if known."""
        count = jnp.maximum(above, 1).astype(self.mean.dtype)
        if total is None:
            total, above = excess_above(self.x, eta, above, scale=self.scale)
        result = Moments(count, total / count)
        if law != "exponential":
            squares, _ = excess_above(self.x, eta, total, scale=self.scale, power=2)
            spread = jnp.maximum(squares - total * result.mean, 0)
            result = result._replace(variance=spread / jnp.maximum(count - 1, 1))
        return result

    def _mean_log(self) -> Array:
        """Mean of ln(scale |x_j|) over the entries that are not zero."""
        x, scale, present = lax.optimization_barrier((self.x, self.scale, self.present))
        tiny = jnp.finfo(scale.dtype).tiny
        # Zeros contribute exactly nothing to this sum.
        total = jnp.sum(jnp.log(jnp.maximum(magnitude(x) * scale, tiny)) - math.log(tiny))
        return total / jnp.maximum(present, 1).astype(scale.dtype) + math.log(tiny)


def fitted(x: Array, law: str, fit: Callable[[Sample], Any], otherwise: Callable[[Array, Array], Any]) -> Any:
    """fit(sample of x), or otherwise(zero, present) where no fit is possible.

    That is where the sum of magnitudes overflows, or their mean is below 2^-116. NaN and infinities count as zeros.
    """
    y = finite(x)
    zero = jnp.zeros((), wide(x.dtype))
    total, present = excess_above(y, zero, count_above(y, zero))
    mean = total / jnp.maximum(present, 1).astype(total.dtype)

    def taken(y, mean):
        exponent = exponent_of(mean) if law != "exponential" else jnp.zeros((), jnp.int32)
        scale, unit = power_of_two(-exponent, mean.dtype), power_of_two(exponent, mean.dtype)
        return fit(Sample(y, mean, present, unit, None if law == "exponential" else scale))

    plain = jnp.isfinite(total) & (mean > 2.0 ** (jnp.finfo(mean.dtype).minexp + 10))
    return one_of(plain, taken, lambda y, mean: otherwise(jnp.zeros_like(mean), present), y, mean)
