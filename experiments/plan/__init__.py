"""The planner in the network laboratory: what it advises, and what its advice costs against the best candidate.

One process for each worker, each on a host of its own (`experiments.lib.netlab`). `plan` makes a plan for each cell of
a grid and prints its table: rates, numbers of workers, model sizes, load on one worker. `plan regret` then runs every
candidate in each cell, too. Written to runs/NAME: config.json, results.json (a row for each cell, as soon as it is
done), and by `plan regret` table.md and regret.png.
"""

import contextlib
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.lib.cli import Parser, at_least, common, existing_folder, one_thread, positive
from experiments.lib.netlab import add_rates, delay_of, laboratory
from experiments.lib.pool import ONE_PROCESS, Pool, serve
from experiments.lib.run import Run, parser_of

__all__ = ["main", "pool_in"]

COMPILING = 120.0  # most seconds of a plan that compiles what later ones measure


def parser() -> Parser:
    p = parser_of("plan", __doc__)
    what = "one plan, or a grid of them"
    p.add_argument("what", nargs="?", choices=("advise", "regret"), default="advise", help=what)
    add_rates(p, "10mbit 100mbit 1gbit none")
    what = "of a link, each way; needs netem"
    p.add_argument("--delays", type=delay_of, nargs="+", default=[0.0], metavar="TIME", help=what)
    some: dict[str, Any] = {"nargs": "+", "metavar": "N"}
    p.add_argument("--workers", type=at_least(2), nargs="*", default=[2, 4], metavar="N", help="processes")
    what = "after these: devices of one process, which exchange in memory, without rates and delays"
    p.add_argument("--one-process", type=at_least(2), nargs="*", default=[], metavar="N", help=what)
    p.add_argument("--sizes", type=at_least(1000), default=[100_000, 400_000], help="parameters", **some)
    p.add_argument("--loads", type=int, choices=(0, 1), nargs="+", default=[0, 1], help="1: one worker's core is busy")
    p.add_argument("--seconds", type=positive, default=60.0, help="that a plan may measure; `regret` compiles before")
    p.add_argument(
        "--tried", type=at_least(0), default=3, help="candidates that it runs besides f32 and the best dense"
    )
    p.add_argument("--rounds", type=at_least(2), default=40, help="of all candidates in turn; the median counts")
    p.add_argument("--all", action="store_true", help="all default candidates, in place of six")
    p.add_argument("--of", nargs="+", default=None, metavar="RUN", help="report what these runs measured")
    common(p, "worker", "address", batch=16)
    return p


def main(arguments: Sequence[str]) -> int:
    run, rows = Run(parser(), arguments, "plan"), []
    o = run.options
    if o.worker is not None:
        from experiments.plan.worker import Worker

        serve(o.address, o.workers[0], o.worker, Worker(o.worker))
        return 0

    from experiments.plan.results import link_of, report

    one_thread()
    try:
        for row in cells(o) if o.of is None else known(o.of):
            where = f"{row['workers']} workers, {row['entries']:,} parameters, {link_of(row)}"
            rows.append(row)
            run.keep(rows)
            if o.what == "advise":
                run.console.print(f"\n{where}\n{row['table']}\n\n{row['verdict']}", highlight=False, soft_wrap=True)
            else:
                best = min(row["measured"], key=row["measured"].get)
                run.say(f"{where}, load {row['load']}: advised {row['chosen']}, best {best}")
    except KeyboardInterrupt:
        run.say(f"interrupted; {run.folder} has what was measured")
        return 130
    if o.what == "regret":
        report(run, rows)
    return 0


def known(folders: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The rows of earlier runs."""
    for folder in folders:
        yield from json.loads((existing_folder(Path(folder)) / "results.json").read_text())


def cells(o: Any) -> Iterator[dict[str, Any]]:
    """A row for each cell. Programs are compiled once for each size and number of workers."""
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
                if o.what == "regret":  # its plans have few seconds: they are for measuring, not for compiling
                    pool.ask(1800.0, what="plan", seconds=COMPILING, tried=100)
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
                    yield row


def pool_in(lab: Any) -> Pool:
    """A worker on each host."""
    from experiments import network

    return network.pool_in(lab, "plan")


def one_process(workers: int) -> Pool:
    """All workers in one process, on as many threads as it likes: fewer than devices would wait for each other."""
    from experiments.network import SETTINGS

    options = ["--workers", str(workers), "--address", ONE_PROCESS, "--worker", "0"]
    settings = {name: value for name, value in SETTINGS.items() if name != "NPROC"}
    return Pool([[sys.executable, "-m", "experiments", "plan", *options]], {"JAX_PLATFORMS": "cpu", **settings})
