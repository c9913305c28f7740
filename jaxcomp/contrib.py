"""Historical rivals of the methods that one should use, each as it was published."""

from jaxcomp.algorithms import momentum_correction
from jaxcomp.compressors import dgc, gaussian_k, hard_threshold, redsync

__all__ = ["dgc", "gaussian_k", "hard_threshold", "momentum_correction", "redsync"]
