"""What the types of `shard_map` say about an array: over which mesh axes it varies, and over which it is equal.

Under `shard_map(check_vma=True)`, its default, the type of each array lists the manual mesh axes over which it may
vary. Loops and conditionals insist that types match, and an out spec `P()` is accepted only for what is typed as equal.
Under vmap, pmap and `check_vma=False` there are no such types: everything here that changes a type then does nothing.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

__all__ = [
    "Axis",
    "axis_index",
    "axis_names",
    "axis_size",
    "is_bound",
    "known_equal",
    "on_equal_types",
    "proven_equal",
    "types_tell",
    "unknown_axes",
    "varying",
    "varying_axes",
]

Array = jax.Array
Axis = str | tuple[str, ...] | None


def axis_names(axis: Axis) -> tuple[str, ...]:
    """The names of an axis: none for None, one for a string."""
    return () if axis is None else (axis,) if isinstance(axis, str) else tuple(axis)


def is_bound(axis: Axis) -> bool:
    """Whether we are inside a `shard_map`, `pmap` or `vmap` that names the axis."""
    try:
        axis_size(axis)
    except NameError:
        return False
    return True


def axis_size(axis: Axis) -> int:
    """Number of workers; 1 without an axis."""
    return lax.axis_size(axis) if axis_names(axis) else 1


def axis_index(axis: Axis) -> Array:
    """This worker's number, i32[]; 0 without an axis."""
    return lax.axis_index(axis).astype(jnp.int32) if axis_names(axis) else jnp.zeros((), jnp.int32)


def varying(tree: Any, axis: Axis) -> Any:
    """Types arrays as differing over the axis, where `shard_map` keeps track of that. No data moves."""
    names = [name for name in dict.fromkeys(axis_names(axis)) if name in _manual_axes()]

    def mark(x):
        x = jnp.asarray(x)
        missing = tuple(name for name in names if name not in _varying_axes(x))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(mark, tree)


def types_tell(axis: Axis) -> bool:
    """Whether types say what is equal on all workers: inside `shard_map` with its default check_vma=True."""
    names = set(axis_names(axis))
    return bool(names) and names <= _varying_axes(varying(jnp.zeros(()), axis))


def known_equal(tree: Any, axis: Axis) -> list[str]:
    """Paths of the arrays whose types say that they are equal on all workers."""
    names = set(axis_names(axis))
    if not types_tell(axis):
        return []
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [jax.tree_util.keystr(path) for path, x in leaves if not names & _varying_axes(jnp.asarray(x))]


def unknown_axes(tree: Any, axis: Axis, named: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Mesh axes, other than the named ones, over which arrays differ; and over which the compiler may have cut them.

    Both are empty outside of a `shard_map` over `axis`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    manual = _manual_axes()
    if not axis_names(axis) or not set(axis_names(axis)) <= manual:
        return [], []
    leaves = [jnp.asarray(x) for x in jax.tree.leaves(tree)]
    differ = {name for x in leaves for name in _varying_axes(x)} - set(named)
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    open_ = [name for name in mesh.axis_names if name not in manual and mesh.shape[name] > 1]
    specs = [str(jax.typeof(x).sharding.spec) for x in leaves]
    cut = lambda name: kinds[name] == jax.sharding.AxisType.Auto or any(f"'{name}'" in spec for spec in specs)
    return sorted(differ), [name for name in open_ if cut(name)]


def varying_axes(tree: Any) -> tuple[str, ...]:
    """All mesh axes over which some array differs, as far as types tell."""
    return tuple(sorted({name for x in jax.tree.leaves(tree) for name in _varying_axes(jnp.asarray(x))}))


def _varying_axes(x: Array) -> frozenset:
    return jax.typeof(x).manual_axis_type.varying


def _manual_axes() -> set[str]:
    return set(getattr(jax.sharding.get_abstract_mesh(), "manual_axes", ()))


# ------------------------------------------------------------------------------------------------
# Types that the tracing context cannot find out by itself

_proven_equal = Primitive("proven_equal")
_proven_equal.def_impl(lambda x, **_: x)
mlir.register_lowering(_proven_equal, lambda context, x, **_: [x])


@_proven_equal.def_abstract_eval
def _(x, *, names):
    kind = x.manual_axis_type
    return x.update(manual_axis_type=type(kind)(varying=kind.varying - frozenset(names)))


def _batched_proven_equal(axis_data, args, dims, *, names):
    (x,), (dim,) = args, dims
    if dim is None or axis_data.name not in names:
        return _proven_equal.bind(x, names=names), dim
    # All rows are equal: any of them is the value without the axis.
    return lax.index_in_dim(x, 0, dim, keepdims=False), None


batching.fancy_primitive_batchers[_proven_equal] = _batched_proven_equal


def proven_equal(tree: Any, axis: Axis) -> Any:
    """Retypes arrays as equal on all workers, where the exchange that made them proves it.

    What arrived by point-to-point messages is typed as varying, although every worker ends with the same
    rows. This tells `shard_map(check_vma=True)` and `vmap(out_axes=None)` so; no data moves.
    """
    names = axis_names(axis)
    return jax.tree.map(lambda x: _proven_equal.bind(jnp.asarray(x), names=names), tree) if names else tree


def on_equal_types(function: Callable[..., Any], *args: Any) -> Any:
    """function(*args), traced with arrays of one type, for a function that names no collective.

    Loops refuse a carry that begins as zeros, typed as equal everywhere, and ends as a sum of what varies. Here the
    function sees only arrays typed as equal, and its results are typed as varying over all axes over which some array
    in `args` varies.
    """
    axes = tuple(name for name in varying_axes(args) if name in _manual_axes())
    return varying(function(*proven_equal(args, axes)), axes) if axes else function(*args)
