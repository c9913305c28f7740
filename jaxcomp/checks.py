"""Checks of arguments."""

import numbers
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["check_like", "contraction", "is_integer", "is_number", "is_whole", "is_within"]


def is_whole(value: Any, least: int = 1) -> bool:
    """Whether it is an integer of at least `least`: not a bool, NaN, or text."""
    return is_number(value) and bool(value >= least) and bool(value % 1 == 0)


def is_integer(value: Any, least: int = 1) -> bool:
    """Whether it is an integer type of at least `least`, of Python or NumPy: not a bool, nor a float such as 3.0."""
    return isinstance(value, numbers.Integral) and is_whole(value, least)


def is_number(value: Any) -> bool:
    """Whether it is a real number: not a bool, an array, or text."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_within(value: Any, least: float, most: float = sys.float_info.max) -> bool:
    """Whether it is a real number in [least, most]; NaN is in no interval."""
    return is_number(value) and bool(least <= value <= most)


def contraction(omega: Callable[[Any], float], longest: int) -> Callable[[Any], float] | None:
    """alpha = 1 - omega of an unbiased compressor, if omega is below 1 for all vectors up to that length; else None."""
    return (lambda d: 1 - omega(d)) if omega(longest) < 1 else None


def check_like(name: str, got: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """Raises ValueError when a payload does not belong to the array it should decompress to."""
    if tuple(got) != tuple(expected):
        raise ValueError(f"{name}: payload of shape {tuple(got)} does not fit the array; expected {tuple(expected)}")
