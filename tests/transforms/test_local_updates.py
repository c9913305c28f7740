"""Local updates against the oracle, against their plain methods to the bit, on meshes, and in what they send."""

import functools

import jax
import jax.numpy as jnp
import local_worlds
import numpy as np
import optax
import oracles_local as oracle
import pytest
from jax.sharding import PartitionSpec as P
from local_worlds import PARAMS, mesh_step, one_worker, random_gradients, stacked, vmap_steps
from variants import variants
from worlds import assert_close, assert_same, at, fsum, mesh_of, vmap_step

import jaxcomp as jc
from jaxcomp import backend
from jaxcomp.exchange import collectives
from jaxcomp.transforms.local_updates import Timetable, cut, fragments_of, towards

pytestmark = pytest.mark.usefixtures("standard_promotion")
N = 3
SIZE = 32
SLICES = {1: [slice(0, 32)], 2: [slice(0, 16), slice(16, 32)], 3: [slice(0, 8), slice(8, 16), slice(16, 32)]}
FULL = jc.direct(jc.identity())


def flat(tree):
    return np.concatenate([np.asarray(x).reshape(-1) for x in jax.tree.leaves(tree)])


def worlds(seed):
    """Curvatures and targets of the workers' quadratic losses, f32[n, d]."""
    rng = np.random.default_rng(seed)
    return rng.uniform(0.5, 2, (N, SIZE)).astype(np.float32), rng.standard_normal((N, SIZE)).astype(np.float32)


def like(tree, x):
    ends = np.cumsum([leaf.size for leaf in jax.tree.leaves(tree)])
    parts = jnp.split(x, ends[:-1])
    return jax.tree.unflatten(
        jax.tree.structure(tree), [p.reshape(leaf.shape) for p, leaf in zip(parts, jax.tree.leaves(tree), strict=True)]
    )


def train(tx, curvature, target, steps, number=lambda t: None):
    """Points of all workers after each step, and the state. number: what step t says."""
    state, axes = jc.init_state(tx, PARAMS, N, "data")
    params = stacked(PARAMS, N)

    def one(number, params, state, curvature, target):
        grads = jax.tree.map(lambda p, a, b: a * (p - b), params, like(PARAMS, curvature), like(PARAMS, target))
        updates, state = tx.update(grads, state, params, at=number)
        return optax.apply_updates(params, updates), state

    in_axes, out_axes = (0, axes, 0, 0), (0, axes)
    mapped = lambda number, *args: jax.vmap(functools.partial(one, number), in_axes, out_axes, "data")(*args)
    step = jax.jit(mapped, static_argnums=0)
    points = []
    for t in range(1, steps + 1):
        params, state = step(number(t), params, state, curvature, target)
        points.append(np.stack([flat(at(params, i)) for i in range(N)]))
    return np.stack(points), state


# ------------------------------------------------------------------------------------------------
# The method itself

CASES = {  # every, fragments, delay, mixing, k of top-k or None
    "diloco": (4, 1, 0, 0.0, None),
    "top_k": (3, 1, 0, 0.0, 5),
    "streaming": (6, 3, 2, 0.5, 3),
    "fragments": (5, 2, 0, 0.0, None),
    "delay": (4, 1, 3, 0.0, None),
    "mixing": (1, 1, 0, 0.25, None),
}


@pytest.mark.parametrize("case", variants(CASES, {"streaming"}))
def test_it_is_the_method_of_the_oracle(case, seed):
    every, number, delay, mixing, k = CASES[case]
    curvature, target = worlds(seed)
    algorithm = FULL if k is None else jc.error_feedback(jc.flat(jc.top_k(k=k)), decay=0.9)
    tx = jc.local_updates(
        optax.sgd(0.05, momentum=0.5),
        optax.sgd(0.7, momentum=0.9, nesterov=True),
        algorithm,
        "data",
        every=every,
        fragments=number,
        delay=delay,
        mixing=mixing,
    )
    steps = 2 * every + delay + 3
    got, state = train(tx, curvature, target, steps)
    want, centre = oracle.local_updates(
        flat(PARAMS),
        lambda i, t, x: curvature[i].astype(np.float64) * (x - target[i]),
        [oracle.Sgd(0.05, 0.5) for _ in range(N)],
        [oracle.Sgd(0.7, 0.9, True) for _ in range(number)],
        [oracle.Mean() if k is None else oracle.TopK(k, 0.9) for _ in range(number)],
        every=every,
        parts=SLICES[number],
        delay=delay,
        mixing=mixing,
        steps=steps,
    )
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(flat(state.point), centre[-1], rtol=2e-5, atol=2e-6)
    assert int(state.count) == steps


@pytest.mark.parametrize("delay", [0, 1])
def test_a_step_that_says_its_number_needs_no_conditional(delay, seed):
    """Rounds after the first are one program: they may say the numbers of the second one."""
    tx = jc.local_updates(
        optax.sgd(0.05), optax.sgd(0.7, momentum=0.9), FULL, "data", every=2, fragments=2, delay=delay, mixing=0.5
    )
    want, state = train(tx, *worlds(seed), 7)
    got, same = train(tx, *worlds(seed), 7, lambda t: t if t <= 4 else 3 + (t - 1) % 2)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)
    assert int(state.count) == int(same.count) == 7
    assert jax.tree.structure(state) == jax.tree.structure(same)
    update = lambda at: jax.make_jaxpr(
        lambda grads, state: tx.update(grads, state, grads, at=at), axis_env=[("data", N)]
    )(PARAMS, tx.init(PARAMS))
    assert "cond[" in str(update(None))
    assert "cond[" not in str(update(3))
    for wrong in (0, 2.0, True, jnp.int32(3)):
        with pytest.raises(ValueError, match=r"at must be the number of this step, an integer of at least 1"):
            update(wrong)


IN_LOOPS = {
    "plain": {},
    "every step": {"every": 1},
    "streaming": {"fragments": 2, "delay": 1, "mixing": 0.5},
    "moments": {"moments": {"mu": 2, "nu": 4}},
}


@pytest.mark.parametrize("mapped", ["vmap", "shard_map"])
@pytest.mark.parametrize("case", IN_LOOPS)
def test_the_loops_of_gpus_give_what_conditionals_do_to_the_bit(case, mapped, seed, monkeypatch):
    """Also where a gradient is not finite; typed by `shard_map`, with parameters and states that are donated."""
    options = {"every": 3} | IN_LOOPS[case]
    grads = random_gradients(seed, 7)
    grads["b"] = grads["b"].at[1, 2, 3].set(jnp.nan)
    found, loops = [], []  # of int4 nothing else is one
    only_if = backend.only_if
    monkeypatch.setattr(backend, "only_if", lambda *args: loops.append(form) or only_if(*args))
    for form in ("cpu", "gpu"):
        for module in (backend, collectives):
            monkeypatch.setattr(module, "platform", lambda mesh=None, form=form: form)
        algorithm, outer = jc.error_feedback(jc.block_scaled("int4")), optax.sgd(0.7, momentum=0.9)
        tx = jc.local_updates(optax.adamw(0.1), outer, algorithm, "data", **options)
        own, state, run = (local_worlds.vmap_step if mapped == "vmap" else mesh_step)(tx, donate_argnums=(0, 1))
        for t in range(7):
            own, state = run(own, state, at(grads, t))
            found.append(jax.tree.map(np.asarray, (own, state)))
    assert set(loops) == {"gpu"}
    assert_same(found[:7], found[7:])


def test_fragments_are_even_and_none_is_empty():
    assert fragments_of([np.zeros(s) for s in (100, 1, 1, 1)], 3) == ((0,), (1,), (2, 3))
    assert fragments_of([np.zeros(s) for s in (1, 1, 100)], 3) == ((0,), (1,), (2,))
    assert fragments_of([np.zeros(5)] * 6, 3) == ((0, 1), (2, 3), (4, 5))
    with pytest.raises(ValueError, match="fragments must be at most the number of leaves, 2; got 3"):
        fragments_of([np.zeros(5)] * 2, 3)


def test_every_fragment_is_merged_once_in_every_round():
    for every, number, delay in [(7, 3, 0), (7, 3, 6), (5, 5, 2), (1, 1, 0)]:
        times = Timetable(every, number, delay)
        for p in range(number):
            steps = [t for t in range(1, 4 * every + 1) if times.merges(p, t)]
            assert np.all(np.diff(steps) == every)
            assert len(steps) >= 3
            assert all(times.takes(p, t - delay) and t > delay for t in steps)
        merges = [t for t in range(delay + 1, 4 * every) for p in range(number) if times.merges(p, t)]
        assert len(set(merges)) == len(merges)  # never two at one step


# ------------------------------------------------------------------------------------------------
# To the bit


def shard_map_steps(tx, params, grads):
    """Points after each of the steps, each worker's own, and the state."""
    own, state, step = mesh_step(tx, params, donate_argnums=(0, 1))
    points = []
    for t in range(jax.tree.leaves(grads)[0].shape[0]):
        own, state = jax.block_until_ready(step(own, state, at(grads, t)))
        points.append(jax.tree.map(np.asarray, own))
    return points, state


ALGORITHMS = {"top_k": jc.error_feedback(jc.flat(jc.top_k(k=4))), "diana": jc.diana(jc.flat(jc.dithering(7)))}


@pytest.mark.parametrize("name", variants(ALGORITHMS, {"top_k"}))
def test_with_one_step_a_round_it_is_the_compressed_mean_to_the_bit(name, seed):
    algorithm, grads = ALGORITHMS[name], random_gradients(seed, 4)
    outer = optax.chain(optax.trace(0.5, nesterov=True), optax.scale(-0.25))  # whose products are exact in any program
    local, state = vmap_steps(jc.local_updates(optax.sgd(1.0), outer, algorithm, "data", every=1), PARAMS, grads)
    plain, _ = vmap_steps(optax.chain(jc.compressed_mean(algorithm, "data"), outer), PARAMS, grads, plain=True)
    assert_same(local, [stacked(points) for points in plain])
    assert_same(state.point, plain[-1])


def test_vmap_and_shard_map_agree_to_the_bit_and_workers_meet_at_the_shared_point(seed):
    inner, outer = optax.sgd(1 / 64), optax.sgd(0.5, momentum=0.5, nesterov=True)  # whose products are exact
    algorithm = jc.error_feedback(jc.top_k(0.2))
    tx = jc.local_updates(inner, outer, algorithm, "data", every=4, fragments=2, delay=1)
    grads = random_gradients(seed, 9)
    meshed, state = shard_map_steps(tx, PARAMS, grads)
    mapped, other = vmap_steps(tx, PARAMS, grads)
    assert_same(meshed, mapped)
    assert_same(state, jax.tree.map(lambda x, like: x.reshape(like.shape), other, state))
    leaf = meshed[7]["c"]  # merged at step 8
    np.testing.assert_array_equal(leaf, np.stack([leaf[0]] * 4))
    assert not np.array_equal(meshed[8]["c"][0], meshed[8]["c"][1])


def test_one_worker_is_the_inner_optimizer(seed):
    """Its difference with itself leads to where it is, up to one rounding."""
    tx = jc.local_updates(optax.adam(0.01), optax.sgd(1.0), FULL, None, every=3)
    point, _, want = one_worker(tx, optax.adam(0.01), at(random_gradients(seed, 7), np.s_[:, 0]))
    assert_close(point, want, rtol=1e-6, atol=1e-7)


def test_updates_reach_their_target(seed):
    rng = np.random.default_rng(seed)
    params = rng.standard_normal(10_000).astype(np.float32)
    near = params * rng.uniform(0.5, 2, 10_000).astype(np.float32)
    np.testing.assert_array_equal(params + jax.jit(towards)(params, near), near)
    far = rng.standard_normal(10_000).astype(np.float32) * 10.0 ** rng.integers(-6, 6, 10_000).astype(np.float32)
    reached = params + jax.jit(towards)(params, far)
    assert np.all(np.abs(reached - far) <= np.spacing(np.maximum(np.abs(params), np.abs(far))))
    assert np.mean(reached == far) > 0.4


def test_a_delay_is_the_same_as_a_snapshot_that_waits(seed):
    """Against a loop that takes the difference at step t - delay and exchanges it at once."""
    every, number, delay, mixing = 4, 2, 2, 0.5
    algorithm, outer = jc.error_feedback(jc.top_k(0.2)), optax.sgd(0.5, momentum=0.5)
    options = {"every": every, "fragments": number, "delay": delay, "mixing": mixing}
    tx = jc.local_updates(optax.sgd(0.125), outer, algorithm, "data", **options)
    grads, times = random_gradients(seed, 11), Timetable(every, number, delay)
    got, _ = vmap_steps(tx, PARAMS, grads)
    root, parts = jax.random.key(0), fragments_of(PARAMS, number)
    means = [jc.compressed_mean(algorithm, "data", seed=jax.random.fold_in(root, p)) for p in range(number)]
    made = [vmap_step(mean, cut(PARAMS, each)) for mean, each in zip(means, parts, strict=True)]
    states, outers = [state for state, _ in made], [outer.init(cut(PARAMS, each)) for each in parts]
    point, own, sent = PARAMS, jax.tree.map(lambda p: np.stack([p] * 4), PARAMS), {}
    rows = lambda tree: jax.tree.map(lambda x: x[None], tree)
    for t in range(1, 12):
        before = own
        own = jax.tree.map(lambda p, g: p - np.float32(0.125) * np.asarray(g[t - 1]), own, grads)  # noqa: B023
        for p, each in enumerate(parts):
            if times.takes(p, t):
                difference = jax.tree.map(lambda a, b: a - b, rows(cut(point, each)), cut(own, each))
                sent[p], states[p] = made[p][1](states[p], difference)
            if times.merges(p, t) and p in sent:
                step, outers[p] = outer.update(sent.pop(p), outers[p])
                new = jax.tree.leaves(optax.apply_updates(cut(point, each), step))
                for name, x in zip([list(PARAMS)[i] for i in each], new, strict=True):
                    point = {**point, name: np.asarray(x)}
                    target = np.float32(mixing) * own[name] + np.float32(1 - mixing) * np.asarray(x)[None]
                    own = {**own, name: before[name] + np.asarray(towards(before[name], target))}
        assert_same(got[t - 1], own)


# ------------------------------------------------------------------------------------------------
# What is sent, and when


def test_the_exchange_stands_in_a_branch_and_steps_without_one_send_nothing(seed):
    """The ledger of the compiled step: every collective stands in an arm of a conditional, with the bytes of `info`."""
    tx = jc.local_updates(
        optax.sgd(0.125), optax.sgd(1.0), jc.error_feedback(jc.flat(jc.top_k(k=4))), "data", every=3, fragments=2
    )
    own, state, step = mesh_step(tx)
    grads = lambda own: jax.tree.map(lambda p: 0.1 * p, own)
    rows = [row for row in jc.ledger(step, own, state, grads(own)).rows if row.sent_bytes]
    assert rows
    assert all(row.branch for row in rows)
    assert sum(row.sent_bytes for row in rows) == 2 * 3 * 4 * (4 + 4)  # two fragments, three others, four pairs
    sent = []
    for _ in range(6):
        own, state = jax.block_until_ready(step(own, state, grads(own)))
        sent.append(float(jc.info(state).sent_bytes))
    assert sent == [96.0, 0, 96, 96, 0, 96]
    assert [int(mean.shared.count) for mean in state.means] == [2, 2]


def test_schedules_count_their_own_steps_and_gradients_may_be_accumulated(seed):
    """The inner schedule counts steps, the outer one rounds; MultiSteps inside steps in one of two."""
    inner = optax.MultiSteps(optax.sgd(lambda count: 0.5 / (1 + count)), 2)
    tx = jc.local_updates(inner, optax.sgd(lambda count: 1.0 / (1 + count)), FULL, "data", every=4)
    grads = jax.tree.map(lambda p: jnp.ones((8, 4, *p.shape), p.dtype), PARAMS)
    points, state = vmap_steps(tx, PARAMS, grads)
    assert points[0]["b"][0, 0] == 1.0
    assert points[1]["b"][0, 0] == 0.5
    assert points[3]["b"][0, 0] == 0.25  # 1 - 0.5 - 0.25, and the outer rate is 1
    assert points[5]["b"][0, 0] == np.float32(0.25) - np.float32(0.5 / 3)
    moved = 0.5 / 3 + 0.5 / 4
    np.testing.assert_allclose(points[7]["b"][0, 0], 0.25 - moved / 2, rtol=1e-6)  # an outer rate of one half
    assert int(state.means[0].shared.count) == 2


@pytest.mark.slow
def test_multi_steps_around_it_and_other_chains(seed):
    tx = optax.chain(optax.clip(0.5), jc.local_updates(optax.sgd(0.5), optax.sgd(1.0), FULL, "data", every=2))
    wrapped = optax.MultiSteps(tx, 2)
    grads = jax.tree.map(lambda p: jnp.ones((8, 4, *p.shape), p.dtype), PARAMS)
    points, _ = vmap_steps(wrapped, PARAMS, grads)
    np.testing.assert_array_equal([p["b"][0, 0] for p in points], [1, 0.75, 0.75, 0.5, 0.5, 0.25, 0.25, 0])
    meshed, _ = shard_map_steps(wrapped, PARAMS, grads)
    assert_same(points, meshed)


def test_what_is_not_finite_does_not_reach_the_others(seed):
    grads = random_gradients(seed, 4)
    grads = {**grads, "b": grads["b"].at[1, 2, 3].set(jnp.nan).at[1, 1, 0].set(jnp.inf)}
    algorithm = jc.error_feedback(jc.flat(jc.top_k(0.5)))
    tx = jc.local_updates(optax.sgd(0.1), optax.sgd(0.7), algorithm, "data", every=4)
    points, state = vmap_steps(tx, PARAMS, grads)
    for i, leaf in ((2, 3), (1, 0)):
        assert not np.isfinite(points[-1]["b"][i, leaf])
    others = jax.tree.map(lambda p: p[np.array([0, 3])], points[-1])
    assert all(np.isfinite(flat(tree)).all() for tree in (others, state.point, state.means[0].local.algorithm))


@pytest.mark.parametrize("dtype", variants(["bfloat16", "float16"], {"bfloat16"}))
def test_the_shared_point_keeps_what_narrow_parameters_cannot(dtype):
    """Moves of the shared point below the last place of the parameters add up."""
    params = {"w": jnp.ones(4, dtype)}
    tx = jc.local_updates(optax.sgd(1.0), optax.sgd(0.25), FULL, "data", every=2)
    size = float(jnp.finfo(dtype).eps)
    grads = {"w": jnp.full((16, 4, 4), size / 2, dtype)}
    points, state = vmap_steps(tx, params, grads)
    assert state.point["w"].dtype == jnp.float32
    assert points[-1]["w"].dtype == dtype
    np.testing.assert_allclose(state.point["w"], 1 - 8 * size / 4, rtol=1e-6)
    assert float(points[-1]["w"][0, 0]) < 1


# ------------------------------------------------------------------------------------------------
# Other workers, other meshes


def test_redistribute_keeps_the_sums_of_memories_and_of_differences_on_their_way(seed):
    algorithm = jc.error_feedback(jc.flat(jc.top_k(k=4)))
    tx = jc.local_updates(optax.adam(0.01), optax.sgd(0.7, 0.9), algorithm, "data", every=4, delay=2, mixing=0.5)
    _points, old = vmap_steps(tx, PARAMS, random_gradients(seed, 7))
    for workers in (2, 5, 4):
        new, _ = jc.init_state(tx, PARAMS, workers, "data")
        moved = jc.redistribute(old, new)
        pairs = [(old.own.local.pending, moved.own.local.pending)]
        pairs += [(old.means[0].local.algorithm.memory, moved.means[0].local.algorithm.memory)]
        for before, after in pairs:
            before, after = (jax.tree.leaves(jax.tree.map(fsum, tree)) for tree in (before, after))
            assert before == after
            assert any(before)
        assert_same((old.point, old.outer, old.count), (moved.point, moved.outer, moved.count))
        mu, other = (state.own.local.inner[0].mu["a"] for state in (old, moved))
        np.testing.assert_array_equal(other[workers - 1], mu[(workers - 1) % 4])
    assert any(np.any(x) for x in jax.tree.leaves(old.own.local.pending))
    other = jc.local_updates(optax.adam(0.01), optax.sgd(0.7, 0.9), algorithm, "data", every=4)
    with pytest.raises(ValueError, match=r"redistribute: .*different optimizers"):
        jc.redistribute(old, jc.init_state(other, PARAMS, 4, "data")[0])


LEVELS = {"ici": jc.direct(jc.cast("bfloat16")), "dcn": jc.error_feedback(jc.top_k(0.2))}


def test_a_hierarchy_exchanges_gradients_inside_a_group_and_differences_across(seed):
    """Two groups of two devices: the same as two workers with the mean gradients of their groups."""
    grads = jax.tree.map(lambda g: jnp.round(g * 4) / 4, random_gradients(seed, 6))
    tx = jc.local_updates(optax.sgd(0.125), optax.sgd(0.5, momentum=0.5), axis_name=LEVELS, every=3)
    mesh = mesh_of((2, 2), ("dcn", "ici"))
    own, state, step = mesh_step(tx, PARAMS, mesh, LEVELS, P("dcn"), P(("dcn", "ici")))
    root = jax.random.fold_in(jax.random.key(0), 1)
    outer = jc.local_updates(optax.sgd(0.125), optax.sgd(0.5, momentum=0.5), LEVELS["dcn"], "dcn", every=3, seed=root)
    of_pairs = jax.tree.map(lambda g: g.reshape(len(g), 2, 2, *g.shape[2:]).mean(2), grads)
    for t, pair in enumerate(vmap_steps(outer, PARAMS, of_pairs, axis="dcn")[0]):
        own, state = jax.block_until_ready(step(own, state, at(grads, t)))
        assert_close(own, pair, rtol=1e-6)
    assert jc.info(state).sent_bytes > 0


CUT = {"a": P(None, "model"), "b": P(), "c": P("model")}


def test_sharded_parameters_exchange_their_shards(seed):
    """Each device steps and exchanges its own shard; the same as two workers with each half alone."""
    grads, outer = at(random_gradients(seed, 5), np.s_[:, :2]), optax.sgd(0.5, momentum=0.5)
    tx = jc.local_updates(optax.adam(0.01), outer, FULL, "data", every=2, delay=1, sharded=CUT)
    rows = {name: P("data", *spec) for name, spec in CUT.items()}
    own, state, step = mesh_step(tx, PARAMS, mesh_of((2, 2)), rows=rows, specs=CUT)
    pairs, plain = vmap_steps(jc.local_updates(optax.adam(0.01), outer, FULL, "data", every=2, delay=1), PARAMS, grads)
    for t, pair in enumerate(pairs):
        own, state = jax.block_until_ready(step(own, state, at(grads, t)))
        assert_close(own, pair)
    assert_close(state.point, plain.point)
    # Four shards in place of two, on the same devices: differences on their way are cut anew.
    new, _ = jc.init_state(tx, PARAMS, mesh_of((1, 4)), "data", CUT)
    moved = jc.redistribute(state, new)
    assert_same(state.point, moved.point)
    pending = lambda state: np.asarray(state.own.local.pending[0]["c"])
    np.testing.assert_array_equal(pending(moved)[0], pending(state).sum(0))


def updates(**options):
    given = {"algorithm": FULL, "axis_name": "data", "every": 2, **options}
    return jc.local_updates(optax.sgd(1.0), optax.sgd(1.0), **given)


def on_equal_parameters():
    tx, w = updates(), jnp.zeros(3)
    state, specs = jc.init_state(tx, w, mesh_of(), "data")
    step = lambda state, w: tx.update(jc.per_worker(w, "data"), state, w)
    jax.shard_map(step, mesh=mesh_of(), in_specs=(specs, P()), out_specs=(P(), specs))(state, w)


W, ALONE = jnp.zeros(3), updates(axis_name=None)
BAD = [
    (lambda: updates(every=0), r"every must be an integer of at least 1; got 0"),
    (lambda: updates(fragments=3), r"fragments must be an integer in 1 \.\. every = 2; got 3"),
    (lambda: updates(delay=2), r"delay must be an integer in 0 \.\. every - 1 = 1; got 2"),
    (lambda: updates(mixing=1), r"mixing must be in \[0, 1\); got 1"),
    (lambda: updates(algorithm=jc.top_k(0.1)), "local_updates needs an algorithm; got the compressor"),
    (lambda: ALONE.update(W, ALONE.init(W)), "update needs params"),
    (lambda: ALONE.update(W, (), W), "expected a LocalUpdatesState"),
    (on_equal_parameters, "typed as equal on all workers of axis 'data'"),
]


@pytest.mark.parametrize(("call", "said"), BAD, ids=[said for _, said in BAD])
def test_errors_name_what_is_wrong(call, said):
    with pytest.raises((TypeError, ValueError), match=said):
        call()


@pytest.mark.parametrize("dtype", variants(["bfloat16", "float16"], {"bfloat16"}))
def test_narrow_parameters_follow_the_shared_point_at_every_step(dtype):
    """With one step a round too, whose updates are below the last place of a parameter."""
    tx = jc.local_updates(optax.sgd(1e-3), optax.sgd(1.0), FULL, "data", every=1)
    params = jnp.ones(4, dtype)
    points, state = vmap_steps(tx, params, jnp.ones((200, N, 4), dtype))
    np.testing.assert_allclose(state.point, 0.8, rtol=1e-3)
    np.testing.assert_array_equal(points[-1], np.stack([np.asarray(state.point.astype(dtype))] * N))


def test_outer_updates_of_another_type_with_one_step_a_round():
    with jax.enable_x64(True):
        tx = jc.local_updates(optax.sgd(1e-3), optax.sgd(np.float64(1.0)), FULL, "data", every=1)
        points, _ = vmap_steps(tx, jnp.ones(4, jnp.float32), jnp.ones((3, N, 4), jnp.float32))
    assert points[-1].dtype == np.float32
    np.testing.assert_allclose(points[-1], 0.997, rtol=1e-6)
