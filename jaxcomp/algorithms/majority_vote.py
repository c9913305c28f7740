"""SignSGD with majority vote: one bit an entry up, one bit down."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxcomp.arrays import bounded, finite, wide_like, zeros_like
from jaxcomp.base import Algorithm, State
from jaxcomp.compressors.signs import vote
from jaxcomp.factories import factory

__all__ = ["majority_vote"]


class VoteState(NamedTuple):
    """momentum: m_i, of each group, in f32.  compressor: its state, for each group."""

    momentum: tuple[jax.Array, ...]
    compressor: tuple[State, ...]


@factory
def majority_vote(momentum: float = 0.9) -> Algorithm:
    """Each worker votes on the sign of every entry; the direction is what most of them voted for.

    m_i <- mu m_i + (1 - mu) g_i,   direction = sign(sum_i w_i sign(m_i)),   each entry -1, 0 or 1.

    With via="two_shot" a worker sends one bit an entry to the owners of chunks, and gets one back. An entry of m_i
    that is zero is voted on by a coin. A tie moves nothing where all votes reach all workers; the owner of a
    chunk has one bit to say it in, and tosses a coin. Both are zero in the mean. Nothing is remembered of what
    the signs leave out, so the method converges for symmetric noise, not in general: `error_feedback(sign())` does.

    A vote is no estimate, so no omega or alpha is known. Every leaf is voted on, however small. Chain it with
    optax.sgd(learning_rate); weight decay comes after it.

    Args:
        momentum: mu, in [0, 1); 0 is plain signSGD.

    Raises:
        ValueError: momentum is out of range.

    Reference: Bernstein, Wang, Azizzadenesheli, Anandkumar 2018 (signSGD), algorithm 3; Bernstein, Zhao,
    Azizzadenesheli, Anandkumar 2019, algorithm 1. They leave ties and zeros open.

    >>> import jax, jax.numpy as jnp, optax, jaxcomp as jc
    >>> tx = jc.compressed_mean(jc.majority_vote(0.0), "data")
    >>> grads = jnp.array([[4.0, 1.0], [0.1, 2.0], [-9.0, 8.0]])
    >>> step = jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name="data", out_axes=None)
    >>> print(jax.jit(step)(grads))
    [1. 1.]
    """
    if not 0 <= momentum < 1:
        raise ValueError(f"majority_vote: momentum must be in [0, 1); got {momentum}")

    def init(here, like):
        return VoteState(zeros_like(wide_like(like)), here.start(like))

    def update(here, grads, state):
        average = lambda m, g: bounded(momentum * m + (1 - momentum) * finite(g).astype(m.dtype))
        m = jax.tree.map(average, state.momentum, grads)
        sent = yield here.mean(m, state.compressor)
        return jax.tree.map(jnp.sign, sent.mean), VoteState(m, sent.states)

    return Algorithm(init, update, {"momentum": "average", "compressor": "compressor"}, vote())
