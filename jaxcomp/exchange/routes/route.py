"""Routes: the ways in which the messages of all workers, or their sum, reach all of them; one file for each.

Most routes bring all payloads to all workers. Such a route is a function `gather` and one line with `gathering_route`.
The driver then decodes and adds the payloads, on every worker alike.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax

from jaxcomp.arrays import bounded, wide
from jaxcomp.backend import SparseSum
from jaxcomp.backend_gpu import TOGETHER
from jaxcomp.base import Compressor, State, lengths
from jaxcomp.exchange.axes import Axis
from jaxcomp.exchange.collectives import all_gather, summed
from jaxcomp.exchange.links import DEFAULT, Cost, Levels, Link
from jaxcomp.groups import Layout
from jaxcomp.payloads import lane_bytes, per_tile

__all__ = [
    "Arrived",
    "Carried",
    "Gather",
    "Parcel",
    "Route",
    "Way",
    "accepts_all",
    "cuts_of",
    "gathered_by",
    "gathering_route",
    "lengths_of",
    "payloads_of",
    "sums",
]

Array = jax.Array


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
        """Weight of each message where messages are added, besides `weights`: 2^-k, at most 1/n; 1 where there are any.

        1/n comes in two parts, this one and that of `mean_of`. Products with it are exact, so that sums are the same
        bit for bit wherever they are compiled, and none overflows.
        """
        return 1.0 if self.weights is not None else 0.5 ** (self.workers - 1).bit_length()

    def mean_of(self, total: Any) -> Any:
        """The mean, from a sum of such shares (an array or a `SparseSum`): times 2^k/n < 2, and saturated."""
        last = 1.0 if self.weights is not None else 1 / (self.workers * self.share)
        if last == 1 or isinstance(total, SparseSum):  # which is saturated when it is made
            return total if last == 1 else total * last
        return bounded(total * last)

    def buckets_of(self, parcels: "Sequence[Parcel]") -> list[int] | None:
        """The bucket of each array of the payloads; None where all share their collectives."""
        if not self.buckets:
            return None
        return [parcel.bucket for parcel in parcels for _ in jax.tree.leaves(parcel.payload)]


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
    route: name of the route that was taken, one of ROUTES.
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
    """

    name: str
    carry: Callable[[Sequence[Parcel], Way, Array, State], Carried]
    refuses: Callable[[Compressor, Mapping[str, Any]], str | None]
    layout: Callable[[Layout, int], Layout] | None = None
    init: Callable[[Array, tuple[Compressor, ...], tuple[Any, ...]], State] | None = None
    cost: Callable[[tuple[int, ...], int, Link | Levels], Cost] | None = None


def accepts_all(compressor: Compressor, roles: Mapping[str, Any]) -> str | None:
    """`Route.refuses` of a route that carries every payload."""
    del compressor, roles
    return None


def payloads_of(parcels: Sequence[Parcel]) -> tuple[Any, ...]:
    """The payload of each parcel."""
    return tuple(parcel.payload for parcel in parcels)


def lengths_of(parcels: Sequence[Parcel]) -> tuple[Any, ...] | None:
    """How much of each payload is padding (`base.lengths`); None where all are equally long on all workers."""
    each = tuple(lengths(parcel.compressor, parcel.like) for parcel in parcels)
    return each if any(limit is not None for limit in each) else None


def sums(parcels: Sequence[Parcel], way: Way) -> tuple[tuple[Any, ...], float]:
    """The sum over the workers of the payload of each parcel, and the bytes that a device sends."""
    kind = wide(*(parcel.like.dtype for parcel in parcels))  # f64 messages are added in f64
    payloads, buckets = payloads_of(parcels), way.buckets_of(parcels)
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
    payloads = payloads_of(parcels)
    if way.workers == 1 or lane_bytes(payloads) == 0:
        return all_gather(payloads, way.axis), 0.0
    return gather(parcels, way)


def gathering_route(
    name: str,
    gather: Gather,
    cost: Callable[[tuple[int, ...], int, Link | Levels], Cost] | None = None,
    layout: Callable[[Layout, int], Layout] | None = None,
) -> Route:
    """The route that brings all payloads to all workers by `gather`."""

    def carry(parcels, way, key, state):
        del key
        payloads, sent_bytes = gathered_by(gather, parcels, way)
        return Carried(tuple(map(Arrived, payloads)), name, sent_bytes, state)

    return Route(name, carry, accepts_all, layout, cost=cost)
