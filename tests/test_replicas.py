"""Workers that should be equal: fingerprints, steps skipped by all or none, memories for another number of workers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from variants import variants
from worlds import AXIS, mesh_of, run_vmap

import jaxcomp as jc
from jaxcomp.exchange.elastic import spread

N = 4
PARAMS = {"b": jnp.zeros(5), "w": jnp.zeros((40, 30))}

pytestmark = pytest.mark.usefixtures("standard_promotion")


def gradients(seed, rounds=3, workers=N):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda p: jnp.asarray(rng.standard_normal((rounds, workers, *p.shape)), p.dtype), PARAMS)


# ------------------------------------------------------------------------------------------------
# Fingerprints


def copies(values, mesh):
    """A replicated array whose copies are not all equal."""
    sharding = NamedSharding(mesh, P())
    parts = [jax.device_put(v, d) for v, d in zip(values, mesh.devices.flat, strict=True)]
    return jax.make_array_from_single_device_arrays(values[0].shape, sharding, parts)


def marks_of(tx, params, state, specs):
    run = lambda p, s: jc.fingerprints((p, s), AXIS)
    return jax.jit(jax.shard_map(run, mesh=mesh_of(N), in_specs=(P(), specs), out_specs=P()))(params, state)


@pytest.mark.parametrize("where", ["params", "moments", "shift", "memory"])
def test_one_corrupt_worker_is_named(where, seed):
    tx = optax.chain(jc.compressed_mean(jc.diana(jc.dithering(7)), AXIS), optax.adam(1e-3))
    mesh = mesh_of(N)
    params = jax.device_put(PARAMS, NamedSharding(mesh, P()))
    state, specs = jc.init_state(tx, params, mesh, AXIS)
    jc.check_replicas(marks_of(tx, params, state, specs))  # all is well
    good = np.random.default_rng(seed).standard_normal((40, 30)).astype(np.float32)
    bad = good.copy()
    bad.view(np.uint32)[7, 3] ^= 1  # the lowest bit of one number
    spoiled = copies([good, good, bad, good], mesh)
    mean, adam = state
    if where == "params":
        params = params | {"w": spoiled}
    elif where == "moments":
        state = mean, (adam[0]._replace(mu=adam[0].mu | {"w": spoiled}), *adam[1:])
    elif where == "shift":
        shared = mean.shared.algorithm._replace(shift=mean.shared.algorithm.shift | {"w": spoiled})
        state = mean._replace(shared=mean.shared._replace(algorithm=shared)), adam
    else:  # what differs between workers anyway is none of its business
        rows = jax.device_put(np.stack([good, good, bad, good]), NamedSharding(mesh, P(AXIS)))
        local = mean.local.algorithm._replace(shift=mean.local.algorithm.shift | {"w": rows})
        state = mean._replace(local=mean.local._replace(algorithm=local)), adam
    marks = marks_of(tx, params, state, specs)
    if where == "memory":
        jc.check_replicas(marks)
        return
    with pytest.raises(jc.ReplicaDrift, match="step 12: parameters or shared state of worker 2 differ") as caught:
        jc.check_replicas(marks, step=12)
    assert caught.value.workers == (2,)


def test_without_a_majority_all_are_named():
    with pytest.raises(jc.ReplicaDrift, match=r"between workers 0 \| 1, and no group is a majority") as caught:
        jc.check_replicas([1, 2])
    assert caught.value.workers == (0, 1)
    with pytest.raises(jc.ReplicaDrift, match="workers 0, 3 differ from the other 3's"):
        jc.check_replicas([5, 7, 7, 8, 7])
    jc.check_replicas([])
    jc.check_replicas([3])


@pytest.mark.parametrize(
    "dtype", [jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn, jnp.int8, jnp.int32, jnp.bool_, jnp.complex64], ids=str
)
def test_every_dtype_and_every_place_counts(dtype):
    x = (jnp.arange(6.0) > 2).astype(dtype)
    marks = {int(jc.fingerprint(tree)) for tree in (x, x[::-1], jnp.roll(x, 1), x[:5], [x, x], {"a": x[:0], "b": x})}
    assert len(marks) == 6


def test_keys_scalars_and_trees_without_arrays():
    key = jax.random.key(3)
    assert int(jc.fingerprint({"key": key, "n": 3})) != int(jc.fingerprint({"key": jax.random.key(4), "n": 3}))
    assert int(jc.fingerprint(())) == 0
    with pytest.raises(ValueError, match="no axis named 'data' is bound"):
        jc.fingerprints(jnp.ones(3), AXIS)


def test_what_differs_between_groups_or_shards_is_no_drift():
    mesh = jax.make_mesh((2, 2), ("dcn", "ici"), axis_types=(AxisType.Auto,) * 2)
    levels = {"ici": jc.diana(jc.dithering(7)), "dcn": jc.error_feedback(jc.top_k(0.1))}
    tx = jc.compressed_mean(axis_name=levels)
    state, specs = jc.init_state(tx, PARAMS, mesh, levels)
    grads = jax.tree.map(lambda g: g[0], gradients(1))
    both = P(("dcn", "ici"))
    step = lambda s, g: tx.update(jax.tree.map(lambda x: x[0], g), s)[1]
    state = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(specs, both), out_specs=specs))(state, grads)
    shift = np.asarray(state[0].state.shared.algorithm.shift["w"])
    assert np.any(shift[0] != shift[1])  # the mean shift of each group
    marks = jax.shard_map(lambda s: jc.fingerprints(s, levels), mesh=mesh, in_specs=(specs,), out_specs=P())
    jc.check_replicas(jax.jit(marks)(state))
    shards = jnp.arange(8.0)
    of_shards = jax.shard_map(
        lambda x: jc.fingerprints(x, "dcn")[None], mesh=mesh, in_specs=P("ici"), out_specs=P("ici")
    )(shards)
    assert of_shards.shape == (2, 2)
    jc.check_replicas(of_shards)
    with pytest.raises(jc.ReplicaDrift):
        jc.check_replicas(np.asarray(of_shards).T)


# ------------------------------------------------------------------------------------------------
# Steps that are skipped


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_gradient_on_one_worker_skips_the_step_everywhere(bad, seed):
    tx = optax.chain(jc.compressed_mean(jc.error_feedback(jc.top_k(0.05)), AXIS), optax.adam(1e-2))
    guarded = jc.skip_nonfinite(tx, AXIS)
    grads = gradients(seed)
    spoiled = jax.tree.map(lambda g: jnp.concatenate([g[:1], g[:1], g[1:]]), grads)
    spoiled["w"] = spoiled["w"].at[1, 2, 3, 4].set(bad)
    updates, state = run_vmap(guarded, PARAMS, spoiled)
    want, plain = run_vmap(guarded, PARAMS, grads)
    np.testing.assert_array_equal(updates["w"][1], 0)
    for a, b in zip(jax.tree.leaves(updates), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.delete(a, 1, axis=0), b)
    for a, b in zip(jax.tree.leaves(state.inner), jax.tree.leaves(plain.inner), strict=True):
        np.testing.assert_array_equal(a, b)
    assert (state.skipped, plain.skipped) == (1, 0)


def test_under_shard_map_it_costs_one_word():
    def total(tx):
        mesh = mesh_of(N)
        state, specs = jc.init_state(tx, PARAMS, mesh, AXIS)
        step = lambda s, g: tx.update(jax.tree.map(lambda x: x[0], g), s)
        step = jax.shard_map(step, mesh=mesh, in_specs=(specs, P(AXIS)), out_specs=(P(), specs))
        return jc.ledger(step, state, jax.tree.map(lambda p: jnp.zeros((N, *p.shape)), PARAMS)).total_bytes

    tx = jc.compressed_mean(jc.error_feedback(jc.top_k(0.05)), AXIS)
    assert total(jc.skip_nonfinite(tx, AXIS)) - total(tx) == 2 * (N - 1) / N * 4


# ------------------------------------------------------------------------------------------------
# Another number of workers

ALGORITHMS = {
    "error_feedback": jc.error_feedback(jc.top_k(0.05)),
    "sidco": jc.error_feedback(jc.sidco(0.05, adapt="climb", stages=2)),
    "diana": jc.diana(jc.dithering(7)),
    "momentum": jc.momentum_correction(jc.top_k(0.05)),
    "direct": jc.direct(jc.natural()),
}


def fsum(rows):
    """The exact sum over workers, entry by entry, and how far it is from zero in units of the last place."""
    from fractions import Fraction

    rows = np.asarray(rows, np.float64).reshape(len(rows), -1)
    return [sum(map(Fraction, column)) for column in rows.T.tolist()]


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


@pytest.mark.parametrize("name", variants(ALGORITHMS, {"sidco"}))
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
