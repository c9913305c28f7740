"""DAGC: workers with more data compress less, under one budget, inside one SPMD program.

All workers run one program and all arrays have one shape, so each worker selects at the largest
capacity and keeps what its own share allows: the rest is padding, which `via="concat"`, `"ring"` and
`"ragged"` do not send. The shares of all workers are arguments of the program (`Amounts` in `State.shared`), of which
`base.for_worker` picks one, so they can change from round to round without compiling again.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp.allocate import counts, ratios, thresholds
from jaxcomp.allocate.workers import Rule, number_of, shares
from jaxcomp.arrays import one_row, row_of, wide
from jaxcomp.base import Compressor, Lengths, Spec, State, left, on_vectors
from jaxcomp.compressors.schedule import RoundCount
from jaxcomp.compressors.sidco import sidco
from jaxcomp.compressors.sparsify import entries_of, largest_indices, top_k
from jaxcomp.factories import factory
from jaxcomp.groups import FILLED_IF_LONG
from jaxcomp.payloads import Sparse
from jaxcomp.select import indices_of_words, marked_above, take, top_set

__all__ = ["Amounts", "Selector", "dagc", "set_amounts"]

Array = jax.Array
Numbers = Sequence[float] | np.ndarray


class Amounts(NamedTuple):
    """Amounts that workers may send of one array. One worker's own are a row of these, with n = 1.

    each: f32[n], in the unit of the sparsifier.
    rooms: i32[n], entries that each worker's message has room for.
    """

    each: Array
    rooms: Array


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
    return largest_indices(x, jnp.minimum(wanted, room), capacity), wanted


def _above(x: Array, threshold: Array, room: Array, capacity: int) -> tuple[Array, Array]:
    """All from the threshold on, at least the largest one; if they do not fit it rises until they do."""
    threshold = threshold.astype(wide(x.dtype))
    known = marked_above(x, threshold)
    wanted = known[1]
    most = jnp.maximum(room, 1)
    least = jnp.where(wanted > most, most - most // 8, 1)
    indices, _ = indices_of_words(top_set(x, threshold, least, most, known=known), capacity, x.shape[0])
    return jnp.where(room > 0, indices, x.shape[0]), wanted


def _fitted(x: Array, ratio: Array, room: Array, capacity: int) -> tuple[Array, Array]:
    """Entries that SIDCo keeps at this ratio; if they do not fit, the largest of them."""
    d = x.shape[0]
    # The ratio is an argument, in the place of the number of a round: what is mapped may not be captured
    # (`base.row_by_row`).
    inner = sidco(lambda share: share, peak=capacity / d, capacity=1.0)
    state = inner.init(jax.random.key(0), jax.ShapeDtypeStruct(x.shape, x.dtype))._replace(shared=RoundCount(ratio))
    payload, local = inner.compress(jax.random.key(0), x, state)
    wanted = jnp.sum(payload.indices < d, dtype=jnp.int32) + left(inner, local).overflow
    places, _ = _above(payload.values, jnp.zeros(()), room, capacity)
    indices = payload.indices.at[places].get(mode="fill", fill_value=d, indices_are_sorted=True)
    return jnp.where(ratio > 0, indices, d), jnp.where(ratio > 0, wanted, 0)


SELECTORS: dict[Any, Selector] = {
    top_k: Selector("ratio", 1.0, _largest),
    sidco: Selector("ratio", 1.25, _fitted),
}


@factory
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
    `compressed_mean`. Shared state holds the amounts of all workers (`for_worker` picks one). A worker without data
    sends nothing.

    With `sidco` the k_i are targets that a fitted threshold meets roughly. With `contrib.hard_threshold` (DAGC-A)
    worker i sends all from its own threshold lambda_i on, from `allocate.thresholds`: volumes make it
    lower, not higher.

    Biased; alpha = min_i k_i / d over the workers with data for `top_k`, 1 / d for the others, which send
    at least the largest entry.

    Args:
        volumes: samples of each worker, in the order of the axis.
        mean_ratio: mean of the ratios, in (0, 1].
        sparsifier: `top_k`, `sidco`, `contrib.hard_threshold`, or a `Selector`.
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
    selector, name = _selector(sparsifier)
    if selector.unit == "threshold" and base is None:
        raise ValueError(
            f"dagc: sparsifier={name} needs base, its mean threshold above 0 (jc.allocate.calibrate finds it); got None"
        )
    if selector.unit != "threshold" and base is not None:
        raise ValueError(f"dagc: base is the mean threshold of hard_threshold, and must be None for {name}; got {base}")
    if not 0 < number_of(mean_ratio) <= 1:
        raise ValueError(f"dagc: mean_ratio must be in (0, 1]; got {mean_ratio}")
    spare = selector.spare if capacity is None else capacity
    if not 1 <= number_of(spare) < math.inf:
        raise ValueError(f"dagc: capacity must be at least 1; got {capacity}")
    shares("dagc", volumes)  # the first error names dagc
    each = None if base is None else thresholds(volumes, base, rule=rule)
    # With thresholds the numbers of entries go as 1 / threshold.
    share = ratios(
        volumes, mean_ratio, rule=2 / 3 if base is not None and rule == "released" else rule, floor=floor, cap=cap
    )
    weights = shares("dagc", np.where(share > 0, volumes, 0))  # without a link is as without data
    return _compressor(f"dagc({name}, {mean_ratio}, rule={rule})", selector, spare, share, each, weights)


def _selector(sparsifier: Any) -> tuple[Selector, str]:
    from jaxcomp.contrib.hard_threshold import hard_threshold  # only to know it where it is given

    selectors = SELECTORS | {hard_threshold: Selector("threshold", 1.25, _above)}
    selector = sparsifier if isinstance(sparsifier, Selector) else selectors.get(sparsifier)
    if selector is None:
        known = "jc.top_k, jc.sidco, jc.contrib.hard_threshold"
        raise ValueError(f"dagc: sparsifier must be one of {known} or a Selector; got {sparsifier!r}")
    return selector, getattr(sparsifier, "__name__", "selector")


def _compressor(
    name: str, selector: Selector, spare: float, share: np.ndarray, each: np.ndarray | None, weights: np.ndarray
) -> Compressor:
    """share: ratio of each worker;  each: what `selector` takes instead, if it is not a ratio;  weights: p_i."""

    def rooms(d: int) -> np.ndarray:
        return np.minimum(np.ceil(spare * counts(share, d) - 1e-9), d).astype(np.int64)

    def init(shared_key, like):
        d = like.size
        amounts = counts(share, d) / max(d, 1) if each is None else each
        plans = Amounts(jnp.asarray(amounts, jnp.float32), jnp.asarray(rooms(d), jnp.int32))
        return State(jnp.zeros((), jnp.int32), plans)

    def compress(key, x, state):
        d = x.shape[0]
        if d == 0:
            return Sparse(x, jnp.zeros((0,), jnp.int32)), state.local
        amount, room = one_row("dagc", state.shared)
        capacity = int(rooms(d).max())
        room = jnp.minimum(room, capacity)  # of a state that was made with more room
        indices, wanted = selector.select(x, amount, room, capacity)
        return Sparse(take(x, indices), indices), jnp.maximum(wanted - room, 0)

    def alpha(d: int) -> float:
        exact = selector.select is _largest
        return float(counts(share, d)[weights > 0].min() if exact else 1) / d if d else 1.0

    return on_vectors(
        init=init,
        compress=compress,
        entries=entries_of,
        lengths=lambda like: Lengths(tuple(int(room) for room in rooms(like.size)), like.size),
        for_worker=functools.partial(row_of, "dagc"),
        overflow=lambda local: local,
        spec=Spec(
            name,
            omega=None,
            alpha=alpha,
            linear=False,
            selects=True,
            layout=FILLED_IF_LONG,
            weights=tuple(float(w) for w in weights),
        ),
    )


def set_amounts(state: Any, amounts: Any) -> Any:
    """The same state with other ratios (or thresholds) for the workers; nothing recompiles.

    Args:
        state: of `dagc`, of an algorithm, of `compressed_mean` or of any optimizer that contains it.
        amounts: [n], for every array that is compressed; or a list of [n], one for each, in the order
            of `jax.tree.leaves`. A ratio above a worker's room (`dagc(capacity=)`) is cut to it.

    Returns:
        The state, with each `Amounts` replaced.

    Raises:
        ValueError: there is no dagc in the state, or a shape does not fit.

    >>> import jaxcomp as jc
    >>> c = jc.dagc([3, 1], 0.25, capacity=2)
    >>> state = c.init(jax.random.key(0), jnp.zeros(8))
    >>> print(set_amounts(state, [0.5, 0.125]).shared.each)
    [0.5   0.125]
    """
    nodes, structure = jax.tree.flatten(state, is_leaf=lambda node: isinstance(node, Amounts))
    found = [i for i, node in enumerate(nodes) if isinstance(node, Amounts)]
    if not found:
        raise ValueError("set_amounts: there is no dagc in this state")
    if not isinstance(amounts, (list, tuple)) or not amounts or np.ndim(amounts[0]) == 0:
        amounts = [amounts] * len(found)
    if len(amounts) != len(found):
        raise ValueError(f"set_amounts: {len(amounts)} lists of amounts for {len(found)} compressed arrays")
    for i, new in zip(found, amounts, strict=True):
        each, old = jnp.asarray(new, jnp.float32), nodes[i].each
        if each.shape != old.shape[-1:]:
            raise ValueError(f"set_amounts: expected {old.shape[-1]} amounts; got shape {each.shape}")
        nodes[i] = nodes[i]._replace(each=jnp.broadcast_to(each, old.shape))
    return structure.unflatten(nodes)
