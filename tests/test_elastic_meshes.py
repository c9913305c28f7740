"""Another number of workers, in hierarchies and for sharded parameters: memories keep their exact sum."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from variants import variants
from worlds import AXIS, PARAMS, fsum, gradients, mesh_of

import jaxcomp as jc
from jaxcomp.base import State
from jaxcomp.exchange import elastic

pytestmark = pytest.mark.usefixtures("standard_promotion")

TOP = jc.error_feedback(jc.top_k(0.05))
LEVELS = {"ici": TOP, "dcn": jc.error_feedback(jc.sidco(0.05, adapt="climb", stages=2))}
WHOLE = {"b": P(), "w": P()}
MODEL = {"b": P(), "w": P(None, "model")}  # b is whole on every device
DEEP = ("dcn", "ici", "model")


def mesh_like(**sizes):
    count = int(np.prod(list(sizes.values())))
    kinds = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds, devices=jax.devices()[:count])


def made(tx, mesh, axis, specs=None, seed=None):
    """A new state; with a seed, floats of everything that is local are random."""
    state, where = jc.init_state(tx, PARAMS, mesh, axis, specs)
    if seed is None:
        return state, where
    rng = np.random.default_rng(seed)

    def filled(x, spec):
        local = any(spec) and jnp.issubdtype(x.dtype, jnp.floating)
        return jax.device_put(rng.standard_normal(x.shape).astype(x.dtype), x.sharding) if local else x

    return jax.tree.map(filled, state, where), where


def pending(state, specs):
    """{parameter: exact sum over the workers of what they remember of it}, from what lies on which device."""
    is_memory = lambda node: hasattr(node, "memory")
    memories = [node.memory for node in jax.tree.leaves(state, is_leaf=is_memory) if is_memory(node)]
    rows = {name: [] for name in PARAMS}
    for memory in memories:
        # Means of sharded parameters have a memory for each group of leaves: those that are whole, then the others.
        named = memory if isinstance(memory, dict) else {"b" if memory[0].ndim == 2 else "w": memory[0]}
        for name, x in named.items():
            shape = PARAMS[name].shape
            places = NamedSharding(x.sharding.mesh, specs[name]).devices_indices_map(shape)
            for shard in x.addressable_shards:
                if shard.replica_id == 0:
                    rows[name].append(np.zeros(shape, np.float32))
                    rows[name][-1][places[shard.device]] = shard.data[0]
    return {name: fsum(each) for name, each in rows.items()}


def one_more_step(tx, mesh, axis, state, where, specs, seed):
    workers = [name for name in mesh.axis_names if name != "model"]
    grads = jax.tree.map(lambda g: g[0], gradients(seed, 1, int(np.prod([mesh.shape[name] for name in workers]))))
    across = jax.tree.map(lambda spec: P(tuple(workers), *spec), specs)
    step = lambda s, g: tx.update(jax.tree.map(lambda x: x[0], g), s)
    step = jax.shard_map(step, mesh=mesh, in_specs=(where, across), out_specs=(specs, where))
    return jax.block_until_ready(jax.jit(step)(state, grads))


HIERARCHIES = [
    ((2, 2), (1, 2)),
    ((2, 2), (2, 1)),
    ((2, 2), (4, 1)),
    ((2, 2), (1, 4)),
    ((1, 2), (2, 2)),
    ((4, 1), (2, 2)),
]


@pytest.mark.parametrize(("old", "new"), HIERARCHIES)
def test_levels_of_a_hierarchy_keep_their_sums(old, new, seed):
    tx = jc.compressed_mean(axis_name=LEVELS)
    meshes = [mesh_like(dcn=dcn, ici=ici) for dcn, ici in (old, new)]
    states = [made(tx, mesh, LEVELS, seed=s)[0] for mesh, s in zip(meshes, (seed, None), strict=True)]
    state = jc.redistribute(*states)
    for level, other, size in zip(state, states[0], (new[0] * new[1], new[0]), strict=True):
        if size > 1:
            assert pending(level, WHOLE) == pending(other, WHOLE)
        else:  # one worker has to round
            memory, rows = (np.asarray(x.state.local.algorithm.memory["w"], np.float64) for x in (level, other))
            np.testing.assert_array_equal(memory, rows.sum(0, keepdims=True).astype(np.float32))
    like = lambda tree: jax.tree.map(lambda x: (x.shape, x.sharding), tree)
    assert like(state) == like(states[1])
    assert all(np.all(np.asarray(x.state.shared.count) == 0) for x in state)


def test_what_a_hierarchy_is_to_deliver_can_stay_what_it_was(seed):
    tx = jc.compressed_mean(axis_name=LEVELS)
    old, new = (made(tx, mesh_like(dcn=dcn, ici=2), LEVELS, seed=s)[0] for dcn, s in ((2, seed), (1, None)))
    state = jc.redistribute(old, new, keep="mean")
    for level, other in zip(state, old, strict=True):
        for a, b in zip(*(jax.tree.leaves(x.state.local.algorithm.memory) for x in (level, other)), strict=True):
            np.testing.assert_allclose(np.mean(a, 0), np.mean(b, 0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("old", "new"), [((2, 2), (1, 2)), ((2, 2), (2, 1)), ((1, 2), (2, 2)), ((2, 1), (1, 2))])
def test_shifts_of_a_group_are_those_of_its_workers(old, new, seed):
    levels = {"ici": jc.diana(jc.dithering(7)), "dcn": jc.diana(jc.dithering(7))}
    tx = jc.compressed_mean(axis_name=levels)
    first, second = (mesh_like(dcn=dcn, ici=ici) for dcn, ici in (old, new))
    before, where = made(tx, first, levels)
    _, before = one_more_step(tx, first, levels, before, where, WHOLE, seed)
    after, where = made(tx, second, levels)
    state = jc.redistribute(before, after)
    of = lambda level: (np.asarray(x.algorithm.shift["w"]) for x in (level.state.shared, level.state.local))
    for level, old_level, groups, old_groups, workers, old_workers in (
        (state[0], before[0], new[0], old[0], new[1], old[1]),
        (state[1], before[1], 1, 1, new[0], old[0]),
    ):
        (shared, local), (old_shared, old_local) = of(level), of(old_level)
        cut = lambda x, *lead: x.reshape(*lead, 40, 30)
        taken = np.arange(groups) % old_groups
        want = cut(old_shared, old_groups)[taken]
        assert np.all(np.any(want != 0, axis=(1, 2)))
        np.testing.assert_array_equal(cut(shared, groups), want)
        local = cut(local, groups, workers)
        if workers == old_workers:
            np.testing.assert_array_equal(local, cut(old_local, old_groups, workers)[taken])
            np.testing.assert_allclose(local.mean(1), want, rtol=1e-5, atol=1e-6)
        else:
            np.testing.assert_array_equal(local, np.repeat(want[:, None], workers, axis=1))
    np.testing.assert_array_equal(state[0].state.shared.count, 1)
    if new == (1, 2):
        one_more_step(tx, second, levels, state, where, WHOLE, seed)


SHARDED = [((2, 2), (1, 2)), ((1, 2), (2, 2)), ((2, 2), (4, 1)), ((4, 1), (2, 2)), ((2, 1), (1, 2)), ((2, 2), (2, 1))]


@pytest.mark.parametrize(("old", "new"), SHARDED)
def test_shards_keep_their_sums_and_may_be_others(old, new, seed):
    tx = optax.chain(jc.compressed_mean(TOP, "data", sharded=MODEL), optax.adam(1e-2))
    meshes = [mesh_like(data=data, model=model) for data, model in (old, new)]
    states = [made(tx, mesh, "data", MODEL, s)[0] for mesh, s in zip(meshes, (seed, None), strict=True)]
    state = jc.redistribute(*states)
    if new[0] > 1 or old[0] == 1:
        assert pending(state[0], MODEL) == pending(states[0][0], MODEL)
    else:
        memory = np.asarray(state[0][1].state.local.algorithm.memory[0])
        rows = np.asarray(states[0][0][1].state.local.algorithm.memory[0], np.float64)
        want = np.concatenate(rows.reshape(*old[::-1], 40, -1).sum(1), 1).astype(np.float32)
        np.testing.assert_array_equal(np.concatenate(memory, 1), want)
    np.testing.assert_array_equal(state[1][0].mu["w"], states[0][1][0].mu["w"])
    like = lambda tree: jax.tree.map(lambda x: (x.shape, x.sharding), tree)
    assert like(state) == like(states[1])


@pytest.mark.parametrize("new", variants([(1, 2, 2), (2, 2, 1), (1, 4, 1)], {(2, 2, 1)}))
def test_a_hierarchy_over_shards_trains_on(new, seed):
    """Memories of both levels, shifts of none: 2 x 1 workers with 2 shards, then others of both."""
    tx = jc.compressed_mean(axis_name=LEVELS, sharded=MODEL)
    first, second = (mesh_like(**dict(zip(DEEP, sizes, strict=True))) for sizes in ((2, 1, 2), new))
    before, where = made(tx, first, LEVELS, MODEL)
    for s in (seed, seed + 1):
        _, before = one_more_step(tx, first, LEVELS, before, where, MODEL, s)
    after, where = made(tx, second, LEVELS, MODEL)
    state = jc.redistribute(jax.tree.map(np.asarray, before), after)
    if new[0] * new[1] > 1:
        for i in (0, 1):
            level = lambda parts: [part[i] for part in parts]  # noqa: B023
            if i == 0 or new[0] > 1:
                assert pending(level(state), MODEL) == pending(level(before), MODEL)
    assert all(np.all(np.asarray(level.state.shared.count) == 2) for part in state for level in part)
    directions, state = one_more_step(tx, second, LEVELS, state, where, MODEL, seed)
    assert all(np.all(np.isfinite(d)) for d in jax.tree.leaves(directions))
    assert all(np.all(np.asarray(level.state.shared.count) == 3) for part in state for level in part)


def test_orbax_brings_it_back_here_and_elsewhere(tmp_path, seed):
    tx = optax.chain(jc.compressed_mean(axis_name=LEVELS, sharded=MODEL), optax.adam(1e-2))
    first, second = (mesh_like(**dict(zip(DEEP, sizes, strict=True))) for sizes in ((2, 1, 2), (1, 2, 1)))
    saved, where = made(tx, first, LEVELS, MODEL, seed)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", saved)
    shapes, specs = jc.init_state(tx, PARAMS, first.abstract_mesh, LEVELS, MODEL)
    assert specs == where

    def restored(place):
        like = lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place(spec))
        with ocp.StandardCheckpointer() as checkpointer:
            return checkpointer.restore(tmp_path / "state", jax.tree.map(like, shapes, specs))

    again = restored(lambda spec: NamedSharding(first, spec))
    new, _ = jc.init_state(tx, PARAMS, second, LEVELS, MODEL)
    moved = jc.redistribute(restored(lambda spec: NamedSharding(second, P())), new)
    for a, b in ((again, saved), (moved, jc.redistribute(saved, new))):
        assert jax.tree.structure(a) == jax.tree.structure(b)
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
            np.testing.assert_array_equal(x, y)
            assert x.sharding.is_equivalent_to(y.sharding, x.ndim)


def test_shifts_of_shards_are_cut_anew(seed):
    tx = jc.compressed_mean(jc.diana(jc.dithering(7)), "data", sharded="model")
    first, second = mesh_like(data=2, model=2), mesh_like(data=1, model=4)
    specs = {"b": P("model"), "w": P("model")}
    params = {"b": jnp.zeros(8), "w": jnp.zeros((40, 30))}
    before, _ = jc.init_state(tx, params, first, "data", specs)
    rng = np.random.default_rng(seed)
    whole = rng.standard_normal((40, 30)).astype(np.float32)
    shared = before.state.shared
    shift = shared.algorithm.shift | {"w": jnp.asarray(whole.reshape(2, 20, 30))}
    before.state = before.state._replace(shared=shared._replace(algorithm=shared.algorithm._replace(shift=shift)))
    state = jc.redistribute(before, jc.init_state(tx, params, second, "data", specs)[0])
    np.testing.assert_array_equal(np.asarray(state.state.shared.algorithm.shift["w"]).reshape(40, 30), whole)
    np.testing.assert_array_equal(np.asarray(state.state.local.algorithm.shift["w"]).reshape(40, 30), whole)


def test_second_shots_of_a_hierarchy_keep_their_sums(seed):
    levels = {"ici": jc.error_feedback(jc.cast("float8_e4m3fn")), "dcn": jc.error_feedback(jc.cast("float8_e4m3fn"))}
    tx = jc.compressed_mean(axis_name=levels, via="two_shot")
    old = made(tx, mesh_like(dcn=4, ici=1), levels, seed=seed)[0]
    state = jc.redistribute(old, made(tx, mesh_like(dcn=2, ici=2), levels)[0])
    size = sum(p.size for p in PARAMS.values())
    chunks = lambda level, groups: np.asarray(level.state.local.second.memory).reshape(groups, -1)[:, :size]
    assert fsum(chunks(state[0], 2)) == fsum(chunks(old[0], 4))
    np.testing.assert_array_equal(chunks(state[1], 1), chunks(old[1], 1))


def test_half_a_step_of_a_hierarchy_goes_on(seed):
    tx = optax.MultiSteps(optax.chain(jc.compressed_mean(axis_name=LEVELS), optax.sgd(0.1)), 2)
    old = made(tx, mesh_like(dcn=2, ici=2), LEVELS, seed=seed)[0]
    state = jc.redistribute(old, made(tx, mesh_like(dcn=2, ici=1), LEVELS)[0])
    for name in PARAMS:
        rows = lambda x, n: np.asarray(x, np.float64).reshape(n, -1)
        assert fsum(rows(state.acc_grads[name], 2)) == fsum(rows(old.acc_grads[name], 4))


def test_each_mean_has_levels_of_its_own(seed):
    """Of a mixture of experts: "expert" is a level of workers for some parameters and cuts others into shards."""
    params = {"d": jnp.zeros((40, 40)), "x": jnp.zeros((2, 40, 40))}
    specs = {"d": P(), "x": P("expert")}
    means = {
        "dense": jc.compressed_mean(axis_name={"data": TOP, "expert": TOP}),
        "experts": jc.compressed_mean(TOP, "data", sharded="expert"),
    }
    tx = optax.partition(means, {"d": "dense", "x": "experts"})
    states = [
        jc.init_state(tx, params, mesh_like(data=data, expert=expert), ("data", "expert"), specs)[0]
        for data, expert in ((4, 1), (2, 2))
    ]
    level = lambda state: state.inner_states["experts"].inner_state.state.local.algorithm
    rng = np.random.default_rng(seed)
    memory = rng.standard_normal((4, 2, 40, 40)).astype(np.float32)
    level(states[0]).memory["x"] = jnp.asarray(memory)
    moved = np.asarray(level(jc.redistribute(*states)).memory["x"])  # [expert data, 1, 40, 40]
    for expert in (0, 1):
        assert fsum(moved[2 * expert : 2 * expert + 2]) == fsum(memory[:, expert])


def test_a_leaf_that_becomes_small_leaves_the_others_alone(seed):
    """Half a shard of v is so few entries that it goes dense: its state goes, that of w stays, memories all stay."""
    params, specs = {"v": jnp.zeros((64, 24)), "w": jnp.zeros((64, 64))}, {"v": P("model"), "w": P("model")}
    tx = jc.compressed_mean(jc.error_feedback(jc.dgc(jc.warm_up([0.5, 0.01], 4))), "data", sharded="model")
    large, small = (jc.init_state(tx, params, mesh_like(data=2, model=n), "data", specs)[0] for n in (1, 2))
    rng = np.random.default_rng(seed)
    shared = large.state.shared
    local = large.state.local
    memory = jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype), local.algorithm.memory)
    counted = lambda x: x + 3 if x.dtype == jnp.int32 else x
    large.state = State(
        local._replace(algorithm=local.algorithm._replace(memory=memory)),
        shared._replace(algorithm=jax.tree.map(counted, shared.algorithm)),
    )
    counts = lambda level: [int(x.max()) for x in jax.tree.leaves(level.state.shared.algorithm) if x.dtype == jnp.int32]
    there = jc.redistribute(large, small)
    back = jc.redistribute(there, large)
    assert (counts(large), counts(there), counts(back)) == ([3, 3], [3], [3, 3])
    for name in params:
        halves = np.asarray(there.state.local.algorithm.memory[name]).reshape(2, 2, 32, -1)  # [model, data, ...]
        np.testing.assert_array_equal(np.concatenate(halves, axis=1), memory[name])
        np.testing.assert_array_equal(back.state.local.algorithm.memory[name], memory[name])


def test_only_the_old_state_is_read(seed, monkeypatch):
    """In several processes nobody can read all of an array of the new mesh."""
    levels = {"ici": jc.diana(jc.dithering(7)), "dcn": jc.momentum_correction(jc.top_k(0.05))}
    tx = jc.compressed_mean(axis_name=levels, sharded=MODEL)
    meshes = [mesh_like(**dict(zip(DEEP, sizes, strict=True))) for sizes in ((2, 1, 1), (1, 2, 1))]
    old, new = (made(tx, mesh, levels, MODEL)[0] for mesh in meshes)
    host = elastic._host

    def reads(x):
        assert isinstance(x, np.ndarray)
        return host(x)

    monkeypatch.setattr(elastic, "_host", reads)
    state = jc.redistribute(jax.tree.map(np.asarray, old), new)
    assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, new)


def test_momenta_of_groups_keep_their_mean_and_small_leaves_their_kind(seed):
    levels = {"ici": jc.momentum_correction(jc.top_k(0.05)), "dcn": jc.direct(jc.identity())}
    tx = jc.compressed_mean(axis_name=levels)
    states = [made(tx, mesh_like(dcn=dcn, ici=1), levels, seed=s)[0] for dcn, s in ((4, seed), (2, None))]
    momenta = [np.asarray(x[0].state.shared.algorithm.momentum["b"]) for x in (states[0], jc.redistribute(*states))]
    np.testing.assert_allclose(momenta[1], np.tile(momenta[0].mean(0, dtype=np.float64), (2, 1)), rtol=1e-6, atol=1e-7)
    tx = jc.compressed_mean(levels["ici"], "data", sharded={"b": P(), "w": P("model")})
    states = [
        jc.init_state(tx, PARAMS, mesh_like(data=2, model=model), "data", {"b": P(), "w": P("model")})[0]
        for model in (1, 2)
    ]
    with pytest.raises(ValueError, match=r"at \[1\].*: one leaf is small enough for momentum_correction"):
        jc.redistribute(*states)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_shapes_of_a_state_elsewhere(kind):
    params = PARAMS | {"s": 1.0}
    specs = MODEL | {"s": P()}
    tx = jc.compressed_mean(axis_name=LEVELS, sharded=specs)
    mesh = jax.make_mesh((2, 1, 2), DEEP, axis_types=(kind,) * 3)
    state, where = jc.init_state(tx, params, mesh, LEVELS, specs)
    with jax.set_mesh(jax.make_mesh((2,), ("dcn",), devices=jax.devices()[:2])):
        shapes, again = jc.init_state(tx, params, jax.sharding.AbstractMesh((2, 1, 2), DEEP), LEVELS, specs)
    assert again == where
    of = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
    assert of(shapes) == of(state)


def test_optimizers_that_differ_are_refused_whatever_the_shards():
    direct, remembers = (jc.compressed_mean(a, "data", sharded=MODEL) for a in (jc.direct(jc.top_k(0.05)), TOP))
    make = lambda tx, model: jc.init_state(tx, PARAMS, mesh_like(data=2, model=model), "data", MODEL)[0]
    for one, other in ((direct, remembers), (remembers, direct)):
        for model in (1, 2):
            with pytest.raises(ValueError, match="different optimizers or parameters"):
                jc.redistribute(make(one, 2), make(other, model))
    state = make(remembers, 2)
    with pytest.raises(ValueError, match="new must hold arrays on devices"):
        jc.redistribute(state, jax.tree.map(np.asarray, state))
    with pytest.raises(ValueError, match="old must hold arrays, not shapes"):
        jc.redistribute(jax.eval_shape(lambda: state), state)
    levels = jc.compressed_mean(axis_name=LEVELS)
    state, _ = jc.init_state(levels, PARAMS, mesh_like(dcn=2, ici=2), LEVELS)
    with pytest.raises(ValueError, match="give the state of the whole optimizer"):
        jc.redistribute(state[0], state[0])
    steps = optax.MultiSteps(optax.chain(jc.compressed_mean(TOP, AXIS), optax.sgd(0.1)), 2)
    four, two = (jc.init_state(steps, {"b": jnp.zeros(size)}, mesh_of(n), AXIS)[0] for n, size in ((4, 5), (2, 10)))
    with pytest.raises(ValueError, match=r"\['b'\]: expected an array of shape"):
        jc.redistribute(four, two)


def test_other_shards_that_cannot_be_cut_are_refused():
    def states(tx, specs, *sizes):
        return [jc.init_state(tx, PARAMS, mesh_like(**each), "data", specs)[0] for each in sizes]

    two, one = {"data": 1, "x": 2, "y": 2}, {"data": 1, "x": 2, "y": 1}
    specs = {"b": P(), "w": P("x", "y")}
    with pytest.raises(
        ValueError, match=r"4 shards along mesh axes \('x', 'y'\) before, 2 now; their number may change"
    ):
        jc.redistribute(*states(jc.compressed_mean(TOP, "data", sharded=specs), specs, two, one))
    cast = jc.error_feedback(jc.cast("float8_e4m3fn"))
    tx = jc.compressed_mean(cast, "data", via="two_shot", sharded=MODEL)
    with pytest.raises(ValueError, match='not supported for via="two_shot"'):
        jc.redistribute(*states(tx, MODEL, {"data": 2, "model": 2}, {"data": 2, "model": 1}))
    tx = jc.compressed_mean(TOP, "data", sharded=MODEL)
    (old,) = states(tx, MODEL, {"data": 2, "model": 2})
    larger = PARAMS | {"w": jnp.zeros((40, 60))}
    new, _ = jc.init_state(tx, larger, mesh_like(data=2, model=1), "data", MODEL)
    with pytest.raises(ValueError, match="not of the same parameter"):
        jc.redistribute(old, new)
