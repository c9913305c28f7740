"""The model as one vector, so that a round's change is one array with one ratio."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from jax.flatten_util import ravel_pytree

from experiments.lib.data import Dataset
from experiments.lib.models import Mlp

__all__ = ["FlatModel", "flat_model", "local_batches", "local_steps"]


class FlatModel(NamedTuple):
    """start: f32[d]; test(vector, images, labels) -> mean loss and accuracy."""

    start: jax.Array
    test: Callable[..., tuple[jax.Array, jax.Array]]


def flat_model(data: Dataset, seed: int) -> FlatModel:
    graph, params = nnx.split(Mlp(data.train_x.shape[1:], data.num_classes, rngs=nnx.Rngs(seed)))
    start, restore = ravel_pytree(params)

    def test(vector, x, y):
        logits = nnx.merge(graph, restore(vector))(x)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
        return losses.mean(), (logits.argmax(1) == y).mean()

    return FlatModel(jnp.asarray(start), test)


def local_steps(model: FlatModel, vector: jax.Array, x: jax.Array, y: jax.Array, rate: Any) -> jax.Array:
    """The change of the model after a step of SGD for each batch: x [steps, batch, ...], y [steps, batch]."""

    def step(current, batch):
        return current - rate * jax.grad(model.test, has_aux=True)(current, *batch)[0], None

    return lax.scan(step, vector, (x, y))[0] - vector


def local_batches(part: np.ndarray, steps: int, batch: int, seed: int, round_: int, client: int) -> np.ndarray:
    """Indices [steps, batch] of one client's round, a function of its arguments alone."""
    rng = np.random.default_rng([seed, 21, round_, client])
    return part[rng.integers(0, len(part), (steps, batch))]
