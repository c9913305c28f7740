"""One worker of the planner's laboratory: plans, and runs every candidate, on a host of its own."""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.lib.launch import end_all, start
from experiments.lib.pool import note
from experiments.network.mesh import Workers
from jaxcomp.plan.advise import choose
from jaxcomp.plan.candidates import Limits, default_candidates, hierarchies
from jaxcomp.plan.clock import MeshClock
from jaxcomp.plan.measure import Workload, seconds_of_steps, step_of, sweep
from jaxcomp.plan.planning import plan_on

__all__ = ["CANDIDATES", "Sweep", "Task"]

# Of the grid: dense ones, and one for each kind of message.
CANDIDATES = ("f32", "bf16:two_shot", "dithering(7):two_shot", "sign+ef:two_shot", "sidco(0.01)+ef", "sidco(0.001)+ef")
BUSY = "while True: pass"


class Sweep:
    """Every collective at several sizes. described: the times of each."""

    def __init__(self, kinds: list[str], most: float, seconds: float):
        clock = MeshClock(Workers().mesh, seconds)
        self.described = {
            kind: [each._asdict() for each in sweep(clock, kind, "data", most, seconds)] for kind in kinds
        }


class Task:
    """A multilayer perceptron of about so many parameters, on random examples. described: how many they are."""

    def __init__(self, size: int, batch: int, of_all: bool, max_every: int, groups: int):
        self.busy, self.limits = None, Limits(max_every=max_every)
        workers = Workers(groups)
        width = max(int(np.sqrt(size)), 8)
        rng = np.random.default_rng(size)
        middle = max((size - 80 * width) // width, 8)
        shapes = {"a": (64, width), "b": (width, middle), "c": (middle, 16)}
        normal = lambda shape: (rng.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)
        params = {name: normal(shape) for name, shape in shapes.items()}
        self.described = sum(leaf.size for leaf in params.values())
        own, rows = np.random.default_rng([jax.process_index(), size]), batch * jax.local_device_count()
        x, y = (workers.own(own.standard_normal((rows, width)).astype(np.float32)) for width in (64, 16))
        self.work = Workload(MeshClock(workers.mesh, 60.0), self.loss, workers.replicate(params), (x, y), workers.axis)
        known = default_candidates(max_every)
        self.candidates = [each for each in known if of_all or each.name in CANDIDATES or each.every > 1]
        self.candidates += hierarchies(workers.axis) if groups > 1 else []

    @staticmethod
    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        hidden = jnp.tanh(jnp.tanh(x @ params["a"]) @ params["b"])
        return jnp.mean(jnp.square(hidden @ params["c"] - y))

    def plan(self, seconds: float, tried: int) -> dict[str, Any]:
        """Predicted seconds of every candidate, and what is advised: by prediction alone, and after trying."""
        self.work.clock.restart(seconds)
        show = note if jax.process_index() == 0 else lambda _: None
        found = plan_on(self.work, self.candidates, self.limits, tried=tried, show=show, thorough=True)
        alone = choose([row._replace(measured=None, expected=None) for row in found.rows])
        return {
            "predicted": {row.candidate.name: row.parts._asdict() for row in found.rows},
            "said": {row.candidate.name: row.seconds for row in found.rows},
            "dense": [row.candidate.name for row in found.rows if row.candidate.dense],
            "alone": alone.candidate.name,
            "chosen": found.chosen.candidate.name,
            "verdict": found.verdict,
            "table": found.table,
        }

    def run(self, seconds: float, rounds: int) -> dict[str, list[float]]:
        """Measured seconds per step of every candidate in each round; in a round each has its turn."""
        steps = [step_of(self.work, each) for each in self.candidates]
        times = seconds_of_steps(self.work.clock, steps, rounds, seconds)
        return {each.name: list(row) for each, row in zip(self.candidates, times, strict=True)}

    def load(self, on: bool) -> bool:
        """Keeps a core of the first worker's busy, or stops that."""
        if jax.process_index() == 0 and on and self.busy is None:
            self.busy = start([sys.executable, "-c", BUSY])
        elif not on and self.busy is not None:
            end_all([self.busy])
            self.busy = None
        return on
