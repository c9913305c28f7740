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
    scale = 2.0**-64 if float(np.max(np.abs(rows), initial=0)) > 2.0**900 else 1.0  # sums in f64 must not overflow
    takers = min(2, workers // 2)  # of what rounding leaves over
    large = workers - takers
    result, pool = [], _Sum(rows.shape[1:])
    for j in range(large):
        part = _Sum(rows.shape[1:])
        for row in rows[j::large]:
            part.add(row.astype(np.float64) * scale)
        result.append(part.value(scale, dtype))
        pool.join(part)
        pool.add(-result[-1].astype(np.float64) * scale)
    for _ in range(takers):
        result.append(pool.value(scale, dtype))
        pool.add(-result[-1].astype(np.float64) * scale)
    if takers:
        _say_what_is_lost(rows, np.abs(pool.high + pool.low) + pool.lost, scale, workers)
    return np.stack(result)


def _say_what_is_lost(rows: np.ndarray, lost: np.ndarray, scale: float, workers: int) -> None:
    inexact = int(np.count_nonzero(lost))
    if inexact:
        largest = np.maximum(np.abs(rows.astype(np.float64)).max(0) * scale, np.finfo(np.float64).tiny)
        warnings.warn(
            f"redistribute: the sum over {len(rows)} workers of {inexact} entries of a memory cannot be held by "
            f"{workers}; at most {float(np.max(lost / largest)):.1e} of the largest of them is lost",
            stacklevel=2,
        )


class _Sum:
    """high + low, exact to twice the digits of f64; lost: bound on what went beyond these."""

    def __init__(self, shape: tuple[int, ...]):
        self.high, self.low, self.lost = (np.zeros(shape) for _ in range(3))

    def add(self, x: np.ndarray) -> None:
        self.high, error = _two_sum(self.high, x)
        self.low, error = _two_sum(self.low, error)
        self.lost += np.abs(error)

    def join(self, other: "_Sum") -> None:
        self.add(other.high)
        self.add(other.low)
        self.lost += other.lost

    def value(self, scale: float, dtype: Any) -> np.ndarray:
        with np.errstate(over="ignore"):
            return rounded((self.high + self.low) / scale, dtype)


def _two_sum(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(s, e) with s = fl(a + b) and a + b = s + e exactly (Knuth 1969)."""
    s = a + b
    c = s - a
    return s, (a - (s - c)) + (b - c)


def rounded(x: np.ndarray, dtype: Any) -> np.ndarray:
    """x in a dtype, at most its largest number."""
    largest = float(jnp.finfo(dtype).max)
    return np.clip(x, -largest, largest).astype(dtype)
