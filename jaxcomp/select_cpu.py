"""Parts of `select` in the form that XLA for CPU needs, under the same names; `select` has the portable ones.

A CPU reads a short vector from its cache as often as one likes, so searches halve: reductions to one number are by far
the fastest there. Where TPUs take one of these, `select` says so.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.backend import running

__all__ = ["block_of_rank", "count_words", "first_bits", "of_rank", "reached_by"]

Array = jax.Array
U32 = jnp.uint32
I32 = jnp.int32
TILE = 32


def count_words(words: Array) -> Array:
    """XLA's CPU backend makes a kernel for each factor of 32 in the length of a reduction. Here it is one for each
    factor of 1024; the barrier keeps two of them from being seen as one.
    """
    counts = lax.population_count(words).astype(I32)
    while counts.shape[0] > TILE:
        tiles = lax.optimization_barrier(jnp.pad(counts, (0, -counts.shape[0] % TILE**2)).reshape(-1, TILE, TILE))
        counts = jnp.sum(tiles, axis=(1, 2), dtype=I32)
    return jnp.sum(counts, dtype=I32)


def first_bits(words: Array, count: Array) -> Array:
    """A search for the bit behind them."""
    number, steps = lax.iota(U32, words.shape[0]), (32 * words.shape[0]).bit_length()
    start = jnp.zeros_like(words, shape=()) + jnp.zeros_like(count, dtype=U32)  # typed as both are, over mesh axes

    def before(bit):
        part = words & ((U32(1) << (bit % U32(32))) - U32(1))
        return jnp.where(number < bit // U32(32), words, jnp.where(number == bit // U32(32), part, U32(0)))

    def step(i, bit):
        later = bit | (U32(1) << jnp.asarray(steps - 1 - i, U32))
        return jnp.where(count_words(before(later)) <= count, later, bit)

    return before(lax.fori_loop(0, steps, step, start))


def block_of_rank(counts: Array, capacity: int) -> tuple[Array, Array, Array]:
    """Each block writes its number at the rank of its first one, of several that write there, all but the last of which
    are empty, the last one. A running maximum spreads it to the ranks that follow. Ranks that ascend, as here, a TPU
    need not sort, which would take longer than all the rest.
    """
    ends = running(jnp.add, counts)
    starts = ends - counts
    number = lax.iota(I32, counts.shape[0])
    first = jnp.zeros((capacity,), I32).at[starts].max(number, mode="drop", indices_are_sorted=True)
    block = running(jnp.maximum, first)
    return block, starts[block], ends[-1]


def reached_by(bits: Array, count: Array) -> Array:
    """The bits from the highest to the lowest, with one pass for each."""
    kind, most = bits.dtype.type, jnp.iinfo(bits.dtype).bits

    def bit(i, threshold):
        higher = threshold | (kind(1) << jnp.asarray(most - 2 - i, kind))
        return jnp.where(jnp.sum(bits >= higher, dtype=I32) >= count, higher, threshold)

    return lax.fori_loop(0, most - 1, bit, jnp.zeros_like(bits, shape=()))


def of_rank(x: Array, rank: Array, most: int) -> Array:
    """The entry of that rank in a sort of few."""
    ordered = lax.optimization_barrier(lax.top_k(x, min(x.shape[0], most + 1))[0])
    return ordered[jnp.minimum(rank, ordered.shape[0] - 1)]
