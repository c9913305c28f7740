"""Regularised logistic regression, split among workers: data, optimum, smoothness."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import jaxcomp as jc
from experiments.lib.cli import UserError
from experiments.lib.data import read_rows
from jaxcomp.smoothness.preprocess import scaled_rows

__all__ = ["Problem", "make_problem"]

FEATURES = {"a1a": 123}  # of files in which the last features do not occur
MOST_FEATURES = 4096  # of a file: the operators and the exact optimum are dense, d x d


class Problem(NamedTuple):
    """f_i(x) = mean_j log(1 + exp(-b_ij a_ij' x)) + (l2/2)|x|^2 for each of n workers.

    features [n, m, d], labels [n, m] of -1 and 1;  smoothness: stack of dense operators;  optimum [d];  L, L_max.
    """

    features: np.ndarray
    labels: np.ndarray
    l2: float
    smoothness: Any
    optimum: np.ndarray
    L: float
    L_max: float

    @property
    def workers(self) -> int:
        return self.features.shape[0]

    @property
    def d(self) -> int:
        return self.features.shape[2]


def make_problem(path: Path | None, workers: int, l2: float = 1e-3, own: int | None = None) -> Problem:
    """Rows divided by their largest magnitude, dealt to workers in the order of their norms, with the exact optimum.

    path: of `read_rows`; None: digits, the lower half against the upper one.
    own: number of features of rows that are drawn instead (`strong_rows`).
    """
    rows, labels = _read(path) if own is None else strong_rows(workers, own)
    rows = scaled_rows(rows)
    signs = np.where(labels == labels.max(), 1.0, -1.0)
    try:
        owner = jc.smoothness.assign("sorted", np.linalg.norm(rows, axis=1), signs, workers)
    except ValueError as error:
        raise UserError(str(error)) from None
    parts = [np.flatnonzero(owner == i) for i in range(workers)]
    features, signs = np.stack([rows[p] for p in parts]), np.stack([signs[p] for p in parts])
    S = jc.smoothness.glm(list(features), l2=l2)
    L = jc.smoothness.mean_lambda_max(S)
    return Problem(features, signs, l2, S, _optimum(features, signs, l2), L, float(np.max(S.lambda_max)))


def strong_rows(workers: int, d: int, each: int = 64) -> tuple[np.ndarray, np.ndarray]:
    """Rows of workers with one strong feature each, of its own, in a block of its own (of n blocks of d / n).

    So tr L_i and n lambda_max(mean L_i) are of the order of lambda_max(L_i), and diag L_i is in one block, which is
    where the bounds of methods with smoothness gain most.
    """
    if workers > d:
        raise UserError(f"--own {d} is for at most as many workers; got {workers}")
    rng = np.random.default_rng(0)
    weak = rng.standard_normal((workers, each, d))
    weak *= np.linspace(0.2, 0.25, workers)[:, None, None] / np.linalg.norm(weak, axis=2, keepdims=True)
    places = np.arange(workers) * (d // workers)
    weak[np.arange(workers), :, places] = 1.0
    rows = weak.reshape(-1, d)
    return rows, (rng.random(len(rows)) < 1 / (1 + np.exp(-2 * rows @ rng.standard_normal(d)))).astype(np.float64)


def _read(path: Path | None) -> tuple[np.ndarray, np.ndarray]:
    if path is None:
        from sklearn.datasets import load_digits

        images, digit = load_digits(return_X_y=True)
        return images.astype(np.float64), (digit >= 5).astype(np.float64)
    rows, labels = read_rows(path, FEATURES.get(path.name.split(".")[0]))
    if rows.shape[1] > MOST_FEATURES:
        raise UserError(f"--data {path} has {rows.shape[1]:,} features; at most {MOST_FEATURES:,} here")
    return rows.toarray(), labels


def _optimum(features: np.ndarray, labels: np.ndarray, l2: float) -> np.ndarray:
    """By Newton's method, until the gradient is at rounding level."""
    from sklearn.linear_model import LogisticRegression

    weight = 1 / (l2 * labels.size)
    model = LogisticRegression(C=weight, fit_intercept=False, solver="newton-cholesky", tol=1e-15)
    return model.fit(features.reshape(labels.size, -1), labels.reshape(-1)).coef_[0]
