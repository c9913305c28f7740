"""FetchSGD: workers send count sketches, which are added on the way; momentum and errors live in the sum's sketch."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcomp.arrays import bounded, finite, key_data, wide_like, wrap_key, zeros_like
from jaxcomp.base import Algorithm, State
from jaxcomp.compressors.checks import is_integer
from jaxcomp.compressors.count_sketch import add_to_sketch, estimates
from jaxcomp.compressors.sparsify import largest_indices
from jaxcomp.compressors.vector import count_of
from jaxcomp.layout import Parts
from jaxcomp.select import take

__all__ = ["fetch_sgd"]

Array = jax.Array


class FetchShared(NamedTuple):
    """momentum, errors: a sketch [r, c] of each vector;  dense: momentum of the small leaves;  seed: of the hashes."""

    momentum: tuple[Array, ...]
    errors: tuple[Array, ...]
    dense: Any
    seed: Array


def fetch_sgd(
    ratio: float | None = None, *, k: int | None = None, sketch: float = 0.1, rows: int = 5, momentum: float = 0.9
) -> Algorithm:
    """The largest entries of the mean gradient with momentum, found in a sum of sketches.

    u <- momentum u + mean_i S(g_i),   e <- e + u,   Delta = the k largest of median_j s_j(i) e_{j h_j(i)},
    e <- e - S(Delta),   direction = Delta.

    S is a count sketch with r rows, the same in all rounds. Workers keep nothing: both sketches are equal on all of
    them, so clients may come and go, and no omega or alpha has to be known. What travels is the sketch alone, by an
    all-reduce. Small leaves are added as they are, with the same momentum. Non-finite entries count as zero.

    Args:
        ratio, k: share or number of entries that move in a round, as for `top_k`.
        sketch: counters, all rows together, as a share of d, in (0, 1].
        rows: odd, 1 to 15; the median of more of them is surer.
        momentum: in [0, 1).

    Raises:
        ValueError: an argument is out of range.

    Reference: Rothchild, Panda, Ullah, Ivkin, Stoica, Braverman, Gonzalez, Arora 2020, algorithm 1. There e
    takes the step size, which stands behind the direction here; the release sets counters that Delta hits to zero.

    >>> import jax, jax.numpy as jnp, jaxcomp as jc
    >>> tx = jc.compressed_mean(jc.fetch_sgd(k=1, sketch=0.5, momentum=0.0), "data")
    >>> grads = jnp.zeros((2, 2000)).at[:, 7].set(jnp.array([4.0, 2.0]))
    >>> step = jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name="data", out_axes=None)
    >>> direction = jax.jit(step)(grads)
    >>> print(jnp.nonzero(direction)[0], direction[7])
    [7] 3.0
    """
    target = count_of("fetch_sgd", ratio, k)
    if not (is_integer(rows) and rows <= 15 and rows % 2 == 1):
        raise ValueError(f"fetch_sgd: rows must be an odd integer in 1 .. 15; got {rows!r}")
    if not 0 < sketch <= 1:
        raise ValueError(f"fetch_sgd: sketch must be in (0, 1]; got {sketch}")
    if not 0 <= momentum < 1:
        raise ValueError(f"fetch_sgd: momentum must be in [0, 1); got {momentum}")

    def init(shared_key, like):
        dense, vectors = _apart(zeros_like(wide_like(like)))
        columns = lambda size: max(1, math.floor(sketch * size / rows))
        zeros = tuple(jnp.zeros((rows, columns(x.size)), x.dtype) for x in vectors)
        return State((), FetchShared(zeros, zeros, dense, key_data(shared_key)))

    def update(key, grads, state, exchange):
        old = state.shared
        dense, vectors = _apart(finite(grads))
        keys = [jax.random.fold_in(wrap_key(old.seed), i) for i in range(len(vectors))]
        sketches = [
            bounded(add_to_sketch(key, jnp.zeros_like(u), x.reshape(-1), jnp.arange(x.size)))
            for key, u, x in zip(keys, old.momentum, vectors, strict=True)
        ]
        part = lambda x, u: x.astype(u.dtype) / exchange.size  # a sum could overflow
        total, dense = exchange.sum((list(map(part, sketches, old.momentum)), jax.tree.map(part, dense, old.dense)))
        average = lambda u, s: bounded(momentum * u + s)
        u = tuple(map(average, old.momentum, total))
        dense, errors, found = jax.tree.map(average, old.dense, dense), [], []
        for key, before, new, x in zip(keys, old.errors, u, vectors, strict=True):
            e = bounded(before + new)
            entries = median(estimates(key, e, x.size))
            count = target(x.size)
            indices = largest_indices(entries, count, count) if count else jnp.zeros((0,), jnp.int32)
            values = take(entries, indices)
            errors.append(bounded(add_to_sketch(key, e, -values, indices)))
            found.append(jnp.zeros_like(entries).at[indices].set(values, mode="drop").reshape(x.shape))
        direction = Parts(dense, tuple(found)) if isinstance(grads, Parts) else found[0]
        return direction, State((), FetchShared(u, tuple(errors), dense, old.seed))

    return Algorithm(init, update, {"momentum": "momentum", "errors": "momentum", "dense": "momentum", "seed": "coin"})


def median(rows: list[Array]) -> Array:
    """Entry by entry, of an odd number of arrays: sorts them by comparing and exchanging neighbours."""
    rows = list(rows)
    for i in range(len(rows)):
        for j in range(len(rows) - 1 - i):
            rows[j], rows[j + 1] = jnp.minimum(rows[j], rows[j + 1]), jnp.maximum(rows[j], rows[j + 1])
    return rows[len(rows) // 2]


def _apart(tree: Any) -> tuple[Any, tuple[Any, ...]]:
    """Small leaves, and the vectors."""
    if isinstance(tree, Parts):
        return tree.dense, tree.vectors
    return (), (tree,)
