"""Seconds that `jc.plan` takes for a multilayer perceptron, and how much of its table is measured."""

import itertools
import os
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax

import jaxcomp as jc
from experiments.bench.timing import bench_parser, mesh_of, report
from experiments.lib.cli import at_least
from experiments.lib.report import new_console

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    p = bench_parser("bench plan", __doc__)
    p.add_argument("--width", type=at_least(8), default=2240, help="of two layers; 2240: 9.9 M parameters")
    p.add_argument("--workers", type=at_least(2), default=2, help="virtual devices of this process")
    p.add_argument("--batch", type=at_least(1), default=64, help="examples of all workers in a step")
    o = p.parse_args(arguments)
    os.environ["JAX_PLATFORMS"] = "cpu"  # of any process that the planner starts
    jax.config.update("jax_platforms", "cpu")
    params, batch = model(o.width, o.batch)
    said: list[tuple[str, float]] = []
    began, spent = time.perf_counter(), time.process_time()
    note = lambda text: said.append((text, time.perf_counter() - began))
    found = jc.plan(loss, params, batch, mesh=mesh_of(o.workers), show=note)
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
    new_console().print(str(found), highlight=False, soft_wrap=True)
    return 0


def model(width: int, examples: int) -> tuple[Any, tuple[Any, Any]]:
    """Four layers, the inputs of MNIST, and random examples."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    sizes = itertools.pairwise([784, width, width, 1400, 10])
    params = [(normal(rows, columns) / rows**0.5, np.zeros(columns, np.float32)) for rows, columns in sizes]
    return params, (normal(examples, 784), rng.integers(0, 10, examples))


def loss(params: Any, x: Any, y: Any) -> Any:
    for weights, bias in params[:-1]:
        x = jax.nn.relu(x @ weights + bias)
    logits = x @ params[-1][0] + params[-1][1]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
