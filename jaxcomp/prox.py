"""Proximal operators: prox(x, step) = argmin_y R(y) + |y - x|^2 / (2 step), for composite steps."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["box", "l1"]

Prox = Callable[[Any, Any], Any]


def l1(weight: float) -> Prox:
    """R(x) = weight |x|_1: soft thresholding.

    Raises:
        ValueError: weight is negative.

    >>> print(l1(1.0)(jnp.array([3.0, -0.5]), 0.5))
    [2.5 0. ]
    """
    if not weight >= 0:
        raise ValueError(f"prox.l1: weight must be at least 0; got {weight}")

    def prox(x, step):
        return jax.tree.map(lambda a: a - jnp.clip(a, -step * weight, step * weight), x)

    return prox


def box(low: float, high: float) -> Prox:
    """R(x) = 0 where low <= x_j <= high for all j, else infinite: the projection.

    Raises:
        ValueError: low is above high.

    >>> print(box(0.0, 1.0)(jnp.array([3.0, -0.5]), 0.5))
    [1. 0.]
    """
    if not low <= high:
        raise ValueError(f"prox.box: low must be at most high; got {low} and {high}")
    return lambda x, step: jax.tree.map(lambda a: jnp.clip(a, low, high), x)
