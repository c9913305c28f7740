"""The loss of the whole batch, called once, whose gradient JAX leaves unreduced over the workers.

On a mesh whose axes are Explicit, parameters typed `reduced={"data"}` have gradients typed `unreduced={"data"}`: each
device holds its part of a sum that was not taken, and the program has no collective for it. With parts h_i,

    grad L = sum_i h_i,    g_i = n h_i    is what worker i compresses:    (1/n) sum_i g_i = grad L.

A worker's part counts its own tokens, so g_i is what a loss with `weight=` gives (`transforms.worker_gradients`).
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcomp.arrays import wide
from jaxcomp.transforms.arguments import Call, Given, Trained
from jaxcomp.transforms.meshes import placed, unless_in_force, without
from jaxcomp.transforms.worker_gradients import Gradients, Loss, is_overflow, kinds_of, own_gradients

__all__ = ["unreduced_on_mesh"]

NOTE = (
    'value_and_grad(gradients="unreduced"): JAX differentiates the loss with parameters typed reduced over {}. '
    "Where it has no rule for an operation, or does not know how its result is to lie, either say so in the loss "
    "(out_sharding=, or jax.reshard of the parameter to P() before an operation on single entries), or take the "
    'gradients of each worker by itself, gradients="per_worker".'
)


def unreduced_on_mesh(
    how: Loss,
    what: Trained,
    call: Call,
    mesh: Any,
    workers: tuple[str, ...],
    trained: Any,
    rest: Any,
    given: Given,
    scale: Any = None,
) -> Gradients:
    """Results like those of `gradients_on_mesh`: messages n h_i, [n, ...]; loss and auxiliary values are plain JAX's.

    Raises:
        ValueError: an axis that is not Explicit; weights of the workers, which a loss of the whole batch has in it.
    """
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    auto = [axis for axis in mesh.axis_names if kinds[axis] != AxisType.Explicit and mesh.shape[axis] > 1]
    if auto:
        raise ValueError(
            f'value_and_grad: gradients="unreduced" needs axes of type Explicit; {auto[0]!r} is {kinds[auto[0]].name}. '
            'Make the mesh with axis_types=(jax.sharding.AxisType.Explicit,) * n, or say gradients="per_worker"'
        )
    if how.shares:
        raise ValueError(
            'value_and_grad: with gradients="unreduced" the loss is that of the whole batch, and weighs its parts '
            'itself; weights of the workers (weights=, dagc) go with gradients="per_worker"'
        )
    count, parts = math.prod(mesh.shape[axis] for axis in workers), how.micro_batches
    specs = jax.tree.map(lambda x: without(jax.typeof(x).sharding.spec, workers), trained)
    _, rest, given = placed(mesh, workers, {}, rest, given)
    lie = lambda x, spec: jax.reshard(x, NamedSharding(mesh, spec))
    rows = jax.tree.map(lambda spec: P(workers, *spec), specs)

    def apart(grads: Any) -> Any:
        """Unreduced gradients as an array [n, ...]. No data moves."""
        ins = jax.tree.map(lambda g: jax.typeof(g).sharding.spec, grads)
        stage = lambda tree: jax.tree.map(lambda g: g[None] * jnp.asarray(count, g.dtype), tree)
        return jax.shard_map(stage, mesh=unless_in_force(mesh), in_specs=(ins,), out_specs=rows, check_vma=False)(grads)

    def zeros(tree: Any) -> Any:
        return jax.tree.map(lambda x, spec: lie(jnp.zeros((count, *x.shape), wide(x.dtype)), spec), tree, rows)

    if parts == 1:
        how = how._replace(kinds=kinds_of("value_and_grad", "equal"))  # as they are
    typed = jax.tree.map(lambda x, spec: lie(lie(x, spec), spec.update(reduced=set(workers))), trained, specs)
    factor = how.scale if scale is None else scale
    try:
        own = own_gradients(how, what, call, None, typed, rest, given, factor, rows=(apart, zeros))
    except Exception as error:
        error.add_note(NOTE.format(workers))
        raise
    overflow = None if scale is None else is_overflow(own.grads)
    return Gradients(own.loss, own.extra, own.rest, own.grads, overflow, own.kinds)
