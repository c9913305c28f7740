"""Which vectors should a tree become? Quality at equal bytes, compile time and step time of each layout.

A CNN on digits and a small transformer on characters are trained by 4 workers, simulated on one device, with each
layout of `jaxcomp.layout` for sparsifiers and for dithering: the whole tree as one vector, each leaf by itself, equal
chunks of 4,096 entries.
"""

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.lib import text as texts
from experiments.lib.cli import Parser, at_least, choose_new, fraction
from experiments.lib.folders import run_options, start_run, write_json
from experiments.lib.report import new_console, progress_bar, show

__all__ = ["main"]

WORKERS, BATCH, CHUNK = 4, 16, 4096


class Task(NamedTuple):
    """params; loss(params, *batch); batch(seed, step) -> arrays with a leading axis of workers; lr of Adam."""

    name: str
    params: Any
    loss: Callable[..., Any]
    batch: Callable[[int, int], Any]
    lr: float


def cnn(folder: Path | None) -> Task:
    import numpy as np
    from flax import nnx

    from experiments.lib.data import load
    from experiments.lib.models import Cnn
    from experiments.lib.step import classified

    data = load("digits", folder)
    graph, params, rest = nnx.split(Cnn(data.train_x.shape[1:], data.num_classes, nnx.Rngs(0)), nnx.Param, ...)

    def batch(seed, step):
        rows = np.random.default_rng([seed, step]).integers(0, len(data.train_x), (WORKERS, BATCH))
        return data.train_x[rows], data.train_y[rows]

    return Task("CNN, digits", params, classified(graph, rest), batch, 1e-3)


def transformer(path: Path | None, length: int, width: int) -> Task:
    from experiments.lib.transformer import LAYOUTS, Sizes, initial, mean_loss

    text = texts.text_of(path)
    sizes = Sizes(text.characters, length, width, 4, 4)

    def batch(seed, step):
        rows = texts.windows(text.codes[: text.train], WORKERS * BATCH, sizes.length, seed, step)
        return (rows.reshape(WORKERS, BATCH, -1),)

    loss = lambda params, windows: mean_loss(params, windows, LAYOUTS["data"])
    return Task(f"transformer, {text.name}", initial(sizes, 0), loss, batch, 1e-3)


def methods(ratio: float) -> dict[str, Callable[[Any], Any]]:
    """Name -> algorithm from a function that lays a compressor out."""
    import jaxcomp as jc

    return {
        f"top_k({ratio:g})": lambda laid: jc.error_feedback(laid(jc.top_k(ratio))),
        f"sidco({ratio:g})": lambda laid: jc.error_feedback(laid(jc.sidco(ratio))),
        "dithering(7), one norm": lambda laid: jc.direct(laid(jc.dithering(7, blocks=1))),
        "dithering(7), blocks of 512": lambda laid: jc.direct(laid(jc.dithering(7, block_size=512))),
    }


def layouts(params: Any) -> dict[str, Callable[[Any], Any]]:
    import jax

    import jaxcomp as jc
    from jaxcomp.compressors.tree import with_layout

    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    chunks = jc.Layout("chunks", chunks=max(1, math.ceil(size / CHUNK)))
    return {
        "tree": lambda c: with_layout("tree", c, jc.Layout("tree")),
        "leaf": jc.per_leaf,
        "chunks": lambda c: with_layout("chunks", c, chunks),
    }


def train(task: Task, algorithm: Any, steps: int, seeds: Sequence[int], tick: Callable[[], None]) -> dict[str, Any]:
    """Losses [seeds, steps], bytes of a message, seconds to compile and of a step."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import jaxcomp as jc
    from experiments.lib.step import training_step

    tx = optax.chain(jc.compressed_mean(algorithm, "data"), optax.adam(task.lr))
    axes = jc.init_state(tx, task.params, WORKERS, "data")[1]
    step = training_step(tx, task.loss, "data")
    on_batch = lambda params, state, batch: step(params, state, *batch)
    mapped = jax.vmap(on_batch, in_axes=(None, axes, 0), out_axes=(None, axes, None), axis_name="data")
    mapped = jax.jit(mapped, donate_argnums=(0, 1))
    losses, taken, compiled = [], [], 0.0
    for seed in seeds:
        params = jax.tree.map(jnp.array, task.params)
        state, _ = jc.init_state(tx, params, WORKERS, "data")
        row = []
        for i in range(steps):
            batch = task.batch(seed, i)
            start = time.perf_counter()
            params, state, loss = jax.block_until_ready(mapped(params, state, batch))
            taken.append(time.perf_counter() - start)
            row.append(float(loss))
            tick()
        losses.append(row)
    compiled = taken[0]
    lane = float(jc.info(state).lane_bytes)
    return {"losses": losses, "lane_bytes": lane, "compile": compiled, "seconds": float(np.median(taken[1:]))}


def parser() -> Parser:
    p = Parser(prog="python -m experiments layouts", description=__doc__)
    p.add_argument("--steps", type=at_least(1), default=300, help="of each training")
    p.add_argument("--seeds", type=at_least(0), nargs="+", default=[0, 1, 2], help="of the batches")
    p.add_argument("--ratio", type=fraction, default=0.01, help="of sparsifiers")
    p.add_argument("--tasks", nargs="+", choices=["cnn", "transformer"], default=["cnn", "transformer"])
    p.add_argument("--text", type=Path, default=None, help="plain or .xz; without it the source of this package")
    p.add_argument("--length", type=at_least(1), default=32, help="characters that the transformer sees")
    p.add_argument("--width", type=at_least(4), default=64, help="of the transformer")
    run_options(p, "layouts")
    return p


def main(arguments: Sequence[str]) -> int:
    options = parser().parse_args(arguments)
    import numpy as np

    from experiments.bench.timing import machine

    console, folder = new_console(), choose_new(options.runs, options.name, "layouts")
    tasks = [
        cnn(None) if name == "cnn" else transformer(options.text, options.length, options.width)
        for name in options.tasks
    ]
    start_run(folder, vars(options))
    results = []
    with progress_bar(console) as bar:
        for task in tasks:
            for method, make in methods(options.ratio).items():
                for layout, laid in layouts(task.params).items():
                    name = f"{task.name}: {method}, {layout}"
                    row = bar.add_task(name, total=options.steps * len(options.seeds), now="")
                    tick = lambda row=row: bar.advance(row)
                    outcome = train(task, make(laid), options.steps, options.seeds, tick)
                    results.append({"task": task.name, "method": method, "layout": layout, **outcome})
    write_json(folder / "results.json", results)
    tail = max(1, options.steps // 10)
    table = []
    for r in results:
        last = np.asarray(r["losses"])[:, -tail:].mean(1)
        table.append(
            [
                r["task"],
                r["method"],
                r["layout"],
                f"{last.mean():.4f}",
                f"{last.std(ddof=1) if len(last) > 1 else 0:.4f}",
            ]
            + [f"{r['lane_bytes']:,.0f}", f"{r['compile']:.1f}", f"{1e3 * r['seconds']:.1f}"]
        )
    head = ["task", "method", "layout", "last losses", "± (seeds)", "lane bytes", "compile s", "ms a step"]
    notes = (
        f"{WORKERS} workers under vmap, {BATCH} examples each, {options.steps} steps of Adam, {len(options.seeds)} "
        f"seeds; the loss is the mean over the last {tail} steps. Chunks have {CHUNK} entries. Times are those of the "
        "whole training step on one device."
    )
    show(console, f"Layouts; {machine()}", head, table, notes, folder / "table.md")
    plot(results, folder / "losses.png")
    return 0


def plot(results: list[dict[str, Any]], path: Path) -> None:
    import numpy as np
    from matplotlib.ticker import LogFormatter

    from experiments.lib.plots import LINES, new_figure, running_mean, save

    panels = list(dict.fromkeys((r["task"], r["method"]) for r in results))
    figure, axes = new_figure(min(4, len(panels)), rows=math.ceil(len(panels) / 4))
    for axis, panel in zip(axes, panels, strict=False):
        rows = [r for r in results if (r["task"], r["method"]) == panel]
        for line, r in zip(LINES, rows, strict=False):
            curve = running_mean(np.asarray(r["losses"]), 10).mean(0)
            axis.plot(1 + np.arange(len(curve)), curve, label=r["layout"], markevery=max(1, len(curve) // 6), **line)
        axis.set(title="\n".join(panel), xlabel="step", ylabel="loss (mean of 10 steps)", yscale="log")
        axis.yaxis.set_major_formatter(LogFormatter())
        axis.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1, 0.4)))
        axis.legend()
    save(figure, path)
