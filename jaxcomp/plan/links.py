"""Time of a collective on a link: latency and bandwidth, fitted to a sweep of sizes.

A collective of operands of b bytes among n workers has m(n) messages one after the other, and each worker sends s(b, n)
bytes in it, as the ledger counts them:

    kind             m(n)        s(b, n)
    all_reduce       2 (n - 1)   2 (n - 1) / n b     ring: reduce-scatter, then all-gather
    all_gather       n - 1       (n - 1) b           ring
    all_to_all       n - 1       (n - 1) / n b       pairwise
    reduce_scatter   n - 1       (n - 1) / n b       ring
    permute          1           b

    t = m (latency + wait max(n / cores - 1, 0)) + s / bandwidth

With n workers on fewer cores of one machine each message waits for the n / cores - 1 other workers of its core.

A fit minimises sum_i ((t_i - X_i b) / e_i)^2 over b = (a, c, w) >= 0, where e_i is the standard error of the i-th time,
or 2 % of it if that is more: weighted least squares, b = (X' W X)^-1 X' W t with X = [m, s, m max(n / cores - 1, 0)]
and W = diag(1 / e^2), of those columns with which no coefficient is negative. The covariance of (a, c) is that of
(X' W X)^-1, times chi^2 / (N - columns) where the line misses the points by more than their errors. Of one sweep at one
n latency and bandwidth are told apart by the sizes; a wait takes sweeps at several n, fitted together.

Real collectives change their algorithm with the size. Within the sizes that were measured a prediction is therefore the
line times the ratio of time to line, interpolated in the logarithm of the bytes sent; outside it is the line, times the
ratio at the end that is nearer.
"""

import itertools
import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from jaxcomp.exchange.links import Link

__all__ = [
    "KINDS",
    "Collective",
    "Fit",
    "Sample",
    "Seconds",
    "check_kind",
    "fit",
    "link_of",
    "seconds_of",
    "workers_of",
]

LEAST_ERROR = 0.02  # of a time: what repeated medians on a quiet machine differ by


class Kind(NamedTuple):
    """messages(n): one after the other; sent(b, n): bytes that a worker sends for operands of b bytes."""

    messages: Callable[[int], float]
    sent: Callable[[float, int], float]


KINDS: dict[str, Kind] = {
    "all_reduce": Kind(lambda n: 2.0 * (n - 1), lambda b, n: 2 * (n - 1) / n * b),
    "all_gather": Kind(lambda n: n - 1.0, lambda b, n: (n - 1.0) * b),
    "all_to_all": Kind(lambda n: n - 1.0, lambda b, n: (n - 1) / n * b),
    "reduce_scatter": Kind(lambda n: n - 1.0, lambda b, n: (n - 1) / n * b),
    "permute": Kind(lambda n: min(1.0, n - 1.0), lambda b, n: b if n > 1 else 0.0),
}


class Collective(NamedTuple):
    """One collective of a program. operand_bytes: what each worker contributes; axis: its name; times: how often."""

    kind: str
    operand_bytes: float
    axis: str
    times: int = 1


class Sample(NamedTuple):
    """One measured size. seconds: median over the rounds of the slowest worker; error: its standard error."""

    workers: int
    operand_bytes: float
    seconds: float
    error: float


class Seconds(NamedTuple):
    """A predicted time and its standard deviation."""

    mean: float
    deviation: float

    def plus(self, other: "Seconds", times: float = 1.0) -> "Seconds":
        """The sum of independent times.

        >>> Seconds(1.0, 3.0).plus(Seconds(2.0, 4.0))
        Seconds(mean=3.0, deviation=5.0)
        """
        return Seconds(self.mean + times * other.mean, float(np.hypot(self.deviation, times * other.deviation)))


class Fit(NamedTuple):
    """A fitted collective.

    latency: seconds of a message besides its bytes. per_byte: seconds of a byte that a worker sends.
    covariance: of (latency, per_byte), as three numbers: var a, cov, var c.
    ratios: (workers, bytes sent, measured over line) of each measured size.
    samples: what it was fitted to.
    wait: seconds of a message for each further worker of its core, and wait_error its standard error. cores: that all
        workers share; 0: each has its own, and the wait does not count.
    """

    kind: str
    latency: float
    per_byte: float
    covariance: tuple[float, float, float] = (0.0, 0.0, 0.0)
    ratios: tuple[tuple[int, float, float], ...] = ()
    samples: tuple[Sample, ...] = ()
    wait: float = 0.0
    cores: int = 0
    wait_error: float = 0.0

    @property
    def link(self) -> Link:
        """The same as `jc.Link`, with a bandwidth in bytes per second."""
        return Link(self.latency, 1 / max(self.per_byte, 1e-15))

    def line(self, operand_bytes: float, workers: int) -> float:
        """Seconds by the formula of the module, without `ratios`."""
        messages, sent, waits = _place(self.kind, operand_bytes, workers, self.cores)
        return messages * self.latency + sent * self.per_byte + waits * self.wait

    def seconds(self, operand_bytes: float, workers: int) -> Seconds:
        """Predicted seconds of one collective."""
        if workers < 2:
            return Seconds(0.0, 0.0)
        messages, sent, waits = _place(self.kind, operand_bytes, workers, self.cores)
        a, both, c = self.covariance
        variance = messages**2 * a + 2 * messages * sent * both + sent**2 * c + (waits * self.wait_error) ** 2
        return Seconds(self.line(operand_bytes, workers) * self._ratio(sent, workers), float(np.sqrt(max(variance, 0))))

    def _ratio(self, sent: float, workers: int) -> float:
        """Measured over line at so many bytes sent, from the sweep with the nearest number of workers."""
        if not self.ratios:
            return 1.0
        nearest = min({n for n, _, _ in self.ratios}, key=lambda n: abs(n - workers))
        points = sorted((max(place, 1.0), ratio) for n, place, ratio in self.ratios if n == nearest)
        return float(np.interp(np.log(max(sent, 1.0)), np.log([p for p, _ in points]), [r for _, r in points]))


def check_kind(name: str, kind: str) -> Kind:
    """The kind of a collective; ValueError if there is none of that name."""
    if kind not in KINDS:
        raise ValueError(f"{name}: kind must be one of {', '.join(KINDS)}; got {kind!r}")
    return KINDS[kind]


def _place(kind: str, operand_bytes: float, workers: int, cores: int = 0) -> tuple[float, float, float]:
    """Messages one after the other, bytes sent, and workers that these messages wait for."""
    how = check_kind("links", kind)
    messages = how.messages(workers)
    return messages, how.sent(operand_bytes, workers), messages * max(workers / cores - 1, 0) if cores else 0.0


def fit(kind: str, samples: Iterable[Sample], cores: int = 0) -> Fit:
    """Latency, bandwidth and wait of a collective from measured sizes, with their covariance (see the module).

    Args:
        kind: one of KINDS.
        samples: at least two, of two sizes or two numbers of workers.
        cores: that all workers share; 0: each has its own, and waits for no other.

    Raises:
        ValueError: an unknown kind, cores that are no integer >= 0, times, errors or bytes that are not finite and
            >= 0, or fewer than two places.

    >>> two = [Sample(2, 0.0, 2e-3, 0.0), Sample(2, 1e6, 1.002, 0.0)]
    >>> found = fit("all_reduce", two)
    >>> round(found.latency, 9), round(found.per_byte, 12)
    (0.001, 1e-06)
    """
    samples = tuple(x for x in samples if x.workers != 1)  # a single worker exchanges nothing
    check_kind("fit", kind)
    if isinstance(cores, bool) or not isinstance(cores, numbers.Integral) or cores < 0:
        raise ValueError(f"fit: cores must be an integer >= 0; got {cores!r}")
    if not all(x.workers > 1 and 0 <= x.operand_bytes < math.inf for x in samples):
        raise ValueError(f"fit: samples must have workers >= 1 and finite operand_bytes >= 0; got {samples}")
    places = np.array([_place(kind, x.operand_bytes, x.workers, cores) for x in samples], np.float64).reshape(-1, 3)
    if len({tuple(place) for place in places[:, :2].tolist()}) < 2:
        raise ValueError(f"fit: samples must be of at least two sizes; got {len(samples)} of {kind}")
    seconds = np.array([x.seconds for x in samples], np.float64)
    errors = np.array([x.error for x in samples], np.float64)
    if not (np.isfinite(seconds).all() and np.isfinite(errors).all() and (seconds >= 0).all() and (errors >= 0).all()):
        raise ValueError(f"fit: seconds and errors must be finite and >= 0; got {seconds.tolist()}, {errors.tolist()}")
    errors = np.maximum(errors, LEAST_ERROR * np.maximum(seconds, 1e-9))
    if len({max(x.workers, cores) for x in samples if x.workers > 1}) < 2:
        places[:, 2] = 0  # one number of workers does not tell a wait from a latency
    (latency, per_byte, wait), covariance = _least_squares(places / errors[:, None], seconds / errors)
    spread = (float(covariance[0, 0]), float(covariance[0, 1]), float(covariance[1, 1]))
    waits = {"wait": float(wait), "cores": int(cores), "wait_error": math.sqrt(covariance[2, 2])}
    made = Fit(kind, float(latency), float(per_byte), spread, **waits)
    lines = [made.line(x.operand_bytes, x.workers) for x in samples]
    ratios = [
        (x.workers, float(place[1]), x.seconds / line if line > 0 else 1.0)
        for x, place, line in zip(samples, places, lines, strict=True)
    ]
    return made._replace(ratios=tuple(ratios), samples=samples)


def _least_squares(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """argmin |x b - y|^2 over b >= 0, and the covariance of b: the best of all sets of columns that give b >= 0."""
    scale = np.linalg.norm(x, axis=0)
    present = [i for i in range(x.shape[1]) if scale[i] > 0]
    scale[scale == 0] = 1.0
    x, best = x / scale, (np.inf, (), np.zeros(0))
    for count in range(len(present), 0, -1):
        for columns in itertools.combinations(present, count):
            solved, _, rank, _ = np.linalg.lstsq(x[:, columns], y, rcond=None)
            rest = float(np.sum((x[:, columns] @ solved - y) ** 2))
            if rank == count and (solved >= 0).all() and rest < best[0]:
                best = (rest, columns, solved)
    rest, columns, solved = best
    found, inverse = np.zeros(x.shape[1]), np.zeros((x.shape[1], x.shape[1]))
    found[list(columns)] = solved
    inverse[np.ix_(columns, columns)] = np.linalg.pinv(x[:, columns].T @ x[:, columns])
    free = len(y) - len(columns)
    return found / scale, inverse * max(rest / free if free > 0 else 1.0, 1.0) / np.outer(scale, scale)


def workers_of(axis: str, sizes: Mapping[str, int]) -> int:
    """Workers of an axis, or of several whose names stand between commas.

    >>> workers_of("a,b", {"a": 2, "b": 4})
    8
    """
    return math.prod(sizes[name] for name in axis.split(","))


def seconds_of(
    collectives: Iterable[Collective], fits: Mapping[str, Mapping[str, Fit]], sizes: Mapping[str, int]
) -> Seconds:
    """Predicted seconds of some collectives, one after the other.

    Args:
        collectives: as `candidates.collectives_of` finds them.
        fits: axis -> kind -> its fit. A kind that was not measured is taken for the slowest of the others.
        sizes: axis -> workers.
    """
    total = Seconds(0.0, 0.0)
    for one in collectives:
        if not fits.get(one.axis):
            raise ValueError(f"plan: fits must hold what was measured of axis {one.axis!r}; it has {list(fits)}")
        each, workers = fits[one.axis], workers_of(one.axis, sizes)
        known = [each[one.kind]] if one.kind in each else list(each.values())
        guesses = [fit._replace(kind=one.kind, ratios=fit.ratios if fit.kind == one.kind else ()) for fit in known]
        slowest = max((fit.seconds(one.operand_bytes, workers) for fit in guesses), key=lambda s: s.mean)
        total = total.plus(slowest, one.times)
    return total


def link_of(fits: Mapping[str, Fit]) -> Link:
    """One link that stands for several collectives, for routes that have a choice: that of the all-gather, if any."""
    for kind in ("all_gather", "all_to_all", "all_reduce"):
        if kind in fits:
            return fits[kind].link
    return next(iter(fits.values())).link if fits else Link()
