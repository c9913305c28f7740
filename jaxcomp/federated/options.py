"""The options of a server: what each may be, as the Python number that a file of `save` can hold."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import optax

from jaxcomp.allocate.workers import RULES, Rule, number_of, rule_exponent
from jaxcomp.checks import is_integer

__all__ = ["check_compress", "check_outer", "history_of", "number_in", "patience_of", "rule_of"]


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


def history_of(history: Any) -> int:
    """A number of updates to keep; ValueError unless it is an integer of at least 0."""
    if not is_integer(history, 0):
        raise ValueError(f"federated: history must be an integer of at least 0; got {history!r}")
    return int(history)


def patience_of(patience: Any) -> int:
    """Rounds that a late answer is waited for; ValueError unless it is an integer of at least 1."""
    if not is_integer(patience, 1):
        raise ValueError(f"federated: patience must be an integer of at least 1; got {patience!r}")
    return int(patience)


def check_outer(outer: Any) -> None:
    """Raises ValueError unless it is an optax optimizer, or None."""
    if outer is not None and not isinstance(outer, optax.GradientTransformation):
        raise ValueError(f"federated: outer must be None or an optax.GradientTransformation; got {outer!r}")


def check_compress(compress: Callable[..., Any]) -> None:
    """Raises ValueError unless it is a function."""
    if not callable(compress):
        raise ValueError(f"federated: compress must be a function (vector, entries) -> Sparse; got {compress!r}")
