"""Count sketches: each entry is added, with a random sign, to one counter of each row. Linear."""

import functools
import numbers
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.arrays import bounded, finite, key_data, weighted, wide, wrap_key
from jaxcomp.backend import fold, zeros_if_shape
from jaxcomp.base import Compressor, Spec, State, on_vectors
from jaxcomp.checks import check_like, is_integer, is_whole
from jaxcomp.compressors.rand_k import Draw, next_draw
from jaxcomp.factories import factory
from jaxcomp.hashing import fmix32, multiply_high
from jaxcomp.norms import room
from jaxcomp.payloads import Dense

__all__ = ["add_to_sketch", "count_sketch", "counters", "estimates"]

Array = jax.Array
U32 = jnp.uint32
MOST_ROWS = 64


@factory
def count_sketch(ratio: float | None = None, *, rows: int = 1, columns: int | None = None) -> Compressor:
    """Adds every entry, with a random sign, to one of the c counters of each of r rows.

    S_jb = sum_{i: h_j(i) = b} s_j(i) x_i,   C(x)_i = (1/r) sum_j s_j(i) S_{j h_j(i)},   h_j and s_j random hashes.

    Unbiased, omega = (d - 1) / (r c), and linear: sketches of all workers are added on the way. The hashes come from
    the shared key and the round, so they cost no bits. As good as `rand_k` of the same size, but no entry is ever
    left out. What sketches are made for, finding the largest entries of a sum, is `fetch_sgd`: there the decoder takes
    the median of the rows, which is not linear.

    Args:
        ratio: counters in all rows together as a share of d, in (0, 1]: c = max(1, floor(ratio d / r)).
        rows: r, 1 to 64. The error depends on r c alone.
        columns: c instead of the ratio.

    Returns:
        Compressor with payload `Dense` of r c values, in the dtype of x.

    Raises:
        ValueError: neither or both of ratio and columns, or out of range.

    Reference: Charikar, Chen, Farach-Colton 2002; Ivkin, Rothchild, Ullah, Braverman, Stoica, Arora 2019.

    >>> import jaxcomp as jc
    >>> x_hat, payload = jc.roundtrip(jc.count_sketch(columns=2), jnp.array([0.0, 5.0, 0.0]), key=jax.random.key(0))
    >>> print(x_hat[1], payload.values.shape)
    5.0 (2,)
    """
    columns_of = _columns("count_sketch", ratio, rows, columns)
    shown = f"{ratio}" if columns is None else f"columns={columns}"
    shown += f", rows={rows}" if rows > 1 else ""

    def compress(key, x, state):
        width = columns_of(x.shape[0])
        zeros = jnp.zeros((rows, width), wide(x.dtype))
        sketch = add_to_sketch(state.shared.round_key(), zeros, finite(x), jnp.arange(x.shape[0]))
        return Dense(bounded(bounded(sketch), x.dtype).reshape(-1)), state.local

    def decoded(values, shared, size, dtype):
        width = columns_of(size)
        check_like("count_sketch", values.shape, (rows * width,))
        found = estimates(shared.round_key(), values.astype(dtype).reshape(rows, width), size)
        unit = room(rows)  # products with it are exact, so compilers do not change what is added up
        return bounded(functools.reduce(jnp.add, [row * unit for row in found]) / (rows * unit))

    def decompress(payload, shared, like):
        return bounded(decoded(payload.values, shared, like.size, wide(like.dtype)), like.dtype)

    def add(total, payloads, weights, shared):
        def add_one(sketch, message):
            payload, weight = message
            return sketch + weighted(payload.values.astype(sketch.dtype), weight)

        total = zeros_if_shape(total, payloads)
        zeros = jnp.zeros((rows * columns_of(total.shape[0]),), total.dtype)
        return bounded(total + decoded(fold(add_one, zeros, (payloads, weights)), shared, total.shape[0], total.dtype))

    return on_vectors(
        init=lambda shared_key, like: State(shared=Draw(key_data(shared_key), jnp.zeros((), jnp.int32))),
        compress=compress,
        decompress=decompress,
        accumulate=add,
        advance=next_draw,
        spec=Spec(
            f"count_sketch({shown})",
            omega=lambda d: max(d - 1, 0) / (rows * max(columns_of(d), 1)),
            alpha=None,
            linear=True,
        ),
    )


def _columns(name: str, ratio: float | None, rows: int, columns: int | None) -> Callable[[int], int]:
    if not (is_integer(rows) and rows <= MOST_ROWS):
        raise ValueError(f"{name}: rows must be an integer in 1 .. {MOST_ROWS}; got {rows!r}")
    if (ratio is None) == (columns is None):
        raise ValueError(f"{name}: give exactly one of ratio and columns; got ratio={ratio}, columns={columns}")
    if columns is not None:
        if not (is_whole(columns) and columns < 2**31):
            raise ValueError(f"{name}: columns must be an integer in 1 .. 2^31 - 1; got {columns}")
        return lambda d: min(int(columns), d)
    if isinstance(ratio, bool) or not isinstance(ratio, numbers.Real) or not 0 < ratio <= 1:
        raise ValueError(f"{name}: ratio must be in (0, 1]; got {ratio}")
    return lambda d: min(max(1, int(ratio * d / rows)), d)


def counters(key: Array, row: int, indices: Array, columns: int) -> tuple[Array, Array]:
    """h(i) i32[k] and the bit of s(i) bool[k], of one row.

    Bits of a hash of the index: the highest say which counter, the lowest which sign.
    """
    words = jax.random.key_data(wrap_key(key)).reshape(-1)
    mixed = fmix32(fmix32(indices.astype(U32) ^ words[0]) + words[-1] + U32(0x9E3779B9 * (row + 1) % 2**32))
    mixed = fmix32(mixed ^ words[0])
    return multiply_high(mixed, U32(columns)).astype(jnp.int32), (mixed & U32(1)) == 1


def add_to_sketch(key: Array, sketch: Array, values: Array, indices: Array) -> Array:
    """sketch + S(values at these indices), f[r, c]."""
    rows, columns = sketch.shape
    if not columns or not values.shape[0]:
        return sketch
    values = values.astype(sketch.dtype)

    def one(row):
        place, negative = counters(key, row, indices, columns)
        return sketch[row].at[place].add(jnp.where(negative, -values, values), mode="drop")

    return jnp.stack([one(row) for row in range(rows)])


def estimates(key: Array, sketch: Array, size: int) -> list[Array]:
    """Estimates of each entry by each row: r arrays f[d]."""
    rows, columns = sketch.shape
    if not columns:
        return [jnp.zeros((size,), sketch.dtype)] * rows

    def one(row: int) -> Any:
        place, negative = counters(key, row, lax.iota(jnp.int32, size), columns)
        found = sketch[row][place]
        return jnp.where(negative, -found, found)

    return [one(row) for row in range(rows)]
