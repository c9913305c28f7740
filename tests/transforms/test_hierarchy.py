"""Means over part of a mesh: hierarchies, sharded parameters, buckets, and meshes of every kind of axis."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from variants import variants
from worlds import assert_close, assert_same, at, mesh_of, mesh_step, vmap_step
from worlds import gradients as gradients_of

import jaxcomp as jc
from jaxcomp.exchange import binding
from jaxcomp.exchange.collectives import gathered
from jaxcomp.exchange.routes import route
from jaxcomp.exchange.routes.route import ROUTES, gathering_route
from jaxcomp.groups import Layout, groups_of

PARAMS = {"b": jnp.zeros(6), "v": jnp.zeros((64, 32)), "w": jnp.zeros((40, 30))}
BOTH = P(("dcn", "ici"))
pytestmark = pytest.mark.usefixtures("standard_promotion")
DENSE, TOP = jc.direct(jc.identity()), jc.error_feedback(jc.top_k(0.05))


def grid(names=("dcn", "ici"), kind=AxisType.Auto):
    return mesh_of((2, 2), names, kind)


def gradients(seed, rounds=2, params=PARAMS):
    return gradients_of(seed, rounds, params=params)


# ------------------------------------------------------------------------------------------------
# Hierarchies


PAIRS = {
    "f32-top_k": (DENSE, TOP),
    "bf16-diana": (jc.direct(jc.cast("bfloat16")), jc.diana(jc.dithering(7))),
    "f32-diana": (DENSE, jc.diana(jc.dithering(7))),
    "bf16-top_k": (jc.direct(jc.cast("bfloat16")), TOP),
}


@pytest.mark.parametrize("pair", variants(PAIRS, {"bf16-diana"}))
def test_a_hierarchy_is_one_mean_after_the_other(pair, seed):
    """What two workers get from the means of their groups, though each device carries half of the message."""
    inside, across = PAIRS[pair]
    levels = {"ici": inside, "dcn": across}
    grads = jax.tree.map(lambda g: jnp.round(g * 64.0) / 64.0, gradients(seed))  # whose sums are exact in any order
    state, step = mesh_step(jc.compressed_mean(axis_name=levels), PARAMS, grid(), levels, BOTH)
    root = jax.random.fold_in(jax.random.key(0), 1)
    plain, simulated = vmap_step(jc.compressed_mean(across, "dcn", seed=root), PARAMS, 2, "dcn")
    inner = jc.compressed_mean(inside, "ici")
    within = jax.vmap(lambda g: inner.update(g, inner.init(g))[0], axis_name="ici", out_axes=None)
    within = jax.jit(jax.vmap(within))
    for t in range(2):
        now = at(grads, t)
        direction, state = jax.block_until_ready(step(state, now))
        groups = within(jax.tree.map(lambda g: g.reshape(2, 2, *g.shape[1:]), now))
        want, plain = simulated(plain, groups)
        assert_close(direction, want, rtol=1e-6)
    assert jc.info(state).sent_bytes > 0


def test_only_the_compressed_message_crosses_and_once_per_group(seed):
    levels = {"ici": DENSE, "dcn": TOP}
    state, step = mesh_step(jc.compressed_mean(axis_name=levels), PARAMS, grid(), levels, BOTH)
    first = at(gradients(seed))
    rows = jc.ledger(step, state, first)
    _, state = jax.block_until_ready(step(state, first))
    assert rows.total_bytes == pytest.approx(float(jc.info(state).sent_bytes))
    outer = jc.info(state[1])
    gathers = [row for row in rows.rows if row.op == "all-gather" and row.dtype == "u32"]
    halves = sum(row.operand_bytes for row in gathers) - 2 * gathers[0].operand_bytes
    assert gathers[0].operand_bytes == pytest.approx((float(outer.lane_bytes) - 4 * 6) / 2, abs=4)
    assert halves == gathers[0].operand_bytes  # what came from two groups is then told within one


@pytest.mark.parametrize("kind", variants([AxisType.Auto, AxisType.Explicit], [AxisType.Explicit]))
def test_training_with_a_hierarchy_among_optax(kind, seed):
    levels = {"ici": DENSE, "dcn": TOP}
    mesh = grid(kind=kind)
    tx = optax.chain(jc.compressed_mean(axis_name=levels), optax.adam(1e-2))
    state, step = mesh_step(tx, PARAMS, mesh, levels, BOTH)
    now = jax.device_put(at(gradients(seed)), NamedSharding(mesh, BOTH))
    updates, state = jax.block_until_ready(step(state, now))
    updates, state = jax.block_until_ready(step(state, now))
    assert all(np.all(np.isfinite(u)) for u in jax.tree.leaves(updates))
    outer = state[0][1]
    memory = jc.state.by_leaf(outer, outer.local.algorithm.memory)["w"]
    assert memory.shape == (2, 40, 30)  # one for each group


def test_a_batch_stays_where_it_lies_whatever_the_order_of_the_levels(seed):
    """Gradients over "ici" first; the mesh, and so the batch, has "dcn" first."""
    mesh, levels = grid(), {"ici": DENSE, "dcn": TOP}
    w = jax.device_put(jnp.ones(2048), NamedSharding(mesh, P()))
    x = jax.random.normal(jax.random.key(seed), (64, 2048))
    loss = lambda w, x: jnp.mean((x @ w) ** 2)
    grad_fn = jc.value_and_grad(loss, axis_name=levels)
    state, placed = grad_fn.init(w), jax.device_put(x, NamedSharding(mesh, BOTH))
    book = jc.ledger(jax.jit(grad_fn), w, state, placed)
    assert book.total_bytes < 4 * w.size + 4 * w.size  # dense over ici, a twentieth over dcn; the batch has 524,288
    np.testing.assert_allclose(jax.jit(grad_fn)(w, state, placed)[0], loss(w, x), rtol=1e-5)


LEVELS = {"ici": DENSE, "dcn": TOP}
BAD_LEVELS = [
    (lambda: jc.compressed_mean(DENSE, {"a": DENSE}), "got both"),
    (lambda: jc.compressed_mean(axis_name={"a": DENSE, ("b", "a"): DENSE}), "axes of its own"),
    (lambda: jc.compressed_mean(axis_name={}), "axes of its own"),
    (lambda: jc.compressed_mean(axis_name={"a": DENSE}, weights=[1.0]), "a hierarchy takes none"),
    (lambda: jc.compressed_mean(axis_name={"a": jc.top_k(0.1)}), "needs an algorithm; got the compressor top_k"),
    (
        lambda: jc.state.state_axes(jax.eval_shape(jc.compressed_mean(axis_name=LEVELS).init, PARAMS)),
        "several mesh axes",
    ),
    (
        lambda: jc.init_state(jc.compressed_mean(axis_name={"dnc": TOP}), jnp.zeros(8), grid(), {"dnc": TOP}),
        r"the mesh has axes \('dcn', 'ici'\); got axis_name with 'dnc'",
    ),
]


@pytest.mark.parametrize(("call", "said"), BAD_LEVELS, ids=range(len(BAD_LEVELS)))
def test_hierarchies_are_checked(call, said):
    with pytest.raises((TypeError, ValueError), match=said):
        call()


def test_levels_have_information_of_their_own():
    state, _ = jc.init_state(jc.compressed_mean(axis_name=LEVELS), PARAMS, grid(), LEVELS)
    with pytest.raises(ValueError, match="different numbers of workers"):
        jc.info(state, each=True)
    assert jc.info(state[1], each=True).sent_bytes.shape == (2,)


# ------------------------------------------------------------------------------------------------
# Sharded parameters


SPECS = {"b": P(), "v": P("model"), "w": P(None, "model")}  # b is whole on every device


def loss_of(params, x):
    """Columns of w and rows of v are on the devices of one group: hidden = x w, out = hidden v, summed over them."""
    hidden = jnp.tanh(x @ params["w"])
    out = lax.psum(hidden @ params["v"][: hidden.shape[1]], "model")
    return jnp.mean(jnp.square(out - 1.0)) + jnp.sum(jnp.square(params["b"] - 1.0))


def sharded_step(tx, mesh, params, specs_of_params):
    state, specs = jc.init_state(tx, params, mesh, "data", specs_of_params)

    def step(params, state, x):
        grads = jax.grad(loss_of)(jc.per_worker(params, "data"), x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    whole = (specs_of_params, specs, P("data"))
    return state, jax.jit(jax.shard_map(step, mesh=mesh, in_specs=whole, out_specs=whole[:2]))


def start(seed):
    rng = np.random.default_rng(seed)
    shapes = {"b": (6,), "v": (64, 32), "w": (40, 64)}
    params = {name: jnp.asarray(0.3 * rng.standard_normal(shape), jnp.float32) for name, shape in shapes.items()}
    return params, jnp.asarray(rng.standard_normal((8, 40)), jnp.float32)


@pytest.mark.sampled
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_each_device_compresses_its_own_shard(kind, seed):
    mesh = grid(("data", "model"), kind)
    params, x = start(seed)
    place = lambda tree, specs: jax.tree.map(lambda a, s: jax.device_put(a, NamedSharding(mesh, s)), tree, specs)
    params, x = place(params, SPECS), place(x, P("data"))
    tx = optax.chain(jc.compressed_mean(TOP, "data", sharded=SPECS), optax.adam(1e-2))
    state, step = sharded_step(tx, mesh, params, SPECS)
    cut = state[0][1]
    assert jc.state.by_leaf(cut, cut.local.algorithm.memory)["w"].shape == (4, 40, 32)
    assert state[1][0].mu["w"].shape == (40, 64)
    for _ in range(2):
        params, state = jax.block_until_ready(step(params, state, x))
    rows = jc.ledger(step, params, state, x).rows
    largest = max(row.operand_bytes for row in rows if row.op == "all-gather")
    assert largest <= 8 * (0.05 * 40 * 32 + 0.05 * 32 * 32)  # payloads; a whole shard of w alone has 5,120 bytes
    assert all(np.all(np.isfinite(p)) for p in jax.tree.leaves(params))


def test_dense_shards_train_like_the_whole(seed):
    params, x = start(seed)
    results = []
    for shape in ((2, 2), (2, 1)):
        tx = optax.chain(jc.compressed_mean(DENSE, "data", sharded=SPECS), optax.adam(1e-2))
        state, step = sharded_step(tx, mesh_of(shape), params, SPECS)
        moved = params
        for _ in range(3):
            moved, state = jax.block_until_ready(step(moved, state, x))
        results.append(jax.tree.map(np.asarray, moved))
    assert_close(*results, rtol=1e-4, atol=1e-5)


def test_workers_and_shards_draw_independently(seed):
    mesh = grid(("data", "model"))
    tx = jc.compressed_mean(jc.direct(jc.bernoulli(0.5)), "data", sharded="model")
    params = {"w": jnp.zeros((64, 64))}
    specs = {"w": P("model")}
    state, where = jc.init_state(tx, params, mesh, "data", specs)
    ones = jnp.ones((2, 64, 64))
    step = lambda s, g: tx.update({"w": g[0]}, s)
    step = jax.shard_map(step, mesh=mesh, in_specs=(where, P("data", "model")), out_specs=(specs, where))
    direction, _ = jax.jit(step)(state, ones)
    top, bottom = np.asarray(direction["w"])[:32], np.asarray(direction["w"])[32:]
    assert np.mean(top == bottom) < 0.5


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_axes_that_are_not_manual(kind):
    mesh = grid(("data", "model"), kind)
    tx = jc.compressed_mean(DENSE, "data")
    with jax.set_mesh(mesh):
        state, specs = jc.init_state(tx, jnp.zeros((8, 4)), mesh, "data")

        def run(grads):
            step = lambda s, g: tx.update(g[0], s)
            step = jax.shard_map(step, in_specs=(specs, P("data")), out_specs=(P(), specs), axis_names={"data"})
            return jax.jit(step)(state, jax.device_put(grads, NamedSharding(mesh, P("data", "model"))))

        with pytest.raises(ValueError, match="mesh axis 'model' is not manual here"):
            run(jnp.ones((2, 8, 4)))


def test_the_state_of_another_place_is_refused():
    tx, other = jc.compressed_mean(DENSE, "data", sharded="model"), jc.compressed_mean(DENSE, "data")
    mesh = grid(("data", "model"))
    state, specs = jc.init_state(tx, jnp.zeros(8), mesh, "data", P("model"))
    step = lambda tx: lambda s, g: tx.update(g, s)
    run = lambda tx, state, specs, grads: jax.shard_map(
        step(tx), mesh=mesh, in_specs=(specs, grads), out_specs=(P("model"), specs)
    )(state, jnp.ones(32))
    with pytest.raises(
        ValueError, match=r"expected a state of workers=\('data',\) with.*got workers=\('data',\), shards=\('model',\)"
    ):
        run(other, state, specs, P("data"))
    plain, plain_specs = jc.init_state(other, jnp.zeros(8), mesh, "data")
    with pytest.raises(
        ValueError,
        match=r"expected a state of workers=\('data',\), shards=\('model',\).*got workers=\('data',\) with",
    ):
        run(tx, plain, plain_specs, P(("data", "model")))


BAD_SHARDS = [
    ("data", {"w": "model"}, "must be axis names or a tree of PartitionSpecs"),
    ("data", {"w": P(("data", "model"))}, "along one dimension, over all of their axes"),
    (None, "model", "need names"),
    ("data", {"w": P("model")}, "gradients have the structure"),
]


@pytest.mark.parametrize(("axis", "sharded", "said"), BAD_SHARDS, ids=range(len(BAD_SHARDS)))
def test_sharded_is_checked(axis, sharded, said):
    with pytest.raises(ValueError, match=said):
        jc.compressed_mean(DENSE, axis, sharded=sharded).init({"v": jnp.zeros(3)})


def test_shards_must_differ():
    mesh, tx = grid(("data", "model")), jc.compressed_mean(DENSE, "data", sharded="model")
    state, specs = jc.init_state(tx, jnp.zeros(8), mesh, "data", P("model"))
    step = jax.shard_map(lambda s, g: tx.update(g, s), mesh=mesh, in_specs=(specs, P("data")), out_specs=(P(), specs))
    with pytest.raises(ValueError, match="equal along mesh axis 'model', and not shards"):
        step(state, jnp.ones(8))


def test_an_optimizer_for_some_of_the_sharded_parameters(seed):
    """`optax.partition` masks the moments of the others: what is left of a tree is laid out like the parameters."""
    mesh = grid(("data", "model"))
    params, x = start(seed)
    tx = optax.chain(
        jc.compressed_mean(TOP, "data", sharded=SPECS),
        optax.partition({"adam": optax.adam(1e-2), "sgd": optax.sgd(1e-2)}, {"b": "sgd", "v": "adam", "w": "adam"}),
    )
    state, step = sharded_step(tx, mesh, params, SPECS)
    params, state = jax.block_until_ready(step(params, state, x))
    mu = state[1].inner_states["adam"].inner_state[0].mu
    assert isinstance(mu["b"], optax.MaskedNode)
    assert [mu[name].sharding.spec for name in ("v", "w")] == [SPECS["v"], SPECS["w"]]
    assert all(np.all(np.isfinite(p)) for p in jax.tree.leaves(params))


# ------------------------------------------------------------------------------------------------
# Buckets


def test_leaves_are_put_together_from_the_last():
    leaves = [jnp.zeros(size, "bfloat16") for size in (5, 5, 5, 5, 5, 3)]
    apart = Layout("apart", dense_below=4)
    large = lambda layout: [group for group in groups_of(layout, leaves).groups if not group.small]
    buckets = lambda bucket_bytes: tuple(group.bucket for group in large(apart.in_buckets(bucket_bytes)))
    assert buckets(20) == (3, 2, 2, 1, 1)
    assert buckets(1) == (5, 4, 3, 2, 1)
    assert buckets(1000) == (1, 1, 1, 1, 1)
    assert [group.bucket for group in large(apart)] == [1, 1, 1, 1, 1]
    together = groups_of(Layout("tree", dense_below=4).in_buckets(20), leaves).groups
    assert [group.leaves for group in together] == [(5,), (0,), (1, 2), (3, 4)]  # a vector holds leaves of one bucket
    assert [group.small for group in together] == [True, False, False, False]
    assert len(groups_of(apart.in_buckets(1), jnp.zeros(3)).groups) == 1


# Each leaf selects by itself: of leaves that are one vector, those of one bucket would be another.
BUCKETED = {
    "top_k": jc.error_feedback(jc.per_leaf(jc.top_k(0.05))),
    "f32": DENSE,
    "bf16": jc.direct(jc.cast("bfloat16")),
}


@pytest.mark.parametrize("name", variants(BUCKETED, {"bf16"}))
def test_buckets_change_collectives_and_nothing_else(name, seed):
    algorithm = BUCKETED[name]
    now, ops, directions = at(gradients(seed)), [], []
    for bucket_bytes in (None, 1):
        tx = jc.compressed_mean(algorithm, "data", bucket_bytes=bucket_bytes)
        state, step = mesh_step(tx, PARAMS, mesh_of())
        rows = jc.ledger(step, state, now)
        ops.append([row for row in rows.rows if row.op == "all-gather"])
        direction, state = jax.block_until_ready(step(state, now))
        directions.append(direction)
        assert rows.total_bytes == pytest.approx(float(jc.info(state).sent_bytes))
    assert_same(*directions)
    if algorithm is not DENSE:
        assert len(ops[1]) > len(ops[0])


@pytest.mark.parametrize("in_the_table", [False, True])
def test_a_gathering_route_of_ones_own_has_buckets(in_the_table, monkeypatch):
    monkeypatch.setattr(route, "NAMES", [*route.NAMES])
    if in_the_table:
        monkeypatch.setattr(binding, "VIAS", (*binding.VIAS, "plain"))
    carried = []

    def plain(parcels, way):
        carried.append(way.buckets_of(parcels))
        return gathered(tuple(parcel.payload for parcel in parcels), way.axis, way.replicas, carried[-1])

    tx = jc.compressed_mean(BUCKETED["top_k"], "data", via=gathering_route("plain", plain), bucket_bytes=1)
    rows = jax.tree.map(lambda p: jax.ShapeDtypeStruct((4, *p.shape), p.dtype), PARAMS)
    jax.eval_shape(jax.vmap(lambda g: tx.update(g, tx.init(PARAMS))[0], axis_name="data"), rows)
    assert len(set(carried[-1])) == 3  # of two large leaves, and of the small one


BAD_BUCKETS = [
    (DENSE, {"bucket_bytes": 0}, r"bucket_bytes must be an integer of at least 1, or what .* makes; got 0"),
    (DENSE, {"bucket_bytes": True}, "got True"),
    (TOP, {"bucket_bytes": 10, "via": "ladder"}, "bucket_bytes goes with via='auto', 'sum', 'gather', and routes"),
    (
        TOP,
        {"bucket_bytes": 10, "via": gathering_route("whole", ROUTES["gather"].gather, buckets=False)},
        r"send each message by itself .*; got 'whole': it sends one message",
    ),
]


@pytest.mark.parametrize(("algorithm", "options", "said"), BAD_BUCKETS, ids=range(len(BAD_BUCKETS)))
def test_bucket_sizes_are_checked(algorithm, options, said):
    with pytest.raises(ValueError, match=said):
        jc.compressed_mean(algorithm, "data", **options)
    jc.compressed_mean(DENSE, "data", bucket_bytes=np.int64(10))
    jc.compressed_mean(DENSE, "data", via=ROUTES["sum"]._replace(name="added"), bucket_bytes=10)


@pytest.mark.sampled
@pytest.mark.parametrize("algorithm", [jc.direct(jc.cast("bfloat16")), jc.error_feedback(jc.cast("bfloat16")), TOP])
@pytest.mark.parametrize("inner", [1, 2])
def test_what_info_says_of_tiny_messages_is_what_is_sent(algorithm, inner, seed):
    """Five entries and four devices: each lane is padded more than once."""
    params = {"v": jnp.zeros(5), "w": jnp.zeros(1100)}
    mesh, levels = mesh_of((4 // inner, inner), ("dcn", "ici")), {"ici": algorithm, "dcn": algorithm}
    state, step = mesh_step(jc.compressed_mean(axis_name=levels), params, mesh, levels, BOTH)
    now = at(gradients(seed, 1, params))
    rows = jc.ledger(step, state, now)
    _, state = jax.block_until_ready(step(state, now))
    assert rows.total_bytes == pytest.approx(float(jc.info(state).sent_bytes))
