"""Seconds that `jc.plan` takes for a multilayer perceptron, and how much of its table is measured."""

import itertools
import os
import time
from collections.abc import Sequence

import jax
import numpy as np
from flax import nnx

import jaxcomp as jc
from experiments.bench.timing import bench_parser, report
from experiments.lib.cli import at_least
from experiments.lib.report import new_console
from experiments.lib.step import classified
from experiments.lib.training import find_mesh

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    p = bench_parser("bench plan", __doc__)
    p.add_argument("--width", type=at_least(8), default=2240, help="of two layers; 2240: 9.9 M parameters")
    p.add_argument("--workers", type=at_least(2), default=2, help="virtual devices of this process")
    p.add_argument("--batch", type=at_least(1), default=64, help="examples of all workers in a step")
    o = p.parse_args(arguments)
    os.environ["JAX_PLATFORMS"] = "cpu"  # of any process that the planner starts
    jax.config.update("jax_platforms", "cpu")
    mesh = find_mesh(o.workers)
    graph, params = nnx.split(model(o.width))
    rng = np.random.default_rng(0)
    batch = rng.standard_normal((o.batch, 784), np.float32), rng.integers(0, 10, o.batch)
    said: list[tuple[str, float]] = []
    began, spent = time.perf_counter(), time.process_time()
    note = lambda text: said.append((text, time.perf_counter() - began))
    found = jc.plan(classified(graph), params, batch, mesh=mesh, show=note)
    seconds, cpu = time.perf_counter() - began, time.process_time() - spent
    ends = [*(at for _, at in said[1:]), seconds]
    rows = [{"piece": piece, "at": at, "takes": end - at} for (piece, at), end in zip(said, ends, strict=True)]
    measured = sum(not row.bound for row in found.rows)
    run = sum(row.measured is not None for row in found.rows)
    notes = f"""\
{sum(x.size for x in jax.tree.leaves(params)):,} parameters, {o.workers} workers: {seconds:.0f} s, {cpu:.0f} CPU
seconds; of {len(found.rows)} candidates the work of {measured} was measured, and {run} were run."""
    columns = {"piece": "{piece}", "begins, s": "{at:.1f}", "takes, s": "{takes:.1f}"}
    report(o, "jc.plan, piece by piece", columns, rows, notes)
    new_console().print(str(found), soft_wrap=True)
    return 0


def model(width: int) -> nnx.Module:
    """Four layers, for the inputs of MNIST."""
    sizes, rngs = itertools.pairwise([784, width, width, 1400, 10]), nnx.Rngs(0)
    layers = [layer for shape in sizes for layer in (nnx.Linear(*shape, rngs=rngs), nnx.relu)]
    return nnx.Sequential(*layers[:-1])
