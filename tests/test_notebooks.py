"""Notebooks run from end to end, and the two halves of each pair hold the same code."""

from pathlib import Path

import jupytext
import nbclient
import pytest
from variants import variants

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.py"))


def test_there_are_notebooks():
    assert NOTEBOOKS


# The shortest; `make test-all` runs the others.
RUN = [path for path in NOTEBOOKS if path.stem == "01_compressor"]


@pytest.mark.parametrize("path", variants(NOTEBOOKS, RUN), ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore")  # of the kernel's own sockets
def test_notebook_runs(path):
    notebook = jupytext.read(path)
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert not [output for output in outputs if output.output_type == "error"]
    assert [output for output in outputs if "image/png" in output.get("data", {})]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_pair_is_in_step(path):
    script, paired = jupytext.read(path), jupytext.read(path.with_suffix(".ipynb"))
    assert [(cell.cell_type, cell.source) for cell in script.cells] == [
        (cell.cell_type, cell.source) for cell in paired.cells
    ]
    assert any(cell.get("outputs") for cell in paired.cells), "the .ipynb is committed with its outputs"
