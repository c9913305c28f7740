"""Arrays and streams as uint32 words in jit, from which the families make their messages.

A message is a sequence of streams, each beginning at a word. Capacities are static, and so large that whatever can be
coded fits; how many words are in use depends on the content.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

__all__ = [
    "Coded",
    "Cursor",
    "coded",
    "from_words",
    "joined",
    "num_words",
    "to_words",
    "uncoded",
    "uncoded_like",
    "whole_array",
]

Array = jax.Array
I32, U32 = jnp.int32, jnp.uint32


class Coded(NamedTuple):
    """words u32[capacity], zero beyond what is used;  used i32[], words;  fits bool[], false if no code can hold it."""

    words: Array
    used: Array
    fits: Array


def to_words(array: Array) -> Array:
    """The bits of an array as uint32 words; the first entries are in the first words."""
    flat = array.reshape(-1)
    per = 4 // flat.dtype.itemsize
    if per > 1:
        flat = jnp.pad(flat, (0, -flat.size % per)).reshape(-1, per)
    return lax.bitcast_convert_type(flat, U32).reshape(-1)


def from_words(words: Array, like: Any) -> Array:
    """[..., words] back as [..., *like.shape]."""
    lead = words.shape[:-1]
    if like.dtype.itemsize == 8:
        words = words.reshape(*lead, -1, 2)
    flat = lax.bitcast_convert_type(words, like.dtype).reshape(*lead, -1)
    return flat[..., : like.size].reshape(*lead, *like.shape)


def num_words(like: Any) -> int:
    """uint32 words that an array of the shape and dtype of `like` fills, the last one padded."""
    return -(-like.size * like.dtype.itemsize // 4)


def coded(words: Array, bits: Array, fits: Array | bool = True) -> Coded:
    """A stream of so many bits."""
    return Coded(words, (bits + 31) // 32, jnp.asarray(fits))


def whole_array(array: Array) -> Coded:
    """An array as it is."""
    words = to_words(array)
    return Coded(words, jnp.asarray(words.size, I32), jnp.asarray(True))


def joined(parts: list[Coded]) -> Coded:
    """One stream after the other."""
    room = sum(part.words.size for part in parts)
    words, start = jnp.zeros((room,), U32), jnp.zeros((), I32)
    for part in parts:
        # The zeros after what is used are overwritten by the next stream.
        words = lax.dynamic_update_slice(words, part.words, (start,))
        start = start + part.used
    return Coded(words, start, jnp.all(jnp.stack([part.fits for part in parts])))


def uncoded(payload: Any) -> Coded:
    """The bits of all arrays of a payload."""
    return joined([whole_array(array) for array in jax.tree.leaves(payload)])


class Cursor:
    """Reads streams front to back. `position` is traced."""

    def __init__(self, words: Array, room: int):
        self.words, self.position = jnp.pad(words, (0, room)), jnp.zeros((), I32)

    def look(self, size: int) -> Array:
        return lax.dynamic_slice(self.words, (self.position,), (size,))

    def take(self, size: int, used: Array | int | None = None) -> Array:
        words = self.look(size)
        self.position = self.position + (size if used is None else used)
        return words

    def array(self, like: Any) -> Array:
        return from_words(self.take(num_words(like)), like)

    def bits(self, size: int, decode: Callable[[Array], tuple[Any, Array]]) -> Any:
        """decode(words) -> (what it read, the bit after it)."""
        result, end = decode(self.look(size))
        self.position = self.position + (end + 31) // 32
        return result


def uncoded_like(cursor: Cursor, like: Any) -> Any:
    """Inverse of `uncoded`."""
    return jax.tree.map(cursor.array, like)
