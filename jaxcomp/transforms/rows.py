"""A mean for loops without `shard_map`: it takes the gradients of all workers, as rows, and runs on their mesh."""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.sharding import PartitionSpec

from jaxcomp.exchange.axes import is_bound
from jaxcomp.state.specs import check_order
from jaxcomp.transforms.meshes import exchange_on_mesh, init_on_mesh, on_mesh

__all__ = ["with_rows"]

# What takes a norm or a mean of whole leaves, or of all.
JOINT = ("adaptive_grad_clip", "centralize", "clip_by_block_rms", "clip_by_global_norm", "normalize_by_update_norm")


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
        _check_before(name, state)
        return exchange_on_mesh(inside, mesh, axes, specs, grads, state)

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]


def _is_names(sharded: Any) -> bool:
    leaves = jax.tree.leaves(sharded, is_leaf=lambda node: isinstance(node, PartitionSpec))
    return sharded is None or not any(isinstance(leaf, PartitionSpec) for leaf in leaves)


def _check_before(name: str, state: Any) -> None:
    """Refuses what stands before the mean in a chain of optax and would see the rows of all workers as one gradient."""
    frame = sys._getframe(1)
    while frame is not None:
        done, steps = frame.f_locals.get("new_state"), frame.f_locals.get("update_fns", ())
        if frame.f_code.co_qualname == "chain.<locals>.update_fn" and isinstance(done, list):
            check_order((*done, state))
            joint = [name for step in steps[: len(done)] for name in _names_of(step) if name in JOINT]
            if joint:
                raise ValueError(
                    f"{name} stands behind optax.{joint[0]}, which would take the gradients of all workers together. "
                    f"Put it first: optax.chain(jc.compressed_mean(...), optax.{joint[0]}(...), optimizer)"
                )
        frame = frame.f_back


def _names_of(step: Any) -> list[str]:
    """Names of the functions of optax that made this update, which `chain` may have wrapped."""
    cells = [cell.cell_contents for cell in getattr(step, "__closure__", None) or ()]
    inside = [tx.update for tx in cells if isinstance(tx, optax.GradientTransformation)]
    name = getattr(step, "__qualname__", "").partition(".")[0]
    if name == "chain":
        inside += [each for cell in cells if type(cell) is tuple for each in cell if callable(each)]
    return [name, *(other for each in inside for other in _names_of(each))]


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
