"""The account of what clients remember, in exact fractions, whatever was killed at whatever moment.

    made = used + remembered + handed over and not used yet

for each client and each entry of the model: what its training added to its memory, over all its answers. The client
writes down what it remembers before it answers (`begin`); its own file says afterwards whether it did, and what it
remembers then. So nothing needs to be written after the answer, where the client may be killed.
"""

import json
import os
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxcomp.members import Member, Server
from jaxcomp.members.checkpoint import read, written

__all__ = ["Counted", "Sums", "begin", "exact", "sums_of"]

UNIT = 2**149  # every float32 is a whole number of these parts of one


def exact(x: Any) -> np.ndarray:
    """f32[d] as whole numbers of 1 / UNIT, of any size."""
    return np.array([int(value) for value in np.asarray(x, np.float64) * float(UNIT)] or [0], object)[: np.size(x)]


def begin(clients: Path, i: int, task: Mapping[str, Any]) -> None:
    """What client i does before it answers a task."""
    member = Member(clients / f"client-{i}.npz")
    made, last = _made(clients, i, member)
    draft = clients / f"made-{i}.tmp"
    draft.write_text(json.dumps([last, list(made)]))
    os.replace(draft, clients / f"made-{i}.json")
    member._settle(dict(zip(task["rounds"], task["shares"], strict=True)))
    written(clients / f"before-{i}.npz", {"round": task["round"], "memory": member.memory})


def _made(clients: Path, i: int, member: Member) -> tuple[np.ndarray, int]:
    """What client i has made, and the last of its rounds that is in it."""
    file, before = clients / f"made-{i}.json", clients / f"before-{i}.npz"
    last, made = json.loads(file.read_text()) if file.is_file() else (0, [])
    made = np.array(made or [0] * member.memory.size, object)
    if before.is_file() and member._pending is not None:
        kept = read(before)
        if last != (number := int(kept["round"])) == member._pending.answer.round:
            former = exact(kept["memory"]) if kept["memory"].size else 0
            made, last = made + exact(member.memory) - former, number
    return made, last


class Counted(Server):
    """Keeps the sum of what was used of each member, in memory and on disk: a file for each round in `folder`."""

    def __init__(self, *args: Any, folder: Path, **options: Any):
        super().__init__(*args, **options)
        self.folder = folder
        self.used_of = {member: np.zeros(self.point.size, np.int64).astype(object) for member in self.counts}
        folder.mkdir(exist_ok=True)

    def take_up(self) -> None:
        """Counts again what was used up to the round that the server is at."""
        for number in range(1, self.number + 1):
            file = self.folder / f"{number}.npz"
            kept = read(file) if file.is_file() else {"members": np.zeros(0, np.int64)}
            for j, member in enumerate(kept["members"]):
                self._add(int(member), kept[f"indices_{j}"], kept[f"values_{j}"])

    def _add(self, member: Any, indices: np.ndarray, values: np.ndarray) -> None:
        self.used_of[member][indices] += exact(values)

    def _moved(self, parts: Any) -> Any:
        self._parts = parts
        return super()._moved(parts)

    def _move(self, used: Any, limit: float) -> int:
        skipped = super()._move(used, limit)
        if not skipped:
            arrays: dict[str, Any] = {"members": np.array([member for member, _ in self._parts], np.int64)}
            for j, (member, (values, indices)) in enumerate(self._parts):
                self._add(member, indices, values)
                arrays |= {f"values_{j}": values, f"indices_{j}": indices}
            written(self.folder / f"{self.number}.npz", arrays)
        return skipped


class Sums(NamedTuple):
    """Of one client, over all entries. apart: entries in which made is not what became of it."""

    made: Fraction
    used: Fraction
    remembered: Fraction
    held: Fraction
    apart: int


def sums_of(core: Counted, clients: Path, i: int) -> Sums | None:
    """The account of client i now; None if it has never answered."""
    files = [clients / f"{name}-{i}.{kind}" for name, kind in (("client", "npz"), ("made", "json"), ("before", "npz"))]
    times = lambda: [file.stat().st_mtime_ns if file.is_file() else 0 for file in files]
    while True:  # a client that is late may write meanwhile
        now = times()
        member = Member(files[0])
        if member.point is None:
            return None
        made, _ = _made(clients, i, member)
        if now == times():
            break
    member._settle(core._entries[i].fates)
    remembered, used = exact(member.memory), core.used_of[i]
    held = sum((exact(x) for who, x in core._held if who == i), np.zeros(used.size, np.int64).astype(object))
    sums = (Fraction(int(x.sum()), UNIT) for x in (made, used, remembered, held))
    return Sums(*sums, int(np.count_nonzero(made - used - remembered - held)))
