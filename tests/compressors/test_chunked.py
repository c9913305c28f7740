"""Selection chunk by chunk, and its payload."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jitted import roundtrip

import jaxcomp as jc
from jaxcomp.base import left
from jaxcomp.packing import pack
from jaxcomp.payloads import Chunks


def top_of_each(x, size, k):
    """Float64 oracle: the k entries of largest magnitude of each chunk, ties to the lowest index."""
    out = np.zeros_like(x)
    for start in range(0, x.size, size):
        chunk = x[start : start + size]
        best = np.argsort(-np.abs(chunk), kind="stable")[:k]
        out[start + best] = chunk[best]
    return out


@pytest.mark.sampled
@pytest.mark.parametrize(("d", "size", "k"), [(4096, 4096, 64), (1000, 64, 5), (65, 32, 32), (7, 100, 3), (9, 1, 1)])
def test_keeps_the_largest_of_each_chunk(d, size, k, key, seed):
    x = np.random.default_rng(seed).standard_normal(d).astype(np.float32)
    x[::3] = 0  # fewer entries than places in some chunks
    x_hat, payload = jax.jit(lambda x: jc.roundtrip(jc.chunked(jc.top_k(k=k), size), x, key=key))(x)
    np.testing.assert_array_equal(x_hat, top_of_each(x, size, k))
    length = min(size, d)
    sent = -(-d // length) * min(k, length)
    width = max(1, (length - 1).bit_length())
    assert jc.lane_bytes(payload) == 4 * sent + 4 * width * -(-sent // 32)
    assert int(jc.payloads.num_entries(payload)) == np.count_nonzero(x_hat)


@pytest.mark.slow
def test_places_need_few_bits(key):
    """12 in the lanes; in the best code near log2 of the number of ways to choose 64 of 4096 places, 7.36 each."""
    x = jax.random.normal(key, (2**18,))
    _, payload = jax.jit(lambda x: jc.roundtrip(jc.chunked(jc.top_k(k=64), 4096), x, key=key))(x)
    count = payload.values.size
    assert count == 64 * 64
    assert 8 * payload.words.nbytes == 12 * count
    best = (float(jc.code_bits(payload, code="best")) - 32 * count) / count
    assert 7.36 < best < 7.6
    assert len(jc.wire.encode(payload, code="best")) < (best + 32) / 8 * count + 64


def test_chunks_without_entries_send_zeros(key):
    x = jnp.zeros(40).at[17].set(3.0)
    x_hat, payload = roundtrip(jc.chunked(jc.top_k(k=2), 8), x, key)
    np.testing.assert_array_equal(x_hat, x)
    assert np.count_nonzero(payload.values) == 1
    # What a compressor of the values makes of the zeros of such a chunk lands on one entry of it, and no other.
    ones = Chunks(jnp.ones_like(payload.values), payload.words)
    dense = jc.chunked(jc.top_k(k=2), 8).decompress(ones, (), jax.ShapeDtypeStruct((40,), jnp.float32))
    np.testing.assert_array_equal(np.flatnonzero(dense), [7, 15, 17, 31, 39])


def test_overflow_and_schedule_of_the_chunks(key):
    full = jc.chunked(jc.contrib.hard_threshold(0.0, room=0.1), 50)
    x = jnp.arange(1.0, 101)
    _, local = jax.jit(full.compress)(key, x, full.init(key, x))
    assert int(left(full, local).overflow) == 90
    falling = jc.chunked(jc.top_k(jc.warm_up([0.5, 0.1], 1)), 10)
    state = falling.init(key, x)
    counts = []
    for _ in range(3):
        payload, _ = falling.compress(key, x, state)
        counts.append(int(jc.payloads.num_entries(payload)))
        state = state._replace(shared=falling.advance(state.shared))
    assert counts == [50, 10, 10]


@pytest.mark.sampled
@pytest.mark.parametrize("via", ["gather", "two_shot", "ladder"])
def test_error_feedback_over_every_road(via, seed):
    """What was sent and what is left in the memories add up to the gradients."""
    n, d = 3, 600
    algorithm = jc.error_feedback(jc.compose(jc.chunked(jc.top_k(k=8), 64), jc.cast("bfloat16")))
    tx = jc.compressed_mean(algorithm, "data", via=via)
    grads = jnp.asarray(np.random.default_rng(seed).standard_normal((n, d)), jnp.float32)

    def step(grads):
        direction, state = tx.update(grads, tx.init(grads))
        return direction, state.local.algorithm.memory[0], state.local.route

    direction, memory, route = jax.jit(jax.vmap(step, axis_name="data"))(grads)
    np.testing.assert_array_equal(direction[0], direction[1])
    if via == "two_shot":
        assert np.all(np.isfinite(route.memory))
        total = direction[0] + np.sum(memory.reshape(n, -1), 0)[:d] / n + route.memory.reshape(-1)[:d]
    else:
        total = direction[0] + np.sum(memory.reshape(n, -1), 0)[:d] / n
    np.testing.assert_allclose(total, np.mean(grads, 0), atol=2e-6)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: jc.chunked(jc.top_k(k=1), 0), r"chunked: size must be an integer in 1 \.\. 2\^24; got 0"),
        (lambda: jc.chunked(jc.top_k(k=1), 2**25), "chunked: size must be"),
        (lambda: jc.chunked(jc.natural(), 64), r"chunked: natural does not select"),
        (lambda: jc.chunked(jc.flat(jc.top_k(k=1)), 64), "does not select entries of one array"),
        (lambda: jc.chunked(jc.dagc([1, 2], 0.1), 64), "by the same rule on all workers"),
        (
            lambda: jc.roundtrip(
                jc.chunked(jc.narrow(jc.top_k(k=1), indices="uint16"), 4), jnp.ones(8), key=jax.random.key(0)
            ),
            "sends no values",
        ),
    ],
)
def test_errors(make, says):
    with pytest.raises(ValueError, match=says):
        make()


@pytest.mark.sampled
@pytest.mark.parametrize("width", [1, 5, 12, 32])
@pytest.mark.parametrize("code", ["fixed", "elias", "best"])
def test_any_gaps_come_back(width, code, seed):
    """Also those that no key stream holds, because they add up to too much."""
    rng = np.random.default_rng(seed)
    for most in (1, 2, 2**width - 1):
        gaps = rng.integers(0, most, 96, np.uint32, endpoint=True)
        words = np.asarray(pack(jnp.asarray(gaps), width))
        payload = Chunks(rng.standard_normal(90).astype(np.float32), words)
        message = jc.wire.encode(payload, code=code)
        assert all(np.array_equal(a, b) for a, b in zip(jc.wire.decode(message), payload, strict=True))
        bits = int(jax.jit(lambda p, code=code: jnp.asarray(jc.code_bits(p, code=code)))(payload))
        assert 0 <= 8 * len(message) - bits <= 8 * 64


def test_rows_that_a_tpu_sorts_in_turn_are_those_of_all_at_once(monkeypatch, seed):
    x = jnp.asarray(np.random.default_rng(seed).standard_normal(11 * 256 + 7).astype(np.float32))
    compressor = jc.chunked(jc.top_k(k=9), 256)
    state = compressor.init(jax.random.key(0), x)
    compress = lambda: jax.jit(lambda x: compressor.compress(jax.random.key(1), x, state)[0])(x)
    whole = compress()
    monkeypatch.setattr(jc.backend, "platform", lambda: "tpu")
    monkeypatch.setattr(jc.backend_tpu, "SORTED", 5 * 256)
    jax.tree.map(np.testing.assert_array_equal, whole, compress())
    assert "scan[" in str(jax.make_jaxpr(lambda x: compressor.compress(jax.random.key(1), x, state)[0])(x))
