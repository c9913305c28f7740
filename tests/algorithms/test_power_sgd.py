"""PowerSGD against the algorithm of its paper in float64, where matrices lack rank, and with other workers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from worlds import AXIS, gradients, run_shard_map, run_vmap

import jaxcomp as jc

N, ROUNDS, RANK = 4, 5, 2
TREE = {"a": jnp.zeros((12, 8)), "b": jnp.zeros((12, 8)), "c": jnp.zeros((10, 4, 3)), "v": jnp.zeros(7)}
FIRST_Q = {"a": (0, 0), "b": (0, 1), "c": (1, 0)}  # which stack, and which of its rows


def power_sgd(grads, q):
    """Vogels, Karimireddy, Jaggi 2019, algorithms 1 and 2, for one matrix: grads f64[rounds, n, r, c], q f64[c, k]."""
    memory, directions = np.zeros(grads.shape[1:]), []
    for g in grads:
        m = g + memory
        p, _ = np.linalg.qr(np.mean(m @ q, axis=0))
        q = np.mean(np.swapaxes(m, 1, 2) @ p, axis=0)
        directions.append(p @ q.T)
        memory = m - p @ q.T
    return np.stack(directions), memory, q


@pytest.mark.parametrize("run", [run_vmap, run_shard_map], ids=lambda run: run.__name__)
def test_power_sgd_is_the_oracle(run, seed):
    """Over several rounds, each of which starts from the factor of the last one."""
    grads = gradients(seed, ROUNDS, N, TREE)
    tx = jc.compressed_mean(jc.power_sgd(RANK, dense_below=0), AXIS)
    start = jax.vmap(lambda _: tx.init(TREE), axis_name=AXIS, out_axes=None)(jnp.arange(N)).shared.algorithm.q
    directions, state = run(tx, TREE, grads)
    memory = jc.state.by_leaf(state, state.local.algorithm.memory)
    for name, (stack, row) in FIRST_Q.items():
        g = np.float64(grads[name])
        g = g.reshape(*g.shape[:3], -1)
        want, rest, q = power_sgd(g, np.float64(start[stack][row]))
        np.testing.assert_allclose(directions[name].reshape(want.shape), want, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(memory[name].reshape(rest.shape), rest, rtol=1e-3, atol=1e-4)
        # Up to signs of the columns, which P Q^T does not have.
        last = np.float64(state.shared.algorithm.q[stack][row])
        np.testing.assert_allclose(np.abs(last), np.abs(q), rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(directions["v"], np.asarray(grads["v"]).mean(1), rtol=1e-5, atol=1e-6)


def test_info_has_the_bytes_of_both_sums(seed):
    tx = jc.compressed_mean(jc.power_sgd(RANK, dense_below=0), AXIS)
    _, state = run_vmap(tx, TREE, gradients(seed, 1, N, TREE))
    numbers = 7 + RANK * (2 * (12 + 8) + 10 + 12)
    assert jc.info(state).lane_bytes == 4 * numbers
    assert jc.info(state).sent_bytes == 2 * (N - 1) / N * 4 * numbers
    assert jc.info(state).chosen == "sum"


def test_matrices_that_lack_rank_stay_finite(seed):
    """A matrix of rank one is found by two columns; zeros stay zeros; what is not finite counts as zero."""
    rng = np.random.default_rng(seed)
    one = np.outer(rng.standard_normal(12), rng.standard_normal(8))
    grads = gradients(seed, 3, N, TREE)
    grads["a"] = jnp.broadcast_to(jnp.asarray(one, jnp.float32), grads["a"].shape)
    grads["b"] = jnp.zeros_like(grads["b"])
    grads["c"] = grads["c"].at[0, 1, 2].set(jnp.nan).at[1, 0, 1].set(jnp.inf)
    directions, state = run_vmap(jc.compressed_mean(jc.power_sgd(RANK, dense_below=0), AXIS), TREE, grads)
    np.testing.assert_allclose(directions["a"], np.broadcast_to(one, (3, 12, 8)), atol=1e-5)
    np.testing.assert_array_equal(directions["b"], 0)
    for x in jax.tree.leaves((directions, state.local.algorithm, state.shared.algorithm)):
        assert np.all(np.isfinite(x))


def test_leaves_that_factors_do_not_make_smaller_go_dense(seed):
    tree = {"narrow": jnp.zeros((3, 2)), "small": jnp.zeros((6, 6)), "w": jnp.zeros((40, 30))}
    grads = gradients(seed, 1, N, tree)
    directions, state = run_vmap(jc.compressed_mean(jc.power_sgd(RANK, dense_below=4), AXIS), tree, grads)
    np.testing.assert_allclose(directions["narrow"], np.asarray(grads["narrow"]).mean(1), rtol=1e-5, atol=1e-6)
    assert np.linalg.matrix_rank(np.asarray(directions["w"][0]), tol=1e-3) == RANK
    assert np.linalg.matrix_rank(np.asarray(directions["small"][0]), tol=1e-3) == RANK
    np.testing.assert_array_equal(jc.state.by_leaf(state, state.local.algorithm.memory)["narrow"], 0)


def test_weights_and_a_bare_array(seed):
    weights = np.array([1.0, 2.0, 3.0, 10.0])
    grads = gradients(seed, 1, N, jnp.zeros(9))
    directions, _ = run_vmap(jc.compressed_mean(jc.power_sgd(1), AXIS, weights=weights), jnp.zeros(9), grads)
    np.testing.assert_allclose(directions[0], weights / 16 @ np.float64(grads[0]), rtol=1e-5)


def test_other_workers_go_on_with_the_sum_of_the_memories(seed):
    tx = jc.compressed_mean(jc.power_sgd(RANK, dense_below=0), AXIS)
    _, old = run_vmap(tx, TREE, gradients(seed, 2, N, TREE))
    new, axes = jc.init_state(tx, TREE, 2, AXIS)
    moved = jc.redistribute(old, new)
    for a, b in zip(
        jax.tree.leaves(moved.local.algorithm.memory), jax.tree.leaves(old.local.algorithm.memory), strict=True
    ):
        assert a.shape[0] == 2
        np.testing.assert_allclose(np.sum(np.float64(a), 0), np.sum(np.float64(b), 0), rtol=1e-6, atol=1e-6)
    for a, b in zip(moved.shared.algorithm.q, old.shared.algorithm.q, strict=True):
        np.testing.assert_array_equal(a, b)
    step = jax.vmap(tx.update, in_axes=(0, axes), out_axes=(None, axes), axis_name=AXIS)
    direction, _ = step(jax.tree.map(lambda g: g[0, :2], gradients(seed, 1, N, TREE)), moved)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(direction))
