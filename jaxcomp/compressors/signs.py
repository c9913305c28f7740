"""Signs, in one bit an entry; and signs or zero, at random (TernGrad)."""

import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomp.base import Compressor, Spec, bounded, finite, wide
from jaxcomp.compressors.blocks import Blocks, blocks_of
from jaxcomp.compressors.vector import check_like, on_vectors
from jaxcomp.hashing import random_bits, random_uniform
from jaxcomp.layout import WHOLE_BLOCKS, Layout
from jaxcomp.norms import block_norms, exponent_of, power_of_two
from jaxcomp.packing import num_words, pack, unpack
from jaxcomp.payloads import Quantized

__all__ = ["sign", "terngrad", "vote"]

Array = jax.Array
BLOCK = 1024  # entries with a scale of their own: 1 + 32 / 1024 bits an entry
LAYOUT = Layout(dense_below=0)  # of votes: a bit for every entry
LARGEST = float(np.finfo(np.float32).max)


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
    fixed = isinstance(scale, numbers.Real) and not isinstance(scale, bool)
    if scale not in ("mean", "l2") and not (fixed and 0 < float(scale) < LARGEST):
        raise ValueError(f'sign: scale must be "mean", "l2" or a positive number; got {scale!r}')
    layout = blocks_of("sign", blocks, block_size, BLOCK)
    shown = [] if scale == "mean" else [f"scale={scale!r}"]
    shown += [f"blocks={blocks}"] if blocks else [f"block_size={block_size}"] if block_size else []
    longest = lambda d: max(layout(d).largest, 1)
    alpha = {"mean": lambda d: 1 / longest(d), "l2": lambda d: 2 / math.sqrt(longest(d)) - 1}.get(str(scale))

    def scales_of(x: Array, cut: Blocks) -> Array:
        if scale == "mean":
            each = _by_block(x, cut, _mean_magnitude)
        else:
            each = cut.norms(x, 2) / jnp.sqrt(jnp.asarray(np.asarray(cut.lengths), x.dtype))
        return jnp.minimum(each, jnp.asarray(LARGEST, x.dtype)).astype(jnp.float32)

    def compress(key, x, state):
        x = finite(x.astype(wide(x.dtype)))
        scales = jnp.zeros((0,), jnp.float32) if fixed else scales_of(x, layout(x.shape[0]))
        return Quantized(scales, pack((x >= 0).astype(jnp.uint32), 1)), state.local

    def decompress(payload, shared, like):
        check_like("sign", payload.words.shape, (1, -(-like.size // 32)))
        each = jnp.full((1,), float(scale), jnp.float32) if fixed else layout(like.size).spread(payload.norms)
        return _signed(payload.words, each, like)

    spec = Spec(
        f"sign({', '.join(shown)})",
        omega=None,
        alpha=alpha,
        linear=False,
        remedy="Take scale='mean', which contracts." if alpha is None or scale == "l2" else None,
    )
    return on_vectors(compress=compress, decompress=decompress, spec=spec)


def vote() -> Compressor:
    """+1 or -1 for each entry, one bit; a coin of the worker's own for what is zero. What `majority_vote` sends.

    It is no estimate of x, only the sign of a sum of votes is of use: no bound is known, and the owner of a chunk keeps
    no memory of what it rounds (`Spec.vote`).
    """

    def compress(key, x, state):
        x = finite(x)
        coins = random_bits(key, num_words(x.shape[0], 1)).reshape(1, -1)
        positive, zero = pack((x > 0).astype(jnp.uint32), 1), pack((x == 0).astype(jnp.uint32), 1)
        return Quantized(jnp.zeros((0,), jnp.float32), positive | (zero & coins)), state.local

    def decompress(payload, shared, like):
        check_like("vote", payload.words.shape, (1, -(-like.size // 32)))
        return _signed(payload.words, jnp.ones((1,), jnp.float32), like)

    return on_vectors(
        compress=compress,
        decompress=decompress,
        spec=Spec("vote()", None, None, linear=False, layout=LAYOUT, vote=True),
    )


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
    layout = blocks_of("terngrad", blocks, block_size, 512)
    shown = [] if clip is None else [f"clip={clip}"]
    shown += [f"blocks={blocks}"] if blocks else [f"block_size={block_size}"] if block_size else []
    spread = lambda d: (math.sqrt(max(layout(d).largest, 1)) - 1) / 2 * (1 + 2.0**-20)

    def compress(key, x, state):
        x = finite(x.astype(wide(x.dtype)))
        cut = layout(x.shape[0])
        tops = cut.norms(x, math.inf)
        if clip is not None:
            tops = jnp.minimum(tops, clip * cut.norms(x, 2) / jnp.sqrt(jnp.asarray(np.asarray(cut.lengths), x.dtype)))
        tops = jnp.minimum(tops, jnp.asarray(LARGEST, x.dtype)).astype(jnp.float32)
        each = cut.spread(tops).astype(x.dtype)
        empty = each < jnp.asarray(jnp.finfo(jnp.float32).tiny, x.dtype)
        chance = jnp.where(empty, 0, jnp.abs(x) / jnp.where(empty, 1, each))
        sent = random_uniform(key, x.shape[0]).astype(x.dtype) < chance
        codes = jnp.where(sent, jnp.where(x < 0, 2, 1), 0)
        return Quantized(tops, pack(codes.astype(jnp.uint32), 2)), state.local

    def decompress(payload, shared, like):
        check_like("terngrad", payload.words.shape, (2, 2 * -(-like.size // 32) // 2))
        codes = unpack(payload.words, like.size)
        each = layout(like.size).spread(payload.norms.astype(jnp.float32))
        values = jnp.where(codes == 1, each, jnp.where(codes == 2, -each, jnp.zeros((), jnp.float32)))
        return bounded(values.astype(like.dtype))

    biased = lambda d: 1 - max(spread(d), 1 + clip**2 / 4)  # pyright: ignore[reportOptionalOperand]
    spec = Spec(
        f"terngrad({', '.join(shown)})",
        omega=spread if clip is None else None,
        alpha=None if clip is None else biased,
        linear=False,
        remedy=None if clip is None else "Without clip it is unbiased.",
        layout=WHOLE_BLOCKS if clip is None and blocks is None else None,  # zeros count in a deviation
    )
    return on_vectors(compress=compress, decompress=decompress, spec=spec)


def _signed(words: Array, each: Array, like: Any) -> Array:
    """+-each by bits, in the dtype of `like`."""
    positive = unpack(words, like.size) != 0
    each = each.astype(jnp.float32)
    return bounded(jnp.where(positive, each, -each).astype(like.dtype))


def _by_block(x: Array, cut: Blocks, function: Any) -> Array:
    """function([b, m]) -> [b] of the blocks."""
    body = cut.rows * cut.length
    parts = [function(x[:body].reshape(cut.rows, cut.length))] if cut.rows else []
    parts += [function(x[body:].reshape(1, cut.tail))] if cut.tail else []
    return jnp.concatenate(parts) if parts else jnp.zeros((0,), x.dtype)


def _mean_magnitude(rows: Array) -> Array:
    """Mean of |x| of each row, whose sum may be too large for the dtype."""
    info = jnp.finfo(rows.dtype)
    largest = block_norms(rows, math.inf)
    exponent = jnp.clip(exponent_of(largest), info.minexp, -info.minexp)
    scale = lax.optimization_barrier(power_of_two(-exponent, rows.dtype))
    mean = jnp.mean(jnp.abs(rows) * scale[:, None], axis=1) * power_of_two(exponent, rows.dtype)
    return jnp.where(largest < info.tiny, 0, mean)
