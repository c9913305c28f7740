"""What holds for every algorithm: worlds agree, shared state is shared, nothing is traced twice, errors say why."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from variants import variants
from worlds import AXIS, at, gradients, run_on_host, run_pmap, run_shard_map, run_vmap

import jaxcomp as jc
from jaxcomp.base import Algorithm

N, ROUNDS = 4, 5
WORLDS = {
    "shard_map": run_shard_map,
    "shard_map-unchecked": lambda *a: run_shard_map(*a, check_vma=False),
    "vmap": run_vmap,
    "pmap": run_pmap,
}
TREE = {"b": jnp.zeros(7), "s": jnp.zeros(()), "w": jnp.zeros((40, 50))}
ALGORITHMS = {
    "direct-identity": jc.direct(jc.identity()),
    "direct-bf16": jc.direct(jc.cast("bfloat16")),
    "direct-rand_k": jc.direct(jc.rand_k(0.1)),
    "direct-dithering": jc.direct(jc.dithering(7)),
    "ef-top_k": jc.error_feedback(jc.top_k(0.05)),
    "ef-sidco-flat": jc.error_feedback(jc.flat(jc.sidco(0.05))),
    "momentum-dgc": jc.contrib.momentum_correction(jc.contrib.dgc(0.05), clip_norm=1.0, workers=N),
    "ef-redsync": jc.error_feedback(jc.contrib.redsync(0.05)),
    "ef-trimmed": jc.error_feedback(jc.contrib.redsync(0.05, method="trimmed")),
    "ef-gaussian_k": jc.error_feedback(jc.contrib.gaussian_k(0.05)),
    "ef-sidco-paper": jc.error_feedback(jc.sidco(0.05, law="pareto", adapt="paper")),
    "ef-narrow": jc.error_feedback(jc.narrow(jc.sidco(0.05), values="bfloat16", indices="uint16")),
    "ef-rand_k": jc.error_feedback(jc.contract(jc.rand_k(0.1))),
    "ef-compose": jc.error_feedback(jc.compose(jc.top_k(0.05), jc.natural())),
    "diana-dithering": jc.diana(jc.dithering(7)),
    "diana-rand_k": jc.diana(jc.rand_k(0.2)),
    "diana-bernoulli": jc.diana(jc.bernoulli(0.2)),
    "power_sgd": jc.power_sgd(2),
    "ef21": jc.ef21(jc.top_k(0.05)),
    "ef21-plus": jc.ef21(jc.top_k(0.05), momentum=0.5, plus=True),
    "ef_bv": jc.methods.ef_bv(jc.top_k(0.05), shift_step=0.5),
    "ef-drive": jc.error_feedback(jc.drive(block=64)),
    "direct-eden": jc.direct(jc.eden(2.5, block=64, per_worker=True)),
    "direct-nvfp4": jc.direct(jc.block_scaled("nvfp4")),
    "loco": jc.loco(jc.block_scaled("int4", rounding="stochastic"), memory="int8"),
}
PRODUCTS = ("power_sgd", "ef-drive", "direct-eden")  # with matrices, whose sums have no fixed order


@pytest.mark.parametrize("name", variants(ALGORITHMS, {"ef-sidco-flat"}))
def test_all_worlds_agree_and_shared_state_is_shared(name, seed):
    grads = gradients(seed, ROUNDS, N, TREE)
    tx = jc.compressed_mean(ALGORITHMS[name], AXIS)
    results = {world: run(tx, TREE, grads) for world, run in WORLDS.items()}
    reference, reference_state = results["shard_map"]
    for directions, state in results.values():
        for a, b in zip(jax.tree.leaves(directions), jax.tree.leaves(reference), strict=True):
            # Dithering may round a norm, and so a level at its edge, differently when vmapped.
            close = np.isclose(a, b, rtol=1e-5, atol=1e-6 if name not in PRODUCTS else 1e-4)
            assert close.mean() > 0.999
        assert int(np.ravel(state.shared.count)[0]) == ROUNDS
    for leaf in jax.tree.leaves(reference_state.shared):
        copies = [np.asarray(shard.data) for shard in leaf.addressable_shards]
        assert len(copies) == N
        assert all(copy.tobytes() == copies[0].tobytes() for copy in copies)
    # pmap keeps one copy for each worker; they must be the same bits as well.
    for leaf in jax.tree.leaves(results["pmap"][1].shared):
        assert all(np.asarray(row).tobytes() == np.asarray(leaf[0]).tobytes() for row in leaf)


# ------------------------------------------------------------------------------------------------
# As bytes

HOSTED = {
    "direct": jc.direct(jc.natural()),
    "error_feedback": jc.error_feedback(jc.top_k(0.05)),
    "diana": jc.diana(jc.rand_k(0.25)),
    "momentum_correction": jc.contrib.momentum_correction(jc.top_k(0.05), momentum=0.5),
    "power_sgd": jc.power_sgd(2),
    "ef21": jc.ef21(jc.top_k(0.05), momentum=0.5),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", variants(HOSTED, {"error_feedback", "power_sgd"}))
def test_messages_as_bytes_give_the_same_rounds(name, seed):
    """Workers as threads, whose messages are encoded, sent and decoded: bitwise what compiled programs do."""
    algorithm, grads = HOSTED[name], gradients(seed, 3, N, TREE)
    each, states = run_on_host(algorithm, TREE, grads)
    for directions in each[1:]:
        for a, b in zip(jax.tree.leaves(directions), jax.tree.leaves(each[0]), strict=True):
            np.testing.assert_array_equal(a, b)
    assert any(np.any(x != 0) for x in jax.tree.leaves(each[0]))
    tx = jc.compressed_mean(algorithm, AXIS, via="gather")
    for world in (run_vmap, run_shard_map):
        directions, state = world(tx, TREE, grads)
        local = jax.tree.map(lambda *rows: np.stack(rows), *(state.local for state in states))
        pairs = (directions, each[0]), (state.local.algorithm, local), (state.shared.algorithm, states[0].shared)
        for got, want in pairs:
            for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
                a = np.reshape(a, np.shape(b))
                if name == "power_sgd":  # products of matrices, and sums in no fixed order
                    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
                else:
                    np.testing.assert_array_equal(a, b)


# ------------------------------------------------------------------------------------------------
# Compiled once

METHODS = {
    "descend": lambda: jc.methods.descend(jc.diana(jc.natural()), 0.1),
    "adiana": lambda: jc.methods.adiana(
        jc.rand_k(0.5), jc.theory.adiana(smoothness=1.0, mu=0.1, workers=2, omega=1, variance=1)
    ),
    "isega": lambda: jc.methods.isega(np.full(6, 0.5), jc.smoothness.diagonal_of(np.ones(6)), 0.1),
    "marina": lambda: jc.methods.marina(jc.natural(), 0.1, 0.5),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", [*HOSTED, *METHODS])
def test_three_steps_are_traced_once(name):
    if name in METHODS:
        run, like = jc.methods.rounds(METHODS[name](), AXIS), jnp.ones(6)
        one = lambda state, g: (None, run.step(state, lambda x: x - g)[0])
    else:
        run, like = jc.compressed_mean(HOSTED[name], AXIS), TREE
        one = lambda state, g: run.update(g, state)
    state, axes = jc.init_state(run, like, 2, AXIS)
    step = jax.jit(jax.vmap(one, in_axes=(axes, 0), out_axes=(None, axes), axis_name=AXIS))
    grads = gradients(0, 3, 2, like)
    for t in range(3):
        _, state = step(state, at(grads, t))
    assert step._cache_size() == 1


# ------------------------------------------------------------------------------------------------
# Wrong arguments

BAD = [
    (
        lambda: jc.error_feedback(jc.rand_k(0.1)),
        r"rand_k\(0.1\) is not one. It is unbiased: take direct\(rand_k\(0.1\)\), or wrap it: contract",
    ),
    (lambda: jc.error_feedback(jc.dithering(3)), r"or wrap it: contract\(dithering"),
    (lambda: jc.error_feedback(jc.cast("float16", scaled=False)), "alpha of .* is not known"),
    (lambda: jc.error_feedback(jc.top_k(0.1), decay=1.5), r"decay must be in \[0, 1\]; got 1.5"),
    (
        lambda: jc.compressed_mean(jc.error_feedback(jc.compose(jc.top_k(0.5), jc.dithering(1, blocks=1))), None).init(
            jnp.zeros(10000)
        ),
        "has alpha = -",
    ),
    (lambda: jc.contrib.momentum_correction(jc.rand_k(0.1)), "needs a contraction"),
    (
        lambda: jc.contrib.momentum_correction(jc.contrib.dgc(0.1), momentum=1),
        r"momentum must be a Python number in \[0, 1\); got 1",
    ),
    (lambda: jc.contrib.momentum_correction(jc.contrib.dgc(0.1), clip_norm=1.0), "give clip_norm and workers"),
    (
        lambda: jc.contrib.momentum_correction(jc.contrib.dgc(0.1), clip_norm=-1.0, workers=2),
        "clip_norm must be a Python number, positive and finite",
    ),
    (lambda: jc.diana(jc.top_k(0.1)), r"Use error_feedback\(top_k\(0.1\)\) instead"),
    (lambda: jc.diana(jc.rand_k(0.1), alpha=0.0), "alpha must be a Python number or a jax.Array in"),
    (
        lambda: jc.compressed_mean(jc.diana(jc.rand_k(0.1), alpha=0.5), AXIS).init(jnp.zeros(100)),
        r"= \(0, 0.1\]; got 0.5",
    ),
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
    direction, _ = jax.jit(tx.update)(tree, tx.init(tree))
    assert jax.tree.structure(direction) == jax.tree.structure(tree)


class Kept(NamedTuple):
    memory: tuple
    compressor: tuple


def forgets_yield(here, grads, state):
    sent = here.mean(grads, state.compressor)
    return sent.direction, state
    yield


def yields_from(here, grads, state):
    sent = yield from here.mean(grads, state.compressor)
    return sent.direction, state


def yields_gradients(here, grads, state):
    yield grads


def returns_nothing(here, grads, state):
    yield here.mean(grads, state.compressor)


def returns_state_first(here, grads, state):
    sent = yield here.mean(grads, state.compressor)
    return state, sent.direction


def does_it_right(here, grads, state):
    sent = yield here.mean(grads, state.compressor)
    return sent.direction, Kept(sent.residual, sent.states)


ROLES = {"memory": "memory", "compressor": "compressor"}
MISTAKES = {
    forgets_yield: (ROLES, "write sent = yield here.mean.*, then sent.direction"),
    yields_from: (ROLES, "an algorithm yields requests, .* not by yield from; got .*Tracer"),
    yields_gradients: (ROLES, "an algorithm yields requests, .*; got tuple"),
    returns_nothing: (ROLES, "the update of an algorithm returns .direction, state.; got NoneType"),
    returns_state_first: (
        ROLES,
        "must be a NamedTuple; got tuple. Its update returns .direction, state., in this order",
    ),
    does_it_right: (ROLES | {"clock": "coin"}, "the roles name 'clock', of which Kept has no field"),
}


@pytest.mark.parametrize("update", MISTAKES, ids=lambda update: update.__name__)
def test_mistakes_in_an_algorithm_of_ones_own_are_named(update):
    roles, said = MISTAKES[update]
    init = lambda here, like: Kept(tuple(jnp.zeros(x.shape) for x in like), here.start(like))
    tx = jc.compressed_mean(Algorithm(init, update, roles, jc.top_k(0.1)), AXIS)
    with pytest.raises((AttributeError, TypeError, ValueError), match=said):
        run_vmap(tx, TREE, gradients(0, 1, N, TREE))
