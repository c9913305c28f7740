"""The length of Elias omega codes, in jit and on the host; `wire.elias` writes and reads the codes.

The code of n >= 1 is written back to front: a 0, and before it, while n > 1, the binary digits of n, after which n
becomes the number of those digits less one. 1 -> 0, 2 -> 100, 3 -> 110, 4 -> 101000.

Reference: Elias 1975.
"""

from typing import Any

from jaxcomp.arrays import bit_length, namespace

__all__ = ["elias_length"]

Array = Any


def elias_length(n: Array) -> Array:
    """Bits of the omega code of each n in 1 .. 2^32 - 1: i32.

    >>> import numpy as np
    >>> elias_length(np.array([1, 2, 3, 4, 7, 8, 15, 16]))
    array([ 1,  3,  3,  6,  6,  7,  7, 11], dtype=int32)
    """
    xp = namespace(n)
    n = n.astype(xp.uint32)
    total = xp.ones(n.shape, xp.int32)
    for _ in range(5):  # 2^31 has 32 digits, 31 has 5, 4 has 3, 2 has 2
        digits = bit_length(n)
        total = total + xp.where(n > 1, digits, 0)
        n = xp.where(n > 1, digits - 1, 1).astype(xp.uint32)
    return total
