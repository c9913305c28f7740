"""DAGC: workers with more data compress less, under one budget, inside one SPMD program.

All workers run one program and all arrays have one shape, so each worker selects at the largest
capacity and keeps what its own share allows: the rest is padding, which `via="concat"`, `"ring"` and
`"ragged"` leave at home. The shares are arguments of the program (`State.shared`), so they can
change from round to round without compiling again.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomp.allocate import counts, ratios, thresholds
from jaxcomp.allocate.workers import Rule, number_of, shares
from jaxcomp.amounts import Amounts
from jaxcomp.base import Compressor, Lengths, Seat, Spec, State, Tally, finite, wide
from jaxcomp.compressors.sidco import sidco
from jaxcomp.compressors.sparsify import UNSORTED_FROM, add_sparse, dense_of_sparse, top_k
from jaxcomp.compressors.threshold import hard_threshold
from jaxcomp.compressors.vector import on_vectors
from jaxcomp.payloads import Sparse
from jaxcomp.select import count_words, indices_of_words, largest, magnitude, take, top_set, words_above

__all__ = ["Selector", "dagc"]

Array = jax.Array
Numbers = Sequence[float] | np.ndarray


class DagcLocal(NamedTuple):
    seat: Seat
    tally: Tally


class Selector(NamedTuple):
    """How a sparsifier chooses entries when the amount is a traced number of this worker.

    unit: "ratio", a share of the entries, or "threshold", a magnitude from which on all are sent.
    spare: default capacity, as a multiple of the worker's share.
    select(x, amount, room, capacity) -> (indices, wanted)
        x: float[d], d >= 1; amount: f32[]; room: i32[], places of this worker; capacity: int, places of
        the largest. indices: i32[capacity] ascending, at most `room` of them, padded with d; what is
        chosen is at least as large as what is not. wanted: i32[], entries that asked for a place.
    """

    unit: str
    spare: float
    select: Callable[[Array, Array, Array, int], tuple[Array, Array]]


def _largest(x: Array, ratio: Array, room: Array, capacity: int) -> tuple[Array, Array]:
    d = x.shape[0]
    wanted = jnp.clip(jnp.rint(ratio * d), 1, d).astype(jnp.int32)
    wanted = jnp.where(ratio > 0, wanted, 0)
    count = jnp.minimum(wanted, room)
    if d >= UNSORTED_FROM:
        return jnp.where(count > 0, largest(x, jnp.maximum(count, 1), capacity), d), wanted
    top, indices = lax.top_k(magnitude(finite(x)), capacity)
    chosen = (top > 0) & (lax.iota(jnp.int32, capacity) < count)
    return jnp.sort(jnp.where(chosen, indices, d).astype(jnp.int32)), wanted


def _above(x: Array, threshold: Array, room: Array, capacity: int) -> tuple[Array, Array]:
    """All from the threshold on, at least the largest one; if they do not fit it rises until they do."""
    threshold = threshold.astype(wide(x.dtype))
    words = words_above(x, threshold)
    wanted = count_words(words)
    most = jnp.maximum(room, 1)
    least = jnp.where(wanted > most, most - most // 8, 1)
    indices, _ = indices_of_words(top_set(x, threshold, least, most, words=words), capacity, x.shape[0])
    return jnp.where(room > 0, indices, x.shape[0]), wanted


def _fitted(x: Array, ratio: Array, room: Array, capacity: int) -> tuple[Array, Array]:
    """Those that SIDCo keeps at this ratio; if they do not fit, the largest of them."""
    d = x.shape[0]
    inner = sidco(lambda round_: ratio, peak=capacity / d, capacity=1.0)
    state = inner.init(jax.random.key(0), jax.ShapeDtypeStruct(x.shape, x.dtype))
    payload, local = inner.compress(jax.random.key(0), x, state)
    wanted = jnp.sum(payload.indices < d, dtype=jnp.int32) + local.tally.overflow
    places, _ = _above(payload.values, jnp.zeros(()), room, capacity)
    indices = payload.indices.at[places].get(mode="fill", fill_value=d, indices_are_sorted=True)
    return jnp.where(ratio > 0, indices, d), jnp.where(ratio > 0, wanted, 0)


SELECTORS: dict[Any, Selector] = {
    top_k: Selector("ratio", 1.0, _largest),
    sidco: Selector("ratio", 1.25, _fitted),
    hard_threshold: Selector("threshold", 1.25, _above),
}


def dagc(
    volumes: Numbers,
    mean_ratio: float,
    *,
    sparsifier: Callable[..., Compressor] | Selector = top_k,
    rule: Rule = "sqrt",
    floor: float = 0.0,
    cap: float | Numbers | None = None,
    base: float | None = None,
    capacity: float | None = None,
) -> Compressor:
    """Sparsifies with a ratio (or threshold) for each worker, from its data volume.

    worker i: C_i(x) = the k_i largest entries of x,  sum_i k_i = n mean_ratio d,  k_i / d = delta_i
    from `allocate.ratios`. The mean is weighted by the volumes: sum_i p_i C_i(x_i).

    The weight p_i multiplies what is sent, never what is remembered. They are the default `weights` of
    `compressed_mean`, which also tells each worker its number; alone, C is that of worker 0. A
    worker without data sends nothing.

    With `sidco` the k_i are targets that a fitted threshold meets roughly. With `hard_threshold` (DAGC-A)
    worker i sends all from its own threshold lambda_i on, from `allocate.thresholds`: volumes make it
    lower, not higher.

    Biased; alpha = min_i k_i / d over the workers with data for `top_k`, 1 / d for the others, which send
    at least the largest entry.

    Args:
        volumes: samples of each worker, in the order of the axis.
        mean_ratio: mean of the ratios, in (0, 1].
        sparsifier: `top_k`, `sidco`, `hard_threshold`, or a `Selector`.
        rule: of `allocate.ratios`, or of `allocate.thresholds`.
        floor, cap: limits of the ratios, as for `allocate.ratios`. With `hard_threshold` they limit only the
            room that a worker has, not its threshold.
        base: mean threshold of `hard_threshold`; `allocate.calibrate` finds it.
        capacity: room of each worker as a multiple of its share, at least 1; None: the selector's own. Room
            for ratios that grow later (`set_amounts`), or for data-dependent numbers of entries. What
            finds no place stays in the memory of the algorithm and is counted as overflow.

    Returns:
        Compressor with payload `Sparse`, as long as the largest room on every worker.

    Raises:
        ValueError: an argument is out of range.

    Reference: Lu, Song, Chen, Cui, Wang 2023 (DAGC); see `allocate` for what the rules optimise.

    >>> import jaxcomp as jc
    >>> tx = jc.compressed_mean(jc.direct(jc.dagc([4, 1], 0.5)), "data")
    >>> step = lambda g: tx.update(g, tx.init(g))[0]
    >>> g = jnp.array([[4.0, 3.0, 2.0, 1.0, 0.5, 0.1], [6.0, 5.0, 4.0, 3.0, 2.0, 1.0]])
    >>> print(jax.vmap(step, axis_name="data", out_axes=None)(g))  # 4 entries from one, 2 from the other
    [4.4 3.4 1.6 0.8 0.  0. ]
    """
    selector = sparsifier if isinstance(sparsifier, Selector) else SELECTORS.get(sparsifier)
    if selector is None:
        known = ", ".join(f"jc.{factory.__name__}" for factory in SELECTORS)
        raise ValueError(f"dagc: sparsifier must be one of {known} or a Selector; got {sparsifier!r}")
    if not 0 < number_of(mean_ratio) <= 1:
        raise ValueError(f"dagc: mean_ratio must be in (0, 1]; got {mean_ratio}")
    spare = selector.spare if capacity is None else capacity
    if not 1 <= number_of(spare) < math.inf:
        raise ValueError(f"dagc: capacity must be at least 1; got {capacity}")
    name = getattr(sparsifier, "__name__", "selector")
    if (selector.unit == "threshold") != (base is not None):
        raise ValueError(f"dagc: base is the mean threshold of hard_threshold; got {base} for {name}")
    shares("dagc", volumes)  # the first error names dagc
    each = None
    if base is not None:
        each = thresholds(volumes, base, rule=rule)
        rule = 2 / 3 if rule == "released" else rule  # the numbers of entries go as 1 / threshold
    share = ratios(volumes, mean_ratio, rule=rule, floor=floor, cap=cap)
    weights = shares("dagc", np.where(share > 0, volumes, 0))  # without a link is as without data

    def rooms(d: int) -> np.ndarray:
        return np.minimum(np.ceil(spare * counts(share, d) - 1e-9), d).astype(np.int64)

    def init(shared_key, like):
        d = like.size
        amounts = counts(share, d) / max(d, 1) if each is None else each
        local = DagcLocal(Seat(jnp.zeros((), jnp.int32)), Tally(jnp.zeros((), jnp.int32)))
        return State(local, Amounts(jnp.asarray(amounts, jnp.float32)))

    def compress(key, x, state):
        d = x.shape[0]
        if d == 0:
            return Sparse(x, jnp.zeros((0,), jnp.int32)), state.local
        number = state.local.seat.number
        room = jnp.asarray(rooms(d), jnp.int32)[number]
        indices, wanted = selector.select(x, state.shared.each[number], room, int(rooms(d).max()))
        return Sparse(take(x, indices), indices), DagcLocal(state.local.seat, Tally(jnp.maximum(wanted - room, 0)))

    def alpha(d: int) -> float:
        exact = selector.select is _largest
        return float(counts(share, d)[weights > 0].min() if exact else 1) / d if d else 1.0

    return on_vectors(
        init=init,
        compress=compress,
        decompress=dense_of_sparse,
        accumulate=add_sparse,
        lengths=lambda like: Lengths(tuple(int(room) for room in rooms(like.size)), like.size),
        spec=Spec(
            f"dagc({name}, {mean_ratio}, rule={rule})",
            omega=None,
            alpha=alpha,
            linear=False,
            selects=True,
            weights=tuple(float(w) for w in weights),
        ),
    )
