"""Block-scaled numbers: entries in few bits, with a scale for each block of them (MX, NVFP4, integers, e4m3).

    C(x)_j = s round(x_j / s),   s of the block of j

What the elements are stands in `jaxcomp.compressors.elements`, how a scale is found in `jaxcomp.compressors.scales`.

The bounds, for blocks of m entries. Let every largest magnitude M of a block be at least M_least s.

Nearest: an element is off by at most u |x| or, among the smallest numbers, by t s. Entries of exactly t s beside one
large one are the worst case, so that with r = (t / M_least)^2

    1 - alpha = (u^2 + (m - 1) r) / (1 + (m - 1) r).

Stochastic: between neighbours a and b the variance is (x - a)(b - x): at most w x^2 with w = 4^-p / (4 (1 + 2^-p)) for
p bits of mantissa, and x (q s - x) below the smallest number q s. With the multiplier omega of the worst case,
(x (q s - x) - omega x^2) is at most (q s)^2 / (4 (1 + omega)), so that with c = (m - 1) q^2 / (4 M_least^2)

    (omega - w) (1 + omega) = c.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomp.arrays import bounded, finite, wide
from jaxcomp.backend import all_finite, form, in_parts
from jaxcomp.base import MOST, Compressor, Spec, on_vectors
from jaxcomp.checks import check_like, contraction, is_whole
from jaxcomp.compressors.blocks import BlockSizes, add_worth, block_sizes, code_words, worth
from jaxcomp.compressors.elements import E2M1, E2M3, E3M2, E4M3, E5M2, INT8, Elements, Float, Integer
from jaxcomp.compressors.scales import SCALES, BlockScales, Scale
from jaxcomp.factories import factory
from jaxcomp.groups import WHOLE_BLOCKS
from jaxcomp.norms import max_abs
from jaxcomp.payloads import Dense, Quantized, Several

__all__ = ["FORMATS", "block_scaled"]

Array = jax.Array
U32 = jnp.uint32
LARGEST, TINY = float(jnp.finfo(jnp.float32).max), float(jnp.finfo(jnp.float32).tiny)


class Format(NamedTuple):
    """elements: of what type;  block: entries that share a scale;  scale: its rule to nearest."""

    elements: Elements
    block: int
    scale: str


FORMATS: dict[str, Format] = {
    "mxfp8": Format(E4M3, 32, "e8m0"),
    "mxfp8_e5m2": Format(E5M2, 32, "e8m0"),
    "mxfp6": Format(E2M3, 32, "e8m0"),
    "mxfp6_e3m2": Format(E3M2, 32, "e8m0"),
    "mxfp4": Format(E2M1, 32, "e8m0"),
    "mxint8": Format(INT8, 32, "e8m0"),
    "nvfp4": Format(E2M1, 16, "e4m3-nearest"),
    "e4m3": Format(E4M3, 128, "bfloat16"),
    **{f"int{bits}": Format(Integer(bits), 128, "bfloat16") for bits in range(2, 9)},
}


@factory
def block_scaled(
    format: str,
    *,
    block: int | None = None,
    rounding: str = "nearest",
    scale: str | None = None,
) -> Compressor:
    """Rounds each entry to a number of few bits times the scale of its block.

    C(x)_j = s round(x_j / s).  Biased with rounding="nearest",   1 - alpha = (u^2 + (m - 1) r) / (1 + (m - 1) r)   for
    blocks of m entries, whose largest magnitude is at least M s and whose other errors are at most u |x| or, among the
    smallest numbers, t s;  r = (t / M)^2.  Unbiased with "stochastic",   (omega - w)(1 + omega) = (m - 1) q^2 / (4 M^2)
    with the smallest number q s, and the variance of larger ones at most w x^2.  Where that omega is below 1, C is a
    contraction, too, with alpha = 1 - omega.

    ==========  ========================  =====  ==========  ============
    format      elements                  block  scale       bits / entry
    ==========  ========================  =====  ==========  ============
    mxfp8       e4m3 (also mxfp8_e5m2)    32     e8m0        8.25
    mxfp6       e2m3 (also mxfp6_e3m2)    32     e8m0        6.25
    mxfp4       e2m1                      32     e8m0        4.25
    mxint8      k / 64, |k| < 128         32     e8m0        8.25
    nvfp4       e2m1                      16     e4m3        4.5
    e4m3        e4m3                      128    bfloat16    8.125
    int2..int8  -(2^(b-1) - 1) .. 2^(b-1) 128    bfloat16    b + 0.125
    ==========  ========================  =====  ==========  ============

    With scales that round up, nothing saturates. The two forms of releases do saturate: for nvfp4 it is the default,
    since it loses 10 to 20 % less than scales rounded up (more where entries differ much); for MX it loses up to 15 %
    less for mxfp4 on entries of about one size and more for all others (`docs/results/quantizers.md`). Integers use all
    2^b codes: the scale has the sign that sends the largest magnitude to 2^(b-1), and with rounding="nearest" every
    error is at most s / 2.

    MX scales are 2^-127 to 2^127, and entries, scales and what is decoded may be subnormal: it is exact on every
    backend (a sum of messages is arithmetic, which may take them for zero). Elements saturate with both signs alike;
    the sign of zero is kept, but for integers. NaN and infinities are sent as zeros, and the rest of their block as if
    they were: OCP leaves that open, and other libraries send a block of NaN. A received scale of NaN (byte 255) is
    decoded as NaN for its block. Other scales are at least 2^-126: a block that needs a smaller one is sent as zeros.
    Magnitudes beyond those of f32 saturate. Stochastic rounding draws 23 bits an entry.

    Exponents come from the bits. microxcaling takes floor(log2(x)) in f32, which just below a power of two is one too
    large.

    Args:
        format: see the table. mxfp6 is e2m3, the other one is mxfp6_e3m2.
        block: entries that share a scale, instead of those of the format; the last block takes what is left.
        rounding: "nearest" (ties to even) or "stochastic".
        scale: type and rounding of the scales, instead of those of the format:
            "e8m0": the least power of two with which nothing saturates (RCEIL), 8 bits.
            "e8m0-floor": 2^(floor(log2 max|x|) - emax), the rule of the OCP specification, with which what lies above
            the largest element saturates; floats only.
            "e4m3": rounded up to an e4m3 number times one f32 for the array, 8 bits; of nvfp4 with "stochastic".
            "e4m3-nearest": rounded to nearest instead, as released: may saturate; of nvfp4 with "nearest".
            "e8m0-best", "e4m3-best": of "e8m0" (or "e4m3") and the next smaller scale the one with which the block has
            the smaller squared error. Takes about twice the time.
            "bfloat16", "float32": max|x| / largest element, rounded up to 8 bits, or to as many as leave products
            with an element exact.

    Returns:
        Compressor with payload `Quantized`, whose norms are the scales; with "e4m3" it is the second part of `Several`,
        of which the first is the factor of the array.

    Raises:
        ValueError: an unknown format, rounding or scale, a block that is not an integer of at least 1, or a scale that
            saturates together with stochastic rounding or integers.

    Reference: Rouhani et al. 2023 (OCP Microscaling Formats, section 6.3); Mishra et al. 2025 (Recipes for pre-training
    with MXFP8, the rounding of scales); NVIDIA 2025 (Pretraining with NVFP4, appendix B).

    >>> import jaxcomp as jc
    >>> x_hat, payload = jc.roundtrip(jc.block_scaled("mxfp4"), jnp.array([7.0, 1.0, -0.2]), key=jax.random.key(0))
    >>> print(x_hat, payload.norms, payload.words.shape)
    [ 8.  1. -0.] [2] (4, 1)
    """
    if format not in FORMATS:
        raise ValueError(f"block_scaled: format must be one of {', '.join(FORMATS)}; got {format!r}")
    elements, default, kind = FORMATS[format]
    if scale is not None and scale not in SCALES:
        raise ValueError(f"block_scaled: scale must be one of {', '.join(SCALES)}; got {scale!r}")
    if rounding not in ("nearest", "stochastic"):
        raise ValueError(f'block_scaled: rounding must be "nearest" or "stochastic"; got {rounding!r}')
    if block is not None and not is_whole(block):
        raise ValueError(f"block_scaled: block must be an integer of at least 1; got {block!r}")
    size = default if block is None else block
    layout = block_sizes("block_scaled", None, size, None)
    stochastic = rounding == "stochastic"
    kind = kind.removesuffix("-nearest") if stochastic else kind
    rule = SCALES[scale or kind]
    sound = "e8m0" if rule.power else "e4m3"
    if rule.saturates and (stochastic or elements.lopsided):
        what = "stochastic rounding is biased" if stochastic else "integers have no exponent"
        raise ValueError(f'block_scaled: with scale="{rule.name}" elements saturate, and {what}; take "{sound}"')
    name = f"block_scaled({format}" + (f", block={size}" if size != default else "")
    name += (f", scale={rule.name}" if rule.name != kind else "") + (", stochastic)" if stochastic else ")")
    bound = _omega if stochastic else _alpha
    known = lambda d: bound(elements, rule, min(size, max(d, 1)), d)
    omega, alpha = (known, contraction(known, MOST)) if stochastic else (None, known)
    spec = Spec(name, omega, alpha, linear=False, layout=WHOLE_BLOCKS, entrywise=True)
    return _compressor(elements, rule, layout, stochastic, spec)


def _compressor(elements: Elements, rule: Scale, layout: Any, stochastic: bool, spec: Spec) -> Compressor:
    def code(x: Array, scale: Array, noise: Array | None = None) -> Array:
        y = rule.divided(_within(x), scale)  # f32
        return elements.encode(y, None if noise is None else noise.astype(y.dtype))

    def value(codes: Array, scale: Array) -> Array:
        # Exact: then no compiler can change the sum of decoded messages by contracting product and addition into one
        # rounding.
        return rule.times(elements.decode(codes), scale)

    def better_of(x: Array, cut: BlockSizes, made: BlockScales) -> BlockScales:
        """The same blocks, with the next smaller scale where that loses less."""
        lower = rule.lower(made)
        error = lambda each: _within(x) - value(code(x, each), each)
        whole, less = (cut.norms(error(cut.spread(m.scale)), 2) for m in (made, lower))
        pick = lambda a, b: lax.select(less < whole, b, a)
        return made._replace(norms=pick(made.norms, lower.norms), scale=pick(made.scale, lower.scale))

    def compress(key, x, state):
        x, cut = x.astype(wide(x.dtype)), layout(x.shape[0])
        ends_of = _largest_by_bits if rule.power else _ends_of(elements.lopsided)
        made = rule.of(cut.each(ends_of, x), elements, stochastic)
        made = better_of(x, cut, made) if rule.best else made
        words = code_words(code, elements.bits, cut, x, [made.scale], key if stochastic else None)
        payload = Quantized(made.norms, words)
        return (payload if made.factor is None else Several((Dense(made.factor), payload))), state.local

    def scales(payload, leading, size):
        """Scales of the messages, their words and how a vector is cut; leading: axes of several messages."""
        factor, payload = (None, payload) if isinstance(payload, Quantized) else payload.parts
        cut = layout(size)
        check_like("block_scaled", payload.words.shape[leading:], (elements.bits, -(-size // 32)))
        check_like("block_scaled", payload.norms.shape[leading:], (cut.count,))
        return rule.read(payload.norms, None if factor is None else factor.values), payload.words, cut

    def decompress(payload, shared, like):
        each, words, cut = scales(payload, 0, like.size)
        same = like.dtype == jnp.float32  # comparisons would take what is subnormal for zero
        decode = value if same else lambda *args: bounded(value(*args), like.dtype)
        return worth(decode, words, cut, each)

    def accumulate(total, payloads, weights, shared):
        each, words, cut = scales(payloads, 1, total.size)
        return add_worth(value, total, words, cut, each, weights)

    return on_vectors(compress=compress, decompress=decompress, accumulate=accumulate, spec=spec)


def _within(x: Array) -> Array:
    """f32, with zeros for what is not finite; f64 saturates, and is rounded to subnormal numbers, too."""
    x = finite(x)
    if x.dtype == jnp.float32:
        return x
    size = jnp.abs(x)
    steps = jnp.round(jnp.minimum(size, TINY) * 2.0**149).astype(U32)  # of 2^-149
    near = jnp.minimum(size, LARGEST).astype(jnp.float32)
    near = jnp.where(size < TINY, lax.bitcast_convert_type(steps, jnp.float32), near)
    return jnp.where(jnp.signbit(x), -near, near)


def _largest_by_bits(rows: Array) -> tuple[Array, Array]:
    """The largest magnitude, subnormal or not, twice."""
    size = lax.bitcast_convert_type(_within(rows), jnp.int32) & jnp.int32(0x7FFFFFFF)
    largest = lax.bitcast_convert_type(jnp.max(size, axis=1), jnp.float32)
    return largest, largest


def _ends_of(signed: bool) -> Callable[[Array], tuple[Array, Array]]:
    """The largest entry and minus the smallest, at least 0.

    signed: whether more is asked than the larger one of both, for which the largest magnitude serves twice.
    """
    portable, on_gpu = (_both_ends, _pairs_of_ends) if signed else (_magnitudes, None)
    both = form(portable, on_cpu=_ends_on_cpu, on_gpu=on_gpu)

    def ends(rows: Array) -> tuple[Array, Array]:
        most, least = both(rows)
        return jnp.maximum(_within(most), 0), jnp.maximum(-_within(least), 0)

    return ends


def _both_ends(rows: Array) -> tuple[Array, Array]:
    """The largest and the smallest finite entry of each row, zero among them: one reduction, since of two XLA keeps
    what they share.
    """
    larger, smaller = jnp.maximum, jnp.minimum
    both = lambda a, b: (larger(finite(a[0]), finite(b[0])), smaller(finite(a[1]), finite(b[1])))
    zero = np.zeros((), rows.dtype)
    return lax.reduce((rows, rows), (zero, zero), both, (1,))


def _pairs_of_ends(rows: Array) -> tuple[Array, Array]:
    """The same, as the two parts of complex numbers: XLA for GPUs looks for them in the loop that computes the rows,
    which it does not where a reduction has two results.
    """
    largest = lambda a, b: jnp.maximum(finite(a), finite(b))
    both = lambda a, b: lax.complex(*(largest(part(a), part(b)) for part in (lax.real, lax.imag)))
    pairs = lax.complex(rows, -rows)
    ends = lax.reduce(pairs, np.zeros((), pairs.dtype), both, (1,))
    return lax.real(ends), -lax.imag(ends)


def _magnitudes(rows: Array) -> tuple[Array, Array]:
    largest = max_abs(rows)
    return largest, -largest


def _ends_on_cpu(rows: Array) -> tuple[Array, Array]:
    """Zero among them if any entry is not finite."""
    ends = jnp.max(rows, axis=1), jnp.min(rows, axis=1)

    def slow(rows, *ends):
        each = lambda function: lambda rows: function(finite(rows), axis=1)
        return in_parts(each(jnp.max), ends[0], rows), in_parts(each(jnp.min), ends[1], rows)

    return lax.cond(all_finite(rows, *ends), lambda rows, *ends: ends, slow, rows, *ends)


# ------------------------------------------------------------------------------------------------
# Bounds


def _alpha(elements: Elements, rule: Scale, m: int, d: int) -> float:
    near, saturation = rule.reach(elements, False)
    t = elements.smallest / 2
    u = max(elements.unit if isinstance(elements, Float) else 0.0, t / near, saturation)
    r = (t / near) ** 2
    error = (u**2 + (m - 1) * r) / (1 + (m - 1) * r)
    return 1 - error - d * (t * rule.least_share(elements, False)) ** 2


def _omega(elements: Elements, rule: Scale, m: int, d: int) -> float:
    near, _ = rule.reach(elements, True)
    q = elements.smallest
    w = elements.variance if isinstance(elements, Float) else q**2 / (4 * near**2)
    c = (m - 1) * q**2 / (4 * near**2)
    omega = (math.sqrt((1 - w) ** 2 + 4 * (w + c)) - (1 - w)) / 2
    return omega + d * (q * rule.least_share(elements, True)) ** 2 / 4
