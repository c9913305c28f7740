"""Tables and plot of the network laboratory."""

import itertools
import math
import os
from typing import Any

from experiments.lib.netlab import rate_name
from experiments.lib.run import Columns, Run, cells

__all__ = ["break_even", "limit_of", "report"]

DENSE = ("psum-f32", "psum-bf16", "dense-bf16:two_shot")  # that others are held against, where they were measured


def limit_of(row: dict[str, Any]) -> float:
    """Seconds that the exchange cannot fall below: max(work without the network, bytes of the program / rate)."""
    alone = row["compute"] or 0.0
    return alone if row["rate"] is None else max(alone, 8 * row["ledger_bytes"] / row["rate"])


def break_even(points: list[tuple[float | None, float, float]]) -> float | None:
    """The rate at which a method is as fast as the dense one.

    Between two rates both times are taken as a + b / rate, which a message on a link costs; so the point is exact
    where they are. None if one of them is faster at every rate measured; the highest, if there are several.

    points: (rate in bit/s or None for no limit, seconds of the method, seconds of the dense one).

    >>> round(break_even([(1e6, 1 + 1, 0.5 + 4), (None, 1.0, 0.5)]) / 1e6)
    6
    """
    line = sorted((0.0 if rate is None else 1 / rate, mine - dense) for rate, mine, dense in points)
    for (x0, y0), (x1, y1) in itertools.pairwise(line):
        if (y0 > 0) != (y1 > 0):
            x = x0 - y0 * (x1 - x0) / (y1 - y0)
            return 1 / x if x > 0 else math.inf
    return None


def report(run: Run, rows: list[dict], trained: list[dict]) -> None:
    o = run.options
    cores = f"{o.workers} processes on {len(os.sched_getaffinity(0))} cores"
    if rows:
        columns = {**EXCHANGE, **against(rows, "seconds")}
        run.table(f"{cores}, ratio {o.ratio:g}{delay_in(o)}", said_in(columns, rows), rows, NOTES, "exchange.md")
        each = [[row for row in rows if row["size"] == size] for size in dict.fromkeys(row["size"] for row in rows)]
        text = [line for of_size in each for dense in DENSE for line in even_lines(of_size, dense)]
        run.say("\n".join(text))
        with run.path("exchange.md").open("a") as file:
            file.write("".join(f"\n{line}  " for line in text) + "\n")
        if not all(row["equal"] for row in rows):
            run.console.print("the workers' means differed", style="bold red")
    if trained:
        title = f"{o.data}, {o.model}, {trained[0]['parameters']:,} parameters, {cores}, ratio {o.train_ratio:g}"
        columns = {**TRAINING, **against(trained, "total")}
        run.table(title, said_in(columns, trained), trained, TRAINED_NOTES, "training.md")
    bases = [name for name in BASES if any(row["method"] == name for row in rows)]
    if bases or trained:
        run.picture(plot(o, bases, rows, trained), "network.png")
    elif rows:
        run.say(f"no plot: it shows how many times as fast as {' or '.join(BASES)}, and neither was measured")


def said_in(columns: Columns, rows: list[dict]) -> Columns:
    """Without the columns in which no row has anything: those of dense methods that were not run."""
    return {name: of for name, of in columns.items() if any(text != "-" for (text,) in cells({name: of}, rows))}


def delay_in(options: Any) -> str:
    return f", delay {1e3 * options.delay:g} ms" if options.delay else ""


BASES = ("psum-f32", "dense-bf16:two_shot")  # of the panels
NOTES = """\
ms: median of a whole exchange (compress, exchange, decode, remember), from the end of the one before until the last
worker has ended it. limit: max(compute, bytes of the program / rate). compute: the same program with its collectives
cut out, begun by all at once, until the last has ended it. program MB:
sent by a worker, read from the compiled program by jaxcomp.ledger. payload / it: bytes that the kernel counted on the
links, less the headers of its frames; frames / it: with headers and acknowledgements. x: times as fast as."""
TRAINED_NOTES = """\
s to target: wall clock from the first step to the target loss (training, mean of 10 steps, all workers' batches), or to
the last step where a + says that it was not reached. MB: sent by a worker in a step, as the compiled program says and
as the kernel counted without headers. x: times as fast to the target as, with the same seed."""


EXCHANGE: Columns = {
    "method": "{method}",
    "entries": "{size:,}",
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
    "loss": lambda row: f"{sum(row['losses'][-10:]) / min(10, len(row['losses'])):.3f}",
    "test accuracy": "{accuracy:.4f}",
}


def against(rows: list[dict], key: str) -> Columns:
    """A column for each dense method: how many times as fast a row is."""
    return {f"x {name}": lambda row, name=name: times(row, rows, name, key) for name in DENSE}


def times(row: dict, rows: list[dict], dense: str, key: str) -> str:
    """How many times as fast a row is as a dense method at the same size, rate and seed, where that was run."""
    same = lambda other: all(other.get(k) == row.get(k) for k in ("size", "rate", "seed"))
    other = next((other for other in rows if other["method"] == dense and same(other)), row)
    if other is row or not (row.get("reached", True) and other.get("reached", True)):
        return "-"
    ratio = other[key] / row[key]
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.1f}"


def compared(rows: list[dict], base: str) -> dict[str, list[tuple[float | None, float, float]]]:
    """method -> (rate, its seconds, those of the base) at each rate at which both were measured."""
    dense = {row["rate"]: row["seconds"] for row in rows if row["method"] == base}
    found: dict[str, list[tuple[float | None, float, float]]] = {}
    for row in rows:
        if row["method"] != base and row["rate"] in dense:
            found.setdefault(row["method"], []).append((row["rate"], row["seconds"], dense[row["rate"]]))
    return found


def even_lines(rows: list[dict], dense: str) -> list[str]:
    """Where each method stops to pay, in words."""
    found = []
    for method, points in compared(rows, dense).items():
        even = break_even(points)
        if method in DENSE:
            continue
        if even is not None and math.isfinite(even):
            found.append(f"{method} {rate_name(float(f'{even:.2g}'))}")
        else:
            faster = sum(mine < other for _, mine, other in points) > len(points) / 2
            found.append(f"{method} {'faster' if faster else 'slower'} at every rate")
    return [f"as fast as {dense} at {rows[0]['size']:,} entries: {', '.join(found)}"] if found else []


def plot(options: Any, bases: list[str], rows: list[dict], trained: list[dict]) -> Any:
    """Speed-up against bandwidth for each size and dense method, break-even marked; loss against the clock."""
    from matplotlib.ticker import NullFormatter

    from experiments.lib.plots import LINES, new_figure

    sizes = list(dict.fromkeys(row["size"] for row in rows))
    panels = [(size, base) for size in sizes for base in bases]
    rates = list(dict.fromkeys(row["rate"] for row in trained))
    figure, axes = new_figure(len(panels) + len(rates), 4.8)
    names = list(dict.fromkeys(row["method"] for row in (*rows, *trained)))
    looks = {name: LINES[i % len(LINES)] for i, name in enumerate(names)}
    for axis, (size, base) in zip(axes, panels, strict=False):
        draw_speed(axis, [row for row in rows if row["size"] == size], base, looks)
        axis.set_title(f"{size:,} entries, against {base}")
    for axis, rate in zip(axes[len(panels) :], rates, strict=True):
        for row in (r for r in trained if r["rate"] == rate):
            smooth = [sum(row["losses"][max(0, i - 9) : i + 1]) / min(10, i + 1) for i in range(len(row["losses"]))]
            look = looks[row["method"]]
            label = row["method"] if row["seed"] == options.train_seeds[0] else None
            reached = {} if row["reached"] else {"markerfacecolor": "none"}
            axis.plot(row["seconds"], smooth, label=label, markevery=[-1], markersize=6, **look, **reached)
        axis.axhline(options.target, color="0.5", linewidth=1, label=f"target {options.target:g} (open marker: missed)")
        axis.set(xlabel="seconds", ylabel="training loss (mean of 10 steps)", yscale="log", xscale="log")
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.set_title(f"{options.data}, {options.model}, {rate_name(rate)}")
        axis.legend(fontsize=8, frameon=True, framealpha=0.9, edgecolor="none")
    cores = f"{options.workers} processes on {len(os.sched_getaffinity(0))} cores"
    figure.suptitle(cores + delay_in(options), fontsize=10)
    return figure


def draw_speed(axis: Any, rows: list[dict], base: str, looks: dict[str, Any]) -> None:
    limited = sorted({row["rate"] for row in rows if row["rate"] is not None})
    unlimited = 10 * limited[-1] if limited else 1e9  # where "no limit" is drawn
    place = lambda rate: unlimited if rate is None else rate
    for method, points in compared(rows, base).items():
        points.sort(key=lambda point: place(point[0]))
        x, y = [place(rate) for rate, _, _ in points], [other / mine for _, mine, other in points]
        axis.plot(x, y, label=method, markersize=5, **looks[method])
        even = break_even(points)
        if even is not None and even < unlimited:
            axis.plot([even], [1], marker="o", markersize=11, markerfacecolor="none", color=looks[method]["color"])
    axis.axhline(1, color="0.3", linewidth=1)
    rates = [*limited, *([None] if any(row["rate"] is None for row in rows) else [])]
    axis.set(xscale="log", yscale="log", xlabel="rate of every link", ylabel="times as fast (circle: break-even)")
    axis.set_xticks([place(rate) for rate in rates], [rate_name(rate) for rate in rates])
    axis.minorticks_off()
    low, high = axis.get_ylim()
    steps = [s for s in (0.01, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100) if low <= s <= high]
    axis.set_yticks(steps, [f"{s:g}" for s in steps])
    axis.legend(fontsize=7)
