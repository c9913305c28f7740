"""Monte Carlo with a stated rate of false alarms."""

from statistics import NormalDist

import jax
import numpy as np


def monte_carlo(draws, key, num_draws, batch=256):
    """Mean and standard error over independent keys, in float64.

    draws: maps keys [batch] to values [batch, ...], jitted.
    """
    keys = jax.random.split(key, num_draws)
    values = np.concatenate([np.asarray(draws(keys[i : i + batch]), np.float64) for i in range(0, num_draws, batch)])
    spread = values.std(0, ddof=1) if num_draws > 1 else np.zeros_like(values[0])
    return values.mean(0), spread / np.sqrt(num_draws)


def z_bound(false_alarm, num_tests):
    """|z| that any of `num_tests` normal statistics exceeds with probability below `false_alarm`."""
    return NormalDist().inv_cdf(1 - false_alarm / (2 * num_tests))


def chi_square_bound(degrees, false_alarm):
    """Upper quantile of chi-square, by the Wilson-Hilferty approximation."""
    z = NormalDist().inv_cdf(1 - false_alarm)
    return degrees * (1 - 2 / (9 * degrees) + z * np.sqrt(2 / (9 * degrees))) ** 3


__all__ = ["chi_square_bound", "monte_carlo", "z_bound"]
