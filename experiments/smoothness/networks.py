"""Layer-wise and diagonal smoothness on a small network, against plain dithering at the same bits.

Curvature is the diagonal of the generalised Gauss-Newton matrix on a part of the data, estimated anew every
--refresh steps at no cost in bits here (a real run would send one number per layer, or per entry,
each time; that is counted in the table). These are estimates: no theory promises a gain.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxcomp as jc
from experiments.lib.data import batch_of, load, split
from experiments.lib.folders import Journal, write_json
from experiments.lib.models import Cnn
from experiments.lib.plots import LINES, new_figure, running_mean, save
from experiments.lib.report import new_console, show
from experiments.lib.step import classified, updated

__all__ = ["networks"]

AXIS = "workers"
WORKERS, BATCH, STEPS, REFRESH, RATE, DAMPING = 4, 16, 300, 100, 0.05, 1.0
SHARES = (0.02, 0.1)  # budgets: expected non-zeros over d
FINEST = 1 / 127
NOTES = f"""\
Mean over seeds ± standard deviation. Small CNN on digits, {WORKERS} workers x {BATCH} examples, SGD {RATE:g}, curvature
damped by {DAMPING:g} of its mean. budget: bound on expected non-zeros over d. bits/entry: Elias-coded uplink of
a worker per step over d. refresh: bits over d of sending the curvature every {REFRESH} steps, per step.
loss: training loss, mean of the last 50 steps."""


class Kind(NamedTuple):
    """operator(diagonal) -> operator, or none;  varying steps;  bits of one refresh for d entries in so many leaves."""

    operator: Callable[[Any], Any] | None
    varying: bool
    refresh_bits: Callable[[int, int], float]


KINDS = {
    "dithering": Kind(None, False, lambda d, leaves: 0.0),
    "layer-wise": Kind(
        lambda diagonal: jc.smoothness.network_operator(diagonal, per_layer=True, damping=DAMPING),
        True,
        lambda d, leaves: 32.0 * leaves,
    ),
    "diagonal": Kind(
        lambda diagonal: jc.smoothness.network_operator(diagonal, damping=DAMPING), True, lambda d, leaves: 32.0 * d
    ),
    "diagonal, equal steps": Kind(
        lambda diagonal: jc.smoothness.network_operator(diagonal, damping=DAMPING), False, lambda d, leaves: 32.0 * d
    ),
}


def steps_of(diag: np.ndarray, share: float, varying: bool) -> np.ndarray:
    """Step per entry; the finest step occurs once, so that the width of a level stays when steps are refreshed."""
    h = jc.smoothness.steps(diag, share * diag.size, method="dcgd+" if varying else "uniform")
    h = np.maximum(h, FINEST)
    h[np.argmin(h)] = FINEST
    return h


def networks(o: Any, folder: Path) -> int:
    """The study `networks` of `python -m experiments smoothness`."""
    console, steps = new_console(), o.rounds or STEPS
    shares = tuple(o.budgets or SHARES)
    data = load("digits")
    folder.mkdir(parents=True)
    rows, curves = [], {}
    journal = Journal(folder)
    for share in shares:
        for name, kind in KINDS.items():
            runs = [train(data, kind, share, seed, steps) for seed in o.seeds]
            for seed, run in zip(o.seeds, runs, strict=True):
                for t in range(0, steps, 10):
                    line = {"method": name, "budget": share, "seed": seed, "step": t + 1}
                    journal.add(line | {"loss": run["loss"][t], "bits": run["bits"][t]})
            loss = np.array([np.mean(run["loss"][-50:]) for run in runs])
            accuracy = np.array([run["accuracy"] for run in runs])
            d, leaves = runs[0]["d"], runs[0]["leaves"]
            each = np.mean([run["bits"][-1] for run in runs]) / steps / d
            rows.append(
                [
                    name,
                    f"{share:g} d",
                    f"{each:.4f}",
                    f"{kind.refresh_bits(d, leaves) / REFRESH / d:.4f}",
                    f"{loss.mean():.4f} ± {loss.std():.4f}",
                    f"{accuracy.mean():.4f} ± {accuracy.std():.4f}",
                ]
            )
            curves[name, share] = runs
            console.print(" | ".join(rows[-1]), highlight=False)
    title = f"digits, CNN of {d:,} parameters, {steps} steps, seeds {', '.join(map(str, o.seeds))}"
    head = ["method", "budget", "bits/entry", "refresh", "loss", "test accuracy"]
    show(console, title, head, rows, NOTES, folder / "table.md")
    write_json(folder / "results.json", [dict(zip(head, row, strict=True)) for row in rows])
    plot(folder / "networks.png", title, curves, shares)
    console.print(f"written to {folder}: networks.png, table.md, metrics.jsonl, results.json")
    return 0


def train(data: Any, kind: Kind, share: float, seed: int, steps: int) -> dict[str, Any]:
    """One run; workers are simulated by vmap."""
    model = Cnn(data.train_x.shape[1:], data.num_classes, nnx.Rngs(seed))
    graph, params = nnx.split(model, nnx.Param)
    d = sum(leaf.size for leaf in jax.tree.leaves(params))
    parts = split(data.train_y, WORKERS, 0.5, seed)
    x, y = jnp.asarray(data.train_x), jnp.asarray(data.train_y)
    logits = lambda params, x: nnx.merge(graph, params)(x)
    estimate = jax.jit(
        lambda params, key: jc.smoothness.ggn_diagonal(lambda p: logits(p, x[:512]), params, key, samples=8)
    )

    def plan(params, key):
        if kind.operator is None:
            return None, steps_of(np.ones(d), share, False)
        operator = kind.operator(estimate(params, key))
        return operator, steps_of(np.asarray(operator.diag), share, kind.varying)

    operator, h = plan(params, jax.random.key(seed))
    inner = jc.dithering(steps=h)
    compressor = jc.flat(inner if operator is None else jc.precondition(inner, operator))
    tx = optax.chain(jc.compressed_mean(jc.direct(compressor), AXIS, seed=seed), optax.sgd(RATE))
    axes = jc.state_axes(jax.eval_shape(tx.init, params))
    state = jax.vmap(lambda _: tx.init(params), axis_name=AXIS, out_axes=axes)(jnp.arange(WORKERS))

    def worker(params, state, x, y):
        value, grads = jax.value_and_grad(classified(graph))(params, x, y)
        return *updated(tx, grads, state, params), value, compressor_payload_bits(grads, state)

    def compressor_payload_bits(grads, state):
        """What this worker is about to send, in Elias codes; the draw is that of a fixed key."""
        shared = state[0].shared.algorithm.compressor
        payload, _ = compressor.compress(jax.random.key(0), grads, jc.State((), shared))
        return jnp.asarray(jc.code_bits(payload, code="elias")).astype(jnp.float32)

    step = jax.jit(
        jax.vmap(worker, in_axes=(None, axes, 0, 0), out_axes=(None, axes, 0, 0), axis_name=AXIS), donate_argnums=1
    )
    losses, bits, total = [], [], 0.0
    for t in range(steps):
        if t and t % REFRESH == 0 and kind.operator is not None:
            newer, h = plan(params, jax.random.key(seed + t))
            state = jc.refresh(state, newer, jnp.asarray(h, jnp.float32)[None])  # pyright: ignore[reportArgumentType]
        rows = batch_of(parts, BATCH, seed, t).reshape(WORKERS, BATCH)
        params, state, value, sent = step(params, state, x[rows], y[rows])
        total += float(jnp.mean(sent))
        losses.append(float(jnp.mean(value)))
        bits.append(total)
        if not np.isfinite(losses[-1]):  # diverged: nothing that follows is of use
            losses += [np.inf] * (steps - len(losses))
            bits += [total] * (steps - len(bits))
            break
    scores = np.asarray(jax.jit(logits)(params, jnp.asarray(data.test_x)))
    accuracy = float(np.mean(scores.argmax(1) == data.test_y))
    leaves = len(jax.tree.leaves(params))
    return {"loss": losses, "bits": bits, "accuracy": accuracy, "d": d, "leaves": leaves}


def plot(path: Path, title: str, curves: dict, shares: tuple[float, ...]) -> None:
    figure, axes = new_figure(len(shares))
    for axis, share in zip(axes, shares, strict=True):
        for i, name in enumerate(KINDS):
            runs = curves[name, share]
            losses = running_mean(np.array([run["loss"] for run in runs]), 20)
            megabytes = np.mean([run["bits"] for run in runs], axis=0) / 8e6
            axis.plot(megabytes, losses.mean(0), label=name, markevery=0.2, **LINES[i])
        axis.set_yscale("log")
        axis.set_xlabel("MB sent by a worker")
        axis.set_title(f"budget {share:g} d", fontsize=10)
    axes[0].set_ylabel("training loss, mean of 20 steps")
    axes[0].legend(fontsize=8)
    figure.suptitle(title, fontsize=10)
    save(figure, path)
