"""Data-parallel training of one model on the hosts of the laboratory, against the clock."""

import abc
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
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
SMOOTH = 10  # steps that the loss is averaged over before it is held against the target


def data_of(name: str, where: str | Path | None) -> Dataset:
    """A data set of images, or the windows of a text, whose labels are the characters moved on by one."""
    where = Path(where) if where else None
    if name != "text":
        return load(name, where)
    text = text_of(where)
    number = len(text.codes) // (LENGTH + 1)
    windows = text.codes[: number * (LENGTH + 1)].reshape(number, LENGTH + 1)
    train = windows[: number * 9 // 10]
    test = windows[number * 9 // 10 :][:1000]
    return Dataset(text.name, train[:, :-1], train[:, 1:], test[:, :-1], test[:, 1:])


class Training(abc.ABC):
    """From the same start and with the same batches for all methods. What a method is, a subclass says.

    task: method, ratio, levels, optimizer, rate, outer (learning rate and momentum, for local
    updates), data, data_dir, model and batch.

    described: what is known of its program before it is run.
    """

    def __init__(self, task: Any):
        self.number, self.task = jax.process_index(), task
        self.data = data_of(task.data, task.data_dir)
        self.draw(0)
        parameters = sum(leaf.size for leaf in jax.tree.leaves(self.params))
        self.described: dict[str, Any] = {"parameters": parameters, "ledger_bytes": None}

    def draw(self, seed: int) -> None:
        """The first parameters, and whose examples are whose."""
        self.seed = seed
        self.parts = split(self.data.train_y, jax.process_count(), None, seed)
        make = ARCHITECTURES[self.task.model]
        model = make(self.data.train_x.shape[1:], self.data.num_classes, rngs=nnx.Rngs(seed))
        self.graph, self.params = nnx.split(model)

    @abc.abstractmethod
    def start(self) -> None:
        """Back to the first parameters."""

    @abc.abstractmethod
    def step(self, x: np.ndarray, y: np.ndarray) -> float:
        """The mean loss of all workers before the step; x, y: this worker's batch."""

    def shared_loss(self, x: np.ndarray, y: np.ndarray) -> float | None:
        """The mean loss of the point that all workers share, before the step; None where they step from it."""
        return None

    def batches(self, steps: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for step in range(1, steps + 1):
            mine = slice(self.number * self.task.batch, (self.number + 1) * self.task.batch)
            chosen = batch_of(self.parts, self.task.batch, self.seed, step)[mine]
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
        losses, judged, seconds, reached = [], [], [], False
        begin = shown = time.perf_counter()
        for x, y in self.batches(steps):
            point = self.shared_loss(x, y) if shared else None
            losses.append(self.step(x, y))
            judged.append(losses[-1] if point is None else point)
            seconds.append(time.perf_counter() - begin)
            if self.number == 0 and time.perf_counter() - shown > 0.5:
                shown = time.perf_counter()
                note(f"step {len(losses)}, loss {losses[-1]:.3f}")
            reached = len(judged) >= SMOOTH and bool(np.mean(judged[-SMOOTH:]) <= target)
            if reached:
                break
        return {"losses": losses, "judged": judged, "seconds": seconds, "reached": reached}


class Compressed(Training):
    """A method of this library, or `lax.pmean`, in a program that is compiled once.

    With local updates each worker has its own row of parameters, and all stop together by the mean of their losses.
    """

    def __init__(self, task: Any):
        super().__init__(task)
        workers, self.local, loss = Workers(), local_of(task.method), classified(self.graph)
        self.workers = workers
        self.tx = trained_by(task.method, task.ratio, task.levels, task.optimizer, task.rate, task.outer)
        if self.local is None:
            step, split_by = training_step(self.tx, loss, AXIS), P()
        else:
            step, split_by = in_rows(training_step(self.tx, loss)), P(AXIS)
            of_all = lambda point, x, y: jax.lax.pmean(loss(point, x, y), AXIS)
            shared = jax.shard_map(of_all, mesh=workers.mesh, in_specs=(P(), P(AXIS), P(AXIS)), out_specs=P())
            self.judge = jax.jit(shared)
        kept = (split_by, self.start())
        step = jax.shard_map(step, mesh=workers.mesh, in_specs=(*kept, P(AXIS), P(AXIS)), out_specs=(*kept, P()))
        arguments = self.now, self.state, *map(workers.own, next(self.batches(1)))
        self.compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*arguments).compile()
        rounds = 1 if self.local is None else self.local.every  # of which one has the exchange, in a branch
        rows = [row for row in jc.ledger(self.compiled).rows if row.counted]
        self.described["ledger_bytes"] = sum(row.sent_bytes / (rounds if row.branch else 1) for row in rows)
        jax.block_until_ready(self.compiled(*arguments))

    def start(self) -> Any:
        """Back to the first parameters; the specs of the state."""
        params = self.workers.replicate(self.params)
        self.state, specs = jax.block_until_ready(self.workers.start(self.tx, params))
        self.now = params if self.local is None else jax.tree.map(lambda x: self.workers.own(x[None]), self.params)
        return specs

    def step(self, x: np.ndarray, y: np.ndarray) -> float:
        batch = self.workers.own(x), self.workers.own(y)
        self.now, self.state, loss = jax.block_until_ready(self.compiled(self.now, self.state, *batch))
        return float(loss)

    def shared_loss(self, x: np.ndarray, y: np.ndarray) -> float | None:
        if self.local is None:
            return None
        return float(self.judge(self.state.point, self.workers.own(x), self.workers.own(y)))


def in_rows(step: Any) -> Any:
    """A step of one worker's own parameters as a row of all; its loss becomes the mean over the workers."""

    def one(rows, state, *batch):
        params, state, loss = step(jax.tree.map(lambda x: x[0], rows), state, *batch)
        return jax.tree.map(lambda x: x[None], params), state, jax.lax.pmean(loss, AXIS)

    return one
