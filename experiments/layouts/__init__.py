"""Which vectors should a tree become? Quality, bytes and time of each layout.

A CNN on digits and a small transformer on characters are trained by 4 workers, simulated on one device, with each
layout of `jaxcomp.groups` for sparsifiers and for dithering: the whole tree as one vector, each leaf by itself (stacked
with those of equal size, or apart), equal chunks of 4,096 entries. Writes to runs/NAME: config.json, results.json,
table.md, losses.png.
"""

import itertools
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
from experiments.lib.cli import common
from experiments.lib.data import load
from experiments.lib.models import Cnn
from experiments.lib.plots import running_mean
from experiments.lib.report import spread
from experiments.lib.run import Columns, Run, parser_of
from experiments.lib.step import classified, training_step
from experiments.lib.text import text_of, windows
from experiments.lib.transformer import LAYOUTS, Sizes, initial, mean_loss
from jaxcomp.compressors.tree import _of_trees

__all__ = ["main"]

WORKERS, BATCH, CHUNK = 4, 16, 4096
# Name -> (ratio, function that lays a compressor out) -> algorithm.
METHODS: dict[str, Callable[[float, Any], Any]] = {
    "top-k": lambda ratio, laid: jc.error_feedback(laid(jc.top_k(ratio))),
    "sidco": lambda ratio, laid: jc.error_feedback(laid(jc.sidco(ratio))),
    "dithering(7), one norm": lambda ratio, laid: jc.direct(laid(jc.dithering(7, blocks=1))),
    "dithering(7), blocks of 512": lambda ratio, laid: jc.direct(laid(jc.dithering(7, block_size=512))),
}
COLUMNS: Columns = {
    "task": "{task}",
    "method": "{method}",
    "layout": "{layout}",
    "last losses": lambda row: spread(row["last"]),
    "lane bytes": "{lane_bytes:,.0f}",
    "compile s": "{compile_seconds:.1f}",
    "ms a step": lambda row: f"{1e3 * row['step_seconds']:.1f}",
}


class Task(NamedTuple):
    """params; loss(params, *batch); batch(seed, step) -> arrays with a leading axis of workers."""

    name: str
    params: Any
    loss: Callable[..., Any]
    batch: Callable[[int, int], Any]


def cnn(path: Path | None) -> Task:
    del path
    data = load("digits")
    graph, params, rest = nnx.split(Cnn(data.train_x.shape[1:], data.num_classes, nnx.Rngs(0)), nnx.Param, ...)

    def batch(seed, step):
        rows = np.random.default_rng([seed, step]).integers(0, len(data.train_x), (WORKERS, BATCH))
        return data.train_x[rows], data.train_y[rows]

    return Task("CNN, digits", params, classified(graph, rest), batch)


def transformer(path: Path | None) -> Task:
    text = text_of(path)
    sizes = Sizes(text.characters, length=32, width=64, heads=4, layers=4)

    def batch(seed, step):
        rows = windows(text.codes[: text.train], WORKERS * BATCH, sizes.length, seed, step)
        return (rows.reshape(WORKERS, BATCH, -1),)

    loss = lambda params, windows: mean_loss(params, windows, LAYOUTS["data"])
    return Task(f"transformer, {text.name}", initial(sizes, 0), loss, batch)


def layouts(params: Any) -> dict[str, jc.Layout]:
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    chunks = jc.Layout("chunks", chunks=-(-size // CHUNK))
    return {"tree": jc.Layout(), "leaf": jc.Layout("leaf"), "apart": jc.Layout("apart"), "chunks": chunks}


def train(task: Task, algorithm: Any, steps: int, seeds: Sequence[int]) -> dict[str, Any]:
    """Losses [seeds, steps], bytes of a message, seconds to compile (with the first step) and of a step."""
    tx = optax.chain(jc.compressed_mean(algorithm, "data"), optax.adam(1e-3))
    state, axes = jc.init_state(tx, task.params, WORKERS, "data")
    step = training_step(tx, task.loss, "data")
    on_batch = lambda params, state, batch: step(params, state, *batch)
    mapped = jax.jit(jax.vmap(on_batch, in_axes=(None, axes, 0), out_axes=(None, axes, None), axis_name="data"))
    losses, seconds = [], []
    for seed in seeds:
        params = jax.tree.map(jnp.array, task.params)
        state, _ = jc.init_state(tx, params, WORKERS, "data")
        losses.append([])
        for i in range(steps):
            batch = task.batch(seed, i)
            start = time.perf_counter()
            params, state, loss = jax.block_until_ready(mapped(params, state, batch))
            seconds.append(time.perf_counter() - start)
            losses[-1].append(float(loss))
    step_seconds = float(np.median(seconds[1:])) if len(seconds) > 1 else float("nan")
    times = {"compile_seconds": seconds[0], "step_seconds": step_seconds}
    return {"losses": losses, "lane_bytes": float(jc.info(state).lane_bytes), **times}


def main(arguments: Sequence[str]) -> int:
    tasks = {"cnn": cnn, "transformer": transformer}
    p = parser_of("layouts", __doc__)
    common(p, "steps", "ratio", seeds=[0, 1, 2])
    p.add_argument("--tasks", nargs="+", choices=tasks, default=list(tasks), help="of these")
    p.add_argument("--text", type=Path, default=None, help="plain or .xz; without it the source of this package")
    run = Run(p, arguments, "layouts")
    o = run.options
    tail = max(1, o.steps // 10)

    def measure(case: tuple[Task, str, str]) -> dict[str, Any]:
        task, method, layout = case
        laid = lambda compressor: _of_trees(layout, compressor, layouts(task.params)[layout])
        row = train(task, METHODS[method](o.ratio, laid), o.steps, o.seeds)
        last = [float(np.mean(each[-tail:])) for each in row["losses"]]
        return {"task": task.name, "method": method, "layout": layout, "last": last, **row}

    cases = [
        (task, method, layout)
        for task in (tasks[name](o.text) for name in o.tasks)
        for method, layout in itertools.product(METHODS, layouts(task.params))
    ]
    rows = run.rows_of(cases, lambda case: f"{case[0].name}: {case[1]}, {case[2]}", measure)
    run.keep(rows)
    notes = (
        f"{WORKERS} workers under vmap, {BATCH} examples each, {o.steps} steps of Adam, {len(o.seeds)} seeds, ratio "
        f"{o.ratio:g}; the loss is the mean over the last {tail} steps. Chunks have {CHUNK} entries. "
        "leaf: leaves with equally many entries, those of equal shape among them, are the rows of one stack; apart: "
        "each is a vector of its own. compile: the first step, with compiling; ms: median of the others, of all "
        "workers on one device."
    )
    run.table(f"Layouts; {machine()}", COLUMNS, rows, notes)
    panels: dict[str, dict[str, Any]] = {}
    for row in rows:
        mean = running_mean(np.asarray(row["losses"]), 10).mean(0)
        panels.setdefault(f"{row['task']}\n{row['method']}", {})[row["layout"]] = (1 + np.arange(o.steps), mean)
    run.plot("losses.png", panels, xlabel="step", ylabel="loss (mean of 10 steps)", yscale="log")
    return run.status
