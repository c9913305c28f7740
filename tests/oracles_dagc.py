"""Slow float64 transcriptions of DAGC's formulas, by other means than the library's. No jaxcomp here."""

import math

import numpy as np

# p = (.7, .2, .08, .02), mean ratio .1: Phi, A and sum p / sqrt(delta) of each allocation.
EXAMPLE = np.array([0.7, 0.2, 0.08, 0.02])
EXAMPLE_RATIOS = {
    "uniform": [0.1, 0.1, 0.1, 0.1],
    "released": [0.209995529011, 0.091095729648, 0.049454370671, 0.049454370671],
    "phi": [0.131598321962, 0.089467226013, 0.089467226013, 0.089467226013],
    "sqrt": [0.195923321888, 0.104725420655, 0.066234171638, 0.033117085819],
    2 / 3: [0.226916947399, 0.098436214286, 0.053439398834, 0.021207439481],
    1.0: [0.28, 0.08, 0.032, 0.008],
}
EXAMPLE_BOUNDS = {  # Phi, A
    "uniform": (10, 10),
    "released": (11.8707629363, 7.5509628692),
    "phi": (9.8043887371, 8.6723999705),
    "sqrt": (14.3983181966, 7.2943359264),
    2 / 3: (17.7874427091, 7.5566897732),
    1.0: (30.1958936082, 10),
}
EXAMPLE_COUNTS = {  # of 1000 entries: largest remainder, ceil
    "released": ([210, 91, 50, 49], [210, 92, 50, 50]),
    "phi": ([132, 90, 89, 89], [132, 90, 90, 90]),
    "sqrt": ([196, 105, 66, 33], [196, 105, 67, 34]),
    2 / 3: ([227, 98, 54, 21], [227, 99, 54, 22]),
}
EXAMPLE_CAPPED = {  # (rule, mean ratio)
    # No cap binds here, so it is five times the allocation at 0.1. (A numerical search at 0.5 gave
    # 0.657991598939 and 0.447336133687, off by 1e-8: Phi is flat to 1e-16 so close to its minimum.)
    ("phi", 0.5): [5 * 0.131598321962, 5 * 0.089467226013, 5 * 0.089467226013, 5 * 0.089467226013],
    ("sqrt", 0.5): [0.979616609442, 0.523627103275, 0.331170858189, 0.165585429094],
    (2 / 3, 0.5): [1, 0.568722430109, 0.308750036648, 0.122527533243],
    ("phi", 0.8): [1, 2.2 / 3, 2.2 / 3, 2.2 / 3],
    ("sqrt", 0.8): [1, 1, 0.8, 0.4],
    (2 / 3, 0.8): [1, 1, 0.859075615900, 0.340924384100],
}


def skewed_volumes(workers, skew):
    """The released generator: log-spaced from `skew` to 1 over all but the last, which repeats 1."""
    volumes = [skew ** ((workers - 2 - i) / (workers - 2)) for i in range(workers - 1)]
    return np.array([*volumes, 1.0])


def bound(p, delta):
    return sum(pi / di for pi, di in zip(p, delta, strict=True))


def coupled_bound(p, delta):
    return sum(pi / math.sqrt(di * min(delta)) for pi, di in zip(p, delta, strict=True))


def filled(weights, budget, low, high):
    """clip(c w, low, high), with c by bisection."""
    left, right = 0.0, max(high / w for w in weights)
    for _ in range(200):
        c = (left + right) / 2
        if sum(min(max(c * w, low), high) for w in weights) < budget:
            left = c
        else:
            right = c
    return [min(max(right * w, low), high) for w in weights]


def released(p, mean_ratio):
    """DAGC-R, candidate by candidate; p in descending order."""
    n, q = len(p), [pi ** (2 / 3) for pi in p]
    if n == 1:
        return [mean_ratio]
    best = None
    for j in range(n - 1, -1, -1):
        if j < n - 1 and p[j] == p[j + 1]:
            continue
        r = n - 2 if j == n - 1 else n - 1
        Q = sum(q[i] for i in range(n) if i != j) / q[r]
        score = (p[j] + p[r] * Q) * (1 + Q)
        delta = [n * mean_ratio / (1 + Q) * (1 if i == j else q[i] / q[r]) for i in range(n)]
        if best is None or score < best[0]:
            best = score, delta
    return best[1]


def phi_minimum(p, mean_ratio, high=1.0):
    """Least value of Phi, by golden section over the least ratio m (Phi is convex in it)."""
    n, q = len(p), [pi ** (2 / 3) for pi in p]
    budget = n * mean_ratio

    def value(m):
        delta = filled(q, budget, m, high)
        return sum(pi / math.sqrt(di * m) for pi, di in zip(p, delta, strict=True))

    left, right = 1e-9, mean_ratio
    golden = (math.sqrt(5) - 1) / 2
    a, b = right - golden * (right - left), left + golden * (right - left)
    fa, fb = value(a), value(b)
    for _ in range(60):
        if fa < fb:
            right, b, fb = b, a, fa
            a = right - golden * (right - left)
            fa = value(a)
        else:
            left, a, fa = a, b, fb
            b = left + golden * (right - left)
            fb = value(b)
    return min(fa, fb, value(mean_ratio))


def knapsack(cost, error, budget):
    """Least cost within the budget, by trying everything."""
    layers, candidates = np.shape(cost)
    best = (math.inf, None)
    for code in range(candidates**layers):
        choice = [code // candidates**layer % candidates for layer in range(layers)]
        spent = sum(error[layer][c] for layer, c in enumerate(choice))
        price = sum(cost[layer][c] for layer, c in enumerate(choice))
        if spent <= budget and price < best[0]:
            best = (price, choice)
    return best
