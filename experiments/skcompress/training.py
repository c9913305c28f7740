"""Loss of linear models and a network under each compression, at equal steps and at equal bytes.

Workers are simulated in one process; each compresses the gradient of its own batch, and the optimizer steps along
the mean of what they sent. Bytes are those of all messages from one worker, by the best code of each; the way back is
not counted.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxcomp as jc
from experiments.lib.cli import at_least, common
from experiments.lib.data import add_rows
from experiments.lib.run import Run, parser_of
from experiments.lib.step import updated
from experiments.skcompress.problems import LOSSES, Problem, linear, network, read, synthetic

__all__ = ["main"]

NOTES = """\
kB a step: from one worker. B/nonzero: over the nonzeros that "f32 keys + values" sends. Loss: over up to 2,000
examples, mean of the seeds. At equal bytes: the lowest loss before a run has sent what "quantile 16" sends in half of
its steps; "-": none was measured so early."""
COLUMNS = {
    "method": "{method}",
    "kB a step": "{kilobytes:,.2f}",
    "B/nonzero": lambda row: "-" if np.isnan(row["each"]) else f"{row['each']:.3f}",
    "final loss": "{loss:.4f}",
    "loss at equal bytes": lambda row: "-" if row["early"] is None else f"{row['early']:.4f}",
}
OPTIMIZERS = {"adam": (optax.adam, 0.01), "sgd": (optax.sgd, 2.0)}  # with learning rates; a tenth for the network
NETWORK = "network"
RATIO = 0.1  # of top-k before every method, for the network


class Method(NamedTuple):
    """compressor: of a vector; feedback: with a memory of what was not sent; raw: 64 bits a nonzero, not coded."""

    compressor: Any
    feedback: bool = False
    raw: bool = False


def methods(ratio: float | None) -> dict[str, Method]:
    """ratio: of top-k before every other method; None for gradients that are sparse by themselves."""
    before: dict[str, Any] = {"room": 1.0} if ratio is None else {"sparsifier": jc.top_k(ratio)}
    kept = jc.contrib.hard_threshold(0.0, room=1.0) if ratio is None else jc.top_k(ratio)
    few = jc.top_k((0.05 if ratio is None else ratio) / 5)
    return {
        "dense f32": Method(jc.identity()),
        "f32 keys + values": Method(kept, raw=True),
        "as released": Method(jc.skcompress(mode="paper", **before)),
        "recentred sketch": Method(jc.skcompress(mode="recentred", **before)),
        "quantile 16": Method(jc.skcompress(**before)),
        "equal depth 16": Method(jc.skcompress(power=0, **before)),
        "quantile 16, memory": Method(jc.skcompress(**before), feedback=True),
        "top-k + quantile 16, memory": Method(jc.skcompress(few), feedback=True),
        "top-k + dithering 7, memory": Method(jc.compose(few, jc.dithering(7, norm="inf", blocks=1)), feedback=True),
    }


class Curve(NamedTuple):
    """steps i32[t], bytes f64[t] sent by one worker so far, loss f64[t] over a fixed part of the examples."""

    steps: np.ndarray
    bytes: np.ndarray
    loss: np.ndarray


def train(problem: Problem, method: Method, optimizer: Any, steps: int, workers: int, batch: int, seed: int) -> Curve:
    """One run, from the same start and with the same batches for every method."""

    @jax.jit
    def step(params, state, memories, data, chosen, key):
        def one_worker(of_worker):
            memory, chosen, key = of_worker
            message = problem.gradient(params, data, chosen) + memory
            x_hat, payload = jc.roundtrip(method.compressor, message, key=key)
            bits = 64 * jnp.sum(x_hat != 0, dtype=jnp.int32) if method.raw else jc.code_bits(payload, code="best")
            return x_hat, message - x_hat if method.feedback else memory, jnp.asarray(bits, jnp.float32)

        sent, memories, bits = jax.lax.map(one_worker, (memories, chosen, jax.random.split(key, workers)))
        return *updated(optimizer, jnp.mean(sent, axis=0), state, params), memories, jnp.mean(bits)

    whole, key = jax.jit(problem.loss), jax.random.key(seed)
    sample = np.random.default_rng([seed, 7]).permutation(problem.examples)[:2000]
    params = jnp.asarray(problem.params)
    state, memories = optimizer.init(params), jnp.zeros((workers, params.size))
    tested = set(np.unique(np.geomspace(1, steps, 25).round().astype(int)))
    points, sent = [(0, 0.0, float(whole(params, problem.data, sample)))], 0.0
    for number in range(1, steps + 1):
        chosen = np.random.default_rng([seed, 8, number]).integers(0, problem.examples, (workers, batch))
        round_key = jax.random.fold_in(key, number)
        params, state, memories, bits = step(params, state, memories, problem.data, chosen, round_key)
        sent += float(bits) / 8
        if number in tested:
            points.append((number, sent, float(whole(params, problem.data, sample))))
    return Curve(*map(np.array, zip(*points, strict=True)))


def main(arguments: Sequence[str]) -> int:
    p = parser_of("skcompress training", __doc__)
    add_rows(p, "a synthetic set")
    kinds = [*LOSSES, NETWORK]
    p.add_argument("--problems", nargs="+", choices=kinds, default=kinds, help="models")
    p.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=[*OPTIMIZERS], help="of the mean")
    common(p, "workers", "seeds", steps={"type": at_least(2), "default": 200}, batch=400)
    run = Run(p, arguments, "skcompress-training")
    o, panels = run.options, {}

    rows = (synthetic() if o.data is None else read(o.data)) if set(o.problems) & set(LOSSES) else None
    for kind in o.problems:
        problem = network() if rows is None or kind == NETWORK else linear(rows, kind)
        for name in o.optimizers:
            panels[f"{problem.name}, {name}"] = compare(run, kind, name, problem)
    run.plot("training.png", panels, xscale="log", xlabel="kB sent by each worker", ylabel="training loss")
    return run.status


def compare(run: Run, kind: str, name: str, problem: Problem) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The table of one model and optimizer, and loss over kilobytes for each method."""
    o, (make, rate) = run.options, OPTIMIZERS[name]
    optimizer, known = (make(rate / 10), methods(RATIO)) if kind == NETWORK else (make(rate), methods(None))

    def measure(label: str) -> list[Curve]:
        curves = [train(problem, known[label], optimizer, o.steps, o.workers, o.batch, seed) for seed in o.seeds]
        for seed, curve in zip(o.seeds, curves, strict=True):
            line = {"problem": kind, "optimizer": name, "method": label, "seed": seed}
            run.add(line | {key: values.tolist() for key, values in curve._asdict().items()})
        return curves

    title = f"{problem.name}, {name}: {o.workers} workers x {o.batch} examples, {o.steps} steps"
    run.say(title)
    curves = dict(zip(known, run.rows_of(list(known), str, measure), strict=False))
    sent = {label: np.mean([curve.bytes[-1] for curve in some]) for label, some in curves.items()}
    # Missing if interrupted.
    budget, nonzeros = sent.get("quantile 16", 0) / 2, sent.get("f32 keys + values", np.nan) / 8
    rows = []
    for label, some in curves.items():
        before = [curve.loss[1:][curve.bytes[1:] <= budget] for curve in some]
        early = np.mean([losses.min() for losses in before]) if all(map(len, before)) else None
        row = {"method": label, "kilobytes": sent[label] / o.steps / 1e3, "each": sent[label] / nonzeros}
        rows.append(row | {"loss": np.mean([curve.loss[-1] for curve in some]), "early": early})
    run.table(title, COLUMNS, rows, NOTES, f"{kind}-{name}.md")
    mean = lambda part, some: np.mean([getattr(curve, part) for curve in some], axis=0)[1:]
    return {label: (mean("bytes", some) / 1e3, mean("loss", some)) for label, some in curves.items()}
