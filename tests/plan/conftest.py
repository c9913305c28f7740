"""A machine that takes what a test says."""

import pytest

from jaxcomp.exchange.links import KINDS
from jaxcomp.plan import planning
from jaxcomp.plan.links import Fit


@pytest.fixture
def machine(monkeypatch):
    """A machine whose links and encoding take what a test says; returns what was measured on it."""

    def of(per_byte, work):
        measured = []
        fits = {"data": {kind: Fit(kind, 1e-6, per_byte) for kind in KINDS}}
        monkeypatch.setattr(planning, "links_of", lambda *_: fits)
        monkeypatch.setattr(planning, "work_of", lambda _, each, *__: measured.append(each.name) or work[each.name])
        return measured

    return of
