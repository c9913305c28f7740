"""DRIVE and EDEN: each entry of the rotated vector to the nearest centroid of the normal law, one scale for a block.

In the symbols of `eden`: the centroids c are those of Lloyd and Max for 2^b levels, in float16. The "unbiased" scale S
has <C(x), x> = |x|^2, so that E C(x) = x over uniformly random rotations; with that of "least_squares" |C(x) - x| is
least.

**What is proved of Hadamard rotations.** Not E C(x) = x: of x = (1, 1/2, 0, ...) one bit keeps the direction of the
first entry alone, whatever the signs. So omega is not known. With least squares |C(x) - x|^2 <= |y - sigma c|^2, and
the entries of y obey Khinchine's inequality (`hadamard`): E y^2 = sigma^2, E|y| >= sigma / sqrt 2, E y^2k <=
(2k - 1)!! sigma^2k. The largest E (y - c(y))^2 over all laws with these moments up to k = 10 is a linear program; its
values are `ERRORS`, so alpha = 1 - ERRORS[b]. For b <= 1 the error is at most 1 - b/2: with signs, 1 - cos^2 is
1 - |y|_1^2 / (B |y|^2).

The unbiased scale has error |x|^2 (1 / cos^2 - 1) with the angle between y and c, so at most that of least squares over
cos^2. Where cos^2 is below 0.86 of what it is for normal entries, which for long blocks does not occur, the scale is
that of least squares; with t = 0.86 (1 - the distortion of Lloyd-Max), alpha = 1 - ERRORS[b] / t, where positive.
"""

import functools
import itertools
import math
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp.arrays import bounded, finite, key_data, wide
from jaxcomp.backend import (
    cut_apart,
    end_to_end,
    fold,
    fold_in_one_pass,
    fold_in_rows,
    form,
    lanes,
    materialized,
    side_by_side,
    zeros_if_shape,
)
from jaxcomp.base import Compressor, Spec, State, on_vectors
from jaxcomp.checks import check_like
from jaxcomp.compressors.hadamard import Rotation, ScaledRows, rotation_of
from jaxcomp.compressors.rotate import BLOCK, Rotated, check_block, clipped, filled_up, key_of
from jaxcomp.factories import factory
from jaxcomp.norms import max_abs
from jaxcomp.packing import pack, unpack
from jaxcomp.payloads import Quantized, Several

__all__ = ["centroids", "distortion", "drive", "eden"]

Array = jax.Array
LEAST = 0.86
FEW = 4  # bits for which entries are compared with all limits
ONE_LOOP = 2**16  # entries from which on codes and sums are one loop on a GPU
UNIT = 2.0**10  # times which entries are rotated: then the smallest are not lost, nor do sums of the largest overflow
# By bits 0 .. 8, each rounded up; recomputed in the tests.
ERRORS = (1.0, 0.509, 0.307, 0.0966, 0.02755, 0.0074, 0.00193, 0.0005, 0.000131)


# ------------------------------------------------------------------------------------------------
# Centroids of the normal law


@functools.cache
def centroids(bits: int) -> tuple[float, ...]:
    """The positive centroids of the Lloyd-Max quantizer of 2^bits levels for the standard normal law, ascending, in
    float16.

    They are rounded because a GPU multiplies float16 as it is. The error is least at the centroids themselves, so that
    rounding adds little to it: 3e-6 of it for 4 bits, 7e-4 for 8.

    >>> print(np.round(centroids(2), 4))
    [0.4529 1.5107]
    """
    return tuple(_lloyd_max(bits).astype(np.float16).tolist())


@functools.cache
def _lloyd_max(bits: int) -> np.ndarray:
    """The same in float64, by Newton's method on c_i = E(Y | Y in the cell of c_i)."""
    count = 2 ** (bits - 1)
    normal = statistics.NormalDist(0, math.sqrt(3))  # its quantiles are nearly those where centroids belong
    c = np.array([normal.inv_cdf(0.5 + (i + 0.5) / (2 * count)) for i in range(count)])
    for _ in range(50):
        low, high, mass = _cells(c)
        density = lambda t: np.exp(-np.square(t) / 2) / math.sqrt(2 * math.pi)
        mean = (density(low) - density(high)) / mass
        below, above = density(low) * (mean - low) / mass / 2, density(high) * (high - mean) / mass / 2
        below[0] = above[-1] = 0
        slope = np.eye(count) - np.diag(below + above) - np.diag(below[1:], -1) - np.diag(above[:-1], 1)
        step = np.linalg.solve(slope, c - mean)
        c = c - step
        if np.abs(step).max() < 1e-13:
            break
    return c


def _cells(c: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    ends = np.concatenate([[0.0], (c[1:] + c[:-1]) / 2, [40.0]])
    beyond = np.array([math.erfc(t / math.sqrt(2)) / 2 for t in ends])
    return ends[:-1], ends[1:], beyond[:-1] - beyond[1:]


@functools.cache
def distortion(bits: float) -> float:
    """E (Y - c(Y))^2 for normal Y and centroids in float64; between whole bits the mean of both.

    >>> round(distortion(1), 4), round(distortion(0.5), 4)
    (0.3634, 0.6817)
    """
    low = math.floor(bits)
    if bits > low:
        return (1 - bits + low) * distortion(low) + (bits - low) * distortion(low + 1)
    if not low:
        return 1.0
    c = _lloyd_max(low)
    return float(1 - 2 * np.sum(np.square(c) * _cells(c)[2]))


def _errors(bits: float) -> float:
    low = math.floor(bits)
    if bits <= 1:
        return 1 - bits / 2
    return ERRORS[low] if bits == low else (1 - bits + low) * ERRORS[low] + (bits - low) * ERRORS[low + 1]


def _codes(y: Array, bits: int) -> Array:
    """Codes u32 of the nearest centroids: magnitude, then sign in the last bit."""
    return _numbers(jnp.abs(y), bits) * jnp.uint32(2) + (y < 0).astype(jnp.uint32)


def _numbers(size: Array, bits: int) -> Array:
    """Number u32 of the nearest centroid of a magnitude."""
    if _by_tables(bits):
        return _looked_up(size, bits).astype(jnp.uint32)
    number = jnp.zeros(size.shape, jnp.uint32)
    for a, b in itertools.pairwise(centroids(bits)):
        number = number + (size > jnp.asarray((a + b) / 2, size.dtype)).astype(jnp.uint32)
    return number


def _nearest(size: Array, bits: int) -> Array:
    """The nearest centroid of a magnitude."""
    table, number = centroids(bits), functools.partial(jnp.asarray, dtype=size.dtype)
    if _by_tables(bits):
        return number(np.array(table)).at[_looked_up(size, bits)].get(mode="promise_in_bounds")
    value = jnp.full(size.shape, number(table[0]))
    for a, b in itertools.pairwise(table):
        value = value + jnp.where(size > number((a + b) / 2), number(b - a), number(0))
    return value


def _by_tables(bits: int) -> bool:
    """Whether entries are looked up, not compared with all limits between two centroids."""
    return bits > FEW and form(lambda: False, on_cpu=lambda: True, on_gpu=lambda: True)()


def _looked_up(size: Array, bits: int) -> Array:
    """Number i32 of the nearest centroid of a magnitude, with limits in f32, for 3 bits and more. Magnitudes are cut
    into cells of equal width, with at most one limit within: a table has the number of limits below each cell, and a
    comparison decides the last one.

    For 8 bits a GPU would write the results of 127 comparisons, which take 26 times the memory of the vector.
    """
    table, dtype = np.array(centroids(bits)), size.dtype
    limits = ((table[1:] + table[:-1]) / 2).astype(np.float32)
    cells = 2.0 ** math.ceil(-math.log2(np.diff(limits).min()))  # between 0 and 1
    starts = np.arange(math.ceil(cells * limits[-1]) + 1, dtype=np.float32) / np.float32(cells)
    of = lambda numbers, i: jnp.asarray(numbers).at[i].get(mode="promise_in_bounds")
    cell = jnp.minimum(size * jnp.asarray(cells, dtype), jnp.asarray(len(starts) - 1, dtype)).astype(jnp.int32)
    below = of(np.searchsorted(limits, starts).astype(np.int32), jnp.maximum(cell, 0))  # a NaN can be any integer
    return below + (size > of(np.append(limits, np.inf).astype(dtype), below)).astype(jnp.int32)


def _decode(codes: Array, bits: int, dtype: Any) -> Array:
    both = jnp.asarray(np.array([[c, -c] for c in centroids(bits)]).reshape(-1).astype(dtype))
    return jnp.where(codes == 0, both[0], both[1]) if bits == 1 else both[codes.astype(jnp.int32)]


# ------------------------------------------------------------------------------------------------
# The compressors


@factory
def drive(*, block: int = BLOCK, scale: str = "unbiased", per_worker: bool = False) -> Compressor:
    """One bit an entry and one scale a block: the signs of the rotated vector, `eden(1)`.

    C(x) = S R^T sign(R x),   S = |x|^2 / |R x|_1 (or |R x|_1 / B);  sign(0) = 1.   alpha: see `eden`.

    Args:
        block, scale, per_worker: see `eden`.

    Raises:
        ValueError: an argument is out of range.

    Reference: Vargaftik, Ben-Basat, Portnoy, Mendelson, Ben-Itzhak, Mitzenmacher 2021 (DRIVE), algorithm 1, appendix C.

    >>> import jaxcomp as jc
    >>> x_hat, payload = jc.roundtrip(jc.drive(), jnp.array([3.0, 0.0, 0.0, 0.0]), key=jax.random.key(0))
    >>> print(jnp.abs(x_hat).round(), payload.words.shape, payload.norms.shape)
    [3. 0. 0. 0.] (1, 1) (1,)
    """
    return _eden("drive", 1, block, scale, per_worker)


@factory
def eden(bits: float, *, block: int = BLOCK, scale: str = "unbiased", per_worker: bool = False) -> Compressor:
    """A fixed number of bits an entry, fractions included, and one scale a block.

    C(x) = S R^T c(y / sigma),   y = R x,   sigma^2 = |y|^2 / B   in blocks of B entries, with the centroids c of the
    normal law and   S = |y|^2 / <c, y> ("unbiased")   or   <c, y> / |c|^2 ("least_squares").  The error is
    |x|^2 / cos^2 - |x|^2 with the angle between y and c: for long blocks 0.571, 0.133, 0.0358, 0.0096 of |x|^2 for 1,
    2, 3, 4 bits.  With E_b the largest error over all laws whose moments obey Khinchine's inequality (a linear program;
    1 - b/2 for b <= 1),   alpha = 1 - E_b ("least_squares"),   1 - E_b / t with t = 0.86 (1 - the error for normal
    entries) ("unbiased").  omega is not known, since for Hadamard rotations E C(x) = x holds only nearly, and for
    vectors of very few large entries not at all.

    With b + f bits, 0 < f < 1, the first part f of the rotated entries of each block has b + 1 bits and the others b;
    those without a bit count as zero. Which entries these are plays no part, since all have one distribution.
    Magnitudes beyond 2^-26 of the largest number saturate, and memories keep the rest.

    Args:
        bits: above 0, at most 8.
        block: B, entries that are rotated together and share a scale of 32 bits; a power of two from 2 to 2^24. At most
            the largest power of two in d is taken.
        scale: "unbiased" or "least_squares".
        per_worker: each worker rotates by signs of its own (see `rotate`): errors of similar gradients average out.

    Returns:
        Compressor with payload `Quantized`, whose norms are the scales; with fractions above one bit `Several` of two
        of them, of which the first has the scales. Whole blocks, what is left of the last one, and the last B entries
        have words of their own, side by side.

    Raises:
        ValueError: bits, block or scale out of range.

    Reference: Vargaftik, Ben-Basat, Portnoy, Mendelson, Ben-Itzhak, Mitzenmacher 2022 (EDEN), algorithm 1. There bits
    below one come from a random mask before the rotation, here from a fixed one after it, which loses as little.

    >>> import jaxcomp as jc
    >>> x = jax.random.normal(jax.random.key(0), (4096,))
    >>> x_hat, _ = jc.roundtrip(jc.eden(4), x, key=jax.random.key(1))
    >>> bool(jnp.sum((x_hat - x) ** 2) < 0.01 * jnp.sum(x**2))
    True
    """
    return _eden("eden", bits, block, scale, per_worker)


def _eden(name: str, bits: float, block: int, scale: str, per_worker: bool) -> Compressor:
    if isinstance(bits, bool) or not isinstance(bits, int | float) or not 0 < bits <= 8:
        raise ValueError(f"{name}: bits must be above 0, at most 8; got {bits!r}")
    if scale not in ("unbiased", "least_squares"):
        raise ValueError(f'{name}: scale must be "unbiased" or "least_squares"; got {scale!r}')
    block = check_block(name, block)
    least = LEAST * (1 - distortion(bits)) if scale == "unbiased" else 1.0
    alpha = 1 - _errors(bits) / least
    written = ([] if name == "drive" else [f"{bits:g}"]) + ([f"block={block}"] if block != BLOCK else [])
    written += (["least_squares"] if scale != "unbiased" else []) + (["per_worker"] if per_worker else [])
    cure = 'Over Hadamard rotations it is not exactly unbiased; scale="least_squares" contracts.'
    known = (lambda d: alpha if d else 1.0) if alpha > 0 else None
    shown = f"{name}({', '.join(written)})"
    spec = Spec(shown, omega=None, alpha=known, linear=False, layout=filled_up(block), remedy=cure)
    return _compressor(spec, _Code(bits), block, None if scale != "unbiased" else least, per_worker)


class _Code:
    """A code for the rows of a matrix: the first `count` entries of each in high bits, the others in low ones."""

    def __init__(self, bits: float):
        self.low = math.floor(bits)
        self.fraction = bits - self.low
        self.high = self.low + (self.fraction > 0)

    def first(self, length: int) -> int:
        """How many entries of a row have the higher number of bits."""
        return length if not self.fraction else min(length, math.ceil(self.fraction * length - 1e-9))

    def encode(self, rows: Array) -> tuple[Array, Array]:
        """Codes of both kinds, flat."""
        if not self.fraction and lanes() > 1:  # as bytes in rows a TPU would take long to lay them end to end
            return _codes(materialized(rows.reshape(-1)), self.high), jnp.zeros((0,), jnp.uint32)
        high, low = self._both(rows, _codes)
        return high.reshape(-1), low.reshape(-1) if self.low else jnp.zeros((0,), jnp.uint32)

    def nearest(self, rows: Array) -> Array:
        """The magnitudes of the centroids, [rows, length]."""
        high, low = self._both(jnp.abs(rows), _nearest)
        return jnp.concatenate([high, low], axis=1) if low.shape[1] else high

    def _both(self, rows: Array, of: Callable[[Array, int], Array]) -> tuple[Array, Array]:
        count = self.first(rows.shape[1])
        rest = rows[:, count:]
        return of(rows[:, :count], self.high), of(rest, self.low) if self.low else jnp.zeros_like(rest)

    def decode(self, codes: Array, others: Array | None, shape: tuple[int, int], dtype: Any) -> Array:
        """The centroids, [rows, length]."""
        rows, length = shape
        count = self.first(length)
        high = _decode(codes.reshape(rows, count), self.high, dtype)
        if count == length:
            return high
        left = (rows, length - count)
        low = jnp.zeros(left, dtype) if others is None else _decode(others.reshape(left), self.low, dtype)
        return jnp.concatenate([high, low], axis=1)


def _room(payload: Any, dtype: Any) -> Array:
    """A power of two, one unless scales are huge, times which they are rotated back without overflow."""
    norms = (payload.parts[0] if isinstance(payload, Several) else payload).norms
    return jnp.where(max_abs(norms.reshape(-1)) > 2.0**90, 2.0**-32, 1.0).astype(dtype)


def _scales(rows: Array, values: Array, again: Array, least: float | None) -> Array:
    """S of each row (see above) of magnitudes, 0 for a row of zeros; least: of cos^2, for the unbiased scale; again:
    the values once more."""
    inner, square, energy = (jnp.sum(a, axis=1) for a in (rows * values, again * again, rows * rows))
    some = energy > 0
    safe = lambda a: jnp.where(some & (a > 0), a, jnp.ones((), a.dtype))
    scale = inner / safe(square)
    if least is not None:
        enough = inner * inner >= least * square * energy
        scale = jnp.where(enough, energy / safe(inner), scale)
    return jnp.where(some, scale, jnp.zeros((), scale.dtype))


def _kept_on_gpu(dtype: Any) -> Any:
    """The dtype of centroids that a GPU rotates back: float16 where the result is in f32."""
    return jnp.float16 if dtype == jnp.float32 else dtype


def _rotated(name: str, code: _Code, rotation: Rotation, payload: Any, times: Array) -> list[ScaledRows]:
    """S c, what was sent of a rotated vector, in its pieces, times a number."""
    first, rest = payload.parts if isinstance(payload, Several) else (payload, None)
    counts = [rows * code.first(length) for rows, length in rotation.shapes]
    left = [rows * length - count for (rows, length), count in zip(rotation.shapes, counts, strict=True)]
    check_like(name, first.words.shape, (code.high, sum(_groups(counts))))
    check_like(name, first.norms.shape, (rotation.pieces,))
    codes = _unpacked(first.words, counts)
    others = [None] * len(codes) if rest is None else _unpacked(rest.words, left)
    held = form(lambda dtype: dtype, on_gpu=_kept_on_gpu)(times.dtype)
    parts, start = [], 0
    for shape, here, more in zip(rotation.shapes, codes, others, strict=True):
        stop = start + shape[0]
        scales = finite(first.norms[start:stop]).astype(times.dtype) * times
        parts.append(ScaledRows(code.decode(here, more, shape, held), scales))
        start = stop
    return parts


def _read_thrice(rows: Array) -> tuple[Array, Array, Array]:
    """Rows for their codes, for one sum of centroids and for another: where there are barriers (`materialized`), each
    computes what it needs. Then a GPU makes all three in one loop, which reads the rows once; what two of them had in
    common it would write to memory.
    """
    if rows.size < ONE_LOOP:
        return rows, rows, rows
    first = materialized(rows)
    second = materialized(first)
    return first, second, materialized(second)


def _in_bytes(codes: Array) -> Array:
    """Codes as a GPU keeps them: to pack them takes another loop than sums of rows."""
    return materialized(codes.astype(jnp.uint8)) if codes.size >= ONE_LOOP else codes


def _compressor(spec: Spec, code: _Code, block: int, least: float | None, per_worker: bool) -> Compressor:
    def init(shared_key, like):
        del like
        return State((), Rotated(key_data(shared_key), ()))

    def compress(key, x, state):
        rotation, x = rotation_of(x.shape[0], block), clipped(x) * UNIT
        kept = form(lambda codes: codes, on_gpu=_in_bytes)
        pieces = rotation.forward_in_pieces(x, key_of(state.shared))
        codes, others, scales = [], [], []
        for rows, sigma in zip(pieces, rotation.deviations(x, pieces), strict=True):
            safe = jnp.where(sigma > 0, sigma, jnp.ones((), sigma.dtype))[:, None]
            first, second, third = (a / safe for a in _read_thrice(rows))
            high, low = code.encode(first)
            codes.append(kept(high))
            others.append(kept(low))
            each = _scales(jnp.abs(second), code.nearest(second), code.nearest(third), least)
            scales.append(materialized(each * sigma))
        payload = Quantized(bounded(end_to_end(scales, x.dtype) / UNIT, jnp.float32), _packed(codes, code.high))
        if code.fraction and code.low:
            payload = Several((payload, Quantized(jnp.zeros((0,), jnp.float32), _packed(others, code.low))))
        return payload, state.local

    def decompress(payload, shared, like):
        rotation, unit = rotation_of(like.size, block), _room(payload, wide(like.dtype))
        pieces = _rotated(spec.name, code, rotation, payload, unit)
        x = rotation.backward_of_pieces(pieces, key_of(shared), unit.dtype)
        return bounded(bounded(x / unit), like.dtype)

    def add(total, payloads, weights, shared):
        dtype = total.dtype
        rotation, unit = rotation_of(total.shape[0], block), _room(payloads, dtype)
        back = lambda pieces, shared: rotation.backward_of_pieces(pieces, key_of(shared), dtype) / unit

        def weighted(payload, weight):
            times = unit if weight is None else unit * weight.astype(dtype)
            return _rotated(spec.name, code, rotation, payload, times)

        def add_turned_back(total, message):
            payload, weight, worker = message
            return total + bounded(back(weighted(payload, weight), shared.of(worker, ())))

        def add_pieces(total, message):
            return [a + piece.values for a, piece in zip(total, weighted(*message), strict=True)]

        if per_worker:
            workers = jnp.arange(jax.tree.leaves(payloads)[0].shape[0])
            return bounded(fold(add_turned_back, total, (payloads, weights, workers)))
        pieces = [jax.ShapeDtypeStruct(shape, dtype) for shape in rotation.shapes]
        # A TPU would hold all that are decoded, and takes a message for a run of memory only where it is rows of lanes.
        added = form(fold_in_rows, on_cpu=fold_in_one_pass, on_gpu=fold_in_one_pass)
        done = [ScaledRows(rows, None) for rows in added(add_pieces, pieces, (payloads, weights))]
        # A vector of its own: each leaf that is cut out of it would be a loop of sums to compile.
        return materialized(bounded(zeros_if_shape(total, payloads) + back(done, shared)))

    return on_vectors(
        init=init,
        compress=compress,
        decompress=decompress,
        spec=spec,
        accumulate=add,
        advance=lambda shared: shared.next(()),
        for_worker=(lambda shared, worker, workers: shared.of(worker, ())) if per_worker else None,
    )


# The codes of each matrix of pieces are packed by themselves: packing is fast where 1024 divides how many there are,
# which holds for most whole blocks, and not for a vector with any rest.


def _groups(counts: list[int]) -> list[int]:
    """Columns of the words of so many codes each."""
    return [-(-count // 32) for count in counts]


def _packed(codes: list[Array], width: int) -> Array:
    return side_by_side([pack(each, width) for each in codes] or [jnp.zeros((width, 0), jnp.uint32)])


def _unpacked(words: Array, counts: list[int]) -> list[Array]:
    return [unpack(each, count) for each, count in zip(cut_apart(words, _groups(counts)), counts, strict=True)]
