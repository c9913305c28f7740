"""Loss and accuracy of SIDCo and its rivals on digits, at equal steps and at equal bytes.

Runs `compare` once for each ratio, with error feedback for every sparse method, and joins the results.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.lib.cli import common, fraction
from experiments.lib.folders import Journal, read_results
from experiments.lib.plots import by_seed
from experiments.lib.report import spread
from experiments.lib.run import Run, parser_of
from experiments.train import compare

__all__ = ["main"]

Lines = list[dict[str, Any]]
DENSE = "dense-f32"
SPARSE = ["top-k", "sidco", "sidco-p", "sidco-gp", "sidco-narrow", "dgc", "redsync", "gaussian-k"]
NOTES = """\
achieved: share of entries sent. sent B: per worker and step. final loss: training loss over the last logged steps.
Accuracy at equal bytes: best test accuracy before a run has sent what the first method sent in half of its steps; "-":
none was measured so early. ±: standard deviation over seeds."""
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
    p = parser_of("sidco training", __doc__)
    p.add_argument("--ratios", type=fraction, nargs="+", default=[0.1, 0.01, 0.001], metavar="RATIO", help="targets")
    p.add_argument("--methods", nargs="+", choices=SPARSE, default=SPARSE, metavar="METHOD", help=", ".join(SPARSE))
    common(p, "workers", steps=400, seeds=[0, 1, 2])
    run = Run(p, arguments, "sidco-training")
    o = run.options

    def trained(name: str, ratio: float, methods: list[str]) -> dict[str, tuple[Lines, Lines]]:
        """What `compare` logged in its steps, and its results, for each method."""
        folder = run.folder / name
        words = ["--runs", run.folder, "--name", name, "--ratio", ratio, "--methods", *methods, "--steps", o.steps]
        words += ["--workers", o.workers, "--seeds", *o.seeds, "--checkpoint-every", o.steps, "--test-every", 20]
        if compare.main(list(map(str, words))):
            raise KeyboardInterrupt
        of = lambda method, lines: [line for line in lines if line["method"] == method]
        lines, results = Journal(folder).lines(), read_results(folder / "results.json")
        return {method: (of(method, lines), of(method, results)) for method in methods}

    dense = trained("dense", 1, [DENSE])
    rows, panels = [{"ratio": "-", **row_of(DENSE, *dense[DENSE], 0)}], {}
    for ratio in o.ratios:
        found = trained(f"ratio-{ratio:g}", ratio, o.methods)
        # Bytes that the first method sends in half of its steps.
        budget = max(line["sent_bytes"] for line in found[o.methods[0]][0]) / 2
        rows += [{"ratio": f"{ratio:g}", **row_of(method, *found[method], budget)} for method in o.methods]
        panels[f"ratio {ratio:g}"] = {method: curve_of(lines) for method, (lines, _) in (dense | found).items()}
    run.table(f"digits, mlp; {o.steps} steps", COLUMNS, rows, NOTES)
    title = f"digits, mlp, {o.workers} workers, {len(o.seeds)} seeds, band: min to max"
    run.plot("training.png", panels, title, xscale="log", xlabel="MB sent by a worker", ylabel="test accuracy")
    return 0


def row_of(method: str, lines: Lines, results: Lines, budget: float) -> dict[str, Any]:
    """budget: bytes up to which the best accuracy counts."""
    early: dict[int, list[float]] = {row["seed"]: [] for row in results}
    for line in lines:
        if line["sent_bytes"] <= budget and "accuracy" in line:
            early[line["seed"]].append(line["accuracy"])
    return {
        "method": method,
        "achieved": np.mean([line["achieved_ratio"] for line in lines]),
        "sent": results[0]["sent_bytes"],
        "loss": spread([row["loss"] for row in results]),
        "accuracy": spread([row["accuracy"] for row in results]),
        "early": spread(list(map(max, early.values()))) if all(early.values()) else "-",
    }


def curve_of(lines: Lines) -> tuple[np.ndarray, np.ndarray]:
    """Megabytes sent until each test, and its accuracy for each seed."""
    sent, accuracies = by_seed([line for line in lines if "accuracy" in line], "sent_bytes", "accuracy")
    return sent.mean(0) / 1e6, accuracies
