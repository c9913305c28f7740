"""What `make test` runs of tests with many variants."""

import itertools
from types import SimpleNamespace

import pytest
from laws import ROWS
from variants import BETWEEN_WORKERS, in_sample


def item(name="test_it", params=None, **places):
    """A variant of a test whose parameters are each at a place of their list; those joined by _and_ share theirs."""
    indices = {name: place for names, place in places.items() for name in names.split("_and_")}
    marks = [pytest.mark.parametrize(",".join(names.split("_and_")), []).mark for names in places]
    return SimpleNamespace(
        originalname=name,
        callspec=SimpleNamespace(indices=indices, params=params or {}),
        iter_markers=lambda kind: marks,
    )


def test_every_value_of_every_parameter_has_its_turn():
    kept = [(i, j) for i, j in itertools.product(range(4), range(6)) if in_sample(item(a_and_b=i, c=j))]
    assert len(kept) == 6
    assert {i for i, _ in kept} == set(range(4))
    assert {j for _, j in kept} == set(range(6))
    assert in_sample(item(a=0, b=0))
    assert in_sample(SimpleNamespace())  # without parameters


def test_every_row_is_held_to_some_laws_and_those_of_each_kind_to_all():
    laws = [f"test_law_{i}" for i in range(16)]
    for place, row in enumerate(ROWS):
        held = [name for name in laws if in_sample(item(name, {"row": row}, row=place))]
        assert held == laws if row.name in BETWEEN_WORKERS else 0 < len(held) < len(laws)
