"""via="sum": payloads of linear compressors are added on the way.

An all-reduce sends 2 (n - 1) / n lane bytes, whatever n. 16-bit floats are added in f32, in two steps with the same
bytes; with an algorithm that has a memory, whose mean must not be rounded once more, the second step brings f32, so
that 3 (n - 1) / n lane bytes are sent. With r replicas each device sends the r-th part of that, and then the sum of its
part to the others.

Each worker scales what it sends, while that is made anyhow; where n is a power of two, the sum is the mean.
"""

from typing import Any

import jax

from jaxcomp.arrays import wide
from jaxcomp.exchange.collectives import share_of
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
    """The mean of the payloads, added on the way (see `Route.carry`)."""
    total, sent = summed(out.payload, call.axis, call.weights, call.replicas, call.buckets, **_numbers(call, out.like))
    return Carried(jax.tree.map(lambda a: a[None], total), None, "sum", sent, out.state, is_sum=True)


def carry_all(outs: list[Outgoing], call: Call) -> list[Carried]:
    """The means of several messages (see `Route.carry_all`)."""
    payloads = tuple(out.payload for out in outs)
    likes = [out.like for out in outs]
    totals, sent = summed(payloads, call.axis, call.weights, call.replicas, None, **_numbers(call, likes))
    bytes_of = [sent] + [0.0] * (len(outs) - 1)
    made = zip(jax.tree.map(lambda a: a[None], totals), bytes_of, outs, strict=True)
    return [Carried(total, None, "sum", b, out.state, is_sum=True) for total, b, out in made]


def _numbers(call: Call, like: Any) -> dict[str, Any]:
    """How numbers are added, for `summed`: f64 messages in f64."""
    dtype = wide(*(leaf.dtype for leaf in jax.tree.leaves(like)))
    return {"exact": call.exact, "wide": dtype, "share": share_of(call.axis, call.weights)}


def cost(lengths: tuple[int, ...], capacity: int, link: Link) -> Cost:
    """Expected time and bytes of this route for messages of these lengths (see `Route.cost`)."""
    n = len(lengths)
    return cost_of(2 * (n - 1), 4 * capacity / n, 2 * (n - 1) / n * 4 * capacity, link, ADDS)


SUM = Route("sum", refuses, None, stateless, carry, cost, buckets=True, carry_all=carry_all)
