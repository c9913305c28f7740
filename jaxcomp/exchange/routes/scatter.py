"""The mean of messages, each worker with its own part of it: for parameters that are cut over the workers themselves.

The message is a stack [n, c] whose row j is what worker j holds (`transforms.scattered`). This is the first half of two
shots: every worker compresses each row by itself and sends it to its owner, who decompresses n rows and adds them.

    m_j = (1/n) sum_i C(x_i)_j   at worker j alone

(n - 1) / n times the lane bytes of the whole message leave each worker, half of what a mean for all of them costs.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxcomp.base import Compressor, State
from jaxcomp.exchange.routes.route import Arrived, Carried, Parcel, Route, Way
from jaxcomp.exchange.routes.two_shot import first_shot
from jaxcomp.exchange.routes.two_shot import layout as chunks
from jaxcomp.exchange.routes.two_shot import refuses as refuses_chunks

__all__ = ["SCATTER"]


def _refuses(compressor: Compressor, roles: Mapping[str, Any]) -> str | None:
    """Why messages cannot be cut by owner; None where they can."""
    others = sorted(set(jax.tree.leaves(roles)) - {"memory", "narrow memory", "compressor"})
    if others:
        return (
            "parameters that are cut over the workers themselves: each worker ends with the mean of its own shard, and "
            f"the state of this algorithm ({', '.join(map(str, others))}) needs the whole of it. Use direct(...) or "
            "error_feedback(...)"
        )
    reason = refuses_chunks(compressor, roles)
    told = "parameters that are cut over the workers themselves need what two shots need: "
    return None if reason is None else told + reason


def _carry(parcels: Sequence[Parcel], way: Way, key: Any, state: State) -> Carried:
    del key
    (out,) = parcels
    row = jax.ShapeDtypeStruct(out.like.shape[1:], out.like.dtype)
    total, sent_bytes = first_shot(out.payload, out.compressor, out.shared, row, way)
    return Carried((Arrived(mean=way.mean_of(total)),), "scatter", sent_bytes, state)


SCATTER = Route("scatter", _carry, _refuses, chunks)
