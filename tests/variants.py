"""Which of many variants `make test` runs; the others are marked slow, for `make test-all`."""

import zlib
from collections.abc import Container, Iterable
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


def variants(names: Iterable, kept: Container) -> list:
    return [pytest.param(name, marks=() if name in kept else pytest.mark.slow) for name in names]


def in_sample(item: Any) -> bool:
    """Whether `make test` runs this variant of a test that is marked `sampled`: about a quarter of them.

    On the diagonals of the grid that its parameters span, so each value of each parameter has its turn, if the others
    have four values; and the first variant always. A row of the laws has a quarter of the laws, another one than the
    next row, and those of BETWEEN_WORKERS have all.
    """
    if not hasattr(item, "callspec"):
        return True
    each = [mark.args[0] for mark in item.iter_markers("parametrize")]
    first = [(names.split(",") if isinstance(names, str) else names)[0].strip() for names in each]
    place = sum(item.callspec.indices[name] for name in first)
    row = item.callspec.params.get("row")
    if row is None:
        return place % 4 == 0
    return row.name in BETWEEN_WORKERS or (place + zlib.crc32(item.originalname.encode())) % 4 == 0
