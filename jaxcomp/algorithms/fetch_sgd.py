"""FetchSGD: workers send count sketches, which are added on the way; momentum and errors live in the sum's sketch."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcomp.arrays import bounded, finite, key_data, wide_like, wrap_key
from jaxcomp.backend import lanes
from jaxcomp.base import Algorithm, Sum, count_of
from jaxcomp.checks import is_integer
from jaxcomp.compressors.count_sketch import add_to_sketch, estimates, sketch_of
from jaxcomp.compressors.sparsify import largest_indices
from jaxcomp.factories import factory
from jaxcomp.select import take

__all__ = ["fetch_sgd"]

Array = jax.Array


class FetchState(NamedTuple):
    """momentum: a sketch [r, c] of each group, and of a small one itself.  errors: a sketch of each large group, () of
    a small one.  seed: of the hashes.
    """

    momentum: tuple[Array, ...]
    errors: tuple[Any, ...]
    seed: Array


@factory
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

    def init(here, like):
        columns = lambda size: max(1, math.floor(sketch * size / rows))
        longest = max((x.size for x in like), default=0)
        if longest >= 2**31:
            raise ValueError(
                f"fetch_sgd: at most 2^31 - 1 entries share a sketch, which numbers them by 32 bits; got {longest}. "
                'Give parts of the tree sketches of their own: jc.by_path({"embed": jc.fetch_sgd(...), ".*": ...})'
            )
        shape = lambda group, x: x.shape if group.small else (rows, columns(x.size))
        pairs = list(zip(here.groups, wide_like(like), strict=True))
        zeros = [jnp.zeros(shape(group, x), x.dtype) for group, x in pairs]
        errors = [() if group.small else zero for zero, (group, _) in zip(zeros, pairs, strict=True)]
        return FetchState(tuple(zeros), tuple(errors), key_data(here.key))

    def update(here, grads, state):
        numbers = iter(range(len(here.groups)))
        keys = [None if g.small else jax.random.fold_in(wrap_key(state.seed), next(numbers)) for g in here.groups]

        def sketched(key, u, x):
            if key is None:
                return x
            return bounded(sketch_of(key, x.reshape(-1).astype(u.dtype), *u.shape))

        part = lambda key, u, x: sketched(key, u, x).astype(u.dtype) / here.size  # a sum could overflow
        total = yield Sum(tuple(map(part, keys, state.momentum, map(finite, grads))))
        u = tuple(bounded(momentum * before + new) for before, new in zip(state.momentum, total, strict=True))
        errors, direction = [], []
        for key, before, new, x in zip(keys, state.errors, u, grads, strict=True):
            if key is None:
                errors.append(())
                direction.append(new)
                continue
            e = bounded(before + new)
            entries = estimates(key, e, x.size, median)
            count = target(x.size)
            indices = largest_indices(entries, count, count) if count else jnp.zeros((0,), jnp.int32)
            values = take(entries, indices)
            found = jnp.zeros_like(entries).at[indices].set(values, mode="drop", indices_are_sorted=True)
            if lanes() > 1:  # a TPU would sort what is added at places that do not ascend
                errors.append(bounded(e - sketch_of(key, found, *e.shape)))
            else:
                errors.append(bounded(add_to_sketch(key, e, -values, indices)))
            direction.append(found.reshape(x.shape))
        return tuple(direction), FetchState(u, tuple(errors), state.seed)

    return Algorithm(init, update, {"momentum": "momentum", "errors": "momentum", "seed": "coin"})


def median(rows: list[Array]) -> Array:
    """Entry by entry, of an odd number of arrays: sorts them by comparing and exchanging neighbours."""
    rows = list(rows)
    for i in range(len(rows)):
        for j in range(len(rows) - 1 - i):
            rows[j], rows[j + 1] = jnp.minimum(rows[j], rows[j + 1]), jnp.maximum(rows[j], rows[j + 1])
    return rows[len(rows) // 2]
