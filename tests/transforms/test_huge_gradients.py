"""Gradients near the largest number: no sum overflows, and no infinity stays behind."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from worlds import AXIS, run_vmap

import jaxcomp as jc

N = 4


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("weights", [None, [1, 2, 3, 10]])
def test_sums_of_narrow_floats_do_not_overflow(dtype, weights):
    grads = jnp.full((1, N, 8), 20000.0, dtype)
    for via in ("auto", "gather"):
        tx = jc.compressed_mean(jc.direct(jc.identity()), AXIS, via=via, weights=weights)
        directions, _ = run_vmap(tx, jnp.zeros(8, dtype), grads)
        np.testing.assert_allclose(np.float64(directions), 20000, rtol=2**-8)


FEEDBACK = [jc.top_k(k=1), jc.contract(jc.rand_k(k=1)), jc.cast("float8_e4m3fn"), jc.eden(1), jc.sign()]
FEEDBACK += [jc.dct(jc.chunked(jc.top_k(k=4), 64)), jc.block_scaled("int4"), jc.rotate(jc.block_scaled("int4"))]
FEEDBACK += [jc.contract(jc.count_sketch(0.3))]
REMEMBER = [jc.error_feedback(compressor) for compressor in FEEDBACK]
REMEMBER += [jc.diana(jc.rand_k(k=1)), jc.diana(jc.dithering(7)), jc.contrib.momentum_correction(jc.top_k(k=1))]
REMEMBER += [jc.methods.ef_bv(c) for c in (jc.eden(1, block=64), jc.eden(1.5, per_worker=True), FEEDBACK[5])]


@pytest.mark.sampled
@pytest.mark.parametrize("signs", [[1], [1, -1]], ids=str)
@pytest.mark.parametrize("algorithm", REMEMBER, ids=repr)
def test_the_largest_numbers_leave_no_infinity_behind(algorithm, signs, seed):
    """Of one worker and of four, whose messages add up to no number; what was not sent saturates, as sums do."""
    largest = jnp.asarray(np.random.default_rng(seed).choice(signs, 256) * np.finfo(np.float32).max)
    rounds = jnp.stack([largest, largest, 0 * largest, -largest, largest])
    grads = rounds[:, None] * jnp.ones((N, 1), jnp.float32)
    for n in (1, N):
        directions, state = run_vmap(jc.compressed_mean(algorithm, AXIS), jnp.zeros(256), grads[:, :n])
        assert np.any(np.asarray(directions[0]) != 0)
        kept = jax.tree.leaves((state.local.algorithm, state.shared.algorithm))
        floats = [x for x in kept if jnp.issubdtype(x.dtype, jnp.floating)]
        assert all(np.all(np.isfinite(x)) for x in (directions, *floats))


@pytest.mark.sampled
@pytest.mark.parametrize("workers", [2, 3, 5])
@pytest.mark.parametrize("algorithm", [jc.error_feedback(jc.top_k(0.5)), jc.diana(jc.dithering(7, block_size=16))])
def test_means_of_huge_gradients_are_finite(algorithm, workers):
    tx = jc.compressed_mean(algorithm, AXIS, via="gather")
    directions, state = run_vmap(tx, jnp.zeros(64), jnp.full((6, workers, 64), 3e38))
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves((directions, state.local.algorithm)))
    assert np.max(directions[-1]) > 2.9e38


@pytest.mark.filterwarnings("ignore:compressed_mean. this exchange sends")
@pytest.mark.sampled
@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize(
    ("algorithm", "via"),
    [
        *((jc.direct(jc.identity()), via) for via in ("auto", "gather", "two_shot")),
        *((jc.error_feedback(jc.top_k(k=1)), via) for via in ("auto", "gather")),
    ],
)
def test_means_are_exact_where_sums_would_overflow(algorithm, via, workers):
    """Small leaves that are summed on the way, too; and a mean of one half is not cut to the largest number."""
    largest = float(np.finfo(np.float32).max)
    params = {"bias": jnp.zeros(4), "w": jnp.zeros(3000)}
    grads = {"bias": jnp.full((1, workers, 4), 2e38), "w": jnp.zeros((1, workers, 3000)).at[0, 0, 7].set(largest)}
    directions, _ = run_vmap(jc.compressed_mean(algorithm, AXIS, via=via), params, grads)
    np.testing.assert_allclose(directions["bias"], 2e38, rtol=1e-6)
    np.testing.assert_allclose(directions["w"][0, 7], largest / workers, rtol=1e-6)


def test_what_is_decoded_beyond_the_largest_number_is_that():
    """A third is no power of two: the mean is the last product, and is saturated."""
    signs = jnp.where(jax.random.bernoulli(jax.random.key(0), 0.5, (64, 64)), 1.0, -1.0)
    grads = jnp.broadcast_to(signs * jnp.finfo(jnp.float32).max, (2, 3, 64, 64))
    directions, _ = run_vmap(jc.compressed_mean(jc.fetch_sgd(k=9), AXIS), jnp.zeros((64, 64)), grads)
    assert np.all(np.isfinite(directions))
    assert np.max(np.abs(directions)) > 3e38


def test_the_first_steps_of_compressed_adam_do_not_overflow():
    """The momentum is a tenth of the mean, though the sum of three gradients is no f32."""
    tx = jc.onebit_adam(0.1, AXIS, freeze_step=5)
    state, axes = jc.init_state(tx, jnp.zeros(8), 3, AXIS)
    step = jax.jit(jax.vmap(tx.update, in_axes=(0, axes, None), out_axes=(None, axes), axis_name=AXIS))
    _, state = step(jnp.full((3, 8), 2e38), state, jnp.zeros(8))
    assert any(np.isclose(np.max(leaf, initial=0), 2e37, rtol=1e-5) for leaf in jax.tree.leaves(state))


METHODS = {
    "marina": jc.methods.marina(jc.rand_k(k=4), 0.02, 0.1),
    "adiana": jc.methods.adiana(
        jc.rand_k(k=4), jc.theory.adiana(smoothness=1.0, mu=0.1, workers=N, omega=15.0, variance=15.0)
    ),
    "isega": jc.methods.isega(np.full(64, 0.1), jc.smoothness.diagonal_of(np.ones(64)), 0.02),
}


@pytest.mark.parametrize("name", METHODS)
def test_methods_with_an_iterate_go_on_after_huge_gradients(name):
    """Gradients of opposite signs, whose difference overflows, leave no infinity behind."""
    run = jc.methods.rounds(METHODS[name], AXIS)
    state, axes = jc.init_state(run, jnp.zeros(64), N, AXIS)
    one = lambda state, extra: run.step(state, lambda x: x - 1 + extra)[0]
    step = jax.jit(jax.vmap(one, in_axes=(axes, 0), out_axes=axes, axis_name=AXIS))
    for t in range(30):
        huge = 0.0 if t < 4 else 3.3e38 if t < 14 else -3.3e38 if t < 24 else 0.0
        state = step(state, jnp.zeros((N, 64)).at[: N - 1].set(huge))
    assert np.all(np.isfinite(run.point(state)))
    kept = jax.tree.leaves((state.local.algorithm, state.shared.algorithm))
    assert all(np.all(np.isfinite(leaf)) for leaf in kept if jnp.issubdtype(leaf.dtype, jnp.floating))


@pytest.mark.sampled
@pytest.mark.parametrize(
    "compressor",
    [
        jc.contract(jc.rotate(jc.block_scaled("int4", rounding="stochastic"), block=64)),
        jc.eden(2, block=64, scale="least_squares"),
        jc.block_scaled("int4"),
        jc.dct(jc.top_k(0.1), 16),
    ],
    ids=lambda compressor: compressor.spec.name,
)
@pytest.mark.parametrize("weights", [None, [1, 3]])
def test_what_is_cut_off_the_direction_stays_in_memory(compressor, weights, seed):
    """Codes may decode to more than the largest number of f16, at which the direction ends: all of it was lost."""
    rng, largest = np.random.default_rng(seed), float(jnp.finfo(jnp.float16).max)
    size = rng.uniform(0.9, 1, 2048) * largest
    signs = rng.choice([-1, 1], 2048)
    grads = jnp.asarray([np.stack([size * signs] * 2), np.stack([-size * signs] * 2) / 2], jnp.float16)
    tx = jc.compressed_mean(jc.error_feedback(compressor), AXIS, weights=weights)
    directions, state = run_vmap(tx, jnp.zeros(2048, jnp.float16), grads)
    shares = np.asarray(weights or [1, 1]) / np.sum(weights or [1, 1])
    memory = np.tensordot(shares, np.float64(state.local.algorithm.memory[0][:, 0]), 1)
    given = np.tensordot(shares, np.float64(grads).sum(0), 1)
    # But for rounding of the directions to f16.
    np.testing.assert_allclose(np.float64(directions).sum(0) + memory, given, atol=2e-3 * largest)


@pytest.mark.parametrize(
    "compressor",
    [jc.drive(), jc.eden(2), jc.eden(4, scale="least_squares"), jc.dct(jc.block_scaled("int8")), jc.dct(jc.top_k(0.1))],
    ids=lambda compressor: compressor.spec.name,
)
def test_what_saturates_in_f32_stays_in_memory(compressor, seed):
    """Codes of rotated and transformed blocks decode to more than an entry: up to the largest number, that was lost."""
    rng, largest = np.random.default_rng(seed), float(jnp.finfo(jnp.float32).max)
    tx = jc.compressed_mean(jc.error_feedback(compressor), AXIS)
    for share in (0.3, 1.0):
        grads = jnp.asarray(rng.uniform(-share, share, (1, 2, 4096)) * largest, jnp.float32)
        directions, state = run_vmap(tx, jnp.zeros(4096), grads)
        memory = np.float64(state.local.algorithm.memory[0][:, 0]).mean(0)
        given = np.float64(grads).mean((0, 1))
        np.testing.assert_allclose(np.float64(directions).sum(0) + memory, given, atol=1e-6 * largest)
