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

import numpy as np

from experiments.lib.cli import Parser, at_least, common, one_thread, positive
from experiments.lib.run import Columns, Run, parser_of

__all__ = ["main"]

AXIS = "data"
EVERY = 8  # steps of a local method between two exchanges
METHODS = ("dense", "error-feedback", "diana", "ef21", "dagc", "local", "local-top-k")


class Task(NamedTuple):
    """data: arrays with a leading axis of workers; loss(x, own) -> f32[]; weights f64[n], of sum one; least: f*."""

    name: str
    size: int
    data: Any
    loss: Callable[[Any, Any], Any]
    weights: np.ndarray
    least: float


def parser() -> Parser:
    p = parser_of("workers", __doc__)
    common(p, "seed", workers={"type": at_least(2), "default": 1024, "help": "simulated"}, ratio=0.05)
    p.add_argument("--tasks", nargs="+", choices=("quadratics", "digits"), default=["quadratics", "digits"])
    p.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD", help="of these")
    p.add_argument("--exchanges", type=at_least(1), default=300, help="rounds")
    p.add_argument("--dimension", type=at_least(2), default=200, help="of the quadratics")
    p.add_argument("--rates", type=positive, nargs="+", default=[0.03, 0.1, 0.3, 1.0], metavar="X", help="step sizes")
    return p


def quadratics(workers: int, size: int, seed: int) -> Task:
    import jax.numpy as jnp

    rng = np.random.default_rng(seed)
    a, b = rng.uniform(0.1, 1.0, (workers, size)), rng.standard_normal((workers, size))
    volumes = rng.lognormal(0.0, 1.0, workers)
    p = volumes / volumes.sum()
    best = (p @ (a * b)) / (p @ a)
    least = float(p @ np.sum(a * (best - b) ** 2, 1) / 2)
    data = (jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32))
    return Task("quadratics", size, data, lambda x, own: jnp.sum(own[0] * (x - own[1]) ** 2) / 2, p, least)


def digits(workers: int, size: int, seed: int) -> Task:
    """Contiguous parts of the digits, sorted by label; a worker may have one example more than another."""
    del size, seed
    import jax
    import jax.numpy as jnp
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    order = np.argsort(y, kind="stable")
    parts = np.array_split(order, min(workers, len(order)))
    most = max(map(len, parts))
    rows = np.zeros((len(parts), most), np.int64)
    real = np.zeros((len(parts), most), np.float32)
    for i, part in enumerate(parts):
        rows[i, : len(part)], real[i, : len(part)] = part, 1
    data = (jnp.asarray(x[rows] / 16, jnp.float32), jnp.asarray(y[rows], jnp.int32), jnp.asarray(real))

    def loss(w, own):
        features, labels, real = own
        logits = features @ w[:640].reshape(64, 10) + w[640:]
        each = -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1)[:, 0]
        return jnp.sum(each * real) / jnp.sum(real) + jnp.sum(w * w) / 2000

    volumes = real.sum(1)
    return Task("digits", 650, data, loss, volumes / volumes.sum(), 0.0)


def algorithm_of(method: str, task: Task, ratio: float) -> Any:
    import jaxcomp as jc

    if method in ("dense", "local"):
        return jc.direct(jc.identity())
    if method == "diana":
        return jc.diana(jc.dithering(1, blocks=1))
    if method == "ef21":
        return jc.ef21(jc.top_k(ratio))
    if method == "dagc":
        return jc.error_feedback(jc.dagc(list(task.weights), ratio))
    return jc.error_feedback(jc.top_k(ratio))


def runner(method: str, task: Task, o: Any) -> Callable[[float], tuple[np.ndarray, float]]:
    """rate -> losses of the mean after each exchange, and the bytes of a worker's message."""
    import jax
    import jax.numpy as jnp
    import optax
    from jax import lax

    import jaxcomp as jc

    workers, local = len(task.weights), method.startswith("local")
    algorithm = algorithm_of(method, task, o.ratio)
    weights = task.weights.tolist()
    options = {"weights": weights, "seed": o.seed}
    if local:
        tx = jc.local_updates(optax.sgd(1.0), optax.sgd(1.0), algorithm, AXIS, every=EVERY, via="gather", **options)
    else:
        tx = jc.compressed_mean(algorithm, AXIS, "auto" if method == "dense" else "gather", **options)
    zero = jnp.zeros(task.size)
    state, axes = jc.init_state(tx, zero, workers, AXIS)
    grads_at = jax.vmap(jax.grad(task.loss), in_axes=(0 if local else None, 0))
    shares = jnp.asarray(task.weights, jnp.float32)
    mean = lambda x, data: shares @ jax.vmap(task.loss, in_axes=(None, 0))(x, data)

    def one(carry, data, rate):
        x, state = carry
        if not local:
            update = jax.vmap(tx.update, in_axes=(0, axes), out_axes=(None, axes), axis_name=AXIS)
            direction, state = update(grads_at(x, data), state)
            x = x - rate * direction
            return (x, state), mean(x, data)
        update = jax.vmap(tx.update, in_axes=(0, axes, 0), out_axes=(0, axes), axis_name=AXIS)

        def step(inner, _):
            x, state = inner
            updates, state = update(rate * grads_at(x, data), state, x)
            return (x + updates, state), None

        (x, state), _ = lax.scan(step, (x, state), None, EVERY)
        return (x, state), mean(x[0], data)

    @jax.jit
    def run(rate, state, data):
        x = jnp.zeros((workers, task.size)) if local else zero
        (_, state), losses = lax.scan(lambda c, _: one(c, data, rate), (x, state), None, o.exchanges)
        return losses, state

    def at(rate: float) -> tuple[np.ndarray, float]:
        losses, after = run(jnp.float32(rate), state, task.data)
        return np.asarray(losses, np.float64), float(jnp.mean(jc.info(after).lane_bytes))

    return at


def main(arguments: Sequence[str]) -> int:
    run, rows = Run(parser(), arguments, "workers"), []
    o = run.options
    one_thread()
    makers = {"quadratics": quadratics, "digits": digits}
    for name in dict.fromkeys(o.tasks):
        task = makers[name](o.workers, o.dimension, o.seed)
        for method in dict.fromkeys(o.methods):
            rows.append(best(method, task, o))
            run.keep(rows)
            run.say(f"{name}, {method}: {rows[-1]['losses'][-1]:.4g} in {rows[-1]['seconds']:.0f} s")
    after = {f"after {place + 1}": f"{{losses[{place}]:.4g}}" for place in places(o.exchanges)}
    columns: Columns = {"task": "{task}", "method": "{method}", "step size": "{rate:g}"}
    columns = {**columns, "bytes": "{message_bytes:,.0f}", **after, "s": "{seconds:.0f}"}
    notes = f"""\
{o.workers:,} workers on one device. Quadratics: f - f*; digits: loss. bytes: of a worker's message at an exchange. Step
size: the one of {o.rates} with the least loss in the end; local methods take {EVERY} such steps between two
exchanges. DIANA's message is ternary with one norm; sparse messages hold {o.ratio:g} of the entries."""
    run.table(f"{run.folder.name}: {o.exchanges} exchanges", columns, rows, notes)
    panels: dict[str, dict[str, Any]] = {}
    for row in rows:
        losses = np.maximum(row["losses"], 5e-6)  # an f32 loss says no more
        what = "f - f*" if row["task"] == "quadratics" else "loss"
        panel = panels.setdefault(f"{row['task']}, {row['workers']:,} workers: {what}", {})
        panel[row["method"]] = (np.arange(1, losses.size + 1), losses)
    run.plot("workers.png", panels, xlabel="exchanges", yscale="log")
    return 0


def best(method: str, task: Task, o: Any) -> dict[str, Any]:
    """A row of results: the method with the step size whose last loss is the least."""
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*pads every message")  # nothing crosses a link here
        at = runner(method, task, o)
        tried = {rate: at(rate) for rate in o.rates}
    rate = min(tried, key=lambda rate: np.nan_to_num(tried[rate][0][-1], nan=np.inf))
    losses, size = tried[rate]
    row = {"task": task.name, "workers": len(task.weights), "method": method, "rate": rate, "message_bytes": size}
    return row | {"losses": (losses - task.least).tolist(), "seconds": time.perf_counter() - start}


def places(exchanges: int) -> list[int]:
    """Exchanges whose loss the table shows: a tenth, a half, and all of them, counted from zero."""
    return sorted({max(exchanges // 10, 1) - 1, max(exchanges // 2, 1) - 1, exchanges - 1})
