"""Moments of inner optimizers that workers share: against DES-LOC in float64, and what each option makes of them."""

import concurrent.futures
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles_local as oracle
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from local_worlds import PARAMS, Board, mesh_step, one_worker, random_gradients, stacked, vmap_steps
from variants import variants
from worlds import assert_close, assert_same, at, mesh_of, vmap_step

import jaxcomp as jc
from jaxcomp.state.moments import LocalMomentsState
from jaxcomp.transforms.local_updates import LocalUpdatesState

pytestmark = pytest.mark.usefixtures("standard_promotion")
N = 4
FULL = jc.direct(jc.identity())
TWO_BITS = jc.error_feedback(jc.flat(jc.block_scaled("int2")), decay=0.9)
BOTH = {"mu": 2, "nu": 3}


def adam_steps(algorithm, grads, inner=None, params=PARAMS, **options):
    tx = jc.local_updates(inner or optax.adam(0.01), optax.sgd(1.0), algorithm, "data", **{"every": 2, **options})
    return vmap_steps(tx, params, grads)


def moment(state, name):
    """The moment of each worker, a tree with a leading axis of workers."""
    return jax.tree.map(lambda x: np.asarray(x)[:, 0], getattr(state.own.local.inner[0], name))


def assert_equal_rows(tree):
    for leaf in jax.tree.leaves(tree):
        np.testing.assert_array_equal(leaf, np.broadcast_to(leaf[:1], leaf.shape))


def by_hand():
    """The state and step of the mean of the first moment, in two bits; the shared moment and those of the workers."""
    mean = jc.compressed_mean(TWO_BITS, "data", seed=jax.random.fold_in(jax.random.key(0), 2**30))
    return *vmap_step(mean, PARAMS), *(jax.tree.map(np.zeros_like, tree) for tree in (PARAMS, stacked(PARAMS)))


# ------------------------------------------------------------------------------------------------
# The method itself

MATRIX = np.linspace(-1, 1, 24, dtype=np.float32).reshape(4, 6)
CASES = {
    "adamw": (optax.adamw(0.02, weight_decay=0.1), lambda: oracle.Adam(0.02, 0.1), {"mu": 4, "nu": 6}),
    "adamw, mu alone": (optax.adamw(0.02, weight_decay=0.0), lambda: oracle.Adam(0.02), {"mu": 5}),
    "momentum": (optax.sgd(0.05, momentum=0.8), lambda: oracle.Momentum(0.05, 0.8), {"trace": 4}),
    "muon": (optax.contrib.muon(0.02), lambda: oracle.Muon(0.02, MATRIX.shape), {"mu": 4}),
}


@pytest.mark.parametrize("case", variants(CASES, {"adamw", "muon"}))
def test_it_is_the_method_of_the_oracle(case, seed):
    """Also inside a chain, a schedule's state, and a partition, wherever optax put the moments."""
    inner, reference, periods = CASES[case]
    grads = random_gradients(seed, 13, params={"w": MATRIX})
    tx = jc.local_updates(inner, optax.sgd(1.0), FULL, "data", every=3, moments=periods)
    got, state = vmap_steps(tx, {"w": MATRIX}, grads)
    given = np.asarray(grads["w"], np.float64).reshape(13, N, -1)
    gradient = lambda i, t, x: given[t - 1, i]
    want, apart = (
        oracle.des_loc(MATRIX.ravel(), gradient, [reference() for _ in range(N)], every=3, periods=each, steps=13)
        for each in (periods, {})
    )
    got = np.stack([each["w"].reshape(N, -1) for each in got])
    np.testing.assert_allclose(got, want, rtol=2e-3, atol=2e-4)
    assert np.max(np.abs(got - apart)) > 10 * np.max(np.abs(got - want))
    assert set(state.moments) == set(periods)


def test_moments_are_equal_after_an_averaging_and_differ_after_a_step(seed):
    """With identity and all periods those of the parameters: everything floating is equal on all workers, bitwise."""
    periods = {"mu": 2, "nu": 2}
    points, state = adam_steps(FULL, random_gradients(seed, 4), moments=periods)
    assert_equal_rows(points[-1])
    for name in periods:
        assert_equal_rows(moment(state, name))
        assert_same(at(moment(state, name)), state.moments[name].point)
    _, later = adam_steps(FULL, random_gradients(seed, 5), moments=periods)
    assert not np.array_equal(moment(later, "mu")["c"][0], moment(later, "mu")["c"][1])
    _, plain = adam_steps(FULL, random_gradients(seed, 4))
    mean = jax.tree.map(lambda x: x.mean(0), moment(plain, "nu"))
    np.testing.assert_allclose(mean["c"], state.moments["nu"].point["c"], rtol=1e-5)  # which is linear in the squares


@pytest.mark.parametrize("apart", variants([False, True], {True}))
def test_what_crosses_is_the_compressed_difference_to_the_shared_moment(apart, seed):
    """To the bit against `compressed_mean` of u - u_i by hand, with its memory, over several averagings."""
    given = {"moments_algorithm": TWO_BITS} if apart else {}
    grads = random_gradients(seed, 9)
    algorithm = FULL if apart else TWO_BITS
    tx = jc.local_updates(
        optax.sgd(0.0, momentum=0.5), optax.sgd(1.0), algorithm, "data", every=9, moments={"trace": 3}, **given
    )
    _, state = vmap_steps(tx, PARAMS, grads)
    memory, exchange, point, own = by_hand()
    for t in range(9):
        own = jax.tree.map(lambda u, g: np.asarray(g[t]) + np.float32(0.5) * u, own, grads)  # noqa: B023
        if t % 3 == 2:
            direction, memory = exchange(memory, jax.tree.map(lambda p, u: p[None] - u, point, own))
            point = jax.tree.map(lambda p, d: p - np.asarray(d), point, direction)
            own = jax.tree.map(lambda p: np.stack([p] * N), point)
    assert_same(state.moments["trace"].point, point)
    assert_same(moment(state, "trace"), own)
    assert_same(state.moments["trace"].mean.local.algorithm.memory, memory.local.algorithm.memory)


def test_squares_stay_above_zero_whatever_a_message_loses(seed):
    """Projected, and the next difference is of the projected point: what two bits make of nu, step by step."""
    grads = random_gradients(seed, 8)
    size = np.float32([1, 1, 0.01, 0.01, 1, 0.1, 0.01, 0.001])  # of the gradients of each step, so that squares shrink
    grads = jax.tree.map(lambda g: g * size.reshape(8, *[1] * (g.ndim - 1)), grads)
    _, state = adam_steps(TWO_BITS, grads, optax.adam(0.01, b2=0.25), moments={"nu": 2})
    memory, exchange, point, own = by_hand()
    below = kept = 0
    for t in range(8):
        own = jax.tree.map(lambda v, g: 0.25 * v + 0.75 * np.asarray(g[t]) ** 2, own, grads)  # noqa: B023
        if t % 2:
            direction, memory = exchange(memory, jax.tree.map(lambda p, v: p[None] - v, point, own))
            raw = jax.tree.map(lambda p, d: p - np.asarray(d), point, direction)
            below += sum(int(np.sum(x < 0)) for x in raw.values())
            point = jax.tree.map(lambda x: np.maximum(x, 0), raw)
            kept += sum(int(np.sum(x == 0)) for x in point.values())
            own = jax.tree.map(lambda p, v: np.where(p > 0, p, v), point, own)
    assert below  # without the projection there were some
    assert kept
    assert_close((state.moments["nu"].point, moment(state, "nu")), (point, own), rtol=1e-4, atol=1e-9)
    assert all(np.all(x > 0) for x in jax.tree.leaves(moment(state, "nu")))


def test_without_moments_nothing_changes_and_with_them_not_before_the_first_averaging(seed):
    grads = random_gradients(seed, 4)
    points, plain = adam_steps(TWO_BITS, grads)
    same, state = adam_steps(TWO_BITS, grads, moments={"mu": 5, "nu": 6})
    assert_same(points, same)
    assert type(plain) is LocalUpdatesState
    assert type(state) is LocalMomentsState
    assert jax.tree.structure(tuple(plain)) == jax.tree.structure(tuple(state)[:-1])
    assert_same(tuple(plain)[:3] + tuple(plain)[5:], tuple(state)[:3] + tuple(state)[5:-1])


# ------------------------------------------------------------------------------------------------
# When, and in what program


def test_exchanges_stand_in_branches_and_nothing_is_compiled_anew(seed):
    tx = jc.local_updates(optax.adam(0.01), optax.sgd(1.0), FULL, "data", every=4, moments=BOTH, via="gather")
    own, state, step = mesh_step(tx)
    grads = lambda own: jax.tree.map(lambda p: 0.1 * p, own)
    rows = [row for row in jc.ledger(step, own, state, grads(own)).rows if row.sent_bytes]
    size = 4 * sum(p.size for p in PARAMS.values()) * (N - 1)
    assert all(row.branch for row in rows)
    assert sum(row.sent_bytes for row in rows) == 3 * size
    sent = []
    for _ in range(12):
        own, state = jax.block_until_ready(step(own, state, grads(own)))
        sent.append(float(jc.info(state).sent_bytes))
    assert sent == [size * ((t % 4 == 0) + (t % 2 == 0) + (t % 3 == 0)) for t in range(1, 13)]
    assert step._cache_size() <= 2  # the first state lies on no device
    assert int(state.moments["mu"].mean.shared.count) == 6


def test_a_step_that_says_its_number_needs_no_conditional():
    tx = jc.local_updates(optax.adam(0.01), optax.sgd(1.0), FULL, "data", every=4, moments=BOTH)
    update = lambda at: str(
        jax.make_jaxpr(lambda grads, state: tx.update(grads, state, grads, at=at), axis_env=[("data", N)])(
            PARAMS, tx.init(PARAMS)
        )
    )
    collectives = lambda text: sum(text.count(f"{each}[") for each in ("psum", "psum_invariant", "all_gather"))
    assert update(None).count("cond[") == 3
    assert not any("cond[" in update(at) for at in (1, 2, 3, 4, 12))
    assert collectives(update(1)) == collectives(update(5)) == 0
    assert 0 < collectives(update(2)) == collectives(update(3)) < collectives(update(4)) < collectives(update(12))


# ------------------------------------------------------------------------------------------------
# Every kind of moment


def test_moments_in_bf16_go_on_from_the_rounded_shared_one(seed):
    inner = optax.adam(0.01, mu_dtype=jnp.bfloat16)
    _, state = adam_steps(FULL, random_gradients(seed, 6), inner, moments=BOTH)
    for leaf, shared in zip(jax.tree.leaves(moment(state, "mu")), state.moments["mu"].point.values(), strict=True):
        assert leaf.dtype == jnp.bfloat16
        assert shared.dtype == np.float32
        np.testing.assert_array_equal(leaf, np.stack([np.asarray(shared.astype(jnp.bfloat16))] * N))
        assert not np.array_equal(shared, shared.astype(jnp.bfloat16))


def test_a_moment_that_is_not_a_number_counts_as_the_shared_one_and_is_replaced(seed):
    tx = jc.local_updates(optax.sgd(0.0, momentum=0.5), optax.sgd(1.0), FULL, "data", every=1, moments={"trace": 1})
    grads = jax.tree.map(lambda g: g.at[1, 2].set(jnp.nan), random_gradients(seed, 2))
    _, state = vmap_steps(tx, PARAMS, grads)
    for key, g in grads.items():
        shared, own = state.moments["trace"].point[key], moment(state, "trace")[key]
        first = np.asarray(g[0]).mean(0)
        others = np.asarray(g[1])[[0, 1, 3]] + 0.5 * first
        np.testing.assert_allclose(shared, (others.sum(0) + first) / N, rtol=1e-5, atol=1e-6)
        assert_equal_rows(own)


def test_one_worker_keeps_its_moments_and_one_step_a_round_averages_at_every_step(seed):
    tx = jc.local_updates(optax.adam(0.01), optax.sgd(1.0), FULL, None, every=1, moments={"mu": 1, "nu": 1})
    alone = jc.local_updates(optax.adam(0.01), optax.sgd(1.0), FULL, None, every=1)
    grads = at(random_gradients(seed, 5), np.s_[:, 0])
    assert_close(*(one_worker(each, optax.adam(0.01), grads)[0] for each in (tx, alone)))


EMPTY = {"a": np.ones(5, np.float32), "none": np.zeros((0, 3), np.float32)}


@pytest.mark.parametrize("params", [EMPTY, np.ones(4, np.float32)], ids=["empty leaf", "bare array"])
def test_leaves_may_be_empty_and_parameters_an_array(params, seed):
    _, state = adam_steps(TWO_BITS, random_gradients(seed, 6, params=params), params=params, moments=BOTH)
    assert_equal_rows(moment(state, "mu"))
    assert np.any(jax.tree.leaves(state.moments["mu"].point)[0])


def test_muon_shares_the_moments_of_its_matrices_and_of_the_rest(seed):
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.contrib.muon(0.01))
    tx = jc.local_updates(inner, optax.sgd(1.0), FULL, "data", every=2, moments=BOTH)
    _, state = vmap_steps(tx, PARAMS, random_gradients(seed, 6))
    assert all(np.any(x) for x in state.moments["mu"].point.values())
    assert isinstance(state.moments["nu"].point["a"], optax.MaskedNode)  # the matrix
    assert np.all(state.moments["nu"].point["b"] > 0)
    matrices, rest = (state.own.local.inner[1].inner_states[name].inner_state[0] for name in ("muon", "adam"))
    assert_equal_rows((matrices.mu, rest.mu, rest.nu))


def test_weights_of_steps_count_for_moments_since_their_last_averaging(seed):
    tx = jc.local_updates(
        optax.sgd(0.0, momentum=0.5), optax.sgd(1.0), FULL, "data", every=4, moments={"trace": 3}, weighted=True
    )
    grads, weights = random_gradients(seed, 6), np.random.default_rng(seed).uniform(0.5, 4, (6, N)).astype(np.float32)
    state, axes = jc.init_state(tx, PARAMS, N, "data")
    own = stacked(PARAMS)
    step = lambda own, state, grads, weight: tx.update(grads, state, own, weight=weight)
    step = jax.jit(jax.vmap(step, in_axes=(0, axes, 0, 0), out_axes=(0, axes), axis_name="data"))
    want = jax.tree.map(lambda p: np.zeros((N, *p.shape)), PARAMS)
    for t in range(6):
        _, state = step(own, state, at(grads, t), weights[t])
        want = jax.tree.map(lambda u, g: 0.5 * u + np.asarray(g[t], np.float64), want, grads)  # noqa: B023
        if t % 3 == 2:
            share = weights[t - 2 : t + 1].sum(0) / weights[t - 2 : t + 1].sum()
            want = jax.tree.map(lambda u: np.stack([np.tensordot(share, u, 1)] * N), want)  # noqa: B023
    assert_close(moment(state, "trace"), want, rtol=1e-4, atol=1e-5)


ROADS = {
    "ladder": (jc.sparse_loco(k=2, chunk=8), {"via": "ladder"}),
    "two_shot": (jc.error_feedback(jc.block_scaled("int8")), {"via": "two_shot"}),
    "buckets, measured": (TWO_BITS, {"bucket_bytes": 64, "measure": True}),
    "fragments": (TWO_BITS, {"fragments": 2, "delay": 1, "mixing": 0.5}),
    "by path": (jc.by_path({"a": TWO_BITS, ".*": FULL}), {}),
}


@pytest.mark.parametrize("road", variants(ROADS, {"buckets, measured", "fragments"}))
def test_moments_take_the_road_of_differences(road, seed):
    algorithm, options = ROADS[road]
    _, state = adam_steps(algorithm, random_gradients(seed, 6), moments={"mu": 2, "nu": 6}, **options)
    assert_equal_rows(moment(state, "mu"))
    assert all(np.any(x) and np.all(np.isfinite(x)) for each in state.moments.values() for x in each.point.values())


# ------------------------------------------------------------------------------------------------
# Meshes


def loss(params, x):
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"]) ** 2) + 0.1 * jnp.sum(params["s"] ** 2)


WHOLE = {
    "w": np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8),
    "v": np.ones((8, 2), np.float32),
    "s": np.ones(4, np.float32),
}
CUT = {"w": P(None, "model"), "v": P("model"), "s": P()}


def on_mesh(shape, specs, inner, seed, steps=6, **options):
    mesh = mesh_of(shape)
    step = jc.local_steps(loss, inner, optax.sgd(1.0), options.pop("algorithm", FULL), mesh, every=2, **options)
    place = lambda p, spec: jax.device_put(p, NamedSharding(mesh, spec))
    own, state = step.init(jax.tree.map(place, WHOLE, specs))
    step = jax.jit(step)
    x = np.random.default_rng(seed).standard_normal((steps, 8, 4)).astype(np.float32)
    for batch in x:
        _, own, state = jax.block_until_ready(step(own, state, place(batch, P("data"))))
    return own, state


def test_sharded_parameters_have_sharded_moments(seed):
    inner = optax.adam(0.01)
    own, state = on_mesh((2, 2), CUT, inner, seed, moments=BOTH)
    same, plain = on_mesh((2, 1), jax.tree.map(lambda _: P(), WHOLE), inner, seed, moments=BOTH)
    assert_close(own, same, rtol=2e-3, atol=2e-4)
    for name in BOTH:
        points = state.exchange.moments[name].point
        assert_close(points, plain.exchange.moments[name].point, rtol=2e-3, atol=2e-4)
        assert points["w"].sharding.spec == CUT["w"]
    assert_equal_rows(jax.tree.map(np.asarray, state.exchange.own.local.inner[0].mu))


@pytest.mark.parametrize("options", [{"moments": BOTH}, {"fragments": 2}], ids=["moments", "fragments"])
def test_cut_parameters_on_explicit_axes_of_a_mesh_that_is_set(options):
    """Keys of moments and of fragments are constants of no mesh."""
    mesh = mesh_of((2, 2), kind=AxisType.Explicit)
    simple = lambda params, x: jnp.mean(jnp.tanh(x @ params["w"] + params["b"]) ** 2)
    with jax.set_mesh(mesh):
        start = {"w": jnp.ones((8, 8)), "b": jnp.ones(8)}
        start = jax.tree.map(jax.device_put, start, {"w": P(None, "model"), "b": P("model")})
        step = jc.local_steps(simple, optax.adam(0.01), optax.sgd(1.0), TWO_BITS, mesh, every=2, **options)
        own, state = step.init(start)
        step = jax.jit(step)
        for _ in range(4):
            value, own, state = jax.block_until_ready(step(own, state, jax.device_put(jnp.ones((8, 8)), P("data"))))
    assert step._cache_size() == 1
    assert np.all(np.asarray(value) < 1)


def test_a_hierarchy_averages_moments_over_its_last_axis(seed):
    mesh = mesh_of((2, 2), ("dcn", "ici"))
    levels = {"ici": FULL, "dcn": TWO_BITS}
    step = jc.local_steps(
        loss, optax.adam(0.01), optax.sgd(1.0), None, mesh, levels, every=2, moments=BOTH, moments_algorithm=FULL
    )
    own, state = step.init(WHOLE)
    x = np.random.default_rng(seed).standard_normal((6, 8, 4)).astype(np.float32)
    step = jax.jit(step)
    for batch in x:
        _, own, state = jax.block_until_ready(step(own, state, jax.device_put(batch, NamedSharding(mesh, P("dcn")))))
    mu = jax.tree.map(np.asarray, state.exchange.own.local.inner[0].mu)
    assert mu["w"].shape[0] == 2
    assert_equal_rows(mu)
    assert_same(at(mu), state.exchange.moments["mu"].point)


def test_muon_in_local_steps_is_the_same_on_any_mesh_and_refuses_matrices_that_are_cut(seed):
    code = jc.error_feedback(jc.binned(2), decay=0.9)
    options = {"algorithm": code, "moments": {"mu": 4}, "moments_algorithm": FULL}
    whole = jax.tree.map(lambda _: P(), WHOLE)
    own, state = on_mesh((4, 1), whole, optax.contrib.muon(0.01), seed, **options)
    assert float(loss(state.point, np.ones((8, 4), np.float32))) < float(loss(WHOLE, np.ones((8, 4), np.float32)))
    with pytest.raises(ValueError, match=r"muon orthogonalizes whole matrices, and params\['v'\] is cut over model"):
        on_mesh((2, 2), CUT, optax.contrib.muon(0.01), seed)
    only = optax.contrib.muon(
        0.01, muon_weight_dimension_numbers={"w": None, "v": None, "s": None}
    )  # nothing is a matrix to it
    on_mesh((2, 2), CUT, only, seed, steps=2)
    by_hand = optax.contrib.muon(
        0.01, muon_weight_dimension_numbers={"w": optax.contrib.MuonDimensionNumbers(), "v": None, "s": None}
    )
    own, _ = on_mesh((2, 2), CUT | {"w": P()}, by_hand, seed, steps=4)
    same, _ = on_mesh((2, 1), whole, by_hand, seed, steps=4)
    assert_close(own, same, rtol=2e-3, atol=2e-4)


# ------------------------------------------------------------------------------------------------
# Newcomers, and workers that are processes


def test_new_workers_begin_with_the_shared_moments(seed):
    tx = jc.local_updates(optax.adam(0.01), optax.sgd(1.0), TWO_BITS, "data", every=2, moments={"mu": 2, "nu": 3})
    grads = jax.tree.map(lambda g: g.at[..., 0].multiply(1e-4), random_gradients(seed, 7))
    _, old = vmap_steps(tx, PARAMS, grads)
    before = jax.tree.map(np.asarray, old.own.local.inner[0])
    for workers in (6, 2):
        new, _ = jc.init_state(tx, PARAMS, workers, "data")
        moved = jc.redistribute(old, new)
        after = jax.tree.map(np.asarray, moved.own.local.inner[0])
        known = min(workers, N)
        for x, like in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True):
            np.testing.assert_array_equal(x[:known], like[:known])
        assert_same(moved.moments["mu"].point, old.moments["mu"].point)
        memory = lambda state: sum(np.asarray(x, np.float64).sum() for x in state.moments["mu"].mean.local.algorithm[0])
        np.testing.assert_allclose(memory(moved), memory(old), rtol=1e-6)
        for key, shared in moved.moments["mu"].point.items():
            for i in range(known, workers):
                np.testing.assert_array_equal(after.mu[key][i], np.asarray(shared)[None])
                nu, own = np.asarray(moved.moments["nu"].point[key])[None], before.nu[key][i % N]
                np.testing.assert_array_equal(after.nu[key][i], np.where(nu > 0, nu, own))
        np.testing.assert_array_equal(after.count, 7)
    other = jc.local_updates(optax.adam(0.01), optax.sgd(1.0), TWO_BITS, "data", every=2, moments={"mu": 2})
    with pytest.raises(ValueError, match=r"redistribute: .*they share different moments"):
        jc.redistribute(old, jc.init_state(other, PARAMS, 6, "data")[0])


def test_processes_average_the_moments_that_the_program_does(seed):
    size, inner = 3, optax.chain(optax.trace(0.5), optax.scale(-1 / 64))  # whose products are exact
    more = {"moments_algorithm": jc.error_feedback(jc.flat(jc.block_scaled("int4")))}
    times = {"every": 4, "fragments": 2, "delay": 1, "mixing": 0.5, "moments": {"trace": 3}, **more}
    grads = jax.tree.map(lambda g: g[:, :size], random_gradients(seed, 11))
    tx = jc.local_updates(inner, optax.sgd(1.0), TWO_BITS, "data", via="gather", **times)
    want, state = vmap_steps(tx, PARAMS, grads)
    make = lambda board, i: jc.local_process(inner, optax.sgd(1.0), TWO_BITS, board.gather(i), i, size, **times)

    def run(workers, points, steps):
        def each(i):
            for t in steps:
                points[i] = workers[i].step(jax.tree.map(lambda g: g[t, i], grads), points[i])  # noqa: B023

        with concurrent.futures.ThreadPoolExecutor(size) as pool:
            list(pool.map(each, range(size)))

    board = Board(size)
    workers = [make(board, i) for i in range(size)]
    points = [worker.start(PARAMS) for worker in workers]
    run(workers, points, range(5))
    kept, board = [worker.state() for worker in workers], Board(size)
    for worker in workers:
        worker.close()
    workers = [make(board, i) for i in range(size)]
    for worker, then in zip(workers, kept, strict=True):
        worker.start(PARAMS)
        worker.restore(then)
    run(workers, points, range(5, 11))
    for worker in workers:
        worker.close()
        assert_same(worker.moments["trace"], jax.tree.map(np.asarray, state.moments["trace"].point))
        assert worker.sent_bytes > 0
    for key in PARAMS:
        np.testing.assert_array_equal(np.stack([p[key] for p in points]), want[-1][key])


def test_processes_with_other_periods_are_told():
    board = Board(2)
    make = lambda i, period: jc.local_process(
        optax.adam(0.01), optax.sgd(1.0), FULL, board.gather(i), i, 2, every=2, moments={"mu": period}
    )
    with make(0, 2) as a, make(1, 3) as b:
        a.start(PARAMS)
        b.start(PARAMS)
        for worker in (a, b):
            with pytest.raises(ValueError, match="moments"):
                [worker.step(PARAMS, PARAMS) for _ in range(3)]


# ------------------------------------------------------------------------------------------------
# Errors


make = functools.partial(jc.local_updates, outer=optax.sgd(1.0), algorithm=FULL, axis_name="data", every=2)
TWICE = optax.chain(optax.scale_by_adam(), optax.scale_by_adam())
BAD = [
    *((optax.adam(0.1), wrong, "moments must be a dictionary from") for wrong in ({"mu": 0}, {"mu": True}, {}, {3: 2})),
    (optax.adam(0.1), {"momentum": 2}, r"floats like the parameters: mu, nu; got 'momentum'$"),
    (optax.adam(0.1), {"count": 2}, r"mu, nu; got 'count'; 'count' has int32\[\], which is not"),
    (optax.sgd(0.1), {"mu": 2}, "there are none; got 'mu'"),
    (TWICE, {"mu": 2}, r"'mu', of which the inner optimizer's state has two for the parameter \['a'\]"),
]


@pytest.mark.parametrize(("inner", "moments", "said"), BAD, ids=range(len(BAD)))
def test_errors_name_what_is_wrong_and_what_is_there(inner, moments, said):
    with pytest.raises(ValueError, match=said):
        make(inner, moments=moments).init(PARAMS)


def test_moments_have_an_algorithm_and_a_state():
    with pytest.raises(ValueError, match="moments_algorithm needs moments"):
        make(optax.adam(0.1), moments_algorithm=FULL)
    with pytest.raises(TypeError, match="needs an algorithm; got the compressor"):
        make(optax.adam(0.1), moments={"mu": 2}, moments_algorithm=jc.identity())
    tx = make(optax.adam(0.1), moments={"mu": 2})
    with pytest.raises(ValueError, match="expected a LocalMomentsState; got LocalUpdatesState"):
        jax.vmap(lambda w: tx.update(w, make(optax.adam(0.1)).init(w), w), axis_name="data")(jnp.ones((2, 3)))
