"""Stacks on a leading axis: messages of several workers, folded in their order; plans of several workers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.packing import as_words

__all__ = ["fold", "fold_in_one_pass", "one_row", "row_of", "weighted"]

Array = jax.Array
Tree = Any


def fold(add: Callable[[Tree, Tree], Tree], total: Tree, messages: Tree) -> Tree:
    """`lax.scan` of `add` over stacked messages; no loop is built for a single one."""
    add, messages = _in_slices(add, messages)
    if jax.tree.leaves(messages)[0].shape[0] == 1:
        return add(total, jax.tree.map(lambda a: a[0], messages))
    total, _ = lax.scan(lambda t, m: (add(t, m), None), total, messages)
    return total


# So many messages of dense codes are added in one pass over the total, on CPU in about half the time of a pass for each
# (`python -m experiments bench compressors --log2-size 20`: "add" against so many times "decompress"). With 20 bf16
# and f32 lose, and compiling takes a second.
ONE_PASS = 8


def fold_in_one_pass(add: Callable[[Tree, Tree], Tree], total: Tree, messages: Tree) -> Tree:
    """`fold` for messages that are decoded entry by entry."""
    first = next((a for a in jax.tree.leaves(messages) if a.size), None)
    count = jax.tree.leaves(messages)[0].shape[0]
    if first is None or not 1 < count <= ONE_PASS:
        return fold(add, total, messages)

    add, messages = _in_slices(add, messages)

    def add_all(total):
        for j in range(count):
            total = add(total, jax.tree.map(lambda a: a[j], messages))  # noqa: B023
        return total

    # It must end in an array: each user of the total would else decode all messages for itself.
    if jax.default_backend() != "cpu":
        return lax.optimization_barrier(add_all(total))
    # XLA for CPU drops that before it fuses. It keeps a condition that it does not know to hold always, as this does.
    value = first.reshape(-1)[0].astype(jnp.float32)
    return lax.cond((value <= jnp.inf) | jnp.isnan(value), add_all, lambda total: total, total)


def _in_slices(add: Callable[[Tree, Tree], Tree], messages: Tree) -> tuple[Callable[[Tree, Tree], Tree], Tree]:
    """Both for messages with 8-bit floats as words: XLA for CPU slices such floats more slowly."""
    narrow = lambda a: jnp.issubdtype(a.dtype, jnp.floating) and jnp.finfo(a.dtype).bits == 8
    kinds = jax.tree.map(lambda a: a.dtype, messages)
    back = lambda a, kind: a if a.dtype == kind else lax.bitcast_convert_type(a, kind)
    words = jax.tree.map(lambda a: as_words(a) if narrow(a) else a, messages)
    return lambda total, message: add(total, jax.tree.map(back, message, kinds)), words


def weighted(x: Array, weight: Array | None) -> Array:
    """weight * x; x for no weight."""
    return x if weight is None else x * weight.astype(x.dtype)


def row_of(name: str, plans: Tree, worker: Array | int, workers: int | None) -> Tree:
    """Plan of one worker from plans stacked on a leading axis, which stays, with length 1.

    A stack of one plan is returned as it is, for every worker: picking twice is picking once.
    """
    rows = jax.tree.leaves(plans)[0].shape[0]
    if rows == 1:
        return plans
    if workers not in (None, rows):
        raise ValueError(f"{name}: plans of {rows} workers for {workers} workers")
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, worker, 0), plans)


def one_row(name: str, plans: Tree) -> Tree:
    """The only plan of a stack of one, without the leading axis."""
    rows = jax.tree.leaves(plans)[0].shape[0]
    if rows != 1:
        raise ValueError(f"{name}: shared state holds the plans of {rows} workers; pick one with base.for_worker")
    return jax.tree.map(lambda a: a[0], plans)
