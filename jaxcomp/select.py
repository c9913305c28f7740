"""From a mask over d entries to sorted indices at a fixed capacity: no sort, no scatter of size d.

1. The mask is packed into d/32 words: one pass over the data, fused with whatever made the mask.
2. Population counts and their running sum give the rank of the first entry of each word.
3. Each non-empty word writes its number at that rank (a scatter of d/32 words, unique targets,
   so deterministic everywhere); a running maximum spreads it to the ranks that follow.
4. Within its word each rank finds its bit by five halvings.

Cost O(d + capacity): the d entries are read once, everything else touches d/32 words.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.base import wide
from jaxcomp.norms import max_abs

__all__ = [
    "count_above",
    "count_words",
    "exceeding",
    "excess_above",
    "indices_of_words",
    "magnitude",
    "mask_words",
    "take",
    "words_above",
]

Array = jax.Array
U32 = jnp.uint32
I32 = jnp.int32


def mask_words(mask: Array) -> Array:
    """Bit j % 32 of word j // 32 is mask[j].

    Args:
        mask: bool[d].

    Returns:
        uint32[ceil(d / 32)], unused bits zero.

    >>> print(mask_words(jnp.array([True, False, True])))
    [5]
    """
    groups = -(-mask.shape[0] // 32)
    bits = jnp.pad(mask, (0, 32 * groups - mask.shape[0])).reshape(groups, 32).astype(U32)
    return jnp.sum(bits << lax.iota(U32, 32), axis=1, dtype=U32)


def count_words(words: Array) -> Array:
    """Number of set bits, i32[]. Exact below 2^31, and faster than summing a mask.

    >>> print(count_words(jnp.array([5, 1], jnp.uint32)))
    3
    """
    return jnp.sum(lax.population_count(words).astype(I32))


def indices_of_words(words: Array, capacity: int, size: int) -> tuple[Array, Array]:
    """Positions of the set bits, ascending.

    Args:
        words: uint32[ceil(size / 32)] from `mask_words`.
        capacity: number of places, fixed.
        size: d, below 2^31; also the padding value.

    Returns:
        indices i32[capacity]: the first `capacity` set positions, then d;
        count i32[]: number of set bits, which may exceed the capacity.

    >>> indices, count = indices_of_words(jnp.array([0b1101], jnp.uint32), 4, 9)
    >>> print(indices, count)
    [0 2 3 9] 3
    """
    if capacity == 0 or words.shape[0] == 0:
        return jnp.full((capacity,), size, I32), count_words(words)
    counts = lax.population_count(words).astype(I32)
    ends = jnp.cumsum(counts, dtype=I32)
    starts = ends - counts
    number = lax.iota(I32, words.shape[0])
    first = jnp.zeros((capacity,), I32).at[jnp.where(counts > 0, starts, capacity)].set(number, mode="drop")
    word = lax.cummax(first)
    rank = lax.iota(I32, capacity)
    index = 32 * word + _bit_of_rank(words[word], rank - starts[word])
    return jnp.where(rank < ends[-1], index, size), ends[-1]


def _bit_of_rank(word: Array, rank: Array) -> Array:
    """Position of the set bit with `rank` set bits below it."""
    position = jnp.zeros_like(rank)
    for half in (16, 8, 4, 2, 1):
        below = lax.population_count(word & U32((1 << half) - 1)).astype(I32)
        upper = rank >= below
        rank = jnp.where(upper, rank - below, rank)
        word = jnp.where(upper, word >> U32(half), word)
        position = jnp.where(upper, position + half, position)
    return position


def take(x: Array, indices: Array) -> Array:
    """x at sorted unique indices, zero at padding (index d) and where x is not finite."""
    values = x.at[indices].get(mode="fill", fill_value=0, indices_are_sorted=True)
    return jnp.where(jnp.isfinite(values), values, jnp.zeros((), x.dtype))


# ------------------------------------------------------------------------------------------------
# Single passes over memory. XLA would merge neighbouring passes that share |x|, or a broadcast
# constant, into one fusion that is ten times slower on CPU, or write a broadcast of size d to
# memory. `optimization_barrier` keeps them apart and costs nothing.


def magnitude(x: Array) -> Array:
    """|x| in f32, or f64."""
    return jnp.abs(x).astype(wide(x.dtype))


def words_above(x: Array, threshold: Array) -> Array:
    """Mask words of the finite entries with |x| > threshold."""
    x, threshold = lax.optimization_barrier((x, threshold))
    a = magnitude(x)
    return mask_words((a > threshold) & (a < jnp.inf))


def count_above(x: Array, threshold: Array) -> Array:
    """Number of finite entries with |x| > threshold, i32[]."""
    return count_words(words_above(x, threshold))


def excess_above(x: Array, threshold: Array, after: Array) -> tuple[Array, Array]:
    """sum_j max(|x_j| - threshold, 0), computed once `after` is; returns it and `after`."""
    zero = jnp.zeros((), threshold.dtype)
    x, threshold, zero, after = lax.optimization_barrier((x, threshold, zero, after))
    return jnp.sum(jnp.maximum(magnitude(x) - threshold, zero)), after


def exceeding(x: Array, threshold: Array, capacity: int) -> tuple[Array, Array]:
    """Mask words of the entries above a threshold, which rises until they fit.

    If more than `capacity` magnitudes exceed the threshold it is raised, by bisection on the bits
    of the float, to the lowest value that at most `capacity` exceed. So whatever is selected is
    at least as large as whatever is not, which is what makes a selection contract. Only when the
    largest magnitude itself occurs more than `capacity` times do more remain: all of them equal,
    and the first by index are as good as any. If none exceeds the threshold, it falls to just
    below the largest magnitude; a zero vector selects nothing. Non-finite entries count as zero.

    Args:
        x: float[d].
        threshold: float[], dtype of `magnitude(x)`, finite and not negative.
        capacity: at least 1.

    Returns:
        words uint32[ceil(d / 32)], and wanted i32[], how many exceeded the threshold given.
    """
    bits = jnp.uint64 if threshold.dtype == jnp.float64 else jnp.uint32
    as_bits = lambda t: lax.bitcast_convert_type(t, bits)
    as_float = lambda b: lax.bitcast_convert_type(b, threshold.dtype)

    words = words_above(x, threshold)
    wanted = count_words(words)

    def fit(x, words, threshold, wanted):
        largest = max_abs(x).astype(threshold.dtype)
        below = jnp.where(largest > 0, as_bits(largest) - bits(1), bits(0))
        # `low` is exceeded by too many (or was never tried), `high` by few enough, unless the
        # largest magnitude alone is too many.
        low = jnp.where(wanted == 0, below, as_bits(threshold))

        def step(bracket):
            low, high = bracket
            middle = low + (high - low) // bits(2)
            few = count_above(x, as_float(middle)) <= capacity
            return jnp.where(few, low, middle), jnp.where(few, middle, high)

        _, high = lax.while_loop(lambda b: b[1] > b[0] + bits(1), step, (low, below))
        return words_above(x, as_float(high))

    fits = (wanted > 0) & (wanted <= capacity)
    return lax.cond(fits, lambda x, words, *_: words, fit, x, words, threshold, wanted), wanted
