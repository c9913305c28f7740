"""Mesh axes: which are bound, where workers, shards and replicas lie, and what types say about an array.

Under `shard_map(check_vma=True)`, its default, the type of each array lists the manual mesh axes over which it may
vary. Loops and conditionals insist that types match, and an out spec `P()` is accepted only for what is typed as equal.
Under vmap, pmap and `check_vma=False` there are no such types: everything here that changes a type then does nothing.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

__all__ = [
    "Axis",
    "Placement",
    "axis_index",
    "axis_names",
    "axis_size",
    "check_gradients",
    "check_own",
    "crossed",
    "is_bound",
    "is_manual",
    "known_equal",
    "local_rows",
    "on_equal_types",
    "proven_equal",
    "types_tell",
    "unknown_axes",
    "varying",
    "varying_axes",
    "with_worker_axis",
    "without_worker_axis",
    "workers_here",
]

Array = jax.Array
Axis = str | tuple[str, ...] | None


def axis_names(axis: Axis) -> tuple[str, ...]:
    """The names of an axis: none for None, one for a string."""
    return () if axis is None else (axis,) if isinstance(axis, str) else tuple(axis)


def is_bound(axis: Axis) -> bool:
    """Whether we are inside a `shard_map`, `pmap` or `vmap` that names the axis."""
    try:
        axis_size(axis)
    except NameError:
        return False
    return True


def is_manual(axis: Axis) -> bool:
    """Whether the axis is one of a mesh that `shard_map` or `pmap` has bound: what is exchanged over it crosses between
    devices."""
    return bool(axis) and set(axis_names(axis)) <= _manual_axes()


def axis_size(axis: Axis) -> int:
    """Number of workers; 1 without an axis."""
    return lax.axis_size(axis) if axis else 1


def crossed(axis: Axis) -> Axis:
    """The axis without mesh axes of a single device, which no collective may name where JAX leaves them out of types
    (`jax_remove_size_one_mesh_axis_from_type`); None where there is no other."""
    return tuple(name for name in axis_names(axis) if axis_size(name) > 1) or None


def axis_index(axis: Axis) -> Array:
    """This worker's number, i32[]; 0 without an axis."""
    return lax.axis_index(axis).astype(jnp.int32) if axis else jnp.zeros((), jnp.int32)


def local_rows(axis: Axis) -> int:
    """Length of the leading axis of local arrays: n outside of the mapped function, where the mesh in force says what n
    is; else 1."""
    if is_bound(axis):
        return 1
    sizes = jax.sharding.get_abstract_mesh().shape
    names = axis_names(axis)
    return math.prod(sizes[name] for name in names) if all(name in sizes for name in names) else 1


def with_worker_axis(tree: Any, axis: Axis) -> Any:
    """Arrays on a leading axis of workers, as often as there are rows here, typed as differing over `axis`."""
    rows, (leaves, structure) = local_rows(axis), jax.tree.flatten(tree)
    repeated = [lax.broadcast(jnp.asarray(x), (rows,)) for x in leaves]
    return varying(structure.unflatten(repeated), axis)


def without_worker_axis(name: str, tree: Any, axis: Axis, what: str = "state") -> Any:
    """Inverse of `with_worker_axis` at one worker.

    Raises:
        ValueError: there are several rows, or none; named after the function `name` and after `what` they belong to.
    """

    tree = varying(tree, axis)
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        if x.shape[:1] != (1,):
            raise ValueError(
                f"{name}: {what}{jax.tree_util.keystr(path)} has shape {x.shape}, expected a leading axis of 1 at one "
                "worker. Make the state, and its in_specs and out_specs, with jc.init_state; hand one that other "
                "workers saved on by jc.redistribute(old, new)."
            )
    return jax.tree.map(operator.itemgetter(0), tree)


def varying(tree: Any, axis: Axis) -> Any:
    """Types arrays as differing over the axis, where `shard_map` keeps track of that. No data moves."""
    manual = _manual_axes()
    names = [name for name in dict.fromkeys(axis_names(axis)) if name in manual]
    if not names:
        return jax.tree.map(jnp.asarray, tree)

    def mark(x):
        x = jnp.asarray(x)
        known = varying_axes(x)
        missing = tuple(name for name in names if name not in known)
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(mark, tree)


def types_tell(axis: Axis) -> bool:
    """Whether types say what is equal on all workers: inside `shard_map` with its default check_vma=True."""
    return bool(axis) and set(axis_names(axis)) <= set(varying_axes(varying(jnp.zeros(()), axis)))


def known_equal(tree: Any, axis: Axis) -> list[str]:
    """Paths of the arrays whose types say that they are equal on all workers."""
    if not types_tell(axis):
        return []
    names = set(axis_names(axis))
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [jax.tree_util.keystr(path) for path, x in leaves if not names & set(varying_axes(x))]


def unknown_axes(tree: Any, axis: Axis, named: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Mesh axes, other than the named ones, over which arrays differ; and over which the compiler may have cut them.

    Both are empty outside of a `shard_map` over `axis`.
    """
    mesh, manual = jax.sharding.get_abstract_mesh(), _manual_axes()
    if not is_manual(axis):
        return [], []
    leaves = [jnp.asarray(x) for x in jax.tree.leaves(tree)]
    differ = set(varying_axes(leaves)) - set(named)
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    open_ = [name for name in mesh.axis_names if name not in manual and mesh.shape[name] > 1]
    specs = [str(jax.typeof(x).sharding.spec) for x in leaves]
    cut = lambda name: kinds[name] == jax.sharding.AxisType.Auto or any(f"'{name}'" in spec for spec in specs)
    return sorted(differ), [name for name in open_ if cut(name)]


def varying_axes(tree: Any) -> tuple[str, ...]:
    """All mesh axes over which some array differs, as far as types tell."""
    types = [jax.typeof(jnp.asarray(x)) for x in jax.tree.leaves(tree)]
    return tuple(sorted({name for each in types for name in each.manual_axis_type.varying}))


def _manual_axes() -> set[str]:
    return set(getattr(jax.sharding.get_abstract_mesh(), "manual_axes", ()))


# ------------------------------------------------------------------------------------------------
# Types that the tracing context cannot find out by itself

_proven_equal = Primitive("proven_equal")
_proven_equal.def_impl(lambda x, **_: x)
mlir.register_lowering(_proven_equal, lambda context, x, **_: [x])


@_proven_equal.def_abstract_eval
def _(x, *, names):
    kind = x.manual_axis_type
    return x.update(manual_axis_type=type(kind)(varying=kind.varying - frozenset(names)))


def _batched_proven_equal(axis_data, args, dims, *, names):
    (x,), (dim,) = args, dims
    if dim is None or axis_data.name not in names:
        return _proven_equal.bind(x, names=names), dim
    # All rows are equal: any of them is the value without the axis.
    return lax.index_in_dim(x, 0, dim, keepdims=False), None


batching.fancy_primitive_batchers[_proven_equal] = _batched_proven_equal


def proven_equal(tree: Any, axis: Axis) -> Any:
    """Retypes arrays as equal on all workers, where the exchange that made them proves it.

    What arrived by point-to-point messages is typed as varying, although every worker ends with the same
    rows. This tells `shard_map(check_vma=True)` and `vmap(out_axes=None)` so; no data moves.
    """
    names = axis_names(axis)
    return jax.tree.map(lambda x: _proven_equal.bind(jnp.asarray(x), names=names), tree) if names else tree


def on_equal_types(function: Callable[..., Any], *args: Any) -> Any:
    """function(*args), traced with arrays of one type, for a function that names no collective.

    Loops refuse a carry that begins as zeros, typed as equal everywhere, and ends as a sum of what varies. Here the
    function sees only arrays typed as equal, and its results are typed as varying over all axes over which some array
    in `args` varies.
    """
    manual = _manual_axes()
    axes = tuple(name for name in varying_axes(args) if name in manual) if manual else ()
    return varying(function(*proven_equal(args, axes)), axes) if axes else function(*args)


# ------------------------------------------------------------------------------------------------
# Where workers are


@dataclasses.dataclass(frozen=True)
class Placement:
    """The mesh axes that hold workers, shards and replicas.

    workers: axis (or axes) over which the mean is taken; None for a single worker.
    later: those of each later level of a hierarchy, at which groups of these workers exchange.
    shards: those along which parameters are cut into shards.
    replicas: those along which gradients are equal, so that the devices there share the work.
    partial: whether it is part of a larger mesh, so that shared state may differ over `outer`.
    """

    workers: Axis
    later: tuple[tuple[str, ...], ...] = ()
    shards: tuple[str, ...] = ()
    replicas: tuple[str, ...] = ()
    partial: bool = False

    def __str__(self) -> str:
        values = [(field.name, getattr(self, field.name)) for field in dataclasses.fields(self)]
        return ", ".join(f"{name}={value}" for name, value in values if value or name == "workers")

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the axes of the workers."""
        return axis_names(self.workers)

    @functools.cached_property
    def outer(self) -> tuple[str, ...]:
        """Axes over which gradients differ and which it leaves alone, in the order of the leading axis of a state."""
        return (*(name for axes in self.later for name in axes), *self.shards)

    @functools.cached_property
    def every(self) -> Axis:
        """Axes over which gradients differ."""
        return (*self.outer, *self.names) or None

    @functools.cached_property
    def identity(self) -> "Placement":
        """Facts that two placements have in common whose states can be handed on to one another."""
        return Placement(self.names, self.later, self.shards, (), self.partial)


def workers_here(name: str, placement: Placement) -> tuple[int, Array]:
    """How many workers there are, and the number of this one.

    Raises:
        ValueError: an axis is not bound here; named after the function `name`.
    """
    for axis in (placement.workers, placement.outer or None):
        if not is_bound(axis):
            raise ValueError(
                f"{name}: no axis named {axis!r} is bound here; call it inside jax.shard_map, jax.pmap or "
                "jax.vmap(axis_name=...)"
            )
    return axis_size(placement.workers), axis_index(placement.workers)


def _some(leaves: list[str]) -> str:
    return f"gradients{', gradients'.join(leaves[:3])}{' ...' if leaves[3:] else ''}"


def check_gradients(grads: Any, placement: Placement) -> None:
    """Refuses gradients that are equal where they should differ, or differ where nobody said so."""
    if not _manual_axes():  # there are no types that tell
        return
    check_own(grads, placement.workers)
    whole = [name for name in placement.outer if known_equal(grads, name)]
    if whole:
        leaves = known_equal(grads, whole[0])
        if whole[0] not in placement.shards:
            raise ValueError(
                f"compressed_mean: {_some(leaves)} are equal along {whole[0]!r}, over which a later level takes the "
                "mean: they were added up uncompressed. Differentiate with respect to jc.per_worker(params, levels), "
                "levels as given to compressed_mean."
            )
        raise ValueError(
            f"compressed_mean: {_some(leaves)} are equal along mesh axis {whole[0]!r}, and not shards. Give sharded= "
            "the tree of PartitionSpecs of the parameters."
        )
    differ, automatic = unknown_axes(grads, placement.workers, (*placement.names, *placement.outer))
    if differ:
        raise ValueError(
            f"compressed_mean: gradients differ over mesh axis {differ[0]!r}, too. If parameters are shards over it, "
            f"say sharded={differ[0]!r}; if it holds more workers, name it in axis_name; if they are parts of a sum, "
            "add them up before."
        )
    if automatic:
        raise ValueError(
            f"compressed_mean: mesh axis {automatic[0]!r} is not manual here, and gradients may be sharded over it: to "
            "compress them the compiler would gather the whole of each on every device. Make all axes of the mesh "
            f"manual (leave axis_names out of jax.shard_map) and say sharded={automatic[0]!r}: then each device "
            "compresses its own shard."
        )


def check_own(grads: Any, axis: Axis) -> None:
    """Refuses gradients that are equal on all workers."""
    equal = known_equal(grads, axis)
    if equal and axis_size(axis) > 1:
        raise ValueError(
            f"compressed_mean: {_some(equal)} are typed as equal on all workers of axis {axis!r}. Under jax.shard_map, "
            "jax.grad sums the gradient of a replicated parameter over the workers by itself: uncompressed, and n "
            "times the mean. Differentiate with respect to jc.per_worker(params, axis_name) instead; mark gradients "
            "that are meant to be equal the same way, jc.per_worker(grads, axis_name)."
        )
