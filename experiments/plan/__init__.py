"""The planner in the network laboratory: what it advises, and what its advice costs against the best candidate.

One process for each worker, each on a host of its own (`experiments.lib.netlab`). `plan` makes a plan for each cell of
a grid and prints its table: rates, numbers of workers, model sizes, load on one worker. `plan regret` then runs every
candidate in each cell, too. Written to runs/NAME: config.json, results.json (a row for each cell, as soon as it is
done), and by `plan regret` table.md and regret.png.
"""

import argparse
import contextlib
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.lib.cli import Parser, at_least, choose_new, existing_folder, one_thread, positive
from experiments.lib.folders import run_options, start_run, write_json
from experiments.lib.netlab import delay_of, laboratory, rate_of
from experiments.lib.pool import Pool
from experiments.lib.report import new_console

__all__ = ["main"]


def parser() -> Parser:
    p = Parser(prog="python -m experiments plan", description=(__doc__ or "").split("\n\n")[0])
    p.add_argument(
        "what", nargs="?", choices=("advise", "regret"), default="advise", help="one plan, or a grid of them"
    )
    rates = ["10mbit", "100mbit", "1gbit", "none"]
    p.add_argument(
        "--rates", type=rate_of, nargs="+", default=rates, metavar="RATE", help="of the links; none: no limit"
    )
    p.add_argument("--workers", type=at_least(2), nargs="*", default=[2, 4], metavar="N", help="processes")
    p.add_argument(
        "--sizes", type=at_least(1000), nargs="+", default=[100_000, 400_000], metavar="D", help="parameters"
    )
    p.add_argument("--loads", type=int, choices=(0, 1), nargs="+", default=[0, 1], help="1: one worker's core is busy")
    p.add_argument(
        "--delays", type=delay_of, nargs="+", default=[0.0], metavar="TIME", help="of a link, each way; needs netem"
    )
    p.add_argument(
        "--one-process",
        type=at_least(2),
        nargs="*",
        default=[],
        metavar="N",
        help="after these: devices of one process, which exchange in memory, without rates and delays",
    )
    p.add_argument("--batch", type=at_least(1), default=16, help="examples of each worker in a step")
    p.add_argument("--seconds", type=positive, default=60.0, help="that a plan may measure")
    p.add_argument("--tried", type=at_least(0), default=3, help="candidates that it runs besides the best dense one")
    p.add_argument("--rounds", type=at_least(2), default=40, help="of all candidates in turn; the median counts")
    p.add_argument("--all", action="store_true", help="all default candidates, in place of six")
    p.add_argument("--of", nargs="+", default=None, metavar="RUN", help="report what these runs measured")
    run_options(p, "plan")
    p.add_argument("--worker", type=int, default=None, help=argparse.SUPPRESS)
    p.add_argument("--address", default=None, help=argparse.SUPPRESS)
    return p


def main(arguments: Sequence[str]) -> int:
    o = parser().parse_args(arguments)
    if o.worker is not None:
        from experiments.plan.worker import work

        work(o.address, o.workers[0], o.worker)
        return 0

    from experiments.plan.results import link_of, report

    o.rates = [rate_of(rate) if isinstance(rate, str) else rate for rate in o.rates]
    console = new_console()
    folder = choose_new(o.runs, o.name, "plan")
    one_thread()
    start_run(folder, vars(o))
    rows: list[dict[str, Any]] = []
    try:
        for row in cells(o, console) if o.of is None else known(o.of):
            rows.append(row)
            write_json(folder / "results.json", rows)
            if o.what == "advise":
                where = f"{row['workers']} workers, {row['entries']:,} parameters, {link_of(row)}"
                console.print(f"\n{where}\n{row['table']}\n\n{row['verdict']}", highlight=False, soft_wrap=True)
    except KeyboardInterrupt:
        console.print(f"interrupted; {folder} has what was measured")
        return 130
    if o.what == "regret":
        report(console, rows, folder)
    return 0


def known(folders: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The rows of earlier runs."""
    for folder in folders:
        yield from json.loads((existing_folder(Path(folder)) / "results.json").read_text())


def cells(o: Any, console: Any) -> Iterator[dict[str, Any]]:
    """A row for each cell. Programs are compiled once for each size and number of workers."""
    from experiments.plan.results import link_of

    slow = list(itertools.product(dict.fromkeys(o.rates), dict.fromkeys(o.delays)))
    grid = [(n, slow) for n in dict.fromkeys(o.workers)] + [(n, None) for n in dict.fromkeys(o.one_process)]
    for workers, links in grid:
        with contextlib.ExitStack() as context:
            lab = None if links is None else context.enter_context(laboratory(workers, delay=max(o.delays)))
            pool = context.enter_context(one_process(workers) if lab is None else pool_in(lab))
            shape = (lambda *_: None) if lab is None else lab.shape
            pool.hear()
            for size in dict.fromkeys(o.sizes):
                shape()
                entries = pool.ask(what="task", size=size, batch=o.batch, all_candidates=o.all)[0]
                for load, (rate, delay) in itertools.product(dict.fromkeys(o.loads), links or [(None, 0.0)]):
                    pool.ask(what="load", on=bool(load))
                    shape(rate, delay)
                    row = {"workers": workers, "entries": entries, "rate": rate, "load": load, "delay": delay}
                    row |= {"one_process": links is None}
                    with contextlib.ExitStack() as undo:
                        undo.callback(pool.ask, what="load", on=False)
                        row |= pool.ask(1800.0, what="plan", seconds=o.seconds, tried=o.tried)[0]
                        if o.what == "regret":
                            row["rounds"] = pool.ask(1800.0, what="run", seconds=o.seconds, rounds=o.rounds)[0]
                            row["measured"] = {name: float(np.median(each)) for name, each in row["rounds"].items()}
                            best = min(row["measured"], key=row["measured"].get)
                            said = f"advised {row['chosen']}, best {best}"
                            where = f"{workers} workers, {entries:,}, {link_of(row)}, load {load}"
                            console.print(f"{where}: {said}", highlight=False)
                    yield row


def pool_in(lab: Any) -> Pool:
    """A worker on each host."""
    from experiments import network

    return network.pool_in(lab, "plan")


def one_process(workers: int) -> Pool:
    """All workers in one process, on as many threads as it likes: fewer than devices would wait for each other."""
    from experiments.network import SETTINGS
    from experiments.plan.worker import ONE_PROCESS

    options = ["--workers", str(workers), "--address", ONE_PROCESS, "--worker", "0"]
    settings = {name: value for name, value in SETTINGS.items() if name != "NPROC"}
    return Pool([[sys.executable, "-m", "experiments", "plan", *options]], {"JAX_PLATFORMS": "cpu", **settings})
