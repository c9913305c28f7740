"""What a collective takes on a link: latency and bandwidth, fitted from a sweep of sizes.

A collective of operands of b bytes among n workers has m(n) messages one after the other, and each worker sends s(b, n)
bytes in it, as the ledger counts them:

    kind             m(n)        s(b, n)
    all_reduce       2 (n - 1)   2 (n - 1) / n b     ring: reduce-scatter, then all-gather
    all_gather       n - 1       (n - 1) b           ring
    all_to_all       n - 1       (n - 1) / n b       pairwise
    reduce_scatter   n - 1       (n - 1) / n b       ring
    permute          1           b

    t = m latency + s / bandwidth

A fit minimises sum_i ((t_i - m_i a - s_i c) / e_i)^2 over a, c >= 0, where e_i is the standard error of the i-th
time, or 2 % of it if that is more: weighted least squares, A = (X' W X)^-1 X' W t with X = [m, s] and W = diag(1 /
e^2). A negative coefficient is set to zero and the other one fitted alone. The covariance of (a, c) is (X' W X)^-1,
times chi^2 / (N - 2) where the line misses the points by more than their errors. Of one sweep at one n the two
columns are told apart by the sizes; sweeps at several n may be fitted together.

Real collectives change their algorithm with the size. Within the sizes that were measured a prediction is therefore the
line times the ratio of time to line, interpolated in the logarithm of the bytes sent; outside it is the line, times the
ratio at the end that is nearer.
"""

import math
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
    """

    kind: str
    latency: float
    per_byte: float
    covariance: tuple[float, float, float] = (0.0, 0.0, 0.0)
    ratios: tuple[tuple[int, float, float], ...] = ()
    samples: tuple[Sample, ...] = ()

    @property
    def link(self) -> Link:
        """The same as `jc.Link`, with a bandwidth in bytes per second."""
        return Link(self.latency, 1 / max(self.per_byte, 1e-15))

    def line(self, operand_bytes: float, workers: int) -> float:
        """Seconds by latency and bandwidth alone."""
        messages, sent = _place(self.kind, operand_bytes, workers)
        return messages * self.latency + sent * self.per_byte

    def seconds(self, operand_bytes: float, workers: int) -> Seconds:
        """Predicted seconds of one collective."""
        if workers < 2:
            return Seconds(0.0, 0.0)
        messages, sent = _place(self.kind, operand_bytes, workers)
        a, both, c = self.covariance
        variance = messages**2 * a + 2 * messages * sent * both + sent**2 * c
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


def _place(kind: str, operand_bytes: float, workers: int) -> tuple[float, float]:
    how = check_kind("links", kind)
    return how.messages(workers), how.sent(operand_bytes, workers)


def fit(kind: str, samples: Iterable[Sample]) -> Fit:
    """Latency and bandwidth of a collective from measured sizes, with their covariance (see the module).

    Args:
        kind: one of KINDS.
        samples: at least two, of two sizes or two numbers of workers.

    Raises:
        ValueError: an unknown kind, times or errors that are not finite and >= 0, or fewer than two places.

    >>> two = [Sample(2, 0.0, 2e-3, 0.0), Sample(2, 1e6, 1.002, 0.0)]
    >>> found = fit("all_reduce", two)
    >>> round(found.latency, 9), round(found.per_byte, 12)
    (0.001, 1e-06)
    """
    samples = tuple(samples)
    check_kind("fit", kind)
    places = np.array([_place(kind, x.operand_bytes, x.workers) for x in samples], np.float64).reshape(-1, 2)
    if len({tuple(place) for place in places.tolist()}) < 2:
        raise ValueError(f"fit: samples must be of at least two sizes; got {len(samples)} of {kind}")
    seconds = np.array([x.seconds for x in samples], np.float64)
    errors = np.array([x.error for x in samples], np.float64)
    if not (np.isfinite(seconds).all() and np.isfinite(errors).all() and (seconds >= 0).all() and (errors >= 0).all()):
        raise ValueError(f"fit: seconds and errors must be finite and >= 0; got {seconds.tolist()}, {errors.tolist()}")
    errors = np.maximum(errors, LEAST_ERROR * np.maximum(seconds, 1e-9))
    found, covariance = _least_squares(places / errors[:, None], seconds / errors)
    made = Fit(kind, float(found[0]), float(found[1]), (covariance[0, 0], covariance[0, 1], covariance[1, 1]))
    lines = [made.line(x.operand_bytes, x.workers) for x in samples]
    ratios = [
        (x.workers, float(place[1]), x.seconds / line if line > 0 else 1.0)
        for x, place, line in zip(samples, places, lines, strict=True)
    ]
    return made._replace(ratios=tuple(ratios), samples=samples)


def _least_squares(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """argmin |x b - y|^2 over b >= 0 of two columns, and the covariance of b."""
    scale = np.linalg.norm(x, axis=0)
    scale[scale == 0] = 1.0
    x = x / scale
    for columns in ((0, 1), (0,), (1,)):
        part = x[:, columns]
        solved = np.linalg.lstsq(part, y, rcond=None)[0]
        if len(columns) == 2 and (solved < 0).any():
            continue
        if len(columns) == 1 and len(part) and _better_alone(x, y, columns[0]):
            continue
        break
    found = np.zeros(2)
    found[list(columns)] = np.maximum(solved, 0)
    inverse = np.zeros((2, 2))
    inverse[np.ix_(columns, columns)] = np.linalg.pinv(part.T @ part)
    misfit = float(np.sum((x @ found - y) ** 2)) / max(len(y) - len(columns), 1)
    covariance = inverse * (max(misfit, 1.0) if len(y) > len(columns) else 1.0)
    return found / scale, covariance / np.outer(scale, scale)


def _better_alone(x: np.ndarray, y: np.ndarray, column: int) -> bool:
    """Whether the other column by itself leaves a smaller rest."""
    rest = lambda c: np.sum((x[:, c] * max(float(x[:, c] @ y) / max(float(x[:, c] @ x[:, c]), 1e-300), 0.0) - y) ** 2)
    return column == 0 and bool(rest(1) < rest(0))


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
