"""One training step, the same for every experiment: loss and gradients, a transformation, new parameters."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax import lax
from jax.flatten_util import ravel_pytree

import jaxcomp as jc

__all__ = ["classified", "dense", "training_step", "updated"]


def classified(graph: Any, *rest: Any) -> Callable[..., jax.Array]:
    """(params, x, y) -> mean cross-entropy of a Flax model that `nnx.split` took apart."""

    def loss(params, x, y):
        logits = nnx.merge(graph, params, *rest)(x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    return loss


def updated(transform: optax.GradientTransformation, grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
    """Parameters and state after one update."""
    updates, state = transform.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def training_step(
    transform: optax.GradientTransformation, loss: Callable[..., Any], axis: str | None = None, mean: Any = lax.pmean
) -> Callable[..., tuple[Any, Any, Any]]:
    """The step (params, state, *batch) -> (params, state, loss before the update) of one worker, not yet compiled.

    loss: (params, *batch) -> a number, of this worker. axis: of the workers that share the parameters; None: they and
    the loss are the worker's own. mean: of the loss over the axis.
    """

    def step(params, state, *batch):
        value, grads = jax.value_and_grad(loss)(params if axis is None else jc.per_worker(params, axis), *batch)
        return *updated(transform, grads, state, params), value if axis is None else mean(value, axis)

    return step


def dense(
    params: Any, gradient: Callable[..., Any], rate: float, batches: Iterable[Any]
) -> Iterator[tuple[Any, np.ndarray]]:
    """Steps of Adam on one worker: parameters after each step, and the gradient it took, as one vector f32[d].

    gradient: (params, *batch) -> a tree like the parameters.
    """
    adam = optax.adam(rate)

    @jax.jit
    def step(params, state, batch):
        grads = gradient(params, *batch)
        return *updated(adam, grads, state, params), ravel_pytree(grads)[0]

    state = adam.init(params)
    for batch in batches:
        params, state, flat = step(params, state, batch)
        yield params, np.asarray(flat)
