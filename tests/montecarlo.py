"""Monte Carlo with a stated rate of false alarms."""

from statistics import NormalDist

import numpy as np

from jaxcomp.testing.compressors import monte_carlo, z_bound


def chi_square_bound(degrees, false_alarm):
    """Upper quantile of chi-square, by the Wilson-Hilferty approximation."""
    z = NormalDist().inv_cdf(1 - false_alarm)
    return degrees * (1 - 2 / (9 * degrees) + z * np.sqrt(2 / (9 * degrees))) ** 3


__all__ = ["chi_square_bound", "monte_carlo", "z_bound"]
