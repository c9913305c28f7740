"""The mesh on which a loss runs, found from the arrays, and the two stages of a step on it.

    stage 1   shard_map over the axes of the workers alone: loss and gradient of each worker's part of the batch. Other
              mesh axes (tensor parallel, FSDP) stay as they are, Auto or Explicit: the model is written as for jax.jit.
              A model that names the workers' axis in its sharding constraints is called once more on a mesh in which
              that axis has length 1, and the workers another name.
    stage 2   shard_map over all axes: each device exchanges its own shard of the gradient over the axes of the workers.

Between them each gradient is an array [n, ...] with a leading axis of workers. Each row lies where it was made.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxcomp.arrays import like_of
from jaxcomp.exchange.agreement import check_state
from jaxcomp.exchange.axes import Axis, axis_names
from jaxcomp.exchange.state import means_in
from jaxcomp.jaxprs import inner_of
from jaxcomp.paths import same_leaves
from jaxcomp.state.specs import shape_on, shapes_of_shards, state_specs
from jaxcomp.transforms.worker_gradients import (
    ROWS,
    Gradients,
    Inputs,
    Problem,
    WorkerResult,
    own_gradients,
    stand_in,
    worker_gradients,
)

__all__ = [
    "DATA",
    "axes_in",
    "exchange_on_mesh",
    "find_devices",
    "find_mesh",
    "find_specs",
    "gradients_on_mesh",
    "if_cut",
    "init_on_mesh",
    "on_mesh",
    "own_gradients_on_mesh",
    "place_arguments",
    "resharded",
    "same_on_mesh",
    "spec_tree",
    "unless_in_force",
    "warn_if_alone",
    "warn_if_cut_otherwise",
    "warn_of_lookups",
    "warn_of_whole",
    "without",
]

Meshes = Mesh | AbstractMesh
P = PartitionSpec
WHOLE = 2**26  # bytes that are gathered before a warning says so
ALONE = (
    "{}: there is a single worker, which exchanges and compresses nothing, on one of {} devices: axis_name={!r} was "
    "given, and it is of no mesh here, since none was given or set, arrays do not say on which they lie, and no map "
    "binds it. Call jax.set_mesh(mesh), or give mesh=, and make the state anew; or say axis_name=None for a single "
    "worker"
)
CUT_OTHERWISE = (
    "value_and_grad: params{} is cut over {}, and the state was made of parameters that are not: each step gathers the "
    "gradient over that axis, each device compresses and remembers the whole of it, and gradients come back whole. "
    "Make the state of the parameters as they are cut, state = grad_fn.init(params), or give param_specs=; states from "
    "elsewhere are handed on by jc.redistribute(old, new)"
)


class _Default(str):
    """A default that is told from the same string of a caller."""


DATA: Any = _Default("data")  # axis_name= of those who write none


# ------------------------------------------------------------------------------------------------
# The mesh


def find_mesh(name: str, given: Meshes | None, axes: tuple[str, ...], *trees: Any) -> Meshes | None:
    """The mesh that was given, else that of `jax.set_mesh`, else that on which arrays lie; None without any.

    Raises:
        ValueError: it does not have the axes.
    """
    found = given if given is not None else _ambient() or _of_arrays(trees)
    unknown = [] if found is None else [axis for axis in axes if axis not in found.shape]
    if unknown:
        raise ValueError(f"{name}: axis_name must be of the mesh, which has {tuple(found.shape)}; got {unknown[0]!r}")  # pyright: ignore
    return found


def warn_if_alone(name: str, axis: Axis, named: bool) -> None:
    """Warns of a step of a single worker where several could be meant: the axis was named, and there are devices.

    name: of the outer form, from which this is called. named: whether the caller gave the axis.
    """
    if named and axis_names(axis) and jax.device_count() > 1:
        warnings.warn(ALONE.format(name, jax.device_count(), axis), stacklevel=3)


def find_devices(name: str, given: Meshes | None, axes: tuple[str, ...], *trees: Any) -> Meshes | None:
    """`find_mesh` outside of any program: with its devices, where arrays and no shapes are given."""
    found = find_mesh(name, given, axes, *trees)
    shapes = any(isinstance(leaf, Tracer | jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(trees))
    if given is not None or shapes or not isinstance(found, AbstractMesh):
        return found
    mesh = jax.sharding.get_mesh()
    return found if mesh.empty else mesh


def on_mesh(axes: tuple[str, ...], *trees: Any) -> Meshes | None:
    """The mesh in force, or that on which arrays lie, if it has these axes and none of them is manual already."""
    found = _ambient() or _of_arrays(trees)
    if found is None or any(axis not in found.shape for axis in axes):
        return None
    return None if set(axes) & set(getattr(found, "manual_axes", ())) else found


def _ambient() -> Meshes | None:
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty else mesh


def _of_arrays(trees: Any) -> Meshes | None:
    """Mesh of the first array that lies on one."""
    for leaf in jax.tree.leaves(trees):
        if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer):
            if isinstance(leaf.sharding, NamedSharding):
                return leaf.sharding.mesh
        elif isinstance(leaf, Tracer | jax.ShapeDtypeStruct):
            kind = leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf)
            mesh = getattr(getattr(kind, "sharding", None), "mesh", None)
            if mesh is not None and not mesh.empty:
                return mesh
    return None


def find_specs(name: str, params: Any, mesh: Meshes, workers: tuple[str, ...], given: Any) -> tuple[PartitionSpec, ...]:
    """How each leaf of the parameters is cut: as given (a prefix tree of specs), else as the arrays lie.

    ValueError where that cannot be known: inside jit, over axes that are left to the compiler, or before the parameters
    were placed on the mesh.
    """
    if given is not None:
        is_none = lambda node: node is None
        if not all(isinstance(spec, PartitionSpec | None) for spec in jax.tree.leaves(given, is_leaf=is_none)):
            raise TypeError(f"{name}: param_specs must be a PartitionSpec, None, or a tree of them; got {given!r}")

        def fill(spec, tree):
            spec = PartitionSpec() if spec is None else spec
            for leaf in jax.tree.leaves(tree):
                if len(spec) > np.ndim(leaf) or not set(axes_in(spec)) <= set(mesh.axis_names):
                    shape = tuple(np.shape(leaf))
                    raise ValueError(
                        f"{name}: param_specs must be over the axes {tuple(mesh.axis_names)} of the mesh, with at most "
                        f"an entry for each dimension; got {spec} for an array of shape {shape}"
                    )
            return jax.tree.map(lambda _: spec, tree)

        return tuple(jax.tree.leaves(jax.tree.map(fill, given, params, is_leaf=is_none)))
    others = [axis for axis in mesh.axis_names if axis not in workers and mesh.shape[axis] > 1]
    automatic = [axis for axis in others if axis in _of_type(mesh, AxisType.Auto)]

    def one(leaf):
        if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) and not isinstance(leaf, Tracer):
            if isinstance(leaf.sharding, NamedSharding):
                return leaf.sharding.spec
            if others:
                raise ValueError(
                    f"{name}: the parameters do not lie on the mesh yet, so how they are cut over {others[0]!r} is not "
                    "known. Place them first (jax.device_put with NamedShardings), or give param_specs."
                )
        elif isinstance(leaf, Tracer):
            if automatic:
                raise ValueError(
                    f"{name}: inside jit, how parameters are cut over the automatic axis {automatic[0]!r} is not "
                    "known, nor under jax.eval_shape: JAX does not hand on the sharding of what it is given. Call init "
                    "outside, on parameters that are placed on the mesh, or give param_specs."
                )
            if not jax.typeof(leaf).sharding.mesh.empty:
                return jax.typeof(leaf).sharding.spec
        elif others and not isinstance(leaf, Tracer):
            raise ValueError(
                f"{name}: parameters must be JAX arrays on the mesh, or param_specs be given; got {type(leaf)}"
            )
        return PartitionSpec()

    return tuple(map(one, jax.tree.leaves(params)))


def warn_of_whole(workers: tuple[str, ...], specs: tuple[PartitionSpec, ...], trained: Any) -> None:
    """Warns where a loss would gather much of what is cut over the workers themselves."""
    pairs = zip(jax.tree.leaves(trained), specs, strict=bool(specs))
    size = sum(x.size * x.dtype.itemsize for x, spec in pairs if set(axes_in(spec)) & set(workers))
    if size >= WHOLE:
        warnings.warn(
            f"value_and_grad: parameters of {size / 1e6:.0f} MB are cut over the workers {workers} themselves: each "
            "step gathers them whole before the loss, and every worker holds its whole gradient, and memory. Cut them "
            'over an axis of their own, on a mesh ("data", "fsdp"); or gather a layer at a time, by '
            "jc.collectives.all_gather inside of shard_map",
            stacklevel=3,
        )


def warn_if_cut_otherwise(specs: tuple[PartitionSpec, ...], mesh: Meshes, trained: Any) -> None:
    """Warns where parameters are cut over axes over which those were not of which the state was made.

    Inside jit that is seen of axes of type Explicit alone; others are the compiler's.
    """
    axes = lambda spec: {axis for axis in axes_in(spec) if mesh.shape.get(axis, 1) > 1}
    for i, (path, x) in enumerate(jax.tree_util.tree_leaves_with_path(trained)):
        lies = x if isinstance(x, jax.Array) and not isinstance(x, Tracer) else jax.typeof(x)
        sharding = getattr(lies, "sharding", None)
        if not isinstance(sharding, NamedSharding):
            continue
        more = axes(sharding.spec) - axes(specs[i] if specs else P())
        if more:
            warnings.warn(
                CUT_OTHERWISE.format(jax.tree_util.keystr(path), ", ".join(map(repr, sorted(more)))), stacklevel=3
            )
            return


def axes_in(spec: PartitionSpec) -> tuple[str, ...]:
    """All mesh axes over which a spec cuts an array."""
    return tuple(name for entry in spec for name in axis_names(entry))


def if_cut(specs: tuple[PartitionSpec, ...], mesh: Meshes) -> tuple[PartitionSpec, ...]:
    """The specs of all leaves; () where none of them cuts an array into more than one piece."""
    return specs if any(mesh.shape[axis] > 1 for spec in specs for axis in axes_in(spec)) else ()


def spec_tree(specs: tuple[PartitionSpec, ...], tree: Any) -> Any:
    """The specs as a tree like the parameters; None where there are none."""
    return jax.tree.unflatten(jax.tree.structure(tree), specs) if specs else None


def without(spec: PartitionSpec, axes: tuple[str, ...]) -> PartitionSpec:
    """The spec with these mesh axes left out."""
    left = [tuple(axis for axis in axis_names(entry) if axis not in axes) for entry in spec]
    return PartitionSpec(*(entry[0] if len(entry) == 1 else entry or None for entry in left))


def resharded(x: Any, spec: PartitionSpec, mesh: Meshes) -> Any:
    """The array as the spec says, over those axes that are explicit; others are the compiler's."""
    explicit = _of_type(mesh, AxisType.Explicit)
    if not explicit:
        return x
    target = without(spec, tuple(axis for axis in mesh.axis_names if axis not in explicit))
    have = getattr(jax.typeof(x), "sharding", None) if not isinstance(x, np.ndarray) else None
    if have is not None and _padded(have.spec, x.ndim) == _padded(target, x.ndim):
        return x
    return jax.reshard(x, NamedSharding(mesh, target))


def _of_type(mesh: Meshes, kind: AxisType) -> list[str]:
    """The axes of a mesh that have this type."""
    return [axis for axis, its in zip(mesh.axis_names, mesh.axis_types, strict=True) if its == kind]


def _padded(spec: PartitionSpec, ndim: int) -> tuple[tuple[str, ...], ...]:
    entries = [axis_names(entry) for entry in spec]
    return (*entries, *[()] * (ndim - len(entries)))


# ------------------------------------------------------------------------------------------------
# Stage 1


def gradients_on_mesh(problem: Problem, mesh: Any, axis: Axis, inputs: Inputs, scale: Any = None) -> Gradients:
    """Results of `worker_gradients` at all workers, with gradients [n, ...]."""
    workers, made = axis_names(axis), []

    def one(axis, number, inputs, scale):
        found = worker_gradients(problem, axis, inputs, scale, number)
        leaves, structure = jax.tree.flatten(found.aux)
        made[:] = [structure, found.kinds]
        apart = [
            [x for x, kind in zip(leaves, found.kinds, strict=True) if (kind in ROWS) is rows] for rows in (False, True)
        ]
        grads = jax.tree.map(lambda g: g[None], found.grads)
        return found._replace(grads=grads, aux=tuple(apart), kinds=())

    outs = Gradients(P(), (P(), P(_in_order(mesh, workers))), P(), P(workers), P())  # pyright: ignore[reportArgumentType]
    inputs = place_arguments(mesh, workers, inputs)._replace(trained=_whole(mesh, workers, inputs.trained))
    found = _stage(one, problem, mesh, workers, P(), outs, inputs, scale)
    structure, kinds = made
    joint, rows = map(iter, found.aux)
    aux = jax.tree.unflatten(structure, [next(rows) if kind in ROWS else next(joint) for kind in kinds])
    return found._replace(aux=aux, kinds=kinds)


def own_gradients_on_mesh(
    problem: Problem, mesh: Any, workers: tuple[str, ...], owners: tuple[str, ...], inputs: Inputs, why: str
) -> WorkerResult:
    """Results of `own_gradients` at each worker at parameters of its own, all behind a leading axis of workers.

    owners: axes over which parameters differ, a leading axis of which they have in `inputs`. why: see `mean_over`.
    """

    def one(axis, number, inputs, scale):
        del scale
        mine = inputs._replace(trained=jax.tree.map(lambda x: x[0], inputs.trained))
        found = own_gradients(problem, axis, mine, refusal=why, number=number)
        return jax.tree.map(lambda x: x[None], found._replace(kinds=()))

    inputs = place_arguments(mesh, workers, inputs)
    return _stage(one, problem, mesh, workers, P(owners), P(workers), inputs, None)


def _in_order(mesh: Any, workers: tuple[str, ...]) -> tuple[str, ...]:
    """The axes in the order of the mesh, as batches lie: in that of the exchanges they would be moved."""
    return tuple(name for name in mesh.axis_names if name in workers)


def _stage(
    one: Any, problem: Problem, mesh: Any, workers: tuple[str, ...], params: P, outs: Any, inputs: Inputs, scale: Any
) -> Any:
    """Results of one(axis, number, inputs, scale) at each worker. params: how those that are trained are cut.

    Where the loss constrains how arrays lie over the axis of the workers, it is called again with an axis of that name
    and of length 1, over which nothing is cut.
    """
    ins = (Inputs(params, P(), P(_in_order(mesh, workers)), P()), P())  # pyright: ignore[reportArgumentType]

    def run(one, mesh, workers, ins, outs):
        return jax.shard_map(
            functools.partial(one, workers),
            mesh=unless_in_force(mesh),
            in_specs=ins,
            out_specs=outs,
            axis_names=set(workers),
            check_vma=False,  # so that a loss may hold loops whose carry begins with zeros, as under plain jit
        )

    try:
        return run(lambda axis, *arrays: one(axis, None, *arrays), mesh, workers, ins, outs)(inputs, scale)
    except ValueError as error:
        if "Manual" not in str(error) or not any(name in str(error) for name in workers):
            raise
        if not isinstance(mesh, Mesh) or set(mesh.axis_types) != {AxisType.Auto} or problem.loss.shares:
            raise ValueError(_constrained(mesh, workers)) from error
        constrained = error
    other = lambda axis: tuple(stand_in(name) if name in workers else name for name in axis_names(axis))
    ins, outs = jax.tree.map(lambda spec: P(*map(other, spec)), ((P(workers), *ins), outs))
    larger, others = _with_stand_ins(mesh, workers), other(workers)
    # JAX lowers axis_index by the mesh of jax.set_mesh, which has no such axis.
    numbers = jnp.arange(np.prod([mesh.shape[name] for name in workers]), dtype=jnp.int32)
    numbered = lambda axis, number, *arrays: one(axis, number[0], *arrays)
    try:
        with jax.sharding.use_abstract_mesh(larger.abstract_mesh):
            return run(numbered, larger, others, ins, outs)(numbers, inputs, scale)
    except (NameError, ValueError) as error:  # the loss sums over the axis, too, or holds an array of this mesh
        if isinstance(error, ValueError) and "should match the mesh" not in str(error):
            raise
        raise ValueError(_constrained(mesh, workers)) from constrained


LOOKUP = (
    "the loss looks up rows of an array of shape {}, which is cut over {}, on a mesh with more than one axis besides "
    "{}. XLA's partitioner may abort the process there (Check failed: partition_group_list.num_replica_groups(), seen "
    "in JAX 0.10.2 and 0.12.0.1). Take jax.nn.one_hot(tokens, len(table)) @ table, or look up in "
    'jax.lax.with_sharding_constraint(table, P()), or take axes of type Explicit and gradients="unreduced"'
)


def warn_of_lookups(run: Callable[..., Any], mesh: Any, workers: tuple[str, ...], specs: Any, trained: Any) -> None:
    """Warns of lookups of sharded tables in stage 1, where XLA was seen to abort; before it can.

    run: stage 1, a function of the parameters, which is traced once more where there is such a table.
    """
    auto = [name for name in _of_type(mesh, AxisType.Auto) if name not in workers and mesh.shape[name] > 1]
    if len(auto) < 2 or all(mesh.shape[name] == 1 for name in workers):
        return
    cut = {}
    for x, spec in zip(jax.tree.leaves(trained), specs, strict=bool(specs)):
        over = tuple(axis for axis in axes_in(spec) if axis in auto)
        if over and len(x.shape) > 1:
            cut[x.shape] = over
    if not cut:
        return
    todo, found = [jax.make_jaxpr(run)(trained).jaxpr], None
    while todo and found is None:
        for equation in todo.pop().eqns:
            todo += inner_of(equation)
            if equation.primitive.name == "gather" and equation.invars[0].aval.shape in cut:
                found = equation.invars[0].aval.shape
    if found is not None:
        warnings.warn(LOOKUP.format(found, cut[found], workers), stacklevel=2)


def _with_stand_ins(mesh: Mesh, workers: tuple[str, ...]) -> Mesh:
    """The same devices in the same order; the workers along `stand_in(name)`, each `name` with length 1."""
    axes = [
        each
        for name, size in mesh.shape.items()
        for each in ([(stand_in(name), size), (name, 1)] if name in workers else [(name, size)])  # pyright: ignore[reportArgumentType]
    ]
    names, sizes = zip(*axes, strict=True)
    return Mesh(mesh.devices.reshape(sizes), names, axis_types=(AxisType.Auto,) * len(names))


def _constrained(mesh: Any, workers: tuple[str, ...]) -> str:
    """Says what to do about a loss that constrains arrays over the axis of the workers."""
    kinds = set(mesh.axis_types)
    if kinds == {AxisType.Explicit}:
        cure = 'Say gradients="unreduced", which calls the loss on the whole batch; or leave'
    elif kinds == {AxisType.Auto} and not isinstance(mesh, Mesh):
        cure = "Give the mesh with its devices, value_and_grad(loss, algorithm, mesh); or leave"
    else:  # axes of both types, weights of the workers, or a loss that sums over the axis, too
        cure = "Leave"
    return (
        f"the loss names {(workers[0] if len(workers) == 1 else workers)!r}, the axis of the workers, in a sharding "
        f"constraint, and is called on the part of the batch of one worker, which is not cut over it. {cure} "
        "that axis out of the constraint: P(None, 'model') in place of P('data', 'model'), the rule ('batch', None) in "
        "place of ('batch', 'data'). If it names none, a closure holds an array that lies on the mesh: give that array "
        "by keyword"
    )


def place_arguments(mesh: Any, workers: tuple[str, ...], inputs: Inputs) -> Inputs:
    """The arguments beside what is trained, as stage 1 takes them: whole over the workers, the batch cut."""
    cut = [resharded(x, _batch_spec(x, _in_order(mesh, workers)), mesh) for x in inputs.cut]
    rest, whole = _whole(mesh, workers, (inputs.rest, inputs.whole))
    return inputs._replace(rest=rest, cut=cut, whole=whole)


def _whole(mesh: Any, workers: tuple[str, ...], tree: Any) -> Any:
    """Arrays that are not cut over the workers."""
    return jax.tree.map(lambda x: resharded(x, without(_spec(x), workers), mesh), tree)


# ------------------------------------------------------------------------------------------------
# Stage 2


def exchange_on_mesh(
    tx: optax.GradientTransformation, mesh: Any, axis: Axis, specs: Any, grads: Any, state: Any
) -> tuple[Any, Any]:
    """Gradients [n, ...] to directions laid out like the parameters, and the next state, by `compressed_mean`.

    tx: made with sharded=specs. specs: of the parameters, a tree like them; None where all are whole.
    """
    workers = axis_names(axis)
    outer = jax.tree.map(lambda _: P(), grads) if specs is None else specs_like(grads, specs)
    rows = jax.tree.map(lambda spec: P(workers, *without(spec, workers)), outer)
    made = _specs_of(state, mesh, axis)

    def one(grads, state):
        return tx.update(jax.tree.map(lambda g: g[0], grads), state)

    stage = jax.shard_map(one, mesh=unless_in_force(mesh), in_specs=(rows, made), out_specs=(outer, made))
    return stage(jax.tree.map(lambda x, spec: resharded(x, spec, mesh), grads, rows), state)


def specs_like(tree: Any, specs: Any) -> Any:
    """The specs in the containers of a tree: those of Flax NNX lie in `nnx.Param`, and gradients do not."""
    return jax.tree.unflatten(jax.tree.structure(tree), jax.tree.leaves(specs)) if same_leaves(tree, specs) else specs


def _specs_of(state: Any, mesh: Any, axis: Axis) -> Any:
    """Specs of the state of an exchange: found once, when it is made, not in each trace.

    Raises:
        ValueError: it was made before the parameters lay on this mesh, or for another one.
    """
    leaves, structure = jax.tree.flatten(state)
    return _specs_by_shape(structure, tuple(map(np.shape, leaves)), tuple(mesh.shape.items()), axis)


@functools.lru_cache(maxsize=256)
def _specs_by_shape(structure: Any, shapes: tuple[Any, ...], mesh: tuple[tuple[str, int], ...], axis: Axis) -> Any:
    state = structure.unflatten([jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes])
    _check_workers(state, dict(mesh), axis_names(axis))
    return state_specs(state, axis)


def _check_workers(state: Any, sizes: dict[str, int], workers: tuple[str, ...]) -> None:
    """Raises ValueError where a state was made before the parameters lay on this mesh, or for another one."""
    for mean in means_in(state):
        names = axis_names(mean.about.placement.every) or workers
        count = int(np.prod([sizes.get(name, 1) for name in names]))
        for leaf in jax.tree.leaves(mean.local):
            if leaf.shape[0] != count:
                raise ValueError(
                    f"the state of the exchange was made for {leaf.shape[0]} device(s), and the mesh has {count} over "
                    f"{names}. Call init outside of jit, on parameters that lie on the mesh (jax.device_put(params, "
                    "NamedSharding(mesh, P()))); or under jax.set_mesh(mesh). Hand a state that other workers saved on "
                    "by jc.redistribute(old, new)."
                )


def init_on_mesh(tx: optax.GradientTransformation, mesh: Any, axis: Axis, specs: Any, params: Any) -> Any:
    """The state of tx, each worker's part on its own device. Of the parameters it takes the shapes alone."""
    like = like_of(params if specs is None else shapes_of_shards(params, mesh, specs_like(params, specs)))
    shapes = shape_on(mesh, tx, like)
    made = _specs_of(shapes, mesh, axis)
    traced = [leaf for leaf in jax.tree.leaves(params) if isinstance(leaf, Tracer)]
    if not traced:
        check_state("init", shapes, mesh if isinstance(mesh, Mesh) else _in_force(), axis)
    make = jax.shard_map(lambda: tx.init(like), mesh=unless_in_force(mesh), in_specs=(), out_specs=made)
    state = jax.jit(make)()
    if not traced:
        return state
    # Inside jit the devices are known by the arguments in use alone, so the state must depend on one.
    leaves, structure = jax.tree.flatten(state)
    first, _ = jax.lax.optimization_barrier((leaves[0], traced[0]))
    return jax.tree.unflatten(structure, [first, *leaves[1:]])


def same_on_mesh(make: Callable[[], Any], mesh: Any) -> Any:
    """Results of a function, whole on every device."""
    return jax.jit(jax.shard_map(make, mesh=unless_in_force(mesh), in_specs=(), out_specs=P()))()


def _in_force() -> Any:
    """The mesh of `jax.set_mesh`, with its devices; None inside of a program."""
    return None if isinstance(jnp.zeros(()) + 0, Tracer) else jax.sharding.get_mesh()


def not_explicit(mesh: Any) -> list[str]:
    """Axes with several devices whose type is not Explicit."""
    explicit = _of_type(mesh, AxisType.Explicit)
    return [name for name in mesh.axis_names if name not in explicit and mesh.shape[name] > 1]


def unless_in_force(mesh: Any) -> Any:
    """The mesh as `shard_map` takes it: None for the one in force."""
    return None if mesh == jax.sharding.get_abstract_mesh() else mesh


def _spec(x: Any) -> P:
    """Spec of an array, as far as types tell it."""
    sharding = getattr(jax.typeof(x), "sharding", None)
    return P() if sharding is None or sharding.mesh.empty else sharding.spec


def _batch_spec(x: Any, workers: tuple[str, ...]) -> P:
    """Cut over the workers along the leading axis, and otherwise as it is."""
    have = without(_spec(x), workers)
    first, others = (axis_names(have[0]), tuple(have)[1:]) if len(have) else ((), ())
    return P((*workers, *first), *others)
