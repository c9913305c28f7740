"""What the estimates are tried on: vectors of known laws, and gradients recorded from training."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from experiments.lib.data import batch_of, load
from experiments.lib.models import CharLstm, Cnn
from experiments.lib.step import classified, dense
from experiments.lib.text import read_characters, windows

__all__ = ["LAWS", "ZEROS", "draws", "record_images", "record_text"]

# Magnitudes of d entries.
LAWS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "Laplace": lambda rng, d: rng.exponential(size=d),
    "gamma 0.2": lambda rng, d: rng.gamma(0.2, size=d),
    "gamma 0.5": lambda rng, d: rng.gamma(0.5, size=d),
    "Pareto 0.2": lambda rng, d: (rng.random(d) ** -0.2 - 1) / 0.2,
    "Pareto 0.4": lambda rng, d: (rng.random(d) ** -0.4 - 1) / 0.4,
    "half-normal": lambda rng, d: np.abs(rng.standard_normal(d)),
    "Student t3": lambda rng, d: np.abs(rng.standard_t(3, d)),
    "scale mixture": lambda rng, d: np.abs(rng.standard_normal(d) * np.exp(rng.standard_normal(d))),
}
ZEROS = (0.0, 0.1, 0.5)  # shares of exact zeros


def draws(law: str, zeros: float, size: int, number: int, seed: int) -> Iterator[np.ndarray]:
    """`number` vectors f32[size] of a law with random signs, a share of whose entries is exactly zero."""
    rng = np.random.default_rng([seed, list(LAWS).index(law), int(100 * zeros)])
    for _ in range(number):
        x = LAWS[law](rng, size) * rng.choice([-1.0, 1.0], size)
        x[rng.random(size) < zeros] = 0
        yield x.astype(np.float32)


def record_images(data: str, folder: Path | None, steps: int, seed: int) -> np.ndarray:
    """Gradients f32[steps, d] of a CNN, trained dense with Adam on batches of 64."""
    images = load(data, folder)
    everyone = [np.arange(len(images.train_y))]

    def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
        chosen = batch_of(everyone, 64, seed, step)
        return images.train_x[chosen], images.train_y[chosen]

    return record(Cnn(images.train_x.shape[1:], images.num_classes, rngs=nnx.Rngs(seed)), batch, steps, rate=1e-3)


def record_text(path: Path, steps: int, seed: int) -> np.ndarray:
    """Gradients f32[steps, d] of a character LSTM, trained dense with Adam on 32 windows of 64 characters."""
    codes, characters = read_characters(path)

    def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
        rows = windows(codes[:-1], 32, 64, seed, step)
        return rows[:, :-1], rows[:, 1:]

    return record(CharLstm(characters, rngs=nnx.Rngs(seed)), batch, steps, rate=2e-3)


def record(model: Any, batch: Callable, steps: int, rate: float) -> np.ndarray:
    """All leaves of each gradient as one vector, in the order of `jax.tree.leaves`."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    gradient = jax.grad(classified(graph, rest))
    return np.stack([flat for _, flat in dense(params, gradient, rate, map(batch, range(steps)))])
