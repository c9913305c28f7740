"""A member: the shared point as it knows it, and what it has not delivered yet, on disk."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxcomp.exchange.agreement import check_equal
from jaxcomp.federated.messages import (
    Answer,
    Task,
    applied,
    largest,
    norm_of,
    opened,
    options_here,
    parted,
    point_checksum,
    whole_of,
)
from jaxcomp.federated.options import check_compress
from jaxcomp.files import read_arrays, refusing, write_arrays
from jaxcomp.payloads import Dense
from jaxcomp.wire import encode

__all__ = ["Member", "OutOfStep"]

Array = np.ndarray


class OutOfStep(Exception):
    """A member cannot follow the updates of a task, as it has not the point they start from: it needs the whole."""


class _Pending(NamedTuple):
    """The answer to a round that the member does not know the fate of.

    answer: itself. values, indices: what was sent. rest: what it remembers besides.
    """

    answer: Answer
    values: Array
    indices: Array
    rest: Array


class Member:
    """One member. Nothing that it remembers is lost when its process is killed, at whatever moment.

    A task is answered in two calls: `take`, which returns the shared point, and `answer` (or `leave`). The answer is on
    disk before it is returned. A task that comes again is answered with the same bytes.

    Args:
        file: where it is kept, written whole or not at all; None: nowhere.
        compress: (vector f32[d], entries) -> `Sparse` of at most so many entries, whose values are those of the vector.

    Raises:
        ValueError: the file is not of a member, or compress is no function.

    >>> from jaxcomp import federated
    >>> server = federated.Server(np.zeros(4, np.float32), {"a": 1}, 0.25)
    >>> member = federated.Member()
    >>> for _ in range(2):
    ...     task = server.open({"a"})["a"]
    ...     point = member.take(task)
    ...     refused = server.receive("a", member.answer(task, point + np.float32([4, 3, 0, 0])))
    ...     print(server.close().used, server.point)
    1 [4. 0. 0. 0.]
    1 [4. 6. 0. 0.]
    """

    def __init__(self, file: Path | str | None = None, compress: Callable[[Array, int], Any] = largest):
        check_compress(compress)
        self.file, self.compress = None if file is None else Path(file), compress
        self.point: Array | None = None
        self.version = -1
        self._memory: Array | None = None
        self._pending: _Pending | None = None
        if self.file is not None and self.file.is_file():
            self._load(self.file)

    @property
    def memory(self) -> Array:
        """The undelivered sum, as it is if the answer on its way is not used."""
        if self._pending is not None:
            return _joined(self._pending, self._pending.values)
        return np.zeros(0, np.float32) if self._memory is None else self._memory

    def take(self, task: Task) -> Array:
        """Learns what became of earlier answers, and follows the server. Returns the shared point f32[d].

        Raises:
            OutOfStep: the updates start from a point that this member has not got. What was learnt is kept.
            Refused: an update is none.
            ValueError: the server runs another version, which the message names. Nothing was learnt.
        """
        each = options_here(), json.loads(task.options) if task.options else options_here()
        check_equal("federated", each, ["this member", "the server"])
        self._settle(dict(zip(task.rounds, task.shares, strict=True)))
        point, updates = self.point, list(task.updates)
        if task.since < 0:
            point = whole_of(updates.pop(0))
        elif point is None or not task.since <= self.version <= task.version:
            raise OutOfStep(f"the task starts from version {task.since}; this member has {self.version}")
        else:
            del updates[: self.version - task.since]  # it has them, and its last answer was not used
        for data in updates:
            point = applied(point, opened(data, point.size, point.size))
        if point_checksum(point) != task.check:
            raise OutOfStep(f"version {task.version} of the point has another checksum here")
        if self._pending is None and self._memory is None:
            self._memory = np.zeros(point.size, np.float32)
        if self.memory.size != point.size:
            raise ValueError(f"federated: the point has {point.size} entries and this memory {self.memory.size}")
        self.point, self.version = point, task.version
        return point.copy()

    def answer(self, task: Task, after: Array, tokens: int = 0) -> Answer:
        """The answer of a member that its own steps led from the shared point to `after`, f32[d].

        Entries of the difference that are not finite count as zero. tokens: that it was trained on, its weight at a
        server with weights="tokens".
        """
        point = self._known(task)
        if self._pending is not None and self._pending.answer.round == task.round:
            return self._pending.answer
        with np.errstate(invalid="ignore", over="ignore"):
            difference = point - np.asarray(after, np.float32).reshape(point.shape)
            whole = self.memory + np.where(np.isfinite(difference), difference, np.float32(0))
        largest_float = np.finfo(np.float32).max
        whole = np.clip(whole, -largest_float, largest_float)
        return self._keep(task, whole, self.compress(whole, task.entries), leaves=False, tokens=int(tokens))

    def leave(self, task: Task) -> Answer:
        """The last answer: all that it remembers. The server uses it in its place; afterwards it remembers nothing.

        A task that was answered before is answered with the same bytes, without leaving (`Answer.leaves` is False): the
        server may have used them.
        """
        self._known(task)
        if self._pending is not None and self._pending.answer.round == task.round:
            return self._pending.answer
        return self._keep(task, self.memory, Dense(self.memory), leaves=True)

    def _known(self, task: Task) -> Array:
        if self.point is None or self.version != task.version:
            raise ValueError(f"federated: call take(task) before answering round {task.round}")
        return self.point

    def _keep(self, task: Task, whole: Array, payload: Any, leaves: bool, tokens: int = 0) -> Answer:
        data = encode(payload, code="best")
        sent = opened(data, whole.size, whole.size)
        norm = norm_of(sent.values)
        share = task.norm / norm if norm > task.norm and not leaves else 1.0
        rest = whole.copy()
        rest[sent.indices] -= sent.values
        answer = Answer(task.round, data, share, leaves, tokens)
        self._pending, self._memory = _Pending(answer, sent.values, sent.indices, rest), None
        self.save()
        return answer

    def _settle(self, shares: dict[int, float]) -> None:
        """Forgets what was used of the answer on the way. One that the server does not know was not used."""
        pending = self._pending
        if pending is None or pending.answer.round not in shares:
            return
        _, left = parted(pending.values, shares[pending.answer.round])
        self._memory, self._pending = _joined(pending, left), None

    def save(self) -> None:
        """Writes the file, whole or not at all. `answer` and `leave` do so themselves."""
        if self.file is None:
            return
        arrays: dict[str, Any] = {"version": self.version, "point": self.point}
        if self._memory is not None:
            arrays["memory"] = self._memory
        if self._pending is not None:
            answer, values, indices, rest = self._pending
            arrays |= answer._replace(data=np.frombuffer(answer.data, np.uint8))._asdict()  # pyright: ignore
            arrays |= {"values": values, "indices": indices, "rest": rest}
        write_arrays(self.file, arrays)

    def _load(self, file: Path) -> None:
        with refusing(f"federated: {file} is not the file of a member"):
            kept = read_arrays(file)
            self.version, self.point, self._memory = int(kept["version"]), kept["point"], kept.get("memory")
            if "round" in kept:
                share, leaves = float(kept["share"]), bool(kept["leaves"])
                tokens = int(kept.get("tokens", 0))  # which files of 0.1 have not
                answer = Answer(int(kept["round"]), kept["data"].tobytes(), share, leaves, tokens)
                self._pending = _Pending(answer, kept["values"], kept["indices"], kept["rest"])


def _joined(pending: _Pending, left: Array) -> Array:
    """The memory with what is left of the last answer added to it."""
    memory = pending.rest.copy()
    memory[pending.indices] += left
    return memory
