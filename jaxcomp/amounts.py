"""What each worker may send of an array: numbers in the shared state, so that they can change any round."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["Amounts", "set_amounts"]

Array = jax.Array


class Amounts(NamedTuple):
    """each: f32[n], what each worker may send of one array, in the unit of the sparsifier."""

    each: Array


def set_amounts(state: Any, amounts: Any) -> Any:
    """The same state with other ratios (or thresholds) for the workers; nothing recompiles.

    Args:
        state: of `dagc`, of an algorithm, of `compressed_mean` or of any optimizer that contains it.
        amounts: [n], for every array that is compressed; or a list of [n], one for each, in the order
            of `jax.tree.leaves`. A ratio above a worker's room (`dagc(capacity=)`) is cut to it.

    Returns:
        The state, with each `Amounts` replaced.

    Raises:
        ValueError: there is no dagc in the state, or a shape does not fit.

    >>> import jaxcomp as jc
    >>> c = jc.dagc([3, 1], 0.25, capacity=2)
    >>> state = c.init(jax.random.key(0), jnp.zeros(8))
    >>> print(set_amounts(state, [0.5, 0.125]).shared.each)
    [0.5   0.125]
    """
    is_amounts = lambda node: isinstance(node, Amounts)
    found = [node for node in jax.tree.leaves(state, is_leaf=is_amounts) if is_amounts(node)]
    if not found:
        raise ValueError("set_amounts: there is no dagc in this state")
    if not isinstance(amounts, (list, tuple)) or not amounts or np.ndim(amounts[0]) == 0:
        amounts = [amounts] * len(found)
    if len(amounts) != len(found):
        raise ValueError(f"set_amounts: {len(amounts)} lists of amounts for {len(found)} compressed arrays")
    new = iter([jnp.asarray(a, jnp.float32) for a in amounts])

    def replace(node):
        if not is_amounts(node):
            return node
        each = next(new)
        if each.shape != node.each.shape[-1:]:
            raise ValueError(f"set_amounts: expected {node.each.shape[-1]} amounts; got shape {each.shape}")
        return Amounts(jnp.broadcast_to(each, node.each.shape))

    return jax.tree.map(replace, state, is_leaf=is_amounts)
