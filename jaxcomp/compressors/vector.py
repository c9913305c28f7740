"""Compressors are written for one flat vector; this lifts them to an array of any shape."""

import numbers
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomp.base import Compressor, Spec, State, is_array, like_of

__all__ = ["check_like", "count_of", "is_whole", "on_vectors"]

Array = jax.Array


def on_vectors(
    *,
    compress: Callable,
    decompress: Callable,
    spec: Spec,
    init: Callable | None = None,
    accumulate: Callable[..., Array] | None = None,
    advance: Callable | None = None,
    lengths: Callable | None = None,
    for_worker: Callable | None = None,
    overflow: Callable | None = None,
) -> Compressor:
    """A `Compressor` of arrays of any shape from functions of vectors (see `base.Compressor`)."""

    def flat_like(like: Any) -> jax.ShapeDtypeStruct:
        if not is_array(like):
            raise ValueError(
                f"{spec.name} acts on one array; got a {type(like).__name__}. "
                "Wrap it: per_leaf(...) compresses each leaf, flat(...) all leaves as one vector."
            )
        (like,) = jax.tree.leaves(like_of(like))
        return jax.ShapeDtypeStruct((like.size,), like.dtype)

    def init_(shared_key, like):
        like = flat_like(like)
        return State() if init is None else init(shared_key, like)

    each = row_by_row(compress) if spec.selects else compress

    def compress_(key, x, state):
        flat_like(x)
        return each(key, jnp.reshape(x, (-1,)), state)

    def decompress_(payload, shared, like):
        payload = jax.tree.map(jnp.asarray, payload)  # of NumPy, once decoded from bytes
        return decompress(payload, shared, flat_like(like)).reshape(like.shape)

    def of_any_shape(accumulate):
        def accumulate_(total, payloads, weights, shared):
            flat_like(total)
            return accumulate(total.reshape(-1), payloads, weights, shared).reshape(total.shape)

        return accumulate_

    accumulate = None if accumulate is None else of_any_shape(accumulate)
    of_flat = None if lengths is None else lambda like: lengths(flat_like(like))
    return Compressor(init_, compress_, decompress_, spec, accumulate, advance, of_flat, for_worker, overflow)


def row_by_row(function: Callable) -> Callable:
    """The same function; under vmap it does one row after another.

    A selection searches, and knows when it may stop. Mapped, its loops would go on for all rows until the last is
    done, and its conditionals would compute both sides for each.
    """
    mapped = jax.custom_batching.custom_vmap(function)

    @mapped.def_vmap
    def rule(size, batched, *args):
        del size
        leaves, tree = jax.tree.flatten(args)
        is_row = jax.tree.leaves(batched)

        def one(rows):
            rows = iter(rows)
            return mapped(
                *jax.tree.unflatten(tree, [next(rows) if b else a for a, b in zip(leaves, is_row, strict=True)])
            )

        out = jax.lax.map(one, [a for a, b in zip(leaves, is_row, strict=True) if b])
        return out, jax.tree.map(lambda _: True, out)

    return mapped


def count_of(name: str, ratio: float | None, k: int | None) -> Callable[[int], int]:
    """Checks that exactly one of ratio and k is given and returns d -> number of entries to keep.

    The count is max(1, floor(ratio d)), never more than d.

    Raises:
        ValueError: both or neither given, ratio outside (0, 1], k below 1 or not an integer.
    """
    if (ratio is None) == (k is None):
        raise ValueError(f"{name}: give exactly one of ratio and k; got ratio={ratio}, k={k}")
    if k is not None:
        if not is_whole(k):
            raise ValueError(f"{name}: k must be an integer of at least 1; got {k}")
        return lambda d: min(int(k), d)
    if not isinstance(ratio, numbers.Real) or not 0 < ratio <= 1:
        raise ValueError(f"{name}: ratio must be in (0, 1]; got {ratio}")
    return lambda d: min(max(1, int(ratio * d)), d)


def is_whole(value: Any, least: int = 1) -> bool:
    """Whether it is an integer of at least `least`: not a bool, NaN, or text."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and float(value) >= least and value % 1 == 0


def check_like(name: str, got: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """Raises ValueError when a payload does not belong to the array it should decompress to."""
    if tuple(got) != tuple(expected):
        raise ValueError(f"{name}: payload of shape {tuple(got)} does not fit the array; expected {tuple(expected)}")
