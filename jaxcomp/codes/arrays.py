"""The few operations that NumPy and JAX write differently, so that each code is written once.

A function of `codes` works on JAX arrays, inside jit, with static shapes; given NumPy arrays it works on the
host in the same way, to the same bits. Which one it is follows from the type of its first array.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomp.arrays import is_host
from jaxcomp.backend import running
from jaxcomp.select import indices_of_words

__all__ = [
    "branch",
    "gather",
    "histogram",
    "mark",
    "ones",
    "running_max",
    "running_sum",
    "scan",
    "scatter_bits",
]

Array = Any


def gather(x: Array, indices: Array) -> Array:
    """x[indices], zero beyond the end."""
    if is_host(x):
        return np.append(x, x.dtype.type(0))[np.minimum(indices, x.size)]
    return x.at[indices].get(mode="fill", fill_value=0)


def histogram(symbols: Array, size: int, valid: Array) -> Array:
    """How often each of 0 .. size - 1 occurs where valid: i32[size]."""
    if is_host(symbols):
        return np.bincount(symbols[valid], minlength=size).astype(np.int32)
    return jnp.zeros((size,), jnp.int32).at[jnp.where(valid, symbols, size)].add(1, mode="drop")


def mark(indices: Array, size: int) -> Array:
    """bool[size], true at the indices; those outside are dropped."""
    if is_host(indices):
        marks = np.zeros(size, bool)
        marks[indices[indices < size]] = True
        return marks
    return jnp.zeros((size,), bool).at[indices].set(True, mode="drop")


def ones(words: Array, count: int) -> Array:
    """Positions of the first `count` set bits, ascending, the rest 32 times the number of words: i32[count]."""
    size = 32 * words.shape[0]
    if not is_host(words):
        return indices_of_words(words, count, size)[0]
    found = np.flatnonzero(np.unpackbits(np.ascontiguousarray(words, "<u4").view(np.uint8), bitorder="little"))
    return np.pad(found[:count], (0, max(count - found.size, 0)), constant_values=size).astype(np.int32)


def running_max(x: Array) -> Array:
    """The largest of each number and those before it."""
    return np.maximum.accumulate(x) if is_host(x) else running(jnp.maximum, x)


def running_sum(x: Array) -> Array:
    """The sum of each number and those before it, in the same integers."""
    return np.cumsum(x, dtype=x.dtype) if is_host(x) else running(jnp.add, x)


def scatter_bits(parts: Sequence[tuple[Array, Array]], num_words: int) -> Array:
    """Adds up numbers shifted to their places in a stream of bits; their bits must not overlap.

    Two scatter-adds of disjoint bits for each part: the result does not depend on the order.

    Args:
        parts: (numbers u32[n], places of their lowest bits i32[n]) each; on the host, places of numbers that
            are not zero ascend within a part.
        num_words: words of the stream; bits beyond are dropped.

    Returns:
        u32[num_words].
    """
    host = is_host(parts[0][0])
    xp: Any = np if host else jnp
    words: Any = xp.zeros((num_words,), xp.uint32)
    for numbers, places in parts:
        word, shift = places >> 5, (places & 31).astype(xp.uint32)
        low = numbers << shift
        high = xp.where(shift == 0, xp.uint32(0), numbers >> ((xp.uint32(32) - shift) & xp.uint32(31)))
        if not host:
            # The numbers at the end of a stream may lie beyond it: they are zero, or do not fit.
            words = words.at[word].add(low, mode="drop").at[word + 1].add(high, mode="drop")
            continue
        kept = numbers != 0
        if not kept.all():
            word, low, high = word[kept], low[kept], high[kept]
        kept = word < num_words
        if not kept.all():
            word, low, high = word[kept], low[kept], high[kept]
        if word.size:
            starts = np.flatnonzero(np.diff(word, prepend=-1))
            words[word[starts]] |= np.add.reduceat(low, starts)
            over = np.flatnonzero((high != 0) & (word + 1 < num_words))
            words[word[over] + 1] |= high[over]
    return words


def scan(step: Callable[[Any], tuple[Any, Any]], state: Any, num_steps: int, like: Any) -> tuple[Any, Any]:
    """`num_steps` times (state, output) = step(state); outputs stacked on a leading axis.

    Args:
        like: an array that says whether this runs on the host.
    """
    if not is_host(like):
        return lax.scan(lambda state, _: step(state), state, length=num_steps)
    outputs = []
    for _ in range(num_steps):
        state, output = step(state)
        outputs.append(output)
    return state, jax.tree.map(lambda *parts: np.stack(parts), *outputs)


def branch(index: Array, functions: Sequence[Callable[..., Any]], *args: Any) -> Any:
    """functions[index](*args), only that one computed."""
    if len(functions) == 1:
        return functions[0](*args)
    return functions[int(index)](*args) if is_host(index) else lax.switch(index, functions, *args)
