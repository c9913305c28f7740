"""What the README says is what the code does; and it fits on a page or two."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from programs import run_inside

import jaxcomp as jc
from experiments.tables import PAGE, computed
from jaxcomp import cli

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
DOCS = {path: path.read_text() for path in sorted((ROOT / "docs").rglob("*.md")) if "_build" not in path.parts}
TABLES = [PAGE, *(PAGE.with_name(f"{name}.md") for name in ("algorithms", "methods", "transforms"))]
REFERENCE = "\n".join(DOCS[page] for page in TABLES)
ROWS = [line for line in REFERENCE.splitlines() if line.startswith("| `jc.")]
EVERYTHING = "\n".join([README, *DOCS.values()])


@pytest.mark.slow
def test_figures_of_compressors_are_those_of_the_code():
    rows = [row for row in ROWS if row in DOCS[PAGE]]
    assert len(rows) > 30
    assert [computed(row) for row in rows] == rows, "run `python -m experiments.tables --write`"


def test_examples_of_algorithms_run():
    """The last cell of their rows."""
    examples = [cell for row in ROWS if (cell := row.split(" | ")[-1].strip(" |")).startswith("`jc.")]
    assert len(examples) > 10
    for example in examples:
        eval(example.strip("`"), {"jc": jc})


def test_it_is_short_and_has_the_two_commands_first():
    assert len(README.splitlines()) <= 180
    screen = "\n".join(README.splitlines()[:20])
    assert "make demo" in screen
    assert "make test" in screen


def test_example_runs():
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 35
    result = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert "sent_bytes" in result.stdout
    assert "all-gather" in result.stdout


def test_every_public_factory_is_in_a_table():
    for module, name in ((group, name) for group in (jc, jc.methods, jc.contrib) for name in group.__all__):
        value, path = getattr(module, name), f"{module.__name__.replace('jaxcomp', 'jc')}.{name}"
        if callable(value) and getattr(value, "__module__", "").startswith(
            ("jaxcomp.compressors", "jaxcomp.algorithms", "jaxcomp.contrib")
        ):
            assert path in REFERENCE, name


def test_options_that_are_named_exist(capsys):
    """Those of README and documentation, in the help of the commands that they give."""
    names = sorted(set(re.findall(r"python -m\s+experiments\s+(bench [a-z]+|[a-z]+)", EVERYTHING)))
    assert "compare" in names
    known = " ".join(run_inside(capsys, *name.split(), "--help").stdout for name in names)
    with pytest.raises(SystemExit):
        cli.main(["smoothness", "--help"])
    known += capsys.readouterr().out
    flags = set(re.findall(r"`(--[a-z-]+)", EVERYTHING)) - {"--name", "--write"}
    assert flags
    assert not {flag for flag in flags if flag not in known}


def test_demo_table_is_a_run_of_the_demo():
    """The committed table has the rows of the default methods, and sizes that follow from them."""
    page = DOCS[ROOT / "docs" / "results" / "demo.md"]
    demo = page[page.index("<!-- demo") : page.index("<!-- end demo -->")]
    rows = {
        cells[0].strip(): cells
        for cells in (line.strip("| ").split("|") for line in demo.splitlines() if line[:1] == "|")
    }
    assert {"dense-f32", "dense-bf16", "top-k", "sidco", "dithering", "diana"} <= set(rows)
    lane = lambda name: int(rows[name][3].replace(",", ""))
    assert lane("dense-f32") == 4 * 85_002
