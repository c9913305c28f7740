"""The whole road as an optax gradient transformation.

The state has a part `local`, which differs between workers, and a part `shared`, which does not. Each array in `local`
has a leading axis of workers: `init` makes it [1, ...] inside the mapped function, and [n, ...] outside if the ambient
mesh (`jax.set_mesh`) has the axis. `init_state` does either for you, `state_specs` gives the specs. Private randomness
of round t on worker i comes from fold_in(fold_in(key, t), i): any round can be replayed, a resumed run is the same run.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import optax
from jax.core import Tracer
from jax.sharding import PartitionSpec

from jaxcomp.arrays import constants, like_of, root_key
from jaxcomp.base import Algorithm, Compressor, require_algorithm
from jaxcomp.exchange.axes import Axis, Placement, axis_names, check_gradients, check_own, is_bound
from jaxcomp.exchange.binding import exchange_of
from jaxcomp.exchange.links import DEFAULT, Link
from jaxcomp.exchange.routes import Route
from jaxcomp.exchange.state import means_in
from jaxcomp.groups import Buckets, join, split, warn_if_dense, without_dense_warning
from jaxcomp.paths import numbers_by_path, same_leaves
from jaxcomp.state.specs import is_names
from jaxcomp.transforms.meshes import axes_in
from jaxcomp.transforms.rows import with_before, with_rows
from jaxcomp.transforms.scattered import cut_dimension, scattered_mean

__all__ = ["by_level", "compressed_mean", "levels_of", "means_over"]

Array = jax.Array
Transformation = optax.GradientTransformationExtraArgs


MISSING: Any = object()  # no axis was given; None is for a single worker


def compressed_mean(
    algorithm: Algorithm | None = None,
    axis_name: Axis | Mapping[Any, Algorithm] = MISSING,
    via: str | Route = "auto",
    weights: Sequence[float] | Array | None = None,
    *,
    seed: int | Array = 0,
    measure: bool | int = False,
    link: Link | Mapping[str, Link] = DEFAULT,
    sharded: Any = None,
    bucket_bytes: int | Buckets | None = None,
    before: optax.GradientTransformation | None = None,
) -> Transformation:
    """Replaces each worker's gradient by the mean direction of a compressed exchange.

    Chain it before any optax optimizer, and run `update` where `axis_name` is bound: inside
    `jax.shard_map`, `jax.pmap` or `jax.vmap(axis_name=...)`. What comes out is equal on all workers. Where it is not
    bound, `update` takes the gradients of all workers, as `worker_value_and_grad` makes them: `WorkerGradients`, which
    nothing before the mean can change.

    Args:
        algorithm: `direct`, `error_feedback`, `diana`, ...; None where axis_name is a mapping.
        axis_name: mapped axis, a tuple of them, or a mapping from axes to algorithms (a hierarchy, say
            {"ici": jc.direct(jc.identity()), "dcn": jc.error_feedback(jc.sidco(1e-3))}: the exchanges in their order.
            The mean over the first axis is the gradient of the second level, so that the devices along "ici" have
            equal messages for "dcn", and each carries one part of them); None, which must be said, for a single worker
            without an axis.
        via: how messages travel: "gather", "sum", "two_shot", "ladder", "concat", "ring" or "ragged" (each of them is a
            file in `jaxcomp.exchange.routes`, with what it sends); "auto" adds up what is linear, gathers the rest, and
            never sends more than f32 would; or a `Route` of your own.
        weights: relative weight of each worker, n numbers >= 0; divided by their sum. None: those that
            the compressor brings (`dagc`), else equal.
        seed: int or key for both kinds of randomness.
        measure: whether `info` has the relative error and the number of non-finite entries, which cost passes over the
            gradient; or an integer k: in one of k rounds. Bytes, ratio and overflow are always there, and so are code
            bits, but those of entropy codes (`skcompress`), in whose place those of the lanes stand unless measured.
        link: `Link` between workers, latency in seconds, in [0, 60], and bandwidth in bytes per second, >= 1; or a
            mapping from names to several levels, innermost first: {"ici": jc.Link(1e-6, 50e9, 8),
            "dcn": jc.Link(5e-5, 1.25e9)} are groups of eight. Levels that have the names of all axes of an exchange
            are those of the axes; else all levels together join its workers. via="auto" depends on it, and the pieces
            of via="ring".
        sharded: PartitionSpecs of parameters that are cut into shards over other mesh axes, a tree like them, or the
            names of the axes if all are cut over the same: each device exchanges its own shard. Within
            `optax.multi_transform` or `optax.masked` it is the tree of all parameters. Make the state with
            `init_state(tx, params, mesh, axis_name, specs)`. Of leaves that are cut over the workers themselves
            (FSDP) each worker gives the whole gradient, and gets the direction of its own shard.
        bucket_bytes: size of the buckets of leaves that are compressed and exchanged by themselves, from the last leaf
            to the first, so that an exchange need not wait for the rest of the backward pass; or what `jc.buckets`
            makes: in the order in which gradients are ready. None: one collective.
        before: optax transformation that each worker applies to its own gradient, before the exchange: clipping, noise,
            weight decay at each worker. It has a state for each worker; typed random keys in it are another one for
            each. Of rows it sees one at a time, under vmap, with whole parameters.

    Returns:
        `optax.GradientTransformationExtraArgs`. Directions have the dtype of the gradients; what is too large for it is
        its largest number.

    Raises:
        TypeError: no axis_name, or no algorithm.
        ValueError: a route that cannot carry what the algorithm sends, bad weights; and at trace time: an unbound axis,
            gradients or a state that do not fit, gradients that differ over a mesh axis that was not named.

    >>> import jax, jax.numpy as jnp, optax, jaxcomp as jc
    >>> tx = optax.chain(jc.compressed_mean(jc.error_feedback(jc.top_k(k=1)), "data"), optax.sgd(1.0))
    >>> step = lambda grads: tx.update(grads, tx.init(grads))[0]
    >>> grads = jnp.array([[4.0, 1.0], [4.0, 2.0], [1.0, 8.0], [0.0, 8.0]])
    >>> print(jax.jit(jax.vmap(step, axis_name="data", out_axes=None))(grads))
    [-2. -4.]
    """
    levels = levels_of(algorithm, axis_name, weights)
    partial = sharded is not None or isinstance(axis_name, Mapping)
    options = {"weights": weights, "measure": measure, "link": link, "bucket_bytes": bucket_bytes}
    # Keys that are made here are constants, wherever the transformation is built.
    with contextlib.nullcontext() if isinstance(seed, Tracer) else constants():
        mean = means_over("compressed_mean", levels, via, root_key(seed), sharded, partial, **options)
    axes = tuple(name for axis in levels for name in axis_names(axis))
    if before is not None and not isinstance(before, optax.GradientTransformation):
        raise TypeError(f"compressed_mean: before must be an optax transformation; got {before!r}")
    inside = mean if before is None else with_before(before, mean, axes)
    if not axes:
        return inside
    outside = with_rows("compressed_mean", mean, inside, axes, sharded, before)

    def update(grads, state, params=None, **extra):
        return (inside if is_bound(axes) else outside).update(grads, state, params, **extra)

    return Transformation(outside.init, update)  # pyright: ignore[reportArgumentType]


def means_over(
    name: str,
    levels: dict[Any, Any],
    via: str | Route,
    root: Array,
    sharded: Any,
    partial: bool,
    *,
    chosen: Sequence[int] | None = None,
    measure: bool | int = False,
    **options: Any,
) -> Transformation:
    """The means over some levels of a hierarchy, one after the other: the road of `compressed_mean`.

    Args:
        name: of the outer form, for errors.
        levels: axis -> algorithm, all of them.
        via, sharded, measure, options: as for `compressed_mean`.
        root: key of both kinds of randomness.
        partial: whether the levels are part of a larger mesh.
        chosen: numbers of the levels, ascending; None for all. Earlier levels have made what it sees equal already.
    """
    names = [axis_names(axis) for axis in levels]
    every = [each for group in names for each in group]
    if not levels or (not all(names) and partial) or len(set(every)) < len(every):
        raise ValueError(
            "compressed_mean: means over part of a mesh need names, and each level axes of its own; "
            f"got {list(levels)} and sharded={sharded!r}"
        )
    if not isinstance(measure, (bool, int)) or not 0 <= measure < 2**31:
        raise ValueError(f"{name}: measure must be True, False or an integer in 1 .. 2^31 - 1; got {measure!r}")
    options = {"measure": int(measure), "code": "fixed" if measure else None, **options}
    numbers = range(len(levels)) if chosen is None else chosen
    axes = [each for group in names[min(numbers, default=0) :] for each in group]

    def mean_of(
        shards: tuple[str, ...],
        replicas: tuple[str, ...],
        root: Array,
        along: tuple[int, ...] | None = None,
        part: int | None = None,
    ) -> Transformation:
        """All chosen levels, for gradients of shards over some axes that are equal over others.

        along: the dimensions of leaves that are cut over the workers themselves. part: that of `by_path`.
        """
        if along is not None:
            if options.get("bucket_bytes") is not None:
                raise ValueError(
                    f"{name}: bucket_bytes does not go with parameters that are cut over the workers themselves"
                )
            if len(levels) > 1:
                raise ValueError(f"{name}: parameters that are cut over the workers of a hierarchy are not supported")
            ((axis, algorithm),) = levels.items()
            algorithm = require_algorithm(name, algorithm if part is None else algorithm.parts[part])
            return scattered_mean(name, algorithm, Placement(axis, (), shards, replicas, True), along, root, options)
        each = enumerate(by_level(levels, root, partial, shards, replicas))
        parts = [_mean(name, *level, via, options) for i, level in each if i in numbers]
        return parts[0] if len(parts) == 1 else optax.chain(*parts)

    if is_names(sharded):
        return mean_of(axis_names(sharded), (), root)
    return _by_shards(sharded, mean_of, axes, root, list(levels.values())[-1])


def by_level(
    levels: Mapping[Any, Any], root: Array, partial: bool, shards: tuple[str, ...] = (), replicas: tuple[str, ...] = ()
) -> Iterator[tuple[Any, Placement, Array]]:
    """Yields the algorithm of each level of a hierarchy, where its workers are, and its key."""
    names = [axis_names(axis) for axis in levels]
    for i, (axis, algorithm) in enumerate(levels.items()):
        earlier = tuple(name for group in names[:i] for name in group)
        placement = Placement(axis, tuple(names[i + 1 :]), shards, earlier + replicas, partial)
        yield algorithm, placement, jax.random.fold_in(root, i) if len(levels) > 1 else root


def levels_of(algorithm: Any, axis_name: Any, weights: Any, name: str = "compressed_mean") -> dict[Any, Any]:
    """Axis -> algorithm, in the order of the exchanges."""
    if axis_name is MISSING:
        raise TypeError(
            f'{name}: axis_name must be given: the mapped axis of the workers, say "data"; None is for a single worker '
            "without an axis"
        )
    if isinstance(axis_name, (Algorithm, Compressor)):
        raise TypeError(f"{name}: give algorithm before axis_name; got {axis_name!r} for axis_name")
    for axis in axis_name if isinstance(axis_name, Mapping) else (axis_name,):
        if not is_names(axis):
            raise TypeError(
                f"{name}: axis_name must be the name of a mapped axis, a tuple of names, a mapping from these to "
                f"algorithms, or None; got {axis!r}"
            )
    if not isinstance(axis_name, Mapping):
        return {axis_name: algorithm}
    if algorithm is not None:
        raise ValueError(f"{name}: give an algorithm, or a mapping from axes to algorithms; got both")
    if weights is not None:
        raise ValueError(f"{name}: weights are of the workers of one axis; a hierarchy takes none")
    return dict(axis_name)


def _mean(
    name: str, algorithm: Any, placement: Placement, root: Array, via: str | Route, options: dict[str, Any]
) -> Transformation:
    """`compressed_mean` over the workers of one placement."""
    run = exchange_of(name, require_algorithm(name, algorithm), placement, via, root, **options)

    def update(grads, state, params=None, **extra):
        del params, extra
        check_gradients(grads, placement)

        def grads_of(groups):
            with jax.named_scope("jc_layout"):
                return split(groups, grads, pieces=run.algorithm.pieces)

        direction, after = run.step(state, grads_of, jax.tree.leaves(grads))
        with jax.named_scope("jc_layout"):
            return join(after.about.groups, direction, grads), after

    return Transformation(run.init, update)  # pyright: ignore[reportArgumentType]


def _by_shards(
    specs: Any, mean_of: Callable[..., Transformation], axes: list[str], root: Array, algorithm: Any
) -> Transformation:
    """A mean for each group of leaves that are sharded over the same axes.

    Leaves that are whole on several devices stay bitwise equal there: they have one message, of which each device
    carries a part. Leaves that are cut over the workers themselves are apart for each part of `by_path`, too.
    """
    masked = lambda node: isinstance(node, optax.MaskedNode)
    leaves, structure = jax.tree.flatten(specs, is_leaf=masked)
    if not all(isinstance(leaf, PartitionSpec) or masked(leaf) for leaf in leaves):
        raise ValueError(f"compressed_mean: sharded must be axis names or a tree of PartitionSpecs; got {specs!r}")
    leaves = [PartitionSpec() if masked(leaf) else leaf for leaf in leaves]
    cut = list(map(axes_in, leaves))
    everything = sorted({name for each in cut for name in each})
    dimensions = [cut_dimension("compressed_mean", spec, tuple(axes)) for spec in leaves]
    part_of: list[int | None] = [None] * len(cut)
    if isinstance(algorithm, Algorithm) and algorithm.parts:
        patterns = [pattern for pattern, _ in algorithm.layout.parts]
        found = numbers_by_path("by_path", patterns, jax.tree.unflatten(structure, range(len(cut))))
        for part, members in enumerate(found):
            for i in members:
                if dimensions[i] is not None:
                    part_of[i] = part
    places = list(zip(cut, part_of, strict=True))
    groups = sorted(set(places), key=lambda place: (place[0], -1 if place[1] is None else place[1]))
    numbers = [tuple(i for i, each in enumerate(places) if each == group) for group in groups]

    def means_of(there: frozenset[int]) -> list[Transformation]:
        """The mean of each group, of whose leaves these are there."""
        means = []
        for i, (names, part) in enumerate(groups):
            along = tuple(dimensions[j] for j in numbers[i] if j in there and dimensions[j] is not None)
            shards = tuple(name for name in names if name not in axes)
            replicas = tuple(name for name in everything if name not in (*names, *axes))
            means.append(mean_of(shards, replicas, jax.random.fold_in(root, i), along or None, part))
        return means

    cached = functools.cache(means_of)
    means_of(frozenset(range(len(cut))))  # says what does not fit while it is built

    def parted(tree):
        """The tree once for each group, with `optax.MaskedNode` in place of what is not of it."""
        leaves, here = jax.tree.flatten(tree, masked)
        if not same_leaves(tree, jax.tree.unflatten(structure, range(len(cut)))):
            raise ValueError(f"compressed_mean: gradients have the structure {here}, sharded= has {structure}")
        only = lambda members: [x if i in members else optax.MaskedNode() for i, x in enumerate(leaves)]
        return [jax.tree.unflatten(here, only(set(members))) for members in numbers]

    def means_for(tree):
        nodes = jax.tree.leaves(tree, is_leaf=masked)
        there = frozenset(i for i, node in enumerate(nodes) if not masked(node))
        if isinstance(root, Tracer):
            return means_of(there)
        with constants():  # keys, wherever a tree is seen first
            return cached(there)

    def init(params):
        like_of(params)
        each = zip(means_for(params), parted(params), strict=True)
        with without_dense_warning():  # of a part, whose leaves may all be small beside the others
            states = tuple(mean.init(part) if jax.tree.leaves(part) else () for mean, part in each)
        warn_if_dense("compressed_mean", *(mean.about.groups for mean in means_in(states)))
        return states

    def update(grads, state, params=None, **extra):
        del params, extra
        for axis in axes:
            check_own(grads, axis)
        leaves, here = jax.tree.flatten(grads, masked)
        after = []
        for mean, part, members, old in zip(means_for(grads), parted(grads), numbers, state, strict=True):
            direction, new = mean.update(part, old) if jax.tree.leaves(part) else (part, old)
            after.append(new)
            given = jax.tree.leaves(direction, is_leaf=masked)
            for i in members:
                leaves[i] = given[i]
        return jax.tree.unflatten(here, leaves), tuple(after)

    return Transformation(init, update)  # pyright: ignore[reportArgumentType]
