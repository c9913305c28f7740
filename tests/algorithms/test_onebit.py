"""1-bit Adam, 0/1 Adam and majority vote, against float64 transcriptions of the papers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from worlds import AXIS, run_shard_map

import jaxcomp as jc

N, D, ROUNDS = 4, 96, 9
B1, B2, EPS, RATE = 0.9, 0.99, 1e-8, 0.01


def scaled_signs(x, size):
    """Float64 oracle of `sign()` with blocks of `size` entries."""
    out = np.empty_like(x)
    for i in range(0, x.size, size):
        block = x[i : i + size]
        out[i : i + size] = np.where(block >= 0, 1, -1) * np.mean(np.abs(block))
    return out


class Mean:
    """Compressed means with the memories of workers and owners: of two shots, or of a gather."""

    def __init__(self, two_shot, size):
        self.two_shot, self.size = two_shot, size
        self.own, self.owners = np.zeros((N, D)), np.zeros(D)

    def __call__(self, messages, moved):
        c = messages + self.own
        sent = np.stack([scaled_signs(x, self.size) for x in c])
        self.own = np.where(moved, c - sent, 0)
        if not self.two_shot:
            return np.where(moved, sent.mean(0), 0)
        total = sent.mean(0) + self.owners
        mean = scaled_signs(total, self.size)
        self.owners = total - mean
        return np.where(moved, mean, 0)


def onebit_oracle(grads, freeze, mean):
    m = v = x = np.zeros(D)
    points = []
    for t, g in enumerate(grads, 1):
        if t <= freeze:
            m, v = B1 * m + (1 - B1) * g.mean(0), B2 * v + (1 - B2) * g.mean(0) ** 2
        else:
            m = mean(B1 * m + (1 - B1) * g, v > 0)
        scale = np.sqrt(v / (1 - B2 ** min(t, freeze))) + EPS
        x = x - RATE * np.where(v > 0, m / (1 - B1**t) / scale, 0)
        points.append(x)
    return np.stack(points)


def zero_one_oracle(grad_of, rounds, rates, freeze, repeat, double, longest, mean):
    m, u = np.zeros((N, D)), np.zeros((N, D))
    v, point, x, total, taken, next_v, next_sync = np.zeros(D), np.zeros(D), np.zeros((N, D)), 0.0, 0, 0, 0
    points = []
    for t in range(rounds):
        g, gamma = grad_of(t, x), rates(t)
        if t < freeze and t >= next_v:
            v, taken = B2 * v + (1 - B2) * g.mean(0) ** 2, taken + 1
            next_v = t + 2 ** (taken // repeat)
        scale = np.where(v > 0, np.sqrt(v / (1 - B2**taken)) + EPS, np.inf) * (1 - B1 ** (t + 1))
        m, before = B1 * m + (1 - B1) * g, u
        u, total = before + gamma * m, total + gamma
        if t >= next_sync:
            m = np.tile(mean(u / total, v > 0), (N, 1))
            point = point - total * m[0] / scale
            x, u, total = np.tile(point, (N, 1)), np.zeros((N, D)), 0.0
            since = max(t + 1 - freeze, 0)
            next_sync = t + (min(2 ** (since // double), longest) if since else 1)
        else:
            x = x - gamma * m / scale
        points.append(x)
    return np.stack(points)


@pytest.mark.sampled
@pytest.mark.parametrize("via", ["two_shot", "gather"])
def test_onebit_adam_equals_the_paper(via, seed):
    grads = np.random.default_rng(seed).standard_normal((ROUNDS, N, D)) + 0.3
    grads[:, :, 5] = 0  # without a gradient: stays where it is
    tx = jc.onebit_adam(RATE, AXIS, freeze_step=4, b1=B1, b2=B2, compressor=jc.sign(block_size=8), via=via)
    state, axes = jc.init_state(tx, jnp.zeros(D), N, AXIS)
    step = jax.jit(jax.vmap(tx.update, in_axes=(0, axes, None), out_axes=(None, axes), axis_name=AXIS))
    x, points, sent = jnp.zeros(D), [], []
    for g in jnp.asarray(grads, jnp.float32):
        updates, state = step(g, state, x)
        x = x + updates
        points.append(x)
        sent.append(float(jc.info(state).sent_bytes))
    want = onebit_oracle(grads, 4, Mean(via == "two_shot", 8))
    np.testing.assert_allclose(points, want, atol=2e-5)
    assert points[-1][5] == 0
    if via == "two_shot":  # one bit an entry and an f32 for 8 of them, each way
        assert sent[0] == 2 * (N - 1) / N * 4 * D
        assert sent[-1] == 2 * (N - 1) / N * (N * 4 + 4 * D / 8)  # chunks of 24 entries: a word each


@pytest.mark.parametrize("via", ["two_shot", pytest.param("gather", marks=pytest.mark.slow)])
def test_zero_one_adam_equals_the_paper(via, seed):
    """Own parameters between exchanges; the same point, up to the rounding of an update, after one."""
    rng = np.random.default_rng(seed)
    targets, rounds = rng.standard_normal((N, D)) + 2, 16
    rates = lambda t: RATE * (1 + 0.5 * (t % 3))
    tx = jc.zero_one_adam(
        lambda t: RATE * (1 + 0.5 * (t % 3).astype(jnp.float32)),
        AXIS,
        freeze_step=6,
        variance_repeat=2,
        double_every=3,
        longest=4,
        b1=B1,
        b2=B2,
        compressor=jc.sign(block_size=8),
        via=via,
    )
    state, axes = jc.init_state(tx, jnp.zeros(D), N, AXIS)
    step = jax.jit(jax.vmap(tx.update, in_axes=(0, axes, 0), out_axes=(0, axes), axis_name=AXIS))
    x, points, sent = jnp.zeros((N, D)), [], []
    for _ in range(rounds):
        updates, state = step(x - jnp.asarray(targets, jnp.float32), state, x)
        x = x + updates
        points.append(x)
        sent.append(float(jc.info(state).sent_bytes))
    want = zero_one_oracle(lambda t, x: x - targets, rounds, rates, 6, 2, 3, 4, Mean(via == "two_shot", 8))
    np.testing.assert_allclose(points, want, atol=1e-4)
    assert sum(bytes_ == 0 for bytes_ in sent) >= 4
    together = [np.abs(p - p[0]).max() < 1e-6 for p in points]
    assert together == [bytes_ > 0 for bytes_ in sent]


def test_majority_vote(seed):
    grads = np.random.default_rng(seed).standard_normal((3, 5, 60)).astype(np.float32)
    grads[:, :, :7] = 0
    for via in ("gather", "two_shot"):
        tx = jc.compressed_mean(jc.majority_vote(0.5), AXIS, via=via)
        state, axes = jc.init_state(tx, jnp.zeros(60), 5, AXIS)
        step = jax.jit(jax.vmap(tx.update, in_axes=(0, axes), out_axes=(None, axes), axis_name=AXIS))
        m = np.zeros((5, 60))
        for g in grads:
            direction, state = step(jnp.asarray(g), state)
            m = 0.5 * m + 0.5 * g
            np.testing.assert_array_equal(direction[7:], np.sign(np.sign(m).sum(0))[7:])
            np.testing.assert_array_equal(np.abs(direction), 1)  # five votes have no tie; zeros are voted on by coins
        per_entry = 8 * float(jc.info(state).sent_bytes) / (60 if via == "gather" else 5 * 32)
        assert per_entry == pytest.approx(4 * 64 / 60 if via == "gather" else 2 * 4 / 5)


@pytest.mark.slow
def test_coins_of_zeros_are_fair(seed):
    tx = jc.compressed_mean(jc.majority_vote(0.0), AXIS, via="two_shot", seed=seed)
    zeros = jnp.zeros((2, 4096))
    direction = jax.jit(jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name=AXIS, out_axes=None))(zeros)
    assert abs(float(jnp.mean(direction))) < 6 / 64
    np.testing.assert_array_equal(jnp.abs(direction), 1)


def test_under_shard_map(seed):
    """The types that shard_map asks for, and the same points as under vmap."""
    grads = jnp.asarray(np.random.default_rng(seed).standard_normal((4, 2, 64)), jnp.float32)
    params = jnp.zeros(64)
    for tx in (jc.onebit_adam(0.1, AXIS, freeze_step=2), jc.compressed_mean(jc.majority_vote(), AXIS)):
        got, _ = run_shard_map(tx, params, grads)
        state, axes = jc.init_state(tx, params, 2, AXIS)
        step = jax.jit(jax.vmap(tx.update, in_axes=(0, axes, None), out_axes=(None, axes), axis_name=AXIS))
        for g, direction in zip(grads, got, strict=True):
            want, state = step(g, state, params)
            np.testing.assert_allclose(direction, want, rtol=1e-5, atol=1e-7)


def test_zero_one_adam_under_shard_map(seed):
    mesh = jax.make_mesh((2,), (AXIS,), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))
    tx = jc.zero_one_adam(0.1, AXIS, freeze_step=2, double_every=1, longest=2)
    state, specs = jc.init_state(tx, jnp.zeros(64), mesh, AXIS)
    rows = jax.sharding.PartitionSpec(AXIS)

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(rows, specs, rows), out_specs=(rows, specs))
    def step(g, state, x):
        updates, state = tx.update(g[0], state, x[0])
        return (x[0] + updates)[None], state

    x = jnp.zeros((2, 64))
    for g in jnp.asarray(np.random.default_rng(seed).standard_normal((5, 2, 64)), jnp.float32):
        x, state = step(g, state, x)
    assert np.all(np.isfinite(x))


def test_a_state_moves_to_other_workers(seed):
    grads = jnp.asarray(np.random.default_rng(seed).standard_normal((4, 64)), jnp.float32)
    for tx in (jc.onebit_adam(0.1, AXIS, freeze_step=1), jc.compressed_mean(jc.majority_vote(), AXIS, via="gather")):
        old, axes = jc.init_state(tx, jnp.zeros(64), 4, AXIS)
        step = jax.jit(jax.vmap(tx.update, in_axes=(0, axes, None), out_axes=(None, axes), axis_name=AXIS))
        for _ in range(3):
            _, old = step(grads, old, jnp.zeros(64))
        new = jc.redistribute(old, jc.init_state(tx, jnp.zeros(64), 2, AXIS)[0])
        mean = new[0] if isinstance(new, tuple) and not hasattr(new, "local") else new
        before = old[0] if mean is not new else old
        if hasattr(mean.local.algorithm, "memory"):
            np.testing.assert_allclose(
                np.sum(mean.local.algorithm.memory[0], 0).reshape(-1)[:64],
                np.sum(before.local.algorithm.memory[0], 0).reshape(-1)[:64],
                rtol=1e-5,
                atol=1e-7,
            )
        else:
            momentum = jax.tree.leaves(before.local.algorithm.momentum)
            want = [np.mean(a, 0) for a in momentum]
            for got, one in zip(jax.tree.leaves(mean.local.algorithm.momentum), want, strict=True):
                np.testing.assert_allclose(got, np.stack([one] * 2), rtol=1e-6, atol=1e-7)


@pytest.mark.sampled
@pytest.mark.parametrize("workers", [1, 2, 6])
def test_zero_one_adam_moves_to_other_workers_between_exchanges(seed, workers):
    """What was not exchanged yet, and what signs left over, is conserved; momenta keep their mean."""
    tx = jc.zero_one_adam(0.1, AXIS, freeze_step=2, double_every=1, longest=4)
    old, axes = jc.init_state(tx, jnp.zeros(64), 4, AXIS)
    step = jax.jit(jax.vmap(tx.update, in_axes=(0, axes, 0), out_axes=(0, axes), axis_name=AXIS))
    x = jnp.zeros((4, 64))
    for g in jnp.asarray(np.random.default_rng(seed).standard_normal((6, 4, 64)), jnp.float32):
        updates, old = step(g, old, x)
        x = x + updates
    new = jc.redistribute(old, jc.init_state(tx, jnp.zeros(64), workers, AXIS)[0])
    was, now = (each.local.algorithm for each in (old, new))
    assert np.any(was.buffer[0] != 0)
    assert np.any(was.memory[0] != 0)
    rows = lambda x: np.float64(x[0]).reshape(len(x[0]), -1)[:, :64]  # cut for two shots, into a part for each worker
    for name in ("buffer", "memory"):
        before, after = rows(getattr(was, name)), rows(getattr(now, name))
        assert len(after) == workers
        np.testing.assert_allclose(after.sum(0), before.sum(0), rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(
        rows(now.momentum), np.tile(rows(was.momentum).mean(0), (workers, 1)), rtol=1e-6, atol=1e-8
    )
    for a, b in zip(jax.tree.leaves(new.shared.algorithm), jax.tree.leaves(old.shared.algorithm), strict=True):
        flat = [np.ravel(leaf)[:64] for leaf in (a, b)]
        np.testing.assert_array_equal(*flat)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: jc.onebit_adam(0.1, AXIS, freeze_step=0), "onebit_adam: freeze_step must be an integer of at least 1"),
        (lambda: jc.onebit_adam(0.1, AXIS, freeze_step=9, b1=1.0), r"onebit_adam: b1 must be in \[0, 1\); got 1.0"),
        (lambda: jc.onebit_adam(0.1, AXIS, freeze_step=9, compressor=jc.sign(1.0)), "onebit_adam needs a contraction"),
        (lambda: jc.zero_one_adam(0.1, AXIS, freeze_step=1, longest=0), "zero_one_adam: longest must be"),
        (lambda: jc.zero_one_adam(0.1, AXIS, freeze_step=1, eps=0.0), "zero_one_adam: eps must be positive"),
        (lambda: jc.majority_vote(1.0), "majority_vote: momentum must be in"),
        (lambda: jc.error_feedback(jc.sign(2.0)), "error_feedback needs a contraction"),
        (lambda: jc.sign("max"), 'sign: scale must be "mean", "l2" or a positive Python number'),
        (lambda: jc.terngrad(clip=0.0), "terngrad: clip must be positive"),
    ],
)
def test_errors(make, says):
    with pytest.raises(ValueError, match=says):
        make()


def test_zero_one_adam_needs_the_parameters():
    tx = jc.zero_one_adam(0.1, AXIS, freeze_step=1)
    with pytest.raises(ValueError, match="needs the parameters of this worker"):
        jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name=AXIS)(jnp.ones((2, 4)))
    optax.apply_updates(jnp.ones(2), jnp.ones(2))
