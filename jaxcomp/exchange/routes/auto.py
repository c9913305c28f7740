"""via="auto": linear payloads are added on the way; the others are brought to all workers.

Of a payload of several vectors the small dense leaves are linear, whatever the compressor is. Where messages have equal
length, they are gathered (`two_shot` may be faster, but compresses once more); where their lengths differ, the route is
the one with the least expected time by the model of `links`.
"""

from collections.abc import Sequence
from typing import Any

from jaxcomp.base import State
from jaxcomp.exchange.collectives import has_ragged
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
    lengths_of,
    payloads_of,
)
from jaxcomp.exchange.routes.sum import SUM
from jaxcomp.exchange.routes.unequal import message_of
from jaxcomp.exchange.varying import axis_size

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
    """What is linear in one sum, all else in one gathering (see `Route.carry`)."""
    linear = [i for i, parcel in enumerate(parcels) if parcel.compressor.spec.linear]
    others = [i for i in range(len(parcels)) if i not in linear]
    summed = SUM.carry([parcels[i] for i in linear], way, key, state)
    payloads, sent_bytes, name = _gathered([parcels[i] for i in others], way) if others else ((), 0.0, "sum")
    found = dict(zip(linear, summed.arrived, strict=True)) | dict(zip(others, map(Arrived, payloads), strict=True))
    arrived = tuple(found[i] for i in range(len(parcels)))
    return Carried(arrived, name, summed.sent_bytes + sent_bytes, state)


def _gathered(parcels: Sequence[Parcel], way: Way) -> tuple[tuple[Any, ...], Any, str]:
    """The payloads of all workers, the bytes that a device sends, and the name of the route."""
    workers, lengths, name = axis_size(way.axis), lengths_of(parcels), "gather"
    if lengths is not None and workers > 1:
        message = message_of(payloads_of(parcels), lengths, workers)
        name = fastest(message.lengths, message.capacity, way.link)
    if name == "gather":  # without a warning of padding: it was chosen for its time
        return *gather.padded(parcels, way), name
    return *gathered_by(GATHERING[name].gather, parcels, way), name


AUTO = Route("auto", carry, accepts_all)
