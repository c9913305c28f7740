"""Compressors are written for one flat vector; this lifts them: to arrays of any shape, to stacks, to whole trees.

on_vectors   one array of any shape, from functions of vectors
lift         the vectors that a layout makes of a tree: one array, a stack of rows, or `Parts`
"""

import functools
import math
import numbers
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.arrays import as_words, finite, is_array, like_of, reshaped, weighted
from jaxcomp.backend import LONG, SparseSum, cut_apart, fold, is_lazy, of_entries, shared_program, zeros_if_shape
from jaxcomp.backend_cpu import FEW
from jaxcomp.base import Compressor, Lifted, Spec, State, accumulate, advance, entries, for_worker, lengths, overflow
from jaxcomp.compressors.checks import is_whole
from jaxcomp.layout import DEFAULT, Parts, TooLong, dense_of, rows_of
from jaxcomp.payloads import Dense, Leaves

__all__ = [
    "Each",
    "Rows",
    "alpha_of",
    "count_of",
    "lift",
    "omega_of",
    "on_vectors",
]

Array = jax.Array
MOST = 2**31 - 1  # entries of an array: indices are i32, and d stands for padding


# ------------------------------------------------------------------------------------------------
# One array


def on_vectors(
    *,
    compress: Callable,
    spec: Spec,
    decompress: Callable | None = None,
    init: Callable | None = None,
    accumulate: Callable[..., Array] | None = None,
    advance: Callable | None = None,
    lengths: Callable | None = None,
    for_worker: Callable | None = None,
    overflow: Callable | None = None,
    entries: Callable[..., tuple[Array, Array]] | None = None,
    ascending: bool = True,
    apart_from: int = 0,
) -> Compressor:
    """A `Compressor` of arrays of any shape from functions of vectors (see `base.Compressor`).

    entries: (payload, shared, like) -> indices i32[k], behind them padding of `like.size`, and values [k]; takes the
        place of `decompress` and `accumulate`. shared: of one worker or of all. ascending: whether the indices are.
    apart_from: under vmap vectors with at least so many entries are compressed one after the other, where the
        compressor selects (`row_by_row`).
    """

    def flat_like(like: Any) -> jax.ShapeDtypeStruct:
        if not is_array(like):
            raise ValueError(
                f"{spec.name} acts on one array; got a {type(like).__name__}. "
                "Wrap it: per_leaf(...) compresses each leaf, flat(...) all leaves as one vector."
            )
        (like,) = jax.tree.leaves(like_of(like))
        if like.size > MOST:
            raise TooLong(
                f"{spec.name}: an array of shape {like.shape} has {like.size} entries, and at most {MOST} can be "
                "numbered with 32 bits. Wrap it: flat(...) cuts long arrays into rows."
            )
        return jax.ShapeDtypeStruct((like.size,), like.dtype)

    def init_(shared_key, like):
        like = flat_like(like)
        return State() if init is None else init(shared_key, like)

    apart, every = row_by_row(compress) if spec.selects else compress, None

    def compress_(key, x, state):
        each = apart if flat_like(x).size >= apart_from else compress
        return each(key, jnp.reshape(x, (-1,)), state)

    def decompress_(payload, shared, like):
        if isinstance(shared, State):
            raise TypeError(
                f"{spec.name}: decompress needs what is shared of a state, state.shared; got the whole state"
            )
        payload = jax.tree.map(jnp.asarray, payload)  # of NumPy, once decoded from bytes
        return decode(payload, shared, flat_like(like)).reshape(like.shape)

    def of_any_shape(accumulate):
        def accumulate_(total, payloads, weights, shared):
            flat = reshaped(total, flat_like(total).shape)
            return accumulate(flat, payloads, weights, shared).reshape(total.shape)

        return accumulate_

    if entries is not None:
        decompress, accumulate, every = of_entries(entries, ascending)
    decode: Any = decompress
    accumulate = None if accumulate is None else of_any_shape(accumulate)
    of_flat = None if lengths is None else lambda like: lengths(flat_like(like))
    return Compressor(init_, compress_, decompress_, spec, accumulate, advance, of_flat, for_worker, overflow, every)


def row_by_row(function: Callable) -> Callable:
    """The same function; under vmap it does one row after another.

    A selection searches, and knows when it may stop. Mapped, its loops would go on for all rows until the last is
    done, and its conditionals would compute both sides for each.
    """
    mapped = jax.custom_batching.custom_vmap(function)

    @mapped.def_vmap
    def rule(size, batched, *args):
        del size
        leaves, tree = jax.tree.flatten(args)
        is_row = jax.tree.leaves(batched)

        def one(rows):
            rows = iter(rows)
            return mapped(
                *jax.tree.unflatten(tree, [next(rows) if b else a for a, b in zip(leaves, is_row, strict=True)])
            )

        out = lax.map(one, [a for a, b in zip(leaves, is_row, strict=True) if b])
        return out, jax.tree.map(lambda _: True, out)

    return mapped


def count_of(name: str, ratio: float | None, k: int | None) -> Callable[[int], int]:
    """Checks that exactly one of ratio and k is given and returns d -> number of entries to keep.

    The count is max(1, floor(ratio d)), never more than d.

    Raises:
        ValueError: both or neither given, ratio outside (0, 1] or an integer, k below 1 or not an integer.
    """
    if (ratio is None) == (k is None):
        raise ValueError(f"{name}: give exactly one of ratio and k; got ratio={ratio}, k={k}")
    if k is not None:
        if not is_whole(k):
            raise ValueError(f"{name}: k must be an integer of at least 1; got {k}")
        return lambda d: min(int(k), d)
    if isinstance(ratio, numbers.Integral) and ratio >= 1:
        raise ValueError(
            f"{name}: ratio must be in (0, 1], a share of the entries; got the integer {ratio}. Say k={ratio} to keep "
            "so many (top_k, rand_k), or ratio=1.0 for all of them"
        )
    if not isinstance(ratio, numbers.Real) or not 0 < ratio <= 1:
        raise ValueError(f"{name}: ratio must be in (0, 1]; got {ratio}")
    return lambda d: min(max(1, int(ratio * d)), d)


# ------------------------------------------------------------------------------------------------
# The vectors of a tree


class Each(NamedTuple):
    """States of the vectors, in their order; with a leading axis for the rows of a stack."""

    vectors: tuple[Any, ...]


def _row(like: Any) -> Any:
    return jax.ShapeDtypeStruct(like.shape[1:], like.dtype)


def lift(compressor: Compressor) -> Compressor:
    """The compressor of the vectors that a layout makes of a tree. Which layout stands in `spec.lifted`.

    Small leaves go as they are. Each row of a stack has its own state and its own keys; rows are compressed one after
    the other. The payload of a stack has a leading axis of rows on all arrays. omega and alpha are those of the
    compressor: of each vector, and so of all.

    Args:
        compressor: of one flat array, with or without a layout.

    Raises:
        TypeError: what is lifted is no compressor.

    >>> import jaxcomp as jc
    >>> jc.methods.lift(jc.top_k(0.1)).spec.lifted.compressor.spec.name
    'top_k(0.1)'
    """
    layout, one = compressor.spec.lifted or Lifted(compressor.spec.layout or DEFAULT, compressor)
    each = _of_vector_or_stack(one)
    called_compress = shared_program(each.compress)
    called_accumulate = shared_program(functools.partial(accumulate, each))

    def init(shared_key, like):
        if is_array(like):
            return each.init(shared_key, like)
        states = [each.init(jax.random.fold_in(shared_key, i), vector) for i, vector in enumerate(like.vectors)]
        return State(Each(tuple(s.local for s in states)), Each(tuple(s.shared for s in states)))

    def compress(key, parts, state):
        if is_array(parts):
            return each.compress(key, parts, state)
        keys, states = _keys(key, len(parts.vectors)), (state.local.vectors, state.shared.vectors)
        compress_one = called_compress if _are_alike(one, parts.vectors) else each.compress
        rows = zip(keys, parts.vectors, *states, strict=True)
        done = [compress_one(own, x, State(*both)) for own, x, *both in rows]
        payload = Leaves(Dense(finite(dense_of(parts))), tuple(payload for payload, _ in done))
        return payload, Each(tuple(local for _, local in done))

    def decompress(payload, shared, like):
        if is_array(like):
            return each.decompress(payload, shared, like)
        triples = zip(payload.leaves, shared.vectors, like.vectors, strict=True)
        dense = jax.tree.map(lambda x: payload.dense.values.astype(x.dtype), like.dense)
        return Parts(dense, tuple(each.decompress(*triple) for triple in triples))

    def add(total, payloads, weights, shared, sparse=False):
        alike = not is_array(total) and _are_alike(one, total.vectors)
        add_one = called_accumulate if alike else functools.partial(accumulate, each)
        if sparse:
            add_one = functools.partial(_few_entries, each, add_one)
        if is_array(total):
            return add_one(total, payloads, weights, shared)
        if not isinstance(weights, Leaves):
            weights = Leaves(Dense(weights), (weights,) * len(payloads.leaves))
        add_dense = lambda t, message: t + weighted(message[0].astype(t.dtype), message[1])
        given = (payloads.dense.values, weights.dense.values)
        dense = jax.tree.map(lambda t: fold(add_dense, t, given), total.dense)
        each_vector = zip(total.vectors, payloads.leaves, weights.leaves, shared.vectors, strict=True)
        return Parts(dense, tuple(add_one(*four) for four in each_vector))

    def over(function):
        """Applies a function to the shared states of all vectors."""

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
        entries=None if one.entries is None else lambda *args: add(args[-1], *args[:-1], sparse=True),
        advance=None if one.advance is None else over(advance),
        lengths=None if one.lengths is None else lengths_,
        for_worker=None if one.for_worker is None else over(for_worker),
        overflow=None if one.overflow is None else overflow_,
    )


def _few_entries(each: Compressor, add: Callable, like: Any, payloads: Any, weights: Any, shared: Any) -> Any:
    """The sum of messages of a vector or a stack; as `SparseSum` where it has few of the entries of a long vector."""
    if rows_of(like) is None and like.size >= LONG:
        found = entries(each, payloads, weights, shared, like)
        if not isinstance(found, SparseSum) or is_lazy(found):
            return found
    return add(like, payloads, weights, shared)


def _are_alike(one: Compressor, vectors: tuple[Any, ...]) -> bool:
    """Whether some vectors have the same shape, so that what is done to them need not be compiled for each.

    Arithmetic of linear compressors is little, and fused with what is before and after it.
    """
    return not one.spec.linear and len({(x.shape, x.dtype) for x in vectors}) < len(vectors)


def _keys(key: Array, count: int) -> list[Array]:
    """fold_in(key, i) for i < count; for many as one array, which is cut."""
    if count < FEW:
        return [jax.random.fold_in(key, i) for i in range(count)]
    every = jax.random.key_data(jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(count)))
    pieces = cut_apart(every.reshape(-1), [every.shape[1]] * count)
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return pieces
    return [jax.random.wrap_key_data(piece, impl=jax.random.key_impl(key)) for piece in pieces]


class Rows(NamedTuple):
    """State of the rows of a stack: all arrays have a leading axis."""

    rows: Any


def _of_vector_or_stack(one: Compressor) -> Compressor:
    """A compressor of vectors, and of the rows of a stack."""
    # A row is cut out of the stack once, before the call; each pass over it would else cut it out again.
    called_compress = one.compress if one.spec.linear else shared_program(one.compress)

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
            payload, local = called_compress(*args)
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
        total, by_row = zeros_if_shape(total, payloads), jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0), payloads)
        return lax.map(lambda args: accumulate(one, args[0], args[1], weights, args[2]), (total, by_row, shared.rows))

    def over(function):
        """Applies a function to the shared state of a vector, or of each row."""

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
