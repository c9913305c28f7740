"""`rounds`: the same road as `compressed_mean`, with weights, over hierarchies, by two shots; and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
from jax.sharding import PartitionSpec as P
from worlds import AXIS, mesh_of

import jaxcomp as jc

N, D, ROUNDS, RATE = 4, 60, 5, 0.2
VOLUMES = [70, 20, 8, 2]
pytestmark = pytest.mark.usefixtures("standard_promotion")


def targets_of(seed, workers=N):
    return np.random.default_rng(seed).standard_normal((workers, D)).astype(np.float32)


def descended(method, targets, **options):
    """Points of all rounds of f_i(x) = |x - b_i|^2 / 2, from zero, and the last state."""
    run = jc.methods.rounds(method, AXIS, **options)
    state, axes = jc.init_state(run, jnp.zeros(D), len(targets), AXIS)
    step = lambda s, b: run.step(s, lambda x: x - b)[0]
    step = jax.jit(jax.vmap(step, in_axes=(axes, 0), out_axes=axes, axis_name=AXIS))
    points = []
    for _ in range(ROUNDS):
        state = step(state, jnp.asarray(targets))
        points.append(np.asarray(run.point(state)))
    return np.stack(points), state


def by_optax(algorithm, targets, **options):
    """The same by `compressed_mean` and SGD."""
    tx = optax.chain(jc.compressed_mean(algorithm, AXIS, **options), optax.sgd(RATE))
    state, axes = jc.init_state(tx, jnp.zeros(D), len(targets), AXIS)

    def step(x, state, b):
        updates, state = tx.update(x - b, state)
        return optax.apply_updates(x, updates), state

    step = jax.jit(jax.vmap(step, in_axes=(None, axes, 0), out_axes=(None, axes), axis_name=AXIS))
    x, points = jnp.zeros(D), []
    for _ in range(ROUNDS):
        x, state = step(x, state, jnp.asarray(targets))
        points.append(np.asarray(x))
    return np.stack(points), state


def by_hand(targets, counts, weights, feedback):
    """In float64: worker i sends its counts[i] largest entries, weighted."""
    x, memory, points = np.zeros(D), np.zeros(targets.shape), []
    for _ in range(ROUNDS):
        message = memory + x - np.float64(targets)
        sent = np.stack([oracles.top_k(m, k) for m, k in zip(message, counts, strict=True)])
        memory = message - sent if feedback else memory
        x = x - RATE * weights @ sent
        points.append(x)
    return np.stack(points)


@pytest.mark.sampled
@pytest.mark.parametrize("feedback", [False, True], ids=["direct", "error_feedback"])
def test_weights_that_the_compressor_brings(feedback, seed):
    """Volumes of dagc weigh the mean in rounds, too."""
    targets, compressor = targets_of(seed), jc.dagc(VOLUMES, 0.2)
    algorithm = jc.error_feedback(compressor) if feedback else jc.direct(compressor)
    points, state = descended(jc.methods.descend(algorithm, RATE), targets)
    counts = jc.allocate.counts(jc.allocate.ratios(VOLUMES, 0.2), D)
    assert len(set(counts)) > 1
    want = by_hand(targets, counts, np.array(VOLUMES) / 100, feedback)
    np.testing.assert_allclose(points, want, rtol=1e-4, atol=1e-5)
    other, after = by_optax(algorithm, targets)
    np.testing.assert_allclose(points, other, rtol=1e-5, atol=1e-6)
    assert jc.info(state).sent_bytes == jc.info(after).sent_bytes > 0


@pytest.mark.sampled
@pytest.mark.parametrize("own", [False, True], ids=["given", "instead-of-volumes"])
def test_weights_that_are_given(own, seed):
    targets, weights = targets_of(seed), [1, 0, 3, 4]
    compressor = jc.dagc(VOLUMES, 0.2) if own else jc.top_k(k=12)
    counts = jc.allocate.counts(jc.allocate.ratios(VOLUMES, 0.2), D) if own else [12] * N
    algorithm = jc.error_feedback(compressor)
    points, _ = descended(jc.methods.descend(algorithm, RATE), targets, weights=weights)
    want = by_hand(targets, counts, np.array(weights) / 8, True)
    np.testing.assert_allclose(points, want, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(points, by_optax(algorithm, targets, weights=weights)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["identity", "top_k"])
def test_by_two_shots(name, seed):
    targets = targets_of(seed)
    algorithm = jc.direct(jc.identity()) if name == "identity" else jc.error_feedback(jc.top_k(k=3))
    points, state = descended(jc.methods.descend(algorithm, RATE), targets, via="two_shot")
    assert jc.info(state).chosen == "two_shot"
    np.testing.assert_allclose(points, by_optax(algorithm, targets, via="two_shot")[0], rtol=1e-5, atol=1e-6)
    if name == "identity":
        np.testing.assert_allclose(points, by_hand(targets, [D] * N, np.full(N, 0.25), False), rtol=1e-4, atol=1e-5)


@pytest.mark.sampled
@pytest.mark.parametrize("inner", ["identity", "top_k"])
def test_a_hierarchy(inner, seed):
    """Means within pairs of devices, then a method between the pairs."""
    targets = targets_of(seed)
    first = jc.direct(jc.identity()) if inner == "identity" else jc.error_feedback(jc.top_k(k=30))
    levels = {"ici": first, "dcn": jc.methods.descend(jc.error_feedback(jc.top_k(k=12)), RATE)}
    mesh = mesh_of((2, 2), ("dcn", "ici"))
    run = jc.methods.rounds(None, levels)
    state, specs = jc.init_state(run, jnp.zeros(D), mesh, levels)
    both = P(("dcn", "ici"))

    def step(state, b):
        state, bits = run.step(state, lambda x: x - b[0])
        return state, bits[None]

    step = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(specs, both), out_specs=(specs, both)))
    x, one, two = np.zeros(D), np.zeros((4, D)), np.zeros((2, D))
    for _ in range(ROUNDS):
        state, bits = jax.block_until_ready(step(state, jnp.asarray(targets)))
        message = one + x - np.float64(targets)
        sent = message if inner == "identity" else np.stack([oracles.top_k(m, 30) for m in message])
        one = message - sent
        message = two + sent.reshape(2, 2, D).mean(1)
        sent = np.stack([oracles.top_k(m, 12) for m in message])
        two = message - sent
        x = x - RATE * sent.mean(0)
        np.testing.assert_allclose(np.reshape(run.point(state), (-1, D))[0], x, rtol=1e-4, atol=1e-5)
        assert np.all(np.asarray(bits) > 0)
    assert len(state) == 2
    np.testing.assert_allclose(np.reshape(state[1].local.algorithm.algorithm.memory, (2, -1, D))[:, 0], two, atol=1e-5)


def test_the_iterate_is_a_tree_and_takes_a_prox(seed):
    tree = {"a": jnp.ones((3, 2)), "b": jnp.full(4, 2.0)}
    run = jc.methods.rounds(jc.methods.descend(jc.direct(jc.identity()), 0.5, prox=jc.prox.l1(1.0)), None)
    state, _ = jax.jit(lambda tree: run.step(run.init(tree), lambda x: x))(tree)
    want = jax.tree.map(lambda x: np.maximum(0.5 * np.asarray(x) - 0.5, 0), tree)
    for a, b in zip(jax.tree.leaves(run.point(state)), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b)


FEEDBACK = jc.error_feedback(jc.top_k(0.1))
WRONG = [
    (
        TypeError,
        lambda: jc.methods.descend(jc.top_k(0.1), 0.1),
        r"descend needs an algorithm; got the compressor top_k\(0.1\). Wrap it in error_feedback",
    ),
    (
        TypeError,
        lambda: jc.methods.descend(jc.methods.marina(jc.natural(), 0.1, 0.5), 0.1),
        "keeps its own iterate. Run that with jc.methods.rounds",
    ),
    (TypeError, lambda: jc.methods.rounds(FEEDBACK, AXIS), r"Wrap it: jc.methods.descend\(algorithm, step_size\)"),
    (TypeError, lambda: jc.methods.rounds(None, {"ici": FEEDBACK, "dcn": FEEDBACK}), r"Wrap it: jc.methods.descend"),
    (
        TypeError,
        lambda: jc.methods.rounds(jc.top_k(0.1), AXIS),
        r"needs a method with an iterate.*got the compressor top_k",
    ),
    (
        ValueError,
        lambda: jc.methods.marina(jc.top_k(0.1), 0.1, 0.5),
        "marina needs an unbiased compressor.*top_k.* is not one",
    ),
    (TypeError, lambda: jc.compressed_mean(FEEDBACK), "axis_name must be given"),
    (
        TypeError,
        lambda: jc.compressed_mean(jc.methods.descend(FEEDBACK, 0.1), AXIS),
        "keeps its own iterate. Run that with jc.methods.rounds",
    ),
    (
        ValueError,
        lambda: jc.methods.rounds(jc.methods.descend(jc.diana(jc.natural()), 0.1), AXIS, "two_shot"),
        "keeps a shift in step",
    ),
    (
        ValueError,
        lambda: jc.methods.rounds(jc.methods.descend(FEEDBACK, 0.1), AXIS, "pigeon"),
        "rounds: via must be one of 'auto'",
    ),
]


@pytest.mark.parametrize(("error", "make", "message"), WRONG, ids=range(len(WRONG)))
def test_errors_name_the_cure(error, make, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("compressor", [jc.natural(), jc.sign(), jc.block_scaled("mxfp8")], ids=repr)
def test_bits_are_those_of_code_bits(compressor):
    """Elias codes, the default before, take up to twice as many for these."""
    algorithm = jc.direct(compressor) if compressor.spec.omega else jc.error_feedback(compressor)
    run = jc.methods.rounds(jc.methods.descend(algorithm, RATE), None)
    x = jnp.asarray(targets_of(0)[0])
    _, bits = jax.jit(lambda s: run.step(s, lambda at: at - x))(run.init(jnp.zeros(D)))
    _, payload = jc.roundtrip(compressor, -x, key=jax.random.key(0))
    assert float(bits) == float(jc.code_bits(payload))
