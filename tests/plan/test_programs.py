"""Collectives that are read from programs, and programs without them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plan_worlds import LIKE
from worlds import AXIS

import jaxcomp as jc
from jaxcomp.plan.candidates import collectives_of, default_candidates, dense_candidates
from jaxcomp.plan.programs import offline, settled


@pytest.mark.slow
def test_what_candidates_send():
    """The dense leaf goes with the vector, or beside it; bytes are those of lanes."""
    sizes = {"data": 4}
    sent = {each.name: collectives_of(each, LIKE, "data", sizes) for each in default_candidates()}
    assert [(x.kind, x.operand_bytes) for x in sent["f32"]] == [("all_reduce", 4 * 30_100.0)]
    assert {x.kind for x in sent["bf16:two_shot"]} == {"all_to_all", "all_gather"}
    assert sorted(x.kind for x in sent["sidco(0.01)+ef"]) == ["all_gather", "all_reduce"]
    assert sum(x.kind == "all_reduce" for x in sent["power_sgd(2)"]) >= 2  # the second factor waits for the first
    assert all(x.axis == "data" for each in sent.values() for x in each)
    like = {"long": jnp.zeros(2**17), "first": jnp.zeros(100), "second": jnp.zeros(50)}
    apart = collectives_of(dense_candidates()[0], like, "data", sizes, joined=False)
    assert sorted(x.operand_bytes for x in apart) == [4 * 50.0, 4 * 100.0, 4 * 2.0**17]  # a CPU runs them one by one
    ladder = jc.Candidate("ladder", jc.error_feedback(jc.top_k(0.01)), "ladder")
    assert max(x.operand_bytes for x in collectives_of(ladder, LIKE, "data", {"data": 2})) >= 8 * 300
    levels = {"a": jc.direct(jc.identity()), "b": jc.error_feedback(jc.top_k(0.01))}
    both = collectives_of(jc.Candidate("two", levels), LIKE, None, {"a": 2, "b": 2})
    assert {x.axis for x in both} >= {"a", "b"}


def test_a_program_in_two_halves(key):
    """What a worker sends before it receives, and after; where all send the same it receives its own messages."""
    tx = jc.compressed_mean(jc.power_sgd(2), AXIS)
    grads = {"w": jax.random.normal(key, (60, 40)), "b": jnp.ones(40)}
    states = jax.jit(jax.vmap(lambda _: tx.init(grads), axis_name=AXIS))(jnp.arange(3))
    expected = jax.jit(jax.vmap(lambda _, state: tx.update(grads, state), axis_name=AXIS))(jnp.arange(3), states)
    given = (grads, jax.tree.map(lambda x: x[0], states))
    halves = offline(tx.update, {AXIS: 3}, *given)
    run = jax.jit(halves.whole)
    received = settled(halves.arrivals, lambda received: run(0, received, *given)[0])
    assert len(received) >= 2  # the second factor waits for the first
    kept = jax.jit(halves.early)(jnp.zeros((), jnp.int32), *jax.tree.leaves(given))
    _, results = halves.outcome(kept, jax.jit(halves.late)(received, kept))
    for mine, theirs in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(mine), np.asarray(theirs[0]), rtol=1e-4, atol=1e-5)
