"""The memory of the owner of a chunk, and its randomness, over rounds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import route_worlds as rw
from route_worlds import uneven
from worlds import AXIS

from jaxcomp.base import State
from jaxcomp.compressors.dense import cast, identity, natural
from jaxcomp.compressors.rows import rows
from jaxcomp.exchange.routes import ROUTES, Parcel, Way

N, SIZE, ROUNDS = 4, 64, 3
ROUTE = ROUTES["two_shot"]


def largest(k):
    return uneven((k,))._replace(lengths=None, for_worker=None)


def run(compressor, given, weights=None):
    """given: [rounds, n, n, c]. Means [rounds, n, c], what was sent first [rounds, n, n, c], and the route's states."""
    stacked, like = rows(compressor), rw.shape(*given.shape[2:], dtype=given.dtype)
    state, way = stacked.init(jax.random.key(0), like), Way(AXIS, N, weights=weights)

    def worker(message, key, memory):
        payload, _ = stacked.compress(jax.random.fold_in(key, 0), message, state)
        out = Parcel(stacked, payload, state.shared, like)
        done = ROUTE.carry([out], way, jax.random.fold_in(key, 1), memory)
        return done.arrived[0].mean, stacked.decompress(payload, state.shared, rw.shape(*like.shape)), done.state

    one = ROUTE.init(jax.random.key(1), (stacked,), (like,))
    memory = State(jax.tree.map(lambda a: jnp.stack([a] * N), one.local), one.shared)
    axes = State(0, None)
    step = jax.jit(jax.vmap(worker, (0, 0, axes), (None, 0, axes), axis_name=AXIS))
    means, sent, states = [], [], []
    for t, message in enumerate(given):
        mean, first, memory = step(message, jax.random.split(jax.random.key(t), N), memory)
        means.append(mean), sent.append(first), states.append(memory)
    return np.stack(means), np.float64(np.stack(sent)), states


@pytest.mark.sampled
@pytest.mark.parametrize("weights", [None, (0.1, 0.2, 0.3, 0.4)], ids=["equal", "weighted"])
def test_the_memory_is_that_of_the_oracle(weights, seed):
    given = rw.messages(seed, rw.shape(N, SIZE), (ROUNDS, N))
    means, sent, states = run(largest(5), given, None if weights is None else jnp.asarray(weights, jnp.float32))
    memory = np.zeros((N, SIZE))
    for mean, first, state in zip(means, sent, states, strict=True):
        whole = memory + np.tensordot(np.full(N, 1 / N) if weights is None else weights, first, 1)
        kept = np.argsort(-np.abs(whole), axis=1, kind="stable")[:, :5]
        want = np.zeros_like(whole)
        np.put_along_axis(want, kept, np.take_along_axis(whole, kept, 1), 1)
        memory = whole - want
        np.testing.assert_allclose(mean, want, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(state.local.memory, memory, rtol=1e-5, atol=1e-6)


def test_nothing_is_lost(seed):
    """What came out, and what the owners remember, is all that was sent."""
    given = rw.messages(seed, rw.shape(N, SIZE), (ROUNDS, N))
    means, sent, states = run(cast("float8_e4m3fn"), given)
    assert np.abs(states[-1].local.memory).max() > 1e-4
    np.testing.assert_allclose(means.sum(0) + states[-1].local.memory, sent.mean(1).sum(0), atol=2e-5)


def test_what_is_not_finite_never_enters_the_memory(seed):
    """A decoder may bring an infinity; the owner takes it as zero, and its memory stays."""
    given = rw.messages(seed, rw.shape(N, SIZE), (ROUNDS, N)) * 3e38
    means, _, states = run(largest(5), given)
    assert np.all(np.isfinite(means))
    assert np.all(np.isfinite(states[-1].local.memory))


def test_an_unbiased_compressor_needs_no_memory_and_stays_unbiased(seed):
    given = jnp.tile(rw.messages(seed, rw.shape(N, SIZE), (1, N)), (400, 1, 1, 1))
    means, _, states = run(natural(), given)
    assert states[-1].local.memory == ()
    z = (means.mean(0, dtype=np.float64) - np.asarray(given[0], np.float64).mean(0)) / (means.std(0, ddof=1) / 20)
    assert np.abs(z).max() < 5.5  # 256 numbers at a false alarm of 1e-5
    assert means.std(0).max() > 0.05


def test_narrow_messages_are_sent_narrow(seed):
    """The mean of bf16 messages is compressed in bf16, where no memory needs more."""
    given = rw.messages(seed, rw.shape(N, SIZE, dtype=jnp.bfloat16), (1, N))
    like = rw.shape(N, SIZE, dtype=jnp.bfloat16)
    assert ROUTE.init(jax.random.key(0), (rows(identity()),), (like,)).local.memory == ()
    said = []

    def worker(message):
        result = rw.send("two_shot", identity(), like, message, Way(AXIS, N))
        payload, carried = result.message.parcels[0].payload, result.carried
        said.append((carried.sent_bytes, carried.lane_bytes, payload.values.dtype))
        return result.mean

    mean = jax.jit(jax.vmap(worker, axis_name=AXIS, out_axes=None))(given[0])
    assert said == [(2 * (N - 1) * 2 * SIZE, 2 * SIZE, jnp.bfloat16)]
    assert mean.dtype == jnp.float32
    np.testing.assert_allclose(mean, np.float64(given[0]).mean(0), rtol=2**-8, atol=1e-7)
