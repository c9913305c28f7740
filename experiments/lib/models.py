"""Small Flax (NNX) models for images and characters."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

__all__ = ["MODELS", "Block", "CharLstm", "Cnn", "Mlp", "Ngrams", "Transformer", "WideTransformer", "pooled"]


class Mlp(nnx.Module):
    """Two hidden layers of 256."""

    def __init__(self, shape: tuple[int, ...], num_classes: int, rngs: nnx.Rngs):
        self.first = nnx.Linear(math.prod(shape), 256, rngs=rngs)
        self.second = nnx.Linear(256, 256, rngs=rngs)
        self.last = nnx.Linear(256, num_classes, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x.reshape(x.shape[0], -1)
        x = nnx.relu(self.first(x))
        x = nnx.relu(self.second(x))
        return self.last(x)


def pooled(x: jax.Array) -> jax.Array:
    """The largest of each 2 x 2 pixels of [n, height, width, channels]; of equal ones the first has the gradient.

    What `nnx.max_pool` does, whose gradient on CPU takes several times as long.
    """
    many, height, width, channels = x.shape
    x = x[:, : height // 2 * 2, : width // 2 * 2].reshape(many, height // 2, 2, width // 2, 2, channels)
    larger = lambda a, b: jnp.where(a >= b, a, b)
    x = larger(x[:, :, :, :, 0], x[:, :, :, :, 1])
    return larger(x[:, :, 0], x[:, :, 1])


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
        x = pooled(nnx.relu(self.first(x)))
        x = pooled(nnx.relu(self.second(x)))
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


class Block(nnx.Module):
    """A layer of a causal transformer: attention of four heads, then a hidden layer, each before a residual sum."""

    heads = 4

    def __init__(self, width: int, rngs: nnx.Rngs):
        linear = lambda inputs, outputs: nnx.Linear(inputs, outputs, use_bias=False, rngs=rngs)
        self.norm_1, self.norm_2 = nnx.RMSNorm(width, rngs=rngs), nnx.RMSNorm(width, rngs=rngs)
        self.qkv, self.out = linear(width, 3 * width), linear(width, width)
        self.up, self.down = linear(width, 4 * width), linear(4 * width, width)

    def __call__(self, x: jax.Array) -> jax.Array:
        many, length, width = x.shape
        q, k, v = jnp.moveaxis(self.qkv(self.norm_1(x)).reshape(many, length, 3, self.heads, -1), 2, 0)
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.reshape(many, length, width))
        return x + self.down(jax.nn.gelu(self.up(self.norm_2(x))))


class Transformer(nnx.Module):
    """Four layers of width 128 over embedded characters, 0.8 million parameters: i32[n, t] -> f32[n, t, characters]."""

    layers, width = 4, 128

    def __init__(self, shape: tuple[int, ...], num_classes: int, rngs: nnx.Rngs):
        self.embed = nnx.Embed(num_classes, self.width, rngs=rngs)
        self.position = nnx.Embed(shape[0], self.width, rngs=rngs)
        for i in range(self.layers):
            setattr(self, f"layer_{i}", Block(self.width, rngs))
        self.norm = nnx.RMSNorm(self.width, rngs=rngs)
        self.last = nnx.Linear(self.width, num_classes, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.embed(x) + self.position(jnp.arange(x.shape[1]))
        for i in range(self.layers):
            x = getattr(self, f"layer_{i}")(x)
        return self.last(self.norm(x))


class WideTransformer(Transformer):
    """The same of width 256: 3.2 million parameters."""

    width = 256


class Ngrams(nnx.Module):
    """The next character from the hashed 1- to 4-grams that end here: i32[n, t] -> f32[n, t, characters].

    Nearly all of its 2.2 million parameters are a table of embeddings, of which a batch touches few rows.
    """

    longest, bits, width = 4, 15, 64

    def __init__(self, shape: tuple[int, ...], num_classes: int, rngs: nnx.Rngs):
        del shape
        self.table = nnx.Embed(2**self.bits, self.width, rngs=rngs)
        self.hidden = nnx.Linear(self.longest * self.width, 256, rngs=rngs)
        self.last = nnx.Linear(256, num_classes, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        codes, hashed, found = x.astype(jnp.uint32) + 1, jnp.zeros(x.shape, jnp.uint32), []
        for back in range(self.longest):
            before = jnp.pad(codes, ((0, 0), (back, 0)))[:, : x.shape[1]]
            hashed = (hashed ^ before) * jnp.uint32(0x9E3779B1)
            hashed = hashed ^ (hashed >> 15)
            found.append(self.table((hashed >> (32 - self.bits)).astype(jnp.int32)))
        return self.last(nnx.relu(self.hidden(jnp.concatenate(found, -1))))


MODELS: dict[str, Callable[..., nnx.Module]] = {"mlp": Mlp, "cnn": Cnn, "cnn-wide": WideCnn}
