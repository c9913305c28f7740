"""Trains one method with one seed: in one process, in several on this machine, or on a cluster.

One process has as many virtual devices as there are workers. --processes N starts N processes on this machine. With
--coordinator, --num-processes and --process-id this process is one of many, started by somebody else; with --cluster
it finds the others as JAX does (SLURM, Open MPI, Kubernetes, TPU pods, ...). All need the folder --runs in common.
Each process keeps the images of its own workers; process 0 alone prints and writes, but for checkpoints.
Writes to runs/NAME: config.json, metrics.jsonl (a line for each logged step), results.json, checkpoints, and logs.
"""

import argparse
import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.lib import processes
from experiments.lib.cli import Parser, UserError, at_least, fraction, one_thread, positive
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
from experiments.lib.joining import join
from experiments.lib.launch import die_with_parent
from experiments.lib.report import new_console, progress_bar

__all__ = ["main"]

# Where it runs, not what: none of it is kept with the run.
PLACES = (
    "processes",
    "coordinator",
    "num_processes",
    "process_id",
    "patience",
    "cluster",
    "logs",
    "resume",
    "name",
    "runs",
)


def parser() -> Parser:
    from experiments.lib.data import DATASETS
    from experiments.lib.methods import METHODS
    from experiments.lib.models import MODELS
    from experiments.lib.training import OPTIMIZERS
    from jaxcomp.exchange.routes import VIAS

    known = "; ".join(f"{name}: {method.what}" for name, method in METHODS.items())
    p = Parser(prog="python -m experiments train", description=(__doc__ or "").split("\n\n")[0])
    what = p.add_argument_group("what is trained")
    what.add_argument("--data", choices=DATASETS, default="digits", help="digits come with scikit-learn")
    what.add_argument("--data-dir", type=Path, default=None, help="folder with the files of --data mnist")
    what.add_argument("--model", choices=MODELS, default="mlp", help="architecture")
    what.add_argument("--method", choices=METHODS, default="sidco", metavar="METHOD", help=known)
    what.add_argument("--via", choices=VIAS, default="auto", help="route of messages, as for jc.compressed_mean")
    what.add_argument("--ratio", type=fraction, default=0.01, help="share of entries that sparse methods keep")
    what.add_argument("--levels", type=at_least(1), default=7, help="levels of dithering; 7 fill 4 bits")
    what.add_argument("--steps", type=at_least(1), default=300, help="steps")
    what.add_argument("--batch", type=at_least(1), default=32, help="examples of each worker in a step")
    what.add_argument("--optimizer", choices=OPTIMIZERS, default="adam", help="what follows the compressed mean")
    what.add_argument("--lr", type=positive, default=1e-3, help="learning rate")
    what.add_argument("--alpha", type=positive, default=None, help="Dirichlet label split; without it IID")
    what.add_argument("--seed", type=at_least(0), default=0, help="of data, model and compression")
    what.add_argument(
        "--nonfinite",
        choices=("mask", "skip"),
        default="mask",
        help="NaN and infinite entries of a gradient: take them as zero, or skip the step on all workers",
    )
    what.add_argument("--spoil", type=at_least(1), default=None, help=argparse.SUPPRESS)  # a step whose batch holds NaN
    where = p.add_argument_group("where")
    where.add_argument("--workers", type=at_least(1), default=None, help="one for each process, or 4 in a single one")
    where.add_argument("--processes", type=at_least(1), default=1, help="processes to start on this machine")
    where.add_argument("--coordinator", metavar="HOST:PORT", default=None, help="address of process 0")
    where.add_argument("--num-processes", type=at_least(1), default=None, help="processes at the coordinator")
    where.add_argument("--process-id", type=at_least(0), default=None, help="number of this one")
    where.add_argument(
        "--patience", type=positive, default=300.0, metavar="SECONDS", help="how long to wait for the other processes"
    )
    where.add_argument("--cluster", action="store_true", help="find the other processes as JAX does")
    where.add_argument("--logs", type=Path, default=None, help=argparse.SUPPRESS)
    keep = p.add_argument_group("what is kept")
    run_options(keep, "train")
    keep.add_argument("--log-every", type=at_least(1), default=10, help="steps between lines of metrics.jsonl")
    keep.add_argument("--test-every", type=at_least(0), default=0, help="steps between tests; 0: only at the end")
    keep.add_argument("--checkpoint-every", type=at_least(1), default=100, help="steps between checkpoints")
    keep.add_argument(
        "--check-every", type=at_least(0), default=0, help="steps between comparisons of the workers' copies; 0: none"
    )
    keep.add_argument(
        "--resume", action="store_true", help="continue --name with its options; --workers may be other than before"
    )
    return p


def main(arguments: Sequence[str]) -> int:
    one_thread()  # for bitwise the same sums, however the workers are spread over processes
    options = vars(parser().parse_args(arguments))
    place = {key: options.pop(key) for key in PLACES}
    check_place(place)
    given = given_in(parser(), arguments)
    if place["processes"] > 1:
        return start(arguments, options, given, place)
    if place["coordinator"] is None and not place["cluster"]:
        try:
            return Run(options, given, place).go(processes.stop_on_signals(alone=True))
        except KeyboardInterrupt:  # twice, while it was compiling
            return 130
    return take_part(options, given, place)


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


def find_run(options: dict[str, Any], given: dict[str, Any], place: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
    """The folder of the run, and its options; writes nothing."""
    if place["logs"] is not None:  # who started this process has chosen it
        folder = place["runs"] / place["name"]
    else:
        folder = choose_folder(place["runs"], place["name"], place["resume"], "train")
    return folder, resumed(folder, options, given, parser(), free=["workers"]) if place["resume"] else options


def workers_of(options: dict[str, Any], number: int) -> int:
    """Workers of so many processes, equally many on each."""
    workers = options["workers"] or (number if number > 1 else 4)
    if workers % number:
        raise UserError(
            f"{number} processes cannot share {workers} workers equally; use --workers {number}, or a multiple of it"
        )
    return workers


def start(arguments: Sequence[str], options: dict[str, Any], given: dict[str, Any], place: dict[str, Any]) -> int:
    """Starts the processes, and waits for them."""
    _, options = find_run(options, given, place)
    workers = workers_of(options, place["processes"])
    with claimed(place["runs"], place["name"], place["resume"], "train") as folder:
        name = str(folder.relative_to(place["runs"]))
        words = ["train", *arguments, "--processes", "1", "--workers", str(workers), "--name", name]
        return supervise(words, folder, place)


def supervise(words: list[str], folder: Path, place: dict[str, Any]) -> int:
    """Has processes run with these words, which write to the folder."""
    try:
        processes.Group(words, place["processes"], folder / "logs").wait()
    except KeyboardInterrupt:
        begun = (folder / "config.json").is_file()
        print("interrupted" + (f"; continue with --resume{how_to_find(place['runs'], folder)}" if begun else ""))
        return 130
    except processes.Failed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        if not (folder / "config.json").is_file():  # nothing has begun
            shutil.rmtree(folder, ignore_errors=True)
    return 0


def take_part(options: dict[str, Any], given: dict[str, Any], place: dict[str, Any]) -> int:
    """One process of many."""
    if place["logs"] is not None:
        die_with_parent()
    run, number = None, place["process_id"] or 0
    try:
        join(place["coordinator"], place["num_processes"], place["process_id"], place["patience"], place["logs"])
        run = Run(options, given, place)
        return run.go(processes.stop_on_signals(alone=False))
    except KeyboardInterrupt:
        os._exit(130)  # at once: JAX would wait for the others
    except Exception as error:
        processes.leave(place["logs"] or (run and run.folder / "logs"), run.number if run else number, error)
        raise


class Run:
    """One run, as one process sees it."""

    def __init__(self, options: dict[str, Any], given: dict[str, Any], place: dict[str, Any]):
        self.place, self.together = place, place["coordinator"] is not None or place["cluster"]
        self.options: dict[str, Any] = options
        self.given = given
        self.folder = Path()
        self.parts: list[np.ndarray] = []  # examples of each worker
        self.number = place["process_id"] or 0

    def go(self, stop_after: Callable[[int], bool]) -> int:
        with contextlib.ExitStack() as self.claims:
            try:
                return self.go_in_folder(stop_after)
            except Exception:
                with goes_on(self.place["runs"], self.folder):
                    raise

    def go_in_folder(self, stop_after: Callable[[int], bool]) -> int:
        import jax

        import jaxcomp as jc
        from experiments.lib.data import load, split
        from experiments.lib.job import Stopped
        from experiments.lib.methods import algorithm_for
        from experiments.lib.training import find_mesh, own_workers

        place = self.place
        self.folder, self.options = find_run(self.options, self.given, place)
        count = place["num_processes"] or 1
        self.mesh = find_mesh(None if place["cluster"] else workers_of(self.options, count), count)
        self.number = jax.process_index()
        self.use_workers()
        o = self.options
        self.folder, finished = self.agree_on_folder()
        self.journal = Journal(self.folder, writes=self.number == 0)
        console = self.console()
        if finished:
            console.print(f"{self.folder} is finished: {finished}", highlight=False, soft_wrap=True)
            return 0

        def choose(labels):
            self.parts = split(labels, o["workers"], o["alpha"], o["seed"])
            return np.sort(np.concatenate([self.parts[i] for i in own_workers(self.mesh)]))

        self.data = load(o["data"], o["data_dir"], choose, test=self.number == 0)
        algorithm = algorithm_for(o["method"], o["ratio"], o["levels"], o["via"])
        if self.number == 0:  # only now, so that a wrong option leaves nothing behind
            self.folder.mkdir(parents=True, exist_ok=True)
            write_config(self.folder, o)
        console.print(self.title(), highlight=False, soft_wrap=True)
        try:
            row = self.train(algorithm, console, stop_after)
        except KeyboardInterrupt as interrupt:
            if self.together and not isinstance(interrupt, Stopped):
                raise
            if place["logs"] is None:
                console.print(f"interrupted; continue with {self.how_to_resume()}", highlight=False, soft_wrap=True)
            return 130
        except jc.ReplicaDrift as error:
            raise UserError(f"{error}; go back to the newest checkpoint with {self.how_to_resume()}") from None
        if self.number == 0:
            row |= {"processes": jax.process_count(), "workers": o["workers"], "via": o["via"]}
            write_json(self.folder / "results.json", [row])
            console.print(said(row), highlight=False, soft_wrap=True)
        return 0

    def use_workers(self) -> None:
        """Takes the workers that there are; on a cluster nobody else says how many."""
        asked = self.given.get("workers")
        if asked not in (None, self.mesh.size):
            raise UserError(f"--workers {asked}: the processes of this cluster have {self.mesh.size} devices together")
        self.options["workers"] = self.mesh.size

    def agree_on_folder(self) -> tuple[Path, str]:
        """The folder, and what came out if the run is finished; process 0 decides, and locks it."""

        def decide() -> list[str]:
            place = self.place
            if place["logs"] is None:  # else who started this process has locked it
                found = claimed(place["runs"], place["name"], place["resume"], "train")
                self.folder = self.claims.enter_context(found)
            results = self.folder / "results.json"
            return [str(self.folder), said(read_results(results)[0]) if results.is_file() else ""]

        folder, finished = processes.agree(decide)
        return Path(folder), finished

    def how_to_resume(self) -> str:
        return f"--resume{how_to_find(self.place['runs'], self.folder)}"

    def console(self) -> Any:
        return new_console(quiet=self.number > 0)

    def title(self) -> str:
        import jax

        o, count = self.options, jax.process_count()
        spread = f" in {count} processes" if count > 1 else ""
        labels = "IID" if o["alpha"] is None else f"Dirichlet({o['alpha']:g})"
        return (
            f"{o['data']}, {o['model']}, {o['workers']} workers{spread} on {self.mesh.devices.flat[0].platform}, "
            f"{o['steps']} steps of {o['batch']} examples each, {labels}; writing to {self.folder}"
        )

    def train(self, algorithm: Any, console: Any, stop_after: Callable[[int], bool]) -> dict[str, Any]:
        from experiments.lib.job import Job, train_one
        from experiments.lib.models import MODELS
        from experiments.lib.training import Trainer

        o = self.options
        with progress_bar(console) as bar:
            task = bar.add_task(f"{o['method']}, seed {o['seed']}", total=o["steps"], now="compiling")
            args = (algorithm, MODELS[o["model"]], self.data, self.mesh, o["optimizer"], o["lr"], o["batch"])
            trainer = Trainer(*args, via=o["via"], nonfinite=o["nonfinite"], spoil=o["spoil"])
            show = lambda step, now: bar.update(task, completed=step, now=now)
            job = Job(o["method"], o["seed"])
            say = lambda text: console.print(text, highlight=False)
            return train_one(trainer, job, o, self.folder, self.journal, self.parts, show, stop_after, say)


def said(row: dict[str, Any]) -> str:
    """A row of results in words."""
    return (
        f"{row['method']}, seed {row['seed']}: loss {row['loss']:.4f}, test accuracy {row['accuracy']:.4f}, "
        f"{row['sent_bytes']:,.0f} B sent per step, {1e3 * row['seconds']:.1f} ms per step, "
        f"parameters {row['sha256'][:12]}, optimizer state {row['sha256_optimizer'][:12]}"
    )
