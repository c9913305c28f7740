"""SIDCo: a threshold from a fitted sparsity-inducing distribution, in a few passes, without a sort.

Magnitudes a = |x| of gradients follow heavy-peaked laws. Fit one to all of a, and its (1 - delta)
quantile is a threshold that about delta d entries exceed. Far tails are fitted badly by the bulk,
so it is done in stages (peaks over threshold): the first stage keeps a quarter, each further one
fits the excesses over the previous threshold, and the product of the stage ratios is delta.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.base import Compressor, Spec, State, Tally, finite
from jaxcomp.compressors.sparsify import add_sparse, dense_of_sparse
from jaxcomp.compressors.vector import count_of, on_vectors
from jaxcomp.norms import max_abs
from jaxcomp.payloads import Sparse
from jaxcomp.select import count_above, exceeding, excess_above, indices_of_words, magnitude, take

__all__ = ["sidco"]

Array = jax.Array
FIRST_RATIO = 0.25
LAWS = ("exponential",)


def sidco(ratio: float, *, law: str = "exponential", stages: int = 3, capacity: float = 1.25) -> Compressor:
    """Keeps the entries above a threshold estimated from a fitted distribution.

    C(x)_j = x_j if |x_j| > eta, else 0. For law = "exponential" (SIDCo-E), with r_1 = 1/4 and
    r_m = (delta / r_1)^(1 / (stages - 1)):

        eta_1 = mean(a) ln(1 / r_1),   eta_m = eta_(m-1) + mean(a - eta_(m-1) | a > eta_(m-1)) ln(1 / r_m).

    With one stage, or delta >= 1/4, eta = mean(a) ln(1 / delta). Exact zeros are left out of the
    fit and the target ratio is raised accordingly, so it is still a share of all entries.

    Biased; alpha = 1 / d is certain (at least the largest entry is sent, and whatever is sent is
    at least as large as whatever is not), about delta in practice. A zero vector sends nothing.

    Args:
        ratio: delta, target share of entries, in (0, 1].
        law: "exponential".
        stages: number of fits, at least 1.
        capacity: room in the message as a multiple of k = max(1, floor(ratio d)), at least 1. When
            more entries exceed the threshold it rises until they fit; the others stay in the
            memory of the algorithm and are counted as overflow.

    Returns:
        Compressor with payload `Sparse` of ceil(capacity k) entries.

    Raises:
        ValueError: an argument is out of range.

    Reference: Abdelmoniem, Elzanaty, Alouini, Canini 2021 (SIDCo), algorithm 1. The location of a stage
    is the previous threshold, not the smallest exceedance as in the released code.

    >>> import jaxcomp as jc
    >>> x = jnp.array([0.1, -0.2, 5.0, 0.1, 0.0, -0.1, 0.2, 0.1])
    >>> print(jc.roundtrip(jc.sidco(1 / 8), x, key=jax.random.key(0))[0])
    [0. 0. 5. 0. 0. 0. 0. 0.]
    """
    count = count_of("sidco", ratio, None)
    if law not in LAWS:
        raise ValueError(f"sidco: law must be one of {', '.join(map(repr, LAWS))}; got {law!r}")
    if isinstance(stages, bool) or int(stages) != stages or stages < 1:
        raise ValueError(f"sidco: stages must be an integer of at least 1; got {stages}")
    if not 1 <= capacity < math.inf:
        raise ValueError(f"sidco: capacity must be at least 1; got {capacity}")

    def places(d: int) -> int:
        return min(d, math.ceil(capacity * count(d)))

    def threshold(x: Array, total: Array, present: Array) -> Array:
        """eta of a vector whose sum of magnitudes is finite, with `present` entries not zero."""
        present = present.astype(total.dtype)
        target = jnp.minimum(jnp.asarray(ratio * x.shape[0], total.dtype) / present, 1)
        one_stage = (target >= FIRST_RATIO) | (stages == 1)
        first = jnp.where(one_stage, target, jnp.asarray(FIRST_RATIO, total.dtype))
        eta = total / present * -jnp.log(first)
        later = jnp.where(one_stage, 1, (target / FIRST_RATIO) ** (1 / max(stages - 1, 1)))
        for _ in range(stages - 1):
            above = count_above(x, eta)
            excess, above = excess_above(x, eta, above)
            eta = eta + excess / jnp.maximum(above, 1).astype(eta.dtype) * -jnp.log(later)
        return eta

    def rescaled_threshold(x: Array, total: Array, present: Array) -> Array:
        """The same where something is not finite or the sum overflows."""
        a = finite(magnitude(x))
        largest = jnp.maximum(max_abs(a), jnp.finfo(a.dtype).tiny)
        return threshold(a / largest, jnp.sum(a / largest), present) * largest

    def compress(key, x, state):
        d = x.shape[0]
        if d == 0:
            return Sparse(x, jnp.zeros((0,), jnp.int32)), state.local
        zero = jnp.zeros((), magnitude(x).dtype)
        total, present = excess_above(x, zero, count_above(x, zero))
        present = jnp.maximum(present, 1)
        eta = lax.cond(jnp.isfinite(total), threshold, rescaled_threshold, x, total, present)
        words, wanted = exceeding(x, eta, places(d))
        indices, _ = indices_of_words(words, places(d), d)
        return Sparse(take(x, indices), indices), Tally(jnp.maximum(wanted - places(d), 0))

    return on_vectors(
        init=lambda shared_key, like: State(local=Tally(jnp.zeros((), jnp.int32))),
        compress=compress,
        decompress=dense_of_sparse,
        accumulate=add_sparse,
        spec=Spec(f"sidco({ratio})", omega=None, alpha=lambda d: 1 / d if d else 1.0, linear=False, selects=True),
    )
