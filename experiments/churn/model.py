"""The training of a member: a network of three layers on digits, in NumPy, at a pace."""

import itertools
import time
from pathlib import Path
from typing import Any

import numpy as np

from experiments.lib.data import load

__all__ = ["BATCH", "SIZES", "Training", "initial", "losses"]

SIZES = (64, 512, 32, 10)
BATCH, RATE = 32, 0.02


def initial(seed: int) -> np.ndarray:
    """The parameters as one vector, f32[d]."""
    rng = np.random.default_rng(seed)
    parts = []
    for n, m in itertools.pairwise(SIZES):
        parts += [rng.standard_normal(n * m) * np.sqrt(2 / n), np.zeros(m)]
    return np.concatenate(parts).astype(np.float32)


def _layers(point: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    layers, at = [], 0
    for n, m in itertools.pairwise(SIZES):
        layers.append((point[at : at + n * m].reshape(n, m), point[at + n * m : at + n * m + m]))
        at += n * m + m
    return layers


def _forward(point: np.ndarray, x: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
    inputs, layers = [x], _layers(point)
    for w, b in layers[:-1]:
        inputs.append(np.maximum(inputs[-1] @ w + b, 0))
    logits = inputs[-1] @ layers[-1][0] + layers[-1][1]
    logits -= logits.max(1, keepdims=True)
    return inputs, logits - np.log(np.exp(logits).sum(1, keepdims=True))


def _gradient(point: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    inputs, logs = _forward(point, x)
    delta = np.exp(logs)
    delta[np.arange(len(y)), y] -= 1
    delta /= len(y)
    parts: list[np.ndarray] = []
    for (w, _), h in zip(_layers(point)[::-1], inputs[::-1], strict=True):
        parts = [(h.T @ delta).reshape(-1), delta.sum(0), *parts]
        delta = (delta @ w.T) * (h > 0)
    return np.concatenate(parts)


def losses(point: np.ndarray) -> tuple[float, float]:
    """Loss and accuracy on the test images."""
    data = load("digits")
    _, logs = _forward(point, data.test_x.reshape(len(data.test_x), -1))
    return float(-logs[np.arange(len(logs)), data.test_y].mean()), float((logs.argmax(1) == data.test_y).mean())


class Training:
    """Steps of one member on its eighth of the images, as many samples a second as it is said to manage."""

    def __init__(self, i: int, members: int, seed: int, pace: float, seconds: float):
        data = load("digits")
        self.x = data.train_x.reshape(len(data.train_x), -1)[i::members]
        self.y = data.train_y[i::members]
        self.rng, self.pace, self.seconds = np.random.default_rng([seed, i, time.time_ns()]), pace, seconds

    def __call__(self, point: np.ndarray, task: Any) -> tuple[np.ndarray, int]:
        """Point after about so many seconds of steps, and samples that they took."""
        del task
        seconds = self.seconds * self.rng.uniform(0.75, 1.5)
        begun, steps = time.monotonic(), max(1, round(self.pace * seconds / BATCH))
        for step in range(steps):
            rows = self.rng.integers(0, len(self.x), BATCH)
            point = point - np.float32(RATE) * _gradient(point, self.x[rows], self.y[rows])
            time.sleep(max(0.0, begun + (step + 1) * BATCH / self.pace - time.monotonic()))
        return point, steps * BATCH


def touch(path: Path) -> None:
    """Says to other processes that something has happened."""
    path.write_text(str(time.time()))
