"""Tables and plot of the network laboratory."""

import os
from typing import Any

import numpy as np

from experiments.lib.netlab import rate_name
from experiments.lib.run import Columns, Run
from experiments.network.methods import DENSE

__all__ = ["limit_of", "report"]

NOTES = """\
ms: median of a whole exchange. limit: max(compute, program MB / rate). compute: without the network. program MB: sent
by a worker, read from the compiled program. payload / it, frames / it: bytes that the kernel counted on the links over
that, without headers and with them. x: times as fast as."""
TRAINED_NOTES = """\
s to target: from the first step to the loss (mean of 10 steps), or to the last step where a + says that it was not
reached. MB: sent by a worker in a step. x: times as fast to the target as, with the same seed."""


def limit_of(row: dict[str, Any]) -> float:
    """Seconds that the exchange cannot fall below: max(work without the network, bytes of the program / rate)."""
    alone = row["compute"] or 0.0
    return alone if row["rate"] is None else max(alone, 8 * row["ledger_bytes"] / row["rate"])


EXCHANGE: Columns = {
    "method": "{method}",
    "rate": lambda row: rate_name(row["rate"]),
    "ms": lambda row: f"{1e3 * row['seconds']:.1f}",
    "/ limit": lambda row: f"{row['seconds'] / limit_of(row):.2f}" if limit_of(row) else "-",
    "limit ms": lambda row: f"{1e3 * limit_of(row):.1f}",
    "compute ms": lambda row: "-" if row["compute"] is None else f"{1e3 * row['compute']:.1f}",
    "program MB": lambda row: f"{row['ledger_bytes'] / 1e6:.3f}",
    "payload / it": lambda row: f"{row['payload_bytes'] / row['ledger_bytes']:.3f}",
    "frames / it": lambda row: f"{row['link_bytes'] / row['ledger_bytes']:.3f}",
}
TRAINING: Columns = {
    "method": "{method}",
    "rate": lambda row: rate_name(row["rate"]),
    "seed": "{seed}",
    "steps": lambda row: f"{len(row['losses']):,}",
    "s to target": lambda row: f"{row['total']:.1f}" + ("" if row["reached"] else " +"),
    "ms/step": lambda row: f"{1e3 * row['total'] / len(row['losses']):.1f}",
    "program MB": lambda row: "-" if row["ledger_bytes"] is None else f"{row['ledger_bytes'] / 1e6:.3f}",
    "counted MB": lambda row: f"{row['payload_bytes'] / 1e6:.3f}",
    "loss": lambda row: f"{np.mean(row['losses'][-10:]):.3f}",
}


def against(rows: list[dict], key: str) -> Columns:
    """A column for each dense method that was run: how many times as fast a row is."""
    run = [name for name in DENSE if any(row["method"] == name for row in rows)]
    times = lambda row, name: f"{speed(row, rows, name, key):.3g}".replace("nan", "-")
    return {f"x {name}": lambda row, name=name: times(row, name) for name in run}


def speed(row: dict, rows: list[dict], dense: str, key: str) -> float:
    """How many times as fast a row is as a dense method at the same rate and seed; NaN unless both came to the end."""
    same = lambda other: all(other.get(k) == row.get(k) for k in ("rate", "seed"))
    others = [other for other in rows if other["method"] == dense and same(other)]
    ended = others and row.get("reached", True) and others[0].get("reached", True)
    return others[0][key] / row[key] if ended else np.nan


def report(run: Run, rows: list[dict], trained: list[dict]) -> None:
    """Both tables, and the plot: speed-up against rates for each dense method, and loss against the clock."""
    from experiments.lib.plots import running_mean

    o, panels, labels = run.options, {}, {}
    cores = f"{o.workers} processes on {len(os.sched_getaffinity(0))} cores"
    cores += f", delay {1e3 * o.delay:g} ms" if o.delay else ""
    if rows:
        rows = sorted(rows, key=lambda row: o.methods.index(row["method"]))
        title = f"{o.size:,} entries, {cores}, ratio {o.ratio:g}"
        run.table(title, {**EXCHANGE, **against(rows, "seconds")}, rows, NOTES, "exchange.md")
        if not all(row["equal"] for row in rows):
            run.console.print("the workers' means differed", style="bold red")
        for base in (name for name in DENSE if any(row["method"] == name for row in rows)):
            panels[f"exchange, against {base}"] = curves = {}
            for method in dict.fromkeys(row["method"] for row in rows):
                mine = [row for row in rows if row["method"] == method]
                mine.sort(key=lambda row: row["rate"] or np.inf)
                speeds = [speed(row, rows, base, "seconds") for row in mine]
                curves[method] = [rate_name(row["rate"]) for row in mine], speeds
    if trained:
        trained = sorted(trained, key=lambda row: o.train_methods.index(row["method"]))
        title = f"{o.data}, {o.model}, {trained[0]['parameters']:,} parameters, {cores}, ratio {o.ratio:g}"
        run.table(title, {**TRAINING, **against(trained, "total")}, trained, TRAINED_NOTES, "training.md")
        for rate in dict.fromkeys(row["rate"] for row in trained):
            mine = [row for row in trained if row["rate"] == rate and row["seed"] == o.train_seeds[0]]
            panel = f"{o.data}, {o.model}, {rate_name(rate)}, to {o.target:g}"
            panels[panel] = {row["method"]: (row["seconds"], running_mean(np.array(row["losses"]), 10)) for row in mine}
            labels[panel] = {"xlabel": "seconds", "ylabel": "training loss (mean of 10 steps)", "xscale": "log"}
    if panels:
        run.plot("network.png", panels, cores, each=labels, xlabel="link", ylabel="times as fast", yscale="log")
