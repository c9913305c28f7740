"""via="sum": payloads of linear compressors are added on the way.

An all-reduce sends 2 (n - 1) / n lane bytes, whatever n. 16-bit floats are added in f32, in two steps with the same
bytes; with an algorithm that has a memory, whose mean must not be rounded once more, the second step brings f32, so
that 3 (n - 1) / n lane bytes are sent. With r replicas each device sends the r-th part of that, and then the sum of its
part to the others.
"""

from typing import Any

import jax

from jaxcomp.base import wide
from jaxcomp.exchange.lanes import all_sum, buckets_of_arrays, sum_bytes
from jaxcomp.exchange.links import ADDS, Cost, Link, cost_of
from jaxcomp.exchange.routes.route import Call, Outgoing, Reduced, Route, reduced, same_layout, stateless
from jaxcomp.exchange.varying import axis_names, varying, varying_axes

__all__ = ["SUM", "summed"]


def summed(payload: Any, like: Any, call: Call) -> tuple[Any, float]:
    """The weighted sum of payloads, with a leading axis of one, and the bytes that a device sends.

    Args:
        payload: of this worker.
        like: of the message: f64 messages are added in f64.
        call: see `Call`.
    """
    payload = varying(payload, (*axis_names(call.axis), *call.outer, *varying_axes(payload)))
    buckets = buckets_of_arrays(payload, call.buckets)
    dtype = wide(*(leaf.dtype for leaf in jax.tree.leaves(like)))
    total = all_sum(payload, call.axis, call.weights, call.replicas, buckets, call.exact, dtype)
    sent = sum_bytes(payload, call.axis, call.replicas, buckets, call.exact, dtype)
    return jax.tree.map(lambda a: a[None], total), sent


def refuses(compressor, roles):
    """Why payloads of this compressor cannot be added; None where they can."""
    del roles
    if compressor.spec.linear:
        return None
    return f'via="sum" needs a linear compressor; {compressor.spec.name} is not. Use via="gather"'


def reduce(out: Outgoing, call: Call) -> Reduced:
    """The mean of payloads that are added on the way (see `Route.reduce`)."""
    total, sent_bytes = summed(out.payload, out.like, call)
    return reduced(out, call, total, None, "sum", sent_bytes)


def cost(lengths: tuple[int, ...], capacity: int, link: Link) -> Cost:
    """Expected time and bytes of this route for messages of these lengths (see `Route.cost`)."""
    n = len(lengths)
    return cost_of(2 * (n - 1), 4 * capacity / n, 2 * (n - 1) / n * 4 * capacity, link, ADDS)


SUM = Route("sum", refuses, same_layout, stateless, reduce, cost, buckets=True)
