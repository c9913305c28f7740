"""SKCompress by position: the bucket of each value travels as a number. The mode to use.

Zero is a split, so no bucket mixes signs, and a level is the mean of its bucket. Buckets hold equal parts of
sum |x_j|^power. Keys travel anyway, so values can be told by their place, without hashing.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.compressors.quantiles import bucket_of, means, signed_splits
from jaxcomp.compressors.sketches import Coder, codes, level_of, ordered
from jaxcomp.packing import pack, width_for
from jaxcomp.payloads import Sketch

__all__ = ["by_position"]

Array = jax.Array
I32 = jnp.int32


def by_position(q: int, power: float) -> Coder:
    """q buckets of equal weight |x_j|^power."""

    def encode(keys, values, n, seeds):
        real = lax.iota(I32, keys.shape[0]) < n
        bucket = bucket_of(values, signed_splits(ordered(values, n), n, q, q, power))
        levels = means(values, jnp.where(real, bucket, q), q)
        cells = pack(jnp.where(real, bucket, 0).astype(jnp.uint32), width_for(q))
        return Sketch(levels, n[None], keys, cells, jnp.zeros((0,), I32))

    return Coder(encode, lambda payload, seeds: level_of(payload, codes(payload)), False)
