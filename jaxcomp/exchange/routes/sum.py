"""via="sum": payloads of linear compressors are added on the way.

An all-reduce sends 2 (n - 1) / n lane bytes, whatever n. 16-bit floats are added in f32, in two steps with the same
bytes; with an algorithm that has a memory, whose mean must not be rounded once more, the second step brings f32, so
that 3 (n - 1) / n lane bytes are sent. With r replicas each device sends the r-th part of that, and then the sum of its
part to the others.

Where 1/n is exact (n a power of two) each worker scales what it sends, while that is made anyhow, and no pass over the
sum is needed. Otherwise the mean is the sum divided, so that it is the same bit for bit by every route.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxcomp.base import wide
from jaxcomp.exchange.lanes import summed
from jaxcomp.exchange.links import ADDS, Cost, Link, cost_of
from jaxcomp.exchange.routes.route import Call, Carried, Outgoing, Route, stateless
from jaxcomp.exchange.varying import axis_size

__all__ = ["SUM"]


def refuses(compressor, roles):
    """Why payloads of this compressor cannot be added; None where they can."""
    del roles
    if compressor.spec.linear:
        return None
    return f'via="sum" needs a linear compressor; {compressor.spec.name} is not. Use via="gather"'


def carry(out: Outgoing, call: Call) -> Carried:
    """The mean of the payloads, added on the way (see `Route.carry`)."""
    total, sent, is_mean = _summed(out.payload, out.like, call, call.buckets)
    return Carried(jax.tree.map(lambda a: a[None], total), None, "sum", sent, out.state, is_mean=is_mean)


def carry_all(outs: list[Outgoing], call: Call) -> list[Carried]:
    """The means of several messages (see `Route.carry_all`)."""
    payloads = tuple(out.payload for out in outs)
    totals, sent, is_mean = _summed(payloads, [out.like for out in outs], call, None)
    bytes_of = [sent] + [0.0] * (len(outs) - 1)
    made = zip(jax.tree.map(lambda a: a[None], totals), bytes_of, outs, strict=True)
    return [Carried(total, None, "sum", b, out.state, is_mean=is_mean) for total, b, out in made]


def _summed(payload: Any, like: Any, call: Call, buckets: Any) -> tuple[Any, float, bool]:
    """The sum, the bytes that a device sends, and whether the sum is the mean already."""
    dtype = wide(*(leaf.dtype for leaf in jax.tree.leaves(like)))  # f64 messages are added in f64
    n, weights = axis_size(call.axis), call.weights
    if weights is None and n & (n - 1) == 0:
        weights = jnp.full((n,), 1 / n, dtype)
    total, sent = summed(payload, call.axis, weights, call.replicas, buckets, call.exact, dtype)
    return total, sent, weights is not None


def cost(lengths: tuple[int, ...], capacity: int, link: Link) -> Cost:
    """Expected time and bytes of this route for messages of these lengths (see `Route.cost`)."""
    n = len(lengths)
    return cost_of(2 * (n - 1), 4 * capacity / n, 2 * (n - 1) / n * 4 * capacity, link, ADDS)


SUM = Route("sum", refuses, None, stateless, carry, cost, buckets=True, carry_all=carry_all)
