"""Local updates whose exchanges run in a thread while the next steps are computed: `jc.local_process` between hosts."""

import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Client, Listener
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

import jaxcomp as jc
from experiments.lib.step import classified
from experiments.lib.training import OPTIMIZERS
from experiments.local.methods import Setup
from experiments.network.methods import local_of
from experiments.network.training import Training

__all__ = ["Overlapped", "Peers"]

PORT = 45_700  # of host 0; the next hosts have the next ones
KEY = b"laboratory"


class Peers:
    """Bytes between this worker and the others, whose addresses stand in order: a connection for each pair."""

    def __init__(self, addresses: list[str]):
        self.number = number = jax.process_index()
        self.others: dict[int, Any] = {}
        with Listener((addresses[number], PORT + number), backlog=len(addresses), authkey=KEY) as listener:
            for i in range(number):  # everyone with a lower number listens already, or will
                self.others[i] = connected((addresses[i], PORT + i))
                self.others[i].send(number)
            for _ in range(number + 1, len(addresses)):
                connection = listener.accept()
                self.others[connection.recv()] = connection

    def gather(self, message: bytes) -> list[bytes]:
        """This worker's bytes to all others, and those of all, in their order."""
        with ThreadPoolExecutor(len(self.others)) as pool:
            pool.map(lambda other: other.send_bytes(message), self.others.values())
            found = {self.number: message} | {i: other.recv_bytes() for i, other in self.others.items()}
        return [found[i] for i in range(len(found))]


def connected(address: tuple[str, int]) -> Any:
    """A connection to a host that may not listen yet."""
    end = time.monotonic() + 60.0
    while True:
        try:
            return Client(address, authkey=KEY)
        except ConnectionRefusedError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


class Overlapped(Training):
    """`overlap-CODE@H`: never waits for a loss of the others, so it takes all of its steps, whatever the target."""

    def __init__(self, task: Any, addresses: list[str]):
        super().__init__(task)
        self.setup, self.workers = cast(Setup, local_of(task.method)), len(addresses)
        self.algorithm = self.setup.algorithm(task.ratio, task.levels)
        self.inner, self.outer = OPTIMIZERS[task.optimizer](task.rate), self.setup.outer(*task.outer)
        # Huffman codes of every entry take longer to make than the link is busy with what they save.
        self.code = "fixed" if self.setup.method in ("f32", "int8", "int4") else "best"
        self.peers = Peers(addresses)
        self.process: Any = None
        self.gradient = jax.jit(jax.value_and_grad(classified(self.graph)))
        self.start()
        for x, y in self.batches(2 * self.setup.every + 1):  # compiled, in the thread, too
            self.step(x, y)

    def start(self) -> None:
        if self.process is not None:
            self.process.close()
        where = (self.peers.gather, self.number, self.workers)
        times = self.setup.times()
        self.process = jc.local_process(self.inner, self.outer, self.algorithm, *where, **times, code=self.code)
        self.now = self.process.start(jax.tree.map(jnp.asarray, self.params))

    def step(self, x: np.ndarray, y: np.ndarray) -> float:
        loss, grads = self.gradient(self.now, x, y)
        self.now = jax.block_until_ready(self.process.step(grads, self.now))
        return float(loss)

    def train(self, steps: int, target: float, seed: int, shared: bool = False) -> dict[str, Any]:
        """See `Training.train`; losses are this worker's own, and message_bytes those of its messages of a step."""
        del target, shared
        found = super().train(steps, -np.inf, seed)
        self.process.close()  # waits for the exchanges on their way
        return found | {"message_bytes": self.process.sent_bytes / steps}
