"""Random dithering: each entry is rounded at random to a multiple of a step times the norm."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomp.arrays import bounded, finite, one_row, rounded_to, row_of, wide
from jaxcomp.backend import add_each
from jaxcomp.base import MOST, Compressor, Spec, State, on_vectors
from jaxcomp.checks import check_like, contraction, is_whole
from jaxcomp.compressors.blocks import BLOCK_SIZE, BlockSizes, add_worth, block_sizes, coded_blocks, made_words, worth
from jaxcomp.factories import factory
from jaxcomp.groups import ALONE, FIXED, Layout
from jaxcomp.hashing import as_uniform, random_uniform
from jaxcomp.packing import Lanes, Places, pack, width_for
from jaxcomp.payloads import Quantized

__all__ = ["dithering", "unzigzag", "zigzag"]

Array = jax.Array
MOST_LEVELS = 2**15
FEW = 127  # levels that `_few_words` rounds
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
    codes = codes.astype(jnp.uint32)
    return 1 + lax.bitcast_convert_type(codes >> 1 ^ (codes & 1) - 1, jnp.int32)


def up_to_bfloat16(norms: Array) -> Array:
    """The next bfloat16 that is not smaller, as f32; at most the largest.

    >>> print(up_to_bfloat16(jnp.array([1.0, 1.0001])))
    [1.        1.0078125]
    """
    bits = (lax.bitcast_convert_type(norms, jnp.uint32) + jnp.uint32(0xFFFF)) & jnp.uint32(0xFFFF0000)
    return jnp.minimum(lax.bitcast_convert_type(bits, jnp.float32), jnp.float32(jnp.finfo(jnp.bfloat16).max))


@factory
def dithering(
    levels: int | None = None,
    *,
    bits: int | None = None,
    steps: Any = None,
    norm: float | str = 2,
    blocks: int | None = None,
    block_size: int | None = None,
    per_worker: bool = False,
    norm_dtype: Any = None,
) -> Compressor:
    """Random dithering, unbiased.

    C(x)_j = |x|_q sign(x_j) h_j k_j,   k_j = floor(|x_j| / (h_j |x|_q) + u_j),   u_j ~ U[0, 1),

    with h_j = 1 / levels, or the given steps, in blocks with a norm each. Within a block of m entries with steps h and
    e = sqrt(sum_j h_j^2),   omega <= e - 1 if e >= 2, else e^2 / 4   (equal steps: e = h sqrt(m)).
    QSGD's bound is min(m h^2, h sqrt(m)). So the relative error grows with the size of a block, not with that of x;
    blocks=1 is the method of the paper. Where equal steps have an omega below 1 (the default blocks from 12 levels on),
    C is a contraction, too, with alpha = 1 - omega. The norm of each block travels as f32, each level with its sign in
    ceil(log2(2 K + 1)) bits, where K = max_j ceil(1 / h_j). The u_j have 16 bits or 23, and the place of an entry among
    the levels those of an f32: C is unbiased up to 2^-17 of a level for up to 127 levels, and up to s 2^-23 for s more.

    Args:
        levels: s, number of positive levels, 1 to 2^15; s = 2^(b-1) - 1 fills b bits.
        bits: b of each code instead, 2 to 16, for the most levels that fit: bits=4 is levels=7.
        steps: step sizes h relative to the norm instead, each at least 2^-15: a number, one per
            entry, or one per block. An array is kept in `State.shared`.
        norm: 2 or "inf".
        blocks: number of blocks; blocks of floor(d / blocks) entries, the last takes the rest.
        block_size: entries per block instead; the last block takes what is left. With neither: 512, or a single
            block where `steps` is an array.
        per_worker: `steps` is a matrix with a row of steps for each worker.
        norm_dtype: float32 (default) or bfloat16, in which norms travel. They are rounded up, which
            keeps C unbiased and multiplies e by at most 1 + 2^-7.

    Returns:
        Compressor with payload `Quantized`.

    Raises:
        ValueError: not exactly one of levels, bits and steps, or something out of range.

    Reference: Alistarh, Grubic, Li, Tomioka, Vojnovic 2017 (QSGD), section 3.1; varying steps: Wang,
    Safaryan, Richtarik 2022. The bound on omega minimises lambda + sum_j h_j^2 / (4 (1 + lambda))
    over lambda >= 0 (Lagrangian dual of the worst case); it is never above QSGD's.

    >>> import jaxcomp as jc
    >>> x = jnp.array([3.0, 0.0, -4.0, 0.0])
    >>> x_hat, payload = jc.roundtrip(jc.dithering(5), x, key=jax.random.key(0))
    >>> print(x_hat, payload.norms)
    [ 3.  0. -4.  0.] [5.]
    """
    if bits is not None:
        if levels is not None or not is_whole(bits, 2) or bits > 16:
            got = f"bits={bits!r}" if levels is None else f"levels={levels} and bits={bits}"
            raise ValueError(f"dithering: bits must be an integer in 2 .. 16, in place of levels; got {got}")
        levels = 2 ** (int(bits) - 1) - 1
    steps_of = _steps(levels, steps, per_worker)
    layout = block_sizes("dithering", blocks, block_size, None if steps_of.varying else BLOCK_SIZE)
    if norm not in (2, "inf", math.inf):
        raise ValueError(f'dithering: norm must be 2 or "inf"; got {norm!r}')
    if norm_dtype is not None and jnp.dtype(norm_dtype) not in (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)):
        raise ValueError(f"dithering: norm_dtype must be float32 or bfloat16; got {norm_dtype!r}")
    short = norm_dtype is not None and jnp.dtype(norm_dtype) == jnp.bfloat16
    order = 2 if norm == 2 else math.inf
    name = f"levels={levels}" if steps is None else "varying steps" if steps_of.varying else f"steps={steps}"
    name += (", norm=inf" if order != 2 else "") + (", norm_dtype=bfloat16" if short else "")
    name += f", blocks={blocks}" if blocks else f", block_size={block_size}" if block_size else ""
    best = Layout(multiple=1024, alone=ALONE) if blocks is None else None
    best = FIXED if steps_of.varying else best
    made = _dithering(f"dithering({name})", steps_of, layout, order, short, per_worker)
    longest = MOST if blocks is not None else BLOCK_SIZE if block_size is None else block_size
    alpha = None if steps_of.varying else contraction(lambda d: steps_of.omega(layout(d), d, short), longest)
    return made._replace(spec=made.spec._replace(layout=best, alpha=alpha))


class Steps(NamedTuple):
    """sizes: float64[1, 1] for equal steps, [1, m], or [n, m] for plans of n workers;  varying: an array was given;
    most: the highest level;  width: bits of a code."""

    sizes: np.ndarray
    varying: bool
    most: int
    width: int

    def omega(self, cut: BlockSizes, d: int, short: bool) -> float:
        """The bound in `dithering`; units, and norms if short, are rounded up."""
        if self.sizes.shape[1] == d:
            starts = np.arange(cut.count) * cut.length
            squares = float(np.max(np.add.reduceat(self.sizes**2, starts, axis=1))) if d else 0.0
        elif self.sizes.shape[1] == 1:
            squares = cut.largest * float(np.max(self.sizes**2, initial=0.0))
        else:
            lengths = np.where(np.arange(cut.count) < cut.rows, cut.length, cut.tail)
            squares = float(np.max(lengths * self.sizes**2, initial=0.0))
        e = math.sqrt(squares) * (1 + 2.0 ** (self.width - 24)) * (1 + short * 2.0**-7)
        return e - 1 if e >= 2 else e**2 / 4

    def unit(self, shared: Any, cut: BlockSizes, norms: Array) -> Array:
        """The value of one level, norm * h: f32[count] of each block, or f32[d] of each entry where steps are.

        Rounded up to few enough bits that level * unit is exact: then no compiler can change the
        sum of decoded messages by contracting product and addition into one rounding. Bounded so that it is finite.
        """
        if self.varying:
            h = one_row("dithering", shared).astype(jnp.float32)
            each = (norms if h.shape[0] == cut.count else cut.spread(norms)) * h
        else:
            each = norms * jnp.float32(self.sizes[0, 0])
        spare = jnp.uint32((1 << (self.width - 1)) - 1)
        bits = (lax.bitcast_convert_type(each, jnp.uint32) + spare) & ~spare
        most = jnp.float32(LARGEST / 2 ** (self.width - 1))  # of which no code is worth more than the largest number
        return jnp.minimum(lax.bitcast_convert_type(bits, jnp.float32), most)


def _steps(levels: int | None, steps: Any, per_worker: bool) -> Steps:
    if (levels is None) == (steps is None):
        raise ValueError(f"dithering: give exactly one of levels and steps; got levels={levels}, steps={steps}")
    if levels is not None and not (is_whole(levels) and levels <= MOST_LEVELS):
        raise ValueError(f"dithering: levels must be an integer in 1 .. 2^15; got {levels}")
    shape = np.shape(np.asarray(0.0 if steps is None else steps))
    if per_worker and len(shape) != 2:
        raise ValueError(f"dithering: per_worker needs a row of steps for each worker; got shape {shape}")
    sizes = np.asarray(steps if levels is None else 1.0 / levels, np.float64)
    sizes = sizes if per_worker else sizes.reshape(1, -1)
    if sizes.size == 0 or not np.all(np.isfinite(sizes) & (sizes >= 1 / MOST_LEVELS)):
        raise ValueError(f"dithering: steps must be finite and at least 2^-15; got {steps}")
    most = math.ceil(float(np.max(1 / sizes)) - 1e-9)
    return Steps(sizes, len(shape) > 0, most, width_for(2 * most + 1))


def _inverse(unit: Array) -> Array:
    """1 / unit, one division for each unit; 0 for one that is no normal number."""
    empty = unit < jnp.asarray(jnp.finfo(jnp.float32).tiny, unit.dtype)
    return jnp.where(empty, jnp.zeros((), unit.dtype), 1 / unit)


def _inverses(unit: Array) -> tuple[Array, Array]:
    """(a, b) with (|x| a) b = |x| / unit, for units whose inverse is no normal number."""
    a = jnp.where(unit > 2.0**100, jnp.asarray(2.0**-64, unit.dtype), jnp.ones((), unit.dtype))
    return a, _inverse(unit * a)


def _codes(x: Array, inverses: tuple[Array, Array], noise: Array, most: int) -> Array:
    """Codes of entries, rounded at random: `zigzag` of levels at most `most`, 2 l - 1 for l > 0, 2 |l| for l <= 0."""
    position = (jnp.abs(finite(x)) * inverses[0]) * inverses[1]
    level = jnp.minimum(position + noise.astype(x.dtype), most).astype(jnp.int32)  # neither is negative: floor
    return jnp.maximum(2 * level - 1 + (x < 0).astype(jnp.int32), 0).astype(jnp.uint32)


def _words(most: int, places: Places | Lanes, x: Array, inverses: list[Array], key: Array) -> Array:
    """`places.pack` of the codes of all entries."""
    each = zip(places.slices(x), zip(*map(places.slices, inverses), strict=True), places.halves(key), strict=True)
    return places.pack([_codes(x, inverses, as_uniform(half), most) for x, inverses, half in each])


def _few_words(most: int, places: Places | Lanes, x: Array, inverses: list[Array], key: Array) -> Array:
    """`_words` of f32 and at most `FEW` levels, in integers, with two thirds of the operations: to fuse them is about
    half of what XLA for GPUs does to compile a step.

    A float in [128, 256) is a multiple of 2^-16, so adding 128 rounds a position to one, and the last bits are that
    multiple. A fraction of f 2^-16 is rounded up for f of the 2^16 values of half. What is left of each entry is its
    level and, in the highest bit of its code, its sign: these are packed, and become codes in all places of a word at
    once: of t = 2 level + sign, t - 1, and 0 for t = 0.
    """
    width, inverse = places.width, inverses[0]

    def level_of(x: Array, inverse: Array) -> Array:
        negative = lax.shift_right_logical(lax.bitcast_convert_type(x, jnp.uint32), jnp.uint32(31))
        position = jnp.minimum(jnp.abs(finite(x)) * inverse, jnp.float32(most)) + jnp.float32(128)
        return lax.bitcast_convert_type(position, jnp.uint32) - jnp.uint32(0x43000000) | negative << (15 + width)

    pairs = zip(places.each(level_of, x, inverse), places.halves(key), strict=True)
    words = places.pack([part + half >> 16 for part, half in pairs])
    last = jnp.uint32(sum(1 << i for i in range(0, 32, width)))  # the lowest bit of each place
    signs = words >> (width - 1) & last
    twice = (words << 1) & ~last | signs
    some = twice
    for step in (1 << i for i in range(width.bit_length() - 1)):
        some = some | some >> step
    return twice - (some & last)


def _worth(codes: Array, unit: Array, dtype: Any) -> Array:
    """Values of codes."""
    level = unzigzag(codes).astype(wide(dtype))
    worth = level * unit.astype(level.dtype)
    return worth if worth.dtype == dtype else bounded(worth, dtype)


def _added_worth(codes: Array, unit: Array, dtype: Any) -> Array:
    """The same where it is added to something: -0 for a zero, and fewer operations."""
    if dtype != jnp.float32:
        return _worth(codes, unit, dtype)
    opposite = lax.bitcast_convert_type(codes >> 1 ^ -(codes & 1), jnp.int32)
    return opposite.astype(jnp.float32) * -unit


def _dithering(
    name: str, steps: Steps, layout: Callable[[int], BlockSizes], order: float, short: bool, per_worker: bool
) -> Compressor:
    sizes, varying, most, width = steps

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

    def norms_of(cut, x):
        norms = bounded(cut.norms(x, order), jnp.float32)
        return up_to_bfloat16(norms) if short else norms

    def compress(key, x, state):
        x = x.astype(wide(x.dtype))
        cut = layout(x.shape[0])
        places = cut.places(width)
        few = x.dtype == jnp.float32 and most <= FEW and np.max(sizes) <= 0.25  # then 1 / unit is a normal number

        def numbers(cut, x):
            norms = norms_of(cut, x)
            units = steps.unit(state.shared, cut, norms).astype(x.dtype)
            return norms, [_inverse(units)] if few else [*_inverses(units)]

        words_of = functools.partial(_few_words if few else _words, most)
        if places is None:  # entry by entry
            norms = norms_of(cut, x)
            units = steps.unit(state.shared, cut, norms).astype(x.dtype)
            codes = _codes(x, _inverses(cut.spread(units)), random_uniform(key, x.shape[0]), most)
            words = pack(codes, width)
        elif varying:
            norms, inverses = numbers(cut, x)
            words = made_words(words_of, places, cut, x, inverses, key)
        else:
            norms, words = coded_blocks(numbers, words_of, places, cut, x, key)
        return Quantized(rounded_to(norms, jnp.bfloat16) if short else norms, words), state.local

    def decompress(payload, shared, like):
        cut = layout(like.size)
        check_like("dithering", payload.words.shape, (width, -(-like.size // 32)))
        units = steps.unit(shared, cut, payload.norms.astype(jnp.float32))
        return worth(lambda codes, unit: _worth(codes, unit, like.dtype), payload.words, cut, units)

    def accumulate(total, payloads, weights, shared):
        cut = layout(total.size)
        check_like("dithering", payloads.words.shape[1:], (width, -(-total.size // 32)))
        if varying or cut.places(width) is None:
            workers = payloads.words.shape[0]
            pick = lambda worker: row_of("dithering", shared, worker, workers) if per_worker else shared
            return add_each(decompress, pick, total, payloads, weights, entrywise=True)
        units = jax.vmap(lambda norms: steps.unit(shared, cut, norms))(payloads.norms.astype(jnp.float32))
        value = lambda codes, unit: _added_worth(codes, unit, total.dtype)
        return add_worth(value, total, payloads.words, cut, units, weights)

    return on_vectors(
        init=init,
        compress=compress,
        decompress=decompress,
        accumulate=accumulate,
        spec=Spec(name, omega=lambda d: steps.omega(layout(d), d, short), alpha=None, linear=False, entrywise=True),
        for_worker=functools.partial(row_of, "dithering") if per_worker else None,
    )
