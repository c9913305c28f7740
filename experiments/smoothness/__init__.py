"""Smoothness-aware compression: DCGD+, DIANA+, ADIANA+ against the methods they improve, in rounds, bits and seconds.

Regularised logistic regression split among n simulated workers, in 64-bit arithmetic, every method at its theoretical
step size. Writes to runs/NAME: config.json, metrics.jsonl, results.json, table.md and a plot.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.lib.cli import Parser, UserError, at_least, choose_new, positive
from experiments.lib.data import FILES
from experiments.lib.folders import Journal, run_options, start_run, write_json
from experiments.lib.report import new_console, progress_bar, show

__all__ = ["main"]

NOTES = """\
Per worker. budget: expected non-zeros of a message over d, the one with the fewest bits. kB up: sent until the target
(norms, Elias-coded gaps and levels, values of 32 bits), geometric mean over seeds. + upload: with the one-off message
that tells the server the roots and the plan. kB down: the direction, in 32 bits an entry or as a server compresses
it (half, one, two: dithering with so many times sqrt(d) levels and a norm of 16 bits). factor: kB up (--count both: up
and down) of the first row over this one's. floor: smallest relative squared error seen."""


def parser() -> Parser:
    from experiments.smoothness.problems import PROBLEMS, data_set
    from experiments.smoothness.studies import STUDIES

    known = "; ".join(f"{name}: {study.what}" for name, study in STUDIES.items())
    known += "; networks: layer-wise and diagonal smoothness on a small CNN"
    p = Parser(prog="python -m experiments smoothness", description=(__doc__ or "").split("\n\n")[0])
    p.add_argument("study", nargs="?", choices=[*STUDIES, "networks"], default="compare", help=known)
    p.add_argument("--data", type=data_set, default="digits", help=f"{', '.join(PROBLEMS)}, or a file: {FILES}")
    p.add_argument("--data-dir", type=Path, default=None, help="folder of the data sets with a name but digits")
    p.add_argument("--workers", nargs="+", type=at_least(1), default=None, help="n; several for the study workers")
    p.add_argument(
        "--l2", type=positive, default=None, help="regularisation, which is also mu; 1e-2 for digits, else 1e-3"
    )
    p.add_argument("--split", choices=["sorted", "contiguous", "iid"], default="sorted", help="how rows are dealt")
    p.add_argument(
        "--budgets", nargs="+", type=positive, default=None, help="expected non-zeros over d; the best counts"
    )
    p.add_argument("--form", choices=["paper", "tight"], default="paper", help="step sizes of the DIANA methods")
    p.add_argument("--target", type=positive, default=None, help="relative squared error to reach")
    p.add_argument("--rounds", type=at_least(1), default=None, help="at most so many")
    p.add_argument("--count", choices=["up", "both"], default="up", help="bits that decide which budget is best")
    p.add_argument("--seeds", nargs="+", type=at_least(0), default=[0, 1], metavar="SEED", help="of the compressors")
    p.add_argument("--only", nargs="+", default=None, metavar="METHOD", help="only these rows of the study, by name")
    run_options(p, "smoothness")
    return p


def main(arguments: Sequence[str]) -> int:
    import jax

    options = parser().parse_args(arguments)
    if options.study == "networks":
        refuse_what_it_has_not(options)
    if options.l2 is None:
        options.l2 = 1e-2 if options.data == "digits" else 1e-3
    folder = choose_new(options.runs, options.name, "smoothness")
    with jax.enable_x64(options.study != "networks"):
        if options.study == "networks":
            from experiments.smoothness.networks import networks

            return networks(options, folder)
        return compare(options, folder)


def refuse_what_it_has_not(options: Any) -> None:
    """Options that only the convex studies read."""
    given = vars(parser().parse_args(["networks"]))
    for name in ("data", "data_dir", "workers", "l2", "split", "form", "target", "only", "count"):
        if getattr(options, name) != given[name]:
            raise UserError(f"the study networks has no --{name.replace('_', '-')}: it trains a CNN on digits")


def compare(o: Any, folder: Path) -> int:
    from experiments.smoothness.problems import make_problem
    from experiments.smoothness.report import HEAD, draw, plot_workers, rows_of
    from experiments.smoothness.studies import STUDIES

    study, console = STUDIES[o.study], new_console()
    budgets = tuple(o.budgets or study.budgets)
    target, limit = o.target or study.target, o.rounds or study.max_rounds
    counts = o.workers or ([2, 4, 8, 16] if o.study == "workers" else [10])
    if len(counts) > 1 and o.study != "workers":
        raise UserError("several --workers only for the study workers")
    problems = [make_problem(o.data, o.data_dir, n, o.l2, o.split) for n in counts]
    setups = [study.setups(problem, budgets or (1 / problem.workers,), o.form, o.count) for problem in problems]
    if o.only:
        known = [setup.label for setup in setups[0]]
        if missing := [label for label in o.only if label not in known]:
            raise UserError(f"no method {missing[0]!r} in this study; it has {', '.join(known)}")
        setups = [[setup for setup in some if setup.label in o.only] for some in setups]
    start_run(folder, vars(o))
    journal = Journal(folder)
    lines: dict[str, list[tuple[float, float]]] = {}
    everything, name = [], Path(o.data).name
    for problem, some in zip(problems, setups, strict=True):
        title = (
            f"{name}: n = {problem.workers} workers x {problem.features.shape[1]} rows, d = {problem.d}, {o.split} "
            f"split, l2 = {o.l2:g}, {o.form} steps, L = {problem.L:.3g}, L_max = {problem.L_max:.3g}, to {target:g}"
        )
        console.print(title)
        results = run_all(problem, some, target, limit, o.seeds, journal, console, o.count)
        for r in results:
            rounds = float(np.mean(r.curves.reached(r.target)[r.best]))
            lines.setdefault(r.setup.label, []).append((float(r.kilobytes[r.best]), rounds))
        show(console, title, HEAD, rows_of(results), NOTES, folder / f"table-{problem.workers}.md")
        draw(folder / f"curves-{problem.workers}.png", title, results)
        everything += [dict(zip(HEAD, row, strict=True), workers=problem.workers) for row in rows_of(results)]
        write_json(folder / "results.json", everything)
    if len(counts) > 1:
        plot_workers(folder / "workers.png", f"{name}: to {target:g}, each at its best budget", counts, lines)
    console.print(f"written to {folder}: " + ", ".join(sorted(path.name for path in folder.iterdir())))
    return 0


def run_all(problem: Any, setups: Any, target: float, limit: int, seeds: Any, journal: Any, console: Any, count: str):
    from experiments.smoothness.report import Result
    from experiments.smoothness.runner import run_setup

    results = []
    with progress_bar(console, "rounds") as bar:
        for setup in setups:
            task = bar.add_task(setup.label, total=limit, now="compiling")

            def now(done: int, error: float, task: Any = task) -> None:
                bar.update(task, completed=done, now=f"{done:,} rounds, error {error:.1e}")

            curves = run_setup(problem, setup, seeds, target=target, max_rounds=limit, count=count, show=now)
            result = Result(problem, setup, curves, target, count)
            bar.update(task, total=curves.errors.shape[-1])
            results.append(result)
            journal.add(*metrics_of(result, seeds))
            if bar.disable:
                kilobytes, error = result.kilobytes[result.best], np.nanmin(curves.errors[result.best])
                to = f"{kilobytes:,.1f} kB" if np.isfinite(kilobytes) else f"target not reached, error {error:.1e},"
                console.print(f"{setup.label}: {to} at budget {setup.budgets[result.best]:g} d", highlight=False)
    return results


def metrics_of(result: Any, seeds: Sequence[int]) -> Iterator[dict[str, Any]]:
    """A line for about 50 rounds of each run."""
    errors, bits = result.curves.errors, result.curves.bits
    rounds = np.unique(np.geomspace(1, errors.shape[-1], 50).astype(int)) - 1
    for b, budget in enumerate(result.setup.budgets):
        for s, seed in enumerate(seeds):
            for t in rounds:
                line = {"method": result.setup.label, "workers": result.problem.workers, "budget": budget, "seed": seed}
                line |= {"round": int(t) + 1, "error": float(errors[b, s, t]), "bits": float(bits[b, s, t])}
                line |= {
                    "seconds": result.curves.seconds * (int(t) + 1),
                    "down_bits": 32.0 * result.problem.d * (int(t) + 1),
                }
                yield line
