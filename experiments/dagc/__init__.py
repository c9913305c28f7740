"""DAGC's rules against each other: which one needs the fewest rounds and bytes, and where uniform wins.

Simulates n workers with unequal data volumes: local steps, error feedback, top-k (or a hard threshold)
with a ratio for each worker, and the mean weighted by volumes. All rules send the same number of
entries in all: with thresholds their common factor is fitted to it in every round. Thresholds are
compared with the uniform threshold, the others with uniform ratios. Writes to runs/NAME: config.json,
metrics.jsonl (a line for each rule, skew, ratio and seed), table.md, dagc.png.
"""

import argparse
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from scipy import stats

import jaxcomp as jc
from experiments.dagc.tasks import TASKS, runner
from experiments.lib.cli import at_least, common, fraction, one_or_more, one_thread, positive, rule_of
from experiments.lib.run import Run, parser_of

__all__ = ["against_uniform", "interval", "main", "one", "rule_in", "shown"]

THRESHOLDS = "threshold"  # before a rule: a hard threshold for each worker (DAGC-A) in place of top-k
NOTES = """\
± is half a 95 % confidence interval over seeds; against uniform is paired by seed, of rows of threshold:RULE against
threshold:uniform; "-": neither of the two reached the target. A run that does not reach it counts with all its rounds.
MB: 4 bytes for each value and each index, up to the target."""


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
    p = parser_of("dagc", __doc__)
    p.add_argument("--task", choices=TASKS, default="digits", help="problem")
    what = f"rules, exponents, or {THRESHOLDS}:RULE; uniform is always there"
    rules = ["uniform", "sqrt", "phi", "released", "2/3", "1"]
    p.add_argument("--rules", nargs="+", type=method_of, default=rules, metavar="RULE", help=what)
    p.add_argument("--skews", nargs="+", type=one_or_more, default=[10.0, 100.0], metavar="SKEW", help="volume ratios")
    p.add_argument("--ratios", nargs="+", type=fraction, default=[0.01], metavar="RATIO", help="mean ratios")
    p.add_argument("--rounds", type=at_least(2), default=60, help="rounds of each run")
    p.add_argument("--by", choices=("accuracy", "loss"), default="accuracy", help="what is to reach the target")
    what = "accuracy on the test, or loss on the training examples (quadratics: |grad f|^2)"
    p.add_argument("--target", type=positive, default=0.9, help=what)
    p.add_argument(
        "--alpha", type=positive, default=1.0, help="of the Dirichlet label mixes; small: labels differ more"
    )
    common(p, data_dir=(None, "folder with the files of --task mnist"), workers={"type": at_least(2), "default": 10})
    common(p, lr=0.02, seeds=[0, 1])
    run = Run(p, arguments, "dagc")
    o = run.options
    o.rules = list(dict.fromkeys([*sorted(set(map(uniform_of, o.rules))), *o.rules]))
    simulation = TASKS[o.task](o)
    task_of = functools.lru_cache(maxsize=1)(simulation.task)

    def measure(case: tuple[float, float, int, str]) -> dict[str, Any]:
        ratio, skew, seed, method = case
        row = {"method": method, "ratio": ratio, "skew": skew, "seed": seed}
        row |= one(simulation, task_of(skew, seed), o, ratio, method)
        run.add(row)
        return row

    cases = list(itertools.product(o.ratios, o.skews, o.seeds, o.rules))
    named = lambda case: "ratio {:g}, skew {:g}, seed {}, {}".format(*case)
    report(run, run.rows_of(cases, named, measure))
    return run.status


def one(simulation: Any, task: Any, o: Any, ratio: float, method: str) -> dict[str, Any]:
    """One run: what it took to the target, and the mean score of its last tenth."""
    rule, by_threshold, d = rule_in(method), method.startswith(THRESHOLDS), task.start.size
    if by_threshold:
        amounts = jc.allocate.thresholds(task.volumes, 1.0, rule=rule)
    else:
        amounts = jc.allocate.counts(jc.allocate.ratios(task.volumes, ratio, rule=rule, cap=1.0), d) / d
    weights = jnp.asarray(task.volumes / task.volumes.sum(), jnp.float32)
    run = runner(simulation, o.workers, o.rounds, ratio, by_threshold)
    found = run(task.start, jnp.asarray(amounts, jnp.float32), weights, task.inputs)
    scores, sent = (np.asarray(x, float) for x in found)
    there = np.flatnonzero(simulation.better * scores >= simulation.better * o.target)
    end = int(there[0]) + 1 if there.size else o.rounds
    part = 1.0  # of the last round
    if o.by == "loss" and there.size and end > 1:  # falls smoothly, so the line between two rounds says where it passed
        part = float((scores[end - 2] - o.target) / (scores[end - 2] - scores[end - 1]))
    return {
        "reached": bool(there.size),
        "rounds": end - 1 + part,
        "mb": 8e-6 * float(sent[:end].sum()),
        "achieved": float(sent[:end].mean()) / (o.workers * d),
        "final": float(np.mean(scores[-max(o.rounds // 10, 1) :])),
    }


# ------------------------------------------------------------------------------------------------


def interval(values: Sequence[float]) -> tuple[float, ...]:
    """Mean and half width of its 95 % confidence interval (Student's t); of a single value the mean alone."""
    width = [float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values))] if len(values) > 1 else []
    return float(np.mean(values)), *width


def shown(of: tuple[float, ...], *formats: str) -> str:
    """Mean ± half width, whichever there are."""
    return " ± ".join(map(format, of, formats)) or "-"


def those_of(rows: list[dict[str, Any]], ratio: float, skew: float, method: str) -> list[dict[str, Any]]:
    return [row for row in rows if (row["ratio"], row["skew"], row["method"]) == (ratio, skew, method)]


def against_uniform(rows: list[dict[str, Any]], ratio: float, skew: float, method: str) -> tuple[float, ...]:
    """Relative change of the rounds in percent, paired by seed: `interval`; nothing if no run reached the target."""
    mine, theirs = ({row["seed"]: row for row in those_of(rows, ratio, skew, x)} for x in (method, uniform_of(method)))
    pairs = [(mine[seed], theirs[seed]) for seed in mine if seed in theirs]
    if not any(row["reached"] for pair in pairs for row in pair):
        return ()
    return interval([100 * (one["rounds"] / other["rounds"] - 1) for one, other in pairs])


def report(run: Run, rows: list[dict[str, Any]]) -> None:
    """The table, and rounds against uniform over the skew, a panel for each ratio."""
    o, summary = run.options, []
    panels: dict[str, dict[str, Any]] = {}
    for ratio, skew, method in itertools.product(o.ratios, sorted(o.skews), o.rules):
        mine = those_of(rows, ratio, skew, method)
        if not mine:  # interrupted
            continue
        reached = sum(row["reached"] for row in mine)
        row: dict[str, Any] = {key: np.mean([each[key] for each in mine]) for key in ("rounds", "mb")}
        row |= {"method": method, "ratio": ratio, "skew": skew, "final": interval([each["final"] for each in mine])}
        row["missed"] = "" if reached == len(mine) else f" ({reached} of {len(mine)} reached it)"
        row["change"] = against_uniform(rows, ratio, skew, method)
        summary.append(row)
        panel = panels.setdefault(f"mean ratio {ratio:g}; below 0 the rule wins, above 0 uniform does", {})
        if row["change"] and method != uniform_of(method):
            points = zip(panel.setdefault(method, ([], [], [])), (skew, *row["change"], 0.0), strict=False)
            for values, value in points:  # a single seed has no interval
                values.append(value)
    columns = {
        "rule": "{method}",
        "ratio": "{ratio:g}",
        "skew": "{skew:g}",
        f"rounds to {o.target:g}": "{rounds:.1f}{missed}",
        "against uniform, %": lambda row: shown(row["change"], "+.1f", ".1f"),
        "MB sent by all": "{mb:.3f}",
        f"final {'|grad f|^2' if o.task == 'quadratics' else o.by}": lambda row: shown(row["final"], ".4g", ".2g"),
    }
    run.table(f"{o.task}: {o.workers} workers, {len(o.seeds)} seeds", columns, summary, NOTES)
    labels = {"xlabel": "skew: largest data volume / smallest", "ylabel": "rounds to target, % against uniform"}
    run.plot("dagc.png", panels, xscale="log", **labels)
