"""Another number of workers, in hierarchies and for sharded parameters: memories keep their exact sum, and no step is
compiled twice for them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from variants import variants
from worlds import AXIS, PARAMS, at, fsum, gradients, mesh_of, vmap_step

import jaxcomp as jc
from jaxcomp.exchange import rearrange
from jaxcomp.exchange.state import is_mean, means_in
from jaxcomp.groups import join, split
from jaxcomp.state import workers as other_workers

pytestmark = pytest.mark.usefixtures("standard_promotion")

TOP = jc.error_feedback(jc.top_k(0.05))
LEVELS = {"ici": TOP, "dcn": jc.error_feedback(jc.sidco(0.05, adapt="climb", stages=2))}
WHOLE = {"b": P(), "w": P()}
MODEL = {"b": P(), "w": P(None, "model")}  # b is whole on every device
DEEP = ("dcn", "ici", "model")


def mesh_like(**sizes):
    return mesh_of(tuple(sizes.values()), tuple(sizes))


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


def of_leaves(mean, vectors):
    return jc.state.by_leaf(mean, vectors)


def with_memory(mean, tree):
    """Another memory; tree: like the parameters, behind an axis of rows."""
    memory = jax.jit(jax.vmap(functools.partial(split, mean.about.groups)))(tree)
    memory = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), memory, mean.local.algorithm.memory)
    return dataclasses.replace(mean, local=mean.local._replace(algorithm=mean.local.algorithm._replace(memory=memory)))


def pending(state, specs):
    """{parameter: exact sum over the workers of what they remember of it}, from what lies on which device."""
    rows = {name: [] for name in PARAMS}
    for mean in means_in(state):
        memory = mean.local.algorithm.memory
        vectors = [x for x in jax.tree.leaves(memory) if x.size]
        mesh = vectors[0].sharding.mesh
        for device in (shard.device for shard in vectors[0].addressable_shards if shard.replica_id == 0):
            here = lambda x: next(np.asarray(s.data)[0] for s in x.addressable_shards if s.device == device)  # noqa: B023
            tree = join(mean.about.groups, jax.tree.map(here, memory))
            for name, x in tree.items():
                if isinstance(x, optax.MaskedNode):  # of another group of sharded leaves, which has a mean of its own
                    continue
                places = NamedSharding(mesh, specs[name]).devices_indices_map(PARAMS[name].shape)
                rows[name].append(np.zeros(PARAMS[name].shape, np.float32))
                rows[name][-1][places[device]] = x
    return {name: fsum(each) for name, each in rows.items() if each}


def one_more_step(tx, mesh, axis, state, where, specs, seed):
    workers = [name for name in mesh.axis_names if name != "model"]
    grads = at(gradients(seed, 1, int(np.prod([mesh.shape[name] for name in workers]))))
    across = jax.tree.map(lambda spec: P(tuple(workers), *spec), specs)
    step = lambda s, g: tx.update(at(g), s)
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


@pytest.mark.sampled
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
            for memory, rows in zip(*(jax.tree.leaves(x.local.algorithm.memory) for x in (level, other)), strict=True):
                want = np.asarray(rows, np.float64).sum(0, keepdims=True).astype(np.float32)
                np.testing.assert_array_equal(memory, want)
    like = lambda tree: jax.tree.map(lambda x: (x.shape, x.sharding), tree)
    assert like(state) == like(states[1])
    assert all(np.all(np.asarray(x.shared.count) == 0) for x in state)


def test_what_a_hierarchy_is_to_deliver_can_stay_what_it_was(seed):
    tx = jc.compressed_mean(axis_name=LEVELS)
    old, new = (made(tx, mesh_like(dcn=dcn, ici=2), LEVELS, seed=s)[0] for dcn, s in ((2, seed), (1, None)))
    state = jc.redistribute(old, new, keep="mean")
    for level, other in zip(state, old, strict=True):
        for a, b in zip(*(jax.tree.leaves(x.local.algorithm.memory) for x in (level, other)), strict=True):
            np.testing.assert_allclose(np.mean(a, 0), np.mean(b, 0), rtol=1e-5, atol=1e-6)


@pytest.mark.sampled
@pytest.mark.parametrize(("old", "new"), [((2, 2), (1, 2)), ((2, 2), (2, 1)), ((1, 2), (2, 2)), ((2, 1), (1, 2))])
def test_shifts_of_a_group_are_those_of_its_workers(old, new, seed):
    levels = {"ici": jc.diana(jc.dithering(7)), "dcn": jc.diana(jc.dithering(7))}
    tx = jc.compressed_mean(axis_name=levels)
    first, second = (mesh_like(dcn=dcn, ici=ici) for dcn, ici in (old, new))
    before, where = made(tx, first, levels)
    _, before = one_more_step(tx, first, levels, before, where, WHOLE, seed)
    after, where = made(tx, second, levels)
    state = jc.redistribute(before, after)
    of = lambda level: (np.asarray(of_leaves(level, x.algorithm.shift)["w"]) for x in (level.shared, level.local))
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
    np.testing.assert_array_equal(state[0].shared.count, 1)
    if new == (1, 2):
        one_more_step(tx, second, levels, state, where, WHOLE, seed)


SHARDED = [((2, 2), (1, 2)), ((1, 2), (2, 2)), ((2, 2), (4, 1)), ((4, 1), (2, 2)), ((2, 1), (1, 2)), ((2, 2), (2, 1))]


@pytest.mark.sampled
@pytest.mark.parametrize(("old", "new"), SHARDED)
def test_shards_keep_their_sums_and_may_be_others(old, new, seed):
    tx = optax.chain(jc.compressed_mean(TOP, "data", sharded=MODEL), optax.adam(1e-2))
    meshes = [mesh_like(data=data, model=model) for data, model in (old, new)]
    states = [made(tx, mesh, "data", MODEL, s)[0] for mesh, s in zip(meshes, (seed, None), strict=True)]
    state = jc.redistribute(*states)
    if new[0] > 1 or old[0] == 1:
        assert pending(state[0], MODEL) == pending(states[0][0], MODEL)
    else:
        memory, rows = (
            np.asarray(of_leaves(x[0][1], x[0][1].local.algorithm.memory)["w"], np.float64) for x in (state, states[0])
        )
        want = np.concatenate(rows.reshape(*old[::-1], 40, -1).sum(1), 1).astype(np.float32)
        np.testing.assert_array_equal(np.concatenate(memory, 1), want)
        assert np.any(want != 0)
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
    assert all(np.all(np.asarray(level.shared.count) == 2) for part in state for level in part)
    directions, state = one_more_step(tx, second, LEVELS, state, where, MODEL, seed)
    assert all(np.all(np.isfinite(d)) for d in jax.tree.leaves(directions))
    assert all(np.all(np.asarray(level.shared.count) == 3) for part in state for level in part)


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


@pytest.mark.sampled
@pytest.mark.parametrize("shape", [(40, 30), (80, 64)], ids=["dense", "compressed"])
def test_shifts_of_shards_are_cut_anew(shape, seed):
    tx = jc.compressed_mean(jc.diana(jc.dithering(7)), "data", sharded="model")
    first, second = mesh_like(data=2, model=2), mesh_like(data=1, model=4)
    specs = {"b": P("model"), "w": P("model")}
    params = {"b": jnp.zeros(8), "w": jnp.zeros(shape)}
    before, _ = jc.init_state(tx, params, first, "data", specs)
    rng = np.random.default_rng(seed)
    whole = {name: rng.standard_normal(x.shape).astype(np.float32) for name, x in params.items()}
    halves = {name: jnp.asarray(x.reshape(2, len(x) // 2, *x.shape[1:])) for name, x in whole.items()}
    shift = jax.jit(jax.vmap(functools.partial(split, before.about.groups)))(halves)
    algorithm = before.shared.algorithm._replace(shift=shift)
    before = dataclasses.replace(before, shared=before.shared._replace(algorithm=algorithm))
    state = jc.redistribute(before, jc.init_state(tx, params, second, "data", specs)[0])
    for part in (state.shared, state.local):
        for name, x in of_leaves(state, part.algorithm.shift).items():
            assert x.shape[0] == 4
            np.testing.assert_array_equal(np.asarray(x).reshape(whole[name].shape), whole[name])


def test_second_shots_of_a_hierarchy_keep_their_sums(seed):
    levels = {"ici": jc.error_feedback(jc.cast("float8_e4m3fn")), "dcn": jc.error_feedback(jc.cast("float8_e4m3fn"))}
    tx = jc.compressed_mean(axis_name=levels, via="two_shot")
    old = made(tx, mesh_like(dcn=4, ici=1), levels, seed=seed)[0]
    state = jc.redistribute(old, made(tx, mesh_like(dcn=2, ici=2), levels)[0])
    size = sum(p.size for p in PARAMS.values())
    chunks = lambda level, groups: np.asarray(level.local.route.memory).reshape(groups, -1)[:, :size]
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
    rng = np.random.default_rng(seed)
    memory = rng.standard_normal((4, 2, 40, 40)).astype(np.float32)

    def experts(node):
        return is_mean(node) and node.about.placement.shards == ("expert",)

    def filled(node):
        return with_memory(node, {"d": optax.MaskedNode(), "x": jnp.asarray(memory)}) if experts(node) else node

    old = jax.tree.map(filled, states[0], is_leaf=is_mean)
    (mean,) = filter(experts, means_in(jc.redistribute(old, states[1])))
    moved = np.asarray(of_leaves(mean, mean.local.algorithm.memory)["x"])  # [expert data, 1, 40, 40]
    assert moved.shape == (4, 1, 40, 40)
    for expert in (0, 1):
        assert fsum(moved[2 * expert : 2 * expert + 2]) == fsum(memory[:, expert])


BY_UNIT = {"leaf by leaf": jc.per_leaf, "one vector": lambda compressor: compressor}


@pytest.mark.sampled
@pytest.mark.parametrize("unit", BY_UNIT)
def test_a_leaf_that_becomes_small_leaves_the_others_alone(unit, seed):
    """Half a shard of v is so few entries that it goes dense: its state goes, that of w stays, memories all stay."""
    params, specs = {"v": jnp.zeros((64, 24)), "w": jnp.zeros((64, 64))}, {"v": P("model"), "w": P("model")}
    compressor = BY_UNIT[unit](jc.contrib.dgc(jc.warm_up([0.5, 0.01], 4)))
    tx = jc.compressed_mean(jc.error_feedback(compressor), "data", sharded="model")
    large, small = (jc.init_state(tx, params, mesh_like(data=2, model=n), "data", specs)[0] for n in (1, 2))
    rng = np.random.default_rng(seed)
    memory = {name: jnp.asarray(rng.standard_normal((2, *p.shape)), p.dtype) for name, p in params.items()}
    large = with_memory(large, memory)
    algorithm = jax.tree.map(lambda x: x + 3 if x.dtype == jnp.int32 else x, large.shared.algorithm)
    large = dataclasses.replace(large, shared=large.shared._replace(algorithm=algorithm))
    counts = lambda mean: [int(x.max()) for x in jax.tree.leaves(mean.shared.algorithm) if x.dtype == jnp.int32]
    there = jc.redistribute(large, small)
    back = jc.redistribute(there, large)
    assert (counts(large), counts(there), counts(back)) == {
        "leaf by leaf": ([3, 3], [3], [3, 3]),
        "one vector": ([3], [3], [3]),
    }[unit]
    (halves, whole) = (of_leaves(mean, mean.local.algorithm.memory) for mean in (there, back))
    for name in params:
        cut = np.asarray(halves[name]).reshape(2, 2, 32, -1)  # [model, data, ...]
        np.testing.assert_array_equal(np.concatenate(cut, axis=1), memory[name])
        np.testing.assert_array_equal(whole[name], memory[name])


def test_only_the_old_state_is_read(seed, monkeypatch):
    """In several processes nobody can read all of an array of the new mesh."""
    levels = {"ici": jc.diana(jc.dithering(7)), "dcn": jc.contrib.momentum_correction(jc.top_k(0.05))}
    tx = jc.compressed_mean(axis_name=levels, sharded=MODEL)
    meshes = [mesh_like(**dict(zip(DEEP, sizes, strict=True))) for sizes in ((2, 1, 1), (1, 2, 1))]
    old, new = (made(tx, mesh, levels, MODEL)[0] for mesh in meshes)
    on_host, placed = rearrange.on_host, rearrange.placed
    started = []

    def reads(x):
        assert isinstance(x, np.ndarray)
        return on_host(x)

    def places(value, like):
        started.append(like)
        return placed(value, like)

    for module in (rearrange, other_workers):
        monkeypatch.setattr(module, "on_host", reads)
        monkeypatch.setattr(module, "placed", places)
    old = jax.tree.map(np.asarray, old)
    # Nor by any other way: what is deleted still has a shape and a place, and nothing that could be read.
    kept = {id(mean.shared.workers) for mean in means_in(new)}
    for x in jax.tree.leaves(new):
        if id(x) not in kept:
            x.delete()
    state = jc.redistribute(old, new)
    assert len(started) > 10
    assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, new)


def test_momenta_of_groups_keep_their_mean_and_small_leaves_their_kind(seed):
    levels = {"ici": jc.contrib.momentum_correction(jc.top_k(0.05)), "dcn": jc.direct(jc.identity())}
    tx = jc.compressed_mean(axis_name=levels)
    states = [made(tx, mesh_like(dcn=dcn, ici=1), levels, seed=s)[0] for dcn, s in ((4, seed), (2, None))]
    states.append(jc.redistribute(*states))
    momenta = [np.asarray(x[0].shared.algorithm.dense_momentum[0]) for x in (states[0], states[2])]
    assert momenta[1].shape == (2, 5)
    np.testing.assert_allclose(momenta[1], np.tile(momenta[0].mean(0, dtype=np.float64), (2, 1)), rtol=1e-6, atol=1e-7)
    tx = jc.compressed_mean(levels["ici"], "data", sharded={"b": P(), "w": P("model")})
    states = [
        jc.init_state(tx, PARAMS, mesh_like(data=2, model=model), "data", {"b": P(), "w": P("model")})[0]
        for model in (1, 2)
    ]
    for old, new in (states, states[::-1]):
        with pytest.raises(ValueError, match=r"at \[1\].*: one leaf is small enough"):
            jc.redistribute(old, new)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_shapes_of_a_state_elsewhere(kind):
    params = PARAMS | {"s": 1.0}
    specs = MODEL | {"s": P()}
    tx = jc.compressed_mean(axis_name=LEVELS, sharded=specs)
    mesh = mesh_of((2, 1, 2), DEEP, kind)
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
    with pytest.raises(ValueError, match=r"parameters have other shapes: \(\(5,\),\) before"):
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
    tx = jc.compressed_mean(TOP, "data", sharded=MODEL)
    (old,) = states(tx, MODEL, {"data": 2, "model": 2})
    larger = PARAMS | {"w": jnp.zeros((40, 60))}
    new, _ = jc.init_state(tx, larger, mesh_like(data=2, model=1), "data", MODEL)
    with pytest.raises(ValueError, match="not of the same parameter"):
        jc.redistribute(old, new)


def test_second_shots_of_other_shards_are_refused():
    cast = jc.error_feedback(jc.cast("float8_e4m3fn"))
    tx = jc.compressed_mean(cast, "data", via="two_shot", sharded=MODEL)
    two, one = (jc.init_state(tx, PARAMS, mesh_like(data=2, model=model), "data", MODEL)[0] for model in (2, 1))
    with pytest.raises(ValueError, match='not supported for via="two_shot"'):
        jc.redistribute(two, one)


def test_a_step_is_compiled_once_for_what_was_redistributed(seed):
    """Under vmap new states are bound to no device, and so is what becomes of them."""
    tx = jc.compressed_mean(jc.error_feedback(jc.top_k(0.1)), AXIS)
    state, step = vmap_step(tx, jnp.zeros(300), 4)
    grads = jnp.asarray(np.random.default_rng(seed).standard_normal((4, 300)), jnp.float32)
    _, old = step(state, grads)
    new = jc.redistribute(old, jc.init_state(tx, jnp.zeros(300), 3, AXIS)[0])
    for _ in range(3):
        _, new = step(new, grads[:3])
    assert step._cache_size() == 2  # one for four workers, one for three
