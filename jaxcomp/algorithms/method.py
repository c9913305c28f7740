"""Gradient descent by any algorithm, and what methods share that choose where gradients are taken.

Such a method is an `Algorithm` with a `point`: it keeps the iterate itself, and its `update` is given the gradient of
its worker's loss as a function. `jc.methods.rounds` runs it.
"""

import math
from typing import Any, NamedTuple

import jax

from jaxcomp.arrays import wide_like, zeros_like
from jaxcomp.backend import made
from jaxcomp.base import Algorithm, check_compressor, require_algorithm, stepped
from jaxcomp.factories import factory
from jaxcomp.prox import Prox

__all__ = ["check_step_size", "check_unbiased", "descend", "move", "zeros_of"]

Array = jax.Array


class DescendState(NamedTuple):
    """x: the iterate.  algorithm: its state."""

    x: Any
    algorithm: Any


@factory
def descend(algorithm: Algorithm, step_size: float | Array, *, prox: Prox | None = None) -> Algorithm:
    """x <- prox(x - gamma direction), with the direction of an algorithm: omega and alpha are its own.

    With `direct` this is DCGD, with `diana` DIANA, and with a preconditioned compressor DCGD+ and DIANA+.

    Args:
        algorithm: `direct`, `diana`, ...
        step_size: gamma, above 0. A JAX array (for sweeps inside jit) is not checked.
        prox: of a regulariser (`jaxcomp.prox`), for composite problems; separable over the entries.

    Raises:
        ValueError: step_size is not above 0.
        TypeError: what is given is no algorithm, or one that keeps its own iterate.

    >>> import jaxcomp as jc
    >>> method = jc.methods.descend(jc.direct(jc.identity()), 0.5)
    >>> run = jc.methods.rounds(method, None)
    >>> state = run.init(jax.numpy.ones(2))
    >>> state, _ = run.step(state, lambda x: x)
    >>> print(run.point(state))
    [0.5 0.5]
    """
    require_algorithm("descend", algorithm)
    check_step_size("descend", step_size)

    def init(here, x):
        return DescendState(x, algorithm.init(here, x))

    def update(here, gradient, state):
        direction, inner = yield from stepped(algorithm.update(here, gradient(state.x), state.algorithm))
        x = move(state.x, made(direction), step_size, prox)
        return x, DescendState(x, inner)

    roles = {"x": "iterate", "algorithm": algorithm.roles}
    return algorithm._replace(init=init, update=update, roles=roles, point=lambda state: state.x, pieces=False)


def move(x: Any, direction: Any, step: Any, prox: Prox | None) -> Any:
    """prox(x - step direction, step)."""
    x = jax.tree.map(lambda a, d: a - (step * d).astype(a.dtype), x, direction)
    return x if prox is None else prox(x, step)


def check_step_size(name: str, step_size: Any) -> None:
    """Raises ValueError unless it is above 0 and finite; a JAX array is not checked."""
    if not isinstance(step_size, jax.Array) and not 0 < step_size < math.inf:
        raise ValueError(f"{name}: step_size must be above 0 and finite; got {step_size}")


def check_unbiased(name: str, compressor: Any) -> None:
    """Raises ValueError unless omega is known, TypeError for what is no compressor."""
    spec = check_compressor(name, compressor)
    if spec.omega is None:
        raise ValueError(f"{name} needs an unbiased compressor (omega known); {spec.name} is not one")


def zeros_of(x: Any) -> Any:
    """Zeros like x in the dtype that shifts are kept in."""
    return zeros_like(wide_like(x))
