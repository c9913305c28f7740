"""Mistakes in a compressor of the user's own: the message names the compressor, what came, and what to write."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from worlds import AXIS, gradients, run_shard_map, run_vmap

import jaxcomp as jc
from jaxcomp.base import Compressor, Spec, State, on_vectors
from jaxcomp.payloads import Dense, Sparse

TREES = {"vector": jnp.zeros(1200), "stack": [jnp.zeros((40, 30)) for _ in range(3)]}
PAIR = r"^own: compress returns \(payload, local\), with the local state afterwards; got a {}\. .* payload, state"
WHOLE = r"^own: compress .* got the whole state .* return payload, state\.local"  # each round would compile anew
LIKE = r"^own: decompress returns an array with the shape and dtype of like, float32\[1200\]; got {}\. Cut padding off"


def sent(key, x, state):
    return Dense(x), state.local


def read(payload, shared, like):
    return payload.values.astype(like.dtype)


def own(form, compress=sent, decompress=read, linear=False):
    spec = Spec("own", omega=lambda d: 0.0, alpha=lambda d: 1.0, linear=linear)
    if form == "on_vectors":
        return on_vectors(compress=compress, decompress=decompress, spec=spec)
    flat = lambda x: jnp.reshape(x, (-1,))
    like = lambda x: jax.ShapeDtypeStruct((x.size,), x.dtype)

    def whole(payload, shared, x):
        x_hat = decompress(payload, shared, like(x))
        return x_hat.reshape(x.shape) if x_hat.size == x.size else x_hat

    init = lambda key, x: State()
    return Compressor(init, lambda key, x, state: compress(key, flat(x), state), whole, spec)


def one_round(compressor, tree="vector", algorithm=jc.error_feedback, via="gather", run=run_vmap):
    tx = jc.compressed_mean(algorithm(compressor), AXIS, via=via)
    return run(tx, TREES[tree], gradients(0, rounds=1, workers=2, params=TREES[tree]))


PAIRS = {
    "payload": (lambda key, x, state: Dense(x), PAIR.format("Dense")),
    "payload of two fields": (
        lambda key, x, state: Sparse(x, jnp.arange(x.size, dtype=jnp.int32)),
        PAIR.format("Sparse"),
    ),
    "three": (lambda key, x, state: (Dense(x), state.local, state.shared), PAIR.format("tuple of 3")),
    "nothing": (lambda key, x, state: None, PAIR.format("NoneType")),
    "whole state": (lambda key, x, state: (Dense(x), state), WHOLE),
}


@pytest.mark.parametrize("form", ["on_vectors", "Compressor"])
@pytest.mark.parametrize("case", PAIRS)
def test_compress_returns_a_pair_with_the_local_side_of_the_state(case, form):
    compress, got = PAIRS[case]
    for tree in TREES:
        with pytest.raises(TypeError, match=got):
            one_round(own(form, compress), tree)


DECODED = {
    "short": (lambda payload, shared, like: payload.values[:-1], r"float32\[1199\]"),
    "one": (lambda payload, shared, like: payload.values[:1], r"float32\[1\]"),  # was spread over all entries
    "narrow": (lambda payload, shared, like: payload.values.astype(jnp.bfloat16), r"bfloat16\[1200\]"),
}


@pytest.mark.parametrize("form", ["on_vectors", "Compressor"])
@pytest.mark.parametrize("case", DECODED)
def test_decompress_returns_what_is_like_the_message(case, form):
    decompress, got = DECODED[case]
    for algorithm, via in ((jc.error_feedback, "gather"), (jc.direct, "gather"), (jc.direct, "auto")):
        with pytest.raises(ValueError, match=LIKE.format(got)):
            one_round(own(form, decompress=decompress, linear=via == "auto"), algorithm=algorithm, via=via)


def test_a_roundtrip_says_so_too():
    for decompress, got in (
        (lambda payload, shared, like: payload.values.astype(jnp.int32), r"int32\[1200\]"),
        (lambda payload, shared, like: payload, "a Dense"),
    ):
        with pytest.raises(ValueError, match=LIKE.format(got)):
            jc.roundtrip(own("on_vectors", decompress=decompress), TREES["vector"], key=jax.random.key(0))


class Pair(NamedTuple):
    payload: Any
    local: Any


@pytest.mark.parametrize("run", [run_vmap, run_shard_map])
@pytest.mark.parametrize("form", ["on_vectors", "Compressor"])
def test_what_is_right_is_taken(form, run):
    """So are lists, and pairs of a type of the user's."""
    for tree in TREES:
        expected = one_round(jc.identity(), tree, jc.direct, "gather", run)[0]
        for compress in (sent, lambda *args: list(sent(*args)), lambda *args: Pair(*sent(*args))):
            found = one_round(own(form, compress), tree, jc.direct, "gather", run)[0]
            assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), found, expected))
