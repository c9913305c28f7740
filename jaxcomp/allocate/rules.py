"""Rules that split a budget over workers with data; `workers` says what they minimise and checks arguments.

Each takes shares p_i > 0 that sum to 1 and a budget B, and returns ratios delta_i with sum_i delta_i = B.
"""

import math

import numpy as np

__all__ = ["coupled_minimum", "filled", "released"]

Array = np.ndarray


def filled(weight: Array, budget: float, low: float | Array, high: Array) -> Array:
    """clip(c w, low, high) with the c that spends the budget: exact, by sorting its 2 n corners.

    >>> print(filled(np.array([1.0, 3.0]), 1.0, 0.0, np.array([1.0, 0.5])))
    [0.5 0.5]
    """
    low = np.broadcast_to(np.asarray(low, np.float64), weight.shape)
    corners = np.sort(np.concatenate([low / weight, high / weight]))
    spent = np.clip(corners[:, None] * weight, low, high).sum(1)
    after = int(np.searchsorted(spent, budget))
    c = corners[-1]
    if after < len(corners):
        left = corners[after - 1] if after else 0.0
        middle = (left + corners[after]) / 2
        moving = (middle * weight > low) & (middle * weight < high)
        fixed = np.clip(middle * weight, low, high)[~moving].sum()
        c = (budget - fixed) / weight[moving].sum() if moving.any() else corners[after]
    return np.clip(c * weight, low, high)


def released(p: Array, budget: float) -> Array:
    """The authors' search: each worker j in turn holds the minimum, tied with the smallest other."""
    n = len(p)
    if n == 1:
        return np.full(1, budget)
    order = np.argsort(-p, kind="stable")
    p = p[order]
    q = p ** (2 / 3)
    best, delta = math.inf, q
    for j in reversed(range(n)):
        if j < n - 1 and p[j] == p[j + 1]:
            continue
        other = n - 2 if j == n - 1 else n - 1
        relative = np.delete(q, j).sum() / q[other]
        score = (p[j] + p[other] * relative) * (1 + relative)
        if score < best:
            least = budget / (1 + relative)
            best, delta = score, least * q / q[other]
            delta[j] = least
    result = np.empty(n)
    result[order] = delta
    return result


def coupled_minimum(p: Array, budget: float, low: float, high: Array) -> Array:
    """The minimiser of Phi: max(m, c p^(2/3)) within the limits, for the best least ratio m.

    For a given m the others are a power law; what remains is convex in m, and its derivative
    changes sign once.
    """
    n = len(p)
    q = p ** (2 / 3)
    if low == 0 and float(p.max()) <= (1 + 1e-12) * 2 / n and float(high.min()) >= budget / n:
        return np.full(n, budget / n)
    least = _tied_minimum(p, q, budget)
    result = filled(q, budget, least, np.full(n, budget))
    if least >= low and np.all(result <= high):
        return result

    def rising(m: float) -> bool:
        delta = filled(q, budget, m, high)
        moving = (delta > m) & (delta < high)
        if not moving.any():
            return False  # a kink: what holds above it decides
        tied = delta <= m
        slope = np.where(tied, 1.0, np.where(moving, -q * np.count_nonzero(tied) / q[moving].sum(), 0.0))
        return bool(np.sum(p * delta**-0.5) + m * np.sum(p * delta**-1.5 * slope) < 0)

    left, right = low, min(budget / n, float(high.min()))
    for _ in range(100):
        middle = (left + right) / 2
        if not left < middle < right:
            break
        left, right = (middle, right) if not rising(middle) else (left, middle)
    return filled(q, budget, right, high)


def _tied_minimum(p: Array, q: Array, budget: float) -> float:
    """m without limits. With the a smallest workers tied at m, weighing P, and S = sum of the other q:

    2 P (B - a m)^(3/2) = S^(3/2) sqrt(m) (2 a m - B).
    """
    n = len(p)
    order = np.argsort(p, kind="stable")
    tied = np.arange(1, n)
    weight = np.cumsum(p[order])[:-1]
    rest = np.cumsum(q[order][::-1])[::-1][1:]
    joins = q[order][1:] * budget / (rest + tied * q[order][1:])  # m at which the next worker is tied too

    def excess(m, a, weight, rest):
        left = 2 * weight * np.maximum(budget - a * m, 0) ** 1.5
        return rest**1.5 * np.sqrt(m) * (2 * a * m - budget) - left

    stops = np.flatnonzero(excess(joins, tied, weight, rest) >= 0)
    if not stops.size:
        return budget / n
    a = int(tied[stops[0]])
    share, others = float(weight[a - 1]), float(rest[a - 1])
    left, right = budget / (2 * a), float(joins[a - 1])
    while True:
        middle = (left + right) / 2
        if not left < middle < right:
            return right
        left, right = (left, middle) if excess(middle, a, share, others) >= 0 else (middle, right)
