"""Optimal probabilities, steps and block steps for a smoothness diagonal, and the variance they leave.

All of it is host arithmetic in float64, done once before training. The generalised variance of a
compressor C with respect to L is the least V(C, L) with E|C(x) - x|^2_L <= V |x|^2 for all x. For
compressors that treat coordinates independently only the diagonal of L matters.

Reference: Safaryan, Hanzely, Richtarik 2021 (sparsification); Wang, Safaryan, Richtarik 2022
(quantization). Where a formula is ours the docstring says so.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from jaxcomp.allocate.workers import number_of

__all__ = [
    "block_steps",
    "block_variance",
    "dithering_variance",
    "exact_probabilities",
    "expected_nonzeros",
    "probabilities",
    "rand_k_variance",
    "sparsification_variance",
    "steps",
]

STEPS_OF_BISECTION = 200
STEPS_OF_MANTISSA = 54
SMALLEST, LARGEST = np.finfo(np.float64).tiny, np.finfo(np.float64).max


def _diagonal(name: str, diag: Any) -> np.ndarray:
    diag = np.asarray(diag, np.float64)
    if diag.ndim not in (1, 2) or diag.shape[-1] == 0 or not np.all(np.isfinite(diag) & (diag >= 0)):
        raise ValueError(f"{name}: diag must be [d] or [workers, d], finite and at least 0; got shape {diag.shape}")
    if not np.all(diag.max(-1) > 0):
        raise ValueError(f"{name}: the diagonal of a worker is zero: there is nothing to send")
    return diag


def _scale(name: str, method: str, workers: int | None, mu: float | None) -> float:
    """n mu, by which methods with shifts weigh V against omega; infinite where omega plays no part."""
    if method not in ("dcgd+", "diana+", "exact"):
        raise ValueError(f'{name}: method must be "uniform", "dcgd+" or "diana+"; got {method!r}')
    if method == "dcgd+":
        return 0.0
    scale = number_of(workers) * number_of(mu)
    if not (number_of(workers) >= 1 and number_of(mu) > 0 and 0 < scale < np.inf):
        raise ValueError(f"{name}: method {method!r} needs workers >= 1 and mu > 0; got {workers} and {mu}")
    return scale


def _above_zero(name: str, what: str, value: Any) -> float:
    if not number_of(value) > 0:
        raise ValueError(f"{name}: {what} must be above 0; got {value!r}")
    return number_of(value)


def _with_one(diag: np.ndarray, scale: float, add: Callable[[Any, Any], Any]) -> np.ndarray:
    """add(1, diag / scale), up to a common factor with which nothing overflows."""
    return add(1, diag / scale) if scale >= 1 else add(scale, diag)


def probabilities(
    diag: Any, tau: float, *, method: str = "dcgd+", workers: int | None = None, mu: float | None = None
) -> np.ndarray:
    """Probabilities of independent sampling with an expected number tau of entries.

    p_j = a_j / (a_j + rho),   rho > 0 the root of sum_j p_j = tau,

    with a_j = L_jj ("dcgd+", minimises V; then V = rho), a_j = 1 + L_jj / (n mu) ("diana+", minimises
    max_j (1 / p_j - 1) a_j), or all equal ("uniform"). "exact" minimises omega + V / (n mu) itself.

    Args:
        diag: L_jj, [d], or [workers, d] for a row of probabilities for each worker.
        tau: expected number of entries sent, above 0.
        method: "dcgd+", "diana+", "exact" or "uniform".
        workers: n, for "diana+" and "exact".
        mu: strong convexity, for "diana+" and "exact".

    Returns:
        float64 of the shape of diag, in [2.2e-308, 1]. Entries with L_jj = 0 carry nothing and get the
        smallest of the other probabilities; tau counts the others. All ones if tau is at least
        their number.

    Raises:
        ValueError: bad diagonal, tau, method or constants.

    Reference: Safaryan, Hanzely, Richtarik 2021; the "diana+" rule as in the code of Wang, Safaryan,
    Richtarik 2022; "exact" is ours (`exact_probabilities`).

    >>> print(probabilities([0.6, 0.225, 0.115625], 1.5))
    [0.7071742  0.47523774 0.31758806]
    """
    diag, tau = _diagonal("probabilities", diag), _above_zero("probabilities", "tau", tau)
    if diag.ndim == 2:
        return np.stack([probabilities(one, tau, method=method, workers=workers, mu=mu) for one in diag])
    used = diag > 0
    if tau >= used.sum():
        return np.ones_like(diag)
    if method == "uniform":
        kept = np.full(used.sum(), max(tau / used.sum(), SMALLEST))
    elif method == "exact":
        scale = _scale("probabilities", method, workers, mu)
        kept = _exact(diag[used], tau, scale)
    else:
        scale = _scale("probabilities", method, workers, mu)
        kept = _shares_of(_with_one(diag[used], scale, np.add) if scale else diag[used], tau)
    p = np.full_like(diag, kept.min())
    p[used] = kept
    return p


def _shares_of(a: np.ndarray, budget: float) -> np.ndarray:
    """a / (a + rho) with the sum `budget`, below the size of a.

    Entries may be as far apart as float64 goes: rho = m 2^e is found as an integer e, then m in [1, 2], each by
    bisection, and only its quotients with the entries are formed.
    """
    mantissa, exponent = np.frexp(a)

    def shares(m, e):
        with np.errstate(over="ignore", under="ignore"):
            return 1 / (1 + np.ldexp(m / mantissa, e - exponent))

    low, high = int(exponent.min()) - 128, int(exponent.max()) + int(np.log2(a.size) - np.log2(budget)) + 2
    while high - low > 1:
        e = (low + high) // 2
        low, high = (e, high) if np.sum(shares(1.0, e)) > budget else (low, e)
    left, right = 1.0, 2.0
    for _ in range(STEPS_OF_MANTISSA):
        m = (left + right) / 2
        left, right = (m, right) if np.sum(shares(m, low)) > budget else (left, m)
    return np.maximum(shares((left + right) / 2, low), SMALLEST)


def _exact(diag: np.ndarray, tau: float, scale: float) -> np.ndarray:
    """Probabilities that minimise omega + V / scale, with the largest entry as the unit of V."""
    largest = diag.max()
    first, second = (scale / largest, 1.0) if scale < largest else (1.0, largest / scale)
    relative = np.maximum(diag / largest, SMALLEST)
    return exact_probabilities(relative, tau, lambda omega, variance: first * omega + second * variance)


def _root_of_budget(spent: Callable[[float], float], budget: float, upper: float) -> float:
    """The root of a decreasing function on (0, upper] by bisection, to the last place."""
    low, high = 0.0, upper
    for _ in range(STEPS_OF_BISECTION):
        middle = (low + high) / 2
        low, high = (middle, high) if spent(middle) > budget else (low, middle)
    return (low + high) / 2


def exact_probabilities(diag: Any, tau: float, objective: Callable[[float, float], float]) -> np.ndarray:
    """Probabilities that minimise any increasing objective(omega, V) of both variances. Ours.

    At the optimum 1 / p_j - 1 = omega min(1, c / L_jj) with c = V / omega between the least and the largest L_jj:
    omega follows from the budget for every c, and c from a search in one dimension.

    Args:
        diag: L_jj, [d], >= 0.
        tau: expected number of entries that are sent, above 0, at most d.
        objective: of omega and V.

    >>> p = exact_probabilities([0.6, 0.225, 0.115625], 1.5, lambda omega, v: omega + v / 0.2)
    >>> print(round(float(max(1 / p - 1) + max((1 / p - 1) * [0.6, 0.225, 0.115625]) / 0.2), 6))
    2.929679
    """
    diag = _diagonal("exact_probabilities", diag)
    if not np.all(diag > 0) or not 0 < number_of(tau) < diag.size:
        raise ValueError(f"exact_probabilities: needs diag above 0 and tau in (0, {diag.size}); got {diag} and {tau}")

    def at(c):
        shape = np.minimum(1, c / diag)
        p = _shares_of(1 / np.maximum(shape, SMALLEST), tau)
        return objective(float(np.max(1 / p - 1)), sparsification_variance(diag, p)), p

    grid = np.geomspace(diag.min(), diag.max(), 65)
    best = int(np.argmin([at(c)[0] for c in grid]))
    low, high = np.log(grid[max(best - 1, 0)]), np.log(grid[min(best + 1, grid.size - 1)])
    golden = (np.sqrt(5) - 1) / 2
    for _ in range(60):
        left, right = high - golden * (high - low), low + golden * (high - low)
        low, high = (low, right) if at(np.exp(left))[0] < at(np.exp(right))[0] else (left, high)
    return at(np.exp((low + high) / 2))[1]


def steps(
    diag: Any, beta: float, *, method: str = "dcgd+", workers: int | None = None, mu: float | None = None
) -> np.ndarray:
    """Step sizes of dithering, one per entry, for an expected number beta of non-zero levels.

    h_j = sqrt(sum_t A_t / A_j) / beta,   so that |1/h|_2 = beta,

    with A_j = L_jj ("dcgd+", minimises |Diag(L) h|) or sqrt(1 + (L_jj / (n mu))^2) ("diana+", minimises
    |h|^2 + |Diag(L) h|^2 / (n mu)^2). "uniform": h_j = sqrt(d) / beta.

    Args:
        diag: L_jj, [d] or [workers, d].
        beta: bound on the expected non-zeros in the 2-norm, above 0.
        method: "dcgd+", "diana+" or "uniform".
        workers, mu: n and strong convexity, for "diana+".

    Returns:
        float64 of the shape of diag, finite. Entries with L_jj = 0 get the largest of the other
        steps and are not counted in beta.

    Raises:
        ValueError: bad diagonal, beta, method or constants.

    Reference: Wang, Safaryan, Richtarik 2022, quantization with varying steps.

    >>> print(steps([0.6, 0.225, 0.115625], 1.5))
    [0.83472107 1.36309379 1.90147722]
    """
    diag, beta = _diagonal("steps", diag), _above_zero("steps", "beta", beta)
    if diag.ndim == 2:
        return np.stack([steps(one, beta, method=method, workers=workers, mu=mu) for one in diag])
    used = diag > 0
    if method == "uniform":
        a = np.ones(used.sum())
    else:
        scale = _scale("steps", method, workers, mu)
        a = _with_one(diag[used], scale, np.hypot) if scale else diag[used]
    with np.errstate(over="ignore"):
        kept = np.sqrt(np.sum(a / a.max())) * (np.sqrt(a.max()) / np.sqrt(a)) / beta
    kept = np.minimum(kept, LARGEST)
    h = np.full_like(diag, kept.max())
    h[used] = kept
    return h


def _cuts(d: int, blocks: int) -> np.ndarray:
    """Starts of blocks of floor(d / blocks) entries; the last takes the remainder, as `dithering` cuts."""
    if not 1 <= blocks <= d:
        raise ValueError(f"blocks must be in 1 .. d = {d}; got {blocks}")
    return np.arange(blocks) * (d // blocks)


def block_steps(
    diag: Any,
    beta: float,
    blocks: int,
    *,
    method: str = "dcgd+",
    rule: str = "exact",
    workers: int | None = None,
    mu: float | None = None,
) -> np.ndarray:
    """Step sizes of dithering, one per block, for B + sum_l (1/h_l^2 + sqrt(d_l)/h_l) = beta.

    h_l = delta / A_l,   with N_l the 2-norm of the diagonal of block l and A_l = N_l ("dcgd+", minimises
    V = max_l h_l N_l), A_l = sqrt(d_l) + N_l / (n mu) ("diana+"), or A_l = sqrt(d_l) for equal blocks ("uniform").

    rule "exact" takes the root delta that spends the budget; "released" the closed forms of the
    authors' code, which spend less (a bound for "dcgd+", a mean for "diana+") or, for "uniform", the same.

    Args:
        diag: L_jj, [d] or [workers, d].
        beta: budget of non-zeros and norms, above `blocks`.
        blocks: B, of floor(d / B) entries, the last takes the remainder.
        method: "dcgd+", "diana+" or "uniform".
        rule: "exact" or "released".
        workers, mu: n and strong convexity, for "diana+".

    Returns:
        float64[B] or [workers, B].

    Raises:
        ValueError: bad diagonal, beta, blocks, method, rule or constants.

    Reference: Wang, Safaryan, Richtarik 2022, block quantization; the exact root is ours.

    >>> print(block_steps([0.6, 0.225, 0.115625], 4.5, 1))
    [0.83645092]
    """
    diag = _diagonal("block_steps", diag)
    if diag.ndim == 2:
        options = {"method": method, "rule": rule, "workers": workers, "mu": mu}
        return np.stack([block_steps(one, beta, blocks, **options) for one in diag])
    if rule not in ("exact", "released"):
        raise ValueError(f'block_steps: rule must be "exact" or "released"; got {rule!r}')
    if not number_of(beta) > blocks:
        raise ValueError(f"block_steps: beta must be above the number of blocks, {blocks}; got {beta}")
    d, budget = diag.size, beta - blocks
    cuts = _cuts(d, blocks)
    lengths = np.diff(np.append(cuts, d))
    norms = np.sqrt(np.add.reduceat(diag**2, cuts))
    norms = np.maximum(norms, 1e-12 * norms.max())  # a block without smoothness still needs a finite step
    whole = np.linalg.norm(diag)
    scale = 0.0 if method == "uniform" else _scale("block_steps", method, workers, mu)
    if scale:
        a, first = np.sqrt(lengths) + norms / scale, 1 + whole / (scale * np.sqrt(d))
    elif method == "dcgd+":
        a, first = norms, whole / np.sqrt(d)
    else:
        a, first = np.sqrt(lengths), 1.0
    linear = np.sum(np.sqrt(lengths) * a) / budget
    if rule == "exact" or method == "uniform":
        delta = linear / 2 + np.sqrt(linear**2 / 4 + np.sum(a**2) / budget)
    elif method == "diana+":
        delta = linear / 2 + np.sqrt(linear**2 / 4 + d * first**2 / budget)
    else:
        delta = linear + np.sqrt(d / budget) * first
    return delta / a


# ------------------------------------------------------------------------------------------------
# What is left: V(C, L)


def sparsification_variance(diag: Any, p: Any) -> float:
    """V of independent sampling: max_j (1 / p_j - 1) L_jj; with diag = 1 this is omega.

    Args:
        diag: L_jj, [d], >= 0.
        p: probabilities, [d].

    Raises:
        ValueError: a probability is not in (0, 1].

    >>> print(sparsification_variance([2.0, 1.0], [0.5, 0.5]))
    2.0
    """
    chances = np.asarray(p, np.float64)
    if not np.all((chances > 0) & (chances <= 1)):
        raise ValueError(f"sparsification_variance: p must be in (0, 1]; got {p}")
    return float(np.max((1 / chances - 1) * np.asarray(diag, np.float64)))


def rand_k_variance(matrix: Any, k: int) -> float:
    """V of k entries without replacement: ((d - k) / k) / (d - 1) lambda_max(d Diag(L) - L), exactly.

    Args:
        matrix: L, [d, d].
        k: 1 to d.

    >>> print(round(rand_k_variance([[0.6, 0.125, 0], [0.125, 0.225, 0], [0, 0, 0.115625]], 2), 6))
    0.305071
    """
    matrix = np.asarray(matrix, np.float64)
    d = matrix.shape[0]
    if not 1 <= k <= d:
        raise ValueError(f"rand_k_variance: k must be in 1 .. {d}; got {k}")
    if k == d:
        return 0.0
    return float((d - k) / k / (d - 1) * np.linalg.eigvalsh(d * np.diag(np.diag(matrix)) - matrix)[-1])


def dithering_variance(diag: Any, steps: Any, *, bound: str = "dual") -> float:
    """Bound on V of random dithering with steps h; with diag = 1, on omega.

    "norm":     |Diag(L) h|_2 (the papers' bound).
    "quarter":  (1/4) sum_j L_jj h_j^2.
    "dual":     min over t >= 0 of t + sum_j L_jj^2 h_j^2 / (4 (L_jj + t)), never above the other two (ours).

    "dual" is the Lagrangian dual of maximising sum_j L_jj h_j^2 r_j (1 - r_j), with r_j the place of
    |x_j| / (h_j |x|) between two levels, over the unit sphere. Valid for norms 2 and inf.

    Args:
        diag: L_jj, [d] (ones for omega).
        steps: h, a number or [d].
        bound: "dual", "norm" or "quarter".

    >>> print(round(dithering_variance([0.6, 0.225, 0.115625], steps([0.6, 0.225, 0.115625], 1.5)), 8))
    0.30436184
    """
    diag = np.asarray(diag, np.float64)
    h = np.broadcast_to(np.asarray(steps, np.float64), diag.shape)
    if bound == "norm":
        return float(np.linalg.norm(diag * h))
    if bound == "quarter":
        return float(np.sum(diag * h**2) / 4)
    if bound != "dual":
        raise ValueError(f'dithering_variance: bound must be "dual", "norm" or "quarter"; got {bound!r}')
    used = diag > 0
    diag, squares = diag[used], (diag[used] * h[used]) ** 2 / 4
    slope = lambda t: np.sum(squares / (diag + t) ** 2)
    t = 0.0 if not diag.size or slope(0.0) <= 1 else _root_of_budget(slope, 1.0, float(np.sqrt(np.sum(squares))))
    return float(t + np.sum(squares / (diag + t)))


def block_variance(diag: Any, steps: Any, *, bound: str = "dual") -> float:
    """The same for blocks with a norm each: the largest over the blocks.

    Args:
        diag: L_jj, [d].
        steps: h_l, [B], one per block (blocks as `dithering(blocks=B)` cuts them).
        bound: as in `dithering_variance`.
    """
    diag, h = np.asarray(diag, np.float64), np.asarray(steps, np.float64).reshape(-1)
    parts = np.split(diag, _cuts(diag.size, h.size)[1:])
    return max(dithering_variance(part, step, bound=bound) for part, step in zip(parts, h, strict=True))


def expected_nonzeros(steps: Any, x: Any = None, *, norm: float = 2) -> float:
    """Expected number of non-zero levels of dithering.

    For a vector x, exactly: sum_j min(1, |x_j| / (h_j |x|_q)). Without, its bound |1/h|_2 over all x (norm 2).

    Args:
        steps: h, [d], above 0.
        x: [d], or None for the bound.
        norm: q.

    >>> print(round(expected_nonzeros([0.5, 0.5]), 4), expected_nonzeros([0.5, 0.5], [1.0, 0.0]))
    2.8284 1.0
    """
    h = np.asarray(steps, np.float64)
    if x is None:
        return float(np.linalg.norm(1 / h))
    x = np.abs(np.asarray(x, np.float64))
    size = np.linalg.norm(x, norm)
    return float(np.sum(np.minimum(1, x / (h * size)))) if size > 0 else 0.0
