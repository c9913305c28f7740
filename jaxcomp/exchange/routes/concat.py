"""via="concat": an all-reduce of the concatenation of all messages, without their padding.

Every worker writes its words at its own place of one buffer, and the buffers are added: 2 (n - 1) / n times the sum of
the real sizes is sent by each worker. The others' words at a place are zero, so the sum of bits is exact.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxcomp.exchange.axes import axis_index, varying, varying_axes
from jaxcomp.exchange.collectives import all_sum_words
from jaxcomp.exchange.links import cost_of
from jaxcomp.exchange.routes.route import Way
from jaxcomp.exchange.routes.unequal import from_buffers, own_words, pieces_of, unequal_route
from jaxcomp.payloads.unequal import UnequalMessage

__all__ = ["CONCAT"]


def _exchange(message: UnequalMessage, way: Way) -> Any:
    lengths, axis = message.lengths, way.axis
    longest, total = max(lengths), sum(lengths)
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    own = own_words(message, axis, longest)
    buffer = varying(jnp.zeros((total + longest,), jnp.uint32), varying_axes(own))
    buffer = lax.dynamic_update_slice(buffer, own, (jnp.asarray(starts, jnp.int32)[axis_index(axis)],))
    return from_buffers(message, pieces_of(all_sum_words(buffer[:total], axis), lengths), axis)


CONCAT = unequal_route(
    "concat", _exchange, lambda lengths, capacity, link: cost_of("all_reduce", 4 * sum(lengths), len(lengths), link)
)
