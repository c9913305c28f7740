"""Norms against sums in more digits and a wider range, in every form that a backend takes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomp import backend, norms

EVERY = ("cpu", "gpu", "tpu")


def oracle(rows):
    """Norms of finite entries, f128, at most the largest number; entries that are no normal numbers count as zeros."""
    info = jnp.finfo(rows.dtype)
    x = np.where(np.isfinite(rows), rows, 0).astype(np.longdouble)
    x = np.where(np.abs(x) < float(info.tiny), 0, x)
    return np.minimum(np.sqrt(np.sum(x * x, axis=-1)), np.longdouble(info.max))


def rows_of(dtype, exponent, length, seed):
    """Four rows with a largest entry of about 2^exponent, and with a NaN and infinities among them."""
    rng = np.random.default_rng(seed)
    rows = rng.uniform(0.5, 1, (4, length)) * rng.choice([-1, 1], (4, length))
    rows = np.ldexp(rows, exponent).astype(dtype)
    if length > 3:
        rows[1, 2], rows[2, 0], rows[3, 1] = np.nan, np.inf, -np.inf
    return rows


@pytest.mark.parametrize("length", [1, 2, 512])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", EVERY)
def test_norms_of_all_magnitudes(name, dtype, length, monkeypatch):
    monkeypatch.setattr(backend, "platform", lambda mesh=None: name)
    with jax.enable_x64(True):
        norms_of, info = jax.jit(lambda rows: norms.block_norms(rows, 2)), jnp.finfo(dtype)
        for seed, exponent in enumerate(range(info.minexp + 2, info.maxexp + 1, info.maxexp // 16)):
            rows = rows_of(dtype, exponent, length, seed)
            np.testing.assert_allclose(norms_of(rows), oracle(rows).astype(dtype), rtol=16 * float(info.eps))


@pytest.mark.parametrize("name", EVERY)
def test_rows_of_many_magnitudes(name, monkeypatch):
    monkeypatch.setattr(backend, "platform", lambda mesh=None: name)
    exponents = np.arange(-120, 125, 5)
    rows = np.concatenate([rows_of("float32", e, 33, e + 200) for e in exponents])
    rows[::7, 5:9] = np.float32(1e-41)  # no normal numbers
    rows[::5] = np.sort(np.abs(rows[::5]), axis=1)[:, ::-1] * np.logspace(0, -12, 33, dtype=np.float32)
    made = jax.jit(lambda rows: norms.block_norms(rows, 2))(rows)
    normal = np.nanmax(np.where(np.isfinite(rows), np.abs(rows), 0), axis=1) > 2.0**-100
    np.testing.assert_allclose(made[normal], oracle(rows)[normal].astype(np.float32), rtol=2e-6)


@pytest.mark.parametrize("name", EVERY)
def test_rows_without_a_normal_number(name, monkeypatch):
    monkeypatch.setattr(backend, "platform", lambda mesh=None: name)
    rows = np.array([[0, 0], [1e-45, 1e-40], [np.nan, -np.inf], [np.inf, 0], [3, 4], [0, -2.5e38], [3e38, -3e38]])
    made = jax.jit(lambda rows: norms.block_norms(rows, 2))(rows.astype(np.float32))
    np.testing.assert_allclose(made, [0, 0, 0, 0, 5, 2.5e38, np.finfo(np.float32).max], rtol=1e-6)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("length", [1, 2])
def test_largest_magnitude_of_short_rows(name, length, monkeypatch):
    """XLA for CPU takes a reduction over one entry for that entry, whatever is reduced by."""
    monkeypatch.setattr(backend, "platform", lambda mesh=None: name)
    rows = np.repeat(np.array([[np.nan], [-np.inf], [-2], [np.inf], [0]], np.float32), length, axis=1)
    np.testing.assert_array_equal(jax.jit(norms.max_abs)(rows), [0, 0, 2, 0, 0])
    np.testing.assert_array_equal(jax.jit(lambda x: norms.block_norms(x, np.inf))(rows), [0, 0, 2, 0, 0])
