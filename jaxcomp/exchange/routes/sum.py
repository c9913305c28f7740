"""via="sum": payloads of linear compressors are added on the way.

An all-reduce sends 2 (n - 1) / n lane bytes, whatever n. 16-bit floats are added in f32, in two steps with the same
bytes; with an algorithm that has a memory, whose mean must not be rounded once more, the second step brings f32, so
that 3 (n - 1) / n lane bytes are sent. With r replicas each device sends the r-th part of that, and then the sum of its
part to the others.

Each worker scales what it sends, while that is made anyhow; where n is a power of two, the sum is the mean.
"""

from collections.abc import Sequence
from typing import Any

from jaxcomp.base import State
from jaxcomp.exchange.links import cost_of
from jaxcomp.exchange.routes.route import Arrived, Carried, Parcel, Route, Way, sums

__all__ = ["SUM"]


def _refuses(compressor, roles):
    """Why payloads of this compressor cannot be added; None where they can."""
    del roles
    if compressor.spec.linear:
        return None
    return f'via="sum" needs a linear compressor; {compressor.spec.name} is not. Use via="gather"'


def _carry(parcels: Sequence[Parcel], way: Way, key: Any, state: State) -> Carried:
    del key
    totals, sent_bytes = sums(parcels, way)
    return Carried(tuple(Arrived(total=total) for total in totals), "sum", sent_bytes, state)


SUM = Route(
    "sum",
    _carry,
    _refuses,
    cost=lambda lengths, capacity, link: cost_of("all_reduce", 4 * capacity, len(lengths), link),
    buckets=True,
)
