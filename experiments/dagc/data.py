"""Unequal workers: the released generator of data volumes and label mixes, and a problem of quadratics."""

from typing import NamedTuple

import numpy as np

from experiments.lib.cli import UserError
from experiments.lib.data import nobody_empty

__all__ = ["Quadratics", "imbalanced_split", "quadratics", "skewed_volumes"]


def skewed_volumes(workers: int, skew: float) -> np.ndarray:
    """Volumes log-spaced from `skew` down to 1 over all workers but the last, which has 1 too. float64[n]."""
    if workers < 3:
        return np.geomspace(skew, 1.0, workers)
    return np.append(np.geomspace(skew, 1.0, workers - 1), 1.0)


def imbalanced_split(labels: np.ndarray, workers: int, skew: float, alpha: float, seed: int) -> list[np.ndarray]:
    """Indices of each worker's examples: label mixes from Dirichlet(alpha), volumes log-spaced.

    Row i of the mixes is scaled to volume v_i; class c with N_c examples is then shared in the
    proportions of column c, rounded. Together the parts are all examples, each once, and every
    worker has at least one; realised volumes differ a little from v.

    Args:
        labels: i32[n].
        workers: number of parts.
        skew: largest volume over the smallest, at least 1.
        alpha: of the Dirichlet distribution of label mixes, above 0.
        seed: of the draw.
    """
    if workers > len(labels):
        raise UserError(f"{workers} workers for {len(labels)} examples; each needs at least one")
    rng = np.random.default_rng([seed, 11])
    classes = np.unique(labels)
    mixes = rng.dirichlet(np.full(len(classes), alpha), workers)
    demand = mixes * skewed_volumes(workers, skew)[:, None]
    parts: list[list[np.ndarray]] = [[] for _ in range(workers)]
    for column, label in enumerate(classes):
        members = rng.permutation(np.flatnonzero(labels == label))
        edges = np.rint(np.cumsum(demand[:, column])[:-1] / demand[:, column].sum() * len(members)).astype(int)
        for part, piece in zip(parts, np.split(members, edges), strict=True):
            part.append(piece)
    return nobody_empty(parts)


class Quadratics(NamedTuple):
    """f_i(x) = 1/2 sum_j h_ij (x_j - c_ij)^2, f = sum_i p_i f_i. curvature, center: f32[n, d]; volumes: f64[n]."""

    curvature: np.ndarray
    center: np.ndarray
    volumes: np.ndarray


def quadratics(workers: int, size: int, skew: float, seed: int) -> Quadratics:
    """Heterogeneous: curvatures in [0.1, 1] and minima of standard deviation 1, drawn for each worker."""
    rng = np.random.default_rng([seed, 12])
    curvature = rng.uniform(0.1, 1.0, (workers, size)).astype(np.float32)
    center = rng.standard_normal((workers, size)).astype(np.float32)
    return Quadratics(curvature, center, skewed_volumes(workers, skew))
