"""Compress in another basis: each block is rotated at random before, and back afterwards."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcomp.arrays import bounded, finite, key_data, wide, wrap_key
from jaxcomp.backend import fold, materialized, zeros_if_shape
from jaxcomp.base import Compressor, State, accumulate, advance, check_compressor, for_worker, on_vectors
from jaxcomp.checks import is_integer
from jaxcomp.compressors.hadamard import rotation_of
from jaxcomp.factories import factory
from jaxcomp.groups import DEFAULT, Layout

__all__ = ["Rotated", "check_block", "clipped", "filled_up", "key_of", "rotate"]

Array = jax.Array
BLOCK = 4096


class Rotated(NamedTuple):
    """seed: key words of the signs;  inner: of the compressor;  worker: i32[] once one worker is picked."""

    seed: Array
    inner: Any
    worker: Array | tuple[()] = ()

    def next(self, inner: Any) -> "Rotated":
        """The rotation of the next round."""
        return self._replace(seed=key_data(jax.random.fold_in(wrap_key(self.seed), 1)), inner=inner)

    def of(self, worker: Array | int, inner: Any) -> "Rotated":
        """The rotation of one worker; picking twice is picking once."""
        picked = jnp.asarray(worker, jnp.int32) if isinstance(self.worker, tuple) else self.worker
        return self._replace(worker=picked, inner=inner)


def key_of(shared: Rotated) -> Array:
    """The key of the signs: of one worker, where one was picked."""
    key = wrap_key(shared.seed)
    return key if isinstance(shared.worker, tuple) else jax.random.fold_in(key, shared.worker)


def check_block(name: str, block: int) -> int:
    """ValueError unless it is a power of two from 2 to 2^24."""
    if not is_integer(block, 2) or block & (block - 1) or block > 2**24:
        raise ValueError(f"{name}: block must be a power of two, 2 .. 2^24; got {block!r}")
    return int(block)


def filled_up(block: int, inner: Layout = DEFAULT) -> Layout:
    """Long vectors of trees are filled up to whole blocks, or to 1024 entries where blocks are longer than usual: a
    rest takes a program of its own. Not where what compresses them is made for one length.
    """
    return Layout(fixed=inner.fixed, multiple=1 if inner.fixed else max(block, 1024) if block <= BLOCK else 1024)


def clipped(x: Array) -> Array:
    """Finite, wide, and so small that no sum over a block overflows."""
    x = bounded(finite(x.astype(wide(x.dtype))))
    most = jnp.asarray(float(jnp.finfo(x.dtype).max) / 2**26, x.dtype)
    return jnp.clip(x, -most, most)


@factory
def rotate(compressor: Compressor, *, block: int = BLOCK, per_worker: bool = False) -> Compressor:
    """Compresses R x instead of x, where R rotates each block at random.

    C'(x) = R^T C(R x),   R = H D / sqrt(B) in blocks of B entries (Walsh-Hadamard, random signs).  omega and alpha are
    those of C, since rotating keeps the norm. Afterwards all entries of a block are of about the same size, nearly
    normal, whatever x was: few levels serve them well, and a single large entry harms no others.

    The signs come from the shared key, are new in each round, and cost no bits. Where d is no multiple of B, the last
    block overlaps the one before it (`jaxcomp.compressors.hadamard`): nothing is padded. (Long vectors of trees are
    filled up to whole blocks of up to 4096.) Magnitudes beyond 2^-26 of the largest number saturate, and memories keep
    the rest.

    Args:
        compressor: of one array.
        block: B, a power of two from 2 to 2^24; at most the largest power of two in d is taken.
        per_worker: each worker rotates by signs of its own, which the others know as well. Errors of workers whose
            gradients resemble each other then average out, and the mean takes a rotation for each message; without,
            messages are added before they are rotated back, once.

    Returns:
        Compressor with the payload of C.

    Raises:
        ValueError: block is no power of two, or the compressor acts on trees or has bounds in another norm.

    Reference: Suresh, Yu, Kumar, McMahan 2017 (Distributed mean estimation with limited communication), section 3.

    >>> import jaxcomp as jc
    >>> compressor = jc.rotate(jc.block_scaled("int4"), block=1024)
    >>> x = jnp.zeros(2048).at[5].set(8.0)
    >>> x_hat, _ = jc.roundtrip(compressor, x, key=jax.random.key(0))
    >>> bool(jnp.linalg.norm(x_hat - x) < 0.1 * jnp.linalg.norm(x))
    True
    """
    spec = check_compressor("rotate", compressor)
    block = check_block("rotate", block)
    if spec.lifted is not None:
        raise ValueError(f"rotate: {spec.name} acts on trees; rotate the compressor of one array and lift the result")
    if spec.norm is not None:
        raise ValueError(f"rotate: the bounds of {spec.name} hold in another norm, which rotating does not keep")

    def init(shared_key, like):
        mine, inner_key = jax.random.split(shared_key)
        inner = compressor.init(inner_key, _wide(like))
        return State(inner.local, Rotated(key_data(mine), inner.shared))

    def compress(key, x, state):
        rotation, x = rotation_of(x.shape[0], block), clipped(x)
        y = rotation.forward(x, key_of(state.shared))
        return compressor.compress(key, y, State(state.local, state.shared.inner))

    def decompress(payload, shared, like):
        y = compressor.decompress(payload, shared.inner, _wide(like))
        return bounded(rotation_of(like.size, block).backward(y, key_of(shared)), like.dtype)

    def add(total, payloads, weights, shared):
        rotation, total = rotation_of(total.shape[0], block), zeros_if_shape(total, payloads)
        if not per_worker:
            y = accumulate(compressor, _wide(total), payloads, weights, shared.inner)
            # A vector of its own: each leaf that is cut out of it would be a loop of sums to compile.
            return materialized(bounded(total + rotation.backward(y, key_of(shared)).astype(total.dtype)))
        workers = jax.tree.leaves(payloads)[0].shape[0]

        def add_one(total, message):
            payload, weight, worker = message
            mine = pick(shared, worker, workers)
            one, weight = jax.tree.map(lambda a: a[None], (payload, weight))
            y = accumulate(compressor, _wide(total), one, weight, mine.inner)
            return bounded(total + rotation.backward(y, key_of(mine)).astype(total.dtype))

        return fold(add_one, total, (payloads, weights, jnp.arange(workers)))

    def pick(shared, worker, workers):
        inner = for_worker(compressor, shared.inner, worker, workers)
        return shared.of(worker, inner) if per_worker else shared._replace(inner=inner)

    plans = per_worker or compressor.for_worker is not None
    name = f"rotate({spec.name}" + (f", block={block}" if block != BLOCK else "")
    return on_vectors(
        init=init,
        compress=compress,
        decompress=decompress,
        spec=spec._replace(
            name=name + (", per_worker)" if per_worker else ")"),
            selects=False,
            entrywise=False,
            layout=filled_up(block, spec.layout or DEFAULT),
        ),
        accumulate=add,
        advance=lambda shared: shared.next(advance(compressor, shared.inner)),
        lengths=compressor.lengths,
        for_worker=pick if plans else None,
        overflow=compressor.overflow,
    )


def _wide(like: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((like.size,), wide(like.dtype))
