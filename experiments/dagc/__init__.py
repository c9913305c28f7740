"""DAGC's rules against each other: which one needs the fewest rounds and bytes, and where uniform wins.

Simulates n workers with unequal data volumes: local steps, error feedback, top-k (or a hard threshold)
with a ratio for each worker, and the mean weighted by volumes. All rules send the same number of
entries in all: with thresholds their common factor is fitted to it in every round. Thresholds are
compared with the uniform threshold, the others with uniform ratios. Writes to runs/NAME: config.json,
metrics.jsonl (a line for each rule, skew, ratio and seed), table.md, dagc.png.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.lib.cli import Parser, at_least, choose_new, fraction, one_or_more, one_thread, positive, rule_of
from experiments.lib.folders import Journal, run_options, start_run
from experiments.lib.report import new_console, progress_bar, show

__all__ = ["main"]

RULES = ("uniform", "sqrt", "phi", "released", 2 / 3, 1.0)
THRESHOLDS = "threshold"  # before a rule: a hard threshold for each worker (DAGC-A) in place of top-k


def method_of(text: str) -> str:
    """A rule, or threshold:RULE; exponents may be written as fractions."""
    if rule_in(text) == "phi" and text != "phi":
        raise argparse.ArgumentTypeError(f"thresholds have the rules sqrt, released, uniform or a number; got {text!r}")
    return text


def rule_in(method: str) -> str | float:
    return rule_of(method.removeprefix(THRESHOLDS + ":"))


def parser() -> Parser:
    from experiments.lib.models import MODELS

    p = Parser(prog="python -m experiments dagc", description=(__doc__ or "").split("\n\n")[0])
    p.add_argument("--task", choices=("digits", "mnist", "quadratics"), default="digits", help="problem")
    p.add_argument("--data-dir", type=Path, default=None, help="folder with the files of --task mnist")
    p.add_argument("--model", choices=MODELS, default="mlp", help="architecture")
    what = f"rules, exponents, or {THRESHOLDS}:RULE; uniform is always there"
    methods = ["uniform", "sqrt", "phi", "released", "2/3", "1"]
    p.add_argument("--rules", nargs="+", type=method_of, default=methods, metavar="RULE", help=what)
    p.add_argument("--workers", type=at_least(2), default=10, help="workers")
    p.add_argument("--skews", nargs="+", type=one_or_more, default=[10.0, 100.0], metavar="SKEW", help="volume ratios")
    p.add_argument("--ratios", nargs="+", type=fraction, default=[0.01], metavar="RATIO", help="mean ratios")
    p.add_argument("--alpha", type=positive, default=1.0, help="Dirichlet parameter of the label mixes")
    p.add_argument("--rounds", type=at_least(2), default=60, help="rounds of each run")
    p.add_argument("--local-steps", type=at_least(1), default=5, help="SGD steps of a worker in a round")
    p.add_argument("--batch", type=at_least(1), default=16, help="examples of a step")
    p.add_argument("--lr", type=positive, default=0.02, help="learning rate")
    p.add_argument("--target", type=positive, default=0.9, help="accuracy to reach (quadratics: |grad f|^2)")
    p.add_argument("--seeds", nargs="+", type=at_least(0), default=[0, 1], metavar="SEED", help="one run for each")
    run_options(p, "dagc")
    return p


def main(arguments: Sequence[str]) -> int:
    one_thread()
    options = vars(parser().parse_args(arguments))
    name, runs = options.pop("name"), options.pop("runs")
    options["rules"] = list(dict.fromkeys(options["rules"]))
    for kind in ("", THRESHOLDS + ":"):  # what every comparison is against
        if any(rule.startswith(THRESHOLDS) == bool(kind) for rule in options["rules"]):
            options["rules"] = list(dict.fromkeys([kind + "uniform", *options["rules"]]))
    folder = choose_new(runs, name, "dagc")

    from experiments.dagc.tasks import TASKS

    simulation = TASKS[options["task"]](options)
    start_run(folder, options)
    rows = run(simulation, options, folder)
    if rows:
        report(options, rows, folder)
    return 0


def run(simulation: Any, options: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    console = new_console()
    cells = [
        (r, s, seed, rule)
        for r in options["ratios"]
        for s in options["skews"]
        for seed in options["seeds"]
        for rule in options["rules"]
    ]
    console.print(f"{options['task']}, {options['workers']} workers, {len(cells)} runs; writing to {folder}")
    rows, programs, tasks = [], {}, {}
    journal = Journal(folder)
    with progress_bar(console, "runs") as bar:
        progress = bar.add_task("runs", total=len(cells))
        try:
            for ratio, skew, seed, method in cells:
                bar.update(progress, description=f"ratio {ratio:g}, skew {skew:g}, seed {seed}, {method}")
                if (skew, seed) not in tasks:
                    tasks = {(skew, seed): simulation.task(skew, seed)}
                row = one(simulation, tasks[skew, seed], options, ratio, method, programs)
                row = {"method": method, "ratio": ratio, "skew": skew, "seed": seed, **row}
                rows.append(row)
                journal.add(row)
                bar.advance(progress)
                if bar.disable:
                    to = row["rounds"] if row["reached"] else f"more than {options['rounds']}"
                    console.print(
                        f"ratio {ratio:g}, skew {skew:g}, seed {seed}, {method}: {to} rounds, final {row['final']:.4g}"
                    )
        except KeyboardInterrupt:
            console.print("interrupted")
    return rows


def one(simulation: Any, task: Any, options: dict[str, Any], ratio: float, method: str, programs: dict) -> dict:
    """One run: scores after each round, and what it took to the target."""
    import jax.numpy as jnp

    import jaxcomp as jc
    from experiments.dagc.tasks import runner

    n, d = options["workers"], task.start.size
    rule, by_threshold = rule_in(method), method.startswith(THRESHOLDS)
    if (ratio, by_threshold) not in programs:
        room = min(float(n), 1 / ratio)  # whatever the rule gives to one worker
        more = {"sparsifier": jc.hard_threshold, "base": 1.0} if by_threshold else {}
        compressor = jc.dagc([1] * n, ratio, rule="uniform", capacity=room, **more)
        budget = int(jc.allocate.counts([ratio] * n, d).sum()) if by_threshold else None
        programs[ratio, by_threshold] = runner(simulation, compressor, options["rounds"], budget)
    if by_threshold:
        amounts = jc.allocate.thresholds(task.volumes, 1.0, rule=rule)
    else:
        amounts = jc.allocate.counts(jc.allocate.ratios(task.volumes, ratio, rule=rule, cap=1.0), d) / d
    weights = jnp.asarray(task.volumes / task.volumes.sum(), jnp.float32)
    outcome = programs[ratio, by_threshold](task.start, jnp.asarray(amounts, jnp.float32), weights, task.inputs)
    scores, sent = np.asarray(outcome.scores, float), np.asarray(outcome.sent, float)
    there = np.flatnonzero(task.better * scores >= task.better * options["target"])
    end = int(there[0]) + 1 if there.size else len(scores)
    return {
        "reached": bool(there.size),
        "rounds": end,
        "mb": 8e-6 * float(sent[:end].sum()),
        "achieved": float(sent[:end].mean()) / (n * d),
        "final": float(np.mean(scores[-max(len(scores) // 10, 1) :])),
        "scores": [float(f"{score:.5g}") for score in scores],
    }


# ------------------------------------------------------------------------------------------------


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half width of its 95 % confidence interval (Student's t); 0 for a single value."""
    from scipy import stats

    mean, count = float(np.mean(values)), len(values)
    if count < 2:
        return mean, 0.0
    return mean, float(stats.t.ppf(0.975, count - 1) * np.std(values, ddof=1) / np.sqrt(count))


def against_uniform(
    rows: list[dict[str, Any]], key: str, cell: tuple[float, float], method: str
) -> tuple[float, float]:
    """Relative change of a quantity in percent, paired by seed: mean and half width of its interval."""
    base = THRESHOLDS + ":uniform" if method.startswith(THRESHOLDS) else "uniform"
    of = lambda name: {r["seed"]: r[key] for r in rows if (r["ratio"], r["skew"], r["method"]) == (*cell, name)}
    mine, theirs = of(method), of(base)
    return interval([100 * (mine[seed] / theirs[seed] - 1) for seed in mine if theirs.get(seed)])


def report(options: dict[str, Any], rows: list[dict[str, Any]], folder: Path) -> None:
    console = new_console()
    final = "accuracy" if options["task"] != "quadratics" else "|grad f|^2"
    table = []
    for ratio in options["ratios"]:
        for skew in options["skews"]:
            for method in options["rules"]:
                mine = [r for r in rows if (r["ratio"], r["skew"], r["method"]) == (ratio, skew, method)]
                if not mine:
                    continue
                reached = sum(r["reached"] for r in mine)
                change, width = against_uniform(rows, "rounds", (ratio, skew), method)
                mean, spread = interval([r["final"] for r in mine])
                rounds = f"{np.mean([r['rounds'] for r in mine]):.1f}"
                table.append(
                    [
                        method,
                        f"{ratio:g}",
                        f"{skew:g}",
                        rounds if reached == len(mine) else f"{rounds} ({reached} of {len(mine)} reached it)",
                        f"{change:+.1f} ± {width:.1f}",
                        f"{np.mean([r['mb'] for r in mine]):.3f}",
                        f"{np.mean([r['achieved'] for r in mine]):.4g}",
                        f"{mean:.4g} ± {spread:.2g}",
                    ]
                )
    head = [
        "rule",
        "ratio",
        "skew",
        f"rounds to {options['target']:g}",
        "against uniform, %",
        "MB sent by all",
        "achieved ratio",
        f"final {final}",
    ]
    title = f"{options['task']}: {options['workers']} workers, {len(options['seeds'])} seeds"
    notes = "± is half a 95 % confidence interval over seeds; against uniform is paired by seed. A run that does not "
    notes += "reach the target counts with all its rounds. MB: 4 bytes for each value and each index, up to the target."
    if any(method.startswith(THRESHOLDS) for method in options["rules"]):
        notes += f" Rows of {THRESHOLDS}:RULE are against {THRESHOLDS}:uniform."
    show(console, title, head, table, notes, folder / "table.md")
    draw(options, rows, folder / "dagc.png")
    console.print(f"plot: {folder / 'dagc.png'}")


def draw(options: dict[str, Any], rows: list[dict[str, Any]], path: Path) -> None:
    """Rounds against uniform over the skew, a panel for each ratio; and scores at the largest skew."""
    from experiments.lib.plots import LINES, new_figure, save

    ratios, skews = options["ratios"], sorted(options["skews"])
    figure, axes = new_figure(len(ratios) + 1)
    methods = [m for m in options["rules"] if any(r["method"] == m for r in rows)]
    for axis, ratio in zip(axes, ratios, strict=False):
        axis.axhline(0, color=LINES[0]["color"], linewidth=1)
        every = [0.0]
        rivals = [m for m in methods if not m.endswith("uniform")]
        for i, method in enumerate(rivals):
            line = LINES[methods.index(method) % len(LINES)]
            points = [against_uniform(rows, "rounds", (ratio, skew), method) for skew in skews]
            places = np.array(skews) * 1.06 ** (i - (len(rivals) - 1) / 2)
            means, widths = np.array(points).T
            every += [mean for mean in means if np.isfinite(mean)]
            axis.errorbar(places, means, widths, label=method, capsize=2, markersize=5, elinewidth=1, **line)
        axis.set(
            xscale="log", xlabel="skew: largest data volume / smallest", ylabel="rounds to target, % against uniform"
        )
        margin = max(max(every) - min(every), 10) / 2  # bars of few seeds may be longer, and are cut off
        axis.set_ylim(min(every) - margin, max(every) + margin)
        axis.set_xticks(skews, [f"{skew:g}" for skew in skews])
        axis.minorticks_off()
        axis.set_title(f"mean ratio {ratio:g}; below 0 the rule wins, above 0 uniform does", fontsize=10)
        if rivals:
            axis.legend(fontsize=8)
    for i, method in enumerate(methods):
        mine = [r["scores"] for r in rows if (r["ratio"], r["skew"], r["method"]) == (ratios[0], skews[-1], method)]
        if mine:
            line = {**LINES[i % len(LINES)], "marker": ""}
            axes[-1].plot(np.arange(1, options["rounds"] + 1), np.mean(mine, axis=0), label=method, **line)
    axes[-1].axhline(options["target"], color="#7F7F7F", linestyle=":", linewidth=1)
    quadratic = options["task"] == "quadratics"
    axes[-1].set(
        xlabel="round", ylabel="|grad f|^2" if quadratic else "test accuracy", yscale="log" if quadratic else "linear"
    )
    axes[-1].set_title(f"mean over seeds, skew {skews[-1]:g}, ratio {ratios[0]:g}", fontsize=10)
    axes[-1].legend(fontsize=8)
    save(figure, path)
