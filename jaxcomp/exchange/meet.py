"""How the payloads of all workers meet: gathered one by one, or summed on the way.

In a payload of a tree the two can be mixed, part by part.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jaxcomp.exchange.lanes import Axis, all_gather, all_sum, axis_size
from jaxcomp.payloads import Dense, Leaves

__all__ = ["VIAS", "Met", "gather", "sums"]

Array = jax.Array


class Met(NamedTuple):
    """What arrived: mean = scale * sum_j weights_j decompress(payloads_j).

    payloads: stacked on a leading axis of n, or of 1 where they were summed on the way.
    weights: [n]; None for all ones; or a prefix tree of the payload with either for each part.
    scale: 1 / n for equal weights, applied last so that the sum itself is free of products; else 1.
    """

    payloads: Any
    weights: Any
    scale: float


def gather(payload: Any, weights: Array | None, axis: Axis, linear: bool) -> Met:
    """All payloads, each with its weight.

    Each worker sends its payload to n - 1 others: (n - 1) lane bytes by a ring all-gather.
    """
    del linear
    return Met(all_gather(payload, axis), weights, _scale(weights, axis))


def sums(payload: Any, weights: Array | None, axis: Axis, linear: bool) -> Met:
    """Linear parts as their weighted sum, the others gathered.

    A ring all-reduce sends 2 (n - 1) / n times the lane bytes, whatever n.
    """
    if linear:
        return Met(_sum(payload, weights, axis), None, _scale(weights, axis))
    if isinstance(payload, Leaves):
        met = Leaves(_sum(payload.dense, weights, axis), all_gather(payload.leaves, axis))
        parts = None if weights is None else Leaves(Dense(None), (weights,) * len(payload.leaves))
        return Met(met, parts, _scale(weights, axis))
    return gather(payload, weights, axis, linear)


def _scale(weights: Array | None, axis: Axis) -> float:
    return 1.0 if weights is not None else 1 / axis_size(axis)


def _sum(payload: Any, weights: Array | None, axis: Axis) -> Any:
    """Weighted sum over the workers, with a leading axis of one."""
    return jax.tree.map(lambda a: a[None], all_sum(payload, axis, weights))


VIAS: dict[str, Callable[..., Met]] = {"auto": sums, "sum": sums, "gather": gather}
