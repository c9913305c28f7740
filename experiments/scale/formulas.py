"""The exchange among thousands of workers: bytes, memory and seconds of every route, by formula.

n workers, gradients of d entries, messages of b bytes (4 d dense, 2 d in 16 bits, 8 k for k values with indices).
Latency a, seconds of a byte c. A collective takes the better of two schedules that are in use:

    all-gather      ring        (n - 1) (a + b c)
                    doubling    ceil(log2 n) a + (n - 1) b c
    all-reduce      ring        2 (n - 1) (a + b c / n)
                    halving     2 ceil(log2 n) a + 2 (n - 1) / n b c      reduce-scatter by halves, all-gather by
                    doubling tree        2 ceil(log2 n) (a + b c)
    all-to-all      pairwise    (n - 1) (a + b c / n)
                    Bruck       ceil(log2 n) (a + b c / 2)                each byte travels log2(n) / 2 times

Contention. Links of m = `group` workers meet in a switch whose way out is `oversubscription` times narrower than their
sum, and s of those bytes leave the group. The bandwidth is that of the narrower place:  c_eff = c max(1, s o). For an
all-to-all s = (n - m) / (n - 1); a ring leaves the group over one link only, s = 1 / m.

Stragglers. All wait for the slowest of n. With independent normal times of standard deviation sigma it is later than
the mean by E max = sigma sqrt(2 ln n) at most; a step waits for it once, whatever the route.

Memory is what a worker holds beside the gradient: all payloads that a route brings, what it adds them up in, and the
memory of error feedback (4 d), stated apart.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["ROUTES", "At", "Fabric", "all_gather", "all_reduce", "all_to_all", "costs_at", "crossover", "straggling"]


class Fabric(NamedTuple):
    """latency: seconds of a message; bandwidth: bytes per second of a worker's link; group: workers at one switch;
    oversubscription: of its way out; inner: bandwidth within a group, for hierarchies; deviation: sigma, seconds."""

    latency: float = 2e-5
    bandwidth: float = 12.5e9
    group: int = 8
    oversubscription: float = 1.0
    inner: float = 1e11
    deviation: float = 0.0

    def per_byte(self, leaving: float) -> float:
        """Seconds of a byte where this share of the bytes leaves a group."""
        return max(1.0, leaving * self.oversubscription) / self.bandwidth


FABRIC = Fabric()


class At(NamedTuple):
    """Of one route at one n. sent_bytes: by a worker; held_bytes: beside gradient and error feedback; seconds: of the
    links; schedule: the collective's, in words."""

    sent_bytes: float
    held_bytes: float
    seconds: float
    schedule: str


def _rounds(n: int) -> int:
    return max(math.ceil(math.log2(n)), 0) if n > 1 else 0


def all_gather(n: int, b: float, fabric: Fabric) -> tuple[float, str]:
    """Seconds, and the better schedule.

    >>> all_gather(4, 1e6, Fabric(latency=1e-3, bandwidth=1e9, group=4))
    (0.005, 'doubling')
    """
    if n < 2:
        return 0.0, "nothing"
    ring = (n - 1) * (fabric.latency + b * fabric.per_byte(1 / fabric.group))
    far = fabric.per_byte(_leaving(n, fabric))
    return min((ring, "ring"), (_rounds(n) * fabric.latency + (n - 1) * b * far, "doubling"))


def all_reduce(n: int, b: float, fabric: Fabric) -> tuple[float, str]:
    """Seconds, and the better schedule."""
    if n < 2:
        return 0.0, "nothing"
    near, far = fabric.per_byte(1 / fabric.group), fabric.per_byte(_leaving(n, fabric))
    rounds = _rounds(n)
    return min(
        (2 * (n - 1) * (fabric.latency + b / n * near), "ring"),
        (2 * rounds * fabric.latency + 2 * (n - 1) / n * b * far, "halving"),
        (2 * rounds * (fabric.latency + b * near), "tree"),
    )


def all_to_all(n: int, b: float, fabric: Fabric) -> tuple[float, str]:
    """Seconds, and the better schedule; b: all that a worker has."""
    if n < 2:
        return 0.0, "nothing"
    far = fabric.per_byte(_leaving(n, fabric))
    return min(
        ((n - 1) * (fabric.latency + b / n * far), "pairwise"),
        (_rounds(n) * (fabric.latency + b / 2 * far), "Bruck"),
    )


def _leaving(n: int, fabric: Fabric) -> float:
    """Share of the bytes to random partners that leave the group."""
    return max(n - fabric.group, 0) / max(n - 1, 1)


# ------------------------------------------------------------------------------------------------
# Routes


def _sum(n: int, b: float, wide: float, fabric: Fabric) -> At:
    del wide
    seconds, how = all_reduce(n, b, fabric)
    return At(2 * (n - 1) / n * b, b, seconds, how)


def _gather(n: int, b: float, wide: float, fabric: Fabric) -> At:
    seconds, how = all_gather(n, b, fabric)
    return At((n - 1) * b, n * b + wide, seconds, how)


def _ring(n: int, b: float, wide: float, fabric: Fabric) -> At:
    """Pieces passed on around a ring, a partial permute for each tick; without padding, so b is the mean message."""
    seconds = (n - 1) * (fabric.latency + b * fabric.per_byte(1 / fabric.group))
    return At((n - 1) * b, n * b + wide, seconds if n > 1 else 0.0, "ring")


def _concat(n: int, b: float, wide: float, fabric: Fabric) -> At:
    seconds, how = all_reduce(n, n * b, fabric)
    return At(2 * (n - 1) * b, 2 * n * b + wide, seconds, how)


def _two_shot(n: int, b: float, wide: float, fabric: Fabric) -> At:
    """All-to-all of chunks, sums by their owners, who select once more; all-gather of what they selected."""
    first, how = all_to_all(n, b, fabric)
    second, then = all_gather(n, b / n, fabric)
    return At(2 * (n - 1) / n * b, 2 * b + wide + 2 * wide / n, first + second, f"{how}, {then}")


def _hierarchy(n: int, b: float, wide: float, fabric: Fabric) -> At:
    """A dense sum within each group over its own links; two shots between the groups, where every worker of a group
    carries one part of the one message that its group has."""
    m = min(fabric.group, n)
    groups = max(n // m, 1)
    inner = fabric._replace(bandwidth=fabric.inner, oversubscription=1.0)
    dense, how = all_reduce(m, wide, inner)
    between = fabric._replace(group=1, oversubscription=max(1.0, fabric.oversubscription))
    outer = _two_shot(groups, b / m, wide / m, between)
    spread, _ = all_gather(m, b / m, inner)
    sent = 2 * (m - 1) / m * wide + outer.sent_bytes + (m - 1) * b / m
    return At(sent, outer.held_bytes + wide + b, dense + outer.seconds + spread, f"{how} in groups, {outer.schedule}")


ROUTES: dict[str, Callable[[int, float, float, Fabric], At]] = {
    "sum": _sum,
    "gather": _gather,
    "ring": _ring,
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


def costs_at(n: int, entries: float, bytes_of: float, fabric: Fabric = FABRIC) -> dict[str, At]:
    """Every route for messages of `bytes_of` bytes, of gradients of so many entries.

    >>> found = costs_at(16_384, 1e9, 8e6)
    >>> round(found["gather"].sent_bytes / 1e9), round(found["two_shot"].sent_bytes / 1e6)
    (131, 16)
    """
    if n < 1 or entries <= 0 or bytes_of < 0:
        raise ValueError(f"costs_at: n >= 1, entries > 0 and bytes_of >= 0 are needed; got {n}, {entries}, {bytes_of}")
    return {name: route(n, bytes_of, 4.0 * entries, fabric) for name, route in ROUTES.items()}


def crossover(entries: float, bytes_of: float, fabric: Fabric = FABRIC, most: int = 2**20) -> int | None:
    """The least power of two of workers from which gathering such messages is slower than a dense f32 sum.

    None: it is not, up to `most`.

    >>> crossover(1e9, 8e6)
    1024
    """
    n = 2
    while n <= most:
        if _gather(n, bytes_of, 4 * entries, fabric).seconds > _sum(n, 4 * entries, 0.0, fabric).seconds:
            return n
        n *= 2
    return None
