"""Training of one curve: workers side by side on one device, each with parameters of its own."""

import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

import jaxcomp as jc
from experiments.lib.step import training_step
from experiments.lib.text import Text, windows
from experiments.lib.training import Checkpoints, State
from experiments.lib.transformer import LAYOUTS, Sizes, initial, mean_loss
from experiments.local.methods import INNERS, Setup
from jaxcomp import base
from jaxcomp.base import Algorithm
from jaxcomp.compressors.tree import each_of
from jaxcomp.exchange.routes import ROUTES
from jaxcomp.groups import split
from jaxcomp.state.moments import moment_of, moment_places
from jaxcomp.transforms.bytes_exchange import BytesExchange
from jaxcomp.transforms.local_updates import Timetable, cut, difference_of, fragments_of
from jaxcomp.transforms.moments import away_from

__all__ = ["train"]

TESTED = 64  # windows
LOGGED = 10  # steps between lines


def train(setup: Setup, seed: int, text: Text, o: Any, checkpoints: Checkpoints) -> Iterator[dict[str, Any]]:
    """A line for each logged step of a curve, from its newest checkpoint on.

    test: loss of the point that all workers share, on the text that is not trained on. sent_bytes: of a worker so far,
    by the compiled exchange. message_bytes: of the messages of a round. seconds: median of steps without an exchange.
    """
    sizes = Sizes(text.characters, o.length, o.width, o.heads, o.layers)
    lr = setup.lr or o.lr
    rate = optax.warmup_cosine_decay_schedule(0.0, lr, max(1, o.steps // 20), o.steps, lr / 10)
    inner = optax.chain(optax.clip_by_global_norm(1.0), INNERS[setup.inner](rate))
    tx = setup.transform(inner, setup.outer(o.outer_lr, o.outer_momentum), o.ratio, o.levels, seed)
    start = initial(sizes, seed)
    state, axes = jc.init_state(tx, start, o.workers, "data")
    params = jax.tree.map(lambda p: jnp.stack([p] * o.workers), start)
    loss_of = lambda params, tokens: mean_loss(params, tokens, LAYOUTS["data"])
    one = training_step(tx, loss_of)

    def informed(*arguments):
        params, state, loss = one(*arguments)
        return params, state, loss, jc.info(state)

    step = jax.vmap(informed, in_axes=(0, axes, 0), out_axes=(0, axes, 0, 0), axis_name="data")
    step, test = jax.jit(step, donate_argnums=(0, 1)), jax.jit(loss_of)
    tested = windows(text.codes[text.train :], TESTED, o.length, 0, 0)
    times = Timetable(setup.every, setup.fragments, setup.delay)
    line: dict[str, Any] = {"label": setup.label, "seed": seed}
    line["parameters"] = sum(leaf.size for leaf in jax.tree.leaves(start))
    line |= {"sent_bytes": 0.0, "message_bytes": None, "route": "sum"}
    seconds: list[float] = []
    first = checkpoints.latest() or 0
    if first:
        about = checkpoints.about(first)
        line, seconds = about["line"], about["seconds"]
        shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, State(params, state))
        params, state = checkpoints.restore(first, shapes, about)
    for t in range(first + 1, o.steps + 1):
        tokens = windows(text.codes[: text.train], o.workers * o.batch, o.length, seed, t)
        tokens = jnp.asarray(tokens.reshape(o.workers, o.batch, -1))
        began = time.perf_counter()
        params, state, loss, info = jax.block_until_ready(step(params, state, tokens))
        took, sent = time.perf_counter() - began, float(np.mean(info.sent_bytes))
        line["sent_bytes"] += sent
        if sent:
            line["route"] = tuple(ROUTES)[int(np.max(info.route))]
        else:
            seconds.append(took)
        takes = any(times.takes(p, t + 1) for p in range(setup.fragments))
        if takes and not setup.plain and (line["message_bytes"] is None or t + setup.every >= o.steps):
            line["message_bytes"] = message_bytes(setup, o, params, state, seed)
        if t == 1 or t % LOGGED == 0 or t == o.steps:
            line |= {"step": t, "loss": float(jnp.mean(loss)), "test": float(test(state.point, tested))}
            line["seconds"] = float(np.median(seconds[-100:])) if seconds else took
            yield dict(line)
        if t % o.checkpoint_every == 0 or t == o.steps:
            checkpoints.save(t, State(params, state), {"line": line, "seconds": seconds[-100:]})


def message_bytes(setup: Setup, o: Any, params: Any, state: Any, seed: int) -> int:
    """Bytes of the messages of worker 0 in a round, as `jc.wire` writes them in its best code.

    All fragments, and moments by their share of a round; of the differences that are there now, with the memory of the
    worker.
    """
    mine, algorithm = jax.tree.map(lambda p: p[0], params), setup.algorithm(o.ratio, o.levels)
    sent = 0.0
    for mean, numbers in zip(state.means, fragments_of(state.point, setup.fragments), strict=True):
        difference = difference_of(cut(state.point, numbers), cut(mine, numbers))
        sent += length_of(algorithm, mean, difference, seed)
    if setup.moments:
        inner = jax.tree.map(lambda x: x[0, 0], state.own.local.inner)
        places, algorithm = moment_places("local", inner, mine, setup.moments), setup.of_moments(o.ratio, o.levels)
        for name, period in setup.moments.items():
            point, mean = state.moments[name]
            difference = away_from(point, moment_of(inner, places[name], mine))
            sent += length_of(algorithm, mean, difference, seed) * setup.every / period
    return round(sent)


def length_of(algorithm: Algorithm, mean: Any, difference: Any, seed: int) -> int:
    """Bytes of the message of worker 0 with this difference."""
    sent: list[int] = []
    link = BytesExchange(lambda message: sent.append(len(message)) or [message], 0, 1, "best")
    local = jax.tree.map(lambda x: x[0, 0], mean.local.algorithm)  # of worker 0
    memory = base.whole(base.State(local, mean.shared.algorithm), algorithm.roles)
    groups = mean.about.groups.groups
    here = base.Round(jax.random.key(seed), groups, each_of(algorithm, groups))
    base.answered(algorithm.update(here, split(mean.about.groups, difference), memory), link.answer)
    return sum(sent)
