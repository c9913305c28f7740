"""Compressors made of compressors: contract, compose, narrow."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.arrays import like_of, size_of, wide
from jaxcomp.backend import fold, form
from jaxcomp.base import Compressor, Spec, State, accumulate, advance, check_compressor, entries, for_worker, left
from jaxcomp.compressors.dense import cast
from jaxcomp.compressors.roundtrip import payload_like
from jaxcomp.factories import factory
from jaxcomp.groups import DEFAULT, Layout
from jaxcomp.payloads import LocalIndices, Sparse, global_indices, local_indices

__all__ = ["compose", "contract", "narrow"]

Array = jax.Array


@factory
def contract(compressor: Compressor) -> Compressor:
    """Scales an unbiased compressor down until it contracts.

    C'(x) = C(x) / (1 + omega),   alpha = 1 / (1 + omega).  Biased. Payload, lanes and linearity
    are those of C; the decoder does the scaling.

    Raises:
        ValueError: omega is not known.

    Reference: Beznosikov, Horvath, Richtarik, Safaryan 2020, lemma 8; Richtarik, Sokolov,
    Fatkhullin 2021 (EF21), lemma 8.

    >>> import jaxcomp as jc
    >>> jc.contract(jc.rand_k(0.25)).spec.alpha(100)
    0.25
    """
    spec = check_compressor("contract", compressor)
    if spec.omega is None:
        raise ValueError(
            f"contract needs an unbiased compressor (omega known); {spec.name} is not one. "
            "A compressor that contracts already needs no wrapper."
        )
    omega = spec.omega

    def scale_of(like):
        return 1 / (1 + omega(size_of(like)))

    def decompress(payload, shared, like):
        x_hat = compressor.decompress(payload, shared, like)
        scale = scale_of(like)
        return jax.tree.map(lambda x: x * jnp.asarray(scale, x.dtype), x_hat)

    def scaled_weights(like, payloads, weights):
        kind = wide(*(leaf.dtype for leaf in jax.tree.leaves(like)))
        scale = jnp.asarray(scale_of(like), kind)
        count = jax.tree.leaves(payloads)[0].shape[0]
        # Inside a tree of weights None stands for a part that was summed on the way: one message.
        scaled = lambda w: scale[None] if w is None else jnp.asarray(w).astype(kind) * scale
        whole = jnp.full((count,), scale)
        return whole if weights is None else jax.tree.map(scaled, weights, is_leaf=lambda w: w is None)

    def add(total, payloads, weights, shared):
        return accumulate(compressor, total, payloads, scaled_weights(total, payloads, weights), shared)

    def sparse(payloads, weights, shared, like):
        return entries(compressor, payloads, scaled_weights(like, payloads, weights), shared, like)

    return compressor._replace(
        decompress=decompress,
        accumulate=add,
        entries=None if compressor.entries is None else sparse,
        spec=spec._replace(
            name=f"contract({spec.name})",
            omega=None,
            alpha=lambda d: 1 / (1 + omega(d)),
            selects=False,
        ),
    )


@factory
def compose(outer: Compressor, inner: Compressor) -> Compressor:
    """Compresses the values that another compressor selected: C(x) = outer with inner(values).

    `outer` chooses what to send (its payload has a field `values`: top_k, sidco, rand_k,
    bernoulli, identity); `inner` compresses those values, a vector. The payload is that of
    `outer` with the payload of `inner` in place of `values`.

    Both unbiased:              1 + omega = (1 + omega_outer) (1 + omega_inner).
    outer selects, inner with alpha:  alpha = alpha_outer alpha_inner, because the two errors are
                                orthogonal.
    outer selects, inner with omega:  alpha = alpha_outer (1 - omega_inner) if that is positive; else 1 - omega_inner,
                                which is no contraction.
    Otherwise neither is known. omega and alpha of `inner` are those at the number of values.

    Raises:
        ValueError: the payload of `outer` has no array `values`, or a part is lifted to trees.

    Reference: Basu, Data, Karakus, Diggavi 2019 (Qsparse-local-SGD), lemma 3, in the sharper form above.

    >>> import jaxcomp as jc
    >>> x_hat, payload = jc.roundtrip(jc.compose(jc.top_k(k=2), jc.cast("bfloat16")), jnp.array([1.0, 5.0, 2.0]),
    ...                               key=jax.random.key(0))
    >>> print(x_hat, jc.lane_bytes(payload))
    [0. 5. 2.] 12
    """
    first, second = check_compressor("compose", outer), check_compressor("compose", inner)
    if first.lifted or second.lifted:
        raise ValueError("compose joins compressors of one array; lift the result: per_leaf(compose(...)) or flat(...)")

    num_values = lambda d: _values_like(outer, second.name, jax.ShapeDtypeStruct((d,), jnp.float32)).size
    omega, alpha = _bounds(first, second, num_values)
    name = f"compose({first.name}, {second.name})"
    spec = Spec(name, omega, alpha, first.linear and second.linear, weights=first.weights)
    own = first.layout or DEFAULT
    spec = spec._replace(layout=Layout(fixed=own.fixed, multiple=own.multiple, filled_from=own.filled_from))
    return _composed(outer, inner, spec)


def _bounds(first: Spec, second: Spec, num_values: Callable[[int], int]) -> tuple[Any, Any]:
    """omega and alpha of a composition, or None."""
    omega = None
    outer, inner = first.omega, second.omega
    if outer is not None and inner is not None:
        omega = lambda d: (1 + outer(d)) * (1 + inner(num_values(d))) - 1
    share, kept = first.alpha, second.alpha
    if kept is None and inner is not None:
        kept = lambda k: 1 - inner(k)
    if not first.selects or share is None or kept is None:
        return omega, None

    def alpha(d):
        """E|C(x) - x|^2 is at most (1 - f a) |x|^2, for a share f of |x|^2 in the values, from `share` to 1."""
        of_values = kept(num_values(d))
        return of_values * (share(d) if of_values > 0 else 1)

    return omega, alpha


def _values_like(outer: Compressor, inner: str, like: Any) -> jax.ShapeDtypeStruct:
    """Shape of the values that `outer` selects; ValueError where it sends none, with the name of `inner`."""
    payload = payload_like(outer, like)
    if not isinstance(getattr(payload, "values", None), jax.ShapeDtypeStruct):
        raise ValueError(
            f"compose: {outer.spec.name} sends {type(payload).__name__}, which has no array of values for "
            f"{inner} to compress; put the compressor that selects first"
        )
    return payload.values


def _composed(outer: Compressor, inner: Compressor, spec: Spec) -> Compressor:
    """Local and shared states are pairs, of `outer` and of `inner`."""

    def values_like(like):
        return _values_like(outer, inner.spec.name, like)

    def init(shared_key, like):
        like = like_of(like)
        outer_key, inner_key = jax.random.split(shared_key)
        outer_state, inner_state = outer.init(outer_key, like), inner.init(inner_key, values_like(like))
        return State(
            local=(outer_state.local, inner_state.local),
            shared=(outer_state.shared, inner_state.shared),
        )

    def compress(key, x, state):
        outer_key, inner_key = jax.random.split(key)
        payload, outer_local = outer.compress(outer_key, x, State(state.local[0], state.shared[0]))
        values, inner_local = inner.compress(inner_key, payload.values, State(state.local[1], state.shared[1]))
        return payload._replace(values=values), (outer_local, inner_local)

    def unfold(payload, shared, like):
        return payload._replace(values=inner.decompress(payload.values, shared[1], values_like(like)))

    def decompress(payload, shared, like):
        return outer.decompress(unfold(payload, shared, like), shared[0], like)

    def add(total, payloads, weights, shared):
        like = like_of(total)
        workers = jax.tree.leaves(payloads)[0].shape[0]

        def add_one(total, message):
            payload, weight, worker = message
            mine = pick(shared, worker, workers)
            one, weight = jax.tree.map(lambda a: a[None], (unfold(payload, mine, like), weight))
            return accumulate(outer, total, one, weight, mine[0])

        return fold(add_one, total, (payloads, weights, jnp.arange(workers)))

    def sparse(payloads, weights, shared, like):
        workers = jax.tree.leaves(payloads)[0].shape[0]
        each = jax.vmap(lambda payload, worker: unfold(payload, pick(shared, worker, workers), like))
        return entries(outer, each(payloads, jnp.arange(workers)), weights, shared[0], like)

    def pick(shared, worker, workers):
        return for_worker(outer, shared[0], worker, workers), for_worker(inner, shared[1], worker, workers)

    def left_by_both(local):
        return jax.tree.map(jnp.add, left(outer, local[0]), left(inner, local[1]))

    next_round = None
    if outer.advance is not None or inner.advance is not None:
        next_round = lambda shared: (advance(outer, shared[0]), advance(inner, shared[1]))
    return Compressor(
        init,
        compress,
        decompress,
        spec,
        accumulate=add,
        entries=None if outer.entries is None else sparse,
        advance=next_round,
        lengths=outer.lengths,
        for_worker=None if outer.for_worker is None and inner.for_worker is None else pick,
        overflow=None if outer.overflow is None and inner.overflow is None else left_by_both,
    )


@factory
def narrow(compressor: Compressor, *, values: Any = None, indices: Any = None) -> Compressor:
    """Lets the message of a sparsifier travel in fewer bits: 16 instead of 32 for values, indices or both.

    values: rounded to a narrower floating type, which is `compose` with `cast`: alpha is multiplied by
        1 - u^2, and with `error_feedback` the rounding errors stay in the memory.
    indices: "uint16" sends the position within blocks of 2^16 entries, and how many there are in each block
        (4 bytes for every 65536 entries of the vector). Nothing is lost.

    Args:
        compressor: of one array, with payload `Sparse`.
        values: "bfloat16", "float16" or a float8 type (these two with a scale for every 512 values), or None to leave
            them as they are.
        indices: "uint16" or None.

    Returns:
        Compressor with payload `Sparse`.

    Raises:
        ValueError: another type, or the compressor sends no `Sparse`.

    >>> import jaxcomp as jc
    >>> x_hat, payload = jc.roundtrip(jc.narrow(jc.top_k(k=2), values="bfloat16", indices="uint16"),
    ...                               jnp.array([1.0, 5.0, 2.0]), key=jax.random.key(0))
    >>> print(x_hat, payload.indices.low, jc.lane_bytes(payload))
    [0. 5. 2.] [1 2] 12
    """
    if indices not in (None, "uint16"):
        raise ValueError(f"narrow: indices must be 'uint16' or None; got {indices!r}")
    check_compressor("narrow", compressor)
    if values is not None:
        compressor = compose(compressor, cast(values))
    if indices is None:
        return compressor
    spec = compressor.spec
    if spec.lifted:
        raise ValueError(f"narrow: {spec.name} acts on trees; narrow the compressor of one array and lift the result")

    def compress(key, x, state):
        payload, local = compressor.compress(key, x, state)
        if not isinstance(payload, Sparse) or isinstance(payload.indices, LocalIndices):
            raise ValueError(f"narrow: {spec.name} sends no 32-bit indices; got {type(payload).__name__}")
        return payload._replace(indices=local_indices(payload.indices, x.size)), local

    def widen(payload, like):
        local = jax.tree.map(jnp.asarray, payload.indices)  # of NumPy, once decoded from bytes
        return payload._replace(indices=global_indices(local, like.size))

    def wide_of(payloads, like):
        at_once = lambda function, rows: jax.vmap(function)(rows)
        each = form(lax.map, on_cpu=at_once, on_gpu=at_once)  # a TPU would lay out all messages anew
        return each(lambda payload: widen(payload, like), payloads)

    def add(total, payloads, weights, shared):
        return accumulate(compressor, total, wide_of(payloads, total), weights, shared)

    def sparse(payloads, weights, shared, like):
        return entries(compressor, wide_of(payloads, like), weights, shared, like)

    return compressor._replace(
        compress=compress,
        decompress=lambda payload, shared, like: compressor.decompress(widen(payload, like), shared, like),
        accumulate=add,
        entries=None if compressor.entries is None else sparse,
        spec=spec._replace(name=f"narrow({spec.name})"),
    )
