"""Another number of workers along one axis: memories keep their exact sum. See also test_workers_on_meshes.py."""

import dataclasses
import re
import warnings
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from variants import variants
from worlds import AXIS, PARAMS, N, assert_same, at, fsum, gradients, mesh_of, run_vmap, vmap_step

import jaxcomp as jc
from jaxcomp.base import State, Sum
from jaxcomp.exchange.spread import spread

pytestmark = pytest.mark.usefixtures("standard_promotion")

ALGORITHMS = {
    "error_feedback": jc.error_feedback(jc.top_k(0.05)),
    "sidco": jc.error_feedback(jc.sidco(0.05, adapt="climb", stages=2)),
    "diana": jc.diana(jc.dithering(7)),
    "momentum": jc.contrib.momentum_correction(jc.top_k(0.05)),
    "direct": jc.direct(jc.natural()),
}


def of_leaves(mean, field="memory"):
    """What the workers remember, leaf by leaf."""
    return jc.state.by_leaf(mean, getattr(mean.local.algorithm, field))


def with_local(mean, **fields):
    return dataclasses.replace(mean, local=mean.local._replace(algorithm=mean.local.algorithm._replace(**fields)))


def assert_same_sums(mean, before, field="memory"):
    """Of all leaves, and not because they are zero."""
    now, then = of_leaves(mean, field), of_leaves(before, field)
    for name in now:
        assert fsum(now[name]) == fsum(then[name]), name
    assert any(np.abs(x).max(initial=0) > 0 for x in now.values())


# ------------------------------------------------------------------------------------------------
# Sums of floats


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


LOST = r"sum over (\d+) workers of (\d+) entries of a memory cannot be held by (\d+); at most (\S+) of the largest"


def lost_of(rows, workers):
    """What was moved, the entries whose exact sum is another one (with how much of the largest is lost), what was said:
    (entries, share), or None for nothing."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        moved = spread(rows, workers)
    off = {}
    for i, (now, then) in enumerate(zip(fsum(moved), fsum(rows), strict=True)):
        if now != then:
            off[i] = abs(now - then) / max(abs(Fraction(float(x))) for x in rows[:, i])
    if not caught:
        return moved, off, None
    (warning,) = caught
    n, entries, held_by, share = re.search(LOST, str(warning.message)).groups()
    assert (int(n), int(held_by)) == (len(rows), workers)
    return moved, off, (int(entries), float(share))


@pytest.mark.parametrize("old", [3, 5, 9])
@pytest.mark.parametrize("new", [2, 3, 4])
def test_what_is_too_far_apart_to_be_kept_is_said(old, new, seed):
    """Magnitudes over 40 decades: entry by entry the sum is exact, or a warning counts it."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((old, 400)) * 10.0 ** rng.uniform(-22, 18, (old, 400))
    rows[:, :100] = rng.standard_normal((old, 100))  # these can be held
    moved, off, said = lost_of(rows.astype(np.float32), new)
    assert np.all(np.isfinite(moved))
    assert all(i >= 100 for i in off) or new < 4
    if off:
        assert said is not None
        entries, share = said
        assert len(off) <= entries <= 300 + 100 * (new < 4)
        assert max(off.values()) <= 1.1 * share  # it is said with two digits


@pytest.mark.parametrize(
    "column",
    [(1e20, 1.0, 1e-20, 1e-37), (1e18, 1e-17, -1e18, 3e-30, 1e-38), (1.0, 2.0**-60, 2.0**-100, 2.0**-140, -1.0)],
)
def test_nothing_is_lost_in_silence(column):
    """Not even what rounding leaves over of what rounding leaves over."""
    for new in (2, 3, 4):
        if new < len(column):
            _, off, said = lost_of(np.array(column, np.float32)[:, None], new)
            assert said is not None if off else True
            if off:
                assert off[0] <= 1.1 * said[1]


def test_too_much_for_the_workers_that_are_left_is_said():
    with pytest.warns(UserWarning, match="sum over 3 workers of 1 entries of a memory cannot be held by 2; at most 7"):
        moved = spread(np.array([[3e38, 1.0], [3e38, 2.0], [3e38, 3.0]], np.float32), 2)
    np.testing.assert_array_equal(moved[:, 0], np.finfo(np.float32).max)
    assert moved[:, 1].sum() == 6
    tx = jc.compressed_mean(ALGORITHMS["error_feedback"], AXIS)
    old, new = (jc.init_state(tx, PARAMS, n, AXIS)[0] for n in (3, 2))
    huge = jax.tree.map(lambda x: jnp.full_like(x, 3e38), old.local.algorithm.memory)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        moved = jc.redistribute(with_local(old, memory=huge), new).local.algorithm.memory
    assert [re.search(LOST, str(each.message))[2] for each in caught] == ["5", "1200"]
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(moved))


@pytest.mark.parametrize("large", [np.float32, np.float64])
def test_the_largest_numbers_become_no_infinity(large):
    most = np.finfo(large).max
    for workers in (1, 2, 3):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            moved = spread(np.full((4, 2), most), workers)
        np.testing.assert_array_equal(moved, np.full((workers, 2), most))


# ------------------------------------------------------------------------------------------------
# States


@pytest.mark.sampled
@pytest.mark.parametrize("name", variants(ALGORITHMS, {"diana", "sidco"}))
@pytest.mark.parametrize("workers", variants([2, 6], {6}))
def test_training_goes_on_with_other_workers(name, workers, seed):
    tx = optax.chain(jc.compressed_mean(ALGORITHMS[name], AXIS), optax.adam(1e-2))
    _, old = run_vmap(tx, PARAMS, gradients(seed))
    new, step = vmap_step(tx, PARAMS, workers)
    state = jc.redistribute(old, new)
    if name in ("error_feedback", "sidco", "momentum"):
        assert_same_sums(state[0], old[0], "velocity" if name == "momentum" else "memory")
    if name == "diana":
        mean = jc.state.by_leaf(old[0], old[0].shared.algorithm.shift)
        for key, shift in of_leaves(state[0], "shift").items():
            np.testing.assert_array_equal(shift, np.broadcast_to(mean[key], shift.shape))
            assert np.abs(mean[key]).max() > 0
    np.testing.assert_array_equal(state[1][0].mu["w"], old[1][0].mu["w"])
    assert state[0].shared.count == 3
    updates, state = step(state, at(gradients(seed, workers=workers)))
    assert all(np.all(np.isfinite(u)) for u in jax.tree.leaves(updates))
    assert state[0].shared.count == 4


@pytest.mark.sampled
@pytest.mark.parametrize("workers", [2, 6])
@pytest.mark.parametrize("params", [{"w": jnp.zeros((40, 30))}, jnp.zeros(64)], ids=["tree", "array"])
def test_memories_of_power_sgd_keep_their_sum(workers, params, seed):
    rng = np.random.default_rng(seed)
    grads = jax.tree.map(lambda p: jnp.asarray(rng.standard_normal((2, N, *p.shape)), p.dtype), params)
    tx = jc.compressed_mean(jc.power_sgd({0: 1, 1: 2}), AXIS)
    _, old = run_vmap(tx, params, grads)
    state = jc.redistribute(old, jc.init_state(tx, params, workers, AXIS)[0])
    for a, b in zip(*(jax.tree.leaves(x.local.algorithm.memory) for x in (state, old)), strict=True):
        assert fsum(a) == fsum(b)
    assert_same(state.shared.algorithm.q, old.shared.algorithm.q)
    assert state.shared.algorithm.rounds == 2


def test_what_is_to_be_delivered_can_stay_what_it_was(seed):
    tx = jc.compressed_mean(jc.error_feedback(jc.top_k(0.05)), AXIS)
    _, old = run_vmap(tx, PARAMS, gradients(seed))
    new, _ = jc.init_state(tx, PARAMS, 2, AXIS)
    moved = of_leaves(jc.redistribute(old, new, keep="mean"))["w"]
    np.testing.assert_allclose(np.mean(moved, 0), np.mean(of_leaves(old)["w"], 0), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("workers", variants([2, 3, 8], ()))
def test_memories_of_second_shots_are_cut_anew(workers, seed):
    tx = jc.compressed_mean(jc.error_feedback(jc.cast("float8_e4m3fn")), AXIS, via="two_shot")
    _, old = run_vmap(tx, PARAMS, gradients(seed))
    new, step = vmap_step(tx, PARAMS, workers)
    state = jc.redistribute(old, new)
    line = lambda state: np.asarray(state.local.route.memory).reshape(-1)[:1205]
    np.testing.assert_array_equal(line(state), line(old))
    step(state, at(gradients(seed, workers=workers)))


def test_stages_of_second_shots_are_taken_over(seed):
    """Adaptive state of a compressor has a row for each chunk: other workers have other chunks."""
    tx = jc.compressed_mean(jc.error_feedback(jc.sidco(0.05, adapt="climb", stages=2)), AXIS, via="two_shot")
    _, old = run_vmap(tx, PARAMS, gradients(seed))
    for workers in (2, 6):
        new, _ = jc.init_state(tx, PARAMS, workers, AXIS)
        state = jc.redistribute(old, new)
        stages = [x for x in jax.tree.leaves(state.local.route.compressor) if x.dtype == jnp.int32]
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


def test_it_lands_on_the_devices_of_the_new_mesh():
    tx = optax.chain(jc.compressed_mean(jc.error_feedback(jc.top_k(0.05)), AXIS), optax.adam(1e-2))
    old, _ = jc.init_state(tx, PARAMS, mesh_of(4), AXIS)
    new, specs = jc.init_state(tx, PARAMS, mesh_of(2), AXIS)
    state = jc.redistribute(jax.tree.map(np.asarray, old), new)
    memory, place = (x[0].local.algorithm.memory[-1] for x in (state, new))
    assert memory.sharding == place.sharding
    assert memory.shape == (2, 1200)
    assert of_leaves(state[0])["w"].shape == (2, 40, 30)
    assert jax.tree.structure(state) == jax.tree.structure(specs, is_leaf=lambda s: isinstance(s, P))


def test_states_that_do_not_fit_are_refused():
    tx, other = (jc.compressed_mean(a, AXIS) for a in (ALGORITHMS["error_feedback"], ALGORITHMS["diana"]))
    one, two = (jc.init_state(t, PARAMS, 2, AXIS)[0] for t in (tx, other))
    with pytest.raises(ValueError, match="of different optimizers or parameters"):
        jc.redistribute(one, two)
    with pytest.raises(ValueError, match='keep must be "sum" or "mean"'):
        jc.redistribute(one, one, keep="all")
    for shape in ((40, 31), (30, 40)):
        other, _ = jc.init_state(tx, PARAMS | {"w": jnp.zeros(shape)}, 2, AXIS)
        said = rf"parameters have other shapes.*\(40, 30\).*before.*\({shape[0]}, {shape[1]}\).*now"
        with pytest.raises(ValueError, match=said):
            jc.redistribute(one, other)


def test_as_many_workers_go_on_as_they_were(seed):
    """All but the measurements, shifts of each worker among it."""
    tx = optax.chain(jc.compressed_mean(jc.diana(jc.dithering(7)), AXIS), optax.adam(1e-2))
    _, old = run_vmap(tx, PARAMS, gradients(seed))
    new, _ = jc.init_state(tx, PARAMS, N, AXIS)
    state = jc.redistribute(old, new)

    def unmeasured(state):
        mean = state[0]
        return (mean.local._replace(counts=None), mean.shared._replace(workers=None), state[1:])

    assert_same(unmeasured(state), unmeasured(old))


def test_memories_that_grow_with_the_workers_saturate():
    tx = jc.compressed_mean(ALGORITHMS["error_feedback"], AXIS)
    old, new = (jc.init_state(tx, PARAMS, n, AXIS)[0] for n in (1, 2))
    huge = jax.tree.map(lambda x: jnp.full_like(x, 3e38), old.local.algorithm.memory)
    memory = of_leaves(jc.redistribute(with_local(old, memory=huge), new, keep="mean"))["w"]
    np.testing.assert_array_equal(np.max(memory, 0), np.finfo(np.float32).max)


# ------------------------------------------------------------------------------------------------
# What becomes of a part of a state stands in the roles of the algorithm


class Half(NamedTuple):
    memory: Any
    seen: Any
    average: Any


def half(roles):
    """Sends one half of everything and remembers the other."""

    def init(here, like):
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), like)
        seen = tuple(State() if group.small else State(jnp.zeros((), jnp.int32)) for group in here.groups)
        return Half(zeros, seen, zeros)

    def update(here, grads, state):
        rest = jax.tree.map(lambda g, e: (g + e) / 2, grads, state.memory)
        total = yield Sum(rest)
        direction = jax.tree.map(lambda total: total / here.size, total)
        return direction, Half(rest, jax.tree.map(lambda n: n + 1, state.seen), direction)

    return jc.Algorithm(init, update, roles)


def assert_refused(roles, message):
    """A state of these roles, for other workers."""
    tx = jc.compressed_mean(half(roles), AXIS)
    with pytest.raises(ValueError, match=message):
        jc.redistribute(*(jc.init_state(tx, PARAMS, n, AXIS)[0] for n in (N, 2)))


DECLARED = {"memory": "memory", "average": "momentum", "seen": "compressor"}


def test_an_algorithm_of_ones_own_is_handed_on_by_its_roles(seed):
    tx = jc.compressed_mean(half(DECLARED), AXIS)
    _, old = run_vmap(tx, PARAMS, gradients(seed))
    state = jc.redistribute(old, jc.init_state(tx, PARAMS, 2, AXIS)[0])
    assert_same_sums(state, old)
    for seen in jax.tree.leaves(state.local.algorithm.seen):
        np.testing.assert_array_equal(np.ravel(seen), [3, 3])
    for a, b in zip(*(jax.tree.leaves(x.shared.algorithm) for x in (state, old)), strict=True):
        np.testing.assert_array_equal(a, b)
        assert np.abs(a).max() > 0


@pytest.mark.parametrize("name", DECLARED)
def test_a_field_without_a_role_is_refused(name):
    assert_refused({key: role for key, role in DECLARED.items() if key != name}, rf"Half\.{name} has no role")


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seen": "Memory"}, "seen has the unknown role 'Memory'"),
        ({"seen": "memory"}, "seen has the role 'memory', and is not laid out like the gradients"),
        ({"average": "shift"}, "average has the role 'shift', and is no `State` with a local and a shared side"),
    ],
)
def test_a_role_that_does_not_fit_is_refused(change, message):
    assert_refused(DECLARED | change, message)


def test_a_state_that_is_no_named_tuple_is_refused():
    init = lambda here, like: {"memory": jnp.zeros(3)}
    algorithm = jc.Algorithm(init, lambda here, grads, state: (grads, state), {"memory": "memory"})
    with pytest.raises(ValueError, match="the state of an algorithm must be a NamedTuple; got dict"):
        jc.init_state(jc.compressed_mean(algorithm, AXIS), jnp.zeros(3), 2, AXIS)


# ------------------------------------------------------------------------------------------------
# States of rounds


def run_rounds(run, workers, seed, steps=3):
    x = jax.tree.map(lambda p: jnp.ones(p.shape, p.dtype), PARAMS)
    state, axes = jc.init_state(run, x, workers, AXIS)
    targets = at(gradients(seed, rounds=1, workers=workers))
    step = lambda state, target: run.step(state, lambda x: jax.tree.map(jnp.subtract, x, target))[0]
    step = jax.jit(jax.vmap(step, in_axes=(axes, 0), out_axes=axes, axis_name=AXIS))
    for _ in range(steps):
        state = jax.block_until_ready(step(state, targets))
    return state


def test_rounds_go_on_with_other_workers(seed):
    run = jc.methods.rounds(jc.methods.descend(jc.error_feedback(jc.top_k(0.05)), 0.1), AXIS)
    old, new = run_rounds(run, 4, seed), run_rounds(run, 2, seed, steps=0)
    state = jc.redistribute(old, new)
    memory = lambda mean: jc.state.by_leaf(mean, mean.local.algorithm.algorithm.memory)["w"]
    assert memory(state).shape == memory(new).shape
    assert fsum(memory(state)) == fsum(memory(old))
    assert np.abs(memory(state)).max() > 0
    for a, b in zip(*(jax.tree.leaves(run.point(x)) for x in (state, old)), strict=True):
        np.testing.assert_array_equal(a, b)
        assert np.any(np.asarray(a) != 1)
    assert state.shared.count == 3
    axes = jc.state.state_axes(state)
    grads = at(gradients(seed, rounds=1, workers=2))
    step = jax.vmap(lambda s, g: run.step(s, lambda x: g)[0], in_axes=(axes, 0), out_axes=axes, axis_name=AXIS)
    assert jax.jit(step)(state, grads).shared.count == 4  # they go on


def test_coins_and_sequences_of_adiana_go_on(seed):
    steps = jc.theory.adiana(smoothness=1.0, mu=0.1, workers=4, omega=1.0, variance=1.0)
    run = jc.methods.rounds(jc.methods.adiana(jc.dithering(7), steps), AXIS)
    old, new = run_rounds(run, 4, seed), run_rounds(run, 2, seed, steps=0)
    state = jc.redistribute(old, new)
    assert_same(state.shared.algorithm, old.shared.algorithm)
    shift = jc.state.by_leaf(old, old.shared.algorithm.shift)["w"]
    assert np.abs(shift).max() > 0
    own = of_leaves(state, "shift")["w"]
    assert len(own) == 2
    np.testing.assert_array_equal(own, np.broadcast_to(shift, own.shape))


def test_the_last_gradients_of_marina_are_of_no_use_to_others(seed):
    run = jc.methods.rounds(jc.methods.marina(jc.dithering(7), 0.1, 0.5), AXIS)
    old, new = run_rounds(run, 4, seed, steps=1), run_rounds(run, 2, seed, steps=0)
    with pytest.raises(ValueError, match="gradient is the last gradient of each worker, from which no other worker"):
        jc.redistribute(old, new)


# ------------------------------------------------------------------------------------------------
# States that lost what the others remembered, or are of something else


def step_with(tx, state, grads, check_vma):
    step = lambda s, g: tx.update(at(g), s)
    step = jax.shard_map(step, mesh=mesh_of(), in_specs=(P(), P(AXIS)), out_specs=(P(), P()), check_vma=check_vma)
    return jax.block_until_ready(jax.jit(step)(state, grads))


def test_one_row_of_memory_for_all_workers_is_refused(seed):
    tx = optax.chain(jc.compressed_mean(ALGORITHMS["error_feedback"], AXIS), optax.sgd(0.1))
    grads = at(gradients(seed, rounds=1))
    state = tx.init(PARAMS)
    new, _ = jc.init_state(tx, PARAMS, 2, AXIS)
    jc.info(state)  # nothing is lost yet
    jc.redistribute(state, new)
    with pytest.raises(ValueError, match=r"memory would be lost.*jc\.init_state"):
        step_with(tx, state, grads, check_vma=True)
    _, state = step_with(tx, state, grads, check_vma=False)
    for use in (lambda: jc.info(state), lambda: jc.redistribute(state, new)):
        with pytest.raises(ValueError, match=r"one row of memory for 4 workers.*jc\.init_state"):
            use()


def test_states_with_all_rows_are_not_refused(seed):
    _, state = run_vmap(jc.compressed_mean(ALGORITHMS["error_feedback"], AXIS), PARAMS, gradients(seed, rounds=1))
    assert jc.info(state).lane_bytes > 0
    alone = jc.compressed_mean(ALGORITHMS["error_feedback"], None)
    _, state = jax.jit(alone.update)(PARAMS, jax.jit(alone.init)(PARAMS))
    assert jc.info(state).lane_bytes > 0


@pytest.mark.parametrize("shape", [(50, 40), (2000,), (40, 51)])
@pytest.mark.parametrize("tree", [True, False])
def test_the_state_of_another_shape_is_refused(shape, tree):
    """Its vectors have as many entries, in another order."""
    wrap = lambda x: {"w": x} if tree else x
    tx = jc.compressed_mean(ALGORITHMS["error_feedback"], None)
    state = tx.init(wrap(jnp.zeros((40, 50))))
    where = r"gradients\['w'\]" if tree else "gradients"
    with pytest.raises(ValueError, match=rf"{where} have shape {re.escape(str(shape))}.*made for \(40, 50\)"):
        tx.update(wrap(jnp.zeros(shape)), state)


def test_specs_of_a_state_without_a_mean_are_refused():
    """P() everywhere would be right for it; yet whoever asks thinks that memories are in there."""
    adam = optax.adam(1e-3)
    with pytest.raises(ValueError, match="state_specs: there is no compressed_mean in this state"):
        jc.state_specs(adam.init(PARAMS), AXIS)
    with pytest.raises(ValueError, match="there is no compressed_mean in this state"):
        jc.state_specs(adam.init(PARAMS), AXIS, params=PARAMS, specs=jax.tree.map(lambda _: P(), PARAMS))
    for mesh in (mesh_of(2), 2):
        with pytest.raises(ValueError, match="there is no compressed_mean in this state"):
            jc.init_state(adam, PARAMS, mesh, AXIS)
    with pytest.raises(ValueError, match="state_axes: there is no compressed_mean in this state"):
        jc.state.state_axes(adam.init(PARAMS))


def test_a_memory_by_leaf_keeps_its_dtype():
    """In f32 it was rounded to the gradients' 16 bits, and to the largest number of f16."""
    tx = jc.compressed_mean(jc.error_feedback(jc.top_k(k=1)), None)
    params = {"w": jnp.zeros((40, 30), jnp.float16), "b": jnp.zeros(3, jnp.float16)}
    state = tx.init(params)
    memory = tuple(jnp.full_like(x, 160_000.0) for x in state.local.algorithm.memory)
    found = jc.state.by_leaf(state, memory)
    assert {x.dtype for x in jax.tree.leaves(found)} == {jnp.dtype("float32")}
    np.testing.assert_array_equal(found["w"], 160_000)
