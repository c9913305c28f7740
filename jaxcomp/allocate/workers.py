"""One budget, split over workers by their data volume.

Worker i holds the share p_i of all samples and sends the share delta_i of its entries. What the ratios do to the rate
of error feedback is bounded by A(delta) (`bound`), which follows from bounding each worker's memory by itself, and by
Phi(delta) >= A(delta) (`coupled_bound`), from bounding all of them by the worst. DAGC was derived from Phi.

Reference: Lu, Song, Chen, Cui, Wang 2023 (DAGC), and its released code.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxcomp.allocate.rules import coupled_minimum, filled, released

__all__ = ["bound", "calibrate", "counts", "coupled_bound", "ratios", "shares", "thresholds"]

Array = np.ndarray
Rule = str | float
NAMED = {"uniform": 0.0, "sqrt": 0.5}
RULES = ("sqrt", "phi", "released", "uniform")
THRESHOLD_RULES = ("released", "sqrt", "uniform")


def ratios(
    volumes: Sequence[float] | Array,
    mean_ratio: float,
    *,
    rule: Rule = "sqrt",
    floor: float = 0.0,
    cap: float | Sequence[float] | Array | None = None,
    active_only: bool = True,
) -> Array:
    """Compression ratio of each worker: the share of its entries that it may send.

    sum_i delta_i = n mean_ratio, with p_i the share of the volumes. What a cap cuts off or a floor takes is made up for
    by the others, which is the exact optimum under these limits. The rules::

        "sqrt"      delta_i ~ sqrt(p_i): minimises A = sum_i p_i / delta_i (`bound`), never above uniform on it
        "phi"       minimises Phi = sum_i p_i / sqrt(delta_i min_j delta_j) (`coupled_bound`); it is uniform if and only
                    if max p_i <= 2 / n
        "released"  the best of n boundary points of Phi, as in the code of DAGC-R; never below uniform on Phi, may give
                    the largest worker the smallest ratio, and may exceed 1
        "uniform"   delta_i = mean_ratio
        a number s  delta_i ~ p_i^s

    Args:
        volumes: samples of each worker, n numbers >= 0 in any order and unit.
        mean_ratio: mean of the ratios, above 0. From 1 on every worker sends everything.
        rule: "sqrt", "phi", "released", "uniform", or the exponent s >= 0 of delta_i ~ p_i^s.
        floor: least ratio, in [0, mean_ratio]. A memory is stale for about 1 / delta_i rounds.
        cap: largest ratio, in [0, 1], one number or one for each worker (`by_bandwidth`). A worker with
            cap 0, as on a dead link, counts as one without data. None is 1, except with "released",
            which is left as its authors' code has it.
        active_only: workers without data get 0. True: mean_ratio is the mean over the others;
            False: it is the mean over all, and the others share what is free.

    Returns:
        float64[n]. With a budget above all caps, the caps.

    Raises:
        ValueError: an argument is out of range, or the floors need more than the budget.

    Reference: Lu, Song, Chen, Cui, Wang 2023. "phi" solves their problem exactly, "released" is their
    code; "sqrt" minimises the tighter bound A.

    >>> print(ratios([7, 2, 1, 0], 0.1).round(4))
    [0.1569 0.0838 0.0593 0.    ]
    >>> print(counts(ratios([7, 2, 1, 0], 0.1), 1000))
    [157  84  59   0]
    >>> print(ratios([90, 6, 4], 0.1, rule="released").round(4))
    [0.0906 0.1188 0.0906]
    """
    weight = shares("ratios", volumes)
    if not 0 < number_of(mean_ratio) < math.inf:
        raise ValueError(f"ratios: mean_ratio must be a finite number above 0; got {mean_ratio}")
    exponent = rule_exponent("ratios", rule, RULES)
    most = _numbers(1.0 if cap is None else cap)
    if most.shape not in ((), weight.shape):
        raise ValueError(f"ratios: cap must be one number or {len(weight)}; got shape {most.shape}")
    if not np.all((most >= 0) & (most <= 1)):
        raise ValueError(f"ratios: cap must be in [0, 1]; got {cap}")
    most = np.broadcast_to(most, weight.shape)
    active = (weight > 0) & (most > 0)
    if not active.any():
        return np.zeros(len(weight))
    p, most = shares("ratios", weight[active]), most[active]
    n = len(p)
    budget = mean_ratio * (n if active_only else len(weight))
    if not 0 <= number_of(floor) <= min(budget / n, float(most.min())):
        raise ValueError(f"ratios: floor must be in [0, {min(budget / n, most.min()):.6g}]; got {floor}")
    result = np.zeros(len(weight))
    if budget >= most.sum():
        result[active] = most
    elif (exponent == 0 or np.all(p == p[0])) and np.all(most >= budget / n):
        result[active] = mean_ratio if active_only else budget / n
    elif rule == "released":
        free = released(p, budget)
        result[active] = free if cap is None and floor == 0 else filled(free, budget, floor, most)
    elif rule == "phi":
        result[active] = coupled_minimum(p, budget, floor, most)
    else:
        assert exponent is not None
        result[active] = filled(np.maximum((p / p.max()) ** exponent, 1e-300), budget, floor, most)
    return result


def thresholds(
    volumes: Sequence[float] | Array, base: float, *, rule: Rule = "released", cap: float = math.inf
) -> Array:
    """Hard threshold of each worker (DAGC-A): lambda_i = base mean_j(p_j^s) / p_i^s.

    The harmonic mean of the thresholds is `base`, so that, as long as the number of entries above
    a threshold falls as its inverse, the budget is that of the uniform threshold `base`.

    Args:
        volumes: samples of each worker, n numbers >= 0; a worker without data gets infinity.
        base: harmonic mean, above 0, in the unit of what is compressed. A memory of gradients keeps the
            thresholds valid when the step size changes; a memory of steps does not.
        rule: exponent s >= 0, or its name. "released" = 2/3 minimises sum p_i^2 lambda_i^2; "sqrt" = 1/2
            the tighter bound sum p_i lambda_i; "uniform" = 0.
        cap: largest threshold as a multiple of `base`, at least 1; a worker with little data
            would otherwise send nothing.

    Returns:
        float64[n].

    Raises:
        ValueError: an argument is out of range.

    Reference: Lu, Song, Chen, Cui, Wang 2023, DAGC-A, as in the released code.

    >>> print(thresholds([8, 1], 1.0))
    [0.625 2.5  ]
    """
    weight = shares("thresholds", volumes)
    if not 0 < number_of(base) < math.inf:
        raise ValueError(f"thresholds: base must be a finite number above 0; got {base}")
    return base * _scales("thresholds", weight, rule, cap)


def calibrate(
    volumes: Sequence[float] | Array,
    probes: Sequence[Array] | Array,
    mean_ratio: float,
    *,
    rule: Rule = "released",
    cap: float = math.inf,
) -> float:
    """The base threshold with which the workers together keep their budget on a probe step.

    The smallest base such that sum_i |{j : |u_ij| >= lambda_i}| <= n mean_ratio d, exactly: entry u_ij is
    kept as long as base <= |u_ij| / (lambda_i / base), so base lies two roundings above the
    first such quotient that is one too many.

    Args:
        volumes: samples of each worker; those without data do not count.
        probes: [n, d], what each worker would compress at one step (gradient plus memory).
        mean_ratio: mean share of entries, in (0, 1].
        rule, cap: as for `thresholds`.

    Returns:
        `base` for `thresholds`. Between entries of equal quotient the budget is met from below.

    Raises:
        ValueError: shapes do not fit, an argument is out of range, or no probe entry is above 0.

    >>> calibrate([1, 1], [[4.0, 3.0, 1.0, 0.5], [2.0, 1.0, 1.0, 0.0]], 3 / 8)
    1.0000000000000004
    """
    weight = shares("calibrate", volumes)
    u = np.abs(_numbers(probes))
    if u.ndim != 2 or len(u) != len(weight):
        raise ValueError(f"calibrate: probes must have shape [{len(weight)}, d]; got {u.shape}")
    if not 0 < number_of(mean_ratio) <= 1:
        raise ValueError(f"calibrate: mean_ratio must be in (0, 1]; got {mean_ratio}")
    active = weight > 0
    scale = _scales("calibrate", weight, rule, cap)[active]
    u = np.where(np.isfinite(u), u, 0)[active]
    quotients = (u / scale[:, None]).reshape(-1)
    quotients = np.sort(quotients[quotients > 0])[::-1]
    if not quotients.size:
        raise ValueError("calibrate: no entry of the probes is above 0")
    keep = _down(mean_ratio * u.size)
    return float(quotients[-1] if keep >= quotients.size else quotients[keep] * (1 + 2**-51))


def counts(ratios: Sequence[float] | Array, size: int, *, mode: str = "exact") -> Array:
    """Entries that each worker sends of an array of `size`, from its ratio.

    "exact": floor(delta_i size), and what is left of floor(sum_i delta_i size) goes one by one to the
    largest remainders, the first worker first. "ceil": ceil(delta_i size), as in the authors' code. Both
    forgive 1e-9 of rounding (0.1 * 3 * 1000 is 300), keep at least 1 where the ratio is above 0,
    and at most `size`.

    Args:
        ratios: n numbers in [0, 1] (from 1 on: all).
        size: number of entries d, at least 0.
        mode: "exact" or "ceil".

    Returns:
        int64[n].

    Raises:
        ValueError: an argument is out of range.

    >>> print(counts([0.28, 0.12, 0.02, 0.0], 10), counts([0.28, 0.12, 0.02, 0.0], 10, mode="ceil"))
    [2 1 1 0] [3 2 1 0]
    """
    delta = _numbers(ratios)
    if delta.ndim != 1 or not np.all(np.isfinite(delta)) or np.any(delta < 0):
        raise ValueError(f"counts: ratios must be n finite numbers >= 0; got {ratios}")
    if isinstance(size, bool) or not number_of(size) >= 0 or number_of(size) % 1 != 0:
        raise ValueError(f"counts: size must be an integer of at least 0; got {size!r}")
    if mode not in ("exact", "ceil"):
        raise ValueError(f"counts: mode must be 'exact' or 'ceil'; got {mode!r}")
    wanted = np.minimum(delta, 1) * size
    least = np.where((delta > 0) & (size > 0), 1, 0)
    if mode == "ceil":
        return np.maximum(np.ceil(wanted - 1e-9 * np.maximum(1, wanted)).astype(np.int64), least)
    whole = np.maximum(np.floor(wanted + 1e-9).astype(np.int64), least)
    left = max(_down(float(wanted.sum())) - int(whole.sum()), 0)
    largest_first = np.argsort(-(wanted - whole), kind="stable")
    whole[largest_first[:left]] += 1
    return whole


def bound(volumes: Sequence[float] | Array, ratios: Sequence[float] | Array) -> float:
    """A(delta) = sum_i p_i / delta_i over the workers with data; infinite where such a ratio is 0.

    Args:
        volumes: of data, [n], >= 0; p_i is their share.
        ratios: delta_i, [n], >= 0.

    >>> bound([1, 1], [0.1, 0.4])
    6.25
    """
    p, delta = _pair("bound", volumes, ratios)
    with np.errstate(divide="ignore"):
        return float(np.sum(p / delta))


def coupled_bound(volumes: Sequence[float] | Array, ratios: Sequence[float] | Array) -> float:
    """Phi(delta) = sum_i p_i / sqrt(delta_i min_j delta_j) over the workers with data.

    Args:
        volumes: of data, [n], >= 0; p_i is their share.
        ratios: delta_i, [n], >= 0.

    >>> coupled_bound([1, 1], [0.1, 0.4])
    7.5
    """
    p, delta = _pair("coupled_bound", volumes, ratios)
    with np.errstate(divide="ignore"):
        return float(np.sum(p / np.sqrt(delta)) / np.sqrt(delta.min()))


# ------------------------------------------------------------------------------------------------
# Arguments


def shares(name: str, volumes: Any) -> Array:
    """p_i = N_i / sum_j N_j, float64[n]."""
    values = _numbers(volumes)
    if values.ndim != 1 or not values.size or not np.all(np.isfinite(values)) or np.any(values < 0):
        raise ValueError(f"{name}: volumes must be n finite numbers >= 0; got {volumes}")
    if not values.max() > 0:
        raise ValueError(f"{name}: at least one volume must be above 0; got {volumes}")
    values = values / values.max()
    return values / values.sum()


def _numbers(values: Any) -> Array:
    """An array of float64; NaN, which no range contains, for text and what else is no number."""
    try:
        text = np.asarray(values).dtype.kind in "US"
        return np.array(np.nan) if text else np.asarray(values, np.float64)
    except (TypeError, ValueError):
        return np.array(np.nan)


def number_of(value: Any) -> float:
    """A number as a float; NaN, which no range contains, for what is none."""
    try:
        return math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError):
        return math.nan


def rule_exponent(name: str, rule: Rule, names: Sequence[str]) -> float | None:
    """The exponent of a power rule, None for the others."""
    if isinstance(rule, str):
        if rule not in names:
            raise ValueError(f"{name}: rule must be one of {', '.join(map(repr, names))} or a number; got {rule!r}")
        return NAMED.get(rule)
    if isinstance(rule, bool) or not 0 <= number_of(rule) < math.inf:
        raise ValueError(f"{name}: rule must be a name or a finite exponent >= 0; got {rule}")
    return float(rule)


def _pair(name: str, volumes: Any, ratios: Any) -> tuple[Array, Array]:
    p, delta = shares(name, volumes), np.asarray(ratios, np.float64)
    if delta.shape != p.shape:
        raise ValueError(f"{name}: {delta.size} ratios for {p.size} volumes")
    return p[p > 0], delta[p > 0]


def _down(x: float) -> int:
    return math.floor(x + 1e-9 * max(1.0, x))


def _scales(name: str, weight: Array, rule: Rule, cap: float) -> Array:
    """lambda_i / base: mean_j(p_j^s) / p_i^s, at most cap, over the workers with data; infinity for the others."""
    if not number_of(cap) >= 1:
        raise ValueError(f"{name}: cap must be at least 1; got {cap}")
    exponent = rule_exponent(name, rule, THRESHOLD_RULES)
    active = weight > 0
    result = np.full(len(weight), np.inf)
    powers = np.maximum((weight[active] / weight.max()) ** (2 / 3 if exponent is None else exponent), 1e-300)
    result[active] = np.minimum(powers.mean() / powers, cap)
    return result
