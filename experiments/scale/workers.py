"""Many simulated workers on one device: error feedback, DIANA, EF21, DAGC and local updates, by vmap.

Every worker has its own quadratic, or its own few digits, sorted by label, so that no worker's gradient says much about
the mean. Losses after so many exchanges, each method with the best of the same step sizes. Volumes differ: the mean is
weighted by them. Writes to runs/NAME: config.json, results.json, table.md, workers.png.

    quadratics   f_i(x) = (x - b_i)' diag(a_i) (x - b_i) / 2, a_i in [0.1, 1], b_i normal: f - f* is known
    digits       multinomial logistic regression with |x|^2 / 2000
"""

import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import jaxcomp as jc
from experiments.lib.cli import at_least, common, one_thread, positive
from experiments.lib.run import Columns, Run, parser_of

__all__ = ["main"]

AXIS = "data"
EVERY = 8  # steps of a local method between two exchanges
SIZE = 200  # entries of the quadratics

# Name -> (weights of the workers, ratio) -> algorithm. Those named local- take EVERY steps between exchanges.
METHODS: dict[str, Callable[[list[float], float], Any]] = {
    "dense": lambda weights, ratio: jc.direct(jc.identity()),
    "error-feedback": lambda weights, ratio: jc.error_feedback(jc.top_k(ratio)),
    "diana": lambda weights, ratio: jc.diana(jc.dithering(1, blocks=1)),
    "ef21": lambda weights, ratio: jc.ef21(jc.top_k(ratio)),
    "dagc": lambda weights, ratio: jc.error_feedback(jc.dagc(weights, ratio)),
    "local": lambda weights, ratio: jc.direct(jc.identity()),
    "local-top-k": lambda weights, ratio: jc.error_feedback(jc.top_k(ratio)),
}


class Task(NamedTuple):
    """data: arrays with a leading axis of workers; loss(x, own) -> f32[]; weights f64[n], of sum one; least: f*."""

    name: str
    size: int
    data: Any
    loss: Callable[[Any, Any], Any]
    weights: np.ndarray
    least: float


def quadratics(workers: int, seed: int) -> Task:
    rng = np.random.default_rng(seed)
    a, b = rng.uniform(0.1, 1.0, (workers, SIZE)), rng.standard_normal((workers, SIZE))
    volumes = rng.lognormal(0.0, 1.0, workers)
    p = volumes / volumes.sum()
    best = (p @ (a * b)) / (p @ a)
    least = float(p @ np.sum(a * (best - b) ** 2, 1) / 2)
    data = (jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32))
    return Task("quadratics", SIZE, data, lambda x, own: jnp.sum(own[0] * (x - own[1]) ** 2) / 2, p, least)


def digits(workers: int, seed: int) -> Task:
    """Contiguous parts of the digits, sorted by label; a worker may have one example more than another."""
    del seed
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    parts = np.array_split(np.argsort(y, kind="stable"), min(workers, len(y)))
    most = max(map(len, parts))
    rows = np.array([np.pad(part, (0, most - len(part))) for part in parts])
    real = np.array([np.arange(most) < len(part) for part in parts], np.float32)
    data = (jnp.asarray(x[rows] / 16, jnp.float32), jnp.asarray(y[rows], jnp.int32), jnp.asarray(real))

    def loss(w, own):
        features, labels, real = own
        logits = features @ w[:640].reshape(64, 10) + w[640:]
        each = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return jnp.sum(each * real) / jnp.sum(real) + jnp.sum(w * w) / 2000

    volumes = real.sum(1)
    return Task("digits", 650, data, loss, volumes / volumes.sum(), 0.0)


def runner(method: str, task: Task, o: Any) -> Callable[[float], Any]:
    """rate -> losses of the mean after each exchange, and the bytes of a worker's message."""
    workers, local = len(task.weights), method.startswith("local")
    weights = task.weights.tolist()
    algorithm, options = METHODS[method](weights, o.ratio), {"weights": weights, "seed": o.seed}
    if local:
        tx = jc.local_updates(optax.sgd(1.0), optax.sgd(1.0), algorithm, AXIS, every=EVERY, via="gather", **options)
    else:
        tx = jc.compressed_mean(algorithm, AXIS, "auto" if method == "dense" else "gather", **options)
    state, axes = jc.init_state(tx, jnp.zeros(task.size), workers, AXIS)
    gradients = jax.vmap(jax.grad(task.loss), in_axes=(0 if local else None, 0))
    update = jax.vmap(tx.update, in_axes=(0, axes, 0), out_axes=(0, axes), axis_name=AXIS)
    shares = jnp.asarray(task.weights, jnp.float32)

    @jax.jit
    def run(rate, state, data):
        def step(carry, _):
            x, state = carry
            grads = gradients(x if local else x[0], data)
            moved, state = update(rate * grads if local else grads, state, x)
            return (x + moved if local else x - rate * moved, state), None

        def exchange(carry, _):
            carry, _ = lax.scan(step, carry, None, EVERY if local else 1)
            return carry, shares @ jax.vmap(task.loss, in_axes=(None, 0))(carry[0][0], data)

        (_, state), losses = lax.scan(exchange, (jnp.zeros((workers, task.size)), state), None, o.exchanges)
        return losses, jnp.mean(jc.info(state).lane_bytes)

    return lambda rate: jax.device_get(run(jnp.float32(rate), state, task.data))


def best(method: str, task: Task, o: Any) -> dict[str, Any]:
    """A row of results: the method with the step size whose last loss is the least."""
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*pads every message")  # nothing crosses a link here
        at = runner(method, task, o)
        tried = {rate: at(rate) for rate in o.rates}
    rate = min(tried, key=lambda rate: np.nan_to_num(tried[rate][0][-1], nan=np.inf))
    losses, size = tried[rate]
    row = {"task": task.name, "workers": len(task.weights), "method": method, "rate": rate}
    row |= {"message_bytes": float(size), "losses": (losses.astype(float) - task.least).tolist()}
    return row | {"seconds": time.perf_counter() - start}


def main(arguments: Sequence[str]) -> int:
    tasks = {"quadratics": quadratics, "digits": digits}
    p = parser_of("workers", __doc__)
    common(p, "seed", workers={"type": at_least(2), "default": 1024, "help": "simulated"}, ratio=0.05)
    p.add_argument("--tasks", nargs="+", choices=tasks, default=list(tasks), help="of these")
    p.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD", help="of these")
    p.add_argument("--exchanges", type=at_least(1), default=300, help="rounds")
    p.add_argument("--rates", type=positive, nargs="+", default=[0.03, 0.1, 0.3, 1.0], metavar="X", help="step sizes")
    run = Run(p, arguments, "workers")
    o = run.options
    one_thread()
    cases = [(tasks[name](o.workers, o.seed), method) for name in o.tasks for method in o.methods]
    rows = run.rows_of(cases, lambda case: f"{case[0].name}, {case[1]}", lambda case: best(case[1], case[0], o))
    run.keep(rows)
    # A tenth, a half, and all of the exchanges, counted from zero.
    places = sorted({max(o.exchanges // 10, 1) - 1, max(o.exchanges // 2, 1) - 1, o.exchanges - 1})
    after = {f"after {place + 1}": f"{{losses[{place}]:.4g}}" for place in places}
    columns: Columns = {"task": "{task}", "method": "{method}", "step size": "{rate:g}"}
    columns = {**columns, "bytes": "{message_bytes:,.0f}", **after, "s": "{seconds:.0f}"}
    notes = f"""\
{o.workers:,} workers on one device; of the digits at most one for each of 1,797. Quadratics: f - f*; digits: loss.
bytes: of a worker's message at an exchange. Step size: the one of {o.rates} with the least loss in the end; local
methods take {EVERY} such steps between two exchanges. DIANA's message is ternary with one norm; sparse messages hold
{o.ratio:g} of the entries."""
    run.table(f"{run.folder.name}: {o.exchanges} exchanges", columns, rows, notes)
    panels: dict[str, dict[str, Any]] = {}
    for row in rows:
        losses = np.maximum(row["losses"], 5e-6)  # an f32 loss says no more
        what = "f - f*" if row["task"] == "quadratics" else "loss"
        panel = panels.setdefault(f"{row['task']}, {row['workers']:,} workers: {what}", {})
        panel[row["method"]] = (np.arange(1, losses.size + 1), losses)
    run.plot("workers.png", panels, xlabel="exchanges", yscale="log")
    return run.status
