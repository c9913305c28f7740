"""Which of many variants `make test` runs; the others are marked slow, for `make test-all`."""

from collections.abc import Container, Iterable

import pytest


def variants(names: Iterable, kept: Container) -> list:
    return [pytest.param(name, marks=() if name in kept else pytest.mark.slow) for name in names]
