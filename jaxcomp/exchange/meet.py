"""How the payloads of all workers meet: brought to all of them, or summed on the way.

In a payload of a tree the two can be mixed, part by part.
"""

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from jaxcomp.exchange.ladder import ladder, rungs
from jaxcomp.exchange.lanes import Axis, all_gather, all_sum, axis_size, has_ragged, sent_by_gather, sent_by_sum
from jaxcomp.exchange.links import DEFAULT, Link
from jaxcomp.exchange.unequal import EXCHANGES, choice, message_of
from jaxcomp.payloads import Dense, Leaves, lane_bytes

__all__ = ["CHOICES", "VIAS", "How", "Met", "bucketed", "gather", "meet", "sums"]

Array = jax.Array

CHOICES = ("sum", "gather", *EXCHANGES, "ladder", "two_shot")
VIAS = ("auto", *CHOICES)
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


class How(NamedTuple):
    """What sums and gathers do besides.

    inner: mesh axes on which payloads are equal: the devices there share the work.
    buckets: number of the bucket of each array of the payload, a collective for each; None for a single one.
    exact: sums of 16-bit floats are not rounded once more, for methods that remember what they sent.
    """

    inner: tuple[str, ...] = ()
    buckets: tuple[int, ...] | None = None
    exact: bool = False

    def of_leaves(self) -> "How":
        """The same for the large leaves of `Leaves`."""
        return self if self.buckets is None else self._replace(buckets=self.buckets[1:])


PLAIN = How()


def bucketed(payload: Any, leaf_bytes: Sequence[int], bucket_bytes: int) -> tuple[int, ...] | None:
    """Numbers for `How.buckets`: leaves are put together, from the last to the first, until a bucket is full.

    The gradients of the last leaves come first out of a backward pass. Small leaves, which come from everywhere, have a
    bucket of their own.

    Args:
        payload: of a tree; None is returned for any that is not cut by leaves.
        leaf_bytes: of the gradient of each large leaf.
        bucket_bytes: a bucket is full when it holds as much.
    """
    if not isinstance(payload, Leaves):
        return None
    numbers, number, held = [], 1, 0
    for size in reversed(leaf_bytes):
        if held >= bucket_bytes:
            number, held = number + 1, 0
        numbers.append(number)
        held += size
    parts = zip(payload.leaves, reversed(numbers), strict=True)
    return (0, *(number for leaf, number in parts for _ in jax.tree.leaves(leaf)))


def meet(
    via: str,
    payload: Any,
    weights: Array | None,
    axis: Axis,
    linear: bool,
    lengths: Any = None,
    link: Link = DEFAULT,
    how: How = PLAIN,
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
        how: for sums and gathers.
    """
    if via == "auto":
        return sums(payload, weights, axis, linear, lengths, link, how)
    if via == "sum":
        return sums(payload, weights, axis, linear, how=how)
    if via == "gather":
        return gather(payload, weights, axis, lengths, how)
    if via == "ladder":
        return _coded(payload, weights, axis)
    return _unequal(via, payload, weights, axis, lengths, link)


def gather(payload: Any, weights: Array | None, axis: Axis, lengths: Any = None, how: How = PLAIN) -> Met:
    """All payloads, each with its weight.

    Each worker sends its payload to n - 1 others: (n - 1) lane bytes by a ring all-gather. With p devices on inner
    axes, each sends a p-th of that, and then tells the other p - 1 what arrived.
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
    met = all_gather(payload, axis, how.inner, how.buckets)
    sent = sent_by_gather(payload, axis, how.inner, how.buckets)
    return Met(met, weights, _scale(weights, axis), "gather", sent)


def sums(
    payload: Any,
    weights: Array | None,
    axis: Axis,
    linear: bool,
    lengths: Any = None,
    link: Link = DEFAULT,
    how: How = PLAIN,
) -> Met:
    """Linear parts as their weighted sum, the others brought to all.

    A ring all-reduce sends 2 (n - 1) / n times the lane bytes, whatever n.
    """
    if linear:
        met = _sum(payload, weights, axis, how)
        return Met(met, None, _scale(weights, axis), "sum", sent_by_sum(payload, axis, *how))
    if isinstance(payload, Leaves):
        lengths = lengths.leaves if isinstance(lengths, Leaves) else None
        rest = _fastest(payload.leaves, weights, axis, lengths, link, how.of_leaves())
        apart = how._replace(buckets=None)
        met = Leaves(_sum(payload.dense, weights, axis, apart), rest.payloads)
        parts = None if weights is None else Leaves(Dense(None), (weights,) * len(payload.leaves))
        sent = rest.sent_bytes + sent_by_sum(payload.dense, axis, *apart)
        return Met(met, parts, rest.scale, rest.chosen, sent)
    return _fastest(payload, weights, axis, lengths, link, how)


def _fastest(payload: Any, weights: Array | None, axis: Axis, lengths: Any, link: Link, how: How) -> Met:
    """By the model of `links.costs` where lengths differ, else gathered."""
    workers = axis_size(axis)
    if lengths is not None and workers > 1 and jax.tree.leaves(payload):
        message = message_of(payload, lengths, workers)
        if len(set(message.lengths)) > 1:
            name = choice(message, link)
            if name != "gather":
                return _unequal(name, payload, weights, axis, lengths, link)
    return gather(payload, weights, axis, how=how)


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
    agreed = 2 * (workers - 1) / workers * 4 if rungs(lane_bytes(payload) // 4) else 0  # on the rung, in one word
    return Met(stacked, weights, _scale(weights, axis), "ladder", (workers - 1) * each + agreed)


def _scale(weights: Array | None, axis: Axis) -> float:
    return 1.0 if weights is not None else 1 / axis_size(axis)


def _sum(payload: Any, weights: Array | None, axis: Axis, how: How) -> Any:
    """Weighted sum over the workers, with a leading axis of one."""
    return jax.tree.map(lambda a: a[None], all_sum(payload, axis, weights, *how))
