"""The account of the soak: exact sums, kills at every moment, and that it sees what is gone. The soak itself, short."""

import json
from fractions import Fraction

import numpy as np
import pytest

from experiments.churn import RUNS, main
from experiments.churn.account import Made, apart, grown
from experiments.federated.account import Counted
from experiments.lib.netlab import missing
from jaxcomp.federated import Member

D = 40


def test_sums_are_exact(seed):
    rng = np.random.default_rng(seed)
    rows = (rng.standard_normal((300, D)) * 10.0 ** rng.integers(-40, 38, (300, D))).astype(np.float32)
    parts = []
    for row in rows:
        parts = grown(parts, row.astype(np.float64))
    for j in range(D):
        total = sum((Fraction(float(part[j])) for part in parts), Fraction(0))
        assert total == sum(Fraction(float(x)) for x in rows[:, j])


@pytest.mark.parametrize("broken", [False, True])
def test_the_account_is_exact_over_kills_at_every_moment_and_sees_a_memory_that_is_gone(tmp_path, seed, broken):
    rng = np.random.default_rng(seed)
    core = Counted(np.linspace(0, 1, D), {0: 30, 1: 10}, 0.2, folder=tmp_path / "used", down=0.5)
    begin = lambda i: (member := Member(tmp_path / f"client-{i}.npz"), Made(tmp_path / f"made-{i}.npz", member))
    members = {i: begin(i) for i in range(2)}
    for number in range(1, 61):
        for i, task in core.open(range(2)).items():
            member, made = members[i]
            fate = rng.integers(0, 10)
            point = member.take(task)
            if fate > 0:
                made.begin(task)
            if fate > 1:
                after = point - rng.standard_normal(D).astype(np.float32)
                reply = member.leave(task) if fate == 2 else member.answer(task, after)
                if fate > 3:
                    core.receive(i, reply)
                    made.answered()
                    made.begin(task)  # of a task that comes again: it was answered
            if fate < 5:  # killed: before or after the account, after the answer, before and after it was sent
                core.lost(i)
                members[i] = begin(i)
        core.close()
        if broken and number == 30:
            member = members[0][0]
            member._settle(core._entries[0].fates)
            member._memory = np.zeros(D, np.float32)
            member._pending = None
            member.save()
        found = [apart(core, tmp_path, i) for i in range(2)]
        if not broken:
            assert [count for count, _ in found] == [0, 0]
    assert (found[0][0] > D // 2) == broken
    assert found[0][1] > 1


@pytest.mark.slow
def test_the_soak_for_half_a_minute(tmp_path):
    pytest.importorskip("grpc")
    if missing():
        pytest.skip(f"needs {missing()}")
    words = "--minutes 0.5 --members 3 --every 8 --seconds 1 --quorum 0.6 --grace 0.5 --name run"
    status = main([*words.split(), "--runs", str(tmp_path)])
    rows = json.loads((tmp_path / "run" / "results.json").read_text())["rows"]
    assert [row["run"] for row in rows] == list(RUNS)
    assert [row["kills"] for row in rows] == [0, 3]
    assert all(row["apart"] == 0 and row["replay"] == "same bits" and row["used"] > 10 for row in rows)
    assert all(min(row["made_norms"]) > 0 for row in rows)
    assert status == (rows[1]["share"] < 0.85)  # of three members one is gone for a third of the time
    assert (tmp_path / "run" / "churn.png").is_file()
