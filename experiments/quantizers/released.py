"""Quantizers as other libraries release them, for comparison: (key, x) -> x_hat, with their bits an entry."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

__all__ = ["RELEASED", "Released"]

Array = jax.Array


class Released(NamedTuple):
    """name: whose;  bits: an entry, scales included;  run: (key, f[d]) -> f[d], d a multiple of its buckets."""

    name: str
    bits: float
    run: Callable[[Array, Array], Array]


def of_rows(name: str, bits: int, row: int, top: float, rounded: Callable[[Array], Array]) -> Released:
    """To nearest, with a scale of 32 bits a row, by which its largest magnitude becomes top."""

    def run(_, x):
        rows = x.reshape(-1, row)
        scale = jnp.max(jnp.abs(rows), axis=1, keepdims=True) / top
        scale = jnp.where(scale == 0, 1.0, scale)
        return (rounded(rows / scale) * scale).reshape(-1)

    return Released(name, bits + 32 / row, run)


def cgx(bits: int, bucket: int = 512) -> Released:
    """CGX: between minimum and maximum of a bucket, 2^bits points, rounded at random; two floats a bucket."""

    def run(key, x):
        rows = x.reshape(-1, bucket)
        low, high = jnp.min(rows, axis=1, keepdims=True), jnp.max(rows, axis=1, keepdims=True)
        step = (high - low) / (2**bits - 1)
        step = jnp.where(step == 0, 1.0, step)
        return (low + step * jnp.floor((rows - low) / step + jax.random.uniform(key, rows.shape))).reshape(-1)

    return Released(f"CGX min-max {bits}", bits + 64 / bucket, run)


def prime(_: Array, x: Array) -> Array:
    """prime: 256 bins over 6 standard deviations to each side, each of which decodes to its own mean."""
    mean, deviation = jnp.mean(x), jnp.std(x)
    place = jnp.clip(jnp.round((x - mean) / (deviation * 12 / 256) + 128), 0, 255).astype(jnp.int32)
    total = jnp.zeros(256).at[place].add(x)
    count = jnp.zeros(256).at[place].add(1.0)
    return (total / jnp.maximum(count, 1))[place]


RELEASED = [
    # DeepSpeed ZeRO++: symmetric int4, clip(round(8 x / max), -8, 7).
    *(of_rows(f"qgZ int4, groups of {g}", 4, g, 8, lambda y: jnp.clip(jnp.round(y), -8, 7)) for g in (128, 2048)),
    *map(cgx, (1, 2, 3, 4, 8)),
    Released("prime uint8", 8.0, prime),
    of_rows("torchft e4m3", 8, 512, 448, lambda y: y.astype(jnp.float8_e4m3fn).astype(jnp.float32)),
    of_rows("torchft int8", 8, 512, 127, jnp.round),
]
