"""Layer-wise and diagonal smoothness on a small network, against plain dithering at the same bits.

Curvature is the diagonal of the generalised Gauss-Newton matrix on a part of the data, estimated anew every REFRESH
steps at no cost in bits here (a real run would send one number per layer, or per entry, each time; that is counted in
the table). These are estimates: no theory promises a gain.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxcomp as jc
from experiments.lib.data import batch_of, load, split
from experiments.lib.models import Cnn
from experiments.lib.plots import running_mean
from experiments.lib.run import Run, cells
from experiments.lib.step import classified, updated

__all__ = ["networks"]

AXIS = "workers"
WORKERS, BATCH, STEPS, REFRESH, RATE, DAMPING = 4, 16, 300, 100, 0.05, 1.0
SHARES = [0.02, 0.1]  # budgets: expected non-zeros over d
FINEST = 1 / 127
NOTES = f"""\
Mean over seeds ± standard deviation. Small CNN on digits, {WORKERS} workers x {BATCH} examples, SGD {RATE:g}, curvature
damped by {DAMPING:g} of its mean. budget: bound on expected non-zeros over d. bits/entry: Elias-coded uplink of
a worker per step over d. refresh: bits over d of sending the curvature every {REFRESH} steps, per step.
loss: training loss, mean of the last 50 steps."""
COLUMNS = {
    "method": "{method}",
    "budget": "{budget:g} d",
    "bits/entry": "{bits:.4f}",
    "refresh": "{refresh:.4f}",
    "loss": lambda row: f"{row['loss'].mean():.4f} ± {row['loss'].std():.4f}",
    "test accuracy": lambda row: f"{row['accuracy'].mean():.4f} ± {row['accuracy'].std():.4f}",
}


# name -> numbers of curvature, by which gradients are whitened, if any; and whether steps are by it, too
KINDS = {
    "dithering": ("", False),
    "layer-wise": ("per layer", True),
    "diagonal": ("per entry", True),
    "diagonal, equal steps": ("per entry", False),
}


def steps_of(diag: np.ndarray, share: float, varying: bool) -> np.ndarray:
    """Step per entry; the finest step occurs once, so that the width of a level stays when steps are refreshed."""
    h = jc.smoothness.steps(diag, share * diag.size, method="dcgd+" if varying else "uniform")
    h = np.maximum(h, FINEST)
    h[np.argmin(h)] = FINEST
    return h


def networks(run: Run) -> int:
    """The study `networks` of `python -m experiments smoothness`."""
    o, data = run.options, load("digits")
    o.rounds, o.budgets = o.rounds or STEPS, o.budgets or SHARES
    cases = [(share, name) for share in o.budgets for name in KINDS]

    def measure(case: tuple[float, str]) -> dict[str, Any]:
        share, name = case
        runs = [train(data, *KINDS[name], share, seed, o.rounds) for seed in o.seeds]
        for seed, each in zip(o.seeds, runs, strict=True):
            for t in range(0, o.rounds, 10):
                line = {"method": name, "budget": share, "seed": seed, "step": t + 1}
                run.add(line | {"loss": each["loss"][t], "bits": each["bits"][t]})
        d = runs[0]["d"]
        numbers = {"": 0, "per layer": runs[0]["leaves"], "per entry": d}[KINDS[name][0]]
        return {
            "method": name,
            "budget": share,
            "bits": np.mean([each["bits"][-1] for each in runs]) / o.rounds / d,
            "refresh": 32.0 * numbers / REFRESH / d,
            "loss": np.array([np.mean(each["loss"][-50:]) for each in runs]),
            "accuracy": np.array([each["accuracy"] for each in runs]),
            "d": d,
            "curve": (
                np.mean([each["bits"] for each in runs], axis=0) / 8e6,
                running_mean(np.array([each["loss"] for each in runs]), 20).mean(0),
            ),
        }

    rows = run.rows_of(cases, lambda case: f"{case[1]}, budget {case[0]:g} d", measure)
    title = f"digits, CNN of {rows[0]['d']:,} parameters, {o.rounds} steps, seeds {', '.join(map(str, o.seeds))}"
    run.table(title, COLUMNS, rows, NOTES)
    run.keep([dict(zip(COLUMNS, row, strict=True)) for row in cells(COLUMNS, rows)])
    panels = {
        f"budget {share:g} d": {row["method"]: row["curve"] for row in rows if row["budget"] == share}
        for share in o.budgets
    }
    labels = {"xlabel": "MB sent by a worker", "ylabel": "training loss, mean of 20 steps"}
    run.plot("networks.png", panels, title, yscale="log", **labels)
    return 0


def train(data: Any, curvature: str, varying: bool, share: float, seed: int, steps: int) -> dict[str, Any]:
    """One run; workers are simulated by vmap."""
    graph, params = nnx.split(Cnn(data.train_x.shape[1:], data.num_classes, nnx.Rngs(seed)), nnx.Param)
    d = sum(leaf.size for leaf in jax.tree.leaves(params))
    parts = split(data.train_y, WORKERS, 0.5, seed)
    x, y = jnp.asarray(data.train_x), jnp.asarray(data.train_y)
    logits = lambda params, x: nnx.merge(graph, params)(x)
    estimate = jax.jit(
        lambda params, key: jc.smoothness.ggn_diagonal(lambda p: logits(p, x[:512]), params, key, samples=8)
    )

    def plan(params, key):
        if not curvature:
            return None, steps_of(np.ones(d), share, False)
        more = {"per_layer": True} if curvature == "per layer" else {}
        operator = jc.smoothness.network_operator(estimate(params, key), damping=DAMPING, **more)
        return operator, steps_of(np.asarray(operator.diag), share, varying)

    operator, h = plan(params, jax.random.key(seed))
    inner = jc.dithering(steps=h)
    compressor = jc.flat(inner if operator is None else jc.precondition(inner, operator))
    tx = optax.chain(jc.compressed_mean(jc.direct(compressor), AXIS, seed=seed), optax.sgd(RATE))
    axes = jc.state_axes(jax.eval_shape(tx.init, params))
    state = jax.vmap(lambda _: tx.init(params), axis_name=AXIS, out_axes=axes)(jnp.arange(WORKERS))

    def worker(params, state, x, y):
        """A step, its loss, and the bits that this worker is about to send, in Elias codes with a fixed key."""
        value, grads = jax.value_and_grad(classified(graph))(params, x, y)
        shared = state[0].shared.algorithm.compressor
        payload, _ = compressor.compress(jax.random.key(0), grads, jc.State((), shared))
        bits = jnp.asarray(jc.code_bits(payload, code="elias")).astype(jnp.float32)
        return *updated(tx, grads, state, params), value, bits

    mapped = jax.vmap(worker, in_axes=(None, axes, 0, 0), out_axes=(None, axes, 0, 0), axis_name=AXIS)
    step = jax.jit(mapped, donate_argnums=1)
    losses, bits, total = [], [], 0.0
    for t in range(steps):
        if t and t % REFRESH == 0 and curvature:
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
    return {"loss": losses, "bits": bits, "accuracy": accuracy, "d": d, "leaves": len(jax.tree.leaves(params))}
