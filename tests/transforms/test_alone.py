"""A worker that decides alone whether to take part in an exchange is refused, wherever that can be seen."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from worlds import AXIS, mesh_of

import jaxcomp as jc

PARAMS = jnp.zeros(6)
GRADS = jnp.ones((2, 6)).at[0, 0].set(jnp.nan)
MEAN = jc.compressed_mean(jc.error_feedback(jc.top_k(k=2)), AXIS)


def skips(updates, *_):
    return ~jnp.all(jnp.isfinite(updates)), {"seen": jnp.zeros(())}


ALONE = {
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 5),
    "nested": lambda tx: optax.chain(optax.apply_if_finite(optax.chain(optax.identity(), tx), 5), optax.identity()),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2, should_skip_update_fn=skips),
}


def on_vmap(tx):
    state, axes = jc.init_state(tx, PARAMS, 2, AXIS)
    step = jax.vmap(lambda s, g: tx.update(g, s, PARAMS), in_axes=(axes, 0), out_axes=(0, axes), axis_name=AXIS)
    return jax.jit(step)(state, GRADS)[0]


def on_mesh(tx, check_vma):
    mesh = mesh_of(2)
    state, specs = jc.init_state(tx, PARAMS, mesh, AXIS)
    step = lambda s, g: tx.update(g[0], s, PARAMS)
    step = jax.shard_map(step, mesh=mesh, in_specs=(specs, P(AXIS)), out_specs=(P(), specs), check_vma=check_vma)
    return jax.jit(step)(state, GRADS)[0]


@pytest.mark.sampled
@pytest.mark.parametrize("world", [on_vmap, lambda tx: on_mesh(tx, True), lambda tx: on_mesh(tx, False)])
@pytest.mark.parametrize("wrap", ALONE.values(), ids=ALONE)
def test_decisions_of_one_worker_are_refused(wrap, world):
    """Before, this was a deadlock on a mesh without types, and under vmap the states went apart without a word."""
    with pytest.raises(
        ValueError, match=r"^compressed_mean: optax\..* around an exchange .* jc\.replicas\.skip_nonfinite\(tx"
    ):
        world(wrap(optax.chain(MEAN, optax.sgd(1.0))))


@pytest.mark.sampled
@pytest.mark.parametrize("world", [on_vmap, lambda tx: on_mesh(tx, False)])
def test_decisions_of_all_are_not(world, standard_promotion):
    """Behind the mean gradients are equal; MultiSteps counts alike; skip_nonfinite agrees."""
    for tx in (
        optax.chain(MEAN, optax.apply_if_finite(optax.sgd(1.0), 5)),
        optax.MultiSteps(optax.chain(MEAN, optax.sgd(1.0)), 1),
    ):
        np.testing.assert_allclose(np.atleast_2d(world(tx))[0], [-0.5, -1, -0.5, 0, 0, 0])
    assert not np.any(world(jc.replicas.skip_nonfinite(optax.chain(MEAN, optax.sgd(1.0)), AXIS)))


def test_a_single_worker_may_decide():
    tx = optax.apply_if_finite(jc.compressed_mean(jc.direct(jc.identity()), None), 5)
    updates, _ = jax.jit(tx.update)(GRADS[0], tx.init(PARAMS))
    np.testing.assert_array_equal(updates, 0)
