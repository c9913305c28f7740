"""The account of what clients remember, in exact fractions, whatever was killed at whatever moment.

    made = used + remembered + handed over and not used yet

for each client and each entry of the model: what its training added to its memory, over all its answers. The client
writes down what it remembers before it answers (`begin`); its own file says afterwards whether it did, and what it
remembers then. So nothing needs to be written after the answer, where the client may be killed.
"""

from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxcomp.federated import Answer, Member, RoundResult, Server
from jaxcomp.files import read_arrays, write_arrays

__all__ = ["UNIT", "Counted", "Sums", "begin", "exact", "sums_of"]

UNIT = 2**149  # every float32 is a whole number of these parts of one


def exact(x: Any) -> np.ndarray:
    """f32[d] as whole numbers of 1 / UNIT, of any size."""
    return np.array([int(value) for value in np.asarray(x, np.float64) * float(UNIT)], object)


def begin(clients: Path, i: int, task: Mapping[str, Any]) -> None:
    """What client i does before it answers a task: it writes down what it made, and what it remembers."""
    member = Member(clients / f"client-{i}.npz")
    made, last = _made(clients, i, member)
    member._settle(dict(zip(task["rounds"], task["shares"], strict=True)))
    arrays = {"made": made.astype("S"), "last": last, "round": task["round"], "memory": member.memory}
    write_arrays(clients / f"account-{i}.npz", arrays)


def _made(clients: Path, i: int, member: Member) -> tuple[np.ndarray, int]:
    """What client i has made, and the last of its rounds that is in it."""
    file = clients / f"account-{i}.npz"
    if not file.is_file():
        return np.zeros(0, object), 0
    kept = read_arrays(file)
    made, last, number = np.array(list(map(int, kept["made"])), object), int(kept["last"]), int(kept["round"])
    if member._pending is not None and last != number == member._pending.answer.round:
        now, former = exact(member.memory), exact(kept["memory"])
        return now + (made if made.size else 0) - (former if former.size else 0), number
    return made, last


class Counted(Server):
    """Keeps the sum of what was used of each member, in memory and on disk: a file for each round in `folder`.

    sent: of each answer of the round: its member, the entries that it might have, its bytes, and whether it was decoded
    ("whole": the memory of a member that leaves).
    """

    def __init__(self, *args: Any, folder: Path, **options: Any):
        super().__init__(*args, **options)
        self.folder = folder
        self.sent: list[tuple[Any, int, int, str]] = []
        self.used_of = {member: np.zeros(self.point.size, object) for member in self.counts}
        folder.mkdir(exist_ok=True)

    def take_up(self) -> None:
        """Counts again what was used up to the round that the server is at."""
        for number in range(1, self.number + 1):
            self._count(read_arrays(self.folder / f"{number}.npz"))

    def _count(self, used: Mapping[str, np.ndarray]) -> None:
        for name in (name for name in used if name.endswith("values")):
            member, indices = int(name.split()[0]), used[name.replace("values", "indices")]
            self.used_of[member][indices] += exact(used[name])

    def receive(self, member: Any, answer: Answer) -> str:
        why = super().receive(member, answer)
        size = len(answer.data) if isinstance(answer.data, bytes) else 0
        what = "refused" if why else "whole" if answer.leaves else "in"
        self.sent.append((member, self._entries[member].limit, size, what))
        return why

    def _moved(self, parts: Any) -> Any:
        self._parts = parts
        return super()._moved(parts)

    def close(self) -> RoundResult:
        self._parts = []
        result = super().close()
        used = {}
        for j, (member, message) in enumerate([] if result.skipped else self._parts):
            used |= {f"{member} {j} values": message.values, f"{member} {j} indices": message.indices}
        write_arrays(self.folder / f"{self.number}.npz", used)
        self._count(used)
        return result


class Sums(NamedTuple):
    """Of one client, over all entries. apart: entries in which made is not what became of it."""

    made: Fraction
    used: Fraction
    remembered: Fraction
    held: Fraction
    apart: int


def sums_of(core: Counted, clients: Path, i: int) -> Sums | None:
    """The account of client i now; None if it has never answered."""
    files = [clients / f"{name}-{i}.npz" for name in ("client", "account")]
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
    held = sum((exact(x) for who, x in core._held if who == i), np.zeros(used.size, object))
    total, apart = lambda x: Fraction(int(x.sum()), UNIT), np.count_nonzero(made - used - remembered - held)
    return Sums(total(made), total(used), total(remembered), total(held), int(apart))
