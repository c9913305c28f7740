"""via="ragged": every worker sends its words to each other one, where the backend has a collective for it.

(n - 1) times its own size is sent by each worker, so the largest message decides how long it takes.
"""

from collections.abc import Sequence
from typing import Any

from jaxcomp.exchange import collectives
from jaxcomp.exchange.axes import Axis
from jaxcomp.exchange.links import Cost, Levels, Link, cost_of
from jaxcomp.exchange.routes.route import Parcel, Way, gathering_route
from jaxcomp.exchange.routes.unequal import from_buffers, gather_by, own_words, pieces_of
from jaxcomp.payloads.unequal import UnequalMessage

__all__ = ["RAGGED"]


def _exchange(message: UnequalMessage, axis: Axis, link: Link | Levels) -> Any:
    """The words of all workers without padding, put back into payloads stacked on a leading axis of n."""
    del link
    lengths = message.lengths
    buffer = collectives.ragged_all_to_all(own_words(message, axis, max(lengths)), lengths, axis)
    return from_buffers(message, pieces_of(buffer, lengths), axis)


def _cost(lengths: tuple[int, ...], capacity: int, link: Link | Levels) -> Cost:
    """Expected time and bytes of this route for messages of these lengths (see `Route.cost`)."""
    del capacity
    n = len(lengths)
    return cost_of("all_gather", 4 * max(lengths), n, link)._replace(sent_bytes=(n - 1) / n * 4 * sum(lengths))


def _gather(parcels: Sequence[Parcel], way: Way) -> tuple[tuple[Any, ...], Any]:
    """All payloads, on a backend that has `ragged_all_to_all`; ValueError on another."""
    if not collectives.has_ragged():
        raise ValueError('via="ragged": this backend has no ragged_all_to_all; use via="ring"')
    return gather_by(_exchange, _cost)(parcels, way)


RAGGED = gathering_route("ragged", _gather, _cost, buckets=False)
