"""Another number of workers: what n of them remember, handed on to n'."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcomp.algorithms.diana import DianaLocal, DianaShared
from jaxcomp.algorithms.error_feedback import ErrorFeedbackLocal
from jaxcomp.algorithms.momentum_correction import MomentumLocal, MomentumShared
from jaxcomp.base import Seat, State, Tally
from jaxcomp.exchange.layout import Level, is_mean

__all__ = ["redistribute", "spread"]


def redistribute(old: Any, new: Any, *, keep: str = "sum") -> Any:
    """The state of an optimizer for another number of workers, with nothing lost of what they remember.

    Memories and velocities (what was not sent yet) keep their sum over the workers exactly: new workers start with
    zero, and what those that are gone remembered is added to what the others do. A sum of floats is seldom a float, so
    the last worker or two take what rounding leaves over, instead of memories of their own; so two workers are as good
    as 48 bits, four as 72, while a single one has to round. DIANA's shifts start from their mean, which all know.
    Adaptive state of compressors (stages of SIDCo) is taken over from worker i mod n. Parameters, moments, counters and
    keys stay as they are; plans for each worker (ratios, matrices) and measurements are those of the new state.

    In a hierarchy any axis may have another length: the workers of the first level are those of all groups together,
    and group j goes on from the mean shifts of group j mod the old number. With sharded parameters each shard keeps its
    own sum. The number of shards may change, too, if parameters are cut along one mesh axis: memories and shifts are
    put together and cut anew.

    The direction is a mean over the workers: with fewer workers an unchanged sum of memories is delivered in larger
    portions. keep="mean" multiplies memories by n' / n, so that what is still to be delivered stays what it was (with
    equal weights).

    Args:
        old: state for n workers: arrays on this host (NumPy, or JAX arrays that are addressable or replicated).
        new: state freshly made for n' workers by `init_state`, with the same optimizer.
        keep: "sum" or "mean".

    Returns:
        State for n' workers, laid out like `new`.

    Raises:
        ValueError: the states are of different optimizers or of `rounds`; or another number of shards that are cut
            along several mesh axes, or whose chunks are remembered by via="two_shot".

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
    special = lambda node: is_mean(node) or isinstance(node, Level | optax.MultiStepsState)
    before, after = _sizes(old), _sizes(new)

    def walk(old, new):
        _check_same(old, new, special)
        return jax.tree.map(one, old, new, is_leaf=special)

    def one(old, new):
        if isinstance(old, Level):
            return _level(old, new, before, after, keep)
        _check_same(old, new)
        if is_mean(old):
            return _mean(old, new, Move(Cut(1, 1, _rows(old)), Cut(1, 1, _rows(new)), keep))
        if isinstance(old, optax.MultiStepsState):
            return _steps(old, new, walk, keep)
        return _same(old, new)

    return walk(old, new)


class Cut(NamedTuple):
    """The leading axis of local arrays is [groups shards workers]: groups, which meet at a later level, of workers with
    the same shard. That of shared arrays is [groups shards]; they have none where a state is not of a `Level`."""

    groups: int
    shards: int
    workers: int


class Move(NamedTuple):
    """From one `Cut` to another. cut_over: mesh axes along which the parameters are cut into shards."""

    old: Cut
    new: Cut
    keep: str
    cut_over: tuple[str, ...] = ()
    within: bool = False  # other groups or shards: shared arrays have a leading axis


# What has the shape of the parameters, in the state of an algorithm: beside the state of its compressor.
MEMORIES = {ErrorFeedbackLocal: ("memory",), MomentumLocal: ("velocity", "momentum")}
LIKE_PARAMETERS = MEMORIES | {DianaLocal: ("shift",), DianaShared: ("shift",), MomentumShared: ("momentum",)}


def _check_same(old: Any, new: Any, is_leaf: Any = None) -> None:
    if jax.tree.structure(old, is_leaf) != jax.tree.structure(new, is_leaf):
        first, second = (
            [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree, is_leaf)]
            for tree in (old, new)
        )
        alone = [f"old{path}" for path in first if path not in second] + [
            f"new{path}" for path in second if path not in first
        ]
        where = f": only one of them has {alone[0]}" if alone else ""
        raise ValueError(
            f"redistribute: the two states are of different optimizers or parameters{where}. From a checkpoint, "
            "restore the old one with jc.init_state(tx, params, jax.sharding.AbstractMesh(...), axis_name) as a target"
        )


def _rows(mean: State) -> int:
    if mean.local.counts is None:
        raise ValueError("redistribute: states of rounds are not supported; begin anew at the point they reached")
    return np.shape(jax.tree.leaves(mean.local.counts)[0])[0]


def _shared_rows(level: Level) -> int:
    return np.shape(level.state.shared.count)[0] if level.outer else 1


def _sizes(state: Any) -> dict[tuple[str, ...], int]:
    """How many workers exchange over the axes of each level."""
    is_level = lambda node: isinstance(node, Level)
    levels = [node for node in jax.tree.leaves(state, is_leaf=is_level) if is_level(node)]
    return {level.axes: _rows(level.state) // _shared_rows(level) for level in levels}


def _cut(level: Level, sizes: dict[tuple[str, ...], int]) -> Cut:
    groups = math.prod(size for axes, size in sizes.items() if set(axes) <= set(level.outer))
    return Cut(groups, _shared_rows(level) // groups, sizes[level.axes])


def _level(old: Level, new: Any, before: Any, after: Any, keep: str) -> Level:
    if not isinstance(new, Level) or (old.axes, old.outer) != (new.axes, new.outer):
        _check_same(old, new)
    later = {name for axes in before for name in axes}
    cut_over = tuple(name for name in old.outer if name not in later)
    move = Move(_cut(old, before), _cut(new, after), keep, cut_over, within=bool(old.outer))
    state = old.state
    if move.old.shards != move.new.shards:
        state, move = _cut_anew(state, new.state, move)
    _check_same(state, new.state)
    return Level(_mean(state, new.state, move), old.axes, old.outer)


def _mean(old: State, new: State, move: Move) -> State:
    shared = jax.tree.map(lambda old, new: _kept(old, new, move), old.shared, new.shared)

    def local(old_node, new_node):
        if isinstance(old_node, Seat | Tally):
            return new_node
        if type(old_node) not in LIKE_PARAMETERS:
            return _taken_over(old_node, new_node, move)
        if isinstance(old_node, DianaLocal):
            names, source, one = ("shift",), shared.algorithm, _shifts
        else:
            names, source, one = MEMORIES[type(old_node)], old_node, _memories
        moved = lambda x, like: one(x, like, move)
        fields = {name: jax.tree.map(moved, getattr(source, name), getattr(new_node, name)) for name in names}
        return new_node._replace(**fields, compressor=walk(old_node.compressor, new_node.compressor))

    def walk(old_tree, new_tree):
        special = lambda node: isinstance(node, Seat | Tally) or type(node) in LIKE_PARAMETERS
        return jax.tree.map(local, old_tree, new_tree, is_leaf=special)

    second, fresh = old.local.second, new.local.second
    if isinstance(second, ErrorFeedbackLocal):
        memory = jax.tree.map(lambda x, like: _chunks(x, like, move), second.memory, fresh.memory)
        second = ErrorFeedbackLocal(memory, walk(second.compressor, fresh.compressor))
    else:
        second = walk(second, fresh)
    return State(new.local._replace(algorithm=walk(old.local.algorithm, new.local.algorithm), second=second), shared)


def _kept(old: Any, new: Any, move: Move) -> Any:
    """Group j goes on from group j mod the old number of them. What has another shape, a plan, is the new one."""
    rows = _host(old)
    if move.within:
        rows = _opened(rows, move.old[:2])
        rows = _closed(np.take(rows, np.arange(move.new.groups) % move.old.groups, 0), 2)
    return _placed(rows, new) if rows.shape == np.shape(_data(new)) else new


def _memories(old: Any, new: Any, move: Move) -> Any:
    """All workers with the same shard, of whatever group, are one pool: their directions are averaged in the end."""
    groups, _, workers = move.new
    pool = _closed(_opened(_host(old), move.old).swapaxes(1, 2), 2)
    moved = spread(pool, groups * workers) * _factor(move, groups * workers / len(pool))
    moved = _opened(moved.astype(pool.dtype), (groups, workers))
    return _placed(_closed(moved.swapaxes(1, 2), 3), new)


def _factor(move: Move, ratio: float) -> float:
    return ratio if move.keep == "mean" else 1


def _shifts(mean: Any, new: Any, move: Move) -> Any:
    """The mean shift of each group at each of its workers."""
    groups, shards, workers = move.new
    shape = np.shape(new)[1:]
    rows = _host(mean).reshape(groups, shards, 1, *shape)
    return _placed(_closed(np.broadcast_to(rows, (groups, shards, workers, *shape)), 3), new)


def _chunks(old: Any, new: Any, move: Move) -> Any:
    """Memories of chunks of one vector, [n, m] or [n, 1, m], cut into other chunks. What fills up the last is zero."""
    (groups, shards, workers), old_groups = move.new, move.old.groups
    rows = _opened(_host(old), move.old)
    vectors = rows.reshape(old_groups, shards, math.prod(rows.shape[2:]))
    if groups != old_groups:
        vectors = (spread(vectors, groups) * _factor(move, groups / old_groups)).astype(rows.dtype)
    cut = np.zeros((groups, shards, workers * math.prod(np.shape(new)[1:])), rows.dtype)
    size = min(cut.shape[-1], vectors.shape[-1])
    cut[..., :size] = vectors[..., :size]
    return _placed(cut.reshape(np.shape(new)), new)


def _taken_over(old: Any, new: Any, move: Move) -> Any:
    """State of a compressor for other workers (and other chunks): that of number i mod n."""
    rows = _opened(_host(old), move.old)
    for axis, length in enumerate((*move.new, *np.shape(_data(new))[1:])):
        if axis < rows.ndim and rows.shape[axis] != length:
            rows = np.take(rows, np.arange(length) % rows.shape[axis], axis)
    return _placed(_closed(rows, 3), new)


def _cut_anew(old: State, new: State, move: Move) -> tuple[State, Move]:
    """The old state with as many shards as the new one has: what is like the parameters put together and cut again."""
    cut, shards = move.old, move.new.shards
    change = f"{cut.shards} shards over mesh axes {move.cut_over} before, {shards} now"
    if len(move.cut_over) > 1:
        raise ValueError(f"redistribute: {change}; their number may change where one mesh axis cuts the parameters")
    if jax.tree.leaves(old.local.second):
        raise ValueError(f'redistribute: {change}; not supported for via="two_shot", which remembers chunks of shards')

    def like_parameters(old, new, lead):
        shape = np.shape(new)[1:]
        rows = _opened(_host(old), cut[:lead])
        differ = [axis for axis, (a, b) in enumerate(zip(rows.shape[lead:], shape, strict=True)) if a != b]
        if rows.size == 0:
            return np.zeros((math.prod(move.old[:lead]) // cut.shards * shards, *shape), rows.dtype)
        if len(differ) != 1 or cut.shards * rows.shape[lead + differ[0]] != shards * shape[differ[0]]:
            raise ValueError(f"redistribute: {change}, of shapes {rows.shape[lead:]} and {shape}: not the same whole")
        axis = lead - 1 + differ[0]  # once that of the shards is out of the way
        whole = np.concatenate(np.moveaxis(rows, 1, 0), axis)
        return _closed(np.stack(np.split(whole, shards, axis), 1), lead)

    def node(old, new, lead):
        if type(old) is not type(new):
            _check_same(old, new)
        if type(old) not in LIKE_PARAMETERS:
            rows = _opened(_host(old), cut[:lead])
            return _closed(np.take(rows, np.arange(shards) % cut.shards, 1), lead)
        again = lambda x, like: like_parameters(x, like, lead)
        fields = {}
        for name in LIKE_PARAMETERS[type(old)]:
            _check_same(getattr(old, name), getattr(new, name))
            fields[name] = jax.tree.map(again, getattr(old, name), getattr(new, name))
        return old._replace(**fields, compressor=walk(old.compressor, new.compressor, lead))

    def fresh(new, lead):
        rows = _opened(_host(new), move.new[:lead])
        for axis, length in ((0, cut.groups), (2, cut.workers))[: lead - 1]:
            rows = np.take(rows, np.arange(length) % rows.shape[axis], axis)
        return _closed(rows, lead)

    def walk(old, new, lead):
        """A leaf that is large as one shard may be small as another, which compressors leave out: they begin anew."""
        special = lambda node: type(node) in LIKE_PARAMETERS
        if jax.tree.structure(old, special) != jax.tree.structure(new, special):
            return jax.tree.map(lambda x: fresh(x, lead), new)
        return jax.tree.map(lambda a, b: node(a, b, lead), old, new, is_leaf=special)

    local = old.local._replace(algorithm=walk(old.local.algorithm, new.local.algorithm, 3), counts=new.local.counts)
    shared = type(old.shared)(*(walk(*fields, 2) for fields in zip(old.shared, new.shared, strict=True)))
    return State(local, shared), move._replace(old=cut._replace(shards=shards))


def _opened(rows: np.ndarray, lead: tuple[int, ...]) -> np.ndarray:
    """The leading axis as several, say those of a `Cut`."""
    return rows.reshape(*lead, *rows.shape[1:])


def _closed(rows: np.ndarray, lead: int) -> np.ndarray:
    """So many leading axes as one."""
    return rows.reshape(math.prod(rows.shape[:lead]), *rows.shape[lead:])


def _steps(old: Any, new: Any, walk: Any, keep: str) -> Any:
    """Of `optax.MultiSteps`: what each worker accumulated, [n p, ...] for parameters [p, ...], or [n, p, ...]."""
    means = [node for node in jax.tree.leaves(old.inner_opt_state, is_leaf=is_mean) if is_mean(node)]
    if not means:  # behind the mean, where all workers accumulate the same
        return type(old)(*map(walk, old, new))
    workers = _rows(means[0])

    def one(old, new):
        rows, length = _host(old), np.shape(old)[0] // workers
        if rows.size == 0:
            return new
        target = np.shape(new)[0] // length
        moved = spread(rows.reshape(workers, length, *rows.shape[1:]), target)
        factor = target / workers if keep == "mean" else 1
        return _placed((moved.astype(np.float64) * factor).astype(rows.dtype).reshape(np.shape(new)), new)

    fields = {name: walk(value, getattr(new, name)) for name, value in old._asdict().items() if name != "acc_grads"}
    return type(old)(**fields, acc_grads=jax.tree.map(one, old.acc_grads, new.acc_grads))


def _same(old: Any, new: Any) -> Any:
    return _placed(_host(old), new)


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
    x = _data(x)
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        if not x.is_fully_replicated:
            raise ValueError(
                "redistribute: the old state lies on other hosts; restore it replicated, or as NumPy arrays"
            )
        return np.asarray(x.addressable_data(0))
    return np.asarray(x)


def _placed(value: np.ndarray, like: Any) -> Any:
    """An array with the values, where and what `like` is."""
    if not isinstance(like, jax.Array):
        raise ValueError(
            f"redistribute: new must hold arrays on devices, from jc.init_state; got {type(like).__name__}"
        )
    data = _data(like)
    if np.shape(value) != np.shape(data):
        raise ValueError(f"redistribute: expected an array of shape {np.shape(data)}; got {np.shape(value)}")
    value = np.asarray(value, data.dtype)
    placed = jax.make_array_from_callback(value.shape, data.sharding, lambda index: value[index])
    return placed if data is like else jax.random.wrap_key_data(placed, impl=jax.random.key_impl(like))
