"""Seconds that `jc.plan` takes for a multilayer perceptron, and how much of its table is measured."""

import itertools
import os
import time
from collections.abc import Sequence
from typing import Any

from experiments.bench.timing import machine
from experiments.lib.cli import Parser, at_least, positive
from experiments.lib.report import new_console, show

__all__ = ["main"]


def parser() -> Parser:
    p = Parser(prog="python -m experiments bench plan", description=(__doc__ or "").split("\n\n")[0])
    p.add_argument("--width", type=at_least(8), default=2240, help="of two layers; 2240: 9.9 M parameters")
    p.add_argument("--workers", type=at_least(2), default=2, help="virtual devices of this process")
    p.add_argument("--batch", type=at_least(1), default=64, help="examples of all workers in a step")
    p.add_argument("--budget", type=positive, default=None, help="seconds; the default is that of jc.plan")
    return p


def main(arguments: Sequence[str]) -> int:
    o = parser().parse_args(arguments)
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    jax.config.update("jax_num_cpu_devices", o.workers)
    import jaxcomp as jc

    console = new_console()
    params, batch = model(o.width, o.batch)
    mesh = jax.make_mesh((o.workers,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    said: list[tuple[str, float]] = []
    began, spent = time.perf_counter(), time.process_time()
    found = jc.plan(loss, params, batch, mesh=mesh, budget=o.budget, show=lambda text: said.append((text, now(began))))
    seconds, cpu = now(began), time.process_time() - spent
    ends = [*[at for _, at in said[1:]], seconds]
    cells = [[text, f"{at:.1f}", f"{end - at:.1f}"] for (text, at), end in zip(said, ends, strict=True)]
    measured = sum(not row.bound for row in found.rows)
    run = sum(row.measured is not None for row in found.rows)
    entries = sum(x.size for x in params.values())
    notes = f"""\
{entries:,} parameters, {o.workers} workers: {seconds:.0f} s, {cpu:.0f} CPU seconds; of {len(found.rows)} candidates the
work of {measured} was measured, and {run} were run. {machine()}"""
    show(console, "jc.plan, piece by piece", ["piece", "begins, s", "takes, s"], cells, notes)
    console.print(str(found), highlight=False, soft_wrap=True)
    return 0


def now(began: float) -> float:
    return time.perf_counter() - began


def model(width: int, examples: int) -> tuple[dict[str, Any], tuple[Any, Any]]:
    """Four layers, the inputs of MNIST, and random examples."""
    import numpy as np

    rng = np.random.default_rng(0)
    sizes = [784, width, width, 1400, 10]
    params = {}
    for i, (rows, columns) in enumerate(itertools.pairwise(sizes)):
        params[f"w{i}"] = (rng.standard_normal((rows, columns)) / rows**0.5).astype(np.float32)
        params[f"b{i}"] = np.zeros(columns, np.float32)
    return params, (rng.standard_normal((examples, 784)).astype(np.float32), rng.integers(0, 10, examples))


def loss(params: Any, x: Any, y: Any) -> Any:
    import jax
    import jax.numpy as jnp

    for i in range(4):
        x = x @ params[f"w{i}"] + params[f"b{i}"]
        x = jax.nn.relu(x) if i < 3 else x
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(x), y[:, None], 1))
