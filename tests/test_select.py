"""Selection without a sort, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomp.select import count_above, count_words, exceeding, excess_above, indices_of_words, mask_words, take

MASKS = {
    "empty": lambda rng, d: np.zeros(d, bool),
    "full": lambda rng, d: np.ones(d, bool),
    "one": lambda rng, d: np.arange(d) == d - 1,
    "sparse": lambda rng, d: rng.random(d) < 0.01,
    "half": lambda rng, d: rng.random(d) < 0.5,
    "clustered": lambda rng, d: (np.arange(d) // 50) % 7 == 3,
}


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("d", [0, 1, 31, 32, 33, 1000, 4096])
@pytest.mark.parametrize("capacity", [0, 1, 64, 5000])
def test_indices_are_those_of_nonzero(kind, d, capacity, seed):
    mask = MASKS[kind](np.random.default_rng(seed), d)
    words = mask_words(jnp.asarray(mask))
    indices, count = jax.jit(indices_of_words, static_argnums=(1, 2))(words, capacity, d)
    want = np.full(capacity, d)
    found = np.flatnonzero(mask)[:capacity]
    want[: len(found)] = found
    np.testing.assert_array_equal(indices, want)
    assert int(count) == int(count_words(words)) == mask.sum()


def test_vmap_equals_loop(seed):
    masks = np.random.default_rng(seed).random((5, 300)) < 0.1
    run = lambda m: indices_of_words(mask_words(m), 40, 300)
    mapped = jax.vmap(run)(jnp.asarray(masks))
    for i in range(5):
        np.testing.assert_array_equal(mapped[0][i], run(jnp.asarray(masks[i]))[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_passes(dtype, seed):
    x = jnp.asarray(np.random.default_rng(seed).standard_normal(1000), dtype)
    a = np.abs(np.float64(x))
    threshold = jnp.float32(0.7)
    assert int(count_above(x, threshold)) == (a > 0.7).sum()
    excess, after = excess_above(x, threshold, jnp.int32(5))
    np.testing.assert_allclose(excess, np.maximum(a - 0.7, 0).sum(), rtol=1e-5)
    assert int(after) == 5


@pytest.mark.parametrize("capacity", [1, 10, 100, 999])
@pytest.mark.parametrize("threshold", [0.0, 0.5, 100.0])
def test_exceeding_always_selects_the_largest(capacity, threshold, seed):
    x = np.random.default_rng(seed).standard_normal(1000).astype(np.float32)
    words, wanted = jax.jit(exceeding, static_argnums=2)(x, jnp.float32(threshold), capacity)
    indices, count = indices_of_words(words, capacity, 1000)
    a = np.abs(x)
    assert int(wanted) == (a > threshold).sum()
    expected = min(capacity, max(int(wanted), 1))
    assert int(count) == expected
    np.testing.assert_array_equal(np.sort(indices)[:expected], np.sort(np.argsort(-a)[:expected]))


def test_exceeding_with_ties_at_the_top():
    x = jnp.array([1.0, 5.0, -5.0, 5.0, 2.0])
    words, _ = exceeding(x, jnp.float32(0), 2)
    np.testing.assert_array_equal(indices_of_words(words, 2, 5)[0], [1, 2])
    # Ties below the top do not fit and are left out: what is sent is still the largest.
    words, _ = exceeding(jnp.array([1.0, 1.0, 1.0, 7.0]), jnp.float32(0), 2)
    np.testing.assert_array_equal(indices_of_words(words, 2, 4)[0], [3, 4])


def test_exceeding_of_zeros_and_of_garbage():
    words, wanted = exceeding(jnp.zeros(40), jnp.float32(0), 3)
    assert int(count_words(words)) == int(wanted) == 0
    words, _ = exceeding(jnp.array([np.nan, np.inf, 1.0, -np.inf]), jnp.float32(0), 1)
    np.testing.assert_array_equal(indices_of_words(words, 1, 4)[0], [2])


def test_take_pads_with_zero_and_drops_garbage():
    x = jnp.array([1.0, np.nan, np.inf, 4.0])
    np.testing.assert_array_equal(take(x, jnp.array([0, 1, 2, 3, 4, 4])), [1, 0, 0, 4, 0, 0])
