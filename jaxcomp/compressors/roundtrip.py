"""A compressor tried on one array: C(x), and what would be sent."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxcomp.arrays import like_of, root_key, wrap_key
from jaxcomp.base import Compressor, State, check_compressor, for_worker

__all__ = ["payload_like", "roundtrip"]

Array = jax.Array
Tree = Any


def roundtrip(compressor: Compressor, x: Tree, *, key: Array, worker: Array | int = 0) -> tuple[Tree, Tree]:
    """Compresses and decompresses once: x_hat = C(x).

    Both kinds of randomness, shared and private, are drawn from `key`. May be jit-compiled and
    mapped (over keys for Monte Carlo, over x for many vectors).

    Args:
        compressor: any compressor.
        x: floating array of any shape (a tree if the compressor is lifted).
        key: typed key or raw uint32[2].
        worker: whose plan to use, where plans differ between workers.

    Returns:
        x_hat with the shape and dtype of x, and the payload.

    >>> import jaxcomp as jc
    >>> x_hat, payload = jc.roundtrip(jc.top_k(k=1), jnp.array([1.0, -3.0]), key=jax.random.key(0))
    >>> print(x_hat, payload.indices)
    [ 0. -3.] [1]
    """
    check_compressor("roundtrip", compressor)
    x = jax.tree.map(jnp.asarray, x)
    shared_key, private_key = jax.random.split(root_key(key) if hasattr(key, "dtype") else wrap_key(key))
    like = like_of(x)
    state = compressor.init(shared_key, like)
    shared = for_worker(compressor, state.shared, worker)
    payload, _ = compressor.compress(private_key, x, State(state.local, shared))
    return compressor.decompress(payload, shared, like), payload


def payload_like(compressor: Compressor, like: jax.ShapeDtypeStruct) -> Tree:
    """Shapes and dtypes of what the compressor sends of an array like this one."""

    def sent(shared_key, key):
        state = compressor.init(shared_key, like)
        shared = for_worker(compressor, state.shared, 0)
        return compressor.compress(key, jnp.zeros(like.shape, like.dtype), State(state.local, shared))[0]

    return jax.eval_shape(sent, jax.random.key(0), jax.random.key(1))
