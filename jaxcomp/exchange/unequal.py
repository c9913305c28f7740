"""Exchanges of messages that are not equally long: what is padding stays at home.

Each brings every worker's message to all workers and puts the padding back, so that all of them,
and the gathering of padded messages, give the same rows and bitwise the same mean. What travels is
uint32 words: of each array the first words, as many as the sender's number of entries needs.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.exchange.lanes import (
    Axis,
    all_sum_words,
    axis_index,
    has_ragged,
    proven_equal,
    ragged_all_to_all,
    send,
    varying,
)
from jaxcomp.exchange.links import Cost, Link, Phase, costs, ring_plan
from jaxcomp.payloads import from_words, limits, to_words

__all__ = ["EXCHANGES", "concat", "message_of", "ragged", "ring"]

Array = jax.Array


class Part(NamedTuple):
    """One array of a message. counts: entries of each worker that travel; fill: what follows them."""

    array: Array
    counts: tuple[int, ...]
    fill: int

    @property
    def words(self) -> tuple[int, ...]:
        row = self.array.size // max(self.array.shape[0], 1) if self.array.ndim else 1
        return tuple(-(-count * row * self.array.dtype.itemsize // 4) for count in self.counts)


class Message(NamedTuple):
    """All arrays of a payload with their lengths on each of n workers."""

    parts: tuple[Part, ...]
    structure: Any

    @property
    def lengths(self) -> tuple[int, ...]:
        """Words of each worker's whole message."""
        return tuple(sum(words) for words in zip(*(part.words for part in self.parts), strict=True))

    @property
    def capacity(self) -> int:
        """Words of a padded message."""
        return sum(-(-part.array.size * part.array.dtype.itemsize // 4) for part in self.parts)

    def costs(self, link: Link) -> dict[str, Cost]:
        return costs(self.lengths, self.capacity, link)


def message_of(payload: Any, lengths: Any, workers: int) -> Message:
    """The arrays of a payload and how much of each travels.

    Args:
        payload: of one worker.
        lengths: from `Compressor.lengths`, or None for messages that are equally long.
        workers: n.

    Raises:
        ValueError: the lengths are those of another number of workers.
    """
    arrays, structure = jax.tree.flatten(payload)
    parts = []
    for array, limit in zip(arrays, limits(payload, lengths), strict=True):
        if limit is None:
            array = array.reshape(array.shape or (1,))
            parts.append(Part(array, (array.shape[0],) * workers, 0))
            continue
        (counts, _), fill = limit
        if len(counts) != workers:
            raise ValueError(f"exchange: lengths of {len(counts)} workers for {workers} workers")
        parts.append(Part(array, counts, fill))
    return Message(tuple(parts), structure)


# ------------------------------------------------------------------------------------------------
# Arrays as words, and back


def _unpacked(message: Message, rows: list[list[Array]], axis: Axis) -> Any:
    """The stacked payloads of all workers from the words of each, [worker][array]."""
    arrays = []
    for number, part in enumerate(message.parts):
        whole = to_words(part.array).size
        padded = [jnp.pad(row[number], (0, whole - row[number].size)) for row in rows]
        entries = from_words(jnp.stack(padded), part.array)
        if min(part.counts) < part.array.shape[0]:
            place = lax.iota(jnp.int32, part.array.shape[0])
            real = place < jnp.asarray(part.counts, jnp.int32)[:, None]
            entries = jnp.where(real, entries, jnp.asarray(part.fill, entries.dtype))
        arrays.append(entries)
    return jax.tree.unflatten(message.structure, proven_equal(arrays, axis))


def _cut(message: Message, buffers: list[Array]) -> list[list[Array]]:
    """Each worker's words, split into its arrays, which stand one after the other."""
    rows = []
    for worker, buffer in enumerate(buffers):
        row, start = [], 0
        for part in message.parts:
            row.append(buffer[start : start + part.words[worker]])
            start += part.words[worker]
        rows.append(row)
    return rows


def _own(message: Message, axis: Axis, room: int) -> Array:
    """This worker's words, its arrays one after the other, then zeros: u32[room]."""
    number = axis_index(axis)
    buffer = varying(jnp.zeros((message.capacity,), jnp.uint32), axis)
    start = jnp.zeros((), jnp.int32)
    for part in message.parts:
        words = to_words(part.array)
        mine = jnp.asarray(part.words, jnp.int32)[number]
        words = jnp.where(lax.iota(jnp.int32, words.size) < mine, words, jnp.uint32(0))
        # The zeros after my words are overwritten by the next array.
        buffer = lax.dynamic_update_slice(buffer, words, (start,))
        start = start + mine
    return jnp.pad(buffer, (0, max(room - buffer.size, 0)))[:room]


# ------------------------------------------------------------------------------------------------
# Three ways. Each: (message, axis, link) -> payload stacked on a leading axis of n.


def concat(message: Message, axis: Axis, link: Link) -> Any:
    """Every worker writes its words at its own place of one buffer; the buffers are added.

    2 (n - 1) / n times the sum of the real sizes is sent by each worker. The others' words at a
    place are zero, so the sum of bits is exact.
    """
    del link
    lengths = message.lengths
    longest, total = max(lengths), sum(lengths)
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    own = _own(message, axis, longest)
    buffer = varying(jnp.zeros((total + longest,), jnp.uint32), axis)
    buffer = lax.dynamic_update_slice(buffer, own, (jnp.asarray(starts, jnp.int32)[axis_index(axis)],))
    buffer = all_sum_words(buffer[:total], axis)
    pieces = [buffer[start : start + length] for start, length in zip(starts, lengths, strict=True)]
    return _unpacked(message, _cut(message, pieces), axis)


def ring(message: Message, axis: Axis, link: Link) -> Any:
    """Every worker passes on pieces to the next; each link carries what is real, once.

    The schedule is fixed when the program is built (`links.ring_plan`): one partial permute a tick.
    """
    lengths = message.lengths
    n, number = len(lengths), axis_index(axis)
    phases = ring_plan(lengths, link).phases
    own = _own(message, axis, max(lengths) + sum(phase.words * phase.pieces for phase in phases))
    start = jnp.zeros((), jnp.int32)
    arrived: list[list[Array]] = [[] for _ in lengths]
    for phase in phases:
        room = phase.words * phase.pieces
        mine = lax.dynamic_slice(own, (start,), (room,)).reshape(phase.pieces, phase.words)
        start = start + jnp.asarray(phase.counts, jnp.int32)[number] * phase.words
        whole = _around(mine, phase, number, axis)[:-1].reshape(n, room)
        for i, count in enumerate(phase.counts):
            arrived[i].append(whole[i, : count * phase.words])
    return _unpacked(message, _cut(message, [jnp.concatenate(row) for row in arrived]), axis)


def _around(mine: Array, phase: Phase, number: Array, axis: Axis) -> Array:
    """All pieces of all workers, and one place for what a worker sends or receives when it does neither."""
    n, zero = len(phase.counts), jnp.zeros((), number.dtype)
    pieces = varying(jnp.zeros((n * phase.pieces + 1, phase.words), jnp.uint32), axis)
    pieces = lax.dynamic_update_slice(pieces, mine, (number * phase.pieces, zero))
    for tick in phase.ticks:
        out = jnp.asarray(tick.sends, jnp.int32)[number]
        place = jnp.asarray(tick.receives, jnp.int32)[number]
        arrived = send(lax.dynamic_index_in_dim(pieces, out, keepdims=False), tick.pairs, axis)
        pieces = lax.dynamic_update_index_in_dim(pieces, arrived, place, 0)
    return pieces


def ragged(message: Message, axis: Axis, link: Link) -> Any:
    """Every worker sends its words to each other one, where the backend has a collective for it.

    (n - 1) times its own size is sent by each worker, so the largest one decides how long it takes.
    """
    del link
    lengths = message.lengths
    buffer = ragged_all_to_all(_own(message, axis, max(lengths)), lengths, axis)
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    pieces = [buffer[start : start + length] for start, length in zip(starts, lengths, strict=True)]
    return _unpacked(message, _cut(message, pieces), axis)


EXCHANGES: dict[str, Callable[[Message, Axis, Link], Any]] = {"concat": concat, "ring": ring, "ragged": ragged}


def choice(message: Message, link: Link) -> str:
    """The fastest exchange by the model, among those of this backend."""
    each = message.costs(link)
    names = [name for name in each if name != "ragged" or has_ragged()]
    return min(names, key=lambda name: each[name].seconds)
