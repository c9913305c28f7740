"""How the payloads of all workers meet: brought to all of them, or summed on the way.

In a payload of a tree the two can be mixed, part by part.
"""

import warnings
from typing import Any, NamedTuple

import jax

from jaxcomp.bits import lane_bytes
from jaxcomp.exchange.ladder import ladder
from jaxcomp.exchange.lanes import Axis, all_gather, all_sum, axis_size, has_ragged
from jaxcomp.exchange.links import DEFAULT, Link
from jaxcomp.exchange.unequal import EXCHANGES, choice, message_of
from jaxcomp.payloads import Dense, Leaves

__all__ = ["CHOICES", "VIAS", "Met", "gather", "meet", "sums"]

Array = jax.Array

VIAS = ("auto", "sum", "gather", *EXCHANGES, "ladder")
CHOICES = ("sum", "gather", *EXCHANGES, "ladder")
PADDED = 1.1  # longest message / mean message from which on gathering is worth a warning


class Met(NamedTuple):
    """What arrived: mean = scale * sum_j weights_j decompress(payloads_j).

    payloads: stacked on a leading axis of n, or of 1 where they were summed on the way.
    weights: [n]; None for all ones; or a prefix tree of the payload with either for each part.
    scale: 1 / n for equal weights, applied last so that the sum itself is free of products; else 1.
    chosen: one of CHOICES, for the parts that are not summed if there are any.
    sent_bytes: what a worker sends, all hops included, mean over the workers. Traced for "ladder".
    """

    payloads: Any
    weights: Any
    scale: float
    chosen: str = "gather"
    sent_bytes: float | Array = 0.0


def meet(
    via: str,
    payload: Any,
    weights: Array | None,
    axis: Axis,
    linear: bool,
    lengths: Any = None,
    link: Link = DEFAULT,
) -> Met:
    """Brings the payloads of all workers together.

    Args:
        via: "gather": all payloads, padded to the longest; "concat", "ring", "ragged": all payloads
            at their real lengths (see `unequal`); "ladder": all payloads in code (see `ladder`);
            "sum": added on the way; "auto": linear parts
            by sum, the others by gathering, or, where lengths differ, by the exchange that takes the
            least time on `link` (see `links.costs`).
        payload: of this worker.
        weights: [n], or None for equal ones.
        axis: name of the axis, names, or None.
        linear: payloads may be added.
        lengths: from `Compressor.lengths`; None if all messages are equally long.
        link: for "auto", and for the size of the pieces of "ring".
    """
    if via == "auto":
        return sums(payload, weights, axis, linear, lengths, link)
    if via == "sum":
        return sums(payload, weights, axis, linear)
    if via == "gather":
        return gather(payload, weights, axis, lengths)
    if via == "ladder":
        return _coded(payload, weights, axis)
    return _unequal(via, payload, weights, axis, lengths, link)


def gather(payload: Any, weights: Array | None, axis: Axis, lengths: Any = None) -> Met:
    """All payloads, each with its weight.

    Each worker sends its payload to n - 1 others: (n - 1) lane bytes by a ring all-gather.
    """
    workers = axis_size(axis)
    if lengths is not None and workers > 1:
        message = message_of(payload, lengths, workers)
        longest, mean = max(message.lengths), sum(message.lengths) / workers
        if longest > PADDED * mean:
            warnings.warn(
                f'via="gather" pads every message to the longest, {longest / mean:.2f} times the mean: a uniform ratio '
                'as large as the largest one would cost the same and lose less. via="concat" and via="ring" leave '
                'the padding at home; via="auto" takes what is fastest.',
                stacklevel=4,
            )
    sent = (workers - 1) * lane_bytes(payload)
    return Met(all_gather(payload, axis), weights, _scale(weights, axis), "gather", sent)


def sums(
    payload: Any,
    weights: Array | None,
    axis: Axis,
    linear: bool,
    lengths: Any = None,
    link: Link = DEFAULT,
) -> Met:
    """Linear parts as their weighted sum, the others brought to all.

    A ring all-reduce sends 2 (n - 1) / n times the lane bytes, whatever n.
    """
    workers = axis_size(axis)
    each = 2 * (workers - 1) / workers
    if linear:
        return Met(_sum(payload, weights, axis), None, _scale(weights, axis), "sum", each * lane_bytes(payload))
    if isinstance(payload, Leaves):
        lengths = lengths.leaves if isinstance(lengths, Leaves) else None
        rest = _fastest(payload.leaves, weights, axis, lengths, link)
        met = Leaves(_sum(payload.dense, weights, axis), rest.payloads)
        parts = None if weights is None else Leaves(Dense(None), (weights,) * len(payload.leaves))
        return Met(met, parts, rest.scale, rest.chosen, rest.sent_bytes + each * lane_bytes(payload.dense))
    return _fastest(payload, weights, axis, lengths, link)


def _fastest(payload: Any, weights: Array | None, axis: Axis, lengths: Any, link: Link) -> Met:
    """By the model of `links.costs` where lengths differ, else gathered."""
    workers = axis_size(axis)
    if lengths is not None and workers > 1 and jax.tree.leaves(payload):
        message = message_of(payload, lengths, workers)
        if len(set(message.lengths)) > 1:
            name = choice(message, link)
            if name != "gather":
                return _unequal(name, payload, weights, axis, lengths, link)
    return gather(payload, weights, axis)


def _unequal(name: str, payload: Any, weights: Array | None, axis: Axis, lengths: Any, link: Link) -> Met:
    workers = axis_size(axis)
    if name == "ragged" and not has_ragged():
        raise ValueError(f'via="ragged": the {jax.default_backend()} backend has no ragged_all_to_all; use via="ring"')
    message = message_of(payload, lengths, workers)
    if workers == 1 or max(message.lengths) == 0:
        return gather(payload, weights, axis)
    stacked = EXCHANGES[name](message, axis, link)
    return Met(stacked, weights, _scale(weights, axis), name, message.costs(link)[name].sent_bytes)


def _coded(payload: Any, weights: Array | None, axis: Axis) -> Met:
    workers = axis_size(axis)
    stacked, each = ladder(payload, axis)
    agreed = 2 * (workers - 1) / workers * 4  # on the rung: an all-reduce of one word
    return Met(stacked, weights, _scale(weights, axis), "ladder", (workers - 1) * each + agreed)


def _scale(weights: Array | None, axis: Axis) -> float:
    return 1.0 if weights is not None else 1 / axis_size(axis)


def _sum(payload: Any, weights: Array | None, axis: Axis) -> Any:
    """Weighted sum over the workers, with a leading axis of one."""
    return jax.tree.map(lambda a: a[None], all_sum(payload, axis, weights))
