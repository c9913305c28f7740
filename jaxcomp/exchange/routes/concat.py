"""via="concat": an all-reduce of the concatenation of all messages, without their padding.

Every worker writes its words at its own place of one buffer, and the buffers are added: 2 (n - 1) / n times the sum of
the real sizes is sent by each worker. The others' words at a place are zero, so the sum of bits is exact.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxcomp.exchange.axes import Axis, axis_index, varying, varying_axes
from jaxcomp.exchange.collectives import all_sum_words
from jaxcomp.exchange.links import Cost, Levels, Link, cost_of
from jaxcomp.exchange.routes.route import gathering_route
from jaxcomp.exchange.routes.unequal import from_buffers, gather_by, own_words, pieces_of
from jaxcomp.payloads.unequal import UnequalMessage

__all__ = ["CONCAT", "gather"]


def _exchange(message: UnequalMessage, axis: Axis, link: Link | Levels) -> Any:
    """The words of all workers without padding, put back into payloads stacked on a leading axis of n."""
    del link
    lengths = message.lengths
    longest, total = max(lengths), sum(lengths)
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    own = own_words(message, axis, longest)
    buffer = varying(jnp.zeros((total + longest,), jnp.uint32), varying_axes(own))
    buffer = lax.dynamic_update_slice(buffer, own, (jnp.asarray(starts, jnp.int32)[axis_index(axis)],))
    return from_buffers(message, pieces_of(all_sum_words(buffer[:total], axis), lengths), axis)


def _cost(lengths: tuple[int, ...], capacity: int, link: Link | Levels) -> Cost:
    """Expected time and bytes of this route for messages of these lengths (see `Route.cost`)."""
    del capacity
    n, total = len(lengths), 4 * sum(lengths)
    return cost_of("all_reduce", total, n, link)


gather = gather_by(_exchange, _cost)
CONCAT = gathering_route("concat", gather, _cost, buckets=False)
