"""Messages of unequal length: bytes, and bitwise the mean of the padded messages."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from route_worlds import ragged_by_definition
from variants import variants
from worlds import AXIS, mesh_of, mesh_step, run_pmap, run_shard_map, run_vmap
from worlds import gradients as random_gradients

import jaxcomp as jc
from jaxcomp.base import State, for_worker, left
from jaxcomp.compressors.dagc import Amounts
from jaxcomp.exchange import collectives
from jaxcomp.exchange.links import Link

N = 4
VOLUMES = [70, 20, 8, 2]
PARAMS = {"b": jnp.zeros(5), "v": jnp.zeros(2001), "w": jnp.zeros((40, 30))}
SLOW = Link(latency=0, bandwidth=1e6)


pytestmark = pytest.mark.usefixtures("standard_promotion")


def gradients(seed, rounds=2, params=PARAMS):
    return random_gradients(seed, rounds, N, params)


def bits(tree):
    return b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree))


# ------------------------------------------------------------------------------------------------
# In programs

CASES = {
    "tree": jc.dagc(VOLUMES, 0.1),
    "per_leaf": jc.per_leaf(jc.dagc(VOLUMES, 0.1)),
    "flat": jc.flat(jc.dagc([2, 0, 5, 5], 0.05)),
    "uint16": jc.narrow(jc.dagc(VOLUMES, 0.03, capacity=1.3), values="float16", indices="uint16"),
    "bf16": jc.compose(jc.dagc([9, 1, 3, 3], 0.021), jc.cast("bfloat16")),
    "dithering": jc.compose(jc.dagc(VOLUMES, 0.1), jc.dithering(7)),
    "equal": jc.dagc([1, 1, 1, 1], 0.02),
}


@pytest.mark.filterwarnings("ignore:via=")
@pytest.mark.slow
def test_all_worlds_give_bitwise_the_same_directions(seed):
    grads = gradients(seed)
    results = {}
    for via, world in (("gather", run_shard_map), ("ring", run_shard_map), ("ring", run_vmap), ("concat", run_pmap)):
        directions, state = world(
            jc.compressed_mean(jc.error_feedback(jc.dagc(VOLUMES, 0.1)), AXIS, via), PARAMS, grads
        )
        results[via, world.__name__] = bits(directions)
        assert jc.info(state).chosen == via
    assert len(set(results.values())) == 1, {key: hash(value) for key, value in results.items()}


@pytest.mark.filterwarnings("ignore:via=")
@pytest.mark.parametrize("via", variants(["gather", "concat", "ring"], {"ring"}))
def test_info_and_program_agree_on_the_bytes(via):
    tx = jc.compressed_mean(jc.error_feedback(jc.dagc(VOLUMES, 0.1)), AXIS, via, link=SLOW)
    mesh = mesh_of(N)
    for check_vma in (True, False):
        state, specs = jc.init_state(tx, PARAMS, mesh, AXIS)
        step = jax.shard_map(
            lambda s, g: tx.update(jax.tree.map(lambda x: x[0], g), s),
            mesh=mesh,
            in_specs=(specs, P(AXIS)),
            out_specs=(P(), specs),
            check_vma=check_vma,
        )
        grads = jax.tree.map(lambda g: g[0], gradients(0))
        book = jc.ledger(step, state, grads)
        sent = book.total_bytes
        _, state = jax.jit(step)(state, grads)
        assert sent == pytest.approx(float(jc.info(state).sent_bytes), rel=1e-6)
        k = jc.allocate.counts(jc.allocate.ratios(VOLUMES, 0.1), 2001 + 1200).sum()
        real = 8 * k + N * 20
        limit = {"gather": (1.4, np.inf), "concat": (0, 2.1), "ring": (0, 1.05)}[via]
        assert limit[0] <= sent / real <= limit[1]


@pytest.mark.slow
def test_auto_takes_what_the_model_says(seed):
    grads = gradients(seed, rounds=1)

    def chosen(link, compressor=CASES["tree"]):
        tx = jc.compressed_mean(jc.error_feedback(compressor), AXIS, "auto", link=link)
        directions, state = run_vmap(tx, PARAMS, grads)
        return jc.info(state).chosen, directions

    assert chosen(SLOW)[0] == "ring"
    assert chosen(Link(1.0, 1e6))[0] == "gather"
    assert chosen(SLOW, CASES["equal"])[0] == "gather"


def test_auto_says_what_it_chose_for_others_too(seed):
    grads = gradients(seed, rounds=1)
    for compressor, name in ((jc.identity(), "sum"), (jc.top_k(0.1), "gather")):
        _, state = run_vmap(jc.compressed_mean(jc.direct(compressor), AXIS), PARAMS, grads)
        assert jc.info(state).chosen == name


def test_gathering_padded_messages_warns_when_padding_eats_the_saving(seed):
    tx = jc.compressed_mean(jc.error_feedback(jc.dagc(VOLUMES, 0.1)), AXIS, "gather")
    with pytest.warns(UserWarning, match=r"1\.9\d times the mean"):
        run_vmap(tx, PARAMS, gradients(seed, rounds=1))


def test_ragged_is_refused_where_the_backend_has_none(seed):
    tx = jc.compressed_mean(jc.error_feedback(jc.dagc(VOLUMES, 0.1)), AXIS, "ragged")
    with pytest.raises(ValueError, match='this backend has no ragged_all_to_all; use via="ring"'):
        run_vmap(tx, PARAMS, gradients(seed, rounds=1))


@pytest.mark.slow
def test_ragged_by_the_definition_of_its_collective(seed, monkeypatch):
    """XLA's CPU backend lacks it: here it is written with all_gather, as its documentation says."""
    grads = gradients(seed, rounds=1)
    want, _ = run_vmap(jc.compressed_mean(jc.error_feedback(CASES["bf16"]), AXIS, "ring"), PARAMS, grads)
    monkeypatch.setattr(collectives, "has_ragged", lambda: True)
    monkeypatch.setattr(lax, "ragged_all_to_all", ragged_by_definition)
    tx = jc.compressed_mean(jc.error_feedback(CASES["bf16"]), AXIS, "ragged")
    got, state = run_vmap(tx, PARAMS, grads)
    assert bits(got) == bits(want)
    assert jc.info(state).chosen == "ragged"


# ------------------------------------------------------------------------------------------------
# The compressor


def assert_is_weighted_error_feedback(compressor, sent_of, d, seed):
    """Four rounds against float64, in which a worker sends `sent_of` its message; returns the state."""
    grads = gradients(seed, 4, jnp.zeros(d))
    directions, state = run_vmap(jc.compressed_mean(jc.error_feedback(compressor), AXIS, "ring"), jnp.zeros(d), grads)
    memory, weights = np.zeros((N, d)), np.array(VOLUMES) / 100
    for direction, g in zip(directions, grads, strict=True):
        message = memory + np.asarray(g, np.float64)
        sent = sent_of(message)
        memory = message - sent
        np.testing.assert_allclose(direction, weights @ sent, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(state.local.algorithm.memory[0][:, 0], memory, rtol=1e-5, atol=1e-5)
    return state


def test_dagc_is_weighted_error_feedback_with_a_count_for_each_worker(seed):
    counts = jc.allocate.counts(jc.allocate.ratios(VOLUMES, 0.05), 500)
    assert counts.sum() == 100
    sent_of = lambda message: np.array([oracles.top_k(m, k) for m, k in zip(message, counts, strict=True)])
    state = assert_is_weighted_error_feedback(jc.dagc(VOLUMES, 0.05), sent_of, 500, seed)
    np.testing.assert_allclose(jc.info(state, each=True).achieved_ratio, counts / 500)


def test_own_weights_take_the_place_of_the_volumes(seed):
    grads = gradients(seed, 1, jnp.zeros(50))
    tx = jc.compressed_mean(jc.direct(jc.dagc(VOLUMES, 1.0)), AXIS, weights=[0, 0, 1, 1])
    directions, _ = run_vmap(tx, jnp.zeros(50), grads)
    np.testing.assert_allclose(directions[0], np.asarray(grads)[0, 2:].mean(0), rtol=1e-6)


def test_ratios_may_change_from_round_to_round_without_compiling_again(seed):
    d = 400
    compressor = jc.dagc(VOLUMES, 0.05, capacity=2)
    tx = optax.chain(jc.compressed_mean(jc.error_feedback(compressor), AXIS, "concat"), optax.sgd(1.0))
    state, step = mesh_step(tx, jnp.zeros(d), mesh_of(N))
    grads = gradients(seed, 4, jnp.zeros(d))
    tables = [[0.01, 0.02, 0.03, 0.04], [0.0, 0.1, 0.0025, 0.01], [1.0, 1.0, 1.0, 1.0]]
    rooms = 2 * jc.allocate.counts(jc.allocate.ratios(VOLUMES, 0.05), d)
    for t, table in enumerate(tables):
        state = jax.device_put(jc.state.set_amounts(state, table), jax.tree.map(lambda x: x.sharding, state))
        _, state = jax.block_until_ready(step(state, grads[t]))
        wanted = np.rint(np.array(table) * d)
        got = jc.info(state, each=True)
        np.testing.assert_array_equal(np.rint(got.achieved_ratio * d), np.minimum(wanted, rooms))
        np.testing.assert_array_equal(got.overflow, np.maximum(wanted - rooms, 0))
    assert step._cache_size() == 1


def test_amounts_for_each_array_and_traced():
    compressor = jc.per_leaf(jc.dagc([1, 1], 0.1, capacity=5), dense_below=10)
    state = compressor.init(jax.random.key(0), {"a": jnp.zeros(20), "b": jnp.zeros(40)})

    @jax.jit
    def sent(first, second):
        changed = jc.state.set_amounts(state, [first, second])
        changed = State(changed.local, for_worker(compressor, changed.shared, 0))
        payload, _ = compressor.compress(jax.random.key(1), {"a": jnp.arange(20.0), "b": jnp.arange(40.0)}, changed)
        return [jnp.sum(part.values != 0) for part in payload.leaves]

    assert [int(n) for n in sent(jnp.array([0.1, 0.5]), jnp.array([0.5, 0.1]))] == [2, 20]
    assert [int(n) for n in sent(jnp.array([0.5, 0.5]), jnp.array([0.2, 0.1]))] == [10, 8]


@pytest.mark.sampled
@pytest.mark.parametrize("number", range(4))
def test_the_number_of_the_worker_decides_the_share(number):
    compressor = jc.dagc([0, 1, 4, 16], 0.1)
    x = jnp.arange(1.0, 101.0)
    state = compressor.init(jax.random.key(0), x)

    @jax.jit
    def run(number):
        own = State(state.local, for_worker(compressor, state.shared, number))
        payload, _ = compressor.compress(jax.random.key(0), x, own)
        return payload, compressor.decompress(payload, state.shared, x)

    payload, x_hat = run(jnp.int32(number))
    k = int(jc.allocate.counts(jc.allocate.ratios([0, 1, 4, 16], 0.1), 100)[number])
    assert np.sum(np.asarray(payload.indices) < 100) == k
    np.testing.assert_array_equal(x_hat, np.where(np.arange(100) >= 100 - k, x, 0))
    assert isinstance(state.shared, Amounts)
    assert compressor.spec.alpha(100) == pytest.approx(0.04)


def sent_by(compressor, number, x):
    state = compressor.init(jax.random.key(0), x)
    own = State(state.local, for_worker(compressor, state.shared, number))
    payload, local = jax.jit(compressor.compress)(jax.random.key(0), x, own)
    assert np.all(np.diff(payload.indices[payload.indices < x.size]) > 0)
    return np.asarray(payload.indices[payload.indices < x.size]), int(left(compressor, local).overflow)


@pytest.mark.slow
@pytest.mark.parametrize("size", variants([600, 40_000], {600}))
def test_every_sparsifier_keeps_the_largest_within_the_room_of_its_worker(size, seed):
    """Short vectors are sorted, long ones are not; both must agree with a sort."""
    x = jnp.asarray(np.random.default_rng(seed).laplace(size=size), jnp.float32)
    order = np.argsort(-np.abs(np.asarray(x)), kind="stable")
    share = jc.allocate.counts(jc.allocate.ratios(VOLUMES, 0.05), size)
    base = float(np.abs(x)[order[size // 20]])
    each = jc.allocate.thresholds(VOLUMES, base)
    room = np.ceil(1.25 * jc.allocate.counts(jc.allocate.ratios(VOLUMES, 0.05, rule=2 / 3), size) - 1e-9)
    for number in (0, 3):
        largest, overflow = sent_by(jc.dagc(VOLUMES, 0.05), number, x)
        np.testing.assert_array_equal(largest, np.sort(order[: share[number]]))
        assert overflow == 0
        fitted, _ = sent_by(jc.dagc(VOLUMES, 0.05, sparsifier=jc.sidco), number, x)
        assert 0.75 * share[number] <= fitted.size <= np.ceil(1.25 * share[number])
        np.testing.assert_array_equal(fitted, np.sort(order[: fitted.size]))
        compressor = jc.dagc(VOLUMES, 0.05, sparsifier=jc.contrib.hard_threshold, base=base, rule="released")
        above, overflow = sent_by(compressor, number, x)
        wanted = max(np.sum(np.abs(x) > np.float32(each[number])), 1)
        np.testing.assert_array_equal(above, np.sort(order[: above.size]))
        assert above.size == wanted if wanted <= room[number] else 7 / 8 * room[number] <= above.size <= room[number]
        assert overflow == max(wanted - room[number], 0) or wanted == 1


def test_thresholds_of_workers_are_weighted_error_feedback_too(seed):
    """DAGC-A over rounds: what is not sent stays, entry by entry, below the threshold or without room."""
    compressor = jc.dagc(VOLUMES, 0.5, sparsifier=jc.contrib.hard_threshold, rule="released", base=1.0, capacity=2)
    each = jc.allocate.thresholds(VOLUMES, 1.0)[:, None]

    def sent_of(message):
        size = np.abs(message)
        return np.where((size > each) | (size == size.max(1, keepdims=True)), message, 0)

    assert_is_weighted_error_feedback(compressor, sent_of, 300, seed)


@pytest.mark.sampled
@pytest.mark.parametrize("params", [{}, {"s": jnp.zeros(())}, {"a": jnp.zeros((0,)), "b": jnp.zeros(1)}], ids=str)
@pytest.mark.parametrize("via", ["concat", "ring"])
def test_empty_and_tiny_trees(params, via, seed):
    grads = gradients(seed, rounds=1, params=params)
    tx = jc.compressed_mean(jc.error_feedback(jc.dagc(VOLUMES, 0.5)), AXIS, via)
    if params:
        want = jax.tree.map(lambda g: np.average(g, axis=1, weights=VOLUMES), grads)
        got = run_vmap(tx, params, grads)[0]
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5)
    else:
        direction, _ = jax.vmap(lambda i: tx.update({}, tx.init({})), axis_name=AXIS, out_axes=None)(jnp.arange(4))
        assert direction == {}


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match=r"dagc: mean_ratio must be in \(0, 1\]; got 0"):
        jc.dagc([1, 2], 0)
    with pytest.raises(ValueError, match=r"dagc: mean_ratio must be in \(0, 1\]; got None"):
        jc.dagc([1, 2], None)
    with pytest.raises(ValueError, match=r"dagc: capacity must be at least 1; got 0\.5"):
        jc.dagc([1, 2], 0.1, capacity=0.5)
    with pytest.raises(ValueError, match=r"dagc: sparsifier must be one of jc\.top_k"):
        jc.dagc([1, 2], 0.1, sparsifier=jc.rand_k)
    with pytest.raises(ValueError, match=r"dagc: base .* must be None for top_k; got 0\.1"):
        jc.dagc([1, 2], 0.1, base=0.1)
    with pytest.raises(ValueError, match=r"sparsifier=hard_threshold needs base, .*; got None"):
        jc.dagc([1, 2], 0.1, sparsifier=jc.contrib.hard_threshold)
    with pytest.raises(ValueError, match="volumes must be n finite numbers"):
        jc.dagc([1, -2], 0.1)
    with pytest.raises(ValueError, match="there is no dagc in this state"):
        jc.state.set_amounts(optax.adam(1e-3).init(PARAMS), [1, 2])
    state = jc.dagc([1, 2], 0.1).init(jax.random.key(0), jnp.zeros(9))
    with pytest.raises(ValueError, match=r"expected 2 amounts; got shape \(3,\)"):
        jc.state.set_amounts(state, [1, 2, 3])
    with pytest.raises(ValueError, match="3 lists of amounts for 1 compressed arrays"):
        jc.state.set_amounts(state, [[1, 2], [1, 2], [1, 2]])
    with pytest.raises(ValueError, match=r"expected 2 amounts; got shape \(0,\)"):
        jc.state.set_amounts(state, [])
    tx = jc.compressed_mean(jc.error_feedback(jc.dagc([1, 2, 3], 0.1)), AXIS)
    with pytest.raises(ValueError, match="3 weights for 4 workers"):
        run_vmap(tx, PARAMS, gradients(0, rounds=1))
