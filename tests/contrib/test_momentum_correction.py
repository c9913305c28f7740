"""Momentum correction against its recursion in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
from worlds import AXIS, gradients, heterogeneous, run_shard_map

import jaxcomp as jc

N, ROUNDS, SIZE = 4, 5, 60


@pytest.mark.sampled
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("masking", [False, True])
def test_momentum_correction_is_the_oracle(nesterov, masking, seed):
    grads = heterogeneous(seed)
    algorithm = jc.contrib.momentum_correction(jc.top_k(k=6), momentum=0.8, nesterov=nesterov, masking=masking)
    directions, _ = run_shard_map(jc.compressed_mean(algorithm, AXIS), jnp.zeros(SIZE), jnp.asarray(grads))
    want = oracles.momentum_correction(np.float64(grads), lambda x: oracles.top_k(x, 6), 0.8, nesterov, masking)
    np.testing.assert_allclose(directions, want, rtol=1e-4, atol=1e-5)


@pytest.mark.sampled
@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_of_dense_leaves_comes_after_the_mean(nesterov, seed):
    """Small leaves go dense: for them the whole is SGD with momentum, as it is for large ones if all is sent."""
    tree = {"b": jnp.zeros(5), "w": jnp.zeros(1500)}
    grads = gradients(seed, ROUNDS, N, tree)
    algorithm = jc.contrib.momentum_correction(jc.top_k(1.0), momentum=0.8, nesterov=nesterov, masking=False)
    directions, _ = run_shard_map(jc.compressed_mean(algorithm, AXIS), tree, grads)
    trace = optax.trace(0.8, nesterov=nesterov)
    state = trace.init(tree)
    for t in range(ROUNDS):
        want, state = trace.update(jax.tree.map(lambda g: g[t].mean(0), grads), state)  # noqa: B023
        for name in tree:
            np.testing.assert_allclose(directions[name][t], want[name], rtol=1e-4, atol=1e-5)


def test_local_clipping(seed):
    """Each worker's gradient is cut to clip_norm / sqrt(n), over all leaves, before it is accumulated."""
    grads = heterogeneous(seed)
    algorithm = jc.contrib.momentum_correction(jc.top_k(1.0), momentum=0, clip_norm=2.0, workers=N)
    directions, _ = run_shard_map(jc.compressed_mean(algorithm, AXIS), jnp.zeros(SIZE), jnp.asarray(grads))
    norms = np.linalg.norm(grads, axis=-1, keepdims=True)
    want = (grads * np.minimum(1, 2.0 / np.sqrt(N) / norms)).mean(1)
    np.testing.assert_allclose(directions, want, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_local_clipping_in_double_precision(seed):
    """A gradient beyond f32 is cut to the norm that it may have, to the last digits of f64."""
    with jax.enable_x64(True):
        grads = 1e200 * np.random.default_rng(seed).standard_normal((N, SIZE))
        algorithm = jc.contrib.momentum_correction(jc.top_k(1.0), momentum=0, clip_norm=2.0, workers=N)
        tx = jc.compressed_mean(algorithm, AXIS, weights=[1, 2, 3, 4])
        step = jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name=AXIS, out_axes=None)
        got = jax.jit(step)(jnp.asarray(grads))
    want = np.average(
        grads / np.linalg.norm(grads / 1e200, axis=1, keepdims=True) / 1e200, axis=0, weights=[1, 2, 3, 4]
    )
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, want, rtol=1e-13, atol=1e-16)


@pytest.mark.parametrize(
    ("dtype", "value"), [("float32", 3e38), ("float32", 3e36), ("float16", 6e4), ("bfloat16", 300)]
)
def test_no_norm_is_too_large_to_be_clipped(dtype, value):
    algorithm = jc.contrib.momentum_correction(jc.top_k(1.0), momentum=0, clip_norm=1.0, workers=1)
    directions, _ = run_shard_map(
        jc.compressed_mean(algorithm, AXIS), jnp.zeros(2**14), jnp.full((1, 1, 2**14), value, dtype)
    )
    np.testing.assert_allclose(np.linalg.norm(np.asarray(directions, np.float64)), 1, rtol=1e-5)


def test_the_momentum_of_small_leaves_saturates():
    grads = jnp.array([3e38, 3e38, -3e38, 1.0]).reshape(4, 1, 1) * jnp.ones(5)
    algorithm = jc.contrib.momentum_correction(jc.top_k(0.1), momentum=0.9)
    directions, _ = run_shard_map(jc.compressed_mean(algorithm, AXIS), jnp.zeros(5), grads)
    assert np.all(np.isfinite(directions))


@pytest.mark.parametrize("tree", [jnp.zeros(3000), {"a": jnp.zeros(3000), "b": jnp.zeros(3)}], ids=["array", "tree"])
def test_no_array_of_the_state_is_empty(tree):
    """Orbax does not save empty arrays."""
    state = jc.compressed_mean(jc.contrib.momentum_correction(jc.top_k(0.1)), None).init(tree)
    assert all(np.size(leaf) for leaf in jax.tree.leaves(state))
