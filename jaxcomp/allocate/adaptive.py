"""Budgets along the other axes: layers (L-GreCo), time (Accordion), bandwidth (Kimad).

Each returns ratios that a compressed step takes as arguments: `jc.state.set_amounts(state, ratios)`.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["by_bandwidth", "by_layer", "by_regime", "layer_errors"]

Array = np.ndarray


def by_layer(cost: Any, error: Any, budget: float, *, steps: int = 10_000) -> Array:
    """One candidate for each layer: least total cost whose errors together stay within a budget.

    min_c sum_l cost[l, c_l]   subject to   sum_l error[l, c_l] <= budget,

    by dynamic programming over the error spent so far, in `steps` units of budget / steps. Errors are
    rounded up to units, so the constraint holds exactly; the cost is the least one for rounded
    errors. L-GreCo: cost = bits, error = |G - C(G)|, budget = the total error of a uniform
    ratio. Kimad+, the other way round: cost = squared error, error = bits, budget = the bits of a round.

    Args:
        cost: [L, C], candidate c of layer l.
        error: [L, C], at least 0; NaN and infinity are never chosen.
        budget: at least 0.
        steps: units of the budget, at least 1. Time and memory are L C steps.

    Returns:
        int64[L], the candidate of each layer.

    Raises:
        ValueError: shapes do not fit, an argument is out of range, or no choice meets the budget
            once errors are rounded up.

    Reference: Alimohammadi, Markov, Frantar, Alistarh 2023 (L-GreCo), algorithm 1.

    >>> print(by_layer([[1, 4], [1, 4]], [[5, 0], [2, 0]], 2))  # only the second layer can be cheap
    [1 0]
    """
    cost, error = np.asarray(cost, np.float64), np.asarray(error, np.float64)
    if cost.ndim != 2 or cost.shape != error.shape or 0 in cost.shape:
        raise ValueError(f"by_layer: cost and error must have one shape [L, C]; got {cost.shape} and {error.shape}")
    if np.any(error < 0) or not np.all(np.isfinite(cost)):
        raise ValueError("by_layer: errors must be at least 0 and costs finite")
    if not (math.isfinite(budget) and budget >= 0):
        raise ValueError(f"by_layer: budget must be a finite number >= 0; got {budget}")
    if isinstance(steps, bool) or int(steps) != steps or steps < 1:
        raise ValueError(f"by_layer: steps must be an integer of at least 1; got {steps}")
    units = np.where(error > 0, np.inf, 0.0)
    if budget > 0:
        units = np.ceil(error / budget * steps * (1 - 1e-12))
    units = np.where(units <= steps, units, steps + 1).astype(np.int64)
    least = np.zeros(steps + 1)  # least cost of the layers so far with at most b units
    chosen = np.zeros((len(cost), steps + 1), np.int16)
    for layer, (costs, sizes) in enumerate(zip(cost, units, strict=True)):
        options = np.full((len(costs), steps + 1), np.inf)
        for option, price, size in zip(options, costs, sizes, strict=True):
            option[size:] = least[: max(steps + 1 - size, 0)] + price
        chosen[layer] = np.argmin(options, axis=0)
        least = np.min(options, axis=0)
    if not np.isfinite(least[-1]):
        raise ValueError(f"by_layer: no choice keeps the total error within {budget}, with errors rounded up to units")
    result, left = np.zeros(len(cost), np.int64), steps
    for layer in reversed(range(len(cost))):
        result[layer] = chosen[layer, left]
        left -= units[layer, result[layer]]
    return result


def layer_errors(tree: Any, ratios: Sequence[float] | Array) -> tuple[Array, Array]:
    """Tabulates what `top_k` at each ratio would cost and lose on each leaf, for `by_layer`.

    Args:
        tree: gradients, usually a sum over some rounds.
        ratios: C candidates in (0, 1].

    Returns:
        counts float64[L, C], the entries sent, and errors float64[L, C], |g - top_k(g)|_2; leaves in the
        order of `jax.tree.leaves`. Non-finite entries count as zero.

    >>> sent, lost = layer_errors([np.array([3.0, 4.0])], [0.5, 1.0])
    >>> print(sent, lost)
    [[1. 2.]] [[3. 0.]]
    """
    ratios = np.asarray(ratios, np.float64)
    if ratios.ndim != 1 or not ratios.size or not np.all((ratios > 0) & (ratios <= 1)):
        raise ValueError(f"layer_errors: ratios must be in (0, 1]; got {ratios}")
    sent, lost = [], []
    for leaf in jax.tree.leaves(tree):
        x = np.asarray(leaf, np.float64).reshape(-1)
        squares = np.sort(np.square(np.where(np.isfinite(x), x, 0)))
        kept = np.minimum(np.maximum(np.floor(ratios * x.size + 1e-9), 1), x.size).astype(np.int64)
        below = np.concatenate([[0.0], np.cumsum(squares)])
        sent.append(kept.astype(np.float64))
        lost.append(np.sqrt(below[x.size - kept]))
    return np.array(sent), np.array(lost)


def by_regime(before: Any, now: Any, *, low: float, high: float, change: float = 0.5) -> jax.Array:
    """Switches between two ratios: much in critical regimes, little otherwise (Accordion).

    ratio = high where |before - now| >= change * before, or before = 0 (the first window), else low.

    Works on arrays (one norm for each layer or worker), inside jit and outside.

    Args:
        before: norm of the gradient accumulated over the previous window, at least 0.
        now: the same of this window.
        low: ratio outside of critical regimes, in (0, 1].
        high: ratio within them, in [low, 1].
        change: relative change from which on a regime is critical, at least 0.

    Returns:
        f32, shape of `before` and `now`. Where a norm is not finite, high.

    Raises:
        ValueError: a ratio or `change` is out of range.

    Reference: Agarwal, Wang, Venkataraman, Papailiopoulos 2021 (Accordion), algorithm 1.

    >>> print(by_regime(jnp.array([0.0, 1.0, 1.0]), jnp.array([1.0, 0.9, 0.4]), low=0.01, high=0.1))
    [0.1  0.01 0.1 ]
    """
    if not 0 < low <= high <= 1:
        raise ValueError(f"by_regime: need 0 < low <= high <= 1; got low={low}, high={high}")
    if not 0 <= change < math.inf:
        raise ValueError(f"by_regime: change must be a finite number >= 0; got {change}")
    before, now = jnp.asarray(before, jnp.float32), jnp.asarray(now, jnp.float32)
    calm = (before > 0) & (jnp.abs(before - now) < change * before)
    return jnp.where(calm, jnp.float32(low), jnp.float32(high))


def by_bandwidth(
    bandwidths: Sequence[float] | Array, seconds: float, size: int, *, bits: float = 64, floor: float = 0.0
) -> Array:
    """Largest ratio that each worker can send within a round's time (Kimad).

    delta_i = clip(bandwidth_i * seconds / (size * bits), floor, 1).

    Together with data volumes it is a cap: `ratios(volumes, r, cap=by_bandwidth(...))`.

    Args:
        bandwidths: bits per second of each worker, n numbers >= 0, as measured.
        seconds: time for communication in a round, above 0.
        size: number of entries d, at least 1.
        bits: of one sent entry (value and index), above 0.
        floor: least ratio, in [0, 1].

    Returns:
        float64[n].

    Raises:
        ValueError: an argument is out of range.

    Reference: Xin, Canini, Richtarik, Horvath 2023 (Kimad).

    >>> print(by_bandwidth([1e6, 1e8], 0.064, 10_000))
    [0.1 1. ]
    """
    rate = np.asarray(bandwidths, np.float64)
    if rate.ndim != 1 or not rate.size or np.any(np.isnan(rate)) or np.any(rate < 0):
        raise ValueError(f"by_bandwidth: bandwidths must be n numbers >= 0; got {bandwidths}")
    for name, value in (("seconds", seconds), ("size", size), ("bits", bits)):
        if not 0 < value < math.inf:
            raise ValueError(f"by_bandwidth: {name} must be a finite number above 0; got {value}")
    if not 0 <= floor <= 1:
        raise ValueError(f"by_bandwidth: floor must be in [0, 1]; got {floor}")
    return np.clip(rate * seconds / (size * bits), floor, 1)
