"""One round of an algorithm at one worker: its state is opened, what it asks for is answered, its state is put away.

An algorithm is a generator (`base.Algorithm`): it yields requests and is sent their answers. The driver compresses a
message, hands all payloads to the route at once, and makes of what arrived the means, when they are asked for.
Every outer form (`compressed_mean`, `rounds`, `local_updates`) runs an `Exchange`, so that weights, routes and
hierarchies are the same in all of them.
"""

import copy
import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from jaxcomp.arrays import bounded, check_decoded, key_data, wide, wrap_key
from jaxcomp.backend import (
    LONG,
    all_there,
    in_place,
    is_apart,
    is_lazy,
    made_in_pieces,
    materialized,
    rows_at_once,
    shared_program,
    whole_vectors,
)
from jaxcomp.base import (
    Algorithm,
    Compressor,
    Cond,
    Mean,
    Round,
    State,
    Sum,
    TooLong,
    accumulate,
    add_own,
    advance,
    answered,
    check_pair,
    for_worker,
    left,
    residual,
    sides,
    whole,
)
from jaxcomp.compressors.rows import compress_together
from jaxcomp.exchange.agreement import check_inside, options_of
from jaxcomp.exchange.axes import (
    Placement,
    axis_index,
    axis_names,
    axis_size,
    crossed,
    is_bound,
    known_equal,
    local_rows,
    on_equal_types,
    types_tell,
    varying,
    varying_axes,
    with_worker_axis,
    without_worker_axis,
    workers_here,
)
from jaxcomp.exchange.collectives import summed
from jaxcomp.exchange.links import DEFAULT, Levels, Link, placed_on
from jaxcomp.exchange.measure import errors_of, joint_errors, nonfinite
from jaxcomp.exchange.routes import ROUTES, Arrived, Carried, Parcel, Route, Way, route_number, route_of, two_shots_pay
from jaxcomp.exchange.state import (
    FIRST_COUNTS,
    NO_COUNTS,
    NO_ERRORS,
    UNIT,
    Counts,
    Description,
    Errors,
    MeanLocal,
    MeanShared,
    MeanState,
    OwnState,
    is_mean,
)
from jaxcomp.groups import Choice, Groups, Layout, compressors_of, groups_of, split, warn_if_dense
from jaxcomp.payloads import counted, lane_bytes

__all__ = ["Exchange", "Message", "add_counts", "idle", "own_at_device", "own_off_device"]

Array = jax.Array
PADDING = 2**13  # bytes of tiles that are not filled, which are nobody's choice
MORE = (
    "{}: this exchange sends {:,.0f} bytes from each of {} workers by {!r}, and an all-reduce of the same gradients in "
    'f32 would send {:,.0f}. via="auto" never sends more; fewer bytes take a smaller ratio, via="two_shot", or a '
    "hierarchy (a mapping from axes to algorithms) whose last axis has fewer workers"
)


# ------------------------------------------------------------------------------------------------
# One round


class Exchange(NamedTuple):
    """An algorithm bound to a place on a mesh and to a route: made once, when a transformation is built.

    name: of the outer form, for errors. root: key of both kinds of randomness, or its words. layout: how trees are laid
    out. choices: what compresses their groups, for each part of `by_path`. roles: of the algorithm, frozen. exact:
    whether it remembers what was sent (`Way.exact`). link: between workers, for routes that have a choice. shares:
    weights of the workers, with sum one, or None. measure: errors are measured in one of so many rounds; 0 for never.
    code: whose bits are counted; None: what is cheap. others: further options of the outer form, in which processes
    must agree.
    """

    name: str
    algorithm: Algorithm
    placement: Placement
    route: Route
    root: Array
    layout: Layout
    choices: tuple[Choice, ...]
    roles: tuple
    exact: bool
    link: Link | Mapping[str, Link] = DEFAULT
    shares: np.ndarray | None = None
    measure: int = 0
    code: str | None = None
    others: tuple[tuple[str, Any], ...] = ()

    def init(self, tree: Any, *, starts: bool = False) -> MeanState:
        """The state for gradients like `tree`; or, if it starts there, of a method with this point."""
        place = self.placement.workers
        workers = axis_size(place) if is_bound(place) else local_rows(place)
        self._levels(workers)  # refuses links of another number of workers
        run = self._taken(tree, workers)
        groups = run._groups(workers, tree)
        warn_if_dense(self.name, groups)
        compressors = compressors_of(self.choices, groups.groups)
        shared_key, private_key = jax.random.split(wrap_key(self.root))
        route = State()
        if self.algorithm.compressor is not None:
            shared_key, route_key = jax.random.split(shared_key)
            route = route if run.route.init is None else run.route.init(route_key, compressors, groups.like)
        first = Round(shared_key, groups.groups, compressors)
        state = self.algorithm.init(first, split(groups, tree) if starts else groups.like)
        kept, zero = sides(state, self.algorithm.roles), jnp.zeros((), jnp.int32)
        local = MeanLocal(kept.local, route.local, FIRST_COUNTS)
        shared = MeanShared(zero, key_data(private_key), zero, kept.shared, route.shared)
        chosen = "" if run.route is self.route else run.route.name
        options = self.options(groups) if jax.process_count() > 1 else ""
        check_inside(self.name, options, self.placement)
        return closed(local, shared, Description(self.placement.identity, groups, self.roles, chosen, options))

    def step(
        self, state: Any, grads_of: Callable[[Groups], Any], arrays: Sequence[Array] = ()
    ) -> tuple[Any, MeanState]:
        """One round of this device: what `Algorithm.update` returns for the gradients `grads_of(groups)`, and the state
        after it. arrays: those whose non-finite entries count.
        """
        chosen = state.about.route if self.route.name == "auto" and isinstance(state, MeanState) else ""
        if chosen:  # two shots, when the state was made
            return self._replace(route=route_of(chosen)).step(state, grads_of, arrays)
        workers, index = workers_here(self.name, self.placement)
        local, shared, groups = self._opened(state, workers)
        grads = grads_of(groups)
        way = self._way(groups, workers, (arrays, local, shared))
        measured = shared.count % self.measure == 0 if self.measure else None
        compressors = compressors_of(self.choices, groups.groups)
        round_ = Round(self._key(shared, index), groups.groups, compressors, index, workers)
        roles, turn = self.algorithm.roles, _Turn(self, way, index, State(local.route, shared.route), measured)
        before = whole(State(local.algorithm, shared.algorithm), roles)
        ended = answered(self.algorithm.update(round_, grads, before), turn.answer)
        if not isinstance(ended, tuple) or len(ended) != 2:
            got = type(ended).__name__
            raise TypeError(f"{self.name}: the update of an algorithm returns (direction, state); got {got}")
        out, after = ended
        kept, counts = sides(after, roles), add_counts(turn.counted, local.counts.since)
        errors = NO_ERRORS if measured is None else self._errors(measured, counts.errors, arrays, local.counts.errors)
        local = MeanLocal(kept.local, turn.state.local, counts._replace(errors=errors))
        size = jnp.asarray(round_.size, jnp.int32)
        shared = MeanShared(shared.count + 1, shared.key, size, kept.shared, turn.state.shared)
        return out, closed(local, shared, state.about)

    def _opened(self, state: Any, workers: int) -> tuple[MeanLocal, MeanShared, Groups]:
        """Local and shared state of this device, without leading axes, and how it lays out trees.

        Raises:
            ValueError: it is the state of another transformation, or not cut for one device, or the same on all.
        """
        name, place = self.name, self.placement.identity
        if self.shares is not None and len(self.shares) != workers:
            axis = self.placement.workers
            raise ValueError(f"{name}: {len(self.shares)} weights for {workers} workers on axis {axis!r}")
        if not isinstance(state, MeanState) or (state.about.placement, state.about.roles) != (place, self.roles):
            got = f"{state.about.placement} with {dict(state.about.roles)}" if is_mean(state) else type(state).__name__
            lost = is_mean(state) and not axis_names(place.workers) and axis_names(state.about.placement.workers)
            cure = ". No mesh was found here: give arrays (or shapes) that have a sharding, mesh=, or jax.set_mesh"
            expected = f"expected a state of {place} with {dict(self.roles)}"
            raise ValueError(f"{name}: {expected}; got {got}{cure if lost else ''}")
        equal = known_equal(state.local, place.workers)
        if equal and axis_size(place.workers) > 1:
            raise ValueError(
                f"{name}: local state{equal[0]} is typed as equal on all workers: passed with P(), all but one worker's"
                " memory would be lost. Make the state, and its in_specs and out_specs, with jc.init_state, or with "
                f"jc.state_specs(state, {place.workers!r})."
            )
        shared = without_worker_axis(name, state.shared, None) if place.outer else state.shared
        local, groups = without_worker_axis(name, state.local, place.every), state.about.groups
        if groups.layout != self._layout(workers) and groups != (here := self._groups(workers, groups.tree)):
            shapes = lambda groups: [x.shape for x in groups.like]
            raise ValueError(
                f"{name}: the state was made for another route, layout or number of workers: its vectors are "
                f"{shapes(groups)}, and here, for {workers} workers, {shapes(here)}. Make it with jc.init_state."
            )
        return local, shared, groups

    def _way(self, groups: Groups, workers: int, inputs: Any) -> Way:
        """For the route. inputs: all arrays that messages are made of."""
        place = self.placement
        weights = None if self.shares is None else jnp.asarray(self.shares, wide(*groups.dtypes))
        buckets = self.layout.bucket_bytes is not None
        replicas, axis = place.replicas, place.workers
        if jax.config.jax_remove_size_one_mesh_axis_from_type:  # pyright: ignore[reportAttributeAccessIssue]
            axis = crossed(axis)
        if types_tell(axis):  # devices that hold the same share the work, also along axes that nobody named
            known = (*place.names, *place.outer, *replicas, *varying_axes(inputs))
            mesh = jax.sharding.get_abstract_mesh()
            replicas += tuple(name for name in mesh.manual_axes if name not in known and mesh.shape[name] > 1)
        rereads = self.algorithm.rereads
        link = self.link if isinstance(self.link, Link) else self._levels(workers)
        return Way(axis, workers, weights, link, replicas, buckets, self.exact, place.outer, rereads)

    def _key(self, shared: MeanShared, index: Array) -> Array:
        """Private to this worker and round: any round can be replayed."""
        key = jax.random.fold_in(wrap_key(shared.key), shared.count)
        if self.placement.outer:
            key = jax.random.fold_in(key, axis_index(self.placement.outer))
        return jax.random.fold_in(key, index)

    def _errors(self, measured: Array, errors: Errors, arrays: Sequence[Array], before: Errors) -> Errors:
        """Errors of this round, or of the last one in which they were measured."""
        typed = lambda x: varying(x, self.placement.every)
        bad = lax.cond(measured, lambda: typed(nonfinite(arrays)), lambda: typed(jnp.zeros((), jnp.float32)))
        return jax.tree.map(lambda a, b: jnp.where(measured, a, b), errors._replace(nonfinite=bad), before)

    def _layout(self, workers: int) -> Layout:
        return self.layout if self.route.layout is None else self.route.layout(self.layout, workers)

    def _groups(self, workers: int, tree: Any) -> Groups:
        return groups_of(self._layout(workers), tree)

    def _taken(self, tree: Any, workers: int) -> "Exchange":
        """The exchange as a tree and so many workers take it: via="auto" may take two shots, in their layout."""
        two_shot, algorithm = ROUTES["two_shot"], self.algorithm
        if self.route.name != "auto" or workers < 3:  # two shots of two workers send as much as a gather
            return self
        if algorithm.compressor is None or algorithm.parts or self.layout.bucket_bytes is not None:
            return self
        if two_shot.refuses(algorithm.compressor, algorithm.roles) is not None:
            return self
        other = self._replace(route=two_shot)
        try:
            both = self._groups(workers, tree), other._groups(workers, tree)
        except TooLong:
            return self
        pairs = lambda groups: list(zip(compressors_of(self.choices, groups.groups), groups.like, strict=True))
        own, chunks = map(pairs, both)
        return other if two_shots_pay(own, chunks, workers, self._levels(workers)) else self

    def _levels(self, workers: int) -> Link | Levels:
        return placed_on(self.name, self.link, axis_names(self.placement.workers), workers)

    def options(self, groups: Groups) -> str:
        """All that must be equal on all workers (`exchange.agreement`)."""
        others = {"via": self.route.name, "weights": self.shares, "seed": self.root, "measure": self.measure}
        others |= {"bucket_bytes": self.layout.bucket_bytes, "link": self.link, "code": self.code}
        return options_of(self.name, self.algorithm, groups, **others, **dict(self.others))


@dataclasses.dataclass(eq=False)
class _Turn:
    """Answers what an algorithm asks for in one round.

    exchange: that runs the round. way: for the route. index: number of this worker. state: of the route, from the last
    round. measured: whether the errors of messages are measured in this round; None if never. counted: what was sent.
    """

    exchange: Exchange
    way: Way
    index: Array
    state: State
    measured: Array | None
    counted: list[Counts] = dataclasses.field(default_factory=list)

    def answer(self, requests: list[Any]) -> list[Any]:
        """The answers to requests: messages together, sums together, conditionals one by one."""
        asked = [each for each in requests if isinstance(each, Mean)]
        added = [each for each in requests if isinstance(each, Sum)]
        found = {Mean: iter(self._means(asked) if asked else ()), Sum: iter(self._sums(added) if added else ())}
        return [self._cond(each) if isinstance(each, Cond) else next(found[type(each)]) for each in requests]

    def _means(self, requests: list[Mean]) -> "list[Message]":
        messages = [Message(request, self.way, self.index) for request in requests]
        parcels = [parcel for message in messages for parcel in message.parcels]
        with jax.named_scope(f"jc_exchange_{self.exchange.route.name}"):
            carried = self.exchange.route.carry(parcels, self.way, requests[0].route_key, self.state)
        self.state, arrived = carried.state, iter(carried.arrived)
        for message in messages:
            message.arrived = tuple(next(arrived) for _ in message.parcels)
        self.counted.append(self._count(messages, carried))
        return messages

    def _count(self, messages: "list[Message]", carried: Carried) -> Counts:
        """Counts of the messages that one call of a route carried. Warns where they are more than f32 would be."""
        each = [pair for message in messages for pair in zip(message.parcels, message.request.message, strict=True)]
        size, n = sum(x.size for _, x in each), self.way.workers
        dense = 8 * (n - 1) / n * size
        known = not isinstance(carried.sent_bytes, Tracer) and not self.way.replicas  # which add bytes on other axes
        if known and carried.sent_bytes > 1.01 * dense + PADDING:
            warnings.warn(MORE.format(self.exchange.name, carried.sent_bytes, n, carried.route, dense), stacklevel=2)
        held, bits, entries = carried.lane_bytes, carried.code_bits, 0.0
        bits = float(bits) if isinstance(bits, int) else jnp.asarray(bits, jnp.float32)
        for parcel, x in each:
            more = counted(parcel.payload, x, self.exchange.code)
            held, bits, entries = (a + b for a, b in zip((held, bits, entries), more, strict=True))
        count = counts_of(held, bits, entries, size, carried.sent_bytes, carried.route)
        local = [pair for message in messages for pair in message.locals if pair[0].overflow is not None]
        if unsent := [left(*pair) for pair in local]:
            count = count._replace(overflow=sum(x.overflow for x in unsent), searches=sum(x.searches for x in unsent))
        if self.measured is not None:
            count = count._replace(errors=joint_errors([self._errors(message) for message in messages]))
        return count

    def _sums(self, requests: list[Sum]) -> list[Any]:
        by_dtype: dict[Any, list[int]] = {}
        for i, request in enumerate(requests):
            by_dtype.setdefault(wide(*(leaf.dtype for leaf in jax.tree.leaves(request.x))), []).append(i)
        totals: list[Any] = [None] * len(requests)
        way = self.way
        for dtype, numbers in by_dtype.items():
            given = tuple(requests[i].x for i in numbers)
            with jax.named_scope("jc_exchange_sum"):
                found, sent_bytes = summed(given, way.axis, way.weights, way.replicas, None, True, dtype)
            size, held = sum(leaf.size for leaf in jax.tree.leaves(given)), lane_bytes(given)
            self.counted.append(counts_of(held, 8 * held, size, size, sent_bytes, "sum"))
            for i, total in zip(numbers, found, strict=True):
                totals[i] = total if way.weights is None else jax.tree.map(lambda t: t * way.workers, total)
        return totals

    def _cond(self, request: Cond) -> Any:
        every = self.exchange.placement.every

        def apart(branch: Callable[..., Any]) -> Callable[..., Any]:
            def run(state: State, *operands: Any) -> Any:
                turn = _Turn(self.exchange, self.way, self.index, state, self.measured)
                out = answered(branch(*operands), turn.answer)
                return out, varying(turn.state, every), varying(add_counts(turn.counted), every)

            return run

        branches = apart(request.yes), apart(request.no)
        out, self.state, counts = lax.cond(request.predicate, *branches, self.state, *request.operands)
        self.counted.append(counts)
        return out

    def _errors(self, message: "Message") -> Errors:
        every = self.exchange.placement.every
        none = varying(NO_ERRORS, every)
        measure = lambda: varying(errors_of(message.request.message, message.decoded(message.parcels)), every)
        return lax.cond(self.measured, measure, lambda: none)


# ------------------------------------------------------------------------------------------------
# One message


class Message:
    """Outcome of one message (`base.Sent`). Nothing is computed, or traced, before it is asked for.

    parcels: what is sent of each group. programs: the compressor of each, as it is run. mine: shared states of the
    compressors as this worker uses them. locals: each compressor with its local state afterwards. arrived: what the
    route brought of each group.
    """

    def __init__(self, request: Mean, way: Way, index: Array):
        self.request, self.way = request, way
        self.arrived: tuple[Arrived, ...] = ()
        pairs = list(zip(request.compressors, request.states, strict=True))
        self.mine = tuple(for_worker(c, state.shared, index, way.workers) for c, state in pairs)
        with jax.named_scope("jc_encode"):
            self.programs, encoded = _encoded(request, self.mine)
        parcels, local = [], []
        each = zip(pairs, encoded, request.message, request.groups, strict=True)
        for (c, state), (payload, after), x, group in each:
            # Typed alike: an array that happens to be typed as equal (an empty one, say) would give loops and
            # conditionals branches of different types.
            payload = varying(payload, (*axis_names(way.axis), *way.outer, *varying_axes(payload)))
            parcels.append(Parcel(c, payload, state.shared, jax.ShapeDtypeStruct(x.shape, x.dtype), group.bucket))
            local.append((c, after))
        self.parcels, self.locals = tuple(parcels), tuple(local)
        # Gradients in f16: a direction is cut at 65504, where a memory in f32 is not.
        self.narrow = any(jnp.finfo(group.dtype).maxexp < 64 for group in request.groups)

    @functools.cached_property
    def mean(self) -> tuple[Any, ...]:
        return self._means(lazy=False)

    @property
    def direction(self) -> tuple[Any, ...]:
        return self.mean if self.narrow else self._means(lazy=True)

    @functools.cached_property
    def own(self) -> tuple[Any, ...]:
        return self.decoded(self.parcels)

    @property
    def residual(self) -> tuple[Any, ...]:
        each = zip(self.parcels, self.request.message, self.mine, strict=True)
        with jax.named_scope("jc_decode"):
            left = tuple(residual(p.compressor, x, p.payload, mine) for p, x, mine in each)
            if not self.narrow:
                return left
            return tuple(map(_with_lost, left, self.mean, self.request.groups))

    @property
    def states(self) -> tuple[State, ...]:
        each = zip(self.locals, self.request.states, strict=True)
        return tuple(State(local, advance(c, state.shared)) for (c, local), state in each)

    def add_to(self, total: tuple[Any, ...], weight: Any) -> tuple[Any, ...]:
        def add(totals, payloads):
            each = zip(self.programs, totals, payloads, self.mine, strict=True)
            return tuple(add_own(c, total, payload, weight, mine) for c, total, payload, mine in each)

        # All at once: of one loop for each group, XLA for CPU would copy what some of them are made in.
        with jax.named_scope("jc_decode"):
            return in_place(add, total, self.payloads)

    def read_by(self, compressors: tuple[Compressor, ...]) -> tuple[Any, Any]:
        if any(arrived.payloads is None and arrived.total is None for arrived in self.arrived):
            raise ValueError("this route does not bring the payloads themselves to all workers; use via='gather'")
        parcels = [p._replace(compressor=c) for p, c in zip(self.parcels, compressors, strict=True)]
        each = zip(parcels, self.arrived, compressors, strict=True)
        mean = tuple(_mean(parcel, arrived, self.way, c) for parcel, arrived, c in each)
        return mean, self.decoded(parcels)

    @property
    def payloads(self) -> tuple[Any, ...]:
        return tuple(parcel.payload for parcel in self.parcels)

    def again(self, message: tuple[Any, ...], payloads: tuple[Any, ...]) -> "Message":
        other = copy.copy(self)
        other.__dict__.pop("own", None)
        other.request = self.request._replace(message=message)
        other.parcels = tuple(p._replace(payload=x) for p, x in zip(self.parcels, payloads, strict=True))
        return other

    def decoded(self, parcels: Sequence[Parcel]) -> tuple[Any, ...]:
        """Decodes what this worker sent; for a branch, in which `own` must not keep what it is."""
        pairs = zip(parcels, self.mine, strict=True)
        with jax.named_scope("jc_decode"):
            return tuple(p.compressor.decompress(p.payload, mine, p.like) for p, mine in pairs)

    def _means(self, lazy: bool) -> tuple[Any, ...]:
        each = zip(self.parcels, self.arrived, self.programs, self.request.groups, strict=True)
        with jax.named_scope("jc_decode"):
            return tuple(
                _mean(parcel, arrived, self.way, program, group if lazy and len(parcel.like.shape) == 1 else None)
                for parcel, arrived, program, group in each
            )


def _with_lost(left: Array, mean: Array, group: Any) -> Array:
    """Memory of what was not sent, and of what the direction loses where it is cut to the largest number of its dtype.

    Every worker adds the same, so the mean of the memories grows by just that.
    """
    limit = float(jnp.finfo(group.dtype).max)
    lost = mean - jnp.clip(mean, -limit, limit)
    return jnp.where(lost != 0, bounded(left + lost.astype(left.dtype)), left)


def _encoded(request: Mean, mine: tuple[Any, ...]) -> tuple[list[Compressor], list[tuple[Any, Any]]]:
    """The compressors as they are run, and what each makes of the message of its group: payload and local state.

    Groups of equal shape and compressor share one traced program, except for linear compressors, whose little
    arithmetic XLA fuses with what is before and after it. Compressors that code each entry by itself, without a state,
    compress several vectors at once (`rows_at_once`).
    """
    alike: dict[Any, list[int]] = {}
    for i, (c, x) in enumerate(zip(request.compressors, request.message, strict=True)):
        alike.setdefault((id(c), x.shape, x.dtype), []).append(i)
    programs, encoded = list(request.compressors), {}
    states = [State(state.local, shared) for state, shared in zip(request.states, mine, strict=True)]
    for numbers in alike.values():
        c, stacks = programs[numbers[0]], [[i] for i in numbers]
        if len(numbers) > 1 and not c.spec.linear:
            add = functools.partial(accumulate, c)
            c = c._replace(compress=shared_program(c.compress), accumulate=shared_program(add))
            if c.spec.entrywise and not jax.tree.leaves([states[i] for i in numbers]):
                stacks = _stacks(request, numbers)
        for stack in stacks:
            keys, xs = ([each[i] for i in stack] for each in (request.keys, request.message))
            state = states[stack[0]]
            made = [c.compress(keys[0], xs[0], state)] if len(stack) == 1 else compress_together(c, keys, xs, state)
            for i, one in zip(stack, made, strict=True):
                programs[i], encoded[i] = c, one
    made = [encoded[i] for i in range(len(mine))]
    for c, one, state in zip(programs, made, states, strict=True):
        check_pair(c.spec.name, one, state)
    return programs, made


def _stacks(request: Mean, numbers: list[int]) -> list[list[int]]:
    """Groups, of equal vectors, that are compressed together: of one bucket, as others come later, and of one type."""
    ready: dict[Any, list[int]] = {}
    for i in numbers:
        ready.setdefault((request.groups[i].bucket, frozenset(varying_axes(request.message[i]))), []).append(i)
    most = rows_at_once()
    return [some[first : first + most] for some in ready.values() for first in range(0, len(some), most)]


def _mean(parcel: Parcel, arrived: Arrived, way: Way, program: Compressor, cut: Any = None) -> Any:
    """The mean of one group from what a route brought, on every worker alike.

    program: the compressor as it is run. cut: the group, if nothing reads it but what cuts it into leaves: then a long
    sum of sparse messages may be left unmade, and leaves may be decoded by themselves.
    """
    compressor, like = parcel.compressor, jax.ShapeDtypeStruct(parcel.like.shape, wide(parcel.like.dtype))
    if arrived.mean is not None:
        return arrived.mean
    if arrived.payloads is None:

        def decode(total: Any, shared: Any) -> Any:
            x_hat = compressor.decompress(total, for_worker(compressor, shared, 0, 1), like)
            check_decoded(compressor.spec.name, x_hat, like)
            return x_hat

        return way.mean_of(varying(on_equal_types(decode, arrived.total, parcel.shared), way.outer))
    weights = way.weights
    if weights is None:
        weights = jnp.full((way.workers,), way.share, like.dtype)

    def total(payloads: Any, weights: Any, shared: Any) -> Any:
        if cut and like.size >= LONG and compressor.entries is not None:
            found = compressor.entries(payloads, weights, shared, like)
            if is_lazy(found):
                return found
        return accumulate(program, like, payloads, weights, shared)

    def made(payloads: Any) -> Any:
        found = varying(on_equal_types(total, payloads, weights, parcel.shared), way.outer)
        return way.mean_of(found)

    if cut and compressor.spec.entrywise and is_apart(like.size, cut.sizes):
        return made_in_pieces(made, arrived.payloads, cut.sizes, cut.dtype)
    payloads = all_there(arrived.payloads)
    return made(payloads) if cut else materialized(made(payloads))


# ------------------------------------------------------------------------------------------------
# How a state is kept: with leading axes


def closed(local: MeanLocal, shared: MeanShared, about: Description) -> MeanState:
    """Inverse of `Exchange._opened`: the state as it is kept, with leading axes."""
    place = about.placement
    shared = with_worker_axis(shared, place.outer) if place.outer else shared
    return MeanState(with_worker_axis(whole_vectors(local), place.every), shared, about)


def idle(states: Any) -> Any:
    """The states of means, a tree of them, after a step without an exchange: their counts are those of no message."""

    def each(state: MeanState) -> MeanState:
        every = state.about.placement.every
        none = lambda value, x: varying(jnp.full(x.shape, value, x.dtype), every)
        before, since = state.local.counts._replace(since=()), varying(state.local.counts.since, every)
        counts = jax.tree.map(none, NO_COUNTS, before)._replace(since=since)
        return MeanState(state.local._replace(counts=counts), state.shared, state.about)

    return jax.tree.map(each, states, is_leaf=lambda node: isinstance(node, MeanState))


def own_off_device(local: Any, placement: Placement, roles: tuple) -> OwnState:
    """State that one worker keeps for itself, as it is kept: with a leading axis of workers."""
    return OwnState(with_worker_axis(local, placement.workers), placement.identity, roles)


def own_at_device(name: str, own: OwnState, placement: Placement) -> Any:
    """State that this worker keeps for itself, without the leading axis.

    Raises:
        ValueError: it belongs to another transformation, or is not cut for one worker.
    """
    if not isinstance(own, OwnState) or own.placement != placement.identity:
        got = own.placement if isinstance(own, OwnState) else type(own).__name__
        raise ValueError(f"{name}: expected a state of {placement.identity}; got {got}")
    return without_worker_axis(name, own.local, placement.workers, "own")


# ------------------------------------------------------------------------------------------------
# What is counted: nothing here changes what is sent


def add_counts(counts: list[Counts], since: Array | None = None) -> Counts:
    """Counts of several messages in one round: the sums; norms joined; of the routes the last one in the table.

    since: what the rounds before came to; None for a part of a round.
    """
    if len(counts) == 1:
        total = counts[0]
    else:
        counts = counts or [NO_COUNTS]
        totals: list[Any] = [
            sum(each[1:], start=each[0]) for each in zip(*(count[:7] for count in counts), strict=True)
        ]
        route = jnp.max(jnp.stack([count.route for count in counts]))
        total = Counts(*totals, route=route, errors=joint_errors([count.errors for count in counts]))
    if since is None:
        return total
    left = since[2:] + jnp.stack([total.sent_bytes, total.code_bits])
    units = jnp.floor(left / UNIT)
    return total._replace(since=jnp.concatenate([since[:2] + units, left - units * UNIT]))


def counts_of(held: Any, bits: Any, entries: Any, size: int, sent_bytes: Any, route: str) -> Counts:
    """Counts of some messages, without overflow and errors. In f32: the numbers may be more than any i32."""
    numbers = {"lane_bytes": held, "code_bits": bits, "entries": entries, "size": size, "sent_bytes": sent_bytes}
    numbers = {name: jnp.asarray(x, jnp.float32) for name, x in numbers.items()}
    return NO_COUNTS._replace(**numbers, route=jnp.asarray(route_number(route), jnp.int32))
