"""via="ragged": every worker sends its words to each other one, where the backend has a collective for it.

(n - 1) times its own size is sent by each worker, so the largest message decides how long it takes.
"""

from typing import Any

from jaxcomp.exchange import collectives
from jaxcomp.exchange.links import Cost, Levels, Link, cost_of
from jaxcomp.exchange.routes.route import Way
from jaxcomp.exchange.routes.unequal import from_buffers, own_words, pieces_of, unequal_route
from jaxcomp.payloads.unequal import UnequalMessage

__all__ = ["RAGGED"]


def _exchange(message: UnequalMessage, way: Way) -> Any:
    if not collectives.has_ragged():
        raise ValueError('via="ragged": this backend has no ragged_all_to_all; use via="ring"')
    lengths, axis = message.lengths, way.axis
    buffer = collectives.ragged_all_to_all(own_words(message, axis, max(lengths)), lengths, axis)
    return from_buffers(message, pieces_of(buffer, lengths), axis)


def _cost(lengths: tuple[int, ...], capacity: int, link: Link | Levels) -> Cost:
    del capacity
    n = len(lengths)
    return cost_of("all_gather", 4 * max(lengths), n, link)._replace(sent_bytes=(n - 1) / n * 4 * sum(lengths))


RAGGED = unequal_route("ragged", _exchange, _cost)
