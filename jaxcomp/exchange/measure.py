"""What one round cost and lost: counted in the compiled step, kept in the state, read by `info`."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from jaxcomp.base import wide
from jaxcomp.bits import lane_bytes
from jaxcomp.exchange.layout import is_mean
from jaxcomp.exchange.meet import CHOICES
from jaxcomp.norms import block_norms

__all__ = ["Counts", "Info", "count", "info", "no_counts"]

Array = jax.Array


class Counts(NamedTuple):
    """Measurements of one worker in one round, as they are kept in the state. All scalars."""

    lane_bytes: Array
    code_bits: Array
    sent: Array
    size: Array
    error: Array
    norm: Array
    nonfinite: Array
    overflow: Array
    sent_bytes: Array
    via: Array


class Info(NamedTuple):
    """One round of `compressed_mean`, averaged over the workers.

    lane_bytes: bytes of a worker's payload, padding included.
    code_bits: bits that the best code we have needs for its message.
    achieved_ratio: share of the message's entries that are not zero after compression.
    relative_error: |C(m) - m| / |m| for the message m (gradient, plus memory or minus shift).
    nonfinite: NaN or infinite gradient entries, summed over workers.
    overflow: chosen entries that found no place in the static capacity, summed over workers.
    sent_bytes: bytes a worker sends in the exchange, every hop counted, as the compiled program does.
    via: how the payloads met, as an index of `jaxcomp.exchange.CHOICES`; `chosen` is its name.
    """

    lane_bytes: Array
    code_bits: Array
    achieved_ratio: Array
    relative_error: Array
    nonfinite: Array
    overflow: Array
    sent_bytes: Array
    via: Array

    @property
    def chosen(self) -> str:
        """Name of the exchange, of a concrete `Info`."""
        return CHOICES[int(np.max(np.asarray(self.via)))]


def no_counts() -> Counts:
    """Before the first round."""
    integer, real = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.float32)
    return Counts(real, real, integer, integer, real, real, integer, integer, real, integer)


def count(payload: Any, bits: Any, grads: Any, message: Any, sent: Any, overflow: Array) -> Counts:
    """What one worker measures in a round.

    Args:
        payload: all that it contributes to collectives.
        bits: of the best code for it.
        grads: before anything was done to them.
        message: what was compressed.
        sent: what was made of it, or None if errors are not measured.
        overflow: `base.overflow` of the compressor after the round.
    """
    leaves = lambda tree: [x.astype(wide(x.dtype)) for x in jax.tree.leaves(tree)]
    total = lambda parts, dtype: jnp.sum(jnp.stack([jnp.zeros((), dtype), *parts]), dtype=dtype)
    norm_of = lambda parts: _joint_norm([block_norms(x.reshape(1, -1), 2)[0] for x in parts])
    message = leaves(message)
    if sent is None:
        kept = jnp.zeros((), jnp.int32)
        error = norm = jnp.full((), jnp.nan, jnp.float32)
    else:
        sent = leaves(sent)
        message = [jnp.where(jnp.isfinite(m), m, jnp.zeros((), m.dtype)) for m in message]
        kept = total([jnp.sum(s != 0, dtype=jnp.int32) for s in sent], jnp.int32)
        error = norm_of([s - m for s, m in zip(sent, message, strict=True)])
        norm = norm_of(message)
    return Counts(
        lane_bytes=jnp.asarray(lane_bytes(payload), jnp.float32),
        code_bits=jnp.asarray(bits).astype(jnp.float32),
        sent=kept,
        size=jnp.asarray(sum(m.size for m in message), jnp.int32),
        error=error,
        norm=norm,
        nonfinite=_nonfinite(jax.tree.leaves(grads)),
        overflow=overflow,
        sent_bytes=jnp.zeros((), jnp.float32),
        via=jnp.zeros((), jnp.int32),
    )


def _nonfinite(arrays: list[Array]) -> Array:
    """Number of NaN and infinite entries, i32[]. They are counted only where the sum is not finite: that is quicker."""
    clean = jnp.isfinite(sum([jnp.sum(x).astype(jnp.float32) for x in arrays], jnp.zeros((), jnp.float32)))
    none = clean.astype(jnp.int32) * 0  # with the types of all arrays
    counted = lambda none, arrays: sum([jnp.sum(~jnp.isfinite(x), dtype=jnp.int32) for x in arrays], none)
    return lax.cond(clean, lambda none, arrays: none, counted, none, arrays)


def _joint_norm(norms: list[Array]) -> Array:
    """Norm of vectors laid end to end, from theirs, without overflow: f32[...]."""
    stacked = jnp.stack([jnp.zeros((), jnp.float32), *(norm.astype(jnp.float32) for norm in norms)])
    largest = jnp.max(stacked, axis=0)
    unit = jnp.where(largest > 0, largest, 1)
    return unit * jnp.sqrt(jnp.sum(jnp.square(jnp.clip(stacked / unit, 0, 1)), axis=0))


def info(state: Any, *, each: bool = False) -> Info:
    """What the last round cost and lost.

    Args:
        state: of `compressed_mean`, or of any optimizer that contains it; several are added up.
            Inside the mapped function, or the whole state outside of it. Of a hierarchy, one level may be given.
        each: arrays of shape [n], one number for each worker, instead of means and sums.

    Returns:
        `Info` of scalars (or arrays). All zero before the first round; ratio and error are 0/0 = NaN there.

    Raises:
        ValueError: there is no `compressed_mean` in the state.

    >>> import jax, jax.numpy as jnp, jaxcomp as jc
    >>> tx = jc.compressed_mean(jc.direct(jc.top_k(k=1)), axis_name=None)
    >>> grads = jnp.array([3.0, 4.0])
    >>> _, state = tx.update(grads, tx.init(grads))
    >>> i = jc.info(state)
    >>> print(i.lane_bytes, i.achieved_ratio, i.relative_error)
    8.0 0.5 0.6
    """
    nodes = [node for node in jax.tree.leaves(state, is_leaf=is_mean) if is_mean(node)]
    nodes = [node for node in nodes if node.local.counts is not None]
    if not nodes:
        raise ValueError("info: there is no compressed_mean in this state")
    rows = [jax.tree.map(lambda x: jnp.reshape(_here(x), (-1,)), node.local.counts) for node in nodes]
    if len({row.norm.size for row in rows}) > 1:  # levels of a hierarchy
        if each:
            raise ValueError("info: levels have different numbers of workers; leave each=True out, or give one level")
        rows = [_over_workers(row) for row in rows]
    counts = jax.tree.map(lambda *xs: sum(xs[1:], start=xs[0]), *rows)
    error, norm = (
        jax.vmap(lambda *xs: _joint_norm(list(xs)))(*(getattr(row, name) for row in rows)) for name in ("error", "norm")
    )
    result = Info(
        counts.lane_bytes,
        counts.code_bits,
        jnp.where(jnp.isnan(counts.norm), jnp.nan, counts.sent.astype(jnp.float32) / counts.size.astype(jnp.float32)),
        error / norm,
        counts.nonfinite,
        counts.overflow,
        counts.sent_bytes,
        jnp.max(jnp.stack([row.via for row in rows]), axis=0),
    )
    return result if each else jax.tree.map(lambda x: x[0], _over_workers(result))


def _here(x: Any) -> Any:
    """A concrete array on one device: a handful of numbers is not worth programs among all."""
    concrete = isinstance(x, jax.Array) and not isinstance(x, Tracer) and x.is_fully_addressable
    return jnp.asarray(np.asarray(x)) if concrete else x


def _over_workers(rows: Any) -> Any:
    """The means of what each worker counted (sums and maxima where they are meant), with one row left."""
    means = jax.tree.map(lambda x: jnp.mean(x, keepdims=True), rows)
    add = lambda x: jnp.sum(x, keepdims=True)
    return means._replace(
        nonfinite=add(rows.nonfinite), overflow=add(rows.overflow), via=jnp.max(rows.via, keepdims=True)
    )
