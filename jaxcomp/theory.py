"""Step sizes for which the methods are known to converge, from constants of the problem and compressor.

Constants: L of the mean loss, mu its strong convexity, n workers, omega of the compressor, and V: for
plain methods omega max_i lambda_max(L_i), for the smoothness-aware ones max_i V(C_i, L_i) (`smoothness`).
The same formulas then serve both, because in the norm of L_i^(-1) every loss has smoothness 1.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["StepSizes", "step_sizes"]

METHODS = ("dcgd", "diana", "adiana", "isega", "marina")
FORMS = {"paper": METHODS, "tight": ("diana", "isega"), "released": ("diana",), "interpolation": ("dcgd",)}


class StepSizes(NamedTuple):
    """What `step_sizes` returns; None where a method has no such number.

    rate: proven factor 1 - rate per round of the Lyapunov function (0 if none is proven).
    """

    gamma: float
    alpha: float | None = None
    eta: float | None = None
    theta_1: float | None = None
    theta_2: float | None = None
    beta: float | None = None
    q: float | None = None
    rate: float = 0.0


def step_sizes(
    method: str,
    *,
    smoothness: float,
    workers: int,
    variance: float,
    omega: float = 0.0,
    mu: float = 0.0,
    form: str = "paper",
    smoothness_max: float | None = None,
    smallest_probability: float | None = None,
    full: float | None = None,
) -> StepSizes:
    """Step sizes of a method, plain or smoothness-aware ("diana" and "diana+" share their formulas).

    dcgd:    gamma = 1 / (L + 2 V/n);  "interpolation" (gradients of all workers vanish at the optimum): 1 / (L + V/n).
    diana:   alpha = 1 / (1 + omega), gamma = 1 / (L + 6 V/n), halved for mu = 0.
             "tight": gamma = 1 / (L + (1 + sqrt(c))^2 V/n) with the c > 1 that makes gamma mu = alpha (1 - 1/c),
             never below the paper's rate; tends to 1 / (L + 4 V/n). Ours.
             "released": 1 / (L_max (1 + 2 omega/n)), the baseline in the authors' code, not proven.
    adiana:  alpha, theta_1, theta_2, q, eta, gamma, beta as in the paper.
    isega:   gamma as diana; rate min(gamma mu, p_min / 2).
    marina:  gamma = 1 / (L + sqrt((1 - p) V / (p n))), where V is omega L_max^2, or, smoothness-aware,
             lambda_max of (1/n) sum_i V_i L_i.

    Args:
        method: "dcgd", "diana", "adiana", "isega" or "marina", with or without "+".
        smoothness: L, a smoothness constant of the mean loss, above 0.
        workers: n.
        variance: V >= 0, see above.
        omega: largest omega of the compressors.
        mu: strong convexity; above 0 for adiana.
        form: "paper", "tight" (diana, isega), "released" (diana), "interpolation" (dcgd).
        smoothness_max: L_max, for "released".
        smallest_probability: for the rate of isega.
        full: p, for marina.

    Raises:
        ValueError: an unknown name, a constant out of range or missing.

    Reference: Mishchenko et al. 2019 (DIANA); Li, Kovalev, Qian, Richtarik 2020 (ADIANA); Wang, Safaryan, Richtarik
    2022 for the smoothness-aware forms; Gorbunov et al. 2021 (MARINA).

    >>> step_sizes("diana+", smoothness=1.0, workers=10, variance=5.0, omega=4.0, mu=0.01)[:2]
    (0.25, 0.2)
    """
    name = method.removesuffix("+")
    if name not in METHODS:
        raise ValueError(f"step_sizes: method must be one of {', '.join(METHODS)}, with or without +; got {method!r}")
    if name not in FORMS.get(form, ()):
        raise ValueError(f"step_sizes: form {form!r} is not known for {method}")
    if not (smoothness > 0 and workers >= 1 and variance >= 0 and omega >= 0 and 0 <= mu <= smoothness * (1 + 1e-9)):
        raise ValueError(
            "step_sizes: needs smoothness > 0, workers >= 1, variance >= 0, omega >= 0 and 0 <= mu <= smoothness; got "
            f"{smoothness}, {workers}, {variance}, {omega}, {mu}"
        )
    noise, alpha = variance / workers, 1 / (1 + omega)
    if name == "dcgd":
        gamma = 1 / (smoothness + (1 if form == "interpolation" else 2) * noise)
        return StepSizes(gamma if mu else gamma / 2, rate=gamma * mu)
    if name == "marina":
        if full is None or not 0 < full <= 1:
            raise ValueError(f"step_sizes: marina needs full in (0, 1]; got {full}")
        return StepSizes(1 / (smoothness + math.sqrt((1 - full) * noise / full)))
    if name == "adiana":
        return _adiana(smoothness, mu, workers, omega, variance)
    if form == "released":
        if smoothness_max is None:
            raise ValueError('step_sizes: form "released" needs smoothness_max')
        return StepSizes(1 / (smoothness_max * (1 + 2 * omega / workers)), alpha)
    if name == "isega":
        learning = 0.0 if smallest_probability is None else smallest_probability
    else:
        learning = alpha
    c = 2.0
    gamma = 1 / (smoothness + 6 * noise)
    if form == "tight" and mu and learning:
        c = _balance(lambda c: mu / (smoothness + (1 + math.sqrt(c)) ** 2 * noise), learning)
        gamma = 1 / (smoothness + (1 + math.sqrt(c)) ** 2 * noise)
    rate = min(gamma * mu, learning * (1 - 1 / c))
    return StepSizes(gamma if mu else gamma / 2, None if name == "isega" else alpha, rate=rate)


def _balance(gamma_mu: Callable[[float], float], alpha: float) -> float:
    """The c > 1 with gamma(c) mu = alpha (1 - 1/c): the left side falls with c, the right side rises."""
    low, high = 1.0, 2.0
    while gamma_mu(high) > alpha * (1 - 1 / high) and high < 1e6:
        high *= 2
    for _ in range(100):
        c = (low + high) / 2
        low, high = (c, high) if gamma_mu(c) > alpha * (1 - 1 / c) else (low, c)
    return high


def _adiana(smoothness: float, mu: float, workers: int, omega: float, variance: float) -> StepSizes:
    if not mu > 0:
        raise ValueError(f"step_sizes: adiana needs mu > 0; got {mu}")
    q, eta = 1.0, 1 / (2 * smoothness)
    if variance > 0:
        q = min(1.0, max(1.0, math.sqrt(workers * smoothness / (32 * variance)) - 1) / (2 * (1 + omega)))
        eta = min(eta, workers / (64 * variance * (2 * q * (omega + 1) + 1) ** 2))
    theta_1 = min(1 / 4, math.sqrt(eta * mu / q))
    gamma = eta / (2 * (theta_1 + eta * mu))
    return StepSizes(gamma, 1 / (1 + omega), eta, theta_1, 1 / 2, 1 - gamma * mu, q)
