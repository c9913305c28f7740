"""Routes among thousands of workers: the formulas against numbers computed by hand, and small runs."""

import doctest
import json
import math

import pytest

import jaxcomp as jc
from experiments import scale
from experiments.lib.cli import UserError
from experiments.lib.run import Run
from experiments.scale import formulas, links, replacement, rows_of, setups, simulate, workers
from experiments.scale.formulas import ROUTES, costs_at, crossover, straggling, widened
from experiments.scale.simulate import simulated
from jaxcomp.exchange.links import on_links
from jaxcomp.exchange.routes import ROUTES as REAL

# ------------------------------------------------------------------------------------------------
# Formulas

FLAT = {"data": jc.Link(1e-3, 1e9)}


def test_routes_by_hand():
    found = costs_at(4, 1e6, 8e4, FLAT)
    assert set(found) == set(ROUTES)
    assert found["gather"].sent_bytes == pytest.approx(3 * 8e4)
    assert found["gather"].held_bytes == pytest.approx(4 * 8e4 + 4e6)
    assert found["gather"].seconds == pytest.approx(2e-3 + 1.1 * 3 * 8e4 / 1e9)
    assert found["two_shot"].sent_bytes == pytest.approx(1.5 * 8e4)
    assert found["two_shot"].held_bytes == pytest.approx(2 * 8e4 + 4e6 + 2e6)
    assert found["sum"].sent_bytes == pytest.approx(1.5 * 8e4)
    # All four are one group: only the dense sum within it, of 4 MB, and no second stage.
    assert found["hierarchy"].sent_bytes == pytest.approx(1.5 * 4e6 + 0.75 * 8e4)
    with pytest.raises(ValueError, match="n >= 1"):
        costs_at(0, 1e6, 8e4)
    assert straggling(1, 1.0) == 0
    assert straggling(8, 2.0) == pytest.approx(2 * math.sqrt(2 * math.log(8)))


def test_what_grows_with_n_and_what_does_not():
    small, large = (costs_at(n, 1e11, 8e8) for n in (64, 16_384))
    assert large["gather"].sent_bytes == pytest.approx(16_383 * 8e8)
    assert large["gather"].held_bytes > 1e13  # no worker can hold it
    assert large["two_shot"].sent_bytes < 1.02 * small["two_shot"].sent_bytes
    assert large["two_shot"].held_bytes < small["two_shot"].held_bytes
    assert crossover(1e9, 0.0, most=64) is None


def test_formulas_of_the_routes_that_exist_agree_with_theirs():
    """Bytes are those of `routes.*.cost` for equal messages; seconds are at most theirs, which are in a ring."""
    for name in ("sum", "gather", "concat", "two_shot"):
        for n in (2, 4, 16):
            real = REAL[name].cost((1000,) * n, 1000, jc.Link(1e-3, 1e9))
            found = costs_at(n, 1e6, 4000.0, FLAT)[name]
            assert found.sent_bytes == pytest.approx(real.sent_bytes)
            assert found.seconds <= real.seconds * (1 + 1e-9)


KINDS_AND_SIZES = [
    (kind, b) for kind in ("all_reduce", "all_gather", "all_to_all", "reduce_scatter") for b in (1e3, 1e7)
]


@pytest.mark.parametrize(("kind", "b"), KINDS_AND_SIZES)
@pytest.mark.parametrize("along", [["host"], ["net"], ["host", "net"]])
def test_times_on_levels_are_those_of_a_simulation(kind, b, along):
    """Message by message, where four hosts of eight share a link each: within a tenth, or two latencies."""
    levels = widened({"host": jc.Link(2e-6, 1e11, 8), "net": jc.Link(2e-5, 1e9)}, 32)
    found = on_links(kind, b, along, levels).seconds
    assert simulated(kind, b, along, levels) == pytest.approx(found, rel=0.1, abs=4e-5)


def test_examples_of_the_formulas():
    assert doctest.testmod(formulas) == (0, 5)  # failed, tried
    assert doctest.testmod(simulate) == (0, 2)


# ------------------------------------------------------------------------------------------------
# Runs


def test_scale_marks_what_does_not_fit_and_names_what_replaces_it(tmp_path, capsys):
    assert scale.main(["--runs", str(tmp_path), "--name", "s", "--workers", "8", "16384", "--entries", "1e9"]) == 0
    rows = json.loads((tmp_path / "s" / "results.json").read_text())
    gathered = next(row for row in rows if row["route"] == "gather" and row["workers"] == 16384)
    assert replacement(rows, gathered, 2e10) == "does not fit: two_shot"
    assert gathered["seconds"] == pytest.approx(gathered["links"] + gathered["work"])
    assert gathered["work"] > 0
    assert {row["selects"] for row in rows if row["route"] == "two_shot"} == {"", "twice, loss not counted"}
    assert (tmp_path / "s" / "scale.png").exists()
    assert gathered["waits"] == pytest.approx(0.001 * math.sqrt(2 * math.log(16384)))
    assert "two_shot" in capsys.readouterr().out
    sharded = rows_of([64, 16384], [1e11], 0.001)
    assert {(row["workers"], row["shards"]) for row in sharded} == {(16384, 64)}  # 64 devices hold one model


def test_a_set_up_is_told_in_a_table_and_a_sentence_that_are_checked():
    small = setups.SETUPS[3]._replace(links={"internet": jc.Link(2e-2, 1.25e7, 4)})
    row = setups.told(small)
    lines = setups.lines_of(small, row)
    assert sum(line.startswith("| **") for line in lines) == 1
    assert "compress: " in row["verdict"]
    assert "4 workers, internet 100 Mbit/s, computed for cpu" in row["verdict"]
    for _, predicted, simulated_seconds in row["checks"]:
        assert simulated_seconds == pytest.approx(predicted, rel=0.15)


def test_links_are_fitted_to_few_workers_and_checked_among_more(tmp_path):
    """Six and eight workers on the line that two and four make are met; one at twice the line is 0.5 of it."""
    rows = []
    for n in (2, 4, 6, 8):
        for size in (256.0, 1e4, 1e6):
            seconds = (n - 1) * 1e-3 + (n - 1) * size * 1e-8
            slow = 2 if (n, size) == (8, 1e6) else 1
            rows.append({"rate": 1e8, "kind": "all_gather", "workers": n, "operand_bytes": size, "error": 0.0})
            rows[-1] |= {"seconds": slow * seconds}
    found = links.compared(rows, {2, 4})
    assert [row["workers"] for row in found] == [6] * 3 + [8] * 3
    assert [row["ratio"] for row in found] == pytest.approx([1, 1, 1, 1, 1, 0.5])
    expected = {"sizes": 6, "within": 5 / 6, "median": 0.0, "worst": 0.5, "repeated": math.nan}
    assert links.summary(found) == pytest.approx(expected, abs=1e-9, nan_ok=True)
    links.report(Run(links.parser(), ["--fit", "2", "4", "--runs", str(tmp_path), "--name", "l"], "links"), found)
    text = (tmp_path / "l" / "table.md").read_text()
    assert "Fitted to 2, 4 workers" in text
    assert "link: 2 sizes, 50% of them within 15%, median error 25%, largest 50%" in text
    assert "Shorter ones: 4 sizes, 100% of them" in text
    slower = lambda row: row | {"seconds": row["seconds"] * (2 if row["operand_bytes"] == 256 else 1.1)}
    with pytest.raises(UserError, match="--check must be other numbers of workers than --fit; both have 2"):
        links.main(["--fit", "2", "3", "--check", "2", "--runs", str(tmp_path)])
    later = [slower(row) for row in rows if row["workers"] == 8]
    assert links.summary(links.compared(rows + later, {2, 4}))["repeated"] == pytest.approx(2 / 3)
    assert all(math.isnan(links.summary([])[name]) for name in ("within", "repeated", "median", "worst"))


def test_simulated_workers_come_nearer(tmp_path):
    options = ["--workers", "8", "--exchanges", "10", "--rates", "0.3", "--tasks", "quadratics"]
    assert workers.main([*options, "--methods", "dense", "--runs", str(tmp_path), "--name", "w"]) == 0
    (row,) = json.loads((tmp_path / "w" / "results.json").read_text())
    assert 0 <= row["losses"][-1] < 0.5 * row["losses"][0]
    assert row["message_bytes"] == 800
    assert (tmp_path / "w" / "workers.png").exists()
