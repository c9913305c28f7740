"""The planner in the network laboratory: what it advises, and what its advice costs against the best candidate.

One process for each worker, each on a host of its own (`experiments.lib.netlab`). `plan` makes a plan for each cell of
a grid and prints its table: rates, numbers of workers, model sizes, load on one worker. `plan regret` then runs every
candidate in each cell, too. Written to runs/NAME: config.json, results.json (a row for each cell, as soon as it is
done), and by `plan regret` table.md and regret.png.
"""

import contextlib
import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from experiments import network
from experiments.lib.cli import Parser, UserError, at_least, common, one_thread, positive
from experiments.lib.netlab import add_rates, delay_of, laboratory
from experiments.lib.pool import ONE_PROCESS, Pool, Tasks, serve
from experiments.lib.run import Run, parser_of
from experiments.plan.results import link_of, report
from experiments.plan.worker import Sweep, Task

__all__ = ["main"]

COMPILING = 120.0  # most seconds of a plan that compiles what later ones measure
LONGEST = 1800.0  # seconds that an answer may take
TRIED = 3  # candidates that a plan runs besides f32 and the best dense


def parser() -> Parser:
    p = parser_of("plan", __doc__)
    what = "one plan, or a grid of them"
    p.add_argument("what", nargs="?", choices=("advise", "regret"), default="advise", help=what)
    add_rates(p, "10mbit 100mbit 1gbit none")
    what = "of a link, each way; needs netem"
    p.add_argument("--delays", type=delay_of, nargs="+", default=[0.0], metavar="TIME", help=what)
    p.add_argument("--workers", type=at_least(2), nargs="*", default=[2, 4], metavar="N", help="processes")
    what = "after these: devices of one process, which exchange in memory, without rates and delays"
    p.add_argument("--one-process", type=at_least(2), nargs="*", default=[], metavar="N", help=what)
    sizes: dict[str, Any] = {"nargs": "+", "metavar": "N", "help": "parameters"}
    p.add_argument("--sizes", type=at_least(1000), default=[100_000, 400_000], **sizes)
    p.add_argument("--loads", type=int, choices=(0, 1), nargs="+", default=[0, 1], help="1: one worker's core is busy")
    p.add_argument("--seconds", type=positive, default=60.0, help="that a plan may measure; `regret` compiles before")
    p.add_argument("--rounds", type=at_least(2), default=40, help="of all candidates in turn; the median counts")
    p.add_argument("--all", action="store_true", help="all default candidates, buckets among them, in place of six")
    p.add_argument(
        "--max-every", type=at_least(1), default=1, metavar="H", help="local updates with up to H steps, too"
    )
    what = "of workers, for hierarchies: a mesh of two axes; divides the numbers of workers"
    p.add_argument("--groups", type=at_least(1), default=1, metavar="G", help=what)
    common(p, "worker", "address", batch=16)
    return p


def main(arguments: Sequence[str]) -> int:
    run, rows = Run(parser(), arguments, "plan"), []
    o = run.options
    if o.worker is not None:
        serve(o.address, o.workers[0], o.worker, Tasks(task=Task, sweep=Sweep))
        return 0

    if wrong := [n for n in (*o.workers, *o.one_process) if o.groups > 1 and (n % o.groups or n == o.groups)]:
        raise UserError(f"--groups must divide the numbers of workers and be smaller; got {o.groups} and {wrong[0]}")
    one_thread()
    for row in cells(o):
        where = f"{row['workers']} workers, {row['entries']:,} parameters, {link_of(row)}"
        rows.append(row)
        run.keep(rows)
        if o.what == "advise":
            run.console.print(f"\n{where}\n{row['table']}\n\n{row['verdict']}", soft_wrap=True)
        else:
            best = min(row["measured"], key=row["measured"].get)
            run.say(f"{where}, load {row['load']}: advised {row['chosen']}, best {best}")
    if o.what == "regret":
        report(run, rows)
    return 0


def cells(o: Any) -> Iterator[dict[str, Any]]:
    """A row for each cell. Programs are compiled once for each size and number of workers."""
    slow = list(itertools.product(dict.fromkeys(o.rates), dict.fromkeys(o.delays)))
    grid = [(n, slow) for n in dict.fromkeys(o.workers)] + [(n, None) for n in dict.fromkeys(o.one_process)]
    for workers, links in grid:
        with contextlib.ExitStack() as context:
            lab = None if links is None else context.enter_context(laboratory(workers, delay=max(o.delays)))
            pool = context.enter_context(one_process(workers) if lab is None else network.pool_in(lab, "plan"))
            ask = lambda what, pool=pool, **request: pool.ask(LONGEST, what=what, **request)[0]
            shape = (lambda *_: None) if lab is None else lab.shape
            pool.hear()
            for size in dict.fromkeys(o.sizes):
                shape()
                entries = ask("task", size=size, batch=o.batch, of_all=o.all, max_every=o.max_every, groups=o.groups)
                if o.what == "regret":  # its plans have few seconds: they are for measuring, not for compiling
                    ask("plan", seconds=COMPILING, tried=100)
                for load, (rate, delay) in itertools.product(dict.fromkeys(o.loads), links or [(None, 0.0)]):
                    shape(rate, delay)
                    row = {"workers": workers, "entries": entries, "rate": rate, "load": load, "delay": delay}
                    row |= {"one_process": links is None}
                    ask("load", on=bool(load))
                    with contextlib.ExitStack() as undo:
                        undo.callback(ask, "load", on=False)
                        row |= ask("plan", seconds=o.seconds, tried=TRIED)
                        if o.what == "regret":
                            row["rounds"] = ask("run", seconds=o.seconds, rounds=o.rounds)
                            row["measured"] = {name: float(np.median(each)) for name, each in row["rounds"].items()}
                    yield row


def one_process(workers: int) -> Pool:
    """All workers in one process, on as many threads as it likes: fewer than devices would wait for each other."""
    options = ["--workers", str(workers), "--address", ONE_PROCESS, "--worker", "0"]
    settings = {name: value for name, value in network.SETTINGS.items() if name != "NPROC"}
    return Pool([[sys.executable, "-m", "experiments", "plan", *options]], {"JAX_PLATFORMS": "cpu", **settings})
