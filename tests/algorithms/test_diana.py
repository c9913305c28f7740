"""DIANA against its recursion in float64."""

import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from worlds import AXIS, heterogeneous, run_pmap, run_shard_map, run_vmap

import jaxcomp as jc


@pytest.mark.parametrize("run", [run_shard_map, run_vmap, run_pmap], ids=lambda run: run.__name__)
def test_diana_is_the_oracle(run, seed):
    """With the identity, whose draw is known: omega = 0, any alpha up to 1."""
    grads = heterogeneous(seed)
    tx = jc.compressed_mean(jc.diana(jc.identity(), alpha=0.3), AXIS)
    directions, state = run(tx, jnp.zeros(60), jnp.asarray(grads))
    want, shifts = oracles.diana(np.float64(grads), lambda x: x, 0.3)
    np.testing.assert_allclose(directions, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(np.reshape(state.local.algorithm.shift, (4, 60)), shifts, rtol=1e-5, atol=1e-6)
    mean = np.reshape(state.shared.algorithm.shift, (-1, 60))[0]
    np.testing.assert_allclose(mean, np.mean(shifts, 0), rtol=1e-5, atol=1e-6)
