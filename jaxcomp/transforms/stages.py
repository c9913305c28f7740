"""The two stages of a step on a mesh, for losses that are sharded by the compiler.

    stage 1   shard_map over the axes of the workers alone: loss and gradient of each worker's part of the batch. Other
              mesh axes (tensor parallel, FSDP) stay as they are, Auto or Explicit: the model is written as for jax.jit.
    stage 2   shard_map over all axes: each device exchanges its own shard of the gradient over the axes of the workers.

Between them each gradient is an array [n, ...] with a leading axis of workers. Each row lies where it was made.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxcomp.arrays import like_of
from jaxcomp.exchange.agreement import check_state
from jaxcomp.exchange.axes import Axis, axis_names
from jaxcomp.exchange.state import means_in
from jaxcomp.state.specs import shape_on, shapes_of_shards, state_specs
from jaxcomp.transforms.meshes import laid_out, without
from jaxcomp.transforms.worker_gradients import Gradients, Loss, Trained, worker_gradients

__all__ = ["check_batch", "exchange_on_mesh", "gradients_on_mesh", "init_on_mesh", "same_on_mesh"]


def check_batch(name: str, batch: Any, mesh: Any, workers: tuple[str, ...]) -> None:
    """Raises ValueError unless the leading axis of every array can be cut evenly."""
    count = int(np.prod([mesh.shape[axis] for axis in workers]))
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        shape = np.shape(leaf)
        if not shape or shape[0] % count:
            raise ValueError(
                f"{name}: batch{jax.tree_util.keystr(path)} must have a leading axis that {count} workers can share "
                f"evenly; got shape {shape}. What is equal on all workers is given by keyword."
            )


def gradients_on_mesh(
    how: Loss,
    what: Trained,
    mesh: Any,
    axis: Axis,
    trained: Any,
    rest: Any,
    batch: Any,
    named: Any,
    scale: Any = None,
) -> Gradients:
    """Stage 1: what `worker_gradients` finds at all workers, with gradients [n, ...]."""
    workers = axis_names(axis)

    def one(trained, rest, batch, named, scale):
        found = worker_gradients(how, what, axis, trained, rest, batch, named, scale)
        return found._replace(grads=jax.tree.map(lambda g: g[None], found.grads))

    # In the order of the mesh, as batches lie, whatever the order of the exchanges is: else the batch would be moved.
    cut = tuple(name for name in mesh.axis_names if name in workers)
    kinds = jax.tree.map(lambda kind: P(cut) if kind == "each" else P(), jax.tree.unflatten(*how.kinds))
    stage = jax.shard_map(
        one,
        mesh=_unless_in_force(mesh),
        in_specs=(P(), P(), P(cut), P(), P()),
        out_specs=Gradients(P(), kinds, P(), P(workers), P()),  # pyright: ignore[reportArgumentType]
        axis_names=set(workers),
        check_vma=False,  # so that a loss may hold loops whose carry begins with zeros, as under plain jit
    )
    whole = lambda tree: jax.tree.map(lambda x: laid_out(x, without(_spec(x), workers), mesh), tree)
    batch = jax.tree.map(lambda x: laid_out(x, _batch_spec(x, cut), mesh), batch)
    return stage(whole(trained), whole(rest), batch, whole(named), scale)


def exchange_on_mesh(
    tx: optax.GradientTransformation, mesh: Any, axis: Axis, specs: Any, grads: Any, state: Any
) -> tuple[Any, Any]:
    """Stage 2: gradients [n, ...] to directions, by `compressed_mean`.

    Args:
        tx: made with `sharded=specs`.
        mesh, axis: of the workers.
        specs: of the parameters, a tree like them; None where all are whole.
        grads: see above.
        state: of tx, whole.

    Returns:
        Directions laid out like the parameters, and the state.
    """
    workers = axis_names(axis)
    _check_workers(state, mesh, workers)
    outer = jax.tree.map(lambda _: P(), grads) if specs is None else specs
    rows = jax.tree.map(lambda spec: P(workers, *without(spec, workers)), outer)
    made = state_specs(state, axis)

    def one(grads, state):
        return tx.update(jax.tree.map(lambda g: g[0], grads), state)

    stage = jax.shard_map(one, mesh=_unless_in_force(mesh), in_specs=(rows, made), out_specs=(outer, made))
    return stage(jax.tree.map(lambda x, spec: laid_out(x, spec, mesh), grads, rows), state)


def _check_workers(state: Any, mesh: Any, workers: tuple[str, ...]) -> None:
    """Raises ValueError where a state was made before the parameters lay on this mesh, or for another one."""
    for mean in means_in(state):
        names = axis_names(mean.about.placement.every) or workers
        count = int(np.prod([mesh.shape.get(name, 1) for name in names]))
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
    like = like_of(params if specs is None else shapes_of_shards(params, mesh, specs))
    shapes = shape_on(mesh, tx, like)
    made = state_specs(shapes, axis, params=like)
    traced = [leaf for leaf in jax.tree.leaves(params) if isinstance(leaf, Tracer)]
    if not traced:
        check_state("init", shapes, mesh if isinstance(mesh, Mesh) else _in_force(), axis)
    make = jax.shard_map(lambda: tx.init(like), mesh=_unless_in_force(mesh), in_specs=(), out_specs=made)
    state = jax.jit(make)()
    if not traced:
        return state
    # Inside jit the devices are known by the arguments in use alone, so the state must depend on one.
    leaves, structure = jax.tree.flatten(state)
    first, _ = jax.lax.optimization_barrier((leaves[0], traced[0]))
    return jax.tree.unflatten(structure, [first, *leaves[1:]])


def same_on_mesh(make: Callable[[], Any], mesh: Any) -> Any:
    """Results of a function, whole on every device."""
    return jax.jit(jax.shard_map(make, mesh=_unless_in_force(mesh), in_specs=(), out_specs=P()))()


def _in_force() -> Any:
    """The mesh of `jax.set_mesh`, with its devices; None inside of a program."""
    return None if isinstance(jnp.zeros(()) + 0, Tracer) else jax.sharding.get_mesh()


def _unless_in_force(mesh: Any) -> Any:
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
