"""Vectors cut into blocks, each with a norm, a scale or a step of its own, and codes of their entries."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp import backend_tpu_kernels
from jaxcomp.arrays import key_data, reshaped, weighted
from jaxcomp.backend import computed_once, fold_in_one_pass, fold_in_rows, has_kernels, of_short_rows, to_short_rows
from jaxcomp.checks import is_integer
from jaxcomp.hashing import random_uniform
from jaxcomp.norms import block_norms, norms_along
from jaxcomp.packing import Lanes, Places, pack, places_of, unpack

__all__ = [
    "BLOCK_SIZE",
    "BlockSizes",
    "add_worth",
    "added",
    "block_sizes",
    "code_words",
    "coded_blocks",
    "made_words",
    "worth",
]

Array = jax.Array
BLOCK_SIZE = 512  # entries, where nothing is said


class BlockSizes:
    """How a vector of d entries is cut: `rows` blocks of `length`, then one of `tail` entries.

    blocks=B: B - 1 blocks of floor(d / B) entries, the last takes the remainder.
    block_size=m: blocks of m entries, the last takes what is left.
    """

    def __init__(self, d: int, blocks: int | None, block_size: int | None):
        if block_size is not None:
            self.rows, self.length = d // block_size, block_size
        else:
            count = max(1, min(blocks or 1, d))
            self.rows, self.length = count - 1, d // count
        self.size = d
        self.tail = d - self.rows * self.length
        self.count = self.rows + int(self.tail > 0)
        self.largest = max(self.length if self.rows else 0, self.tail)

    def lengths(self, dtype: Any) -> Array:
        """Entries of each block, [count]."""
        return jnp.where(lax.iota(jnp.int32, self.count) < self.rows, self.length, self.tail).astype(dtype)

    def each(self, of: Callable[[Array], Any], x: Array) -> Any:
        """of(rows), for the blocks of a vector as rows [b, m] -> [b] each: [count] each."""
        cut, parts = self.rows * self.length, []
        if self.rows or not self.tail:
            parts.append(of_short_rows(of, x[:cut], self.length))
        if self.tail:
            parts.append(of(x[cut:].reshape(1, self.tail)))
        return jax.tree.map(lambda *numbers: jnp.concatenate(numbers), *parts)

    def norms(self, x: Array, order: float) -> Array:
        """Norm of each block, [count]."""
        if not self.count:
            return jnp.zeros((0,), x.dtype)
        return self.each(lambda rows: block_norms(rows, order), x)

    def places(self, width: int) -> Places | Lanes | None:
        """Places of codes of so many bits in the order of their words; None where 32 entries are not always of one
        block, or there are no such places."""
        in_words = self.count <= 1 or (self.length % 32 == 0 and self.tail in (0, self.length))
        return places_of(self.size, width) if in_words else None

    def spread_to_words(self, each: Array) -> Array:
        """A number per block, repeated over 32 entries at a time; [count] -> [d / 32] or [1]. One per entry stays."""
        return each if self.count <= 1 or each.shape[0] == self.size else jnp.repeat(each, self.length // 32)

    def spread(self, each: Array) -> Array:
        """A number per block, repeated over the entries of its block; [count] -> [d] or [1]. One per entry stays."""
        if self.count <= 1 or each.shape[0] == self.size:
            return each
        if self.tail <= self.length:  # fuses with what follows, where a concatenation would be an array of its own
            return to_short_rows(each, self.length)[: self.size]
        body = to_short_rows(each[: self.rows], self.length)
        return jnp.concatenate([body, jnp.broadcast_to(each[self.rows :], (self.tail,))]) if self.tail else body


def block_sizes(
    name: str, blocks: int | None, block_size: int | None, default: int | None
) -> Callable[[int], BlockSizes]:
    """How a vector of d entries is cut, d -> `BlockSizes`; ValueError if both are given, or one is no integer above 0.

    default: block_size where neither is given.
    """
    for what, value in (("blocks", blocks), ("block_size", block_size)):
        if value is not None and not is_integer(value):
            raise ValueError(f"{name}: {what} must be an integer of at least 1; got {value!r}")
    if blocks is not None and block_size is not None:
        raise ValueError(f"{name}: give at most one of blocks and block_size; got {blocks} and {block_size}")
    count, size = (None if value is None else int(value) for value in (blocks, block_size))
    size = default if count is None and size is None else size
    return lambda d: BlockSizes(d, count, size)


# ------------------------------------------------------------------------------------------------
# Codes of w bits, entry by entry, in the order of their words where that can be. Numbers of blocks are [count], or [1]
# for all entries.


def code_words(
    code: Callable[..., Array], width: int, cut: BlockSizes, x: Array, each: list[Array], key: Array | None = None
) -> Array:
    """Words [w, G], as `pack` returns them, of code(x, *each), u32.

    x: [d];  each: numbers of blocks.
    key: code(x, *each, noise) with noise of each entry, uniform in (0, 1).
    """
    noise = lambda places, key: [] if key is None else [places.uniform(key).astype(x.dtype)]
    places = cut.places(width)
    if places is None:
        uniform = [] if key is None else [random_uniform(key, x.shape[0]).astype(x.dtype)]
        return pack(code(x, *map(cut.spread, each), *uniform), width)
    words_of = lambda places, x, each, key: places.pack(places.each(code, x, *each, *noise(places, key)))
    return made_words(words_of, places, cut, x, each, key)


def made_words(
    of: Callable[..., Array], places: Places | Lanes, cut: BlockSizes, x: Array, each: list[Array], key: Array | None
) -> Array:
    """Words [w, G] of of(places, x, each, key), computed once. x: [d]; each: numbers of blocks; key: its words."""
    words = None if key is None else key_data(key)
    if _in_kernels(places, cut, x, *each):
        made = backend_tpu_kernels.words_of(of, places.width, x, each, words)
    else:
        made = computed_once(functools.partial(of, places), x, [*map(places.of_blocks(cut), each)], words)
    return made.reshape(places.width, -1)


def coded_blocks(
    numbers: Callable[..., Any], of: Callable[..., Array], places: Places | Lanes, cut: BlockSizes, x: Array, key: Array
) -> tuple[Array, Array]:
    """Numbers of blocks as they are sent, [count], and words [w, G] of of(places, x, others, key).

    numbers: (cut, x) -> what is sent of each block, others of each block that `of` needs, where none of all this is an
        array of its own.
    """
    if _in_kernels(places, cut, x) and cut.count > 1 and backend_tpu_kernels.fits_blocks(cut.length):
        of_blocks = lambda blocks, x: numbers(_InRegisters(blocks), x)
        sent, words = backend_tpu_kernels.coded_rows(of_blocks, of, places.width, cut.length, x, key_data(key))
        return sent, words.reshape(places.width, -1)
    sent, others = numbers(cut, x)
    return sent, made_words(of, places, cut, x, others, key)


class _InRegisters(NamedTuple):
    """`BlockSizes` within a kernel."""

    blocks: backend_tpu_kernels.BlockedRows

    def norms(self, x: Array, order: float) -> Array:
        return norms_along(self.blocks.along, x, order)


def _in_kernels(places: Any, cut: BlockSizes, x: Any, *each: Any) -> bool:
    """Whether a TPU has kernels for this. Numbers of blocks may be integers below 2^24."""
    if not isinstance(places, Lanes) or x.dtype != jnp.float32 or not has_kernels():
        return False
    if any(numbers.dtype not in (jnp.float32, jnp.int32) for numbers in each):
        return False
    equal = cut.count <= 1 or cut.count * cut.length == cut.size
    return equal and backend_tpu_kernels.fits(cut.size, places.width, cut.length if cut.count > 1 else None)


def worth(value: Callable[[Array, Array], Array], words: Array, cut: BlockSizes, each: Array) -> Array:
    """value(code, number of its block) of all entries, [d], from words [w, G]."""
    places = cut.places(words.shape[0])
    if places is None:
        return value(unpack(words, cut.size), cut.spread(each))
    like = jax.eval_shape(value, jax.ShapeDtypeStruct((cut.size,), jnp.uint32), jax.ShapeDtypeStruct((1,), each.dtype))
    if _in_kernels(places, cut, like, each):
        return backend_tpu_kernels.with_worth(
            value, like, words[None], each[None], None, width=places.width, keep=False
        )
    decode = lambda words, each: value(places.unpack(words), places.spread(each))
    return computed_once(decode, words, places.of_blocks(cut)(each)).reshape(-1)


def add_worth(
    value: Callable[[Array, Array], Array],
    total: Array,
    words: Array,
    cut: BlockSizes,
    each: Array,
    weights: Array | None,
) -> Array:
    """total [d] + sum_j weights_j worth_j, of words [n, w, G] and numbers of blocks [n, count] (`base.accumulate`)."""
    places, width = cut.places(words.shape[1]), words.shape[1]
    if _in_kernels(places, cut, total, each):
        return backend_tpu_kernels.with_worth(value, total, words, each, weights, width=width, keep=True)
    shape = (total.size,) if places is None else places.whole

    def add(total, message):
        words, each, weight = message
        codes = unpack(words, total.size) if places is None else places.unpack(words)
        each = cut.spread(each) if places is None else places.spread(places.of_blocks(cut)(each))
        return total + weighted(value(codes, each).astype(total.dtype), weight)

    return added(places, add, reshaped(total, shape), (words, each, weights)).reshape(-1)


def added(places: Places | Lanes | None, add: Callable[[Any, Any], Any], total: Any, messages: Any) -> Any:
    """`fold` of messages whose codes stand in places, as the backend does it best."""
    in_lanes = isinstance(places, Lanes)
    if in_lanes and places.fills_rows:
        return fold_in_rows(add, total, messages)
    return fold_in_one_pass(add, total, messages, least=1, one_at_a_time=in_lanes)
