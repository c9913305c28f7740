"""DAGC's rules against each other: which one needs the fewest rounds and bytes, and where uniform wins.

Simulates n workers with unequal data volumes: local steps, error feedback, top-k (or a hard threshold)
with a ratio for each worker, and the mean weighted by volumes. All rules send the same number of
entries in all: with thresholds their common factor is fitted to it in every round. Thresholds are
compared with the uniform threshold, the others with uniform ratios. Writes to runs/NAME: config.json,
metrics.jsonl (a line for each rule, skew, ratio and seed), table.md, dagc.png,
scores.png.
"""

import argparse
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.lib.cli import at_least, common, fraction, one_or_more, one_thread, positive, rule_of
from experiments.lib.run import Run, parser_of

__all__ = ["main"]

THRESHOLDS = "threshold"  # before a rule: a hard threshold for each worker (DAGC-A) in place of top-k


def method_of(text: str) -> str:
    """A rule, or threshold:RULE; exponents may be written as fractions."""
    if rule_in(text) == "phi" and text != "phi":
        raise argparse.ArgumentTypeError(f"thresholds have the rules sqrt, released, uniform or a number; got {text!r}")
    return text


def rule_in(method: str) -> str | float:
    return rule_of(method.removeprefix(THRESHOLDS + ":"))


def uniform_of(method: str) -> str:
    """What a method is compared with."""
    return THRESHOLDS + ":uniform" if method.startswith(THRESHOLDS) else "uniform"


def main(arguments: Sequence[str]) -> int:
    one_thread()
    from experiments.dagc.tasks import TASKS
    from experiments.lib.models import MODELS

    p = parser_of("dagc", __doc__)
    p.add_argument("--task", choices=TASKS, default="digits", help="problem")
    p.add_argument("--model", choices=MODELS, default="mlp", help="architecture")
    what = f"rules, exponents, or {THRESHOLDS}:RULE; uniform is always there"
    rules = ["uniform", "sqrt", "phi", "released", "2/3", "1"]
    p.add_argument("--rules", nargs="+", type=method_of, default=rules, metavar="RULE", help=what)
    p.add_argument("--skews", nargs="+", type=one_or_more, default=[10.0, 100.0], metavar="SKEW", help="volume ratios")
    p.add_argument("--ratios", nargs="+", type=fraction, default=[0.01], metavar="RATIO", help="mean ratios")
    p.add_argument("--alpha", type=positive, default=1.0, help="Dirichlet parameter of the label mixes")
    p.add_argument("--rounds", type=at_least(2), default=60, help="rounds of each run")
    p.add_argument("--local-steps", type=at_least(1), default=5, help="SGD steps of a worker in a round")
    p.add_argument("--target", type=positive, default=0.9, help="accuracy to reach (quadratics: |grad f|^2)")
    common(p, data_dir=(None, "folder with the files of --task mnist"), workers={"type": at_least(2), "default": 10})
    common(p, batch=16, lr=0.02, seeds=[0, 1])
    run = Run(p, arguments, "dagc")
    o = run.options
    o.rules = list(dict.fromkeys([*sorted(set(map(uniform_of, o.rules))), *o.rules]))
    simulation = TASKS[o.task](vars(o))
    programs, tasks = {}, {}

    def measure(case: tuple[float, float, int, str]) -> dict[str, Any]:
        ratio, skew, seed, method = case
        if (skew, seed) not in tasks:
            tasks.clear()
            tasks[skew, seed] = simulation.task(skew, seed)
        row = {"method": method, "ratio": ratio, "skew": skew, "seed": seed}
        row |= one(simulation, tasks[skew, seed], vars(o), ratio, method, programs)
        run.add(row)
        return row

    cases = list(itertools.product(o.ratios, o.skews, o.seeds, o.rules))
    run.say(f"{o.task}, {o.workers} workers, {len(cases)} runs; writing to {run.folder}")
    named = lambda case: "ratio {:g}, skew {:g}, seed {}, {}".format(*case)
    rows = run.rows_of(cases, named, measure, partial=True)
    report(run, rows)
    draw(run, rows)
    return 0


def one(simulation: Any, task: Any, options: dict[str, Any], ratio: float, method: str, programs: dict) -> dict:
    """One run: scores after each round, and what it took to the target. programs: compiled ones, to use again."""
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


def those_of(rows: list[dict[str, Any]], ratio: float, skew: float, method: str) -> list[dict[str, Any]]:
    return [row for row in rows if (row["ratio"], row["skew"], row["method"]) == (ratio, skew, method)]


def against_uniform(
    rows: list[dict[str, Any]], key: str, cell: tuple[float, float], method: str
) -> tuple[float, float]:
    """Relative change of a quantity in percent, paired by seed: mean and half width of its interval."""
    of = lambda name: {row["seed"]: row[key] for row in those_of(rows, *cell, name)}
    mine, theirs = of(method), of(uniform_of(method))
    return interval([100 * (mine[seed] / theirs[seed] - 1) for seed in mine if theirs.get(seed)])


def report(run: Run, rows: list[dict[str, Any]]) -> None:
    o = run.options
    summary = []
    for ratio, skew, method in itertools.product(o.ratios, o.skews, o.rules):
        if mine := those_of(rows, ratio, skew, method):
            mean = {key: np.mean([row[key] for row in mine]) for key in ("rounds", "mb", "achieved")}
            reached = sum(row["reached"] for row in mine)
            missed = "" if reached == len(mine) else f" ({reached} of {len(mine)} reached it)"
            change = against_uniform(rows, "rounds", (ratio, skew), method)
            final = interval([row["final"] for row in mine])
            row = {"method": method, "ratio": ratio, "skew": skew, "missed": missed, "change": change, "final": final}
            summary.append(row | mean)
    columns = {
        "rule": "{method}",
        "ratio": "{ratio:g}",
        "skew": "{skew:g}",
        f"rounds to {o.target:g}": "{rounds:.1f}{missed}",
        "against uniform, %": "{change[0]:+.1f} ± {change[1]:.1f}",
        "MB sent by all": "{mb:.3f}",
        "achieved ratio": "{achieved:.4g}",
        f"final {'|grad f|^2' if o.task == 'quadratics' else 'accuracy'}": "{final[0]:.4g} ± {final[1]:.2g}",
    }
    notes = "± is half a 95 % confidence interval over seeds; against uniform is paired by seed. A run that does not "
    notes += "reach the target counts with all its rounds. MB: 4 bytes for each value and each index, up to the target."
    if THRESHOLDS + ":uniform" in o.rules:
        notes += f" Rows of {THRESHOLDS}:RULE are against {THRESHOLDS}:uniform."
    run.table(f"{o.task}: {o.workers} workers, {len(o.seeds)} seeds", columns, summary, notes)


def draw(run: Run, rows: list[dict[str, Any]]) -> None:
    """Rounds against uniform over the skew, a panel for each ratio; and scores at the largest skew."""
    o, skews = run.options, sorted(run.options.skews)
    rivals = [method for method in o.rules if not method.endswith("uniform")]
    panels: dict[str, dict[str, Any]] = {}
    for ratio in o.ratios:
        panel = panels.setdefault(f"mean ratio {ratio:g}; below 0 the rule wins, above 0 uniform does", {})
        for i, method in enumerate(rivals):
            points = [against_uniform(rows, "rounds", (ratio, skew), method) for skew in skews]
            panel[method] = (np.array(skews) * 1.06**i, *np.array(points).T)
    labels = {"xlabel": "skew: largest data volume / smallest", "ylabel": "rounds to target, % against uniform"}
    run.plot("dagc.png", panels, xscale="log", **labels)
    panel = {}
    for method in o.rules:
        if mine := those_of(rows, o.ratios[0], skews[-1], method):
            scores = np.mean([row["scores"] for row in mine], axis=0)
            panel[method] = (np.arange(1, o.rounds + 1), scores)
    labels = {"ylabel": "|grad f|^2", "yscale": "log"} if o.task == "quadratics" else {"ylabel": "test accuracy"}
    run.plot("scores.png", {f"mean over seeds, skew {skews[-1]:g}, ratio {o.ratios[0]:g}": panel}, **labels)
