"""Tables and plots of the smoothness experiments."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.lib.plots import LINES, new_figure, save
from experiments.smoothness.problems import Problem
from experiments.smoothness.runner import Curves
from experiments.smoothness.setups import Setup

__all__ = ["HEAD", "Result", "draw", "plot_workers", "rows_of", "upload_bits"]


class Result(NamedTuple):
    """Curves of one setup on one problem, and the budget that needed the fewest bits."""

    problem: Problem
    setup: Setup
    curves: Curves
    target: float
    count: str = "up"

    @property
    def kilobytes(self) -> np.ndarray:
        """[budgets]: counted bits until the target, geometric mean over seeds; infinite where not reached."""
        return self.of(self.count)

    def of(self, count: str) -> np.ndarray:
        """[budgets]: kilobytes "up", "down" or "both" until the target."""
        return np.exp(np.mean(np.log(self.curves.bits_to(self.target, count)), axis=1)) / 8e3

    @property
    def best(self) -> int:
        """The budget with the fewest bits, or, if none reached the target, the smallest error."""
        if np.isfinite(self.kilobytes).any():
            return int(np.argmin(self.kilobytes))
        return int(np.argmin(np.nanmin(self.curves.errors, axis=-1).mean(1)))


def upload_bits(setup: Setup, d: int) -> float:
    """One-off upload of a worker in f32: the operator as it is stored (a symmetric root once), and the plan."""
    if not setup.label.split()[0].endswith("+"):
        return 0.0
    operator = setup.operator
    form = type(operator).__name__
    plan = max(np.size(leaf) for leaf in _leaves(setup.plans[0])) / operator.diag.shape[0]
    if form == "Dense":
        symmetric = np.allclose(operator.matrix_root[0], operator.matrix_root[0].T)
        entries = d * (d + 1) / 2 if symmetric else d * d
    elif form == "LowRank":
        entries = operator.vectors[0].size + operator.sigma[0].size + 1
    elif form == "Blocks":
        entries = operator.matrix_root[0].shape[0] * operator.matrix_root[0].shape[1] ** 2
    else:
        entries = d
    return 32 * (entries + plan)


def _leaves(tree: Any) -> list[Any]:
    import jax

    return jax.tree.leaves(tree)


HEAD = [
    "method",
    "budget",
    "gamma",
    "omega",
    "rounds",
    "bits/round",
    "kB up",
    "+ upload",
    "kB down",
    "both",
    "factor",
    "floor",
]


def rows_of(results: list[Result]) -> list[list[str]]:
    """A row for each result at its best budget; factors against the first."""
    rows = []
    reference = results[0].kilobytes[results[0].best]
    for r in results:
        b = r.best
        d = r.problem.d
        kilobytes, up, down = r.kilobytes[b], r.of("up")[b], r.of("down")[b]
        rounds = float(np.mean(r.curves.reached(r.target)[b]))
        each = float(np.mean(r.curves.bits[b, :, -1])) / r.curves.bits.shape[-1]
        once = upload_bits(r.setup, d) / 8e3
        reached = np.isfinite(kilobytes)
        floor = float(np.exp(np.mean(np.log(np.maximum(np.nanmin(r.curves.errors[b], -1), 1e-300)))))
        rows.append(
            [
                r.setup.label,
                f"{r.setup.budgets[b]:g} d",
                f"{r.setup.steps[b].gamma:.3g}",
                f"{r.setup.omega[b]:.3g}",
                f"{rounds:,.0f}" if reached else "-",
                f"{each:.0f}",
                f"{up:,.1f}" if reached else "-",
                f"{up + once:,.1f}" if reached else "-",
                f"{down:,.1f}" if reached else "-",
                f"{up + down:,.1f}" if reached else "-",
                f"{reference / kilobytes:.2f}" if reached and np.isfinite(reference) else "-",
                f"{floor:.1e}",
            ]
        )
    return rows


# Colour says the method, line and marker the compressor.
COLOURS = {
    "dcgd": "#7F7F7F",
    "diana": "#000000",
    "adiana": "#CC79A7",
    "dcgd+": "#E69F00",
    "diana+": "#0072B2",
    "adiana+": "#D55E00",
    "isega+": "#009E73",
}
KINDS = {
    "rand": (":", "^"),
    "uniform": ("--", "s"),
    "varying": ("-", "o"),
    "block": ("-.", "D"),
    "uniform-16": ("--", "v"),
    "varying-16": ("-", "P"),
}


def style_of(label: str, i: int) -> dict[str, Any]:
    method, _, kind = label.partition(" ")
    if method not in COLOURS or kind not in KINDS:
        return LINES[i % len(LINES)]
    return {"color": COLOURS[method], "linestyle": KINDS[kind][0], "marker": KINDS[kind][1]}


def draw(path: Path, title: str, results: list[Result], points: int = 40) -> None:
    """Relative squared error against rounds, megabytes (with and without the one-off upload) and seconds."""
    figure, axes = new_figure(2, height=7.2, rows=2)
    labels = ["rounds", "MB sent by a worker", "MB with the one-off upload", "seconds, all workers on this machine"]
    for i, r in enumerate(results):
        b = r.best
        errors = np.log(np.maximum(np.nan_to_num(r.curves.errors[b], nan=1e6, posinf=1e6), 1e-30))
        middle, spread = errors.mean(0), errors.std(0)
        x = np.arange(1, middle.size + 1)
        megabytes = r.curves.bits[b].mean(0) / 8e6
        once = upload_bits(r.setup, r.problem.d) / 8e6
        end = int(np.max(r.curves.reached(1e-24)[b]))
        keep = np.unique(np.geomspace(1, end, 400).astype(int)) - 1
        style = style_of(r.setup.label, i) | {"label": r.setup.label, "markevery": max(1, len(keep) // 6)}
        for axis, values in zip(axes, (x, megabytes, megabytes + once, x * r.curves.seconds), strict=True):
            axis.plot(values[keep], np.exp(middle[keep]), markersize=4, **style)
            low, high = np.exp(middle[keep] - spread[keep]), np.exp(middle[keep] + spread[keep])
            axis.fill_between(values[keep], low, high, color=style["color"], alpha=0.15, linewidth=0)
    for axis, label in zip(axes, labels, strict=True):
        axis.set_yscale("log")
        axis.set_xlabel(label)
        axis.set_ylim(bottom=max(1e-24, min(float(np.nanmin(r.curves.errors)) for r in results) / 3))
    for axis in axes[1:3]:
        axis.set_xscale("log")
        axis.set_xlim(left=axis.get_xlim()[1] / 1e4)
    for axis in axes[::2]:
        axis.set_ylabel("relative squared error |x - x*|² / |x*|²")
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside right center", fontsize=8)
    figure.suptitle(title.replace(" split, ", " split,\n"), fontsize=10)
    save(figure, path)


def plot_workers(path: Path, title: str, counts: list[int], lines: dict[str, list[tuple[float, float]]]) -> None:
    """Kilobytes that a worker sends until the target, rounds, and rounds saved, against the number of workers."""
    figure, axes = new_figure(3)
    first = next(iter(lines))
    base = np.array(lines[first])[:, 1]
    for i, (label, values) in enumerate(lines.items()):
        kilobytes, rounds = np.array(values).T
        for axis, shown in zip(axes, (kilobytes, rounds, base / rounds), strict=True):
            axis.plot(counts, shown, label=label, **style_of(label, i))
    axes[2].plot(counts, np.array(counts) / counts[0], color="0.5", linewidth=1, label=f"n / {counts[0]}")
    texts = ("kB sent by a worker to the target", "rounds to the target", f"rounds of {first} / rounds")
    for axis, text in zip(axes, texts, strict=True):
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2)
        axis.set_xlabel("workers n")
        axis.set_ylabel(text)
    axes[2].legend(fontsize=8)
    figure.suptitle(title, fontsize=10)
    save(figure, path)
