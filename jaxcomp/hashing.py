"""Counter-based random words and a random permutation that needs no memory.

Rounding a gradient at random needs one random word per entry. A hash of (entry, key) makes it
inside the same loop that rounds, at the speed of memory, where `jax.random` would take about
ten times longer on CPU. Keys still come from `jax.random`, so streams of different rounds and
workers are as independent as threefry makes them.

fmix32 is the finalizer of MurmurHash3 (Appleby 2011), a bijection of 32-bit words. A stream is
one key: 2^32 words, after which it repeats; no vector is longer. Tested (tests/test_hashing.py):
bytes and halves of words by chi-square, correlations with neighbours, with other rounds and other
workers, pairs on a grid, all at a false-alarm rate of 1e-6.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.arrays import wrap_key

__all__ = [
    "as_uniform",
    "fmix32",
    "halves",
    "halves_in_lanes",
    "halves_in_pairs",
    "multiply_high",
    "random_bits",
    "random_subset",
    "random_uniform",
    "scale_to",
    "uniform_in_lanes",
]

Array = jax.Array
U32 = jnp.uint32
GOLDEN = 0x9E3779B9  # 2^32 over the golden ratio, odd

# Traced once for each shape, not at every call: hashes are many small operations. Programs are the same without it.
once = functools.partial(jax.jit, inline=True)


@once
def fmix32(h: Array) -> Array:
    """Mixes each uint32 word so that every input bit changes every output bit with chance 1/2.

    >>> print(fmix32(jnp.array([0, 1], jnp.uint32)))
    [         0 1364076727]
    """
    h = h ^ (h >> U32(16))
    h = h * U32(0x85EBCA6B)
    h = h ^ (h >> U32(13))
    h = h * U32(0xC2B2AE35)
    return h ^ (h >> U32(16))


def _words(key: Any) -> tuple[Array, Array]:
    if isinstance(key, tuple):  # in a kernel
        return key
    data = jax.random.key_data(wrap_key(key)).reshape(-1)
    return data[0], data[-1]


def random_bits(key: Array, size: int) -> Array:
    """uint32[size]: word i is fmix32(fmix32(i ^ key_0) + key_1)."""
    return fmix32(_start(key, lax.iota(U32, size)))


def _start(key: Array, place: Array) -> Array:
    first, second = _words(key)
    return fmix32(place ^ first) + second


def random_uniform(key: Array, size: int) -> Array:
    """f32[size], uniform on the 2^23 midpoints (i + 1/2) 2^-23: never 0, never 1, mean exactly 1/2."""
    return _of_words(random_bits(key, size))


def uniform_in_lanes(key: Any, shape: tuple[int, int], first: Array | int = 0) -> Array:
    """f32[shape]: of `random_uniform` those of entries that stand in rows, from row `first` on."""
    row, lane = _rows_and_lanes(shape, first)
    return _of_words(fmix32(_start(key, row * U32(shape[1]) + lane)))


def _of_words(words: Array) -> Array:
    return ((words >> U32(9)).astype(jnp.int32).astype(jnp.float32) + jnp.float32(0.5)) * jnp.float32(2.0**-23)


def _rows_and_lanes(shape: tuple[int, int], first: Array | int) -> tuple[Array, Array]:
    row, lane = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    return (row + first).astype(U32), lane.astype(U32)


def halves(key: Array, shape: tuple[int, ...], count: int) -> list[Array]:
    """`count` arrays uint32[shape], uniform on 0 .. 2^16 - 1.

    Two of them share a word, its lower and its upper half. Word p of place i is fmix32(w_i + p g), where fmix32(w_i) is
    word i of `random_bits` and g the odd number next to 2^32 over the golden ratio. So a rounding costs half a hash,
    and each word can be computed by itself.
    """
    start, made = _start(key, _place(shape)), []
    for pair in range(-(-count // 2)):
        word = fmix32(start + U32(pair * GOLDEN % 2**32))
        made += [word & U32(0xFFFF), word >> U32(16)]
    return made[:count]


def halves_in_pairs(key: Array, shape: tuple[int, int, int, int]) -> list[Array]:
    """Two arrays uint32[q, w, pairs, 32]: the even ones and the odd ones of `halves(key, (q, w, 32), 2 pairs)`, side by
    side on the third axis: fewer operations to compile.

    >>> key = jax.random.key(0)
    >>> lower, upper = halves_in_pairs(key, (1, 2, 4, 32))
    >>> bool(jnp.all(upper[:, :, 3] == halves(key, (1, 2, 32), 8)[7]))
    True
    """
    place = _place((*shape[:2], 1, shape[3]))
    word = fmix32(_start(key, place) + lax.broadcasted_iota(U32, shape, 2) * U32(GOLDEN))
    return [word & U32(0xFFFF), word >> U32(16)]


def halves_in_lanes(key: Any, shape: tuple[int, int], width: int, first: Array | int = 0) -> Array:
    """uint32[shape], those of `halves(key, (size / 1024, w, 32), 32 / w)` in the order in which entries stand in words
    of w bits (`packing`): of 32 words side by side first all first codes, then all second ones, and so on.

    shape: rows of lanes, a multiple of 64 of them that divides 1024 / w. first: number of the first row. Each entry
    computes its own word, so a word is computed twice, and nothing moves from one lane to another: with rows stacked
    for each word, XLA for TPUs took five times as long to compile, and a loop that adds them to a vector 3.7 times the
    cycles by its estimate.

    >>> from jaxcomp.packing import Places
    >>> key, places = jax.random.key_data(jax.random.key(0)), Places(4, 2)
    >>> whole = jnp.stack(halves(key, places.shape, places.count), axis=2).reshape(-1)
    >>> print(jnp.array_equal(halves_in_lanes(key, (16, 128), 4).reshape(-1), whole))
    True
    """
    several = 1024 // width // shape[1]  # rows of 32 words, a power of two
    row, lane = _rows_and_lanes(shape, first)
    pair = (row & U32(several - 1)) * U32(shape[1] // 64) + (lane >> U32(6))
    place = (row >> U32(several.bit_length() - 1)) * U32(32) + (lane & U32(31))
    word = fmix32(_start(key, place) + pair * U32(GOLDEN))
    return jnp.where(lane & U32(32) == 0, word & U32(0xFFFF), word >> U32(16))


def as_uniform(half: Array) -> Array:
    """f32 from numbers 0 .. 2^16 - 1: the midpoints (i + 1/2) 2^-16, never 0, never 1, with mean exactly 1/2."""
    return (half.astype(jnp.int32).astype(jnp.float32) + jnp.float32(0.5)) * jnp.float32(2.0**-16)


def _place(shape: tuple[int, ...]) -> Array:
    """Number of each entry, uint32[shape]."""
    total, stride = jnp.zeros((), U32), 1
    for axis in reversed(range(len(shape))):
        total = total + lax.broadcasted_iota(U32, shape, axis) * U32(stride)
        stride *= shape[axis]
    return total


@functools.partial(once, static_argnums=1)
def scale_to(h: Array, size: int) -> Array:
    """Maps uint32 words to 0 .. size-1 by multiply-high, floor(h * size / 2^32); size <= 2^16."""
    high, low = h >> U32(16), h & U32(0xFFFF)
    return (high * U32(size) + ((low * U32(size)) >> U32(16))) >> U32(16)


def multiply_high(h: Array, size: Array) -> Array:
    """Maps uint32 words to 0 .. size-1 by floor(h * size / 2^32), in 16-bit halves; size: uint32, any.

    >>> print(multiply_high(jnp.array([0, 2**31, 2**32 - 1], jnp.uint32), jnp.uint32(100_000)))
    [    0 50000 99999]
    """
    half = U32(0xFFFF)
    (a, b), (c, e) = (h >> U32(16), h & half), (size >> U32(16), size & half)
    middle = ((b * e) >> U32(16)) + ((a * e) & half) + ((b * c) & half)
    return a * c + ((a * e) >> U32(16)) + ((b * c) >> U32(16)) + (middle >> U32(16))


@functools.partial(once, static_argnums=(1, 2))
def random_subset(key: Array, size: int, k: int) -> Array:
    """k distinct indices of 0 .. size-1, in random order, in O(k) time and memory.

    They are the images of 0 .. k-1 under a keyed permutation: an eight-round Feistel network on
    the square a x a >= size, walked along its cycle until it lands below size (Black and Rogaway
    2002). A full shuffle would sort all `size` entries.

    Args:
        key: equal on all workers where the subset must be.
        size: below 2^31.
        k: at most `size`.

    Returns:
        i32[k].

    >>> print(jnp.sort(random_subset(jax.random.key(0), 5, 5)))
    [0 1 2 3 4]
    """
    side = max(1, int(size**0.5))
    while side * side < size:
        side += 1
    first, second = _words(key)
    round_keys = [fmix32(first + U32(r) * U32(GOLDEN)) ^ second for r in range(8)]

    def permute(index: Array) -> Array:
        left, right = index // U32(side), index % U32(side)
        for round_key in round_keys:
            left, right = right, (left + scale_to(fmix32(fmix32(right) ^ round_key), side)) % U32(side)
        return left * U32(side) + right

    index = permute(lax.iota(U32, k))
    if side * side > size:
        index = lax.while_loop(
            lambda i: jnp.any(i >= U32(size)),
            lambda i: jnp.where(i >= U32(size), permute(i), i),
            index,
        )
    return index.astype(jnp.int32)
