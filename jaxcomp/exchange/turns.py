"""All-to-all in turns: on links where two workers cannot well send to each other at the same time.

Gloo, which joins processes on CPU, writes a message into a connection before it says through the same connection
that it is ready to receive one. So two workers that exchange messages do so one after the other, and their links
are used half of the time. In turns each worker sends to one other and receives from one other, and, where that can be
arranged, not from the same one. Of four processes on links of 100 Mbit/s, two shots of bf16 take 1.12 times what their
bytes need, with gloo's all-to-all 1.56 times: `python -m experiments network --only exchange --methods
lax-two-shot-bf16 dense-bf16:two_shot --rates 100mbit`.
"""

import itertools
from typing import NamedTuple

__all__ = ["Turn", "turns"]


class Turn(NamedTuple):
    """targets: worker i sends to targets[i], which is a permutation; parts: which part of what it has for that one."""

    targets: tuple[int, ...]
    parts: tuple[int, ...]


def turns(workers: int) -> tuple[list[Turn], int]:
    """Turns in which every worker sends what it has for every other, in so many equal parts.

    Each turn shifts by one distance. Of an even number of workers, the distance n / 2 pairs them up. Of four that
    would be one turn in three: there every cycle through all of them is a turn instead, with half of the content.

    >>> turns(3)
    ([Turn(targets=(1, 2, 0), parts=(0, 0, 0)), Turn(targets=(2, 0, 1), parts=(0, 0, 0))], 1)
    >>> len(turns(4)[0]), turns(4)[1]
    (6, 2)
    """
    if workers != 4:
        shifts = [tuple((i + shift) % workers for i in range(workers)) for shift in range(1, workers)]
        return [Turn(targets, (0,) * workers) for targets in shifts], 1
    result: list[Turn] = []
    sent: dict[tuple[int, int], int] = {}
    for rest in itertools.permutations((1, 2, 3)):
        cycle = (0, *rest)
        after: dict[int, int] = dict(zip(cycle, (*rest, 0), strict=True))
        parts = []
        for i in range(4):
            parts.append(sent.get((i, after[i]), 0))
            sent[i, after[i]] = parts[-1] + 1
        result.append(Turn(tuple(after[i] for i in range(4)), tuple(parts)))
    return result, 2
