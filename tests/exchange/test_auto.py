"""via="auto": it never sends more than uncompressed f32 where another route sends less, and says what it took."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from worlds import AXIS, run_shard_map, run_vmap

import jaxcomp as jc
from jaxcomp.exchange import collectives, driver

D = 4096
LIKE = {"w": jnp.zeros(D)}
STEP = jc.direct(jc.dithering(7))
# For each method the route among 2, 4, 8, 16 and 32 workers: a code of c bits is gathered by up to 64 / c of them.
TAKEN = {
    "dithering(7)": (STEP, ["gather"] * 3 + ["two_shot"] * 2),
    "int8+ef": (jc.error_feedback(jc.block_scaled("int8")), ["gather"] * 2 + ["two_shot"] * 3),
    "int4+ef": (jc.error_feedback(jc.block_scaled("int4")), ["gather"] * 3 + ["two_shot"] * 2),
    "sign+ef": (jc.error_feedback(jc.sign()), ["gather"] * 5),
    "top_k(0.1)+ef": (jc.error_feedback(jc.top_k(0.1)), ["gather"] * 3 + ["two_shot"] * 2),
    "top_k(0.01)+ef": (jc.error_feedback(jc.top_k(0.01)), ["gather"] * 5),
    "diana(dithering(7))": (jc.diana(jc.dithering(7)), ["gather"] * 3 + ["sum"] * 2),
    "per_leaf": (jc.error_feedback(jc.per_leaf(jc.block_scaled("int4"))), ["gather"] * 3 + ["sum"] * 2),
    "dithering(1)": (jc.direct(jc.dithering(1)), ["gather"] * 4 + ["sum"]),
    "bf16": (jc.direct(jc.cast("bfloat16")), ["sum"] * 5),
    "bf16+ef": (jc.error_feedback(jc.cast("bfloat16")), ["gather"] + ["sum"] * 4),
    "f32": (jc.direct(jc.identity()), ["sum"] * 5),
}


@pytest.fixture
def said(monkeypatch):
    """(route, bytes) of a round, as `info` has them, from shapes alone."""
    found, counts_of = [], driver.counts_of

    def noted(*counted):
        *_, sent_bytes, route = counted
        found.append((route, sent_bytes))
        return counts_of(*counted)

    monkeypatch.setattr(driver, "counts_of", noted)

    def one(algorithm, workers, like=LIKE, **options):
        tx = jc.compressed_mean(algorithm, AXIS, **options)
        grads = jax.tree.map(lambda x: jax.ShapeDtypeStruct((workers, *x.shape), x.dtype), like)
        step = lambda g: tx.update(g, tx.init(like))
        jax.eval_shape(jax.vmap(step, axis_name=AXIS), grads)
        return found[-1]

    return one


def dense(workers, size=D):
    return 8 * (workers - 1) / workers * size


@pytest.mark.parametrize(
    "workers", [2, pytest.param(4, marks=pytest.mark.slow), 8, 16, pytest.param(32, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", TAKEN)
def test_no_more_than_an_all_reduce_of_f32(name, workers, said):
    algorithm, routes = TAKEN[name]
    route, sent = said(algorithm, workers)
    assert route == routes[[2, 4, 8, 16, 32].index(workers)]
    assert sent <= dense(workers)


def test_where_the_choice_stays_nothing_changes(seed):
    """Bit for bit what a gather gives."""
    grads = {"w": jnp.asarray(np.random.default_rng(seed).standard_normal((2, 4, D)), jnp.float32)}
    for algorithm in (STEP, jc.error_feedback(jc.top_k(0.01))):
        auto, gathered = (run_vmap(jc.compressed_mean(algorithm, AXIS, via), LIKE, grads) for via in ("auto", "gather"))
        jax.tree.map(np.testing.assert_array_equal, auto, gathered)


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize("exact", [False, True])
def test_narrow_floats_are_gathered_where_that_is_less(platform, exact, monkeypatch):
    """On a TPU the all-to-all of a sum counts whole: between slices the part that stays is handed over, too."""
    monkeypatch.setattr(collectives, "platform", lambda: platform)
    found = [n for n in range(2, 17) if collectives.gathers_for_less(n, exact)]
    assert (
        found == {("cpu", False): [], ("cpu", True): [2], ("tpu", False): [2], ("tpu", True): [2, 3]}[platform, exact]
    )


def test_two_gathered_bf16_messages_give_the_mean_of_their_sum(seed):
    grads = {"w": jnp.asarray(np.random.default_rng(seed).standard_normal((3, 2, D)), jnp.float32)}
    feedback = jc.error_feedback(jc.cast("bfloat16"))
    one, two = (run_vmap(jc.compressed_mean(feedback, AXIS, via), LIKE, grads) for via in ("auto", "sum"))
    np.testing.assert_array_equal(one[0]["w"], two[0]["w"])
    assert jc.info(one[1]).sent_bytes == 2 * D < jc.info(two[1]).sent_bytes


@pytest.mark.filterwarnings("ignore:compressed_mean. this exchange sends")
def test_decoded_messages_give_the_mean_of_a_gather(seed):
    """A shift keeps in step with it; on a mesh, too, where the type of the mean says that it is equal everywhere."""
    grads = {"w": jnp.asarray(np.random.default_rng(seed).standard_normal((3, 4, D)), jnp.float32)}
    sparse = jc.diana(jc.bernoulli(np.full(D, 0.5, np.float32)))  # 8 bytes for more than half of the entries
    auto, state = run_shard_map(jc.compressed_mean(sparse, AXIS), LIKE, grads)
    gathered, _ = run_shard_map(jc.compressed_mean(sparse, AXIS, "gather"), LIKE, grads)
    np.testing.assert_allclose(auto["w"], gathered["w"], rtol=1e-5, atol=1e-6)
    assert jc.info(state).chosen == "sum"


@pytest.mark.slow
def test_a_state_that_does_not_know_its_workers_keeps_its_layout():
    """`tx.init` outside of any mesh: among 16 workers messages are then decoded and added."""
    tx = optax.chain(jc.compressed_mean(STEP, AXIS), optax.sgd(0.1))
    state = tx.init(LIKE)
    step = lambda g: tx.update(g, state)[1]
    after = jax.vmap(step, axis_name=AXIS, axis_size=16)({"w": jnp.ones((16, D))})
    assert jc.info(after).chosen == "sum"
    inside = lambda g: tx.update(g, tx.init(LIKE))[1]
    assert jc.info(jax.vmap(inside, axis_name=AXIS)({"w": jnp.ones((16, D))})).chosen == "two_shot"


def test_more_than_f32_is_warned_of(said):
    with pytest.warns(
        UserWarning, match=r"sends 1,031,680 bytes from each of 32 workers by 'gather'.* would send 507,904"
    ):
        said(STEP, 32, {"w": jnp.zeros(2**16)}, via="gather")


@pytest.mark.filterwarnings("ignore:compressed_mean. this exchange sends")
@pytest.mark.parametrize(("old", "new"), [(4, 16), pytest.param(16, 20, marks=pytest.mark.slow)])
def test_other_numbers_of_workers_with_another_choice(old, new, seed):
    """Memories keep their sum across layouts."""
    tx = jc.compressed_mean(jc.error_feedback(jc.block_scaled("int4")), AXIS)
    grads = {"w": jnp.asarray(np.random.default_rng(seed).standard_normal((2, old, D)), jnp.float32)}
    _, before = run_vmap(tx, LIKE, grads)
    after = jc.redistribute(before, jc.init_state(tx, LIKE, new, AXIS)[0])
    total = lambda state: np.float64(state.local.algorithm.memory[0]).reshape(len(state.local.counts.size), -1).sum(0)
    np.testing.assert_allclose(total(before)[:D], total(after)[:D], atol=1e-5)
    if new == 16:
        with pytest.raises(ValueError, match=r'gathers among the new ones.* via="two_shot"'):
            jc.redistribute(after, before)
