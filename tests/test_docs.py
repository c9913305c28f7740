"""The pages of the documentation that hold code are run."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from worlds import AXIS

import jaxcomp as jc

PAGES = Path(__file__).parents[1] / "docs" / "development"


def code_of(page):
    return "\n".join(re.findall(r"```python\n(.*?)```", (PAGES / page).read_text(), re.DOTALL))


@pytest.mark.usefixtures("standard_promotion")
def test_the_algorithm_of_the_page_runs_and_remembers(seed):
    names = {}
    exec(compile(code_of("algorithm.md"), "algorithm.md", "exec"), names)
    rng = np.random.default_rng(seed)
    params = {"a": jnp.zeros((40, 30)), "b": jnp.zeros((40, 30)), "bias": jnp.zeros(5)}
    grads = jax.tree.map(lambda p: jnp.asarray(rng.standard_normal((4, *p.shape)), jnp.float32), params)
    tx = jc.compressed_mean(names["low_rank"](2), AXIS)
    state, axes = jc.init_state(tx, params, 4, AXIS)
    step = jax.jit(jax.vmap(tx.update, in_axes=(0, axes), out_axes=(None, axes), axis_name=AXIS))
    total = jax.tree.map(jnp.zeros_like, params)
    for _ in range(3):
        direction, state = step(grads, state)
        assert np.linalg.matrix_rank(direction["a"]) == 2
        np.testing.assert_allclose(direction["bias"], grads["bias"].mean(0), rtol=1e-5, atol=1e-6)
        total = jax.tree.map(jnp.add, total, direction)
    memory = jc.state.by_leaf(state, state.local.algorithm.memory)
    for name in ("a", "b"):  # what was not delivered in three rounds is remembered
        left = np.asarray(memory[name]).reshape(4, 40, 30).mean(0)
        np.testing.assert_allclose(total[name] + left, 3 * grads[name].mean(0), rtol=1e-4, atol=1e-4)
    fewer, _ = jc.init_state(tx, params, 2, AXIS)
    assert jc.redistribute(state, fewer).local.algorithm.memory.vectors[0].shape[0] == 2


@pytest.mark.parametrize("page", ["algorithm.md", "payload.md", "route.md"])
def test_files_that_a_page_names_exist(page):
    root = Path(__file__).parents[1]
    named = set(re.findall(r"`((?:jaxcomp|tests)/[a-z_/]+(?:\.py)?/?)`", (PAGES / page).read_text()))
    assert named
    assert not [name for name in named if not (root / name).exists()]
