"""Which of many variants `make test` runs; the others are marked slow, for `make test-all`."""

import zlib
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

import pytest

# One row for each kind of payload and of shared state, for the tests that compile for several workers or vectors.
BETWEEN_WORKERS = {
    "bernoulli-scalar",
    "cast-bf16",
    "compose-top_k-dithering",
    "contract-rand_k",
    "dagc-top_k",
    "dithering-7",
    "identity",
    "narrow-top_k",
    "precondition-bernoulli",
    "rand_k-ratio",
    "sidco",
    "skcompress-recentred",
}

# Tests that take longest, beside a variant of the same test that `make test` runs, or a shorter test of the same thing.
LONG = frozenset((Path(__file__).parent / "long.txt").read_text().splitlines())
ABSENT = pytest.StashKey[list[str]]()  # ids of LONG that are no longer those of tests, of files that were collected


def absent(items: Iterable[Any], names: Iterable[str] = LONG) -> list[str]:
    """Which of these ids no test has, of the files that these items are all tests of."""
    found = {item.nodeid for item in items}
    files = {name.partition("::")[0] for name in found}
    return sorted(name for name in names if name not in found and name.partition("::")[0] in files)


def variants(names: Iterable, kept: Container) -> list:
    return [pytest.param(name, marks=() if name in kept else pytest.mark.slow) for name in names]


def sampled(items: Iterable[Any]) -> list[Any]:
    """Of tests that are marked `sampled`, in the order of collection, those that `make test` runs.

    Where a test has more than two variants that are not slow: about a third of them, of more than 12 a quarter, on
    the diagonals of the grid that its parameters span, so that values of one parameter meet different values of the
    others. Rows of the laws: all of BETWEEN_WORKERS, and of the others a quarter, another one for each law.
    """
    tests: dict[Any, list[Any]] = {}
    for item in items:
        tests.setdefault((item.path, item.originalname), []).append(item)
    return [item for variants in tests.values() for item in _sample_of(variants)]


def _sample_of(items: list[Any]) -> list[Any]:
    if len(items) <= 2:
        return items
    axes = _axes(items)
    places = [_place(item, axes) for item in items]
    rows = [item.callspec.params.get("row") for item in items]
    if any(row is not None for row in rows):
        turn = zlib.crc32(items[0].originalname.encode())
        chosen = [
            row.name in BETWEEN_WORKERS or (place + turn) % 4 == 0 for row, place in zip(rows, places, strict=True)
        ]
    else:
        chosen = [place % (3 if len(items) <= 12 else 4) == 0 for place in places]
    return [item for item, kept in zip(items, chosen, strict=True) if kept] or items[:1]


def _axes(items: list[Any]) -> dict[tuple[str, ...], dict[Any, int]]:
    """For each parametrization, given by the names it sets, the place of each of its values."""
    axes: dict[tuple[str, ...], dict[Any, int]] = {}
    for item in items:
        for mark in item.iter_markers("parametrize"):
            names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
            values = axes.setdefault(tuple(name.strip() for name in names), {})
            values.setdefault(_value(item, tuple(name.strip() for name in names)), len(values))
    return axes


def _place(item: Any, axes: dict[tuple[str, ...], dict[Any, int]]) -> int:
    return sum(values[_value(item, names)] for names, values in axes.items())


def _value(item: Any, names: tuple[str, ...]) -> tuple[int, ...]:
    """What tells the values of a parametrization apart: the same object in every variant that has it."""
    return tuple(id(item.callspec.params[name]) for name in names)
