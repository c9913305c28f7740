"""Memories in fewer bits than the gradients: bfloat16, or 8 bits with a scale for each block; rounded at random."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomp.base import Algorithm, stepped
from jaxcomp.floats import rounded_to
from jaxcomp.hashing import random_bits, random_uniform

__all__ = ["MEMORIES", "Narrow", "remembered_in"]

Array = Any  # of JAX inside jit, of NumPy on the host
MEMORIES = ("float32", "bfloat16", "int8")
BLOCK = 128
MOST = 127
TINY = float(np.finfo(np.float32).tiny)
# Of 8 bits: 127 times a scale, which may have been rounded up.
LARGEST = {"int8": float(np.finfo(np.float32).max) * (1 - 2.0**-22), "bfloat16": float(jnp.finfo(jnp.bfloat16).max)}


class Narrow(NamedTuple):
    """Numbers in few bits, in one of two forms.

    codes: i8[..., d];    scales: f[..., ceil(d / 128)].  Values: codes times the scale of their block.
    codes: bf16[..., d];  scales: f[..., 0].              Values: the codes.

    The dtype of the scales is that of the values.
    """

    codes: Array
    scales: Array

    @property
    def kind(self) -> str:
        """The name of its dtype, of `MEMORIES`."""
        return str(np.dtype(self.codes.dtype).name)

    @classmethod
    def of(cls, x: Array, key: Array | None = None, kind: str = "int8") -> "Narrow":
        """Rounded to nearest; with a key at random, without bias up to the largest number. x: finite."""
        xp: Any = jnp if isinstance(x, jax.Array) else np
        dtype, largest = x.dtype, np.asarray(LARGEST[kind], x.dtype)
        x = xp.clip(x, -largest, largest).astype(xp.float32)
        if kind == "bfloat16":
            return cls(_in_16_bits(x, key), xp.zeros((*x.shape[:-1], 0), dtype))
        *lead, d = x.shape
        blocks = -(-d // BLOCK)
        rows = xp.pad(x, [(0, 0)] * len(lead) + [(0, blocks * BLOCK - d)])
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
        return cls(codes.reshape(*lead, blocks * BLOCK)[..., :d], scales.astype(dtype))

    def values(self) -> Array:
        """f[..., d]."""
        xp: Any = jnp if isinstance(self.codes, jax.Array) else np
        wide = self.codes.astype(self.scales.dtype)
        if self.kind == "bfloat16":
            return wide
        return wide * xp.repeat(self.scales, BLOCK, axis=-1)[..., : self.codes.shape[-1]]

    @classmethod
    def zeros(cls, like: Any, kind: str = "int8") -> "Narrow":
        """Codes of zeros of this shape and dtype."""
        *lead, d = like.shape
        return cls(jnp.zeros((*lead, d), kind), jnp.zeros((*lead, -(-d // BLOCK) if kind == "int8" else 0), like.dtype))


def _in_16_bits(x: Array, key: Array | None) -> Array:
    """bf16, rounded up with the chance that the lower 16 bits say: they are a share of the step to the next number."""
    if key is None:
        return rounded_to(x, jnp.bfloat16) if isinstance(x, jax.Array) else x.astype(jnp.bfloat16)
    noise = random_bits(key, x.size).reshape(x.shape) >> jnp.uint32(16)
    bits = lax.bitcast_convert_type(x, jnp.uint32) + noise & jnp.uint32(0xFFFF0000)
    return lax.bitcast_convert_type(bits, jnp.float32).astype(jnp.bfloat16)  # exact


def remembered_in(memory: str, algorithm: Algorithm, *fields: str) -> Algorithm:
    """The same algorithm with its memories in fewer bits between rounds: of these fields, or of the role "memory".

    A round reads them as f32 and rounds them at its end, at random without bias: so in the mean nothing is lost, and in
    each round at most a part of 2^-7 of an entry (bfloat16) or of the largest one of 128 (int8).

    Raises:
        ValueError: `memory` is none of `MEMORIES`.
    """
    name = getattr(algorithm.update, "__qualname__", "algorithm").partition(".")[0]
    if memory not in MEMORIES:
        raise ValueError(f"{name}: memory must be one of {', '.join(map(repr, MEMORIES))}; got {memory!r}")
    if memory == "float32":
        return algorithm
    fields = fields or tuple(field for field, role in algorithm.roles.items() if role == "memory")
    each = lambda function, state: {field: tuple(map(function, getattr(state, field))) for field in fields}

    def init(here, like):
        state = algorithm.init(here, like)
        return state._replace(**each(lambda x: Narrow.zeros(x, memory), state))

    def update(here, grads, state):
        key, own = jax.random.split(here.key)
        wide = state._replace(**each(lambda narrow: narrow.values(), state))
        out, after = yield from stepped(algorithm.update(here._replace(key=key), grads, wide))
        count = sum(len(getattr(after, field)) for field in fields)
        keys = iter(jax.random.split(own, max(count, 1)))
        return out, after._replace(**each(lambda x: Narrow.of(x, next(keys), memory), after))

    roles = dict(algorithm.roles) | dict.fromkeys(fields, "narrow memory")
    return algorithm._replace(init=init, update=update, roles=roles)
