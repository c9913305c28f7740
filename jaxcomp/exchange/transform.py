"""The whole road as an optax gradient transformation."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from jaxcomp.base import (
    Algorithm,
    Compressor,
    Seat,
    State,
    Tally,
    accumulate,
    for_worker,
    key_data,
    lengths,
    like_of,
    root_key,
    wide,
    wide_like,
    wrap_key,
)
from jaxcomp.bits import code_bits, lane_bytes
from jaxcomp.exchange.lanes import Axis, axis_index, axis_names, axis_size, is_bound, known_equal, varying
from jaxcomp.exchange.links import DEFAULT, Link
from jaxcomp.exchange.meet import CHOICES, VIAS, meet
from jaxcomp.norms import block_norms

__all__ = ["Info", "compressed_mean", "info", "init_state", "per_worker", "state_axes", "state_specs"]

Array = jax.Array


class Counts(NamedTuple):
    """Measurements of one worker in one round, as they are kept in the state. All scalars."""

    lane_bytes: Array
    code_bits: Array
    sent: Array
    size: Array
    error: Array
    norm: Array
    nonfinite: Array
    overflow: Array
    sent_bytes: Array
    via: Array


class MeanLocal(NamedTuple):
    """Every array has a leading axis of workers: [1, ...] at one worker, [n, ...] for all of them.

    counts: of `compressed_mean`; None in the state of `rounds`, which returns what it sent.
    """

    algorithm: Any
    counts: Counts | None


class MeanShared(NamedTuple):
    """count i32[]: rounds so far; key uint32[2]: base key of the private randomness."""

    count: Array
    key: Array
    algorithm: Any


class Info(NamedTuple):
    """One round of `compressed_mean`, averaged over the workers.

    lane_bytes: bytes of a worker's payload, padding included.
    code_bits: bits that the best code we have needs for its message.
    achieved_ratio: share of the message's entries that are not zero after compression.
    relative_error: |C(m) - m| / |m| for the message m (gradient, plus memory or minus shift).
    nonfinite: NaN or infinite gradient entries, summed over workers.
    overflow: chosen entries that found no place in the static capacity, summed over workers.
    sent_bytes: bytes a worker sends in the exchange, every hop counted, as the compiled program does.
    via: how the payloads met, as an index of `jaxcomp.exchange.CHOICES`; `chosen` is its name.
    """

    lane_bytes: Array
    code_bits: Array
    achieved_ratio: Array
    relative_error: Array
    nonfinite: Array
    overflow: Array
    sent_bytes: Array
    via: Array

    @property
    def chosen(self) -> str:
        """Name of the exchange, of a concrete `Info`."""
        return CHOICES[int(np.max(np.asarray(self.via)))]


def compressed_mean(
    algorithm: Algorithm,
    axis_name: Axis,
    via: str = "auto",
    weights: Sequence[float] | Array | None = None,
    *,
    seed: int | Array = 0,
    measure: bool = True,
    link: Link = DEFAULT,
) -> optax.GradientTransformationExtraArgs:
    """Replaces each worker's gradient by the mean direction of a compressed exchange.

    Chain it before any optax optimizer, and run `update` where `axis_name` is bound: inside
    `jax.shard_map`, `jax.pmap` or `jax.vmap(axis_name=...)`. What comes out is equal on all workers.

    The state is a `State(local, shared)`. Each array in `local` has a leading axis of workers:
    `init` makes it [1, ...] inside the mapped function, and [n, ...] outside if the ambient mesh
    (`jax.set_mesh`) has the axis. `init_state` does either for you, `state_specs` gives the specs.

    Private randomness of round t on worker i comes from fold_in(fold_in(key, t), i), so any
    round can be replayed and a resumed run is the same run.

    Args:
        algorithm: `direct`, `error_feedback`, `diana`, ...
        axis_name: mapped axis, a tuple of them, or None for a single worker without an axis.
        via: "gather": all payloads to all workers, (n - 1) lane bytes sent by each, any compressor;
            "sum": payloads added on the way, 2 (n - 1) / n lane bytes, linear compressors only;
            "concat", "ring", "ragged": all payloads without their padding, for a compressor whose
            messages are not equally long (`dagc`): bitwise the mean of "gather", for fewer bytes;
            "ladder": all payloads in the shortest code that there is for what they hold, at the smallest of a
            static ladder of capacities that holds them all: bitwise the mean of "gather" again;
            "auto": linear parts (small dense leaves among them) by sum, the others by gather, or by
            the exchange that `jaxcomp.exchange.links.costs` expects to be fastest on `link`.
        weights: relative weight of each worker, n numbers >= 0; divided by their sum. None: those that
            the compressor brings (`dagc`), else equal.
        seed: int or key for both kinds of randomness.
        measure: keep relative error and achieved ratio for `info`. Costs a few passes over the
            gradient; without it they are NaN.
        link: latency and bandwidth between workers, for via="auto" and the pieces of via="ring".

    Returns:
        `optax.GradientTransformationExtraArgs`. Directions have the dtype of the gradients.

    Raises:
        ValueError: unknown via, via="sum" with a compressor that is not linear, bad weights; and
            at trace time: an unbound axis, gradients or a state that do not fit.

    Example, four workers simulated on one device:

    >>> import jax, jax.numpy as jnp, optax, jaxcomp as jc
    >>> tx = optax.chain(jc.compressed_mean(jc.error_feedback(jc.top_k(k=1)), "data"), optax.sgd(1.0))
    >>> def step(grads):
    ...     updates, state = tx.update(grads, tx.init(grads))
    ...     return updates
    >>> grads = jnp.array([[4.0, 1.0], [4.0, 2.0], [1.0, 8.0], [0.0, 8.0]])
    >>> print(jax.vmap(step, axis_name="data", out_axes=None)(grads))
    [-2. -4.]
    """
    if via not in VIAS:
        raise ValueError(f"compressed_mean: via must be one of {', '.join(map(repr, VIAS))}; got {via!r}")
    if not isinstance(algorithm, Algorithm):
        got = f"the compressor {algorithm.spec.name}" if isinstance(algorithm, Compressor) else repr(algorithm)
        raise TypeError(
            f"compressed_mean needs an algorithm; got {got}. Wrap a compressor in error_feedback(...), diana(...) or "
            "direct(...)"
        )
    spec = algorithm.compressor.spec
    if via == "sum" and not spec.linear:
        raise ValueError(f'compressed_mean: via="sum" needs a linear compressor; {spec.name} is not. Use via="gather"')
    weights = spec.weights if weights is None else weights
    shares = None if weights is None else _shares(weights)
    root = root_key(seed)

    def init(params):
        like = like_of(params)
        shared_key, private_key = jax.random.split(root)
        state = algorithm.init(shared_key, like)
        rows = local_rows(axis_name)
        local = MeanLocal(state.local, _no_counts())
        local = jax.tree.map(lambda x: jnp.tile(x[None], (rows,) + (1,) * x.ndim), local)
        if is_bound(axis_name):
            local = varying(local, axis_name)
        return State(local, MeanShared(jnp.zeros((), jnp.int32), key_data(private_key), state.shared))

    def update(grads, state, params=None, **extra):
        del params, extra
        if not is_bound(axis_name):
            raise ValueError(
                f"compressed_mean: no axis named {axis_name!r} is bound here; call update inside jax.shard_map, "
                "jax.pmap or jax.vmap(axis_name=...)"
            )
        workers = axis_size(axis_name)
        equal = known_equal(grads, axis_name) if workers > 1 else []
        if equal:
            raise ValueError(
                f"compressed_mean: gradients{', gradients'.join(equal[:3])}{' ...' if equal[3:] else ''} are typed as "
                f"equal on all workers of axis {axis_name!r}. Under jax.shard_map, jax.grad sums the gradient of a "
                "replicated parameter over the workers by itself: uncompressed, and n times the mean. Differentiate "
                "with respect to jc.per_worker(params, axis_name) instead; mark gradients that are meant to be equal "
                "the same way, jc.per_worker(grads, axis_name)."
            )
        if shares is not None and len(shares) != workers:
            raise ValueError(f"compressed_mean: {len(shares)} weights for {workers} workers on axis {axis_name!r}")
        like = like_of(grads)
        compressor = algorithm.compressor
        shared = state.shared
        local = _one_worker(state.local, algorithm, like)
        # A fresh copy of the types: what is local varies between workers, whatever came in.
        local = varying(local, axis_name)

        key = jax.random.fold_in(wrap_key(shared.key), shared.count)
        key = jax.random.fold_in(key, axis_index(axis_name))
        mine = for_worker(compressor, shared.algorithm.compressor, axis_index(axis_name), workers)
        own = State(_seated(local, axis_name), shared.algorithm._replace(compressor=mine))
        payload, new_local = algorithm.send(key, grads, own)

        each = None if shares is None else jnp.asarray(shares, jnp.float32)
        met = meet(via, payload, each, axis_name, spec.linear, lengths(compressor, like), link)
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), wide_like(grads))
        total = accumulate(compressor, zeros, met.payloads, met.weights, shared.algorithm.compressor)
        mean = jax.tree.map(lambda t: t * met.scale, total)
        direction, new_shared = algorithm.receive(mean, shared.algorithm)
        direction = jax.tree.map(lambda d, g: d.astype(g.dtype), direction, like)

        sent = compressor.decompress(payload, mine, wide_like(grads)) if measure else None
        counts = _count(payload, grads, algorithm.message(grads, local), sent, new_local)
        counts = counts._replace(
            sent_bytes=jnp.asarray(met.sent_bytes, jnp.float32), via=jnp.asarray(CHOICES.index(met.chosen), jnp.int32)
        )
        rows = jax.tree.map(lambda x, old: x.reshape(old.shape), MeanLocal(new_local, counts), state.local)
        return direction, State(varying(rows, axis_name), MeanShared(shared.count + 1, shared.key, new_shared))

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]


def _shares(weights: Any) -> np.ndarray:
    values = np.asarray(weights, np.float64)
    if values.ndim != 1 or not np.all(np.isfinite(values)) or np.any(values < 0) or not values.sum() > 0:
        raise ValueError(f"compressed_mean: weights must be n numbers >= 0, not all zero; got {weights}")
    return values / values.sum()


def local_rows(axis: Axis) -> int:
    """Leading axis of local arrays: n where we stand outside and the ambient mesh says what n is."""
    if is_bound(axis):
        return 1
    sizes = jax.sharding.get_abstract_mesh().shape
    names = axis_names(axis)
    return math.prod(sizes[name] for name in names) if all(name in sizes for name in names) else 1


def _one_worker(local: Any, algorithm: Algorithm, like: Any) -> Any:
    """The algorithm's local state without the leading axis, checked against the gradients."""
    expected = jax.eval_shape(lambda key: algorithm.init(key, like).local, jax.random.key(0))
    got = local.algorithm
    if jax.tree.structure(got) != jax.tree.structure(expected):
        raise ValueError(
            "compressed_mean: the state was made for another tree than these gradients: expected "
            f"{jax.tree.structure(expected)}, got {jax.tree.structure(got)}"
        )

    def one(path, x, leaf):
        if x.size != leaf.size:
            raise ValueError(
                f"compressed_mean: local state{jax.tree_util.keystr(path)} has shape {x.shape}, expected "
                f"{(1, *leaf.shape)} at one worker. Under shard_map, pass the state with "
                "in_specs=jc.state_specs(state, axis_name) and make it with jc.init_state."
            )
        return x.reshape(leaf.shape)

    return jax.tree_util.tree_map_with_path(one, got, expected)


def _seated(local: Any, axis: Axis) -> Any:
    """The algorithm's local state with this worker's number in every `Seat`."""
    is_seat = lambda node: isinstance(node, Seat)
    number = axis_index(axis)
    return jax.tree.map(lambda node: Seat(number) if is_seat(node) else node, local, is_leaf=is_seat)


def _no_counts() -> Counts:
    integer, real = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.float32)
    return Counts(real, real, integer, integer, real, real, integer, integer, real, integer)


def _count(payload: Any, grads: Any, message: Any, sent: Any, local: Any) -> Counts:
    leaves = lambda tree: [x.astype(wide(x.dtype)) for x in jax.tree.leaves(tree)]
    total = lambda parts, dtype: jnp.sum(jnp.stack([jnp.zeros((), dtype), *parts]), dtype=dtype)
    norm_of = lambda parts: _joint_norm([block_norms(x.reshape(1, -1), 2)[0] for x in parts])
    message = leaves(message)
    if sent is None:
        kept = jnp.zeros((), jnp.int32)
        error = norm = jnp.full((), jnp.nan, jnp.float32)
    else:
        sent = leaves(sent)
        message = [jnp.where(jnp.isfinite(m), m, jnp.zeros((), m.dtype)) for m in message]
        kept = total([jnp.sum(s != 0, dtype=jnp.int32) for s in sent], jnp.int32)
        error = norm_of([s - m for s, m in zip(sent, message, strict=True)])
        norm = norm_of(message)
    tallies = [t for t in jax.tree.leaves(local, is_leaf=lambda t: isinstance(t, Tally)) if isinstance(t, Tally)]
    return Counts(
        lane_bytes=jnp.asarray(lane_bytes(payload), jnp.float32),
        code_bits=jnp.asarray(code_bits(payload)).astype(jnp.float32),
        sent=kept,
        size=jnp.asarray(sum(m.size for m in message), jnp.int32),
        error=error,
        norm=norm,
        nonfinite=total([jnp.sum(~jnp.isfinite(g), dtype=jnp.int32) for g in jax.tree.leaves(grads)], jnp.int32),
        overflow=total([t.overflow for t in tallies], jnp.int32),
        sent_bytes=jnp.zeros((), jnp.float32),
        via=jnp.zeros((), jnp.int32),
    )


def _joint_norm(norms: list[Array]) -> Array:
    """Norm of vectors laid end to end, from theirs, without overflow: f32[...]."""
    stacked = jnp.stack([jnp.zeros((), jnp.float32), *(norm.astype(jnp.float32) for norm in norms)])
    largest = jnp.max(stacked, axis=0)
    unit = jnp.where(largest > 0, largest, 1)
    return unit * jnp.sqrt(jnp.sum(jnp.square(jnp.clip(stacked / unit, 0, 1)), axis=0))


# ------------------------------------------------------------------------------------------------
# Reading and placing the state, wherever optax wrappers have put it


def _is_mean(node: Any) -> bool:
    return isinstance(node, State) and isinstance(node.local, MeanLocal)


def _map_states(tree: Any, local: Any, shared: Any, axis: Axis) -> Any:
    """`local` in place of arrays that differ between workers, `shared` of all others."""

    def of_mean(node):
        return State(jax.tree.map(lambda _: local, node.local), jax.tree.map(lambda _: shared, node.shared))

    def of_steps(node):
        # MultiSteps accumulates each worker's own gradients.
        fields = {
            name: jax.tree.map(lambda _: shared, value) if name not in ("inner_opt_state", "acc_grads") else value
            for name, value in node._asdict().items()
        }
        for leaf in jax.tree.leaves(node.acc_grads):
            if jnp.ndim(leaf) == 0 and isinstance(local, PartitionSpec):
                raise ValueError(
                    "state_specs: optax.MultiSteps accumulates gradients per worker, and one of them is a scalar, "
                    f"which cannot be laid out over axis {axis!r}. Make that parameter a vector of one entry."
                )
        fields["inner_opt_state"] = walk(node.inner_opt_state)
        fields["acc_grads"] = jax.tree.map(lambda _: local, node.acc_grads)
        return type(node)(**fields)

    def special(node):
        return _is_mean(node) or isinstance(node, optax.MultiStepsState)

    def walk(node):
        def one(x):
            return of_mean(x) if _is_mean(x) else of_steps(x) if special(x) else shared

        return jax.tree.map(one, node, is_leaf=special)

    return walk(tree)


def state_specs(state: Any, axis_name: Axis) -> Any:
    """PartitionSpecs of an optimizer state for `shard_map`: P(axis_name) for local arrays, else P().

    Args:
        state: of `compressed_mean`, or of any optax optimizer that contains it (chain,
            inject_hyperparams, masked, MultiSteps, ...), or its shapes (`jax.eval_shape(tx.init, params)`).
        axis_name: name of the data axis, or a tuple of names.

    Returns:
        Tree of the same structure, for `in_specs` and `out_specs`.

    >>> import jax.numpy as jnp, optax, jaxcomp as jc
    >>> tx = jc.compressed_mean(jc.error_feedback(jc.top_k(0.1)), "data")
    >>> jc.state_specs(tx.init(jnp.zeros(50)), "data").local.algorithm.memory
    P('data',)
    """
    return _map_states(state, PartitionSpec(axis_name), PartitionSpec(), axis_name)


def state_axes(state: Any) -> Any:
    """The same for `jax.vmap` and `jax.pmap`: 0 for local arrays, None for all others.

    Args:
        state: as for `state_specs`.

    Returns:
        Tree prefix for `in_axes` and `out_axes`.
    """
    # None is an empty tree to JAX, so the result is a tree prefix: exactly what in_axes takes.
    return _map_states(state, 0, None, None)


def init_state(
    tx: optax.GradientTransformation, params: Any, mesh: jax.sharding.Mesh | int, axis_name: Axis
) -> tuple[Any, Any]:
    """Makes an optimizer state that lies where it belongs, each worker's part on its own device.

    Args:
        tx: optimizer with `compressed_mean` in it.
        params: parameters, equal on all workers.
        mesh: the mesh that `shard_map` will run on; or the number of workers of a `vmap` or `pmap`.
        axis_name: its data axis (or a tuple of axes).

    Returns:
        (state, specs): the state, and its PartitionSpecs for in_specs and out_specs; or, for a number of workers,
        the axes for in_axes and out_axes.

    Sixty-four workers on one device:

    >>> import jax, jax.numpy as jnp, jaxcomp as jc
    >>> tx = jc.compressed_mean(jc.error_feedback(jc.top_k(k=1)), "data")
    >>> state, axes = jc.init_state(tx, jnp.zeros(5), 64, "data")
    >>> step = jax.vmap(tx.update, in_axes=(0, axes), out_axes=(None, axes), axis_name="data")
    >>> direction, state = step(jnp.ones((64, 5)), state)
    >>> print(direction, state.local.algorithm.memory.shape)
    [1. 0. 0. 0. 0.] (64, 1, 5)
    """
    if isinstance(mesh, int):
        axes = state_axes(jax.eval_shape(tx.init, params))
        make = jax.vmap(tx.init, in_axes=None, out_axes=axes, axis_name=axis_name, axis_size=mesh)
        return jax.jit(make)(params), axes
    specs = state_specs(jax.eval_shape(tx.init, params), axis_name)
    make = jax.shard_map(tx.init, mesh=mesh, in_specs=PartitionSpec(), out_specs=specs)
    return jax.jit(make)(params), specs


def per_worker(params: Any, axis_name: Axis) -> Any:
    """The same parameters, as each worker's own: differentiate with respect to these.

    Under `jax.shard_map` (with its default `check_vma=True`) replicated parameters are typed as
    equal on all workers, and their gradient is therefore the sum over the workers: `jax.grad` adds an
    all-reduce of the whole gradient by itself. This marks them as each worker's own, so that the
    gradient stays local and nothing crosses but the compressed message. No data moves. Under vmap,
    pmap and `check_vma=False` it does nothing, and is not needed.

    >>> import jax, jax.numpy as jnp, jaxcomp as jc
    >>> grad = lambda w, x: jax.grad(lambda w: w * x)(jc.per_worker(w, "data"))
    >>> print(jax.vmap(grad, in_axes=(None, 0), axis_name="data")(1.0, jnp.arange(3.0)))
    [0. 1. 2.]
    """
    return varying(params, axis_name)


def info(state: Any, *, each: bool = False) -> Info:
    """What the last round cost and lost.

    Args:
        state: of `compressed_mean`, or of any optimizer that contains it; several are added up.
            Inside the mapped function, or the whole state outside of it.
        each: arrays of shape [n], one number for each worker, instead of means and sums.

    Returns:
        `Info` of scalars (or arrays). All zero before the first round; ratio and error are 0/0 = NaN there.

    Raises:
        ValueError: there is no `compressed_mean` in the state.

    >>> import jax, jax.numpy as jnp, jaxcomp as jc
    >>> tx = jc.compressed_mean(jc.direct(jc.top_k(k=1)), axis_name=None)
    >>> grads = jnp.array([3.0, 4.0])
    >>> _, state = tx.update(grads, tx.init(grads))
    >>> i = jc.info(state)
    >>> print(i.lane_bytes, i.achieved_ratio, i.relative_error)
    8.0 0.5 0.6
    """
    nodes = [node for node in jax.tree.leaves(state, is_leaf=_is_mean) if _is_mean(node)]
    nodes = [node for node in nodes if node.local.counts is not None]
    if not nodes:
        raise ValueError("info: there is no compressed_mean in this state")
    rows = [jax.tree.map(lambda x: jnp.reshape(x, (-1,)), node.local.counts) for node in nodes]
    counts = jax.tree.map(lambda *xs: sum(xs[1:], start=xs[0]), *rows)
    error, norm = (
        jax.vmap(lambda *xs: _joint_norm(list(xs)))(*(getattr(row, name) for row in rows)) for name in ("error", "norm")
    )
    result = Info(
        counts.lane_bytes,
        counts.code_bits,
        jnp.where(jnp.isnan(counts.norm), jnp.nan, counts.sent.astype(jnp.float32) / counts.size.astype(jnp.float32)),
        error / norm,
        counts.nonfinite,
        counts.overflow,
        counts.sent_bytes,
        jnp.max(jnp.stack([row.via for row in rows]), axis=0),
    )
    if each:
        return result
    means = jax.tree.map(jnp.mean, result)
    totals = {"nonfinite": jnp.sum(result.nonfinite), "overflow": jnp.sum(result.overflow)}
    return means._replace(**totals, via=jnp.max(result.via))
