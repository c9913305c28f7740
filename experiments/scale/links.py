"""Collectives among few real processes, fitted, against measured ones among more.

One process for each worker, each on a host of its own (`experiments.lib.netlab`). Every collective is swept over sizes
with 2, 3 and 4 workers; latency, bandwidth and the wait for a shared core are fitted to all of these at once, and what
the fit says of 6 and 8 workers is compared with what these take. They are measured twice, the second time with new
processes: a prediction can hardly come nearer than the two do. Writes to runs/NAME: config.json, results.json,
table.md.

The model is that of `jaxcomp.plan.links`; each message also waits for the n / cores - 1 other workers of its core:

    t = m (latency + wait max(n / cores - 1, 0)) + s / bandwidth

Of one sweep at one n a wait looks like latency; it takes sweeps at several n, fitted together, to tell them apart.
"""

import math
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.lib.cli import Parser, UserError, at_least, one_thread, positive
from experiments.lib.netlab import add_rates, laboratory, rate_name
from experiments.lib.run import Columns, Run, parser_of
from experiments.network import pool_in
from jaxcomp.exchange.links import KINDS
from jaxcomp.plan.links import Fit, Seconds, Timing, fit, least_squares, weights_of

__all__ = ["main"]

CHECKED = ("all_reduce", "all_gather", "all_to_all")
ENOUGH = 0.15  # error of a prediction that is still good
MOST = 6e5  # bytes of the largest operand
LONG = 0.02  # seconds; sizes whose bytes take less are apart: processes that share cores wait longer for those


def parser() -> Parser:
    p = parser_of("links", __doc__)
    p.add_argument("--fit", type=at_least(2), nargs="+", default=[2, 3, 4], metavar="N", help="workers, to fit to")
    p.add_argument("--check", type=at_least(2), nargs="+", default=[6, 8], metavar="N", help="workers, held back")
    add_rates(p, "10mbit 100mbit")
    p.add_argument("--seconds", type=positive, default=15.0, help="for the rounds of one collective at one rate")
    return p


def main(arguments: Sequence[str]) -> int:
    run, rows = Run(parser(), arguments, "links"), []
    if both := set(run.options.fit) & set(run.options.check):
        raise UserError(f"--check must be other numbers of workers than --fit; both have {min(both)}")
    one_thread()
    for row in measured(run):
        rows.append(row)
        run.keep(rows)
    found = compared(rows, set(run.options.fit), len(os.sched_getaffinity(0)))
    run.keep(rows + found)
    report(run, found)
    return 0


def measured(run: Run) -> Iterator[dict[str, Any]]:
    """A row for each number of workers, rate, collective and size; what is held back comes once more at the end."""
    o = run.options
    checked = list(dict.fromkeys(o.check))
    for workers in [*dict.fromkeys(o.fit), *checked, *checked]:
        with laboratory(workers) as lab, pool_in(lab, "plan") as pool:
            pool.hear()
            for rate in dict.fromkeys(o.rates):
                lab.shape(rate)
                run.say(f"{workers} workers, {rate_name(rate)}")
                request = {"kinds": CHECKED, "most": MOST, "seconds": o.seconds}
                for kind, samples in pool.ask(1800.0, what="sweep", **request)[0].items():
                    for sample in samples:
                        yield {"rate": rate, "kind": kind, **sample}


class WaitFit(NamedTuple):
    """A fitted collective. covariance: of (latency, per_byte, wait). cores: that all workers share; 0: each has its
    own, and no message waits."""

    fit: Fit
    wait: float
    covariance: np.ndarray
    cores: int

    def seconds(self, operand_bytes: float, workers: int) -> Seconds:
        """Predicted seconds of one collective."""
        row = row_of(self.fit.kind, operand_bytes, workers, self.cores)
        line = float(row @ (self.fit.latency, self.fit.per_byte, self.wait))
        return Seconds(line * self.fit.ratio(operand_bytes, workers), math.sqrt(max(row @ self.covariance @ row, 0.0)))


def row_of(kind: str, operand_bytes: float, workers: int, cores: int) -> np.ndarray:
    """Messages one after the other, bytes sent, and workers that these messages wait for."""
    messages, sent = KINDS[kind].messages(workers), KINDS[kind].sent(operand_bytes, workers)
    return np.array([messages, sent, messages * max(workers / cores - 1, 0) if cores else 0.0])


def wait_fit(kind: str, timings: Sequence[Timing], cores: int) -> WaitFit:
    """Latency, bandwidth and wait by weighted least squares; no wait where it cannot be told from the latency."""
    if len({max(x.workers, cores) for x in timings}) < 2:
        cores = 0
    rows = np.array([row_of(kind, x.operand_bytes, x.workers, cores) for x in timings])
    seconds, weights = np.array([x.seconds for x in timings]), weights_of(timings)
    (latency, per_byte, wait), covariance = least_squares(rows * weights[:, None], seconds * weights)
    found = fit(kind, timings)._replace(latency=float(latency), per_byte=float(per_byte))
    lines = rows @ (latency, per_byte, wait)
    ratios = [(x.workers, s, t / line) for x, (_, s, _), t, line in zip(timings, rows, seconds, lines, strict=True)]
    return WaitFit(found._replace(ratios=tuple(ratios)), float(wait), covariance, cores)


def compared(rows: Sequence[dict[str, Any]], fitted: set[int], cores: int = 0) -> list[dict[str, Any]]:
    """Rows that were held back, with the seconds that a fit to the others predicts, and those of the second time.

    cores: that all workers share; 0: each has its own.
    """
    found: dict[tuple, dict[str, Any]] = {}
    for rate, kind in dict.fromkeys((row["rate"], row["kind"]) for row in rows):
        mine = [row for row in rows if (row["rate"], row["kind"]) == (rate, kind)]
        timing = lambda row: Timing(row["workers"], row["operand_bytes"], row["seconds"], row["error"])
        found_fit = wait_fit(kind, [timing(row) for row in mine if row["workers"] in fitted], cores)
        line = found_fit.fit
        for row in mine:
            place = (rate, kind, row["workers"], row["operand_bytes"])
            if place in found:
                found[place]["again"] = row["seconds"]
            elif row["workers"] not in fitted:
                said = found_fit.seconds(row["operand_bytes"], row["workers"])
                sent = KINDS[kind].sent(row["operand_bytes"], row["workers"]) * line.per_byte
                more = {"predicted": said.mean, "deviation": said.deviation, "ratio": said.mean / row["seconds"]}
                more |= {"latency": line.latency, "per_byte": line.per_byte, "wait": found_fit.wait}
                found[place] = row | more | {"bytes_seconds": sent, "again": None}
    return list(found.values())


def summary(found: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Share within 15 %, median and largest error |predicted / measured - 1|; NaN of nothing.

    repeated: share of the sizes measured twice whose second time is within 15 % of the first.
    """
    errors = [abs(row["ratio"] - 1) for row in found] or [math.nan]
    repeated = [abs(row["again"] / row["seconds"] - 1) for row in found if row["again"] is not None] or [math.nan]
    share = lambda each: math.nan if math.isnan(each[0]) else float(np.mean(np.array(each) <= ENOUGH))
    return {
        "sizes": len(found),
        "within": share(errors),
        "median": float(np.median(errors)),
        "worst": max(errors),
        "repeated": share(repeated),
    }


SUMMARY = (
    "{sizes} sizes, {within:.0%} of them within 15%, median error {median:.0%}, largest {worst:.0%}; measured again, "
    "{repeated:.0%} are within 15% of the first time"
)
COLUMNS: Columns = {
    "rate": lambda row: rate_name(row["rate"]),
    "collective": "{kind}",
    "workers": "{workers}",
    "bytes": "{operand_bytes:,.0f}",
    "measured ms": lambda row: f"{1e3 * row['seconds']:.3g} +- {1e3 * row['error']:.1g}",
    "again ms": lambda row: "-" if row["again"] is None else f"{1e3 * row['again']:.3g}",
    "predicted ms": lambda row: f"{1e3 * row['predicted']:.3g}",
    "predicted/measured": "{ratio:.2f}",
}


def report(run: Run, found: list[dict[str, Any]]) -> None:
    """Prints and keeps the table: predicted over measured seconds of each size."""
    long = [row for row in found if row["bytes_seconds"] >= LONG]
    short = [row for row in found if row["bytes_seconds"] < LONG]
    said = [SUMMARY.format(**summary(rows)) if rows else "none" for rows in (long, short)]
    notes = f"""\
Fitted to {", ".join(map(str, run.options.fit))} workers, held back: the others. Bytes that take at least
{1e3 * LONG:g} ms on the link: {said[0]}. Shorter ones: {said[1]}. bytes: of each worker's operand."""
    run.table(f"{run.folder.name}: collectives among more workers than were fitted", COLUMNS, found, notes)
