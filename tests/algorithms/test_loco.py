"""LoCo: a moving average of errors, in f32 and in 8 bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from variants import variants
from worlds import run_vmap

import jaxcomp as jc
from jaxcomp.algorithms.narrow import Narrow

TREE = {"b": jnp.zeros(5), "w": jnp.zeros((30, 50))}


def gradients(seed, rounds, workers=2):
    rng = np.random.default_rng(seed)
    mean = {name: rng.standard_normal(x.shape) for name, x in TREE.items()}
    noise = lambda x: (x + 0.1 * rng.standard_normal((rounds, workers, *x.shape))).astype(np.float32)
    return {name: jnp.asarray(noise(x)) for name, x in mean.items()}


@pytest.mark.parametrize("reset", variants([None, 3], {3}))
def test_the_average_of_errors_is_added_to_the_next_gradient(reset, seed):
    """Against float64, with a code that rounds to whole numbers in blocks of 50."""
    code, grads = jc.block_scaled("int4", block=50), gradients(seed, 5)
    tx = jc.compressed_mean(jc.loco(code, beta=0.8, reset=reset), "data", via="gather")
    directions, state = run_vmap(tx, TREE, grads)
    rounded = jax.jit(lambda x: jc.roundtrip(code, x, key=jax.random.key(0))[0])
    e = np.zeros((2, 1500))
    for t in range(5):
        h = np.asarray(grads["w"][t], np.float64).reshape(2, -1) + e
        sent = np.stack([rounded(jnp.asarray(row, jnp.float32)) for row in h])
        np.testing.assert_allclose(directions["w"][t].reshape(-1), sent.mean(0), atol=2e-5)
        e = 0.8 * e + 0.2 * (h - sent)
        e = e * (reset is None or (t + 1) % reset != 0)
    np.testing.assert_allclose(np.reshape(state.local.algorithm.memory[-1], e.shape), e, atol=2e-5)
    np.testing.assert_allclose(directions["b"], np.asarray(grads["b"]).mean(1), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_eight_bits_remember_nearly_as_well(seed):
    """Errors of the sum of directions, over 40 rounds with one mean gradient: with a memory they average out."""
    grads = gradients(seed, 40)
    exact = np.asarray(grads["w"]).mean(1).sum(0)
    code = jc.block_scaled("int2", block=50)
    made = {
        "none": jc.direct(code),
        "float32": jc.loco(code),
        "int8": jc.loco(code, memory="int8"),
    }
    error = {}
    for name, algorithm in made.items():
        directions, state = run_vmap(jc.compressed_mean(algorithm, "data", via="two_shot"), TREE, grads)
        error[name] = np.linalg.norm(np.asarray(directions["w"]).sum(0) - exact)
    assert error["float32"] < 0.5 * error["none"]
    assert error["int8"] < 1.1 * error["float32"]
    memory = state.local.algorithm.memory
    sizes = [x.nbytes for x in jax.tree.leaves(memory)]
    assert sum(sizes) < 0.3 * 4 * 2 * (1500 + 64)


def test_narrow_vectors_are_unbiased_and_keep_zeros(key, seed):
    x = np.random.default_rng(seed).standard_normal((3, 300)).astype(np.float32)
    x[:, 128:256] = 0
    nearest = Narrow.of(x).values(300)
    steps = np.repeat(Narrow.of(x).scales, 128, axis=1)[:, :300]
    assert (np.abs(nearest - x) <= steps * 0.5001).all()
    draws = jax.jit(jax.vmap(lambda key: Narrow.of(jnp.asarray(x), key).values(300)))(jax.random.split(key, 2000))
    assert np.abs(np.asarray(draws, np.float64).mean(0) - x).max() < 6 * steps.max() / 2 / np.sqrt(2000)
    np.testing.assert_array_equal(np.asarray(draws)[:, :, 128:256], 0)


@pytest.mark.sampled
@pytest.mark.parametrize(("memory", "workers"), [("float32", 3), ("int8", 1), ("int8", 3), ("bfloat16", 3)])
def test_memories_go_to_other_workers(memory, workers, seed):
    tx = jc.compressed_mean(jc.loco(jc.block_scaled("int2"), memory=memory), "data")
    _, old = run_vmap(tx, TREE, gradients(seed, 2))
    fresh, _ = jc.init_state(tx, TREE, workers, "data")
    new = jc.redistribute(old, fresh)
    values = lambda node: np.asarray(node.values(1500) if isinstance(node, Narrow) else node, np.float64)
    before, after = (values(state.local.algorithm.memory[-1]).reshape(-1, 1500) for state in (old, new))
    assert after.shape == (workers, 1500)
    assert np.abs(before).max() > 0
    tolerance = 1e-6 if memory == "float32" else np.abs(after).max() / 127
    np.testing.assert_allclose(after.sum(0), before.sum(0), atol=tolerance)


def test_wrong_arguments_are_named():
    for make, what in (
        (lambda: jc.loco(jc.top_k(0.1), beta=1.0), "beta must be in"),
        (lambda: jc.loco(jc.top_k(0.1), reset=0), "reset must be"),
        (lambda: jc.loco(jc.top_k(0.1), memory="int4"), "memory must be"),
        (lambda: jc.loco(jc.eden(0.1)), "known error bound"),
    ):
        with pytest.raises(ValueError, match=what):
            make()
