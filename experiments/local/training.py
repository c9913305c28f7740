"""Training of one curve: workers side by side on one device, each with parameters of its own."""

import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxcomp as jc
from experiments.lib.step import training_step
from experiments.lib.text import Text, windows
from experiments.lib.transformer import LAYOUTS, Sizes, initial, mean_loss
from experiments.local.methods import Setup
from jaxcomp.base import State
from jaxcomp.exchange.routes import ROUTES
from jaxcomp.layout import split
from jaxcomp.transforms.fragments import Timetable, cut, fragments_of
from jaxcomp.transforms.local_process import BytesExchange
from jaxcomp.transforms.local_updates import LocalUpdatesState, difference_of

__all__ = ["Trainer", "seconds_of"]

Array = jax.Array
TESTED = 64  # windows


class Trainer:
    """One curve for one seed.

    params: of all workers, with a leading axis. state: of the optimizer.
    """

    def __init__(self, setup: Setup, text: Text, sizes: Sizes, options: dict[str, Any], seed: int):
        self.setup, self.text, self.options, self.seed = setup, text, options, seed
        steps, workers = options["steps"], options["workers"]
        rate = optax.warmup_cosine_decay_schedule(0.0, options["lr"], max(1, steps // 20), steps, options["lr"] / 10)
        inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=0.1))
        outer = setup.outer(options["outer_lr"], options["outer_momentum"])
        self.tx = setup.transform(inner, outer, options["ratio"], options["levels"], seed)
        self.algorithm = setup.algorithm(options["ratio"], options["levels"])
        start = initial(sizes, seed)
        self.parameters = sum(leaf.size for leaf in jax.tree.leaves(start))
        self.state, axes = jc.init_state(self.tx, start, workers, "data")
        self.params = jax.tree.map(lambda p: jnp.stack([p] * workers), start)
        self.loss = lambda params, tokens: mean_loss(params, tokens, LAYOUTS["data"])
        step = training_step(self.tx, self.loss)

        def one(*arguments):
            params, state, loss = step(*arguments)
            return params, state, loss, jc.info(state)

        mapped = jax.vmap(one, in_axes=(0, axes, 0), out_axes=(0, axes, 0, 0), axis_name="data")
        self.step = jax.jit(mapped, donate_argnums=(0, 1))
        test = text.codes[text.train :]
        self.test_windows = windows(test, TESTED, sizes.length, 0, 0)
        self.test = jax.jit(self.loss)
        self.length = sizes.length

    def batch(self, step: int) -> Array:
        """i32[workers, batch, length + 1] of this step."""
        workers, batch = self.options["workers"], self.options["batch"]
        rows = windows(self.text.codes[: self.text.train], workers * batch, self.length, self.seed, step)
        return jnp.asarray(rows.reshape(workers, batch, -1))

    def advance(self, step: int) -> "Step":
        """Takes a step, counted from one."""
        tokens = self.batch(step)
        began = time.perf_counter()
        self.params, self.state, loss, info = jax.block_until_ready(self.step(self.params, self.state, tokens))
        seconds = time.perf_counter() - began
        route = tuple(ROUTES)[int(np.max(info.route))]
        return Step(float(jnp.mean(loss)), float(np.mean(info.sent_bytes)), route, seconds)

    def test_loss(self) -> float:
        """Of the point that all workers share, on the text that is not trained on."""
        return float(self.test(self.state.point, self.test_windows))

    def is_due(self, step: int) -> bool:
        """Whether the next step takes a difference."""
        setup = self.setup
        times = Timetable(setup.every, setup.fragments, setup.delay)
        return any(times.takes(p, step + 1) for p in range(setup.fragments))

    def message_bytes(self) -> int:
        """Bytes of the messages of worker 0 in a round, all fragments, as `jc.wire` writes them in its best code.

        Of the difference that is there now, with the memory of the worker.
        """
        sent: list[int] = []
        link = BytesExchange(lambda message: sent.append(len(message)) or [message], 0, 1, "best")
        state: LocalUpdatesState = self.state
        mine = jax.tree.map(lambda p: p[0], self.params)
        for p, numbers in enumerate(fragments_of(state.point, self.setup.fragments)):
            difference = difference_of(cut(state.point, numbers), cut(mine, numbers))
            mean = state.means[p]
            local = jax.tree.map(lambda x: x[0, 0], mean.local.algorithm)  # of worker 0
            memory = State(local, mean.shared.algorithm)
            self.algorithm.update(jax.random.key(self.seed), split(mean.about.plan, difference), memory, link)
        return sum(sent)

    def save(self, path: Path, step: int) -> None:
        """All or nothing."""
        leaves = jax.tree.leaves((self.params, self.state))
        draft = path.with_suffix(".tmp.npz")
        arrays: dict[str, Any] = {f"leaf{i}": np.asarray(leaf) for i, leaf in enumerate(leaves)}
        np.savez(draft, step=step, **arrays)
        os.replace(draft, path)

    def load(self, path: Path) -> int:
        """Goes on from a checkpoint; returns its step."""
        leaves, structure = jax.tree.flatten((self.params, self.state))
        with np.load(path) as kept:
            found = [jnp.asarray(kept[f"leaf{i}"]) for i in range(len(leaves))]
            self.params, self.state = jax.tree.unflatten(structure, found)
            return int(kept["step"])


class Step(NamedTuple):
    """loss: mean over the workers; sent_bytes: of the compiled exchange, from each worker; seconds: it took here."""

    loss: float
    sent_bytes: float
    route: str
    seconds: float


def seconds_of(setup: Setup, steps: int, compute: float, sent_bytes: float, mbit: float) -> float:
    """Time of so many steps on links of so many Mbit/s, if an exchange waits for nothing else.

    A round of H steps takes H compute, and for each of its P exchanges what its delay does not hide:
    max(0, sent / bandwidth - delay compute). compute: seconds of a step without an exchange. sent_bytes: of a worker in
    a whole round, all fragments.

    >>> setup = Setup("f32 H=10", "f32", 10)
    >>> print(seconds_of(setup, 100, 0.1, 1.25e6, 10.0), seconds_of(setup._replace(delay=5), 100, 0.1, 1.25e6, 10.0))
    20.0 15.0
    """
    each = sent_bytes / setup.fragments / (mbit * 1e6 / 8)
    waits = max(0.0, each - setup.delay * compute)
    return steps * compute + steps / setup.every * setup.fragments * waits
