"""The dagc experiment and the benchmark of exchanges, on tiny settings; the generators of unequal workers."""

import json
import os
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import oracles_dagc as oracle
import pytest
from programs import run_inside, run_to

from experiments.dagc import against_uniform, interval, one, rule_in, shown
from experiments.dagc.tasks import Task, factor_for, heterogeneous_quadratics, runner
from experiments.lib import data
from experiments.lib.cli import UserError
from jaxcomp import allocate


@pytest.mark.slow
def test_dagc_compares_rules_and_thresholds_with_uniform(tmp_path):
    rules = ("sqrt", "2/3", "threshold:released")
    result = run_to(
        0,
        *("dagc", "--task", "quadratics", "--runs", tmp_path, "--name", "r", "--rounds", 300, "--lr", 0.3),
        *("--target", 1e-3, "--rules", *rules, "--skews", 5, 100, "--ratios", 0.02, "--workers", 6, "--seeds", 0, 1),
    )
    for text in ("against uniform, %", "threshold:uniform", "dagc.png", "final |grad f|^2"):
        assert text in result.stdout
    rows = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    methods = ["threshold:uniform", "uniform", *rules]
    assert sorted({row["method"] for row in rows}) == sorted(methods)
    assert len(rows) == 2 * 2 * len(methods)
    assert all(np.isfinite(row["final"]) for row in rows)
    # One budget: all rules send the same number of entries in all.
    assert all(row["achieved"] == pytest.approx(row["ratio"], rel=0.02) for row in rows)
    assert "against threshold:uniform" in " ".join(result.stdout.split())
    assert (tmp_path / "r" / "dagc.png").read_bytes()[:4] == b"\x89PNG"
    assert "| sqrt |" in (tmp_path / "r" / "table.md").read_text()


def test_thresholds_keep_the_budget_when_there_is_memory():
    options = SimpleNamespace(workers=4, rounds=30, lr=0.3, target=1e-9, by="accuracy")
    simulation = heterogeneous_quadratics(options)
    before = runner.cache_info().misses
    for method in ("threshold:uniform", "threshold:released"):
        row = one(simulation, simulation.task(100.0, 0), options, 0.1, method)
        assert row["achieved"] == pytest.approx(0.1, rel=0.01)
    assert runner.cache_info().misses == before + 1  # one program for both


def test_a_loss_passes_its_target_between_two_rounds(monkeypatch):
    losses = np.array([2.0, 1.0, 0.5, 0.25])
    monkeypatch.setattr("experiments.dagc.runner", lambda *args: lambda *args: (losses, np.full(4, 10.0)))
    task = Task(np.zeros(100), np.array([3.0, 1.0]), ())
    for target, rounds, reached in ((0.75, 2.5, True), (0.5, 3.0, True), (2.0, 1.0, True), (0.1, 4.0, False)):
        options = SimpleNamespace(workers=2, rounds=4, target=target, by="loss")
        row = one(SimpleNamespace(better=-1), task, options, 0.1, "sqrt")
        assert (row["rounds"], row["reached"]) == (rounds, reached)


@pytest.mark.parametrize("rule", ["uniform", 2 / 3])
def test_the_factor_of_thresholds_is_that_of_calibrate(rule, seed):
    probes = np.random.default_rng(seed).standard_normal((4, 300)).astype(np.float32)
    each = allocate.thresholds([70, 20, 8, 2], 1.0, rule=rule)
    factor = float(factor_for(120, jnp.asarray(probes), jnp.asarray(each, jnp.float32)))
    calibrated = allocate.calibrate([70, 20, 8, 2], probes, 0.1, rule=rule)
    assert factor >= calibrated * (1 - 1e-6)
    for base in (factor, calibrated):
        assert np.sum(np.abs(probes) >= base * each[:, None]) == 120


def test_rules_in_options():
    assert [rule_in(text) for text in ("sqrt", "2/3", "threshold:1/2", "0.25")] == ["sqrt", 2 / 3, 0.5, 0.25]


def test_intervals_are_paired_by_seed():
    assert interval([3.0]) == (3.0,)
    mean, width = interval([1.0, 2.0, 3.0])
    assert (mean, width) == (2.0, pytest.approx(4.302653 / np.sqrt(3), rel=1e-6))
    rows = [
        {"method": method, "seed": seed, "ratio": 0.1, "skew": 2, "rounds": rounds, "reached": True}
        for method, each in (("uniform", (10, 100)), ("sqrt", (9, 90)))
        for seed, rounds in enumerate(each)
    ]
    assert shown(against_uniform(rows[:1] + rows[2:3], 0.1, 2, "sqrt"), "+.1f", ".1f") == "-10.0"
    missed = [row | {"reached": False} for row in rows]
    assert shown(against_uniform(missed, 0.1, 2, "sqrt"), "+.1f", ".1f") == "-"
    assert shown(interval([1.0, 2.0, 3.0]), ".4g", ".2g") == "2 ± 2.5"
    assert against_uniform(rows, 0.1, 2, "sqrt") == (pytest.approx(-10), pytest.approx(0, abs=1e-9))


@pytest.mark.parametrize(("workers", "skew"), [(3, 2.0), (10, 100.0), (10, 1.0)])
def test_volumes_of_the_released_generator(workers, skew):
    np.testing.assert_allclose(data.skewed_volumes(workers, skew), oracle.skewed_volumes(workers, skew))
    assert data.skewed_volumes(2, skew).tolist() == [skew, 1.0]


def test_split_is_a_partition_with_the_volumes_it_was_asked_for(seed):
    labels = np.random.default_rng(seed).integers(0, 10, 20_000)
    parts = data.imbalanced_split(labels, 10, 100.0, 1.0, seed)
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))
    volumes = np.array([len(part) for part in parts])
    wanted = data.skewed_volumes(10, 100.0)
    # Label mixes differ, classes are equally large: volumes are met roughly.
    assert np.all(np.abs(np.log(volumes / volumes.sum() / (wanted / wanted.sum()))) < 1.0)
    mixes = np.array([np.bincount(labels[part], minlength=10) / len(part) for part in parts])
    assert mixes.std(0).mean() > 0.03
    with pytest.raises(UserError, match="5 workers for 3 examples"):
        data.imbalanced_split(np.zeros(3, int), 5, 2.0, 1.0, 0)
    assert [len(part) for part in data.imbalanced_split(np.zeros(3, int), 3, 50.0, 1.0, 0)] == [1, 1, 1]


@pytest.mark.slow
def test_exchanges_between_processes_send_what_the_program_says():
    """Real messages between two processes, counted by the kernel: headers cost a few per cent."""
    result = run_to(0, "bench", "exchange", "--workers", 2, "--size", 2_000_000, "--skew", 20, "--rounds", 2)
    rows = [line.split("│")[1:-1] for line in result.stdout.splitlines() if line.startswith("│")]
    assert [row[0].split()[0] for row in rows] == ["gather", "concat", "ring", "auto"]
    for row in rows:
        measured, program = float(row[2]), float(row[3])
        assert program <= measured <= 1.15 * program + 0.02
    assert float(rows[2][3]) <= 1.05


def test_shaped_links_need_root(monkeypatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    result = run_inside(capsys, "bench", "exchange", "--mbit", 100)
    assert (result.returncode, result.stderr) == (
        2,
        "error: a network laboratory needs root and the commands ip and tc\n",
    )
