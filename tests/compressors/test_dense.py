"""`cast`: a scale for each block, and types without a negative zero. `dithering`: a norm for each block."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jitted import roundtrip

import jaxcomp as jc


def vector(seed, d=1000):
    return np.random.default_rng(seed).standard_t(3, d).astype(np.float32)


@pytest.mark.parametrize("name", ["float16", "float8_e4m3fn", "float8_e5m2"])
def test_cast_gives_each_block_its_scale(name, key, seed):
    """Small entries far from a large one keep the relative error of the type; with one scale they vanish."""
    x = vector(seed, 2048)
    x[:1024] *= 1e-3 / np.abs(x[:1024]).max()
    x[1024:] *= 1e4 / np.abs(x[1024:]).max()
    small = lambda x_hat: np.linalg.norm(x_hat[:1024] - x[:1024]) / np.linalg.norm(x[:1024])
    x_hat, payload = roundtrip(jc.cast(name), x, key)
    assert payload.scale.shape == (4,)
    assert small(x_hat) < 0.2
    x_hat, payload = roundtrip(jc.cast(name, block_size=None), x, key)
    assert payload.scale.shape == ()
    if name == "float8_e4m3fn":
        assert small(x_hat) == 1


@pytest.mark.parametrize("name", ["float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e4m3b11fnuz"])
def test_types_without_negative_zero_round_nothing_to_nan(name, key):
    """Their -0 is NaN, which XLA makes of small negative numbers in a loop: it must not reach a memory."""
    tx = jc.compressed_mean(jc.error_feedback(jc.cast(name)), None, seed=key)
    x = jnp.array([1.0, -1e-9])

    def body(state, _):
        _, state = tx.update(x, state)
        return state, state.local.algorithm.memory

    memories = jax.jit(lambda state: jax.lax.scan(body, state, length=2)[1])(tx.init(x))
    assert np.isfinite(memories).all()


@pytest.mark.parametrize("name", ["float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e4m3b11fnuz"])
@pytest.mark.parametrize("scaled", [True, False])
def test_types_without_negative_zero_round_to_nearest(name, scaled, key, seed):
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal(500) * 10.0 ** rng.integers(-9, 1, 500)).astype(np.float32)
    compressor = jc.cast(name, scaled=scaled)
    x_hat, payload = roundtrip(compressor, x, key)
    factor = float(payload.scale[0]) if scaled else 1.0
    want = (x / np.float32(factor)).astype(jnp.dtype(name)).astype(np.float32) * np.float32(factor)
    want = np.where(np.isnan(want), 0, want)  # where NumPy itself made -0 of it
    np.testing.assert_allclose(x_hat, want, rtol=1e-6)


def test_the_error_of_dithering_does_not_grow_with_the_vector(key, seed):
    assert jc.dithering(7).spec.omega(2**22) == jc.dithering(7).spec.omega(512)
    assert jc.dithering(7, blocks=1).spec.omega(2**22) > 100
    x = vector(seed, 100_000)
    x_hat, payload = roundtrip(jc.dithering(7), x, key)
    assert payload.norms.shape == (-(-100_000 // 512),)
    assert np.linalg.norm(x_hat - x) < 1.5 * np.linalg.norm(x)
    # An array of steps is one for each entry, or for each block: what is a block has to be said.
    assert jc.dithering(steps=[0.1] * 1000).spec.omega(1000) == pytest.approx(0.1 * 1000**0.5 - 1, rel=1e-3)
