"""Loss and accuracy of SIDCo and its rivals, at equal steps and at equal bytes.

Runs `compare` once for each ratio, with error feedback for every sparse method, and joins the results.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.lib.cli import at_least, common, fraction
from experiments.lib.folders import Journal, read_results
from experiments.lib.plots import by_seed
from experiments.lib.report import spread
from experiments.lib.run import Run, parser_of

__all__ = ["main"]

DENSE = "dense-f32"
SPARSE = ["top-k", "sidco", "sidco-p", "sidco-gp", "sidco-narrow", "dgc", "redsync", "gaussian-k"]
NOTES = """\
achieved: share of entries sent. sent B: per worker and step. final loss: training loss over the last logged steps.
Accuracy at equal bytes: best test accuracy before a run has sent what the first method sent in half of its steps. ±:
standard deviation over seeds."""
COLUMNS = {
    "method": "{method}",
    "ratio": "{ratio}",
    "achieved": "{achieved:.3g}",
    "sent B": "{sent:,.0f}",
    "final loss": "{loss}",
    "test accuracy": "{accuracy}",
    "accuracy at equal bytes": "{early}",
}


def main(arguments: Sequence[str]) -> int:
    from experiments.train import compare

    p = parser_of("sidco training", __doc__)
    p.add_argument("--ratios", type=fraction, nargs="+", default=[0.1, 0.01, 0.001], metavar="RATIO", help="targets")
    p.add_argument("--methods", nargs="+", choices=SPARSE, default=SPARSE, metavar="METHOD", help=", ".join(SPARSE))
    p.add_argument("--test-every", type=at_least(1), default=20, help="steps between tests")
    p.add_argument("--data", default="digits", help="as in compare")
    p.add_argument("--model", default="mlp", help="as in compare")
    common(p, "data-dir", "workers", steps=400, seeds=[0, 1, 2])
    run = Run(p, arguments, "sidco-training")
    o = run.options

    shared = ["--log-every", 10, "--checkpoint-every", o.steps, "--seeds", *o.seeds, "--runs", run.folder]
    for flag in ("steps", "test_every", "data", "data_dir", "model", "workers"):
        shared += [f"--{flag.replace('_', '-')}", getattr(o, flag)] if getattr(o, flag) is not None else []
    runs = [("dense", [DENSE], 1.0), *((f"ratio-{ratio:g}", o.methods, ratio) for ratio in o.ratios)]
    for name, methods, ratio in runs:
        words = [*shared, "--name", name, "--ratio", ratio, "--methods", *methods]
        if code := compare.main(list(map(str, words))):
            return code

    dense = load(run.folder / "dense")
    loaded = {ratio: load(run.folder / f"ratio-{ratio:g}") for ratio in o.ratios}
    rows = [row_of(DENSE, "-", dense, None)]
    for ratio, found in loaded.items():
        # Bytes that the first method sends in half of its steps.
        budget = max(line["sent_bytes"] for line in found["lines"] if line["method"] == o.methods[0]) / 2
        rows += [row_of(method, f"{ratio:g}", found, budget) for method in o.methods]
    run.table(f"{o.data}, {o.model}; {o.steps} steps", COLUMNS, rows, NOTES)
    over_steps, over_bytes = {}, {}
    for ratio, found in loaded.items():
        of = {DENSE: dense["lines"], **dict.fromkeys(o.methods, found["lines"])}
        curves = {method: accuracies(method, lines) for method, lines in of.items()}
        over_steps[f"ratio {ratio:g}, over steps"] = {name: (x, y) for name, (x, _, y) in curves.items()}
        over_bytes[f"ratio {ratio:g}, over MB sent by a worker"] = {name: (x, y) for name, (_, x, y) in curves.items()}
    title = f"{o.data}, {o.model}, {o.workers} workers, mean of {len(o.seeds)} seeds"
    run.plot("training.png", over_steps | over_bytes, title, ylabel="test accuracy")
    return 0


def accuracies(method: str, lines: list[dict[str, Any]]) -> list[np.ndarray]:
    """Steps with a test, megabytes sent until then, and the mean accuracy of the seeds."""
    tested = [line for line in lines if line["method"] == method and "accuracy" in line]
    steps, sent, means = (values.mean(0) for values in by_seed(tested, "step", "sent_bytes", "accuracy"))
    return [steps, sent / 1e6, means]


def load(folder: Path) -> dict[str, Any]:
    return {"lines": Journal(folder).lines(), "results": read_results(folder / "results.json")}


def row_of(method: str, ratio: str, found: dict[str, Any], budget: float | None) -> dict[str, Any]:
    """budget: bytes up to which the best accuracy counts."""
    results, of_method = ([row for row in found[kind] if row["method"] == method] for kind in ("results", "lines"))

    def best_of(seed: int) -> float:
        mine = (line for line in of_method if line["seed"] == seed and line["sent_bytes"] <= budget)
        return max((line["accuracy"] for line in mine if "accuracy" in line), default=0)

    return {
        "method": method,
        "ratio": ratio,
        "achieved": np.mean([line["achieved_ratio"] for line in of_method]),
        "sent": results[0]["sent_bytes"],
        "loss": spread([row["loss"] for row in results]),
        "accuracy": spread([row["accuracy"] for row in results]),
        "early": spread([best_of(row["seed"]) for row in results]) if budget is not None else "-",
    }
