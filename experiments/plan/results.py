"""Regret of each cell and errors of predictions: table and plot."""

from typing import Any

import numpy as np

from experiments.lib.netlab import link_name
from experiments.lib.run import Columns, Run

__all__ = ["link_of", "report", "summary"]

MATTERS = 0.10  # regret, and by how much dense must be best for the cell to count as one of its own


def link_of(row: dict[str, Any]) -> str:
    return "one process" if row["one_process"] else link_name(row["rate"], row["delay"])


def regret_of(row: dict[str, Any], choice: str) -> float:
    """What the chosen candidate took more than the fastest, as a share of the fastest."""
    return row["measured"][row[choice]] / min(row["measured"].values()) - 1


def dense_is_best(row: dict[str, Any]) -> bool:
    """Whether every compressed candidate took more than 10 % longer than the best dense one."""
    dense = min(row["measured"][name] for name in row["dense"])
    others = [seconds for name, seconds in row["measured"].items() if name not in row["dense"]]
    return dense * (1 + MATTERS) < min(others)


def errors_of(row: dict[str, Any], said: bool = False) -> list[float]:
    """|predicted - measured| / measured of every candidate: predicted from parts, or what the plan said in the end."""
    seconds = row["said"] if said else {name: parts["total"] for name, parts in row["predicted"].items()}
    return [abs(seconds[name] / measured - 1) for name, measured in row["measured"].items()]


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Of all cells. error: predicted from parts, said: by the plan in the end, both of all candidates in all cells.

    within: share of the cells whose regret is at most 10 %; alone: the same of the choice by prediction alone.
    noise: medians of even rounds against those of odd ones, of what was measured twice or more.
    """
    rounds = [each for row in rows for each in row["rounds"].values() if len(each) > 1]
    noise = [abs(np.median(each[::2]) / np.median(each[1::2]) - 1) for each in rounds] or [np.nan]
    shown = {
        "error": [error for row in rows for error in errors_of(row)],
        "said": [error for row in rows for error in errors_of(row, said=True)],
        "noise": noise,
    }
    own = [row for row in rows if dense_is_best(row)]
    return {
        "cells": len(rows),
        "within": float(np.mean([regret_of(row, "chosen") <= MATTERS for row in rows])),
        "alone": float(np.mean([regret_of(row, "alone") <= MATTERS for row in rows])),
        "worst": max(regret_of(row, "chosen") for row in rows),
        **{f"{name}_median": float(np.median(each)) for name, each in shown.items()},
        **{f"{name}_90": float(np.percentile(each, 90)) for name, each in shown.items()},
        "dense_cells": len(own),
        "dense_advised": sum(row["chosen"] in row["dense"] for row in own),
    }


COLUMNS: Columns = {
    "workers": "{workers}",
    "entries": "{entries:,}",
    "link": lambda row: link_of(row),
    "load": "{load}",
    "advised": "{chosen}",
    "predicted best": "{alone}",
    "best": lambda row: min(row["measured"], key=row["measured"].get),
    "best ms": lambda row: f"{1e3 * min(row['measured'].values()):.1f}",
    "dense ms": lambda row: f"{1e3 * min(row['measured'][name] for name in row['dense']):.1f}",
    "regret %": lambda row: f"{100 * regret_of(row, 'chosen'):.1f}",
    "error %": lambda row: f"{100 * np.median(errors_of(row)):.0f}",
    "in the end %": lambda row: f"{100 * np.median(errors_of(row, said=True)):.0f}",
    "best by 10 %": lambda row: "dense" if dense_is_best(row) else "",
}


def report(run: Run, rows: list[dict[str, Any]]) -> None:
    """Prints and keeps the table, and draws the plot."""
    s = summary(rows)
    both = lambda name: f"{s[f'{name}_median']:.0%}, 90th percentile {s[f'{name}_90']:.0%}"
    notes = f"""\
Advised: after trying; predicted: by prediction alone. {s["cells"]} cells: regret at most 10 % in {s["within"]:.0%}
({s["alone"]:.0%} by prediction alone), at most {s["worst"]:.0%}. Seconds per step of all candidates in all cells,
against measured ones: predicted from parts, median error {both("error")}; as the plan says in the end, which has run
some of them, {both("said")}. Even against odd rounds of what is measured: {both("noise")}. Dense is best by more than
10 % in {s["dense_cells"]} cells, and was advised in {s["dense_advised"]} of these."""
    run.table(f"{run.folder.name}: the planner's choice against all candidates", COLUMNS, rows, notes)
    run.picture(draw(rows), "regret.png")


def draw(rows: list[dict[str, Any]]) -> Any:
    from experiments.lib.plots import LINES, new_figure

    figure, (left, right) = new_figure(2)
    names = list(rows[0]["measured"])
    for number, name in enumerate(names):
        points = [(row["measured"][name], row["predicted"][name]["total"]) for row in rows]
        look = {**LINES[number % len(LINES)], "linestyle": "none", "markersize": 4}
        left.plot(*zip(*points, strict=True), label=name, **look)
    every = [row["measured"][name] for row in rows for name in names]
    ends = [min(every), max(every)]
    left.plot(ends, ends, color="0.3", linewidth=1)
    left.fill_between(ends, [0.75 * x for x in ends], [1.25 * x for x in ends], color="0.85", label="25 %")
    left.set(xscale="log", yscale="log", xlabel="measured s/step", ylabel="predicted s/step")
    left.legend(fontsize=7)
    for choice, look in (("chosen", LINES[1]), ("alone", LINES[2])):
        values = sorted(100 * regret_of(row, choice) for row in rows)
        shares = [100 * (i + 1) / len(values) for i in range(len(values))]
        label = "after trying" if choice == "chosen" else "by prediction alone"
        right.step(values, shares, where="post", label=label, color=look["color"], linestyle=look["linestyle"])
    right.axvline(10, color="0.4", linewidth=1)
    right.set(xlabel="regret, %", ylabel="cells at most so far from the best, %", ylim=(0, 102))
    right.legend(fontsize=8)
    return figure
