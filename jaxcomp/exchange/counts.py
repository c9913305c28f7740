"""Counts of one round of a worker: bytes, bits, entries and overflow of its messages, and errors where asked for.

A side exit of the road: nothing here changes what is sent. `info` reads the counts from the state.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.arrays import wide
from jaxcomp.exchange.routes import ROUTES, SCATTER
from jaxcomp.norms import block_norms
from jaxcomp.payloads import by_row, cheap_bits, code_bits, lane_bytes, num_entries

__all__ = [
    "NAMES",
    "Counts",
    "Errors",
    "add_counts",
    "count_message",
    "count_sum",
    "errors_of",
    "joint_norm",
    "no_counts",
    "no_errors",
    "nonfinite",
]

Array = jax.Array
NAMES = (*ROUTES, SCATTER.name)


class Errors(NamedTuple):
    """Norms that take passes over the gradient; NaN where not asked for. error, norm: of C(m) - m, and of m."""

    error: Array
    norm: Array
    nonfinite: Array


class Counts(NamedTuple):
    """Measurements of one worker in one round, as they are kept in the state. All scalars, f32 or i32."""

    lane_bytes: Array
    code_bits: Array
    entries: Array
    size: Array
    overflow: Array
    sent_bytes: Array
    route: Array
    errors: Errors


def no_errors() -> Errors:
    """Errors of a round in which nothing was measured."""
    return Errors(*(jnp.full((), jnp.nan, jnp.float32),) * 3)


def no_counts() -> Counts:
    """Counts of a round in which nothing was sent."""
    integer, real = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.float32)
    return Counts(real, real, real, real, integer, real, integer, no_errors())


def add_counts(counts: list[Counts]) -> Counts:
    """Adds the counts of several messages of one round, joins norms, takes the last of their routes in the table."""
    total = jax.tree.map(lambda *xs: sum(xs[1:], start=xs[0]), no_counts(), *counts)
    every = [count.errors for count in counts] or [no_errors()]
    errors = Errors(
        joint_norm([each.error for each in every]), joint_norm([each.norm for each in every]), every[0].nonfinite
    )
    route = jnp.max(jnp.stack([jnp.zeros((), jnp.int32), *(count.route for count in counts)]))
    return total._replace(errors=errors, route=route)


def errors_of(message: Any, own: Any) -> Errors:
    """Norms of C(m) - m and of m, over all vectors together."""
    leaves = lambda tree: [x.astype(wide(x.dtype)) for x in jax.tree.leaves(tree)]
    norm_of = lambda parts: joint_norm([block_norms(x.reshape(1, -1), 2)[0] for x in parts])
    message = [jnp.where(jnp.isfinite(m), m, jnp.zeros((), m.dtype)) for m in leaves(message)]
    error = norm_of([s - m for s, m in zip(leaves(own), message, strict=True)])
    return Errors(error, norm_of(message), jnp.zeros((), jnp.float32))


def nonfinite(arrays: list[Array]) -> Array:
    """Number of NaN and infinite entries, f32[]. They are counted only where the sum is not finite: that is quicker."""
    clean = jnp.isfinite(sum([jnp.sum(x).astype(jnp.float32) for x in arrays], jnp.zeros((), jnp.float32)))
    none = clean.astype(jnp.int32) * 0  # with the types of all arrays
    counted = lambda none, arrays: sum([jnp.sum(~jnp.isfinite(x), dtype=jnp.int32) for x in arrays], none)
    return lax.cond(clean, lambda none, arrays: none, counted, none, arrays).astype(jnp.float32)


def joint_norm(norms: list[Array]) -> Array:
    """Norm of vectors laid end to end, from theirs, without overflow: f32[...]."""
    if not norms:
        return jnp.zeros((), jnp.float32)
    stacked = jnp.stack([norm.astype(jnp.float32) for norm in norms])
    largest = jnp.max(stacked, axis=0)
    unit = jnp.where(largest > 0, largest, 1)
    return unit * jnp.sqrt(jnp.sum(jnp.square(jnp.clip(stacked / unit, 0, 1)), axis=0))


def count_message(message: Any, payload: Any, carried: Any, code: str | None) -> Counts:
    """Counts of one message and what its route added to it (`routes.Carried`), without overflow and errors.

    code: whose bits are counted; None: what is cheap to count.
    """
    bits_of = cheap_bits if code is None else lambda payload: code_bits(payload, code=code)
    return no_counts()._replace(
        lane_bytes=_real(float(lane_bytes(payload) + carried.lane_bytes)),
        code_bits=by_row(bits_of, payload, message) + _real(carried.code_bits),
        entries=by_row(num_entries, payload, message),
        size=_real(float(sum(leaf.size for leaf in jax.tree.leaves(message)))),
        sent_bytes=_real(carried.sent_bytes),
        route=jnp.asarray(NAMES.index(carried.route), jnp.int32),
    )


def count_sum(arrays: Any, sent_bytes: float) -> Counts:
    """Counts of a sum of uncompressed arrays."""
    size, held = sum(leaf.size for leaf in jax.tree.leaves(arrays)), lane_bytes(arrays)
    return no_counts()._replace(
        lane_bytes=_real(held),
        code_bits=_real(8 * held),
        entries=_real(size),
        size=_real(size),
        sent_bytes=_real(sent_bytes),
        route=jnp.asarray(NAMES.index("sum"), jnp.int32),
    )


def _real(value: Any) -> Array:
    """The value as f32[]: numbers of bits and bytes may be larger than any i32."""
    return jnp.asarray(float(value) if isinstance(value, int) else value).astype(jnp.float32)
