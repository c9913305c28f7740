"""Records of the server on each member and on each round."""

from typing import Any, NamedTuple

import numpy as np

from jaxcomp.federated.messages import Answer
from jaxcomp.payloads import Sparse

__all__ = ["ArrivedAnswer", "Entry", "RoundResult"]


class RoundResult(NamedTuple):
    """The outcome of a round.

    asked, used: members. late: answers of the round before that were used in this one. missing: members that have not
    answered. refused, clipped: (member, why) of each answer not used, or not wholly. joined, returned, left: members.
    held: norm of what members who left have handed over, and is not used yet. skipped: 1 if the point would not have
    been finite and was left as it was. up_bytes, down_bytes: of the payloads; used_bytes: of those that were used.
    """

    number: int
    asked: int
    used: int
    late: int
    missing: int
    refused: list[tuple[Any, str]]
    clipped: list[tuple[Any, str]]
    joined: list[Any]
    returned: list[Any]
    left: list[Any]
    held: float
    skipped: int
    up_bytes: int
    used_bytes: int
    down_bytes: int


class Entry:
    """The record of the server on one member.

    volume: samples. version: of the point that it has; -1: none. round: that it has not answered yet; 0: none.
    last: round of its last answer. offered, limit, told: of its last task. fates: shares that it has not
    been told yet, as far as the server knows. norm: of its last answer. used: whether an answer of it was used since it
    joined or last left. seen, here: in any round, and in this one. tokens: of its last answer that was used.
    """

    def __init__(self, volume: int):
        self.volume, self.version, self.round, self.last = volume, -1, 0, 0
        self.offered, self.limit, self.told = -1, 0, np.inf
        self.fates: dict[int, float] = {}
        self.seen = self.here = self.used = False
        self.norm = 0.0
        self.tokens = 0

    def reach(self, size: int) -> float:
        """How much longer than a difference a memory may be: error feedback keeps at most 2 / alpha, alpha = k / d."""
        return 2 * size / max(self.limit, 1)


class ArrivedAnswer(NamedTuple):
    """norm: of that part of the message which is to be used."""

    member: Any
    answer: Answer
    message: Sparse
    digest: bytes
    norm: float
