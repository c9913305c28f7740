"""Algorithms as a user writes them: one that sums twice, one that sends two messages in a round."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from worlds import AXIS, assert_close, at, gradients, mesh_of, mesh_step, run_shard_map, run_vmap

import jaxcomp as jc
from jaxcomp.base import Sum

N = 4


class Factored(NamedTuple):
    memory: Any
    q: Any


def rank_one():
    """PowerSGD of rank one for matrices of one shape."""

    def init(here, like):
        (stack,) = like
        q = jax.random.normal(jax.random.fold_in(here.key, 0), (stack.shape[0], stack.shape[2], 1))
        return Factored((jnp.zeros(stack.shape),), q)

    def update(here, grads, state):
        ((g,), (e,)) = grads, state.memory
        m = g + e
        p = yield Sum(m @ state.q)
        p = p / jnp.linalg.norm(p, axis=1, keepdims=True)
        q = yield Sum(jnp.swapaxes(m, 1, 2) @ p)
        q = q / here.size
        sent = p @ jnp.swapaxes(q, 1, 2)
        return (sent,), Factored((m - sent,), q)

    roles = {"memory": "memory", "q": "coin"}
    return jc.Algorithm(init, update, roles, layout=jc.Layout("shape", 0))


class Inner(NamedTuple):
    compressor: Any


def in_two_messages(compressor):
    """C(g), and then C of what that left: no memory, half of the error."""

    def init(here, like):
        return Inner(here.start(like))

    def update(here, grads, state):
        keys = jax.random.split(here.key)
        first = yield here.mean(grads, state.compressor, keys[0])
        second = yield here.mean(first.residual, first.states, keys[1])
        return jax.tree.map(jnp.add, first.mean, second.mean), Inner(second.states)

    return jc.Algorithm(init, update, {"compressor": "compressor"}, compressor)


def ledger_of(tx, params, grads):
    state, step = mesh_step(tx, params, mesh_of())
    return jc.ledger(step, state, at(grads)).total_bytes


@pytest.mark.sampled
@pytest.mark.parametrize("run", [run_vmap, run_shard_map], ids=lambda run: run.__name__)
def test_sums_are_all_that_power_sgd_needs(run, seed):
    params = {"a": jnp.zeros((9, 7)), "b": jnp.zeros((9, 7))}
    grads = gradients(seed, 3, N, params)
    tx = jc.compressed_mean(rank_one(), AXIS)
    own, state = run(tx, params, grads)
    want, _ = run_vmap(jc.compressed_mean(jc.power_sgd(1, dense_below=0, min_ratio=1), AXIS), params, grads)
    assert_close(own, want, rtol=1e-3, atol=1e-4)
    info = jc.info(state)
    assert info.lane_bytes == 4 * 2 * (9 + 7)
    assert info.sent_bytes == 2 * (N - 1) / N * 4 * 2 * (9 + 7) == ledger_of(tx, params, grads)


@pytest.mark.sampled
@pytest.mark.parametrize("run", [run_vmap, run_shard_map], ids=lambda run: run.__name__)
def test_two_messages_in_a_round(run, seed):
    """k of the largest entries, and then the next k: together 2 k of them, for the bytes of both."""
    params, k = jnp.zeros(50), 6
    grads = gradients(seed, 2, N, params)
    tx = jc.compressed_mean(in_two_messages(jc.top_k(k=k)), AXIS)
    directions, state = run(tx, params, grads)
    for t in range(2):
        want = np.mean([oracles.top_k(g, 2 * k) for g in np.float64(grads[t])], axis=0)
        np.testing.assert_allclose(directions[t], want, rtol=1e-5, atol=1e-6)
    info = jc.info(state)
    assert info.lane_bytes == 2 * 8 * k
    assert info.sent_bytes == (N - 1) * 2 * 8 * k == ledger_of(tx, params, grads)
    assert float(info.achieved_ratio) == pytest.approx(k / 50)  # of the entries of both messages
    assert info.chosen == "gather"
