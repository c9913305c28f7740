"""The main job: one model, several compression methods, what each costs and what it loses.

Trains a Flax model data-parallel on n workers with every method and every seed, and writes to
runs/NAME: config.json, metrics.jsonl (a line for each logged step), results.json (a row for each
finished method and seed), table.md, compare.png, and checkpoints.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.lib.cli import Parser, at_least, fraction, positive
from experiments.lib.folders import (
    Journal,
    choose_folder,
    claimed,
    given_in,
    goes_on,
    how_to_find,
    read_results,
    resumed,
    run_options,
    write_config,
    write_json,
)
from experiments.lib.report import new_console, progress_bar, show

if TYPE_CHECKING:
    from experiments.lib.job import Job

__all__ = ["main"]

DEFAULT_METHODS = ["dense-f32", "dense-bf16", "top-k", "sidco", "dithering", "diana"]


def parser() -> Parser:
    from experiments.lib.data import DATASETS
    from experiments.lib.methods import METHODS
    from experiments.lib.models import MODELS
    from experiments.lib.training import OPTIMIZERS
    from jaxcomp.exchange.routes import VIAS

    known = "; ".join(f"{name}: {method.what}" for name, method in METHODS.items())
    p = Parser(prog="python -m experiments compare", description=(__doc__ or "").split("\n\n")[0])
    p.add_argument("--data", choices=DATASETS, default="digits", help="digits come with scikit-learn")
    p.add_argument("--data-dir", type=Path, default=None, help="folder with the files of --data mnist")
    p.add_argument("--model", choices=MODELS, default="mlp", help="architecture")
    p.add_argument("--methods", nargs="+", choices=METHODS, default=DEFAULT_METHODS, metavar="METHOD", help=known)
    p.add_argument("--workers", type=at_least(1), default=4, help="data-parallel workers, one device each")
    p.add_argument("--steps", type=at_least(1), default=300, help="steps of each run")
    p.add_argument("--batch", type=at_least(1), default=32, help="examples of each worker in a step")
    p.add_argument("--optimizer", choices=OPTIMIZERS, default="adam", help="what follows the compressed mean")
    p.add_argument("--lr", type=positive, default=1e-3, help="learning rate")
    p.add_argument("--ratio", type=fraction, default=0.01, help="share of entries that sparse methods keep")
    p.add_argument("--levels", type=at_least(1), default=7, help="levels of dithering; 7 fill 4 bits")
    p.add_argument("--via", choices=VIAS, default="auto", help="route of messages, as for jc.compressed_mean")
    p.add_argument("--alpha", type=positive, default=None, help="Dirichlet label split; without it IID")
    p.add_argument("--seeds", nargs="+", type=at_least(0), default=[0, 1], metavar="SEED", help="one run for each")
    run_options(p, "compare")
    p.add_argument("--log-every", type=at_least(1), default=10, help="steps between lines of metrics.jsonl")
    p.add_argument("--test-every", type=at_least(0), default=0, help="steps between tests; 0: only at the end")
    p.add_argument("--checkpoint-every", type=at_least(1), default=100, help="steps between checkpoints")
    p.add_argument("--resume", action="store_true", help="continue --name with the options it was started with")
    return p


def main(arguments: Sequence[str]) -> int:
    options = vars(parser().parse_args(arguments))
    resume, name, runs = options.pop("resume"), options.pop("name"), options.pop("runs")
    folder = choose_folder(runs, name, resume, "compare")
    if resume:
        options = resumed(folder, options, given_in(parser(), arguments), parser())
    return Run(options, runs, name).go(resume)


class Run:
    """All jobs of one folder."""

    def __init__(self, options: dict[str, Any], runs: Path, name: str | None):
        self.runs, self.name = runs, name
        self.options = options
        self.results: list[dict[str, Any]] = []

    def go(self, resume: bool) -> int:
        from experiments.lib.data import load, split
        from experiments.lib.methods import algorithm_for
        from experiments.lib.training import find_mesh

        o = self.options
        console = new_console()
        self.console = console
        self.mesh = find_mesh(o["workers"])
        self.data = load(o["data"], o["data_dir"])
        self.parts = {seed: split(self.data.train_y, o["workers"], o["alpha"], seed) for seed in o["seeds"]}
        for method in o["methods"]:
            algorithm_for(method, o["ratio"], o["levels"], o["via"])
        # Only now, so that a wrong option leaves nothing behind.
        with claimed(self.runs, self.name, resume, "compare") as self.folder, goes_on(self.runs, self.folder):
            self.journal = Journal(self.folder)
            return self.go_in_folder(resume)

    def go_in_folder(self, resume: bool) -> int:
        from experiments.lib.job import Job

        o, console = self.options, self.console
        if not resume:
            write_config(self.folder, o)
        elif (self.folder / "results.json").is_file():
            self.results = read_results(self.folder / "results.json")
        jobs = [Job(method, seed) for method in dict.fromkeys(o["methods"]) for seed in dict.fromkeys(o["seeds"])]
        done = {(row["method"], row["seed"]) for row in self.results}
        console.print(
            f"{o['data']}, {o['model']}, {o['workers']} workers on {self.mesh.devices.flat[0].platform}, "
            f"{o['steps']} steps of {o['batch']} examples each, {self.labels}; writing to {self.folder}"
        )
        interrupted = False
        try:
            self.train([job for job in jobs if (job.method, job.seed) not in done], console)
        except KeyboardInterrupt:
            interrupted = True
            where = how_to_find(self.runs, self.folder)
            console.print(f"interrupted; continue with --resume{where}", highlight=False, soft_wrap=True)
        self.report(console)
        return 130 if interrupted else 0

    @property
    def labels(self) -> str:
        """How labels are spread over the workers."""
        alpha = self.options["alpha"]
        return "IID" if alpha is None else f"Dirichlet({alpha:g})"

    def train(self, jobs: list["Job"], console: Any) -> None:
        with progress_bar(console) as bar:
            trainer, method = None, None
            for job in jobs:
                task = bar.add_task(f"{job.method}, seed {job.seed}", total=self.options["steps"], now="compiling")
                if trainer is None or method != job.method:
                    trainer, method = self.trainer_for(job.method), job.method
                row = self.train_one(trainer, job, lambda step, now, t=task: bar.update(t, completed=step, now=now))
                self.results.append(row)
                write_json(self.folder / "results.json", self.results)
                if bar.disable:
                    console.print(
                        f"{job.method}, seed {job.seed}: loss {row['loss']:.4f}, test accuracy {row['accuracy']:.4f}, "
                        f"{row['sent_bytes']:,.0f} B sent per step, {1e3 * row['seconds']:.1f} ms per step"
                    )

    def trainer_for(self, method: str) -> Any:
        from experiments.lib.methods import algorithm_for
        from experiments.lib.models import MODELS
        from experiments.lib.training import Trainer

        o = self.options
        algorithm = algorithm_for(method, o["ratio"], o["levels"], o["via"])
        args = (algorithm, MODELS[o["model"]], self.data, self.mesh, o["optimizer"], o["lr"], o["batch"])
        return Trainer(*args, via=o["via"])

    def train_one(self, trainer: Any, job: "Job", show: Any) -> dict[str, Any]:
        from experiments.lib.job import train_one

        return train_one(trainer, job, self.options, self.folder, self.journal, self.parts[job.seed], show)

    # --------------------------------------------------------------------------------------------

    def report(self, console: Any) -> None:
        if self.results:
            title = f"{self.folder.name}: {self.results[0]['parameters']:,} parameters"
            show(console, title, HEAD, self.rows(), NOTES, self.folder / "table.md")
        if any(line["step"] > 1 for line in self.journal.lines()):
            console.print(f"plot: {self.plot()}")

    def rows(self) -> list[list[str]]:
        """The cells of the table, a row for each method that has a result."""

        def bytes_of(dense: str) -> float | None:
            found = [row["sent_bytes"] for row in self.results if row["method"] == dense]
            return found[0] if found else None

        def spread(rows: list[dict[str, Any]], key: str) -> str:
            values = [row[key] for row in rows]
            more = f" ± {np.std(values, ddof=1):.4f}" if len(values) > 1 else ""
            return f"{np.mean(values):.4f}{more}"

        f32, bf16 = bytes_of("dense-f32"), bytes_of("dense-bf16")
        table = []
        for method in dict.fromkeys(row["method"] for row in self.results):
            rows = [row for row in self.results if row["method"] == method]
            sent = rows[0]["sent_bytes"]
            table.append(
                [
                    method,
                    spread(rows, "loss"),
                    spread(rows, "accuracy"),
                    f"{rows[0]['lane_bytes']:,.0f}",
                    f"{np.mean([row['code_bits'] for row in rows]) / 8:,.0f}",
                    f"{sent:,.0f}",
                    f"{f32 / sent:.1f} x" if f32 and sent else "-",
                    f"{bf16 / sent:.1f} x" if bf16 and sent else "-",
                    f"{1e3 * np.median([row['seconds'] for row in rows]):.1f}",
                ]
            )
        return table

    def plot(self) -> Path:
        from experiments.lib.job import WINDOW
        from experiments.lib.plots import LINES, new_figure, running_mean, save

        lines = self.journal.lines()
        anything_sent = any(line["sent_bytes"] > 0 for line in lines)  # one worker sends nothing
        figure, (by_step, *by_bytes) = new_figure(2 if anything_sent else 1)
        for look, method in zip(LINES, dict.fromkeys(line["method"] for line in lines), strict=False):
            runs: dict[int, list[dict[str, Any]]] = {}
            for line in lines:
                if line["method"] == method:
                    runs.setdefault(line["seed"], []).append(line)
            length = min(len(run) for run in runs.values())
            # Steps and bytes are averaged like the losses, so that no curve lags behind.
            mean_of = lambda run, key: running_mean(np.array([line[key] for line in run[:length]], float), WINDOW)  # noqa: B023
            losses = np.stack([mean_of(run, "loss") for run in runs.values()])
            some = next(iter(runs.values()))
            steps, megabytes = mean_of(some, "step"), mean_of(some, "sent_bytes") / 1e6
            for axis, x in zip((by_step, *by_bytes), (steps, megabytes), strict=False):
                axis.plot(x, losses.mean(0), label=method, markevery=max(1, length // 6), markersize=5, **look)
                if len(losses) > 1:
                    axis.fill_between(x, losses.min(0), losses.max(0), color=look["color"], alpha=0.15, linewidth=0)
        o = self.options
        by_step.set(
            xlabel="step", ylabel=f"training loss (mean of {WINDOW} logged steps)", yscale="log", title="loss by step"
        )
        for axis in by_bytes:
            axis.set(xlabel="MB sent by each worker", xscale="log", yscale="log", title="loss by bytes sent")
        by_step.legend()
        figure.suptitle(
            f"{o['data']}, {o['model']}, {o['workers']} workers, {o['optimizer']} {o['lr']:g}, ratio {o['ratio']:g}; "
            f"{self.labels}; {len(o['seeds'])} seed(s), band: min to max",
            fontsize=10,
        )
        path = self.folder / "compare.png"
        save(figure, path)
        return path


HEAD = ["method", "final loss", "test accuracy", "lane B", "code B", "sent B", "vs f32", "vs bf16", "ms/step"]
NOTES = """\
Per worker and step. lane B: bytes it contributes to the collective. code B: the best code we have for that message.
sent B: what the compiled program sends from one device (ring model, read by jaxcomp.ledger, with the loss of
each worker, 4 bytes).
vs f32, vs bf16: sent B of the dense exchange divided by this one's. ms/step: median; all devices share this machine.
final loss: training loss, mean of the last 5 logged steps. ±: standard deviation over seeds."""
