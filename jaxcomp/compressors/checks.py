"""Checks of the arguments of compressors."""

import numbers
from typing import Any

__all__ = ["check_like", "is_number", "is_whole"]


def is_whole(value: Any, least: int = 1) -> bool:
    """Whether it is an integer of at least `least`: not a bool, NaN, or text."""
    return is_number(value) and float(value) >= least and value % 1 == 0


def is_number(value: Any) -> bool:
    """Whether it is a real number: not a bool, an array, or text."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def check_like(name: str, got: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """Raises ValueError when a payload does not belong to the array it should decompress to."""
    if tuple(got) != tuple(expected):
        raise ValueError(f"{name}: payload of shape {tuple(got)} does not fit the array; expected {tuple(expected)}")
