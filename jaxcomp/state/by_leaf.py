"""Vectors of a state as trees like the parameters."""

import functools
import math
from typing import Any

import jax

from jaxcomp.algorithms.narrow import Narrow
from jaxcomp.exchange.state import MeanState
from jaxcomp.groups import join

__all__ = ["by_leaf"]


def by_leaf(mean: MeanState, vectors: Any) -> Any:
    """Arrays of a state, one for each group (memories, shifts, iterates), as a tree like the parameters.

    Leaves have the leading axes and the dtype that the arrays have: a memory in f32 is not rounded to the gradients' 16
    bits. A memory in fewer bits (`memory="int8"`) is read.

    Args:
        mean: the state of `compressed_mean`.
        vectors: a part of it that has an array for each group, say state.local.algorithm.memory.

    >>> import jax.numpy as jnp, jaxcomp as jc
    >>> tx = jc.compressed_mean(jc.error_feedback(jc.top_k(k=1)), None)
    >>> state = tx.init({"w": jnp.zeros((2, 3))})
    >>> jc.state.by_leaf(state, state.local.algorithm.memory)["w"].shape
    (1, 2, 3)
    """
    groups = mean.about.groups
    vectors = tuple(map(_shaped, vectors, groups.like))
    lead = [x.ndim - len(like.shape) for x, like in zip(vectors, groups.like, strict=True)]
    dtypes = dict(enumerate(groups.dtypes)) | {
        i: x.dtype for x, group in zip(vectors, groups.groups, strict=True) for i in group.leaves
    }
    shapes = [jax.ShapeDtypeStruct(shape, dtypes[i]) for i, shape in enumerate(groups.shapes)]
    one = functools.partial(join, groups, like=jax.tree.unflatten(groups.structure, shapes))
    return functools.reduce(lambda f, _: jax.vmap(f), range(max(lead, default=0)), one)(vectors)


def _shaped(vector: Any, like: Any) -> Any:
    """A memory in few bits as an array with the shape of its group, behind the leading axes."""
    if not isinstance(vector, Narrow):
        return vector
    return vector.values(math.prod(like.shape)).reshape(*vector.codes.shape[:-2], *like.shape)
