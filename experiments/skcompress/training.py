"""Loss of linear models and a network under each compression, at equal steps and at equal bytes.

Workers are simulated in one process; each compresses the gradient of its own batch, and the optimizer steps along
the mean of what they sent. Bytes are those of all messages from one worker, by the best code of each; the way back is
not counted.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxcomp as jc
from experiments.lib.cli import at_least, common, positive
from experiments.lib.run import Run, parser_of
from experiments.lib.step import updated
from experiments.skcompress.problems import LOSSES, add_data, linear, network, read, synthetic
from jaxcomp.base import State, advance

__all__ = ["main"]

NOTES = """\
kB a step: from one worker. B/nonzero: over the nonzeros that "f32 keys + values" sends. Loss: over up to 2,000
examples, mean of the seeds. At equal bytes: the lowest loss before a run has sent what "quantile 16" sends in half of
its steps; "-": none was measured so early."""
OPTIMIZERS = {"adam": optax.adam, "sgd": optax.sgd}


class Method(NamedTuple):
    """compressor: of a vector; feedback: with a memory of what was not sent; raw: 64 bits a nonzero, not coded."""

    compressor: Any
    feedback: bool = False
    raw: bool = False


def methods(ratio: float | None) -> dict[str, Method]:
    """ratio: of top-k before every other method; None for gradients that are sparse by themselves."""
    before: dict[str, Any] = {"room": 1.0} if ratio is None else {"sparsifier": jc.top_k(ratio)}
    kept = jc.hard_threshold(0.0, room=1.0) if ratio is None else jc.top_k(ratio)
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


def train(problem: Any, method: Method, optimizer: Any, steps: int, workers: int, batch: int, seed: int) -> Curve:
    """One run, from the same start and with the same batches for every method."""
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
    return Curve(*map(np.array, zip(*points, strict=True)))


def main(arguments: Sequence[str]) -> int:
    p = parser_of("skcompress training", __doc__)
    add_data(p)
    p.add_argument("--problems", nargs="+", choices=[*LOSSES, "network"], default=[*LOSSES, "network"], help="models")
    p.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=[*OPTIMIZERS], help="of the mean")
    p.add_argument("--adam-lr", type=positive, default=0.01, help="learning rate of Adam; a tenth for the network")
    p.add_argument("--sgd-lr", type=positive, default=2.0, help="learning rate of SGD; a tenth for the network")
    common(p, "workers", "seeds", steps={"type": at_least(2), "default": 200}, batch=400)
    common(p, ratio=(0.1, "of top-k before every method, for the network"))
    run = Run(p, arguments, "skcompress-training")
    o = run.options

    rows = (synthetic() if o.data is None else read(o.data)) if set(o.problems) & set(LOSSES) else None
    problems = {kind: network() if rows is None or kind == "network" else linear(rows, kind) for kind in o.problems}
    cases = list(itertools.product(o.problems, o.optimizers, methods(None)))

    def measure(case: tuple[str, str, str]) -> list[Curve]:
        kind, name, label = case
        of_network = kind == "network"
        rate = getattr(o, f"{name}_lr") / (10 if of_network else 1)
        method = methods(o.ratio if of_network else None)[label]
        curves = []
        for seed in o.seeds:
            curves.append(train(problems[kind], method, OPTIMIZERS[name](rate), o.steps, o.workers, o.batch, seed))
            line = {"problem": kind, "optimizer": name, "method": label, "seed": seed}
            run.add(line | {key: values.tolist() for key, values in curves[-1]._asdict().items()})
        return curves

    measured = dict(zip(cases, run.rows_of(cases, ", ".join, measure), strict=True))
    panels = {}
    for kind, name in itertools.product(o.problems, o.optimizers):
        curves = {label: measured[kind, name, label] for label in methods(None)}
        title = f"{problems[kind].name}, {name}"
        mean = lambda part, some: np.mean([getattr(curve, part) for curve in some], axis=0)[1:]
        panels[title] = {x: (mean("bytes", some) / 1e3, mean("loss", some)) for x, some in curves.items()}
        of_all = f"{title}: {o.workers} workers x {o.batch} examples, {o.steps} steps"
        run.table(of_all, columns_of(curves, o.steps), [{"label": x} for x in curves], NOTES, f"{kind}-{name}.md")
    run.plot("training.png", panels, xscale="log", xlabel="kB sent by each worker", ylabel="training loss")
    return 0


def columns_of(curves: dict[str, list[Curve]], steps: int) -> Any:
    sent = {label: np.mean([curve.bytes[-1] for curve in some]) for label, some in curves.items()}
    budget, nonzeros = sent["quantile 16"] / 2, sent["f32 keys + values"] / 8

    def early(label: str) -> str:
        before = [curve.loss[1:][curve.bytes[1:] <= budget] for curve in curves[label]]
        return f"{np.mean([losses.min() for losses in before]):.4f}" if all(map(len, before)) else "-"

    return {
        "method": "{label}",
        "kB a step": lambda row: f"{sent[row['label']] / steps / 1e3:,.2f}",
        "B/nonzero": lambda row: f"{sent[row['label']] / nonzeros:.3f}",
        "final loss": lambda row: f"{np.mean([curve.loss[-1] for curve in curves[row['label']]]):.4f}",
        "loss at equal bytes": lambda row: early(row["label"]),
    }
