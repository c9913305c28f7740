"""The state of an optimizer on a mesh: which arrays differ between which workers, wherever optax put them."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

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
    "init_state",
    "is_mean",
    "lay_out",
    "local_rows",
    "means_in",
    "names_of",
    "off_device",
    "per_worker",
    "state_axes",
    "state_specs",
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
    known = int(np.max(np.asarray(workers), initial=0))
    if known > 1 and is_bound(None) and not is_bound(state.about.placement.workers) and np.shape(counts[0])[0] == 1:
        raise ValueError(
            f"{name}: this state has one row of memory for {known} workers: it was passed through shard_map with P(), "
            "and all other rows are lost. Make the state and its specs with jc.init_state(tx, params, mesh, axis_name)."
        )


# ------------------------------------------------------------------------------------------------


class Marks(NamedTuple):
    """What stands for each part of an optimizer state: local(axes, outer), shared(outer), rest(leaf)."""

    local: Callable[[Axis, tuple[str, ...]], Any]
    shared: Callable[[tuple[str, ...]], Any]
    rest: Callable[[Any], Any]
    is_leaf: Callable[[Any], bool] = lambda node: False


def lay_out(state: Any, axis: Axis, marks: Marks) -> Any:
    """A tree of the structure of an optimizer state, with what `marks` says for each array."""

    def of_mean(node):
        place = node.about.placement
        axes = place.workers if place.partial else axis
        local, shared = marks.local(axes, place.outer), marks.shared(place.outer)
        fill = lambda value, tree: jax.tree.map(lambda _: value, tree)
        return MeanState(fill(local, node.local), fill(shared, node.shared), node.about)

    def of_steps(node):
        local = marks.local(axis, ())
        for leaf in jax.tree.leaves(node.acc_grads):
            if jnp.ndim(leaf) == 0 and isinstance(local, PartitionSpec):
                raise ValueError(
                    "state_specs: optax.MultiSteps accumulates gradients per worker, and one of them is a scalar, "
                    f"which cannot be laid out over axis {axis!r}. Make that parameter a vector of one entry."
                )
        fields = {name: walk(value) for name, value in node._asdict().items() if name != "acc_grads"}
        return type(node)(**fields, acc_grads=jax.tree.map(lambda _: local, node.acc_grads))

    def walk_fields(node):
        return type(node)(*map(walk, node))

    def special(node):
        return is_mean(node) or _is_steps(node) or marks.is_leaf(node)

    def walk(node):
        def one(x):
            if is_mean(x):
                return of_mean(x)
            # Around a mean, MultiSteps accumulates each worker's own gradients; behind one, what is equal on all.
            return of_steps(x) if _is_steps(x) and _has_mean(x) else walk_fields(x) if _is_steps(x) else marks.rest(x)

        return jax.tree.map(one, node, is_leaf=special)

    return walk(state)


def state_specs(state: Any, axis_name: Any, *, params: Any = None, specs: Any = None) -> Any:
    """PartitionSpecs of an optimizer state for `shard_map`: P(axis_name) for local arrays, else P().

    Args:
        state: of `compressed_mean`, or of any optax optimizer that contains it (chain,
            inject_hyperparams, masked, MultiSteps, ...), or its shapes (`jax.eval_shape(tx.init, params)`).
        axis_name: name of the data axis, a tuple of names, or the mapping given to `compressed_mean`.
        params: whole parameters, or their shapes, where they are sharded over other axes.
        specs: their PartitionSpecs, a tree like `params`. Parts of the state with the structure and shapes of the
            parameters (Adam's moments) are laid out like them.

    Returns:
        Tree of the same structure, for `in_specs` and `out_specs`.

    >>> import jax.numpy as jnp, optax, jaxcomp as jc
    >>> tx = jc.compressed_mean(jc.error_feedback(jc.top_k(0.1)), "data")
    >>> jc.state_specs(tx.init(jnp.zeros(50)), "data").local.algorithm.memory
    P('data',)
    """
    axis = names_of(axis_name)
    whole = lambda tree: [jnp.shape(leaf) for leaf in jax.tree.leaves(tree)]
    like_params = lambda node: False
    masked = lambda node: isinstance(node, optax.MaskedNode)  # in place of the parameters of other optimizers
    if specs is not None:
        structure, shapes = jax.tree.structure(params), whole(params)

        def like_params(node):
            if jax.tree.structure(node, masked) != structure:
                return False
            leaves = jax.tree.leaves(node, is_leaf=masked)
            pairs = [(jnp.shape(x), shape) for x, shape in zip(leaves, shapes, strict=True) if not masked(x)]
            return bool(pairs) and all(got == shape for got, shape in pairs)

    steps = [n for n in jax.tree.leaves(state, is_leaf=_is_steps) if _is_steps(n) and _has_mean(n)]
    if specs is not None and steps:
        raise ValueError(
            "state_specs: optax.MultiSteps with sharded parameters is not supported; add gradients up before"
        )

    def of_params(node):
        return jax.tree.map(lambda x, spec: x if masked(x) else spec, node, specs, is_leaf=masked)

    def local(axes, outer):
        return PartitionSpec((*outer, *axis_names(axes)) if outer else axes)

    return lay_out(
        state,
        axis,
        Marks(
            local=local,
            shared=lambda outer: PartitionSpec(outer) if outer else PartitionSpec(),
            rest=lambda node: of_params(node) if like_params(node) else PartitionSpec(),
            is_leaf=like_params,
        ),
    )


def _is_steps(node: Any) -> bool:
    """Of `optax.MultiSteps`."""
    return isinstance(node, optax.MultiStepsState)


def _has_mean(node: Any) -> bool:
    """Whether a mean over the workers is somewhere within."""
    return bool(means_in(node))


def names_of(axis: Any) -> Axis:
    """Axis names of an axis, which may be the mapping that `compressed_mean` takes."""
    return tuple(name for key in axis for name in axis_names(key)) if isinstance(axis, Mapping) else axis


def state_axes(state: Any) -> Any:
    """The same for `jax.vmap` and `jax.pmap`: 0 for local arrays, None for all others.

    Args:
        state: as for `state_specs`, of a mean over one axis.

    Returns:
        Tree prefix for `in_axes` and `out_axes`.
    """

    def local(axes, outer):
        if outer:
            raise ValueError(
                "state_axes: the state differs over several mesh axes; use jax.shard_map and jc.init_state"
            )
        return 0

    # None is an empty tree to JAX, so the result is a tree prefix: exactly what in_axes takes.
    return lay_out(state, None, Marks(local, lambda outer: None, lambda leaf: None))


def init_state(
    tx: optax.GradientTransformation, params: Any, mesh: Mesh | AbstractMesh | int, axis_name: Any, specs: Any = None
) -> tuple[Any, Any]:
    """Makes an optimizer state that lies where it belongs, each worker's part on its own device.

    Args:
        tx: optimizer with `compressed_mean` in it.
        params: parameters, equal on all workers, or whole ones that `specs` cuts, wherever they lie.
        mesh: the mesh that `shard_map` will run on; or the number of workers of a `vmap` or `pmap`; or an
            `AbstractMesh`, for shapes and dtypes alone, say of a state that other workers saved.
        axis_name: its data axis (or a tuple of axes, or the mapping given to `compressed_mean`).
        specs: PartitionSpecs of parameters that are sharded over other axes of the mesh, a tree like `params`.

    Returns:
        (state, specs): the state, and its PartitionSpecs for in_specs and out_specs; or, for a number of workers,
        the axes for in_axes and out_axes.

    Raises:
        ValueError: the mesh has no such axis.

    Sixty-four workers on one device:

    >>> import jax, jax.numpy as jnp, jaxcomp as jc
    >>> tx = jc.compressed_mean(jc.error_feedback(jc.top_k(k=1)), "data")
    >>> state, axes = jc.init_state(tx, jnp.zeros(5), 64, "data")
    >>> step = jax.vmap(tx.update, in_axes=(0, axes), out_axes=(None, axes), axis_name="data")
    >>> direction, state = step(jnp.ones((64, 5)), state)
    >>> print(direction, state.local.algorithm.memory.shape)
    [1. 0. 0. 0. 0.] (64, 1, 5)
    """
    if isinstance(mesh, int):
        axes = state_axes(jax.eval_shape(tx.init, params))
        make = jax.vmap(tx.init, in_axes=None, out_axes=axes, axis_name=names_of(axis_name), axis_size=mesh)
        return jax.jit(make)(params), axes
    names = axis_names(names_of(axis_name))
    unknown = [name for name in names if name not in mesh.shape]
    if unknown:
        raise ValueError(f"init_state: the mesh has axes {tuple(mesh.shape)}; got axis_name with {unknown[0]!r}")
    like = params if specs is None else _shards(params, mesh, specs)
    made = state_specs(jax.eval_shape(tx.init, like), axis_name, params=like, specs=specs)
    whole = PartitionSpec() if specs is None else specs
    if isinstance(mesh, AbstractMesh):
        params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)), params)
        mesh = mesh.update(axis_types=(AxisType.Auto,) * len(mesh.axis_names))
        make = jax.shard_map(tx.init, mesh=mesh, in_specs=(whole,), out_specs=made)
        with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):  # whatever mesh is in force here
            return jax.eval_shape(make, params), made
    if specs is not None:
        params = jax.tree.map(lambda leaf, spec: jax.device_put(leaf, NamedSharding(mesh, spec)), params, specs)
    make = jax.shard_map(tx.init, mesh=mesh, in_specs=(whole,), out_specs=made)
    return jax.jit(make)(params), made


def _shards(params: Any, mesh: Any, specs: Any) -> Any:
    """Shapes of the parameters at one device: whether a leaf is large or small is decided for its shard."""

    def one(leaf, spec):
        shape = NamedSharding(mesh, spec).shard_shape(jnp.shape(leaf))
        return jax.ShapeDtypeStruct(shape, jnp.result_type(leaf))

    return jax.tree.map(one, params, specs)


def per_worker(params: Any, axis_name: Any) -> Any:
    """The same parameters, as each worker's own: differentiate with respect to these.

    Under `jax.shard_map` (with its default `check_vma=True`) replicated parameters are typed as
    equal on all workers, and their gradient is therefore the sum over the workers: `jax.grad` adds an
    all-reduce of the whole gradient by itself. This marks them as each worker's own, so that the
    gradient stays local and nothing crosses but the compressed message. No data moves. Under vmap,
    pmap and `check_vma=False` it does nothing, and is not needed.

    Args:
        params: any tree.
        axis_name: mapped axis, a tuple of them, or the mapping given to `compressed_mean`.

    >>> import jax, jax.numpy as jnp, jaxcomp as jc
    >>> grad = lambda w, x: jax.grad(lambda w: w * x)(jc.per_worker(w, "data"))
    >>> print(jax.vmap(grad, in_axes=(None, 0), axis_name="data")(1.0, jnp.arange(3.0)))
    [0. 1. 2.]
    """
    return varying(params, names_of(axis_name))
