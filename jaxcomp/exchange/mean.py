"""The mean of messages, from what a route carried."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxcomp.base import accumulate, entries, for_worker, wide, wide_like
from jaxcomp.exchange.routes import Call, Carried, Outgoing
from jaxcomp.exchange.varying import axis_size, on_equal_types, varying
from jaxcomp.payloads import Dense, Leaves
from jaxcomp.pieces import SparseSum

__all__ = ["mean_of"]


def mean_of(out: Outgoing, carried: Carried, call: Call, *, sparse: bool = False) -> Any:
    """The mean of what a route carried; the payloads of all workers are decoded and added, on every worker alike.

    sparse: vectors may be `SparseSum`.
    """
    if carried.payloads is None:
        return carried.mean
    like = wide_like(out.like)
    if carried.is_mean:  # one message, which is decoded without a pass that adds it to zeros
        first, mine = lambda a: a[0], lambda shared: for_worker(out.compressor, shared, 0, 1)
        decode = lambda sent, shared: out.compressor.decompress(jax.tree.map(first, sent), mine(shared), like)
        return varying(on_equal_types(decode, carried.payloads, out.shared), call.outer)

    def add(payloads: Any, weights: Any, shared: Any) -> Any:
        if sparse:
            return entries(out.compressor, payloads, weights, shared, like)
        return accumulate(out.compressor, like, payloads, weights, shared)

    workers, weights = axis_size(call.axis), carried.weights
    # A share of 1/n comes in two parts. 2^-k <= 1/n goes where messages are added: its products are exact, so that sums
    # are the same bit for bit wherever they are compiled, and none overflows. 2^k/n < 2 comes last.
    last = 1.0
    if call.weights is None:
        power = 0.5 ** (workers - 1).bit_length()
        last = 1 / (workers * power)
        if weights is None:
            weights = _equal_weights(carried.payloads, power, wide(*(leaf.dtype for leaf in jax.tree.leaves(like))))
        else:
            weights = jax.tree.map(lambda weight: weight * power, weights)
    total = varying(on_equal_types(add, carried.payloads, weights, out.shared), call.outer)
    return total if last == 1 else jax.tree.map(lambda t: t * last, total, is_leaf=lambda t: isinstance(t, SparseSum))


def _equal_weights(payloads: Any, weight: float, dtype: Any) -> Any:
    """The same weight for all messages, for `accumulate`; a part that was added on the way is one message."""
    share = lambda part: jnp.full((jax.tree.leaves(part)[0].shape[0],), weight, dtype)
    if not isinstance(payloads, Leaves):
        return share(payloads)
    return Leaves(Dense(jax.tree.map(share, payloads.dense.values)), tuple(map(share, payloads.leaves)))
