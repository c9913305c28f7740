"""MARINA: which rounds send everything, which the compressed difference, and what is counted for them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from worlds import AXIS, mesh_of

import jaxcomp as jc

N, D, K = 4, 64, 4


def runs(world, run, targets, count):
    """Infos and points of every round; f_i(x) = |x - b_i|^2 / 2."""
    if world == "vmap":
        state, axes = jc.init_state(run, jnp.zeros(D), N, AXIS)
        step = jax.vmap(lambda s, b: run.step(s, lambda x: x - b)[0], in_axes=(axes, 0), out_axes=axes, axis_name=AXIS)
    else:
        state, specs = jc.init_state(run, jnp.zeros(D), mesh_of(N), AXIS)
        step = lambda s, b: run.step(s, lambda x: x - b[0])[0]
        step = jax.shard_map(step, mesh=mesh_of(N), in_specs=(specs, P(AXIS)), out_specs=specs)
    step, infos, points = jax.jit(step), [], []
    book = jc.ledger(step, state, targets) if world == "shard_map" else None
    for _ in range(count):
        state = jax.block_until_ready(step(state, targets))
        infos.append(jc.info(state))
        points.append(np.asarray(run.point(state)))
    return infos, points, book


@pytest.mark.sampled
@pytest.mark.parametrize("world", ["vmap", "shard_map"])
def test_full_rounds_and_differences_are_counted_as_what_they_are(world, seed):
    targets = jnp.asarray(np.random.default_rng(seed).standard_normal((N, D)), jnp.float32)
    run, count = jc.methods.rounds(jc.methods.marina(jc.rand_k(k=K), 0.1, 0.4), AXIS, via="gather"), 12
    coin = jax.jit(run.init)(jnp.zeros(D)).shared.algorithm.coin
    tosses = [jax.random.fold_in(jax.random.wrap_key_data(coin.key), t) for t in range(count)]
    full = [t == 0 or bool(jax.random.bernoulli(key, 0.4)) for t, key in enumerate(tosses)]
    assert 1 < sum(full) < count
    infos, _, book = runs(world, run, targets, count)
    payload = jax.eval_shape(lambda x: jc.roundtrip(jc.rand_k(k=K), x, key=jax.random.key(0))[1], jnp.zeros(D))
    short = jc.lane_bytes(payload)
    assert short < 4 * D / 4
    assert [float(info.lane_bytes) for info in infos] == [4 * D if each else short for each in full]
    assert [info.chosen for info in infos] == ["sum" if each else "gather" for each in full]
    sent = [float(info.sent_bytes) for info in infos]
    assert sent == [2 * (N - 1) / N * 4 * D if each else (N - 1) * short for each in full]
    assert [float(info.achieved_ratio) for info in infos] == pytest.approx([1 if each else K / D for each in full])
    if book is not None:  # takes the dearest arm of a conditional
        assert book.total_bytes == max(sent)
        arms = {}
        for row in book.rows:
            arms[row.branch] = arms.get(row.branch, 0) + row.sent_bytes
        assert sorted(arms.values()) == sorted(set(sent))
        assert all(arms)


def test_the_direction_is_the_mean_gradient_after_a_full_round(seed):
    """With full = 1 it is gradient descent, one step late."""
    targets = jnp.asarray(np.random.default_rng(seed).standard_normal((N, D)), jnp.float32)
    _, points, _ = runs("vmap", jc.methods.rounds(jc.methods.marina(jc.rand_k(k=K), 0.1, 1.0), AXIS), targets, 4)
    x = np.zeros(D)
    for point in points:
        np.testing.assert_allclose(point, x, rtol=1e-5, atol=1e-6)
        x = x - 0.1 * (x - np.float64(targets).mean(0))
