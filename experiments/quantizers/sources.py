"""Vectors of n workers, f32[n, d]: normal, lognormal, and gradients of a transformer."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from experiments.lib.step import dense
from experiments.lib.text import read_characters
from experiments.lib.transformer import LAYOUTS, Sizes, initial, mean_loss

__all__ = ["lognormal", "normal", "transformer"]


def normal(workers: int, size: int, seed: int) -> np.ndarray:
    return np.random.default_rng([seed, 1]).standard_normal((workers, size)).astype(np.float32)


def lognormal(workers: int, size: int, seed: int) -> np.ndarray:
    return np.exp(np.random.default_rng([seed, 2]).standard_normal((workers, size))).astype(np.float32)


def transformer(workers: int, size: int, seed: int, text: Path | None, steps: int) -> np.ndarray:
    """The first `size` entries of the gradients of the workers, each on 16 windows of its own, after so many steps."""
    codes, characters = read_characters(text)
    params = jax.tree.map(jnp.asarray, initial(Sizes(characters, 64, 64, 4, 3), seed))
    grad = jax.grad(lambda params, windows: mean_loss(params, windows, LAYOUTS["data"]))

    def windows(step: int, worker: int) -> np.ndarray:
        starts = np.random.default_rng([seed, step, worker]).integers(0, len(codes) - 65, 16)
        return codes[starts[:, None] + np.arange(65)]

    start = params
    for params, _ in dense(start, grad, 2e-3, ((windows(number, 0),) for number in range(steps))):  # noqa: B007
        pass
    flat = jax.jit(lambda params, windows: ravel_pytree(grad(params, windows))[0])
    rows = [np.asarray(flat(params, jnp.asarray(windows(steps, 1 + i)))) for i in range(workers)]
    if rows[0].size < size:
        raise ValueError(f"the transformer has {rows[0].size} parameters; got size={size}")
    return np.stack(rows)[:, :size]
