"""Which vectors should a tree become? Quality at equal bytes, compile time and step time of each layout.

A CNN on digits and a small transformer on characters are trained by 4 workers, simulated on one device, with each
layout of `jaxcomp.layout` for sparsifiers and for dithering: the whole tree as one vector, each leaf by itself, equal
chunks of 4,096 entries.
"""

import itertools
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxcomp as jc
from experiments.bench.timing import machine
from experiments.lib.cli import at_least, common
from experiments.lib.data import load
from experiments.lib.models import Cnn
from experiments.lib.plots import running_mean
from experiments.lib.run import Run, parser_of
from experiments.lib.step import classified, training_step
from experiments.lib.text import text_of, windows
from experiments.lib.transformer import LAYOUTS, Sizes, initial, mean_loss
from jaxcomp.compressors.tree import with_layout

__all__ = ["main", "train", "transformer"]

WORKERS, BATCH, CHUNK = 4, 16, 4096
COLUMNS = {
    "task": "{task}",
    "method": "{method}",
    "layout": "{layout}",
    "last losses": lambda row: f"{row['last'].mean():.4f}",
    "± (seeds)": lambda row: f"{row['last'].std(ddof=1) if row['last'].size > 1 else 0:.4f}",
    "lane bytes": "{lane_bytes:,.0f}",
    "compile s": "{compile:.1f}",
    "ms a step": lambda row: f"{1e3 * row['seconds']:.1f}",
}


class Task(NamedTuple):
    """params; loss(params, *batch); batch(seed, step) -> arrays with a leading axis of workers."""

    name: str
    params: Any
    loss: Callable[..., Any]
    batch: Callable[[int, int], Any]


def cnn() -> Task:
    data = load("digits")
    graph, params, rest = nnx.split(Cnn(data.train_x.shape[1:], data.num_classes, nnx.Rngs(0)), nnx.Param, ...)

    def batch(seed, step):
        rows = np.random.default_rng([seed, step]).integers(0, len(data.train_x), (WORKERS, BATCH))
        return data.train_x[rows], data.train_y[rows]

    return Task("CNN, digits", params, classified(graph, rest), batch)


def transformer(path: Path | None, length: int, width: int) -> Task:
    text = text_of(path)
    sizes = Sizes(text.characters, length, width, 4, 4)

    def batch(seed, step):
        rows = windows(text.codes[: text.train], WORKERS * BATCH, sizes.length, seed, step)
        return (rows.reshape(WORKERS, BATCH, -1),)

    loss = lambda params, windows: mean_loss(params, windows, LAYOUTS["data"])
    return Task(f"transformer, {text.name}", initial(sizes, 0), loss, batch)


def methods(ratio: float) -> dict[str, Callable[[Any], Any]]:
    """Name -> algorithm from a function that lays a compressor out."""
    return {
        f"top_k({ratio:g})": lambda laid: jc.error_feedback(laid(jc.top_k(ratio))),
        f"sidco({ratio:g})": lambda laid: jc.error_feedback(laid(jc.sidco(ratio))),
        "dithering(7), one norm": lambda laid: jc.direct(laid(jc.dithering(7, blocks=1))),
        "dithering(7), blocks of 512": lambda laid: jc.direct(laid(jc.dithering(7, block_size=512))),
    }


def layouts(params: Any) -> dict[str, Callable[[Any], Any]]:
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    chunks = jc.Layout("chunks", chunks=max(1, math.ceil(size / CHUNK)))
    return {
        "tree": lambda c: with_layout("tree", c, jc.Layout("tree")),
        "leaf": jc.per_leaf,
        "chunks": lambda c: with_layout("chunks", c, chunks),
    }


def train(task: Task, algorithm: Any, steps: int, seeds: Sequence[int]) -> dict[str, Any]:
    """Losses [seeds, steps], bytes of a message, seconds to compile and of a step."""
    tx = optax.chain(jc.compressed_mean(algorithm, "data"), optax.adam(1e-3))
    axes = jc.init_state(tx, task.params, WORKERS, "data")[1]
    step = training_step(tx, task.loss, "data")
    on_batch = lambda params, state, batch: step(params, state, *batch)
    mapped = jax.vmap(on_batch, in_axes=(None, axes, 0), out_axes=(None, axes, None), axis_name="data")
    mapped = jax.jit(mapped, donate_argnums=(0, 1))
    losses, taken, state = [], [], None
    for seed in seeds:
        params = jax.tree.map(jnp.array, task.params)
        state, _ = jc.init_state(tx, params, WORKERS, "data")
        losses.append([])
        for i in range(steps):
            batch = task.batch(seed, i)
            start = time.perf_counter()
            params, state, loss = jax.block_until_ready(mapped(params, state, batch))
            taken.append(time.perf_counter() - start)
            losses[-1].append(float(loss))
    times = {"compile": taken[0], "seconds": float(np.median(taken[1:]))}
    return {"losses": losses, "lane_bytes": float(jc.info(state).lane_bytes), **times}


def main(arguments: Sequence[str]) -> int:
    p = parser_of("layouts", __doc__)
    common(p, "steps", "ratio", seeds=[0, 1, 2])
    p.add_argument("--tasks", nargs="+", choices=["cnn", "transformer"], default=["cnn", "transformer"])
    p.add_argument("--text", type=Path, default=None, help="plain or .xz; without it the source of this package")
    p.add_argument("--length", type=at_least(1), default=32, help="characters that the transformer sees")
    p.add_argument("--width", type=at_least(4), default=64, help="of the transformer")
    run = Run(p, arguments, "layouts")
    o = run.options
    tasks = [cnn() if name == "cnn" else transformer(o.text, o.length, o.width) for name in o.tasks]
    cases = [
        {"task": task, "method": method, "layout": layout}
        for task in tasks
        for method, layout in itertools.product(methods(o.ratio), layouts(task.params))
    ]

    def measure(case: dict[str, Any]) -> dict[str, Any]:
        task, laid = case["task"], layouts(case["task"].params)[case["layout"]]
        found = train(task, methods(o.ratio)[case["method"]](laid), o.steps, o.seeds)
        return {**case, "task": task.name, **found}

    results = run.rows_of(cases, lambda case: f"{case['task'].name}: {case['method']}, {case['layout']}", measure)
    run.keep(results)
    tail = max(1, o.steps // 10)
    notes = (
        f"{WORKERS} workers under vmap, {BATCH} examples each, {o.steps} steps of Adam, {len(o.seeds)} "
        f"seeds; the loss is the mean over the last {tail} steps. Chunks have {CHUNK} entries. Times are those of the "
        "whole training step on one device."
    )
    rows = [{**row, "last": np.asarray(row["losses"])[:, -tail:].mean(1)} for row in results]
    run.table(f"Layouts; {machine()}", COLUMNS, rows, notes)
    panels: dict[str, dict[str, Any]] = {}
    for row in results:
        mean = running_mean(np.asarray(row["losses"]), 10).mean(0)
        panels.setdefault(f"{row['task']}\n{row['method']}", {})[row["layout"]] = (1 + np.arange(o.steps), mean)
    run.plot("losses.png", panels, xlabel="step", ylabel="loss (mean of 10 steps)", yscale="log")
    return 0
