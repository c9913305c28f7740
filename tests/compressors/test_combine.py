"""What wrappers hand on: overflow, and scales in double precision. Sizes without arrays on the host."""

import math
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jitted import roundtrip
from variants import variants
from worlds import AXIS, run_shard_map

import jaxcomp as jc
from jaxcomp.base import accumulate, for_worker, left
from jaxcomp.compressors.tree import _of_trees

FULL = jc.contrib.hard_threshold(0.0, room=0.1)  # of a hundred entries ten fit
ONES = jc.smoothness.diagonal_of(np.ones(100))
WRAPPED = {
    "alone": (FULL, 90),
    "compose": (jc.compose(FULL, jc.natural()), 90),
    "narrow": (jc.narrow(FULL, values="bfloat16", indices="uint16"), 90),
    "skcompress": (jc.skcompress(FULL, buckets=4), 90),
    "flat": (jc.flat(FULL), 90),
    "per_leaf": (jc.per_leaf(FULL, dense_below=10), 90),
    "two leaves": (jc.per_leaf(FULL, dense_below=10), 9 + 81),
    "chunks": (_of_trees("chunks", FULL, jc.Layout("chunks", chunks=2)), 2 * 50 - 2 * 6),
    "dagc": (jc.dagc([1], 0.1, sparsifier=jc.contrib.hard_threshold, base=0.1, capacity=1), 90),
    "top_k": (jc.top_k(0.1), 0),
    "compose top_k": (jc.compose(jc.top_k(0.1), jc.natural()), 0),
    "precondition": (jc.precondition(jc.bernoulli(0.5), ONES), 0),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", variants(WRAPPED, {"skcompress", "two leaves"}))
def test_overflow_is_handed_on(name, key):
    compressor, want = WRAPPED[name]
    x = jnp.arange(1.0, 101)
    if name in ("flat", "per_leaf", "chunks"):
        x = {"x": x}
    elif name == "two leaves":
        x = [jnp.arange(1.0, 11), jnp.arange(1.0, 91), jnp.zeros(3)]
    state = jax.jit(compressor.init)(key, x)
    assert int(left(compressor, state.local).overflow) == 0
    _, local = jax.jit(compressor.compress)(key, x, state)
    count = left(compressor, local).overflow
    assert (count.shape, count.dtype) == ((), jnp.int32)
    assert int(count) == want


def test_a_probability_for_all_makes_no_array_on_the_host():
    """An f64 for every entry would be 8 GiB, at every trace."""
    like = jax.ShapeDtypeStruct((2**30,), jnp.float32)
    payload_of = lambda p: jax.eval_shape(lambda x: jc.roundtrip(jc.bernoulli(p), x, key=jax.random.key(0))[1], like)
    tracemalloc.start()
    payload = payload_of(1e-6)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 2**26
    mean = 2**30 * 1e-6
    assert payload.values.size == math.ceil(mean + 8 * math.sqrt(mean * (1 - 1e-6)) + 8)
    assert payload_of(1.0).values.size == 2**30


def test_contract_scales_in_double_precision():
    with jax.enable_x64(True):
        x, compressor = jnp.asarray(np.random.default_rng(0).standard_normal(100)), jc.contract(jc.rand_k(0.07))

        @jax.jit
        def run(x):
            state = compressor.init(jax.random.key(0), x)
            payload, _ = compressor.compress(jax.random.key(1), x, state)
            stacked = jax.tree.map(lambda a: a[None], payload)
            add = lambda weights: accumulate(compressor, jnp.zeros_like(x), stacked, weights, state.shared)
            return compressor.decompress(payload, state.shared, x), add(None), add(jnp.ones(1))

        want, *sums = run(x)
        for added in sums:
            assert added.dtype == jnp.float64
            np.testing.assert_allclose(added, want, rtol=1e-15)


# ------------------------------------------------------------------------------------------------
# Plans per worker

VOLUMES = [0, 1, 4, 16]
COUNTS = jc.allocate.counts(jc.allocate.ratios(VOLUMES, 0.1), 100)
DAGCS = {
    "alone": jc.dagc(VOLUMES, 0.1),
    "compose": jc.compose(jc.dagc(VOLUMES, 0.1), jc.cast("bfloat16")),
    "narrow": jc.narrow(jc.dagc(VOLUMES, 0.1), indices="uint16"),
    "skcompress": jc.skcompress(jc.dagc(VOLUMES, 0.1), buckets=64),
    "flat": jc.flat(jc.dagc(VOLUMES, 0.1)),
    "per_leaf": jc.per_leaf(jc.dagc(VOLUMES, 0.1)),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", DAGCS)
def test_each_worker_has_its_share_wherever_a_plan_is_picked(name, key):
    x = jnp.arange(1.0, 101)
    for worker, count in enumerate(COUNTS):
        x_hat, _ = roundtrip(DAGCS[name], x, key, worker)
        assert np.count_nonzero(x_hat) == count


@pytest.mark.slow
def test_each_worker_has_its_share_in_rounds():
    run = jc.methods.rounds(jc.methods.descend(jc.error_feedback(jc.dagc(VOLUMES, 0.1)), 1.0), "workers")

    def worker(slope):
        state, _ = run.step(run.init(jnp.zeros(100)), lambda x: slope)
        return run.point(state)

    slopes = jnp.stack([jnp.roll(jnp.arange(1.0, 101), 25 * i) for i in range(4)])
    x = np.asarray(jax.jit(jax.vmap(worker, axis_name="workers", out_axes=None))(slopes))
    assert np.count_nonzero(x) == COUNTS.sum()  # the largest entries of the four lie apart


def test_the_plan_of_one_worker_must_be_picked(key):
    compressor = jc.dagc(VOLUMES, 0.1)
    state = compressor.init(key, jnp.zeros(100))
    with pytest.raises(ValueError, match=r"plans of 4 workers; pick one with base\.for_worker"):
        compressor.compress(key, jnp.zeros(100), state)
    with pytest.raises(ValueError, match="plans of 4 workers for 3 workers"):
        for_worker(compressor, state.shared, 0, 3)


@pytest.mark.slow
def test_composing_with_much_noise_claims_no_less_error_than_there_is(key):
    """All of x is among the values, so that the error is omega |x|^2; alpha_outer (1 - omega) would allow an eighth."""
    x = jnp.zeros(300).at[7].set(3.0)
    compressor = jc.compose(jc.top_k(0.121), jc.bernoulli(0.0169))
    got = jax.jit(jax.vmap(lambda key: jc.roundtrip(compressor, x, key=key)[0]))(jax.random.split(key, 1024))
    error = float(jnp.mean(jnp.sum((got - x) ** 2, axis=1)) / jnp.sum(x**2))
    assert compressor.spec.alpha(300) == pytest.approx(1 - (1 / 0.0169 - 1))
    assert 20 < error < 2 * (1 - compressor.spec.alpha(300))


@pytest.mark.parametrize("inner", [jc.block_scaled("int4"), jc.sign()], ids=lambda inner: inner.spec.name)
@pytest.mark.parametrize("wrap", [jc.rotate, jc.dct, lambda inner: jc.compose(jc.top_k(0.25), inner)])
def test_errors_of_what_a_wrapper_sends_belong_to_their_worker(wrap, inner, seed):
    """Under shard_map with its check of types; sent + remembered is the input."""
    grads = jnp.asarray(np.random.default_rng(seed).standard_normal((3, 4, 300)), jnp.float32)
    tx = jc.compressed_mean(jc.error_feedback(wrap(inner)), AXIS)
    directions, state = run_shard_map(tx, jnp.zeros(300), grads)
    left = np.mean(state.local.algorithm.memory[0], axis=0)
    np.testing.assert_allclose(np.sum(directions, 0) + left.reshape(-1), np.sum(np.mean(grads, 1), 0), atol=1e-5)


@pytest.mark.parametrize(
    "compressor", [jc.dithering(127), jc.dithering(12), jc.block_scaled("int4", rounding="stochastic")], ids=str
)
def test_roundings_with_a_small_omega_contract(compressor, key):
    """1 - alpha = omega, so that error feedback takes them as they are."""
    x = jax.random.laplace(key, (4096,))
    spec = compressor.spec
    for d in (1, 7, 512, 4096):
        assert 0 < spec.alpha(d) == pytest.approx(1 - spec.omega(d))
    x, x_hat = np.asarray(x), np.asarray(roundtrip(compressor, x, key)[0])
    assert np.sum((x_hat - x) ** 2) / np.sum(x**2) <= 1 - spec.alpha(4096)
    jc.error_feedback(compressor)
    for other in (jc.dithering(11), jc.dithering(7), jc.block_scaled("int2", rounding="stochastic")):
        assert other.spec.alpha is None
