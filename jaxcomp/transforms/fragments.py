"""A tree in consecutive fragments of about equal size; the steps at which each of them is exchanged, and the others."""

import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from jaxcomp.exchange.axes import varying
from jaxcomp.exchange.state import NO_COUNTS, MeanState

__all__ = ["Timetable", "cut", "fragments_of", "idle", "replaced"]


class Timetable(NamedTuple):
    """When fragment p of P is merged: at the steps t > delay with t mod every = floor((p + 1) every / P) mod every.

    every, fragments, delay: as for `local_updates`. Steps are counted from one, and may be traced.

    >>> times = Timetable(6, 2, 1)
    >>> [[t for t in range(1, 13) if times.merges(p, t)] for p in range(2)]
    [[3, 9], [6, 12]]
    >>> [[t for t in range(1, 13) if times.takes(p, t)] for p in range(2)]
    [[2, 8], [5, 11]]
    """

    every: int
    fragments: int
    delay: int

    def place(self, fragment: int) -> int:
        """t mod every at which it is merged."""
        return (fragment + 1) * self.every // self.fragments % self.every

    def merges(self, fragment: int, step: Any) -> Any:
        """Whether the fragment is merged at this step."""
        return (step % self.every == self.place(fragment)) & (step > self.delay)

    def takes(self, fragment: int, step: Any) -> Any:
        """Whether the difference of the fragment is taken at this step, to be merged `delay` steps later."""
        return (step + self.delay) % self.every == self.place(fragment)


def fragments_of(tree: Any, number: int) -> tuple[tuple[int, ...], ...]:
    """Numbers of the leaves of each fragment: consecutive, none empty, each nearest to an equal share of what is left.

    Raises:
        ValueError: fewer leaves than fragments.

    >>> fragments_of([jnp.zeros(4), jnp.zeros(3), jnp.zeros(1), jnp.zeros(9)], 2)
    ((0, 1, 2), (3,))
    """
    sizes = [math.prod(jnp.shape(leaf)) for leaf in jax.tree.leaves(tree)]
    if number == 1:
        return (tuple(range(len(sizes))),)
    if len(sizes) < number:
        raise ValueError(f"local_updates: fragments must be at most the number of leaves, {len(sizes)}; got {number}")
    ends = [0]
    for left in range(number, 1, -1):  # fragments, of about equal parts of what is left
        share = sum(sizes[ends[-1] :]) / left
        distance = lambda end: abs(sum(sizes[ends[-1] : end]) - share)  # noqa: B023
        ends.append(min(range(ends[-1] + 1, len(sizes) - left + 2), key=distance))
    ends.append(len(sizes))
    return tuple(tuple(range(a, b)) for a, b in itertools.pairwise(ends))


def _is_spec(node: Any) -> bool:
    return isinstance(node, PartitionSpec)


def cut(tree: Any, numbers: tuple[int, ...]) -> Any:
    """The tree with `optax.MaskedNode` in place of the leaves that are not of this fragment: optax passes over these.

    >>> cut({"a": 1, "b": 2}, (1,))
    {'a': MaskedNode(), 'b': 2}
    """
    leaves, structure = jax.tree.flatten(tree, is_leaf=_is_spec)
    if len(numbers) == len(leaves):
        return tree
    return jax.tree.unflatten(structure, [x if i in numbers else optax.MaskedNode() for i, x in enumerate(leaves)])


def replaced(tree: Any, numbers: tuple[int, ...], part: Any) -> Any:
    """The tree with the leaves of a fragment taken from `part`, which `cut` made."""
    leaves, structure = jax.tree.flatten(tree)
    for i, leaf in zip(numbers, jax.tree.leaves(part), strict=True):
        leaves[i] = leaf
    return jax.tree.unflatten(structure, leaves)


def idle(state: MeanState) -> MeanState:
    """The state of a mean after a step without an exchange."""
    every = state.about.placement.every
    none = lambda value, x: varying(jnp.full(x.shape, value, x.dtype), every)
    before, since = state.local.counts._replace(since=()), varying(state.local.counts.since, every)
    counts = jax.tree.map(none, NO_COUNTS, before)._replace(since=since)
    return MeanState(state.local._replace(counts=counts), state.shared, state.about)
