"""Signs, in one bit an entry; and signs or zero, at random (TernGrad)."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomp.arrays import bounded, exponent_of, finite, power_of_two, wide
from jaxcomp.backend import form, in_parts
from jaxcomp.base import Compressor, Spec, on_vectors
from jaxcomp.checks import check_like, is_number
from jaxcomp.compressors.blocks import BlockSizes, add_worth, block_sizes, code_words, worth
from jaxcomp.factories import factory
from jaxcomp.groups import WHOLE_BLOCKS, Layout
from jaxcomp.hashing import random_bits
from jaxcomp.norms import block_norms, finite_sizes
from jaxcomp.packing import num_code_words
from jaxcomp.payloads import Quantized

__all__ = ["sign", "terngrad", "vote"]

Array = jax.Array
BLOCK = 1024  # entries with a scale of their own: 1 + 32 / 1024 bits an entry
LAYOUT = Layout(dense_below=0)  # of votes: a bit for every entry
WHOLE = block_sizes("sign", 1, None, None)  # where one scale serves all entries
LARGEST = float(np.finfo(np.float32).max)


@factory
def sign(scale: float | str = "mean", *, blocks: int | None = None, block_size: int | None = None) -> Compressor:
    """The signs of all entries, one bit each, and a scale for each block.

    C(x)_j = s sign(x_j),   s = |x|_1 / m   for a block of m entries;   sign(0) = 1.   Biased,   alpha = 1 / m;
    for each x it is |x|_1^2 / (m |x|^2), which is 2 / pi for normal entries. This scale has the least error.

    With `error_feedback` and via="two_shot" each worker sends about one bit an entry to the owners of chunks and gets
    one back, with a memory on both ways.

    Args:
        scale: "mean" as above; "l2" for s = |x| / sqrt m, as in 1-bit Adam, for which alpha = 2 / sqrt m - 1 is no
            contraction in the worst case; or a number, the same for all entries, for which no bound is known.
        blocks, block_size: number of blocks, or their size, as for `dithering`; with neither 1024 entries.

    Returns:
        Compressor with payload `Quantized`: codes of one bit, set for what is not negative.

    Raises:
        ValueError: an argument is out of range.

    Reference: Karimireddy, Rebjock, Stich, Jaggi 2019, lemma 8; "l2": Tang et al. 2021 (1-bit Adam),
    as DeepSpeed has it.

    >>> import jaxcomp as jc
    >>> print(jc.roundtrip(jc.sign(), jnp.array([1.0, -4.0, 0.0, 3.0]), key=jax.random.key(0))[0])
    [ 2. -2.  2.  2.]
    """
    fixed = is_number(scale)
    if scale not in ("mean", "l2") and not (fixed and 0 < float(scale) < LARGEST):
        raise ValueError(f'sign: scale must be "mean", "l2" or a positive Python number; got {scale!r}')
    layout = block_sizes("sign", blocks, block_size, BLOCK)
    shown = [] if scale == "mean" else [f"scale={scale!r}"]
    shown += [f"blocks={blocks}"] if blocks else [f"block_size={block_size}"] if block_size else []
    longest = lambda d: max(layout(d).largest, 1)
    alpha = {"mean": lambda d: 1 / longest(d), "l2": lambda d: 2 / math.sqrt(longest(d)) - 1}.get(str(scale))

    def scales_of(x: Array, cut: BlockSizes) -> Array:
        if scale == "mean":
            each = cut.each(_mean_magnitude, x) if cut.count else jnp.zeros((0,), x.dtype)
        else:
            each = cut.norms(x, 2) / jnp.sqrt(cut.lengths(x.dtype))
        return bounded(each, jnp.float32)

    def compress(key, x, state):
        x = x.astype(wide(x.dtype))
        scales = jnp.zeros((0,), jnp.float32) if fixed else scales_of(x, layout(x.shape[0]))
        return Quantized(scales, _bits(lambda x: (x >= 0) | ~jnp.isfinite(x), x)), state.local

    spec = Spec(
        f"sign({', '.join(shown)})",
        omega=None,
        alpha=alpha,
        linear=False,
        remedy="Take scale='mean', which contracts." if alpha is None or scale == "l2" else None,
        entrywise=True,
    )
    return on_vectors(
        compress=compress, **_read("sign", 1, layout, _signed, float(scale) if fixed else None), spec=spec
    )


def vote() -> Compressor:
    """+1 or -1 for each entry, one bit; a coin of the worker's own for what is zero. What `majority_vote` sends.

    It is no estimate of x, only the sign of a sum of votes is of use: no bound is known, and the owner of a chunk keeps
    no memory of what it rounds (`Spec.vote`).
    """

    def compress(key, x, state):
        coins = random_bits(key, num_code_words(x.shape[0], 1)).reshape(1, -1)
        positive = _bits(lambda x: jnp.isfinite(x) & (x > 0), x)
        zero = _bits(lambda x: ~jnp.isfinite(x) | (x == 0), x)
        return Quantized(jnp.zeros((0,), jnp.float32), positive | (zero & coins)), state.local

    return on_vectors(
        compress=compress,
        **_read("vote", 1, WHOLE, _signed, 1.0),
        spec=Spec("vote()", None, None, linear=False, layout=LAYOUT, vote=True),
    )


@factory
def terngrad(*, clip: float | None = None, blocks: int | None = None, block_size: int | None = None) -> Compressor:
    """Each entry becomes zero or plus or minus the largest of its block, at random.

    C(x)_j = s sign(x_j) b_j,   s = max_i |x_i|,   b_j = 1 with probability |x_j| / s, else 0.

    Unbiased,   omega = (sqrt m - 1) / 2   for blocks of m entries: the greatest value of s |x|_1 / |x|^2 - 1, where one
    entry is s and the others are s / (1 + sqrt m). Codes of two bits; the best code of the wire needs the entropy of
    the three levels, and less where hardly any entry is sent.

    Args:
        clip: entries beyond `clip` standard deviations sqrt(|x|^2 / m) of the block count as that much, which makes s
            smaller; 2.5 in the paper. Biased then: all that is known is   E|C(x) - x|^2 <= max((sqrt m - 1) / 2,
            1 + clip^2 / 4) |x|^2.   None, the default, clips nothing.
        blocks, block_size: number of blocks, or their size, as for `dithering`; with neither 512 entries.

    Returns:
        Compressor with payload `Quantized`: codes 0, 1, 2 for 0, s, -s.

    Raises:
        ValueError: an argument is out of range.

    Reference: Wen, Xu, Yan, Wu, Wang, Chen, Li 2017, equations 1 to 3 and 8. The bound is ours.

    >>> import jaxcomp as jc
    >>> print(jc.roundtrip(jc.terngrad(), jnp.array([2.0, 0.0, -2.0]), key=jax.random.key(0))[0])
    [ 2.  0. -2.]
    """
    if clip is not None and not 0 < clip < math.inf:
        raise ValueError(f"terngrad: clip must be positive and finite, or None; got {clip}")
    layout = block_sizes("terngrad", blocks, block_size, 512)
    shown = [] if clip is None else [f"clip={clip}"]
    shown += [f"blocks={blocks}"] if blocks else [f"block_size={block_size}"] if block_size else []
    spread = lambda d: (math.sqrt(max(layout(d).largest, 1)) - 1) / 2 * (1 + 2.0**-20)

    def compress(key, x, state):
        x = x.astype(wide(x.dtype))
        cut = layout(x.shape[0])
        tops = cut.norms(x, math.inf)
        if clip is not None:
            tops = jnp.minimum(tops, clip * cut.norms(x, 2) / jnp.sqrt(cut.lengths(x.dtype)))
        tops = bounded(tops, jnp.float32)
        return Quantized(tops, code_words(_ternary, 2, cut, x, [tops.astype(x.dtype)], key)), state.local

    biased = lambda d: 1 - max(spread(d), 1 + clip**2 / 4)  # pyright: ignore[reportOptionalOperand]
    spec = Spec(
        f"terngrad({', '.join(shown)})",
        omega=spread if clip is None else None,
        alpha=None if clip is None else biased,
        linear=False,
        remedy=None if clip is None else "Without clip it is unbiased.",
        layout=WHOLE_BLOCKS if clip is None and blocks is None else None,  # zeros count in a deviation
        entrywise=True,
    )
    return on_vectors(compress=compress, **_read("terngrad", 2, layout, _of_three), spec=spec)


def _bits(condition: Callable[[Array], Array], x: Array) -> Array:
    """uint32[1, ceil(d / 32)]: a bit for each entry, set where the condition holds."""
    return code_words(lambda x: condition(x).astype(jnp.uint32), 1, WHOLE(x.shape[0]), x, [])


def _signed(codes: Array, scale: Array) -> Array:
    return jnp.where(codes != 0, scale, -scale)


def _ternary(x: Array, top: Array, noise: Array) -> Array:
    """0, 1 or 2 for 0, s or -s."""
    # With chance |x| / s, without the division: XLA would multiply by the inverse of s, which is rounded, and zero for
    # the largest s. An entry of magnitude s is always sent, as noise < 1 leaves a product below s.
    sent = (noise.astype(x.dtype) * top < jnp.abs(finite(x))) & (
        top >= jnp.asarray(jnp.finfo(jnp.float32).tiny, x.dtype)
    )
    return jnp.where(sent, jnp.where(x < 0, 2, 1), 0).astype(jnp.uint32)


def _of_three(codes: Array, scale: Array) -> Array:
    return jnp.where(codes == 1, scale, jnp.where(codes == 2, -scale, jnp.zeros((), jnp.float32)))


def _read(
    name: str,
    width: int,
    layout: Callable[[int], BlockSizes],
    value: Callable[[Array, Array], Array],
    scale: float | None = None,
) -> dict[str, Any]:
    """decompress and accumulate of codes of `width` bits: value(code, scale of the block), or one scale for all."""
    cut_of = layout if scale is None else WHOLE

    def scales(norms: Array) -> Array:
        if scale is None:
            return norms.astype(jnp.float32)
        return jnp.full((*norms.shape[:-1], 1), scale, jnp.float32)

    def decompress(payload, shared, like):
        check_like(name, payload.words.shape, (width, -(-like.size // 32)))
        of = lambda *args: bounded(value(*args), like.dtype)
        return worth(of, payload.words, cut_of(like.size), scales(payload.norms))

    def accumulate(total, payloads, weights, shared):
        check_like(name, payloads.words.shape[1:], (width, -(-total.size // 32)))
        each = scales(payloads.norms)
        return add_worth(lambda *args: bounded(value(*args)), total, payloads.words, cut_of(total.size), each, weights)

    return {"decompress": decompress, "accumulate": accumulate}


def _mean_magnitude(rows: Array) -> Array:
    """Mean of |x| of each row, with zeros for what is not finite, even where sums are too large for the dtype."""
    return form(_mean_or_scaled, on_gpu=_mean_in_two_scales)(rows)


def _mean_in_two_scales(rows: Array) -> Array:
    """One pass without a condition (see `norms.block_norms`): of entries made smaller, whose sum cannot overflow, and
    made larger, for rows of which such a sum would lose what counts. As parts of one complex sum XLA for GPUs adds them
    up in the loop that computes the rows."""
    info, size = jnp.finfo(rows.dtype), finite_sizes(rows)
    down, up = 0.5 ** rows.shape[1].bit_length(), 2.0 ** (info.maxexp // 2)
    sums = jnp.sum(lax.complex(size * down, size * up), axis=1)
    is_small = lax.real(sums) <= info.tiny * 2.0**40
    means = jnp.where(is_small, lax.imag(sums) / rows.shape[1] / up, lax.real(sums) / (rows.shape[1] * down))
    return jnp.where(means < info.tiny / rows.shape[1], 0, means)


def _mean_or_scaled(rows: Array) -> Array:
    info, length = jnp.finfo(rows.dtype), rows.shape[1]
    # As they are where none has overflowed or lost an entry that counts; a NaN anywhere fails the test.
    sums = jnp.sum(jnp.abs(rows), axis=1)
    plain = jnp.all(((sums > info.tiny * 2.0**40) | (sums == 0)) & (sums < info.max))
    return lax.cond(plain, lambda rows, sums: sums / length, lambda rows, _: _scaled_mean(rows), rows, sums)


def _scaled_mean(rows: Array) -> Array:
    info = jnp.finfo(rows.dtype)
    largest = block_norms(rows, math.inf)
    exponent = jnp.clip(exponent_of(largest), info.minexp, -info.minexp)
    scale = power_of_two(-exponent, rows.dtype)
    mean = lambda rows, scale: jnp.mean(jnp.abs(finite(rows)) * lax.optimization_barrier(scale)[:, None], axis=1)
    means = in_parts(mean, largest, rows, scale) * power_of_two(exponent, rows.dtype)
    return jnp.where(largest < info.tiny, 0, means)
