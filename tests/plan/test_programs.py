"""Collectives that are read from programs, and programs without them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plan_worlds import F32, LIKE, NAMED
from worlds import AXIS

import jaxcomp as jc
from jaxcomp.plan.candidates import collectives_of
from jaxcomp.plan.programs import offline, settled


@pytest.mark.slow
def test_what_candidates_send():
    """The dense leaf goes with the vector, or beside it; bytes are those of lanes."""
    sent = lambda each, like=LIKE, **options: collectives_of(each, like, "data", {"data": 4}, **options)
    kinds = lambda each: sorted(x.kind for x in sent(each))
    assert [(x.kind, x.operand_bytes, x.axis) for x in sent(F32)] == [("all_reduce", 4 * 30_100.0, "data")]
    assert set(kinds(NAMED["bf16:two_shot"])) == {"all_to_all", "all_gather"}
    assert kinds(NAMED["sidco(0.01)+ef"]) == ["all_gather", "all_reduce"]
    assert kinds(NAMED["power_sgd(2)"]).count("all_reduce") >= 2  # the second factor waits for the first
    like = {"long": jnp.zeros(2**17), "first": jnp.zeros(100), "second": jnp.zeros(50)}
    apart = sent(F32, like, joined=False)  # a CPU runs them one by one
    assert sorted(x.operand_bytes for x in apart) == [4 * 50.0, 4 * 100.0, 4 * 2.0**17]
    ladder = jc.Candidate("ladder", jc.error_feedback(jc.top_k(0.01)), "ladder")
    assert max(x.operand_bytes for x in sent(ladder)) >= 8 * 300
    levels = jc.Candidate("two", {"a": jc.direct(jc.identity()), "b": jc.error_feedback(jc.top_k(0.01))})
    assert {x.axis for x in collectives_of(levels, LIKE, None, {"a": 2, "b": 2})} >= {"a", "b"}


def test_a_program_in_two_halves(key):
    """A worker sends before it receives, and after; where all send the same it receives its own messages."""
    tx = jc.compressed_mean(jc.power_sgd(2), AXIS)
    grads = {"w": jax.random.normal(key, (60, 40)), "b": jnp.ones(40)}
    states = jax.jit(jax.vmap(lambda _: tx.init(grads), axis_name=AXIS))(jnp.arange(3))
    expected = jax.jit(jax.vmap(lambda _, state: tx.update(grads, state), axis_name=AXIS))(jnp.arange(3), states)
    given = (grads, jax.tree.map(lambda x: x[0], states))
    halves = offline(tx.update, {AXIS: 3}, *given)
    run = jax.jit(halves.whole)
    received = settled(halves.arrivals, lambda received: run(0, received, *given)[0])
    assert len(received) >= 2  # the second factor waits for the first
    _, results = run(0, received, *given)
    for mine, theirs in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(mine), np.asarray(theirs[0]), rtol=1e-4, atol=1e-5)
