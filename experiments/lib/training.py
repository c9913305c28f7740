"""Data-parallel training of a small Flax model with a compressed exchange of gradients.

The workers are the devices of one process, or of many that `jax.distributed` has joined: the same program, as a
process hands to JAX what belongs to its own workers.
"""

import functools
import hashlib
import json
import logging
import sys
import time
import zlib
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
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomp as jc
from experiments.lib.cli import UserError
from experiments.lib.data import Dataset, batch_of
from experiments.lib.errors import reading
from experiments.lib.step import classified, training_step
from jaxcomp.base import Algorithm

__all__ = ["AXIS", "OPTIMIZERS", "Checkpoints", "State", "Trainer", "find_devices", "find_mesh", "fingerprint"]
__all__ += ["own_workers"]

AXIS = "data"
OPTIMIZERS: dict[str, Callable[[float], optax.GradientTransformation]] = {
    "adam": optax.adam,
    "sgd": lambda rate: optax.sgd(rate, momentum=0.9),
}


def find_devices(workers: int | None, processes: int = 1, asked: str = "", instead: str = "--workers {}") -> list[Any]:
    """One device for each worker: real accelerators if there are any, else virtual CPU devices.

    Must be called before anything else touches JAX's devices, and after `jax.distributed.initialize`.

    Args:
        workers: on all processes together, equally many on each; None: one for each device there is.
        asked: what of the options needs them, where these do not name workers.
        instead: options with which the experiment runs on the devices there are; {} is their number.

    Raises:
        UserError: there are fewer devices.
    """
    if workers is None:
        return jax.devices()
    jax.config.update("jax_num_cpu_devices", workers // processes)
    devices = jax.devices()
    here = [[d for d in devices if d.process_index == p][: workers // processes] for p in range(processes)]
    if sum(map(len, here)) < workers:
        there = f"there {'is' if len(devices) == 1 else 'are'} {len(devices)} ({devices[0].platform})"
        raise UserError(
            f"{asked or f'{workers} workers'} need{'s' if asked else ''} {workers} devices, and {there}: "
            f"run with {instead.format(len(devices))}, or on virtual CPU devices with JAX_PLATFORMS=cpu"
        )
    return [device for some in here for device in some]


def find_mesh(workers: int | None, processes: int = 1) -> Mesh:
    """The workers in a row, on `find_devices`."""
    devices = find_devices(workers, processes)
    return jax.make_mesh((len(devices),), (AXIS,), devices=devices, axis_types=(AxisType.Auto,))


def own_workers(mesh: Mesh) -> list[int]:
    """Numbers of the workers that this process runs."""
    return [i for i, device in enumerate(mesh.devices.flat) if device.process_index == jax.process_index()]


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
    """One method on one model; compiled once for all seeds.

    Args:
        algorithm: of `jc.compressed_mean`, which an optimizer follows.
        model: makes the Flax module from an input shape and a number of classes.
        data: with the images of this process's workers, or of all.
        options: optimizer, lr; batch: examples of each worker in a step; via: the route of messages; nonfinite: "mask"
            takes NaN and infinite entries of a gradient as zero, "skip" drops the step on all workers; spoil: number of
            a step in which the first example is NaN, to see what becomes of it, or None.
    """

    def __init__(
        self, algorithm: Algorithm, model: Callable[..., nnx.Module], data: Dataset, mesh: Mesh, options: dict[str, Any]
    ):
        self.algorithm, self.data, self.mesh, self.options = algorithm, data, mesh, options
        self.model = lambda seed: model(data.train_x.shape[1:], data.num_classes, rngs=nnx.Rngs(seed))
        self.everywhere, self.split = NamedSharding(mesh, P()), NamedSharding(mesh, P(AXIS))
        self.graph, params = nnx.split(self.model(0))
        self.num_params = sum(leaf.size for leaf in jax.tree.leaves(params))
        self.transform = self.transform_for(0)
        _, self.specs = jc.init_state(self.transform, params, AbstractMesh((mesh.size,), (AXIS,)), AXIS)
        self.compiled = self._compile(params)
        self.ledger = jc.ledger(self.compiled)
        self.info = jax.jit(jc.info, out_shardings=self.everywhere)
        self.copy = jax.jit(lambda tree: tree, out_shardings=self.everywhere)

    def transform_for(self, seed: int) -> optax.GradientTransformation:
        mean = jc.compressed_mean(self.algorithm, AXIS, via=self.options["via"], seed=seed, measure=True)
        chain = optax.chain(mean, OPTIMIZERS[self.options["optimizer"]](self.options["lr"]))
        return jc.replicas.skip_nonfinite(chain, AXIS) if self.options["nonfinite"] == "skip" else chain

    def _compile(self, params: Any) -> Any:
        # Added in the order of the workers, whatever carries them: a sum on the way has an order of its own.
        in_order = lambda loss, axis: lax.all_gather(loss, axis, to="invarying").mean()
        one = training_step(self.transform, classified(self.graph), AXIS, mean=in_order)

        def step(state, x, y):
            params, optimizer, loss = one(*state, x, y)
            return State(params, optimizer), loss

        specs = State(P(), self.specs)
        step = jax.shard_map(step, mesh=self.mesh, in_specs=(specs, P(AXIS), P(AXIS)), out_specs=(specs, P()))
        size = self.options["batch"] * self.mesh.size
        x = jax.ShapeDtypeStruct((size, *self.data.train_x.shape[1:]), jnp.float32, sharding=self.split)
        y = jax.ShapeDtypeStruct((size,), jnp.int32, sharding=self.split)
        return jax.jit(step, donate_argnums=0).lower(self.abstract_state(params), x, y).compile()

    def abstract_state(self, params: Any, workers: int | None = None) -> State:
        """Shapes, dtypes and places of the state; of one that so many other workers left, all of it everywhere."""
        shapes, _ = jc.init_state(self.transform, params, AbstractMesh((workers or self.mesh.size,), (AXIS,)), AXIS)

        def place(leaf, spec=None):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(self.mesh, spec or P()))

        optimizer = jax.tree.map(place, shapes) if workers else jax.tree.map(place, shapes, self.specs)
        return State(jax.tree.map(place, params), optimizer)

    def initial_state(self, seed: int) -> State:
        _, params = nnx.split(self.model(seed))
        params = jax.device_put(params, self.everywhere)
        optimizer, _ = jc.init_state(self.transform_for(seed), params, self.mesh, AXIS)
        return State(params, optimizer)

    def taken_over(self, old: State, seed: int) -> State:
        """The state that other workers left, however many, for those of this trainer: the sum of memories stays."""
        new = self.initial_state(seed).optimizer
        return State(old.params, jc.redistribute(old.optimizer, new, keep="sum"))

    def check(self, state: State, step: int) -> None:
        """Raises `jc.replicas.ReplicaDrift`, with the workers that differ, where what must be equal is not."""
        jc.check_replicas(np.asarray(self._fingerprints(state)), step=step)

    @functools.cached_property
    def _fingerprints(self) -> Callable[[State], jax.Array]:
        prints = lambda state: jc.replicas.fingerprints(state, AXIS)
        return jax.jit(jax.shard_map(prints, mesh=self.mesh, in_specs=(State(P(), self.specs),), out_specs=P()))

    def whole(self, tree: Any) -> Any:
        """Every worker's part of a tree of arrays, on this process's host."""
        return jax.tree.map(np.asarray, self.copy(tree))

    def steps(self, state: State, parts: list[np.ndarray], seed: int, first: int, last: int) -> Iterator[Progress]:
        """Steps first + 1 .. last. Each is finished before it is reported."""
        for number in range(first + 1, last + 1):
            start = time.perf_counter()
            chosen = batch_of(parts, self.options["batch"], seed, number)

            def images(examples: np.ndarray, spoiled: bool = number == self.options["spoil"]) -> np.ndarray:
                found = self.data.images_of(examples)
                if spoiled:
                    found[0] = np.nan
                return found

            x = self._spread(images, chosen, self.data.train_x.shape[1:])
            y = self._spread(self.data.train_y.__getitem__, chosen, ())
            state, loss = jax.block_until_ready(self.compiled(state, x, y))
            yield Progress(number, float(loss), time.perf_counter() - start, state)

    def _spread(self, rows_of: Callable[[np.ndarray], np.ndarray], chosen: np.ndarray, shape: tuple[int, ...]) -> Any:
        """Each worker's rows on its own device; this process makes those of its own workers alone."""
        mine = lambda index: rows_of(chosen[index[0] if index else slice(None)])
        return jax.make_array_from_callback((len(chosen), *shape), self.split, mine)

    def test(self, state: State) -> tuple[float, float]:
        """Mean loss and accuracy on the test images, on one device of this process."""
        params = jax.tree.map(lambda leaf: leaf.addressable_data(0), state.params)
        losses, right = 0.0, 0
        for start in range(0, len(self.data.test_y), 1000):
            x, y = self.data.test_x[start : start + 1000], self.data.test_y[start : start + 1000]
            loss, correct = self._evaluate(params, x, y)
            losses, right = losses + float(loss), right + int(correct)
        return losses / len(self.data.test_y), right / len(self.data.test_y)

    @functools.cached_property
    def _evaluate(self) -> Callable:
        def evaluate(params, x, y):
            logits = nnx.merge(self.graph, params)(x)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
            return losses.sum(), (logits.argmax(1) == y).sum()

        return jax.jit(evaluate)


def fingerprint(tree: Any) -> str:
    """SHA-256 of the bits of all arrays, in the order of the tree."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()


class Checkpoints:
    """The newest state of one job on disk, by orbax: every process writes what it holds.

    Orbax writes beside the place and renames in the end, so that a checkpoint is there whole or not at all; the one
    before it goes only then. With the state goes a fingerprint of all its bits, which is compared when it is read: the
    format itself does not notice every flipped bit.
    """

    def __init__(self, folder: Path):
        # What fails comes back as an exception, and need not be logged with its traceback before.
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        sys.unraisablehook = _without_late_answers
        self.folder = folder.absolute()
        options = ocp.CheckpointManagerOptions(
            max_to_keep=1,
            create=True,
            cleanup_tmp_directories=True,
            # In the background a process whose write fails would wait for the others, and they for it, for minutes.
            enable_async_checkpointing=False,
        )
        self.manager = ocp.CheckpointManager(self.folder, options=options)

    def latest(self) -> int | None:
        return self.manager.latest_step()

    def save(self, step: int, state: State, about: dict[str, Any]) -> None:
        """Writes the state, and what has to be known of it before it can be read."""
        if self.manager.latest_step() != step:
            about = about | {"fingerprint": _fingerprint_of_bits(state, about)}
            args = {"state": ocp.args.StandardSave(state._asdict()), "about": ocp.args.JsonSave(about)}
            self.manager.save(step, args=ocp.args.Composite(**args))
            self.manager.wait_until_finished()

    def _reading(self, step: int) -> Any:
        return reading(f"checkpoint {self.folder}/{step}", "remove it, and the run starts again from its first step")

    def about(self, step: int) -> dict[str, Any]:
        """What has to be known of a state."""
        with self._reading(step):
            return dict(self.manager.restore(step, args=ocp.args.Composite(about=ocp.args.JsonRestore()))["about"])

    def restore(self, step: int, abstract: State, about: dict[str, Any]) -> State:
        with self._reading(step):
            args = ocp.args.Composite(state=ocp.args.StandardRestore(abstract._asdict()))
            state = State(**self.manager.restore(step, args=args)["state"])
            if _fingerprint_of_bits(state, about) != about["fingerprint"]:
                raise ValueError("its fingerprint does not fit: bits have changed")
            return state

    def close(self) -> None:
        self.manager.close()


def _without_late_answers(failure: Any) -> None:
    """What the store's threads want to tell an event loop that has failed and is closed interests nobody."""
    if str(failure.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(failure)


_marks = jax.jit(jc.replicas.fingerprint)


def _fingerprint_of_bits(state: State, about: dict[str, Any]) -> int:
    """32 bits that tell of any flipped bit, in whatever way the arrays are spread over devices."""
    text = json.dumps({key: value for key, value in about.items() if key != "fingerprint"}, sort_keys=True)
    return zlib.crc32(text.encode(), int(_marks(jax.tree.leaves(state))))
