"""Two shots: a mean whose bytes do not grow with the number of workers, for dense codes.

The gradients of all leaves, laid end to end, are cut into n chunks. Worker j owns chunk j:

    first shot    every worker compresses each chunk by itself and sends it to its owner (all-to-all);
    in between    the owner decompresses n messages and adds them in f32: m_j = (1/n) sum_i C(x_i)_j;
    second shot   it compresses m_j again and sends it to all (all-gather).

Each worker sends 2 (n - 1) / n times the lane bytes of its whole message, as an all-reduce does, where gathering sends
n - 1 times. The second compression loses as well. An unbiased one (omega known) leaves the mean unbiased; a biased
one is followed by error feedback of the owner: it sends C(m_j + e_j), in f32, and keeps the rest as e_j.

Reference: the two halves are those of Thakur, Rabenseifner, Gropp 2005; a memory for each as in 1-bit Adam (Tang et al.
2021), where they are the worker's and the server's error.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.algorithms.direct import direct
from jaxcomp.algorithms.error_feedback import ErrorFeedbackLocal, error_feedback
from jaxcomp.base import Algorithm, Compressor, State, accumulate, advance, like_of, overflow, wide
from jaxcomp.bits import code_bits, lane_bytes
from jaxcomp.compressors.tree import dtype_of, ravel, unravel
from jaxcomp.exchange.lanes import Axis, all_gather, all_to_all, axis_size, varying
from jaxcomp.packing import as_words

__all__ = ["Shot", "again", "chunk_like", "in_chunks", "second_shot"]

Array = jax.Array


class Shot(NamedTuple):
    """What came of two shots.

    mean: f32[n m], equal on all workers, with what filled up the last chunk.
    local, shared: of the second compression, after it.
    second_bytes: lane bytes of its message. code_bits: of both messages. sent_bytes: what leaves this worker.
    """

    mean: Array
    local: Any
    shared: Any
    second_bytes: int
    code_bits: Array
    sent_bytes: float


def chunk_like(tree: Any, chunks: int) -> jax.ShapeDtypeStruct:
    """Shape of a chunk of all leaves together: a multiple of 32 entries, for whole words, unless that is too coarse.

    Long chunks are multiples of 1024, which the usual blocks divide: decoding takes a quarter longer where a last block
    is shorter than the others. This adds less than one percent to the bytes.
    """
    likes = jax.tree.leaves(like_of(tree))
    size = sum(like.size for like in likes)
    entries = -(-size // chunks)
    unit = 1024 if entries >= 2**17 else 32 if entries >= 32 else 1
    return jax.ShapeDtypeStruct((-(-entries // unit) * unit,), dtype_of(likes))


def in_chunks(compressor: Compressor, chunks: int) -> Compressor:
    """Compresses all leaves of a tree as one vector, cut into equal chunks, each by itself.

    The last chunk is filled up with zeros. All arrays of the payload and of the local state have a leading axis of
    chunks.

    Args:
        compressor: of one array.
        chunks: how many.

    Raises:
        ValueError: the compressor acts on trees, or treats workers differently.
    """
    spec = compressor.spec
    if spec.lifted:
        raise ValueError(
            f'via="two_shot" cuts all leaves together into chunks: it needs a compressor of one array; got {spec.name}'
        )
    if compressor.lengths is not None or compressor.for_worker is not None:
        raise ValueError(f'via="two_shot" needs one compressor for all workers; {spec.name} has a plan for each')

    def rows(tree):
        like = chunk_like(tree, chunks)
        vector = ravel(jax.tree.leaves(tree), like.dtype)
        return jnp.pad(vector, (0, chunks * like.size - vector.size)).reshape(chunks, like.size)

    def init(shared_key, like):
        state = compressor.init(shared_key, chunk_like(like, chunks))
        return State(jax.tree.map(lambda x: jnp.stack([x] * chunks), state.local), state.shared)

    def compress(key, tree, state):
        # One after the other: under vmap each `lax.cond` of a compressor would take both ways, sixfold the time.
        kinds: list[Any] = []

        # As words: XLA for CPU widens a whole array of narrow floats to write a part of it in a loop, and back.
        def one(chunk):
            payload, local = compressor.compress(chunk[0], chunk[1], State(chunk[2], state.shared))
            kinds[:] = [jax.tree.map(lambda x: x.dtype, payload)]
            return jax.tree.map(as_words, payload), local

        payload, local = lax.map(one, (jax.random.split(key, chunks), rows(tree), state.local))
        return jax.tree.map(lax.bitcast_convert_type, payload, kinds[0]), local

    def decompress(payload, shared, like):
        chunk = chunk_like(like, chunks)
        vector = jax.vmap(lambda part: compressor.decompress(part, shared, chunk))(payload).reshape(-1)
        likes, structure = jax.tree.flatten(like_of(like))
        return jax.tree.unflatten(structure, unravel(vector, likes))

    def overflow_(local):
        return jnp.sum(jax.vmap(lambda one: overflow(compressor, one))(local), dtype=jnp.int32)

    def of_chunks(bound):
        def of(d):
            size = sum(d) if isinstance(d, tuple) else d
            return bound(chunk_like(jax.ShapeDtypeStruct((size,), jnp.float32), chunks).size)

        return None if bound is None else of

    return Compressor(
        init,
        compress,
        decompress,
        spec._replace(
            name=f"{spec.name} in {chunks} chunks",
            omega=of_chunks(spec.omega),
            alpha=of_chunks(spec.alpha),
            lifted=True,
            norm=None,
        ),
        advance=None if compressor.advance is None else lambda shared: advance(compressor, shared),
        overflow=None if compressor.overflow is None else overflow_,
    )


def again(compressor: Compressor) -> Algorithm:
    """What the owner of a chunk does with its mean: sends it, with a memory if the compressor is biased."""
    return direct(compressor) if compressor.spec.omega is not None else error_feedback(compressor)


def second_shot(
    payload: Any,
    weights: Array | None,
    axis: Axis,
    compressor: Compressor,
    shared: Any,
    second: Algorithm,
    state: State,
    key: Array,
    chunk: jax.ShapeDtypeStruct,
    outer: tuple[str, ...] = (),
) -> Shot:
    """Everything after the first compression.

    Args:
        payload: of `in_chunks`, a row for each owner.
        weights: [n], or None for equal ones.
        axis: of the workers.
        compressor: of one array.
        shared: its shared state in the first shot.
        second: `again(compressor)`.
        state: its state.
        key: private, for the second compression.
        chunk: `chunk_like` of the gradients.
        outer: other mesh axes over which they differ.
    """
    workers = axis_size(axis)
    rows = all_to_all(payload, axis)
    zeros = varying(varying(jnp.zeros(chunk.shape, wide(chunk.dtype)), axis), outer or None)
    mean = accumulate(compressor, zeros, rows, weights, shared)
    mean = mean / workers if weights is None else mean
    like = like_of(mean)
    remembers = isinstance(state.local, ErrorFeedbackLocal)
    reply, local = second.send(key, mean if remembers else mean.astype(chunk.dtype), state)
    replies = all_gather(reply, axis)
    whole = jax.vmap(lambda part: compressor.decompress(part, state.shared.compressor, like))(replies)
    _, after = second.receive(mean, state.shared)
    lanes = [lane_bytes(payload), lane_bytes(reply)]
    bits = jnp.sum(jax.vmap(lambda part: jnp.asarray(code_bits(part)).astype(jnp.float32))(payload))
    return Shot(
        whole.reshape(-1),
        local,
        after,
        lanes[1],
        bits + jnp.asarray(code_bits(reply)).astype(jnp.float32),
        (workers - 1) / workers * lanes[0] + (workers - 1) * lanes[1],
    )
