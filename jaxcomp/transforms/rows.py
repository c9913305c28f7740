"""A mean for loops without `shard_map`: it takes the gradients of all workers, as rows, and runs on their mesh."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.sharding import PartitionSpec

from jaxcomp.exchange.varying import is_bound
from jaxcomp.transforms.meshes import on_mesh
from jaxcomp.transforms.stages import exchange_on_mesh, init_on_mesh

__all__ = ["with_rows"]


def with_rows(
    name: str, inside: optax.GradientTransformation, axes: tuple[str, ...], sharded: Any
) -> optax.GradientTransformationExtraArgs:
    """The same transformation where the axes are not bound: it takes rows [n, ...].

    Args:
        name: of the outer form, for errors.
        inside: where they are bound.
        axes: of all workers.
        sharded: as for `compressed_mean`.
    """
    specs = sharded if not _is_names(sharded) else None

    def init(params):
        arrays = jax.tree.leaves(params)
        eager = arrays and not any(isinstance(x, Tracer | jax.ShapeDtypeStruct) for x in arrays)
        mesh = (
            on_mesh(axes, params) if eager and not is_bound(axes) and (sharded is None or specs is not None) else None
        )
        return inside.init(params) if mesh is None else init_on_mesh(inside, mesh, axes, specs, params)

    def update(grads, state, params=None, **extra):
        mesh = on_mesh(axes, grads)
        if mesh is None:
            return inside.update(grads, state, params, **extra)
        count = 1
        for axis in axes:
            count *= mesh.shape[axis]
        _check_rows(name, axes, grads, params, count)
        return exchange_on_mesh(inside, mesh, axes, specs, grads, state)

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]


def _is_names(sharded: Any) -> bool:
    leaves = jax.tree.leaves(sharded, is_leaf=lambda node: isinstance(node, PartitionSpec))
    return sharded is None or not any(isinstance(leaf, PartitionSpec) for leaf in leaves)


def _check_rows(name: str, axes: tuple[str, ...], grads: Any, params: Any, count: int) -> None:
    shapes = [jnp.shape(g) for g in jax.tree.leaves(grads)]
    whole = None if params is None else [jnp.shape(x) for x in jax.tree.leaves(params)]
    fits = all(shape[:1] == (count,) for shape in shapes)
    if whole is not None and fits:
        fits = len(whole) == len(shapes) and all(g[1:] == x for g, x in zip(shapes, whole, strict=True))
    if not fits:
        raise ValueError(
            f"{name}: no axis named {', '.join(map(repr, axes))} is bound here; call it inside jax.shard_map, "
            f"jax.pmap or jax.vmap(axis_name=...), or give it the gradients of all {count} workers, [n, ...] each, as "
            f"jc.worker_value_and_grad makes them; got shapes {shapes[:3]}"
        )
