"""Under shard_map with check_vma=True every value is typed by the mesh axes over which it differs."""

import jax
import jax.numpy as jnp
import pytest
from worlds import mesh_of

from experiments.bench.trees import methods, update_of

LIKE = {"b": jax.ShapeDtypeStruct((7,), jnp.float32), "w": jax.ShapeDtypeStruct((200, 300), jnp.float32)}


@pytest.mark.sampled
@pytest.mark.parametrize("name", methods())
def test_every_method_is_typed_over_the_mesh(name):
    step, shapes = update_of(methods()[name], LIKE, mesh_of(2))
    state, direction = jax.eval_shape(step, *shapes)
    assert jax.tree.map(lambda x: x.shape, direction) == {"b": (7,), "w": (200, 300)}
    assert jax.tree.map(lambda x: x.shape, state) == jax.tree.map(lambda x: x.shape, shapes[1])
