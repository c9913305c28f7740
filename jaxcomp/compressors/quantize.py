"""Random dithering: each entry is rounded at random to a multiple of a step times the norm."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomp.base import Compressor, Spec, State, bounded, finite, one_row, row_of, wide
from jaxcomp.compressors.vector import check_like, is_whole, on_vectors
from jaxcomp.hashing import random_uniform
from jaxcomp.norms import block_norms
from jaxcomp.packing import pack, unpack, width_for
from jaxcomp.payloads import Quantized

__all__ = ["dithering", "unzigzag", "zigzag"]

Array = jax.Array
MOST_LEVELS = 2**15
LARGEST = np.finfo(np.float32).max  # of norms and units, which are f32


def zigzag(levels: Array) -> Array:
    """0, 1, -1, 2, -2, ... -> 0, 1, 2, 3, 4, ... as uint32.

    >>> print(zigzag(jnp.array([0, 1, -1, 2, -2])))
    [0 1 2 3 4]
    """
    return jnp.where(levels > 0, 2 * levels - 1, -2 * levels).astype(jnp.uint32)


def unzigzag(codes: Array) -> Array:
    """Inverse of `zigzag`, i32.

    >>> print(unzigzag(jnp.array([0, 1, 2, 3, 4], jnp.uint32)))
    [ 0  1 -1  2 -2]
    """
    codes = codes.astype(jnp.int32)
    return jnp.where(codes % 2 == 1, (codes + 1) // 2, -(codes // 2))


def up_to_bfloat16(norms: Array) -> Array:
    """The next bfloat16 that is not smaller, as f32; at most the largest.

    >>> print(up_to_bfloat16(jnp.array([1.0, 1.0001])))
    [1.        1.0078125]
    """
    bits = (lax.bitcast_convert_type(norms, jnp.uint32) + jnp.uint32(0xFFFF)) & jnp.uint32(0xFFFF0000)
    return jnp.minimum(lax.bitcast_convert_type(bits, jnp.float32), jnp.float32(jnp.finfo(jnp.bfloat16).max))


class Blocks:
    """How a vector of d entries is cut: `rows` blocks of `length`, then one of `tail` entries.

    blocks=B: B - 1 blocks of floor(d / B) entries, the last takes the remainder.
    block_size=m: blocks of m entries, the last takes what is left.
    """

    def __init__(self, d: int, blocks: int | None, block_size: int | None):
        if block_size is not None:
            self.rows, self.length = d // block_size, block_size
        else:
            count = max(1, min(blocks or 1, d))
            self.rows, self.length = count - 1, d // count
        self.tail = d - self.rows * self.length
        self.lengths = [self.length] * self.rows + [self.tail] * (self.tail > 0)
        self.count = len(self.lengths)
        self.largest = max(self.lengths, default=0)

    def norms(self, x: Array, order: float) -> Array:
        """Norm of each block, [count]."""
        cut = self.rows * self.length
        parts = []
        if self.rows:
            parts.append(block_norms(x[:cut].reshape(self.rows, self.length), order))
        if self.tail:
            parts.append(block_norms(x[cut:].reshape(1, self.tail), order))
        return jnp.concatenate(parts) if parts else jnp.zeros((0,), x.dtype)

    def spread(self, each: Array) -> Array:
        """A number per block, repeated over the entries of its block; [count] -> [d] or [1]."""
        if self.count <= 1:
            return each
        if self.tail <= self.length:  # fuses with what follows, where a concatenation would be an array of its own
            size = self.rows * self.length + self.tail
            return jnp.broadcast_to(each[:, None], (self.count, self.length)).reshape(-1)[:size]
        body = jnp.broadcast_to(each[: self.rows, None], (self.rows, self.length)).reshape(-1)
        return jnp.concatenate([body, jnp.broadcast_to(each[self.rows :], (self.tail,))]) if self.tail else body


def dithering(
    levels: int | None = None,
    *,
    steps: Any = None,
    norm: float | str = 2,
    blocks: int | None = None,
    block_size: int | None = None,
    per_worker: bool = False,
    norm_dtype: Any = None,
) -> Compressor:
    """Random dithering, unbiased.

    C(x)_j = |x|_q sign(x_j) h_j k_j,   k_j = floor(|x_j| / (h_j |x|_q) + u_j),   u_j ~ U[0, 1),

    with h_j = 1 / levels, or the given steps. Within a block of m entries with steps h and
    e = sqrt(sum_j h_j^2),   omega <= e - 1 if e >= 2, else e^2 / 4   (equal steps: e = h sqrt(m)).
    QSGD's bound is min(m h^2, h sqrt(m)). The norm of each block travels as f32, each level with its sign in
    ceil(log2(2 K + 1)) bits, where K = max_j ceil(1 / h_j).

    Args:
        levels: s, number of positive levels, 1 to 2^15; s = 2^(b-1) - 1 fills b bits.
        steps: step sizes h relative to the norm instead, each at least 2^-15: a number, one per
            entry, or one per block. An array is kept in `State.shared`.
        norm: 2 or "inf".
        blocks: number of blocks; blocks of floor(d / blocks) entries, the last takes the rest.
        block_size: entries per block instead; the last block takes what is left.
        per_worker: `steps` is a matrix with a row of steps for each worker.
        norm_dtype: float32 (default) or bfloat16, in which norms travel. They are rounded up, which
            keeps C unbiased and multiplies e by at most 1 + 2^-7.

    Returns:
        Compressor with payload `Quantized`.

    Raises:
        ValueError: not exactly one of levels and steps, or something out of range.

    Reference: Alistarh, Grubic, Li, Tomioka, Vojnovic 2017 (QSGD), section 3.1; varying steps: Wang,
    Safaryan, Richtarik 2022. The bound on omega minimises lambda + sum_j h_j^2 / (4 (1 + lambda))
    over lambda >= 0 (Lagrangian dual of the worst case); it is never above QSGD's.

    >>> import jaxcomp as jc
    >>> x = jnp.array([3.0, 0.0, -4.0, 0.0])
    >>> x_hat, payload = jc.roundtrip(jc.dithering(5), x, key=jax.random.key(0))
    >>> print(x_hat, payload.norms)
    [ 3.  0. -4.  0.] [5.]
    """
    if (levels is None) == (steps is None):
        raise ValueError(f"dithering: give exactly one of levels and steps; got levels={levels}, steps={steps}")
    if levels is not None and not (is_whole(levels) and levels <= MOST_LEVELS):
        raise ValueError(f"dithering: levels must be an integer in 1 .. 2^15; got {levels}")
    if norm not in (2, "inf", math.inf):
        raise ValueError(f'dithering: norm must be 2 or "inf"; got {norm!r}')
    for name, value in (("blocks", blocks), ("block_size", block_size)):
        if value is not None and not (is_whole(value) and isinstance(value, int)):
            raise ValueError(f"dithering: {name} must be an integer of at least 1; got {value}")
    if blocks is not None and block_size is not None:
        raise ValueError(f"dithering: give at most one of blocks and block_size; got {blocks} and {block_size}")

    if norm_dtype is not None and jnp.dtype(norm_dtype) not in (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)):
        raise ValueError(f"dithering: norm_dtype must be float32 or bfloat16; got {norm_dtype!r}")
    short = norm_dtype is not None and jnp.dtype(norm_dtype) == jnp.bfloat16

    order = 2 if norm == 2 else math.inf
    shape = np.shape(np.asarray(0.0 if steps is None else steps))
    varying = len(shape) > 0
    if per_worker and len(shape) != 2:
        raise ValueError(f"dithering: per_worker needs a row of steps for each worker; got shape {shape}")
    sizes = np.asarray(steps if levels is None else 1.0 / levels, np.float64)
    sizes = sizes if per_worker else sizes.reshape(1, -1)
    if sizes.size == 0 or not np.all(np.isfinite(sizes) & (sizes >= 1 / MOST_LEVELS)):
        raise ValueError(f"dithering: steps must be finite and at least 2^-15; got {steps}")
    most = math.ceil(float(np.max(1 / sizes)) - 1e-9)
    width = width_for(2 * most + 1)

    def layout(d: int) -> Blocks:
        return Blocks(d, blocks, block_size)

    def init(shared_key, like):
        if not varying:
            return State()
        cut = layout(like.size)
        if sizes.shape[1] not in (like.size, cut.count):
            raise ValueError(
                f"dithering: {sizes.shape[1]} steps for an array of {like.size} entries in {cut.count} block(s); "
                "give one step per entry or one per block"
            )
        return State(shared=jnp.asarray(sizes, jnp.float32))

    def unit_of(shared: Any, cut: Blocks, norms: Array) -> Array:
        """What a level is worth, norm * h, for each entry: f32[d] or f32[1].

        Rounded up to few enough bits that level * unit is exact: then no compiler can change the
        sum of decoded messages by contracting product and addition into one rounding.
        """
        each = cut.spread(norms)
        if varying:
            steps = one_row("dithering", shared).astype(jnp.float32)
            each = each * (cut.spread(steps) if steps.shape[0] == cut.count else steps)
        else:
            each = each * jnp.float32(sizes[0, 0])
        spare = jnp.uint32((1 << (width - 1)) - 1)
        bits = (lax.bitcast_convert_type(each, jnp.uint32) + spare) & ~spare
        return jnp.minimum(lax.bitcast_convert_type(bits, jnp.float32), jnp.float32(LARGEST))

    def compress(key, x, state):
        x = x.astype(wide(x.dtype))
        cut = layout(x.shape[0])
        norms = jnp.minimum(cut.norms(x, order), jnp.asarray(LARGEST, x.dtype)).astype(jnp.float32)
        norms = up_to_bfloat16(norms) if short else norms
        unit = unit_of(state.shared, cut, norms).astype(x.dtype)
        empty = unit < jnp.asarray(jnp.finfo(jnp.float32).tiny, x.dtype)
        position = jnp.where(empty, jnp.zeros((), x.dtype), jnp.abs(finite(x)) / unit)
        noise = random_uniform(key, x.shape[0]).astype(x.dtype)
        level = jnp.minimum(jnp.floor(position + noise), most).astype(jnp.int32)
        norms = norms.astype(jnp.bfloat16) if short else norms
        return Quantized(norms, pack(zigzag(jnp.where(x < 0, -level, level)), width)), state.local

    def decompress(payload, shared, like):
        cut = layout(like.size)
        check_like("dithering", payload.words.shape, (width, -(-like.size // 32)))
        level = unzigzag(unpack(payload.words, like.size)).astype(wide(like.dtype))
        unit = unit_of(shared, cut, payload.norms.astype(jnp.float32)).astype(level.dtype)
        return bounded(bounded(level * unit).astype(like.dtype))

    def omega(d: int) -> float:
        cut = layout(d)
        if sizes.shape[1] == d:
            starts = np.cumsum([0, *cut.lengths[:-1]])
            squares = float(np.max(np.add.reduceat(sizes**2, starts, axis=1))) if d else 0.0
        else:
            squares = float(np.max(np.array(cut.lengths) * sizes**2, initial=0.0))
        e = math.sqrt(squares) * (1 + 2.0 ** (width - 24)) * (1 + short * 2.0**-7)  # units and norms are rounded up
        return e - 1 if e >= 2 else e**2 / 4

    described = f"levels={levels}" if steps is None else "varying steps" if varying else f"steps={steps}"
    described += (", norm=inf" if order != 2 else "") + (", norm_dtype=bfloat16" if short else "")
    described += f", blocks={blocks}" if blocks else f", block_size={block_size}" if block_size else ""
    return on_vectors(
        init=init,
        compress=compress,
        decompress=decompress,
        spec=Spec(f"dithering({described})", omega=omega, alpha=None, linear=False),
        for_worker=functools.partial(row_of, "dithering") if per_worker else None,
    )
