"""Step sizes for which the methods are known to converge, from constants of the problem and the compressor.

One function for each method; `jc.theory.diana` knows the step sizes of `jc.methods.descend(jc.diana(c), gamma)`, and
so on. The constants have the same names in all of them:

    smoothness   L of the mean loss.
    workers      n.
    variance     V. Plain methods: omega max_i L_i. Smoothness-aware ones, of a preconditioned compressor: max_i
                 V(C_i, L_i), which `smoothness.dithering_variance` and its kin compute.
    omega        the largest omega of the compressors.
    mu           strong convexity of the mean loss.

A method and its smoothness-aware form (DIANA and DIANA+) share their formulas: in the norm of L_i^(-1) every loss has
smoothness 1.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxcomp.allocate.workers import number_of

__all__ = ["StepSizes", "adiana", "dcgd", "diana", "diana_released", "ef21", "isega", "marina"]


class StepSizes(NamedTuple):
    """Step sizes of one method; None where the method has no such number.

    gamma: step size of the iterate.
    alpha: step size of the shifts.
    eta, theta_1, theta_2, beta, q: of `adiana`.
    rate: the Lyapunov function shrinks by 1 - rate in each round (0 if no linear rate is proven).
    """

    gamma: float
    alpha: float | None = None
    eta: float | None = None
    theta_1: float | None = None
    theta_2: float | None = None
    beta: float | None = None
    q: float | None = None
    rate: float = 0.0


def dcgd(
    *,
    smoothness: float,
    workers: int,
    variance: float,
    mu: float = 0.0,
    interpolation: bool = False,
    down_omega: float = 0.0,
) -> StepSizes:
    """Distributed compressed gradient descent: `descend(direct(c), gamma)`.

    gamma = 1 / (L + 2 V / n), or, if the gradients of all workers vanish at the optimum (interpolation),
    1 / (L + V / n). It is halved for mu = 0. The rate is gamma mu; without interpolation it leads to a
    ball around the optimum.

    Args:
        smoothness: L, above 0.
        workers: n, at least 1.
        variance: V, at least 0 (see `jaxcomp.theory`).
        mu: strong convexity, in [0, L].
        interpolation: whether the gradients of all workers vanish at the optimum.
        down_omega: omega of what compresses the way down (`bidirectional`); gamma is divided by 1 + down_omega.

    Returns:
        `StepSizes` with gamma and rate.

    Raises:
        ValueError: a constant is out of range.

    Reference: Khirirat, Feyzmahdavian, Johansson 2018; Safaryan, Hanzely, Richtarik 2021 (DCGD+).

    >>> dcgd(smoothness=1.0, workers=10, variance=5.0, mu=0.01).gamma
    0.5
    """
    _check("dcgd", smoothness, workers, variance, mu=mu, down_omega=down_omega)
    gamma = 1 / (smoothness + (1 if interpolation else 2) * variance / workers) / (1 + down_omega)
    return StepSizes(gamma if mu else gamma / 2, rate=gamma * mu)


def diana(
    *,
    smoothness: float,
    workers: int,
    variance: float,
    omega: float,
    mu: float = 0.0,
    tight: bool = False,
    down_omega: float = 0.0,
) -> StepSizes:
    """DIANA: `descend(diana(c, alpha=alpha), gamma)`.

    alpha = 1 / (1 + omega),   gamma = 1 / (L + 6 V / n), halved for mu = 0,   rate = min(gamma mu, alpha / 2).

    tight: gamma = 1 / (L + (1 + sqrt(c))^2 V / n) with the c > 1 for which gamma mu = alpha (1 - 1 / c), and
    rate = min(gamma mu, alpha (1 - 1 / c)). The rate is never below that of the paper, and gamma tends to
    1 / (L + 4 V / n) for small mu. This form is ours.

    Args:
        smoothness: L, above 0.
        workers: n, at least 1.
        variance: V, at least 0 (see `jaxcomp.theory`).
        omega: largest omega of the compressors, at least 0.
        mu: strong convexity, in [0, L].
        tight: whether to take the larger step above; without effect for mu = 0.
        down_omega: omega of what compresses the way down (`bidirectional`): L and V grow by 1 + down_omega.

    Returns:
        `StepSizes` with gamma, alpha and rate.

    Raises:
        ValueError: a constant is out of range.

    Reference: Mishchenko, Gorbunov, Takac, Richtarik 2019 (DIANA); Wang, Safaryan, Richtarik 2022 (DIANA+).

    >>> diana(smoothness=1.0, workers=10, variance=5.0, omega=4.0, mu=0.01)[:2]
    (0.25, 0.2)
    """
    _check("diana", smoothness, workers, variance, omega=omega, mu=mu, down_omega=down_omega)
    alpha, grown = 1 / (1 + omega), 1 + down_omega
    gamma, rate = _learnt_shifts(grown * smoothness, grown * variance / workers, mu, alpha, tight)
    return StepSizes(gamma, alpha, rate=rate)


def diana_released(*, smoothness_max: float, workers: int, omega: float) -> StepSizes:
    """The baseline in the code of the authors of DIANA+, for comparison: no rate is proven for it.

    alpha = 1 / (1 + omega),   gamma = 1 / (L_max (1 + 2 omega / n)).

    Args:
        smoothness_max: L_max, the largest smoothness constant of a worker's loss, above 0.
        workers: n, at least 1.
        omega: largest omega of the compressors, at least 0.

    Returns:
        `StepSizes` with gamma and alpha.

    Raises:
        ValueError: a constant is out of range.

    >>> diana_released(smoothness_max=1.0, workers=2, omega=1.0)[:2]
    (0.5, 0.5)
    """
    _range("diana_released", "smoothness_max", smoothness_max, number_of(smoothness_max) > 0, "above 0")
    _check("diana_released", smoothness_max, workers, omega=omega)
    return StepSizes(1 / (smoothness_max * (1 + 2 * omega / workers)), 1 / (1 + omega))


def adiana(
    *, smoothness: float, workers: int, variance: float, omega: float, mu: float, down_omega: float = 0.0
) -> StepSizes:
    """Accelerated DIANA: `adiana(c, step_sizes)`.

    alpha = 1 / (1 + omega),   theta_1 = min(1 / 4, sqrt(eta mu / q)),   theta_2 = 1 / 2,
    gamma = eta / (2 (theta_1 + eta mu)),   beta = 1 - gamma mu,
    q = min(1, max(1, sqrt(n L / (32 V)) - 1) / (2 (1 + omega))),
    eta = min(1 / (2 L), n / (64 V (2 q (1 + omega) + 1)^2));   q = 1 and eta = 1 / (2 L) for V = 0.

    Args:
        smoothness: L, above 0.
        workers: n, at least 1.
        variance: V, at least 0 (see `jaxcomp.theory`).
        omega: largest omega of the compressors, at least 0.
        mu: strong convexity, in (0, L].
        down_omega: omega of what compresses the way down; eta is divided by (1 + down_omega)^2, the price of
            multiplicative noise in accelerated methods (Vaswani, Bach, Schmidt 2019). For ADIANA no rate is proven with
            it.

    Returns:
        `StepSizes` with everything but a rate.

    Raises:
        ValueError: a constant is out of range.

    Reference: Li, Kovalev, Qian, Richtarik 2020 (ADIANA); Safaryan, Hanzely, Richtarik 2021 (ADIANA+).

    >>> adiana(smoothness=1.0, workers=4, variance=0.0, omega=0.0, mu=0.125)[2:4]
    (0.5, 0.25)
    """
    _check("adiana", smoothness, workers, variance, omega=omega, mu=mu, down_omega=down_omega)
    _range("adiana", "mu", mu, mu > 0, "above 0")
    q, eta = 1.0, 1 / (2 * smoothness)
    if variance > 0:
        q = min(1.0, max(1.0, math.sqrt(workers * smoothness / (32 * variance)) - 1) / (2 * (1 + omega)))
        eta = min(eta, workers / (64 * variance * (2 * q * (omega + 1) + 1) ** 2))
    eta /= (1 + down_omega) ** 2
    theta_1 = min(1 / 4, math.sqrt(eta * mu / q))
    gamma = eta / (2 * (theta_1 + eta * mu))
    return StepSizes(gamma, 1 / (1 + omega), eta, theta_1, 1 / 2, 1 - gamma * mu, q)


def ef21(*, smoothness: float, alpha: float, worker_smoothness: float | None = None, mu: float = 0.0) -> StepSizes:
    """EF21, for non-convex losses: `descend(ef21(c), gamma)`.

    gamma = 1 / (L + L~ sqrt(1 - alpha) / theta),   theta = 1 - sqrt(1 - alpha). Where the Polyak-Lojasiewicz condition
    holds with mu > 0: gamma = min(1 / (L + L~ sqrt(2 (1 - alpha)) / theta), theta / (2 mu)), and the rate is gamma mu.

    Args:
        smoothness: L, above 0.
        alpha: of the compressor, in (0, 1].
        worker_smoothness: L~, the root of the mean of L_i^2; None: L.
        mu: constant of the condition (strong convexity, say), in [0, L].

    Returns:
        `StepSizes` with gamma and rate.

    Raises:
        ValueError: a constant is out of range.

    Reference: Richtarik, Sokolov, Fatkhullin 2021 (EF21), theorems 1 and 2; their sqrt(beta / theta) is
    sqrt(1 - alpha) / theta, which is 0 for alpha = 1.

    >>> ef21(smoothness=1.0, alpha=0.75).gamma
    0.5
    """
    _check("ef21", smoothness, 1, mu=mu)
    _range("ef21", "alpha", alpha, 0 < number_of(alpha) <= 1, "in (0, 1]")
    each = smoothness if worker_smoothness is None else worker_smoothness
    _range("ef21", "worker_smoothness", each, number_of(each) > 0, "above 0")
    left = math.sqrt(1 - alpha)
    over = 1 + left  # theta = alpha / over; 1 - left would cancel for small alpha
    gamma = alpha / (smoothness * alpha + (math.sqrt(2) if mu else 1) * each * left * over)
    gamma = min(gamma, alpha / (2 * mu * over)) if mu else gamma
    return StepSizes(gamma, rate=gamma * mu)


def isega(
    *,
    smoothness: float,
    workers: int,
    variance: float,
    mu: float = 0.0,
    smallest_probability: float | None = None,
    tight: bool = False,
) -> StepSizes:
    """ISEGA: `isega(p, S, gamma)`.

    gamma as for `diana`, with min_j p_j, the rate at which shifts are learnt, in the place of alpha;
    rate = min(gamma mu, min_j p_j / 2).

    Args:
        smoothness: L, above 0.
        workers: n, at least 1.
        variance: V, at least 0 (see `jaxcomp.theory`).
        mu: strong convexity, in [0, L].
        smallest_probability: min_j p_j over all workers, in (0, 1]; None: the rate is then 0.
        tight: as for `diana`; needs smallest_probability.

    Returns:
        `StepSizes` with gamma and rate.

    Raises:
        ValueError: a constant is out of range, or tight without smallest_probability.

    Reference: Mishchenko, Hanzely, Richtarik 2020 (ISEGA); the smoothness-aware form is ours.

    >>> isega(smoothness=1.0, workers=10, variance=5.0, mu=0.01, smallest_probability=0.1).gamma
    0.25
    """
    _check("isega", smoothness, workers, variance, mu=mu)
    if smallest_probability is None and tight:
        raise ValueError("theory.isega: tight needs smallest_probability, the least of all probabilities; got None")
    if smallest_probability is not None:
        fits = 0 < number_of(smallest_probability) <= 1
        _range("isega", "smallest_probability", smallest_probability, fits, "in (0, 1]")
    gamma, rate = _learnt_shifts(smoothness, variance / workers, mu, smallest_probability or 0.0, tight)
    return StepSizes(gamma, rate=rate)


def marina(*, smoothness: float, workers: int, variance: float, full: float) -> StepSizes:
    """MARINA, for non-convex losses: `marina(c, gamma, full)`.

    gamma = 1 / (L + sqrt((1 - p) V / (p n))),   with V = omega L_max^2, or, smoothness-aware, lambda_max of
    (1 / n) sum_i V_i L_i.

    Args:
        smoothness: L, above 0.
        workers: n, at least 1.
        variance: V as above, at least 0; V_i of worker i is what `smoothness.dithering_variance` and its kin compute.
        full: p, the probability of a round with whole gradients, in (0, 1].

    Returns:
        `StepSizes` with gamma.

    Raises:
        ValueError: a constant is out of range.

    Reference: Gorbunov, Burlachenko, Li, Richtarik 2021 (MARINA); the smoothness-aware form is ours.

    >>> marina(smoothness=1.0, workers=4, variance=4.0, full=0.5).gamma
    0.5
    """
    _check("marina", smoothness, workers, variance)
    _range("marina", "full", full, 0 < number_of(full) <= 1, "in (0, 1]")
    return StepSizes(1 / (smoothness + math.sqrt((1 - full) * variance / (full * workers))))


def _check(
    name: str,
    smoothness: float,
    workers: int,
    variance: float = 0.0,
    omega: float = 0.0,
    mu: float = 0.0,
    down_omega: float = 0.0,
) -> None:
    limit = number_of(smoothness) * (1 + 1e-9)
    _range(name, "smoothness", smoothness, number_of(smoothness) > 0, "above 0")
    _range(name, "workers", workers, number_of(workers) >= 1, "at least 1")
    _range(name, "workers", workers, number_of(workers) % 1 == 0, "an integer")
    for what, value in (("variance", variance), ("omega", omega), ("down_omega", down_omega)):
        _range(name, what, value, number_of(value) >= 0, "at least 0")
    _range(name, "mu", mu, 0 <= number_of(mu) <= limit, f"in [0, smoothness = {smoothness}]")


def _range(name: str, what: str, value: Any, fits: bool, allowed: str) -> None:
    if not fits:
        raise ValueError(f"theory.{name}: {what} must be {allowed}; got {value!r}")
    if number_of(value) == math.inf:
        raise ValueError(f"theory.{name}: {what} must be finite; got {value!r}")


def _learnt_shifts(smoothness: float, noise: float, mu: float, learning: float, tight: bool) -> tuple[float, float]:
    """gamma and rate of a method whose shifts are learnt at the rate `learning`; noise = V / n."""
    c, gamma = 2.0, 1 / (smoothness + 6 * noise)
    if tight and mu and learning:
        c = _balance(lambda c: mu / (smoothness + (1 + math.sqrt(c)) ** 2 * noise), learning)
        gamma = 1 / (smoothness + (1 + math.sqrt(c)) ** 2 * noise)
    rate = min(gamma * mu, learning * (1 - 1 / c))
    return gamma if mu else gamma / 2, rate


def _balance(gamma_mu: Callable[[float], float], alpha: float) -> float:
    """The c > 1 with gamma(c) mu = alpha (1 - 1/c): the left side falls with c, the right side rises."""
    low, high = 1.0, 2.0
    while gamma_mu(high) > alpha * (1 - 1 / high) and high < 1e6:
        high *= 2
    for _ in range(100):
        c = (low + high) / 2
        low, high = (c, high) if gamma_mu(c) > alpha * (1 - 1 / c) else (low, c)
    return high
