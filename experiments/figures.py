"""Tables and pictures of docs/results that a command makes in under an hour: which are stale, and to make them anew.

A table stands on its page between two markers. The first one says when it was made, with which JAX, on how many cores,
and a hash of the code that it came from, without comments and docstrings: the experiment, and those files of the
library and of what experiments share that it uses (`experiments.sources`), so that a method that it does not compare
changes nothing. What hands arrays on (MACHINERY) is in the hash of tables with times and with facts of compiled
programs; of tables with losses, entries and bytes it is not, since by the tests it changes no direction and no byte.
Where that hash is another one today, or none stands there, the table is stale. Text around a table is not rewritten:
rows that changed are printed, so that its author can. A table that is of an accelerator is made by its command alone,
which writes the page.

    python -m experiments figures                    what is stale
    python -m experiments figures demo scale         make these anew
    python -m experiments figures --all [--data DIR] all of them; `make figures`
"""

import ast
import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from experiments.lib.cli import UserError, existing_folder
from experiments.lib.report import new_console, show_rows
from experiments.lib.run import parser_of
from experiments.sources import ROOT, sources_of

__all__ = ["FIGURES", "Figure", "main", "placed", "stamp_of"]

RESULTS = ROOT / "docs" / "results"
IMAGES = ROOT / "docs" / "images"
# Files of the library that lay out, hand on, count and add, which tests hold bit for bit whatever the method is.
MACHINERY = (
    "exchange",
    "state",
    "arrays.py",
    "backend.py",
    "backend_cpu.py",
    "base.py",
    "buckets.py",
    "collectives.py",
)
MACHINERY += ("factories.py", "groups.py", "hlo.py", "jaxprs.py", "ledger.py", "metrics.py", "paths.py", "program.py")
MACHINERY += ("replicas.py", *(f"transforms/{name}.py" for name in ("arguments", "bytes_exchange", "compressed_mean")))
MACHINERY += tuple(f"transforms/{name}.py" for name in ("meshes", "rows", "scattered", "unreduced", "value_and_grad"))
MACHINERY += ("transforms/worker_gradients.py",)


class Figure(NamedTuple):
    """A table between its markers.

    page: of docs/results. command: words after `python -m experiments`; {table} is the file to write it to, {data} the
    folder of --data. Without {table} the command keeps a run, and writes its table.md. source: file or folder below
    experiments that makes it. minutes: about, on 2 cores. picture: of the run, and its name in docs/images.
    accelerator: the command needs a GPU or a TPU, and writes the page itself. compilers: it needs theirs. package: of a
    trainer or a transport, which it needs. whole: all lines of table.md are the table, not only its rows. programs: it
    holds times, or facts of compiled programs, which change with the machinery, too.
    """

    page: str
    command: str
    source: str
    minutes: int
    picture: tuple[str, str] | None = None
    accelerator: bool = False
    compilers: bool = False
    whole: bool = False
    package: str = ""
    programs: bool = False
    resumable: bool = False


SCOREBOARD = "scoreboard --seconds 4 --methods dense-bf16:two_shot dithering:two_shot power-sgd-2 sidco-narrow "
SCOREBOARD += "local-int4@20"
PLAN = "plan regret --workers 2 4 8 --one-process 2 4 --sizes 50000 250000 --seconds 12 --rounds 40"
LOCAL = "local --data {data}/tinyshakespeare --every 20 --steps 240 --batch 4 --length 48"
HOSTS = "pods --pods h100 4xh100 32xh100 --size 1.3 6.7"
MAXTEXT = "trainers maxtext --data {data}/tinyshakespeare"
FIGURES = {
    "demo": Figure("demo", "compare", "train", 2, ("compare.png", "demo.png")),
    "bench": Figure("costs", "bench compressors --markdown {table}", "bench/compressors.py", 5, programs=True),
    "step": Figure("costs", "bench step --markdown {table}", "bench/step.py", 5, programs=True),
    "trees": Figure("costs", "bench trees --markdown {table}", "bench/trees.py", 12, programs=True),
    "codes": Figure("costs", "bench codes --markdown {table}", "bench/codes.py", 3, programs=True),
    "training": Figure("thresholds", "sidco training --steps 300 --seeds 0 1", "sidco", 4),
    "scale": Figure("scale", "scale --workers 8 512 16384", "scale", 1, ("scale.png", "scale.png")),
    "workers": Figure("scale", "workers", "scale/workers.py", 8, ("workers.png", "workers.png")),
    "scoreboard": Figure("scoreboard", SCOREBOARD, "network", 35, ("scoreboard.png", "scoreboard.png"), programs=True),
    "plan": Figure("plan", PLAN, "plan", 35, ("regret.png", "plan.png"), programs=True),
    "churn": Figure("churn", "churn", "churn", 35, ("churn.png", "churn.png"), package="grpc", programs=True),
    "local": Figure("local", LOCAL, "local", 10),
    "accelerator": Figure("accelerators", "accelerator", "accelerator", 5, accelerator=True, programs=True),
    "pods": Figure(
        "pods",
        "pods --pods v5e:16x16 2xv5e:16x16",
        "pods",
        30,
        ("pods.png", "pods.png"),
        compilers=True,
        programs=True,
        resumable=True,
    ),
    "hosts": Figure(
        "pods", HOSTS, "pods", 40, ("pods.png", "hosts.png"), compilers=True, programs=True, resumable=True
    ),
    "pods-maxtext": Figure(
        "pods",
        "pods maxtext",
        "pods",
        40,
        ("pods.png", "pods-maxtext.png"),
        compilers=True,
        package="maxtext",
        programs=True,
        resumable=True,
    ),
    "setups": Figure("setups", "setups", "scale/setups.py", 3, whole=True),
    "maxtext": Figure("trainers", MAXTEXT, "trainers", 5, ("maxtext.png", "maxtext.png"), package="maxtext"),
    "drjax": Figure("trainers", "trainers drjax", "trainers", 3, package="drjax"),
    "tunix": Figure("trainers", "trainers tunix", "trainers", 3, package="tunix"),
    "compiled": Figure("accelerators", "compiled", "compiled", 20, compilers=True, programs=True),
}


def main(arguments: Sequence[str]) -> int:
    p = parser_of("figures", __doc__)
    p.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(FIGURES)}")
    p.add_argument("--all", action="store_true", help="all of them; without --data those that need none")
    p.add_argument("--data", type=Path, default=None, metavar="DIR", help="folder with tinyshakespeare")
    o = p.parse_args(arguments)
    data = None if o.data is None else existing_folder(o.data).resolve()
    for name in o.names:
        if name not in FIGURES:
            raise UserError(f"unknown figure {name!r}; choose from {', '.join(FIGURES)}")
        if data is None and "{data}" in FIGURES[name].command:
            raise UserError(f"--data is needed for {name}")
        if FIGURES[name].accelerator:
            raise UserError(f"{name} needs a GPU or a TPU; run python -m experiments {FIGURES[name].command} there")
    console = new_console()
    for name in FIGURES if o.all else o.names:
        if data is None and "{data}" in FIGURES[name].command:
            console.print(f"{name}: left out, it needs --data")
            continue
        if FIGURES[name].accelerator:
            console.print(f"{name}: left out, it needs an accelerator")
            continue
        if FIGURES[name].compilers and find_spec("libtpu") is None:
            console.print(
                f"{name}: left out, it needs the compilers of accelerators, which make test-accelerators sets up"
            )
            continue
        if FIGURES[name].package and find_spec(FIGURES[name].package) is None:
            extra = "[sites]'" if FIGURES[name].package == "grpc" else "[trainers]', on Python 3.12"
            console.print(f"{name}: left out, it needs pip install '.{extra}")
            continue
        console.print(f"{name}: about {FIGURES[name].minutes} min")
        for row in make(name, FIGURES[name], data):
            console.print(f"  changed: {row}")
    rows = []
    for name, figure in FIGURES.items():
        made, stale = state_of(name, figure)
        page, state = f"docs/results/{figure.page}.md", "stale" if stale else ""
        if stale and figure.accelerator:
            state = "stale; needs an accelerator" if made else "needs an accelerator"
        rows.append({"table": name, "page": page, "made": made, "state": state, "min": str(figure.minutes)})
    notes = "Stale: the code that makes it, or the library, is another one than it was made with."
    show_rows(console, "Figures of docs/results", rows, notes)
    return 0


def make(name: str, figure: Figure, data: Path | None) -> list[str]:
    """Runs the command and writes its table and picture: the rows that are new."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        words = [word.format(table=run / "table.md", data=data) for word in figure.command.split()]
        if "{table}" in figure.command:
            run.mkdir()
        else:
            words += ["--runs", folder, "--name", "run"]
        rows_kept = ROOT / "runs" / "figures" / f"{name}-{code_of(figure)}-{version('jax')}"
        if figure.resumable:
            words += ["--rows", str(rows_kept)]
        done = subprocess.run([sys.executable, "-m", "experiments", *words], cwd=ROOT, check=False)
        if done.returncode:
            raise UserError(f"python -m experiments {' '.join(words)} ended with {done.returncode}")
        lines = (run / "table.md").read_text().splitlines()
        rows = [line for line in lines if figure.whole or line.startswith("|")]
        page = RESULTS / f"{figure.page}.md"
        before = page.read_text()
        page.write_text(placed(before, name, rows, stamp_of(figure)))
        if figure.picture is not None:
            shutil.copyfile(run / figure.picture[0], IMAGES / figure.picture[1])
        shutil.rmtree(rows_kept, ignore_errors=True)
    return [row for row in rows if row not in before]


def found_in(page: str, name: str) -> re.Match[str]:
    """The markers of a table, what the first one says, and the rows between them.

    Raises:
        ValueError: the markers are not there.
    """
    pattern = rf"<!-- {name}(?:: (?P<stamp>[^>]*))? -->\n(?P<rows>.*?)<!-- end {name} -->"
    found = re.search(pattern, page, re.DOTALL)
    if found is None:
        raise ValueError(f"no <!-- {name} --> and <!-- end {name} --> on the page")
    return found


def placed(page: str, name: str, rows: list[str], stamp: str) -> str:
    """The page with these rows between the markers of a table, the first of which says `stamp`."""
    found = found_in(page, name)
    table = "\n".join([f"<!-- {name}: {stamp} -->", *rows, f"<!-- end {name} -->"])
    return page[: found.start()] + table + page[found.end() :]


def stamp_of(figure: Figure, machine: str | None = None) -> str:
    """When, with what and from which code: what the marker says. machine: in words; None: the cores of this one."""
    import jax

    machine = machine or f"JAX {jax.__version__}, {os.cpu_count()} cores"
    return f"{time.strftime('%Y-%m-%d')}, {machine}, code {code_of(figure)}"


def code_of(figure: Figure) -> str:
    """A short hash of the code, without comments, that the table comes from."""
    digest = hashlib.sha256()
    for path in files_of(figure):
        digest.update(f"{path.relative_to(ROOT).as_posix()}\0{code_at(path)}\0".encode())
    return digest.hexdigest()[:12]


def files_of(figure: Figure) -> list[Path]:
    """The files that the table comes from."""
    own = ROOT / "experiments" / figure.source
    found = sources_of(sorted(own.rglob("*.py")) or [own])
    machinery = [] if figure.programs else [ROOT / "jaxcomp" / name for name in MACHINERY]
    return sorted(path for path in found if not any(path.is_relative_to(place) for place in machinery))


@functools.cache
def code_at(path: Path) -> str:
    return code_in(path.read_text())


def code_in(source: str) -> str:
    """What a program does, without comments, docstrings and the way it is laid out, the same in each version of Python.

    >>> code_in("x = 1  # one") == code_in("'Numbers.'\\nx = (1)"), code_in("x = 1") == code_in("x = 2")
    (True, False)
    """
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
        if isinstance(node, ast.JoinedStr):  # 3.12 has empty texts in there
            node.values = [each for each in node.values if not (isinstance(each, ast.Constant) and each.value == "")]
    return _written(tree)


def _written(node: object) -> str:
    """A syntax tree as text. Empty fields are left out, since some versions of Python do not have them."""
    if isinstance(node, list):
        return f"[{', '.join(map(_written, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = (f"{name}={_written(value)}" for name, value in ast.iter_fields(node) if value is not None and value != [])
    return f"{type(node).__name__}({', '.join(fields)})"


def state_of(name: str, figure: Figure) -> tuple[str, bool]:
    """What the marker says, and whether the table is stale."""
    made = found_in((RESULTS / f"{figure.page}.md").read_text(), name)["stamp"] or ""
    return made.rpartition(", code ")[0], not made.endswith(f"code {code_of(figure)}")
