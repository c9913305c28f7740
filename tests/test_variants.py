"""What `make test` runs of tests with many variants, seen by what pytest collects."""

import collections
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from laws import ROWS
from variants import ABSENT, BETWEEN_WORKERS, LONG, absent

CONFTEST = """
import pytest
from variants import sampled

def pytest_collection_modifyitems(items):
    kept = sampled(items)
    items[:] = [item for item in items if item in kept]
"""
TESTS = """
from types import SimpleNamespace
import pytest

@pytest.mark.parametrize("a,b", [(0, "p"), (1, "q"), (2, "r"), (3, "s")])
@pytest.mark.parametrize("c", range(6))
def test_grid(a, b, c): pass

@pytest.mark.parametrize("a", [False, True])
@pytest.mark.parametrize("b", [False, True])
@pytest.mark.parametrize(("c", "d"), [(1, 2), (3, 4), (5, 6)])
def test_cube(a, b, c, d): pass

@pytest.mark.parametrize("a", range(2))
def test_few(a): pass

def test_single(): pass

ROWS = [SimpleNamespace(name=name) for name in ["other0", "identity", *(f"other{i}" for i in range(1, 11))]]
each_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
"""
LAWS = "".join(f"@each_row\ndef test_law{i}(row): pass\n" for i in range(40))
LAWS += '@each_row\n@pytest.mark.parametrize("kind", "wxyz")\ndef test_kinds(row, kind): pass\n'


def kept_of(folder: Path) -> dict[str, list[list[str]]]:
    """test -> the ids of its variants that are left, in parts."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_it.py").write_text(TESTS + LAWS)
    words = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-c", os.devnull, "--rootdir", folder, folder]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    out = subprocess.run(words, env=environment, capture_output=True, text=True, check=True, timeout=300).stdout
    found: dict[str, list[list[str]]] = collections.defaultdict(list)
    for line in out.splitlines():
        name, bracket, variant = line.partition("::")[2].partition("[")
        if name:
            found[name].append(variant.rstrip("]").split("-") if bracket else [])
    return found


def test_values_of_one_parameter_meet_those_of_others(tmp_path):
    kept = kept_of(tmp_path)
    grid = [(int(c), int(a)) for c, a, _ in kept["test_grid"]]
    assert len(grid) == 6
    assert {c for c, _ in grid} == set(range(6))
    assert {a for _, a in grid} == set(range(4))
    cube = [tuple(ids) for ids in kept["test_cube"]]
    assert 3 <= len(cube) <= 5
    assert [{ids[axis] for ids in cube} for axis in (0, 1, 2)] == [{"1", "3", "5"}, {"2", "4", "6"}, {"False", "True"}]
    assert len(kept["test_few"]) == 2
    assert kept["test_single"] == [[]]

    rows = ["other0", "identity", *(f"other{i}" for i in range(1, 11))]
    held = collections.Counter(ids[0] for name, variants in kept.items() if "law" in name for ids in variants)
    assert held["identity"] == 40
    assert all(0 < held[row] < 20 for row in rows if row != "identity")
    kinds = collections.Counter((row, kind) for kind, row in kept["test_kinds"])
    assert all(sum(kinds[row, kind] for kind in "wxyz") == (4 if row == "identity" else 1) for row in rows)


def test_what_is_left_to_the_whole_suite_is_still_there():
    for test in LONG:
        path, _, name = test.partition("::")
        text = (Path(__file__).parents[1] / path).read_text()
        assert f"def {name.partition('[')[0]}(" in text, test


def test_what_is_named_is_collected(request):
    """Of this run, where files were collected whole; a name that no test has any more would say nothing."""
    assert request.config.stash[ABSENT] == []
    assert {row.name for row in ROWS} >= BETWEEN_WORKERS
    items = [SimpleNamespace(nodeid=name) for name in ("a.py::test_a[1]", "a.py::test_b", "b.py::test_a[3]")]
    assert absent(items, ["a.py::test_a[1]", "a.py::test_a[2]", "a.py::test_c", "c.py::test_a"]) == [
        "a.py::test_a[2]",
        "a.py::test_c",
    ]
