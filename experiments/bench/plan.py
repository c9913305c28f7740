"""Seconds that `jc.plan` takes for a multilayer perceptron, and how much of its table is measured."""

import itertools
import os
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

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
{sum(x.size for x in params.values()):,} parameters, {o.workers} workers: {seconds:.0f} s, {cpu:.0f} CPU seconds; of
{len(found.rows)} candidates the work of {measured} was measured, and {run} were run."""
    columns = {"piece": "{piece}", "begins, s": "{at:.1f}", "takes, s": "{takes:.1f}"}
    report(o, "jc.plan, piece by piece", columns, rows, notes)
    new_console().print(str(found), highlight=False, soft_wrap=True)
    return 0


def model(width: int, examples: int) -> tuple[dict[str, Any], tuple[Any, Any]]:
    """Four layers, the inputs of MNIST, and random examples."""
    rng = np.random.default_rng(0)
    params = {}
    for i, (rows, columns) in enumerate(itertools.pairwise([784, width, width, 1400, 10])):
        params[f"w{i}"] = (rng.standard_normal((rows, columns)) / rows**0.5).astype(np.float32)
        params[f"b{i}"] = np.zeros(columns, np.float32)
    return params, (rng.standard_normal((examples, 784)).astype(np.float32), rng.integers(0, 10, examples))


def loss(params: Any, x: Any, y: Any) -> Any:
    for i in range(4):
        x = x @ params[f"w{i}"] + params[f"b{i}"]
        x = jax.nn.relu(x) if i < 3 else x
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(x), y[:, None], 1))
