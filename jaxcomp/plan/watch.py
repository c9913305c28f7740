"""Whether a plan still holds: a detector of changes in the series that a training loop has anyway.

Fed with seconds per step and what `jc.info` says, it reports once that a series is no longer what it was, and changes
nothing. A call takes microseconds, and nothing is added to the step.

    1. Steps are put together in blocks of b = 8; a block's median is one observation x_t.
    2. p_t = (#{i <= t: x_i > x_t} + u_t #{i <= t: x_i = x_t}) / t,  u_t uniform: small where x_t is among the largest.
       If the observations are exchangeable, the p_t are independent and uniform (conformal prediction).
    3. f(p) = mean over eps in E of eps p^(eps - 1), of mean one: a bet that p is small.
       M_t = sum over s <= t of pi_s prod_(s <= i <= t) f(p_i)  +  sum over s > t of pi_s,   pi_s = 1 / (s (s + 1)):
       a bet that begins at an unknown time s. M is a martingale of mean one: P(M_t >= 1 / a for some t) <= a (Ville).
    4. It reports when M_t >= 1 / a and the median of the last blocks differs from that of the first by more than a
       tolerance.

Each series is watched in both directions, with a = false_alarm / (directions watched): the probability that anything is
ever reported of a training whose blocks are exchangeable is at most false_alarm, however long it runs. Steps that
depend on their neighbours are not exchangeable; the blocks take most of that out, and the tolerance the small
changes.

Reference: Vovk, Nouretdinov, Gammerman 2003 (testing exchangeability on-line); Ville 1939.
"""

import bisect
import math
import random
import statistics
from typing import Any, NamedTuple

import numpy as np

__all__ = ["BLOCK", "Change", "Martingale", "Watch"]

BLOCK = 8  # steps
EPSILONS = (0.1, 0.2, 0.4, 0.7)
RECENT = 5  # blocks that are compared with the first
MOST_LOG = 600.0


class Series(NamedTuple):
    """One series: its name in words, and what it means where it grows, and where it falls."""

    words: str
    larger: str
    smaller: str


SERIES = {
    "seconds": Series(
        "seconds per step",
        "A link or a worker got slower",
        "A link or a worker got faster; dense may be best now",
    ),
    "relative_error": Series(
        "relative error of messages",
        "Messages lose more of the gradient",
        "Messages lose less; fewer entries may do",
    ),
    "overflow": Series(
        "entries that found no place",
        "Gradients got heavier tails than the threshold expects",
        "The capacity may be smaller",
    ),
    "sent_bytes": Series("bytes sent", "Messages got longer", "Messages got shorter"),
}


class Change(NamedTuple):
    """A change that was found. step: the last one seen; series: its name; before, after: medians; words: a sentence."""

    step: int
    series: str
    before: float
    after: float
    words: str


class Martingale:
    """Steps 2 and 3: a bet on one direction of one series. sign: 1 for larger values, -1 for smaller ones."""

    def __init__(self, sign: int = 1, seed: int = 0):
        self.sign, self.sorted, self.random = sign, [], random.Random(seed)
        self.started = -math.inf  # log of the part of M whose bets have begun

    def add(self, x: float) -> float:
        """log M_t after one more observation."""
        x = self.sign * x
        bisect.insort(self.sorted, x)
        t, low, high = len(self.sorted), bisect.bisect_left(self.sorted, x), bisect.bisect_right(self.sorted, x)
        p = (t - high + self.random.random() * (high - low)) / t
        begun = float(np.logaddexp(self.started, -math.log(t * (t + 1.0))))
        self.started = min(begun + math.log(bet(p)), MOST_LOG)
        return float(np.logaddexp(self.started, -math.log(t + 1.0)))


def bet(p: float) -> float:
    """f(p) of the module; its integral over [0, 1] is one.

    >>> bet(1.0)
    0.35
    """
    p = max(p, 1e-100)
    return sum(e * p ** (e - 1) for e in EPSILONS) / len(EPSILONS)


class Watch:
    """Reports when the series of a training are no longer what they were when it began.

    Call it once a step::

        watch = advice.watch()
        for ...:
            ...
            for change in watch(seconds, jc.info(state)):
                print(change.words)

    Args:
        false_alarm: probability that a training without a change ever gets a report, at most.
        tolerance: changes of a median by less than this share of it are not reported.
        block: steps of an observation.
        warm_up: steps at the beginning that do not count (compiling).
        seed: of the detector's own randomness.

    >>> watch = Watch(warm_up=0)
    >>> found = [c for t in range(1200) for c in watch(0.1 + 0.01 * (t * 7 % 5) + 0.2 * (t >= 800))]
    >>> [(change.series, change.step < 1000) for change in found]
    [('seconds', True)]
    """

    def __init__(
        self,
        *,
        false_alarm: float = 0.01,
        tolerance: float = 0.15,
        block: int = BLOCK,
        warm_up: int = 10,
        seed: int = 0,
    ):
        if not 0 < false_alarm < 1:
            raise ValueError(f"watch: false_alarm must be in (0, 1); got {false_alarm!r}")
        if not tolerance >= 0:
            raise ValueError(f"watch: tolerance must be a number >= 0; got {tolerance!r}")
        if block < 1 or warm_up < 0:
            raise ValueError(f"watch: block must be at least 1 and warm_up at least 0; got {block}, {warm_up}")
        self.limit = -math.log(false_alarm / (2 * len(SERIES)))
        self.tolerance, self.block, self.warm_up, self.step = tolerance, block, warm_up, 0
        self.pending: dict[str, list[float]] = {name: [] for name in SERIES}
        self.blocks: dict[str, list[float]] = {name: [] for name in SERIES}
        # Those of changes that have not been reported yet.
        self.bets = {(name, sign): Martingale(sign, seed + i) for i, name in enumerate(SERIES) for sign in (1, -1)}

    def __call__(self, seconds: float | None = None, info: Any = None, **others: float) -> list[Change]:
        """One step.

        Args:
            seconds: of this step; None: not known.
            info: of `jc.info(state)`, read on the host; None: not watched. What is NaN in it is left out.
            others: the same fields by name, in place of `info`.

        Returns:
            What has just been found; most often nothing. Each change is reported once.
        """
        self.step += 1
        if self.step <= self.warm_up:
            return []
        values = {name: getattr(info, name, None) for name in SERIES} | {"seconds": seconds, **others}
        if unknown := set(values) - set(SERIES):
            raise ValueError(f"watch: series must be of {', '.join(SERIES)}; got {', '.join(sorted(unknown))}")
        numbers = {name: float(value) for name, value in values.items() if value is not None}
        return [change for name, x in numbers.items() if math.isfinite(x) for change in self._add(name, x)]

    update = __call__

    def _add(self, name: str, value: float) -> list[Change]:
        pending, blocks = self.pending[name], self.blocks[name]
        pending.append(value)
        if len(pending) < self.block:
            return []
        blocks.append(statistics.median(pending))
        pending.clear()
        first = blocks[: max(len(blocks) // 2, 1)][: 4 * RECENT]
        before, after = statistics.median(first), statistics.median(blocks[-RECENT:])
        found = []
        for sign in (1, -1):
            if (name, sign) not in self.bets or self.bets[name, sign].add(blocks[-1]) < self.limit:
                continue
            if sign * (after - before) > self.tolerance * abs(before):
                del self.bets[name, sign]
                found.append(Change(self.step, name, before, after, self._words(name, sign, before, after)))
        return found

    def _words(self, name: str, sign: int, before: float, after: float) -> str:
        share = f"{after / before:.2f} times" if before else "more than none"
        return (
            f"the plan may no longer hold: {SERIES[name].words} went from {before:.4g} to {after:.4g} ({share}) by "
            f"step {self.step}. {SERIES[name].larger if sign > 0 else SERIES[name].smaller}"
        )
