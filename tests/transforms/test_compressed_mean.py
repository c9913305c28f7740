"""`compressed_mean` among optax's wrappers, scans, donated buffers, odd dtypes and bad gradients."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from variants import variants
from worlds import AXIS, PARAMS, N, assert_close, at, gradients, mesh_of, mesh_step, run_pmap, run_shard_map, run_vmap

import jaxcomp as jc

EF = jc.error_feedback(jc.top_k(0.05))
SIDCO, REDSYNC = jc.sidco(0.1), jc.contrib.redsync(0.1)

pytestmark = pytest.mark.usefixtures("standard_promotion")


WRAPPERS = {
    "chain-adamw": lambda mean: optax.chain(mean, optax.adamw(1e-2)),
    "chain-clip-first": lambda mean: optax.chain(optax.clip_by_global_norm(1.0), mean, optax.sgd(0.1, momentum=0.9)),
    "inject": lambda mean: optax.inject_hyperparams(lambda learning_rate: optax.chain(mean, optax.sgd(learning_rate)))(
        learning_rate=0.1
    ),
    "multi_steps": lambda mean: optax.MultiSteps(optax.chain(mean, optax.sgd(0.1)), 2),
    "apply_if_finite": lambda mean: optax.chain(mean, optax.apply_if_finite(optax.adam(0.1), 3)),
    "partition": lambda mean: optax.partition(
        {"x": optax.chain(mean, optax.sgd(0.1)), "y": optax.sgd(0.2)}, {"b": "y", "w": "x"}
    ),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", variants(WRAPPERS, {"chain-clip-first", "multi_steps"}))
def test_optax_wrappers_in_every_world(name, seed):
    tx = WRAPPERS[name](jc.compressed_mean(EF, AXIS))
    grads = gradients(seed, rounds=4)
    # What is not compressed is not averaged either: it gets equal gradients, and is typed as differing between workers.
    unchecked = name == "partition"
    if unchecked:
        grads["b"] = jnp.broadcast_to(grads["b"][:, :1], grads["b"].shape)
    sharded, state = run_shard_map(tx, PARAMS, grads, check_vma=not unchecked)
    simulated, _ = run_vmap(tx, PARAMS, grads) if not unchecked else run_pmap(tx, PARAMS, grads)
    assert_close(sharded, simulated)
    assert jc.info(state).lane_bytes > 0
    if name == "multi_steps":  # the mean of two rounds comes out every second round
        np.testing.assert_array_equal(sharded["w"][0], 0)
        assert np.abs(sharded["w"][1]).max() > 0


@pytest.mark.sampled
@pytest.mark.parametrize("run", [run_shard_map, run_vmap])
def test_multi_steps_behind_the_mean_accumulates_what_is_equal_on_all(run, seed):
    grads = gradients(seed, rounds=2)
    mean = jc.compressed_mean(EF, AXIS)
    directions, state = run(optax.chain(mean, optax.MultiSteps(optax.sgd(1.0), 2)), PARAMS, grads)
    plain, _ = run(mean, PARAMS, grads)
    assert_close(at(directions, 1), jax.tree.map(lambda d: -d.mean(0), plain))
    assert jax.tree.map(jnp.shape, state[1].acc_grads) == jax.tree.map(jnp.shape, PARAMS)
    again = jc.redistribute(state, state)
    np.testing.assert_array_equal(again[1].mini_step, state[1].mini_step)


@pytest.mark.sampled
@pytest.mark.parametrize("via", ["auto", "sum", "gather"])
@pytest.mark.parametrize("weights", [None, [0.1, 0.2, 0.3, 0.4]])
def test_sums_of_narrow_messages_lose_nothing_that_is_remembered(via, weights, seed):
    """Sent + memory = input: a sum that is rounded once more, which nobody remembers, would drift."""
    tx = jc.compressed_mean(jc.error_feedback(jc.cast("bfloat16")), AXIS, via=via, weights=weights)
    rng = np.random.default_rng(seed)
    grads = jnp.broadcast_to(jnp.asarray(rng.standard_normal((4, 999)), jnp.float32), (20, 4, 999))
    directions, state = run_vmap(tx, jnp.zeros(999), grads)
    shares = np.full(4, 1 / 4) if weights is None else np.asarray(weights)
    memory = np.asarray(state.local.algorithm.memory, np.float64).reshape(4, 999)
    delivered = np.asarray(directions, np.float64).sum(0) + shares @ memory
    np.testing.assert_allclose(delivered, 20 * shares @ np.asarray(grads[0], np.float64), atol=2e-6)


def test_multi_steps_accumulates_the_gradients_of_each_worker(seed):
    grads = gradients(seed, rounds=2)
    tx = optax.MultiSteps(optax.chain(jc.compressed_mean(jc.direct(jc.identity()), AXIS), optax.sgd(1.0)), 2)
    directions, _ = run_shard_map(tx, PARAMS, grads)
    assert_close(at(directions, 1), jax.tree.map(lambda g: -g.mean((0, 1)), grads))


def test_whole_training_in_one_scan_inside_shard_map(seed):
    tx = optax.chain(jc.compressed_mean(EF, AXIS, measure=True), optax.adam(1e-2))
    grads = gradients(seed)

    def train(params, grads):
        def body(carry, g):
            params, state = carry
            updates, state = tx.update(g, state, params)
            return (optax.apply_updates(params, updates), state), jc.info(state).relative_error

        (params, _), errors = jax.lax.scan(body, (params, tx.init(params)), jax.tree.map(lambda g: g[:, 0], grads))
        return params, errors[None]

    specs = (P(), P(None, AXIS))
    fn = jax.jit(jax.shard_map(train, mesh=mesh_of(), in_specs=specs, out_specs=(P(), P(AXIS))))
    params, errors = fn(PARAMS, grads)
    stepwise, _ = run_shard_map(tx, PARAMS, grads)
    assert_close(params, jax.tree.map(lambda d: d.sum(0), stepwise))
    assert errors.shape == (N, 3)
    assert np.all((errors > 0) & (errors < 1))


@pytest.mark.parametrize("workers", variants([1, 100], {100}))
def test_one_worker_and_a_hundred(workers, seed):
    grads = gradients(seed, rounds=2, workers=workers)
    tx = jc.compressed_mean(jc.direct(jc.identity()), AXIS)
    directions, _ = run_vmap(tx, PARAMS, grads)
    assert_close(directions, jax.tree.map(lambda g: g.mean(1), grads))
    if workers == 1:
        assert_close(run_shard_map(tx, PARAMS, grads)[0], directions)
        alone = jc.compressed_mean(jc.direct(jc.identity()), None)
        assert_close(jax.jit(alone.update)(at(grads, (0, 0)), alone.init(PARAMS))[0], at(directions))


def test_donated_buffers_of_a_step_that_is_compiled_once(seed):
    tx = optax.chain(jc.compressed_mean(jc.diana(jc.rand_k(0.1)), AXIS), optax.adam(1e-2))
    state, step = mesh_step(tx, PARAMS, mesh_of(), donate_argnums=0)
    grads = gradients(seed)
    for t in range(3):
        old = state
        updates, state = jax.block_until_ready(step(state, at(grads, t)))
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old[0].local.algorithm))
    assert step._cache_size() == 1
    want, _ = run_shard_map(tx, PARAMS, grads)
    assert_close(updates, at(want, -1))


@pytest.mark.sampled
@pytest.mark.parametrize(
    "algorithm", [EF, jc.diana(jc.dithering(7)), jc.direct(jc.identity())], ids=["ef", "diana", "direct"]
)
def test_bf16_gradients_have_f32_memories(algorithm, seed):
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
    grads = gradients(seed, params=params)
    directions, state = run_shard_map(jc.compressed_mean(algorithm, AXIS), params, grads)
    assert {d.dtype for d in jax.tree.leaves(directions)} == {jnp.dtype(jnp.bfloat16)}
    floats = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert {x.dtype for x in floats} == {jnp.dtype(jnp.float32)}
    if algorithm.compressor.spec.name == "per_leaf(identity)":
        assert jc.info(state).lane_bytes == 2 * sum(p.size for p in jax.tree.leaves(params))


@pytest.mark.sampled
@pytest.mark.parametrize(
    "algorithm",
    [EF, jc.diana(jc.dithering(7)), jc.direct(jc.identity()), jc.error_feedback(jc.flat(jc.sidco(0.05)))],
    ids=["ef", "diana", "direct", "sidco"],
)
def test_non_finite_gradients_never_enter_a_memory_and_are_counted(algorithm, seed):
    dirty = gradients(seed, rounds=1)
    dirty["w"] = dirty["w"].at[0, 1, :3, 7].set(jnp.array([np.nan, np.inf, -np.inf]))
    dirty["b"] = dirty["b"].at[0, 2, 0].set(np.nan)
    clean = jax.tree.map(lambda g: jnp.where(jnp.isfinite(g), g, 0), dirty)
    tx = jc.compressed_mean(algorithm, AXIS, measure=True)
    directions, state = run_shard_map(tx, PARAMS, dirty)
    want, want_state = run_shard_map(tx, PARAMS, clean)
    assert_close(directions, want)
    assert_close(state.local.algorithm, want_state.local.algorithm)
    assert int(jc.info(state).nonfinite) == 4
    np.testing.assert_array_equal(jc.info(state, each=True).nonfinite, [0, 3, 1, 0])


def test_info_is_what_it_says(seed):
    grads = gradients(seed, rounds=1)
    tx = optax.chain(jc.compressed_mean(EF, AXIS, measure=True), optax.sgd(1.0))
    _, state = run_shard_map(tx, PARAMS, grads)
    info = jc.info(state)
    assert info.lane_bytes == 60 * 8 + 5 * 4
    assert info.achieved_ratio == pytest.approx(65 / 1205)
    errors = []
    for i in range(N):
        w = np.asarray(grads["w"][0, i]).ravel()
        whole = np.sum(w**2) + np.sum(np.asarray(grads["b"][0, i]) ** 2)
        errors.append(np.sqrt(np.sum(np.sort(w**2)[:-60]) / whole))
    np.testing.assert_allclose(jc.info(state, each=True).relative_error, errors, rtol=1e-5)
    assert float(info.relative_error) == pytest.approx(np.mean(errors), rel=1e-5)
    assert float(info.code_bits) == pytest.approx(60 * (32 + 11) + 5 * 32)
    assert info.nonfinite == info.overflow == 0


def test_info_without_measurements_and_without_a_state(seed):
    tx = jc.compressed_mean(EF, AXIS)
    _, state = run_vmap(tx, PARAMS, gradients(seed, rounds=1))
    info = jc.info(state)
    assert info.lane_bytes == 500
    assert info.achieved_ratio == pytest.approx(65 / 1205)
    assert np.isnan(info.relative_error)
    assert np.isnan(info.nonfinite)
    with pytest.raises(ValueError, match="no compressed_mean in this state"):
        jc.info(optax.adam(1e-3).init(PARAMS))


def test_errors_may_be_measured_now_and_then(seed):
    """With measure=2 in rounds 0, 2, ...; in between those of the last one stay."""
    errors = []
    whole, some, every = gradients(seed, rounds=3), *(jc.compressed_mean(EF, AXIS, measure=m) for m in (2, True))
    for rounds in (1, 2, 3):
        grads = jax.tree.map(lambda g: g[:rounds], whole)  # noqa: B023
        states = [run_vmap(tx, PARAMS, grads)[1] for tx in (some, every)]
        errors.append([float(jc.info(state).relative_error) for state in states])
    assert errors[0][0] == errors[0][1] == errors[1][0] != errors[1][1]
    assert errors[2][0] == errors[2][1] != errors[1][0]


def test_overflow_is_counted(seed):
    """A gradient that gives SIDCo's first threshold twice as many entries as expected."""
    x = np.ones(2000, np.float32)
    x[:200] = 30
    tx = jc.compressed_mean(jc.error_feedback(jc.sidco(0.05, stages=1, capacity=1)), None)
    _, state = jax.jit(tx.update)(jnp.asarray(x), tx.init(jnp.asarray(x)))
    assert int(jc.info(state).overflow) == 200 - 100


def test_rounds_can_be_replayed(seed):
    """The same count and key give the same draw; the next round another."""
    tx = jc.compressed_mean(jc.direct(jc.dithering(3)), None, seed=7)
    g = jnp.asarray(np.random.default_rng(seed).standard_normal(2000), jnp.float32)
    state, update = tx.init(g), jax.jit(tx.update)
    first, after = update(g, state)
    again, _ = update(g, state)
    second, _ = update(g, after)
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, second)
    other_seed, _ = jax.jit(jc.compressed_mean(jc.direct(jc.dithering(3)), None, seed=8).update)(g, state)
    np.testing.assert_array_equal(first, other_seed)  # the key lives in the state


def test_workers_draw_independently(seed):
    tx = jc.compressed_mean(jc.direct(jc.dithering(1)), AXIS)
    g = jnp.ones(2000)
    mean, _ = run_vmap(tx, g, jnp.ones((1, 50, 2000)))
    # 50 independent draws average out; one draw shared by all would be 50 times as noisy.
    alone, _ = run_vmap(tx, g, jnp.ones((1, 1, 2000)))
    assert np.var(mean) < np.var(alone) / 25


def test_init_outside_under_an_ambient_mesh():
    """tx.init outside of shard_map makes one row for each worker of the mesh in use."""
    tx = optax.chain(jc.compressed_mean(EF, AXIS), optax.sgd(0.1))
    want, specs = jc.init_state(tx, PARAMS, mesh_of(), AXIS)
    with jax.set_mesh(mesh_of()):
        state = tx.init(PARAMS)
        assert jc.state_specs(state, AXIS) == specs
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
    assert jax.tree.structure(state) == jax.tree.structure(want)


def test_axes_of_two_names(seed):
    axes = ("dcn", "ici")
    state, step = mesh_step(jc.compressed_mean(EF, axes), PARAMS, mesh_of((2, 2), axes), axes, P(axes))
    grads = gradients(seed, rounds=1)
    want, _ = run_vmap(jc.compressed_mean(EF, AXIS), PARAMS, grads)
    assert_close(step(state, at(grads))[0], at(want))


def test_gradients_that_were_summed_already_are_reported():
    tx = jc.compressed_mean(EF, AXIS)
    state, specs = jc.init_state(tx, PARAMS, mesh_of(), AXIS)

    def step(params, state, x, mine):
        loss = lambda p: jnp.sum(p["w"]) * x[0] + jnp.sum(p["b"]) * x[0]
        return tx.update(jax.grad(loss)(mine(params)), state)

    def run(mine):
        one, ins = lambda *args: step(*args, mine), (P(), specs, P(AXIS))
        fn = jax.jit(jax.shard_map(one, mesh=mesh_of(), in_specs=ins, out_specs=(P(), specs)))
        return fn(PARAMS, state, jnp.arange(4.0))[0]

    # 0 + 1 + 2 + 3 = 6 would not be a mean at all.
    with pytest.raises(ValueError, match=r"jc\.per_worker\(params"):
        run(lambda p: p)
    with pytest.raises(ValueError, match=r"gradients\['w'\] are typed"):
        run(lambda p: {"w": p["w"], "b": jc.per_worker(p["b"], AXIS)})
    mean = run(lambda p: jc.per_worker(p, AXIS))
    np.testing.assert_allclose(mean["b"], 1.5)


def test_errors_help():
    tx = jc.compressed_mean(EF, AXIS)
    state = tx.init(PARAMS)
    with pytest.raises(ValueError, match="no axis named 'data' is bound here"):
        tx.update(PARAMS, state)
    with pytest.raises(ValueError, match=r"\['n'\] has dtype int32"):
        tx.init({"n": jnp.zeros(3, jnp.int32)})
    weighted = jc.compressed_mean(EF, AXIS, weights=[1, 2, 3])
    with pytest.raises(ValueError, match="3 weights for 4 workers on axis 'data'"):
        run_vmap(weighted, PARAMS, gradients(0, rounds=1))
    with pytest.raises(ValueError, match="made for another tree"):
        jax.vmap(lambda g: tx.update({"other": g}, state)[0], axis_name=AXIS)(jnp.zeros((N, 3)))
    rows = jax.tree.map(lambda x: jnp.tile(x, (N,) + (1,) * (x.ndim - 1)), state.local)
    grads = jax.tree.map(lambda p: jnp.zeros((N, *p.shape)), PARAMS)
    with pytest.raises(ValueError, match=r"leading axis of 1 at one worker\. Make the state, and its in_specs"):
        jax.vmap(lambda g: tx.update(g, dataclasses.replace(state, local=rows))[0], axis_name=AXIS)(grads)
    scalar = optax.MultiSteps(optax.chain(tx, optax.sgd(0.1)), 2)
    with pytest.raises(ValueError, match="one of them is a scalar"):
        jc.state_specs(scalar.init({"s": jnp.zeros(())}), AXIS)


@pytest.mark.sampled
@pytest.mark.parametrize("params", [{}, {"s": jnp.zeros(())}, {"a": jnp.zeros((0,)), "b": jnp.zeros(1)}], ids=str)
def test_empty_and_tiny_trees(params, seed):
    grads = gradients(seed, rounds=1, params=params)
    tx = jc.compressed_mean(EF, AXIS)
    if params:
        assert_close(run_shard_map(tx, params, grads)[0], jax.tree.map(lambda g: g.mean(1), grads))
        assert_close(run_vmap(tx, params, grads)[0], jax.tree.map(lambda g: g.mean(1), grads))
    else:
        direction, _ = jax.vmap(lambda i: tx.update({}, tx.init({})), axis_name=AXIS, out_axes=None)(jnp.arange(2))
        assert direction == {}


ADVANCING = {
    "direct": lambda c: jc.direct(c),
    "error_feedback": lambda c: jc.error_feedback(jc.contract(c)),
    "diana": lambda c: jc.diana(c),
    "momentum_correction": lambda c: jc.contrib.momentum_correction(jc.contract(c)),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", ADVANCING)
@pytest.mark.parametrize("tree", [False, True], ids=["array", "tree"])
def test_shared_randomness_is_new_every_round(name, tree):
    tx = jc.compressed_mean(ADVANCING[name](jc.rand_k(0.05)), None)
    g = {"w": jnp.ones(2000)} if tree else jnp.ones(2000)
    update = jax.jit(tx.update)
    first, state = update(g, jax.jit(tx.init)(g))
    second, _ = update(g, state)
    a, b = (np.asarray(jax.tree.leaves(direction)[0]) != 0 for direction in (first, second))
    if name == "diana":  # the second direction holds the first shift as well
        assert np.sum(b & ~a) > 50
    else:
        assert np.sum(a & ~b) > 50


@pytest.mark.sampled
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_relative_error_is_free_of_scale(scale, seed):
    x = np.random.default_rng(seed).standard_normal(500)
    g = jnp.asarray(scale * x, jnp.float32)
    tx = jc.compressed_mean(jc.direct(jc.top_k(0.3)), None, measure=True)
    _, state = jax.jit(tx.update)(g, tx.init(g))
    want = np.sqrt(np.sum(np.sort(x**2)[:350]) / np.sum(x**2))
    np.testing.assert_allclose(jc.info(state).relative_error, want, rtol=1e-4)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "seed", [np.int64(3), jnp.int32(3), jax.random.key(0, impl="rbg"), jax.random.PRNGKey(1)], ids=str
)
def test_seeds_of_every_kind(seed):
    tx = jc.compressed_mean(jc.diana(jc.rand_k(0.5)), None, seed=seed)
    direction, _ = jax.jit(tx.update)(jnp.ones(10), tx.init(jnp.ones(10)))
    assert np.sum(np.asarray(direction) != 0) == 5


@pytest.mark.sampled
@pytest.mark.parametrize(
    "algorithm", [jc.direct(jc.identity()), EF, jc.diana(jc.dithering(3))], ids=["d", "ef", "diana"]
)
@pytest.mark.parametrize("leaf", [{"a": jnp.zeros(0)}, jnp.zeros(0)], ids=["tree", "array"])
def test_empty_leaves_alone_under_shard_map(algorithm, leaf):
    directions, _ = run_shard_map(
        jc.compressed_mean(algorithm, AXIS), leaf, jax.tree.map(lambda x: jnp.zeros((1, N, 0)), leaf)
    )
    assert jax.tree.leaves(directions)[0].shape == (1, 0)


@pytest.mark.parametrize(
    "compressor",
    variants(
        [jc.dithering(7), jc.contract(jc.natural()), jc.cast("float16"), jc.top_k(0.1), SIDCO, REDSYNC],
        [SIDCO],
    ),
    ids=lambda compressor: compressor.spec.name,
)
def test_vmap_inside_shard_map(compressor, seed):
    """Several models in one program: the axis of vmap is not that of the workers."""
    make = jc.diana if compressor.spec.omega is not None else jc.error_feedback
    tx = jc.compressed_mean(make(compressor), AXIS)
    grads = jnp.asarray(np.random.default_rng(seed).standard_normal((N, 2, 50)), jnp.float32)

    def step(g):
        return jax.vmap(lambda g: tx.update(g, tx.init(g))[0])(g[0])

    directions = jax.jit(jax.shard_map(step, mesh=mesh_of(), in_specs=P(AXIS), out_specs=P()))(grads)
    for i in range(2):
        want, _ = run_vmap(tx, jnp.zeros(50), grads[None, :, i])
        assert np.isclose(directions[i], want[0], rtol=1e-5, atol=1e-6).mean() > 0.95
