"""Keeps the largest entries."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.arrays import finite
from jaxcomp.backend import mapped_as
from jaxcomp.base import Compressor, Spec, State, on_vectors
from jaxcomp.compressors.schedule import Ratio, shown, target_of
from jaxcomp.factories import factory
from jaxcomp.groups import FILLED_IF_LONG
from jaxcomp.payloads import Sparse
from jaxcomp.select import largest_in_row, magnitude, select_largest, take

__all__ = ["entries_of", "largest_indices", "top_k"]

Array = jax.Array
UNSORTED_FROM = 1 << 14  # entries; below, a sort is as fast


def entries_of(payload: Sparse, shared: Any = (), like: Any = None) -> tuple[Array, Array]:
    """Indices and values of a message that has them as they are."""
    del shared, like
    return payload.indices, payload.values


def largest_indices(x: Array, count: Array | int, capacity: int) -> Array:
    """Indices of the `count` entries of largest magnitude, ascending: i32[capacity], padded with d.

    Args:
        x: float[d], d > 0; may hold NaN and infinities.
        count: int, or i32[], 0 .. capacity.
        capacity: at most d.
    """
    d = x.shape[0]
    if d >= UNSORTED_FROM:
        if isinstance(count, int):
            return select_largest(x, count, capacity)
        return jnp.where(count > 0, select_largest(x, jnp.maximum(count, 1), capacity), d)
    by_sort = functools.partial(_by_sort, capacity=capacity)
    by_search = lambda x, count: jnp.where(count > 0, largest_in_row(x, count, capacity), d)
    return mapped_as(by_sort, by_search)(x, jnp.asarray(count, jnp.int32))


def _by_sort(x: Array, count: Array, capacity: int) -> Array:
    top, indices = lax.top_k(magnitude(finite(x)), capacity)
    chosen = (top > 0) & (lax.iota(jnp.int32, capacity) < count)
    return jnp.sort(jnp.where(chosen, indices, x.shape[0]).astype(jnp.int32))


@factory
def top_k(ratio: Ratio | None = None, *, k: int | None = None, peak: float | None = None) -> Compressor:
    """Keeps the k entries of largest magnitude.

    C(x)_j = x_j if j is among the k largest |x_j|, else 0. Ties go to the lowest index. Biased,
    alpha = k / d; 1 / d where k follows a schedule. Zeros are not sent: where fewer than k entries differ from zero
    the message ends in padding.

    Long vectors are not sorted: see `select.select_largest`.

    Args:
        ratio: k = max(1, floor(ratio d)), in (0, 1], or an optax schedule.
        k: number of entries instead; k >= d keeps all.
        peak: largest value of the schedule, for which the message has room; its first one if not given.

    Returns:
        Compressor with payload `Sparse` of k values and k indices.

    Raises:
        ValueError: neither or both of ratio and k, or out of range.

    Reference: Stich, Cordonnier, Jaggi 2018, definition 2.1.

    >>> import jaxcomp as jc
    >>> print(jc.roundtrip(jc.top_k(0.5), jnp.array([1.0, -3.0, 2.0, 0.5]), key=jax.random.key(0))[0])
    [ 0. -3.  2.  0.]
    """
    target = target_of("top_k", ratio, peak, k=k)

    def compress(key, x, state):
        d = x.shape[0]
        if d == 0:
            return Sparse(x, jnp.zeros((0,), jnp.int32)), state.local
        capacity = target.peak(d)
        count = target.of(d, target.round_of(state.shared))[0] if target.scheduled else capacity
        positions = largest_indices(x, count, capacity)
        return Sparse(take(x, positions), positions), state.local

    return on_vectors(
        init=lambda shared_key, like: State(shared=target.first_round()),
        compress=compress,
        entries=entries_of,
        advance=target.advance,
        spec=Spec(
            f"top_k({shown(ratio, k)})",
            omega=None,
            alpha=lambda d: target.least(d) / d if d else 1.0,
            linear=False,
            selects=True,
            layout=FILLED_IF_LONG,
        ),
        by_row_from=UNSORTED_FROM,
    )
