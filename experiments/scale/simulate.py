"""Collectives on levels of links, message by message: a check of the formulas of `jaxcomp.exchange.links`.

Devices are numbered with the innermost level fastest. A message from one device to another goes out through the link of
each member that it leaves, all at once; a link carries one message after the other. A device sends its message of a
round when it has received that of the round before and its links are free. What a factor of a kind adds is added to
each.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from jaxcomp.exchange.links import KINDS, Link, on_links

__all__ = ["simulated"]

Round = list[tuple[int, int, float]]  # sender, receiver, bytes


def rounds_of(kind: str, schedule: str, n: int, b: float) -> Iterator[Round]:
    """The messages of each round of a schedule among n workers, whose operands have b bytes.

    >>> [len(each) for each in rounds_of("all_reduce", "halving", 4, 8.0)]
    [4, 4, 4, 4]
    """
    halves = [[(i, i ^ 2**k, b / 2 ** (k + 1)) for i in range(n)] for k in range(int(math.log2(n)))]
    if schedule == "ring":
        size = b if kind in ("all_gather", "permute") else b / n
        for _ in range(int(KINDS[kind].messages(n))):
            yield [(i, (i + 1) % n, size) for i in range(n)]
    elif schedule == "halving":
        yield from halves
        yield from reversed(halves) if kind == "all_reduce" else ()
    elif schedule == "doubling":
        for k in range(int(math.log2(n))):
            yield [(i, i ^ 2**k, 2**k * b) for i in range(n)]
    elif schedule == "pairwise":
        for r in range(1, n):
            yield [(i, (i + r) % n, b / n) for i in range(n)]
    elif schedule == "Bruck":
        for k in range(math.ceil(math.log2(n))):
            yield [(i, (i + 2**k) % n, b / 2) for i in range(n)]
    else:
        raise ValueError(f"simulated: schedule must be one of those of exchange.links; got {schedule!r}")


def simulated(kind: str, operand_bytes: float, along: Sequence[str], levels: Mapping[str, Link]) -> float:
    """Seconds of a collective along some of the levels, by the schedule that `on_links` takes.

    >>> simulated("all_gather", 1e6, ["data"], {"data": Link(1e-3, 1.1e6, 4)})
    3.002
    """
    schedule = on_links(kind, operand_bytes, along, levels).schedule
    widths = [each.width or 1 for each in levels.values()]
    members = [math.prod(widths[:i]) for i in range(len(widths))]  # devices in a member of each level
    place = lambda device: tuple(device // m % w for m, w in zip(members, widths, strict=True))
    taking = [name in along for name in levels]
    groups: dict[tuple, list[int]] = {}
    for device in range(math.prod(widths)):
        groups.setdefault(tuple(x for x, one in zip(place(device), taking, strict=True) if not one), []).append(device)
    n = len(next(iter(groups.values())))
    ready, free = dict.fromkeys(itertools.chain(*groups.values()), 0.0), dict[tuple[int, int], float]()
    for messages in rounds_of(kind, schedule, n, operand_bytes):
        arrived = dict.fromkeys(ready, 0.0)
        real = [(own[i], own[j], size) for i, j, size in messages for own in groups.values()]
        for i, j, size in sorted(real, key=lambda each: ready[each[0]]):
            crossed = [x for x, m in enumerate(members) if i // m != j // m]
            links = {(x, i // members[x]): list(levels.values())[x] for x in crossed}
            start = max([ready[i], *(free.get(key, 0.0) for key in links)])
            for key, link in links.items():
                free[key] = start + KINDS[kind].factor * size / link.bandwidth
            latency = max((link.latency for link in links.values()), default=0.0)
            arrived[j] = max(arrived[j], latency + max((free[key] for key in links), default=start))
        ready = {device: max(arrived[device], ready[device]) for device in ready}
    return max(ready.values())
