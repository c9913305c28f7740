"""Local updates whose exchanges run in a thread while the next steps are computed: `jc.local_process` between hosts."""

import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Client, Listener
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxcomp as jc
from experiments.lib.step import classified
from experiments.lib.training import OPTIMIZERS
from experiments.network.methods import local_of
from experiments.network.training import Training

__all__ = ["Overlapped", "Peers"]

PORT = 45_700  # of host 0; the next hosts have the next ones
KEY = b"laboratory"


class Peers:
    """Bytes between worker `number` and the others, whose addresses stand in order: a connection for each pair."""

    def __init__(self, addresses: list[str], number: int):
        self.number = number
        self.connections: dict[int, Any] = {}
        with Listener((addresses[number], PORT + number), backlog=len(addresses), authkey=KEY) as listener:
            for i in range(number):  # everyone with a lower number listens already, or will
                self.connections[i] = connected((addresses[i], PORT + i))
                self.connections[i].send(number)
            for _ in range(number + 1, len(addresses)):
                connection = listener.accept()
                self.connections[connection.recv()] = connection

    def gather(self, message: bytes) -> list[bytes]:
        """This worker's bytes to all others, and those of all, in their order."""
        with ThreadPoolExecutor(max(1, len(self.connections))) as pool:
            pool.map(lambda connection: connection.send_bytes(message), self.connections.values())
            return [
                message if i == self.number else self.connections[i].recv_bytes()
                for i in range(len(self.connections) + 1)
            ]

    def close(self) -> None:
        for connection in self.connections.values():
            connection.close()


def connected(address: tuple[str, int], seconds: float = 60.0) -> Any:
    """A connection to a host that may not listen yet."""
    end = time.monotonic() + seconds
    while True:
        try:
            return Client(address, authkey=KEY)
        except ConnectionRefusedError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


class Overlapped(Training):
    """`overlap-CODE@H`: never waits for a loss of the others, so it takes all of its steps, whatever the target."""

    def __init__(
        self,
        number: int,
        addresses: list[str],
        method: str,
        ratio: float,
        levels: int,
        optimizer: str,
        rate: float,
        outer: tuple[float | None, float | None] = (None, None),
        **options: Any,
    ):
        super().__init__(number, **options)
        self.setup, self.workers = local_of(method), len(addresses)
        self.algorithm = self.setup.algorithm(ratio, levels)
        self.inner, self.outer = OPTIMIZERS[optimizer](rate), self.setup.outer(*outer)
        # Huffman codes of every entry take longer to make than the link is busy with what they save.
        self.code = "fixed" if self.setup.method in ("f32", "int8", "int4") else "best"
        self.peers = Peers(addresses, number)
        self.process: Any = None
        self.gradient = jax.jit(jax.value_and_grad(classified(self.graph)))
        self.described = {"ledger_bytes": None, "parameters": self.parameters}
        self.start()
        for x, y in self.batches(2 * self.setup.every + 1):  # compiled, in the thread, too
            self.step(x, y)

    def start(self) -> None:
        self.stop()
        s = self.setup
        where = (self.peers.gather, self.number, self.workers)
        self.process = jc.local_process(self.inner, self.outer, self.algorithm, *where, **s.times(), code=self.code)
        self.now = self.process.start(jax.tree.map(jnp.asarray, self.params))

    def stop(self) -> None:
        """Waits for the exchanges on their way."""
        if self.process is not None:
            self.process.close()

    def step(self, x: np.ndarray, y: np.ndarray) -> float:
        loss, grads = self.gradient(self.now, x, y)
        self.now = jax.block_until_ready(self.process.step(grads, self.now))
        return float(loss)

    def right(self, x: np.ndarray, y: np.ndarray) -> int:
        return int(self.count_right(self.now, x, y))

    def train(self, steps: int, target: float, seed: int, shared: bool = False) -> dict[str, Any]:
        """See `Training.train`; losses are this worker's own, and message_bytes those of its messages of a step."""
        del target, shared
        found = super().train(steps, -np.inf, seed)
        self.stop()
        return found | {"message_bytes": self.process.sent_bytes / steps, "waited": self.process.waited}
