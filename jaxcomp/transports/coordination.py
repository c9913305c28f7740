"""Bytes over the coordination service of jax.distributed: a map from keys to bytes that process 0 holds.

A short message is one key below the receiver's folder. A long one, or one for several receivers, lies in parts in a
folder of the sender, written before the keys that point to it, so that nobody sees half a message:

    RUN/in/RECEIVER/TAG/SENDER/ID       packed(parts, bytes, CRC-32), with the message itself if it is short
    RUN/parts/SENDER/ID/NUMBER          so many bytes of it

Receivers delete what they have read; parts with several receivers are deleted by their sender two messages later.

`jax._src.distributed` is private: of jaxcomp this file alone uses it. It was tried with JAX 0.10.2 and 0.12.0; where a
function is missing, `coordination` says which and names `jc.transports.hub`.
"""

import contextlib
import time
import uuid
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from jaxcomp.checks import is_integer
from jaxcomp.transports.base import Gathering, check_name, check_positive
from jaxcomp.transports.packets import packed, unpacked
from jaxcomp.wire import WireError

__all__ = ["Coordination", "coordination"]

NEEDED = (
    "key_value_set_bytes",
    "key_value_try_get_bytes",
    "key_value_dir_get_bytes",
    "key_value_delete",
)
ROOM = 2  # messages of one sender with one tag that are kept for a receiver who does not read them
SHORTEST, LONGEST = 0.002, 0.05  # seconds between two looks for messages
MOST_PARTS = 2**20


class _Gone(Exception):
    """The parts of a message were deleted by its sender."""


class Coordination:
    """A `Transport` over the coordination service; made by `coordination`.

    name: of this process. index, size: its number among the processes of jax.distributed, and theirs. gather: for
    `jc.local_process`.
    """

    def __init__(self, client: Any, place: tuple[int, int], name: str, run: str, seconds: float, chunk_bytes: int):
        self.name, (self.index, self.size) = name, place
        self._client, self._run, self._seconds, self._chunk = client, run, seconds, chunk_bytes
        # Times order the messages of a process that was started anew after those that it sent before.
        self._start, self._count = f"{time.time_ns():016x}{uuid.uuid4().hex[:8]}", 0
        self._unread: dict[tuple[str, ...], deque[list[str]]] = {}
        self._gathering: Gathering | None = None

    def gather(self, message: bytes) -> list[bytes]:
        """Bytes of this process -> those of all processes of jax.distributed, in their order (`Gathering`)."""
        if self._gathering is None:
            names = [str(i) for i in range(self.size)]
            if self.name != names[self.index]:
                raise ValueError(
                    f"coordination: gather is for processes named by their numbers; this is {self.name!r}. "
                    "Give the names of all: jc.transports.Gathering(link, names)"
                )
            self._gathering = Gathering(self, names, seconds=self._seconds)
        return self._gathering(message)

    def send(self, to: Sequence[str], tag: str, data: bytes) -> None:
        check_name("tag", tag)
        data, to = bytes(data), [check_name("receiver", name) for name in to]
        number, self._count = f"{self._start}.{self._count:010x}", self._count + 1
        inline = len(data) <= self._chunk and len(to) == 1
        parts = 0 if inline else max(1, -(-len(data) // self._chunk))
        folder, keys = f"{self._run}/parts/{self.name}/{number}", []
        unread = self._unread.setdefault((tag, *to), deque())
        with self._talking():
            for key in unread.popleft() if len(unread) >= ROOM else ():  # before there is another message
                self._client.key_value_delete(key)
            for part in range(parts):
                chunk = data[part * self._chunk : (part + 1) * self._chunk]
                self._client.key_value_set_bytes(f"{folder}/{part:06x}", chunk)
            about = {"parts": parts, "bytes": len(data), "check": zlib.crc32(data), "alone": len(to) == 1}
            head = packed(about, [data] if inline else [])
            for name in to:
                key = f"{self._run}/in/{name}/{tag}/{self.name}/{number}"
                self._client.key_value_set_bytes(key, head)
                keys.append(key)
            unread.append([*keys, *([f"{folder}/"] if parts else [])])

    def receive(self, tag: str, seconds: float) -> list[tuple[str, bytes]]:
        folder = f"{self._run}/in/{self.name}/{check_name('tag', tag)}/"
        end, pause = time.monotonic() + seconds, SHORTEST
        with self._talking():
            while not (found := self._client.key_value_dir_get_bytes(folder)):
                left = end - time.monotonic()
                if left <= 0:
                    return []
                time.sleep(min(pause, left))
                pause = min(2 * pause, LONGEST)
            arrived, broken = [], None
            for key, head in sorted(found):
                self._client.key_value_delete(key)
                source, number = key.removeprefix(folder).split("/", 1)
                try:
                    arrived.append((source, self._read(source, number, head)))
                except WireError as error:
                    broken = broken or error
                except _Gone:  # its sender has sent later ones, or closed
                    continue
        if broken is not None and not arrived:
            raise broken
        return arrived

    def _read(self, source: str, number: str, head: bytes) -> bytes:
        about, blobs = unpacked(head)
        numbers = [about.get(name) for name in ("parts", "bytes", "check")]
        parts, size, check = (x if isinstance(x, int) and not isinstance(x, bool) else -1 for x in numbers)
        if min(parts, size, check) < 0:
            raise WireError(f"head of a message of {source}", about, "numbers of parts and bytes, and a checksum")
        if parts > MOST_PARTS or len(blobs) != (parts == 0):
            raise WireError(f"parts of a message of {source}", parts, f"in [0, {MOST_PARTS}]")
        folder, data = f"{self._run}/parts/{source}/{number}/", blobs[0] if blobs else b""
        if parts:
            chunks, found = [], 0
            for part in range(parts):
                chunks.append(self._part(f"{folder}{part:06x}"))
                found += len(chunks[-1])
                if found > size:
                    break
            data = b"".join(chunks)
            if about.get("alone") is True:
                self._client.key_value_delete(folder)
        if len(data) != size:
            raise WireError(f"length of a message of {source}", len(data), f"{size}, as its sender said")
        if zlib.crc32(data) != check:
            raise WireError(f"checksum of a message of {source}", f"{zlib.crc32(data):08x}", f"{check:08x}")
        return data

    def _part(self, key: str) -> bytes:
        """One part, which was written before the head that names it: if it is not there now, it is gone."""
        try:
            return self._client.key_value_try_get_bytes(key)
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" in str(error):
                raise _Gone from None
            raise

    @contextlib.contextmanager
    def _talking(self) -> Iterator[None]:
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            first = (str(error).strip().splitlines() or [""])[0]
            raise ConnectionError(
                f"coordination: the service of jax.distributed, in process 0, does not answer: {first}"
            ) from error

    def close(self) -> None:
        """Waits until all have read the last messages of `gather`, and deletes those that it sent to several.

        A message to a single receiver stays until that one reads it.
        """
        if self._gathering is not None:
            self._gathering.close()
        with contextlib.suppress(ConnectionError), self._talking():
            for (_, *to), sent in self._unread.items():
                for key in (key for keys in sent for key in keys) if len(to) > 1 else ():
                    self._client.key_value_delete(key)
        self._unread.clear()

    def __enter__(self) -> "Coordination":
        return self

    def __exit__(self, kind: Any, *error: Any) -> None:
        if kind is not None:
            self._gathering = None  # the others are not waited for
        self.close()


def coordination(
    *, name: str | None = None, run: str = "jaxcomp", seconds: float = 60.0, chunk_bytes: int = 2**22
) -> Coordination:
    """A transport over the coordination service of jax.distributed, which every process of the run has joined.

    The service is process 0: where that ends, all end. A process that is killed ends the others after the time limit of
    its heartbeats, unless `jax.config.update("jax_enable_recoverability", True)` came before `initialize`.

    Args:
        name: of this process; None: its number, as `gather` needs it.
        run: a word for the keys, another one for each run over one service.
        seconds: until a message of `gather` that has not come is an error.
        chunk_bytes: of the parts in which a longer message is written.

    Returns:
        `Coordination`, a context that is closed in the end. `link.gather`, `link.index` and `link.size` are what
        `jc.local_process` takes; `jaxcomp.federated.Rounds` takes the link as it is.

    Raises:
        ValueError: an argument out of range, or jax.distributed was not initialized.
        RuntimeError: this version of JAX has not the functions that it needs.

    >>> import jaxcomp as jc
    >>> jc.transports.coordination()
    Traceback (most recent call last):
    ValueError: coordination: jax.distributed must be initialized before; call jax.distributed.initialize(...)
    """
    check_name("run", run)
    check_positive("seconds", seconds)
    if not is_integer(chunk_bytes) or chunk_bytes > 2**28:
        raise ValueError(f"coordination: chunk_bytes must be an integer in [1, {2**28}]; got {chunk_bytes!r}")
    client, place = _client_and_place()
    return Coordination(
        client, place, str(place[0]) if name is None else check_name("name", name), run, seconds, chunk_bytes
    )


def _client_and_place() -> tuple[Any, tuple[int, int]]:
    """The client of the service, and the number of this process among how many."""
    instead = "jc.transports.hub and site carry the same messages over gRPC"
    try:
        from jax._src.distributed import global_state
    except ImportError:
        raise RuntimeError(
            f"coordination: JAX {jax.__version__} has no jax._src.distributed.global_state; {instead}"
        ) from None
    client = getattr(global_state, "client", None)
    if client is None:
        raise ValueError(
            "coordination: jax.distributed must be initialized before; call jax.distributed.initialize(...)"
        )
    missing = [each for each in NEEDED if not hasattr(client, each)]
    if missing:
        raise RuntimeError(f"coordination: the service of JAX {jax.__version__} has no {', '.join(missing)}; {instead}")
    return client, (int(global_state.process_id), int(global_state.num_processes))
