"""Sums of floats that move to other workers without loss, wherever so many floats can hold them."""

import warnings
from typing import Any

import jax.numpy as jnp
import numpy as np

__all__ = ["pooled", "rounded", "spread"]


def pooled(rows: np.ndarray, workers: int, keep: str) -> np.ndarray:
    """[n, ...] of n workers for another number of them: with the same sum, or ("mean") with n' / n times as much."""
    moved = spread(rows, workers)
    if keep == "sum" or workers == len(rows):
        return moved
    return rounded(moved.astype(np.float64) * (workers / len(rows)), rows.dtype)


def spread(rows: np.ndarray, workers: int) -> np.ndarray:
    """[n, ...] -> [workers, ...] with the same exact sum over the first axis, wherever so many floats can hold it.

    Where they cannot, because magnitudes are too far apart or the sum is too large, a warning says for how many entries
    and by how much.

    >>> print(spread(np.array([[1.0], [1e-9], [1.0]], np.float32), 2).tolist())
    [[2.0], [9.999999717180685e-10]]
    """
    dtype, n = rows.dtype, len(rows)
    if workers >= n:
        return np.concatenate([rows, np.zeros((workers - n, *rows.shape[1:]), dtype)])
    takers = min(2, workers // 2)  # of what rounding leaves over
    large = workers - takers
    result = []
    high, low = np.zeros(rows.shape[1:]), np.zeros(rows.shape[1:])
    for j in range(large):
        total, rest = np.zeros(rows.shape[1:]), np.zeros(rows.shape[1:])
        for row in rows[j::large]:
            total, error = _two_sum(total, row.astype(np.float64))
            rest = rest + error
        result.append(rounded(total + rest, dtype))
        high, error = _two_sum(high, total - result[-1])
        low = low + (rest + error)
    for _ in range(takers):
        high, low = _two_sum(high, low)
        result.append(rounded(high, dtype))
        high = high - result[-1]
    if takers:
        _say_what_is_lost(rows, high + low, workers)
    return np.stack(result)


def _say_what_is_lost(rows: np.ndarray, lost: np.ndarray, workers: int) -> None:
    inexact = int(np.count_nonzero(lost))
    if inexact:
        scale = np.maximum(np.abs(rows.astype(np.float64)).max(0), np.finfo(np.float64).tiny)
        warnings.warn(
            f"redistribute: the sum over {len(rows)} workers of {inexact} entries of a memory cannot be held by "
            f"{workers}; at most {float(np.max(np.abs(lost) / scale)):.1e} of the largest of them is lost",
            stacklevel=2,
        )


def _two_sum(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(s, e) with s = fl(a + b) and a + b = s + e exactly (Knuth 1969)."""
    s = a + b
    c = s - a
    return s, (a - (s - c)) + (b - c)


def rounded(x: np.ndarray, dtype: Any) -> np.ndarray:
    """x in a dtype, at most its largest number."""
    largest = float(jnp.finfo(dtype).max)
    return np.clip(x, -largest, largest).astype(dtype)
