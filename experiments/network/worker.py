"""One worker of the laboratory: does what it is asked, on a host of its own, and says how long it took."""

import gc
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomp as jc
from experiments.crew import answer, note, or_die, requests
from experiments.data import batch_of, load, split
from experiments.models import MODELS
from experiments.network.methods import AXIS, transformation
from experiments.network.offline import Inseparable, offline
from experiments.training import OPTIMIZERS

__all__ = ["work"]

GRADIENTS = 3  # that follow one another, so that a memory does not see the same one again and again
SMOOTH = 10  # steps that the loss is averaged over before it is held against the target


def work(address: str, workers: int, number: int) -> None:
    """Joins the others and serves requests until there are no more."""
    with or_die():
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(address, workers, number)
        task: Exchange | Training | None = None
        answer("ready")
        for request in requests():
            what = request.pop("what")
            if what == "exchange":
                task = None
                gc.collect()
                task = Exchange(number, **request)
                answer(task.described)
            elif what == "training":
                task = None
                gc.collect()
                task = Training(number, **request)
                answer(task.described)
            elif isinstance(task, Exchange):
                answer({"rounds": task.rounds, "compute": task.compute}[what](**request))
            elif isinstance(task, Training):
                answer(task.train(**request))


class Workers:
    """The mesh of all processes, and how arrays come to lie on it."""

    def __init__(self):
        self.mesh = jax.make_mesh((jax.device_count(),), (AXIS,), axis_types=(AxisType.Auto,))
        self.equal, self.split = NamedSharding(self.mesh, P()), NamedSharding(self.mesh, P(AXIS))

    def replicate(self, tree: Any) -> Any:
        return jax.tree.map(lambda x: jax.make_array_from_process_local_data(self.equal, np.asarray(x)), tree)

    def own(self, x: np.ndarray) -> jax.Array:
        """This worker's rows of an array split among all."""
        return jax.make_array_from_process_local_data(self.split, x)


class Exchange:
    """One method on a gradient of one array: compress, exchange, decode, remember."""

    def __init__(self, number: int, method: str, size: int, ratio: float, levels: int):
        workers = Workers()
        tx = transformation(method, ratio, levels)
        self.number, self.count = number, 0
        # Laplace entries times a scale that varies: heavier tails than a normal law, as gradients have.
        rng = np.random.default_rng([number, size])
        scale = np.exp(rng.normal(size=size)).astype(np.float32)
        rows = [rng.laplace(size=(1, size)).astype(np.float32) * scale for _ in range(GRADIENTS)]
        self.gradients = [workers.own(row) for row in rows]
        state, specs = jc.init_state(tx, workers.replicate(np.zeros(size, np.float32)), workers.mesh, AXIS)

        def one(state, gradient):
            return tx.update(gradient[0], state)

        step = jax.shard_map(one, mesh=workers.mesh, in_specs=(specs, P(AXIS)), out_specs=(P(), specs))
        self.step = jax.jit(step, donate_argnums=0).lower(state, self.gradients[0]).compile()
        self.state = state
        self.mean = None
        ledger = jc.ledger(self.step)
        self.one, self.tx = one, tx
        self.described = {
            "ledger_bytes": ledger.total_bytes,
            "collectives": [f"{row.op} {row.dtype}[{','.join(map(str, row.shape))}]" for row in ledger.rows],
        }

    def rounds(self, number: int) -> dict[str, Any]:
        """Seconds of each round; what `jc.info` says of the last one, and a sum that must be equal on all workers."""
        seconds = []
        for _ in range(number):
            gradient = self.gradients[self.count % GRADIENTS]
            self.count += 1
            start = time.perf_counter()
            self.mean, self.state = jax.block_until_ready(self.step(self.state, gradient))
            seconds.append(time.perf_counter() - start)
        described: dict[str, Any] = {"seconds": seconds}
        mean = np.asarray(self.mean.addressable_data(0))  # pyright: ignore[reportOptionalMemberAccess]
        described["sum"] = float(np.sum(mean, dtype=np.float64))
        mine = jax.tree.map(lambda x: jnp.asarray(x.addressable_data(0)), self.state)
        try:
            info = jc.info(mine)
        except ValueError:  # not a method of this library
            return described
        return described | {"lane_bytes": float(info.lane_bytes), "sent_bytes": float(info.sent_bytes)}

    def compute(self, number: int) -> dict[str, Any]:
        """Seconds of each round without the network."""
        state, gradient = jax.tree.map(lambda x: jnp.array(x.addressable_data(0)), (self.state, self.gradients[0]))
        try:
            program, received = offline(self.one, AXIS, jax.device_count(), state, gradient)
        except Inseparable:  # its time without the network cannot be told
            return {"seconds": []}
        run = jax.jit(program, donate_argnums=2)
        place, structure = jnp.asarray(self.number, jnp.int32), jax.tree.structure(state)
        seconds = []
        for _ in range(number + 1):
            start = time.perf_counter()
            _, (_, *leaves) = jax.block_until_ready(run(place, received, state, gradient))
            seconds.append(time.perf_counter() - start)
            state = jax.tree.unflatten(structure, leaves)
        return {"seconds": seconds[1:]}


class Training:
    """Data-parallel training of one model with one method, from the same start and with the same batches for all."""

    def __init__(self, number: int, method: str, ratio: float, levels: int, data: str, data_dir: str | None, **options):
        workers = Workers()
        self.workers, self.number, self.batch = workers, number, options["batch"]
        self.data = load(data, Path(data_dir) if data_dir else None)
        self.parts = split(self.data.train_y, jax.process_count(), None, 0)
        model = MODELS[options["model"]](self.data.train_x.shape[1:], self.data.num_classes, rngs=nnx.Rngs(0))
        graph, params = nnx.split(model)
        tx = optax.chain(transformation(method, ratio, levels), OPTIMIZERS[options["optimizer"]](options["rate"]))
        self.make = lambda: jc.init_state(tx, self.params, workers.mesh, AXIS)
        self.params = workers.replicate(params)
        state, specs = self.make()

        def loss_of(params, x, y):
            logits = nnx.merge(graph, params)(x)
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

        def one(params, state, x, y):
            loss, grads = jax.value_and_grad(loss_of)(jc.per_worker(params, AXIS), x, y)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, lax.pmean(loss, AXIS)

        specs = (P(), specs, P(AXIS), P(AXIS))
        step = jax.shard_map(one, mesh=workers.mesh, in_specs=specs, out_specs=(*specs[:2], P()))
        batch = next(self.batches(1))
        self.step = jax.jit(step).lower(self.params, state, *batch).compile()
        jax.block_until_ready(self.step(self.params, state, *batch))
        self.described = {
            "ledger_bytes": jc.ledger(self.step).total_bytes,
            "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
        }

        def right(params, x, y):
            return jnp.sum(nnx.merge(graph, params)(x).argmax(1) == y)

        self.right = jax.jit(right)

    def batches(self, steps: int) -> Iterator[tuple[jax.Array, jax.Array]]:
        for step in range(1, steps + 1):
            chosen = batch_of(self.parts, self.batch, 0, step)[self.number * self.batch :][: self.batch]
            yield self.workers.own(self.data.train_x[chosen]), self.workers.own(self.data.train_y[chosen])

    def train(self, steps: int, target: float, start: int = 0) -> dict[str, Any]:
        """Until the loss, averaged over ten steps, is at the target; at most so many steps.

        losses: of each step, of all workers' batches. seconds: since the start, at the end of each step.
        """
        params, (state, _) = self.params, self.make()
        jax.block_until_ready(state)
        losses, seconds, shown = [], [], 0.0
        begin = time.perf_counter()
        for x, y in self.batches(steps):
            params, state, loss = jax.block_until_ready(self.step(params, state, x, y))
            losses.append(float(loss))
            seconds.append(time.perf_counter() - begin)
            if self.number == 0 and seconds[-1] - shown > 0.5:
                shown = seconds[-1]
                note(f"step {len(losses)}, loss {losses[-1]:.3f}")
            if len(losses) >= SMOOTH and np.mean(losses[-SMOOTH:]) <= target:
                break
        test, most = self.data.test_y, 1000
        mine = jax.tree.map(lambda x: jnp.asarray(x.addressable_data(0)), params)
        parts = [slice(at, at + most) for at in range(0, len(test), most)] if self.number == 0 else []
        right = sum(int(self.right(mine, self.data.test_x[part], test[part])) for part in parts)
        reached = len(losses) >= SMOOTH and float(np.mean(losses[-SMOOTH:])) <= target
        return {"losses": losses, "seconds": seconds, "accuracy": right / len(test), "reached": reached}
