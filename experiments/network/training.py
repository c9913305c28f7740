"""Data-parallel training of one model on the hosts of the laboratory, against the clock."""

import abc
import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxcomp as jc
from experiments.lib.data import Dataset, batch_of, load, split
from experiments.lib.models import MODELS, Ngrams, Transformer, WideTransformer
from experiments.lib.pool import note
from experiments.lib.step import classified, training_step
from experiments.lib.text import text_of
from experiments.network.mesh import Workers
from experiments.network.methods import AXIS, local_of, trained_by

__all__ = ["ARCHITECTURES", "DATA", "OF_TEXT", "Compressed", "Training", "data_of"]

OF_TEXT = {"transformer": Transformer, "transformer-wide": WideTransformer, "ngrams": Ngrams}
ARCHITECTURES = {**MODELS, **OF_TEXT}
DATA = ("digits", "mnist", "text")
LENGTH = 64  # characters of a window


def data_of(name: str, where: Path | None) -> Dataset:
    """A data set of images, or the windows of a text, whose labels are the characters moved on by one."""
    if name != "text":
        return load(name, where)
    text = text_of(where)
    number = len(text.codes) // (LENGTH + 1)
    windows = text.codes[: number * (LENGTH + 1)].reshape(number, LENGTH + 1)
    train = windows[: number * 9 // 10]
    test = windows[number * 9 // 10 :][:1000]
    return Dataset(text.name, train[:, :-1], train[:, 1:], test[:, :-1], test[:, 1:])


SMOOTH = 10  # steps that the loss is averaged over before it is held against the target


class Training(abc.ABC):
    """From the same start and with the same batches for all methods. What a method is, a subclass says.

    described: what is known of its program before it is run.
    """

    described: dict[str, Any]

    def __init__(self, number: int, data: str, data_dir: str | None, model: str, batch: int):
        self.number, self.batch, self.architecture = number, batch, model
        self.data = data_of(data, Path(data_dir) if data_dir else None)
        self.draw(0)
        self.parameters = sum(leaf.size for leaf in jax.tree.leaves(self.params))

    def draw(self, seed: int) -> None:
        """The first parameters, and whose examples are whose."""
        self.seed = seed
        self.parts = split(self.data.train_y, jax.process_count(), None, seed)
        rngs = nnx.Rngs(seed)
        self.graph, self.params = nnx.split(
            ARCHITECTURES[self.architecture](self.data.train_x.shape[1:], self.data.num_classes, rngs=rngs)
        )

    @abc.abstractmethod
    def start(self) -> None:
        """Back to the first parameters."""

    @abc.abstractmethod
    def step(self, x: np.ndarray, y: np.ndarray) -> float:
        """The mean loss of all workers before the step; x, y: this worker's batch."""

    def shared_loss(self, x: np.ndarray, y: np.ndarray) -> float | None:
        """The mean loss of the point that all workers share, before the step; None where they step from it."""
        del x, y
        return None

    @functools.cached_property
    def count_right(self) -> Callable[..., jax.Array]:
        return jax.jit(lambda params, x, y: jnp.sum(nnx.merge(self.graph, params)(x).argmax(-1) == y))

    @abc.abstractmethod
    def right(self, x: np.ndarray, y: np.ndarray) -> int:
        """How many of these labels the model finds now."""

    def batches(self, steps: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for step in range(1, steps + 1):
            chosen = batch_of(self.parts, self.batch, self.seed, step)[self.number * self.batch :][: self.batch]
            yield self.data.train_x[chosen], self.data.train_y[chosen]

    def train(self, steps: int, target: float, seed: int, shared: bool = False) -> dict[str, Any]:
        """Until the loss, averaged over ten steps, is at the target; at most so many steps.

        shared: whether the loss is that of the point that all workers share, which takes time of its own where that is
        not what they step from; else it is that of what they step from.

        losses: of what they step from, at each step, of all workers' batches. judged: the losses that are held against
        the target. seconds: since the start, at the end of each step.
        """
        self.draw(seed)
        self.start()
        losses, judged, seconds, shown = [], [], [], 0.0
        begin = time.perf_counter()
        for x, y in self.batches(steps):
            point = self.shared_loss(x, y) if shared else None
            losses.append(self.step(x, y))
            judged.append(losses[-1] if point is None else point)
            seconds.append(time.perf_counter() - begin)
            if self.number == 0 and seconds[-1] - shown > 0.5:
                shown = seconds[-1]
                note(f"step {len(losses)}, loss {losses[-1]:.3f}")
            if len(judged) >= SMOOTH and np.mean(judged[-SMOOTH:]) <= target:
                break
        test, most = self.data.test_y, 1000
        parts = [slice(at, at + most) for at in range(0, len(test), most)] if self.number == 0 else []
        right = sum(self.right(self.data.test_x[part], test[part]) for part in parts)
        reached = len(judged) >= SMOOTH and float(np.mean(judged[-SMOOTH:])) <= target
        found = {"losses": losses, "judged": judged, "seconds": seconds, "accuracy": right / test.size}
        return found | {"reached": reached}


class Compressed(Training):
    """A method of this library, or `lax.pmean`, in a program that is compiled once.

    With local updates each worker has its own row of parameters, and all stop together by the mean of their losses.
    """

    def __init__(
        self,
        number: int,
        method: str,
        ratio: float,
        levels: int,
        optimizer: str,
        rate: float,
        outer: tuple[float | None, float | None] = (None, None),
        **options: Any,
    ):
        super().__init__(number, **options)
        workers = self.workers = Workers()
        tx = trained_by(method, ratio, levels, optimizer, rate, outer)
        local, loss = local_of(method), classified(self.graph)
        self.init = lambda params: workers.start(tx, params)
        self.place = (
            workers.replicate if local is None else lambda tree: jax.tree.map(lambda x: workers.own(x[None]), tree)
        )
        state, specs = self.init(workers.replicate(self.params))
        one = training_step(tx, loss, AXIS) if local is None else in_rows(training_step(tx, loss))
        kept = (P() if local is None else P(AXIS), specs)
        step = jax.shard_map(one, mesh=workers.mesh, in_specs=(*kept, P(AXIS), P(AXIS)), out_specs=(*kept, P()))
        arguments = self.place(self.params), state, *(workers.own(x) for x in next(self.batches(1)))
        self.compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*arguments).compile()
        rounds = 1 if local is None else local.every  # of which one has the exchange, in a branch
        rows = [row for row in jc.ledger(self.compiled).rows if row.counted]
        sent = sum(row.sent_bytes / (rounds if row.branch else 1) for row in rows)
        self.described = {"ledger_bytes": sent, "parameters": self.parameters}
        jax.block_until_ready(self.compiled(*arguments))
        self.local = local
        of_all = lambda point, x, y: jax.lax.pmean(loss(point, x, y), AXIS)
        of_all = jax.shard_map(of_all, mesh=workers.mesh, in_specs=(P(), P(AXIS), P(AXIS)), out_specs=P())
        self.judge = jax.jit(of_all)
        self.row = (lambda x: x) if local is None else (lambda x: x[0])

    def start(self) -> None:
        self.now = self.place(self.params)
        self.state, _ = jax.block_until_ready(self.init(self.workers.replicate(self.params)))

    def step(self, x: np.ndarray, y: np.ndarray) -> float:
        batch = self.workers.own(x), self.workers.own(y)
        self.now, self.state, loss = jax.block_until_ready(self.compiled(self.now, self.state, *batch))
        return float(loss)

    def shared_loss(self, x: np.ndarray, y: np.ndarray) -> float | None:
        if self.local is None:
            return None
        return float(self.judge(self.state.point, self.workers.own(x), self.workers.own(y)))

    def right(self, x: np.ndarray, y: np.ndarray) -> int:
        mine = jax.tree.map(lambda leaf: self.row(jnp.asarray(leaf.addressable_data(0))), self.now)
        return int(self.count_right(mine, x, y))


def in_rows(step: Callable[..., tuple[Any, Any, Any]]) -> Callable[..., tuple[Any, Any, Any]]:
    """A step of one worker's own parameters as a row of all; its loss becomes the mean over the workers."""

    def one(rows, state, *batch):
        params, state, loss = step(jax.tree.map(lambda x: x[0], rows), state, *batch)
        return jax.tree.map(lambda x: x[None], params), state, jax.lax.pmean(loss, AXIS)

    return one
