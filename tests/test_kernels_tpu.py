"""Kernels for TPUs give what XLA's form gives: run here by an interpreter, and compiled in `tests/accelerators`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomp as jc
from jaxcomp import kernels_tpu
from jaxcomp.base import accumulate
from jaxcomp.compressors import blocks
from tests.jitted import made_for

ROW = kernels_tpu.ROWS * kernels_tpu.LANES
SIZES = [ROW, ROW + 3 * 4096, 8 * ROW, 8 * ROW + 4096, 17 * ROW]  # less than a block of rows, one, and parts of more
ROWS = {
    "dithering": lambda d: jc.dithering(7),
    "dithering, 4096 entries": lambda d: jc.dithering(1, block_size=4096),
    "dithering, 128 entries": lambda d: jc.dithering(127, block_size=128, norm="inf"),
    "dithering, 32 entries": lambda d: jc.dithering(7, block_size=32),
    "dithering, 8192 entries": lambda d: jc.dithering(7, block_size=8192),
    "dithering, one norm": lambda d: jc.dithering(7, blocks=1),
    "dithering, bfloat16": lambda d: jc.dithering(100, norm_dtype=jnp.bfloat16),
    "dithering, steps": lambda d: jc.dithering(steps=np.random.default_rng(d).uniform(0.2, 0.3, d)),
    "int8": lambda d: jc.block_scaled("int8"),
    "int4, at random": lambda d: jc.block_scaled("int4", rounding="stochastic"),
    "mxfp4": lambda d: jc.block_scaled("mxfp4"),
    "sign": lambda d: jc.sign(),
    "terngrad": lambda d: jc.terngrad(),
}
KEY = jax.random.key(0)


@pytest.fixture
def with_kernels(monkeypatch):
    """function(*args) as a TPU computes it with kernels, interpreted; of which there must be so many."""

    def run(count, function, *args):
        calls, real = [], kernels_tpu.pl.pallas_call

        def interpreted(*args, **kwargs):
            calls.append(args)
            return real(*args, interpret=True, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(kernels_tpu.pl, "pallas_call", interpreted)
            patch.setattr(blocks, "has_kernels", lambda: True)
            found = made_for("tpu", function, *args)
        assert len(calls) == count
        return found

    return run


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ROWS)
def test_kernels_code_and_decode_like_xla(name, size, seed, with_kernels):
    """Norms up to the order of their sums, codes the same but where a norm is another; decoded the same."""
    compressor = ROWS[name](size)
    whole = "8192" not in name or size % 8192 == 0  # a shorter last block is left to XLA
    x = jax.random.normal(jax.random.key(seed), (size,)).at[7].set(jnp.nan).at[size - 1].set(0)
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    state = compressor.init(KEY, like)
    compress = lambda x: compressor.compress(KEY, x, state)[0]

    def decode(payload, other, total):
        several = jax.tree.map(lambda *parts: jnp.stack(parts), payload, other, payload)
        added = lambda total, weights: accumulate(compressor, total, several, weights, state.shared)
        decoded = compressor.decompress(payload, state.shared, like)
        return decoded, added(total, None), added(like, jnp.array([0.5, 0.25, 0.25]))

    mine, theirs = with_kernels(whole, compress, x), made_for("tpu", compress, x)
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
        if a.dtype == jnp.uint32:
            assert np.mean(np.asarray(a != b)) < 1e-3
        else:
            np.testing.assert_allclose(a.astype(jnp.float32), b.astype(jnp.float32), rtol=1e-6)
    payloads = theirs, made_for("tpu", compress, -2 * x)
    found, wanted = with_kernels(3 * whole, decode, *payloads, x), made_for("tpu", decode, *payloads, x)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(a, b)


def test_kernels_take_what_a_vmap_gives(seed, with_kernels):
    rows = jax.random.normal(jax.random.key(seed), (3, 2 * ROW))
    keys, compressor = jax.random.split(KEY, 3), jc.block_scaled("int8", rounding="stochastic")
    run = jax.vmap(lambda key, x: jc.roundtrip(compressor, x, key=key)[0])
    np.testing.assert_array_equal(with_kernels(2, run, keys, rows), made_for("tpu", run, keys, rows))


@pytest.mark.parametrize("size", [ROW - 1024, ROW + 1024, ROW + 7])
def test_other_vectors_are_coded_by_xla(size, with_kernels):
    """Short ones, those whose words fill no rows of lanes, and those that fill none themselves."""
    with_kernels(0, lambda x: jc.roundtrip(jc.sign(), x, key=KEY)[0], jnp.ones(size))


def test_zeros_and_what_is_not_finite(with_kernels):
    """Law 5: NaN and infinities count as zeros; a block of zeros stays one."""
    x = jnp.zeros(ROW).at[ROW - 3].set(jnp.inf).at[600].set(2.0)
    for compressor in (jc.dithering(7), jc.block_scaled("int8"), jc.terngrad()):
        found = with_kernels(2, lambda x: jc.roundtrip(compressor, x, key=KEY)[0], x)  # noqa: B023
        np.testing.assert_allclose(found, jnp.zeros(ROW).at[600].set(2.0), rtol=1e-6)
