"""What a route is: one way to form the mean of the workers' messages, with one file for each.

Most routes only bring all payloads to all workers. Such a route is a function `carry` and one line with `by_carrying`;
the payloads are then decoded and added here, by every worker alike.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax

from jaxcomp.base import Compressor, State, accumulate, lengths, wide_like, zeros_like
from jaxcomp.exchange.lanes import all_gather
from jaxcomp.exchange.links import DEFAULT, Cost, Link
from jaxcomp.exchange.varying import Axis, axis_names, axis_size, on_equal_types, varying, varying_axes
from jaxcomp.layout import Layout
from jaxcomp.payloads import lane_bytes

__all__ = ["Call", "Carry", "Outgoing", "Reduced", "Route", "accepts_all", "by_carrying", "reduced", "stacked"]

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
    compressor: of the vectors of `like` (`compressors.parts.lift`).
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


class Reduced(NamedTuple):
    """What came of the messages of all workers.

    mean: shapes of `like`, in f32 (f64 for f64 messages), equal on all workers.
    state: of the route, for the next round.
    route: name of the one that was taken, one of ROUTES.
    sent_bytes: what a device sends, all hops included, mean over the workers. Traced for "ladder".
    lane_bytes, code_bits: of further messages than that of the worker (a second compression).
    read: (compressor, shared) -> the mean as another compressor with the same payloads decodes it; None where
        payloads do not reach all workers.
    """

    mean: Any
    state: State
    route: str
    sent_bytes: float | Array
    lane_bytes: int = 0
    code_bits: Any = 0
    read: Callable[[Compressor, Any], Any] | None = None


class Carry(Protocol):
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
    layout(layout, workers): in which messages are compressed.
    init(shared_key, compressor, like): state of the route for messages of `like`, with the lifted compressor.
    reduce(outgoing, call): the mean.
    cost(lengths, capacity, link): expected time and bytes for messages of so many uint32 words, `capacity` with
        padding; None where it depends on what is in them.
    buckets: whether `Call.buckets` is heeded.
    """

    name: str
    refuses: Callable[[Compressor, Mapping[str, Any]], str | None]
    layout: Callable[[Layout, int], Layout]
    init: Callable[[Array, Compressor, Any], State]
    reduce: Callable[[Outgoing, Call], Reduced]
    cost: Callable[[tuple[int, ...], int, Link], Cost] | None = None
    buckets: bool = False


def accepts_all(compressor: Compressor, roles: Mapping[str, Any]) -> str | None:
    """`Route.refuses` of a route that carries every payload."""
    del compressor, roles
    return None


def same_layout(layout: Layout, workers: int) -> Layout:
    """`Route.layout` of a route that takes messages in any layout."""
    del workers
    return layout


def stateless(shared_key: Array, compressor: Compressor, like: Any) -> State:
    """`Route.init` of a route that remembers nothing."""
    del shared_key, compressor, like
    return State()


def stacked(carry: Carry, payload: Any, lengths: Any, call: Call) -> tuple[Any, float | Array]:
    """`carry` of a payload whose arrays are all typed alike; where nothing crosses, without it.

    What differs over `call.outer` is typed so in all arrays: an array that happens to be typed as equal (an empty one,
    say) would give loops and conditionals branches of different types.
    """
    payload = varying(payload, (*axis_names(call.axis), *call.outer, *varying_axes(payload)))
    if axis_size(call.axis) == 1 or lane_bytes(payload) == 0:
        return all_gather(payload, call.axis), 0.0
    return carry(payload, lengths, call)


def reduced(out: Outgoing, call: Call, payloads: Any, weights: Any, route: str, sent_bytes: float | Array) -> Reduced:
    """The mean of payloads that are there.

    Args:
        out: this worker's message.
        call: see `Call`.
        payloads: stacked on a leading axis of n, or of one where they were added on the way.
        weights: [n], None for all ones, or a prefix tree of the payload with either for each part.
        route: name of the route.
        sent_bytes: see `Reduced`.
    """
    # For equal weights 1/n comes last: sums without products are the same bit for bit wherever they are compiled.
    scale = 1 / axis_size(call.axis) if call.weights is None else None

    def read(compressor, shared):
        zeros = varying(zeros_like(wide_like(out.like)), call.outer)
        add = lambda *args: accumulate(compressor, *args)
        total = on_equal_types(add, zeros, payloads, weights, shared)
        return total if scale is None else jax.tree.map(lambda t: t * scale, total)

    return Reduced(read(out.compressor, out.shared), out.state, route, sent_bytes, read=read)


def by_carrying(
    name: str,
    carry: Carry,
    cost: Callable[[tuple[int, ...], int, Link], Cost] | None = None,
    refuses: Callable[[Compressor, Mapping[str, Any]], str | None] = accepts_all,
    buckets: bool = False,
) -> Route:
    """The route that brings all payloads to all workers by `carry`."""

    def reduce(out, call):
        payloads, sent_bytes = stacked(carry, out.payload, lengths(out.compressor, out.like), call)
        return reduced(out, call, payloads, call.weights, name, sent_bytes)

    return Route(name, refuses, same_layout, stateless, reduce, cost, buckets)
