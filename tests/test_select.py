"""Selection without a sort, against NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from jitted import made_for
from variants import variants

from jaxcomp.arrays import finite
from jaxcomp.compressors.sparsify import largest_indices
from jaxcomp.payloads import global_indices, local_indices
from jaxcomp.select import (
    count_above,
    count_words,
    excess_above,
    first_bits,
    indices_of_words,
    mask_words,
    select_largest,
    take,
    top_set,
    words_above,
)

MASKS = {
    "empty": lambda rng, d: np.zeros(d, bool),
    "full": lambda rng, d: np.ones(d, bool),
    "one": lambda rng, d: np.arange(d) == d - 1,
    "sparse": lambda rng, d: rng.random(d) < 0.01,
    "half": lambda rng, d: rng.random(d) < 0.5,
    "clustered": lambda rng, d: (np.arange(d) // 50) % 7 == 3,
}


@pytest.mark.parametrize("d", variants([0, 1, 31, 32, 33, 1000, 40_007], {0, 1, 33, 40_007}))
@pytest.mark.parametrize("capacity", [0, 1, 64, 5000])
def test_indices_are_those_of_nonzero(d, capacity, seed):
    for kind, draw in MASKS.items():
        mask = draw(np.random.default_rng(seed), d)
        words = mask_words(jnp.asarray(mask))
        indices, count = jax.jit(indices_of_words, static_argnums=(1, 2))(words, capacity, d)
        want = np.full(capacity, d)
        found = np.flatnonzero(mask)[:capacity]
        want[: len(found)] = found
        np.testing.assert_array_equal(indices, want, err_msg=kind)
        assert int(count) == int(count_words(words)) == mask.sum(), kind


def test_vmap_equals_loop(seed):
    masks = np.random.default_rng(seed).random((5, 300)) < 0.1
    run = lambda m: indices_of_words(mask_words(m), 40, 300)
    mapped, one = jax.jit(jax.vmap(run))(masks), jax.jit(run)
    for i in range(5):
        np.testing.assert_array_equal(mapped[0][i], one(masks[i])[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_passes(dtype, seed):
    x = jnp.asarray(np.random.default_rng(seed).standard_normal(1000), dtype)
    a = np.abs(np.float64(x))
    threshold = jnp.float32(0.7)
    assert int(count_above(x, threshold)) == (a > 0.7).sum()
    excess, after = excess_above(x, threshold, jnp.int32(5))
    np.testing.assert_allclose(excess, np.maximum(a - 0.7, 0).sum(), rtol=1e-5)
    assert int(after) == 5
    squares, _ = excess_above(x, threshold, after, scale=jnp.float32(0.25), power=2)
    np.testing.assert_allclose(squares, np.square(np.maximum(a - 0.7, 0)).sum() / 16, rtol=1e-5)


@jax.jit
def run_top_set(x, threshold, least, most):
    """How many are selected of 1000, and which."""
    words = top_set(x, threshold, least, most)
    return count_words(words), indices_of_words(words, 1000, 1000)[0]


@pytest.mark.sampled
@pytest.mark.parametrize("most", [1, 10, 100, 999])
@pytest.mark.parametrize("threshold", [0.0, 0.5, 100.0, -1.0, np.nan])
def test_top_set_always_selects_the_largest(most, threshold, seed):
    x = np.random.default_rng(seed).standard_normal(1000).astype(np.float32)
    a = np.abs(x)
    for least in {1, max(1, most // 2), most}:
        counted, indices = run_top_set(x, jnp.float32(threshold), least, most)
        count = int(counted)
        above = (a > max(np.nan_to_num(threshold), 0)).sum()
        assert count == above if 1 <= above <= most else least <= count <= most
        np.testing.assert_array_equal(np.sort(indices)[:count], np.sort(np.argsort(-a)[:count]))


def test_top_set_with_ties():
    @functools.partial(jax.jit, static_argnums=(1, 2))
    def run(x, least, most):
        return indices_of_words(top_set(x, jnp.float32(0), least, most), 3, len(x))[0]

    selected = lambda x, least, most: run(np.float32(x), least, most)
    np.testing.assert_array_equal(selected([1.0, 5.0, -5.0, 5.0, 2.0], 2, 2), [1, 2, 5])
    # The first of the equal ones by index fill up.
    np.testing.assert_array_equal(selected([1.0, 1.0, 1.0, 7.0], 2, 2), [0, 3, 4])
    np.testing.assert_array_equal(selected([1.0, 1.0, 1.0, 7.0], 1, 2), [3, 4, 4])


def test_top_set_of_zeros_and_of_garbage():
    found = jax.jit(lambda x: indices_of_words(top_set(x, jnp.float32(0), 1, 1), 1, 4)[0])
    assert int(jax.jit(lambda x: count_words(top_set(x, jnp.float32(0), 3, 3)))(jnp.zeros(40))) == 0
    np.testing.assert_array_equal(found(jnp.array([np.nan, np.inf, 1.0, -np.inf])), [2])


KINDS = {
    "normal": lambda rng, d: rng.standard_normal(d),
    "few values": lambda rng, d: rng.integers(-3, 4, d),
    "all equal": lambda rng, d: np.ones(d),
    "zeros": lambda rng, d: np.zeros(d),
    "hardly any": lambda rng, d: np.where(rng.random(d) < 0.001, rng.standard_normal(d), 0),
    "very heavy": lambda rng, d: rng.standard_cauchy(d) ** 5,
    "garbage": lambda rng, d: np.where(rng.random(d) < 0.1, rng.choice([np.nan, np.inf, -np.inf], d), rng.random(d)),
    "tiny": lambda rng, d: rng.standard_normal(d) * 1e-36,
}
run_largest = jax.jit(select_largest, static_argnums=(2,))


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("d", "capacity", "dtype"),
    [(1, 1, "float32"), (33, 7, "float32"), (1000, 1000, "float32"), (1000, 300, "bfloat16"), (50_001, 500, "float32")],
)
def test_largest_is_a_stable_sort(d, capacity, dtype, seed):
    for kind, draw in KINDS.items():
        x = jnp.asarray(draw(np.random.default_rng(seed), d), dtype)
        for k in {1, capacity}:
            want = np.r_[stable_largest(x, k), [d] * (capacity - k)]
            np.testing.assert_array_equal(run_largest(x, k, capacity), want, err_msg=kind)


ACCELERATORS = ["gpu", "tpu"]


def stable_largest(x, k):
    """Indices of the k largest finite magnitudes, ascending, padded: by a stable sort."""
    a = np.nan_to_num(np.abs(np.float64(x)), nan=0, posinf=0)
    a[a < float(jnp.finfo(jnp.float32).tiny)] = 0  # XLA flushes subnormal numbers
    kept = np.argsort(-a, kind="stable")[:k]
    kept = np.sort(kept[a[kept] > 0])
    return np.r_[kept, [a.size] * (k - kept.size)]


@pytest.mark.parametrize("platform", ACCELERATORS)
@pytest.mark.parametrize(
    ("rows", "d", "k"), [(1, 17_000, 60), (2, 17_000, 17_000), (5, 4096, 64), (8, 64, 5), (3, 300, 299)]
)
def test_accelerators_select_the_same(rows, d, k, platform, seed):
    """A vector, several at once, and many short rows: other forms, the same set."""
    rng = np.random.default_rng(seed)
    select = lambda x: (
        jax.vmap(lambda x: largest_indices(x, k, k))(x) if rows > 1 else largest_indices(x[0], k, k)[None]
    )
    inputs = np.stack([[draw(rng, d) for _ in range(rows)] for draw in KINDS.values()]).astype(np.float32)
    inputs[0, -1] = np.linspace(-1, 1, d)
    inputs[np.abs(inputs) < float(jnp.finfo(jnp.float32).tiny)] = 0
    found = made_for(platform, lambda xs: jax.lax.map(select, xs), jnp.asarray(inputs))
    for kind, xs, each in zip(KINDS, inputs, found, strict=True):
        for x, got in zip(xs, each, strict=True):
            np.testing.assert_array_equal(got, stable_largest(x, k), err_msg=kind)


@pytest.mark.parametrize("platform", ACCELERATORS)
@pytest.mark.parametrize("d", [31, 4096, 9000, 100_001])
def test_accelerators_mark_count_and_find_the_same(d, platform, seed):
    x = jnp.asarray(np.random.default_rng(seed).standard_normal(d).astype(np.float32)).at[3].set(jnp.nan)

    def run(x):
        words = words_above(x, jnp.float32(0.7))
        first = first_bits(words, 5)
        excess, _ = excess_above(finite(x), jnp.float32(0.7), jnp.int32(0))
        above, few = (count_words(words), count_above(x, jnp.float32(0.7))), words_above(x, jnp.float32(3.2))
        places = [indices_of_words(few, capacity, d) for capacity in (100, 190)]  # fewer than ones of 100,001; more
        return words, first, *above, indices_of_words(words, d, d), indices_of_words(words, 2, d), *places, excess

    here, there = jax.jit(run)(x), made_for(platform, run, x)
    jax.tree.map(np.testing.assert_array_equal, here[:-1], there[:-1])
    np.testing.assert_allclose(here[-1], there[-1], rtol=1e-5)


def test_largest_under_vmap_with_counts_of_their_own(seed):
    xs = np.random.default_rng(seed).standard_normal((3, 5000)).astype(np.float32)
    mapped = jax.jit(jax.vmap(lambda x, k: select_largest(x, k, 60)))(xs, jnp.array([1, 20, 60]))
    for x, k, got in zip(xs, (1, 20, 60), mapped, strict=True):
        np.testing.assert_array_equal(got[:k], np.sort(np.argsort(-np.abs(x))[:k]))
        assert np.all(got[k:] == 5000)


@pytest.mark.sampled
@pytest.mark.parametrize("count", [0, 1, 5, 31, 32, 33, 70, 500])
def test_first_bits(count, seed):
    mask = np.random.default_rng(seed).random(300) < 0.3
    mask[40:110] = True
    indices = jax.jit(lambda mask: indices_of_words(first_bits(mask_words(mask), count), 300, 300)[0])(mask)
    np.testing.assert_array_equal(indices, np.r_[np.flatnonzero(mask)[:count], [300] * 300][:300])


@pytest.mark.sampled
@pytest.mark.parametrize("d", [1, 65535, 65536, 65537, 200_000])
def test_local_indices_are_the_oracle_and_come_back(d, seed):
    rng = np.random.default_rng(seed)
    for count, capacity in ((0, 4), (1, 1), (min(d, 50), 60), (min(d, 300), 300)):
        indices = np.full(capacity, d, np.int32)
        indices[:count] = np.sort(rng.choice(d, count, replace=False))
        local = jax.jit(local_indices, static_argnums=1)(indices, d)
        low, counts = oracles.local_indices(indices, d)
        np.testing.assert_array_equal(local.low, low)
        np.testing.assert_array_equal(local.counts, counts)
        np.testing.assert_array_equal(jax.jit(global_indices, static_argnums=1)(local, d), indices)


def test_local_indices_of_a_dense_block():
    """All 65536 entries of a block, the largest count there is."""
    indices = jnp.arange(65536 + 3, dtype=jnp.int32)
    local = jax.jit(local_indices, static_argnums=1)(indices, 70_000)
    np.testing.assert_array_equal(local.counts, [65536, 3])
    np.testing.assert_array_equal(jax.jit(global_indices, static_argnums=1)(local, 70_000), indices)


def test_take_pads_with_zero_and_drops_garbage():
    x = jnp.array([1.0, np.nan, np.inf, 4.0])
    np.testing.assert_array_equal(take(x, jnp.array([0, 1, 2, 3, 4, 4])), [1, 0, 0, 4, 0, 0])
