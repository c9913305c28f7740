"""Loss of linear models and a network under each compression, at equal steps and at equal bytes.

Workers are simulated in one process; each compresses the gradient of its own batch, and the optimizer steps along
the mean of what they sent. Bytes are those of all messages from one worker, by the best code of each; the way back is
not counted.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.lib.cli import Parser, at_least, choose_new, fraction, positive
from experiments.lib.data import FILES
from experiments.lib.folders import Journal, run_options, start_run
from experiments.lib.report import new_console, progress_bar, show

__all__ = ["main", "methods", "train"]


class Method(NamedTuple):
    """compressor: of a vector; feedback: with a memory of what was not sent; raw: 64 bits a nonzero, not coded."""

    compressor: Any
    feedback: bool = False
    raw: bool = False


def methods(ratio: float | None) -> dict[str, Method]:
    """ratio: of top-k before every other method; None for gradients that are sparse by themselves."""
    import jaxcomp as jc

    before: dict[str, Any] = {"room": 1.0} if ratio is None else {"sparsifier": jc.top_k(ratio)}
    kept = jc.hard_threshold(0.0, room=1.0) if ratio is None else jc.top_k(ratio)
    tops = 0.05 if ratio is None else ratio
    return {
        "dense f32": Method(jc.identity()),
        "f32 keys + values": Method(kept, raw=True),
        "as released": Method(jc.skcompress(mode="paper", **before)),
        "recentred sketch": Method(jc.skcompress(mode="recentred", **before)),
        "quantile 16": Method(jc.skcompress(**before)),
        "equal depth 16": Method(jc.skcompress(power=0, **before)),
        "quantile 16, memory": Method(jc.skcompress(**before), feedback=True),
        "top-k + quantile 16, memory": Method(jc.skcompress(jc.top_k(tops / 5)), feedback=True),
        "top-k + dithering 7, memory": Method(
            jc.compose(jc.top_k(tops / 5), jc.dithering(7, norm="inf", blocks=1)), feedback=True
        ),
    }


class Run(NamedTuple):
    """steps i32[t], bytes f64[t] sent by one worker so far, loss f64[t] over a fixed part of the examples."""

    steps: np.ndarray
    bytes: np.ndarray
    loss: np.ndarray


def train(
    problem: Any, method: Method, optimizer: Any, steps: int, workers: int, batch: int, seed: int, show: Callable
) -> Run:
    """One run, from the same start and with the same batches for every method."""
    import jax
    import jax.numpy as jnp

    import jaxcomp as jc
    from experiments.lib.step import updated
    from jaxcomp.base import State, advance

    d = problem.params.size
    like = jax.ShapeDtypeStruct((d,), jnp.float32)
    compressor, key = method.compressor, jax.random.key(seed)
    start = compressor.init(key, like)

    def one_worker(params, memory, local, shared, data, chosen, key):
        message = problem.gradient(params, data, chosen) + memory
        payload, local = compressor.compress(key, message, State(local, shared))
        x_hat = compressor.decompress(payload, shared, like)
        bits = 64 * jnp.sum(x_hat != 0, dtype=jnp.int32) if method.raw else jc.code_bits(payload, code="best")
        return x_hat, message - x_hat if method.feedback else memory, local, jnp.asarray(bits, jnp.float32)

    @jax.jit
    def step(carry, data, chosen, round_):
        params, state, memories, locals_, shared = carry
        keys = jax.random.split(jax.random.fold_in(key, round_), workers)
        run = lambda x: one_worker(params, x[0], x[1], shared, data, x[2], x[3])
        sent, memories, locals_, bits = jax.lax.map(run, (memories, locals_, chosen, keys))
        new = updated(optimizer, jnp.mean(sent, axis=0), state, params)
        return (*new, memories, locals_, advance(compressor, shared)), bits

    whole = jax.jit(problem.loss)
    sample = np.random.default_rng([seed, 7]).permutation(problem.examples)[:2000]
    params = jnp.asarray(problem.params)
    stacked = jax.tree.map(lambda a: jnp.stack([a] * workers), (jnp.zeros(d), start.local))
    carry = (params, optimizer.init(params), *stacked, start.shared)
    tested = set(np.unique(np.geomspace(1, steps, 25).round().astype(int)))
    points, sent = [(0, 0.0, float(whole(params, problem.data, sample)))], 0.0
    for number in range(1, steps + 1):
        chosen = np.random.default_rng([seed, 8, number]).integers(0, problem.examples, (workers, batch))
        carry, bits = step(carry, problem.data, chosen, number)
        sent += float(np.mean(bits)) / 8
        if number in tested:
            points.append((number, sent, float(whole(carry[0], problem.data, sample))))
        show(number)
    steps_, bytes_, loss = (np.array(part) for part in zip(*points, strict=True))
    return Run(steps_, bytes_, loss)


HEAD = ["method", "kB a step", "B/nonzero", "final loss", "loss at equal bytes"]
NOTES = """\
kB a step: from one worker. B/nonzero: over the nonzeros that "f32 keys + values" sends. Loss: over up to 2,000
examples, mean of the seeds. At equal bytes: the lowest loss before a run has sent what "quantile 16" sends in half of
its steps; "-": none was measured so early."""


def main(arguments: Sequence[str]) -> int:
    from experiments.skcompress.problems import LOSSES

    p = Parser(prog="python -m experiments skcompress training", description=(__doc__ or "").split("\n\n")[0])
    p.add_argument("--data", type=Path, default=None, help=f"{FILES}; without it a synthetic set")
    p.add_argument("--problems", nargs="+", choices=[*LOSSES, "network"], default=[*LOSSES, "network"], help="models")
    p.add_argument("--optimizers", nargs="+", choices=["adam", "sgd"], default=["adam", "sgd"], help="of the mean")
    p.add_argument("--adam-lr", type=positive, default=0.01, help="learning rate of Adam; a tenth for the network")
    p.add_argument("--sgd-lr", type=positive, default=2.0, help="learning rate of SGD; a tenth for the network")
    p.add_argument("--ratio", type=fraction, default=0.1, help="of top-k before every method, for the network")
    p.add_argument("--steps", type=at_least(2), default=200, help="of each run")
    p.add_argument("--batch", type=at_least(1), default=400, help="examples for each worker and step")
    p.add_argument("--workers", type=at_least(1), default=4, help="simulated")
    p.add_argument("--seeds", nargs="+", type=at_least(0), default=[0], metavar="SEED", help="one run for each")
    run_options(p, "skcompress-training")
    o = p.parse_args(arguments)

    import optax

    from experiments.skcompress.problems import linear, network, read, synthetic

    console, folder = new_console(), choose_new(o.runs, o.name, "skcompress-training")
    rates = {"adam": (optax.adam, o.adam_lr), "sgd": (optax.sgd, o.sgd_lr)}
    everything: dict[tuple[str, str], dict[str, list[Run]]] = {}
    titles = {}
    with progress_bar(console, "") as bar:
        task = bar.add_task("reading", total=None)
        rows = None
        if set(o.problems) & set(LOSSES):
            rows = synthetic() if o.data is None else read(o.data)
        start_run(folder, vars(o))
        journal = Journal(folder)
        number = len(methods(None)) * len(o.problems) * len(o.optimizers) * len(o.seeds)
        bar.update(task, total=number * o.steps)
        for kind in o.problems:
            ratio = o.ratio if kind == "network" else None
            problem = network() if rows is None or kind == "network" else linear(rows, kind)
            for name in o.optimizers:
                make, rate = rates[name]
                optimizer = make(rate / 10 if kind == "network" else rate)
                titles[kind, name] = f"{problem.name}, {name}"
                runs = everything.setdefault((kind, name), {})
                for label, method in methods(ratio).items():
                    bar.update(task, description=f"{kind}, {name}: {label}")
                    for seed in o.seeds:
                        advance = lambda _: bar.advance(task)
                        run = train(problem, method, optimizer, o.steps, o.workers, o.batch, seed, advance)
                        runs.setdefault(label, []).append(run)
                        line = {"problem": kind, "optimizer": name, "method": label, "seed": seed}
                        line |= {key: values.tolist() for key, values in run._asdict().items()}
                        journal.add(line)
    for (kind, name), runs in everything.items():
        title = f"{titles[kind, name]}: {o.workers} workers x {o.batch} examples, {o.steps} steps"
        show(console, title, HEAD, rows_of(runs, o.steps), NOTES, folder / f"{kind}-{name}.md")
    console.print(f"plot: {plot(everything, titles, o, folder)}")
    return 0


def rows_of(runs: dict[str, list[Run]], steps: int) -> list[list[str]]:
    budget = np.mean([run.bytes[-1] for run in runs["quantile 16"]]) / 2
    nonzeros = np.mean([run.bytes[-1] for run in runs["f32 keys + values"]]) / 8 / steps
    table = []
    for label, some in runs.items():
        sent = np.mean([run.bytes[-1] for run in some]) / steps
        early = [run.loss[1:][run.bytes[1:] <= budget] for run in some]
        best = f"{np.mean([losses.min() for losses in early]):.4f}" if all(map(len, early)) else "-"
        final = np.mean([run.loss[-1] for run in some])
        table.append([label, f"{sent / 1e3:,.2f}", f"{sent / nonzeros:.3f}", f"{final:.4f}", best])
    return table


def plot(everything: dict, titles: dict, o: Any, folder: Path) -> Path:
    """Loss against kilobytes, a panel for each problem and optimizer."""
    from experiments.lib.plots import LINES, new_figure, save

    columns = len(o.optimizers)
    figure, axes = new_figure(columns, rows=len(o.problems), height=4.2 * len(o.problems))
    for axis, (key, runs) in zip(axes, everything.items(), strict=True):
        for look, (label, some) in zip(LINES, runs.items(), strict=False):
            sent = np.mean([run.bytes for run in some], 0)[1:] / 1e3
            loss = np.mean([run.loss for run in some], 0)[1:]
            axis.plot(sent, loss, label=label, markevery=4, markersize=5, **look)
        axis.set(xscale="log", xlabel="kB sent by each worker", ylabel="training loss", title=titles[key])
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2 * columns, fontsize=8)
    path = folder / "training.png"
    save(figure, path)
    return path
