"""Small Flax (NNX) models for images."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

__all__ = ["MODELS", "CharLstm", "Cnn", "Mlp", "WideCnn"]


class Mlp(nnx.Module):
    """Two hidden layers of 256."""

    def __init__(self, shape: tuple[int, ...], num_classes: int, rngs: nnx.Rngs):
        size = 1
        for length in shape:
            size *= length
        self.first = nnx.Linear(size, 256, rngs=rngs)
        self.second = nnx.Linear(256, 256, rngs=rngs)
        self.last = nnx.Linear(256, num_classes, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x.reshape(x.shape[0], -1)
        x = nnx.relu(self.first(x))
        x = nnx.relu(self.second(x))
        return self.last(x)


class Cnn(nnx.Module):
    """Two convolutions with pooling, then two dense layers."""

    hidden = 128

    def __init__(self, shape: tuple[int, ...], num_classes: int, rngs: nnx.Rngs):
        height, width, channels = shape
        self.first = nnx.Conv(channels, 16, (3, 3), rngs=rngs)
        self.second = nnx.Conv(16, 32, (3, 3), rngs=rngs)
        self.third = nnx.Linear(32 * (height // 4) * (width // 4), self.hidden, rngs=rngs)
        self.last = nnx.Linear(self.hidden, num_classes, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.max_pool(nnx.relu(self.first(x)), (2, 2), (2, 2))
        x = nnx.max_pool(nnx.relu(self.second(x)), (2, 2), (2, 2))
        x = nnx.relu(self.third(x.reshape(x.shape[0], -1)))
        return self.last(x)


class WideCnn(Cnn):
    """The same with 2,048 hidden units: 3.2 million parameters for images of 28 x 28."""

    hidden = 2048


class CharLstm(nnx.Module):
    """One LSTM of 256 over embedded characters: i32[n, t] -> logits f32[n, t, characters]."""

    def __init__(self, characters: int, rngs: nnx.Rngs):
        self.embed = nnx.Embed(characters, 64, rngs=rngs)
        self.lstm = nnx.RNN(nnx.OptimizedLSTMCell(64, 256, rngs=rngs))
        self.last = nnx.Linear(256, characters, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        empty = jnp.zeros((x.shape[0], 256))
        hidden = self.lstm(self.embed(x), initial_carry=(empty, empty))
        return self.last(hidden)  # pyright: ignore[reportArgumentType]


MODELS: dict[str, Callable[..., nnx.Module]] = {"mlp": Mlp, "cnn": Cnn, "cnn-wide": WideCnn}
