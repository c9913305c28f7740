"""Selection chunk by chunk: places within a chunk need few bits, and no part of the vector is left out for long."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.arrays import is_array
from jaxcomp.backend import flattened, over_rows, running_in_rows
from jaxcomp.base import Compressor, Spec, State, advance, check_compressor, left, left_of, on_vectors
from jaxcomp.checks import is_integer
from jaxcomp.factories import factory
from jaxcomp.groups import Layout
from jaxcomp.packing import pack, unpack, width_for
from jaxcomp.payloads import Chunks, Sparse

__all__ = ["chunked"]

Array = jax.Array
FILLED = 2**13  # entries of a chunk, up to which vectors of trees are filled up to whole ones


@factory
def chunked(compressor: Compressor, size: int) -> Compressor:
    """Selects in each chunk of `size` consecutive entries by itself.

    C(x) = (C_1(x_1), C_2(x_2), ...),   x_i = x[(i - 1) size : i size].

    alpha is that of the compressor for `size` entries. A vector with fewer is one chunk, and the last chunk is filled
    up with zeros. Each chunk has the same number of places in the message, so it can travel in values and, for each of
    them, ceil(log2 size) bits: 12 for chunks of 4096. The best code of the wire needs about log2(size / k) + 1.5.
    A chunk without anything to send names its last entry, with the value zero.

    What was selected can be compressed further: `compose(chunked(top_k(k=64), 4096), cast("bfloat16"))`.

    Args:
        compressor: of one array; selects entries, and sends them with their indices (`top_k`, `sidco`, ...).
        size: entries of a chunk, at most 2^24.

    Returns:
        Compressor with payload `Chunks`.

    Raises:
        ValueError: the compressor does not select, or has a plan for each worker; size is not an integer in 1 .. 2^24.

    Reference: Sarfi, Thérien, Lidin, Belilovsky 2025 (SparseLoCo), k of 64 in chunks of 4096; Peng, Quesnelle, Kingma
    2024 (DeMo) selects in chunks as well.

    >>> import jaxcomp as jc
    >>> x_hat, payload = jc.roundtrip(jc.chunked(jc.top_k(k=1), 3), jnp.array([1.0, 3.0, 2.0, 0.5, -9.0]),
    ...                               key=jax.random.key(0))
    >>> print(x_hat, payload.values)
    [ 0.  3.  0.  0. -9.] [ 3. -9.]
    """
    spec = check_compressor("chunked", compressor)
    if not (is_integer(size) and size <= 2**24):
        raise ValueError(f"chunked: size must be an integer in 1 .. 2^24; got {size!r}")
    if not spec.selects or spec.lifted or compressor.for_worker is not None or compressor.lengths is not None:
        raise ValueError(
            f"chunked: {spec.name} does not select entries of one array by the same rule on all workers. Take top_k or "
            "another sparsifier; compress the values that it selects with compose(chunked(...), c)"
        )
    name = f"chunked({spec.name}, {size})"

    def cut(d):
        """Number of chunks, and of the entries of each."""
        length = max(min(size, d), 1)
        return -(-d // length), length

    def init(shared_key, like):
        rows, length = cut(like.size)
        row = jax.ShapeDtypeStruct((length,), like.dtype)
        return State(*jax.vmap(lambda key: compressor.init(key, row))(jax.random.split(shared_key, rows)))

    def compress(key, x, state):
        rows, length = cut(x.shape[0])
        chunks = jnp.pad(x, (0, rows * length - x.shape[0])).reshape(rows, length)
        sent, local = over_rows(compressor.compress, jax.random.split(key, rows), chunks, state, length=length)
        if not isinstance(sent, Sparse) or not is_array(sent.values) or not is_array(sent.indices):
            raise ValueError(f"chunked: {spec.name} sends no values with 32-bit indices; got {type(sent).__name__}")
        indices, each = flattened(sent.indices), sent.indices.shape[1]
        return Chunks(flattened(sent.values), pack(_gaps(indices, each, length), width_for(length))), local

    def entries(payload, shared, like):
        """Ascending indices and values of one message. What fills a chunk up adds zero to the last entry of it."""
        rows, length = cut(like.size)
        each = payload.values.size // max(rows, 1)
        gaps = unpack(payload.words, payload.values.size)
        inside = running_in_rows(jnp.add, gaps.astype(jnp.int32) + 1, each) - 1
        filled = (inside >= 0) & (inside < length)
        start = length * lax.div(lax.iota(jnp.int32, inside.size), jnp.int32(max(each, 1)))
        index = jnp.minimum(start + jnp.where(filled, inside, length - 1), like.size)
        return index, jnp.where(filled, payload.values, jnp.zeros((), payload.values.dtype))

    def decompress(payload, shared, like):
        index, values = entries(payload, shared, like)
        zeros, values = jnp.zeros(like.shape, like.dtype), values.astype(like.dtype)
        return zeros.at[index].add(values, mode="drop", indices_are_sorted=True)

    alpha = spec.alpha
    return on_vectors(
        init=init,
        compress=compress,
        decompress=decompress,
        entries=entries,
        advance=None if compressor.advance is None else jax.vmap(lambda shared: advance(compressor, shared)),
        overflow=None
        if compressor.overflow is None
        else lambda local: left_of(jax.vmap(lambda row: left(compressor, row))(local)),
        spec=Spec(
            name,
            omega=None,
            alpha=None if alpha is None else lambda d: alpha(cut(d)[1]),
            linear=False,
            selects=True,
            layout=Layout(multiple=int(size) if size <= FILLED else 1),
        ),
        by_row_from=2**31,
    )


def _gaps(indices: Array, each: int, length: int) -> Array:
    """Gaps of indices [rows each] that ascend in each row, padded with `length`: u32[rows each], below `length`.

    Padding comes out as indices of at least `length`, but for the first of a row, which is length - 1.
    """
    first = lax.rem(lax.iota(jnp.int32, indices.size), jnp.int32(max(each, 1))) == 0
    before = jnp.where(first, -1, jnp.pad(indices[:-1], (1, 0))) if indices.size else indices
    return jnp.clip(indices - before - 1, 0, length - 1).astype(jnp.uint32)
