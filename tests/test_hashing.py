"""The random words are uniform and independent where the compressors rely on it."""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from montecarlo import chi_square_bound, z_bound

from jaxcomp.compressors.rand_k import Draw
from jaxcomp.hashing import as_uniform, fmix32, halves, random_bits, random_subset, random_uniform, scale_to

N = 1 << 18


def test_fmix32_is_the_oracle():
    words = [0, 1, 2, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 123456789]
    np.testing.assert_array_equal(fmix32(jnp.array(words, jnp.uint32)), [oracles.fmix32(w) for w in words])


def test_uniform_on_bytes_and_mean(key):
    """Chi-square over 256 values of each byte, false alarm 1e-6 each."""
    words = np.asarray(random_bits(key, N))
    for byte in words.view(np.uint8).reshape(-1, 4).T:
        counts = np.bincount(byte, minlength=256)
        assert np.sum((counts - N / 256) ** 2) / (N / 256) < chi_square_bound(255, 1e-6)
    uniform = np.asarray(random_uniform(key, N), np.float64)
    assert 0 < uniform.min() < uniform.max() < 1
    assert abs(uniform.mean() - 0.5) * np.sqrt(12 * N) < z_bound(1e-6, 1)


@pytest.mark.parametrize("other", ["next round", "next worker", "neighbour", "far neighbour"])
def test_no_correlation(other, key):
    a = np.asarray(random_uniform(key, N), np.float64) - 0.5
    b = {
        "next round": lambda: random_uniform(jax.random.fold_in(key, 1), N),
        "next worker": lambda: random_uniform(jax.random.fold_in(jax.random.fold_in(key, 0), 3), N),
        "neighbour": lambda: np.roll(a, 1) + 0.5,
        "far neighbour": lambda: np.roll(a, 4096) + 0.5,
    }[other]()
    b = np.asarray(b, np.float64) - 0.5
    assert abs(np.mean(a * b)) * 12 * np.sqrt(N) < z_bound(1e-6, 1)


def test_pairs_are_uniform_on_the_square(key):
    """Successive words on a 32 x 32 grid, chi-square, false alarm 1e-6."""
    u = np.asarray(random_uniform(key, N))
    cells = (u[0::2] * 32).astype(int) * 32 + (u[1::2] * 32).astype(int)
    counts = np.bincount(cells, minlength=1024)
    assert np.sum((counts - N / 2048) ** 2) / (N / 2048) < chi_square_bound(1023, 1e-6)


def test_halves_are_uniform_and_do_not_depend_on_each_other(key):
    """Of a word, and of the words that follow it: means, correlations, any two of them on a 32 x 32 grid.

    Beside those of the next place, of another round and of another worker.
    """
    shape, many = (4, 512, 32), 8
    other = lambda number: jax.random.fold_in(key, number)
    drawn = [np.stack(halves(each, shape, many)).reshape(many, -1) for each in (key, other(1), other(2))]
    assert all(0 <= x.min() < x.max() < 2**16 for x in drawn)
    uniform = np.asarray(as_uniform(drawn[0][0]))
    assert 0 < uniform.min() < uniform.max() < 1
    rows = np.concatenate([*drawn, np.roll(drawn[0], 1, 1)]).astype(np.int64)
    count, pairs = rows.shape[1], [(i, j) for i in range(many) for j in range(i + 1, len(rows))]
    centred = (rows + 0.5) / 2**16 - 0.5
    assert np.all(np.abs(centred.mean(1)) * np.sqrt(12 * count) < z_bound(1e-6, len(rows)))
    correlations = centred @ centred.T / count * 12 * np.sqrt(count)
    assert all(abs(correlations[i, j]) < z_bound(1e-6, len(pairs)) for i, j in pairs)
    for bits in (rows >> 11, rows & 31):
        for i, j in pairs:
            counts = np.bincount(bits[i] * 32 + bits[j], minlength=1024)
            squares = np.sum((counts - count / 1024) ** 2) / (count / 1024)
            assert squares < chi_square_bound(1023, 1e-6 / len(pairs)), (i, j)


@pytest.mark.parametrize("size", [1, 2, 3, 10, 1000, 46341, 65536])
def test_scale_to_is_multiply_high(size):
    words = np.array([0, 1, 2**31, 2**32 - 1, 12345678], np.uint32)
    want = (words.astype(np.uint64) * size) >> 32
    np.testing.assert_array_equal(scale_to(jnp.asarray(words), size), want)


@pytest.mark.sampled
@pytest.mark.parametrize(("size", "k"), [(0, 0), (1, 1), (2, 2), (3, 3), (10, 10), (1023, 1023), (2**31 - 1, 1000)])
def test_subset_is_distinct_and_in_range(size, k, key):
    chosen = np.asarray(random_subset(key, size, k))
    assert len(np.unique(chosen)) == k
    assert k == 0 or (chosen.min() >= 0 and chosen.max() < size)


def test_raw_and_typed_keys_agree(key):
    np.testing.assert_array_equal(random_bits(key, 8), random_bits(jax.random.key_data(key), 8))


def test_words_of_a_round_are_new_in_every_round_and_place(key):
    rounds = jax.jit(jax.vmap(lambda count: Draw(jax.random.key_data(key), count).words(16)))(jnp.arange(1000))
    words = np.asarray(rounds)
    assert np.unique(words).size > words.size - 10  # 0.03 of 16,000 words of 32 bits are expected twice
    assert abs(np.unpackbits(words.view(np.uint8)).mean() - 0.5) < 5 * 0.5 / np.sqrt(32 * words.size)
