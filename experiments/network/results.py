"""Tables and plot of the network laboratory."""

import itertools
import math
import os
from pathlib import Path
from typing import Any

from experiments.lib.netlab import rate_name
from experiments.lib.report import show_rows

__all__ = ["break_even", "limit_of", "report"]

DENSE = ("psum-f32", "psum-bf16", "dense-bf16:two_shot")  # that others are held against, where they were measured


def limit_of(row: dict[str, Any]) -> float:
    """Seconds that the exchange cannot fall below: max(work without the network, bytes of the program / rate)."""
    alone = row["compute"] or 0.0
    return alone if row["rate"] is None else max(alone, 8 * row["ledger_bytes"] / row["rate"])


def break_even(points: list[tuple[float | None, float, float]]) -> float | None:
    """The rate at which a method is as fast as the dense one.

    Between two rates both times are taken as a + b / rate, which a message on a link costs; so the point is exact
    where they are.

    Args:
        points: (rate in bit/s or None for no limit, seconds of the method, seconds of the dense one).

    Returns:
        bit/s; None if one of them is faster at every rate measured. The highest, if there are several.

    >>> round(break_even([(1e6, 1 + 1, 0.5 + 4), (None, 1.0, 0.5)]) / 1e6)
    6
    """
    line = sorted((0.0 if rate is None else 1 / rate, mine - dense) for rate, mine, dense in points)
    for (x0, y0), (x1, y1) in itertools.pairwise(line):
        if (y0 > 0) != (y1 > 0):
            x = x0 - y0 * (x1 - x0) / (y1 - y0)
            return 1 / x if x > 0 else math.inf
    return None


def report(console: Any, options: Any, rows: list[dict], trained: list[dict], folder: Path) -> None:
    cores = f"{options.workers} processes on {len(os.sched_getaffinity(0))} cores"
    if rows:
        title = f"{cores}, ratio {options.ratio:g}{delay_in(options)}"
        show_rows(console, title, [cells(row, rows) for row in rows], NOTES, folder / "exchange.md")
        each = [[row for row in rows if row["size"] == size] for size in dict.fromkeys(row["size"] for row in rows)]
        text = [line for of_size in each for dense in DENSE for line in even_lines(of_size, dense)]
        console.print("\n".join(text), highlight=False)
        with (folder / "exchange.md").open("a") as file:
            file.write("".join(f"\n{line}  " for line in text) + "\n")
        if not all(row["equal"] for row in rows):
            console.print("the workers' means differed", style="bold red")
    if trained:
        size = f"{trained[0]['parameters']:,} parameters"
        title = f"{options.data}, {options.model}, {size}, {cores}, ratio {options.train_ratio:g}"
        table = [trained_cells(row, trained) for row in trained]
        show_rows(console, title, table, TRAINED_NOTES, folder / "training.md")
    bases = [name for name in BASES if any(row["method"] == name for row in rows)]
    if bases or trained:
        console.print(f"plot: {plot(options, bases, rows, trained, folder / 'network.png')}")
    elif rows:
        console.print(f"no plot: it shows how many times as fast as {' or '.join(BASES)}, and neither was measured")


def delay_in(options: Any) -> str:
    return f", delay {1e3 * options.delay:g} ms" if options.delay else ""


BASES = ("psum-f32", "dense-bf16:two_shot")  # of the panels
NOTES = """\
ms: median of a whole exchange (compress, exchange, decode, remember), the slowest worker's. limit: max(compute, bytes
of the program / rate). compute: the same program with its collectives cut out, begun by all at once. program MB:
sent by a worker, read from the compiled program by jaxcomp.ledger. payload / it: bytes that the kernel counted on the
links, less the headers of its frames; frames / it: with headers and acknowledgements. x: times as fast as."""
TRAINED_NOTES = """\
s to target: wall clock from the first step to the target loss (training, mean of 10 steps, all workers' batches), or to
the last step where a + says that it was not reached. MB: sent by a worker in a step, as the compiled program says and
as the kernel counted without headers. x: times as fast to the target as, with the same seed."""


def times(row: dict, rows: list[dict], key: str) -> dict[str, str]:
    """How many times as fast a row is as each of DENSE at the same size, rate and seed, where that was run."""
    found = dict.fromkeys((f"x {name}" for name in DENSE), "-")
    same = [r for r in rows if all(r.get(k) == row.get(k) for k in ("size", "rate", "seed"))]
    for other in same:
        if other["method"] in DENSE and other is not row and row.get("reached", True) and other.get("reached", True):
            ratio = other[key] / row[key]
            found[f"x {other['method']}"] = f"{ratio:.2f}" if ratio < 10 else f"{ratio:.1f}"
    return found


def cells(row: dict, rows: list[dict]) -> dict[str, str]:
    limit, sent = limit_of(row), row["ledger_bytes"]
    sizes = "" if len({r["size"] for r in rows}) == 1 else f", {row['size']:,}"
    return {
        "method": row["method"] + sizes,
        "rate": rate_name(row["rate"]),
        "ms": f"{1e3 * row['seconds']:.1f}",
        "/ limit": f"{row['seconds'] / limit:.2f}" if limit else "-",
        "limit ms": f"{1e3 * limit:.1f}",
        "compute ms": "-" if row["compute"] is None else f"{1e3 * row['compute']:.1f}",
        "program MB": f"{sent / 1e6:.3f}",
        "payload / it": f"{row['payload_bytes'] / sent:.3f}",
        "frames / it": f"{row['link_bytes'] / sent:.3f}",
        **times(row, rows, "seconds"),
    }


def trained_cells(row: dict, rows: list[dict]) -> dict[str, str]:
    steps = len(row["losses"])
    return {
        "method": row["method"],
        "rate": rate_name(row["rate"]),
        "seed": f"{row['seed']}",
        "steps": f"{steps:,}",
        "s to target": f"{row['total']:.1f}" + ("" if row["reached"] else " +"),
        "ms/step": f"{1e3 * row['total'] / steps:.1f}",
        "program MB": "-" if row["ledger_bytes"] is None else f"{row['ledger_bytes'] / 1e6:.3f}",
        "counted MB": f"{row['payload_bytes'] / 1e6:.3f}",
        "loss": f"{sum(row['losses'][-10:]) / min(10, steps):.3f}",
        "test accuracy": f"{row['accuracy']:.4f}",
        **times(row, rows, "total"),
    }


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


def plot(options: Any, bases: list[str], rows: list[dict], trained: list[dict], path: Path) -> Path:
    """Speed-up against bandwidth for each size and dense method, break-even marked; loss against the clock."""
    from matplotlib.ticker import NullFormatter

    from experiments.lib.plots import LINES, new_figure, save

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
    save(figure, path)
    return path


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
