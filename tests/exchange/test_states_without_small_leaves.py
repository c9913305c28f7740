"""No array of a state is without entries, so that Orbax, which refuses such arrays, writes every state."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomp as jc

LARGE = {"a": jax.ShapeDtypeStruct((40, 40), jnp.float32), "b": jax.ShapeDtypeStruct((50, 40), jnp.float32)}
TOP = jc.top_k(0.1)
ALGORITHMS = {
    "direct": jc.direct(TOP),
    "error feedback": jc.error_feedback(TOP),
    "per leaf": jc.error_feedback(jc.per_leaf(TOP)),
    "sidco": jc.error_feedback(jc.sidco(0.01)),
    "diana": jc.diana(jc.rand_k(0.1)),
    "ef21": jc.ef21(TOP),
    "power_sgd": jc.power_sgd(rank=1),
    "fetch_sgd": jc.fetch_sgd(0.01, sketch=0.5),
    "loco": jc.loco(jc.block_scaled("int4")),
    "majority_vote": jc.majority_vote(),
    "sparse_loco": jc.sparse_loco(),
    "by_path": jc.by_path({"a": jc.direct(jc.identity()), ".*": jc.error_feedback(TOP)}),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_no_array_of_a_state_is_empty(name):
    tx = jc.compressed_mean(ALGORITHMS[name], "data")
    state = jax.eval_shape(lambda params: jc.init_state(tx, params, 4, "data")[0], LARGE)
    assert [path for path, x in jax.tree_util.tree_leaves_with_path(state) if x.size == 0] == []


@pytest.mark.slow
def test_a_round_of_each_without_small_leaves():
    """vmap of two workers: directions and states keep their shapes, and no group is of small leaves."""
    rng = np.random.default_rng(0)
    grads = {name: jnp.asarray(rng.normal(size=(2, *x.shape)), jnp.float32) for name, x in LARGE.items()}
    params = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), LARGE)
    names = ("per leaf", "power_sgd", "fetch_sgd", "by_path", "diana")
    chained = [jc.compressed_mean(ALGORITHMS[name], "data") for name in names]
    pairs = [jc.init_state(tx, params, 2, "data") for tx in chained]

    @jax.jit
    def rounds(states, grads):
        return [
            jax.vmap(tx.update, in_axes=(0, axes), out_axes=(None, axes), axis_name="data")(grads, state)
            for tx, (_, axes), state in zip(chained, pairs, states, strict=True)
        ]

    for (direction, after), (before, _) in zip(rounds([s for s, _ in pairs], grads), pairs, strict=True):
        assert jax.tree.map(jnp.shape, direction) == jax.tree.map(jnp.shape, params)
        assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, before)
        assert not any(group.small for group in after.about.groups.groups)
        fewer, _ = jc.init_state(chained[0], params, 3, "data")
    new = jc.redistribute(pairs[0][0], fewer)  # memories of other workers, laid out alike
    assert jax.tree.map(jnp.shape, new) == jax.tree.map(jnp.shape, fewer)
