"""Seconds of a training step, predicted from measured parts. Pure functions of float64 numbers.

A step is the gradient, and every H steps an exchange in K buckets. Bucket k is the k-th from the end of the tree, and
is ready when the backward pass has come so far. With forward share f of the gradient time g, and shares of entries
q_1 .. q_K, the backward pass takes b_k = (1 - f) g q_k for bucket k: the work of a layer is taken to follow its
number of parameters, which is exact for matrix products and not for convolutions or embeddings.

One resource computes, another one exchanges:

    c_0 = f g,   c_k = c_(k-1) + b_k + encode_k                 bucket k is encoded right after it is ready
    x_k = max(c_k, x_(k-1)) + network_k                         exchanges go one after the other
    overlapped = max(c_K, x_K) + sum_k decode_k
    serial     = g + sum_k (encode_k + network_k + decode_k)

    t = serial - e (serial - overlapped)

e in [0, 1] is what of the overlap a machine gets, measured: a program that computes for T_c and exchanges for T_x, at
the same time, takes T; e = (T_c + T_x - T) / min(T_c, T_x). On one that computes and exchanges with the same cores it
is near zero: exchanging slows the computing down by as much as it saves.

With H local steps to an exchange:  t = g + (t_1 - g) / H.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

__all__ = [
    "Bucket",
    "Factors",
    "Line",
    "Parts",
    "factors_of",
    "line_through",
    "overlap_of",
    "regret",
    "step_seconds",
]

TRUST = 1.0  # of `factors_of`, in the parts: as much as in one step that was run


class Line(NamedTuple):
    """Seconds against entries: base + slope d, both >= 0, from measured points (entries, seconds)."""

    base: float
    slope: float
    points: tuple[tuple[float, float], ...] = ()

    def seconds(self, entries: float) -> float:
        """Seconds for so many entries; measured ones are met, and between them lines are drawn.

        >>> Line(1.0, 2.0).seconds(3.0)
        7.0
        """
        if entries <= 0:
            return 0.0
        places = [place for place, _ in self.points]
        if len(places) < 2 or entries >= places[-1] or entries <= places[0]:
            nearest = 0 if not places or entries <= places[0] else -1
            extra = self.points[nearest][1] - self._at(places[nearest]) if places else 0.0
            scale = min(entries / places[0], 1.0) if places else 1.0
            return max(self._at(entries) + extra * scale, 0.0)
        return float(np.interp(entries, places, [seconds for _, seconds in self.points]))

    def _at(self, entries: float) -> float:
        return self.base + self.slope * entries


def line_through(points: Sequence[tuple[float, float]]) -> Line:
    """The least-squares line through times against sizes, weighted by 1 / seconds^2, with base, slope >= 0.

    >>> [round(x, 9) for x in line_through([(1.0, 3.0), (2.0, 5.0)])[:2]]
    [1.0, 2.0]
    """
    points = tuple(sorted((float(x), float(t)) for x, t in points))
    if not points:
        return Line(0.0, 0.0)
    if len({x for x, _ in points}) == 1:
        x, t = points[0][0], float(np.mean([t for _, t in points]))
        return Line(0.0, t / x if x else 0.0, ((x, t),))
    x, t = np.array(points, np.float64).T
    weight = 1 / np.maximum(t, 1e-9)
    columns = np.stack([np.ones_like(x), x], 1) * weight[:, None]
    base, slope = np.linalg.lstsq(columns, t * weight, rcond=None)[0]
    if slope < 0:
        base, slope = float(np.average(t, weights=weight**2)), 0.0
    elif base < 0:
        base, slope = 0.0, float(np.sum(x * t * weight**2) / np.sum((x * weight) ** 2))
    return Line(float(base), float(slope), points)


class Bucket(NamedTuple):
    """share: of all entries; the others are seconds."""

    share: float
    encode: float
    network: float
    decode: float


class Parts(NamedTuple):
    """Parts of a predicted step in seconds; hidden: by overlap, at each exchange."""

    gradient: float
    encode: float
    network: float
    decode: float
    hidden: float
    total: float
    deviation: float


def step_seconds(
    gradient: float,
    forward_share: float,
    buckets: Sequence[Bucket],
    *,
    overlap: float = 0.0,
    every: int = 1,
    deviation: float = 0.0,
) -> Parts:
    """The predicted step (see the module).

    Args:
        gradient: seconds of loss and gradient.
        forward_share: f, in [0, 1].
        buckets: in the order in which they are ready; shares with sum one.
        overlap: e, in [0, 1].
        every: H.
        deviation: of the seconds of one exchange.

    >>> step_seconds(3.0, 1 / 3, [Bucket(0.5, 0.0, 1.0, 0.0), Bucket(0.5, 0.0, 1.0, 0.0)], overlap=1.0).total
    4.0
    """
    if not 0 <= overlap <= 1 or not 0 <= forward_share <= 1:
        raise ValueError(f"step_seconds: overlap and forward_share must be in [0, 1]; got {overlap}, {forward_share}")
    if every < 1:
        raise ValueError(f"step_seconds: every must be at least 1; got {every}")
    encode, network, decode = (sum(bucket[i] for bucket in buckets) for i in (1, 2, 3))
    computed, exchanged = forward_share * gradient, 0.0
    for bucket in buckets:
        computed += (1 - forward_share) * gradient * bucket.share + bucket.encode
        exchanged = max(computed, exchanged) + bucket.network
    serial = gradient + encode + network + decode
    hidden = overlap * (serial - max(computed, exchanged) - decode)
    total = gradient + (serial - hidden - gradient) / every
    return Parts(gradient, encode, network, decode, hidden, total, deviation / every)


def overlap_of(computing: float, exchanging: float, both: float) -> float:
    """The share of the possible overlap of a computation and an exchange that was reached, in [0, 1].

    >>> overlap_of(1.0, 2.0, 2.0), overlap_of(1.0, 2.0, 3.0), overlap_of(1.0, 2.0, 2.5)
    (1.0, 0.0, 0.5)
    """
    shorter = min(computing, exchanging)
    return float(np.clip((computing + exchanging - both) / shorter, 0, 1)) if shorter > 0 else 0.0


class Factors(NamedTuple):
    """Ratios of measured to predicted time of steps that were run: on the links, and of all the rest."""

    network: float = 1.0
    rest: float = 1.0

    def of(self, parts: Parts, every: int = 1) -> float:
        """Seconds per step, with the factors.

        >>> Factors(2.0, 3.0).of(Parts(1.0, 0.5, 2.0, 0.5, 0.0, 4.0, 0.0))
        10.0
        """
        network, rest = _two(parts, every)
        return self.network * network + self.rest * rest


def _two(parts: Parts, every: int) -> tuple[float, float]:
    network = min(parts.network / every, parts.total)
    return network, parts.total - network


def factors_of(runs: Sequence[tuple[Parts, int, float]], trust: float = TRUST) -> Factors:
    """a, b >= 0 that make a network + b rest what was measured, with least squares of relative errors.

        sum_i ((a network_i + b rest_i) / measured_i - 1)^2 + trust ((a - 1)^2 + (b - 1)^2)

    Parts are measured one by one. Within a step they also wait for each other, and for the cores that all workers of a
    machine share; steps that were run say how long.

    Args:
        runs: of each step that was run its parts, H, and its measured seconds.
        trust: in the parts alone: of no runs both factors are one.

    >>> step = Parts(1.0, 0.0, 3.0, 0.0, 0.0, 4.0, 0.0)
    >>> factors_of([]), [round(x, 3) for x in factors_of([(step, 1, 8.0)], trust=1e-9)]
    (Factors(network=1.0, rest=1.0), [2.2, 1.4])
    """
    rows, goals = [[trust**0.5, 0.0], [0.0, trust**0.5]], [trust**0.5] * 2
    for parts, every, measured in runs:
        rows.append([x / max(measured, 1e-9) for x in _two(parts, every)])
        goals.append(1.0)
    found = np.linalg.lstsq(np.array(rows), np.array(goals), rcond=None)[0]
    return Factors(*(float(max(x, 0.1)) for x in found))


def regret(chosen: float, measured: Sequence[float]) -> float:
    """Excess cost of a choice over the best one, as a share of the best.

    >>> regret(1.1, [1.0, 1.1, 2.0])
    0.10000000000000009
    """
    best = min(measured)
    return chosen / best - 1
