"""PowerSGD against its paper and torch's hook in float64, where matrices lack rank, with schedules and shards."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles_lowrank
import pytest
from jax.sharding import PartitionSpec as P
from variants import variants
from worlds import AXIS, gradients, mesh_of, mesh_step, run_shard_map, run_vmap

import jaxcomp as jc
from jaxcomp.algorithms.low_rank import FEW, bases_of, factored, matrix_shape, product, transposed_times
from jaxcomp.algorithms.power_sgd import _first

N, ROUNDS, RANK = 4, 5, 2
BATCHED = {"batched": True}
OPTIONS = [{"error_feedback": False}, {"warm_start": False}, {"error_feedback": False, "warm_start": False}, BATCHED]
OPTIONS += [BATCHED | {"warm_start": False}, BATCHED | {"error_feedback": False}]
TREE = {"a": jnp.zeros((12, 8)), "b": jnp.zeros((12, 8)), "c": jnp.zeros((10, 4, 3)), "v": jnp.zeros(7)}
FIRST_Q = {"a": (0, 0), "b": (0, 1), "c": (1, 0)}  # which stack, and which of its rows
SMALL = {"dense_below": 0, "min_ratio": 1.0}


def power_sgd(grads, q):
    """Vogels, Karimireddy, Jaggi 2019, algorithms 1 and 2, for one matrix: grads f64[rounds, n, r, c], q f64[c, k]."""
    memory, directions = np.zeros(grads.shape[1:]), []
    for g in grads:
        m = g + memory
        p, _ = np.linalg.qr(np.mean(m @ q, axis=0))
        q = np.mean(np.swapaxes(m, 1, 2) @ p, axis=0)
        directions.append(p @ q.T)
        memory = m - p @ q.T
    return np.stack(directions), memory


@pytest.mark.parametrize("run", variants([run_vmap, run_shard_map], {run_vmap}), ids=lambda run: run.__name__)
def test_power_sgd_is_the_oracle(run, seed):
    """Over several rounds, each of which starts from the factor of the last one."""
    grads = gradients(seed, ROUNDS, N, TREE)
    tx = jc.compressed_mean(jc.power_sgd(RANK, **SMALL), AXIS)
    start = jax.jit(jax.vmap(lambda _: tx.init(TREE), axis_name=AXIS, out_axes=None))(jnp.arange(N)).shared.algorithm.q
    start = [q for q in start if len(q)]  # of the stacks
    directions, state = run(tx, TREE, grads)
    memory = jc.state.by_leaf(state, state.local.algorithm.memory)
    for name, (stack, row) in FIRST_Q.items():
        g = np.float64(grads[name])
        g = g.reshape(*g.shape[:2], *matrix_shape(g.shape[2:]))
        want, rest = power_sgd(g, np.float64(start[stack][row]))
        np.testing.assert_allclose(directions[name].reshape(want.shape), want, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(memory[name].reshape(rest.shape), rest, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(directions["v"], np.asarray(grads["v"]).mean(1), rtol=1e-5, atol=1e-6)
    info, numbers = jc.info(state), 7 + RANK * (2 * (12 + 8) + 10 + 12)
    assert info.lane_bytes == 4 * numbers
    assert info.sent_bytes == 2 * (N - 1) / N * 4 * numbers
    assert info.chosen == "sum"


@pytest.mark.parametrize("rank", variants([1, 3], {3}))
def test_fifty_steps_are_those_of_torchs_hook(rank, seed):
    """Descent on four least-squares problems, dense for ten steps, in 64 bits.

    In 32 bits the iteration amplifies rounding to a few 1e-4: so it does in the hook, which adds 1e-8 to its norms.
    """
    with jax.enable_x64(True):
        x, want = fifty_steps_of_both(rank, seed)
    for name in TREE_64:
        np.testing.assert_allclose(x[name], want[name], atol=1e-5)


@pytest.mark.parametrize("options", variants(OPTIONS, OPTIONS[2:4]), ids=str)
def test_options_are_those_of_torchs_hook(options, seed):
    with jax.enable_x64(True):
        x, want = fifty_steps_of_both(2, seed, **options)
        plain, _ = fifty_steps_of_both(2, seed)
    for name in TREE_64:
        np.testing.assert_allclose(x[name], want[name], atol=1e-5)
    assert np.abs(x["w"] - plain["w"]).max() > 1e-3  # the option does something
    for name in ("error_feedback", "warm_start", "batched"):
        with pytest.raises(ValueError, match=f"{name} must be True or False; got 1"):
            jc.power_sgd(2, **{name: 1})


TREE_64 = {"w": (16, 12), "k": (8, 4, 5), "b": (12,)}


def fifty_steps_of_both(rank, seed, **options):
    """Where `power_sgd` and the hook's transcription arrive."""
    rng = np.random.default_rng(seed)
    tree = {name: jnp.zeros(shape, "f8") for name, shape in TREE_64.items()}
    targets = jax.tree.map(lambda p: rng.standard_normal((N, *p.shape)), tree)
    curvature = jax.tree.map(lambda p: rng.uniform(0.5, 2, (N, *p.shape)), tree)
    tx = jc.compressed_mean(jc.power_sgd(rank, start=10, dense_below=0, min_ratio=1.2, **options), AXIS)
    state, axes = jc.init_state(tx, tree, N, AXIS)
    order = jax.tree.unflatten(jax.tree.structure(tree), range(3))
    stacks = [group for group in state.about.groups.groups if group.is_stack]

    def by_name(qs):
        qs = [np.asarray(q) for q in qs]
        places = {leaf: (i, row) for i, group in enumerate(stacks) for row, leaf in enumerate(group.leaves)}
        return {name: qs[places[leaf][0]][places[leaf][1]] for name, leaf in order.items() if leaf in places}

    def drawn(iteration):
        keys = [jax.random.wrap_key_data(key) for key in state.shared.algorithm.q if len(key)]
        like = [jax.ShapeDtypeStruct(group.shape, "f8") for group in stacks]
        return named(_first(jax.random.fold_in(k, iteration), x, rank) for k, x in zip(keys, like, strict=True))

    batched = options.get("batched", False)
    named = (lambda qs: np.asarray(next(iter(qs))[0])) if batched else by_name
    warm, feedback = options.get("warm_start", True), options.get("error_feedback", True)
    first = named(q for q in state.shared.algorithm.q if len(q)) if warm else None
    if batched:
        hook = oracles_lowrank.BatchedPowerSGDHook(first, rank, 10, None if warm else drawn, feedback)
    else:
        hook = oracles_lowrank.PowerSGDHook(first or {}, rank, 10, 1.2, None if warm else drawn, feedback)

    def step(x, state, target, curvature):
        grads = jax.tree.map(lambda x, t, c: c * (x - t), x, target, curvature)
        direction, state = tx.update(grads, state)
        return jax.tree.map(lambda x, d: x - 0.05 * d, x, direction), state

    step = jax.jit(jax.vmap(step, (None, axes, 0, 0), (None, axes), axis_name=AXIS))
    x, want = tree, jax.tree.map(lambda p: np.zeros(p.shape), tree)
    for _ in range(50):
        x, state = step(x, state, targets, curvature)
        grads = [{k: curvature[k][i] * (want[k] - targets[k][i]) for k in sorted(tree)} for i in range(N)]
        direction = hook(grads)
        want = {k: want[k] - 0.05 * direction[k] for k in tree}
    return x, want


@pytest.mark.parametrize("columns", [1, 3, FEW, FEW + 1])
def test_products_with_few_columns_and_with_many(columns, seed):
    rng = np.random.default_rng(seed)
    m, p = rng.standard_normal((2, 20, 15)), rng.standard_normal((2, 20, columns))
    q = np.einsum("mrk,mrc->mkc", p, m)
    got = transposed_times(jnp.asarray(m, jnp.float32), jnp.asarray(p, jnp.float32))
    np.testing.assert_allclose(got, q, rtol=1e-4, atol=1e-4)
    got = product(jnp.asarray(p, jnp.float32), jnp.asarray(q, jnp.float32))
    np.testing.assert_allclose(got, p @ q, rtol=1e-4, atol=1e-3)


# ------------------------------------------------------------------------------------------------
# What lacks rank


def cases(rng):
    x = rng.standard_normal((2, 30, 4)).astype(np.float32)
    same = np.broadcast_to(x[:, :, :1], x.shape)
    return {
        "normal": x,
        "zero": 0 * x,
        "rank one": same * np.float32([1, -2, 0, 1e-3]),
        "nearly dependent": same + np.float32(1e-7) * x,
        "huge": np.float32(1e37) * x,
        "tiny": np.float32(1e-32) * x,
        "graded": x * np.float32(10.0) ** np.arange(0, 32, 8, dtype=np.float32),
        "square": x[:, :4],
    }


def test_bases_are_orthonormal_and_span_what_there_is(seed):
    rng = np.random.default_rng(seed)
    long = rng.standard_normal((1, 300, 4)).astype(np.float32)  # of several blocks, beside matrices of one
    together = cases(rng) | {"long": long, "long, rank one": long[:, :, :1] * np.float32([1, 0, 2, 1e-3])}
    bases = dict(zip(together, bases_of(list(together.values())), strict=True))
    for name, x in together.items():
        b = np.float64(bases[name])
        assert np.max(np.abs(b.swapaxes(1, 2) @ b - np.eye(4))) < 2e-6, name
        scaled = np.float64(x) / max(float(np.max(np.abs(x))), 1e-300)
        left = scaled - b @ (b.swapaxes(1, 2) @ scaled)
        assert np.max(np.abs(left)) < 1e-5, name  # but rounding is replaced
    for name in ("normal", "long"):
        q = np.linalg.qr(np.float64(together[name]))[0]
        np.testing.assert_allclose(np.abs(np.einsum("mrk,mrk->mk", q, bases[name])), 1, atol=1e-5)  # in the same order
    mixed = [together["normal"], long[:, :, :2], together["square"]]  # another k is another batch
    for x, b in zip(mixed, bases_of(mixed), strict=True):
        np.testing.assert_allclose(b, bases_of([x])[0], atol=1e-6)


def test_matrices_that_lack_rank_stay_finite(seed):
    """A matrix of rank one is found by two columns; zeros stay zeros; what is not finite counts as zero.

    Tokens that did not occur before are found: unit vectors in a basis would never see the rows and columns of others.
    """
    rng = np.random.default_rng(seed)
    one = np.outer(rng.standard_normal(12), rng.standard_normal(8))
    tree = TREE | {"d": jnp.zeros((12, 8))}
    late = np.zeros((12, 8))
    late[4:, 4:] = np.outer(np.arange(1, 9), [1, -1, 2, 1])
    grads = gradients(seed, 3, N, tree)
    grads["d"] = jnp.broadcast_to(jnp.asarray(late, jnp.float32), grads["d"].shape).at[0].set(0)
    grads["a"] = jnp.broadcast_to(jnp.asarray(one, jnp.float32), grads["a"].shape)
    grads["b"] = jnp.zeros_like(grads["b"])
    grads["c"] = grads["c"].at[0, 1, 2].set(jnp.nan).at[1, 0, 1].set(jnp.inf).at[2].set(3e38)
    directions, state = run_vmap(jc.compressed_mean(jc.power_sgd(RANK, **SMALL), AXIS), tree, grads)
    np.testing.assert_allclose(directions["d"].sum(0), 2 * late, atol=1e-3)
    np.testing.assert_allclose(directions["a"], np.broadcast_to(one, (3, 12, 8)), atol=1e-5)
    np.testing.assert_array_equal(directions["b"], 0)
    for x in jax.tree.leaves((directions, state.local.algorithm, state.shared.algorithm)):
        assert np.all(np.isfinite(x))


HUGE = {"w": jnp.zeros((40, 30)), "narrow": jnp.zeros((3, 2)), "v": jnp.zeros(7)}


@pytest.mark.sampled
@pytest.mark.parametrize("start", [0, 2])
@pytest.mark.parametrize("scale", [2.0**-80, 1.0, 2.0**115])
def test_what_is_not_sent_is_remembered_at_every_scale(start, scale, seed):
    """Powers of two change nothing, and no entry is lost, whether sent at a low rank, at a higher one or dense."""
    grads = jax.tree.map(lambda g: jnp.clip(g, -3, 3).at[4:].set(0), gradients(seed, 6, N, HUGE))
    tx = jc.compressed_mean(jc.power_sgd({0: RANK, 4: 9}, min_ratio=1.2, dense_below=4, start=start), AXIS)
    plain, _ = run_vmap(tx, HUGE, grads)
    directions, state = run_vmap(tx, HUGE, jax.tree.map(lambda g: g * scale, grads))
    memory = jc.state.by_leaf(state, state.local.algorithm.memory)
    for name, g in grads.items():
        np.testing.assert_allclose(np.float64(directions[name]) / scale, plain[name], rtol=1e-4, atol=1e-4)
        kept = N * np.float64(directions[name]).sum(0) + np.float64(memory[name]).sum(0).reshape(g.shape[2:])
        np.testing.assert_allclose(kept / scale, np.float64(g).sum((0, 1)), rtol=1e-4, atol=1e-3)


@pytest.mark.sampled
@pytest.mark.parametrize("signs", [[1], [1, -1]], ids=str)
def test_sums_beyond_the_largest_number_are_cut_and_the_rest_is_remembered(signs, seed):
    """Of four workers with half of it nothing is lost; of more than any memory holds, nothing is infinite."""
    w = np.random.default_rng(seed).choice(signs, (40, 30)).astype(np.float32)
    most = np.finfo(np.float32).max
    tx = jc.compressed_mean(jc.power_sgd(RANK, **SMALL), AXIS)
    grads = {"w": jnp.broadcast_to(w * most, (3, N, 40, 30)), "v": jnp.broadcast_to(w[:, 0] * most, (3, N, 40))}
    grads = jax.tree.map(lambda g: g.at[1:, 2:].multiply(-1), grads)
    tree = jax.tree.map(lambda g: g[0, 0], grads)
    directions, state = run_vmap(tx, tree, jax.tree.map(lambda g: g[:1] / 2, grads))
    memory = jc.state.by_leaf(state, state.local.algorithm.memory)
    for name, g in tree.items():
        kept = directions[name][0] / np.float64(most) + np.float64(memory[name] / most).mean(0).reshape(g.shape)
        np.testing.assert_allclose(kept, g / most / 2, atol=1e-6)
    directions, state = run_vmap(tx, tree, grads)
    for x in jax.tree.leaves((directions, state.local.algorithm, state.shared.algorithm)):
        assert np.all(np.isfinite(x))


# ------------------------------------------------------------------------------------------------
# What goes dense, and when


def test_leaves_that_factors_do_not_make_smaller_go_dense(seed):
    given = [((9, 9), 2, 2.2), ((9, 9), 2, 9 / 4), ((64, 3, 3, 64), 1, 9), ((1, 50), 1, 1), ((5,), 1, 1)]
    assert [factored(*each) for each in given] == [True, False, True, False, False]
    tree = {"narrow": jnp.zeros((3, 2)), "w": jnp.zeros((20, 30))}
    grads = gradients(seed, 1, N, tree)
    directions, state = run_vmap(jc.compressed_mean(jc.power_sgd(RANK, dense_below=4), AXIS), tree, grads)
    np.testing.assert_allclose(directions["narrow"], np.asarray(grads["narrow"]).mean(1), rtol=1e-5, atol=1e-6)
    assert np.linalg.matrix_rank(np.asarray(directions["w"][0]), tol=1e-3) == RANK
    np.testing.assert_array_equal(jc.state.by_leaf(state, state.local.algorithm.memory)["narrow"], 0)


def test_ranks_follow_their_schedule_and_bytes_follow_the_ranks(seed):
    """Dense for one round, then rank three, one, four: nothing is lost on the way, and nothing is traced twice."""
    tree = {"w": jnp.zeros((40, 30))}
    grads = gradients(seed, 5, N, tree)
    tx = jc.compressed_mean(jc.power_sgd({0: 3, 2: 1, 3: 4}, start=1, dense_below=0), AXIS)
    state, step = mesh_step(tx, tree, mesh_of(), donate_argnums=0)
    total, found = np.zeros((40, 30)), []
    for g in grads["w"]:
        direction, state = jax.block_until_ready(step(state, {"w": g}))
        total += np.asarray(direction["w"])
        rank = int(np.linalg.matrix_rank(np.asarray(direction["w"]), tol=1e-3))
        found.append((rank, int(np.ravel(jc.info(state).lane_bytes)[0]) // 4))
    assert found == [(30, 1200), (3, 210), (1, 70), (4, 280), (4, 280)]
    assert step._cache_size() == 1
    memory = np.asarray(jc.state.by_leaf(state, state.local.algorithm.memory)["w"]).mean(0)
    np.testing.assert_allclose(total + memory, np.asarray(grads["w"]).mean(1).sum(0), atol=1e-4)


def test_weights_and_a_bare_array(seed):
    weights = np.array([1.0, 2.0, 3.0, 10.0])
    grads = gradients(seed, 1, N, jnp.zeros(9))
    directions, _ = run_vmap(jc.compressed_mean(jc.power_sgd(1), AXIS, weights=weights), jnp.zeros(9), grads)
    np.testing.assert_allclose(directions[0], weights / 16 @ np.float64(grads[0]), rtol=1e-5)


BAD = [
    ({"rank": 0}, "power_sgd: rank must be an integer of at least 1; got 0"),
    ({"rank": {1: 2}}, "needs one for round 0"),
    ({"rank": {0: 2, 5: 0}}, "rank must be an integer of at least 1; got 0"),
    ({"rank": {0: 2, -1: 2}}, "rounds of at least 0; got -1"),
    ({"min_ratio": 0}, "min_ratio must be positive and finite; got 0"),
    ({"start": -1}, "start must be an integer of at least 0; got -1"),
    ({"dense_below": 0.5}, "dense_below must be an integer of at least 0; got 0.5"),
]


@pytest.mark.parametrize(("options", "message"), BAD, ids=[message for _, message in BAD])
def test_arguments_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        jc.power_sgd(**options)


# ------------------------------------------------------------------------------------------------
# Other workers, shards, levels


def test_shards_have_factors_of_their_own_and_a_hierarchy_sums_first(seed):
    """Columns cut over "model": each device does what the oracle does with its shard. And "ici" before "dcn"."""
    tree, specs = {"w": jnp.zeros((12, 16))}, {"w": P(None, "model")}
    mesh = mesh_of((2, 2))
    rng = np.random.default_rng(seed)
    grads = rng.standard_normal((3, 2, 12, 16)).astype(np.float32)
    tx = jc.compressed_mean(jc.power_sgd(RANK, **SMALL), "data", sharded=specs)
    state, state_specs = jc.init_state(tx, tree, mesh, "data", specs)
    step = lambda g, s: tx.update({"w": g[0]}, s)
    ins, outs = (P("data", None, "model"), state_specs), (specs, state_specs)
    step = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=ins, out_specs=outs))
    first = np.asarray(state[0].shared.algorithm.q[0], np.float64)  # [shards, m, columns, rank]
    directions = []
    for g in grads:
        direction, state = step(g, state)
        directions.append(np.asarray(direction["w"]))
    for shard in range(2):
        part = slice(8 * shard, 8 * shard + 8)
        want, _ = power_sgd(np.float64(grads[..., part]), first[shard].reshape(8, RANK))
        np.testing.assert_allclose(np.stack(directions)[..., part], want, rtol=1e-3, atol=1e-4)

    levels = {"ici": jc.direct(jc.identity()), "dcn": jc.power_sgd(RANK, **SMALL)}
    tx = optax.chain(jc.compressed_mean(None, levels), optax.scale(1.0))
    state, step = mesh_step(tx, tree, mesh_of((2, 2), ("dcn", "ici")), tuple(levels), P(("dcn", "ici")))
    four = rng.standard_normal((4, 12, 16)).astype(np.float32)
    q = jax.tree.leaves(state[0][1].shared.algorithm.q)[0]
    direction, state = step(state, {"w": four})
    want, _ = power_sgd(np.float64(four.reshape(1, 2, 2, 12, 16).mean(2)), np.float64(q).reshape(16, RANK))
    np.testing.assert_allclose(direction["w"], want[0], rtol=1e-3, atol=1e-4)
