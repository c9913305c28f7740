"""Messages of unequal length as words: what concat, ring and ragged share.

They bring every worker's message to all workers without its padding and put the padding back, so that all of them, and
the gathering of padded messages, give the same rows and bitwise the same mean. What travels is uint32 words: of each
array the first words, as many as the sender's number of entries needs.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.exchange.axes import Axis, axis_index, proven_equal, varying, varying_axes
from jaxcomp.exchange.collectives import gathered
from jaxcomp.exchange.links import Cost, Levels, Link
from jaxcomp.exchange.routes.route import Parcel, Route, Way, gathering_route, lengths_of
from jaxcomp.payloads import from_words, to_words
from jaxcomp.payloads.unequal import UnequalMessage, message_of

__all__ = ["from_buffers", "own_words", "pieces_of", "unequal_route"]

Array = jax.Array


def unequal_route(
    name: str,
    exchange: Callable[[UnequalMessage, Way], Any],
    cost: Callable[[tuple[int, ...], int, Link | Levels], Cost],
) -> Route:
    """The route whose `exchange` brings the words of all workers without padding, put back into payloads stacked on a
    leading axis of n, at this cost (see `Route.cost`)."""

    def gather(parcels: Sequence[Parcel], way: Way) -> tuple[tuple[Any, ...], float]:
        payloads = tuple(parcel.payload for parcel in parcels)
        message = message_of(payloads, lengths_of(parcels), way.workers)
        if max(message.lengths) == 0:
            return gathered(payloads, way.axis)
        return exchange(message, way), cost(message.lengths, message.capacity, way.link).sent_bytes

    return gathering_route(name, gather, cost, buckets=False)


# ------------------------------------------------------------------------------------------------
# Arrays as words, and back


def own_words(message: UnequalMessage, axis: Axis, room: int) -> Array:
    """This worker's words, its arrays one after the other, then zeros: u32[room]."""
    number = axis_index(axis)
    arrays = [to_words(part.array) for part in message.parts]
    buffer = varying(jnp.zeros((message.capacity,), jnp.uint32), varying_axes(arrays))
    start = jnp.zeros((), jnp.int32)
    for part, words in zip(message.parts, arrays, strict=True):
        mine = jnp.asarray(part.words, jnp.int32)[number]
        words = jnp.where(lax.iota(jnp.int32, words.size) < mine, words, jnp.uint32(0))
        # The zeros after my words are overwritten by the next array.
        buffer = lax.dynamic_update_slice(buffer, words, (start,))
        start = start + mine
    return jnp.pad(buffer, (0, max(room - buffer.size, 0)))[:room]


def pieces_of(buffer: Array, lengths: tuple[int, ...]) -> list[Array]:
    """The words of each worker from a buffer where they stand one after the other."""
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return [buffer[start : start + length] for start, length in zip(starts, lengths, strict=True)]


def from_buffers(message: UnequalMessage, buffers: list[Array], axis: Axis) -> Any:
    """The payloads of all workers, stacked, from the words of each."""
    arrays, starts = [], [0] * len(buffers)
    for part, shape in zip(message.parts, message.shapes, strict=True):
        whole = to_words(part.array).size
        padded = []
        for worker, size in enumerate(part.words):
            words = buffers[worker][starts[worker] : starts[worker] + size]
            starts[worker] += size
            padded.append(jnp.pad(words, (0, whole - size)))
        entries = from_words(jnp.stack(padded), part.array)
        if min(part.counts) < part.array.shape[0]:
            place = lax.iota(jnp.int32, part.array.shape[0])[None]
            real = place < jnp.asarray(part.counts, jnp.int32)[:, None]
            real = real.reshape(*real.shape, *(1,) * (part.array.ndim - 1))
            entries = jnp.where(real, entries, jnp.asarray(part.fill, entries.dtype))
        arrays.append(entries.reshape(len(buffers), *shape))
    return jax.tree.unflatten(message.structure, proven_equal(arrays, axis))
