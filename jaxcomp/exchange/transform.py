"""The whole road as an optax gradient transformation."""

import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from jaxcomp.algorithms.direct import DirectShared
from jaxcomp.base import (
    Algorithm,
    Compressor,
    State,
    accumulate,
    bounded,
    for_worker,
    key_data,
    lengths,
    like_of,
    overflow,
    root_key,
    wide_like,
    wrap_key,
)
from jaxcomp.bits import code_bits
from jaxcomp.compressors.tree import unravel
from jaxcomp.exchange.lanes import (
    Axis,
    axis_index,
    axis_names,
    axis_size,
    is_bound,
    known_equal,
    unknown_axes,
    varying,
)
from jaxcomp.exchange.layout import Level, MeanLocal, MeanShared, closed, local_rows, opened, outer_of, with_rows
from jaxcomp.exchange.links import DEFAULT, Link
from jaxcomp.exchange.measure import count, no_counts
from jaxcomp.exchange.meet import CHOICES, VIAS, How, bucketed, meet
from jaxcomp.exchange.two_shot import again, chunk_like, in_chunks, second_shot

__all__ = ["compressed_mean"]

Array = jax.Array


def compressed_mean(
    algorithm: Algorithm | None = None,
    axis_name: Axis | Mapping[Any, Algorithm] = None,
    via: str = "auto",
    weights: Sequence[float] | Array | None = None,
    *,
    seed: int | Array = 0,
    measure: bool = True,
    link: Link = DEFAULT,
    sharded: Any = None,
    bucket_bytes: int | None = None,
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
        algorithm: `direct`, `error_feedback`, `diana`, ...; left out where axis_name is a mapping.
        axis_name: mapped axis, a tuple of them, or None for a single worker without an axis. Or a hierarchy: a mapping
            from axes to algorithms, in the order of the exchanges, say {"ici": jc.direct(jc.identity()),
            "dcn": jc.error_feedback(jc.sidco(1e-3))}. The mean over the first axis is the gradient of the second level,
            so the devices along "ici" have equal messages for "dcn": in sums and gathers each of them carries one part.
        via: "gather": all payloads to all workers, (n - 1) lane bytes sent by each, any compressor;
            "sum": payloads added on the way, 2 (n - 1) / n lane bytes, linear compressors only; 3 (n - 1) / n for 16
            bits with an algorithm that remembers what it sent, whose mean must not be rounded once more ("two_shot"
            remembers that rounding, too, and so sends 2 (n - 1) / n);
            "concat", "ring", "ragged": all payloads without their padding, for a compressor whose
            messages are not equally long (`dagc`): bitwise the mean of "gather", for fewer bytes;
            "ladder": all payloads in the shortest code that there is for what they hold, at the smallest of a
            static ladder of capacities that holds them all: bitwise the mean of "gather" again;
            "two_shot": each worker adds up one chunk of the gradient and sends the sum, compressed again, to all:
            2 (n - 1) / n lane bytes for any compressor of one array, see `jaxcomp.exchange.two_shot`;
            "auto": linear parts (small dense leaves among them) by sum, the others by gather, or by
            the exchange that `jaxcomp.exchange.links.costs` expects to be fastest on `link`.
        weights: relative weight of each worker, n numbers >= 0; divided by their sum. None: those that
            the compressor brings (`dagc`), else equal.
        seed: int or key for both kinds of randomness.
        measure: keep relative error and achieved ratio for `info`. Costs a few passes over the
            gradient; without it they are NaN.
        link: latency and bandwidth between workers, for via="auto" and the pieces of via="ring".
        sharded: for parameters, and so gradients, that are cut into shards over other mesh axes (FSDP, tensor
            parallel): their PartitionSpecs, a tree like the parameters; or, if all are cut over the same axes, the
            names of these. Each device compresses its own shard and exchanges it over axis_name alone. Make the state
            with `init_state(tx, params, mesh, axis_name, specs)`.
        bucket_bytes: leaves are put together, from the last to the first, until their gradients have so many
            bytes, and each such bucket is exchanged by a collective of its own, which need not wait for the rest of
            the backward pass. None: one collective. For sums and gathers of compressors that act leaf by leaf.

    Returns:
        `optax.GradientTransformationExtraArgs`. Directions have the dtype of the gradients; what is too large for it is
        its largest number.

    Raises:
        ValueError: unknown via, via="sum" with a compressor that is not linear, via="two_shot" with an algorithm that
            needs the mean as it was sent (`diana`), bad weights; and at trace time: an unbound axis, gradients or a
            state that do not fit, gradients that differ over a mesh axis that was not named.

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
    if isinstance(axis_name, Mapping):
        if algorithm is not None:
            raise ValueError("compressed_mean: give an algorithm, or a mapping from axes to algorithms; got both")
        if weights is not None:
            raise ValueError("compressed_mean: weights are of the workers of one axis; a hierarchy takes none")
        levels = dict(axis_name)
    else:
        levels = {axis_name: algorithm}
    whole_mesh = sharded is None and not isinstance(axis_name, Mapping)
    names = [axis_names(axis) for axis in levels]
    every = [name for each in names for name in each]
    if not levels or (not all(names) and not whole_mesh) or len(set(every)) < len(every):
        raise ValueError(
            "compressed_mean: means over part of a mesh need names, and each level axes of its own; "
            f"got {list(levels)} and sharded={sharded!r}"
        )
    root = root_key(seed)

    def mean_of(
        cut: tuple[str, ...], inner: tuple[str, ...], root: Array = root
    ) -> optax.GradientTransformationExtraArgs:
        """All levels, for gradients of shards over `cut` that are equal over `inner`."""
        parts = []
        for i, (axis, each) in enumerate(levels.items()):
            earlier = tuple(name for names_ in names[:i] for name in names_)
            place = Place(axis, tuple(names[i + 1 :]), cut, earlier + inner, not whole_mesh)
            own = jax.random.fold_in(root, i) if len(levels) > 1 else root
            parts.append(_mean(each, place, via, weights, own, measure, link, bucket_bytes))
        return parts[0] if len(parts) == 1 else optax.chain(*parts)

    if sharded is None or isinstance(sharded, str) or _are_names(sharded):
        return mean_of(axis_names(sharded), ())
    return _by_shards(sharded, mean_of, every, root)


class Place(NamedTuple):
    """Where on a mesh a mean is taken.

    axis: of its workers. later: those of each later level. cut: those of the shards. inner: axes on which gradients are
    equal. level: its state is a `Level`.
    """

    axis: Axis
    later: tuple[tuple[str, ...], ...]
    cut: tuple[str, ...]
    inner: tuple[str, ...]
    level: bool

    @property
    def outer(self) -> tuple[str, ...]:
        """Axes over which the gradients differ and which it leaves alone."""
        return outer_of(self.later, self.cut)


def _are_names(sharded: Any) -> bool:
    return isinstance(sharded, tuple) and all(isinstance(name, str) for name in sharded)


def _by_shards(
    specs: Any, mean_of: Callable[..., optax.GradientTransformationExtraArgs], axes: list[str], root: Array
) -> optax.GradientTransformationExtraArgs:
    """A mean for each group of leaves that are sharded over the same axes.

    Leaves that are whole on several devices stay bitwise equal there: they have one message, of which each device
    carries a part.
    """
    leaves, structure = jax.tree.flatten(specs, is_leaf=lambda node: isinstance(node, PartitionSpec))
    if not all(isinstance(leaf, PartitionSpec) for leaf in leaves):
        raise ValueError(f"compressed_mean: sharded must be axis names or a tree of PartitionSpecs; got {specs!r}")
    cut = [tuple(name for entry in spec if entry is not None for name in axis_names(entry)) for spec in leaves]
    everything = sorted({name for each in cut for name in each})
    if set(everything) & set(axes):
        raise ValueError(
            f"compressed_mean: parameters are sharded over {sorted(set(everything) & set(axes))}, over which the mean "
            "is taken. There each device needs the mean of its shard alone: jc.psum_scatter."
        )
    groups = sorted(set(cut))
    rest = lambda group: tuple(name for name in everything if name not in group)
    means = [mean_of(group, rest(group), jax.random.fold_in(root, i)) for i, group in enumerate(groups)]

    def parted(tree):
        if jax.tree.structure(tree) != structure:
            raise ValueError(
                f"compressed_mean: gradients have the structure {jax.tree.structure(tree)}, sharded= has {structure}"
            )
        flat = jax.tree.leaves(tree)
        return [tuple(x for x, each in zip(flat, cut, strict=True) if each == group) for group in groups]

    def init(params):
        like_of(params)
        return tuple(mean.init(part) for mean, part in zip(means, parted(params), strict=True))

    def update(grads, state, params=None, **extra):
        del params, extra
        for axis in axes:
            _check_own(grads, axis)
        done = [mean.update(part, old) for mean, part, old in zip(means, parted(grads), state, strict=True)]
        parts = {group: iter(jax.tree.leaves(direction)) for group, (direction, _) in zip(groups, done, strict=True)}
        return jax.tree.unflatten(structure, [next(parts[each]) for each in cut]), tuple(new for _, new in done)

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]


def _mean(
    algorithm: Any,
    place: Place,
    via: str,
    weights: Any,
    root: Array,
    measure: bool,
    link: Link,
    bucket_bytes: int | None,
) -> optax.GradientTransformationExtraArgs:
    """`compressed_mean` over one axis."""
    axis_name, outer = place.axis, place.outer
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
    two_shot = via == "two_shot"
    over = algorithm.over
    if two_shot and over is None:
        raise ValueError(
            'compressed_mean: via="two_shot" compresses the mean once more, and this algorithm keeps a shift in step '
            'with the mean as it was sent. Use direct(...) or error_feedback(...), or via="gather"'
        )
    if two_shot and over is not None:
        over(lambda c: in_chunks(c, 1))  # refuses here what it would refuse when it is run
    integral = isinstance(bucket_bytes, numbers.Integral) and not isinstance(bucket_bytes, bool)
    if bucket_bytes is not None and not (integral and bucket_bytes >= 1):
        raise ValueError(f"compressed_mean: bucket_bytes must be an integer of at least 1; got {bucket_bytes!r}")
    if bucket_bytes is not None and via not in ("auto", "sum", "gather"):
        raise ValueError(f'compressed_mean: bucket_bytes goes with via="auto", "sum" and "gather"; got {via!r}')
    weights = spec.weights if weights is None else weights
    shares = None if weights is None else _shares(weights)

    def plan(workers: int) -> tuple[Algorithm, Compressor | None, Algorithm | None]:
        """The algorithm as it runs; with two shots also the compressor of a chunk, and what sends it again."""
        if not two_shot or over is None:
            return algorithm, None, None
        given: list[Compressor] = []

        def cut(compressor):
            given.append(compressor)
            return in_chunks(compressor, workers)

        whole = over(cut)
        return whole, given[0], again(given[0])

    def workers_here() -> int:
        return axis_size(axis_name) if is_bound(axis_name) else local_rows(axis_name)

    def init(params):
        like = like_of(params)
        workers = workers_here()
        whole, _, second = plan(workers)
        shared_key, private_key = jax.random.split(root)
        then = State()
        if second is not None:
            shared_key, again_key = jax.random.split(shared_key)
            then = second.init(again_key, chunk_like(like, workers))
        state = whole.init(shared_key, like)
        every = (*outer, *axis_names(axis_name)) or None
        rows = local_rows(every)
        local = with_rows(MeanLocal(state.local, no_counts(), then.local), rows)
        if is_bound(every):
            local = varying(local, every)
        shared = MeanShared(jnp.zeros((), jnp.int32), key_data(private_key), state.shared, then.shared)
        state = State(local, shared)
        return closed(state, axis_names(axis_name), place.later, place.cut) if place.level else state

    def update(grads, state, params=None, **extra):
        del params, extra
        if not is_bound(axis_name) or not is_bound(outer or None):
            missing = axis_name if not is_bound(axis_name) else outer
            raise ValueError(
                f"compressed_mean: no axis named {missing!r} is bound here; call update inside jax.shard_map, "
                "jax.pmap or jax.vmap(axis_name=...)"
            )
        workers = axis_size(axis_name)
        _check_types(grads, place)
        if shares is not None and len(shares) != workers:
            raise ValueError(f"compressed_mean: {len(shares)} weights for {workers} workers on axis {axis_name!r}")
        if place.level:
            state = opened(state, axis_names(axis_name), place.later, place.cut)
        elif isinstance(state, Level):
            raise ValueError(
                "compressed_mean: the state was made with sharded= or a hierarchy, this transformation not"
            )
        like = like_of(grads)
        whole, chunk_compressor, second = plan(workers)
        compressor = whole.compressor
        shared = state.shared
        local = _one_worker(state.local, whole, like)
        # A fresh copy of the types: what is local varies between workers, whatever came in.
        every = (*outer, *axis_names(axis_name)) or None
        local = varying(local, every)

        key = jax.random.fold_in(wrap_key(shared.key), shared.count)
        if outer:
            key = jax.random.fold_in(key, axis_index(outer))
        key = jax.random.fold_in(key, axis_index(axis_name))
        again_key = key
        if two_shot:  # not fold_in of the key that is split for the chunks: that would be the key of one of them
            key, again_key = jax.random.split(key)
        mine = for_worker(compressor, shared.algorithm.compressor, axis_index(axis_name), workers)
        own = State(local, shared.algorithm._replace(compressor=mine))
        payload, new_local = whole.send(key, grads, own)
        each = None if shares is None else jnp.asarray(shares, jnp.float32)

        if chunk_compressor is None or second is None:
            buckets = _buckets(payload, like, spec.dense_below, bucket_bytes)
            how = How(place.inner, buckets, exact=not isinstance(shared.algorithm, DirectShared))
            met = meet(via, payload, each, axis_name, spec.linear, lengths(compressor, like), link, how)
            zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), wide_like(grads))
            zeros = varying(zeros, outer or None)
            total = accumulate(compressor, zeros, met.payloads, met.weights, shared.algorithm.compressor)
            mean = jax.tree.map(lambda t: t * met.scale, total)
            if jax.tree.leaves(state.local.second):
                raise ValueError('compressed_mean: the state was made for via="two_shot", this transformation is not')
            then, bits, more, sent_bytes, chosen = State(), code_bits(payload), 0, met.sent_bytes, met.chosen
        else:
            then = State(_second_of(state.local.second, second, chunk_like(like, workers)), shared.second)
            shot = second_shot(
                payload,
                each,
                axis_name,
                chunk_compressor,
                shared.algorithm.compressor,
                second,
                then,
                again_key,
                chunk_like(like, workers),
                outer,
            )
            wide_leaves, structure = jax.tree.flatten(wide_like(grads))
            mean = jax.tree.unflatten(structure, unravel(shot.mean, wide_leaves))
            then, chosen = State(shot.local, shot.shared), "two_shot"
            bits, more, sent_bytes = shot.code_bits, shot.second_bytes, shot.sent_bytes
        direction, new_shared = whole.receive(mean, shared.algorithm)
        direction = jax.tree.map(lambda d, g: d if d.dtype == g.dtype else bounded(d.astype(g.dtype)), direction, like)

        sent = compressor.decompress(payload, mine, wide_like(grads)) if measure else None
        left = overflow(compressor, getattr(new_local, "compressor", new_local))
        counts = count(payload, bits, grads, whole.message(grads, local), sent, left)
        counts = counts._replace(
            lane_bytes=counts.lane_bytes + more,
            sent_bytes=jnp.asarray(sent_bytes, jnp.float32),
            via=jnp.asarray(CHOICES.index(chosen), jnp.int32),
        )
        new = MeanLocal(new_local, counts, then.local)
        rows = jax.tree.map(lambda x, old: x.reshape(old.shape), new, state.local)
        after = State(varying(rows, every), MeanShared(shared.count + 1, shared.key, new_shared, then.shared))
        return direction, closed(after, axis_names(axis_name), place.later, place.cut) if place.level else after

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]


def _check_types(grads: Any, place: Place) -> None:
    """Refuses gradients that are equal where they should differ, or differ where nobody said so."""
    _check_own(grads, place.axis)
    whole = [name for name in place.outer if known_equal(grads, name)]
    if whole:
        leaves = known_equal(grads, whole[0])
        if whole[0] not in place.cut:
            raise ValueError(
                f"compressed_mean: gradients{', gradients'.join(leaves[:3])}{' ...' if leaves[3:] else ''} are equal "
                f"along {whole[0]!r}, over which a later level takes the mean: they were added up uncompressed. "
                "Differentiate with respect to jc.per_worker(params, levels), levels as given to compressed_mean."
            )
        raise ValueError(
            f"compressed_mean: gradients{', gradients'.join(leaves[:3])}{' ...' if leaves[3:] else ''} are equal along "
            f"mesh axis {whole[0]!r}, and not shards. Give sharded= the tree of PartitionSpecs of the parameters."
        )
    differ, automatic = unknown_axes(grads, place.axis, (*axis_names(place.axis), *place.outer))
    if differ:
        raise ValueError(
            f"compressed_mean: gradients differ over mesh axis {differ[0]!r}, too. If parameters are shards over it, "
            f"say sharded={differ[0]!r}; if it holds more workers, name it in axis_name; if they are parts of a sum, "
            "add them up before."
        )
    if automatic:
        raise ValueError(
            f"compressed_mean: mesh axis {automatic[0]!r} is not manual here, and gradients may be sharded over it: to "
            "compress them the compiler would gather the whole of each on every device. Make all axes of the mesh "
            f"manual (leave axis_names out of jax.shard_map) and say sharded={automatic[0]!r}: then each device "
            "compresses its own shard."
        )


def _check_own(grads: Any, axis: Axis) -> None:
    """Refuses gradients that are equal on all workers."""
    equal = known_equal(grads, axis) if is_bound(axis) and axis_size(axis) > 1 else []
    if equal:
        raise ValueError(
            f"compressed_mean: gradients{', gradients'.join(equal[:3])}{' ...' if equal[3:] else ''} are typed as "
            f"equal on all workers of axis {axis!r}. Under jax.shard_map, jax.grad sums the gradient of a "
            "replicated parameter over the workers by itself: uncompressed, and n times the mean. Differentiate "
            "with respect to jc.per_worker(params, axis_name) instead; mark gradients that are meant to be equal "
            "the same way, jc.per_worker(grads, axis_name)."
        )


def _buckets(payload: Any, like: Any, dense_below: int, bucket_bytes: int | None) -> tuple[int, ...] | None:
    if bucket_bytes is None:
        return None
    large = [leaf for leaf in jax.tree.leaves(like) if leaf.size >= dense_below]
    return bucketed(payload, [leaf.size * leaf.dtype.itemsize for leaf in large], bucket_bytes)


def _shares(weights: Any) -> np.ndarray:
    values = np.asarray(weights, np.float64)
    if values.ndim != 1 or not np.all(np.isfinite(values)) or np.any(values < 0) or not values.sum() > 0:
        raise ValueError(f"compressed_mean: weights must be n numbers >= 0, not all zero; got {weights}")
    return values / values.sum()


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
                "in_specs=jc.state_specs(state, axis_name) and make it with jc.init_state, with the specs "
                "of sharded parameters."
            )
        return x.reshape(leaf.shape)

    return jax.tree_util.tree_map_with_path(one, got, expected)


def _second_of(local: Any, second: Algorithm, chunk: jax.ShapeDtypeStruct) -> Any:
    """The local state of the second compression without its leading axis, checked."""
    expected = jax.eval_shape(lambda key: second.init(key, chunk).local, jax.random.key(0))
    same = jax.tree.structure(local) == jax.tree.structure(expected)
    if not same or any(x.size != e.size for x, e in zip(*map(jax.tree.leaves, (local, expected)), strict=True)):
        raise ValueError(
            'compressed_mean: the state was made for another number of workers, or not for via="two_shot". Make it '
            "with jc.init_state, or hand the old one on with jc.redistribute."
        )
    return jax.tree.map(lambda x, e: x.reshape(e.shape), local, expected)
