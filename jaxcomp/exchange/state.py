"""The state of an optimizer on a mesh: which arrays differ between which workers, wherever optax put them."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxcomp.base import State
from jaxcomp.exchange.placement import Placement
from jaxcomp.exchange.varying import Axis, axis_names, is_bound, known_equal, varying
from jaxcomp.layout import Plan, join

__all__ = [
    "About",
    "MeanLocal",
    "MeanShared",
    "MeanState",
    "at_device",
    "by_leaf",
    "check_rows",
    "frozen",
    "is_mean",
    "local_rows",
    "means_in",
    "off_device",
]

Array = jax.Array


class MeanLocal(NamedTuple):
    """Every array has a leading axis of workers: [1, ...] at one worker, [n, ...] for all of them.

    algorithm, route: what they remember. counts: of the last round, for `info`.
    """

    algorithm: Any
    route: Any
    counts: Any


class MeanShared(NamedTuple):
    """count i32[]: rounds so far; key uint32[2]: of the private randomness; workers i32[]: how many there were."""

    count: Array
    key: Array
    workers: Array
    algorithm: Any
    route: Any


@dataclasses.dataclass(frozen=True)
class About:
    """What a state is of: static, and compared before it is used.

    roles: `Algorithm.roles` as nested tuples, by which the state is handed on to other workers.
    """

    placement: Placement
    plan: Plan
    roles: tuple


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class MeanState:
    """The state of one `compressed_mean`, of one level of a hierarchy, or of `rounds`.

    Over `about.placement.outer`, the axes of later levels and of shards, everything here may differ. Where there are
    such axes, arrays of `shared` have a leading axis over them and arrays of `local` one over them and the workers; at
    one device both have length 1.
    """

    local: MeanLocal
    shared: MeanShared
    about: About = dataclasses.field(metadata={"static": True})


def frozen(roles: Mapping[str, Any]) -> tuple:
    """Nested mappings as nested tuples.

    >>> frozen({"x": "iterate", "algorithm": {"memory": "memory"}})
    (('algorithm', (('memory', 'memory'),)), ('x', 'iterate'))
    """
    pairs = ((name, frozen(role) if isinstance(role, Mapping) else role) for name, role in roles.items())
    return tuple(sorted(pairs))


def is_mean(node: Any) -> bool:
    """Whether it is the state of one mean."""
    return isinstance(node, MeanState)


def means_in(state: Any) -> list[MeanState]:
    """All of them, wherever optax put them."""
    return [node for node in jax.tree.leaves(state, is_leaf=is_mean) if is_mean(node)]


def by_leaf(mean: MeanState, vectors: Any) -> Any:
    """Vectors of a state (memories, shifts, iterates) as a tree like the parameters, behind their leading axes.

    >>> import jaxcomp as jc
    >>> tx = jc.compressed_mean(jc.error_feedback(jc.top_k(k=1)), None)
    >>> state = tx.init({"w": jnp.zeros((2, 3))})
    >>> jc.state.by_leaf(state, state.local.algorithm.memory)["w"].shape
    (1, 2, 3)
    """
    plan = mean.about.plan
    lead = jax.tree.map(lambda x, like: x.ndim - len(like.shape), vectors, plan.like)
    axes = max(jax.tree.leaves(lead), default=0)
    return functools.reduce(lambda f, _: jax.vmap(f), range(axes), functools.partial(join, plan))(vectors)


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
        raise ValueError(f"{name}: expected a state of {placement} with {dict(roles)}; got {got}")
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
                f"worker. {cure} (in_specs=jc.state_specs(state, axis_name))."
            )
        return x[0]

    local = jax.tree_util.tree_map_with_path(one, varying(state.local, placement.every))
    return State(local, jax.tree_util.tree_map_with_path(one, state.shared) if placement.outer else state.shared)


def _workers_here(placement: Placement) -> int:
    sizes = jax.sharding.get_abstract_mesh().shape
    return math.prod(sizes.get(name, 1) for name in placement.names)


def check_rows(name: str, state: MeanState) -> None:
    """Raises ValueError where a state, seen from outside, has one row of memory for several workers."""
    workers, counts = state.shared.workers, jax.tree.leaves(state.local.counts)
    if isinstance(workers, (Tracer, jax.ShapeDtypeStruct)):
        return
    # Of several processes each sees its own part, and the number is the same everywhere.
    here = workers.addressable_data(0) if isinstance(workers, jax.Array) else workers
    known = int(np.max(np.asarray(here), initial=0))
    if known > 1 and is_bound(None) and not is_bound(state.about.placement.workers) and np.shape(counts[0])[0] == 1:
        raise ValueError(
            f"{name}: this state has one row of memory for {known} workers: it was passed through shard_map with P(), "
            "and all other rows are lost. Make the state and its specs with jc.init_state(tx, params, mesh, axis_name)."
        )
