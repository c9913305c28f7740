"""via="auto": each message goes a way that neither sends more than uncompressed f32 would nor takes longer.

n workers, a message of d entries in b bytes:

    linear      added on the way; of 16-bit floats two or three messages are gathered where that sends less
    other       gathered, (n - 1) b, as long as that is at most the 8 (n - 1) / n d of an all-reduce of f32: n b <= 8 d
    beyond      two shots, 2 (n - 1) / n b, if the algorithm can have its messages compressed once more, and if those
                are not unbiased with an omega above 4, which no memory would make good. They need another layout of
                the tree, so this is decided when the state is made (`taken`)
    else        decoded before they are sent, and added: as many bytes as without compression, and no more

Longer: by the model of `links`, on the link or the levels of links that the user states. On one link fewer bytes take
less time, unless a vector is so short that latency decides. On several levels they may take more: in an all-to-all
each device sends to each device of the other hosts, while a ring takes a byte out of a host once.

So a code of c bits an entry is gathered by up to 64 / c workers, and sparse messages of 8 bytes for each of r d entries
by up to 1 / r. Of a payload of several vectors the small dense leaves are linear, whatever the compressor is. Where the
lengths of messages differ, the route is the one with the least expected time, among those that send no more than f32.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax

from jaxcomp.arrays import wide_like
from jaxcomp.base import Compressor, State, for_worker, lengths, omega_of
from jaxcomp.exchange.axes import axis_index
from jaxcomp.exchange.collectives import gathered, gathers_for_less, has_ragged
from jaxcomp.exchange.links import DEFAULT, Cost, Levels, Link, cost_of
from jaxcomp.exchange.routes import concat, gather, ragged, ring
from jaxcomp.exchange.routes.route import (
    Arrived,
    Carried,
    Parcel,
    Route,
    Way,
    accepts_all,
    cuts_of,
    gathered_by,
    sums,
)
from jaxcomp.exchange.routes.two_shot import TWO_SHOT
from jaxcomp.exchange.routes.unequal import message_of

__all__ = ["AUTO", "costs", "fastest", "taken"]

# Variance, in |mean|^2, up to which an unbiased message is compressed once more: no memory takes it back, and the mean
# of n messages had but an n-th of it.
MOST_OMEGA = 4.0
ANY = Cost(math.inf, math.inf)
GATHERING = {"gather": gather, "concat": concat, "ring": ring, "ragged": ragged}


def costs(lengths: tuple[int, ...], capacity: int, link: Link | Levels = DEFAULT) -> dict[str, Cost]:
    """Expected time and bytes of every route that brings all messages to all workers.

    Args:
        lengths: uint32 words of each worker's message.
        capacity: words of a padded message.
        link: between workers.

    >>> {name: cost.sent_bytes for name, cost in costs((6, 2, 1), 6).items()}
    {'gather': 48.0, 'concat': 48.0, 'ring': 24.0, 'ragged': 24.0}
    """
    return {name: route.cost(lengths, capacity, link) for name, route in GATHERING.items()}


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


def taken(
    own: Sequence[tuple[Compressor, Any]],
    chunks: Sequence[tuple[Compressor, Any]],
    workers: int,
    link: Link | Levels,
) -> Route:
    """The route for a tree: two shots where a gather of some message would send more than f32 or take longer, and they
    send less and are faster.

    Args:
        own: compressor, and shape and dtype of what it compresses, of each group of the tree in its own layout.
        chunks: the same in the layout of two shots; none where these are refused.
        workers: n.
        link: between them.
    """
    if not chunks or workers < 3:  # two shots of two workers send as much as a gather
        return AUTO
    (compressor, like) = chunks[0]
    if compressor.spec.omega is not None and omega_of((compressor,), (like,)) > MOST_OMEGA:
        return AUTO
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
        return AUTO
    on = lambda kind, size: cost_of(kind, size, workers, link)
    auto = on("all_reduce", added + decoded), on("all_gather", gathered)
    chunk = sum(held_by(*pair) for pair in chunks)
    both = on("all_to_all", chunk), on("all_gather", chunk / workers)
    better = all(sum(getattr(x, of) for x in both) < sum(getattr(x, of) for x in auto) for of in Cost._fields)
    return TWO_SHOT if better else AUTO


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

    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(payload, jax.random.key(0), like)))


def _dense(like: Any) -> int:
    """Bytes of the array, in f32 or wider."""
    return max(4, like.dtype.itemsize) * like.size


# ------------------------------------------------------------------------------------------------
# In each round: by which way


def carry(parcels: Sequence[Parcel], way: Way, key: Any, state: State) -> Carried:
    """Carries what is linear, or decoded, in one sum, all else in one gathering (see `Route.carry`)."""
    del key
    how = [_how(parcel, way) for parcel in parcels]
    name = _gathering([parcel for parcel, each in zip(parcels, how, strict=True) if each == "gather"], way)
    if name is None:
        how = ["decoded" if each == "gather" else each for each in how]
    pairs = list(zip(parcels, how, strict=True))
    added = [_decoded(p, way) if each == "decoded" else p for p, each in pairs if each != "gather"]
    with jax.named_scope("sum"):
        totals, sent_bytes = sums(added, way)
    payloads, more_bytes = _gathered([p for p, each in pairs if each == "gather"], way, name)
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
    known = [lengths(parcel.compressor, parcel.like) for parcel in parcels]
    if way.workers == 1 or all(limit is None for limit in known):
        return "gather"
    message = message_of(tuple(parcel.payload for parcel in parcels), tuple(known), way.workers)
    dense = cost_of("all_reduce", sum(_dense(parcel.like) for parcel in parcels), way.workers, way.link)
    most = ANY if way.rereads else dense
    return fastest(message.lengths, message.capacity, way.link, most)


def _gathered(parcels: Sequence[Parcel], way: Way, name: str | None) -> tuple[tuple[Any, ...], Any]:
    """The payloads of all workers, and the bytes that a device sends."""
    if not parcels:
        return (), 0.0
    with jax.named_scope(str(name)):
        if name == "gather":  # without a warning of padding: it was chosen
            payloads = tuple(parcel.payload for parcel in parcels)
            return gathered(payloads, way.axis, way.replicas, way.buckets_of(parcels), cuts_of(parcels))
        return gathered_by(GATHERING[str(name)].gather, parcels, way)


def _decoded(parcel: Parcel, way: Way) -> Parcel:
    """The same with what this worker's message says in place of it."""
    compressor, like = parcel.compressor, wide_like(parcel.like)
    mine = for_worker(compressor, parcel.shared, axis_index(way.axis), way.workers)
    return parcel._replace(payload=compressor.decompress(parcel.payload, mine, like))


AUTO = Route("auto", carry, accepts_all)
