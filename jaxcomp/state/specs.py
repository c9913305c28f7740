"""Placement of an optimizer state on a mesh: specs, axes, and states that are made in place."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxcomp.base import Algorithm, Compressor
from jaxcomp.exchange.agreement import check_state
from jaxcomp.exchange.axes import Axis, axis_names, varying
from jaxcomp.exchange.state import MeanState, OwnState, is_mean, is_own, means_in
from jaxcomp.groups import without_dense_warning

__all__ = [
    "Marks",
    "check_order",
    "check_wrappers",
    "init_state",
    "is_names",
    "lay_out",
    "names_of",
    "per_worker",
    "shape_on",
    "shapes_of_shards",
    "state_axes",
    "state_specs",
]


def is_names(sharded: Any) -> bool:
    """Whether it names mesh axes, or none: no tree of PartitionSpecs, nor a mapping."""
    return (
        sharded is None
        or isinstance(sharded, str)
        or (isinstance(sharded, tuple) and all(isinstance(name, str) for name in sharded))
    )


class Marks(NamedTuple):
    """Marks for each part of an optimizer state: local(axes, outer), shared(outer), rest(leaf).

    own(local, rest): for an array of `OwnState`, from what stands for its leading axis and for what is behind that;
    None: as local.
    """

    local: Callable[[Axis, tuple[str, ...]], Any]
    shared: Callable[[tuple[str, ...]], Any]
    rest: Callable[[Any], Any]
    is_leaf: Callable[[Any], bool] = lambda node: False
    own: Callable[[Any, Any], Any] | None = None


def lay_out(state: Any, axis: Axis, marks: Marks) -> Any:
    """A tree of the structure of an optimizer state, with what `marks` says for each array."""
    fill = lambda value, tree: jax.tree.map(lambda _: value, tree)
    axes_of = lambda place: place.workers if place.partial else axis

    def of_mean(node):
        place = node.about.placement
        local, shared = marks.local(axes_of(place), place.outer), marks.shared(place.outer)
        return MeanState(fill(local, node.local), fill(shared, node.shared), node.about)

    def of_own(node):
        first, own = marks.local(axes_of(node.placement), ()), marks.own
        if own is None:
            return OwnState(fill(first, node.local), node.placement, node.roles)
        behind = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), _shapes(node.local))
        rest = jax.tree.map(marks.rest, behind, is_leaf=marks.is_leaf)
        return OwnState(jax.tree.map(lambda spec: own(first, spec), rest), node.placement, node.roles)

    def of_steps(node):
        local = marks.local(axis, ())
        for leaf in jax.tree.leaves(node.acc_grads):
            if jnp.ndim(leaf) == 0 and isinstance(local, PartitionSpec):
                raise ValueError(
                    "state_specs: optax.MultiSteps accumulates gradients per worker, and one of them is a scalar, "
                    f"which cannot be laid out over axis {axis!r}. Make that parameter a vector of one entry."
                )
        return type(node)(*map(walk, node))._replace(acc_grads=fill(local, node.acc_grads))

    def special(node):
        return is_mean(node) or is_own(node) or _is_steps(node) or marks.is_leaf(node)

    def walk(node):
        def one(x):
            if is_mean(x):
                return of_mean(x)
            if is_own(x):
                return of_own(x)
            if not _is_steps(x):
                return marks.rest(x)
            # Around a mean, MultiSteps accumulates each worker's own gradients; behind one, what is equal on all.
            return of_steps(x) if _has_mean(x) else type(x)(*map(walk, x))

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

    Raises:
        ValueError: there is no `compressed_mean` in the state, so that nothing in it differs between workers.

    >>> import jax.numpy as jnp, optax, jaxcomp as jc
    >>> tx = jc.compressed_mean(jc.error_feedback(jc.top_k(0.1)), "data")
    >>> jc.state_specs(tx.init(jnp.zeros(50)), "data").local.algorithm.memory  # an array for each group of leaves
    (P('data',),)
    """
    _check_has_mean("state_specs", state)
    axis = names_of(axis_name)
    like_params = lambda node: False
    masked = lambda node: isinstance(node, optax.MaskedNode)  # in place of the parameters of other optimizers
    if specs is not None:
        structure, shapes = jax.tree.structure(params), list(map(jnp.shape, jax.tree.leaves(params)))

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
            own=lambda local, rest: PartitionSpec(*local, *rest),
        ),
    )


def _chains(node: Any) -> list[tuple]:
    """The states of optax chains within, which are plain tuples, and that of the chain itself."""
    if is_mean(node) or is_own(node) or not isinstance(node, tuple):
        return []
    inner = [chain for part in node for chain in _chains(part)]
    return [node, *inner] if type(node) is tuple else inner


def _is_steps(node: Any) -> bool:
    """Whether it is the state of `optax.MultiSteps`."""
    return isinstance(node, optax.MultiStepsState)


def _has_mean(node: Any) -> bool:
    """Whether a mean over the workers is somewhere within."""
    return bool(means_in(node))


def _check_has_mean(name: str, state: Any) -> None:
    check_wrappers(state)
    if not _has_mean(state):
        raise ValueError(
            f"{name}: there is no compressed_mean in this state; chain one before the optimizer: "
            "optax.chain(jc.compressed_mean(...), optimizer)"
        )


def names_of(axis: Any) -> Axis:
    """Axis names of an axis, which may be the mapping that `compressed_mean` takes."""
    return tuple(name for key in axis for name in axis_names(key)) if isinstance(axis, Mapping) else axis


def state_axes(state: Any) -> Any:
    """The same for `jax.vmap` and `jax.pmap`: 0 for local arrays, None for all others.

    Args:
        state: as for `state_specs`, of a mean over one axis.

    Returns:
        Tree prefix for `in_axes` and `out_axes`.

    Raises:
        ValueError: there is no `compressed_mean` in the state, or one over several mesh axes.
    """
    _check_has_mean("state_axes", state)

    def local(axes, outer):
        if outer:
            raise ValueError(
                "state_axes: the state differs over several mesh axes; use jax.shard_map and jc.init_state"
            )
        return 0

    # None is an empty tree to JAX, so the result is a tree prefix: exactly what in_axes takes.
    return lay_out(state, None, Marks(local, lambda outer: None, lambda leaf: None))


def init_state(
    tx: Any, params: Any, mesh: Mesh | AbstractMesh | int, axis_name: Any, specs: Any = None
) -> tuple[Any, Any]:
    """Makes an optimizer state that lies where it belongs, each worker's part on its own device.

    Args:
        tx: optimizer with `compressed_mean` in it, or `jc.methods.rounds(...)`.
        params: parameters, equal on all workers, or whole ones that `specs` cuts, wherever they lie; or their
            `jax.ShapeDtypeStruct`, for those of the state, with the shardings to restore a checkpoint by.
        mesh: the mesh that `shard_map` will run on; or the number of workers of a `vmap` or `pmap`; or an
            `AbstractMesh`, for shapes and dtypes alone, say of a state that other workers saved.
        axis_name: its data axis (or a tuple of axes, or the mapping given to `compressed_mean`).
        specs: PartitionSpecs of parameters that are sharded over other axes of the mesh, a tree like `params`.

    Returns:
        (state, specs): the state, and its PartitionSpecs for in_specs and out_specs; or, for a number of workers,
        the axes for in_axes and out_axes.

    Raises:
        TypeError: arguments in another order, or of other kinds.
        ValueError: the mesh has no such axis; there is no `compressed_mean` in tx, or one behind an optimizer; the
            processes of the mesh were started with other options, of which the message names which and where.

    Sixty-four workers on one device:

    >>> import jax, jax.numpy as jnp, jaxcomp as jc
    >>> tx = jc.compressed_mean(jc.error_feedback(jc.top_k(k=1)), "data")
    >>> state, axes = jc.init_state(tx, jnp.zeros(5), 64, "data")
    >>> step = jax.vmap(tx.update, in_axes=(0, axes), out_axes=(None, axes), axis_name="data")
    >>> direction, state = jax.jit(step)(jnp.ones((64, 5)), state)
    >>> print(direction, state.local.algorithm.memory[0].shape)
    [1. 0. 0. 0. 0.] (64, 1, 5)
    """
    _check_kinds(tx, params, mesh, axis_name)
    if isinstance(mesh, int):
        if not 1 <= mesh < 2**31:
            raise ValueError(f"init_state: a number of workers must be at least 1; got {mesh}")
        axes = state_axes(shape_on(AbstractMesh((mesh,), axis_names(names_of(axis_name))), tx, params))
        make = jax.vmap(tx.init, in_axes=None, out_axes=axes, axis_name=names_of(axis_name), axis_size=mesh)
        return jax.jit(make)(params), axes
    names = axis_names(names_of(axis_name))
    unknown = [name for name in names if name not in mesh.shape]
    if unknown:
        raise ValueError(f"init_state: the mesh has axes {tuple(mesh.shape)}; got axis_name with {unknown[0]!r}")
    specs = None if specs is None else _whole(specs, params)
    like = params if specs is None else shapes_of_shards(params, mesh, specs)
    shapes = shape_on(mesh, tx, like)
    made = state_specs(shapes, axis_name, params=like, specs=specs)
    check_state("init_state", shapes, mesh, names_of(axis_name))
    whole = PartitionSpec() if specs is None else specs
    leaves = jax.tree.leaves(params)
    if isinstance(mesh, AbstractMesh) or (leaves and all(isinstance(x, jax.ShapeDtypeStruct) for x in leaves)):
        make = jax.shard_map(tx.init, mesh=_automatic(mesh), in_specs=(whole,), out_specs=made)
        with _no_mesh():
            state = jax.eval_shape(make, _shapes(params))
        if isinstance(mesh, AbstractMesh):
            return state, made
        place = lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
        return jax.tree.map(place, state, made), made
    if specs is not None:
        params = jax.tree.map(lambda leaf, spec: jax.device_put(leaf, NamedSharding(mesh, spec)), params, specs)
    make = jax.shard_map(tx.init, mesh=mesh, in_specs=(whole,), out_specs=made)
    return jax.jit(make)(params), made


def _whole(specs: Any, params: Any) -> Any:
    """A spec for each parameter, from a prefix tree of specs."""
    try:
        return jax.tree.map(lambda spec, tree: jax.tree.map(lambda _: spec, tree), specs, params)
    except ValueError as error:
        raise ValueError(
            f"init_state: specs must be a tree of PartitionSpecs like params, or a prefix of it; got {specs!r}"
        ) from error


def _check_kinds(tx: Any, params: Any, mesh: Any, axis_name: Any) -> None:
    """Raises TypeError where arguments of `init_state` are in another order."""
    is_mesh = isinstance(mesh, (Mesh, AbstractMesh, int)) and not isinstance(mesh, bool)
    is_axis = isinstance(axis_name, Mapping) or is_names(axis_name)
    is_tx = callable(getattr(tx, "init", None)) and not isinstance(tx, (Algorithm, Compressor))
    kinds = {"tx": (tx, is_tx), "mesh": (mesh, is_mesh), "axis_name": (axis_name, is_axis)}
    for name, (value, fits) in kinds.items():
        if not fits:
            raise TypeError(
                "init_state: call it as init_state(tx, params, mesh, axis_name), with an optax optimizer, a tree of "
                f"arrays, a mesh or a number of workers, and a name; got {type(value).__name__} for {name}"
            )


ALONE = (
    "{} around an exchange lets each worker decide by its own gradient whether to take part, so that one NaN blocks "
    "the others or leaves them with other states. Use jc.replicas.skip_nonfinite(tx, axis_name), by which all workers "
    "skip a step together"
)
REFUSED = {  # states of wrappers of optax -> why there is none around an exchange
    optax.ApplyIfFiniteState: ALONE.format("optax.apply_if_finite"),
    optax.contrib.SAMState: (
        "optax.contrib.sam around an exchange would take steps at each worker's own point. Give it gradients that are "
        "exchanged before: those of jc.value_and_grad(loss, algorithm)"
    ),
    optax.transforms.ConditionallyMaskState: (
        "optax.conditionally_mask around an exchange leaves its state as it was where the condition is not met, which "
        "the types of shard_map do not allow. Put the condition behind the mean: "
        "optax.chain(jc.compressed_mean(...), optax.conditionally_mask(optimizer, ...))"
    ),
    optax.transforms.ConditionallyTransformState: (
        "optax.conditionally_transform around an exchange returns each worker's own gradient where the condition is "
        "not met, and the workers go apart. Put the condition behind the mean: optax.chain(jc.compressed_mean(...), "
        "optax.conditionally_mask(optimizer, ...)); for an exchange every so many steps take optax.MultiSteps or "
        "jc.local_updates"
    ),
}


def check_wrappers(state: Any, divided: bool = False) -> None:
    """Refuses wrappers of optax around a mean by which a worker decides alone, or that let its own gradient through.

    divided: whether an `optax.multi_transform` is around, which gives other leaves to others.
    """
    if is_mean(state) or is_own(state) or not isinstance(state, tuple) or not _has_mean(state):
        return
    refused = REFUSED.get(type(state))
    if isinstance(state, optax.MultiStepsState) and jax.tree.leaves(state.skip_state):
        refused = ALONE.format("optax.MultiSteps(should_skip_update_fn=...)")
    if refused is not None:
        raise ValueError(f"compressed_mean: {refused}")
    if isinstance(state, optax.MaskedState) and not divided:
        tree = means_in(state)[0].about.groups.tree
        masked = lambda node: isinstance(node, optax.MaskedNode)
        pairs = jax.tree_util.tree_leaves_with_path(tree, is_leaf=masked)
        left = [jax.tree_util.keystr(path) for path, node in pairs if masked(node)]
        if left:
            raise ValueError(
                f"compressed_mean: optax.masked leaves gradients{left[0]} out, which would stay each worker's own. "
                'Give them a mean, too: jc.by_path({"...": jc.direct(jc.identity()), ".*": ...}) in place of the mask, '
                "or optax.multi_transform"
            )
    inner = state.inner_states.values() if isinstance(state, optax.transforms.PartitionState) else state
    for part in inner:
        check_wrappers(part, divided or isinstance(state, optax.transforms.PartitionState))


def check_order(chain: tuple) -> None:
    """Refuses a chain of optax with a memory of gradients before the mean, where each worker has its own."""
    first = next((i for i, part in enumerate(chain) if _has_mean(part)), 0)
    for part in chain[:first]:
        arrays = jax.tree.leaves(part, is_leaf=is_own)
        seen = [x for x in arrays if jnp.issubdtype(jnp.result_type(x), jnp.bool_)]
        if seen:
            raise ValueError(
                f"compressed_mean stands behind a transformation that remembers what it found in each worker's own "
                f"gradient ({type(part).__name__}). Give it to the mean, which keeps its state for each worker: "
                "jc.compressed_mean(..., before=transformation)"
            )
        kept = [x for x in arrays if jnp.ndim(x) and jnp.issubdtype(jnp.result_type(x), jnp.floating)]
        if kept:
            raise ValueError(
                f"compressed_mean stands behind an optimizer that remembers gradients ({type(part).__name__}), and "
                "these would be each worker's own. Put it first: optax.chain(jc.compressed_mean(...), optimizer). "
                "For steps at each worker, with an exchange now and then, take jc.local_updates"
            )


def shape_on(mesh: Mesh | AbstractMesh, tx: Any, like: Any) -> Any:
    """Shapes of the state that tx will have on a mesh, for parameters with shards of these shapes.

    Routes may lay out what is sent by the number of workers.
    """
    # Who makes the state afterwards tells of leaves that are not compressed.
    with _no_mesh(), jax.sharding.use_abstract_mesh(_automatic(mesh)), without_dense_warning():
        state = jax.eval_shape(tx.init, _shapes(like))
    for chain in _chains(state):
        check_order(chain)
    return state


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), tree)


def _automatic(mesh: Mesh | AbstractMesh) -> AbstractMesh:
    abstract = mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh
    return abstract.update(axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def _no_mesh() -> Any:
    """A context without the mesh that is in force here."""
    return jax.sharding.use_abstract_mesh(AbstractMesh((), ()))


def shapes_of_shards(params: Any, mesh: Any, specs: Any) -> Any:
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

    What gradients are added to in a `lax.scan` (accumulation over micro-batches) must be each worker's own from the
    beginning, too: start it with jc.per_worker(zeros, axis_name).

    Args:
        params: any tree of arrays.
        axis_name: mapped axis, a tuple of them, or the mapping given to `compressed_mean`.

    Raises:
        TypeError: a Flax NNX model, of which it would make a copy.

    >>> import jax, jax.numpy as jnp, jaxcomp as jc
    >>> grad = lambda w, x: jax.grad(lambda w: w * x)(jc.per_worker(w, "data"))
    >>> print(jax.vmap(grad, in_axes=(None, 0), axis_name="data")(1.0, jnp.arange(3.0)))
    [0. 1. 2.]
    """
    for node in jax.tree.leaves(params, is_leaf=_is_module):
        if _is_module(node):
            raise TypeError(
                f"per_worker copies trees, and what the loss changes in a copy of {type(node).__name__} (BatchNorm "
                "statistics, counters of random keys) would be lost. Split the model before: graph, params, rest = "
                "nnx.split(model, nnx.Param, ...), and differentiate with respect to jc.per_worker(params, axis_name); "
                "or take jc.value_and_grad(loss, algorithm, wrt=nnx.Param), which takes the model as it is"
            )
    return varying(params, names_of(axis_name))


def _is_module(node: Any) -> bool:
    """Whether it is a model of Flax NNX, which is not imported for that."""
    return any(kind.__name__ == "Module" and kind.__module__.startswith("flax.nnx") for kind in type(node).__mro__)
