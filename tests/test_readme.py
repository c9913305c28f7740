"""What the README says is what the code does."""

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import jaxcomp as jc
from experiments.tables import placed

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


@pytest.mark.slow
def test_tables_are_those_of_the_code():
    assert placed(README) == README, "run `python -m experiments.tables --write`"


def test_first_screen_has_the_two_commands():
    screen = "\n".join(README.splitlines()[:20])
    assert "make demo" in screen
    assert "make test" in screen


def test_example_runs_and_has_twenty_lines():
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 20
    result = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert "relative_error" in result.stdout
    assert "all-gather" in result.stdout


@pytest.mark.parametrize("name", sorted(set(re.findall(r"jc\.([a-z_][a-z0-9_]*)", README))))
def test_every_name_in_the_readme_exists(name):
    assert hasattr(jc, name)


def test_every_public_factory_is_in_a_table():
    for name in {*jc.__all__, *jc.methods.__all__, *jc.contrib.__all__}:
        made = getattr(getattr(jc, name), "__module__", "")
        if callable(getattr(jc, name)) and made.startswith(("jaxcomp.compressors", "jaxcomp.algorithms")):
            assert f"jc.{name}" in README or f"jc.methods.{name}" in README, name


def test_options_in_the_readme_exist():
    """Those that it speaks of, in the help of the commands that it gives."""

    def help_of(name):
        command = [sys.executable, "-m", "experiments", name, "--help"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True).stdout

    names = sorted(set(re.findall(r"python -m experiments ([a-z]+)", README)))
    assert "compare" in names
    with ThreadPoolExecutor(2) as pool:
        known = " ".join(pool.map(help_of, names))
    flags = set(re.findall(r"`(--[a-z-]+)", README)) - {"--name"}
    assert flags
    assert not {flag for flag in flags if flag not in known}


def test_demo_table_is_a_run_of_the_demo():
    """The committed table has the rows of the default methods, and sizes that follow from them."""
    demo = README[README.index("<!-- demo -->") : README.index("<!-- end demo -->")]
    rows = {
        cells[0].strip(): cells
        for cells in (line.strip("| ").split("|") for line in demo.splitlines() if line[:1] == "|")
    }
    assert {"dense-f32", "dense-bf16", "top-k", "sidco", "dithering", "diana"} <= set(rows)
    lane = lambda name: int(rows[name][3].replace(",", ""))
    assert lane("dense-f32") == 4 * 85_002
