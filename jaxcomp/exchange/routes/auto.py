"""via="auto": linear payloads are added on the way; the others are brought to all workers.

Of a payload of several vectors the small dense leaves are linear, whatever the compressor is. Where messages have equal
length, they are gathered (`two_shot` may be faster, but compresses once more); where their lengths differ, the route is
the one with the least expected time by the model of `links`.
"""

from typing import Any

import jax

from jaxcomp.arrays import wide
from jaxcomp.base import lengths
from jaxcomp.exchange.collectives import has_ragged, share_of
from jaxcomp.exchange.lanes import gathered, summed
from jaxcomp.exchange.links import DEFAULT, Cost, Link
from jaxcomp.exchange.routes import concat, gather, ragged, ring
from jaxcomp.exchange.routes.route import (
    Call,
    Carried,
    Outgoing,
    Route,
    accepts_all,
    gathered_by,
    stateless,
)
from jaxcomp.exchange.routes.sum import SUM
from jaxcomp.exchange.routes.unequal import message_of
from jaxcomp.exchange.varying import axis_size
from jaxcomp.payloads import Dense, Leaves

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


def carry(out: Outgoing, call: Call) -> Carried:
    """The messages, part by part in the way that suits it (see `Route.carry`)."""
    if out.compressor.spec.linear:
        return SUM.carry(out, call)
    limits = lengths(out.compressor, out.like)
    if not isinstance(out.payload, Leaves):
        payloads, sent_bytes, name = _gathered(out.payload, limits, call)
        return Carried(payloads, call.weights, name, sent_bytes, out.state)
    dense, vectors = out.payload
    dtype, share = wide(*(leaf.dtype for leaf in jax.tree.leaves(out.like))), share_of(call.axis, call.weights)
    total, dense_bytes = summed(dense, call.axis, call.weights, call.replicas, None, call.exact, dtype, share)
    total = jax.tree.map(lambda a: a[None], total)
    if not vectors:
        return Carried(Leaves(total, ()), None, "sum", dense_bytes, out.state)
    limits = limits.leaves if isinstance(limits, Leaves) else None
    payloads, sent_bytes, name = _gathered(vectors, limits, call)
    weights = None if call.weights is None else Leaves(Dense(None), (call.weights,) * len(vectors))
    return Carried(Leaves(total, payloads), weights, name, dense_bytes + sent_bytes, out.state)


def carry_all(outs: list[Outgoing], call: Call) -> list[Carried]:
    """Several messages: what is linear in one sum, all else in one gathering (see `Route.carry_all`)."""
    workers = axis_size(call.axis)
    added: list[Any] = [None] * len(outs)
    rest: list[Any] = [None] * len(outs)
    limits: list[Any] = [None] * len(outs)
    for i, out in enumerate(outs):
        if out.compressor.spec.linear:
            added[i] = out.payload
            continue
        given = lengths(out.compressor, out.like)
        rest[i], limits[i] = (out.payload,), (given,)
        if isinstance(out.payload, Leaves):
            added[i], rest[i] = out.payload.dense, out.payload.leaves
            limits[i] = given.leaves if isinstance(given, Leaves) else (None,) * len(rest[i])
    dtype = wide(*(leaf.dtype for out in outs for leaf in jax.tree.leaves(out.like)))
    numbers = (call.exact, dtype, share_of(call.axis, call.weights))
    totals, sum_bytes = summed(tuple(added), call.axis, call.weights, call.replicas, None, *numbers)
    totals = jax.tree.map(lambda a: a[None], totals)
    parts = tuple(part for each in rest if each is not None for part in each)
    known = tuple(limit for each in limits if each is not None for limit in each)
    some = known if any(limit is not None for limit in known) and workers > 1 else None
    found: tuple[Any, Any, str] = _gathered(parts, some, call) if parts else ((), 0.0, "sum")
    gathered_parts, gather_bytes, name = found
    arrived, bytes_of, made = iter(gathered_parts), sum_bytes + gather_bytes, []
    for out, total, own in zip(outs, totals, rest, strict=True):
        brought = [next(arrived) for _ in own or ()]
        if own is None:
            payloads, weights = total, None
        elif isinstance(out.payload, Leaves):
            payloads = Leaves(total, tuple(brought))
            weights = None if call.weights is None or not own else Leaves(Dense(None), (call.weights,) * len(own))
        else:
            payloads, weights = brought[0], call.weights
        made.append(Carried(payloads, weights, name if own else "sum", bytes_of, out.state))
        bytes_of = 0.0
    return made


def _gathered(payload: Any, lengths: Any, call: Call) -> tuple[Any, Any, str]:
    """The payloads of all workers, the bytes that a device sends, and the name of the route."""
    workers, name = axis_size(call.axis), "gather"
    if lengths is not None and workers > 1 and jax.tree.leaves(payload):
        message = message_of(payload, lengths, workers)
        name = fastest(message.lengths, message.capacity, call.link)
    if name == "gather":  # without a warning of padding: it was chosen for its time
        return *gathered(payload, call.axis, call.replicas, call.buckets), name
    return *gathered_by(GATHERING[name].gather, payload, lengths, call), name


AUTO = Route("auto", accepts_all, None, stateless, carry, buckets=True, carry_all=carry_all)
