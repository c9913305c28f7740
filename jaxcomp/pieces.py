"""Vectors of many leaves that are never joined, and their memories, to which each leaf is added where it belongs.

Joining leaves is a pass that reads and one that writes, before anything is computed. A memory that is a vector already
needs neither: on CPU each leaf is added to its part of the memory, in the memory's place.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from jaxcomp.compiled import always, computed, in_place

__all__ = ["LONG", "Pieces", "accumulated", "cut_apart", "end_to_end", "joined"]

Array = jax.Array
Tree = Any
FEW = 16  # slices that may be kernels of their own
LONG = 2**18  # entries of a vector that is worth a branch of its own


class Pieces(NamedTuple):
    """leaves: [d_1], ..., [d_m] of any dtypes, end to end the first entries of a vector, whose others are zero."""

    leaves: tuple[Array, ...]


def joined(pieces: Pieces, like: Any) -> Array:
    """The vector of shape and dtype `like` that the pieces are."""
    leaves = list(pieces.leaves)
    rest = like.size - sum(leaf.size for leaf in leaves)
    leaves += [jnp.zeros((rest,), like.dtype)] if rest else []
    return end_to_end(leaves, like.dtype).reshape(like.shape)


def accumulated(one: Callable[..., Array], memory: Tree, grads: Tree, *others: Tree) -> Tree:
    """one(e, g, *others) for each entry, with shapes and dtypes of the memory: computed once, and in its place.

    Args:
        one: of entries, which are zero where all are zero. The same object each time: outside of any program it is
            compiled.
        memory, others: arrays. grads: arrays of the same shapes, or `Pieces` of them.
    """

    def each(e: Array, g: Any, *others: Array) -> Array:
        if not isinstance(g, Pieces):
            return in_place(_of_several(one), e, (g, *others))
        if jax.default_backend() != "cpu" or not isinstance(e, Tracer) or not 0 < e.size < 2**31:
            return in_place(_of_several(one), e, (joined(g, e), *others))
        return _piece_by_piece(one, e, g, *others)

    return jax.tree.map(each, memory, grads, *others)


@functools.cache
def _of_several(one: Callable[..., Array]) -> Callable[..., Array]:
    return lambda e, x: one(e, *x)


@functools.partial(jax.jit, static_argnums=0)  # traced once for each size
def _with_piece(one: Callable[..., Array], memory: Array, start: Array, piece: Array, *others: Array) -> Array:
    there = lambda x: lax.dynamic_slice_in_dim(x, start, piece.size)
    now = one(there(memory), piece, *map(there, others))
    return lax.dynamic_update_slice_in_dim(memory, now, start, 0)


def _piece_by_piece(one: Callable[..., Array], memory: Array, pieces: Pieces, *others: Array) -> Array:
    @jax.custom_batching.custom_vmap
    def added(memory, pieces, others):
        leaves = [x for x in pieces.leaves if x.size]
        starts = _unknown(_starts([x.size for x in leaves]), leaves[0])
        after, others = computed(memory, starts[0]).reshape(-1), [x.reshape(-1) for x in others]
        for start, piece in zip(starts, leaves, strict=True):
            after = _with_piece(one, after, start, piece, *others)
        return after.reshape(memory.shape)

    @added.def_vmap
    def _(size, batched, *args):
        of = lambda memory, pieces, others: in_place(_of_several(one), memory, (joined(pieces, memory), *others))
        axes = jax.tree.map(lambda is_batched: 0 if is_batched else None, tuple(batched))
        return jax.vmap(of, axes, axis_size=size)(*args), True

    return added(memory, pieces, others)


# ------------------------------------------------------------------------------------------------
# End to end, and apart


def end_to_end(leaves: Sequence[Array], dtype: Any) -> Array:
    """Leaves of any shapes as one vector of a dtype; no entries for no leaves."""
    if len(leaves) == 1:
        return leaves[0].reshape(-1).astype(dtype)
    if not leaves:
        return jnp.zeros((0,), dtype)
    vectors = [lax.reshape(jnp.asarray(leaf, dtype), (leaf.size,)) for leaf in leaves if leaf.size]
    size = sum(leaf.size for leaf in leaves)
    if not 1 < len(vectors) < FEW or size < LONG or jax.default_backend() != "cpu":
        return lax.concatenate(vectors, 0) if vectors else jnp.zeros((0,), dtype)
    # XLA for CPU fuses few leaves with what follows, entry by entry: ten times as slow. It fuses nothing into a branch.
    other = lambda *vectors: jnp.broadcast_to(sum(vector[0] for vector in vectors), (size,))
    return lax.cond(always(vectors[0]), lambda *vectors: lax.concatenate(vectors, 0), other, *vectors)


def cut_apart(vector: Array, sizes: Sequence[int]) -> list[Array]:
    """Consecutive pieces of a vector, or of each row [..., d]; what is left of it is dropped."""
    few = len(sizes) < FEW or not isinstance(vector, Tracer)
    if few or jax.default_backend() != "cpu" or not 0 < vector.size < 2**31:
        static = zip(_starts(sizes), sizes, strict=True)
        return [lax.slice_in_dim(vector, start, start + size, axis=-1) for start, size in static]
    dynamic = zip(_unknown(_starts(sizes), vector), sizes, strict=True)
    return [lax.dynamic_slice_in_dim(vector, start, size, axis=-1) for start, size in dynamic]


def _starts(sizes: Sequence[int]) -> list[int]:
    return (np.cumsum(sizes, dtype=np.int64) - np.asarray(sizes, np.int64)).tolist()


def _unknown(starts: list[int], vector: Array) -> Sequence[Array]:
    """The same numbers, out of a condition that XLA cannot decide.

    On CPU it compiles every static slice of a long vector as a kernel of its own, 30 ms each. Slices whose starts it
    does not know are one kernel for each size.
    """
    constants = lambda numbers: lambda: tuple(jnp.asarray(number, jnp.int32) for number in numbers)
    return lax.cond(always(vector), constants(starts), constants([0] * len(starts)))
