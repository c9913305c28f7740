"""Losses of one round, as they are measured, and `info`, which reads what a state keeps of them and of costs.

A side exit of the road: nothing here changes what is sent.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from jaxcomp.arrays import is_host, is_shapes, wide
from jaxcomp.exchange.routes import NAMES
from jaxcomp.exchange.state import NOT_MEASURED, UNIT, Errors, check_rows, means_in
from jaxcomp.norms import block_norms

__all__ = ["Info", "errors_of", "info", "joint_errors", "nonfinite"]

Array = jax.Array


def joint_errors(every: Sequence[Errors]) -> Errors:
    """Errors of several messages together; of one at least."""
    error, norm = [_joint([each[i] for each in every]) for i in (0, 1)]
    return Errors(error, norm, every[0].nonfinite)


def _joint(norms: list[Array]) -> Array:
    """The joint norm, where all were measured."""
    measured = functools.reduce(jnp.minimum, norms) >= 0
    return jnp.where(measured, joint_norm(norms), jnp.float32(NOT_MEASURED))


def errors_of(message: Any, own: Any) -> Errors:
    """Norms of C(m) - m and of m, over all vectors together."""
    leaves = lambda tree: [x.astype(wide(x.dtype)) for x in jax.tree.leaves(tree)]
    norm_of = lambda parts: joint_norm([block_norms(x.reshape(1, -1), 2)[0] for x in parts])
    message = [jnp.where(jnp.isfinite(m), m, jnp.zeros((), m.dtype)) for m in leaves(message)]
    error = norm_of([s - m for s, m in zip(leaves(own), message, strict=True)])
    return Errors(error, norm_of(message), jnp.zeros((), jnp.float32))


def nonfinite(arrays: Sequence[Array]) -> Array:
    """Number of NaN and infinite entries, f32[]. They are counted only where the sum is not finite: that is quicker."""
    clean = jnp.isfinite(sum([jnp.sum(x).astype(jnp.float32) for x in arrays], jnp.zeros((), jnp.float32)))
    none = clean.astype(jnp.int32) * 0  # with the types of all arrays
    counted = lambda none, arrays: sum([jnp.sum(~jnp.isfinite(x), dtype=jnp.int32) for x in arrays], none)
    return lax.cond(clean, lambda none, arrays: none, counted, none, arrays).astype(jnp.float32)


def joint_norm(norms: list[Any]) -> Any:
    """Norm of vectors laid end to end, from theirs, without overflow: f32[...]. In NumPy for norms on the host."""
    if not norms:
        return jnp.zeros((), jnp.float32)
    xp: Any = np if all(map(is_host, norms)) else jnp
    stacked = xp.stack([norm.astype(xp.float32) for norm in norms])
    largest = xp.max(stacked, axis=0, keepdims=True)
    unit = xp.where(largest > 0, largest, xp.ones((), xp.float32))
    return unit[0] * xp.sqrt(xp.sum(xp.square(xp.clip(stacked / unit, 0, 1)), axis=0))


# ------------------------------------------------------------------------------------------------
# As users read it


class Info(NamedTuple):
    """One round of `compressed_mean`, averaged over the workers (of this process, where there are several).

    lane_bytes: bytes of a worker's payload, padding included.
    code_bits: bits of the code that `wire.encode` uses for its message.
    achieved_ratio: entries that the payload carries, as a share of those of the message.
    relative_error: |C(m) - m| / |m| for the message m (gradient, plus memory or minus shift). NaN unless measured.
    nonfinite: NaN or infinite gradient entries, summed over workers. NaN unless measured.
    overflow: chosen entries that found no place in the static capacity, summed over workers.
    sent_bytes: bytes a worker sends in the exchange, every hop counted, as the compiled program does. Loss, weights and
        auxiliary values of `value_and_grad` travel beside it and are not counted (`ledger` has them).
    route: how the payloads travelled, as a place in `jaxcomp.exchange.ROUTES` (behind them, of your own); `chosen` is
        its name.
    dense: entries of a worker's gradient that are sent as they are, since they are of small leaves.
    searches: vectors whose threshold no estimate found (`sidco` and its like), so that it was searched for in further
        passes; summed over workers.
    rounds: so far; the largest number, where several exchanges are added up.
    total_sent_bytes, total_code_bits: of all rounds since the state was made, or handed on by `redistribute`.
    """

    lane_bytes: Array
    code_bits: Array
    achieved_ratio: Array
    relative_error: Array
    nonfinite: Array
    overflow: Array
    sent_bytes: Array
    route: Array
    dense: Array | int = 0
    searches: Array | int = 0
    rounds: Array | int = 0
    total_sent_bytes: Array | int = 0
    total_code_bits: Array | int = 0

    @property
    def chosen(self) -> str:
        """Name of the route, of a concrete `Info`."""
        return NAMES[int(np.max(np.asarray(self.route)))]

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers and strings, of a concrete `Info`, for JSON and logs; None for what was not measured.

        With each=True lists, one item for each worker.
        """

        def plain(x: Any) -> Any:
            if isinstance(x, list):
                return [plain(each) for each in x]
            return None if isinstance(x, float) and x != x else x

        values = {name: plain(np.asarray(getattr(self, name)).tolist()) for name in self._fields}
        names = np.asarray(self.route).astype(int)
        return values | {"route": [NAMES[i] for i in names] if names.ndim else NAMES[names]}

    def __str__(self) -> str:
        if any(isinstance(x, Tracer) or not hasattr(x, "shape") for x in self):
            return f"Info({', '.join(f'{name}={x}' for name, x in zip(self._fields, self, strict=True))})"
        each = max(np.size(x) for x in self)
        route = [NAMES[i] for i in np.broadcast_to(np.asarray(self.route), (each,)).astype(int)]
        forms = {"lane_bytes": "{:,.0f} B", "sent_bytes": "{:,.0f} B"}
        forms |= {"achieved_ratio": "{:.4g}", "relative_error": "{:.4g}"}
        table = []
        for name in (*self._fields[:6], "searches", "sent_bytes", "dense"):
            row = np.broadcast_to(np.asarray(getattr(self, name)), (each,))
            form = forms.get(name, "{:,.0f}")
            table.append([name, *("not measured" if np.isnan(x) else form.format(x) for x in row)])
        table.insert(-1, ["route", *route])
        if each > 1:
            table.insert(0, ["worker", *map(str, range(each))])
        widths = [max(len(row[i]) for row in table) for i in range(each + 1)]
        line = lambda row: "  ".join(
            [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]
        )
        return "\n".join(map(line, table))

    __repr__ = __str__


def info(state: Any, *, each: bool = False) -> Info:
    """Reads what the last round cost and lost.

    Nothing is exchanged: among several processes each reads the rows of its own workers, so one of them may print it
    alone.

    Args:
        state: of `compressed_mean` or `rounds`, or of any optimizer that contains it; several are added up.
            Inside the mapped function, or the whole state outside of it. Of a hierarchy, one level may be given.
        each: arrays of shape [n], one number for each worker, instead of means and sums.

    Returns:
        `Info` of scalars (or arrays). All zero before the first round; the ratio is 0/0 = NaN there. Relative error and
        non-finite entries are NaN unless they are asked for: compressed_mean(..., measure=True).

    Raises:
        ValueError: there is no `compressed_mean` in the state, or it has lost the rows of all workers but one.

    >>> import jax, jax.numpy as jnp, jaxcomp as jc
    >>> tx = jc.compressed_mean(jc.direct(jc.top_k(k=1)), axis_name=None, measure=True)
    >>> grads = jnp.array([3.0, 4.0])
    >>> _, state = tx.update(grads, tx.init(grads))
    >>> i = jc.info(state)
    >>> print(i.lane_bytes, i.achieved_ratio, i.relative_error)
    8.0 0.5 0.6
    >>> print(i)
    lane_bytes         8 B
    code_bits           33
    achieved_ratio     0.5
    relative_error     0.6
    nonfinite            0
    overflow             0
    searches             0
    sent_bytes         0 B
    route           gather
    dense                0
    """
    nodes = means_in(state)
    if not nodes:
        raise ValueError("info: there is no compressed_mean in this state")
    if is_shapes(nodes):
        raise TypeError("info: the state holds shapes, jax.ShapeDtypeStruct, in place of arrays")
    for node in nodes:
        check_rows("info", node)
    with jax.debug_nans(False), np.errstate(all="ignore"):  # NaN is what is not known
        return jax.tree.map(jnp.asarray, _read(nodes, each))


def _read(nodes: list[Any], each: bool) -> Info:
    """The numbers as users read them; of a concrete state in NumPy, without a program to compile."""
    rows = [jax.tree.map(lambda x: _here(x).reshape(-1), node.local.counts) for node in nodes]
    rounds = [_here(node.shared.count) for node in nodes]
    xp: Any = np if all(map(is_host, jax.tree.leaves((rows, rounds)))) else jnp
    parts = [xp.reshape(row.since, (-1, 4)).T for row in rows]
    rows = [row._replace(since=(a * UNIT + c, b * UNIT + d)) for row, (a, b, c, d) in zip(rows, parts, strict=True)]
    if len({row.size.size for row in rows}) > 1:  # levels of a hierarchy
        if each:
            raise ValueError("info: levels have different numbers of workers; leave each=True out, or give one level")
        rows = [jax.tree.map(functools.partial(xp.mean, keepdims=True, dtype=xp.float32), row) for row in rows]
    counts = jax.tree.map(lambda *xs: sum(xs[1:], start=xs[0]), *rows)
    known = lambda norms: xp.where(functools.reduce(xp.minimum, norms) >= 0, 1, xp.nan).astype(xp.float32)
    error, norm = ([getattr(row.errors, name) for row in rows] for name in ("error", "norm"))
    dense = sum(group.like.size for node in nodes for group in node.about.groups.groups if group.small)
    result = Info(
        counts.lane_bytes,
        counts.code_bits,
        counts.entries / counts.size,
        known(error) * joint_norm(error) / joint_norm(norm),
        known([row.errors.nonfinite for row in rows]) * counts.errors.nonfinite,
        counts.overflow,
        counts.sent_bytes,
        xp.max(xp.stack([row.route for row in rows]), axis=0),
        xp.full_like(counts.entries, dense),
        counts.searches,
        xp.full(counts.overflow.shape, xp.max(xp.stack([xp.max(each) for each in rounds]))),
        *counts.since,
    )
    return result if each else jax.tree.map(lambda x: x[0], _over_workers(result, xp))


def _here(x: Any) -> Any:
    """A concrete array on the host: of this process's workers alone, so that no other process is waited for."""
    if isinstance(x, Tracer):
        return x
    if not isinstance(x, jax.Array) or x.is_fully_addressable:
        return np.asarray(x)
    if not x.ndim:  # equal everywhere
        return np.asarray(x.addressable_data(0))
    rows = {shard.index[0].start or 0: np.asarray(shard.data) for shard in x.addressable_shards}
    return np.concatenate([rows[start] for start in sorted(rows)])


def _over_workers(rows: Info, xp: Any) -> Info:
    """The means of what each worker counted (sums and maxima where they are meant), with one row left."""
    means = jax.tree.map(functools.partial(xp.mean, keepdims=True, dtype=xp.float32), rows)
    add = lambda x: xp.sum(x, keepdims=True, dtype=x.dtype)
    sums = {name: add(getattr(rows, name)) for name in ("nonfinite", "overflow", "searches")}
    return means._replace(route=xp.max(rows.route, keepdims=True), rounds=xp.max(rows.rounds, keepdims=True), **sums)
