"""Parameters that are cut over the workers themselves (fully sharded data parallelism).

Each worker has the gradient of whole parameters, and holds a shard of them. The leaves are laid out by owner,

    x = [n, c]: row j is what worker j holds of every leaf, end to end, filled up with zeros,

the algorithm sees that stack, and each worker ends with its own row of the mean direction (`exchange.routes.scatter`).
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from jaxcomp.arrays import bounded, like_of, wide
from jaxcomp.base import Algorithm
from jaxcomp.exchange.axes import Placement, axis_names, axis_size, check_gradients, is_bound, local_rows
from jaxcomp.exchange.binding import exchange_of
from jaxcomp.exchange.routes import SCATTER
from jaxcomp.groups import row_size, split

__all__ = ["cut_dimension", "scattered_mean"]

Array = jax.Array


def cut_dimension(name: str, spec: PartitionSpec, workers: tuple[str, ...]) -> int | None:
    """The dimension that a spec cuts over all the workers; None if it cuts none.

    Raises:
        ValueError: it cuts over some of them, in another order, or not last.
    """
    entries = [axis_names(entry) for entry in spec]
    cut = [i for i, entry in enumerate(entries) if set(entry) & set(workers)]
    if not cut:
        return None
    if len(cut) > 1 or entries[cut[0]][-len(workers) :] != workers:
        raise ValueError(
            f"{name}: parameters may be cut over the workers along one dimension, over all of their axes {workers}, "
            f"after other axes; got {spec}"
        )
    return cut[0]


def _common(leaves: list[Any]) -> Any:
    """The dtype that they have, or a wide one where they have several."""
    kinds = {leaf.dtype for leaf in leaves}
    return kinds.pop() if len(kinds) == 1 else wide(*kinds)


class RowLayout(NamedTuple):
    """Places of the pieces of leaves in a row. shapes: of the shards; dimensions: along which they are cut."""

    workers: int
    shapes: tuple[tuple[int, ...], ...]
    dimensions: tuple[int, ...]

    @property
    def sizes(self) -> list[int]:
        """Entries of each leaf in a row."""
        return list(map(math.prod, self.shapes))

    @property
    def width(self) -> int:
        """Entries of a row, with its padding."""
        return row_size(self.workers * sum(self.sizes), self.workers)

    def stack(self, leaves: list[Array]) -> Array:
        """[n, c] of whole leaves."""
        dtype = _common(leaves)
        pieces = []
        for leaf, shape, k in zip(leaves, self.shapes, self.dimensions, strict=True):
            whole = (*shape[:k], self.workers, *shape[k:])
            pieces.append(jnp.moveaxis(leaf.astype(dtype).reshape(whole), k, 0).reshape(self.workers, -1))
        return jnp.concatenate([*pieces, jnp.zeros((self.workers, self.width - sum(self.sizes)), dtype)], axis=1)

    @property
    def whole(self) -> list[tuple[int, ...]]:
        """Shapes of the whole leaves."""
        pairs = zip(self.shapes, self.dimensions, strict=True)
        return [(*shape[:k], shape[k] * self.workers, *shape[k + 1 :]) for shape, k in pairs]

    def recut(self, stack: np.ndarray, other: "RowLayout") -> np.ndarray:
        """[..., n, c] for the owners of `other`, on the host. The padding is zero in both."""
        lead, start, pieces = stack.shape[:-2], 0, []
        at = len(lead)
        each = zip(self.shapes, self.dimensions, self.sizes, self.whole, other.shapes, other.dimensions, strict=True)
        for shape, k, size, whole, shard, other_k in each:
            piece = stack[..., start : start + size].reshape(*lead, self.workers, *shape)
            leaf = np.moveaxis(piece, at, at + k).reshape(*lead, *whole)
            cut = leaf.reshape(*lead, *shard[:other_k], other.workers, *shard[other_k:])
            pieces.append(np.moveaxis(cut, at + other_k, at).reshape(*lead, other.workers, -1))
            start += size
        rest = np.zeros((*lead, other.workers, other.width - sum(other.sizes)), stack.dtype)
        return np.concatenate([*pieces, rest], -1)

    def cut(self, row: Array, dtypes: list[Any]) -> list[Array]:
        """Shards of the leaves from one row."""
        ends = [sum(self.sizes[: i + 1]) for i in range(len(self.sizes))]
        pieces = [row[end - size : end] for end, size in zip(ends, self.sizes, strict=True)]
        pairs = zip(pieces, self.shapes, dtypes, strict=True)
        return [bounded(piece.reshape(shape), dtype) for piece, shape, dtype in pairs]


def scattered_mean(
    name: str,
    algorithm: Algorithm,
    placement: Placement,
    dimensions: tuple[int, ...],
    root: Array,
    options: dict[str, Any],
) -> optax.GradientTransformationExtraArgs:
    """The mean direction of leaves that are cut over the workers, each along its dimension: whole gradients in, shards
    out. algorithm: `direct` or `error_feedback`."""
    run = exchange_of(name, algorithm, placement, SCATTER, root, **options)
    axis = placement.workers

    def rows_of(shards: list[Any]) -> RowLayout:
        workers = axis_size(axis) if is_bound(axis) else local_rows(axis)
        return RowLayout(workers, tuple(leaf.shape for leaf in shards), dimensions)

    def init(params):
        leaves = jax.tree.leaves(like_of(params))
        rows = rows_of(leaves)
        state = run.init(jax.ShapeDtypeStruct((rows.workers, rows.width), _common(leaves)))
        return dataclasses.replace(state, about=dataclasses.replace(state.about, owners=rows))

    def update(grads, state, params=None, **extra):
        del params, extra
        check_gradients(grads, placement)
        leaves, structure = jax.tree.flatten(grads)
        count = axis_size(axis)
        shards = []
        for leaf, k in zip(leaves, dimensions, strict=True):
            if leaf.shape[k] % count:
                raise ValueError(f"{name}: dimension {k} of a gradient {leaf.shape} must be a multiple of {count}")
            shape = (*leaf.shape[:k], leaf.shape[k] // count, *leaf.shape[k + 1 :])
            shards.append(jax.ShapeDtypeStruct(shape, leaf.dtype))
        rows = rows_of(shards)
        (direction,), after = run.step(state, lambda groups: split(groups, rows.stack(leaves)), leaves)
        return jax.tree.unflatten(structure, rows.cut(direction, [leaf.dtype for leaf in leaves])), after

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]
