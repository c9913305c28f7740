"""Compressors of the vectors that a layout makes of a tree: one array, a stack of rows, or `Parts`."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.base import (
    Compressor,
    Lifted,
    State,
    accumulate,
    advance,
    finite,
    fold,
    for_worker,
    is_array,
    lengths,
    overflow,
    weighted,
)
from jaxcomp.layout import DEFAULT, Parts, rows_of
from jaxcomp.packing import as_words
from jaxcomp.payloads import Dense, Leaves

__all__ = ["alpha_of", "lift", "omega_of"]


class Each(NamedTuple):
    """States of the vectors, in their order; with a leading axis for the rows of a stack."""

    vectors: tuple[Any, ...]


def _row(like: Any) -> Any:
    return jax.ShapeDtypeStruct(like.shape[1:], like.dtype)


def lift(compressor: Compressor) -> Compressor:
    """The compressor of the vectors that a layout makes of a tree. Which layout stands in `spec.lifted`.

    Small leaves go as they are. Each row of a stack has its own state and its own keys; rows are compressed one after
    the other. The payload of a stack has a leading axis of rows on all arrays.
    """
    layout, one = compressor.spec.lifted or Lifted(compressor.spec.layout or DEFAULT, compressor)
    each = _of_vector_or_stack(one)

    def init(shared_key, like):
        if is_array(like):
            return each.init(shared_key, like)
        states = [each.init(jax.random.fold_in(shared_key, i), vector) for i, vector in enumerate(like.vectors)]
        return State(Each(tuple(s.local for s in states)), Each(tuple(s.shared for s in states)))

    def compress(key, parts, state):
        if is_array(parts):
            return each.compress(key, parts, state)
        states = zip(parts.vectors, state.local.vectors, state.shared.vectors, strict=True)
        done = [
            each.compress(jax.random.fold_in(key, i), vector, State(local, shared))
            for i, (vector, local, shared) in enumerate(states)
        ]
        payload = Leaves(Dense(finite(parts.dense)), tuple(payload for payload, _ in done))
        return payload, Each(tuple(local for _, local in done))

    def decompress(payload, shared, like):
        if is_array(like):
            return each.decompress(payload, shared, like)
        triples = zip(payload.leaves, shared.vectors, like.vectors, strict=True)
        return Parts(
            payload.dense.values.astype(like.dense.dtype), tuple(each.decompress(*triple) for triple in triples)
        )

    def add(total, payloads, weights, shared):
        if is_array(total):
            return accumulate(each, total, payloads, weights, shared)
        if not isinstance(weights, Leaves):
            weights = Leaves(Dense(weights), (weights,) * len(payloads.leaves))
        add_one = lambda t, message: t + weighted(message[0].astype(t.dtype), message[1])
        dense = fold(add_one, total.dense, (payloads.dense.values, weights.dense.values))
        each_vector = zip(total.vectors, payloads.leaves, weights.leaves, shared.vectors, strict=True)
        return Parts(dense, tuple(accumulate(each, *four) for four in each_vector))

    def over(function):
        """Of the shared states of all vectors."""

        def of(shared, *args):
            if not isinstance(shared, Each):
                return function(each, shared, *args)
            return Each(tuple(function(each, vector, *args) for vector in shared.vectors))

        return of

    def lengths_(like):
        if is_array(like):
            return lengths(each, like)
        return Leaves(Dense(None), tuple(lengths(each, vector) for vector in like.vectors))

    def overflow_(local):
        states = local.vectors if isinstance(local, Each) else (local,)
        return sum((overflow(each, state) for state in states), jnp.zeros((), jnp.int32))

    return Compressor(
        init,
        compress,
        decompress,
        one.spec._replace(lifted=Lifted(layout, one)),
        accumulate=add,
        advance=None if one.advance is None else over(advance),
        lengths=None if one.lengths is None else lengths_,
        for_worker=None if one.for_worker is None else over(for_worker),
        overflow=None if one.overflow is None else overflow_,
    )


class Rows(NamedTuple):
    """State of the rows of a stack: all arrays have a leading axis."""

    rows: Any


def _of_vector_or_stack(one: Compressor) -> Compressor:
    """Of vectors, and of the rows of a stack."""

    def init(shared_key, like):
        if rows_of(like) is None:
            return one.init(shared_key, like)
        keys = jax.random.split(shared_key, like.shape[0])
        return State(*map(Rows, jax.vmap(lambda key: one.init(key, _row(like)))(keys)))

    def compress(key, x, state):
        if rows_of(x) is None:
            return one.compress(key, x, state)
        args = (jax.random.split(key, x.shape[0]), x, State(state.local.rows, state.shared.rows))
        first = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), args)
        kinds = jax.tree.map(lambda a: a.dtype, jax.eval_shape(one.compress, *first)[0])

        # One after the other: under vmap each `lax.cond` of a compressor would take both ways, sixfold the time. As
        # words: XLA for CPU widens a whole array of narrow floats to write a part of it in a loop, and back.
        def row(args):
            payload, local = one.compress(*args)
            return jax.tree.map(as_words, payload), local

        payload, local = lax.map(row, args)
        return jax.tree.map(lax.bitcast_convert_type, payload, kinds), Rows(local)

    def decompress(payload, shared, like):
        if rows_of(like) is None:
            return one.decompress(payload, shared, like)
        return jax.vmap(lambda payload, shared: one.decompress(payload, shared, _row(like)))(payload, shared.rows)

    def add(total, payloads, weights, shared):
        if rows_of(total) is None:
            return accumulate(one, total, payloads, weights, shared)
        by_row = jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0), payloads)
        return lax.map(lambda args: accumulate(one, args[0], args[1], weights, args[2]), (total, by_row, shared.rows))

    def over(function):
        """Of the shared state of a vector, or of each row."""

        def of(shared, *args):
            if not isinstance(shared, Rows):
                return function(one, shared, *args)
            return Rows(jax.vmap(lambda row: function(one, row, *args))(shared.rows))

        return of

    def overflow_(local):
        if not isinstance(local, Rows):
            return overflow(one, local)
        return jnp.sum(jax.vmap(lambda row: overflow(one, row))(local.rows))

    return one._replace(
        init=init,
        compress=compress,
        decompress=decompress,
        accumulate=add,
        advance=over(advance),
        lengths=lambda like: lengths(one, like) if rows_of(like) is None else None,
        for_worker=over(for_worker),
        overflow=None if one.overflow is None else overflow_,
    )


def omega_of(compressor: Compressor, like: Any) -> float:
    """The largest omega over the vectors of `like`; 0 without any."""
    return max((compressor.spec.omega(size) for size in _sizes(like)), default=0.0) if compressor.spec.omega else 0.0


def alpha_of(compressor: Compressor, like: Any) -> float:
    """The smallest alpha over the vectors of `like`; 1 without any."""
    return min((compressor.spec.alpha(size) for size in _sizes(like)), default=1.0) if compressor.spec.alpha else 0.0


def _sizes(like: Any) -> list[int]:
    vectors = [like] if is_array(like) else like.vectors
    return [math.prod(x.shape if rows_of(x) is None else x.shape[1:]) for x in vectors]
