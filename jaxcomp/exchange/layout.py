"""How the state of an optimizer lies on a mesh: which arrays differ between which workers, wherever optax put them."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxcomp.base import State
from jaxcomp.exchange.lanes import Axis, axis_names, is_bound, varying

__all__ = [
    "Layout",
    "Level",
    "MeanLocal",
    "MeanShared",
    "closed",
    "init_state",
    "is_mean",
    "lay_out",
    "local_rows",
    "names_of",
    "opened",
    "outer_of",
    "per_worker",
    "state_axes",
    "state_specs",
    "with_rows",
]

Array = jax.Array


class MeanLocal(NamedTuple):
    """Every array has a leading axis of workers: [1, ...] at one worker, [n, ...] for all of them.

    counts: of `compressed_mean`; None in the state of `rounds`, which returns what it sent.
    second: of the second compression of via="two_shot".
    """

    algorithm: Any
    counts: Any
    second: Any = ()


class MeanShared(NamedTuple):
    """count i32[]: rounds so far; key uint32[2]: base key of the private randomness; second: as in `MeanLocal`."""

    count: Array
    key: Array
    algorithm: Any
    second: Any = ()


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Level:
    """The state of a mean among some axes of a larger mesh.

    axes: over which it exchanges.
    later: those of each later level, at which groups of these workers exchange.
    cut: those along which parameters are cut into shards.

    Over `outer`, the later ones and those of shards, everything here may differ. Arrays of `state.shared` have a
    leading axis over `outer`, arrays of `state.local` one over `outer` and `axes`; at one device both have length 1.
    """

    state: State
    axes: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    later: tuple[tuple[str, ...], ...] = dataclasses.field(metadata={"static": True})
    cut: tuple[str, ...] = dataclasses.field(metadata={"static": True})

    @property
    def outer(self) -> tuple[str, ...]:
        return outer_of(self.later, self.cut)


def outer_of(later: tuple[tuple[str, ...], ...], cut: tuple[str, ...]) -> tuple[str, ...]:
    """Mesh axes of groups and shards, in the order of the leading axis."""
    return (*(name for axes in later for name in axes), *cut)


def is_mean(node: Any) -> bool:
    """Whether it is the state of one `compressed_mean` (or level, or `rounds`)."""
    return isinstance(node, State) and isinstance(node.local, MeanLocal)


def local_rows(axis: Axis) -> int:
    """Leading axis of local arrays: n where we stand outside and the ambient mesh says what n is."""
    if is_bound(axis):
        return 1
    sizes = jax.sharding.get_abstract_mesh().shape
    names = axis_names(axis)
    return math.prod(sizes[name] for name in names) if all(name in sizes for name in names) else 1


def with_rows(tree: Any, rows: int) -> Any:
    """The same arrays `rows` times, on a leading axis."""
    return jax.tree.map(lambda x: jnp.tile(x[None], (rows,) + (1,) * x.ndim), tree)


def opened(state: Any, axes: tuple[str, ...], later: tuple[tuple[str, ...], ...], cut: tuple[str, ...]) -> State:
    """The state of a level as a plain `State` at this device.

    Raises:
        ValueError: it is the state of another transformation, or not cut for one device.
    """
    outer = outer_of(later, cut)
    if not isinstance(state, Level) or (state.axes, state.later, state.cut) != (axes, later, cut):
        got = f"one of axes {state.axes} within {state.outer}" if isinstance(state, Level) else type(state).__name__
        raise ValueError(f"compressed_mean: expected a state of axes {axes} within {outer}; got {got}")
    if not outer:
        return state.state

    def one(path, x):
        if x.shape[:1] != (1,):
            raise ValueError(
                f"compressed_mean: shared state{jax.tree_util.keystr(path)} has shape {x.shape}, expected a leading "
                "axis of 1 at one device. Pass the state with in_specs from jc.init_state."
            )
        return x[0]

    return State(state.state.local, jax.tree_util.tree_map_with_path(one, state.state.shared))


def closed(state: State, axes: tuple[str, ...], later: tuple[tuple[str, ...], ...], cut: tuple[str, ...]) -> Level:
    """Inverse of `opened`."""
    outer = outer_of(later, cut)
    if not outer:
        return Level(state, axes, later, cut)
    shared = with_rows(state.shared, local_rows(outer))
    return Level(State(state.local, varying(shared, outer) if is_bound(outer) else shared), axes, later, cut)


# ------------------------------------------------------------------------------------------------


class Layout(NamedTuple):
    """What stands for each part of an optimizer state: local(axes, outer), shared(outer), rest(leaf)."""

    local: Callable[[Axis, tuple[str, ...]], Any]
    shared: Callable[[tuple[str, ...]], Any]
    rest: Callable[[Any], Any]
    is_leaf: Callable[[Any], bool] = lambda node: False


def lay_out(state: Any, axis: Axis, layout: Layout) -> Any:
    """A tree of the structure of an optimizer state, with what `layout` says for each array."""

    def of_mean(node, axes, outer):
        local, shared = layout.local(axes, outer), layout.shared(outer)
        return State(jax.tree.map(lambda _: local, node.local), jax.tree.map(lambda _: shared, node.shared))

    def of_steps(node):
        local = layout.local(axis, ())
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
        return isinstance(node, Level | optax.MultiStepsState) or is_mean(node) or layout.is_leaf(node)

    def walk(node):
        def one(x):
            if isinstance(x, Level):
                return dataclasses.replace(x, state=of_mean(x.state, x.axes, x.outer))
            if is_mean(x):
                return of_mean(x, axis, ())
            # Around a mean, MultiSteps accumulates each worker's own gradients; behind one, what is equal on all.
            return of_steps(x) if _is_steps(x) and _has_mean(x) else walk_fields(x) if _is_steps(x) else layout.rest(x)

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
        Layout(
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
    means = lambda x: is_mean(x) or isinstance(x, Level)
    return any(map(means, jax.tree.leaves(node, is_leaf=means)))


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
    return lay_out(state, None, Layout(local, lambda outer: None, lambda leaf: None))


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
