"""The planner's experiments: what they make of measurements, and small runs of what needs no laboratory."""

import json

import numpy as np
import pytest

from experiments import plan
from experiments.__main__ import EXPERIMENTS, main
from experiments.lib.cli import UserError
from experiments.lib.run import Run
from experiments.plan.results import dense_is_best, regret_of, report, summary


def cell(chosen, alone, measured, predicted):
    parts = {name: {"total": seconds} for name, seconds in predicted.items()}
    row = {"workers": 2, "entries": 10, "rate": None, "delay": 0.0, "one_process": False, "load": 0, "rounds": {}}
    row |= {"chosen": chosen, "alone": alone, "measured": measured, "predicted": parts, "said": predicted}
    return row | {"dense": ["f32", "bf16"]}


ROWS = [
    cell("f32", "bf16", {"f32": 1.0, "bf16": 1.2, "k": 2.0}, {"f32": 1.1, "bf16": 1.2, "k": 1.0}),
    cell("k", "k", {"f32": 3.0, "bf16": 2.0, "k": 1.0}, {"f32": 3.0, "bf16": 2.0, "k": 1.0}),
    cell("f32", "f32", {"f32": 1.5, "bf16": 1.6, "k": 1.0}, {"f32": 1.5, "bf16": 1.6, "k": 2.0}),
]


def test_regret_by_hand():
    assert [regret_of(row, "chosen") for row in ROWS] == pytest.approx([0, 0, 0.5])
    assert [regret_of(row, "alone") for row in ROWS] == pytest.approx([0.2, 0, 0.5])
    assert [dense_is_best(row) for row in ROWS] == [True, False, False]
    found = summary(ROWS)
    assert found["within"] == pytest.approx(2 / 3)
    assert found["alone"] == pytest.approx(1 / 3)
    assert found["worst"] == pytest.approx(0.5)
    assert found["error_median"] == 0  # six of nine predictions are exact
    assert found["said_90"] == found["error_90"]  # these say what was predicted from parts
    assert np.isnan(found["noise_median"])
    rows = [row | {"said": row["measured"], "rounds": {"f32": [1.0, 1.1, 1.0, 1.1]}} for row in ROWS]
    assert summary(rows)["said_90"] == 0
    assert summary(rows)["noise_median"] == pytest.approx(1 / 11)
    assert (found["dense_cells"], found["dense_advised"]) == (1, 1)


def test_the_report_has_a_table_and_a_plot(tmp_path, capsys):
    run = Run(plan.parser(), ["regret", "--runs", str(tmp_path), "--name", "both"], "plan")
    report(run, ROWS[:2])
    assert "2 cells: regret at most 10 % in 100%" in " ".join(capsys.readouterr().out.split())
    assert "| 2 | 10 | no limit | 0 | k | k | k |" in (tmp_path / "both" / "table.md").read_text()
    assert (tmp_path / "both" / "regret.png").stat().st_size > 1000


def test_a_kernel_without_delays_is_named_before_anything_is_measured(tmp_path, monkeypatch):
    def laboratory(hosts, rate=None, delay=0.0):
        raise UserError(f"no netem for {delay} s")

    monkeypatch.setattr(plan, "laboratory", laboratory)
    monkeypatch.setattr(plan, "one_thread", lambda: None)  # which sets a variable for all processes
    options = ["--rates", "none", "--delays", "0s", "2ms", "--runs", str(tmp_path), "--name", "r"]
    with pytest.raises(UserError, match=r"no netem for 0\.002 s"):
        plan.main(["regret", *options])


@pytest.mark.slow
def test_a_cell_without_links(tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "one_thread", lambda: None)
    options = ["--workers", "--one-process", "2", "--sizes", "2000", "--loads", "0", "--seconds", "2", "--rounds", "4"]
    assert plan.main(["regret", *options, "--runs", str(tmp_path), "--name", "r"]) == 0
    (row,) = json.loads((tmp_path / "r" / "results.json").read_text())
    assert row["chosen"] in row["measured"]
    assert set(row["said"]) == set(row["predicted"]) == set(row["measured"]) == set(row["rounds"])
    assert "one process" in (tmp_path / "r" / "table.md").read_text()


@pytest.mark.slow
def test_buckets_hierarchies_and_local_updates(tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "one_thread", lambda: None)
    options = ["--workers", "--one-process", "4", "--sizes", "2000", "--loads", "0", "--seconds", "2"]
    options += ["--all", "--max-every", "4", "--groups", "2", "--runs", str(tmp_path), "--name", "r"]
    assert plan.main(["advise", *options]) == 0
    (row,) = json.loads((tmp_path / "r" / "results.json").read_text())
    said = list(row["said"])
    assert any(name.endswith("H=4") for name in said)
    assert "f32 over data, sidco(0.01)+ef over group" in said
    assert any("MiB" in name for name in said)


def test_groups_divide_the_workers(tmp_path):
    with pytest.raises(UserError, match="--groups must divide the numbers of workers and be smaller; got 2 and 3"):
        plan.main(["--workers", "4", "3", "--groups", "2", "--runs", str(tmp_path)])


def test_every_experiment_has_a_line(capsys):
    assert main(["--help"]) == 0
    assert all(what in capsys.readouterr().out for what in [EXPERIMENTS["plan"][1]])
