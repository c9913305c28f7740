"""Machines: their file, and the work that is computed of them."""

import pytest

import jaxcomp as jc
from jaxcomp.plan.candidates import default_candidates
from jaxcomp.plan.links import Collective
from jaxcomp.plan.machine import Codec


def test_a_machine_is_what_its_file_says(tmp_path):
    for name in jc.Machine.names():
        machine = jc.Machine.of(name)
        assert machine.source
        assert machine.date
        assert machine.code
        path = tmp_path / "machine.json"
        machine.save(path)
        assert jc.Machine.of(path) == machine
        known = [each for each in default_candidates() if each.name != "power_sgd(4)"]
        if name.startswith("h"):
            assert all(machine.work(each, [], {"data": 4}) is not None for each in known)
    assert jc.Machine.here().name == "cpu"
    path.write_text('{"name": "x"}')
    with pytest.raises(ValueError, match=r"file that Machine\.save has written"):
        jc.Machine.of(path)


def test_work_goes_by_what_arrives():
    """16 workers: of gathered codes all messages are decoded; two shots decode twice and encode 1 / 16 more."""
    machine = jc.Machine("m", 8.0, 1.0, {"d": Codec(9.0, 9.0), "dithering": Codec(2.0, 0.5)})
    codes, sizes = jc.Candidate("c", jc.direct(jc.dithering(7))), {"data": 16}
    sent = lambda *kinds: [Collective(kind, 1.0, "data") for kind in kinds]
    slope = lambda *kinds: machine.work(codes, sent(*kinds), sizes).all.slope
    assert slope("all_reduce") == pytest.approx(2.5 + 0.9)
    assert slope("all_gather") == pytest.approx(2 + 16 * 0.5 + 0.9)
    assert slope("all_to_all", "all_gather") == pytest.approx(2 + 2 / 16 + 2 * 0.5 + 0.9)
    memory = jc.Candidate("c", jc.error_feedback(jc.contract(jc.dithering(7))))
    assert machine.work(memory, [], sizes) is None  # contract(...) is no name that it knows
    assert machine.work(jc.Candidate("f32", jc.direct(jc.identity())), [], sizes).all.slope == 0
