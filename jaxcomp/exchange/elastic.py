"""Another number of workers: what n of them remember, handed on to n'."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcomp.algorithms.diana import DianaLocal
from jaxcomp.algorithms.error_feedback import ErrorFeedbackLocal
from jaxcomp.algorithms.momentum_correction import MomentumLocal
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
        ValueError: the states are of different optimizers, of a hierarchy, of sharded parameters, or of `rounds`.

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
    if jax.tree.structure(old) != jax.tree.structure(new):
        raise ValueError("redistribute: the two states are of different optimizers or parameters")
    special = lambda node: is_mean(node) or isinstance(node, Level | optax.MultiStepsState)

    def walk(old, new):
        return jax.tree.map(one, old, new, is_leaf=special)

    def one(old, new):
        if isinstance(old, Level):
            raise ValueError("redistribute: states of hierarchies and of sharded parameters are not supported")
        if is_mean(old):
            return _mean(old, new, keep)
        if isinstance(old, optax.MultiStepsState):
            return _steps(old, new, walk, keep)
        return _same(old, new)

    return walk(old, new)


def _mean(old: State, new: State, keep: str) -> State:
    if old.local.counts is None:
        raise ValueError("redistribute: states of rounds are not supported")

    def kept(old, new):
        return _same(old, new) if np.shape(old) == np.shape(new) else new

    special = lambda node: isinstance(node, ErrorFeedbackLocal | DianaLocal | MomentumLocal | Seat | Tally)

    def local(old_node, new_node):
        if isinstance(old_node, ErrorFeedbackLocal):
            memory = _memories(old_node.memory, new_node.memory, keep)
            return ErrorFeedbackLocal(memory, walk(old_node.compressor, new_node.compressor))
        if isinstance(old_node, MomentumLocal):
            velocity, momentum = (
                _memories(getattr(old_node, name), getattr(new_node, name), keep) for name in ("velocity", "momentum")
            )
            return MomentumLocal(velocity, momentum, walk(old_node.compressor, new_node.compressor))
        if isinstance(old_node, DianaLocal):
            mean = old.shared.algorithm.shift
            shift = jax.tree.map(
                lambda h, row: _placed(np.broadcast_to(_host(h), row.shape), row), mean, new_node.shift
            )
            return DianaLocal(shift, walk(old_node.compressor, new_node.compressor))
        if isinstance(old_node, Seat | Tally):
            return new_node
        return _taken_over(old_node, new_node)

    def walk(old_tree, new_tree):
        return jax.tree.map(local, old_tree, new_tree, is_leaf=special)

    second, fresh = old.local.second, new.local.second
    if isinstance(second, ErrorFeedbackLocal):
        memory = jax.tree.map(_chunks, second.memory, fresh.memory)
        second = ErrorFeedbackLocal(memory, walk(second.compressor, fresh.compressor))
    else:
        second = walk(second, fresh)
    return State(
        old.local._replace(
            algorithm=walk(old.local.algorithm, new.local.algorithm), counts=new.local.counts, second=second
        ),
        jax.tree.map(kept, old.shared, new.shared),
    )


def _memories(old: Any, new: Any, keep: str) -> Any:
    def one(old, new):
        rows, workers = _host(old), np.shape(new)[0]
        moved = spread(rows, workers)
        factor = workers / len(rows) if keep == "mean" else 1
        return _placed((moved * factor).astype(rows.dtype), new)

    return jax.tree.map(one, old, new)


def _steps(old: Any, new: Any, walk: Any, keep: str) -> Any:
    """Of `optax.MultiSteps`: what each worker accumulated, [n p, ...] for parameters [p, ...], or [n, p, ...]."""
    means = [node for node in jax.tree.leaves(old.inner_opt_state, is_leaf=is_mean) if is_mean(node)]
    if not means:  # behind the mean, where all workers accumulate the same
        return type(old)(*map(walk, old, new))
    workers = np.shape(jax.tree.leaves(means[0].local)[0])[0]

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


def _taken_over(old: Any, new: Any) -> Any:
    """State of a compressor for other workers (and other chunks): that of number i mod n."""
    rows = _host(old)
    for axis, length in enumerate(np.shape(new)):
        if axis < rows.ndim and rows.shape[axis] != length:
            rows = np.take(rows, np.arange(length) % rows.shape[axis], axis)
    return _placed(rows, new)


def _same(old: Any, new: Any) -> Any:
    if jnp.issubdtype(new.dtype, jax.dtypes.prng_key):
        data = _placed(_host(jax.random.key_data(old)), jax.random.key_data(new))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(new))
    return _placed(_host(old), new)


def _chunks(old: Any, new: Any) -> Any:
    """Memories of chunks of one vector, [n, m] or [n, 1, m], cut into other chunks. What fills up the last is zero."""
    vector = _host(old).reshape(-1)
    cut = np.zeros(int(np.prod(np.shape(new))), vector.dtype)
    size = min(cut.size, vector.size)
    cut[:size] = vector[:size]
    return _placed(cut.reshape(np.shape(new)), new)


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


def _host(x: Any) -> np.ndarray:
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        if not x.is_fully_replicated:
            raise ValueError(
                "redistribute: the old state lies on other hosts; restore it replicated, or as NumPy arrays"
            )
        return np.asarray(x.addressable_data(0))
    return np.asarray(x)


def _placed(value: np.ndarray, like: Any) -> Any:
    """An array with the values, where and what `like` is."""
    if np.shape(value) != np.shape(like):
        raise ValueError(f"redistribute: expected an array of shape {np.shape(like)}; got {np.shape(value)}")
    value = np.asarray(value, like.dtype)
    return jax.make_array_from_callback(value.shape, like.sharding, lambda index: value[index])
