"""The state of an optimizer on a mesh: which arrays differ between which workers, wherever optax put them."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.core import Tracer

from jaxcomp.exchange.axes import Placement, is_bound
from jaxcomp.groups import Groups

__all__ = [
    "FIRST_COUNTS",
    "KEPT",
    "NOT_MEASURED",
    "NO_COUNTS",
    "NO_ERRORS",
    "UNIT",
    "Counts",
    "Description",
    "Errors",
    "MeanLocal",
    "MeanShared",
    "MeanState",
    "OwnState",
    "check_rows",
    "frozen",
    "is_mean",
    "is_own",
    "means_in",
    "state_dataclass",
]

Array = jax.Array
T = TypeVar("T")


NOT_MEASURED = -1.0  # in a state, where NaN would stop every run under jax_debug_nans; `info` says NaN


class Errors(NamedTuple):
    """Norms of C(m) - m and of m, which take passes over the gradient; -1 where they were not asked for."""

    error: Array
    norm: Array
    nonfinite: Array


UNIT = 2**24  # of totals: numbers below it are exact in f32


class Counts(NamedTuple):
    """Measurements of one worker in one round, as they are kept in the state. All scalars, f32 or i32.

    since: f32[4], since the state was made: whole UNITs of bytes and of bits that were sent, and what is left of both;
    () in what one message counts.
    """

    lane_bytes: Array
    code_bits: Array
    entries: Array
    size: Array
    overflow: Array
    searches: Array
    sent_bytes: Array
    route: Array
    errors: Errors
    since: Any = ()


_REAL, _WHOLE = np.float32(0), np.int32(0)
NO_ERRORS: Any = Errors(*(np.float32(NOT_MEASURED),) * 3)  # pyright: ignore[reportArgumentType]
NO_COUNTS: Any = Counts(_REAL, _REAL, _REAL, _REAL, _WHOLE, _WHOLE, _REAL, _WHOLE, NO_ERRORS)  # pyright: ignore[reportArgumentType]
FIRST_COUNTS = NO_COUNTS._replace(since=np.zeros(4, np.float32))  # of a state before its first round


KEPT: list[type] = []


def state_dataclass(kind: type[T]) -> type[T]:
    """Decorates a dataclass that is a state: it is a tree to JAX, and known to `jc.state.register_flax`."""
    KEPT.append(kind)
    return jax.tree_util.register_dataclass(kind)


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
class Description:
    """Description of a state: static, and compared before the state is used.

    roles: `Algorithm.roles` as nested tuples, by which the state is handed on to other workers.
    route: name of the route that via="auto" chose for this tree and number of workers, where it needs another layout.
    options: of the transformation that made it, for `exchange.agreement`. A state may be used with others.
    owners: of parameters that are cut over the workers themselves, how they lie in rows (`transforms.scattered`).
    """

    placement: Placement
    groups: Groups
    roles: tuple
    route: str = ""
    options: str = dataclasses.field(default="", compare=False, repr=False)
    owners: Any = None


@state_dataclass
@dataclasses.dataclass
class MeanState:
    """The state of one `compressed_mean`, of one level of a hierarchy, or of `rounds`.

    Over `about.placement.outer`, the axes of later levels and of shards, everything here may differ. Where there are
    such axes, arrays of `shared` have a leading axis over them and arrays of `local` one over them and the workers; at
    one device both have length 1.
    """

    local: MeanLocal
    shared: MeanShared
    about: Description = dataclasses.field(metadata={"static": True})


@state_dataclass
@dataclasses.dataclass
class OwnState:
    """State that a transformation keeps for each worker alone, say that of the inner optimizer in `local_updates`.

    local: a NamedTuple. Each array has a leading axis of workers, behind which it lies as it would in the state of any
    other optimizer: parts that are like sharded parameters are cut like them.
    roles: field -> "memory" or "compressor" (`base.ROLES`), as nested tuples.
    """

    local: Any
    placement: Placement = dataclasses.field(metadata={"static": True})
    roles: tuple = dataclasses.field(metadata={"static": True})


def frozen(roles: Mapping[Any, Any]) -> tuple:
    """Nested mappings as nested tuples.

    >>> frozen({"x": "iterate", "algorithm": {"memory": "memory"}})
    (('algorithm', (('memory', 'memory'),)), ('x', 'iterate'))
    """
    pairs = ((name, frozen(role) if isinstance(role, Mapping) else role) for name, role in roles.items())
    return tuple(sorted(pairs))


def is_mean(node: Any) -> bool:
    """Whether it is the state of one mean."""
    return isinstance(node, MeanState)


def is_own(node: Any) -> bool:
    """Whether it is what a transformation keeps for each worker alone."""
    return isinstance(node, OwnState)


def means_in(state: Any) -> list[MeanState]:
    """All of them, wherever optax put them."""
    return [node for node in jax.tree.leaves(state, is_leaf=is_mean) if is_mean(node)]


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
