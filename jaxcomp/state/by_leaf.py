"""Vectors of a state as trees like the parameters."""

import functools
from typing import Any

import jax

from jaxcomp.exchange.state import MeanState
from jaxcomp.layout import join

__all__ = ["by_leaf"]


def by_leaf(mean: MeanState, vectors: Any) -> Any:
    """Vectors of a state (memories, shifts, iterates) as a tree like the parameters, behind their leading axes.

    >>> import jax.numpy as jnp, jaxcomp as jc
    >>> tx = jc.compressed_mean(jc.error_feedback(jc.top_k(k=1)), None)
    >>> state = tx.init({"w": jnp.zeros((2, 3))})
    >>> jc.state.by_leaf(state, state.local.algorithm.memory)["w"].shape
    (1, 2, 3)
    """
    plan = mean.about.plan
    lead = jax.tree.map(lambda x, like: x.ndim - len(like.shape), vectors, plan.like)
    axes = max(jax.tree.leaves(lead), default=0)
    return functools.reduce(lambda f, _: jax.vmap(f), range(axes), functools.partial(join, plan))(vectors)
