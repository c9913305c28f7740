"""Stacks: each row of an array [rows, ...] is compressed by itself, by one instance in the compiled program."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.arrays import as_words
from jaxcomp.backend import for_each_row, materialized, shared_program, zeros_if_shape
from jaxcomp.backend_gpu import rows_apart
from jaxcomp.base import Compressor, State, accumulate, advance, check_pair, for_worker, left, left_of

__all__ = ["Rows", "compress_together", "rows"]

Array = jax.Array


class Rows(NamedTuple):
    """State of the rows of a stack: all arrays have a leading axis."""

    rows: Any


def _row(like: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(like.shape[1:], like.dtype)


def rows(one: Compressor) -> Compressor:
    """C(X)_i = C(X_i) for each row i of a stack, one row after the other.

    On a GPU codes and sparse messages are made of all rows at once; other compressors may hold a row in several forms.

    Each row has its own state and its own keys. The payload has a leading axis of rows on all arrays. omega and alpha
    are those of a row, and so of all.
    """
    # A row is cut out of the stack once, before the call; each pass over it would else cut it out again.
    compress_one = one.compress if one.spec.linear else shared_program(one.compress)
    of_each = for_each_row if one.spec.entrywise or one.entries is not None else lax.map

    def init(shared_key, like):
        keys = jax.random.split(shared_key, like.shape[0])
        return State(*map(Rows, jax.vmap(lambda key: one.init(key, _row(like)))(keys)))

    def compress(key, x, state):
        keys = jax.random.split(key, x.shape[0])
        args = (keys, x, State(state.local.rows, state.shared.rows))
        first = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), args)
        made = jax.eval_shape(one.compress, *first)
        check_pair(one.spec.name, made, first[2])
        kinds = jax.tree.map(lambda a: a.dtype, made[0])

        # In turn on CPUs, where under vmap each `lax.cond` of a compressor would take both ways, sixfold the time. As
        # words: XLA for CPU widens a whole array of narrow floats to write a part of it in a loop, and back.
        # Keys as words: jax_debug_key_reuse takes mapped keys for used ones where workers are mapped, too.
        def row(args):
            words, *others = args
            payload, local = compress_one(jax.random.wrap_key_data(words, impl=jax.random.key_impl(key)), *others)
            return jax.tree.map(as_words, payload), local

        payload, local = of_each(row, (jax.random.key_data(keys), *args[1:]))
        return jax.tree.map(lax.bitcast_convert_type, payload, kinds), Rows(local)

    def decompress(payload, shared, like):
        return jax.vmap(lambda payload, shared: one.decompress(payload, shared, _row(like)))(payload, shared.rows)

    def add(total, payloads, weights, shared):
        total, by_row = zeros_if_shape(total, payloads), jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0), payloads)
        return of_each(lambda args: accumulate(one, args[0], args[1], weights, args[2]), (total, by_row, shared.rows))

    def of_shared(function):
        """The same function of the shared state of each row."""
        return lambda shared, *args: Rows(jax.vmap(lambda row: function(one, row, *args))(shared.rows))

    def left_over(local):
        return left_of(jax.vmap(lambda row: left(one, row))(local.rows))

    return Compressor(
        init,
        compress,
        decompress,
        one.spec._replace(rows=one, layout=None, lifted=None),
        accumulate=add,
        advance=None if one.advance is None else of_shared(advance),
        for_worker=None if one.for_worker is None else of_shared(for_worker),
        overflow=None if one.overflow is None else left_over,
    )


def compress_together(one: Compressor, keys: list[Array], xs: list[Array], state: State) -> list[tuple[Any, Any]]:
    """one.compress(key, x, state) of several vectors of one shape, all at once; the state holds no arrays.

    The payloads are made before anything reads a row of them: each reader of a row would else compute it again.
    """
    # Keys as words: jax_debug_key_reuse takes mapped keys for used ones where workers are mapped, too.
    words, kind = jnp.stack(list(map(jax.random.key_data, keys))), jax.random.key_impl(keys[0])

    def compress(words, x):
        return one.compress(jax.random.wrap_key_data(words, impl=kind), x, state)[0]

    payloads = materialized(jax.vmap(compress)(words, jnp.stack(xs)))
    return [(payload, state.local) for payload in rows_apart(payloads)]
