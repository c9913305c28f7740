"""via="two_shot": a mean whose bytes do not grow with the number of workers, for dense codes.

The gradients of all leaves, laid end to end, are cut into n chunks, the rows of one stack. Worker j owns chunk j:

    first shot    every worker compresses each chunk by itself and sends it to its owner (all-to-all);
    in between    the owner decompresses n messages and adds them in f32: m_j = sum_i w_i C(x_i)_j;
    second shot   it compresses m_j again and sends it to all (all-gather).

Each worker sends 2 (n - 1) / n times the lane bytes of its whole message, as an all-reduce does, where gathering sends
n - 1 times. The second compression loses as well. An unbiased one (omega known) leaves the mean unbiased; a biased
one is followed by error feedback of the owner: it sends C(m_j + e_j), in f32, and keeps the rest as e_j.

Reference: the two halves are those of Thakur, Rabenseifner, Gropp 2005; a memory for each as in 1-bit Adam (Tang et al.
2021), where they are the worker's and the server's error.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.arrays import bounded, wide_like
from jaxcomp.base import Compressor, State, accumulate, advance, has_role, residual
from jaxcomp.compressors.rows import Rows
from jaxcomp.exchange.axes import Axis, axis_index, axis_names, on_equal_types, varying, varying_axes
from jaxcomp.exchange.collectives import all_to_all, gathered
from jaxcomp.exchange.links import Cost, Levels, Link, cost_of
from jaxcomp.exchange.routes.route import Arrived, Carried, Parcel, Route, Way
from jaxcomp.groups import Layout
from jaxcomp.payloads import cheap_bits, lane_bytes

__all__ = ["TWO_SHOT", "Second", "first_shot", "second_shot"]

Array = jax.Array


class Second(NamedTuple):
    """Memory of the owner of a chunk of its compression of the mean.

    memory: [c], what was not sent yet; () for an unbiased compressor.
    compressor: local state of the compressor.
    """

    memory: Any
    compressor: Any


# ------------------------------------------------------------------------------------------------
# The two halves


def first_shot(payload: Any, compressor: Compressor, shared: Any, row: Any, way: Way) -> tuple[Array, float]:
    """The sum of what the workers sent to the owner of a chunk, each with its weight, or with `Way.share`: f32[c], f64
    for f64 messages. And the bytes that a device sends for it.

    Args:
        payload: of a stack [n, c], with a leading axis of n.
        compressor: of a stack (`rows`).
        shared: its shared state.
        row: shape and dtype of a chunk.
        way: see `Way`.
    """
    (rows, sent_bytes), like = all_to_all(payload, way.axis, way.replicas), wide_like(row)
    add = lambda *args: accumulate(_of_row(compressor), like, *args)
    equal = jnp.full((way.workers,), way.share, like.dtype)
    weights = equal if way.weights is None else way.weights
    total = on_equal_types(add, rows, weights, _row(shared, way.axis))
    return varying(total, (*axis_names(way.axis), *way.outer)), sent_bytes


def second_shot(
    key: Array,
    chunk: Array,
    compressor: Compressor,
    state: State,
    like: Any,
    way: Way,
) -> tuple[Any, Any, Array, float]:
    """Compresses the owner's chunk and brings it to all workers.

    Args:
        key: private.
        chunk: [c].
        compressor: of a stack (`rows`).
        state: local of one chunk, shared of all.
        like: shapes of the mean, [n, c].
        way: see `Way`.

    Returns:
        The payload of the chunk, the compressor's local state, the chunks of all workers as they are decoded, [n, c],
        equal on all, and the bytes that a device sends.
    """
    payload, local = _of_row(compressor).compress(key, chunk, State(state.local, _row(state.shared, way.axis)))
    payload = varying(payload, varying_axes((chunk, payload)))
    read = lambda payloads, shared: compressor.decompress(payloads, shared, like)
    payloads, sent_bytes = gathered(payload, way.axis, way.replicas)
    return payload, local, on_equal_types(read, payloads, state.shared), sent_bytes


def _of_row(compressor: Compressor) -> Compressor:
    """The compressor of one row of a stack."""
    return compressor.spec.rows  # pyright: ignore[reportReturnType]


def _row(shared: Rows, axis: Axis) -> Any:
    """This worker's row of the shared state of a stack."""
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, axis_index(axis), keepdims=False), shared.rows)


# ------------------------------------------------------------------------------------------------
# The route


def refuses(compressor: Compressor, roles: Mapping[str, Any]) -> str | None:
    """Why messages cannot be cut into chunks and compressed once more; None where they can."""
    spec = compressor.spec
    if has_role(roles, "shift"):
        return (
            'via="two_shot" compresses the mean once more, and this algorithm keeps a shift in step with the mean as '
            'it was sent. Use direct(...) or error_feedback(...), or via="gather"'
        )
    if spec.lifted is not None or (spec.layout is not None and spec.layout.unit == "shape"):
        return (
            'via="two_shot" cuts all leaves together into chunks: it needs a compressor of one array; '
            f'got {spec.name}. Leave its layout out, or use via="gather"'
        )
    if compressor.lengths is not None or compressor.for_worker is not None:
        return (
            f'via="two_shot" needs one compressor for all workers; {spec.name} has a plan for each. '
            'Use via="auto" or via="gather"'
        )
    if spec.omega is None and spec.alpha is None and not spec.vote:
        cure = spec.remedy or 'Use via="gather"'
        return f'via="two_shot" needs a compressor with a known error bound; {spec.name} has none. {cure}'
    return None


def layout(given: Layout, workers: int) -> Layout:
    """All leaves in as many equal chunks as there are workers."""
    del given
    return Layout("chunks", chunks=workers)


def _is_biased(compressor: Compressor) -> bool:
    return compressor.spec.omega is None and not compressor.spec.vote


def _sent_like(compressor: Compressor, like: Any) -> Any:
    """Shape and dtype of what the owners compress: with a memory that is wide, as the memory is."""
    return wide_like(like) if _is_biased(compressor) else like


def init(shared_key: Array, compressors: tuple[Compressor, ...], like: tuple[Any, ...]) -> State:
    """The memory and the compressor state of the owner of a chunk."""
    (compressor,), (given,) = compressors, like
    sent = _sent_like(compressor, given)
    state = compressor.init(shared_key, sent)
    memory = jnp.zeros(sent.shape[1:], sent.dtype) if _is_biased(compressor) else ()
    return State(Second(memory, jax.tree.map(lambda a: a[0], state.local.rows)), state.shared)


def _carry(parcels: Sequence[Parcel], way: Way, key: Array, state: State) -> Carried:
    (out,) = parcels
    way = way if way.workers > 1 else way._replace(replicas=())
    compressor, axis, like = out.compressor, way.axis, _sent_like(out.compressor, out.like)
    row = jax.ShapeDtypeStruct(out.like.shape[1:], out.like.dtype)
    axes = (*axis_names(axis), *way.outer)
    memory, local = varying(state.local, axes)
    total, first_bytes = first_shot(out.payload, compressor, out.shared, row, way)
    chunk = jnp.nan_to_num(way.mean_of(total))
    if _is_biased(compressor):
        chunk = bounded(chunk + memory)
    second, local, mean, second_bytes = second_shot(
        key, bounded(chunk, like.dtype), compressor, State(local, state.shared), wide_like(like), way
    )
    if _is_biased(compressor):
        memory = residual(_of_row(compressor), chunk, second, _row(state.shared, axis))
    sent_bytes = first_bytes + second_bytes
    after = State(Second(memory, local), advance(compressor, state.shared))
    return Carried((Arrived(mean=mean),), "two_shot", sent_bytes, after, lane_bytes(second), cheap_bits(second))


def _cost(lengths: tuple[int, ...], capacity: int, link: Link | Levels) -> Cost:
    n = len(lengths)
    first, second = cost_of("all_to_all", 4 * capacity, n, link), cost_of("all_gather", 4 * capacity / n, n, link)
    return Cost(first.seconds + second.seconds, first.sent_bytes + second.sent_bytes)


TWO_SHOT = Route("two_shot", _carry, refuses, layout, init, _cost)
