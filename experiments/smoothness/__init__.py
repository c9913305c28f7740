"""Smoothness-aware compression: DCGD+, DIANA+, ADIANA+ against the methods they improve, in rounds, bits and seconds.

Regularised logistic regression split among n simulated workers, in 64-bit arithmetic, every method at its theoretical
step size. Writes to runs/NAME: config.json, metrics.jsonl, results.json, table.md and a plot.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.lib.cli import Parser, UserError, at_least, common, positive
from experiments.lib.report import progress_bar
from experiments.lib.run import Run, cells, parser_of
from experiments.smoothness.problems import add_data, make_problem
from experiments.smoothness.report import NOTES, Result, columns_of, draw, metrics_of, plot_workers
from experiments.smoothness.runner import run_setup
from experiments.smoothness.setups import STUDIES

__all__ = ["main"]


def parser() -> Parser:
    known = "; ".join(f"{name}: {study.what}" for name, study in STUDIES.items())
    known += "; networks: layer-wise and diagonal smoothness on a small CNN"
    p = parser_of("smoothness", __doc__)
    p.add_argument("study", nargs="?", choices=[*STUDIES, "networks"], default="compare", help=known)
    add_data(p)
    p.add_argument("--workers", nargs="+", type=at_least(1), default=None, help="n; several for the study workers")
    p.add_argument("--l2", type=positive, default=None, help="also mu; without it 1e-2 for digits, else 1e-3")
    p.add_argument("--split", choices=["sorted", "contiguous", "iid"], default="sorted", help="how rows are dealt")
    p.add_argument("--budgets", nargs="+", type=positive, default=None, help="non-zeros over d; the best counts")
    p.add_argument("--form", choices=["paper", "tight"], default="paper", help="step sizes of the DIANA methods")
    p.add_argument("--target", type=positive, default=None, help="relative squared error to reach")
    p.add_argument("--rounds", type=at_least(1), default=None, help="at most so many")
    p.add_argument("--count", choices=["up", "both"], default="up", help="bits that decide which budget is best")
    common(p, seeds=([0, 1], "of the compressors"))
    p.add_argument("--only", nargs="+", default=None, metavar="METHOD", help="only these rows of the study, by name")
    return p


def main(arguments: Sequence[str]) -> int:
    run = Run(parser(), arguments, "smoothness")
    if run.options.study == "networks":
        from experiments.smoothness.networks import networks

        for name in ("data", "data_dir", "workers", "l2", "split", "form", "target", "only", "count"):
            if getattr(run.options, name) != parser().get_default(name):
                raise UserError(f"the study networks has no --{name.replace('_', '-')}: it trains a CNN on digits")
        return networks(run)
    with jax.enable_x64(True):
        return compare(run)


def compare(run: Run) -> int:
    o = run.options
    study, name = STUDIES[o.study], Path(o.data).name
    o.l2 = o.l2 or (1e-2 if o.data == "digits" else 1e-3)
    o.budgets = o.budgets or list(study.budgets)
    o.target, o.rounds = o.target or study.target, o.rounds or study.max_rounds
    o.workers = o.workers or ([2, 4, 8, 16] if o.study == "workers" else [10])
    if len(o.workers) > 1 and o.study != "workers":
        raise UserError("several --workers only for the study workers")
    problems = [make_problem(o.data, o.data_dir, n, o.l2, o.split) for n in o.workers]
    setups = [study.setups(problem, o.budgets or (1 / problem.workers,), o.form, o.count) for problem in problems]
    if o.only:
        known = [setup.label for setup in setups[0]]
        if missing := [label for label in o.only if label not in known]:
            raise UserError(f"no method {missing[0]!r} in this study; it has {', '.join(known)}")
        setups = [[setup for setup in some if setup.label in o.only] for some in setups]
    by_label: dict[str, list[Result]] = {}
    everything = []
    for problem, some in zip(problems, setups, strict=True):
        title = (
            f"{name}: n = {problem.workers} workers x {problem.features.shape[1]} rows, d = {problem.d}, {o.split} "
            f"split, l2 = {o.l2:g}, {o.form} steps, L = {problem.L:.3g}, L_max = {problem.L_max:.3g}, to {o.target:g}"
        )
        run.say(title)
        results = run_all(run, problem, some)
        for r in results:
            by_label.setdefault(r.setup.label, []).append(r)
        columns = columns_of(results[0])
        run.table(title, columns, results, NOTES, f"table-{problem.workers}.md")
        draw(run, f"curves-{problem.workers}.png", title, results)
        rows = cells(columns, results)
        everything += [dict(zip(columns, row, strict=True), workers=problem.workers) for row in rows]
        run.keep(everything)
    if len(o.workers) > 1:
        plot_workers(run, f"{name}: to {o.target:g}, each at its best budget", by_label)
    return 0


def run_all(run: Run, problem: Any, setups: Any) -> list[Result]:
    """The results, of which one that needs no more rounds ends before --rounds."""
    o, results = run.options, []
    with progress_bar(run.console, "rounds") as bar:
        for setup in setups:
            task = bar.add_task(setup.label, total=o.rounds, now="compiling")

            def now(done: int, error: float, task: Any = task) -> None:
                bar.update(task, completed=done, now=f"{done:,} rounds, error {error:.1e}")

            curves = run_setup(problem, setup, o.seeds, target=o.target, max_rounds=o.rounds, count=o.count, show=now)
            bar.update(task, total=curves.errors.shape[-1])
            result = Result(problem, setup, curves, o.target, o.count)
            results.append(result)
            run.add(*metrics_of(result, o.seeds))
            if bar.disable:
                kilobytes = result.kilobytes[o.count]
                missed = f"target not reached, error {result.floor:.1e},"
                to = f"{kilobytes:,.1f} kB" if np.isfinite(kilobytes) else missed
                run.say(f"{setup.label}: {to} at budget {setup.budgets[result.best]:g} d")
    return results
