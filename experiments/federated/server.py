"""The server: opens rounds, checks what arrives, adds it up by sample counts."""

import math
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import grpc
import numpy as np

import jaxcomp as jc
from experiments.federated.protocol import OPTIONS, BadCall, handler_of, pack
from jaxcomp.payloads import Dense, Sparse

__all__ = ["Round", "Server", "checked"]

PATIENCE = 20.0  # seconds that a client's question for the next round stays open


class Round(NamedTuple):
    """What happened in a round. bytes: bodies of the messages, as they were sent."""

    number: int
    selected: int
    accepted: int
    rejected: int
    missing: int
    up_bytes: int
    down_bytes: int
    seconds: float
    vector: np.ndarray


class Server:
    """Shared by the threads of gRPC and the loop of rounds; every field is guarded by `changed`."""

    def __init__(self, vector: Any, clients: int, mean_ratio: float, rule: Any, seed: int):
        self.vector = np.array(vector, np.float32)
        self.clients, self.mean_ratio, self.rule, self.seed = clients, mean_ratio, rule, seed
        self.changed = threading.Condition()
        self.samples: dict[int, int] = {}
        self.ready: set[int] = set()
        self.counts: np.ndarray | None = None
        self.number = 0
        self.open: set[int] = set()  # clients of this round that have not answered
        self.accepted: dict[int, tuple[int, Sparse]] = {}
        self.rejected = self.up_bytes = self.down_bytes = 0
        self.reasons: list[str] = []
        self.done = False
        self.model = b""
        methods = {"Join": self.join, "Pull": self.pull, "Push": self.push}
        self.server = grpc.server(ThreadPoolExecutor(clients + 4), handlers=[handler_of(methods)], options=OPTIONS)
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        self.server.start()

    # What clients call

    def join(self, header: dict[str, Any], body: bytes) -> bytes:
        client = self.client_of(header)
        samples = header.get("samples")
        if not isinstance(samples, int) or samples < 0:
            raise BadCall("samples must be an integer >= 0")
        with self.changed:
            self.samples[client] = samples
            self.changed.notify_all()
            if not self.changed.wait_for(lambda: self.counts is not None or self.done, PATIENCE):
                return pack({"wait": True})
            return pack({"done": True} if self.counts is None else {"k": int(self.counts[client])})

    def pull(self, header: dict[str, Any], body: bytes) -> bytes:
        client, after = self.client_of(header), header.get("after")
        if not isinstance(after, int):
            raise BadCall("after must be an integer")
        with self.changed:
            self.ready.add(client)
            self.changed.notify_all()
            waits = lambda: self.done or (client in self.open and self.number > after)
            if not self.changed.wait_for(waits, PATIENCE):
                return pack({"wait": True})
            if self.done:
                return pack({"done": True})
            self.down_bytes += len(self.model)
            return pack({"round": self.number}, self.model)

    def push(self, header: dict[str, Any], body: bytes) -> bytes:
        client = self.client_of(header)
        with self.changed:
            if header.get("round") != self.number or client not in self.open or self.counts is None:
                return pack({"accepted": False, "why": "the round is closed"})
            self.up_bytes += len(body)
            self.open.discard(client)
            try:
                self.accepted[client] = self.samples[client], checked(body, self.vector.size, int(self.counts[client]))
                why = ""
            except ValueError as error:  # a WireError is one too
                self.rejected += 1
                why = f"{type(error).__name__}: {error}"
                self.reasons.append(f"round {self.number}, client {client}: {why}")
            self.changed.notify_all()
            return pack({"accepted": not why, "why": why})

    def client_of(self, header: dict[str, Any]) -> int:
        client = header.get("client")
        if not isinstance(client, int) or not 0 <= client < self.clients:
            raise BadCall(f"client must be an integer in [0, {self.clients})")
        return client

    # What the experiment calls

    def wait_for_clients(self, seconds: float) -> None:
        """Until all have joined; fixes what each may send; and until all have compiled and ask for work."""
        with self.changed:
            if not self.changed.wait_for(lambda: len(self.samples) == self.clients, seconds):
                raise TimeoutError(f"{len(self.samples)} of {self.clients} clients joined within {seconds:.0f} s")
            volumes = [self.samples[i] for i in range(self.clients)]
            ratios = jc.allocate.ratios(volumes, self.mean_ratio, rule=self.rule)
            self.counts = jc.allocate.counts(ratios, self.vector.size)
            self.changed.notify_all()
            if not self.changed.wait_for(lambda: len(self.ready) == self.clients, seconds):
                raise TimeoutError(f"{len(self.ready)} of {self.clients} clients were ready within {seconds:.0f} s")

    def rounds(self, number: int, participation: float, deadline: float) -> Iterator[Round]:
        """Rounds 1 .. number, one after the other."""
        rng = np.random.default_rng([self.seed, 22])
        count = max(1, math.ceil(participation * self.clients))
        for t in range(1, number + 1):
            chosen = {int(client) for client in rng.choice(self.clients, count, replace=False)}
            start = time.perf_counter()
            with self.changed:
                self.model = jc.wire.encode(Dense(self.vector))
                self.number, self.open, self.accepted = t, set(chosen), {}
                self.rejected = self.up_bytes = self.down_bytes = 0
                self.changed.notify_all()
                self.changed.wait_for(lambda: not self.open, deadline)
                missing, self.open = len(self.open), set()
                self.vector = averaged(self.vector, list(self.accepted.values()))
                seconds = time.perf_counter() - start
                numbers = (count, len(self.accepted), self.rejected, missing, self.up_bytes, self.down_bytes)
            yield Round(t, *numbers, seconds, self.vector)

    def stop(self) -> None:
        with self.changed:
            self.done = True
            self.changed.notify_all()
        self.server.stop(grace=2.0).wait()


def checked(body: bytes, size: int, limit: int) -> Sparse:
    """A client's message, if it is one: `Sparse`, finite, at most `limit` entries of a vector of `size`.

    Raises:
        ValueError: it is not (`WireError` if the bytes are not even a payload).
    """
    payload = jc.wire.decode(body)
    if not isinstance(payload, Sparse):
        raise ValueError(f"expected Sparse; got {type(payload).__name__}")
    values, indices = payload
    if not (isinstance(values, np.ndarray) and values.dtype == np.float32 and values.ndim == 1):
        raise ValueError("values must be f32[k]")
    if not (isinstance(indices, np.ndarray) and indices.dtype == np.int32 and indices.shape == values.shape):
        raise ValueError("indices must be i32[k]")
    real = indices != size
    if indices.size > limit:
        raise ValueError(f"{indices.size} entries; this client may send {limit}")
    if np.any(indices < 0) or np.any(indices > size) or np.any(np.diff(indices[real]) <= 0):
        raise ValueError(f"indices must ascend within [0, {size})")
    if not np.all(np.isfinite(values)):
        raise ValueError("values must be finite")
    return Sparse(values[real], indices[real])


def averaged(vector: np.ndarray, messages: list[tuple[int, Sparse]]) -> np.ndarray:
    """vector + sum_i N_i M_i / sum_i N_i over the clients whose message was accepted."""
    total = sum(samples for samples, _ in messages)
    change = np.zeros(vector.size, np.float64)
    for samples, message in messages:
        change[message.indices] += samples / max(total, 1) * message.values.astype(np.float64)
    return (vector + change).astype(np.float32)
