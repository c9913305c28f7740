"""Unsigned integers of w bits packed into uint32 words, inside jit, without a loop over elements.

32 codes of w bits fill exactly w words. The n codes make G = ceil(n / 32) groups, which stand in tiles of g groups: 32
of them where 32 divides G and w divides 32, else one tile of all. Within a tile neighbours in memory stay neighbours:
code 32 g T + i g + t is the i-th of group t of tile T, and word m of that group is word w g T + m g + t of the message.
So all slices are contiguous, on CPU and GPU alike, and in tiles of 32 the words of 1024 entries are 32 w words one
after the other, which may be cut out. The width can be read off the shape: these words in order are uint32[w, G].

Within a group, code i occupies bits [i*w, (i+1)*w) of the 32*w bits, least significant first.
"""

import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomp.backend import computed_once, form, lanes, materialized
from jaxcomp.backend_tpu import of_columns, to_columns
from jaxcomp.hashing import halves, halves_in_lanes, halves_in_pairs, random_uniform

__all__ = ["TILE", "Lanes", "Places", "num_code_words", "pack", "places_of", "tile_of", "unpack", "width_for"]

Array = jax.Array
U32 = jnp.uint32
TILE = 32  # groups
MANY = 2**12  # words
BY_ROWS = 2**14  # groups


def width_for(num_codes: int) -> int:
    """Bits needed for codes 0 .. num_codes - 1, at least 1.

    >>> [width_for(n) for n in (1, 2, 3, 15, 16, 17)]
    [1, 1, 2, 4, 4, 5]
    """
    return max(1, (num_codes - 1).bit_length())


def num_code_words(size: int, width: int) -> int:
    """Words that `pack` makes of `size` codes: width * ceil(size / 32)."""
    return width * (-(-size // 32))


def tile_of(groups: int, width: int) -> int:
    """Groups of a tile.

    >>> [tile_of(groups, 4) for groups in (1, 32, 33, 64)], tile_of(64, 3)
    ([1, 32, 33, 32], 64)
    """
    return TILE if groups % TILE == 0 and 32 % width == 0 else groups


def pack(codes: Array, width: int) -> Array:
    """Packs codes into words.

    Args:
        codes: uint[n], each below 2^width (higher bits are dropped).
        width: bits per code, 1 to 32.

    Returns:
        uint32[width, ceil(n / 32)], unused places zero.

    Raises:
        ValueError: width is outside 1 .. 32 or codes are not a vector.

    >>> pack(jnp.arange(5, dtype=jnp.uint32), 3).shape
    (3, 1)
    """
    _check_width(width)
    if codes.ndim != 1:
        raise ValueError(f"pack: codes must be a vector; got shape {codes.shape}")
    groups = -(-codes.shape[0] // 32)
    codes = codes.astype(U32)
    if width < 32:
        codes = codes & U32((1 << width) - 1)
    rest = 32 * groups - codes.shape[0]
    if _by_rows(groups, width):
        return _packed_by_rows(jnp.pad(codes, (0, rest)), width)
    if 32 % width == 0:  # no code straddles two words: a sum, in which XLA computes the codes where they are used
        tile, codes = tile_of(groups, width), jnp.pad(codes, (0, rest))
        if groups and _in_lanes(tile, width):
            return _packed_in_lanes(codes, width)
        parts = codes.reshape(groups // tile * width, 32 // width, tile)
        shifts = lax.iota(U32, 32 // width) * U32(width)
        return _in_order(jnp.sum(parts << shifts[None, :, None], axis=1, dtype=U32), width)
    rows = jnp.pad(_narrow(codes, width), (0, rest)).reshape(32, groups)  # these codes will be an array
    words = []
    for m in range(width):
        word = None
        for i in range(32 * m // width, min(32, -(-32 * (m + 1) // width))):
            shift = i * width - 32 * m
            row = rows[i].astype(U32)
            part = row << U32(shift) if shift >= 0 else row >> U32(-shift)
            word = part if word is None else word | part
        words.append(word)
    return jnp.stack(words)


def _in_order(words: Array, width: int) -> Array:
    """Words as [w, G]. Where they are many, not in the loop that makes them: it would find their places by division."""
    shaped = lambda words: words.reshape(width, words.size // width)
    return computed_once(shaped, words) if words.size >= MANY else shaped(words)


class Places(NamedTuple):
    """How n = 1024 q entries stand in words of w bits, where 32 is a multiple of w: as [q, w, 32 / w, 32].

    Slice i of the third axis is what stands at bits [i w, (i + 1) w) of the words, [q, w, 32]. Arithmetic on such
    slices reads and writes neighbours, so that XLA computes several entries at once; on a vector of all entries it
    would find the place of each one by division.
    """

    width: int
    tiles: int

    @property
    def count(self) -> int:
        """Codes of a word."""
        return 32 // self.width

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of a slice."""
        return self.tiles, self.width, TILE

    @property
    def whole(self) -> tuple[int, int, int, int]:
        """Shape of all entries."""
        return self.tiles, self.width, self.count, TILE

    def of_blocks(self, cut: Any) -> Callable[[Array], Array]:
        """How a number for each block (`compressors.blocks`) is repeated for `spread`."""
        return cut.spread_to_words

    def spread(self, each: Array) -> Array:
        """Reshapes a number for each entry, each 32 entries, or all so that it broadcasts to [q, w, 32 / w, 32]."""
        if each.shape[0] == 1:
            return each.reshape(1, 1, 1, 1)
        return each.reshape(*self.whole[:3], each.shape[0] // (TILE * self.tiles))

    def slices(self, each: Array) -> list[Array]:
        """[count] slices of a number for each entry, each 32 entries, or all; one for all is in each."""
        each = self.spread(each)
        return [each[:, :, min(i, each.shape[2] - 1)] for i in range(self.count)]

    def unpack(self, words: Array) -> Array:
        """uint32[q, w, 32 / w, 32], the codes that `packing.unpack` finds in words [w, G]."""
        shifts = jnp.arange(0, 32, self.width, dtype=U32)[None, None, :, None]
        codes = words.reshape(self.tiles, self.width, 1, TILE) >> shifts
        return codes & U32((1 << self.width) - 1) if self.width < 32 else codes

    def pack(self, codes: list[Array]) -> Array:
        """uint32[q, w, 32], those that `packing.pack` makes of the vector, from the codes of each slice."""
        return _in_words(codes, self.width)

    def each(self, code: Callable[..., Array], *numbers: Array) -> list[Array]:
        """code(*numbers) of each slice."""
        return [code(*slices) for slices in zip(*map(self.slices, numbers), strict=True)]

    def halves(self, key: Array) -> list[Array]:
        """Random numbers of each slice (`hashing.halves`)."""
        return halves(key, self.shape, self.count)

    def uniform(self, key: Array) -> Array:
        """f32[n], random numbers of all entries (`hashing.random_uniform`)."""
        return random_uniform(key, math.prod(self.whole))


class Pairs(Places):
    """The same places as a GPU works on them: two slices, [q, w, 16 / w, 32], of what stands at even and at odd places
    of the words. These are half as many operations, whose fusion was a third of the time that XLA took for a step.
    """

    __slots__ = ()

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of a slice."""
        return self.tiles, self.width, self.count // 2, TILE

    def slices(self, each: Array) -> list[Array]:
        """Both slices of a number for each entry, each 32 entries, or all."""
        return self._even_and_odd(self.spread(each))

    def unpack(self, words: Array) -> Array:
        """uint32[q, w, 32 / w, 32], the codes of `Places.unpack`, shifted by the number of each entry."""
        codes = words.reshape(self.tiles, self.width, 1, TILE) >> _offsets(self.whole)
        return codes & U32((1 << self.width) - 1)

    def pack(self, codes: list[Array]) -> Array:
        """uint32[q, w, 32], the words of `Places.pack`: a sum of pairs, in which XLA computes each once."""
        pairs = _in_words(codes, self.width)
        shifts = lax.broadcasted_iota(U32, self.shape, 2) * U32(2 * self.width)
        return jnp.sum(pairs << shifts, axis=2, dtype=U32)

    def each(self, code: Callable[..., Array], *numbers: Array) -> list[Array]:
        """Both slices of code(*numbers) of all entries."""
        return self._even_and_odd(code(*map(self.spread, numbers)))

    def halves(self, key: Array) -> list[Array]:
        """The random numbers of `Places.halves`, of each slice."""
        return halves_in_pairs(key, self.shape)

    def _even_and_odd(self, each: Array) -> list[Array]:
        if each.shape[2] == 1:
            return [each, each]
        both = each.reshape(*self.shape[:3], 2, each.shape[3])
        return [both[:, :, :, 0], both[:, :, :, 1]]


class Lanes(NamedTuple):
    """The same n entries one after the other, as a TPU works on them (`_in_lanes`): the vector is the only slice."""

    width: int
    size: int

    @property
    def fills_rows(self) -> bool:
        """Whether the words of 1024 entries are whole rows of lanes, so that words can be cut between them."""
        return self.width * TILE % lanes() == 0

    @property
    def whole(self) -> tuple[int]:
        """Shape of all entries."""
        return (self.size,)

    def of_blocks(self, cut: Any) -> Callable[[Array], Array]:
        """How a number for each block is repeated for `spread`."""
        return cut.spread

    def spread(self, each: Array) -> Array:
        """The same: a number for each entry, or one for all."""
        return each

    def slices(self, each: Array) -> list[Array]:
        """[1] slice, all entries."""
        return [each]

    def each(self, code: Callable[..., Array], *numbers: Array) -> list[Array]:
        """code(*numbers), once."""
        return [code(*numbers)]

    def unpack(self, words: Array) -> Array:
        """uint32[n], `packing.unpack` of words [w, G]."""
        return unpack(words, self.size)

    def pack(self, codes: list[Array]) -> Array:
        """`packing.pack` of the only slice."""
        return pack(codes[0], self.width)

    def halves(self, key: Array) -> list[Array]:
        """The random numbers of `Places.halves`, of all entries in their order."""
        return [halves_in_lanes(key, (self.size // lanes(), lanes()), self.width).reshape(-1)]

    uniform = Places.uniform


def _in_words(codes: list[Array], width: int) -> Array:
    """Words of so many codes of w bits, each array at the next w bits."""
    words = codes[0]
    for i, code in enumerate(codes[1:], 1):
        words = words | (code << U32(i * width))
    return words


def places_of(size: int, width: int) -> Places | Lanes | None:
    """None where entries cannot be worked on in the order of words: a number that 1024 does not divide, say.

    >>> places = places_of(2048, 8)
    >>> codes = jnp.arange(2048, dtype=jnp.uint32) % 256
    >>> print(jnp.array_equal(places.pack(places.slices(codes)).reshape(8, -1), pack(codes, 8)))
    True
    """
    if not size or size % 1024 or 32 % width:
        return None
    if _in_lanes(TILE, width):
        return Lanes(width, size)
    return form(Places, on_gpu=Pairs if width < 32 else None)(width, size // 1024)


def unpack(words: Array, size: int) -> Array:
    """Inverse of `pack`.

    Args:
        words: uint32[w, G] as `pack` returns it.
        size: number of codes n, with ceil(n / 32) = G.

    Returns:
        uint32[n].

    Raises:
        ValueError: shape and size do not fit together.

    >>> print(unpack(pack(jnp.arange(5, dtype=jnp.uint32), 3), 5))
    [0 1 2 3 4]
    """
    if words.ndim != 2 or words.shape[1] != -(-size // 32):
        raise ValueError(f"unpack: {size} codes need words of shape (w, {-(-size // 32)}); got {words.shape}")
    width, groups = words.shape
    _check_width(width)
    if _by_rows(groups, width):
        return _unpacked_by_rows(words)[:size]
    if 32 % width == 0:  # no code straddles two words
        tile = tile_of(groups, width)
        if groups and _in_lanes(tile, width):
            return _unpacked_in_lanes(words, width)[:size]
        shape = groups // tile, width, 32 // width, tile
        few = lambda _: jnp.arange(0, 32, width, dtype=U32)[None, None, :, None]
        codes = words.reshape(groups // tile, width, 1, tile) >> form(few, on_gpu=_offsets)(shape)
        return (codes & U32((1 << width) - 1) if width < 32 else codes).reshape(-1)[:size]
    start = np.arange(32) * width
    row, shift = start // 32, (start % 32).astype(np.uint32)[:, None]
    rows_of = form(_side_by_side, on_cpu=operator.getitem, on_gpu=operator.getitem)
    low = rows_of(words, row) >> shift
    # A code that straddles two words takes its high bits from the next one. A shift by 32 is
    # undefined, so codes that start at bit 0 are masked out instead.
    high = jnp.where(
        shift == 0, U32(0), rows_of(words, np.minimum(row + 1, width - 1)) << ((32 - shift) % np.uint32(32))
    )
    return ((low | high) & U32((1 << width) - 1)).reshape(-1)[:size]


def _side_by_side(words: Array, rows: np.ndarray) -> Array:
    """words[rows], of which XLA for TPUs would make 256 kernels."""
    return jnp.concatenate([lax.index_in_dim(words, int(row)) for row in rows])


# ------------------------------------------------------------------------------------------------
# Where a register has more lanes than a tile has groups (TPUs), an axis of 32 would be padded to it, and an array of
# codes be four times as large. So the codes of 32 words stand there as [32 / w / 4, 128]: four of a word side by side.


def _in_lanes(tile: int, width: int) -> bool:
    return tile == TILE < lanes() and lanes() % TILE == 0 and (TILE * 32 // width) % lanes() == 0


def _by_rows(groups: int, width: int) -> bool:
    """Whether a TPU takes the codes that stand at one place of all words in turn: each such row begins at another lane,
    and to shift all of them at once is a program of a hundred thousand instructions. Of still more codes an array of
    32 bits each would be too much.
    """
    one_tile = tile_of(groups, width) == groups
    return lanes() > 1 and BY_ROWS <= groups < 2**6 * BY_ROWS and one_tile


def _packed_by_rows(codes: Array, width: int) -> Array:
    groups = codes.shape[0] // 32

    def add(i: Array, words: Array) -> Array:
        row = lax.dynamic_slice_in_dim(codes, i * groups, groups)
        m, shift, more = _place(i, width)
        with_part = lambda words, part, m: lax.dynamic_update_slice_in_dim(
            words, lax.dynamic_slice_in_dim(words, m * groups, groups) | part, m * groups, 0
        )
        words = with_part(words, row << shift, m)
        if 32 % width:
            words = with_part(words, jnp.where(more, row >> ((32 - shift) & 31), U32(0)), jnp.minimum(m + 1, width - 1))
        return words

    return lax.fori_loop(0, 32, add, jnp.zeros_like(codes, shape=(width * groups,))).reshape(width, groups)


def _unpacked_by_rows(words: Array) -> Array:
    width, groups = words.shape
    row = lambda m: lax.dynamic_index_in_dim(words, m, 0, keepdims=False)

    def add(i: Array, codes: Array) -> Array:
        m, shift, more = _place(i, width)
        code = row(m) >> shift
        if 32 % width:
            code = code | jnp.where(more, row(jnp.minimum(m + 1, width - 1)) << ((32 - shift) & 31), U32(0))
        code = code & U32((1 << width) - 1) if width < 32 else code
        return lax.dynamic_update_slice_in_dim(codes, code, i * groups, 0)

    return lax.fori_loop(0, 32, add, jnp.zeros_like(words, shape=(32 * groups,)))


def _place(i: Array, width: int) -> tuple[Array, Array, Array]:
    """Finds the word and the bit where code i of a group begins, and whether it goes on in the next word."""
    start = jnp.asarray(i, jnp.int32) * width
    m, shift = start >> 5, start & 31
    return m, shift.astype(U32), shift + width > 32


def _shifts(width: int) -> Array:
    """Returns the bit offset of each code within its word, [1, 32 / w, 1, 1]."""
    return jnp.arange(0, 32, width, dtype=U32)[None, :, None, None]


def _packed_in_lanes(codes: Array, width: int) -> Array:
    columns = to_columns(materialized(_narrow(codes, width)), 32 * TILE)
    parts = materialized(columns.reshape(width, 32 // width, TILE, -1)).astype(U32) << _shifts(width)
    words = jnp.sum(parts, axis=1, dtype=U32)  # [w, 32, tiles]
    return words.reshape(width * TILE, -1).T.reshape(width, -1)


def _unpacked_in_lanes(words: Array, width: int) -> Array:
    columns = words.reshape(-1, width * TILE).T.reshape(width, 1, TILE, -1)
    codes = materialized(_narrow((columns >> _shifts(width)) & U32((1 << width) - 1), width))
    return of_columns(codes.reshape(32 * TILE, -1)).astype(U32)


def _narrow(codes: Array, width: int) -> Array:
    """Casts codes to the narrowest unsigned integers that hold `width` bits."""
    return codes.astype(jnp.uint8 if width <= 8 else jnp.uint16 if width <= 16 else U32)


def _offsets(shape: tuple[int, int, int, int]) -> Array:
    """Bit offsets, within its word, of each entry [tiles, w, 32 / w, groups]. Of the number of each entry: an array of
    the offsets alone would be read by all leaves, and XLA for GPUs would join their loops for it, in one that no
    registers hold.
    """
    _, width, count, tile = shape
    number = lax.iota(U32, math.prod(shape))
    if tile % width:
        return (number // tile % count * U32(width)).reshape(shape)
    return (lax.div(number, U32(tile // width)) & U32((count - 1) * width)).reshape(shape)  # the same, in two steps


def _check_width(width: int) -> None:
    if not 1 <= width <= 32:
        raise ValueError(f"pack: width must be in 1 .. 32 bits; got {width}")
