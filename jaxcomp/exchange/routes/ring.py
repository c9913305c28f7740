"""via="ring": every worker passes on pieces of messages to the next, and no padding.

Each link carries what is real, once: about the sum of the real sizes. The schedule is fixed when the program is built
(`links.ring_plan`), with one partial permute a tick.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.exchange.axes import Axis, axis_index, varying, varying_axes
from jaxcomp.exchange.collectives import send
from jaxcomp.exchange.links import Cost, Levels, Link, Phase, ring_plan, slowest
from jaxcomp.exchange.routes.route import Way
from jaxcomp.exchange.routes.unequal import from_buffers, own_words, unequal_route
from jaxcomp.payloads.unequal import UnequalMessage

__all__ = ["RING"]

Array = jax.Array


def _exchange(message: UnequalMessage, way: Way) -> Any:
    lengths, axis = message.lengths, way.axis
    n, number = len(lengths), axis_index(axis)
    phases = ring_plan(lengths, slowest(way.link)).phases
    own = own_words(message, axis, max(lengths) + sum(phase.words * phase.pieces for phase in phases))
    start = jnp.zeros((), jnp.int32)
    arrived: list[list[Array]] = [[] for _ in lengths]
    for phase in phases:
        room = phase.words * phase.pieces
        mine = lax.dynamic_slice(own, (start,), (room,)).reshape(phase.pieces, phase.words)
        start = start + jnp.asarray(phase.counts, jnp.int32)[number] * phase.words
        whole = _around(mine, phase, number, axis)[:-1].reshape(n, room)
        for i, count in enumerate(phase.counts):
            arrived[i].append(whole[i, : count * phase.words])
    return from_buffers(message, [jnp.concatenate(words) for words in arrived], axis)


def _around(mine: Array, phase: Phase, number: Array, axis: Axis) -> Array:
    """All pieces of all workers, and one place for what a worker sends or receives when it does neither."""
    n, zero = len(phase.counts), jnp.zeros((), number.dtype)
    pieces = varying(jnp.zeros((n * phase.pieces + 1, phase.words), jnp.uint32), varying_axes(mine))
    pieces = lax.dynamic_update_slice(pieces, mine, (number * phase.pieces, zero))
    for tick in phase.ticks:
        out = jnp.asarray(tick.sends, jnp.int32)[number]
        place = jnp.asarray(tick.receives, jnp.int32)[number]
        arrived = send(lax.dynamic_index_in_dim(pieces, out, keepdims=False), tick.pairs, axis)
        pieces = lax.dynamic_update_index_in_dim(pieces, arrived, place, 0)
    return pieces


def _cost(lengths: tuple[int, ...], capacity: int, link: Link | Levels) -> Cost:
    del capacity
    one = slowest(link)
    plan = ring_plan(lengths, one)
    return Cost(plan.seconds(one), plan.sent_bytes)


RING = unequal_route("ring", _exchange, _cost)
