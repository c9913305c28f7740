"""One round of an algorithm at one worker: the state is opened, the algorithm runs, the state is put away.

`Runner.step` is what `compressed_mean`, `rounds` and every other outer form use, so that weights, routes and
hierarchies are the same in all of them. `Round` is the `base.Exchange` that it hands to the algorithm: it compresses a
message, has it carried by the route, and adds up what arrived.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomp.arrays import key_data, like_of, wide, wrap_key
from jaxcomp.backend import in_place
from jaxcomp.base import Algorithm, Compressor, State, add_own, advance, for_worker, overflow, residual
from jaxcomp.exchange.counts import (
    Counts,
    Errors,
    add_counts,
    count_message,
    count_sum,
    errors_of,
    no_counts,
    no_errors,
    nonfinite,
)
from jaxcomp.exchange.lanes import summed
from jaxcomp.exchange.links import DEFAULT, Link
from jaxcomp.exchange.mean import mean_of
from jaxcomp.exchange.placement import Placement, check_not_alone, is_missing
from jaxcomp.exchange.routes import Call, Carried, Outgoing, Route
from jaxcomp.exchange.state import About, MeanLocal, MeanShared, MeanState, is_mean
from jaxcomp.exchange.varying import (
    Axis,
    axis_index,
    axis_names,
    axis_size,
    is_bound,
    known_equal,
    varying,
    varying_axes,
)
from jaxcomp.layout import Layout, Plan, plan_of, split

__all__ = ["Message", "Round", "Runner", "Way", "at_device", "local_rows", "off_device"]

Array = jax.Array


# ------------------------------------------------------------------------------------------------
# One round


class Runner(NamedTuple):
    """An algorithm bound to a place on a mesh and to a route.

    name: of the outer form, for errors. root: key of both kinds of randomness, or its words. roles: of the algorithm,
    frozen. shares: weights of the workers, with sum one, or None. measure: errors are measured in one of so many
    rounds; 0 for never. code: whose bits are counted; None: what is cheap.
    """

    name: str
    algorithm: Algorithm
    placement: Placement
    route: Route
    root: Array
    layout: Layout
    roles: tuple
    link: Link = DEFAULT
    shares: np.ndarray | None = None
    measure: int = 0
    code: str | None = None

    def init(self, tree: Any, *, starts: bool = False) -> MeanState:
        """The state for gradients like `tree`; or, if it starts there, of a method with this point."""
        axis = self.placement.workers
        workers = axis_size(axis) if is_bound(axis) else local_rows(axis)
        plan = self._plan(workers, tree)
        shared_key, private_key = jax.random.split(wrap_key(self.root))
        route = State()
        if self.algorithm.compressor is not None:
            shared_key, route_key = jax.random.split(shared_key)
            route = self.route.init(route_key, self.algorithm.compressor, plan.like)
        state = self.algorithm.init(shared_key, split(plan, tree) if starts else plan.like)
        zero = jnp.zeros((), jnp.int32)
        local = MeanLocal(state.local, route.local, no_counts())
        shared = MeanShared(zero, key_data(private_key), zero, state.shared, route.shared)
        return off_device(local, shared, self._about(plan))

    def step(
        self, state: Any, given: Callable[[Plan], tuple[Any, list[Array]]], *, sparse: bool = False
    ) -> tuple[Any, MeanState]:
        """One round.

        Args:
            state: of this device.
            given: plan -> (what `Algorithm.update` takes for gradients, arrays whose non-finite entries count).
            sparse: vectors of what it returns may be `jaxcomp.backend.SparseSum`.

        Returns:
            What `Algorithm.update` returns, and the state after the round.
        """
        local, shared, plan = self._opened(state)
        grads, arrays = given(plan)
        measured = shared.count % self.measure == 0 if self.measure else None
        sparse = sparse and self.algorithm.sparse
        exchange = Round(self._way(plan)._replace(sparse=sparse), State(local.route, shared.route), measured)
        out, new = self.algorithm.update(self._key(shared), grads, State(local.algorithm, shared.algorithm), exchange)
        route, counts = exchange.outcome
        errors = self._errors(measured, counts.errors, arrays, local.counts.errors)
        local = MeanLocal(new.local, route.local, counts._replace(errors=errors))
        size = jnp.asarray(exchange.size, jnp.int32)
        shared = MeanShared(shared.count + 1, shared.key, size, new.shared, route.shared)
        return out, off_device(local, shared, state.about)

    def _opened(self, state: Any) -> tuple[MeanLocal, MeanShared, Plan]:
        place = self.placement
        if missing := is_missing(place):
            raise ValueError(
                f"{self.name}: no axis named {missing!r} is bound here; call it inside jax.shard_map, jax.pmap or "
                "jax.vmap(axis_name=...)"
            )
        if place.names:
            check_not_alone(self.name, place.workers)
        workers = axis_size(place.workers)
        if self.shares is not None and len(self.shares) != workers:
            raise ValueError(f"{self.name}: {len(self.shares)} weights for {workers} workers on axis {place.workers!r}")
        local, shared = at_device(self.name, state, place.identity, self.roles)
        plan = state.about.plan
        here = self._plan(workers, plan.tree)
        if plan != here:
            shapes = lambda plan: [x.shape for x in jax.tree.leaves(plan.like)]
            raise ValueError(
                f"{self.name}: the state was made for another route, layout or number of workers: its vectors are "
                f"{shapes(plan)}, and here, for {workers} workers, {shapes(here)}. Make it with jc.init_state."
            )
        return local, shared, plan

    def _plan(self, workers: int, tree: Any) -> Plan:
        return plan_of(self.layout if self.route.layout is None else self.route.layout(self.layout, workers), tree)

    def _about(self, plan: Plan) -> About:
        return About(self.placement.identity, plan, self.roles)

    def _key(self, shared: MeanShared) -> Array:
        """Private to this worker and round: any round can be replayed."""
        key = jax.random.fold_in(wrap_key(shared.key), shared.count)
        if self.placement.outer:
            key = jax.random.fold_in(key, axis_index(self.placement.outer))
        return jax.random.fold_in(key, axis_index(self.placement.workers))

    def _way(self, plan: Plan) -> "Way":
        dtype = wide(*plan.dtypes)
        weights = None if self.shares is None else jnp.asarray(self.shares, dtype)
        buckets = None if self.layout.bucket_bytes is None else plan.buckets
        exact = any(_has_role(self.algorithm.roles, role) for role in ("memory", "narrow memory", "shift"))
        return Way(self.placement, self.route, self.link, weights, buckets, exact, self.code)

    def _errors(self, measured: Array | None, errors: Errors, arrays: list[Array], before: Errors) -> Errors:
        """Those of this round, or of the last one in which they were measured."""
        if measured is None:
            return no_errors()
        typed = lambda x: varying(x, self.placement.every)
        bad = lax.cond(measured, lambda: typed(nonfinite(arrays)), lambda: typed(jnp.zeros((), jnp.float32)))
        return jax.tree.map(lambda a, b: jnp.where(measured, a, b), errors._replace(nonfinite=bad), before)


def _has_role(roles: Any, role: str) -> bool:
    values = roles.values() if hasattr(roles, "values") else [roles]
    return any(value == role or (hasattr(value, "values") and _has_role(value, role)) for value in values)


# ------------------------------------------------------------------------------------------------
# One message


class Way(NamedTuple):
    """How messages travel: what the user of an algorithm chose.

    weights: f[n] of all workers, with sum one, or None for equal ones. buckets: of the vectors. exact: the algorithm
    remembers what it sent, so sums must not be rounded. code: whose bits are counted; None: what is cheap to count.
    sparse: whether means may have `SparseSum` for vectors.
    """

    placement: Placement
    route: Route
    link: Link
    weights: Array | None = None
    buckets: tuple[int, ...] | None = None
    exact: bool = False
    code: str | None = None
    sparse: bool = False

    @property
    def call(self) -> Call:
        place = self.placement
        return Call(place.workers, self.weights, self.link, place.replicas, self.buckets, self.exact, place.outer)


class Message:
    """What came of one message (`base.Sent`). Nothing is computed, or traced, before it is asked for."""

    def __init__(self, out: Outgoing, message: Any, mine: Any, state: State, carried: Carried, way: Way):
        self._out, self._message, self._mine, self._carried, self._way = out, message, mine, carried, way
        self.state = state

    @functools.cached_property
    def mean(self) -> Any:
        return mean_of(self._out, self._carried, self._way.call, sparse=self._way.sparse)

    def decoded(self) -> Any:
        return self._out.compressor.decompress(self._out.payload, self._mine, self._out.like)

    @functools.cached_property
    def own(self) -> Any:
        return self.decoded()

    @functools.cached_property
    def residual(self) -> Any:
        return residual(self._out.compressor, self._message, self._out.payload, self._mine)

    def add_to(self, total: Any, weight: Any) -> Any:
        def added(total, payload):
            return add_own(self._out.compressor, total, payload, weight, self._mine)

        return in_place(added, total, self._out.payload)

    def read_by(self, compressor: Compressor) -> tuple[Any, Any]:
        if self._carried.payloads is None:
            raise ValueError(f'via="{self._carried.route}" does not bring the payloads themselves to all workers')
        own = compressor.decompress(self._out.payload, self._mine, self._out.like)
        return mean_of(self._out._replace(compressor=compressor), self._carried, self._way.call), own


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
        return self.means([(key, compressor, message, state)])[0]

    def means(self, messages: Sequence[tuple[Array, Compressor, Any, State]]) -> list[Message]:
        packed = [self._packed(*message) for message in messages]
        call, route = self._way.call, self._way.route
        if len(packed) > 1 and route.carry_all is not None:
            every = route.carry_all([out for out, _, _ in packed], call)
        else:
            every = []
            for outgoing, _, _ in packed:
                every.append(route.carry(outgoing._replace(state=self._state), call))
                self._state = every[-1].state
        return [self._arrived(*each) for each in zip(messages, packed, every, strict=True)]

    def _packed(self, key: Array, compressor: Compressor, message: Any, state: State) -> tuple[Outgoing, Any, Any]:
        """A message as it leaves, the compressor's state as this worker uses it, and its local state afterwards."""
        call = self._way.call
        mine = for_worker(compressor, state.shared, self.index, self.size)
        route_key, key = jax.random.split(key)
        payload, local = compressor.compress(key, message, State(state.local, mine))
        # Typed alike: an array that happens to be typed as equal (an empty one, say) would give loops and conditionals
        # branches of different types.
        payload = varying(payload, (*axis_names(call.axis), *call.outer, *varying_axes(payload)))
        return Outgoing(route_key, compressor, payload, state.shared, like_of(message), self._state), mine, local

    def _arrived(self, given: tuple, packed: tuple, carried: Carried) -> Message:
        (_, compressor, message, state), (outgoing, mine, local) = given, packed
        after = State(local, advance(compressor, state.shared))
        sent = Message(outgoing, message, mine, after, carried, self._way)
        count = count_message(message, outgoing.payload, carried, self._way.code)
        self._counts += (count._replace(overflow=overflow(compressor, local), errors=self._errors(sent, message)),)
        return sent

    def sum(self, x: Any) -> Any:
        call, dtype = self._way.call, wide(*(leaf.dtype for leaf in jax.tree.leaves(x)))
        total, sent_bytes = summed(x, call.axis, call.weights, call.replicas, None, True, dtype)
        self._counts += (count_sum(x, sent_bytes),)
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

    def _errors(self, sent: Message, message: Any) -> Errors:
        if self._measured is None:
            return no_errors()
        none, every = varying(no_errors(), self._way.placement.every), self._way.placement.every
        own = sent.decoded  # a function: what is computed inside a branch must not be kept outside
        return lax.cond(self._measured, lambda: varying(errors_of(message, own()), every), lambda: none)


# ------------------------------------------------------------------------------------------------
# How a state is kept: with leading axes


def local_rows(axis: Axis) -> int:
    """Leading axis of local arrays: n where we stand outside and the ambient mesh says what n is."""
    if is_bound(axis):
        return 1
    sizes = jax.sharding.get_abstract_mesh().shape
    names = axis_names(axis)
    return math.prod(sizes[name] for name in names) if all(name in sizes for name in names) else 1


def _with_rows(tree: Any, axis: Axis) -> Any:
    """The same arrays on a leading axis, as often as there are rows here, typed as differing over `axis`."""
    rows = local_rows(axis)
    tree = jax.tree.map(lambda x: jnp.tile(x[None], (rows,) + (1,) * x.ndim), tree)
    return varying(tree, axis) if is_bound(axis) else tree


def off_device(local: MeanLocal, shared: MeanShared, about: About) -> MeanState:
    """A state as it is kept: with leading axes."""
    place = about.placement
    shared = _with_rows(shared, place.outer) if place.outer else shared
    return MeanState(_with_rows(local, place.every), shared, about)


def at_device(name: str, state: Any, placement: Placement, roles: tuple) -> State:
    """Local and shared state of this device, without leading axes.

    Raises:
        ValueError: it is the state of another transformation, or not cut for one device, or the same on all devices.
    """
    if not isinstance(state, MeanState) or (state.about.placement, state.about.roles) != (placement, roles):
        got = f"{state.about.placement} with {dict(state.about.roles)}" if is_mean(state) else type(state).__name__
        lost = is_mean(state) and not axis_names(placement.workers) and axis_names(state.about.placement.workers)
        cure = ". No mesh was found here: give arrays (or shapes) that have a sharding, mesh=, or jax.set_mesh"
        raise ValueError(f"{name}: expected a state of {placement} with {dict(roles)}; got {got}{cure if lost else ''}")
    cure = "Make the state, and its in_specs and out_specs, with jc.init_state"
    equal = known_equal(state.local, placement.workers) if is_bound(placement.workers) else []
    if equal and _workers_here(placement) > 1:
        raise ValueError(
            f"{name}: local state{equal[0]} is typed as equal on all workers: passed with P(), all but one worker's "
            f"memory would be lost. {cure}, or with jc.state_specs(state, {placement.workers!r})."
        )

    def one(path, x):
        if x.shape[:1] != (1,):
            raise ValueError(
                f"{name}: state{jax.tree_util.keystr(path)} has shape {x.shape}, expected a leading axis of 1 at one "
                f"worker. {cure}; hand one that other workers saved on by jc.redistribute(old, new)."
            )
        return x[0]

    local = jax.tree_util.tree_map_with_path(one, varying(state.local, placement.every))
    return State(local, jax.tree_util.tree_map_with_path(one, state.shared) if placement.outer else state.shared)


def _workers_here(placement: Placement) -> int:
    sizes = jax.sharding.get_abstract_mesh().shape
    return math.prod(sizes.get(name, 1) for name in placement.names)
