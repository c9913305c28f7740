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
from experiments.lib.report import spread
from experiments.lib.run import Run
from experiments.lib.step import classified

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
    "loss": lambda row: spread(row["losses"]),
}
DITHERING, LAYERS, DIAGONAL = METHODS = ("dithering", "layer-wise", "diagonal")  # the last two with curvature


def steps_of(diag: np.ndarray, share: float, design: str) -> np.ndarray:
    """Step per entry; the finest step occurs once, so that the width of a level stays when steps are refreshed."""
    h = jc.smoothness.steps(diag, share * diag.size, method=design)
    h = np.maximum(h, FINEST)
    h[np.argmin(h)] = FINEST
    return h


def networks(run: Run) -> int:
    """The study `networks` of `python -m experiments smoothness`."""
    o, data = run.options, load("digits")
    params = nnx.state(model_of(data, 0), nnx.Param)
    d = optax.tree.size(params)
    o.rounds, o.budgets = o.rounds or STEPS, o.budgets or SHARES

    def measure(case: tuple[float, str]) -> dict[str, Any]:
        share, name = case
        runs = [train(data, name, share, seed, o.rounds) for seed in o.seeds]
        losses, sent = (np.array(each) for each in zip(*runs, strict=True))
        numbers = {DITHERING: 0, LAYERS: len(jax.tree.leaves(params)), DIAGONAL: d}[name]
        row = {
            "method": name,
            "budget": share,
            "bits": sent[:, -1].mean() / o.rounds / d,
            "refresh": 32.0 * numbers / REFRESH / d,
            "losses": losses[:, -50:].mean(1).tolist(),
        }
        run.add(row | {"loss": losses.tolist(), "sent": sent.tolist()})
        return row | {"curve": (sent.mean(0) / 8e6, running_mean(losses, 20))}

    cases = [(share, name) for share in o.budgets for name in METHODS]
    rows = run.rows_of(cases, lambda case: f"{case[1]}, budget {case[0]:g} d", measure)
    title = f"digits, CNN of {d:,} parameters, {o.rounds} steps, seeds {', '.join(map(str, o.seeds))}"
    run.table(title, COLUMNS, rows, NOTES)
    panels = {
        f"budget {share:g} d": {row["method"]: row["curve"] for row in rows if row["budget"] == share}
        for share in dict.fromkeys(row["budget"] for row in rows)
    }
    labels = {"xlabel": "MB sent by a worker", "ylabel": "training loss, mean of 20 steps"}
    run.plot("networks.png", panels, title, yscale="log", **labels)
    return run.status


def model_of(data: Any, seed: int) -> Cnn:
    return Cnn(data.train_x.shape[1:], data.num_classes, nnx.Rngs(seed))


def train(data: Any, method: str, share: float, seed: int, steps: int) -> tuple[list[float], np.ndarray]:
    """One run: loss in each step, and bits that a worker sent until then; workers are mapped by vmap."""
    graph, params = nnx.split(model_of(data, seed), nnx.Param)
    parts = split(data.train_y, WORKERS, 0.5, seed)
    x, y = jnp.asarray(data.train_x), jnp.asarray(data.train_y)
    loss, logits = classified(graph), lambda params: nnx.merge(graph, params)(x[:512])
    estimate = jax.jit(lambda params, key: jc.smoothness.ggn_diagonal(logits, params, key, samples=8))

    def plan(params, key):
        if method == DITHERING:
            operator, design = jc.smoothness.diagonal_of(np.ones(optax.tree.size(params))), "uniform"
        else:
            curvature, design = estimate(params, key), "dcgd+"
            operator = jc.smoothness.network_operator(curvature, damping=DAMPING, per_layer=method == LAYERS)
        return operator, steps_of(np.asarray(operator.diag), share, design)

    operator, h = plan(params, jax.random.key(seed))
    compressor = jc.flat(jc.precondition(jc.dithering(steps=h), operator))
    run = jc.methods.rounds(jc.methods.descend(jc.direct(compressor), RATE), AXIS, seed=seed)
    state, axes = jc.init_state(run, params, WORKERS, AXIS)

    worker = lambda state, x, y: run.step(state, lambda params: jax.grad(loss)(params, x, y))
    step = jax.jit(jax.vmap(worker, in_axes=(axes, 0, 0), out_axes=(axes, 0), axis_name=AXIS), donate_argnums=0)
    mean_loss = jax.jit(lambda state, x, y: loss(run.point(state), x, y))
    losses, bits = [], []
    for t in range(steps):
        if t and t % REFRESH == 0:
            newer, h = plan(run.point(state), jax.random.key(seed + t))
            state = jc.state.refresh(state, newer, jnp.asarray(h, jnp.float32)[None])
        rows = batch_of(parts, BATCH, seed, t)
        losses.append(float(mean_loss(state, x[rows], y[rows])))
        rows = rows.reshape(WORKERS, BATCH)
        state, sent = step(state, x[rows], y[rows])
        bits.append(float(jnp.mean(sent.astype(jnp.float32))))
    return losses, np.cumsum(bits)
