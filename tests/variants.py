"""Which of many variants `make test` runs; the others are marked slow, for `make test-all`."""

from collections.abc import Container, Iterable

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
