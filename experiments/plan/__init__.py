"""The planner in the network laboratory: what it advises, and what its advice costs against the best candidate.

One process for each worker, each on a host of its own (`experiments.lib.netlab`). `plan` makes a plan for each cell of
a grid and prints its table: rates, numbers of workers, model sizes, load on one worker. `plan regret` then runs every
candidate in each cell, too. Written to runs/NAME: config.json, results.json (a row for each cell, as soon as it is
done), and by `plan regret` table.md and regret.png.
"""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from experiments.lib.cli import Parser, at_least, common, one_thread, positive
from experiments.lib.netlab import add_rates, laboratory, rate_name
from experiments.lib.pool import Pool, serve
from experiments.lib.run import Run, parser_of

__all__ = ["main", "pool_in"]


def parser() -> Parser:
    p = parser_of("plan", __doc__)
    what = "one plan, or a grid of them"
    p.add_argument("what", nargs="?", choices=("advise", "regret"), default="advise", help=what)
    add_rates(p, "10mbit 100mbit 1gbit none")
    some: dict[str, Any] = {"nargs": "+", "metavar": "N"}
    p.add_argument("--workers", type=at_least(2), default=[2, 4], help="processes", **some)
    p.add_argument("--sizes", type=at_least(1000), default=[100_000, 400_000], help="parameters", **some)
    p.add_argument("--loads", type=int, choices=(0, 1), nargs="+", default=[0, 1], help="1: one worker's core is busy")
    p.add_argument("--seconds", type=positive, default=60.0, help="that a plan may measure")
    p.add_argument("--tried", type=at_least(0), default=2, help="candidates that it runs besides the best dense one")
    p.add_argument("--rounds", type=at_least(2), default=9, help="steps of each candidate; the median counts")
    p.add_argument("--all", action="store_true", help="all default candidates, in place of six")
    common(p, "worker", "address", batch=16)
    return p


def main(arguments: Sequence[str]) -> int:
    run, rows = Run(parser(), arguments, "plan"), []
    o = run.options
    if o.worker is not None:
        from experiments.plan.worker import Worker

        serve(o.address, o.workers[0], o.worker, Worker(o.worker))
        return 0

    from experiments.plan.results import report

    one_thread()
    try:
        for row in cells(o):
            where = f"{row['workers']} workers, {row['entries']:,} parameters, {rate_name(row['rate'])}"
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


def cells(o: Any) -> Iterator[dict[str, Any]]:
    """A row for each cell. Programs are compiled once for each size and number of workers."""
    for workers in dict.fromkeys(o.workers):
        with laboratory(workers) as lab, pool_in(lab) as pool:
            pool.hear()
            for size in dict.fromkeys(o.sizes):
                lab.shape()
                entries = pool.ask(what="task", size=size, batch=o.batch, all_candidates=o.all)[0]
                for load, rate in itertools.product(dict.fromkeys(o.loads), dict.fromkeys(o.rates)):
                    pool.ask(what="load", on=bool(load))
                    lab.shape(rate)
                    with contextlib.ExitStack() as undo:
                        undo.callback(lambda: pool.ask(what="load", on=False))
                        row = {"workers": workers, "entries": entries, "rate": rate, "load": load}
                        row |= pool.ask(1800.0, what="plan", seconds=o.seconds, tried=o.tried)[0]
                        if o.what == "regret":
                            row["measured"] = pool.ask(1800.0, what="run", seconds=o.seconds, rounds=o.rounds)[0]
                    yield row


def pool_in(lab: Any) -> Pool:
    """A worker on each host."""
    from experiments import network

    return network.pool_in(lab, "plan")
