"""A model of the time that messages take on links, and schedules of pieces around a ring.

A link carries a message of b bytes in `latency + b / bandwidth`, and all links work at once. For n
workers with messages of w_i bytes, W = sum w_i, the routes take:

    gather   (n - 1) (latency + 1.1 max w_i / bandwidth)       ring all-gather of padded messages
    concat   2 (n - 1) (latency + 1.2 W / n / bandwidth)       ring all-reduce of their concatenation
    ring     sum over ticks (latency + 1.5 piece / bandwidth)  pieces passed on, about W over each link
    ragged   (n - 1) (latency + 1.1 max w_i / bandwidth)       each sends its own message n - 1 times

So concat beats gather from about max w_i > 2.2 W / n on. Ring sends the fewest bytes but waits most often, and
at every tick for both neighbours, which a collective that runs by itself does not. The factors and the
latency of 1 ms were measured with gloo, eight processes and links of 100 Mbit/s
(`python -m experiments bench exchange --workers 8 --mbit 100`). The formula of each route stands in its own file
in `routes`.
"""

import functools
import math
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from jaxcomp.compressors.checks import is_number
from jaxcomp.exchange.axes import Placement

__all__ = [
    "ADDS",
    "DEFAULT",
    "GATHERS",
    "Cost",
    "Link",
    "Phase",
    "Plan",
    "check_link",
    "cost_of",
    "ring_plan",
    "warn_of_order",
]

MOST_PIECES = 48  # of the longest message
MOST_REST = 8  # pieces of the longest rest
GATHERS, ADDS, WAITS = 1.1, 1.2, 1.5  # time of a message, of one that is added, and of a tick over that of its bytes
MOST_LATENCY, LEAST_BANDWIDTH = 60.0, 1.0  # no link is beyond these; latency and bandwidth in the wrong order are
WASTE = 1.04  # what a link carries, over the sum of the real sizes, that is worth more ticks to avoid


class Link(NamedTuple):
    """latency: seconds that a message takes besides its bytes; bandwidth: bytes per second.

    The default is 1 ms and 100 Mbit/s. On links where latency decides, messages of equal length (via="gather") are as
    fast as any.
    """

    latency: float = 1e-3
    bandwidth: float = 12.5e6


DEFAULT = Link()


def check_link(name: str, link: Any) -> None:
    """Raises TypeError or ValueError, named after the function `name`, unless it is a link as there may be one."""
    if not isinstance(link, Link):
        raise TypeError(f"{name}: link must be a jc.Link, say jc.Link(1e-3, 12.5e6) for 100 Mbit/s; got {link!r}")
    latency = is_number(link.latency) and 0 <= link.latency <= MOST_LATENCY
    if not (latency and is_number(link.bandwidth) and link.bandwidth >= LEAST_BANDWIDTH):
        raise ValueError(
            f"{name}: link must have a latency in [0, {MOST_LATENCY:g}] seconds and a bandwidth of at least "
            f"{LEAST_BANDWIDTH:g} byte per second, in this order; got {link}"
        )


SLOW = ("devices of one process", "several processes", "several slices")  # of TPUs; each slower than the one before


def warn_of_order(placements: Sequence[Placement], mesh: Mesh) -> None:
    """Warns where a hierarchy exchanges over slower links first, from what the devices say of themselves.

    Then each device of a fast group sends a message of its own over the slow links. With the fast axis first the
    devices of a group share out one message.

    Args:
        placements: of the means of one transformation.
        mesh: with its devices.
    """

    def kind(axes: tuple[str, ...]) -> int:
        places = [mesh.axis_names.index(name) for name in axes]
        rows = np.moveaxis(mesh.devices, places, range(len(places))).reshape(*map(mesh.shape.get, axes), -1)  # pyright: ignore
        rows = rows.reshape(-1, rows.shape[-1])
        along = lambda of: any(len({of(device) for device in rows[:, j]}) > 1 for j in range(rows.shape[1]))
        if along(lambda device: getattr(device, "slice_index", None)):
            return 2
        return int(along(lambda device: device.process_index))

    for placement in placements:
        levels = [placement.names, *placement.later]
        if len(levels) == 1:
            continue
        kinds = [kind(axes) for axes in levels]
        faster = [j for j in range(1, len(levels)) if kinds[j] < kinds[0]]
        if faster:
            fast = levels[faster[0]]
            number = math.prod(mesh.shape[name] for name in fast)
            shown = lambda axes: repr(axes[0] if len(axes) == 1 else axes)
            warnings.warn(
                f"the exchange over {shown(levels[0])}, between {SLOW[kinds[0]]}, comes before that over "
                f"{shown(fast)}, between {SLOW[kinds[faster[0]]]}, so that each of {number} devices sends a message of "
                f"its own over the slower links. Begin with {shown(fast)}: then they share out one message",
                stacklevel=3,
            )
            return


class Cost(NamedTuple):
    """seconds by the model; sent_bytes: what a worker sends in one exchange, mean over the workers."""

    seconds: float
    sent_bytes: float


def cost_of(messages: int, message_bytes: float, sent_bytes: float, link: Link, factor: float = GATHERS) -> Cost:
    """The cost of so many messages of equal size, one after the other; factor: GATHERS or ADDS."""
    return Cost(messages * (link.latency + factor * message_bytes / link.bandwidth), float(sent_bytes))


class Tick(NamedTuple):
    """One partial permute. pairs: links in use; sends, receives: number of the piece (origin *
    pieces + position) at each worker, n * pieces for none."""

    pairs: tuple[tuple[int, int], ...]
    sends: tuple[int, ...]
    receives: tuple[int, ...]


class Phase(NamedTuple):
    """Pieces of one size. words: of a piece; counts: pieces of each worker; ticks: in order."""

    words: int
    counts: tuple[int, ...]
    ticks: tuple[Tick, ...]

    @property
    def pieces(self) -> int:
        """Number of pieces of the worker that has most."""
        return max(self.counts)


class Plan(NamedTuple):
    """Every word of every worker to all, around a ring: whole pieces first, then what is left over."""

    phases: tuple[Phase, ...]

    @property
    def sent_bytes(self) -> float:
        """Mean over the workers."""
        return sum(4 * p.words * len(tick.pairs) / len(p.counts) for p in self.phases for tick in p.ticks)

    def seconds(self, link: Link) -> float:
        """Seconds by the model."""
        return sum(len(p.ticks) * _tick(p.words, link) for p in self.phases)


def _tick(words: int, link: Link) -> float:
    return link.latency + WAITS * 4 * words / link.bandwidth


@functools.lru_cache(maxsize=256)
def ring_plan(lengths: tuple[int, ...], link: Link = DEFAULT) -> Plan:
    """The fastest schedule by the model, among sizes of pieces.

    Each message is cut into as many pieces of one size as fit, and its rest into pieces of a smaller
    size, the last one filled up. Every tick is one partial permute: each worker passes on the
    piece that still has furthest to go. Among the sizes with which no link carries more than 1.04
    times the sum of the real lengths the fastest is taken; without any, the least wasteful.

    Args:
        lengths: uint32 words of each worker's message.
        link: latency and bandwidth.

    >>> plan = ring_plan((6, 2, 1), Link(latency=0))
    >>> [(phase.words, phase.counts, len(phase.ticks)) for phase in plan.phases], plan.sent_bytes
    ([(1, (6, 2, 1), 8)], 24.0)
    """
    n, longest, total = len(lengths), max(lengths), sum(lengths)
    if n == 1 or longest == 0:
        return Plan(())
    best = None
    for whole in {-(-longest // pieces) for pieces in range(1, min(MOST_PIECES, longest) + 1)}:
        counts = tuple(length // whole for length in lengths)
        rest = tuple(length % whole for length in lengths)
        for small in {-(-max(rest) // pieces) for pieces in range(1, min(MOST_REST, max(rest)) + 1)} or {0}:
            left = tuple(-(-r // small) if small else 0 for r in rest)
            busy = [sum(c) - min(c) for c in (counts, left)]
            waste = max((busy[0] * whole + busy[1] * small) / total / WASTE, 1.0)
            seconds = sum((b + n - 2) * _tick(words, link) for b, words in zip(busy, (whole, small), strict=True) if b)
            if best is None or (waste, seconds, -whole) < best[0]:
                best = (waste, seconds, -whole), ((whole, counts), (small, left))
    assert best is not None
    return Plan(tuple(Phase(words, counts, _ticks(counts)) for words, counts in best[1] if words and any(counts)))


def _ticks(counts: tuple[int, ...]) -> tuple[Tick, ...]:
    n, pieces = len(counts), max(counts)
    held = [[(n - 1, -k, i * pieces + k) for k in range(count)] for i, count in enumerate(counts)]
    ticks = []
    while any(held):
        moves = {i: max(held[i]) for i in range(n) if held[i]}
        sends, receives = [n * pieces] * n, [n * pieces] * n
        for i, move in moves.items():
            hops, order, piece = move
            held[i].remove(move)
            sends[i] = receives[(i + 1) % n] = piece
            if hops > 1:
                held[(i + 1) % n].append((hops - 1, order, piece))
        ticks.append(Tick(tuple((i, (i + 1) % n) for i in moves), tuple(sends), tuple(receives)))
    return tuple(ticks)
