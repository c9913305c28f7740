"""Compressors are written for one flat vector, and are made of that for arrays of any shape."""

import math
import numbers
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomp.arrays import is_array, like_of, reshaped
from jaxcomp.backend import form, in_turn, of_entries
from jaxcomp.base import Compressor, Spec, State
from jaxcomp.compressors.checks import is_whole
from jaxcomp.groups import TooLong

__all__ = [
    "alpha_of",
    "count_of",
    "omega_of",
    "on_vectors",
]

Array = jax.Array
MOST = 2**31 - 1  # entries of an array: indices are i32, and d stands for padding


# ------------------------------------------------------------------------------------------------
# One array


def on_vectors(
    *,
    compress: Callable,
    spec: Spec,
    decompress: Callable | None = None,
    init: Callable | None = None,
    accumulate: Callable[..., Array] | None = None,
    advance: Callable | None = None,
    lengths: Callable | None = None,
    for_worker: Callable | None = None,
    overflow: Callable | None = None,
    entries: Callable[..., tuple[Array, Array]] | None = None,
    ascending: bool = True,
    apart_from: int = 0,
) -> Compressor:
    """A `Compressor` of arrays of any shape from functions of vectors (see `base.Compressor`).

    entries: (payload, shared, like) -> indices i32[k], behind them padding of `like.size`, and values [k]; takes the
        place of `accumulate`, and of `decompress` where none is given (which an index that stands twice needs). shared:
        of one worker or of all. ascending: whether the indices are.
    apart_from: under vmap vectors with at least so many entries are compressed one after the other, where the
        compressor selects (`row_by_row`).
    """

    def flat_like(x: Any) -> jax.ShapeDtypeStruct:
        is_float = hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)
        like = x if is_float and x.size <= MOST else _checked(spec.name, x)
        return jax.ShapeDtypeStruct((like.size,), like.dtype)

    def init_(shared_key, like):
        like = flat_like(like)
        return State() if init is None else init(shared_key, like)

    apart, every = row_by_row(compress) if spec.selects else compress, None

    def compress_(key, x, state):
        each = apart if flat_like(x).size >= apart_from else compress
        return each(key, jnp.reshape(x, (-1,)), state)

    def decompress_(payload, shared, like):
        if isinstance(shared, State):
            raise TypeError(
                f"{spec.name}: decompress needs what is shared of a state, state.shared; got the whole state"
            )
        payload = jax.tree.map(jnp.asarray, payload)  # of NumPy, once decoded from bytes
        return decode(payload, shared, flat_like(like)).reshape(like.shape)

    def of_any_shape(accumulate):
        def accumulate_(total, payloads, weights, shared):
            flat = reshaped(total, flat_like(total).shape)
            return accumulate(flat, payloads, weights, shared).reshape(total.shape)

        return accumulate_

    decode: Any = decompress
    if entries is not None:
        once, accumulate, every = of_entries(entries, ascending)
        decode = decompress or once
    accumulate = None if accumulate is None else of_any_shape(accumulate)
    of_flat = None if lengths is None else lambda like: lengths(flat_like(like))
    return Compressor(init_, compress_, decompress_, spec, accumulate, advance, of_flat, for_worker, overflow, every)


def _checked(name: str, x: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype of what a compressor of one array may take.

    Raises:
        ValueError: not one array, or not of real floating point.
        TooLong: more entries than indices of 32 bits can number.
    """
    if not is_array(x):
        raise ValueError(
            f"{name} acts on one array; got a {type(x).__name__}. "
            "Wrap it: per_leaf(...) compresses each leaf, flat(...) all leaves as one vector."
        )
    (like,) = jax.tree.leaves(like_of(x))
    if like.size > MOST:
        raise TooLong(
            f"{name}: an array of shape {like.shape} has {like.size} entries, and at most {MOST} can be "
            "numbered with 32 bits. Wrap it: flat(...) cuts long arrays into rows."
        )
    return like


def row_by_row(function: Callable) -> Callable:
    """The same function; under vmap it does one row after another, but for programs for GPUs.

    A selection searches, and knows when it may stop. Mapped, its loops go on for all rows until the last is done, and
    its conditionals compute both sides for each. That costs GPUs less than the kernels of a search for each row.
    """
    mapped = jax.custom_batching.custom_vmap(function)

    @mapped.def_vmap
    def rule(size, batched, *args):
        del size
        each = form(mapped, mapped, on_gpu=function)
        leaves, tree = jax.tree.flatten(args)
        is_row = jax.tree.leaves(batched)

        def one(rows):
            rows = iter(rows)
            return each(
                *jax.tree.unflatten(tree, [next(rows) if b else a for a, b in zip(leaves, is_row, strict=True)])
            )

        out = in_turn(one, [a for a, b in zip(leaves, is_row, strict=True) if b])
        return out, jax.tree.map(lambda _: True, out)

    return mapped


def count_of(name: str, ratio: float | None, k: int | None) -> Callable[[int], int]:
    """Checks that exactly one of ratio and k is given and returns d -> number of entries to keep.

    The count is max(1, floor(ratio d)), never more than d.

    Raises:
        ValueError: both or neither given, ratio outside (0, 1] or an integer, k below 1 or not an integer.
    """
    if (ratio is None) == (k is None):
        raise ValueError(f"{name}: give exactly one of ratio and k; got ratio={ratio}, k={k}")
    if k is not None:
        if not is_whole(k):
            raise ValueError(f"{name}: k must be an integer of at least 1; got {k}")
        return lambda d: min(int(k), d)
    if isinstance(ratio, numbers.Integral) and ratio >= 1:
        raise ValueError(
            f"{name}: ratio must be in (0, 1], a share of the entries; got the integer {ratio}. Say k={ratio} to keep "
            "so many (top_k, rand_k), or ratio=1.0 for all of them"
        )
    if not isinstance(ratio, numbers.Real) or not 0 < ratio <= 1:
        raise ValueError(f"{name}: ratio must be in (0, 1]; got {ratio}")
    return lambda d: min(max(1, int(ratio * d)), d)


# ------------------------------------------------------------------------------------------------
# Over all groups of a tree


def omega_of(compressors: tuple[Compressor, ...], like: tuple[Any, ...]) -> float:
    """The largest omega of the groups of a tree; 0 without any, or where it is not known."""
    known = [(c.spec.omega, x) for c, x in zip(compressors, like, strict=True)]
    return max((omega(_size(x)) for omega, x in known if omega is not None), default=0.0)


def alpha_of(compressors: tuple[Compressor, ...], like: tuple[Any, ...]) -> float:
    """The smallest alpha of the groups of a tree; 1 without any, 0 where it is not known."""
    known = [(c.spec.alpha, x) for c, x in zip(compressors, like, strict=True)]
    return min((0.0 if alpha is None else alpha(_size(x)) for alpha, x in known), default=1.0)


def _size(x: Any) -> int:
    """Entries of an array, or of a row of a stack."""
    return math.prod(x.shape[1:] if len(x.shape) > 1 else x.shape)
