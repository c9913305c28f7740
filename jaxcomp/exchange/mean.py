"""The mean of messages, from what a route carried."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxcomp.base import accumulate, for_worker, wide, wide_like
from jaxcomp.exchange.routes import Call, Carried, Outgoing
from jaxcomp.exchange.varying import axis_size, on_equal_types, varying
from jaxcomp.payloads import Dense, Leaves

__all__ = ["mean_of"]


def mean_of(out: Outgoing, carried: Carried, call: Call) -> Any:
    """The mean of what a route carried; the payloads of all workers are decoded and added, on every worker alike."""
    if carried.payloads is None:
        return carried.mean
    like = wide_like(out.like)
    if carried.is_mean:  # one message, which is decoded without a pass that adds it to zeros
        first, mine = lambda a: a[0], lambda shared: for_worker(out.compressor, shared, 0, 1)
        decode = lambda sent, shared: out.compressor.decompress(jax.tree.map(first, sent), mine(shared), like)
        return varying(on_equal_types(decode, carried.payloads, out.shared), call.outer)
    add = lambda *args: accumulate(out.compressor, like, *args)
    workers, weights = axis_size(call.axis), carried.weights
    # Equal shares of 1/n: of two, four, ... workers their products are exact, so that they go where the messages are
    # added. Else 1/n comes last: sums without products are the same bit for bit wherever they are compiled.
    last = call.weights is None and (workers & (workers - 1) != 0 or weights is not None)
    if call.weights is None and not last:
        weights = _equal_shares(carried.payloads, workers, wide(*(leaf.dtype for leaf in jax.tree.leaves(like))))
    total = varying(on_equal_types(add, carried.payloads, weights, out.shared), call.outer)
    return jax.tree.map(lambda t: t * (1 / workers), total) if last else total


def _equal_shares(payloads: Any, workers: int, dtype: Any) -> Any:
    """Weights of 1/n for `accumulate`; a part that was added on the way is one message."""
    share = lambda part: jnp.full((jax.tree.leaves(part)[0].shape[0],), 1 / workers, dtype)
    if not isinstance(payloads, Leaves):
        return share(payloads)
    return Leaves(Dense(jax.tree.map(share, payloads.dense.values)), tuple(map(share, payloads.leaves)))
