"""Compressors of trees: leaf by leaf, or all leaves as one vector. `jaxcomp.groups` says how trees become arrays."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomp.arrays import is_left_out
from jaxcomp.backend import zeros_if_shape
from jaxcomp.base import (
    Compressor,
    Left,
    Lifted,
    Round,
    State,
    accumulate,
    advance,
    check_compressor,
    for_worker,
    keys_of,
    left,
    lengths,
)
from jaxcomp.checks import is_whole
from jaxcomp.compressors.rows import Rows, rows
from jaxcomp.factories import factory
from jaxcomp.groups import (
    AS_IT_IS,
    DEFAULT,
    DENSE_BELOW,
    Choice,
    Group,
    Groups,
    Layout,
    compressors_of,
    groups_of,
    join,
    split,
)
from jaxcomp.payloads import Dense, Leaves

__all__ = ["as_leaves", "choices_of", "each_of", "flat", "from_leaves", "laid_out", "layout_of", "per_leaf"]


def laid_out(compressor: Compressor) -> Lifted:
    """The layout in which a compressor serves trees, and what compresses one array of it."""
    return compressor.spec.lifted or Lifted(compressor.spec.layout or DEFAULT, compressor)


def layout_of(algorithm: Any) -> Layout:
    """How an algorithm lays out trees: as it says itself, or as its compressor does."""
    if algorithm.layout is not None or algorithm.compressor is None:
        return algorithm.layout or DEFAULT
    return laid_out(algorithm.compressor).layout


def choices_of(algorithm: Any) -> tuple[Choice, ...]:
    """Choices that compress the groups of a tree: of an algorithm, or of each of its parts, or of a compressor."""
    if getattr(algorithm, "parts", ()):
        return tuple(choice for part in algorithm.parts for choice in choices_of(part))
    given = algorithm if isinstance(algorithm, Compressor) else algorithm.compressor
    one = AS_IT_IS if given is None else laid_out(given).compressor
    return (Choice(one, rows(one)),)


def each_of(algorithm: Any, groups: tuple[Group, ...]) -> tuple[Compressor, ...]:
    """The compressor of each group, of an algorithm or of a compressor."""
    return compressors_of(choices_of(algorithm), groups)


@factory
def per_leaf(compressor: Compressor, *, dense_below: int = DENSE_BELOW) -> Compressor:
    """Compresses each leaf of a tree by itself; small leaves go dense in one message.

    Each leaf has its own state, its own keys and its own payload. Leaves with fewer than
    `dense_below` entries (biases, norms) are concatenated and sent as they are. A bare array, a
    tree that is itself a leaf, is compressed whatever its size, with the compressor's own payload.

    omega is the largest, alpha the smallest over the leaves (1 for dense ones).

    Leaves with equally many entries are compressed by one instance in the compiled program, one after the other. So
    compile time grows with the number of different sizes; where that is too much, leave `per_leaf` out: by default
    large leaves are one vector, or with `dithering` and `cast` few.

    Args:
        compressor: of one array.
        dense_below: number of entries, at least 0; 0 compresses every leaf.

    Returns:
        Compressor of trees with payload `Leaves`.

    Raises:
        ValueError: the compressor acts on trees already, or dense_below is negative.

    >>> import jaxcomp as jc
    >>> tree = {"b": jnp.ones(2), "w": jnp.arange(6.0)}
    >>> x_hat, payload = jc.roundtrip(jc.per_leaf(jc.top_k(k=1), dense_below=3), tree, key=jax.random.key(0))
    >>> print(x_hat["b"], x_hat["w"], payload.dense.values)
    [1. 1.] [0. 0. 0. 0. 0. 5.] [1. 1.]
    """
    if not is_whole(dense_below, 0):
        raise ValueError(f"per_leaf: dense_below must be an integer of at least 0; got {dense_below}")
    unit = "leaf" if compressor.lengths is None else "apart"
    return _of_trees("per_leaf", compressor, Layout(unit, int(dense_below)))


@factory
def flat(compressor: Compressor) -> Compressor:
    """Compresses all leaves of a tree as one vector, in the order of `jax.tree.leaves`.

    One threshold or one norm for the whole model, one message. omega and alpha are those of the
    compressor at the total number of entries.

    Args:
        compressor: of one array.

    Returns:
        Compressor of trees with the compressor's own payload.

    Raises:
        ValueError: the compressor acts on trees already.

    >>> import jaxcomp as jc
    >>> tree = {"a": jnp.ones(2), "b": jnp.array(3.0)}
    >>> x_hat, payload = jc.roundtrip(jc.flat(jc.top_k(k=1)), tree, key=jax.random.key(0))
    >>> print(x_hat["a"], x_hat["b"], payload.indices)
    [0. 0.] 3.0 [2]
    """
    own = check_compressor("flat", compressor).layout or DEFAULT
    layout = Layout("tree", 0, single=True, multiple=own.multiple, filled_from=own.filled_from)
    return _of_trees("flat", compressor, layout)


def _of_trees(name: str, compressor: Compressor, layout: Layout) -> Compressor:
    """A compressor of trees that are laid out so. Its states are tuples with one item for each group."""
    spec = check_compressor(name, compressor)
    if spec.lifted:
        raise ValueError(f"{name}: {spec.name} acts on trees already")

    def of(tree: Any) -> tuple[Groups, tuple[Compressor, ...]]:
        groups = groups_of(layout, tree)
        return groups, each_of(compressor, groups.groups)

    def init(shared_key, like):
        groups, each = of(like)
        states = Round(shared_key, groups.groups, each).start(groups.like)
        return State(tuple(s.local for s in states), tuple(s.shared for s in states))

    def compress(key, tree, state):
        groups, each = of(tree)
        keys = keys_of(key, groups.groups)
        given = zip(each, keys, split(groups, tree), state.local, state.shared, strict=True)
        done = [c.compress(own, x, State(local, shared)) for c, own, x, local, shared in given]
        payload = as_leaves(groups.groups, tuple(payload for payload, _ in done))
        return _by_leaf(groups.groups, payload), tuple(local for _, local in done)

    def decompress(payload, shared, like):
        groups, each = of(like)
        payloads = from_leaves(groups.groups, _by_group(groups.groups, payload, 0))
        given = zip(each, payloads, shared, groups.like, strict=True)
        return join(groups, tuple(c.decompress(*rest) for c, *rest in given))

    def add(total, payloads, weights, shared):
        groups, each = of(total)
        if isinstance(weights, Leaves):
            weights = from_leaves(groups.groups, _by_group(groups.groups, weights, None))
            weights = (weights[0].values, *weights[1:]) if _has_small(groups.groups) else weights
        else:
            weights = (weights,) * len(each)
        payloads = _by_group(groups.groups, payloads, 1)
        totals = split(groups, zeros_if_shape(total, payloads))
        given = zip(each, totals, from_leaves(groups.groups, payloads), weights, shared, strict=True)
        return join(groups, tuple(accumulate(*five) for five in given))

    def one_of(state):
        """The compressor that such a state is of."""
        return rows(compressor) if isinstance(state, Rows) else compressor

    def over(function):
        """The same function of the shared states of all groups; small ones have none."""
        return lambda shared, *args: tuple(
            each if is_left_out(each) else function(one_of(each), each, *args) for each in shared
        )

    def lengths_(like):
        groups, each = of(like)
        counts = tuple(lengths(c, x) for c, x in zip(each, groups.like, strict=True))
        if _has_one(groups.groups):
            return counts[0]
        return Leaves(Dense(None), counts[1:] if _has_small(groups.groups) else counts)

    def overflow_(local):
        zero = jnp.zeros((), jnp.int32)
        each = [left(one_of(own), own) for own in local if not is_left_out(own)]
        return jax.tree.map(lambda *xs: sum(xs[1:], start=xs[0]), Left(zero, zero), *each)

    return Compressor(
        init,
        compress,
        decompress,
        spec._replace(
            name=f"{name}({spec.name})",
            omega=_bound(layout, spec.omega, max, 0.0),
            alpha=_bound(layout, spec.alpha, min, 1.0),
            selects=False,
            lifted=Lifted(layout, compressor),
        ),
        accumulate=add,
        advance=None if compressor.advance is None else over(advance),
        lengths=None if compressor.lengths is None else lengths_,
        for_worker=None if compressor.for_worker is None else over(for_worker),
        overflow=None if compressor.overflow is None else overflow_,
    )


def _bound(layout: Layout, of_size: Callable | None, pick: Callable, of_dense: float) -> Callable | None:
    """omega or alpha of a tree from that of one array of d entries: of the worst array, where there are several."""
    if of_size is None:
        return None

    def of(sizes: Any) -> float:
        if not isinstance(sizes, tuple):
            return of_size(sizes)
        if layout.single:
            return of_size(sum(sizes))
        return pick([of_size(d) if d >= layout.dense_below else of_dense for d in sizes], default=of_dense)

    return of


# ------------------------------------------------------------------------------------------------
# One payload for a whole tree


def _has_one(groups: tuple[Group, ...]) -> bool:
    """Whether it is one group that has the message to itself: then the payload is that of the group."""
    return len(groups) == 1 and groups[0].number is None and not groups[0].small


def _has_small(groups: tuple[Group, ...]) -> bool:
    return bool(groups) and groups[0].small


def as_leaves(groups: tuple[Group, ...], payloads: tuple[Any, ...]) -> Any:
    """The payloads of all groups as one, as it is kept in bytes: `Leaves`, or that of a single group by itself."""
    if _has_one(groups):
        return payloads[0]
    if _has_small(groups):
        return Leaves(payloads[0], payloads[1:])
    return Leaves(Dense(jnp.zeros((0,), jnp.float32)), payloads)


def from_leaves(groups: tuple[Group, ...], payload: Any) -> tuple[Any, ...]:
    """Inverse of `as_leaves`."""
    if _has_one(groups):
        return (payload,)
    return (payload.dense, *payload.leaves) if _has_small(groups) else tuple(payload.leaves)


def _by_leaf(groups: tuple[Group, ...], payload: Any) -> Any:
    """The payload of each leaf in the order of the leaves, out of those of the groups."""
    if _has_one(groups):
        return payload
    found = {}
    for group, part in zip(_large(groups), payload.leaves, strict=True):
        for row, i in enumerate(group.leaves if group.each else group.leaves[:1]):
            found[i] = jax.tree.map(lambda a: a[row], part) if group.each else part  # noqa: B023
    return payload._replace(leaves=tuple(found[i] for i in sorted(found)))


def _by_group(groups: tuple[Group, ...], payload: Any, axis: int | None) -> Any:
    """Inverse of `_by_leaf`, stacking rows along `axis`; None: what stands for a group is that of its first leaf."""
    if _has_one(groups):
        return payload
    large = _large(groups)
    numbers = sorted(i for group in large for i in (group.leaves if group.each else group.leaves[:1]))
    found = dict(zip(numbers, payload.leaves, strict=True))

    def part(group):
        if axis is None or not group.each:
            return found[group.leaves[0]]
        along = axis
        return jax.tree.map(lambda *rows: jnp.stack(rows, along), *(found[i] for i in group.leaves))

    return payload._replace(leaves=tuple(map(part, large)))


def _large(groups: tuple[Group, ...]) -> list[Any]:
    return [group for group in groups if not group.small]
