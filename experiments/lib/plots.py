"""Plots that can be read in print, in grey, and by colour-blind eyes."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

__all__ = ["LINES", "by_seed", "new_figure", "running_mean", "save"]

# Okabe and Ito's colours with a line style and a marker each: two ways to tell lines apart besides hue.
COLOURS = ["#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F"]
STYLES = ["-", "--", "-.", ":"]
MARKERS = ["o", "s", "^", "D", "v", "P", "X", "*"]
LINES: list[dict[str, Any]] = [
    {"color": COLOURS[i % 8], "linestyle": STYLES[(i // 2 + i // 8) % 4], "marker": MARKERS[(i + 4 * (i // 8)) % 8]}
    for i in range(16)
]


def new_figure(columns: int, height: float = 4.2, rows: int = 1) -> tuple[Any, list[Any]]:
    """A figure with panels side by side; with several rows, row after row."""
    plt.rcParams.update({"font.size": 10, "axes.grid": True, "grid.alpha": 0.3, "axes.spines.top": False})
    plt.rcParams.update({"axes.spines.right": False, "legend.frameon": False, "lines.linewidth": 1.6})
    figure, axes = plt.subplots(rows, columns, figsize=(5.2 * columns, height), squeeze=False, layout="constrained")
    return figure, list(axes.reshape(-1))


def by_seed(lines: list[dict[str, Any]], *keys: str) -> list[np.ndarray]:
    """Values f64[seeds, t] of each key from lines of metrics, as long as the shortest run is."""
    runs: dict[int, list[dict[str, Any]]] = {}
    for line in lines:
        runs.setdefault(line["seed"], []).append(line)
    length = min(map(len, runs.values()))
    return [np.array([[line[key] for line in run[:length]] for run in runs.values()], float) for key in keys]


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Mean of the last `window` values (fewer at the start), along the last axis."""
    sums = np.cumsum(values, -1, float)
    sums[..., window:] -= sums[..., :-window].copy()
    return sums / np.minimum(1 + np.arange(values.shape[-1]), window)


def save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=150)
    plt.close(figure)
