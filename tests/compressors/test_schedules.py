"""top_k and rand_k whose ratio follows a schedule; those that estimate a threshold are in test_sidco."""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from montecarlo import monte_carlo, z_bound

import jaxcomp as jc
from jaxcomp.base import State, accumulate, advance


def vector(seed, d=1000):
    return jnp.asarray(np.random.default_rng(seed).standard_t(3, d), jnp.float32)


def rounds_of(compressor, x, key, count):
    """Payload, decoded vector and its sum with itself for each round, of one compiled function."""
    traces = []

    @jax.jit
    def step(key, x, state):
        traces.append(1)
        payload, local = compressor.compress(key, x, state)
        x_hat = compressor.decompress(payload, state.shared, x)
        both = jax.tree.map(lambda a: jnp.stack([a, a]), payload)
        twice = accumulate(compressor, jnp.zeros_like(x), both, None, state.shared)
        return payload, x_hat, twice, State(local, advance(compressor, state.shared))

    state, out = compressor.init(key, x), []
    for i in range(count):
        payload, x_hat, twice, state = step(jax.random.fold_in(key, i), x, state)
        np.testing.assert_allclose(twice, 2 * x_hat, rtol=1e-6)
        out.append((payload, np.asarray(x_hat)))
    assert len(traces) == 1
    return out


FALLING, RATIOS = jc.warm_up([0.25, 0.05, 0.01], 1), (0.25, 0.05, 0.01, 0.01)


@pytest.mark.sampled
@pytest.mark.parametrize("d", [1000, 20_000])
def test_top_k_follows_a_schedule(d, key, seed):
    x, compressor = vector(seed, d), jc.top_k(FALLING)
    for (payload, x_hat), ratio in zip(rounds_of(compressor, x, key, 4), RATIOS, strict=True):
        assert payload.indices.shape == (d // 4,)
        np.testing.assert_array_equal(x_hat, oracles.top_k(np.asarray(x), round(ratio * d)))
    assert compressor.spec.alpha(d) == 1 / d


def test_rand_k_follows_a_schedule(key, seed):
    d, x = 1000, vector(seed)
    compressor = jc.rand_k(FALLING, least=0.01)
    assert compressor.spec.omega(d) == 99
    for (payload, x_hat), ratio in zip(rounds_of(compressor, x, key, 4), RATIOS, strict=True):
        chosen = np.flatnonzero(x_hat)
        assert payload.values.shape == (250,)
        assert len(chosen) == np.count_nonzero(payload.values) == round(ratio * d)
        np.testing.assert_allclose(x_hat, oracles.rand_k(np.float64(x), chosen), rtol=1e-6)


def test_ratios_outside_of_peak_and_least_are_cut(key, seed):
    x = vector(seed)
    steps = lambda low, high: lambda count: jnp.where(count < 1, low, high)
    sent = lambda compressor: [np.count_nonzero(x_hat) for _, x_hat in rounds_of(compressor, x, key, 2)]
    assert sent(jc.top_k(steps(0.01, 0.1), peak=0.1)) == [10, 100]
    assert sent(jc.top_k(steps(0.01, 0.1))) == [10, 10]
    assert sent(jc.rand_k(steps(0.25, 0.001), least=0.05)) == [250, 50]
    assert sent(jc.rand_k(steps(0.01, 0.1), peak=0.05, least=0.01)) == [10, 50]


def test_rand_k_with_a_schedule_is_unbiased_in_every_round(key, seed):
    compressor, x = jc.rand_k(jc.warm_up([0.5, 0.1], 1), least=0.1), vector(seed, 60)

    def second(key):
        state = compressor.init(key, x)
        shared = advance(compressor, state.shared)
        payload, _ = compressor.compress(key, x, State(state.local, shared))
        return compressor.decompress(payload, shared, x)

    draws = jax.jit(jax.vmap(second))
    mean, error = monte_carlo(draws, key, num_draws=4096)
    z = np.abs(mean - np.asarray(x, np.float64)) / np.maximum(error, 1e-6 * float(jnp.max(jnp.abs(x))))
    assert z.max() < z_bound(false_alarm=1e-6, num_tests=x.size)
    norms, error = monte_carlo(lambda keys: jnp.sum((draws(keys) - x) ** 2, -1), key, num_draws=1024)
    assert norms <= compressor.spec.omega(60) * float(jnp.sum(x**2)) + z_bound(1e-6, 1) * error


def test_all_workers_keep_the_same_number(key, seed):
    """Under compressed_mean, where the sum of the payloads is decoded."""
    xs = jnp.stack([vector(seed + i) for i in range(4)])
    tx = jc.compressed_mean(jc.direct(jc.rand_k(FALLING, least=0.01)), "data", "sum")

    def run(x):
        state, out = tx.init(x), []
        for _ in range(3):
            mean, state = tx.update(x, state)
            out.append(mean)
        return jnp.stack(out)

    means = np.asarray(jax.jit(jax.vmap(run, axis_name="data", out_axes=None))(xs))
    for mean, ratio in zip(means, RATIOS, strict=False):
        chosen = np.flatnonzero(mean)
        assert len(chosen) == round(1000 * ratio)
        np.testing.assert_allclose(mean[chosen], np.asarray(xs).mean(0)[chosen] / ratio, rtol=1e-4, atol=1e-4)
