"""The exchange among thousands of workers: bytes, memory and seconds of every route, by formula.

n workers, gradients of d entries, messages of b bytes (4 d dense, 2 d in 16 bits, 8 k for k values with indices).
Seconds of collectives are those of `jaxcomp.exchange.links` on levels of links, by the better of the schedules that are
in use; those of encoding and decoding are a machine's (`jaxcomp.plan.machine`).

Stragglers. All wait for the slowest of n. With independent normal times of standard deviation sigma it is later than
the mean by E max = sigma sqrt(2 ln n) at most; a step waits for it once, whatever the route.

Memory is what a worker holds beside the gradient: all payloads that a route brings, what it adds them up in, and the
memory of error feedback (4 d), stated apart.
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from jaxcomp.exchange.links import Link, on_links, stated_levels

__all__ = ["LINKS", "ROUTES", "At", "costs_at", "crossover", "straggling", "widened"]

# 8 devices of a host at 800 Gbit/s each; a host has 8 links of 100 Gbit/s, to switches with half of that outwards.
LINKS = {"host": Link(2e-5, 1e11, 8), "net": Link(2e-5, 5e10)}


class At(NamedTuple):
    """Of one route at one n. sent_bytes: by a worker; held_bytes: beside gradient and error feedback; seconds: on the
    links; schedule: the collective's, in words; kinds: of its collectives, by which its work goes."""

    sent_bytes: float
    held_bytes: float
    seconds: float
    schedule: str
    kinds: tuple[str, ...]


def widened(links: Mapping[str, Link], n: int) -> dict[str, Link]:
    """The levels for n workers: inner ones are at most n wide, the one without a width joins the rest.

    >>> [each.width for each in widened(LINKS, 64).values()], [each.width for each in widened(LINKS, 4).values()]
    ([8, 8], [4, 1])
    """
    found, left = {}, n
    for name, each in links.items():
        width = left if each.width is None else min(each.width, left)
        found[name] = each._replace(width=width)
        left //= width
    return stated_levels("scale", found, n)


# ------------------------------------------------------------------------------------------------
# Routes


def _collective(kind: str, b: float, levels: Mapping[str, Link]) -> tuple[float, str]:
    found = on_links(kind, b, list(levels), levels)
    return found.seconds, found.schedule


def _sum(n: int, b: float, wide: float, levels: Mapping[str, Link]) -> At:
    del wide
    return At(2 * (n - 1) / n * b, b, *_collective("all_reduce", b, levels), ("all_reduce",))


def _gather(n: int, b: float, wide: float, levels: Mapping[str, Link]) -> At:
    return At((n - 1) * b, n * b + wide, *_collective("all_gather", b, levels), ("all_gather",))


def _concat(n: int, b: float, wide: float, levels: Mapping[str, Link]) -> At:
    return At(2 * (n - 1) * b, 2 * n * b + wide, *_collective("all_reduce", n * b, levels), ("all_gather",))


def _two_shot(n: int, b: float, wide: float, levels: Mapping[str, Link]) -> At:
    """All-to-all of chunks, sums by their owners, who select once more; all-gather of what they selected."""
    (first, how), (second, then) = _collective("all_to_all", b, levels), _collective("all_gather", b / n, levels)
    sent, held = 2 * (n - 1) / n * b, 2 * b + wide + 2 * wide / n
    return At(sent, held, first + second, f"{how}, {then}", ("all_to_all", "all_gather"))


def _hierarchy(n: int, b: float, wide: float, levels: Mapping[str, Link]) -> At:
    """A dense sum at the innermost level; two shots between its groups, where every worker of a group carries one part
    of the one message that its group has."""
    (inner, *others), m = levels, next(iter(levels.values())).width or 1
    groups = n // m
    dense, spread = (on_links(*of, [inner], levels) for of in (("all_reduce", wide), ("all_gather", b / m)))
    first, second = (on_links(*of, others, levels) for of in (("all_to_all", b / m), ("all_gather", b / m / groups)))
    sent = 2 * (m - 1) / m * wide + 2 * (groups - 1) / groups * b / m + (m - 1) * b / m
    held = 2 * b / m + wide / m + 2 * wide / m / groups + wide + b
    how = f"{dense.schedule} in groups, {first.schedule}, {second.schedule}"
    return At(sent, held, sum(x.seconds for x in (dense, first, second, spread)), how, ("all_to_all", "all_gather"))


ROUTES: dict[str, Callable[[int, float, float, Mapping[str, Link]], At]] = {
    "sum": _sum,
    "gather": _gather,
    "concat": _concat,
    "two_shot": _two_shot,
    "hierarchy": _hierarchy,
}


def straggling(n: int, deviation: float) -> float:
    """Seconds that a step waits for the slowest of n, at most: sigma sqrt(2 ln n).

    >>> straggling(1, 1.0), round(straggling(16_384, 0.01), 5)
    (0.0, 0.04405)
    """
    return deviation * math.sqrt(2 * math.log(n)) if n > 1 else 0.0


def costs_at(n: int, entries: float, bytes_of: float, links: Mapping[str, Link] = LINKS) -> dict[str, At]:
    """Every route for messages of `bytes_of` bytes, of gradients of so many entries.

    >>> found = costs_at(16_384, 1e9, 8e6)
    >>> round(found["gather"].sent_bytes / 1e9), round(found["two_shot"].sent_bytes / 1e6)
    (131, 16)
    """
    if n < 1 or entries <= 0 or bytes_of < 0:
        raise ValueError(f"costs_at: n >= 1, entries > 0 and bytes_of >= 0 are needed; got {n}, {entries}, {bytes_of}")
    levels = widened(links, n)
    return {name: route(n, bytes_of, 4.0 * entries, levels) for name, route in ROUTES.items()}


def crossover(entries: float, bytes_of: float, links: Mapping[str, Link] = LINKS, most: int = 2**20) -> int | None:
    """The least power of two of workers from which gathering such messages is slower than a dense f32 sum.

    None: it is not, up to `most`.

    >>> crossover(1e9, 8e6)
    1024
    """
    n = 2
    while n <= most:
        levels = widened(links, n)
        if _gather(n, bytes_of, 4 * entries, levels).seconds > _sum(n, 4 * entries, 0.0, levels).seconds:
            return n
        n *= 2
    return None
