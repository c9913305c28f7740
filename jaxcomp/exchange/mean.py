"""The mean of messages, from what a route carried."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxcomp.arrays import wide, wide_like
from jaxcomp.backend import SparseSum
from jaxcomp.base import accumulate, entries, for_worker
from jaxcomp.exchange.collectives import share_of, whole_of
from jaxcomp.exchange.routes import Call, Carried, Outgoing
from jaxcomp.exchange.varying import on_equal_types, varying
from jaxcomp.payloads import Dense, Leaves

__all__ = ["mean_of"]


def mean_of(out: Outgoing, carried: Carried, call: Call, *, sparse: bool = False) -> Any:
    """The mean of what a route carried; the payloads of all workers are decoded and added, on every worker alike.

    sparse: vectors may be `SparseSum`.
    """
    if carried.payloads is None:
        return carried.mean
    like, share = wide_like(out.like), share_of(call.axis, call.weights)
    whole = lambda total: whole_of(total, call.axis, call.weights)
    if carried.is_sum:  # one message, which is decoded without a pass that adds it to zeros
        first, mine = lambda a: a[0], lambda shared: for_worker(out.compressor, shared, 0, 1)
        decode = lambda sent, shared: out.compressor.decompress(jax.tree.map(first, sent), mine(shared), like)
        total = varying(on_equal_types(decode, carried.payloads, out.shared), call.outer)
        return jax.tree.map(whole, total)

    def add(payloads: Any, weights: Any, shared: Any) -> Any:
        if sparse:
            return entries(out.compressor, payloads, weights, shared, like)
        return accumulate(out.compressor, like, payloads, weights, shared)

    weights = carried.weights
    if call.weights is None:
        weights = _equal_weights(carried.payloads, share, wide(*(leaf.dtype for leaf in jax.tree.leaves(like))))
    total = varying(on_equal_types(add, carried.payloads, weights, out.shared), call.outer)
    return jax.tree.map(whole, total, is_leaf=lambda t: isinstance(t, SparseSum))


def _equal_weights(payloads: Any, weight: float, dtype: Any) -> Any:
    """The same weight for all messages, for `accumulate`; a part that was added on the way is one, weighted already."""

    def share(part: Any) -> jax.Array:
        rows = jax.tree.leaves(part)[0].shape[0]
        return jnp.full((rows,), 1 if rows == 1 else weight, dtype)

    if not isinstance(payloads, Leaves):
        return share(payloads)
    return Leaves(Dense(jax.tree.map(share, payloads.dense.values)), tuple(map(share, payloads.leaves)))
