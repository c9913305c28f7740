"""Keeps random entries, the same on all workers."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.arrays import bounded, finite, key_data, weighted, wide
from jaxcomp.backend import added_at, fold
from jaxcomp.base import Compressor, Spec, State, on_vectors
from jaxcomp.checks import check_like
from jaxcomp.compressors.schedule import Ratio, shown, target_of
from jaxcomp.factories import factory
from jaxcomp.hashing import fmix32, random_bits, random_subset
from jaxcomp.payloads import Dense

__all__ = ["Draw", "rand_k"]

Array = jax.Array


class Draw(NamedTuple):
    """Shared randomness of one round: key uint32[2], count i32[] of rounds so far."""

    key: Array
    count: Array

    @classmethod
    def first(cls, key: Array) -> "Draw":
        """The draw of the first round."""
        return cls(key_data(key), jnp.zeros((), jnp.int32))

    def round_key(self) -> Array:
        """The typed key of this round."""
        return jax.random.fold_in(jax.random.wrap_key_data(self.key), self.count)

    def words(self, size: int) -> Array:
        """uint32[size] of this round for hash functions, without the program of a threefry."""
        return fmix32(random_bits(jax.random.wrap_key_data(self.key), size) + self.count.astype(jnp.uint32))


def next_draw(shared: Draw) -> Draw:
    """The draw of the next round."""
    return Draw(shared.key, shared.count + 1)


@factory
def rand_k(
    ratio: Ratio | None = None, *, k: int | None = None, peak: float | None = None, least: float | None = None
) -> Compressor:
    """Keeps k entries chosen uniformly at random, the same on all workers, scaled to be unbiased.

    C(x)_j = (d / k) x_j if j in S, else 0;  S uniform among subsets of size k.
    omega = d / k - 1. Linear: the index set comes from the shared key and the round, so only
    k values travel, and they can be summed on the way.

    The expectation is over the shared draw: workers draw the same S, so their errors do not
    average out as those of private compressors do.

    With a schedule k changes from round to round, equally on all workers. The message has room for the largest k, what
    follows the first k values is zero, and omega is that of the smallest k.

    Args:
        ratio: k = max(1, floor(ratio d)), in (0, 1], or an optax schedule.
        k: number of entries instead; k >= d keeps all, unscaled.
        peak: largest value of the schedule; its first one if not given.
        least: smallest value of the schedule, needed for omega. Smaller ones are raised to it.

    Returns:
        Compressor with payload `Dense` of k values.

    Raises:
        ValueError: neither or both of ratio and k, out of range, or a schedule without `least`.

    Reference: Stich, Cordonnier, Jaggi 2018, definition 2.1, with the scaling d / k.

    >>> import jaxcomp as jc
    >>> x_hat, payload = jc.roundtrip(jc.rand_k(k=1), jnp.ones(4), key=jax.random.key(0))
    >>> print(jnp.sum(x_hat), payload.values)
    4.0 [1.]
    """
    if callable(ratio) and least is None:
        raise ValueError("rand_k: a schedule needs least=, its smallest ratio: omega = d / k - 1 is largest there")
    target = target_of("rand_k", ratio, peak, k=k, least=least)

    def indices_of(shared: Draw, d: int) -> Array:
        """Indices in random order, so that the first of them are a uniform subset, too."""
        return random_subset(shared.round_key(), d, target.peak(d))

    def kept(values: Array, shared: Draw, d: int) -> tuple[Array, Array | float]:
        """The values that are sent in this round, others zero, and d / k."""
        if not target.scheduled:
            return values, d / max(target.peak(d), 1)
        count, _ = target.of(d, shared.count)
        sent = jnp.where(lax.iota(jnp.int32, values.shape[0]) < count, values, jnp.zeros((), values.dtype))
        return sent, jnp.asarray(d, sent.dtype) / jnp.maximum(count, 1).astype(sent.dtype)

    def compress(key, x, state):
        values, _ = kept(finite(x[indices_of(state.shared, x.shape[0])]), state.shared, x.shape[0])
        return Dense(values), state.local

    def add(total, payloads, weights, shared):
        d = total.shape[0]
        check_like("rand_k", payloads.values.shape[1:], (target.peak(d),))
        indices = indices_of(shared, d)

        def add_one(total, message):
            payload, weight = message
            values, scale = kept(payload.values.astype(total.dtype), shared, d)
            # The barrier keeps the product from being contracted with the addition (`accumulate`).
            values = weighted(lax.optimization_barrier(bounded(values * scale)), weight)
            return added_at(total, indices, values)

        return fold(add_one, total, (payloads, weights))

    def decompress(payload, shared, like):
        stacked = jax.tree.map(lambda a: a[None], payload)
        return bounded(add(jax.ShapeDtypeStruct(like.shape, wide(like.dtype)), stacked, None, shared), like.dtype)

    return on_vectors(
        init=lambda shared_key, like: State(shared=Draw.first(shared_key)),
        compress=compress,
        decompress=decompress,
        accumulate=add,
        advance=next_draw,
        spec=Spec(
            f"rand_k({shown(ratio, k)})",
            omega=lambda d: d / target.least(d) - 1 if d else 0.0,
            alpha=None,
            linear=True,
        ),
    )
