"""Another number of workers: what n of them remember, handed on to n'."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcomp.algorithms.diana import DianaLocal, DianaShared
from jaxcomp.algorithms.error_feedback import ErrorFeedbackLocal
from jaxcomp.algorithms.momentum_correction import MomentumLocal, MomentumShared
from jaxcomp.base import State
from jaxcomp.compressors.tree import PerLeaf
from jaxcomp.exchange.layout import Level, is_mean

__all__ = ["redistribute", "spread"]


def redistribute(old: Any, new: Any, *, keep: str = "sum") -> Any:
    """The state of an optimizer for another number of workers, with nothing lost of what they remember.

    Memories and velocities (what was not sent yet) keep their sum over the workers exactly: new workers start with
    zero, and what those that are gone remembered is added to what the others do. A sum of floats is seldom a float, so
    the last worker or two take what rounding leaves over, instead of memories of their own; so two workers are as good
    as 48 bits, four as 72, while a single one has to round. DIANA's shifts start from their mean, which all know.
    Where their number stays, workers keep their shifts. Adaptive state of compressors (stages of SIDCo) is taken over
    from worker i mod n. Parameters, moments, counters and keys stay as they are; measurements are those of the new
    state, and so are plans for each worker (ratios, matrices) that have another shape there. What `optax.MultiSteps`
    has accumulated is handed on as a memory is.

    In a hierarchy any axis may have another length: the workers of the first level are those of all groups together;
    group j goes on from the mean shift of group j mod the old number, and from the mean of the groups' momenta. With
    sharded parameters each shard keeps its own sum. The number of shards may change, too, if parameters are cut along
    one mesh axis: memories and shifts are put together and cut anew.

    The direction is a mean over the workers: with fewer workers an unchanged sum of memories is delivered in larger
    portions. keep="mean" multiplies memories by n' / n, so that what is still to be delivered stays what it was (with
    equal weights).

    Args:
        old: state for n workers: arrays on this host (NumPy, or JAX arrays that are addressable or replicated).
        new: state freshly made for n' workers by `init_state`, with the same optimizer.
        keep: "sum" or "mean".

    Returns:
        State for n' workers, laid out like `new`, some arrays of which it holds.

    Raises:
        ValueError: the states are of different optimizers or parameters, or of `rounds`; or their parameters are in
            other shards, cut along several mesh axes, remembered in chunks (via="two_shot"), or so small or so large
            that `momentum_correction` would send another leaf as it is.

    >>> import jax.numpy as jnp, jaxcomp as jc
    >>> tx = jc.compressed_mean(jc.error_feedback(jc.top_k(k=1)), "data")
    >>> old, axes = jc.init_state(tx, jnp.zeros(2), 2, "data")
    >>> step = jax.vmap(tx.update, in_axes=(0, axes), out_axes=(None, axes), axis_name="data")
    >>> _, old = step(jnp.array([[3.0, 1.0], [4.0, 2.0]]), old)
    >>> new, _ = jc.init_state(tx, jnp.zeros(2), 3, "data")
    >>> print(jc.redistribute(old, new).local.algorithm.memory[:, 0])
    [[0. 1.]
     [0. 2.]
     [0. 0.]]
    """
    if keep not in ("sum", "mean"):
        raise ValueError(f'redistribute: keep must be "sum" or "mean"; got {keep!r}')
    try:
        return _optimizer(old, new, keep)
    except Misfit as misfit:
        where = f"at {misfit.path}: " if misfit.path else ""
        raise ValueError(f"redistribute: {where}{misfit.what}") from None


class Misfit(Exception):
    """What is wrong, and at which place of the trees."""

    def __init__(self, what: str, path: str = ""):
        super().__init__(what)
        self.what, self.path = what, path


def _map(fn: Callable[[Any, Any], Any], old: Any, new: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """As `jax.tree.map`, for trees that must be alike."""

    def one(path, x, like):
        try:
            if type(x) is not type(like):
                _check_alike(x, like)
            return fn(x, like)
        except Misfit as misfit:
            raise Misfit(misfit.what, jax.tree_util.keystr(path) + misfit.path) from None

    _check_alike(old, new, is_leaf)
    return jax.tree_util.tree_map_with_path(one, old, new, is_leaf=is_leaf)


def _check_alike(old: Any, new: Any, is_leaf: Callable[[Any], bool] | None = None) -> None:
    if jax.tree.structure(old, is_leaf) == jax.tree.structure(new, is_leaf):
        return
    paths = lambda tree: [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree, is_leaf)]
    first, second = paths(old), paths(new)
    alone = [f"old{path}" for path in first if path and path not in second]
    alone += [f"new{path}" for path in second if path and path not in first]
    raise Misfit(
        f"the two states are of different optimizers or parameters{f'; only one has {alone[0]}' if alone else ''}. To "
        "restore the old one, make a target by jc.init_state(tx, params, jax.sharding.AbstractMesh(...), axis_name)"
    )


def _optimizer(old: Any, new: Any, keep: str) -> Any:
    before, after = _sizes(old), _sizes(new)

    def one(old, new):
        if isinstance(old, Level):
            bare = [dataclasses.replace(level, state=()) for level in (old, new)]
            _check_alike(bare[0], bare[1])
            move = Move(_cut(old, before), _cut(new, after), keep, old.cut, leads=bool(old.outer))
            return Level(_mean(old.state, new.state, move), old.axes, old.later, old.cut)
        if is_mean(old):
            return _mean(old, new, Move(Cut(1, 1, _rows(old)), Cut(1, 1, _rows(new)), keep))
        if isinstance(old, optax.MultiStepsState):
            return _steps(old, new, walk, keep)
        return _placed(_host(old), new)

    def walk(old, new):
        return _map(one, old, new, lambda node: is_mean(node) or isinstance(node, Level | optax.MultiStepsState))

    return walk(old, new)


class Cut(NamedTuple):
    """Local arrays have a leading axis of [groups shards workers]: of groups, which meet at a later level, of workers
    with the same shard. Shared arrays have one of [groups shards] where there may be more than one of these."""

    groups: int
    shards: int
    workers: int


class Move(NamedTuple):
    """From one `Cut` to another.

    keep: as for `redistribute`. cut_along: mesh axes of the shards. leads: shared arrays have a leading axis.
    """

    old: Cut
    new: Cut
    keep: str
    cut_along: tuple[str, ...] = ()
    leads: bool = False


def _rows(mean: State) -> int:
    if mean.local.counts is None:
        raise Misfit("states of rounds are not supported; begin anew at the point they reached")
    return np.shape(jax.tree.leaves(mean.local.counts)[0])[0]


def _shared_rows(level: Level) -> int:
    return np.shape(level.state.shared.count)[0] if level.outer else 1


def _sizes(state: Any) -> dict[tuple[str, ...], int]:
    """How many workers exchange over the axes of each level."""
    is_level = lambda node: isinstance(node, Level)
    levels = [node for node in jax.tree.leaves(state, is_leaf=is_level) if is_level(node)]
    return {level.axes: _rows(level.state) // _shared_rows(level) for level in levels}


def _cut(level: Level, sizes: dict[tuple[str, ...], int]) -> Cut:
    if not set(level.later) <= set(sizes):
        raise Misfit("one level of a hierarchy; give the state of the whole optimizer")
    groups = math.prod(sizes[axes] for axes in level.later)
    return Cut(groups, _shared_rows(level) // groups, sizes[level.axes])


def _mean(old: State, new: State, move: Move) -> State:
    shared = _shared(old.shared, new.shared, move)
    algorithm = _local(old.local.algorithm, new.local.algorithm, old.shared.algorithm, move)
    second, fresh = old.local.second, new.local.second
    if isinstance(second, ErrorFeedbackLocal) and isinstance(fresh, ErrorFeedbackLocal):
        memory = _map(lambda x, like: _chunks(x, like, move), second.memory, fresh.memory)
        second = ErrorFeedbackLocal(memory, _local(second.compressor, fresh.compressor, None, move))
    else:
        second = _local(second, fresh, None, move)
    return State(new.local._replace(algorithm=algorithm, second=second), shared)


def _shared(old: Any, new: Any, move: Move) -> Any:
    def node(old, new):
        if isinstance(old, PerLeaf):
            return _per_leaf(old, new, lambda x, like: _shared(x, like, move))
        if isinstance(old, DianaShared):
            shift = _map(lambda x, like: _of_groups(x, like, move), old.shift, new.shift)
            return DianaShared(shift, _shared(old.compressor, new.compressor, move))
        if isinstance(old, MomentumShared):
            momentum = _map(lambda x, like: _of_groups(x, like, move, mean=True), old.momentum, new.momentum)
            return MomentumShared(momentum, _shared(old.compressor, new.compressor, move))
        return _kept(old, new, move)

    return _map(node, old, new, lambda node: isinstance(node, PerLeaf | DianaShared | MomentumShared))


def _local(old: Any, new: Any, shared: Any, move: Move) -> Any:
    """shared: of the old algorithm."""
    memories = lambda old, new: _map(lambda x, like: _memories(x, like, move), old, new)

    def node(old, new):
        if isinstance(old, PerLeaf):
            return _per_leaf(old, new, lambda x, like: _local(x, like, None, move))
        if isinstance(old, ErrorFeedbackLocal):
            rest = {"memory": memories(old.memory, new.memory)}
        elif isinstance(old, MomentumLocal):
            rest = {name: memories(getattr(old, name), getattr(new, name)) for name in ("velocity", "momentum")}
        elif isinstance(old, DianaLocal):
            stay = move.old.workers == move.new.workers
            source, one = (old, _same_workers) if stay else (shared, _of_workers)
            rest = {"shift": _map(lambda x, like: one(x, like, move), source.shift, new.shift)}
        else:
            return _taken_over(old, new, move)
        return new._replace(**rest, compressor=_local(old.compressor, new.compressor, None, move))

    kinds = PerLeaf | ErrorFeedbackLocal | MomentumLocal | DianaLocal
    return _map(node, old, new, lambda node: isinstance(node, kinds))


def _per_leaf(old: PerLeaf, new: Any, one: Callable[[Any, Any], Any]) -> PerLeaf:
    """A leaf that is large as one shard may be small as another, and small ones have no state: it begins anew."""
    if not isinstance(new, PerLeaf) or len(old.leaves) != len(new.leaves):
        _check_alike(old, new)
    pairs = zip(old.leaves, new.leaves, strict=True)
    return PerLeaf(tuple(like if x is None or like is None else one(x, like) for x, like in pairs))


# ------------------------------------------------------------------------------------------------
# Arrays


def _kept(old: Any, new: Any, move: Move) -> Any:
    """Group j goes on from group j mod the old number of them. What has another shape, a plan, is the new one."""
    rows = _host(old)
    if move.leads:
        rows = _closed(_modulo(_opened(rows, move.old[:2]), move.new[:2]), 2)
    return _placed(rows, new) if rows.shape == np.shape(_data(new)) else new


def _rows_of_groups(old: Any, shape: tuple[int, ...], move: Move) -> np.ndarray:
    """[old groups, shards, *shape] of shared arrays that have the shape of the parameters."""
    return _cut_anew(_opened(_host(old), move.old[:2]), 2, shape, move)


def _of_groups(old: Any, new: Any, move: Move, mean: bool = False) -> Any:
    """From group j mod the old number; or, where there are others, from the mean of all groups."""
    if not move.leads:
        return _placed(_host(old), new)
    rows = _rows_of_groups(old, np.shape(new)[1:], move)
    if mean and move.old.groups != move.new.groups:
        rows = rows.mean(0, dtype=np.float64, keepdims=True).astype(rows.dtype)
    return _placed(_closed(_modulo(rows, move.new[:2]), 2), new)


def _of_workers(old: Any, new: Any, move: Move) -> Any:
    """What their group has (see `_of_groups`) at each of its workers."""
    if not move.leads:  # [n, *shape], or [n, 1, *shape] of workers under vmap
        rows, shape = _host(old), np.shape(new)
        return _placed(np.broadcast_to(rows, shape) if shape[len(shape) - rows.ndim :] == rows.shape else rows, new)
    rows = _modulo(_rows_of_groups(old, np.shape(new)[1:], move), move.new[:2])[:, :, None]
    return _placed(_closed(np.broadcast_to(rows, (*move.new, *rows.shape[3:])), 3), new)


def _same_workers(old: Any, new: Any, move: Move) -> Any:
    """Workers of group j are those of group j mod the old number."""
    rows = _cut_anew(_opened(_host(old), move.old), 3, np.shape(new)[1:], move)
    return _placed(_closed(_modulo(rows, move.new), 3), new)


def _memories(old: Any, new: Any, move: Move) -> Any:
    """All workers with the same shard, of whatever group, are one pool: their directions are averaged in the end."""
    groups, _, workers = move.new
    rows = _cut_anew(_opened(_host(old), move.old), 3, np.shape(new)[1:], move)
    pool = _pooled(_closed(rows.swapaxes(1, 2), 2), groups * workers, move.keep)
    return _placed(_closed(_opened(pool, (groups, workers)).swapaxes(1, 2), 3), new)


def _pooled(rows: np.ndarray, workers: int, keep: str) -> np.ndarray:
    moved = spread(rows, workers)
    if keep == "sum" or workers == len(rows):
        return moved
    return _rounded(moved.astype(np.float64) * (workers / len(rows)), rows.dtype)


def _chunks(old: Any, new: Any, move: Move) -> Any:
    """Memories of chunks of one vector, [n, m] or [n, 1, m], cut into other chunks. What fills up the last is zero."""
    groups, shards, workers = move.new
    if move.old.shards != shards:
        raise Misfit(f'{_change(move)}; not supported for via="two_shot", which remembers chunks of shards')
    rows = _opened(_host(old), move.old)
    vectors = rows.reshape(*rows.shape[:2], math.prod(rows.shape[2:]))
    vectors = _pooled(vectors, groups, move.keep)
    cut = np.zeros((groups, shards, workers * math.prod(np.shape(new)[1:])), rows.dtype)
    size = min(cut.shape[-1], vectors.shape[-1])
    cut[..., :size] = vectors[..., :size]
    return _placed(cut.reshape(np.shape(new)), new)


def _taken_over(old: Any, new: Any, move: Move) -> Any:
    """State of a compressor for other workers (and other chunks): that of number i mod n."""
    rows = _modulo(_opened(_host(old), move.old), (*move.new, *np.shape(_data(new))[1:]))
    return _placed(_closed(rows, 3), new)


def _steps(old: Any, new: Any, walk: Any, keep: str) -> Any:
    """Of `optax.MultiSteps`: what each worker accumulated, [n p, ...] for parameters [p, ...], or [n, p, ...]."""
    means = lambda state: [x for x in jax.tree.leaves(state.inner_opt_state, is_leaf=is_mean) if is_mean(x)]
    if not means(old):  # behind the mean, where all workers accumulate the same
        return type(old)(*map(walk, old, new))
    fields = {name: walk(value, getattr(new, name)) for name, value in old._asdict().items() if name != "acc_grads"}
    workers, target = (_rows(means(state)[0]) for state in (old, new))

    def one(old, new):
        rows = _host(old)
        rows = _opened(rows, (workers, len(rows) // workers))
        return _placed(_closed(_pooled(rows, target, keep), 2), new)

    return type(old)(**fields, acc_grads=_map(one, old.acc_grads, new.acc_grads))


def _cut_anew(rows: np.ndarray, lead: int, shape: tuple[int, ...], move: Move) -> np.ndarray:
    """[groups, shards, ..., *shape of a shard] of other shards: put together and cut again."""
    old, new = move.old.shards, move.new.shards
    if old == new:
        return rows
    if len(move.cut_along) > 1:
        raise Misfit(f"{_change(move)}; their number may change where one mesh axis cuts the parameters")
    before = rows.shape[lead:]
    if len(before) != len(shape) or (0 in before) != (0 in shape):
        raise Misfit(f"{_change(move)}: one leaf is small enough for momentum_correction to send it as it is, or was")
    if 0 in shape:
        return np.zeros((rows.shape[0], new, *rows.shape[2:lead], *shape), rows.dtype)
    differ = [axis for axis, (a, b) in enumerate(zip(before, shape, strict=True)) if a != b]
    if len(differ) != 1 or old * before[differ[0]] != new * shape[differ[0]]:
        raise Misfit(f"{_change(move)}, of shapes {before} and {shape}: not of the same parameter")
    axis = lead - 1 + differ[0]  # once that of the shards is out of the way
    whole = np.concatenate(np.moveaxis(rows, 1, 0), axis)
    return np.stack(np.split(whole, new, axis), 1)


def _change(move: Move) -> str:
    return f"{move.old.shards} shards along mesh axes {move.cut_along} before, {move.new.shards} now"


def _modulo(rows: np.ndarray, lengths: tuple[int, ...]) -> np.ndarray:
    """Index i of each of the first axes from i mod their length."""
    for axis, length in enumerate(lengths[: rows.ndim]):
        if rows.shape[axis] != length:
            rows = np.take(rows, np.arange(length) % rows.shape[axis], axis)
    return rows


def _opened(rows: np.ndarray, lead: tuple[int, ...]) -> np.ndarray:
    """The leading axis as several, say those of a `Cut`."""
    return rows.reshape(*lead, *rows.shape[1:])


def _closed(rows: np.ndarray, lead: int) -> np.ndarray:
    """So many leading axes as one."""
    return rows.reshape(math.prod(rows.shape[:lead]), *rows.shape[lead:])


def spread(rows: np.ndarray, workers: int) -> np.ndarray:
    """[n, ...] -> [workers, ...] with the same exact sum over the first axis, wherever so many floats can hold it.

    >>> print(spread(np.array([[1.0], [1e-9], [1.0]], np.float32), 2).tolist())
    [[2.0], [9.999999717180685e-10]]
    """
    dtype, n = rows.dtype, len(rows)
    if workers >= n:
        return np.concatenate([rows, np.zeros((workers - n, *rows.shape[1:]), dtype)])
    takers = min(2, workers // 2)  # of what rounding leaves over
    large = workers - takers
    result = []
    high, low = np.zeros(rows.shape[1:]), np.zeros(rows.shape[1:])
    for j in range(large):
        total, rest = np.zeros(rows.shape[1:]), np.zeros(rows.shape[1:])
        for row in rows[j::large]:
            total, error = _two_sum(total, row.astype(np.float64))
            rest = rest + error
        result.append(_rounded(total + rest, dtype))
        high, error = _two_sum(high, total - result[-1])
        low = low + (rest + error)
    for _ in range(takers):
        high, low = _two_sum(high, low)
        result.append(_rounded(high, dtype))
        high = high - result[-1]
    return np.stack(result)


def _two_sum(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(s, e) with s = fl(a + b) and a + b = s + e exactly (Knuth 1969)."""
    s = a + b
    c = s - a
    return s, (a - (s - c)) + (b - c)


def _rounded(x: np.ndarray, dtype: Any) -> np.ndarray:
    largest = float(jnp.finfo(dtype).max)
    return np.clip(x, -largest, largest).astype(dtype)


def _data(x: Any) -> Any:
    """Typed keys as words, other arrays as they are."""
    typed = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(x) if typed else x


def _host(x: Any) -> np.ndarray:
    if isinstance(x, jax.ShapeDtypeStruct):
        raise Misfit("old must hold arrays, not shapes")
    x = _data(x)
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        if not x.is_fully_replicated:
            raise Misfit("the old state lies on other hosts; restore it replicated, or as NumPy arrays")
        return np.asarray(x.addressable_data(0))
    return np.asarray(x)


def _placed(value: np.ndarray, like: Any) -> Any:
    """An array with the values, where and what `like` is."""
    if not isinstance(like, jax.Array):
        raise Misfit(f"new must hold arrays on devices, from jc.init_state; got {type(like).__name__}")
    data = _data(like)
    if np.shape(value) != np.shape(data):
        raise Misfit(f"expected an array of shape {np.shape(data)}; got {np.shape(value)}")
    value = np.asarray(value, data.dtype)
    placed = jax.make_array_from_callback(value.shape, data.sharding, lambda index: value[index])
    return placed if data is like else jax.random.wrap_key_data(placed, impl=jax.random.key_impl(like))
