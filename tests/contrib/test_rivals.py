"""Historical rivals: thresholds against float64 oracles, samples, and arguments. Corners and scales: test_sidco.py."""

import jax
import numpy as np
import oracles
import pytest
from thresholds import DATA, SIZE, compressed, run

import jaxcomp as jc

RIVALS = [
    (jc.contrib.gaussian_k(0.01, capacity=80), lambda x: oracles.gaussian_k(x, 0.01)),
    (jc.contrib.hard_threshold(1.5, room=0.9), lambda x: 1.5),
    (jc.contrib.redsync(0.05, spacing=0.01), lambda x: oracles.redsync(x, 0.05, step=0.01)),
]


@pytest.mark.sampled
@pytest.mark.parametrize(("compressor", "oracle"), RIVALS, ids=[c.spec.name for c, _ in RIVALS])
def test_rivals_are_their_oracles(compressor, oracle, key, seed):
    for draw in DATA.values():
        x = draw(np.random.default_rng(seed), SIZE).astype(np.float32)
        a, eta = np.abs(np.float64(x)), oracle(x)
        _, x_hat = compressed(compressor, x, key)
        edge = np.abs(a - eta) < 1e-4 * eta
        np.testing.assert_array_equal((x_hat != 0)[~edge], (a > eta)[~edge])


def test_trimmed_redsync_is_top_k(key, seed):
    for draw in DATA.values():
        x = draw(np.random.default_rng(seed), SIZE).astype(np.float32)
        _, x_hat = compressed(jc.contrib.redsync(0.01, method="trimmed"), x, key)
        np.testing.assert_array_equal(x_hat, oracles.top_k(x, 200))


def test_redsync_uses_a_threshold_again(key, seed):
    xs = [scale * np.random.default_rng(seed).laplace(size=SIZE) for scale in (1, 0.9, 0.9, 0.9)]
    sent = [
        int(np.sum(np.asarray(p.indices) < SIZE))
        for p, _ in run(jc.contrib.redsync(0.05, spacing=0.01, reuse=3), xs, key)
    ]
    assert sent[0] > sent[1] == sent[2] < sent[3] == sent[0]


def test_dgc_samples_and_corrects(key, seed):
    """Never more than k; close to k on a smooth law; exactly the top k when the sample misleads."""
    x = np.random.default_rng(seed).laplace(size=100_000).astype(np.float32)
    for k in jax.random.split(key, 5):
        payload, _ = compressed(jc.contrib.dgc(0.01), x, k)
        assert 0.75 * 1000 <= np.sum(np.asarray(payload.indices) < x.size) <= 1000
    # Half of the entries equal the threshold of any sample: far too many reach it.
    x[::2] = 3.0
    x[1::2] = np.clip(x[1::2], -2.9, 2.9)
    x[77] = 50
    payload, x_hat = compressed(jc.contrib.dgc(0.01), x, key)
    np.testing.assert_array_equal(x_hat, oracles.top_k(x, 1000))


BAD = [
    (lambda: jc.contrib.dgc(0.01, sample_ratio=0), r"sample_ratio must be in \(0, 1\]; got 0"),
    (lambda: jc.contrib.redsync(0.01, method="guess"), "method must be 'search' or 'trimmed'"),
    (lambda: jc.contrib.redsync(0.01, spacing=1), r"spacing must be in \(0, 1\); got 1"),
    (lambda: jc.contrib.redsync(0.01, reuse=0), "reuse must be an integer of at least 1"),
    (lambda: jc.contrib.hard_threshold(-1), "threshold must be at least 0"),
    (lambda: jc.contrib.hard_threshold(float("nan")), "threshold must be at least 0"),
    (lambda: jc.contrib.gaussian_k(0.0), r"ratio must be in \(0, 1\]"),
]


@pytest.mark.parametrize(("make", "message"), BAD, ids=[message for _, message in BAD])
def test_wrong_arguments_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
