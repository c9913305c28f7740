"""One worker of the laboratory: does what it is asked, on a host of its own, and says how long it took."""

import gc
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import jaxcomp as jc
from experiments.network.mesh import Workers
from experiments.network.methods import AXIS, PEERS, transformation
from experiments.network.training import Compressed, Training
from jaxcomp.exchange.state import means_in
from jaxcomp.plan.offline import Inseparable, offline, settled

__all__ = ["Worker"]

GRADIENTS = 3  # that follow one another, so that a memory does not see the same one again and again


class Worker:
    """Does one request after the other: `exchange` and `training` begin a task, the others belong to it."""

    def __init__(self, address: str, workers: int, number: int):
        self.address, self.workers, self.number = address, workers, number
        self.task: Any = None

    def __call__(self, what: str, **request: Any) -> Any:
        if what in ("exchange", "training"):
            self.task = None
            gc.collect()
            self.task = Exchange(self.number, **request) if what == "exchange" else self.training(**request)
            return self.task.described
        return getattr(self.task, what)(**request)

    def training(self, method: str, **options: Any) -> Training:
        net = self.address.rpartition(".")[0]
        if method.startswith("overlap-"):
            from experiments.network.overlapped import Overlapped

            return Overlapped(self.number, [f"{net}.{i + 1}" for i in range(self.workers)], method, **options)
        if method not in PEERS:
            return Compressed(self.number, method, **options)
        from experiments.network import ddp

        ddp.join(self.address, self.workers, self.number)
        return ddp.Peer(self.number, method, **options)


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
        state, specs = workers.start(tx, workers.replicate(np.zeros(size, np.float32)))

        def one(state, gradient):
            return tx.update(gradient[0], state)

        step = jax.shard_map(one, mesh=workers.mesh, in_specs=(specs, P(AXIS)), out_specs=(P(), specs))
        self.step = jax.jit(step, donate_argnums=0).lower(state, self.gradients[0]).compile()
        self.state = state
        self.mean = None
        ledger = jc.ledger(self.step)
        self.one, self.tx, self.alone = one, tx, None
        self.described = {
            "ledger_bytes": ledger.total_bytes,
            "collectives": [f"{row.op} {row.dtype}[{','.join(map(str, row.shape))}]" for row in ledger.rows],
        }

    def rounds(self, number: int, at: float) -> dict[str, Any]:
        """When each round ended, bytes of the last one as this worker counted them, a sum that is equal everywhere.

        at: when all workers begin, in seconds of time.perf_counter, which processes of one machine share; ends count
        from then.
        """
        ends = []
        time.sleep(max(0.0, at - time.perf_counter()))
        for _ in range(number):
            gradient = self.gradients[self.count % GRADIENTS]
            self.count += 1
            self.mean, self.state = jax.block_until_ready(self.step(self.state, gradient))
            ends.append(time.perf_counter() - at)
        described: dict[str, Any] = {"ends": ends}
        mean = np.asarray(self.mean.addressable_data(0))  # pyright: ignore[reportOptionalMemberAccess]
        described["sum"] = float(np.sum(mean, dtype=np.float64))
        # `jc.info` would have the workers exchange what each counted, and the links are being counted.
        counts = [node.local.counts for node in means_in(self.state)]
        for name in ("lane_bytes", "sent_bytes") if counts else ():
            described[name] = sum(float(getattr(each, name).addressable_data(0)[0]) for each in counts)
        return described

    def compute(self, at: float) -> dict[str, Any]:
        """Seconds of a round without the network; the first time compiles.

        at: as of `rounds`. On fewer cores than workers some have to wait for a core, as they do in an exchange.
        """
        if self.alone is None:
            state, gradients = jax.tree.map(lambda x: jnp.array(x.addressable_data(0)), (self.state, self.gradients))
            try:
                halves = offline(self.one, {AXIS: jax.device_count()}, state, gradients[0])
            except Inseparable:  # its time without the network cannot be measured
                return {"seconds": None}
            run, first = jax.jit(halves.whole, donate_argnums=2), jnp.zeros((), jnp.int32)
            send = lambda received: run(first, received, jax.tree.map(jnp.copy, state), gradients[0])[0]
            received = [jnp.asarray(x) for x in settled(halves.arrivals, send)]
            self.alone = run, received, state, gradients
        run, received, state, gradients = self.alone
        gradient, place = gradients[self.count % GRADIENTS], jnp.asarray(self.number, jnp.int32)
        self.count += 1
        time.sleep(max(0.0, at - time.perf_counter()))
        _, (_, *leaves) = jax.block_until_ready(run(place, received, state, gradient))
        seconds = time.perf_counter() - at
        self.alone = run, received, jax.tree.unflatten(jax.tree.structure(state), leaves), gradients
        return {"seconds": seconds}
