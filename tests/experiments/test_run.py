"""The form of a run: options, a folder, rows, a table and a picture."""

import json
from typing import NamedTuple

import jax
import pytest

from experiments.lib.cli import UserError
from experiments.lib.run import Run, cells, parser_of
from experiments.skcompress import problems, sizes, training


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

    with pytest.raises(KeyboardInterrupt):
        run.rows_of([3, 4], str, measure)
    assert run.rows_of([1, 2], str, measure) == [10, 20]
    assert run.status == 0
    assert run.rows_of([1, 2, 3, 4], str, measure) == [10, 20]
    assert run.status == 130
    with pytest.raises(KeyboardInterrupt):  # what would come next does not begin
        run.rows_of([1, 2], str, measure)


def test_rows_that_stand_in_a_file_are_not_made_again(tmp_path):
    def run(name, steps=3):
        parser = parser_of("something", "Does something.")
        parser.add_argument("--steps", type=int, default=steps)
        words = ["--runs", str(tmp_path), "--name", name, "--rows", str(tmp_path / "kept")]
        return Run(parser, words, "something", resumable=True)

    made = []

    def measure(case):
        if case == 3 and not made.count(3):
            made.append(case)
            raise RuntimeError("ended")
        made.append(case)
        return {"x": case}

    with pytest.raises(RuntimeError):
        run("a").rows_of([1, 2, 3], str, measure)
    with (tmp_path / "kept" / "metrics.jsonl").open("a") as file:
        file.write('{"case": "3", "ro')  # as it is where a process was killed
    assert run("b").rows_of([1, 2, 3, 4], str, measure) == [{"x": x} for x in (1, 2, 3, 4)]
    assert run("c").rows_of([4, 3], str, measure) == [{"x": 4}, {"x": 3}]
    assert made == [1, 2, 3, 3, 4]
    assert run("g", steps=4).rows_of([1], str, lambda case: {"x": 10}) == [{"x": 10}]  # of other options
    failed = lambda case: {"error": "killed"} if made.append(case) is None else {}
    assert run("e").rows_of([5], str, failed) == run("f").rows_of([5], str, failed)
    assert made == [1, 2, 3, 3, 4, 5, 5]  # what failed is tried again
    (tmp_path / "kept" / "metrics.jsonl").write_text("something else\n")
    with pytest.raises(UserError, match="line 1 is damaged"):
        run("d").rows_of([1], str, measure)


def then_ctrl_c(measure):
    """measure, interrupted in its second call."""
    calls = []

    def wrapped(*arguments, **options):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return measure(*arguments, **options)

    return wrapped


def test_a_table_of_the_cases_before_ctrl_c(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "train", then_ctrl_c(training.train))
    options = ["--problems", "network", "--optimizers", "sgd", "adam", "--steps", "2", "--batch", "8", "--workers", "2"]
    with jax.numpy_dtype_promotion("standard"), pytest.raises(KeyboardInterrupt):  # before Adam
        training.main([*options, "--runs", str(tmp_path), "--name", "r"])
    assert not (tmp_path / "r" / "network-adam.md").exists()
    table = (tmp_path / "r" / "network-sgd.md").read_text()
    assert [line.split(" | ")[0] for line in table.splitlines() if line.startswith("|")][2:] == ["| dense f32"]
    assert "| - |" in table


def test_a_table_and_a_plot_of_the_messages_before_ctrl_c(tmp_path, monkeypatch):
    monkeypatch.setattr(sizes, "measure_method", then_ctrl_c(sizes.measure_method))
    options = ["--batch", "8", "--steps", "3", "--runs", str(tmp_path), "--name", "r"]
    monkeypatch.setattr(sizes, "synthetic", lambda seed: problems.synthetic(rows=50, d=400, fields=5, seed=seed))
    with jax.numpy_dtype_promotion("standard"):
        assert sizes.main(options) == 130
    table = (tmp_path / "r" / "table.md").read_text()
    assert "| f32 keys + values |" in table
    assert "SKCompress" not in table
    assert (tmp_path / "r" / "sizes.png").stat().st_size > 1000
