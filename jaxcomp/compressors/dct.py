"""The cosine transform of small blocks before compression: gradients of matrices gather in few coefficients."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp.arrays import bounded, is_array, like_of, wide
from jaxcomp.backend import rows_times_square, zeros_if_shape
from jaxcomp.base import Compressor, Spec, accumulate, check_compressor, lengths
from jaxcomp.checks import is_integer
from jaxcomp.compressors.chunked import chunked
from jaxcomp.compressors.rotate import clipped
from jaxcomp.factories import factory
from jaxcomp.groups import Layout
from jaxcomp.norms import room

__all__ = ["dct", "dct_of_blocks"]

Array = jax.Array


@factory
def dct(compressor: Compressor, chunk: int = 64) -> Compressor:
    """Compresses the cosine transform of blocks: vectors in blocks of `chunk`, the last two axes in squares of it.

    C(x) = T' C'(T x),   T the orthonormal DCT-II of each block along its one or two axes,   C' the compressor.

    An axis of n entries is cut into ceil(n / chunk) equal pieces, the last of which is filled up with zeros, so that
    sides are at most `chunk`, and no more than one entry in each piece is filled up. Other axes are left as they are.
    C' sees the coefficients block after block as one vector of d' <= d (1 + 1 / chunk)^2 entries, and omega and
    alpha are its at d'. Non-finite entries count as zero, and magnitudes beyond 2^-26 of the largest number saturate,
    so that no sum overflows and memories keep the rest. Sums are transformed back once.

    All large leaves of a tree come as one vector, which loses their axes; `demo` takes leaf by leaf.

    Args:
        compressor: of one array.
        chunk: 1 to 1024.

    Returns:
        Compressor with the payload of `compressor`.

    Raises:
        ValueError: the compressor acts on trees, or chunk is out of range.

    Reference: Peng, Quesnelle, Kingma 2024 (DeMo). There sides are the largest divisors that are not above 64, which
    is 1 for primes, and arrays of more than two axes are not handled.

    >>> import jaxcomp as jc
    >>> x = jnp.cos(jnp.pi * (jnp.arange(8.0) + 0.5) * 3 / 8)
    >>> x_hat, payload = jc.roundtrip(jc.dct(jc.top_k(k=1), 8), x, key=jax.random.key(0))
    >>> print(payload.indices, bool(jnp.allclose(x_hat, x, atol=1e-6)))
    [3] True
    """
    check_compressor("dct", compressor)
    if compressor.spec.lifted:
        raise ValueError(f"dct: {compressor.spec.name} acts on trees; transform the array, and lift the result")
    return _transformed(f"dct({compressor.spec.name}, {chunk})", lambda _: compressor, chunk)


def dct_of_blocks(compressor: Compressor, chunk: int = 64, *, by_senders: bool = False) -> Compressor:
    """`dct` that selects in each block by itself, whatever its size (`chunked`).

    by_senders: a mean of messages is, for each coefficient, over those who sent it (`of_senders`). Such a compressor
    reads the messages of others; what is left of a message is not its to say.
    """
    name = f"dct_of_blocks({compressor.spec.name}, {chunk}{', by_senders' if by_senders else ''})"
    inner = lambda size: of_senders(chunked(compressor, size)) if by_senders else chunked(compressor, size)
    made = _transformed(name, inner, chunk)
    least = _of_blocks(compressor.spec.alpha, chunk)
    return made._replace(spec=made.spec._replace(alpha=least, layout=Layout("shape")))


def of_senders(compressor: Compressor) -> Compressor:
    """The compressor, which divides each entry of a sum by the weights of those who sent it, not by those of all.

    sum_j w_j  sum_j w_j q_j / sum_j w_j [q_j != 0]: a mean over all where all weights add up to one. A second sum over
    the same indices counts the senders. compressor: selects, and its payload has the field `values`.
    """

    def add(total, payloads, weights, shared):
        values = payloads.values
        marks = payloads._replace(values=(values != 0).astype(values.dtype))
        found = accumulate(compressor, total, payloads, weights, shared)
        by = accumulate(compressor, total, marks, weights, shared)
        every = jnp.asarray(values.shape[0] if weights is None else jnp.sum(weights), found.dtype)
        return found * (every / jnp.where(by > 0, by, every))

    return compressor._replace(accumulate=add, entries=None)


class ChunkShape(NamedTuple):
    """shape: with one leading axis;  pieces, sides: of the axes behind it, one or two."""

    shape: tuple[int, ...]
    pieces: tuple[int, ...]
    sides: tuple[int, ...]

    @property
    def block(self) -> int:
        """Entries of a block."""
        return math.prod(self.sides)

    @property
    def size(self) -> int:
        """Coefficients."""
        return self.shape[0] * math.prod(self.pieces) * self.block


def cut_of(shape: tuple[int, ...], chunk: int) -> ChunkShape:
    """How an array is cut into blocks.

    >>> cut_of((3, 65, 10), 64)
    ChunkShape(shape=(3, 65, 10), pieces=(2, 1), sides=(33, 10))
    """
    axes = shape[-2:] if len(shape) > 1 else (math.prod(shape),)
    pieces = tuple(max(1, -(-n // chunk)) for n in axes)
    sides = tuple(-(-n // p) for n, p in zip(axes, pieces, strict=True))
    return ChunkShape((math.prod(shape[:-2]) if len(shape) > 1 else 1, *axes), pieces, sides)


def cosines(size: int) -> np.ndarray:
    """The orthonormal DCT-II as a matrix: float64[size, size], row k the k-th wave."""
    wave = np.cos(np.pi * (np.arange(size) + 0.5) * np.arange(size)[:, None] / max(size, 1))
    return wave * np.sqrt(np.where(np.arange(size)[:, None] == 0, 1, 2) / max(size, 1))


def _blocks(x: Array, cut: ChunkShape) -> Array:
    """[lead, pieces and sides in turn], filled up with zeros."""
    full = [p * s - n for n, p, s in zip(cut.shape[1:], cut.pieces, cut.sides, strict=True)]
    x = jnp.pad(x.reshape(cut.shape), [(0, 0), *((0, more) for more in full)])
    return x.reshape(cut.shape[0], *(n for pair in zip(cut.pieces, cut.sides, strict=True) for n in pair))


def forward(x: Array, cut: ChunkShape) -> Array:
    """Coefficients, block after block, [size], of entries as `clipped` leaves them: no sum of 2^20 of these overflows.

    So they are what the products are, and no pass over them cuts what overflowed.
    """
    waves = [jnp.asarray(cosines(s), x.dtype) for s in cut.sides]
    if len(waves) == 1:
        return rows_times_square(_blocks(x, cut).reshape(-1), waves[0].T)
    return jnp.einsum("apiqj,ki,lj->apqkl", _blocks(x, cut), *waves, precision="highest").reshape(-1)


def backward(coefficients: Array, cut: ChunkShape, shape: tuple[int, ...]) -> Array:
    """Inverse of `forward` for finite coefficients, saturated: in units of a power of two until all sums are made, so
    that none overflows."""
    blocks = coefficients.reshape(cut.shape[0], *cut.pieces, *cut.sides)
    units = [room(2 * math.sqrt(max(s, 1))) for s in cut.sides]
    waves = [jnp.asarray(cosines(s) * unit, blocks.dtype) for s, unit in zip(cut.sides, units, strict=True)]
    if len(waves) == 1:
        x = rows_times_square(coefficients, waves[0])
    else:
        x = jnp.einsum("apqkl,ki,lj->apiqj", blocks, *waves, precision="highest")
    x = bounded(x / math.prod(units))
    x = x.reshape(cut.shape[0], *(p * s for p, s in zip(cut.pieces, cut.sides, strict=True)))
    return x[tuple(slice(n) for n in cut.shape)].reshape(shape)


def _transformed(name: str, inner_of: Callable[[int], Compressor], chunk: int) -> Compressor:
    if not (is_integer(chunk) and chunk <= 1024):
        raise ValueError(f"dct: chunk must be an integer in 1 .. 1024; got {chunk!r}")
    sample = inner_of(chunk)
    spec = sample.spec

    def parts(like: Any) -> tuple[ChunkShape, Compressor, Any]:
        """How it is cut, what compresses the coefficients, and these."""
        if not is_array(like):
            raise ValueError(f"{name} acts on one array; got a {type(like).__name__}. Wrap it: per_leaf(...)")
        (like,) = jax.tree.leaves(like_of(like))
        cut = cut_of(like.shape, chunk)
        return cut, inner_of(max(cut.block, 1)), jax.ShapeDtypeStruct((cut.size,), wide(like.dtype))

    def init(shared_key, like):
        _, inner, coefficients = parts(like)
        return inner.init(shared_key, coefficients)

    def compress(key, x, state):
        cut, inner, _ = parts(x)
        return inner.compress(key, forward(clipped(x), cut), state)

    def decompress(payload, shared, like):
        cut, inner, coefficients = parts(like)
        found = inner.decompress(payload, shared, coefficients)
        return bounded(backward(found, cut, like.shape), like.dtype)

    def add(total, payloads, weights, shared):
        cut, inner, _ = parts(total)
        zeros = jax.ShapeDtypeStruct((cut.size,), total.dtype)
        found = bounded(accumulate(inner, zeros, payloads, weights, shared))
        return bounded(zeros_if_shape(total, payloads) + backward(found, cut, total.shape))

    def of_padded(bound, worse):
        """The worse of a vector of d entries, and of the longest that an array of as many can become."""
        longest = lambda d: math.floor(d * (1 + 1 / chunk) ** 2) if d > chunk else d
        return None if bound is None else lambda d: worse(bound(cut_of((d,), chunk).size), bound(longest(d)))

    return sample._replace(
        init=init,
        compress=compress,
        decompress=decompress,
        accumulate=add,
        entries=None,
        lengths=None if sample.lengths is None else lambda like: lengths(sample, parts(like)[2]),
        spec=Spec(
            name,
            omega=of_padded(spec.omega, max),
            alpha=of_padded(spec.alpha, min),
            linear=spec.linear,
            weights=spec.weights,
            remedy=spec.remedy,
        ),
    )


def _of_blocks(alpha: Any, chunk: int) -> Any:
    """The least alpha of a block of an array of d entries, of whatever size."""
    if alpha is None:
        return None
    return lambda d: min((alpha(size) for size in range(1, min(d, chunk**2) + 1)), default=1.0)
