"""Another number of workers along one axis: memories keep their exact sum. See also test_elastic_meshes.py."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from variants import variants
from worlds import AXIS, PARAMS, N, fsum, gradients, mesh_of, run_vmap

import jaxcomp as jc
from jaxcomp.exchange.elastic import spread

pytestmark = pytest.mark.usefixtures("standard_promotion")


ALGORITHMS = {
    "error_feedback": jc.error_feedback(jc.top_k(0.05)),
    "sidco": jc.error_feedback(jc.sidco(0.05, adapt="climb", stages=2)),
    "diana": jc.diana(jc.dithering(7)),
    "momentum": jc.momentum_correction(jc.top_k(0.05)),
    "direct": jc.direct(jc.natural()),
}


@pytest.mark.parametrize(("old", "new"), [(4, 2), (4, 3), (2, 4), (5, 4), (9, 2), (3, 3)])
def test_memories_keep_their_exact_sum(old, new, seed):
    rng = np.random.default_rng(seed)
    rows = (rng.standard_normal((old, 300)) * 2.0 ** rng.integers(-12, 3, (old, 300))).astype(np.float32)
    rows[:, 0], rows[:, 1] = 0, 1
    moved = spread(rows, new)
    assert moved.shape == (new, 300)
    assert moved.dtype == np.float32
    assert fsum(moved) == fsum(rows)


def test_one_worker_has_to_round(seed):
    rows = np.random.default_rng(seed).standard_normal((4, 300)).astype(np.float32)
    (alone,) = spread(rows, 1)
    np.testing.assert_array_equal(alone, rows.astype(np.float64).sum(0).astype(np.float32))
    huge = np.full((3, 1), 3e38, np.float32)
    np.testing.assert_array_equal(spread(huge, 1), [[np.finfo(np.float32).max]])


@pytest.mark.parametrize("name", variants(ALGORITHMS, {"diana", "sidco"}))
@pytest.mark.parametrize("workers", variants([2, 6], {6}))
def test_training_goes_on_with_other_workers(name, workers, seed):
    tx = optax.chain(jc.compressed_mean(ALGORITHMS[name], AXIS), optax.adam(1e-2))
    _, old = run_vmap(tx, PARAMS, gradients(seed))
    new, axes = jc.init_state(tx, PARAMS, workers, AXIS)
    state = jc.redistribute(old, new)
    local, before = state[0].local.algorithm, old[0].local.algorithm
    if name in ("error_feedback", "sidco", "momentum"):
        memory = lambda local: local.velocity if name == "momentum" else local.memory
        assert fsum(memory(local)["w"]) == fsum(memory(before)["w"])
        assert np.abs(memory(local)["w"]).max() > 0
    if name == "diana":
        for row in np.asarray(local.shift["w"]):
            np.testing.assert_array_equal(row[0], old[0].shared.algorithm.shift["w"])
    np.testing.assert_array_equal(state[1][0].mu["w"], old[1][0].mu["w"])
    assert state[0].shared.count == 3
    step = jax.jit(jax.vmap(tx.update, in_axes=(0, axes), out_axes=(None, axes), axis_name=AXIS))
    updates, state = step(jax.tree.map(lambda g: g[0], gradients(seed, workers=workers)), state)
    assert all(np.all(np.isfinite(u)) for u in jax.tree.leaves(updates))
    assert state[0].shared.count == 4


def test_what_is_to_be_delivered_can_stay_what_it_was(seed):
    tx = jc.compressed_mean(jc.error_feedback(jc.top_k(0.05)), AXIS)
    _, old = run_vmap(tx, PARAMS, gradients(seed))
    new, _ = jc.init_state(tx, PARAMS, 2, AXIS)
    moved = jc.redistribute(old, new, keep="mean").local.algorithm.memory["w"]
    np.testing.assert_allclose(np.mean(moved, 0), np.mean(old.local.algorithm.memory["w"], 0), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("workers", variants([2, 3, 8], ()))
def test_memories_of_second_shots_are_cut_anew(workers, seed):
    tx = jc.compressed_mean(jc.error_feedback(jc.cast("float8_e4m3fn")), AXIS, via="two_shot")
    _, old = run_vmap(tx, PARAMS, gradients(seed))
    new, axes = jc.init_state(tx, PARAMS, workers, AXIS)
    state = jc.redistribute(old, new)
    line = lambda state: np.asarray(state.local.second.memory).reshape(-1)[:1205]
    np.testing.assert_array_equal(line(state), line(old))
    step = jax.vmap(tx.update, in_axes=(0, axes), out_axes=(None, axes), axis_name=AXIS)
    step(jax.tree.map(lambda g: g[0], gradients(seed, workers=workers)), state)


def test_stages_of_second_shots_are_taken_over(seed):
    """Adaptive state of a compressor has a row for each chunk: other workers have other chunks."""
    tx = jc.compressed_mean(jc.error_feedback(jc.sidco(0.05, adapt="climb", stages=2)), AXIS, via="two_shot")
    _, old = run_vmap(tx, PARAMS, gradients(seed))
    for workers in (2, 6):
        new, _ = jc.init_state(tx, PARAMS, workers, AXIS)
        state = jc.redistribute(old, new)
        stages = [x for x in jax.tree.leaves(state.local.second.compressor) if x.dtype == jnp.int32]
        assert any(np.all(np.asarray(x) > 0) for x in stages)  # stages are counted from one
        assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, new)


def test_gradients_without_rows_are_redistributed():
    params = {"w": jnp.zeros((4, 5)), "e": jnp.zeros((0, 2))}
    tx = optax.MultiSteps(optax.chain(jc.compressed_mean(jc.error_feedback(jc.top_k(k=2)), AXIS), optax.sgd(0.1)), 2)
    old, new = (jc.init_state(tx, params, mesh_of(n), AXIS)[0] for n in (4, 2))
    assert jax.tree.map(jnp.shape, jc.redistribute(old, new)) == jax.tree.map(jnp.shape, new)


@pytest.mark.parametrize("on_a_mesh", [True, False])
def test_half_a_step_of_accumulated_gradients_goes_on(on_a_mesh, seed):
    tx = optax.MultiSteps(optax.chain(jc.compressed_mean(jc.error_feedback(jc.top_k(0.05)), AXIS), optax.sgd(0.1)), 2)
    make = lambda n: jc.init_state(tx, PARAMS, mesh_of(n) if on_a_mesh else n, AXIS)[0]
    old, new = make(4), make(2)
    rng = np.random.default_rng(seed)
    fill = lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype)
    old = old._replace(acc_grads=jax.tree.map(fill, old.acc_grads))
    state = jc.redistribute(jax.tree.map(np.asarray, old), new)
    for name, p in PARAMS.items():
        rows = lambda x, n: np.asarray(x, np.float64).reshape(n, -1)
        assert fsum(rows(state.acc_grads[name], 2)) == fsum(rows(old.acc_grads[name], 4)), p.shape


def test_it_lands_on_the_devices_of_the_new_mesh(seed):
    tx = optax.chain(jc.compressed_mean(jc.error_feedback(jc.top_k(0.05)), AXIS), optax.adam(1e-2))
    old, _ = jc.init_state(tx, PARAMS, mesh_of(4), AXIS)
    new, specs = jc.init_state(tx, PARAMS, mesh_of(2), AXIS)
    state = jc.redistribute(jax.tree.map(np.asarray, old), new)
    memory = state[0].local.algorithm.memory["w"]
    assert memory.sharding == new[0].local.algorithm.memory["w"].sharding
    assert memory.shape == (2, 40, 30)
    assert jax.tree.structure(state) == jax.tree.structure(specs, is_leaf=lambda s: isinstance(s, P))


def test_states_that_do_not_fit_are_refused():
    tx, other = (jc.compressed_mean(a, AXIS) for a in (ALGORITHMS["error_feedback"], ALGORITHMS["diana"]))
    one, two = (jc.init_state(t, PARAMS, 2, AXIS)[0] for t in (tx, other))
    with pytest.raises(ValueError, match="of different optimizers or parameters"):
        jc.redistribute(one, two)
    with pytest.raises(ValueError, match='keep must be "sum" or "mean"'):
        jc.redistribute(one, one, keep="all")
    larger, _ = jc.init_state(tx, PARAMS | {"w": jnp.zeros((40, 31))}, 2, AXIS)
    with pytest.raises(ValueError, match="expected an array of shape"):
        jc.redistribute(one, larger)
    run = jc.rounds(jc.descend(jc.direct(jc.identity()), 0.1), None)
    with pytest.raises(ValueError, match="states of rounds are not supported"):
        jc.redistribute(run.init(jnp.zeros(3)), run.init(jnp.zeros(3)))


def test_as_many_workers_go_on_as_they_were(seed):
    """All but the measurements, shifts of each worker among it."""
    tx = optax.chain(jc.compressed_mean(jc.diana(jc.dithering(7)), AXIS), optax.adam(1e-2))
    _, old = run_vmap(tx, PARAMS, gradients(seed))
    new, _ = jc.init_state(tx, PARAMS, N, AXIS)
    state = jc.redistribute(old, new)
    unmeasured = lambda state: (state[0]._replace(local=state[0].local._replace(counts=None)), state[1:])
    for a, b in zip(*(jax.tree.leaves(unmeasured(x)) for x in (state, old)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_memories_that_grow_with_the_workers_saturate():
    tx = jc.compressed_mean(ALGORITHMS["error_feedback"], AXIS)
    old, new = (jc.init_state(tx, PARAMS, n, AXIS)[0] for n in (1, 2))
    old.local.algorithm.memory["w"] = jnp.full_like(old.local.algorithm.memory["w"], 3e38)
    memory = np.asarray(jc.redistribute(old, new, keep="mean").local.algorithm.memory["w"])
    np.testing.assert_array_equal(np.max(memory, 0), np.finfo(np.float32).max)
