"""A fixed threshold."""

import math

from jaxcomp.base import Compressor
from jaxcomp.compressors.schedule import target_of
from jaxcomp.compressors.threshold import by_threshold, fixed
from jaxcomp.factories import factory

__all__ = ["hard_threshold"]


@factory
def hard_threshold(threshold: float, *, room: float = 0.01) -> Compressor:
    """Keeps the entries above a fixed threshold.

    C(x)_j = x_j if |x_j| > threshold, else 0. If none exceeds it the largest is sent, so that the
    compressor contracts: alpha = 1 / d. Biased.

    Args:
        threshold: at least 0.
        room: share of the entries that the message has room for, in (0, 1]. When more exceed the
            threshold it rises until they fit; the others are counted as overflow.

    Returns:
        Compressor with payload `Sparse` of max(1, floor(room d)) entries.

    Raises:
        ValueError: an argument is out of range.

    Reference: Dutta et al. 2020; Sahu et al. 2021, Rethinking gradient sparsification as total error minimization.

    >>> import jax, jax.numpy as jnp, jaxcomp as jc
    >>> x = jnp.array([0.1, -3.0, 0.5, 2.0])
    >>> print(jc.roundtrip(jc.contrib.hard_threshold(0.4, room=1), x, key=jax.random.key(0))[0])
    [ 0.  -3.   0.5  2. ]
    """
    if not 0 <= threshold < math.inf:
        raise ValueError(f"hard_threshold: threshold must be at least 0 and finite; got {threshold}")
    if not 0 < room <= 1:
        raise ValueError(f"hard_threshold: room must be in (0, 1]; got {room}")
    target = target_of("hard_threshold", float(room))
    return by_threshold(f"hard_threshold({threshold})", target, fixed(threshold), capacity=1.0)
