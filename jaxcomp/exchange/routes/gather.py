"""via="gather": an all-gather of all payloads, as they are, with their padding.

Each worker sends its payload to n - 1 others: (n - 1) lane bytes by a ring all-gather. With r replicas each device
sends the r-th part of that, and then what arrived to the other r - 1.
"""

import warnings
from collections.abc import Sequence
from typing import Any

from jaxcomp.exchange.collectives import gathered
from jaxcomp.exchange.links import cost_of
from jaxcomp.exchange.routes.route import Parcel, Way, cuts_of, gathering_route, lengths_of
from jaxcomp.payloads.unequal import message_of

__all__ = ["GATHER", "gather_padded"]

PADDED = 1.1  # longest message / mean message from which on gathering is worth a warning


def gather_padded(parcels: Sequence[Parcel], way: Way) -> tuple[tuple[Any, ...], float]:
    """All payloads, by one collective for each lane."""
    payloads, lengths = tuple(parcel.payload for parcel in parcels), lengths_of(parcels)
    if lengths is not None:
        words = message_of(payloads, lengths, way.workers).lengths
        longest, mean = max(words), sum(words) / way.workers
        if longest > PADDED * mean:
            warnings.warn(
                f'via="gather" pads every message to the longest, {longest / mean:.2f} times the mean: a uniform ratio '
                'as large as the largest one would cost the same and lose less. via="concat" and via="ring" do not '
                'send the padding; via="auto" takes what is fastest.',
                stacklevel=4,
            )
    return gathered(payloads, way.axis, way.replicas, way.buckets_of(parcels), cuts_of(parcels))


GATHER = gathering_route(
    "gather", gather_padded, lambda lengths, capacity, link: cost_of("all_gather", 4 * capacity, len(lengths), link)
)
