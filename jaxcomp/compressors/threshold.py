"""Sparsifiers that estimate a threshold: what SIDCo and its rivals have in common.

All of them guess a threshold eta and send the entries with |x_j| > eta, so their cost is O(d). They
differ in the guess (`Estimator`). What they share is here: a target that may follow a schedule, a message of
fixed capacity, and `select.top_set`, which sees to it that at least one entry is sent and that what
is sent fits and is at least as large as what is not. So each of them contracts.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.arrays import wide
from jaxcomp.base import Compressor, Left, Spec, State, on_vectors
from jaxcomp.compressors.schedule import Target
from jaxcomp.compressors.sparsify import entries_of
from jaxcomp.groups import FILLED_IF_LONG
from jaxcomp.payloads import Sparse
from jaxcomp.select import indices_of_words, marked_above, take, top_set

__all__ = ["Estimator", "ThresholdLocal", "adjusted", "by_threshold", "fixed"]

Array = jax.Array


class ThresholdLocal(NamedTuple):
    """overflow, searches: i32[], of the last round (`base.Left`); memory: what the estimate remembers."""

    overflow: Array
    memory: Any
    searches: Array


class Estimator(NamedTuple):
    """How a threshold is found.

    estimate(key, x, k, ratio, memory) -> (eta, marked_above(x, eta), or None where it is not known yet, memory)
        x: float[d] with d > 0, may hold NaN and infinities; k: i32[] and ratio: f32[], the target. eta may be anything.
    memory(dtype) -> what is remembered before the first round.
    learn(memory, number of entries above eta, k, ratio) -> memory, after each round with an entry that is not zero.
    bounds(number of entries above eta, k) -> how many are enough, and at most how many to keep. Where there are fewer
        or more, the threshold moves until at least k and at most that many are left, of which the first k by index are
        sent. None: one is enough, and as many as the capacity are kept, the others being counted as overflow.
    near: without bounds, 4/5 of k are enough and at most 5/4 are kept, all of which are sent, whatever the estimate is.
    """

    estimate: Callable[..., tuple[Array, tuple[Array, Array] | None, Any]]
    memory: Callable[[Any], Any] = lambda dtype: ()
    learn: Callable[..., Any] = lambda memory, wanted, k, ratio: memory
    bounds: Callable[[Array, Array], tuple[Any, Any]] | None = None
    near: bool = False


def by_threshold(
    name: str,
    target: Target,
    estimator: Estimator,
    *,
    capacity: float,
    alpha: Callable[[int], float] = lambda d: 1 / d,
) -> Compressor:
    """A compressor from an estimate of a threshold.

    capacity: room in the message as a multiple of k. alpha: for d > 0.
    """
    if not 1 <= capacity < math.inf:
        raise ValueError(f"{name.split('(')[0]}: capacity must be at least 1; got {capacity}")

    def places(d: int) -> int:
        return min(d, math.ceil(capacity * target.peak(d)))

    def init(shared_key, like):
        zero = jnp.zeros((), jnp.int32)
        return State(ThresholdLocal(zero, estimator.memory(wide(like.dtype)), zero), target.first_round())

    def compress(key, x, state):
        d = x.shape[0]
        if d == 0:
            return Sparse(x, jnp.zeros((0,), jnp.int32)), state.local
        k, ratio = target.of(d, target.round_of(state.shared))
        eta, known, remembered = estimator.estimate(key, x, k, ratio, state.local.memory)
        words, wanted = marked_above(x, eta) if known is None else known
        enough, most = (1, places(d)) if estimator.bounds is None else estimator.bounds(wanted, k)
        if estimator.near:
            enough, most = k - k // 5, jnp.minimum(k + (k + 3) // 4, places(d))
        words = top_set(x, eta, k, most, enough=enough, known=(words, wanted))
        positions, chosen = indices_of_words(words, places(d), d)
        if estimator.bounds is None:
            room, chosen = most, jnp.maximum(chosen, wanted)
        else:
            room, positions = k, jnp.where(lax.iota(jnp.int32, places(d)) < k, positions, d)
        learnt = estimator.learn(remembered, wanted, k, ratio)
        learnt = jax.tree.map(lambda new, old: jnp.where(chosen > 0, new, old), learnt, state.local.memory)
        searched = ((wanted < enough) | (wanted > most)).astype(jnp.int32)
        return Sparse(take(x, positions), positions), ThresholdLocal(jnp.maximum(chosen - room, 0), learnt, searched)

    return on_vectors(
        init=init,
        compress=compress,
        entries=entries_of,
        advance=target.advance,
        overflow=lambda local: Left(local.overflow, local.searches),
        spec=Spec(
            name, omega=None, alpha=lambda d: alpha(d) if d else 1.0, linear=False, selects=True, layout=FILLED_IF_LONG
        ),
    )


def fixed(threshold: float) -> Estimator:
    """The same threshold for every vector, which nothing estimates."""
    return Estimator(lambda key, x, k, ratio, memory: (jnp.asarray(threshold, wide(x.dtype)), None, memory))


def adjusted(x: Array, eta: Array, factor_of: Callable[[Array], Array], most: int) -> tuple[Array, tuple[Array, Array]]:
    """(eta, marked_above(x, eta)), with eta times factor_of(entries above it) while that is not one, `most` times."""

    def is_off(carry):
        times, _, (_, count) = carry
        return (times < most) & (factor_of(count) != 1)

    def step(carry):
        times, eta, (_, count) = carry
        eta = eta * factor_of(count).astype(eta.dtype)
        return times + 1, eta, marked_above(x, eta)

    return lax.while_loop(is_off, step, (jnp.zeros((), jnp.int32), eta, marked_above(x, eta)))[1:]
