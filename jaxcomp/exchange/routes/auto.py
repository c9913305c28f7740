"""via="auto": linear payloads are added on the way; the others are brought to all workers.

Of a payload of several vectors the small dense leaves are linear, whatever the compressor is. Where messages have equal
length, they are gathered (`two_shot` may be faster, but compresses once more); where their lengths differ, the route is
the one with the least expected time by the model of `links`.
"""

from collections.abc import Sequence
from typing import Any

import jax

from jaxcomp.base import State, lengths
from jaxcomp.exchange.axes import axis_size
from jaxcomp.exchange.collectives import gathered, has_ragged
from jaxcomp.exchange.links import DEFAULT, Cost, Link
from jaxcomp.exchange.routes import concat, gather, ragged, ring
from jaxcomp.exchange.routes.route import (
    Arrived,
    Carried,
    Parcel,
    Route,
    Way,
    accepts_all,
    gathered_by,
)
from jaxcomp.exchange.routes.sum import sums
from jaxcomp.exchange.routes.unequal import message_of

__all__ = ["AUTO", "costs", "fastest"]

GATHERING = {"gather": gather, "concat": concat, "ring": ring, "ragged": ragged}


def costs(lengths: tuple[int, ...], capacity: int, link: Link = DEFAULT) -> dict[str, Cost]:
    """Expected time and bytes of every route that brings all messages to all workers.

    Args:
        lengths: uint32 words of each worker's message.
        capacity: words of a padded message.
        link: latency and bandwidth.

    >>> {name: cost.sent_bytes for name, cost in costs((6, 2, 1), 6).items()}
    {'gather': 48.0, 'concat': 48.0, 'ring': 24.0, 'ragged': 24.0}
    """
    return {name: route.cost(lengths, capacity, link) for name, route in GATHERING.items()}


def fastest(lengths: tuple[int, ...], capacity: int, link: Link = DEFAULT) -> str:
    """Name of the route with the least expected time, among those that the backend has; gather for equal lengths."""
    if len(set(lengths)) == 1:
        return "gather"
    each = costs(lengths, capacity, link)
    return min((name for name in each if name != "ragged" or has_ragged()), key=lambda name: each[name].seconds)


def carry(parcels: Sequence[Parcel], way: Way, key: Any, state: State) -> Carried:
    """Carries what is linear in one sum, all else in one gathering (see `Route.carry`)."""
    del key
    linear = [parcel.compressor.spec.linear for parcel in parcels]
    added = [parcel for parcel, is_linear in zip(parcels, linear, strict=True) if is_linear]
    others = [parcel for parcel, is_linear in zip(parcels, linear, strict=True) if not is_linear]
    with jax.named_scope("sum"):
        totals, sent_bytes = sums(added, way)
    payloads, more_bytes, name = _gathered(others, way) if others else ((), 0.0, "sum")
    total, payload = iter(totals), iter(payloads)
    arrived = [Arrived(total=next(total)) if is_linear else Arrived(next(payload)) for is_linear in linear]
    return Carried(tuple(arrived), name, sent_bytes + more_bytes, state)


def _gathered(parcels: Sequence[Parcel], way: Way) -> tuple[tuple[Any, ...], Any, str]:
    """The payloads of all workers, the bytes that a device sends, and the name of the route."""
    workers, known = axis_size(way.axis), [lengths(parcel.compressor, parcel.like) for parcel in parcels]
    payloads = tuple(parcel.payload for parcel in parcels)
    name = "gather"
    if workers > 1 and any(limit is not None for limit in known):
        message = message_of(payloads, tuple(known), workers)
        name = fastest(message.lengths, message.capacity, way.link)
    with jax.named_scope(name):
        if name == "gather":  # without a warning of padding: it was chosen for its time
            return *gathered(payloads, way.axis, way.replicas, way.buckets_of(parcels)), name
        return *gathered_by(GATHERING[name].gather, parcels, way), name


AUTO = Route("auto", carry, accepts_all)
