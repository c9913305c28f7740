"""via="two_shot": against NumPy, in every world, in bytes, and where it must refuse."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from variants import variants
from worlds import AXIS, PARAMS, at, gradients, mesh_of, mesh_step, run_pmap, run_shard_map, run_vmap, vmap_step

import jaxcomp as jc
from jaxcomp.groups import row_size
from jaxcomp.plan.candidates import collectives_of, sent_bytes

N = 4
SIZE = 1205


def vectors(tree):
    """[..., d] in the order of the tree."""
    leaves = [np.asarray(x, np.float64) for x in jax.tree.leaves(tree)]
    lead = leaves[0].ndim - jax.tree.leaves(PARAMS)[0].ndim
    return np.concatenate([x.reshape(*x.shape[:lead], -1) for x in leaves], -1)


def two_shot(algorithm, **options):
    return jc.compressed_mean(algorithm, AXIS, via="two_shot", **options)


# ------------------------------------------------------------------------------------------------
# The oracle: both halves with error feedback, in float64


def top_k_oracle(grads, k, weights):
    """grads f64[rounds, n, d] -> directions, first memories [n, n, m], second memories [n, m]."""
    rounds, n, d = grads.shape
    m = row_size(d, n)
    padded = np.pad(grads, ((0, 0), (0, 0), (0, n * m - d))).reshape(rounds, n, n, m)
    first, second = np.zeros((n, n, m)), np.zeros((n, m))

    def largest(x):
        kept = np.zeros_like(x)
        kept[np.argsort(-np.abs(x), kind="stable")[:k]] = 1
        return x * kept

    directions = []
    for g in padded:
        message = first + g
        sent = np.apply_along_axis(largest, -1, message)
        first = message - sent
        mean = np.einsum("i,ijm->jm", weights, sent)
        again = np.apply_along_axis(largest, -1, mean + second)
        second = mean + second - again
        directions.append(again.reshape(-1)[:d])
    return np.stack(directions), first, second


@pytest.mark.sampled
@pytest.mark.parametrize("weights", [None, [1.0, 2.0, 3.0, 4.0]])
def test_both_memories_are_those_of_the_oracle(weights, seed):
    grads = gradients(seed)
    tx = two_shot(jc.error_feedback(jc.top_k(k=7)), weights=weights)
    directions, state = run_shard_map(tx, PARAMS, grads)
    shares = np.full(N, 1 / N) if weights is None else np.array(weights) / 10
    want, first, second = top_k_oracle(vectors(grads), 7, shares)
    np.testing.assert_allclose(vectors(directions), want, rtol=1e-5, atol=1e-6)
    memory = np.reshape(state.local.algorithm.memory[0], (N, -1))
    np.testing.assert_allclose(memory[:, :SIZE], first.reshape(N, -1)[:, :SIZE], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(state.local.route.memory, second, rtol=1e-5, atol=1e-6)


def test_nothing_is_lost(seed):
    """What came out, and what both memories hold, is all that went in."""
    grads = gradients(seed, rounds=4)
    directions, state = run_vmap(two_shot(jc.error_feedback(jc.cast("float8_e4m3fn"))), PARAMS, grads)
    first = np.float64(state.local.algorithm.memory[0]).reshape(N, -1)[:, :SIZE].mean(0)
    second = np.asarray(state.local.route.memory, np.float64).reshape(-1)[:SIZE]
    assert min(np.abs(first).max(), np.abs(second).max()) > 1e-4
    came_out = vectors(directions).sum(0)
    np.testing.assert_allclose(came_out + first + second, vectors(grads).mean(1).sum(0), atol=2e-5)


ROWS = {
    "identity": jc.direct(jc.identity()),
    "cast": jc.direct(jc.cast("bfloat16")),
    "dithering": jc.direct(jc.dithering(7, block_size=64)),
    "fp8": jc.error_feedback(jc.cast("float8_e4m3fn")),
    "sidco": jc.error_feedback(jc.sidco(0.1)),
    "momentum": jc.contrib.momentum_correction(jc.top_k(0.1)),
}


@pytest.mark.parametrize("name", variants(ROWS, {"dithering"}))
def test_every_world_gives_the_same_and_the_ledger_agrees(name, seed):
    grads = gradients(seed, rounds=2)
    tx = two_shot(ROWS[name])
    sharded, state = run_shard_map(tx, PARAMS, grads)
    simulated, other = run_vmap(tx, PARAMS, grads)
    pairs = (sharded, state.local.route), (simulated, other.local.route)
    for a, b in zip(*map(jax.tree.leaves, pairs), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b).reshape(a.shape), rtol=1e-6, atol=1e-6)
    state, step = mesh_step(tx, PARAMS, mesh_of())
    first = at(grads)
    total = jc.ledger(step, state, first).total_bytes
    info = jc.info(jax.block_until_ready(step(state, first))[1])
    assert total == info.sent_bytes
    assert info.chosen == "two_shot"
    assert info.sent_bytes == 2 * (N - 1) / N * info.lane_bytes * N / (N + 1)  # n chunks went, one came back
    if name in ("identity", "cast"):
        np.testing.assert_allclose(vectors(sharded), vectors(grads).mean(1), atol=1e-6 if name == "identity" else 0.02)


@pytest.mark.slow
def test_bytes_do_not_grow_with_the_workers(seed):
    sent = {}
    for workers in (2, 32):
        grads = gradients(seed, rounds=1, workers=workers, params={"w": jnp.zeros(2**14)})
        tx = two_shot(jc.direct(jc.dithering(7, blocks=1)))
        _, state = run_vmap(tx, {"w": jnp.zeros(2**14)}, grads)
        sent[workers] = float(jc.info(state).sent_bytes)
    assert sent[32] < 2 * sent[2] * 1.01
    np.testing.assert_allclose(sent[2], 2**14 / 2, rtol=0.01)  # 4 bits, half out and half back


def test_unbiased_stays_unbiased(seed):
    draws = 2000
    grads = np.random.default_rng(seed).standard_normal((2, 24)).astype(np.float32)

    def draw(key):
        tx = two_shot(jc.direct(jc.dithering(2)), seed=key)
        step = lambda g: tx.update(g, tx.init(g))[0]
        return jax.vmap(step, axis_name=AXIS, out_axes=None)(jnp.asarray(grads))

    found = np.asarray(jax.lax.map(draw, jax.random.split(jax.random.key(seed), draws)), np.float64)
    z = (found.mean(0) - grads.mean(0)) / (found.std(0, ddof=1) / np.sqrt(draws))
    assert np.abs(z).max() < 5.1  # 24 numbers at a false alarm of 1e-5
    assert found.std(0).max() > 0.05


@pytest.mark.sampled
@pytest.mark.parametrize(
    "params", [{}, {"a": jnp.zeros(0)}, {"a": jnp.zeros(1)}, {"a": jnp.zeros(3), "b": jnp.zeros(())}], ids=str
)
def test_tiny_trees(params, seed):
    if not jax.tree.leaves(params):
        tx = two_shot(jc.direct(jc.identity()))
        step = lambda i: tx.update({}, tx.init({}))[0]
        assert jax.vmap(step, axis_name=AXIS, out_axes=None)(jnp.arange(3)) == {}
        return
    grads = gradients(seed, params=params)
    directions, _ = run_shard_map(two_shot(jc.direct(jc.identity())), params, grads)
    for d, g in zip(jax.tree.leaves(directions), jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(d, g.mean(1), atol=1e-6)


def test_one_worker_and_pmap(seed):
    grads = gradients(seed, workers=1)
    directions, _ = run_vmap(two_shot(jc.direct(jc.identity())), PARAMS, grads)
    np.testing.assert_allclose(vectors(directions), vectors(grads)[:, 0], atol=1e-7)
    grads = gradients(seed, rounds=1, workers=2)
    directions, _ = run_pmap(two_shot(jc.direct(jc.cast("bfloat16"))), PARAMS, grads)
    np.testing.assert_allclose(vectors(directions), vectors(grads).mean(1), atol=0.02)


def test_bad_gradients_never_enter_either_memory(seed):
    grads = gradients(seed)
    grads["w"] = grads["w"].at[0, 1, 3].set(jnp.nan).at[1, 2, 4].set(jnp.inf)
    directions, state = run_vmap(two_shot(jc.error_feedback(jc.top_k(0.1))), PARAMS, grads)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves((directions, state.local.route, state.local.algorithm)))


def test_states_of_other_exchanges_are_refused(seed):
    grads = at(gradients(seed))
    feedback = jc.error_feedback(jc.cast("bfloat16"))
    gathers, shoots = jc.compressed_mean(feedback, AXIS, via="gather"), two_shot(feedback)
    for made, used in ((gathers, shoots), (shoots, gathers)):
        state, axes = jc.init_state(made, PARAMS, N, AXIS)
        with pytest.raises(ValueError, match="made for another"):
            jax.vmap(used.update, in_axes=(0, axes), out_axes=(None, axes), axis_name=AXIS)(grads, state)


def test_narrow_gradients_come_back_narrow(seed):
    params = {"w": jnp.zeros(4096, jnp.bfloat16)}
    grads = gradients(seed, rounds=1, params=params)
    directions, state = run_vmap(two_shot(jc.direct(jc.identity())), params, grads)
    assert jc.info(state).sent_bytes == 2 * (N - 1) / N * 2 * 4096
    exact = np.asarray(grads["w"], np.float64).mean(1)
    np.testing.assert_allclose(np.asarray(directions["w"], np.float64), exact, rtol=2**-8, atol=1e-7)


BAD = [
    (jc.diana(jc.dithering(7)), {}, "keeps a shift in step"),
    (
        jc.error_feedback(jc.per_leaf(jc.top_k(0.1))),
        {},
        r"of one array; got per_leaf\(top_k\(0.1\)\). Leave its",
    ),
    (jc.power_sgd(2), {}, r'two_shot" cuts all leaves together .* Use via="auto"'),
    (jc.fetch_sgd(0.1), {}, r'two_shot" cuts all leaves together .* Use via="auto"'),
    (jc.error_feedback(jc.dagc([1, 2], 0.1)), {}, "has a plan for each"),
    (jc.direct(jc.identity()), {"bucket_bytes": 100}, "bucket_bytes goes with"),
]


@pytest.mark.parametrize(("algorithm", "options", "said"), BAD, ids=[said for *_, said in BAD])
def test_what_does_not_fit_is_refused(algorithm, options, said):
    with pytest.raises(ValueError, match=said):
        two_shot(algorithm, **options)


def test_two_shots_inside_an_optimizer_do_not_retrace(seed):
    with jax.numpy_dtype_promotion("standard"):
        tx = optax.chain(two_shot(jc.error_feedback(jc.cast("bfloat16"))), optax.adam(1e-2))
        state, step = vmap_step(tx, PARAMS)
        for t in range(3):
            _, state = step(state, at(gradients(seed), t))
    assert step._cache_size() == 1


@pytest.mark.parametrize(
    ("dtype", "value", "compressor"),
    [
        ("float32", 3e38, jc.dithering(1, norm=2, block_size=64)),
        ("bfloat16", 1e38, jc.block_scaled("int8", rounding="stochastic")),
        ("float16", 3e4, jc.dithering(1, norm=2, block_size=64)),
    ],
)
def test_what_overflows_at_the_owner_is_the_largest_number(dtype, value, compressor):
    """An unbiased compressor may bring several times an entry, beyond the type in which the owner sends it on."""
    grads = jnp.full((1, N, 4096), value, dtype)
    means, _ = run_vmap(two_shot(jc.direct(compressor)), jnp.zeros(4096, dtype), grads)
    means = np.float64(means)
    assert np.all(np.isfinite(means))
    assert np.mean(means) > value / 10


@pytest.mark.parametrize("name", ["top_k", "int4"])
def test_devices_that_hold_the_same_share_both_shots(name, seed):
    """Of two workers of two devices each, which hold the same, a device sends half of both shots to the other worker,
    and what comes out is bit for bit that of two devices."""
    algorithm = jc.error_feedback(jc.top_k(0.3) if name == "top_k" else jc.block_scaled("int4"))
    tx, grads, found = two_shot(algorithm), gradients(seed, 2, 2), {}
    for devices in (1, 2):
        mesh = mesh_of((2, devices), (AXIS, "inside"))
        state, step = mesh_step(tx, PARAMS, mesh)
        book = jc.ledger(step, state, at(grads))
        directions = []
        for i in range(2):
            direction, state = step(state, at(grads, i))
            directions.append(vectors(direction))
        assert float(np.ravel(jc.info(state).sent_bytes)[0]) == book.total_bytes
        found[devices] = np.stack(directions), book.by_axes(mesh)[AXIS,]
    assert np.array_equal(found[1][0], found[2][0])
    assert found[2][1] == pytest.approx(found[1][1] / 2, rel=0.02)  # each part is filled up to whole words


def test_auto_takes_two_shots_of_a_hierarchy_whose_devices_share_them():
    """32 hosts of eight: int4 would be 31 messages of 33 d / 64 bytes; both shots 2 * 31 / 32 of one, shared by 8."""
    levels = {"ici": jc.direct(jc.identity()), "dcn": jc.error_feedback(jc.block_scaled("int4"))}
    sizes, d = {"dcn": 32, "ici": 8}, 2**20
    found = collectives_of(jc.Candidate("both", levels), jax.ShapeDtypeStruct((d,), jnp.float32), "dcn", sizes)
    slow = [one for one in found if one.axis == "dcn"]
    assert {one.kind for one in slow} == {"all_to_all", "all_gather"}
    assert sent_bytes(slow, sizes) == pytest.approx(2 * 31 / 32 * d * 33 / 64 / 8, rel=0.001)
