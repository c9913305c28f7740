"""Unequal workers: the released generator of data volumes and label mixes."""

import numpy as np

from experiments.lib.cli import UserError
from experiments.lib.data import dealt

__all__ = ["imbalanced_split", "skewed_volumes"]


def skewed_volumes(workers: int, skew: float) -> np.ndarray:
    """Volumes log-spaced from `skew` down to 1 over all workers but the last, which has 1 too. float64[n]."""
    if workers < 3:
        return np.geomspace(skew, 1.0, workers)
    return np.append(np.geomspace(skew, 1.0, workers - 1), 1.0)


def imbalanced_split(labels: np.ndarray, workers: int, skew: float, alpha: float, seed: int) -> list[np.ndarray]:
    """Indices of each worker's examples: label mixes from Dirichlet(alpha), volumes log-spaced over `skew`.

    Row i of the mixes is scaled to volume v_i; class c with N_c examples is then shared in the proportions of column
    c, rounded. Together the parts are all examples, each once, and every worker has at least one; realised volumes
    differ a little from v.
    """
    if workers > len(labels):
        raise UserError(f"{workers} workers for {len(labels)} examples; each needs at least one")
    rng = np.random.default_rng([seed, 11])
    mixes = rng.dirichlet(np.full(len(np.unique(labels)), alpha), workers)
    demand = mixes * skewed_volumes(workers, skew)[:, None]
    shares = demand / demand.sum(0)
    return dealt(labels, rng, lambda number: shares[:, number])
