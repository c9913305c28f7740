"""Memories in fewer bits than the gradients: bfloat16, or 8 bits with a scale for each block; rounded at random."""

import itertools
import math
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomp.arrays import rounded_to
from jaxcomp.backend import Pieces, join_pieces, recomputes, seen_anew
from jaxcomp.base import Algorithm, Mean, Round, answered, stepped
from jaxcomp.hashing import random_bits, random_uniform

__all__ = ["MEMORIES", "Narrow", "remembered_in"]

Array = Any  # of JAX inside jit, of NumPy on the host
MEMORIES = ("float32", "bfloat16", "int8")
BLOCK = 128
MOST = 127
TINY = float(np.finfo(np.float32).tiny)
# Of 8 bits: 127 times a scale, which is rounded up.
LARGEST = {"int8": float(np.finfo(np.float32).max) * (1 - 2.0**-15), "bfloat16": float(jnp.finfo(jnp.bfloat16).max)}


class Narrow(NamedTuple):
    """d numbers in few bits, as b = ceil(d / 128) blocks, the last filled up with zeros; in one of two forms.

    codes: i8[..., b, 128];    scales: f[..., b].  Values: codes times the scale of their block.
    codes: bf16[..., b, 128];  scales: f[..., 0].  Values: the codes.

    A TPU keeps a single row of n such numbers, as state has them at each device, in four rows of 8 bits or two of 16.
    The dtype of the scales is that of the values. A scale has 17 bits, so that its products with codes are exact: no
    compiler can change a sum with them. A block of 8 bits whose largest entry is below 1.5e-36 is zero.
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
        return cls.with_scales(x, scales_of(x, kind), key, kind)

    @classmethod
    def with_scales(cls, x: Array, scales: Array, key: Array | None, kind: str) -> "Narrow":
        """The same; scales: `scales_of` x."""
        xp, rows = _rows(x, kind)
        if kind == "bfloat16":
            return cls(_in_16_bits(rows, key), scales)
        each = scales.astype(xp.float32)
        steps = rows / xp.where(each == 0, xp.float32(1), each)[..., None]
        steps = xp.where((each == 0)[..., None], xp.float32(0), steps)
        if key is None:
            steps = xp.round(steps)
        else:
            noise = random_uniform(key, math.prod(rows.shape)).reshape(rows.shape)
            steps = xp.floor(steps + noise)
        return cls(xp.clip(steps, -MOST, MOST).astype(xp.int8), scales)

    def values(self, size: int | None = None) -> Array:
        """f[..., d], the first `size` of them; None: of whole blocks."""
        *lead, blocks, _ = self.codes.shape
        wide = self.codes.astype(self.scales.dtype)
        wide = wide if self.kind == "bfloat16" else wide * self.scales[..., None]
        return wide.reshape(*lead, blocks * BLOCK)[..., :size]

    @classmethod
    def zeros(cls, like: Any, kind: str = "int8") -> "Narrow":
        """Codes of zeros of this shape and dtype."""
        *lead, d = like.shape
        blocks = -(-d // BLOCK)
        scales = jnp.zeros((*lead, blocks if kind == "int8" else 0), like.dtype)
        return cls(jnp.zeros((*lead, blocks, BLOCK), kind), scales)


def scales_of(x: Array, kind: str) -> Array:
    """f[..., b] of the blocks of x in 8 bits, f[..., 0] in 16."""
    xp, rows = _rows(x, kind)
    if kind == "bfloat16":
        return xp.zeros((*rows.shape[:-2], 0), x.dtype)
    scales = xp.max(xp.abs(rows), axis=-1) / xp.float32(MOST)
    return _rounded_up(xp.where(scales < xp.float32(TINY), xp.float32(0), scales)).astype(x.dtype)


def _rows(x: Array, kind: str) -> tuple[Any, Array]:
    """The library of the array, and its blocks in f32."""
    xp: Any = jnp if isinstance(x, jax.Array) else np
    largest = np.asarray(LARGEST[kind], x.dtype)
    *lead, d = x.shape
    rows = xp.pad(xp.clip(x, -largest, largest).astype(xp.float32), [(0, 0)] * len(lead) + [(0, -d % BLOCK)])
    return xp, rows.reshape(*lead, -(-d // BLOCK), BLOCK)


def _rounded_up(scales: Array) -> Array:
    """f32 to 17 bits, of which the first is not stored."""
    if isinstance(scales, jax.Array):
        bits = lax.bitcast_convert_type(scales, jnp.uint32) + jnp.uint32(127) & ~jnp.uint32(127)
        return lax.bitcast_convert_type(bits, jnp.float32)
    return (scales.view(np.uint32) + np.uint32(127) & ~np.uint32(127)).view(np.float32)


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
    each round at most a part of 2^-7 of an entry (bfloat16) or of the largest one of 128 (int8). Each group is one
    vector [d]. Of f64, what is beyond the largest number of f32 (bfloat16: of that) is lost.

    Raises:
        ValueError: `memory` is none of `MEMORIES`.
    """
    name = getattr(algorithm.update, "__qualname__", "algorithm").partition(".")[0]
    if memory not in MEMORIES:
        raise ValueError(f"{name}: memory must be one of {', '.join(map(repr, MEMORIES))}; got {memory!r}")
    if memory == "float32":
        return algorithm
    fields = fields or tuple(field for field, role in algorithm.roles.items() if role == "memory")

    def each(function: Callable[..., Any], here: Round, state: Any) -> dict[str, tuple[Any, ...]]:
        """function(array, shape of its group), of all groups of each field; a field may be left out, ()."""
        shapes = [group.shape for group in here.groups]
        found = {field: getattr(state, field) for field in fields}
        return {field: tuple(map(function, own, shapes)) if own else () for field, own in found.items()}

    def init(here, like):
        state = algorithm.init(here, like)
        return state._replace(**each(lambda x, _: Narrow.zeros(x.reshape(-1), memory), here, state))

    def update(here, grads, state):
        key, own = jax.random.split(here.key)
        here = here._replace(key=key)

        def run(grads, state, pieces=False):
            widened = each(lambda x, shape: x.values(math.prod(shape)).reshape(shape), here, state)
            grads = grads if pieces else tuple(map(_whole, grads, here.groups))
            return algorithm.update(here, grads, state._replace(**widened))

        # Of a sparse code the message is an array at any rate, in which its threshold is searched for.
        dense = algorithm.compressor is not None and all(c.spec.entrywise for c in here.compressors)
        if dense and recomputes(grads):
            twice = _Again(run, grads, state)
            out, after = yield from twice.first()
            scales = each(lambda x, _: scales_of(x.reshape(-1), memory), here, twice.after())
            anew = twice.after(scales)
        else:
            out, after = yield from stepped(run(grads, state, bool(algorithm.pieces)))
            scales = each(lambda x, _: scales_of(x.reshape(-1), memory), here, after)
            anew = after
        keys = iter(jax.random.split(own, max(len(fields) * len(here.groups), 1)))
        found = itertools.chain(*scales.values())  # in the order of `fields`
        rounded = lambda x, _: Narrow.with_scales(x.reshape(-1), next(found), next(keys), memory)
        return out, after._replace(**each(rounded, here, anew))

    roles = dict(algorithm.roles) | dict.fromkeys(fields, "narrow memory")
    return algorithm._replace(init=init, update=update, roles=roles, pieces=True)


def _whole(grads: Any, group: Any) -> Any:
    return join_pieces(grads, group.like) if isinstance(grads, Pieces) else grads


# ------------------------------------------------------------------------------------------------
# A round run again


class _Again:
    """A round of an algorithm, and its state after the round, computed anew as often as it is read.

    Of the gradients, the narrow memories and what was sent it is little arithmetic. Kept, as XLA would, the message and
    what is remembered of it are arrays in f32, which memories in few bits are to save.
    """

    def __init__(self, run: Callable[[Any, Any], Any], grads: Any, state: Any):
        """run(grads, state): the algorithm."""
        self.run, self.given = run, (grads, state)
        self.answers: list[Any] = []
        self.arrays: list[Any] = []  # of each answer: the payloads that were sent, or all of it

    def first(self) -> Generator[Any, Any, Any]:
        """Run of the algorithm, for `yield from`: returns what it returns."""
        steps: Any = self.run(*self.given)
        if not isinstance(steps, Generator):
            return steps
        reply: Any = None
        while True:
            try:
                asked = steps.send(reply)
            except StopIteration as end:
                return end.value
            reply = yield asked
            for request, answer in zip(asked, reply, strict=True) if isinstance(asked, list) else [(asked, reply)]:
                self.answers.append(answer)
                self.arrays.append(answer.payloads if isinstance(request, Mean) else answer)

    def after(self, tied: Any = ()) -> Any:
        """The state after the round. tied: arrays that are computed before it is."""
        self.given, self.arrays, _ = seen_anew((self.given, self.arrays, tied))
        noted = zip(self.answers, self.arrays, strict=True)

        def one(request: Any) -> Any:
            answer, arrays = next(noted)
            return answer.again(request.message, arrays) if isinstance(request, Mean) else arrays

        return answered(self.run(*self.given), lambda requests: list(map(one, requests)))[1]
