"""Trains one method with one seed: in one process, in several on this machine, or on a cluster.

One process has as many virtual devices as there are workers. --processes N starts N processes on this machine. With
--coordinator, --num-processes and --process-id this process is one of many, started by somebody else; with --cluster
it finds the others as JAX does (SLURM, Open MPI, Kubernetes, TPU pods, ...). All need the folder --runs in common.
Each process keeps the images of its own workers; process 0 alone prints and writes, but for checkpoints.
Writes to runs/NAME: config.json, metrics.jsonl (a line for each logged step), results.json, and checkpoints.
"""

import argparse
import contextlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxcomp as jc
from experiments.lib import folders, processes
from experiments.lib.cli import Parser, UserError, at_least, common, one_thread, positive
from experiments.lib.data import DATASETS, load, split
from experiments.lib.folders import Journal, how_to_find, run_options
from experiments.lib.job import Job, Stopped, train_one
from experiments.lib.methods import METHODS, algorithm_for
from experiments.lib.models import MODELS
from experiments.lib.report import new_console, progress_bar
from experiments.lib.run import parser_of
from experiments.lib.training import OPTIMIZERS, Trainer, find_mesh, own_workers
from jaxcomp.exchange.routes import VIAS

__all__ = ["LINE", "MANY", "RESULT", "Run", "main", "parser"]

MANY = ["dense-f32", "dense-bf16", "top-k", "sidco", "dithering", "diana"]  # methods, where several are trained

# Where it runs, not what: none of it is kept with the run.
PLACES = ("processes", "coordinator", "num_processes", "process_id", "patience", "cluster", "resume")
PLACES += ("name", "runs")

# What is read again of a line of metrics.jsonl, and of a row of results.json.
LINE: dict[str, type] = {"method": str} | dict.fromkeys(("seed", "step"), int)
LINE |= dict.fromkeys(("loss", "seconds", "sent_bytes", "lane_bytes", "code_bits"), float)
RESULT = {key: kind for key, kind in LINE.items() if key != "step"} | {"accuracy": float, "parameters": int}
RESULT |= dict.fromkeys(("sha256", "sha256_optimizer"), str)


def parser(kind: str = "train", about: str | None = __doc__) -> Parser:
    """The options of `train`, or of what trains many: --methods and --seeds in place of --method and --seed."""
    known = "; ".join(f"{name}: {method.what}" for name, method in METHODS.items())
    methods: dict[str, Any] = {"choices": METHODS, "metavar": "METHOD", "help": known}
    p = parser_of(kind, about)
    what = p.add_argument_group("what is trained")
    what.add_argument("--data", choices=DATASETS, default="digits", help="digits come with scikit-learn")
    common(what, "data-dir")
    what.add_argument("--model", choices=MODELS, default="mlp", help="architecture")
    if kind == "train":
        what.add_argument("--method", default="sidco", **methods)
        common(what, "seed")
    else:
        what.add_argument("--methods", nargs="+", default=MANY, **methods)
        common(what, seeds=[0, 1])
    what.add_argument("--via", choices=VIAS, default="auto", help="route of messages, as for jc.compressed_mean")
    common(what, "ratio", "levels", "steps", "batch", "lr")
    what.add_argument("--optimizer", choices=OPTIMIZERS, default="adam", help="what follows the compressed mean")
    what.add_argument("--alpha", type=positive, default=None, help="Dirichlet label split; without it IID")
    nonfinite = "NaN and infinite entries of a gradient: take them as zero, or skip the step on all workers"
    what.add_argument("--nonfinite", choices=("mask", "skip"), default="mask", help=nonfinite)
    what.add_argument("--spoil", type=at_least(1), default=None, help=argparse.SUPPRESS)  # a step whose batch holds NaN
    where = p.add_argument_group("where")
    common(where, workers={"default": None, "help": "one for each process, or 4 in a single one"})
    where.add_argument("--processes", type=at_least(1), default=1, help="processes to start on this machine")
    where.add_argument("--coordinator", metavar="HOST:PORT", default=None, help="address of process 0")
    where.add_argument("--num-processes", type=at_least(1), default=None, help="processes at the coordinator")
    where.add_argument("--process-id", type=at_least(0), default=None, help="number of this one")
    patience = "seconds to wait for the other processes"
    where.add_argument("--patience", type=positive, default=300.0, metavar="SECONDS", help=patience)
    where.add_argument("--cluster", action="store_true", help="find the other processes as JAX does")
    keep = p.add_argument_group("what is kept")
    run_options(keep, kind)
    common(keep, "log-every", "checkpoint-every")
    keep.add_argument("--test-every", type=at_least(0), default=0, help="steps between tests; 0: only at the end")
    check = "steps between comparisons of the workers' copies; 0: none"
    keep.add_argument("--check-every", type=at_least(0), default=0, help=check)
    common(keep, resume={"help": "continue --name with its options; --workers may be other than before"})
    return p


def main(arguments: Sequence[str], of: type["Run"] | None = None) -> int:
    """of: what is run, where it is not a single training."""
    one_thread()  # for bitwise the same sums, however the workers are spread over processes
    run = (of or Run)(arguments)
    check_place(run.place)
    if run.place["processes"] > 1:
        return start(run)
    if not run.together:
        with processes.stopping(alone=True) as stop_after:
            return run.go(stop_after)
    with processes.or_die():
        processes.join(*(run.place[key] for key in ("coordinator", "num_processes", "process_id", "patience")))
        with processes.stopping(alone=False) as stop_after:
            return processes.farewell(run.go(stop_after))


def check_place(place: dict[str, Any]) -> None:
    """One way to find the other processes, and all that it needs."""
    trio = [place[key] is not None for key in ("coordinator", "num_processes", "process_id")]
    if any(trio) and not all(trio):
        raise UserError("--coordinator, --num-processes and --process-id belong together")
    if all(trio) and place["process_id"] >= place["num_processes"]:
        raise UserError(f"--process-id must be below --num-processes {place['num_processes']}")
    host, _, port = (place["coordinator"] or "localhost:1").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise UserError(f"--coordinator must be HOST:PORT with a port of 1 .. 65535; got {place['coordinator']}")
    if (place["processes"] > 1) + all(trio) + place["cluster"] > 1:
        raise UserError("choose one of --processes, --coordinator and --cluster")


def workers_of(options: dict[str, Any], number: int) -> int:
    """Workers of so many processes, equally many on each."""
    workers = options["workers"] or (number if number > 1 else 4)
    if workers % number:
        better = f"use --workers {number}, or a multiple of it"
        raise UserError(f"{number} processes cannot share {workers} workers equally; {better}")
    return workers


def start(run: "Run") -> int:
    """Starts the processes, and waits for them."""
    run.find()
    number = run.place["processes"]
    words = [run.kind, *run.arguments, "--processes", "1", "--workers", str(workers_of(run.options, number))]
    with folders.claimed(*run.where):
        pass  # what is wrong with options or the folder is said before they start
    group = processes.training_group(words, number)
    try:
        group.wait()
    except KeyboardInterrupt:
        if group.processes[0].returncode not in (0, processes.STOPPED):  # it has not said how it ended
            begun = run.place["name"] and (run.folder / "config.json").is_file()
            found = how_to_find(run.place["runs"], run.folder)
            lost = f": what followed the newest checkpoint is lost; continue with --resume{found}"
            print(f"interrupted{lost if begun else ''}", file=sys.stderr)
        return processes.STOPPED
    except processes.Failed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


class Run:
    """One run, as one process sees it: jobs of a method and a seed each, here a single one."""

    kind = "train"
    parser = staticmethod(parser)

    def __init__(self, arguments: Sequence[str]):
        self.arguments, self.options = arguments, vars(self.parser().parse_args(arguments))
        self.place = {key: self.options.pop(key) for key in PLACES}
        self.together = self.place["coordinator"] is not None or self.place["cluster"]
        self.where = (self.place["runs"], self.place["name"], self.place["resume"], self.kind)
        self.asked = self.options["workers"]
        self.results: list[dict[str, Any]] = []  # of process 0, a row for each finished job

    def jobs(self) -> list[Job]:
        return [Job(self.options["method"], self.options["seed"])]

    def report(self) -> None:
        """What process 0 shows in the end."""

    def find(self) -> None:
        """The folder of the run, and its options; writes nothing."""
        self.folder = folders.choose_folder(*self.where)
        if self.place["resume"]:
            self.options = folders.resumed(self.folder, self.parser(), self.arguments, self.options, free=["workers"])

    def go(self, stop_after: Callable[[int], bool]) -> int:
        """Trains what is left; the exit status."""
        self.find()
        count = self.place["num_processes"] or 1
        self.mesh = find_mesh(None if self.place["cluster"] else workers_of(self.options, count), count)
        workers = self.options["workers"] = self.mesh.size  # on a cluster nobody else says how many there are
        if self.asked not in (None, workers):
            raise UserError(f"--workers {self.asked}: the processes of this cluster have {workers} devices together")
        self.number = jax.process_index()
        self.console = new_console(quiet=self.number > 0)
        with contextlib.ExitStack() as claims:
            left = self.agree_on_folder(claims)
            self.journal = Journal(self.folder, self.number == 0, LINE)
            with folders.goes_on(self.place["runs"], self.folder):
                status = self.train(left, stop_after) if left else 0
            if not left:
                alone = f": {said(self.results[0])}" if len(self.results) == 1 else ""
                self.say(f"{self.folder} is finished{alone}")
            self.report()
            return status

    def agree_on_folder(self, claims: contextlib.ExitStack) -> list[Job]:
        """The jobs that are left; process 0 decides on the folder, and locks it."""

        def decide() -> list[Any]:
            self.folder = claims.enter_context(folders.claimed(*self.where))
            self.results = folders.read_results(self.folder / "results.json", RESULT)
            done = {(row["method"], row["seed"]) for row in self.results}
            return [str(self.folder), [job for job in dict.fromkeys(self.jobs()) if job not in done]]

        folder, left = processes.agree(decide)
        self.folder = Path(folder)
        return [Job(*job) for job in left]

    def say(self, words: str) -> None:
        self.console.print(words, soft_wrap=True)

    @property
    def labels(self) -> str:
        """How labels are spread over the workers."""
        alpha = self.options["alpha"]
        return "IID" if alpha is None else f"Dirichlet({alpha:g})"

    def train(self, left: list[Job], stop_after: Callable[[int], bool]) -> int:
        """Trains these jobs; the exit status."""
        o, parts = self.options, {}  # seed -> examples of each worker

        def choose(labels):
            parts.update({job.seed: split(labels, o["workers"], o["alpha"], job.seed) for job in left})
            return np.unique(np.concatenate([part[i] for part in parts.values() for i in own_workers(self.mesh)]))

        data = load(o["data"], o["data_dir"], choose, test=self.number == 0)
        algorithms = {method: algorithm_for(method, o["ratio"], o["levels"], o["via"]) for method, _ in left}
        if self.number == 0:  # only now, so that a wrong option leaves nothing behind
            folders.write_config(self.folder, o)
        spread = f" in {jax.process_count()} processes" if jax.process_count() > 1 else ""
        self.say(
            f"{o['data']}, {o['model']}, {o['workers']} workers{spread} on {self.mesh.devices.flat[0].platform}, "
            f"{o['steps']} steps of {o['batch']} examples each, {self.labels}; writing to {self.folder}"
        )
        goes_on = f"--resume{how_to_find(self.place['runs'], self.folder)}"
        trainer, compiled = None, None
        try:
            with progress_bar(self.console) as bar:
                for job in left:
                    task = bar.add_task(f"{job.method}, seed {job.seed}", total=o["steps"], now="compiling")
                    if trainer is None or job.method != compiled:
                        trainer = Trainer(algorithms[job.method], MODELS[o["model"]], data, self.mesh, o)
                        compiled = job.method
                    show = lambda step, now, task=task: bar.update(task, completed=step, now=now)
                    where = (self.folder, self.journal, parts[job.seed])
                    row = train_one(trainer, job, o, *where, show, stop_after, self.say)
                    if self.number == 0:
                        places = {"processes": jax.process_count(), "workers": o["workers"], "via": o["via"]}
                        self.results.append(row | places)
                        folders.write_json(self.folder / "results.json", self.results)
                        self.say(said(row))
        except KeyboardInterrupt as interrupt:
            if self.together and not isinstance(interrupt, Stopped):
                raise
            self.say(f"interrupted; continue with {goes_on}")
            return 130
        except jc.replicas.ReplicaDrift as error:
            raise UserError(f"{error}; go back to the newest checkpoint with {goes_on}") from None
        return 0


def said(row: dict[str, Any]) -> str:
    """A row of results in words."""
    return (
        f"{row['method']}, seed {row['seed']}: loss {row['loss']:.4f}, test accuracy {row['accuracy']:.4f}, "
        f"{row['sent_bytes']:,.0f} B sent per step, {1e3 * row['seconds']:.1f} ms per step, "
        f"parameters {row['sha256'][:12]}, optimizer state {row['sha256_optimizer'][:12]}"
    )
