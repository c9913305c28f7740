"""Payloads of which each worker sends its own number of rows: what travels of each array, and in how many words."""

from typing import Any, NamedTuple

import jax

from jaxcomp.payloads.registry import limits

__all__ = ["UnequalMessage", "message_of"]


class Part(NamedTuple):
    """One array of a message. counts: rows (entries of a vector) of each worker that travel; fill: what follows."""

    array: Any
    counts: tuple[int, ...]
    fill: int

    @property
    def words(self) -> tuple[int, ...]:
        row = self.array.size // max(self.array.shape[0], 1)
        return tuple(-(-count * row * self.array.dtype.itemsize // 4) for count in self.counts)


class UnequalMessage(NamedTuple):
    """All arrays of a payload with their lengths on each of n workers."""

    parts: tuple[Part, ...]
    structure: Any
    shapes: tuple[tuple[int, ...], ...]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Words of each worker's whole message."""
        return tuple(sum(words) for words in zip(*(part.words for part in self.parts), strict=True))

    @property
    def capacity(self) -> int:
        """Words of a padded message."""
        return sum(-(-part.array.size * part.array.dtype.itemsize // 4) for part in self.parts)


def message_of(payload: Any, lengths: Any, workers: int) -> UnequalMessage:
    """The arrays of a payload and how much of each travels.

    Args:
        payload: of one worker.
        lengths: from `base.lengths`, or None for messages that are equally long.
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
            raise ValueError(f"the compressor has lengths for {len(counts)} workers; the axis has {workers}")
        parts.append(Part(array, counts, fill))
    return UnequalMessage(tuple(parts), structure, tuple(array.shape for array in arrays))
