"""One worker of the laboratory: does what it is asked, on a host of its own, and says how long it took."""

import functools
import itertools
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import jaxcomp as jc
from experiments.lib.pool import Tasks
from experiments.network.mesh import Workers
from experiments.network.methods import AXIS, PEERS, transformation
from experiments.network.training import Compressed, Training
from jaxcomp.exchange.state import means_in
from jaxcomp.plan.programs import Inseparable, offline, settled

__all__ = ["ends_of", "tasks_of"]

GRADIENTS = 3  # that follow one another, so that a memory does not see the same one again and again


def tasks_of(address: str) -> Tasks:
    """An `exchange` or a `training`. address: of the first worker, where all have met."""

    def training(**request: Any) -> Training:
        task = SimpleNamespace(**request)
        if task.method.startswith("overlap-"):
            from experiments.network.overlapped import Overlapped

            net = address.rpartition(".")[0]
            return Overlapped(task, [f"{net}.{i + 1}" for i in range(jax.process_count())])
        if task.method not in PEERS:
            return Compressed(task)
        from experiments.network import ddp

        ddp.join(address)
        return ddp.Peer(task)

    return Tasks(exchange=Exchange, training=training)


def ends_of(step: Callable[[], Any], number: int, at: float) -> list[float]:
    """When each of so many steps ended.

    at: when all workers begin, in seconds of time.perf_counter, which processes of one machine share; ends count from
    then.
    """
    ends = []
    time.sleep(max(0.0, at - time.perf_counter()))
    for _ in range(number):
        jax.block_until_ready(step())
        ends.append(time.perf_counter() - at)
    return ends


class Exchange:
    """One method on a gradient of one array: compress, exchange, decode, remember."""

    def __init__(self, method: str, size: int, ratio: float, levels: int):
        workers = Workers()
        tx = transformation(method, ratio, levels)
        # Laplace entries times a scale that varies: heavier tails than a normal law, as gradients have.
        rng = np.random.default_rng([jax.process_index(), size])
        scale = np.exp(rng.normal(size=size)).astype(np.float32)
        gradients = [workers.own(rng.laplace(size=(1, size)).astype(np.float32) * scale) for _ in range(GRADIENTS)]
        self.gradients = itertools.cycle(gradients)
        self.state, specs = workers.start(tx, workers.replicate(np.zeros(size, np.float32)))
        self.one = lambda state, gradient: tx.update(gradient[0], state)
        step = jax.shard_map(self.one, mesh=workers.mesh, in_specs=(specs, P(AXIS)), out_specs=(P(), specs))
        self.step = jax.jit(step, donate_argnums=0).lower(self.state, gradients[0]).compile()
        self.described = {"ledger_bytes": jc.ledger(self.step).total_bytes}

    def take(self) -> Any:
        self.mean, self.state = self.step(self.state, next(self.gradients))
        return self.mean, self.state

    def rounds(self, number: int, at: float) -> dict[str, Any]:
        """When each round ended, bytes of the last one as this worker counted them, a sum that is equal everywhere."""
        ends, mean = ends_of(self.take, number, at), np.asarray(self.mean.addressable_data(0))
        # `jc.info` would have the workers exchange what each counted, and the links are being counted.
        sent = [float(node.local.counts.sent_bytes.addressable_data(0)[0]) for node in means_in(self.state)]
        return {"ends": ends, "sum": float(np.sum(mean, dtype=np.float64)), "sent_bytes": sum(sent)}

    def compute(self, at: float) -> dict[str, Any]:
        """Seconds of a round without the network; the first time compiles.

        at: as of `ends_of`. On fewer cores than workers some have to wait for a core, as they do in an exchange.
        """
        if self.alone is None:
            return {"seconds": None}
        gradient, place = next(self.gradients).addressable_data(0), jnp.asarray(jax.process_index(), jnp.int32)
        time.sleep(max(0.0, at - time.perf_counter()))
        self.alone(place, gradient)
        return {"seconds": time.perf_counter() - at}

    @functools.cached_property
    def alone(self) -> Callable[[Any, Any], None] | None:
        """(place, gradient) -> a step of the program with its collectives cut out, which has a state of its own.

        None if its work cannot be told from its exchange.
        """
        mine = lambda x: jnp.array(x.addressable_data(0))
        state, gradient = jax.tree.map(mine, self.state), mine(next(self.gradients))
        try:
            halves = offline(self.one, {AXIS: jax.device_count()}, state, gradient)
        except Inseparable:
            return None
        run, first = jax.jit(halves.whole, donate_argnums=2), jnp.zeros((), jnp.int32)
        send = lambda received: run(first, received, jax.tree.map(jnp.copy, state), gradient)[0]
        received = [jnp.asarray(x) for x in settled(halves.arrivals, send)]

        def step(place: Any, gradient: Any) -> None:
            nonlocal state
            _, (_, state) = jax.block_until_ready(run(place, received, state, gradient))

        return step
