"""What each member's training added to its memory, exact, at a cost that a member can bear in every round.

A sum of float32 numbers is kept as a few float64 vectors that do not overlap (Shewchuk 1997, grow-expansion): each
addition is exact, and nearly always two of them suffice. It is written down before a member answers, with what the
member remembers then, so that after a kill at any moment its own file says whether the answer was made.
"""

from pathlib import Path
from typing import Any

import numpy as np

from experiments.federated.account import Counted, exact
from jaxcomp.federated import Member, Task
from jaxcomp.files import BROKEN, read_arrays, write_arrays

__all__ = ["Made", "apart", "grown"]


def grown(parts: list[np.ndarray], x: Any) -> list[np.ndarray]:
    """The sum of these vectors and x, f64[d], as vectors again: exact.

    >>> [each.tolist() for each in grown(grown([], np.array([1e16])), np.array([1.0]))]
    [[1.0], [1e+16]]
    """
    q, rest = np.array(x, np.float64), []
    for part in parts:  # the smallest first
        total = q + part
        virtual = total - q
        rest.append((q - (total - virtual)) + (part - virtual))
        q = total
    return [each for each in [*rest, q] if np.any(each)]


class Made:
    """The sum of one member, and its file."""

    def __init__(self, file: Path, member: Member):
        self.file, self.member = file, member
        self.parts: list[np.ndarray] = []
        self.round, self.before = 0, np.zeros(0, np.float32)
        if file.is_file():
            try:
                kept = read_arrays(file)
            except BROKEN as error:
                raise ValueError(f"churn: {file} is not an account: {error}") from None
            self.parts = [kept[f"part{i}"] for i in range(len(kept) - 2)]
            self.round, self.before = int(kept["round"]), kept["before"]
        self._fold()

    def _fold(self) -> None:
        """Adds what the last answer made of the memory, if the member made it."""
        pending = self.member._pending
        if pending is not None and pending.answer.round == self.round:
            after = self.member.memory.astype(np.float64)
            self.parts = grown(grown(self.parts, after), -self.before.astype(np.float64))
            self.round = 0

    def begin(self, task: Task) -> None:
        """Writes down what was made so far and is remembered now, before the member first answers this task."""
        pending = self.member._pending
        if pending is not None and pending.answer.round == task.round:
            return
        self.round, self.before = task.round, self.member.memory.copy()
        arrays = {f"part{i}": part for i, part in enumerate(self.parts)}
        write_arrays(self.file, {**arrays, "round": task.round, "before": self.before})

    def answered(self) -> None:
        """After the answer."""
        self._fold()


def apart(core: Counted, folder: Path, i: int) -> tuple[int, float]:
    """Entries of member i in which what it made is not what was used, remembered or handed over; and the norm of all.

    Returns:
        How many entries, 0 if nothing was lost or counted twice; and the norm of what was made.
    """
    member = Member(folder / f"client-{i}.npz")
    if member.point is None:
        return 0, 0.0
    made = Made(folder / f"made-{i}.npz", member)
    total = sum((exact(part) for part in made.parts), np.zeros(core.point.size, object))
    member._settle(core._entries[i].fates)
    held = sum((exact(x) for who, x in core._held if who == i), np.zeros(core.point.size, object))
    norm = float(np.linalg.norm(sum(made.parts, np.zeros(core.point.size))))
    return int(np.count_nonzero(total - core.used_of[i] - exact(member.memory) - held)), norm
