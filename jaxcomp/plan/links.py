"""Seconds of a collective on a link that was measured, or on links that were stated.

Latency and bandwidth are fitted to a sweep of sizes by the model of `jaxcomp.exchange.links`,

    t = m latency + s / bandwidth

whose factors a fit has in its bandwidth.

A fit minimises sum_i ((t_i - X_i b) / e_i)^2 over b = (latency, 1 / bandwidth) >= 0, where X_i = [m, s] and e_i is the
standard error of the i-th time, or 2 % of it if that is more. The covariance of b is that of weighted least squares,
(X' W X)^-1 with W = diag(1 / e^2), times chi^2 / (N - columns) where the line misses the points by more than their
errors.

Real collectives change their algorithm with the size. Within the sizes that were measured a prediction is therefore the
line times the ratio of time to line, interpolated in the logarithm of the bytes sent; outside it is the line, times the
ratio at the end that is nearer.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxcomp.exchange.links import KINDS, Link, on_links

__all__ = [
    "Collective",
    "Fit",
    "Fits",
    "Seconds",
    "Stated",
    "Timing",
    "at_bandwidth",
    "check_kind",
    "fit",
    "least_squares",
    "seconds_of",
    "stated",
    "weights_of",
    "workers_of",
]

LEAST_ERROR = 0.02  # of a time: what repeated medians on a quiet machine differ by


class Collective(NamedTuple):
    """One collective of a program. operand_bytes: of each worker; axis: its names; times: how often it runs."""

    kind: str
    operand_bytes: float
    axis: str
    times: int = 1


class Timing(NamedTuple):
    """One measured size. seconds: median over the rounds of the slowest worker; error: its standard error."""

    workers: int
    operand_bytes: float
    seconds: float
    error: float


class Seconds(NamedTuple):
    """A predicted time and its standard deviation; each: of it, on each link by its name."""

    mean: float
    deviation: float
    each: Mapping[str, float] = {}


class Fit(NamedTuple):
    """A fitted collective.

    latency: seconds of a message besides its bytes. per_byte: seconds of a byte that a worker sends.
    covariance: of (latency, per_byte), as three numbers: var a, cov, var c.
    ratios: (workers, bytes sent, measured over line) of each measured size.
    """

    kind: str
    latency: float
    per_byte: float
    covariance: tuple[float, float, float] = (0.0, 0.0, 0.0)
    ratios: tuple[tuple[int, float, float], ...] = ()

    def line(self, operand_bytes: float, workers: int) -> float:
        """Seconds by the formula of the module, without `ratios`."""
        messages, sent = place_of(self.kind, operand_bytes, workers)
        return messages * self.latency + sent * self.per_byte

    def seconds(self, operand_bytes: float, workers: int) -> Seconds:
        """Predicted seconds of one collective."""
        if workers < 2:
            return Seconds(0.0, 0.0)
        messages, sent = place_of(self.kind, operand_bytes, workers)
        a, both, c = self.covariance
        variance = messages**2 * a + 2 * messages * sent * both + sent**2 * c
        mean = self.line(operand_bytes, workers) * self.ratio(operand_bytes, workers)
        return Seconds(mean, math.sqrt(max(variance, 0.0)))

    def of_kind(self, kind: str) -> "Fit":
        """The same for another kind of collective."""
        return self._replace(kind=kind, ratios=())

    def at(self, level: str, bandwidth: float) -> "Fit":
        """The same on a link of so many bytes per second."""
        del level
        return self._replace(per_byte=1 / bandwidth, ratios=())

    def ratio(self, operand_bytes: float, workers: int) -> float:
        """Measured over line, from the sweep with the nearest number of workers."""
        if not self.ratios:
            return 1.0
        _, sent = place_of(self.kind, operand_bytes, workers)
        nearest = min((n for n, _, _ in self.ratios), key=lambda n: abs(n - workers))
        points = sorted((max(place, 1.0), ratio) for n, place, ratio in self.ratios if n == nearest)
        return float(np.interp(np.log(max(sent, 1.0)), np.log([p for p, _ in points]), [r for _, r in points]))


class Stated(NamedTuple):
    """A collective along some of the levels of links that were stated (`jaxcomp.exchange.links`)."""

    kind: str
    along: tuple[str, ...]
    levels: Mapping[str, Link]

    def of_kind(self, kind: str) -> "Stated":
        """The same for another kind of collective."""
        return self._replace(kind=kind)

    def at(self, level: str, bandwidth: float) -> "Stated":
        """The same with another bandwidth at one level."""
        other = self.levels[level]._replace(bandwidth=bandwidth)
        return self._replace(levels={**self.levels, level: other})

    def seconds(self, operand_bytes: float, workers: int) -> Seconds:
        """Predicted seconds of one collective."""
        del workers
        found = on_links(self.kind, operand_bytes, self.along, self.levels)
        return Seconds(found.seconds, 0.0, found.each)


Fits = Mapping[str, Mapping[str, Fit | Stated]]


def stated(levels: Mapping[str, Link]) -> dict[str, dict[str, Stated]]:
    """Every kind of collective along every set of levels, whose names stand outermost first, as axes of a mesh do.

    >>> list(stated({"ici": Link(1e-6, 5e10, 8), "dcn": Link(5e-5, 1.25e9, 4)}))
    ['dcn', 'ici', 'dcn,ici']
    """
    names = tuple(reversed(list(levels)))
    some = [set_ for count in range(1, len(names) + 1) for set_ in itertools.combinations(names, count)]
    return {",".join(along): {kind: Stated(kind, along, levels) for kind in KINDS} for along in some}


def at_bandwidth(fits: Fits, level: str, bandwidth: float) -> Fits:
    """The same with a link of so many bytes per second at one level."""
    return {
        axis: {
            kind: each.at(level, bandwidth) if level in (axis, *axis.split(",")) else each for kind, each in own.items()
        }
        for axis, own in fits.items()
    }


def check_kind(name: str, kind: str) -> None:
    """Raises ValueError unless there is a collective of that kind."""
    if kind not in KINDS:
        raise ValueError(f"{name}: kind must be one of {', '.join(KINDS)}; got {kind!r}")


def place_of(kind: str, operand_bytes: float, workers: int) -> tuple[float, float]:
    """Messages one after the other, and bytes that a worker sends."""
    return KINDS[kind].messages(workers), KINDS[kind].sent(operand_bytes, workers)


def fit(kind: str, timings: Iterable[Timing]) -> Fit:
    """Latency and bandwidth of a collective from times of at least two sizes, with their covariance (see the module).

    Raises:
        ValueError: an unknown kind, times, errors or bytes that are not finite and >= 0, or fewer than two sizes.

    >>> found = fit("all_reduce", [Timing(2, 0.0, 2e-3, 0.0), Timing(2, 1e6, 1.002, 0.0)])
    >>> round(found.latency, 9), round(found.per_byte, 12)
    (0.001, 1e-06)
    """
    check_kind("fit", kind)
    timings = [x for x in timings if x.workers != 1]  # one worker exchanges nothing
    numbers = np.array([x[1:] for x in timings], np.float64).reshape(-1, 3)
    if not (np.isfinite(numbers).all() and (numbers >= 0).all() and all(x.workers > 1 for x in timings)):
        raise ValueError(
            f"fit: timings must have workers >= 1 and finite operand_bytes, seconds and errors >= 0; got {timings}"
        )
    places = np.array([place_of(kind, x.operand_bytes, x.workers) for x in timings], np.float64).reshape(-1, 2)
    if len(np.unique(places, axis=0)) < 2:
        raise ValueError(f"fit: timings must be of at least two sizes; got {len(timings)} of {kind}")
    seconds = numbers[:, 1]
    weights = weights_of(timings)
    (latency, per_byte), ((a, both), (_, c)) = least_squares(places * weights[:, None], seconds * weights)
    made = Fit(kind, float(latency), float(per_byte), (float(a), float(both), float(c)))
    lines = [made.line(x.operand_bytes, x.workers) for x in timings]
    each = zip(timings, places, lines, strict=True)
    ratios = tuple((x.workers, float(sent), x.seconds / line if line > 0 else 1.0) for x, (_, sent), line in each)
    return made._replace(ratios=ratios)


def weights_of(timings: Sequence[Timing]) -> np.ndarray:
    """1 / e of each time (see the module)."""
    return np.array([1 / max(x.error, LEAST_ERROR * max(x.seconds, 1e-9)) for x in timings])


def least_squares(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """argmin |x b - y|^2 over b >= 0, and the covariance of b: the best of all sets of columns that give b >= 0."""
    scale = np.linalg.norm(x, axis=0)
    present, scale = np.flatnonzero(scale), np.where(scale > 0, scale, 1.0)
    x, least, best = x / scale, np.inf, ([], np.zeros(0))
    for count in range(len(present), 0, -1):
        for columns in map(list, itertools.combinations(present, count)):
            solved, _, rank, _ = np.linalg.lstsq(x[:, columns], y, rcond=None)
            misfit = float(np.sum((x[:, columns] @ solved - y) ** 2))
            if rank == count and (solved >= 0).all() and misfit < least:
                least, best = misfit, (columns, solved)
    columns, solved = best
    found, inverse = np.zeros(len(scale)), np.zeros((len(scale), len(scale)))
    found[columns] = solved
    inverse[np.ix_(columns, columns)] = np.linalg.pinv(x[:, columns].T @ x[:, columns])
    free = len(y) - len(columns)
    return found / scale, inverse * max(least / free if free > 0 else 1.0, 1.0) / np.outer(scale, scale)


def workers_of(axis: Any, sizes: Mapping[str, int]) -> int:
    """Workers along an axis, or along several: a tuple of names, or one text with commas between them.

    >>> workers_of("a,b", {"a": 2, "b": 4}), workers_of(("b",), {"a": 2, "b": 4})
    (8, 4)
    """
    return math.prod(sizes[name] for name in (axis.split(",") if isinstance(axis, str) else axis))


def seconds_of(collectives: Iterable[Collective], fits: Fits, sizes: Mapping[str, int]) -> Seconds:
    """Predicted seconds of some collectives, one after the other, whose times are independent.

    fits: axis -> kind -> its fit; a kind that was not measured is taken for the slowest of the others. sizes: axis ->
    workers.
    """
    mean = variance = 0.0
    links: dict[str, float] = {}
    for one in collectives:
        known = fits.get(one.axis)
        if not known:
            raise ValueError(f"plan: fits must hold what was measured of axis {one.axis!r}; it has {list(fits)}")
        alike = [known[one.kind]] if one.kind in known else [x.of_kind(one.kind) for x in known.values()]
        workers = workers_of(one.axis, sizes)
        slowest = max((x.seconds(one.operand_bytes, workers) for x in alike), key=lambda seconds: seconds.mean)
        mean += one.times * slowest.mean
        variance += (one.times * slowest.deviation) ** 2
        for name, seconds in (slowest.each or {one.axis: slowest.mean}).items():
            links[name] = links.get(name, 0.0) + one.times * seconds
    return Seconds(mean, math.sqrt(variance), links)
