"""Loss and accuracy of SIDCo and its rivals, at equal steps and at equal bytes.

Runs `compare` once for each ratio, with error feedback for every sparse method, and joins the results.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.lib.cli import Parser, at_least, choose_new, fraction
from experiments.lib.folders import Journal, read_results, run_options
from experiments.lib.report import new_console, show, spread

__all__ = ["main"]

DENSE = "dense-f32"
SPARSE = ["top-k", "sidco", "sidco-p", "sidco-gp", "sidco-narrow", "dgc", "redsync", "gaussian-k"]


def main(arguments: Sequence[str]) -> int:
    from experiments.train import compare

    p = Parser(prog="python -m experiments sidco training", description=(__doc__ or "").split("\n\n")[0])
    p.add_argument("--ratios", type=fraction, nargs="+", default=[0.1, 0.01, 0.001], metavar="RATIO", help="targets")
    p.add_argument("--methods", nargs="+", choices=SPARSE, default=SPARSE, metavar="METHOD", help=", ".join(SPARSE))
    p.add_argument("--steps", type=at_least(1), default=400, help="steps of each run")
    p.add_argument("--test-every", type=at_least(1), default=20, help="steps between tests")
    p.add_argument("--seeds", nargs="+", type=at_least(0), default=[0, 1, 2], metavar="SEED", help="one run for each")
    p.add_argument("--data", default="digits", help="as in compare")
    p.add_argument("--data-dir", type=Path, default=None, help="as in compare")
    p.add_argument("--model", default="mlp", help="as in compare")
    p.add_argument("--workers", type=at_least(1), default=4, help="data-parallel workers")
    run_options(p, "sidco-training")
    options = p.parse_args(arguments)
    folder = choose_new(options.runs, options.name, "sidco-training")

    shared = ["--steps", options.steps, "--log-every", 10, "--test-every", options.test_every]
    shared += ["--data", options.data, "--model", options.model, "--workers", options.workers]
    shared += ["--checkpoint-every", options.steps, "--seeds", *options.seeds]
    shared += ["--data-dir", options.data_dir] if options.data_dir else []
    runs = [("dense", [DENSE], 1.0), *((f"ratio-{ratio:g}", options.methods, ratio) for ratio in options.ratios)]
    for name, methods, ratio in runs:
        more = ["--runs", folder, "--name", name, "--ratio", ratio, "--methods", *methods]
        code = compare.main([str(item) for item in (*shared, *more)])
        if code:
            return code

    console = new_console()
    dense = load(folder / "dense")
    loaded = {ratio: load(folder / f"ratio-{ratio:g}") for ratio in options.ratios}
    table = [row_of(DENSE, None, dense, None)]
    for ratio, run in loaded.items():
        budget = budget_of(run, options.methods[0])
        table += [row_of(method, ratio, run, budget) for method in options.methods]
    show(console, f"{options.data}, {options.model}; {options.steps} steps", HEAD, table, NOTES, folder / "table.md")
    console.print(f"plot: {plot(dense, loaded, options, folder)}")
    return 0


HEAD = ["method", "ratio", "achieved", "sent B", "final loss", "test accuracy", "accuracy at equal bytes"]
NOTES = """\
achieved: share of entries sent. sent B: per worker and step. final loss: training loss over the last logged steps.
Accuracy at equal bytes: best test accuracy before a run has sent what the first method sent in half of its steps. ±:
standard deviation over seeds."""


def load(folder: Path) -> dict[str, Any]:
    return {"lines": Journal(folder).lines(), "results": read_results(folder / "results.json")}


def budget_of(run: dict[str, Any], method: str) -> float:
    """Bytes that the method sends in half of its steps."""
    return max(line["sent_bytes"] for line in run["lines"] if line["method"] == method) / 2


def row_of(method: str, ratio: float | None, run: dict[str, Any], budget: float | None) -> list[str]:
    results = [row for row in run["results"] if row["method"] == method]
    lines = [line for line in run["lines"] if line["method"] == method]
    at_budget = [
        max(
            (x["accuracy"] for x in lines if x["seed"] == seed and "accuracy" in x and x["sent_bytes"] <= limit),
            default=0,
        )
        for limit in ([] if budget is None else [budget])
        for seed in dict.fromkeys(line["seed"] for line in lines)
    ]
    return [
        method,
        "-" if ratio is None else f"{ratio:g}",
        f"{np.mean([line['achieved_ratio'] for line in lines]):.3g}",
        f"{results[0]['sent_bytes']:,.0f}",
        spread([row["loss"] for row in results]),
        spread([row["accuracy"] for row in results]),
        spread(at_budget) if at_budget else "-",
    ]


def plot(dense: dict[str, Any], loaded: dict[float, dict[str, Any]], options: Any, folder: Path) -> Path:
    """Test accuracy against steps (above) and bytes (below), a column for each ratio."""
    from experiments.lib.plots import LINES, new_figure, save

    figure, axes = new_figure(len(loaded), rows=2, height=7)
    for column, (ratio, run) in enumerate(loaded.items()):
        for look, method in zip(LINES, [DENSE, *options.methods], strict=False):
            lines = [
                x for x in (dense if method == DENSE else run)["lines"] if x["method"] == method and "accuracy" in x
            ]
            steps = sorted({line["step"] for line in lines})
            means = [np.mean([line["accuracy"] for line in lines if line["step"] == step]) for step in steps]
            sent = [next(line["sent_bytes"] for line in lines if line["step"] == step) / 1e6 for step in steps]
            top, bottom = axes[column], axes[len(loaded) + column]
            top.plot(steps, means, label=method, markevery=4, markersize=4, **look)
            bottom.plot(sent, means, label=method, markevery=4, markersize=4, **look)
        top.set(xlabel="step", ylabel="test accuracy", title=f"ratio {ratio:g}")
        bottom.set(xlabel="MB sent by each worker", ylabel="test accuracy", xscale="log")
    axes[0].legend(fontsize=8)
    figure.suptitle(f"{options.data}, {options.model}, {options.workers} workers, mean of {len(options.seeds)} seeds")
    path = folder / "training.png"
    save(figure, path)
    return path
