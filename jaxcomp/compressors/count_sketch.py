"""Count sketches: each entry is added, with a random sign, to one counter of each row. Linear."""

import functools
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.arrays import bounded, finite, weighted, wide, wrap_key
from jaxcomp.backend import fold, form, zeros_if_shape
from jaxcomp.base import Compressor, Spec, State, on_vectors, row_by_row
from jaxcomp.checks import check_like, is_integer, is_whole
from jaxcomp.compressors.rand_k import Draw, next_draw
from jaxcomp.factories import factory
from jaxcomp.hashing import GOLDEN, fmix32, multiply_high
from jaxcomp.norms import room
from jaxcomp.payloads import Dense

__all__ = ["add_to_sketch", "count_sketch", "counters", "estimates", "sketch_of"]

Array = jax.Array
U32 = jnp.uint32
MOST_ROWS = 64
SHORT = 1024  # counters of a row, with fewer of which blocks are too many and too small to be added one by one


@factory
def count_sketch(ratio: float | None = None, *, rows: int = 1, columns: int | None = None) -> Compressor:
    """Adds every entry, with a random sign, to one of the c counters of each of r rows.

    S_jb = sum_{i: h_j(i) = b} s_j(i) x_i,   C(x)_i = (1/r) sum_j s_j(i) S_{j h_j(i)},   h_j and s_j random hashes.

    Every c entries, one after the other, are added to the c counters of a row at a random offset of their own
    (`counters`): entries of different runs share a counter with chance 1/c, entries of one run never. Unbiased, omega
    at most (d - 1) / (r c), and linear: sketches of all workers are added on the way. The hashes come from the shared
    key and the round, so they cost no bits. As good as `rand_k` of the same size, but no entry is ever left out. What
    sketches are made for, finding the largest entries of a sum, is `fetch_sgd`: there the decoder takes the median of
    the rows, which is not linear.

    Args:
        ratio: counters in all rows together as a share of d, in (0, 1]: c = max(1, floor(ratio d / r)).
        rows: r, 1 to 64. The bound depends on r c alone; of equal r c fewer rows are better.
        columns: c instead of the ratio.

    Returns:
        Compressor with payload `Dense` of r c values, in the dtype of x.

    Raises:
        ValueError: neither or both of ratio and columns, or out of range.

    Reference: Charikar, Chen, Farach-Colton 2002; Ivkin, Rothchild, Ullah, Braverman, Stoica, Arora 2019. An offset for
    each block has their release, too (nikitaivkin/csvec), on top of a hash that all blocks share.

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
        sketch = sketch_of(state.shared.round_key(), finite(x).astype(wide(x.dtype)), rows, width)
        return Dense(bounded(bounded(sketch), x.dtype).reshape(-1)), state.local

    def decoded(values, shared, size, dtype):
        width = columns_of(size)
        check_like("count_sketch", values.shape, (rows * width,))
        unit = room(rows)  # products with it are exact, so compilers do not change what is added up
        mean = lambda found: bounded(functools.reduce(jnp.add, [row * unit for row in found]) / (rows * unit))
        return estimates(shared.round_key(), values.astype(dtype).reshape(rows, width), size, mean)

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
        init=lambda shared_key, like: State(shared=Draw.first(shared_key)),
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
    """h(i), i32[k], and whether s(i) is negative, bool[k], in one row.

    A block is c entries, one after the other. Its entry j counts at j + o, modulo c, where the offset o, uniform on
    0 .. c - 1, is a hash of block and row: what is added, and read, is runs of memory. The sign is a bit of a hash of
    the entry.
    """
    return _counters(_words(key), row, indices.astype(U32), columns)


def _words(key: Array) -> Array:
    """The key as words, which several hashes may read, and which a loop may hold, under `jax_debug_key_reuse`, too."""
    return jax.random.key_data(wrap_key(key)).reshape(-1)


def _counters(words: Array, row: int, places: Array, columns: int) -> tuple[Array, Array]:
    at = places % U32(columns) + _offsets(words, row, places // U32(columns), columns)
    return jnp.where(at >= columns, at - U32(columns), at).astype(jnp.int32), _signs(words, places, [row])[0]


def _offsets(words: Array, row: Any, blocks: Array, columns: int) -> Array:
    """How far each block is shifted in a row: u32."""
    mixed = fmix32(blocks.astype(U32) ^ words[-1]) + words[0] + U32(GOLDEN) * (U32(1) + jnp.asarray(row, U32))
    return multiply_high(fmix32(fmix32(mixed) ^ words[-1]), U32(columns))


def _signs(words: Array, places: Array, rows: Sequence[int]) -> list[Array]:
    """Whether the sign of each entry is negative, for each of these rows: bits of a word that 32 rows share."""
    start = fmix32(places ^ words[0]) + words[-1]
    hashes = {part: fmix32(start + U32(part * GOLDEN % 2**32)) for part in {row // 32 for row in rows}}
    return [(hashes[row // 32] >> U32(row % 32)) & U32(1) == 1 for row in rows]


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


def sketch_of(key: Array, x: Array, rows: int, columns: int) -> Array:
    """S(x) of a vector f[d], f[r, c] in its dtype."""
    if not columns or not x.shape[0]:
        return jnp.zeros((rows, columns), x.dtype)
    by_gather = functools.partial(_sketch_by_gather, rows, columns)
    by_block = row_by_row(functools.partial(_sketch_by_block, rows, columns))
    return form(by_block if columns >= SHORT else by_gather, on_gpu=by_gather)(_words(key), x)


def _sketch_by_gather(rows: int, columns: int, words: Array, x: Array) -> Array:
    """Each counter adds up its entry of every block: one reduction, whatever the number of blocks. Its parts are
    saturated, since of opposite infinities they were NaN together.
    """
    shape = (-(-x.shape[0] // columns), columns)
    start, counter = lax.broadcasted_iota(U32, shape, 0) * U32(columns), lax.broadcasted_iota(U32, shape, 1)

    def one(row):
        offset = jnp.broadcast_to(_offsets(words, row, jnp.arange(shape[0]), columns)[:, None], shape)
        place = start + jnp.where(counter < offset, counter + U32(columns), counter) - offset
        found, negative = x.at[place].get(mode="fill", fill_value=0), _signs(words, place, [row])[0]
        added = jnp.where(negative, -found, found)
        return lax.reduce(added, jnp.zeros((), x.dtype), lambda a, b: bounded(a + b), (0,))

    return jnp.stack([one(row) for row in range(rows)])


def _sketch_by_block(rows: int, columns: int, words: Array, x: Array) -> Array:
    """Each block is added, as it stands, to two rounds of the counters, at its offset; these are added in the end."""

    def add(start, signs, offsets, totals):
        part, after = lax.dynamic_slice_in_dim(x, start, signs[0].size), []
        for total, negative, offset in zip(totals, signs, offsets, strict=True):
            now = lax.dynamic_slice_in_dim(total, offset, part.size) + jnp.where(negative, -part, part)
            after.append(lax.dynamic_update_slice_in_dim(total, now, offset, 0))
        return after

    totals = [jnp.zeros_like(x, shape=(2 * columns,)) for _ in range(rows)]
    totals = _for_each_block(words, x.shape[0], rows, columns, add, totals)
    return bounded(jnp.stack([bounded(total[:columns]) + bounded(total[columns:]) for total in totals]))


def _for_each_block(words: Array, size: int, rows: int, columns: int, step: Callable[..., Any], carry: Any) -> Any:
    """step(first entry, signs and offset of each row, carry), for one block after the other, of which the last one may
    be shorter."""
    whole, rest = size // columns, size % columns
    row, block = (lax.broadcasted_iota(U32, (rows, whole + 1), axis) for axis in (0, 1))
    offsets = _offsets(words, row, block, columns).astype(jnp.int32)

    def one(block, count, carry):
        start = block * columns
        signs = _signs(words, jnp.asarray(start, U32) + lax.iota(U32, count), range(rows))
        return step(start, signs, list(offsets[:, block]), carry)

    carry = lax.fori_loop(0, whole, lambda block, carry: one(block, columns, carry), carry) if whole else carry
    return one(whole, rest, carry) if rest else carry


def estimates(key: Array, sketch: Array, size: int, join: Callable[[list[Array]], Array]) -> Array:
    """An estimate of each entry, f[d]: the rows say s_j(i) S_{j h_j(i)}.

    join: r arrays, one of each row -> one, entry by entry.
    """
    rows, columns = sketch.shape
    if not columns or not size:
        return join([jnp.zeros((size,), sketch.dtype)] * rows)

    def by_gather(words: Array, sketch: Array) -> Array:
        def one(row: int) -> Array:
            place, negative = _counters(words, row, lax.iota(U32, size), columns)
            sign = jnp.where(negative, -1, 1).astype(sketch.dtype)  # XLA for GPUs writes what a choice reads twice
            return sketch[row].at[place].get(mode="promise_in_bounds") * sign

        return join([one(row) for row in range(rows)])

    def by_block(words: Array, sketch: Array) -> Array:
        twice = [jnp.concatenate([sketch[row]] * 2) for row in range(rows)]

        def read(start, signs, offsets, out):
            parts = [lax.dynamic_slice_in_dim(x, at, signs[0].size) for x, at in zip(twice, offsets, strict=True)]
            found = [jnp.where(negative, -part, part) for negative, part in zip(signs, parts, strict=True)]
            return lax.dynamic_update_slice_in_dim(out, join(found), start, 0)

        return _for_each_block(words, size, rows, columns, read, jnp.zeros_like(sketch, shape=(size,)))

    return form(row_by_row(by_block) if columns >= SHORT else by_gather, on_gpu=by_gather)(_words(key), sketch)
