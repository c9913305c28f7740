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


def qgz(group: int) -> Released:
    """DeepSpeed ZeRO++: symmetric int4, q = clip(round(8 x / max), -8, 7), a scale of 32 bits a group."""

    def run(key, x):
        del key
        rows = x.reshape(-1, group)
        step = jnp.max(jnp.abs(rows), axis=1, keepdims=True) / 8
        step = jnp.where(step == 0, 1.0, step)
        return (jnp.clip(jnp.round(rows / step), -8, 7) * step).reshape(-1)

    return Released(f"qgZ int4, groups of {group}", 4 + 32 / group, run)


def cgx(bits: int, bucket: int = 512) -> Released:
    """CGX: between minimum and maximum of a bucket, 2^bits points, rounded at random; two floats a bucket."""

    def run(key, x):
        rows = x.reshape(-1, bucket)
        low, high = jnp.min(rows, axis=1, keepdims=True), jnp.max(rows, axis=1, keepdims=True)
        step = (high - low) / (2**bits - 1)
        step = jnp.where(step == 0, 1.0, step)
        return (low + step * jnp.floor((rows - low) / step + jax.random.uniform(key, rows.shape))).reshape(-1)

    return Released(f"CGX min-max {bits}", bits + 64 / bucket, run)


def prime() -> Released:
    """prime: 256 bins over 6 standard deviations to each side, each of which decodes to its own mean."""

    def run(key, x):
        del key
        mean, deviation = jnp.mean(x), jnp.std(x)
        place = jnp.clip(jnp.round((x - mean) / (deviation * 12 / 256) + 128), 0, 255).astype(jnp.int32)
        total = jnp.zeros(256).at[place].add(x)
        count = jnp.zeros(256).at[place].add(1.0)
        return (total / jnp.maximum(count, 1))[place]

    return Released("prime uint8", 8.0, run)


def torchft(kind: str, row: int = 512) -> Released:
    """torchft: e4m3 or int8 to nearest, a scale of 32 bits a row."""

    def run(key, x):
        del key
        rows = x.reshape(-1, row)
        top = 448.0 if kind == "e4m3" else 127.0
        scale = jnp.max(jnp.abs(rows), axis=1, keepdims=True) / top
        scale = jnp.where(scale == 0, 1.0, scale)
        y = rows / scale
        y = y.astype(jnp.float8_e4m3fn).astype(jnp.float32) if kind == "e4m3" else jnp.round(y)
        return (y * scale).reshape(-1)

    return Released(f"torchft {kind}", 8 + 32 / row, run)


RELEASED = [qgz(128), qgz(2048), *map(cgx, (1, 2, 3, 4, 8)), prime(), torchft("e4m3"), torchft("int8")]
