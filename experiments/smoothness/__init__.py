"""Smoothness-aware compression: DCGD+, DIANA+, ADIANA+ against the methods they improve, in rounds and bits.

Regularised logistic regression split among n simulated workers, in 64-bit arithmetic, every method at its theoretical
step size. Writes to runs/NAME: config.json, metrics.jsonl (a line for each method), and a table and a plot for each n.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from experiments.lib.cli import UserError, at_least, common, positive
from experiments.lib.data import add_rows
from experiments.lib.run import Columns, Run, parser_of
from experiments.smoothness.networks import networks
from experiments.smoothness.problems import Problem, make_problem
from experiments.smoothness.runner import Curves, run_setup
from experiments.smoothness.setups import STUDIES, Setup

__all__ = ["main", "upload_bits"]

NOTES = """\
Per worker. budget: expected non-zeros of a message over d, the one with the fewest bits; * at an end of those tried,
so that one further may be better. kB up: sent until the target
(norms, Elias-coded gaps and levels, values of 32 bits), geometric mean over seeds. + upload: with the one-off message
that tells the server the roots and the plan. kB down: the direction, in 32 bits an entry or as a server compresses
it (dithering with sqrt(d) levels and a norm of 16 bits). factor: kB up (--count both: up
and down) of the first row over this one's. floor: smallest relative squared error seen."""


def where_reached(key: str, form: str) -> Callable[[dict[str, Any]], str]:
    return lambda row: form.format(row[key]) if np.isfinite(row[key]) else "-"


COLUMNS: Columns = {
    "method": "{method}",
    "budget": "{budget:g} d{edge}",
    "rounds": where_reached("rounds", "{:,.0f}"),
    "bits/round": "{bits:.0f}",
    "kB up": where_reached("up", "{:,.1f}"),
    "+ upload": where_reached("uploaded", "{:,.1f}"),
    "kB down": where_reached("down", "{:,.1f}"),
    "both": where_reached("both", "{:,.1f}"),
    "factor": where_reached("factor", "{:.2f}"),
    "floor": "{floor:.1e}",
}


def main(arguments: Sequence[str]) -> int:
    known = "; ".join(f"{name}: {study.what}" for name, study in STUDIES.items())
    known += "; networks: layer-wise and diagonal smoothness on a small CNN (--rounds, --budgets and --seeds alone)"
    p = parser_of("smoothness", __doc__)
    p.add_argument("study", nargs="?", choices=[*STUDIES, "networks"], default="all", help=known)
    add_rows(p, "digits")
    own = "D features of drawn rows instead of data: each worker has a strong one of its own, where theory gains most"
    p.add_argument("--own", type=at_least(2), default=None, metavar="D", help=own)
    p.add_argument("--workers", nargs="+", type=at_least(1), default=None, help="n; a table for each")
    p.add_argument("--l2", type=positive, default=None, help="also mu; without it 1e-2 for digits, else 1e-3")
    p.add_argument("--budgets", nargs="+", type=positive, default=None, help="non-zeros over d; the best counts")
    p.add_argument("--target", type=positive, default=None, help="relative squared error to reach")
    p.add_argument("--rounds", type=at_least(1), default=None, help="at most so many")
    p.add_argument("--count", choices=["up", "both"], default="up", help="bits that decide which budget is best")
    common(p, seeds=([0, 1], "of the compressors"))
    p.add_argument("--only", nargs="+", default=None, metavar="METHOD", help="only these rows of the study, by name")
    run = Run(p, arguments, "smoothness")
    if run.options.study == "networks":
        return networks(run)
    o, study = run.options, STUDIES[run.options.study]
    o.l2 = o.l2 or (1e-2 if o.data is None else 1e-3)
    o.budgets = o.budgets or list(study.budgets)
    o.target, o.rounds = o.target or study.target, o.rounds or study.max_rounds
    o.workers = o.workers or ([2, 4, 8, 16] if o.study == "workers" else [10])
    with jax.enable_x64(True):
        rows = [row for n in o.workers for row in compare(run, n)]
    if len(o.workers) > 1:
        axes = {"kB sent by a worker to the target": "up", "rounds to the target": "rounds"}
        of = lambda label, key: tuple(
            zip(*((row["workers"], row[key]) for row in rows if row["method"] == label), strict=True)
        )
        labels = dict.fromkeys(row["method"] for row in rows)
        panels = {axis: {label: of(label, key) for label in labels} for axis, key in axes.items()}
        run.plot("workers.png", panels, f"to {o.target:g}", xscale="log", yscale="log", xlabel="workers n")
    return run.status


def compare(run: Run, n: int) -> list[dict[str, Any]]:
    """The table and the plot of n workers; its rows."""
    o = run.options
    problem = make_problem(o.data, n, o.l2, o.own)
    setups = {setup.label: setup for setup in STUDIES[o.study].setups(problem, o.budgets or (1 / n,), o.count)}
    if missing := [label for label in o.only or () if label not in setups]:
        raise UserError(f"no method {missing[0]!r} in this study; it has {', '.join(setups)}")
    name = f"own {o.own}" if o.own else "digits" if o.data is None else o.data.name
    title = (
        f"{name}: n = {n} workers x {problem.features.shape[1]} rows, d = {problem.d}, l2 = {o.l2:g}, "
        f"L = {problem.L:.3g}, L_max = {problem.L_max:.3g}, to {o.target:g}"
    )
    run.say(title)

    def measure(label: str) -> dict[str, Any]:
        curves = run_setup(problem, setups[label], o.seeds, target=o.target, max_rounds=o.rounds, count=o.count)
        row = row_of(problem, setups[label], curves, o.target, o.count)
        run.add({key: value for key, value in row.items() if key != "curves"})
        return row

    rows = run.rows_of([label for label in setups if label in (o.only or setups)], str, measure)
    for row in rows:
        row["factor"] = rows[0][o.count] / row[o.count] if np.isfinite(row[o.count]) else np.inf
    run.table(title, COLUMNS, rows, NOTES, f"table-{n}.md")
    panels = {axis: {row["method"]: row["curves"][axis] for row in rows} for axis in rows[0]["curves"]}
    error = "relative squared error |x - x*|² / |x*|²"
    run.plot(f"curves-{n}.png", panels, title, xscale="log", yscale="log", ylabel=error)
    return rows


def row_of(problem: Problem, setup: Setup, curves: Curves, target: float, count: str) -> dict[str, Any]:
    """Of the budget with the fewest bits or, if none reached the target, the smallest error. count: "up" or "both";
    numbers are infinite where the target was not reached."""
    mean = lambda values: np.exp(np.mean(np.log(values), axis=1))  # geometric, over seeds
    floors = mean(np.maximum(np.nanmin(curves.errors, -1), 1e-300))
    kilobytes = {way: mean(curves.bits_to(target, way)) / 8e3 for way in ("up", "down", "both")}
    best = np.argmin(kilobytes[count] if np.isfinite(kilobytes[count]).any() else floors)
    sent = {way: float(values[best]) for way, values in kilobytes.items()}
    upload = upload_bits(setup, problem.d) / 8e3
    errors = mean(np.clip(np.nan_to_num(curves.errors[best].T, nan=1e6), 1e-30, 1e6))
    rounds, megabytes = np.arange(1, errors.size + 1), curves.up[best].mean(0) / 8e6
    axes = {"rounds": rounds, "MB sent by a worker": megabytes, "MB with the one-off upload": megabytes + upload / 1e3}
    return sent | {
        "method": setup.label,
        "workers": problem.workers,
        "budget": setup.budgets[best],
        "edge": "*" if len(setup.budgets) > 1 and best in (0, len(setup.budgets) - 1) else "",
        "rounds": float(np.mean(curves.reached(target)[best])),
        "bits": float(curves.up[best, :, -1].mean()) / errors.size,
        "uploaded": sent["up"] + upload,
        "floor": float(floors[best]),
        "curves": {name: (x, errors) for name, x in axes.items()},
    }


def upload_bits(setup: Setup, d: int) -> float:
    """One-off upload of a worker in f32: the operator as it is stored (a symmetric root once), and the plan."""
    if not setup.label.split()[0].endswith("+"):
        return 0.0
    operator, entries = setup.operator, float(d)
    from jaxcomp.smoothness.store import form_of

    form = form_of(operator)
    if form == "Dense":
        root = operator.matrix_root[0]
        entries = d * (d + 1) / 2 if np.allclose(root, root.T) else d * d
    elif form == "LowRank":
        entries = operator.vectors[0].size + operator.sigma[0].size + 1
    elif form == "Blocks":
        entries = operator.matrix_root[0].size
    plan = max(np.size(leaf) for leaf in jax.tree.leaves(setup.plans[0])) / operator.diag.shape[0]
    return 32 * (entries + plan)
