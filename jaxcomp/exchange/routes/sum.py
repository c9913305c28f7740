"""via="sum": payloads of linear compressors are added on the way.

An all-reduce sends 2 (n - 1) / n lane bytes, whatever n. 16-bit floats are added in f32, in two steps with the same
bytes; with an algorithm that has a memory, whose mean must not be rounded once more, the second step brings f32, so
that 3 (n - 1) / n lane bytes are sent. With r replicas each device sends the r-th part of that, and then the sum of its
part to the others.
"""

import jax

from jaxcomp.base import wide
from jaxcomp.exchange.lanes import summed
from jaxcomp.exchange.links import ADDS, Cost, Link, cost_of
from jaxcomp.exchange.routes.route import Call, Carried, Outgoing, Route, stateless

__all__ = ["SUM"]


def refuses(compressor, roles):
    """Why payloads of this compressor cannot be added; None where they can."""
    del roles
    if compressor.spec.linear:
        return None
    return f'via="sum" needs a linear compressor; {compressor.spec.name} is not. Use via="gather"'


def carry(out: Outgoing, call: Call) -> Carried:
    """The weighted sum of the payloads, added on the way (see `Route.carry`)."""
    dtype = wide(*(leaf.dtype for leaf in jax.tree.leaves(out.like)))  # f64 messages are added in f64
    total, sent = summed(out.payload, call.axis, call.weights, call.replicas, call.buckets, call.exact, dtype)
    return Carried(jax.tree.map(lambda a: a[None], total), None, "sum", sent, out.state)


def carry_all(outs: list[Outgoing], call: Call) -> list[Carried]:
    """The sums of several messages (see `Route.carry_all`)."""
    payloads = tuple(out.payload for out in outs)
    dtype = wide(*(leaf.dtype for out in outs for leaf in jax.tree.leaves(out.like)))
    totals, sent = summed(payloads, call.axis, call.weights, call.replicas, None, call.exact, dtype)
    bytes_of = [sent] + [0.0] * (len(outs) - 1)
    stacked = jax.tree.map(lambda a: a[None], totals)
    return [Carried(total, None, "sum", b, out.state) for total, b, out in zip(stacked, bytes_of, outs, strict=True)]


def cost(lengths: tuple[int, ...], capacity: int, link: Link) -> Cost:
    """Expected time and bytes of this route for messages of these lengths (see `Route.cost`)."""
    n = len(lengths)
    return cost_of(2 * (n - 1), 4 * capacity / n, 2 * (n - 1) / n * 4 * capacity, link, ADDS)


SUM = Route("sum", refuses, None, stateless, carry, cost, buckets=True, carry_all=carry_all)
