"""The form of a run: options, a folder, rows, a table and a picture."""

import json
from typing import NamedTuple

import pytest

from experiments.lib.cli import UserError
from experiments.lib.run import Run, cells, parser_of


class Row(NamedTuple):
    name: str
    seconds: float


COLUMNS = {"what": "{name}", "ms": lambda row: f"{1e3 * row.seconds:.1f}"}


def started(tmp_path):
    parser = parser_of("something", "Does something.\n\nMore about it.")
    parser.add_argument("--steps", type=int, default=3)
    return Run(parser, ["--runs", str(tmp_path), "--name", "r", "--steps", "5"], "something")


def test_cells_of_tuples_and_dictionaries():
    assert cells(COLUMNS, [Row("a", 0.002)]) == [["a", "2.0"]]
    assert cells({"x": "{a:.1f} ± {b[0]:g}"}, [{"a": 1, "b": [2]}]) == [["1.0 ± 2"]]


def test_a_folder_is_made_with_the_first_thing_that_is_written(tmp_path):
    run = started(tmp_path)
    assert not run.folder.exists()
    run.add({"step": 1})
    run.table("Title", COLUMNS, [Row("a", 0.002)], "notes")
    run.keep([1])
    run.plot("p.png", {"one": {"a": ([1, 2], [3, 4]), "b": ([1, 2], [3, 4], [[1, 1], [0, 2]])}}, xlabel="x")
    assert json.loads((run.folder / "config.json").read_text()) == {"steps": 5}
    assert {path.name for path in run.folder.iterdir()} == {
        *("config.json", "metrics.jsonl", "table.md", "results.json", "p.png")
    }
    assert "| a | 2.0 |" in (run.folder / "table.md").read_text()
    with pytest.raises(UserError, match="exists; choose another --name"):
        started(tmp_path)


def test_a_missing_matplotlib_is_said_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.setattr("experiments.lib.run.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"the plot needs matplotlib; install it with: pip install 'jaxcomp\[exp"):
        started(tmp_path)


def test_what_was_measured_before_ctrl_c_is_kept(tmp_path):
    run = started(tmp_path)

    def measure(case):
        if case == 3:
            raise KeyboardInterrupt
        return 10 * case

    assert run.rows_of([1, 2, 3, 4], str, measure, partial=True) == [10, 20]
    with pytest.raises(KeyboardInterrupt):
        run.rows_of([1, 2, 3, 4], str, measure)
