"""Bins around the mean of a block."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jitted import made_for, roundtrip

import jaxcomp as jc


def oracle(x, bits, refine, lengths):
    """Float64, from the definition: block by block, bins of 6 sigma / 2^bits, then Lloyd's steps."""
    count, out, start = 2**bits, [], 0
    for length in lengths:
        v = np.float64(x[start : start + length])
        start += length
        width = 6 * v.std() / count
        codes = np.floor((v - v.mean()) / width) if width > 0 else np.zeros(length)
        codes = np.clip(codes + count // 2, 0, count - 1).astype(int)
        means = v.mean() + width * (np.arange(count) - (count - 1) / 2)
        for step in range(refine + 1):
            means = np.array([v[codes == i].mean() if np.any(codes == i) else means[i] for i in range(count)])
            if step < refine:
                codes = np.sum(v[:, None] > (means[1:] + means[:-1]) / 2, axis=1)
        out.append(means[codes])
    return np.concatenate(out)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("bits", "refine", "options", "lengths"),
    [
        (2, 4, {}, [1024, 1024, 152]),
        (1, 0, {"blocks": 1}, [2200]),
        (2, 0, {"blocks": 3}, [733, 733, 734]),
        (4, 2, {"block_size": 500}, [500, 500, 500, 500, 200]),
    ],
)
def test_equals_the_definition(bits, refine, options, lengths, key, seed):
    rng = np.random.default_rng(seed)
    x = (rng.choice([-1, 1], 2200) * (1 + rng.exponential(size=2200))).astype(np.float32)
    compressor = jc.binned(bits, refine=refine, **options)
    x_hat, payload = jax.jit(lambda x: jc.roundtrip(compressor, x, key=key))(x)
    near = np.isclose(x_hat, oracle(x, bits, refine, lengths), rtol=1e-4)
    assert near.mean() > 0.99  # an entry on an edge may be rounded to the other side
    assert payload.norms.size == 2**bits * len(lengths)
    assert payload.words.shape == (bits, 69)


def test_refining_never_adds_to_the_error(key, seed):
    x = jnp.asarray(np.random.default_rng(seed).standard_normal(4096), jnp.float32)
    compressors = [jc.binned(2, refine=refine) for refine in (0, 1, 2, 4, 8)]
    errors = jax.jit(lambda x: [jnp.sum((jc.roundtrip(c, x, key=key)[0] - x) ** 2) for c in compressors])(x)
    assert all(a >= b * (1 - 1e-5) for a, b in itertools.pairwise(errors))
    assert errors[-1] < 0.9 * errors[0]


@pytest.mark.slow
def test_half_the_error_of_the_released_code(key, seed):
    """Of the values that SparseLoCo sends: codes rounded around the mean of all, as its release has them."""
    x = jax.random.normal(jax.random.key(seed), (2**18,))
    values = roundtrip(jc.chunked(jc.top_k(k=64), 4096), x, key)[1].values
    v = np.float64(values)
    codes = np.clip(np.round((v - v.mean()) / (6 * v.std(ddof=1) / 4) + 2), 0, 3)
    means = np.array([v[codes == i].mean() if np.any(codes == i) else 0 for i in range(4)])
    released = np.sum((v - means[codes.astype(int)]) ** 2)
    ours = np.sum((v - np.float64(jax.jit(lambda v: jc.roundtrip(jc.binned(2), v, key=key)[0])(values))) ** 2)
    assert ours < 0.6 * released


def test_sparse_loco_message(key):
    """2 bits and 12 for the place, and the means: 14.125 an entry that is sent; fewer in the best code."""
    compressor = jc.compose(jc.chunked(jc.top_k(k=64), 4096), jc.binned(2))
    x = jax.random.normal(key, (2**18,))
    _, payload = jax.jit(lambda x: jc.roundtrip(compressor, x, key=key))(x)
    assert 8 * jc.lane_bytes(payload) == 14.125 * 2**12
    assert 8 * len(jc.wire.encode(payload, code="best")) < 9.6 * 2**12
    alpha = compressor.spec.alpha(2**18)
    np.testing.assert_allclose(alpha, 64 / 4096 * (1.5 / 32 - 81 / 64 / 1024), rtol=1e-5)


@pytest.mark.parametrize("arguments", [{"bits": 0}, {"bits": 5}, {"bits": 2.5}, {"refine": -1}, {"refine": True}])
def test_errors(arguments):
    with pytest.raises(ValueError, match=f"binned: {next(iter(arguments))} must be an integer in"):
        jc.binned(**arguments)


@pytest.mark.parametrize("bits", [1, 4])
def test_a_gpu_fills_the_bins_in_one_sum(bits, key, seed):
    x, compressor = jnp.asarray(np.random.default_rng(seed).laplace(size=3000).astype(np.float32)), jc.binned(bits)
    run = lambda x: jc.roundtrip(compressor, x, key=key)
    (here, sent), (there, found) = jax.jit(run)(x), made_for("gpu", run, x)
    np.testing.assert_allclose(there, here, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(found.words, sent.words)
