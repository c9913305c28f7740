"""What a route is: one way in which the messages of all workers, or their sum, reach all of them; one file for each.

Most routes bring all payloads to all workers. Such a route is a function `gather` and one line with `gathering_route`.
The runner then decodes and adds the payloads, on every worker alike.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax

from jaxcomp.base import Compressor, State, lengths
from jaxcomp.exchange.lanes import all_gather
from jaxcomp.exchange.links import DEFAULT, Cost, Link
from jaxcomp.exchange.varying import Axis, axis_size
from jaxcomp.layout import Layout
from jaxcomp.payloads import lane_bytes

__all__ = [
    "Call",
    "Carried",
    "Gather",
    "Outgoing",
    "Route",
    "accepts_all",
    "gathered_by",
    "gathering_route",
    "stateless",
]

Array = jax.Array


class Call(NamedTuple):
    """What a route needs besides the message. Static, except for the weights.

    axis: of the workers.
    weights: [n], of all workers, with sum one, in the widest dtype of the messages; None for equal ones.
    link: between workers, for routes that have a choice.
    replicas: mesh axes on which payloads are equal; in gathers and sums the devices there share the work.
    buckets: number of the bucket of each vector, with a collective for each bucket; None for a single one.
    exact: sums of 16-bit floats are not rounded once more, for algorithms with a memory of what was sent.
    outer: other mesh axes over which messages differ.
    """

    axis: Axis
    weights: Array | None = None
    link: Link = DEFAULT
    replicas: tuple[str, ...] = ()
    buckets: tuple[int, ...] | None = None
    exact: bool = False
    outer: tuple[str, ...] = ()


class Outgoing(NamedTuple):
    """One worker's message.

    key: private to this worker and round, and used for nothing else; for routes that compress once more.
    compressor: of the vectors of `like` (`compressors.vector.lift`).
    payload: what it made of the message.
    shared: its shared state, with the plans of all workers.
    like: shapes and dtypes of the message, an array or `Parts`.
    state: of the route.
    """

    key: Array
    compressor: Compressor
    payload: Any
    shared: Any
    like: Any
    state: State = State()


class Carried(NamedTuple):
    """What a route brought.

    payloads: of all workers, stacked on a leading axis of n and equal on all of them; or their sum, on an axis of one,
        where each has its weight already, or `share_of` all; None where the route made the mean itself.
    weights: of the payloads in their sum: [n], None for equal ones, or a prefix tree of the payload with either for
        each part.
    route: name of the one that was taken, one of ROUTES.
    sent_bytes: what a device sends, all hops included, mean over the workers. Traced for "ladder".
    state: of the route, for the next round.
    mean: shapes of `like`, in f32 (f64 for f64 messages), equal on all workers; where there are no payloads.
    lane_bytes, code_bits: of further messages than that of the worker (a second compression).
    is_sum: the payloads are one, the sum of all.
    """

    payloads: Any
    weights: Any
    route: str
    sent_bytes: float | Array
    state: State = State()
    mean: Any = None
    lane_bytes: int = 0
    code_bits: Any = 0
    is_sum: bool = False


class Gather(Protocol):
    """Brings the payloads of all workers to all of them.

    Args:
        payload: of this worker.
        lengths: how much of it is padding (`base.lengths`), or None.
        call: see `Call`.

    Returns:
        The payloads stacked on a leading axis of n, equal on all workers; and the bytes that a device sends.
    """

    def __call__(self, payload: Any, lengths: Any, call: Call) -> tuple[Any, float | Array]: ...


class Route(NamedTuple):
    """One way to form the mean of messages.

    name: what users ask for.
    refuses(compressor, roles): why messages of this compressor cannot go this way, in a sentence with the cure; None
        where they can. Asked when a transformation is built, with the compressor as the user gave it and the
        algorithm's roles.
    layout(layout, workers): in which messages are compressed; None: in the one that they have.
    init(shared_key, compressor, like): state of the route for messages of `like`, with the lifted compressor.
    carry(outgoing, call): brings the messages, or their sum, to all workers.
    cost(lengths, capacity, link): expected time and bytes for messages of so many uint32 words, `capacity` with
        padding; None where it depends on what is in them.
    buckets: whether `Call.buckets` is heeded.
    carry_all(outgoings, call): several messages at once, in as few collectives as one, without buckets and state; the
        bytes of all are those of the first. None: one after the other.
    """

    name: str
    refuses: Callable[[Compressor, Mapping[str, Any]], str | None]
    layout: Callable[[Layout, int], Layout] | None
    init: Callable[[Array, Compressor, Any], State]
    carry: Callable[[Outgoing, Call], Carried]
    cost: Callable[[tuple[int, ...], int, Link], Cost] | None = None
    buckets: bool = False
    carry_all: Callable[[list[Outgoing], Call], list[Carried]] | None = None


def accepts_all(compressor: Compressor, roles: Mapping[str, Any]) -> str | None:
    """`Route.refuses` of a route that carries every payload."""
    del compressor, roles
    return None


def stateless(shared_key: Array, compressor: Compressor, like: Any) -> State:
    """`Route.init` of a route that remembers nothing."""
    del shared_key, compressor, like
    return State()


def gathered_by(gather: Gather, payload: Any, lengths: Any, call: Call) -> tuple[Any, float | Array]:
    """All payloads, by `gather`; where nothing crosses, without it."""
    if axis_size(call.axis) == 1 or lane_bytes(payload) == 0:
        return all_gather(payload, call.axis), 0.0
    return gather(payload, lengths, call)


def gathering_route(
    name: str,
    gather: Gather,
    cost: Callable[[tuple[int, ...], int, Link], Cost] | None = None,
    refuses: Callable[[Compressor, Mapping[str, Any]], str | None] = accepts_all,
    buckets: bool = False,
) -> Route:
    """The route that brings all payloads to all workers by `gather`."""

    def carry(out, call):
        payloads, sent_bytes = gathered_by(gather, out.payload, lengths(out.compressor, out.like), call)
        return Carried(payloads, call.weights, name, sent_bytes, out.state)

    def carry_all(outs, call):
        payloads = tuple(out.payload for out in outs)
        limits = tuple(lengths(out.compressor, out.like) for out in outs)
        some = limits if any(limit is not None for limit in limits) else None
        arrived, sent_bytes = gathered_by(gather, payloads, some, call)
        bytes_of = [sent_bytes] + [0.0] * (len(outs) - 1)
        each = zip(arrived, bytes_of, outs, strict=True)
        return [Carried(payload, call.weights, name, sent, out.state) for payload, sent, out in each]

    return Route(name, refuses, None, stateless, carry, cost, buckets, carry_all)
