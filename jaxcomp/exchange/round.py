"""What a worker does with the others in one round: compress, exchange by a route, add up, and count what travels."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.base import (
    Compressor,
    State,
    add_own,
    for_worker,
    like_of,
    overflow,
    residual,
    wide,
)
from jaxcomp.exchange.info import NAMES, Counts, Errors, add_counts, errors_of, no_counts, no_errors
from jaxcomp.exchange.lanes import all_sum, sum_bytes
from jaxcomp.exchange.links import Link
from jaxcomp.exchange.placement import Placement
from jaxcomp.exchange.routes import Call, Outgoing, Reduced, Route
from jaxcomp.exchange.varying import axis_index, axis_size, varying
from jaxcomp.layout import rows_of
from jaxcomp.payloads import Leaves, cheap_bits, code_bits, lane_bytes, num_entries

__all__ = ["Message", "Round", "Way"]

Array = jax.Array


class Way(NamedTuple):
    """How messages travel: what the user of an algorithm chose.

    weights: f[n] of all workers, with sum one, or None for equal ones. buckets: of the vectors. exact: the algorithm
    remembers what it sent, so sums must not be rounded. code: whose bits are counted; None: what is cheap to count.
    """

    placement: Placement
    route: Route
    link: Link
    weights: Array | None = None
    buckets: tuple[int, ...] | None = None
    exact: bool = False
    code: str | None = None

    @property
    def call(self) -> Call:
        place = self.placement
        return Call(place.workers, self.weights, self.link, place.replicas, self.buckets, self.exact, place.outer)


class Message:
    """What came of one message (`base.Sent`). Nothing is computed, or traced, before it is asked for."""

    def __init__(self, out: Outgoing, message: Any, mine: Any, state: State, reduced: Reduced):
        self._compressor, self._payload, self._message, self._shared = out.compressor, out.payload, message, mine
        self._out, self._reduced = out, reduced
        self.state, self.mean = state, reduced.mean

    def decoded(self) -> Any:
        return self._compressor.decompress(self._payload, self._shared, like_of(self._message))

    @functools.cached_property
    def own(self) -> Any:
        return self.decoded()

    @functools.cached_property
    def residual(self) -> Any:
        return residual(self._compressor, self._message, self._payload, self._shared)

    def add_to(self, total: Any, weight: Any) -> Any:
        return add_own(self._compressor, total, self._payload, weight, self._shared)

    def read_by(self, compressor: Compressor) -> tuple[Any, Any]:
        if self._reduced.read is None:
            raise ValueError(f'via="{self._reduced.route}" does not bring the payloads themselves to all workers')
        own = compressor.decompress(self._payload, self._shared, like_of(self._message))
        return self._reduced.read(compressor, self._out.shared), own


class Round:
    """A worker's exchanges in one round (`base.Exchange`).

    Args:
        way: how messages travel.
        state: of the route, from the last round.
        measured: whether the errors of messages are measured in this round; None if never.
    """

    def __init__(self, way: Way, state: State, measured: Array | None):
        self._way, self._measured = way, measured
        self._state, self._counts = state, ()
        self.index = axis_index(way.placement.workers)
        self.size = axis_size(way.placement.workers)

    @property
    def outcome(self) -> tuple[State, Counts]:
        """State of the route after the round, and what was counted."""
        return self._state, add_counts(list(self._counts))

    def mean(self, key: Array, compressor: Compressor, message: Any, state: State) -> Message:
        mine = for_worker(compressor, state.shared, self.index, self.size)
        again, key = jax.random.split(key)
        payload, local = compressor.compress(key, message, State(state.local, mine))
        outgoing = Outgoing(again, compressor, payload, state.shared, like_of(message), self._state)
        reduced = self._way.route.reduce(outgoing, self._way.call)
        self._state = reduced.state
        after = State(local, state.shared if compressor.advance is None else compressor.advance(state.shared))
        sent = Message(outgoing, message, mine, after, reduced)
        self._counts += (self._count(sent, message, payload, overflow(compressor, local), reduced),)
        return sent

    def sum(self, x: Any) -> Any:
        call, leaves = self._way.call, jax.tree.leaves(x)
        dtype = wide(*(leaf.dtype for leaf in leaves))
        total = all_sum(x, call.axis, call.weights, call.replicas, None, True, dtype)
        sent = sum_bytes(x, call.axis, call.replicas, None, True, dtype)
        size = sum(leaf.size for leaf in leaves)
        real = lambda value: jnp.asarray(value, jnp.float32)
        count = no_counts()._replace(
            lane_bytes=real(lane_bytes(x)),
            code_bits=real(8 * lane_bytes(x)),
            entries=real(size),
            size=real(size),
            sent_bytes=real(sent),
            route=jnp.asarray(NAMES.index("sum"), jnp.int32),
        )
        self._counts += (count,)
        return total if call.weights is None else jax.tree.map(lambda t: t * self.size, total)

    def cond(self, predicate: Array, yes: Callable[..., Any], no: Callable[..., Any], *operands: Any) -> Any:
        before, every = (self._state, self._counts), self._way.placement.every

        def apart(branch: Callable[..., Any]) -> Callable[..., Any]:
            def run(state: State, *operands: Any) -> Any:
                self._state, self._counts = state, ()
                out = branch(*operands)
                return out, *(varying(part, every) for part in self.outcome)

            return run

        out, state, counts = lax.cond(predicate, apart(yes), apart(no), before[0], *operands)
        self._state, self._counts = state, (*before[1], counts)
        return out

    def _count(self, sent: Message, message: Any, payload: Any, lost: Array, reduced: Reduced) -> Counts:
        real = lambda value: jnp.asarray(value).astype(jnp.float32)
        return Counts(
            lane_bytes=real(float(lane_bytes(payload) + reduced.lane_bytes)),
            code_bits=_by_row(self._bits, payload, message) + real(reduced.code_bits),
            entries=_by_row(num_entries, payload, message),
            size=real(float(sum(leaf.size for leaf in jax.tree.leaves(message)))),
            overflow=lost,
            sent_bytes=real(reduced.sent_bytes),
            route=jnp.asarray(NAMES.index(reduced.route), jnp.int32),
            errors=self._errors(sent, message),
        )

    def _bits(self, payload: Any) -> Any:
        return cheap_bits(payload) if self._way.code is None else code_bits(payload, code=self._way.code)

    def _errors(self, sent: Message, message: Any) -> Errors:
        if self._measured is None:
            return no_errors()
        none, every = varying(no_errors(), self._way.placement.every), self._way.placement.every
        own = sent.decoded  # a function: what is computed inside a branch must not be kept outside
        return lax.cond(self._measured, lambda: varying(errors_of(message, own()), every), lambda: none)


def _vectors(payload: Any, message: Any) -> list[tuple[Any, Any]]:
    """Each payload with its vector."""
    if not isinstance(payload, Leaves):
        return [(payload, message)]
    return [(payload.dense, message.dense), *zip(payload.leaves, message.vectors, strict=True)]


def _by_row(function: Callable[[Any], Any], payload: Any, message: Any) -> Array:
    """The sum of a number over all messages, of each row where there are several; None stands for all entries."""
    total = jnp.zeros((), jnp.float32)
    for part, vector in _vectors(payload, message):
        number = function(part) if rows_of(vector) is None else jax.vmap(function)(part)
        total = total + (float(vector.size) if number is None else jnp.sum(jnp.asarray(number).astype(jnp.float32)))
    return total
