"""Local updates: many steps at each worker, then one compressed exchange of differences. Loss against bytes and steps.

Trains a transformer on the bytes of a text with every method, H and seed, workers side by side on one device. Methods:
NAME exchanges differences every H steps, stream:NAME in three fragments that arrive up to five steps later, ddp:NAME
gradients at every step. Written to runs/NAME: config.json, metrics.jsonl (a line for each logged step), results.json (a
row for each curve and seed), table.md and local.png.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.lib.cli import Parser, UserError, at_least, common, positive, share
from experiments.lib.report import show_rows
from experiments.lib.run import Run, parser_of
from experiments.lib.text import add_sizes, text_of
from experiments.local import report
from experiments.local.methods import NAMES, parse
from experiments.local.training import train

__all__ = ["main"]

DEFAULT = ["ddp:f32", "f32", "int8", "int4", "sparse-loco", "stream:int4"]


def parser() -> Parser:
    p = parser_of("local", __doc__)
    p.add_argument("--methods", nargs="+", default=DEFAULT, metavar="METHOD", help=f"of {', '.join(NAMES)}")
    p.add_argument("--every", nargs="+", type=at_least(1), default=[30], metavar="H", help="steps of a round")
    p.add_argument("--outer-lr", type=positive, default=None, help="0.7, or 1 for sparse-loco")
    p.add_argument("--outer-momentum", type=share, default=None, help="of Nesterov: 0.9, or 0 for sparse-loco")
    what = "text, plain or .xz, or a folder of NAME.txt(.xz); without it the source of this package"
    p.add_argument("--data", type=Path, default=None, help=what)
    add_sizes(p, width=64, layers=2)
    common(p, "steps", "ratio", "levels", "seeds", workers=(4, "side by side on one device"))
    common(p, batch=(8, "windows of each worker in a step"), lr=(2e-3, "of AdamW"))
    p.add_argument("--mbit", type=positive, default=100.0, help="of each link, for the computed times")
    return p


def main(arguments: Sequence[str]) -> int:
    run = Run(parser(), arguments, "local")
    o = run.options
    setups, text = parse(o.methods, o.every), text_of(o.data)
    if o.width % o.heads:
        raise UserError(f"--width must be a multiple of --heads; got {o.width} and {o.heads}")
    run.say(
        f"{text.name}: {len(text.codes):,} bytes; {o.workers} workers, {o.steps} steps of {o.batch} windows of "
        f"{o.length} bytes each; writing to {run.folder}"
    )
    lines: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []

    def measure(case: tuple[Any, int]) -> None:
        for line in train(*case, text, o):
            lines.append(line)
            run.add(line)
        rows.append({**lines[-1], **case[0]._asdict()})
        run.keep(rows)

    cases = list(itertools.product(setups, dict.fromkeys(o.seeds)))
    run.rows_of(cases, lambda case: f"{case[0].label}, seed {case[1]}", measure, partial=True)
    title = f"{run.folder.name}: {rows[0]['parameters']:,} parameters, {text.name}"
    notes = report.NOTES.format(mbit=o.mbit)
    show_rows(run.console, title, report.rows(rows, o.workers, o.mbit), notes, run.path("table.md"))
    panels = report.panels(lines, setups, o.workers)
    title = f"{text.name}, {o.workers} workers, {len(o.seeds)} seed(s), band: min to max"
    of_bytes = {report.BY_BYTES: {"xlabel": "MB sent by each worker", "xscale": "log"}}
    labels = {"xlabel": "step", "ylabel": "test loss of the shared point (nats a byte)"}
    run.plot("local.png", panels, title, each=of_bytes, **labels)
    return 0
