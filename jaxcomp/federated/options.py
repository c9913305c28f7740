"""The options of a server: what each may be, as the Python number that a file of `save` can hold."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import optax

from jaxcomp.allocate.workers import RULES, Rule, number_of, rule_exponent
from jaxcomp.checks import is_integer

__all__ = ["check_compress", "check_outer", "integer_of", "number_in", "rule_of"]


def number_in(name: str, value: Any, low: float, high: float, *, low_counts: bool = False) -> float:
    """A number in (low, high], or in [low, high].

    Raises:
        ValueError: it is none, or out of range.
    """
    number = math.nan if isinstance(value, bool | np.bool_) else number_of(value)
    if not (low < number <= high or (low_counts and number == low)):
        raise ValueError(f"federated: {name} must be in {'[' if low_counts else '('}{low}, {high}]; got {value!r}")
    return number


def rule_of(rule: Any) -> Rule:
    """A rule of `allocate.ratios`: its name, or its exponent."""
    rule_exponent("federated", rule, RULES)
    return rule if isinstance(rule, str) else float(rule)


def integer_of(name: str, value: Any, least: int) -> int:
    """An integer of at least `least`.

    Raises:
        ValueError: it is none.
    """
    if not is_integer(value, least):
        raise ValueError(f"federated: {name} must be an integer of at least {least}; got {value!r}")
    return int(value)


def check_outer(outer: Any) -> None:
    """Raises ValueError unless it is an optax optimizer, or None."""
    if outer is not None and not isinstance(outer, optax.GradientTransformation):
        raise ValueError(f"federated: outer must be None or an optax.GradientTransformation; got {outer!r}")


def check_compress(compress: Callable[..., Any]) -> None:
    """Raises ValueError unless it is a function."""
    if not callable(compress):
        raise ValueError(f"federated: compress must be a function (vector, entries) -> Sparse; got {compress!r}")
