"""Cosine transforms of blocks, and DeMo."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jitted import roundtrip
from worlds import AXIS, run_shard_map

import jaxcomp as jc
from jaxcomp.compressors.dct import backward, cosines, cut_of, dct_of_blocks, forward


def pieces(n, chunk):
    """Slices of an axis: ceil(n / chunk) of equal length but the last."""
    side = -(-n // -(-n // chunk))
    return [slice(i, i + side) for i in range(0, n, side)], side


def wave(size):
    """DCT-II in float64 from its definition."""
    k, i = np.mgrid[:size, :size]
    return np.where(k == 0, np.sqrt(1 / size), np.sqrt(2 / size)) * np.cos(np.pi * (2 * i + 1) * k / (2 * size))


def top_of_blocks(x, chunk, k):
    """Float64 oracle: of each block of a matrix the k largest coefficients, transformed back."""
    (rows, a), (columns, b) = pieces(x.shape[0], chunk), pieces(x.shape[1], chunk)
    out = np.zeros_like(x)
    for r in rows:
        for c in columns:
            block = np.zeros((a, b))
            part = x[r, c]
            block[: part.shape[0], : part.shape[1]] = part
            q = wave(a) @ block @ wave(b).T
            keep = np.argsort(-np.abs(q).reshape(-1), kind="stable")[:k]
            kept = np.zeros(a * b)
            kept[keep] = q.reshape(-1)[keep]
            back = wave(a).T @ kept.reshape(a, b) @ wave(b)
            out[r, c] = back[: part.shape[0], : part.shape[1]]
    return out


@pytest.mark.sampled
@pytest.mark.parametrize("shape", [(), (1,), (7,), (64,), (67,), (5, 67), (2, 3, 17, 9), (0, 4)])
def test_the_transform_is_orthonormal_and_comes_back(shape, seed):
    x = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    cut = cut_of(shape, 16)
    q = forward(jnp.asarray(x), cut)
    assert q.shape == (cut.size,)
    assert cut.size <= max(x.size * (1 + 1 / 16) ** 2, x.size)
    np.testing.assert_allclose(np.sum(np.square(np.float64(q))), np.sum(np.square(np.float64(x))), rtol=1e-5)
    np.testing.assert_allclose(backward(q, cut, shape), x, atol=1e-5)
    np.testing.assert_allclose(cosines(9), wave(9), atol=1e-12)


def test_blocks_equal_the_definition(key, seed):
    x = np.random.default_rng(seed).standard_normal((40, 67)).astype(np.float32)
    compressor = dct_of_blocks(jc.top_k(k=5), 32)
    x_hat, payload = jax.jit(lambda x: jc.roundtrip(compressor, x, key=key))(x)
    np.testing.assert_allclose(x_hat, top_of_blocks(np.float64(x), 32, 5), atol=1e-5)
    # Blocks of 20 x 23: five coefficients and their places of 9 bits in each of six
    assert payload.values.shape == (30,)
    assert payload.words.shape == (9, 1)


@pytest.mark.slow
def test_smooth_matrices_gather_in_few_coefficients(key):
    x = jnp.sin(jnp.arange(128.0) / 20)[:, None] * jnp.cos(jnp.arange(128.0) / 30)
    error = lambda c: float(jnp.sum((roundtrip(c, x, key)[0] - x) ** 2) / jnp.sum(x**2))
    assert error(jc.dct(jc.top_k(0.01))) < 1e-3 < 0.5 < error(jc.top_k(0.01))


def test_demo_is_its_algorithm(seed):
    n, shape, rounds = 3, (40, 48), 4
    grads = np.random.default_rng(seed).standard_normal((rounds, n, *shape)).astype(np.float32)
    tree = lambda g: {"b": g[..., 0], "w": g}
    tx = jc.demo(0.1, AXIS, decay=0.9, k=8, chunk=16, weight_decay=0.5)
    params = tree(jnp.ones(shape))
    state, axes = jc.init_state(tx, params, n, AXIS)
    step = jax.jit(jax.vmap(tx.update, in_axes=(0, axes, None), out_axes=(None, axes), axis_name=AXIS))
    delta = np.zeros((n, *shape))
    for g in grads:
        updates, state = step(tree(jnp.asarray(g)), state, params)
        delta = 0.9 * delta + g
        sent = np.stack([top_of_blocks(d, 16, 8) for d in delta])
        delta -= sent
        mean = sent.mean(0)
        clear = np.abs(mean) > 1e-5  # where rounding does not decide the sign
        want = -0.1 * (np.sign(mean) + 0.5)
        np.testing.assert_allclose(updates["w"][clear], want[clear], rtol=1e-5)
        np.testing.assert_allclose(updates["b"], -0.1 * (np.sign(g.mean(0)[:, 0]) + 0.5), rtol=1e-5)
    memory = state[0].local.algorithm.memory[-1]
    np.testing.assert_allclose(np.reshape(memory, delta.shape), delta, atol=1e-4)


def test_demo_under_shard_map(seed):
    grads = jnp.asarray(np.random.default_rng(seed).standard_normal((2, 2, 3, 33, 40)), jnp.float32)
    got, _ = run_shard_map(jc.demo(0.1, AXIS, k=4, chunk=16), jnp.zeros((3, 33, 40)), grads)
    assert np.all(np.isin(np.abs(got), [0, np.float32(0.1)]))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: jc.dct(jc.top_k(0.1), 0), r"dct: chunk must be an integer in 1 \.\. 1024; got 0"),
        (lambda: jc.dct(jc.flat(jc.top_k(0.1))), "acts on trees"),
        (lambda: jc.demo(0.1, AXIS, decay=2.0), "demo: decay must be in"),
        (lambda: jc.demo(0.1, AXIS, k=0), "demo: k must be an integer of at least 1"),
    ],
)
def test_errors(make, says):
    with pytest.raises(ValueError, match=says):
        make()
