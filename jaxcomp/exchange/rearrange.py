"""Arrays of a state for other workers, groups and shards: taken apart into leaves, moved, and laid out anew."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp.arrays import is_left_out
from jaxcomp.groups import Groups

__all__ = [
    "LeadingAxes",
    "Misfit",
    "Move",
    "change_of",
    "check_alike",
    "check_shapes",
    "each_leaf",
    "join_lead",
    "kept_groups",
    "map_alike",
    "modulo",
    "on_host",
    "placed",
    "split_lead",
    "taken_over",
]


class Misfit(Exception):
    """Tells what is wrong, and at which place of the trees."""

    def __init__(self, what: str, path: str = ""):
        super().__init__(what)
        self.what, self.path = what, path


def map_alike(fn: Callable[[Any, Any], Any], old: Any, new: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """Maps as `jax.tree.map` does, for trees that must be alike."""

    def one(path, x, like):
        try:
            if type(x) is not type(like):
                check_alike(x, like)
            return fn(x, like)
        except Misfit as misfit:
            raise Misfit(misfit.what, jax.tree_util.keystr(path) + misfit.path) from None

    check_alike(old, new, is_leaf)
    return jax.tree_util.tree_map_with_path(one, old, new, is_leaf=is_leaf)


def check_alike(old: Any, new: Any, is_leaf: Callable[[Any], bool] | None = None) -> None:
    """Raises Misfit unless two states have the same structure; names a part that only one of them has."""
    if jax.tree.structure(old, is_leaf) == jax.tree.structure(new, is_leaf):
        return
    paths = lambda tree: [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree, is_leaf)]
    first, second = paths(old), paths(new)
    alone = [f"old{path}" for path in first if path and path not in second]
    alone += [f"new{path}" for path in second if path and path not in first]
    raise Misfit(
        f"the two states are of different optimizers or parameters{f'; only one has {alone[0]}' if alone else ''}. To "
        "restore the old one, make a target by jc.init_state(tx, params, jax.sharding.AbstractMesh(...), axis_name)"
    )


class LeadingAxes(NamedTuple):
    """Local arrays have a leading axis of [groups shards workers]: of groups, which exchange at a later level, of
    workers with the same shard. Shared arrays have one of [groups shards] where there may be more than one of these."""

    groups: int
    shards: int
    workers: int


class Move(NamedTuple):
    """A way from one state to another.

    keep: as for `redistribute`. along: mesh axes of the shards. leads: shared arrays have a leading axis.
    before, after: the groups of the tree. owners: how the rows of owners lie before and after, of parameters that are
    cut over the workers themselves.
    """

    old: LeadingAxes
    new: LeadingAxes
    keep: str
    along: tuple[str, ...]
    leads: bool
    before: Groups
    after: Groups
    owners: tuple[Any, Any] = (None, None)


def each_leaf(
    old: Any, new: Any, move: Move, one: Callable, lead: tuple[int, ...] | None = None, single: bool = False
) -> Any:
    """`one` of each leaf, [*lead, *shape] of the old shards to [groups, shards, ..., *shape] of the new ones.

    single: `new` has no leading axis.
    """
    leads, lead = lead is None or move.leads, move.old if lead is None else lead
    leaves = _leaves(
        move.before,
        jax.tree.map(lambda x: split_lead(on_host(x) if leads else on_host(x)[None], lead), old),
        len(lead),
    )
    shapes = move.after.shapes
    made = [x if x is None else one(_cut_anew(x, len(lead), shapes[i], move)) for i, x in enumerate(leaves)]
    return _of_leaves(move.after, made, new, single)


def _leaves(groups: Groups, arrays: Any, lead: int) -> list[np.ndarray | None]:
    """Arrays of the leaves of a tree out of those of its groups, behind leading axes; None for those left out."""
    leaves: list[Any] = [None] * len(groups.shapes)
    for group, array in zip(groups.groups, arrays, strict=True):
        if is_left_out(array):
            continue
        flat, start = array.reshape(*array.shape[:lead], -1), 0
        for i in group.leaves:
            size = math.prod(groups.shapes[i])
            leaves[i] = flat[..., start : start + size].reshape(*array.shape[:lead], *groups.shapes[i])
            start += size
    return leaves


def _of_leaves(groups: Groups, leaves: list[np.ndarray | None], new: Any, single: bool) -> Any:
    """Inverse of `_leaves`, placed like `new`."""
    made = []
    for group, like in zip(groups.groups, new, strict=True):
        there = [x for x in (leaves[i] for i in group.leaves) if x is not None]
        if len(there) != (0 if is_left_out(like) else len(group.leaves)):
            raise Misfit(
                "one leaf is small enough to be sent as it is, or was: its memory has no place in the new state"
            )
        if is_left_out(like):
            made.append(())
            continue
        shape = np.shape(like)
        value = np.zeros(shape, _data(like).dtype)
        if there and math.prod(shape):
            rows = 1 if single else shape[0]
            each = [x.reshape(rows, math.prod(groups.shapes[i])) for i, x in zip(group.leaves, there, strict=True)]
            joined = np.concatenate(each, 1)
            value.reshape(rows, -1)[:, : joined.shape[1]] = joined
        made.append(placed(value, like))
    return tuple(made)


def check_shapes(move: Move) -> None:
    """Raises Misfit if the same shards of parameters have other shapes."""
    old, new = move.before.shapes, move.after.shapes
    if move.old.shards != move.new.shards or old == new:
        return
    rows, others = move.owners
    if rows is not None and others is not None and rows.whole == others.whole:
        return
    raise Misfit(f"parameters have other shapes: {old} before, {new} now")


def kept_groups(old: Any, new: Any, move: Move) -> Any:
    """Group j goes on from group j mod the old number of them. What has another shape, a plan, is the new one."""
    kept = lambda rows, shape: join_lead(modulo(split_lead(rows, move.old[:2]), move.new[:2]), 2)
    return _moved(old, new, kept if move.leads else lambda rows, shape: rows)


def taken_over(old: Any, new: Any, move: Move) -> Any:
    """State of a compressor for other workers (and other chunks): that of number i mod n."""
    taken = lambda rows, shape: modulo(split_lead(rows, move.old), (*move.new, *shape[1:]))
    return _moved(old, new, lambda rows, shape: join_lead(taken(rows, shape), 3))


def _moved(old: Any, new: Any, one: Callable[[np.ndarray, tuple[int, ...]], np.ndarray]) -> Any:
    """`one` of each old array and the shape of the new one; the new one where that has another shape still."""
    if jax.tree.structure(old) != jax.tree.structure(new):
        return new

    def placed_if_alike(old, new):
        shape = np.shape(_data(new))
        rows = one(on_host(old), shape)
        return placed(rows, new) if rows.shape == shape else new

    return jax.tree.map(placed_if_alike, old, new)


def _cut_anew(rows: np.ndarray, lead: int, shape: tuple[int, ...], move: Move) -> np.ndarray:
    """[groups, shards, ..., *shape of a shard] of other shards: put together and cut again."""
    old, new = move.old.shards, move.new.shards
    if old == new:
        owners, others = move.owners
        return rows if owners == others else owners.recut(rows, others)
    if len(move.along) > 1:
        raise Misfit(f"{change_of(move)}; their number may change where one mesh axis cuts the parameters")
    before = rows.shape[lead:]
    if len(before) != len(shape) or (0 in before) != (0 in shape):
        raise Misfit(f"{change_of(move)}: one leaf is small enough for momentum_correction to send it as it is, or was")
    if 0 in shape:
        return np.zeros((rows.shape[0], new, *rows.shape[2:lead], *shape), rows.dtype)
    differ = [axis for axis, (a, b) in enumerate(zip(before, shape, strict=True)) if a != b]
    if len(differ) != 1 or old * before[differ[0]] != new * shape[differ[0]]:
        raise Misfit(f"{change_of(move)}, of shapes {before} and {shape}: not of the same parameter")
    axis = lead - 1 + differ[0]  # once that of the shards is out of the way
    whole = np.concatenate(np.moveaxis(rows, 1, 0), axis)
    return np.stack(np.split(whole, new, axis), 1)


def change_of(move: Move) -> str:
    """Says how the number of shards changes, for error messages."""
    return f"{move.old.shards} shards along mesh axes {move.along} before, {move.new.shards} now"


def modulo(rows: np.ndarray, lengths: tuple[int, ...]) -> np.ndarray:
    """Index i of each of the first axes from i mod their length."""
    for axis, length in enumerate(lengths[: rows.ndim]):
        if rows.shape[axis] != length:
            rows = np.take(rows, np.arange(length) % rows.shape[axis], axis)
    return rows


def split_lead(rows: np.ndarray, lead: tuple[int, ...]) -> np.ndarray:
    """The leading axis as several, say `LeadingAxes`."""
    return rows.reshape(*lead, *rows.shape[1:])


def join_lead(rows: np.ndarray, lead: int) -> np.ndarray:
    """So many leading axes as one."""
    return rows.reshape(math.prod(rows.shape[:lead]), *rows.shape[lead:])


def _data(x: Any) -> Any:
    """Typed keys as words, other arrays as they are."""
    typed = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(x) if typed else x


def on_host(x: Any) -> np.ndarray:
    """An array of the old state as NumPy; raises Misfit where this host cannot read all of it."""
    if isinstance(x, jax.ShapeDtypeStruct):
        raise Misfit("old must hold arrays, not shapes")
    x = _data(x)
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        if not x.is_fully_replicated:
            raise Misfit("the old state lies on other hosts; restore it replicated, or as NumPy arrays")
        return np.asarray(x.addressable_data(0))
    return np.asarray(x)


def placed(value: np.ndarray, like: Any) -> Any:
    """An array with the values, where and what `like` is."""
    if not isinstance(like, jax.Array):
        raise Misfit(f"new must hold arrays on devices, from jc.init_state; got {type(like).__name__}")
    data = _data(like)
    if np.shape(value) != np.shape(data):
        raise Misfit(f"expected an array of shape {np.shape(data)}; got {np.shape(value)}")
    value = np.asarray(value, data.dtype)
    if data.committed:
        placed = jax.make_array_from_callback(value.shape, data.sharding, lambda index: value[index])
    else:  # jit would compile once more for an array that is bound to its device
        placed = jnp.array(value)
    return placed if data is like else jax.random.wrap_key_data(placed, impl=jax.random.key_impl(like))
