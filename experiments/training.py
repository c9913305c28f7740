"""Data-parallel training of a small Flax model with a compressed exchange of gradients."""

import hashlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomp as jc
from experiments.cli import UserError
from experiments.data import Dataset, batch_of
from jaxcomp.base import Algorithm

__all__ = ["AXIS", "OPTIMIZERS", "Progress", "Trainer", "find_devices"]

AXIS = "data"
OPTIMIZERS: dict[str, Callable[[float], optax.GradientTransformation]] = {
    "adam": optax.adam,
    "sgd": lambda rate: optax.sgd(rate, momentum=0.9),
}


def find_devices(workers: int) -> list[Any]:
    """One device for each worker: real accelerators if there are any, else virtual CPU devices.

    Must be called before anything else touches JAX's devices.
    """
    jax.config.update("jax_num_cpu_devices", workers)
    devices = jax.devices()
    if len(devices) < workers:
        raise UserError(
            f"{workers} workers need {workers} devices, and there are {len(devices)} ({devices[0].platform}); "
            f"use --workers {len(devices)}, or JAX_PLATFORMS=cpu for virtual devices"
        )
    return devices[:workers]


class State(NamedTuple):
    """Everything that the next step depends on."""

    params: Any
    optimizer: Any


class Progress(NamedTuple):
    """One step: its number, the mean loss over workers before the update, and how long it took."""

    step: int
    loss: float
    seconds: float
    state: State


class Trainer:
    """One method on one model; compiled once for all seeds."""

    def __init__(
        self,
        algorithm: Algorithm,
        model: Callable[..., nnx.Module],
        data: Dataset,
        devices: list[Any],
        optimizer: str,
        rate: float,
        batch: int,
    ):
        self.algorithm, self.data, self.batch = algorithm, data, batch
        self.model = lambda seed: model(data.train_x.shape[1:], data.num_classes, rngs=nnx.Rngs(seed))
        self.mesh = jax.make_mesh((len(devices),), (AXIS,), devices=devices, axis_types=(AxisType.Auto,))
        self.optimizer = OPTIMIZERS[optimizer](rate)
        self.graph, params = nnx.split(self.model(0))
        self.num_params = sum(leaf.size for leaf in jax.tree.leaves(params))
        self.transform = self.transform_for(0)
        self.specs = jc.state_specs(jax.eval_shape(self.transform.init, params), AXIS)
        self.compiled = self._compile(params)
        self.ledger = jc.ledger(self.compiled)
        self.info = jax.jit(jc.info)

    def transform_for(self, seed: int) -> optax.GradientTransformation:
        return optax.chain(jc.compressed_mean(self.algorithm, AXIS, seed=seed), self.optimizer)

    def _compile(self, params: Any) -> Any:
        def loss_of(params, x, y):
            logits = nnx.merge(self.graph, params)(x)
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

        def step(state, x, y):
            loss, grads = jax.value_and_grad(loss_of)(jc.per_worker(state.params, AXIS), x, y)
            updates, optimizer = self.transform.update(grads, state.optimizer, state.params)
            return State(optax.apply_updates(state.params, updates), optimizer), lax.pmean(loss, AXIS)

        specs = State(P(), self.specs)
        step = jax.shard_map(step, mesh=self.mesh, in_specs=(specs, P(AXIS), P(AXIS)), out_specs=(specs, P()))
        size = self.batch * self.mesh.size
        split = NamedSharding(self.mesh, P(AXIS))
        x = jax.ShapeDtypeStruct((size, *self.data.train_x.shape[1:]), jnp.float32, sharding=split)
        y = jax.ShapeDtypeStruct((size,), jnp.int32, sharding=split)
        return jax.jit(step, donate_argnums=0).lower(self.abstract_state(params), x, y).compile()

    def abstract_state(self, params: Any) -> State:
        """Shapes, dtypes and places of the state."""
        make = jax.shard_map(self.transform.init, mesh=self.mesh, in_specs=P(), out_specs=self.specs)

        def place(leaf, spec):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(self.mesh, spec))

        optimizer = jax.tree.map(place, jax.eval_shape(make, params), self.specs)
        return State(jax.tree.map(lambda leaf: place(leaf, P()), params), optimizer)

    def initial_state(self, seed: int) -> State:
        _, params = nnx.split(self.model(seed))
        params = jax.device_put(params, NamedSharding(self.mesh, P()))
        optimizer, _ = jc.init_state(self.transform_for(seed), params, self.mesh, AXIS)
        return State(params, optimizer)

    def steps(self, state: State, parts: list[np.ndarray], seed: int, first: int, last: int) -> Iterator[Progress]:
        """Steps first + 1 .. last. Each is finished before it is reported."""
        split = NamedSharding(self.mesh, P(AXIS))
        for number in range(first + 1, last + 1):
            start = time.perf_counter()
            chosen = batch_of(parts, self.batch, seed, number)
            x = jax.device_put(self.data.train_x[chosen], split)
            y = jax.device_put(self.data.train_y[chosen], split)
            state, loss = self.compiled(state, x, y)
            loss = float(jax.block_until_ready(loss))
            jax.block_until_ready(state)
            yield Progress(number, loss, time.perf_counter() - start, state)

    def test(self, state: State) -> tuple[float, float]:
        """Mean loss and accuracy on the test images."""
        losses, right = 0.0, 0
        for start in range(0, len(self.data.test_y), 1000):
            x, y = self.data.test_x[start : start + 1000], self.data.test_y[start : start + 1000]
            loss, correct = self._evaluate(state.params, x, y)
            losses, right = losses + float(loss), right + int(correct)
        return losses / len(self.data.test_y), right / len(self.data.test_y)

    @property
    def _evaluate(self) -> Callable:
        if not hasattr(self, "_evaluate_jitted"):

            def evaluate(params, x, y):
                logits = nnx.merge(self.graph, params)(x)
                losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
                return losses.sum(), (logits.argmax(1) == y).sum()

            self._evaluate_jitted = jax.jit(evaluate)
        return self._evaluate_jitted


def fingerprint(params: Any) -> str:
    """SHA-256 of the bits of all parameters, in the order of the tree."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(params):
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()


class Checkpoints:
    """The newest state of one job on disk, by orbax."""

    def __init__(self, folder: Path):
        options = ocp.CheckpointManagerOptions(max_to_keep=1, create=True)
        self.manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def latest(self) -> int | None:
        return self.manager.latest_step()

    def save(self, step: int, state: State) -> None:
        if self.manager.latest_step() != step:
            self.manager.save(step, args=ocp.args.StandardSave(state._asdict()))
            self.manager.wait_until_finished()

    def restore(self, step: int, abstract: State) -> State:
        return State(**self.manager.restore(step, args=ocp.args.StandardRestore(abstract._asdict())))

    def close(self) -> None:
        self.manager.close()
