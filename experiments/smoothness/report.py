"""Tables and plots of the smoothness experiments."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from experiments.lib.run import Columns, Run
from experiments.smoothness.problems import Problem
from experiments.smoothness.runner import Curves
from experiments.smoothness.setups import Setup

__all__ = ["NOTES", "Result", "columns_of", "draw", "metrics_of", "plot_workers", "upload_bits"]

NOTES = """\
Per worker. budget: expected non-zeros of a message over d, the one with the fewest bits. kB up: sent until the target
(norms, Elias-coded gaps and levels, values of 32 bits), geometric mean over seeds. + upload: with the one-off message
that tells the server the roots and the plan. kB down: the direction, in 32 bits an entry or as a server compresses
it (half, one, two: dithering with so many times sqrt(d) levels and a norm of 16 bits). factor: kB up (--count both: up
and down) of the first row over this one's. floor: smallest relative squared error seen."""


@dataclasses.dataclass
class Result:
    """Curves of one setup on one problem; count: the bits that matter, "up" or "both"."""

    problem: Problem
    setup: Setup
    curves: Curves
    target: float
    count: str = "up"

    def of(self, count: str) -> np.ndarray:
        """[budgets]: kilobytes "up", "down" or "both" until the target, geometric mean over seeds; infinite where it
        was not reached."""
        return np.exp(np.mean(np.log(self.curves.bits_to(self.target, count)), axis=1)) / 8e3

    @functools.cached_property
    def best(self) -> int:
        """The budget with the fewest bits, or, if none reached the target, the smallest error."""
        kilobytes = self.of(self.count)
        if np.isfinite(kilobytes).any():
            return int(np.argmin(kilobytes))
        return int(np.argmin(np.nanmin(self.curves.errors, axis=-1).mean(1)))

    @functools.cached_property
    def kilobytes(self) -> dict[str, float]:
        """The counts of `of` at the best budget, and "upload", what is sent up once."""
        found = {count: float(self.of(count)[self.best]) for count in ("up", "down", "both")}
        return found | {"upload": upload_bits(self.setup, self.problem.d) / 8e3}

    @property
    def rounds(self) -> float:
        return float(np.mean(self.curves.reached(self.target)[self.best]))

    @property
    def floor(self) -> float:
        errors = np.nanmin(self.curves.errors[self.best], -1)
        return float(np.exp(np.mean(np.log(np.maximum(errors, 1e-300)))))

    @property
    def bits_of_a_round(self) -> float:
        bits = self.curves.bits[self.best]
        return float(np.mean(bits[:, -1])) / bits.shape[-1]


def upload_bits(setup: Setup, d: int) -> float:
    """One-off upload of a worker in f32: the operator as it is stored (a symmetric root once), and the plan."""
    if not setup.label.split()[0].endswith("+"):
        return 0.0
    operator = setup.operator
    form = type(operator).__name__
    entries: float = d
    if form == "Dense":
        symmetric = np.allclose(operator.matrix_root[0], operator.matrix_root[0].T)
        entries = d * (d + 1) / 2 if symmetric else d * d
    elif form == "LowRank":
        entries = operator.vectors[0].size + operator.sigma[0].size + 1
    elif form == "Blocks":
        entries = operator.matrix_root[0].shape[0] * operator.matrix_root[0].shape[1] ** 2
    plan = max(np.size(leaf) for leaf in jax.tree.leaves(setup.plans[0])) / operator.diag.shape[0]
    return 32 * (entries + plan)


def columns_of(first: Result) -> Columns:
    """Of rows at their best budgets; factors against the first result."""
    base = first.kilobytes[first.count]
    reached = lambda r: np.isfinite(r.kilobytes[r.count])

    def where_reached(form: str, value: Callable[[Result], float]) -> Callable[[Result], str]:
        return lambda r: form.format(value(r)) if reached(r) else "-"

    kilobytes = lambda *counts: where_reached("{:,.1f}", lambda r: sum(r.kilobytes[count] for count in counts))
    return {
        "method": lambda r: r.setup.label,
        "budget": lambda r: f"{r.setup.budgets[r.best]:g} d",
        "gamma": lambda r: f"{r.setup.steps[r.best].gamma:.3g}",
        "omega": lambda r: f"{r.setup.omega[r.best]:.3g}",
        "rounds": where_reached("{:,.0f}", lambda r: r.rounds),
        "bits/round": lambda r: f"{r.bits_of_a_round:.0f}",
        "kB up": kilobytes("up"),
        "+ upload": kilobytes("up", "upload"),
        "kB down": kilobytes("down"),
        "both": kilobytes("up", "down"),
        "factor": where_reached("{:.2f}", lambda r: base / r.kilobytes[r.count]) if reached(first) else lambda r: "-",
        "floor": lambda r: f"{r.floor:.1e}",
    }


def metrics_of(result: Result, seeds: Sequence[int]) -> Iterator[dict[str, Any]]:
    """A line for about 50 rounds of each run."""
    curves, setup, problem = result.curves, result.setup, result.problem
    rounds = np.unique(np.geomspace(1, curves.errors.shape[-1], 50).astype(int)).tolist()
    for b, s, number in itertools.product(range(len(setup.budgets)), range(len(seeds)), rounds):
        at = (b, s, number - 1)
        line = {"method": setup.label, "workers": problem.workers, "budget": setup.budgets[b], "seed": seeds[s]}
        line |= {"round": number, "error": float(curves.errors[at]), "bits": float(curves.bits[at])}
        yield line | {"seconds": curves.seconds * number, "down_bits": float(curves.down[at])}


def draw(run: Run, name: str, title: str, results: list[Result]) -> None:
    """Relative squared error against rounds, megabytes (with and without the one-off upload) and seconds."""
    labels = ("rounds", "MB sent by a worker", "MB with the one-off upload", "seconds, all workers on this machine")
    panels: dict[str, dict[str, Any]] = {label: {} for label in labels}
    for r in results:
        errors = np.nan_to_num(r.curves.errors[r.best], nan=1e6, posinf=1e6)
        middle = np.exp(np.mean(np.log(np.maximum(errors, 1e-30)), axis=0))
        rounds, megabytes = np.arange(1, middle.size + 1), r.curves.bits[r.best].mean(0) / 8e6
        places = (rounds, megabytes, megabytes + r.kilobytes["upload"] / 1e3, rounds * r.curves.seconds)
        keep = np.unique(np.geomspace(1, int(np.max(r.curves.reached(1e-24)[r.best])), 400).astype(int)) - 1
        for label, x in zip(labels, places, strict=True):
            panels[label][r.setup.label] = (x[keep], middle[keep])
    run.plot(name, panels, title, xscale="log", yscale="log", ylabel="relative squared error |x - x*|² / |x*|²")


def plot_workers(run: Run, title: str, results: dict[str, list[Result]]) -> None:
    """Kilobytes that a worker sends until the target, rounds, and rounds saved, against the number of workers."""
    first, *_ = results
    base = np.array([r.rounds for r in results[first]])
    panels: dict[str, dict[str, Any]] = {}
    for label, some in results.items():
        counts = [r.problem.workers for r in some]
        kilobytes, rounds = np.array([(r.kilobytes[r.count], r.rounds) for r in some]).T
        panels.setdefault("kB sent by a worker to the target", {})[label] = (counts, kilobytes)
        panels.setdefault("rounds to the target", {})[label] = (counts, rounds)
        panels.setdefault(f"rounds of {first} / rounds", {})[label] = (counts, base / rounds)
    run.plot("workers.png", panels, title, xscale="log", yscale="log", xlabel="workers n")
