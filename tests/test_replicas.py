"""Workers that should be equal: fingerprints, and steps skipped by all or none."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from worlds import AXIS, PARAMS, N, assert_same, at, gradients, mesh_of, mesh_step, run_vmap

import jaxcomp as jc

pytestmark = pytest.mark.usefixtures("standard_promotion")


# ------------------------------------------------------------------------------------------------
# Fingerprints


def copies(values, mesh):
    """A replicated array whose copies are not all equal."""
    sharding = NamedSharding(mesh, P())
    parts = [jax.device_put(v, d) for v, d in zip(values, mesh.devices.flat, strict=True)]
    return jax.make_array_from_single_device_arrays(values[0].shape, sharding, parts)


def with_vectors(mean, side, field, change):
    """Other vectors in local or shared state of the algorithm; change: large vector -> large vector."""
    part = getattr(mean, side)
    *small, vector = getattr(part.algorithm, field)
    parts = (*small, change(vector))
    return dataclasses.replace(mean, **{side: part._replace(algorithm=part.algorithm._replace(**{field: parts}))})


def marks_of(params, state, specs, mesh, axis=AXIS):
    run = lambda p, s: jc.replicas.fingerprints((p, s), axis)
    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=(P(), specs), out_specs=P()))(params, state)


@pytest.mark.sampled
@pytest.mark.parametrize("where", ["params", "moments", "shift", "memory"])
def test_one_corrupt_worker_is_named(where, seed):
    tx = optax.chain(jc.compressed_mean(jc.diana(jc.dithering(7)), AXIS), optax.adam(1e-3))
    mesh = mesh_of(N)
    params = jax.device_put(PARAMS, NamedSharding(mesh, P()))
    state, specs = jc.init_state(tx, params, mesh, AXIS)
    jc.check_replicas(marks_of(params, state, specs, mesh))  # all is well
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
        lines = copies([good.reshape(-1), good.reshape(-1), bad.reshape(-1), good.reshape(-1)], mesh)
        state = with_vectors(mean, "shared", "shift", lambda _: lines), adam
    else:  # what differs between workers anyway is none of its business
        rows = np.stack([good, good, bad, good]).reshape(N, -1)
        rows = jax.device_put(rows, NamedSharding(mesh, P(AXIS)))
        state = with_vectors(mean, "local", "shift", lambda _: rows), adam
    marks = marks_of(params, state, specs, mesh)
    if where == "memory":
        jc.check_replicas(marks)
        return
    with pytest.raises(
        jc.replicas.ReplicaDrift, match="step 12: parameters or shared state of worker 2 differ"
    ) as caught:
        jc.check_replicas(marks, step=12)
    assert caught.value.workers == (2,)


def test_without_a_majority_all_are_named():
    with pytest.raises(jc.replicas.ReplicaDrift, match=r"between workers 0 \| 1, and no group is a majority") as caught:
        jc.check_replicas([1, 2])
    assert caught.value.workers == (0, 1)
    with pytest.raises(jc.replicas.ReplicaDrift, match="workers 0, 3 differ from the other 3's"):
        jc.check_replicas([5, 7, 7, 8, 7])
    jc.check_replicas([])
    jc.check_replicas([3])


@pytest.mark.sampled
@pytest.mark.parametrize(
    "dtype", [jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn, jnp.int8, jnp.int32, jnp.bool_, jnp.complex64], ids=str
)
def test_every_dtype_and_every_place_counts(dtype):
    x = (jnp.arange(6.0) > 2).astype(dtype)
    marks = {
        int(jc.replicas.fingerprint(tree)) for tree in (x, x[::-1], jnp.roll(x, 1), x[:5], [x, x], {"a": x[:0], "b": x})
    }
    assert len(marks) == 6


def test_keys_scalars_and_trees_without_arrays():
    key = jax.random.key(3)
    assert int(jc.replicas.fingerprint({"key": key, "n": 3})) != int(
        jc.replicas.fingerprint({"key": jax.random.key(4), "n": 3})
    )
    assert int(jc.replicas.fingerprint(())) == 0
    with pytest.raises(ValueError, match="no axis named 'data' is bound"):
        jc.replicas.fingerprints(jnp.ones(3), AXIS)


@pytest.mark.slow
def test_what_differs_between_groups_or_shards_is_no_drift():
    mesh = mesh_of((2, 2), ("dcn", "ici"))
    levels = {"ici": jc.diana(jc.dithering(7)), "dcn": jc.error_feedback(jc.top_k(0.1))}
    tx = jc.compressed_mean(axis_name=levels)
    state, step = mesh_step(tx, PARAMS, mesh, levels, P(("dcn", "ici")))
    state = step(state, at(gradients(1)))[1]
    shift = np.asarray(jc.state.by_leaf(state[0], state[0].shared.algorithm.shift)["w"])
    assert np.any(shift[0] != shift[1])  # the mean shift of each group
    jc.check_replicas(marks_of((), state, jc.init_state(tx, PARAMS, mesh, levels)[1], mesh, levels))
    shards = jnp.arange(8.0)
    of_shards = jax.shard_map(
        lambda x: jc.replicas.fingerprints(x, "dcn")[None], mesh=mesh, in_specs=P("ici"), out_specs=P("ici")
    )(shards)
    assert of_shards.shape == (2, 2)
    jc.check_replicas(of_shards)
    with pytest.raises(jc.replicas.ReplicaDrift):
        jc.check_replicas(np.asarray(of_shards).T)


def with_copies(x, spoil):
    """The same array, but for the copies on devices i in `spoil`, where one entry has its lowest bit flipped."""
    parts = []
    for i, shard in enumerate(x.addressable_shards):
        part = np.array(shard.data)
        if i in spoil:
            part.reshape(-1).view(np.uint32)[-1] ^= 1
        parts.append(jax.device_put(part, shard.device))
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts)


LEVELS = {"dcn": jc.diana(jc.dithering(7)), "ici": jc.error_feedback(jc.top_k(0.1))}


@pytest.mark.sampled
@pytest.mark.parametrize("where", ["shift of a group", "memory between groups", "memory within", "params"])
def test_copies_along_inner_axes_are_compared(where):
    """Numbers of workers: dcn times 3 plus ici. The mean over "dcn" comes first: one group for each place on "ici"."""
    mesh = mesh_of((3, 1), ("dcn", "ici"))
    tx = jc.compressed_mean(axis_name=LEVELS)
    params = jax.device_put(PARAMS, NamedSharding(mesh, P()))
    state, specs = jc.init_state(tx, params, mesh, LEVELS)
    jc.check_replicas(marks_of(params, state, specs, mesh, LEVELS))
    first, second = state
    spoiled = functools.partial(with_copies, spoil={2})
    if where == "shift of a group":
        first = with_vectors(first, "shared", "shift", spoiled)
    elif where == "memory between groups":
        second = with_vectors(second, "local", "memory", spoiled)
    elif where == "memory within":
        first = with_vectors(first, "local", "shift", spoiled)
    else:
        params["w"] = spoiled(params["w"])
    marks = marks_of(params, (first, second), specs, mesh, LEVELS)
    if where == "memory within":  # each worker's own
        jc.check_replicas(marks)
        return
    with pytest.raises(jc.replicas.ReplicaDrift, match="of worker 2 differ from the other 2's"):
        jc.check_replicas(marks)


@pytest.mark.parametrize(("spoil", "odd"), [({3}, (2, 3)), ({0, 1}, None)])
def test_a_set_without_majority_is_named_whole(spoil, odd):
    """On 2 x 2 devices a shard has two copies. Both copies spoiled alike are no drift."""
    mesh = mesh_of((2, 2), ("model", "data"))
    specs = {"b": P(), "w": P("model")}
    params = {"b": jnp.zeros(5), "w": jnp.arange(40.0)}
    params = jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), params, specs)
    run = lambda p: jc.replicas.fingerprints(p, ("model", "data"), specs)
    run = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=(specs,), out_specs=P()))
    jc.check_replicas(run(params))
    marks = run(params | {"w": with_copies(params["w"], spoil)})
    if odd is None:
        jc.check_replicas(marks)
        return
    with pytest.raises(jc.replicas.ReplicaDrift) as caught:
        jc.check_replicas(marks)
    assert set(odd) <= set(caught.value.workers)
    with pytest.raises(jc.replicas.ReplicaDrift, match="worker 1 differ from the other 3's"):
        jc.check_replicas(run(params | {"b": with_copies(params["b"], {1})}))


def test_specs_are_checked():
    run = lambda specs: jax.jit(jax.vmap(lambda p: jc.replicas.fingerprints(p, AXIS, specs), axis_name=AXIS))(
        {"w": jnp.zeros((2, 3))}
    )
    with pytest.raises(ValueError, match="specs must be those of the tree"):
        run({"v": P()})
    with pytest.raises(ValueError, match="nothing to compare"):
        run({"w": P(AXIS)})


def test_an_axis_that_gradients_differ_over_is_asked_for():
    mesh = mesh_of((2, 2))
    tx = jc.replicas.skip_nonfinite(jc.compressed_mean(jc.direct(jc.identity()), AXIS, sharded="model"), AXIS)
    state, specs = jc.init_state(tx, jnp.zeros(8), mesh, AXIS, P("model"))
    step = jax.shard_map(
        lambda s, g: tx.update(g[0], s), mesh=mesh, in_specs=(specs, P(AXIS, "model")), out_specs=(P("model"), specs)
    )
    with pytest.raises(ValueError, match=r"over mesh axis 'model', too, .*: give axis_name=\('data', 'model'\)"):
        step(state, jnp.zeros((2, 8)))


def test_the_group_is_named():
    with pytest.raises(
        jc.replicas.ReplicaDrift, match="step 3: group 1: parameters or shared state of worker 0 differ"
    ):
        jc.check_replicas([[7, 7, 7], [8, 9, 9]], step=3)


# ------------------------------------------------------------------------------------------------
# Steps that are skipped


@pytest.mark.sampled
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_gradient_on_one_worker_skips_the_step_everywhere(bad, seed):
    tx = optax.chain(jc.compressed_mean(jc.error_feedback(jc.top_k(0.05)), AXIS), optax.adam(1e-2))
    guarded = jc.replicas.skip_nonfinite(tx, AXIS)
    grads = gradients(seed)
    spoiled = jax.tree.map(lambda g: jnp.concatenate([g[:1], g[:1], g[1:]]), grads)
    spoiled["w"] = spoiled["w"].at[1, 2, 3, 4].set(bad)
    updates, state = run_vmap(guarded, PARAMS, spoiled)
    want, plain = run_vmap(guarded, PARAMS, grads)
    np.testing.assert_array_equal(updates["w"][1], 0)
    assert_same(jax.tree.map(lambda a: np.delete(a, 1, axis=0), updates), want)
    assert_same(state.inner, plain.inner)
    assert (state.skipped, plain.skipped) == (1, 0)


def test_under_shard_map_it_costs_one_word():
    def total(tx):
        state, step = mesh_step(tx, PARAMS, mesh_of())
        return jc.ledger(step, state, at(gradients(0))).total_bytes

    tx = jc.compressed_mean(jc.error_feedback(jc.top_k(0.05)), AXIS)
    assert total(jc.replicas.skip_nonfinite(tx, AXIS)) - total(tx) == 2 * (N - 1) / N * 4
