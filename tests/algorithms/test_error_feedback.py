"""Error feedback, and direct without it: the recursion in float64, what is kept, and where they converge."""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from worlds import AXIS, Board, HostExchange, heterogeneous, run_pmap, run_shard_map, run_vmap

import jaxcomp as jc
from jaxcomp.base import Round, answered
from jaxcomp.compressors.tree import each_of
from jaxcomp.groups import Layout, groups_of

N, SIZE = 4, 60
WORLDS = {
    "shard_map": run_shard_map,
    "shard_map-unchecked": lambda *a: run_shard_map(*a, check_vma=False),
    "vmap": run_vmap,
    "pmap": run_pmap,
}


@pytest.mark.sampled
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(("decay", "weights"), [(1.0, None), (0.9, None), (1.0, [1, 2, 3, 10])], ids=str)
def test_error_feedback_is_the_oracle(world, decay, weights, seed):
    """A weight multiplies what is sent, never the memory."""
    grads = heterogeneous(seed)
    tx = jc.compressed_mean(jc.error_feedback(jc.top_k(k=6), decay=decay), AXIS, weights=weights)
    directions, state = WORLDS[world](tx, jnp.zeros(SIZE), jnp.asarray(grads))
    want, memory = oracles.error_feedback(np.float64(grads), lambda x: oracles.top_k(x, 6), decay, weights)
    np.testing.assert_allclose(directions, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(np.reshape(state.local.algorithm.memory, (N, SIZE)), memory, rtol=1e-5, atol=1e-6)


def test_error_feedback_conserves_bitwise(seed):
    """sent + memory = gradient + old memory, exactly, every round."""
    algorithm, board = jc.error_feedback(jc.sidco(0.1)), Board(1)
    groups = groups_of(Layout(), jnp.zeros(SIZE))
    here = Round(jax.random.key(0), groups.groups, each_of(algorithm, groups.groups))
    state = algorithm.init(here, groups.like)
    with board.running:
        for g in heterogeneous(seed)[:, 0]:
            message = g + np.asarray(state.memory[0])
            steps = algorithm.update(here, (jnp.asarray(g),), state)
            (sent,), state = answered(steps, HostExchange(0, board).answer)
            assert 0 < np.count_nonzero(sent) < SIZE
            np.testing.assert_array_equal(np.asarray(sent) + np.asarray(state.memory[0]), message)


def test_everything_arrives_in_the_end():
    """One gradient and then zeros: the sum of all directions is the gradient."""
    g = jnp.asarray(np.random.default_rng(0).standard_normal(50), jnp.float32)
    tx = jc.compressed_mean(jc.error_feedback(jc.top_k(k=5)), None)
    state, total, update = tx.init(g), 0.0, jax.jit(tx.update)
    for t in range(10):
        direction, state = update(g if t == 0 else jnp.zeros(50), state)
        total = total + direction
    np.testing.assert_array_equal(total, g)


QUADRATIC = np.random.default_rng(5).standard_normal((N, 40))


def minimise(algorithm, step, rounds):
    """f_i(x) = |x - b_i|^2 / 2 from zero; squared distance to the mean of the b_i, relative."""
    tx = jc.compressed_mean(algorithm, AXIS)
    targets = jnp.asarray(QUADRATIC, jnp.float32)

    def worker(target):
        def body(carry, _):
            x, state = carry
            direction, state = tx.update(x - target, state)
            return (x - step * direction, state), None

        x = jnp.zeros(40)
        (x, _), _ = jax.lax.scan(body, (x, tx.init(x)), length=rounds)
        return x

    x = jax.jit(jax.vmap(worker, axis_name=AXIS))(targets)[0]
    best = QUADRATIC.mean(0)
    return float(np.sum((np.asarray(x) - best) ** 2) / np.sum(best**2))


def test_diana_reaches_the_optimum_where_direct_stops_in_a_ball():
    compressor = jc.dithering(2)
    assert minimise(jc.diana(compressor), 0.3, 400) < 1e-10
    assert minimise(jc.direct(compressor), 0.3, 400) > 1e-3


def test_error_feedback_reaches_the_optimum_where_top_k_alone_does_not():
    # With a constant step a ball of the size of the step remains (heterogeneous workers).
    assert minimise(jc.error_feedback(jc.top_k(0.1)), 0.01, 3000) < 1e-2
    assert minimise(jc.direct(jc.top_k(0.1)), 0.01, 3000) > 5e-2
