"""SparseLoCo against its definition and its release, in error and in bytes of real messages."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles_local as oracle
import pytest
from variants import variants

import jaxcomp as jc
from jaxcomp.base import State

pytestmark = pytest.mark.usefixtures("standard_promotion")
# Differences after some steps of Adam are a mixture of scales; the other laws are lighter and heavier in their tails.
DRAWS = {
    "normal": lambda rng, d: rng.standard_normal(d),
    "laplace": lambda rng, d: rng.laplace(size=d),
    "student": lambda rng, d: rng.standard_t(3, d),
    "scales": lambda rng, d: rng.standard_normal(d) * np.exp(rng.standard_normal(d // 64)).repeat(64),
    "skewed": lambda rng, d: rng.standard_normal(d) ** 2 - 0.3,
}
PARAMS = {"a": jnp.zeros((37, 101)), "b": jnp.zeros(7), "c": jnp.zeros((3, 41, 53)), "d": jnp.zeros(())}


def message_of(algorithm, x):
    """Payload of a first round, and what it decodes to."""
    state = algorithm.init(jax.random.key(0), jax.ShapeDtypeStruct(x.shape, x.dtype))
    seen = []

    class Exchange:
        index, size = jnp.zeros((), jnp.int32), 1

        def mean(self, key, compressor, message, state):
            payload, local = jax.jit(compressor.compress)(key, message, State(state.local, state.shared))
            seen.append(payload)
            like = jax.ShapeDtypeStruct(x.shape, x.dtype)
            own = jax.jit(lambda payload: compressor.decompress(payload, state.shared, like))(payload)
            return Sent(own, message - own, State(local, state.shared))

    mean, _ = algorithm.update(jax.random.key(1), x, state, Exchange())
    return seen[0], np.asarray(mean)


class Sent:
    def __init__(self, own, residual, state):
        self.mean, self.own, self.residual, self.state = own, own, residual, state


def error(x, x_hat):
    return np.sum((np.asarray(x, np.float64) - x_hat) ** 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", variants(DRAWS, {"scales"}))
def test_no_more_error_than_the_release(name, seed):
    x = DRAWS[name](np.random.default_rng(seed), 6 * 4096).astype(np.float32)
    _, got = message_of(jc.sparse_loco(), jnp.asarray(x))
    want = oracle.sparse_loco(x)
    np.testing.assert_array_equal(got != 0, want != 0)
    assert np.mean(np.abs(got - want) > 1e-3 * np.abs(want)) < 1e-3  # values half-way between two means
    assert error(x, got) <= 1.0001 * error(x, want) <= error(x, oracle.sparse_loco(x, released=True))


def test_a_memory_keeps_no_more_than_that_of_the_release(seed):
    """Rounds of error feedback with a decay of 0.95, each form with its own memory."""
    rng, d = np.random.default_rng(seed), 4 * 4096
    memory = {False: np.zeros(d), True: np.zeros(d)}
    drift = rng.standard_normal(d)
    for _ in range(30):
        fresh = 0.3 * drift + DRAWS["scales"](rng, d)
        for released, e in memory.items():
            message = 0.95 * e + fresh
            memory[released] = message - oracle.sparse_loco(message, released=released)
    assert np.sum(memory[False] ** 2) <= np.sum(memory[True] ** 2)


@pytest.mark.slow
def test_bins_of_each_chunk_fit_chunks_of_different_scale(seed):
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((8, 4096)) * 10.0 ** np.arange(-4, 4)[:, None]).astype(np.float32).reshape(-1)
    _, whole = message_of(jc.sparse_loco(), jnp.asarray(x))
    _, each = message_of(jc.sparse_loco(per_chunk=True), jnp.asarray(x))
    chunks = lambda y: ((x - y).astype(np.float64).reshape(8, -1) ** 2).sum(1) / (x.reshape(8, -1) ** 2).sum(1)
    assert np.all(chunks(each) < 0.95)
    assert chunks(whole)[0] > 1  # the smallest chunk gets the bins of the largest


def test_any_shape_zeros_and_what_is_not_finite(seed):
    tx = jc.local_updates(optax.sgd(1.0), optax.sgd(1.0), jc.sparse_loco(k=8, chunk=256), "data", every=2)
    rng = np.random.default_rng(seed)
    state, axes = jc.init_state(tx, PARAMS, 3, "data")
    own = jax.tree.map(lambda p: jnp.stack([p] * 3), PARAMS)

    def one(own, state, grads):
        updates, state = tx.update(grads, state, own)
        return optax.apply_updates(own, updates), state

    step = jax.jit(jax.vmap(one, in_axes=(0, axes, 0), out_axes=(0, axes), axis_name="data"))
    draw = lambda p: jnp.asarray(rng.standard_normal((3, *p.shape)), p.dtype)
    for t in range(4):
        grads = jax.tree.map(draw if t > 1 else jnp.zeros_like, own if t < 2 else PARAMS)
        if t == 3:
            grads["a"] = grads["a"].at[1, 0, 0].set(jnp.nan)
        own, state = step(own, state, grads)
    info = jc.info(state)
    assert 0 < float(info.achieved_ratio) <= 8 / 256 * 1.1  # filled up to whole chunks and words
    assert all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves((state.point, state.means[0].local.algorithm)))
    assert any(np.any(np.asarray(x)) for x in jax.tree.leaves(state.point))


def test_wrong_arguments_are_named():
    for options, words in (
        ({"k": 0}, "k must be"),
        ({"chunk": 0}, "size must be"),
        ({"bits": 5}, "bits must be"),
        ({"decay": 1.5}, "decay must be"),
    ):
        with pytest.raises(ValueError, match=words):
            jc.sparse_loco(**options)


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAWS)
def test_two_hundred_times_fewer_bytes_than_f32(name, seed):
    """Bytes of real messages, headers included, of 10 million parameters; and they decode to what was sent."""
    d = 10_000_000
    x = DRAWS[name](np.random.default_rng(seed), d - d % 64).astype(np.float32)
    payload, _ = message_of(jc.sparse_loco(), jnp.asarray(x))
    data = jc.wire.encode(payload, code="best")
    assert 4 * x.size >= 200 * len(data)
    again = jc.wire.decode(data)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), again, payload)
