"""EF21 in its forms and EF-BV against their papers in float64; where they converge and others do not."""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import oracles_lowrank
import pytest
from variants import variants
from worlds import AXIS, heterogeneous, run_shard_map, run_vmap

import jaxcomp as jc

N, ROUNDS, D, K = 4, 6, 60, 7
FORMS = {
    "plain": {},
    "compressed start": {"whole_start": False},
    "momentum": {"momentum": 0.75},
    "momentum, compressed start": {"momentum": 0.75, "whole_start": False},
    "plus": {"plus": True},
    "plus, momentum, compressed start": {"plus": True, "momentum": 0.5, "whole_start": False},
}


def trajectory(seed):
    """Some rounds around points of each worker; then gradients that are almost sparse, where EF21+ begins anew."""
    grads = heterogeneous(seed, ROUNDS, N, D)
    grads[ROUNDS // 2 :, :, K:] *= 1e-3
    return grads


@pytest.mark.sampled
@pytest.mark.parametrize("form", variants(FORMS, {"plain", "plus, momentum, compressed start"}))
def test_ef21_is_the_oracle(form, seed):
    grads = trajectory(seed)
    want, shifts = oracles_lowrank.ef21(grads, lambda x: oracles.top_k(x, K), **FORMS[form])
    tx = jc.compressed_mean(jc.ef21(jc.top_k(k=K), **FORMS[form]), AXIS)
    for run in (run_vmap, run_shard_map):
        directions, state = run(tx, jnp.zeros(D), jnp.asarray(grads))
        np.testing.assert_allclose(directions, want, rtol=1e-5, atol=1e-5)
        own, mean = (np.asarray(part.algorithm.shift[0]) for part in (state.local, state.shared))
        own = own.reshape(N, D)
        np.testing.assert_allclose(own, shifts, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(mean, own.mean(0), rtol=1e-5, atol=1e-5)
    if "plus" in FORMS[form]:
        other, _ = oracles_lowrank.ef21(grads, lambda x: oracles.top_k(x, K), **FORMS[form] | {"plus": False})
        assert not np.allclose(want, other, atol=1e-3)


@pytest.mark.parametrize("steps", [(0.5, 0.25), (1.0, 1.0)])
def test_ef_bv_is_the_oracle(steps, seed):
    grads = trajectory(seed)
    want, shifts = oracles_lowrank.ef_bv(grads, lambda x: oracles.top_k(x, K), *steps)
    algorithm = jc.methods.ef_bv(jc.top_k(k=K), shift_step=steps[0], mean_step=steps[1])
    directions, state = run_vmap(jc.compressed_mean(algorithm, AXIS), jnp.zeros(D), jnp.asarray(grads))
    np.testing.assert_allclose(directions, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(np.reshape(state.local.algorithm.shift, (N, D)), shifts, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_ef_bv_is_diana_at_one_end_and_ef21_at_the_other(seed):
    grads = jnp.asarray(trajectory(seed))
    directions = lambda algorithm: run_vmap(jc.compressed_mean(algorithm, AXIS), jnp.zeros(D), grads)[0]
    c = jc.dithering(3, blocks=1)
    omega = c.spec.omega(D)
    np.testing.assert_array_equal(directions(jc.methods.ef_bv(c, mean_step=1.0)), directions(jc.diana(c)))
    narrowed = directions(jc.methods.ef_bv(c))[0]
    np.testing.assert_allclose(narrowed, directions(jc.diana(c))[0] / (1 + omega / N), rtol=1e-5, atol=1e-6)
    c = jc.top_k(k=K)
    np.testing.assert_allclose(
        directions(jc.methods.ef_bv(c)), directions(jc.ef21(c, whole_start=False)), rtol=1e-6, atol=1e-6
    )


def test_the_first_gradient_is_counted_whole_and_later_ones_are_not(seed):
    grads = jnp.asarray(trajectory(seed))
    sent, tx = [], jc.compressed_mean(jc.ef21(jc.top_k(k=K)), AXIS)
    for rounds in (1, 2):
        _, state = run_vmap(tx, jnp.zeros(D), grads[:rounds])
        sent.append(float(jc.info(state).lane_bytes))
    assert sent == [4 * D, 8 * K]


def test_ef21_converges_where_workers_differ(seed):
    """f_i = |A_i x - b_i|^2 / 2 with top-1 of 20: error feedback at the same step stays away from the optimum."""
    rng = np.random.default_rng(seed)
    with jax.enable_x64(True):
        a, b = rng.standard_normal((N, 30, 20)) / np.sqrt(30), 10 * rng.standard_normal((N, 30))
        hessians = np.einsum("nij,nik->njk", a, a)
        optimum = np.linalg.solve(hessians.mean(0), np.einsum("nij,ni->j", a, b) / N)
        each = np.linalg.eigvalsh(hessians)[:, -1]
        mu, smoothness = np.linalg.eigvalsh(hessians.mean(0))[[0, -1]]
        c = jc.top_k(k=1)
        alpha = c.spec.alpha(20)
        steps = jc.theory.ef21(smoothness=smoothness, alpha=alpha, worker_smoothness=np.sqrt(np.mean(each**2)), mu=mu)

        def error(algorithm, rounds):
            run = jc.methods.rounds(jc.methods.descend(algorithm, steps.gamma), AXIS)

            def worker(a, b):
                step = lambda state, _: (run.step(state, lambda x: a.T @ (a @ x - b))[0], None)
                return run.point(jax.lax.scan(step, run.init(jnp.zeros(20)), length=rounds)[0])

            x = jax.jit(jax.vmap(worker, axis_name=AXIS, out_axes=None))(a, b)
            return np.sum((x - optimum) ** 2)

        rounds = int(30 / steps.rate)
        assert error(jc.ef21(c), rounds) < 1e-8 * np.sum(optimum**2)
        assert error(jc.error_feedback(c), rounds) > 1e-7 * np.sum(optimum**2)


@pytest.mark.parametrize("workers", [2, 6])
def test_shifts_start_from_their_mean_with_other_workers(workers, seed):
    tx = jc.compressed_mean(jc.ef21(jc.top_k(k=K), momentum=0.5, whole_start=False), AXIS)
    _, old = run_vmap(tx, jnp.zeros(D), jnp.asarray(trajectory(seed)))
    moved = jc.redistribute(old, jc.init_state(tx, jnp.zeros(D), workers, AXIS)[0])
    mean = np.asarray(old.shared.algorithm.shift[0])
    shifts = np.reshape(moved.local.algorithm.shift[0], (workers, D))
    np.testing.assert_array_equal(shifts, np.broadcast_to(mean, (workers, D)))
    total = lambda state: np.asarray(state.local.algorithm.memory[0], np.float64).sum(0)
    np.testing.assert_allclose(total(moved), total(old), atol=1e-5)


BAD = [
    (lambda: jc.ef21(jc.dithering(3)), "ef21 needs a contraction; dithering"),
    (lambda: jc.ef21(jc.top_k(0.1), momentum=1.0), r"ef21: momentum must be a Python number in \[0, 1\); got 1.0"),
    (lambda: jc.methods.ef_bv(jc.cast("float16", scaled=False)), "ef_bv needs a compressor with a known error bound"),
    (
        lambda: jc.methods.ef_bv(jc.top_k(0.1), shift_step=0.0),
        r"ef_bv: shift_step must be a Python number in \(0, 1\]; got 0.0",
    ),
    (
        lambda: jc.methods.ef_bv(jc.top_k(0.1), mean_step=2),
        r"ef_bv: mean_step must be a Python number in \(0, 1\]; got 2",
    ),
    (lambda: jc.theory.ef21(smoothness=1.0, alpha=0.0), r"theory.ef21: alpha must be in \(0, 1\]; got 0.0"),
    (lambda: jc.theory.ef21(smoothness=1.0, alpha=1, worker_smoothness=0), "worker_smoothness must be above 0; got 0"),
]


@pytest.mark.parametrize(("make", "message"), BAD, ids=[message for _, message in BAD])
def test_arguments_are_checked(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("nu", [0.5, 1e-2, 1e-6])
def test_a_direction_of_small_steps_keeps_its_digits(nu, seed):
    """In the first round it is nu times the mean of what was sent, however far the shifts go."""
    grads = jnp.asarray(heterogeneous(seed, 1, N, D))
    mean = run_vmap(jc.compressed_mean(jc.methods.ef_bv(jc.top_k(1.0)), AXIS), jnp.zeros(D), grads)[0]
    small = run_vmap(jc.compressed_mean(jc.methods.ef_bv(jc.top_k(1.0), mean_step=nu), AXIS), jnp.zeros(D), grads)[0]
    np.testing.assert_allclose(small, nu * np.asarray(mean, np.float64), rtol=1e-6)


def test_a_whole_start_of_large_gradients_leaves_the_shifts_in_step():
    grads = jnp.array([1e38, 1.0, 1.0]).reshape(3, 1, 1) * jnp.ones((1, N, D))
    directions, _ = run_vmap(jc.compressed_mean(jc.ef21(jc.top_k(1.0)), AXIS), jnp.zeros(D), grads)
    np.testing.assert_allclose(directions[-1], 1, rtol=1e-6)


@pytest.mark.parametrize("alpha", [np.float64(0.05), np.float32(0.05)])
def test_steps_of_any_float_type_leave_the_dtype_of_shifts(alpha, seed):
    with jax.enable_x64(True):
        grads = jnp.asarray(heterogeneous(seed, 2, N, D), jnp.float32)
        for algorithm in (jc.diana(jc.dithering(7), alpha=alpha), jc.methods.ef_bv(jc.dithering(7), shift_step=alpha)):
            directions, state = run_vmap(jc.compressed_mean(algorithm, AXIS), jnp.zeros(D, jnp.float32), grads)
            assert directions.dtype == np.float32
            assert {x.dtype for x in jax.tree.leaves(state.local.algorithm)} == {jnp.dtype("float32")}
