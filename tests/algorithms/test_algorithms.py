"""Algorithms against their float64 recursions, in every world, and their theory."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
from variants import variants
from worlds import AXIS, run_pmap, run_shard_map, run_vmap

import jaxcomp as jc
from jaxcomp.base import State

N, ROUNDS, SIZE = 4, 5, 60


def gradients(seed, dtype=np.float32):
    """[rounds, workers, d]: each worker around its own point, as with heterogeneous data."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((1, N, SIZE)) + 0.3 * rng.standard_normal((ROUNDS, N, SIZE))).astype(dtype)


WORLDS = {
    "shard_map": run_shard_map,
    "shard_map-unchecked": lambda *a: run_shard_map(*a, check_vma=False),
    "vmap": run_vmap,
    "pmap": run_pmap,
}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("decay", [1.0, 0.9])
def test_error_feedback_is_the_oracle(world, decay, seed):
    grads = gradients(seed)
    tx = jc.compressed_mean(jc.error_feedback(jc.top_k(k=6), decay=decay), AXIS)
    directions, state = WORLDS[world](tx, jnp.zeros(SIZE), jnp.asarray(grads))
    want, memory = oracles.error_feedback(np.float64(grads), lambda x: oracles.top_k(x, 6), decay)
    np.testing.assert_allclose(directions, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(np.reshape(state.local.algorithm.memory, (N, SIZE)), memory, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("world", WORLDS)
def test_diana_is_the_oracle(world, seed):
    """With the identity, whose draw is known: omega = 0, any alpha up to 1."""
    grads = gradients(seed)
    tx = jc.compressed_mean(jc.diana(jc.identity(), alpha=0.3), AXIS)
    directions, state = WORLDS[world](tx, jnp.zeros(SIZE), jnp.asarray(grads))
    want, shifts = oracles.diana(np.float64(grads), lambda x: x, 0.3)
    np.testing.assert_allclose(directions, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(np.reshape(state.local.algorithm.shift, (N, SIZE)), shifts, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("world", WORLDS)
def test_weights(world, seed):
    grads = gradients(seed)
    weights = [1, 2, 3, 10]
    tx = jc.compressed_mean(jc.error_feedback(jc.top_k(k=6)), AXIS, weights=weights)
    directions, state = WORLDS[world](tx, jnp.zeros(SIZE), jnp.asarray(grads))
    want, memory = oracles.error_feedback(np.float64(grads), lambda x: oracles.top_k(x, 6), weights=weights)
    np.testing.assert_allclose(directions, want, rtol=1e-5, atol=1e-6)
    # The weight multiplies what is sent, never the memory.
    np.testing.assert_allclose(np.reshape(state.local.algorithm.memory, (N, SIZE)), memory, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("masking", [False, True])
def test_momentum_correction_is_the_oracle(nesterov, masking, seed):
    grads = gradients(seed)
    algorithm = jc.momentum_correction(jc.top_k(k=6), momentum=0.8, nesterov=nesterov, masking=masking)
    directions, _ = run_shard_map(jc.compressed_mean(algorithm, AXIS), jnp.zeros(SIZE), jnp.asarray(grads))
    want = oracles.momentum_correction(np.float64(grads), lambda x: oracles.top_k(x, 6), 0.8, nesterov, masking)
    np.testing.assert_allclose(directions, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_of_dense_leaves_comes_after_the_mean(nesterov, seed):
    """Small leaves go dense: for them the whole is SGD with momentum, as it is for large ones if all is sent."""
    tree = {"b": jnp.zeros(5), "w": jnp.zeros(1500)}
    rng = np.random.default_rng(seed)
    grads = jax.tree.map(lambda p: jnp.asarray(rng.standard_normal((ROUNDS, N, *p.shape)), p.dtype), tree)
    algorithm = jc.momentum_correction(jc.top_k(1.0), momentum=0.8, nesterov=nesterov, masking=False)
    directions, _ = run_shard_map(jc.compressed_mean(algorithm, AXIS), tree, grads)
    trace = optax.trace(0.8, nesterov=nesterov)
    state = trace.init(tree)
    for t in range(ROUNDS):
        want, state = trace.update(jax.tree.map(lambda g: g[t].mean(0), grads), state)  # noqa: B023
        for name in tree:
            np.testing.assert_allclose(directions[name][t], want[name], rtol=1e-4, atol=1e-5)


def test_local_clipping(seed):
    """Each worker's gradient is cut to clip_norm / sqrt(n), over all leaves, before it is accumulated."""
    grads = gradients(seed)
    algorithm = jc.momentum_correction(jc.top_k(1.0), momentum=0, clip_norm=2.0, workers=N)
    directions, _ = run_shard_map(jc.compressed_mean(algorithm, AXIS), jnp.zeros(SIZE), jnp.asarray(grads))
    norms = np.linalg.norm(grads, axis=-1, keepdims=True)
    want = (grads * np.minimum(1, 2.0 / np.sqrt(N) / norms)).mean(1)
    np.testing.assert_allclose(directions, want, rtol=1e-5, atol=1e-6)


TREE = {"b": jnp.zeros(7), "s": jnp.zeros(()), "w": jnp.zeros((40, 50))}
ALGORITHMS = {
    "direct-identity": jc.direct(jc.identity()),
    "direct-bf16": jc.direct(jc.cast("bfloat16")),
    "direct-rand_k": jc.direct(jc.rand_k(0.1)),
    "direct-dithering": jc.direct(jc.dithering(7)),
    "ef-top_k": jc.error_feedback(jc.top_k(0.05)),
    "ef-sidco-flat": jc.error_feedback(jc.flat(jc.sidco(0.05))),
    "momentum-dgc": jc.momentum_correction(jc.dgc(0.05), clip_norm=1.0, workers=N),
    "ef-redsync": jc.error_feedback(jc.redsync(0.05)),
    "ef-trimmed": jc.error_feedback(jc.redsync(0.05, method="trimmed")),
    "ef-gaussian_k": jc.error_feedback(jc.gaussian_k(0.05)),
    "ef-sidco-paper": jc.error_feedback(jc.sidco(0.05, law="pareto", adapt="paper")),
    "ef-narrow": jc.error_feedback(jc.narrow(jc.sidco(0.05), values="bfloat16", indices="uint16")),
    "ef-rand_k": jc.error_feedback(jc.contract(jc.rand_k(0.1))),
    "ef-compose": jc.error_feedback(jc.compose(jc.top_k(0.05), jc.natural())),
    "diana-dithering": jc.diana(jc.dithering(7)),
    "diana-rand_k": jc.diana(jc.rand_k(0.2)),
    "diana-bernoulli": jc.diana(jc.bernoulli(0.2)),
}


# One for each kind of payload, of shared state and of memory.
KINDS = {"ef-sidco-flat", "diana-rand_k"}


def tree_gradients(seed, tree=TREE):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda p: jnp.asarray(rng.standard_normal((ROUNDS, N, *p.shape)), p.dtype), tree)


@pytest.mark.parametrize("name", variants(ALGORITHMS, {"ef-sidco-flat"}))
def test_all_worlds_agree_and_shared_state_is_shared(name, seed):
    grads = tree_gradients(seed)
    tx = jc.compressed_mean(ALGORITHMS[name], AXIS)
    results = {world: run(tx, TREE, grads) for world, run in WORLDS.items()}
    reference, reference_state = results["shard_map"]
    for directions, state in results.values():
        for a, b in zip(jax.tree.leaves(directions), jax.tree.leaves(reference), strict=True):
            # Dithering may round a norm, and so a level at its edge, differently when vmapped.
            close = np.isclose(a, b, rtol=1e-5, atol=1e-6)
            assert close.mean() > 0.999
        assert int(np.ravel(state.shared.count)[0]) == ROUNDS
    for leaf in jax.tree.leaves(reference_state.shared):
        copies = [np.asarray(shard.data) for shard in leaf.addressable_shards]
        assert len(copies) == N
        assert all(copy.tobytes() == copies[0].tobytes() for copy in copies)
    # pmap keeps one copy for each worker; they must be the same bits as well.
    for leaf in jax.tree.leaves(results["pmap"][1].shared):
        assert all(np.asarray(row).tobytes() == np.asarray(leaf[0]).tobytes() for row in leaf)


@pytest.mark.parametrize("name", variants(ALGORITHMS, KINDS))
def test_messages_as_bytes_give_the_same_round(name, key, seed):
    """Workers and server as plain Python: send, encode, decode, accumulate, receive."""
    algorithm = ALGORITHMS[name]
    grads = jax.tree.map(lambda g: g[0], tree_gradients(seed))
    tx = jc.compressed_mean(algorithm, AXIS, via="gather", seed=key)
    direction, _ = run_vmap(tx, TREE, jax.tree.map(lambda g: g[None], grads))

    shared_key, private_key = jax.random.split(key)
    state = algorithm.init(shared_key, TREE)
    arrived = []
    for i in range(N):
        private = jax.random.fold_in(jax.random.fold_in(private_key, 0), i)
        mine = jax.tree.map(lambda g, i=i: g[i], grads)
        payload, _ = jax.jit(algorithm.send)(private, mine, state)
        arrived.append(jc.wire.decode(jc.wire.encode(payload)))
    total = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), TREE)
    for payload in arrived:
        x_hat = algorithm.compressor.decompress(payload, state.shared.compressor, TREE)
        total = jax.tree.map(lambda t, x: t + x.astype(jnp.float32), total, x_hat)
    want, _ = algorithm.receive(jax.tree.map(lambda t: t / N, total), state.shared)
    for a, b in zip(jax.tree.leaves(direction), jax.tree.leaves(want), strict=True):
        assert np.isclose(a[0], b, rtol=1e-5, atol=1e-6).mean() > 0.999


def test_error_feedback_conserves_bitwise(seed):
    """sent + memory = gradient + old memory, exactly, every round."""
    grads = gradients(seed)[:, 0]
    algorithm = jc.error_feedback(jc.sidco(0.1))
    state = algorithm.init(jax.random.key(0), jnp.zeros(SIZE))
    for g in grads:
        message = np.asarray(algorithm.message(jnp.asarray(g), state.local))
        payload, local = algorithm.send(jax.random.key(0), jnp.asarray(g), state)
        sent = algorithm.compressor.decompress(payload, (), jax.ShapeDtypeStruct((SIZE,), jnp.float32))
        np.testing.assert_array_equal(np.asarray(sent) + np.asarray(local.memory), message)
        state = State(local, state.shared)


def test_everything_arrives_in_the_end():
    """One gradient and then zeros: the sum of all directions is the gradient."""
    g = jnp.asarray(np.random.default_rng(0).standard_normal(50), jnp.float32)
    tx = jc.compressed_mean(jc.error_feedback(jc.top_k(k=5)), None)
    state, total = tx.init(g), 0.0
    for t in range(10):
        direction, state = tx.update(g if t == 0 else jnp.zeros(50), state)
        total = total + direction
    np.testing.assert_array_equal(total, g)


QUADRATIC = np.random.default_rng(5).standard_normal((N, 40))


def minimise(algorithm, step, rounds):
    """f_i(x) = |x - b_i|^2 / 2 from zero; squared distance to the mean of the b_i, relative."""
    tx = jc.compressed_mean(algorithm, AXIS, measure=False)
    targets = jnp.asarray(QUADRATIC, jnp.float32)

    def worker(target):
        def body(carry, _):
            x, state = carry
            direction, state = tx.update(x - target, state)
            return (x - step * direction, state), None

        x = jnp.zeros(40)
        (x, _), _ = jax.lax.scan(body, (x, tx.init(x)), length=rounds)
        return x

    x = jax.jit(jax.vmap(worker, axis_name=AXIS))(targets)[0]
    best = QUADRATIC.mean(0)
    return float(np.sum((np.asarray(x) - best) ** 2) / np.sum(best**2))


def test_diana_reaches_the_optimum_where_direct_stops_in_a_ball():
    compressor = jc.dithering(2)
    assert minimise(jc.diana(compressor), 0.3, 400) < 1e-10
    assert minimise(jc.direct(compressor), 0.3, 400) > 1e-3


def test_error_feedback_reaches_the_optimum_where_top_k_alone_does_not():
    # With a constant step a ball of the size of the step remains (heterogeneous workers).
    assert minimise(jc.error_feedback(jc.top_k(0.1)), 0.01, 3000) < 1e-2
    assert minimise(jc.direct(jc.top_k(0.1)), 0.01, 3000) > 5e-2


BAD = [
    (lambda: jc.error_feedback(jc.rand_k(0.1)), r"needs a contraction; rand_k\(0.1\) is not one. Wrap it: contract"),
    (lambda: jc.error_feedback(jc.dithering(3)), r"Wrap it: contract\(dithering"),
    (lambda: jc.error_feedback(jc.cast("float16", scaled=False)), "Its alpha is not known"),
    (lambda: jc.error_feedback(jc.top_k(0.1), decay=1.5), r"decay must be in \[0, 1\]; got 1.5"),
    (
        lambda: jc.error_feedback(jc.compose(jc.top_k(0.5), jc.dithering(1))).init(jax.random.key(0), jnp.zeros(10000)),
        "has alpha = -",
    ),
    (lambda: jc.momentum_correction(jc.rand_k(0.1)), "needs a contraction"),
    (lambda: jc.momentum_correction(jc.dgc(0.1), momentum=1), r"momentum must be in \[0, 1\); got 1"),
    (lambda: jc.momentum_correction(jc.dgc(0.1), clip_norm=1.0), "give clip_norm and workers"),
    (lambda: jc.momentum_correction(jc.dgc(0.1), clip_norm=-1.0, workers=2), "clip_norm must be positive"),
    (lambda: jc.diana(jc.top_k(0.1)), r"Use error_feedback\(top_k\(0.1\)\) instead"),
    (lambda: jc.diana(jc.rand_k(0.1), alpha=0.0), "alpha must be in"),
    (lambda: jc.diana(jc.rand_k(0.1), alpha=0.5).init(jax.random.key(0), jnp.zeros(100)), r"= \(0, 0.1\]; got 0.5"),
    (lambda: jc.direct(jc.cast("float16", scaled=False)), "known error bound"),
    (lambda: jc.compressed_mean(jc.direct(jc.identity()), AXIS, via="pigeon"), "via must be one of 'auto'"),
    (lambda: jc.compressed_mean(jc.direct(jc.top_k(0.1)), AXIS, via="sum"), "needs a linear compressor"),
    (lambda: jc.compressed_mean(jc.direct(jc.identity()), AXIS, weights=[1, -1]), "weights must be n numbers >= 0"),
    (lambda: jc.compressed_mean(jc.direct(jc.identity()), AXIS, weights=[0, 0]), "weights must be n numbers >= 0"),
]


@pytest.mark.parametrize(("make", "message"), BAD, ids=[message for _, message in BAD])
def test_theory_and_arguments_are_checked_when_built(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_algorithms_take_optax_style_trees():
    """Anything that optax accepts as a tree: nested dicts, tuples, NamedTuples."""
    tree = optax.ScaleByAdamState(jnp.zeros(3), {"a": jnp.zeros(2000)}, (jnp.zeros(()),))
    tx = jc.compressed_mean(jc.error_feedback(jc.top_k(0.1)), None)
    direction, _ = tx.update(tree, tx.init(tree))
    assert jax.tree.structure(direction) == jax.tree.structure(tree)
