"""Routes, the ways in which the messages of all workers, or their sum, reach all of them; and the one by default.

Each of the others has a file of its own. Most routes bring all payloads to all workers. Such a route is a function
`gather` and one line with `gathering_route`. The driver then decodes and adds the payloads, on every worker alike.

via="auto" chooses for each message a way that neither sends more than uncompressed f32 would nor takes longer. For n
workers and a message of d entries in b bytes:

    linear      added on the way; of 16-bit floats two or three messages are gathered where that sends less
    other       gathered, (n - 1) b, as long as that is at most the 8 (n - 1) / n d of an all-reduce of f32: n b <= 8 d
    beyond      two shots, 2 (n - 1) / n b, if the algorithm can have its messages compressed once more, and if those
                are not unbiased with an omega above 4, which no memory would make good. They need another layout of
                the tree, so this is decided when the state is made (`two_shots_pay`)
    else        decoded before they are sent, and added: as many bytes as without compression, and no more

Longer: by the model of `links`, on the link or the levels of links that the user states. On one link fewer bytes take
less time, unless a vector is so short that latency decides. On several levels they may take more: in an all-to-all
each device sends to each device of the other hosts, while a ring takes a byte out of a host once.

So a code of c bits an entry is gathered by up to 64 / c workers, and sparse messages of 8 bytes for each of r d entries
by up to 1 / r. Of a payload of several vectors the small dense leaves are linear, whatever the compressor is. Where the
lengths of messages differ, the route is the one with the least expected time, among those that send no more than f32.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast

import jax

from jaxcomp.arrays import bounded, wide, wide_like
from jaxcomp.backend import SparseSum
from jaxcomp.backend_gpu import TOGETHER
from jaxcomp.base import Compressor, State, for_worker, lengths, omega_of
from jaxcomp.exchange.axes import Axis, axis_index
from jaxcomp.exchange.collectives import gather_tree, gathered, gathers_for_less, has_ragged, summed
from jaxcomp.exchange.links import DEFAULT, Cost, Levels, Link, cost_of
from jaxcomp.groups import Layout
from jaxcomp.payloads import lane_bytes, per_tile
from jaxcomp.payloads.unequal import message_of

__all__ = [
    "AUTO",
    "NAMES",
    "ROUTES",
    "Arrived",
    "Carried",
    "Gather",
    "Parcel",
    "Route",
    "Way",
    "costs",
    "cuts_of",
    "fastest",
    "gathered_by",
    "gathering_route",
    "held_by",
    "lengths_of",
    "route_number",
    "sums",
    "two_shots_pay",
]

Array = jax.Array
# Variance, in |mean|^2, up to which an unbiased message is compressed once more: no memory takes it back, and the mean
# of n messages had but an n-th of it.
MOST_OMEGA = 4.0
ANY = Cost(math.inf, math.inf)
LAST = 2**31 - 1  # number of a bucket behind all others


class Way(NamedTuple):
    """Everything a route needs besides the messages. Static, except for the weights.

    axis: of the workers.
    workers: how many there are.
    weights: [n], of all workers, with sum one, in the widest dtype of the messages; None for equal ones.
    link: between workers, for routes that have a choice.
    replicas: mesh axes on which payloads are equal; in gathers and sums the devices there share the work.
    buckets: whether groups of different buckets have collectives of their own.
    exact: sums of 16-bit floats are not rounded once more, for algorithms with a memory of what was sent.
    outer: other mesh axes over which messages differ.
    rereads: whether the algorithm reads the payloads themselves (`base.Sent.read_by`), so that a mean is not enough.
    """

    axis: Axis
    workers: int
    weights: Array | None = None
    link: Link | Levels = DEFAULT
    replicas: tuple[str, ...] = ()
    buckets: bool = False
    exact: bool = False
    outer: tuple[str, ...] = ()
    rereads: bool = False

    @property
    def share(self) -> float:
        """Factor on each message before it is added: the largest power of two that is at most 1/n; 1 where there are
        `weights`, which add up to one.

        1/n comes in two parts, this one and that of `mean_of`. Products with it are exact, so that sums are the same
        bit for bit wherever they are compiled, and none overflows.
        """
        return 1.0 if self.weights is not None else 0.5 ** (self.workers - 1).bit_length()

    def mean_of(self, total: Any) -> Any:
        """The mean, from a sum of such shares (an array or a `SparseSum`): times 2^k/n < 2, and saturated."""
        last = 1.0 if self.weights is not None else 1 / (self.workers * self.share)
        if last == 1:
            return total
        return total * last if isinstance(total, SparseSum) else bounded(total * last)  # the sum when it is made

    def buckets_of(self, parcels: "Sequence[Parcel]") -> list[int] | None:
        """The bucket of each array of the payloads, that of small leaves from everywhere, which are ready last, as the
        last one; None where all share their collectives."""
        if not self.buckets:
            return None
        return [parcel.bucket or LAST for parcel in parcels for _ in jax.tree.leaves(parcel.payload)]


class Parcel(NamedTuple):
    """The part of a message that is of one group of leaves, as one worker sends it.

    compressor: of the group. payload: what it made of the message. shared: its shared state, with the plans of all
    workers. like: shape and dtype of the message. bucket: number of the bucket of the group.
    """

    compressor: Compressor
    payload: Any
    shared: Any
    like: jax.ShapeDtypeStruct
    bucket: int = 0


class Arrived(NamedTuple):
    """The part of what a route brought that is of one group: one of these.

    payloads: of all workers, stacked on a leading axis of n and equal on all of them.
    total: their sum, as one payload, where each has its weight already, or `Way.share` all.
    mean: the mean itself, in f32 (f64 for f64 messages), equal on all workers.
    """

    payloads: Any = None
    total: Any = None
    mean: Any = None


class Carried(NamedTuple):
    """All that a route brought.

    arrived: of each parcel.
    route: name of the route that was taken, one of ROUTES or of your own.
    sent_bytes: what a device sends, all hops included, mean over the workers. Traced for "ladder".
    state: of the route, for the next round.
    lane_bytes, code_bits: of further messages than those of the worker (a second compression).
    """

    arrived: tuple[Arrived, ...]
    route: str
    sent_bytes: float | Array
    state: State = State()
    lane_bytes: int = 0
    code_bits: Any = 0


class Gather(Protocol):
    """Brings the payloads of all workers to all of them.

    Args:
        parcels: of this worker.
        way: see `Way`.

    Returns:
        The payload of each parcel, stacked on a leading axis of n, equal on all workers; and the bytes that a device
        sends.
    """

    def __call__(self, parcels: Sequence[Parcel], way: Way) -> tuple[tuple[Any, ...], float | Array]: ...


class Route(NamedTuple):
    """One way to form the mean of messages.

    name: what users ask for.
    carry(parcels, way, key, state): brings the messages, or their sum, to all workers. All that can share a collective
        comes at once. key: private to this worker and round, for routes that compress once more. state: of the route.
    refuses(compressor, roles): why messages of this compressor cannot go this way, in a sentence with the cure; None
        where they can. Asked when a transformation is built, with the compressor as the user gave it and the
        algorithm's roles.
    layout(layout, workers): in which messages are compressed; None: in the one that they have.
    init(shared_key, compressors, like): state of the route for messages of `like`.
    cost(lengths, capacity, link): expected time and bytes for messages of so many uint32 words, `capacity` with
        padding; None where it depends on what is in them.
    gather: of a route that brings all payloads.
    buckets: whether groups of leaves may cross by themselves (`bucket_bytes`): nothing is chosen, cut or coded for all
        messages together.
    """

    name: str
    carry: Callable[[Sequence[Parcel], Way, Array, State], Carried]
    refuses: Callable[[Compressor, Mapping[str, Any]], str | None]
    layout: Callable[[Layout, int], Layout] | None = None
    init: Callable[[Array, tuple[Compressor, ...], tuple[Any, ...]], State] | None = None
    cost: Callable[[tuple[int, ...], int, Link | Levels], Cost] | None = None
    gather: Gather | None = None
    buckets: bool = False


ROUTES: dict[str, Route] = {}  # all but "auto", filled by `jaxcomp.exchange.routes`
NAMES: list[str] = []  # as a state numbers them; those of your own come last


def route_number(route: str) -> int:
    """The number of a route in a state, by its name."""
    if route not in NAMES:
        NAMES.append(route)
    return NAMES.index(route)


def accepts_all(compressor: Compressor, roles: Mapping[str, Any]) -> str | None:
    """`Route.refuses` of a route that carries every payload."""
    del compressor, roles
    return None


def lengths_of(parcels: Sequence[Parcel]) -> tuple[Any, ...] | None:
    """How much of each payload is padding (`base.lengths`); None where all are equally long on all workers."""
    each = tuple(lengths(parcel.compressor, parcel.like) for parcel in parcels)
    return each if any(limit is not None for limit in each) else None


def sums(parcels: Sequence[Parcel], way: Way) -> tuple[tuple[Any, ...], float]:
    """The sum over the workers of the payload of each parcel, and the bytes that a device sends."""
    kind = wide(*(parcel.like.dtype for parcel in parcels))  # f64 messages are added in f64
    payloads, buckets = tuple(parcel.payload for parcel in parcels), way.buckets_of(parcels)
    return summed(payloads, way.axis, way.weights, way.replicas, buckets, way.exact, kind, way.share)


def cuts_of(parcels: Sequence[Parcel]) -> list[int]:
    """How each array of the payloads can be cut (`payloads.per_tile`), so that it may cross later, in sections; 0 for
    what must cross whole: all that is not coded entry by entry, and stacks."""
    found: list[int] = []
    for compressor, payload, _, like, _ in parcels:
        arrays, dense = jax.tree.leaves(payload), compressor.spec.entrywise and len(like.shape) == 1
        each = per_tile(payload) if dense else [0] * len(arrays)
        found += [n if x.size * TOGETHER == n * like.size else 0 for x, n in zip(arrays, each, strict=True)]
    return found


def gathered_by(gather: Gather, parcels: Sequence[Parcel], way: Way) -> tuple[tuple[Any, ...], float | Array]:
    """All payloads, by `gather`; where nothing crosses, without it."""
    payloads = tuple(parcel.payload for parcel in parcels)
    if way.workers == 1 or lane_bytes(payloads) == 0:
        return gather_tree(payloads, way.axis), 0.0
    return gather(parcels, way)


def gathering_route(
    name: str,
    gather: Gather,
    cost: Callable[[tuple[int, ...], int, Link | Levels], Cost] | None = None,
    layout: Callable[[Layout, int], Layout] | None = None,
    buckets: bool = True,
) -> Route:
    """The route that brings all payloads to all workers by `gather`. The others are members of `Route`."""

    def carry(parcels, way, key, state):
        del key
        payloads, sent_bytes = gathered_by(gather, parcels, way)
        return Carried(tuple(map(Arrived, payloads)), name, sent_bytes, state)

    return Route(name, carry, accepts_all, layout, cost=cost, gather=gather, buckets=buckets)


# ------------------------------------------------------------------------------------------------
# via="auto", from here on: what each way costs


def costs(lengths: tuple[int, ...], capacity: int, link: Link | Levels = DEFAULT) -> dict[str, Cost]:
    """Expected time and bytes of every route that gathers and has a cost.

    Args:
        lengths: uint32 words of each worker's message.
        capacity: words of a padded message.
        link: between workers.

    >>> {name: cost.sent_bytes for name, cost in costs((6, 2, 1), 6).items()}
    {'gather': 48.0, 'concat': 48.0, 'ring': 24.0, 'ragged': 24.0}
    """
    return {
        name: route.cost(lengths, capacity, link)
        for name, route in ROUTES.items()
        if route.cost is not None and route.gather is not None
    }


def fastest(lengths: tuple[int, ...], capacity: int, link: Link | Levels = DEFAULT, most: Cost = ANY) -> str | None:
    """Name of the route with the least expected time, among those that the backend has and that neither send more nor
    take longer than `most`; gather for equal lengths; None where there is none.
    """
    each = {
        name: cost
        for name, cost in costs(lengths, capacity, link).items()
        if cost.sent_bytes <= most.sent_bytes and cost.seconds <= most.seconds
    }
    if len(set(lengths)) == 1:
        return "gather" if "gather" in each else None
    there = [name for name in each if name != "ragged" or has_ragged()]
    return min(there, key=lambda name: each[name].seconds, default=None)


# ------------------------------------------------------------------------------------------------
# When a state is made: in which layout


def two_shots_pay(
    own: Sequence[tuple[Compressor, Any]],
    chunks: Sequence[tuple[Compressor, Any]],
    workers: int,
    link: Link | Levels,
) -> bool:
    """Whether two shots send less and are faster, for a tree of which a gather of some message would send more than f32
    or take longer.

    Args:
        own: compressor, and shape and dtype of what it compresses, of each group of the tree in its own layout.
        chunks: the same in the layout of two shots.
        workers: n.
        link: between them.
    """
    if omega_of(*zip(*chunks, strict=True)) > MOST_OMEGA:
        return False
    added, gathered, decoded = 0, 0, 0
    for each, like in own:
        held = held_by(each, like)
        if each.spec.linear:
            added += held
        elif _is_within(held, like, workers, link):
            gathered += held
        else:
            decoded += _dense(like)
    if not decoded:
        return False
    on = lambda kind, size: cost_of(kind, size, workers, link)
    auto = on("all_reduce", added + decoded), on("all_gather", gathered)
    chunk = sum(held_by(*pair) for pair in chunks)
    both = on("all_to_all", chunk), on("all_gather", chunk / workers)
    return all(sum(getattr(x, of) for x in both) < sum(getattr(x, of) for x in auto) for of in Cost._fields)


def _is_within(held: float, like: Any, workers: int, link: Link | Levels) -> bool:
    """Whether a gather of messages of so many bytes sends no more than a sum of arrays like this one in f32, or wider,
    and takes no longer: which follows on one link, where it has half the latencies."""
    dense = _dense(like)
    if workers * held > 2 * dense:
        return False
    if isinstance(link, Link):
        return True
    each = cost_of("all_gather", held, workers, link), cost_of("all_reduce", dense, workers, link)
    return each[0].seconds <= each[1].seconds


def held_by(compressor: Compressor, like: Any) -> int:
    """Bytes of what a compressor makes of an array of this shape and dtype."""

    def payload(key: Any, x: Any) -> Any:
        state = compressor.init(key, like)
        return compressor.compress(key, x, State(state.local, for_worker(compressor, state.shared, 0)))[0]

    return lane_bytes(jax.eval_shape(payload, jax.random.key(0), like))


def _dense(like: Any) -> int:
    """Bytes of the array, in f32 or wider."""
    return max(4, like.dtype.itemsize) * like.size


# ------------------------------------------------------------------------------------------------
# In each round: by which way


def carry_auto(parcels: Sequence[Parcel], way: Way, key: Any, state: State) -> Carried:
    """Carries what is linear, or decoded, in one sum, all else in one gathering (see `Route.carry`)."""
    del key
    how = [_how(parcel, way) for parcel in parcels]
    gather = [parcel for parcel, each in zip(parcels, how, strict=True) if each == "gather"]
    name = _gathering(gather, way)
    if name is None:
        how, gather = ["decoded" if each == "gather" else each for each in how], []
    pairs = zip(parcels, how, strict=True)
    added = [_decoded(p, way) if each == "decoded" else p for p, each in pairs if each != "gather"]
    with jax.named_scope("sum"):
        totals, sent_bytes = sums(added, way)
    payloads, more_bytes = (), 0.0
    with jax.named_scope(str(name)):
        if gather and name == "gather":  # not by `GATHER.gather`, which warns of padding: here that was weighed
            payloads = tuple(parcel.payload for parcel in gather)
            buckets, cuts = way.buckets_of(gather), cuts_of(gather)
            payloads, more_bytes = gathered(payloads, way.axis, way.replicas, buckets, cuts)
        elif gather:
            payloads, more_bytes = gathered_by(cast(Gather, ROUTES[str(name)].gather), gather, way)
    total, payload, arrived = iter(totals), iter(payloads), []
    for each in how:
        brought = next(payload if each == "gather" else total)
        if each == "decoded":
            arrived.append(Arrived(mean=way.mean_of(brought)))
        else:
            arrived.append(Arrived(brought) if each == "gather" else Arrived(total=brought))
    return Carried(tuple(arrived), name if name and payloads else "sum", sent_bytes + more_bytes, state)


def _how(parcel: Parcel, way: Way) -> str:
    """Way of one message: "sum", "gather" or "decoded"."""
    compressor, leaves = parcel.compressor, jax.tree.leaves(parcel.payload)
    if compressor.spec.linear:
        narrow = way.workers in (2, 3) and all(x.dtype.itemsize < 4 for x in leaves)
        return "gather" if narrow and gathers_for_less(way.workers, way.exact) else "sum"
    # How much of a message of unequal length travels is decided for all of them together.
    free = way.workers == 1 or compressor.lengths is not None or way.rereads
    held = sum(x.size * x.dtype.itemsize for x in leaves)
    return "gather" if free or _is_within(held, parcel.like, way.workers, way.link) else "decoded"


def _gathering(parcels: Sequence[Parcel], way: Way) -> str | None:
    """Name of the route that brings messages to all; None where a sum of f32 sends less than each or is faster."""
    known = lengths_of(parcels)
    if way.workers == 1 or known is None:
        return "gather"
    message = message_of(tuple(parcel.payload for parcel in parcels), known, way.workers)
    dense = cost_of("all_reduce", sum(_dense(parcel.like) for parcel in parcels), way.workers, way.link)
    most = ANY if way.rereads else dense
    return fastest(message.lengths, message.capacity, way.link, most)


def _decoded(parcel: Parcel, way: Way) -> Parcel:
    """The same with what this worker's message says in place of it."""
    compressor, like = parcel.compressor, wide_like(parcel.like)
    mine = for_worker(compressor, parcel.shared, axis_index(way.axis), way.workers)
    return parcel._replace(payload=compressor.decompress(parcel.payload, mine, like))


AUTO = Route("auto", carry_auto, accepts_all, buckets=True)
