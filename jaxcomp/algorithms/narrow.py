"""Vectors that are remembered in 8 bits, with a scale for each block: a quarter of the memory."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp.hashing import random_uniform

__all__ = ["Narrow"]

Array = Any  # of JAX inside jit, of NumPy on the host
BLOCK = 128
MOST = 127
TINY = float(np.finfo(np.float32).tiny)


class Narrow(NamedTuple):
    """codes: i8[..., d];  scales: f32[..., ceil(d / 128)].  Values: codes times the scale of their block."""

    codes: Array
    scales: Array

    @classmethod
    def of(cls, x: Array, key: Array | None = None) -> "Narrow":
        """Rounded to nearest; with a key at random, without bias. x: finite."""
        xp: Any = jnp if isinstance(x, jax.Array) else np
        *lead, d = x.shape
        blocks = -(-d // BLOCK)
        rows = xp.pad(x.astype(xp.float32), [(0, 0)] * len(lead) + [(0, blocks * BLOCK - d)])
        rows = rows.reshape(*lead, blocks, BLOCK)
        scales = xp.max(xp.abs(rows), axis=-1) / xp.float32(MOST)
        scales = xp.where(scales < xp.float32(TINY), xp.float32(0), scales)
        steps = rows / xp.where(scales == 0, xp.float32(1), scales)[..., None]
        steps = xp.where((scales == 0)[..., None], xp.float32(0), steps)
        if key is None:
            steps = xp.round(steps)
        else:
            noise = random_uniform(key, math.prod(rows.shape)).reshape(rows.shape)
            steps = xp.floor(steps + noise)
        codes = xp.clip(steps, -MOST, MOST).astype(xp.int8)
        return cls(codes.reshape(*lead, blocks * BLOCK)[..., :d], scales)

    def values(self) -> Array:
        """f32[..., d]."""
        xp: Any = jnp if isinstance(self.codes, jax.Array) else np
        each = xp.repeat(self.scales, BLOCK, axis=-1)[..., : self.codes.shape[-1]]
        return self.codes.astype(xp.float32) * each

    @classmethod
    def zeros(cls, like: Any) -> "Narrow":
        """Codes of zeros of this shape."""
        *lead, d = like.shape
        return cls(jnp.zeros((*lead, d), jnp.int8), jnp.zeros((*lead, -(-d // BLOCK)), jnp.float32))
