"""Rotations and EDEN in float64 NumPy, and the linear program behind its bounds; none of this imports jaxcomp."""

import math

import numpy as np
from scipy import optimize, special


def hadamard(size):
    """Sylvester's matrix, entries 1 and -1."""
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


def eden(y, table, scale):
    """S c(y / sigma) of one rotated block."""
    sigma = math.sqrt(np.mean(np.square(y)))
    levels = np.concatenate([-np.asarray(table)[::-1], table])
    c = levels[np.argmin(np.abs(y[:, None] / sigma - levels), axis=1)]
    return c * (y @ y / (c @ y) if scale == "unbiased" else (c @ y) / (c @ c))


def largest_error(table, moments=10):
    """max E (|Y| - c)^2 over laws with E Y^2 = 1, E|Y| >= 1 / sqrt 2, E Y^2k <= (2k - 1)!!, on a grid of |Y|."""
    c = np.asarray(table)
    y = np.unique(np.concatenate([np.linspace(0, 12, 3001), np.geomspace(12, 200, 300), (c[1:] + c[:-1]) / 2, c]))
    error = np.min(np.square(y[:, None] - c), axis=1)
    rows, bounds = [-y], [-1 / math.sqrt(2)]
    for k in range(2, moments + 1):
        rows.append(y ** (2 * k) / special.factorial2(2 * k - 1))
        bounds.append(1.0)
    rows = np.array(rows)
    unit = 1 / np.maximum(1, rows.max(axis=0))  # of the unknowns, so that no coefficient is above one
    equal = np.array([unit, y**2 * unit])
    result = optimize.linprog(-error * unit, A_ub=rows * unit, b_ub=bounds, A_eq=equal, b_eq=[1, 1], method="highs")
    return -result.fun
