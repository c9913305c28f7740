"""Shapes, dtypes and keys: what every part of the library needs to know of an array before it computes."""

import functools
import numbers
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

__all__ = [
    "bounded",
    "finite",
    "is_array",
    "key_data",
    "like_of",
    "root_key",
    "size_of",
    "wide",
    "wide_like",
    "wrap_key",
    "zeros_like",
]

Array = jax.Array
Tree = Any


def wide(*dtypes: Any) -> Any:
    """The floating type to compute in: f64 if any of the dtypes is f64, else f32.

    >>> wide(jnp.bfloat16).name
    'float32'
    """
    return jnp.dtype(jnp.float64 if any(jnp.dtype(dtype) == jnp.float64 for dtype in dtypes) else jnp.float32)


def like_of(tree: Tree) -> Tree:
    """Shapes and dtypes of a tree of arrays, as `jax.ShapeDtypeStruct`.

    Args:
        tree: arrays, scalars or ShapeDtypeStructs.

    Raises:
        ValueError: a leaf is not a real floating-point array (named with its path).

    >>> like_of({"w": jnp.zeros((2, 3))})
    {'w': ShapeDtypeStruct(shape=(2, 3), dtype=float32)}
    """

    def one(path, leaf):
        shape, dtype = jnp.shape(leaf), jnp.result_type(leaf)
        if not jnp.issubdtype(dtype, jnp.floating):
            where = jax.tree_util.keystr(path) or "the array"
            raise ValueError(
                f"only real floating point is compressed; {where} has dtype {dtype}. "
                "Leave such leaves of a gradient out with optax.masked."
            )
        return jax.ShapeDtypeStruct(shape, dtype)

    return jax.tree_util.tree_map_with_path(one, tree)


def wide_like(tree: Tree) -> Tree:
    """The same with each dtype replaced by the one that sums and memories are kept in."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, wide(leaf.dtype)), like_of(tree))


def is_array(tree: Tree) -> bool:
    """True for a bare array (or its ShapeDtypeStruct), False for a tree of arrays."""
    return jax.tree.structure(tree) == jax.tree.structure(0)


def size_of(like: Tree) -> int | tuple[int, ...]:
    """Number of entries of a bare array; tuple of them for the leaves of a tree.

    >>> size_of(jnp.zeros((2, 3))), size_of({"a": jnp.zeros(2), "b": jnp.zeros(())})
    (6, (2, 1))
    """
    sizes = tuple(_prod(jnp.shape(leaf)) for leaf in jax.tree.leaves(like))
    return sizes[0] if is_array(like) else sizes


def _prod(shape: Sequence[int]) -> int:
    result = 1
    for length in shape:
        result *= int(length)
    return result


def finite(tree: Tree) -> Tree:
    """NaN and infinities replaced by zero (law 5)."""
    return jax.tree.map(lambda x: jnp.where(jnp.isfinite(x), x, jnp.zeros((), x.dtype)), tree)


def bounded(x: Array) -> Array:
    """x, with what overflowed to infinity cut to the largest number of its dtype."""
    info = jnp.finfo(x.dtype)
    return jnp.clip(x, jnp.asarray(info.min, x.dtype), jnp.asarray(info.max, x.dtype))


# ------------------------------------------------------------------------------------------------
# Keys are kept in states as plain uint32 words, so that every optimizer wrapper, donation and
# checkpoint treats them like any other array.


def key_data(key: Array) -> Array:
    """The uint32 words of a typed or raw key."""
    return jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key


def root_key(seed: Any) -> Array:
    """A typed key of the default kind from an integer, or from a key of any kind."""
    if isinstance(seed, numbers.Integral):
        return jax.random.key(int(seed))
    data = key_data(wrap_key(seed)).reshape(-1)
    if data.shape == jax.random.key_data(jax.random.key(0)).shape:
        return jax.random.wrap_key_data(data)
    return functools.reduce(jax.random.fold_in, data, jax.random.key(0))


def wrap_key(data: Array) -> Array:
    """The typed key of uint32 words."""
    if not hasattr(data, "dtype"):
        raise TypeError(f"a key of jax.random is needed, for instance jax.random.key(0); got {data!r}")
    return data if jnp.issubdtype(data.dtype, jax.dtypes.prng_key) else jax.random.wrap_key_data(data)


def zeros_like(like: Tree) -> Tree:
    """Zeros with the shapes and dtypes of a tree."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)
