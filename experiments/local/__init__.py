"""Local updates: many steps, then one compressed exchange of differences. Loss against bytes and against time.

Trains a transformer on the bytes of a text with every method, H and seed, workers side by side on one device, and
writes to runs/NAME: config.json, metrics.jsonl (a line for each logged step), results.json (a row for each finished
curve and seed), table.md, local.png, and checkpoints. Methods: NAME exchanges differences every H steps, stream:NAME in
--fragments with --delay and --mixing, ddp:NAME gradients at every step.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.lib import folders
from experiments.lib.cli import Parser, UserError, at_least, common, positive, share
from experiments.lib.folders import Journal, how_to_find, run_options
from experiments.lib.report import new_console, progress_bar, show_rows
from experiments.lib.run import parser_of

__all__ = ["main"]

DEFAULT = ["ddp:f32", "f32", "int8", "int4", "sparse-loco", "stream:int4"]


def nonnegative(text: str) -> float:
    return 0.0 if text in ("0", "0.0") else positive(text)


def parser() -> Parser:
    from experiments.lib.text import add_sizes
    from experiments.local.methods import NAMES

    p = parser_of("local", __doc__)
    p.add_argument("--methods", nargs="+", default=DEFAULT, metavar="METHOD", help=f"of {', '.join(NAMES)}")
    p.add_argument("--every", nargs="+", type=at_least(1), default=[30], metavar="H", help="steps of a round")
    p.add_argument("--fragments", type=at_least(1), default=3, help="parts of the model, for stream:")
    p.add_argument("--delay", type=at_least(0), default=5, help="steps an exchange may take, for stream:")
    p.add_argument("--mixing", type=share, default=0.5, help="share of its own point a worker keeps, for stream:")
    p.add_argument("--outer-lr", type=positive, default=None, help="0.7, or 1 for sparse-loco")
    p.add_argument("--outer-momentum", type=nonnegative, default=None, help="of Nesterov: 0.9, or 0 for sparse-loco")
    what = "text, plain or .xz, or a folder of NAME.txt(.xz); without it the source of this package"
    p.add_argument("--data", type=Path, default=None, help=what)
    add_sizes(p, width=64, layers=2)
    common(p, "steps", "ratio", "levels", "seeds", workers=(4, "side by side on one device"))
    common(p, batch=(8, "windows of each worker in a step"), lr=(2e-3, "of AdamW"))
    p.add_argument("--mbit", type=positive, default=100.0, help="of each link, for the computed times")
    run_options(p, "local")
    common(p, "log-every", "checkpoint-every", "resume")
    return p


def main(arguments: Sequence[str]) -> int:
    with folders.resumable(parser, arguments, "local", Run) as (run, runs, folder):
        return run.go(runs, folder)


class Run:
    """All curves of one folder."""

    def __init__(self, options: dict[str, Any]):
        from experiments.lib.text import text_of
        from experiments.lib.transformer import Sizes
        from experiments.local.methods import parse

        o = self.options = options
        self.console = new_console()
        self.setups = parse(o["methods"], o["every"], o["fragments"], o["delay"], o["mixing"])
        self.text = text_of(o["data"])
        if o["width"] % o["heads"]:
            raise UserError(f"--width must be a multiple of --heads; got {o['width']} and {o['heads']}")
        if len(self.text.codes) - self.text.train <= o["length"] + 1:
            raise UserError(f"{self.text.name} is too short for windows of {o['length']} bytes")
        self.sizes = Sizes(self.text.characters, o["length"], o["width"], o["heads"], o["layers"])
        for setup in self.setups:
            try:
                setup.algorithm(o["ratio"], o["levels"])
            except ValueError as error:
                raise UserError(f"{setup.label}: {error}") from None

    def go(self, runs: Path, folder: Path) -> int:
        o, console, self.folder, self.journal = self.options, self.console, folder, Journal(folder)
        self.results = folders.read_results(folder / "results.json")
        done = {(row["label"], row["seed"]) for row in self.results}
        console.print(
            f"{self.text.name}: {len(self.text.codes):,} bytes; {o['workers']} workers, {o['steps']} steps of "
            f"{o['batch']} windows of {o['length']} bytes each; writing to {folder}"
        )
        interrupted = False
        try:
            with progress_bar(console) as bar:
                for setup in self.setups:
                    for seed in dict.fromkeys(o["seeds"]):
                        if (setup.label, seed) not in done:
                            self.train(setup, seed, bar)
        except KeyboardInterrupt:
            interrupted = True
            where = how_to_find(runs, folder)
            console.print(f"interrupted; continue with --resume{where}", highlight=False, soft_wrap=True)
        self.report()
        return 130 if interrupted else 0

    def train(self, setup: Any, seed: int, bar: Any) -> None:
        from experiments.local.training import Trainer

        o = self.options
        task = bar.add_task(f"{setup.label}, seed {seed}", total=o["steps"], now="compiling")
        trainer = Trainer(setup, self.text, self.sizes, o, seed)
        checkpoint = self.folder / f"{setup.label.replace(':', '-').replace(' ', '-')}-{seed}.npz"
        first, seconds, sent, message, route, last = 0, [], 0.0, None, "sum", {}
        if checkpoint.is_file():
            first = trainer.load(checkpoint)
        of_this = lambda line: (line["label"], line["seed"]) == (setup.label, seed)
        self.journal.keep(lambda line: not of_this(line) or line["step"] <= first)
        kept = [line for line in self.journal.lines() if of_this(line)]
        if kept:
            last = kept[-1]
            sent, message, seconds = last["sent_bytes"], last["message_bytes"], [last["seconds"]]
        for t in range(first + 1, o["steps"] + 1):
            step = trainer.advance(t)
            sent += step.sent_bytes
            if step.sent_bytes:
                route = step.route
            else:
                seconds.append(step.seconds)
            if not setup.plain and (message is None or t > o["steps"] // 2) and trainer.is_due(t):
                message = trainer.message_bytes()
            if t == 1 or t % o["log_every"] == 0 or t == o["steps"]:
                line = {"label": setup.label, "method": setup.method, "seed": seed, "step": t, "loss": step.loss}
                line |= {"test": trainer.test_loss(), "sent_bytes": sent, "message_bytes": message, "route": route}
                line["seconds"] = float(np.median(seconds[-100:])) if seconds else step.seconds
                self.journal.add(last := line)
                bar.update(task, completed=t, now=f"loss {step.loss:.3f}")
            if t % o["checkpoint_every"] == 0 or t == o["steps"]:
                trainer.save(checkpoint, t)
        self.results.append({**last, **setup._asdict(), "parameters": trainer.parameters})
        folders.write_json(self.folder / "results.json", self.results)
        if bar.disable:
            said = f"test loss {last['test']:.4f}, {1e3 * last['seconds']:.0f} ms"
            self.console.print(f"{setup.label}, seed {seed}: {said}")

    def report(self) -> None:
        from experiments.local.report import NOTES, plot, rows

        o, lines = self.options, self.journal.lines()
        if self.results:
            title = f"{self.folder.name}: {self.results[0]['parameters']:,} parameters, {self.text.name}"
            show_rows(self.console, title, rows(self.results, o), NOTES.format(**o), self.folder / "table.md")
        if any(line["step"] > 1 for line in lines):
            path = self.folder / "local.png"
            plot(path, lines, {setup.label: setup for setup in self.setups}, o, self.text.name)
            self.console.print(f"plot: {path}")
