"""The time of an exchange on links: the one model by which routes are chosen, advice is given, scale is computed.

A link carries a message of b bytes in latency + b / bandwidth, and all links work at once. A collective of operands of
b bytes at each of n workers has m messages one after the other, a worker sends s bytes in it, as the ledger counts, and
programs take f times as long for them as the bytes do:

    kind             m            s                  f
    all_reduce       2 (n - 1)    2 (n - 1) / n b    1.2    ring: reduce-scatter, then all-gather
    all_gather       n - 1        (n - 1) b          1.1    ring
    all_to_all       n - 1        (n - 1) / n b      1.1    pairwise
    reduce_scatter   n - 1        (n - 1) / n b      1.2    ring
    permute          1            b                  1.1

    t = m latency + f s / bandwidth

A partial permute of the ring schedule waits for both neighbours at every tick: f = 1.5. The factors were measured with
gloo, eight processes and links of 100 Mbit/s (`python -m experiments bench exchange --workers 8 --mbit 100`). Routes
are sums of such collectives, and each states its own in its file in `routes`: concat beats gather from about max w_i >
2.2 W / n on, for messages of w_i bytes, W = sum w_i.

Levels. Workers may be joined by several links: a level joins `width` members by a link of each, and the members of the
next one are these groups. So of an inner level "ici", width 8, and "dcn", width 4, a host of eight devices has one link
to the other hosts. m is the number of devices in one member, and u that of collectives which run beside each other in
it and share its link. For each collective the best of schedules that are in use is taken:

    ring       as above; a byte leaves a member once: u s on the link of each level, m latencies of the slowest level
    doubling   2 or 1 times log2(width) latencies of each level. Halves are summed, or pieces gathered, innermost first,
               so f u 2 (n - m) / n b or f u m (n - m) b leave a member of m devices
    pairwise   all-to-all: f u m (n - m) / n b leave it; n - 1 latencies
    Bruck      all-to-all with each byte handed on: f u m b log2(n / m) / 2; log2(width) latencies of each level

A schedule takes its latencies and the longest time of a level.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxcomp.checks import is_integer, is_number

__all__ = [
    "DEFAULT",
    "KINDS",
    "Cost",
    "Levels",
    "Link",
    "OnLinks",
    "Phase",
    "RingSchedule",
    "check_link",
    "check_links",
    "cost_of",
    "on_links",
    "placed_on",
    "ring_plan",
    "slowest",
    "stated_levels",
]

MOST_PIECES = 48  # of the longest message
MOST_REST = 8  # pieces of the longest rest
WAITS = 1.5  # time of a tick over that of its bytes
MOST_LATENCY, LEAST_BANDWIDTH = 60.0, 1.0  # no link is beyond these; latency and bandwidth in the wrong order are
WASTE = 1.04  # what a link carries, over the sum of the real sizes, that is worth more ticks to avoid


class Link(NamedTuple):
    """latency: seconds that a message takes besides its bytes; bandwidth: bytes per second of a member.

    width: how many members it joins, of one of several levels; None: as many as are left.

    The default is 1 ms and 100 Mbit/s. On links where latency decides, messages of equal length (via="gather") are as
    fast as any.
    """

    latency: float = 1e-3
    bandwidth: float = 12.5e6
    width: int | None = None


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
    if link.width is not None and not is_integer(link.width, 1):
        raise ValueError(f"{name}: link must have a width of at least 1, or None; got {link}")


class Levels(NamedTuple):
    """Several links as an exchange meets them. levels: innermost first, each with its width; along: names of those over
    which it goes."""

    levels: Mapping[str, Link]
    along: tuple[str, ...]


def check_links(name: str, link: Any) -> None:
    """Raises TypeError or ValueError, named after the function `name`, unless it is a link or levels of them."""
    levels = link if isinstance(link, Mapping) else {"data": link}
    if not levels or not all(isinstance(key, str) and key and "," not in key for key in levels):
        raise ValueError(f"{name}: link must map names without commas to links; got {link!r}")
    for each in levels.values():
        check_link(name, each)


def placed_on(name: str, link: Link | Mapping[str, Link], axes: Sequence[str], workers: int) -> Link | Levels:
    """The links of an exchange among so many workers along these mesh axes. Levels that have the names of all of these
    are those of the axes; else all levels together join the workers. A single worker has none.

    Raises:
        ValueError: widths that do not make so many workers.

    >>> few = {"ici": Link(1e-6, 5e10, 8), "dcn": Link(5e-5, 1.25e9)}
    >>> placed_on("mean", few, ("dcn",), 4).along, placed_on("mean", few, ("data",), 32).along
    (('dcn',), ('ici', 'dcn'))
    """
    if workers == 1:
        return link if isinstance(link, Link) else DEFAULT
    if isinstance(link, Link):
        if link.width not in (None, workers):
            raise ValueError(
                f"{name}: link must have as its width the {workers} workers along {', '.join(axes)}, or None; got "
                f"{link}. Links of several levels are given by name, say {{'ici': a, 'dcn': b}}"
            )
        return link
    along = tuple(key for key in link if key in axes)
    along = along if len(along) == len(axes) else tuple(link)
    try:
        own = stated_levels(name, {key: link[key] for key in along}, workers)
    except ValueError as error:
        told = f"{error}. It is along {', '.join(axes)}; levels of a hierarchy have the names of its axes"
        raise ValueError(told) from None
    last = max(list(link).index(key) for key in along)
    for key in list(link)[:last]:
        if key not in along and link[key].width is None:
            raise ValueError(f"{name}: link must have a width at {key!r}, inside of {', '.join(along)}; got {link!r}")
    return Levels(
        {key: own.get(key, each if each.width else each._replace(width=1)) for key, each in link.items()}, along
    )


def slowest(link: Link | Levels) -> Link:
    """The link at whose pace a ring goes, which crosses every level: the longest latency, the least bandwidth."""
    if isinstance(link, Link):
        return link
    used = [link.levels[name] for name in link.along if link.levels[name].width != 1]
    return Link(max(each.latency for each in used), min(each.bandwidth for each in used)) if used else DEFAULT


# ------------------------------------------------------------------------------------------------
# Collectives


class Kind(NamedTuple):
    """messages(n): one after the other; sent(b, n): bytes that a worker sends for operands of b bytes; factor: time of
    a program over that of its bytes."""

    messages: Callable[[int], float]
    sent: Callable[[float, int], float]
    factor: float


KINDS: dict[str, Kind] = {
    "all_reduce": Kind(lambda n: 2.0 * (n - 1), lambda b, n: 2 * (n - 1) / n * b, 1.2),
    "all_gather": Kind(lambda n: n - 1.0, lambda b, n: (n - 1.0) * b, 1.1),
    "all_to_all": Kind(lambda n: n - 1.0, lambda b, n: (n - 1) / n * b, 1.1),
    "reduce_scatter": Kind(lambda n: n - 1.0, lambda b, n: (n - 1) / n * b, 1.2),
    "permute": Kind(lambda n: min(1.0, n - 1.0), lambda b, n: b if n > 1 else 0.0, 1.1),
}


class Cost(NamedTuple):
    """seconds by the model; sent_bytes: what a worker sends in one exchange, mean over the workers."""

    seconds: float
    sent_bytes: float


def cost_of(kind: str, operand_bytes: float, workers: int, link: Link | Levels) -> Cost:
    """The cost of a collective by its best schedule (see the module).

    >>> cost_of("all_gather", 1e6, 3, Link(1e-3, 1.1e6))
    Cost(seconds=2.002, sent_bytes=2000000.0)
    """
    levels, along = link if isinstance(link, Levels) else ({"": link._replace(width=workers)}, ("",))
    seconds = on_links(kind, operand_bytes, along, levels).seconds
    return Cost(seconds, KINDS[kind].sent(operand_bytes, workers))


class OnLinks(NamedTuple):
    """A collective on levels of links. seconds: in all; each: seconds on the link of each level, latencies included;
    schedule: its name."""

    seconds: float
    each: dict[str, float]
    schedule: str


def stated_levels(name: str, link: Any, workers: int | None) -> dict[str, Link]:
    """The levels as they are stated, innermost first, each with its width, whose product is the number of workers.

    Args:
        name: of the function that the user called, for errors.
        link: a `Link`, or a mapping from names to them.
        workers: n; None: the product of the widths.

    Raises:
        TypeError, ValueError: no link, one out of range, or widths that do not make so many workers.

    >>> stated_levels("plan", {"ici": Link(1e-6, 5e10, 8), "dcn": Link(5e-5, 1.25e9)}, 32)["dcn"].width
    4
    """
    check_links(name, link)
    levels = dict(link) if isinstance(link, Mapping) else {"data": link}
    open_levels = [key for key, each in levels.items() if each.width is None]
    known = math.prod(each.width or 1 for each in levels.values())
    if len(open_levels) > 1 or (open_levels and (workers is None or workers % known)):
        raise ValueError(
            f"{name}: link must have a width at each level, but for one where workers are said and a multiple of the "
            f"others; got {link!r} and workers={workers}"
        )
    levels |= {key: levels[key]._replace(width=(workers or known) // known) for key in open_levels}
    made = math.prod(each.width or 1 for each in levels.values())
    if workers is not None and made != workers:
        raise ValueError(f"{name}: link must have widths whose product is the {workers} workers; it is {made}")
    return levels


def on_links(kind: str, operand_bytes: float, along: Sequence[str], levels: Mapping[str, Link]) -> OnLinks:
    """The time of a collective on levels of links, by the best schedule (see the module).

    along: names of the levels that take part; the other ones inside of these run the same beside each other.

    >>> on_links("all_gather", 1e6, ["data"], {"data": Link(1e-3, 1.1e6, 3)})
    OnLinks(seconds=2.002, each={'data': 2.002}, schedule='ring')
    """
    n, inside, used = 1, 1, []
    for name, link in levels.items():  # innermost first
        if name in along and (link.width or 1) > 1:
            used.append((name, link, n, inside))
            n *= link.width or 1
        elif name not in along:
            inside *= link.width or 1
    if not used:
        return OnLinks(0.0, {}, "nothing")
    factor, operand_bytes = KINDS[kind].factor, float(operand_bytes)
    rounds = {name: math.ceil(math.log2(link.width or 1)) for name, link, *_ in used}
    slowest = max(used, key=lambda level: level[1].latency)[0]
    in_ring = {name: KINDS[kind].messages(n) * (name == slowest) for name, *_ in used}
    halves = {"all_reduce": 2, "reduce_scatter": 1}.get(kind, 0)
    found = []

    def schedule(name: str, latencies: Mapping[str, float], leaving: Callable[[int], float]) -> None:
        wait = {level: latencies[level] * link.latency for level, link, *_ in used}
        busy = {level: factor * u * leaving(m) / link.bandwidth for level, link, m, u in used}
        each = {level: wait[level] + busy[level] for level in wait}
        found.append(OnLinks(sum(wait.values()) + max(busy.values()), each, name))

    if kind == "all_to_all":
        schedule("pairwise", in_ring, lambda m: m * (n - m) / n * operand_bytes)
        schedule("Bruck", rounds, lambda m: m * operand_bytes * math.log2(n / m) / 2)
    else:
        schedule("ring", in_ring, lambda m: KINDS[kind].sent(operand_bytes, n))
    if halves:
        twice = {level: halves * count for level, count in rounds.items()}
        schedule("halving", twice, lambda m: halves * (n - m) / n * operand_bytes)
    if kind == "all_gather":
        schedule("doubling", rounds, lambda m: m * (n - m) * operand_bytes)
    return min(found, key=lambda each: each.seconds)


# ------------------------------------------------------------------------------------------------
# Around a ring


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


class RingSchedule(NamedTuple):
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
def ring_plan(lengths: tuple[int, ...], link: Link = DEFAULT) -> RingSchedule:
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
        return RingSchedule(())
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
    return RingSchedule(
        tuple(Phase(words, counts, _ticks(counts)) for words, counts in best[1] if words and any(counts))
    )


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
