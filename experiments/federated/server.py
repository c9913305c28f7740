"""The server: opens rounds, checks what arrives, adds it up by sample counts."""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import grpc
import numpy as np

import jaxcomp as jc
from experiments.federated.protocol import OPTIONS, handler_of, pack, whole
from jaxcomp.payloads import Dense, Sparse

__all__ = ["Round", "Server", "checked"]

PATIENCE = 20.0  # seconds that a client's question for the next round stays open
GLANCE = 0.5  # seconds between two looks at the client processes
MOST_SAMPLES = 1 << 53  # whole numbers up to here are exact in float64


class Round(NamedTuple):
    """What happened in a round.

    refused: calls that were not of the protocol, whoever made them. skipped: 1 if the model would not have
    been finite and was left as it was. bytes: bodies of the messages as they arrived, late ones too.
    """

    number: int
    selected: int
    accepted: int
    rejected: int
    missing: int
    refused: int
    skipped: int
    up_bytes: int
    down_bytes: int
    seconds: float
    vector: np.ndarray


class Server:
    """Shared by the threads of gRPC and the loop of rounds; every field is guarded by `changed`.

    look_after is called, under that guard, every now and then while the server waits for clients.
    """

    def __init__(self, vector: Any, clients: int, mean_ratio: float, rule: Any, seed: int, participation: float = 1.0):
        self.vector = np.array(vector, np.float32)
        self.clients, self.mean_ratio, self.rule, self.seed = clients, mean_ratio, rule, seed
        self.changed = threading.Condition()
        self.asked = max(1, math.ceil(participation * clients - 1e-9))  # clients of a round
        self.look_after: Callable[[], None] = lambda: None
        self.samples: dict[int, int] = {}
        self.ready: set[int] = set()  # clients that have asked for work since they were started
        self.rooms: np.ndarray | None = None  # most entries that each may send in any round
        self.limits: dict[int, int] = {}  # entries that each may send in this round
        self.number = 0
        self.open: set[int] = set()  # clients of this round that have not answered
        self.accepted: dict[int, tuple[int, Sparse]] = {}
        self.rejected = self.refused = self.up_bytes = self.down_bytes = 0
        self.reasons: deque[str] = deque(maxlen=10)
        self.done = False
        self.model = b""
        handler = handler_of({"Join": self.join, "Pull": self.pull, "Push": self.push}, self.refuse)
        self.server = grpc.server(ThreadPoolExecutor(clients + 4), handlers=[handler], options=OPTIONS)
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        self.server.start()

    # What clients call

    def join(self, header: dict[str, Any], body: bytes, waits: Callable[[], bool]) -> bytes:
        client, samples = whole(header, "client", 0, self.clients), whole(header, "samples", 1, MOST_SAMPLES)
        with self.changed:
            self.samples[client] = samples
            self.changed.notify_all()
            if not self.changed.wait_for(lambda: self.rooms is not None or self.done, PATIENCE):
                return pack({"wait": True})
            return pack({"done": True} if self.rooms is None else {"room": int(self.rooms[client])})

    def pull(self, header: dict[str, Any], body: bytes, waits: Callable[[], bool]) -> bytes:
        client, after = whole(header, "client", 0, self.clients), whole(header, "after", 0)
        with self.changed:
            self.ready.add(client)
            self.changed.notify_all()
            asked = lambda: self.done or (client in self.open and self.number > after)
            if not self.changed.wait_for(asked, PATIENCE) or not waits():
                return pack({"wait": True})
            if self.done:
                return pack({"done": True})
            self.down_bytes += len(self.model)
            return pack({"round": self.number, "k": self.limits[client]}, self.model)

    def push(self, header: dict[str, Any], body: bytes, waits: Callable[[], bool]) -> bytes:
        client, number = whole(header, "client", 0, self.clients), whole(header, "round", 0)
        with self.changed:
            self.up_bytes += len(body)
            if number != self.number or client not in self.open:
                return pack({"accepted": False, "why": "the round is closed"})
            self.open.discard(client)
            try:
                self.accepted[client] = self.samples[client], checked(body, self.vector.size, self.limits[client])
                why = ""
            except ValueError as error:  # a WireError is one too
                self.rejected += 1
                why = f"{type(error).__name__}: {error}"
                self.reasons.append(f"round {self.number}, client {client}: {why}")
            self.changed.notify_all()
            return pack({"accepted": not why, "why": why})

    def refuse(self, why: str) -> None:
        with self.changed:
            self.refused += 1
            self.reasons.append(f"round {self.number}, a call: {why}")

    # What the experiment calls

    def wait(self, happened: Callable[[], bool], seconds: float) -> bool:
        """Waits, and looks after the clients meanwhile; False if it did not happen in time."""
        end = time.monotonic() + seconds
        while not self.changed.wait_for(happened, min(GLANCE, max(end - time.monotonic(), 0))):
            if time.monotonic() >= end:
                return False
            self.look_after()
        return True

    def wait_for_clients(self, seconds: float) -> None:
        """Until all have joined; fixes what each may send; and until all have compiled and ask for work."""
        with self.changed:
            if not self.wait(lambda: len(self.samples) == self.clients, seconds):
                raise TimeoutError(f"{len(self.samples)} of {self.clients} clients joined within {seconds:.0f} s")
            if self.asked == self.clients:
                self.rooms = np.array(list(self.shared_among(range(self.clients)).values()))
            else:  # however a round's budget is split, nobody gets more than all of it
                most = jc.allocate.counts([self.asked * self.mean_ratio], self.vector.size, mode="ceil")
                self.rooms = np.repeat(most, self.clients)
            self.changed.notify_all()
            if not self.wait(lambda: len(self.ready) == self.clients, seconds):
                raise TimeoutError(f"{len(self.ready)} of {self.clients} clients were ready within {seconds:.0f} s")

    def shared_among(self, chosen: Iterable[int]) -> dict[int, int]:
        """Entries that each of these clients may send: together, their number times the mean ratio."""
        chosen = sorted(chosen)
        ratios = jc.allocate.ratios([self.samples[i] for i in chosen], self.mean_ratio, rule=self.rule)
        counts = jc.allocate.counts(ratios, self.vector.size)
        return {client: int(count) for client, count in zip(chosen, counts, strict=True)}

    def rounds(self, number: int, deadline: float) -> Iterator[Round]:
        """Rounds 1 .. number, one after the other."""
        rng = np.random.default_rng([self.seed, 22])
        for t in range(1, number + 1):
            chosen = {int(client) for client in rng.choice(self.clients, self.asked, replace=False)}
            start = time.perf_counter()
            with self.changed:
                self.model = jc.wire.encode(Dense(self.vector))
                self.number, self.open, self.accepted = t, set(chosen), {}
                self.limits = self.shared_among(chosen)
                self.changed.notify_all()
                self.wait(lambda: not self.open, deadline)
                missing, self.open = len(self.open), set()
                vector = averaged(self.vector, list(self.accepted.values()))
                skipped = not np.all(np.isfinite(vector))
                self.vector = self.vector if skipped else vector
                seconds = time.perf_counter() - start
                numbers = (self.asked, len(self.accepted), self.rejected, missing, self.refused, int(skipped))
                sizes = (self.up_bytes, self.down_bytes)
                self.rejected = self.refused = self.up_bytes = self.down_bytes = 0
            yield Round(t, *numbers, *sizes, seconds, self.vector)

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
    with np.errstate(over="ignore"):  # the caller looks
        return (vector + change).astype(np.float32)
