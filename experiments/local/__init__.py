"""Local updates: many steps at each worker, then one compressed exchange of differences. Loss against bytes and time.

Trains a transformer on the bytes of a text with every method, H and seed, workers side by side on one device. Methods:
NAME exchanges differences every H steps, stream:NAME in three fragments that arrive up to five steps later, ddp:NAME
gradients at every step; each with every inner optimizer and every rhythm of its moments. Written to runs/NAME:
config.json, metrics.jsonl (a line for each logged step), results.json (a row for each finished curve and seed),
table.md, local.png, and checkpoints, from which --resume goes on.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from experiments.lib.cli import Parser, UserError, at_least, common, positive, share
from experiments.lib.folders import Journal, how_to_find, read_results, resumable, run_options, write_json
from experiments.lib.report import new_console, progress_bar, show_rows
from experiments.lib.run import draw_panels, parser_of
from experiments.lib.text import Text, add_sizes, text_of
from experiments.lib.training import Checkpoints
from experiments.local import report
from experiments.local.methods import INNERS, NAMES, Setup, parse
from experiments.local.training import train

__all__ = ["main"]

# What is read again of a line of metrics.jsonl; a row of results.json has the fields of its curve beside them.
LINE: dict[str, type] = {"label": str, "route": str, "message_bytes": object}
LINE |= dict.fromkeys(("seed", "step", "parameters"), int)
LINE |= dict.fromkeys(("loss", "test", "seconds", "sent_bytes"), float)
CURVE: dict[str, Any] = Setup.__annotations__ | dict.fromkeys(("lr", "outer_lr", "outer_momentum"), object)
DEFAULT = ["ddp:f32", "f32", "int8", "int4", "sparse-loco", "stream:int4"]


def parser() -> Parser:
    p = parser_of("local", __doc__)
    p.add_argument("--methods", nargs="+", default=DEFAULT, metavar="METHOD", help=f"of {', '.join(NAMES)}")
    p.add_argument("--every", nargs="+", type=at_least(1), default=[30], metavar="H", help="steps of a round")
    what = f"of {', '.join(INNERS)}, with rates of its own after colons: a grid of rates is a list of such words"
    form = "OPTIMIZER[:RATE[:OUTER_RATE[:OUTER_MOMENTUM]]]"
    p.add_argument("--inner", nargs="+", default=["adamw"], metavar=form, help=what)
    what = "rounds from one averaging of the first and second moments to the next, and their code, or none"
    p.add_argument("--moments", nargs="+", default=["none"], metavar="MU:NU[:METHOD]", help=what)
    p.add_argument("--outer-lr", type=positive, default=None, help="0.7, or 1 for sparse-loco")
    p.add_argument("--outer-momentum", type=share, default=None, help="of Nesterov: 0.9, or 0 for sparse-loco")
    what = "text, plain or .xz, or a folder of NAME.txt(.xz); without it the source of this package"
    p.add_argument("--data", type=Path, default=None, help=what)
    add_sizes(p, width=64, layers=2)
    common(p, "steps", "ratio", "levels", "seeds", workers=(4, "side by side on one device"))
    common(p, batch=(8, "windows of each worker in a step"), lr=(2e-3, "of the inner optimizer"))
    p.add_argument("--mbit", type=positive, default=100.0, help="of each link, for the computed times")
    run_options(p, "local")
    common(p, "checkpoint-every", "resume")
    return p


def main(arguments: Sequence[str]) -> int:
    with resumable(parser, arguments, "local", prepared) as ((o, setups, text), runs, folder):
        return run(o, setups, text, runs, folder)


def prepared(options: dict[str, Any]) -> tuple[SimpleNamespace, list[Setup], Text]:
    """The options, the curves that they ask for, and the text."""
    o = SimpleNamespace(**options)
    if o.width % o.heads:
        raise UserError(f"--width must be a multiple of --heads; got {o.width} and {o.heads}")
    return o, parse(o.methods, o.every, o.inner, o.moments), text_of(o.data)


def run(o: Any, setups: list[Setup], text: Text, runs: Path, folder: Path) -> int:
    """Trains what is not finished yet, and shows all that there is: the exit status."""
    console, journal = new_console(), Journal(folder, needs=LINE)
    console.print(
        f"{text.name}: {len(text.codes):,} bytes; {o.workers} workers, {o.steps} steps of {o.batch} windows of "
        f"{o.length} bytes each; writing to {folder}"
    )
    rows = read_results(folder / "results.json", LINE | CURVE)
    done, interrupted = {(row["label"], row["seed"]) for row in rows}, False
    try:
        with progress_bar(console) as bar:
            for setup, seed in itertools.product(setups, dict.fromkeys(o.seeds)):
                if (setup.label, seed) not in done:
                    rows.append(curve(setup, seed, text, o, folder, journal, bar))
                    write_json(folder / "results.json", rows)
    except KeyboardInterrupt:
        interrupted = True
        console.print(f"interrupted; go on with --resume{how_to_find(runs, folder)}", soft_wrap=True)
    if rows:
        title = f"{folder.name}: {rows[0]['parameters']:,} parameters, {text.name}"
        notes = report.NOTES.format(mbit=o.mbit)
        show_rows(console, title, report.rows(rows, o.workers, o.mbit), notes, folder / "table.md")
        panels = report.panels(journal.lines(), setups, o.workers, o.mbit, report.compute_of(rows))
        title = f"{text.name}, {o.workers} workers, {len(o.seeds)} seed(s), band: min to max"
        own = {report.BY_BYTES: {"xlabel": "MB sent by each worker", "xscale": "log"}}
        own |= {report.BY_TIME: {"xlabel": f"seconds, computed for links of {o.mbit:g} Mbit/s", "xscale": "log"}}
        labels: dict[str, Any] = {"xlabel": "step", "ylabel": "test loss of the shared point (nats a byte)"}
        draw_panels(folder / "local.png", panels, title, each=own, **labels)
        console.print(f"plot: {folder / 'local.png'}", soft_wrap=True)
    return 130 if interrupted else 0


def curve(setup: Setup, seed: int, text: Text, o: Any, folder: Path, journal: Journal, bar: Any) -> dict[str, Any]:
    """Trains one curve from its newest checkpoint: its row of results."""
    name = f"{setup.label.replace(':', '-').replace(' ', '-')}-{seed}"
    checkpoints = Checkpoints(folder / "checkpoints" / name)
    first = checkpoints.latest() or 0
    of_this = lambda line: (line["label"], line["seed"]) == (setup.label, seed)
    journal.keep(lambda line: not of_this(line) or line["step"] <= first)
    task = bar.add_task(f"{setup.label}, seed {seed}", total=o.steps, completed=first, now="compiling")
    line: dict[str, Any] = {}
    for line in train(setup, seed, text, o, checkpoints):
        journal.add(line)
        bar.update(task, completed=line["step"], now=f"loss {line['loss']:.3f}")
    if not line:  # it was trained to its end, and stopped before its row was written
        line = next((each for each in reversed(journal.lines()) if of_this(each)), {})
        if not line:
            raise UserError(
                f"no line of {name} in {journal.path}; remove {folder / 'checkpoints' / name} to train it anew"
            )
    checkpoints.close()
    if bar.disable:
        bar.console.print(f"{setup.label}, seed {seed}: test loss {line['test']:.4f}")
    return line | setup._asdict()
