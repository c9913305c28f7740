"""The collectives: everything in jaxcomp that names a `lax` collective is here.

Arrays of a payload are joined into one lane per width or fewer before they cross, as plain unsigned words:
fewer launches, and no backend widens a narrow float on the way (on CPU both `psum` and
`all_gather` of bf16 are compiled to f32).
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from jaxcomp.base import weighted
from jaxcomp.exchange.turns import turns
from jaxcomp.packing import as_words

__all__ = [
    "Axis",
    "all_gather",
    "all_max",
    "all_sum",
    "all_sum_words",
    "all_to_all",
    "axis_index",
    "axis_names",
    "axis_size",
    "has_ragged",
    "is_bound",
    "known_equal",
    "proven_equal",
    "ragged_all_to_all",
    "send",
    "sent_by_gather",
    "sent_by_sum",
    "sum_scatter",
    "types_tell",
    "unknown_axes",
    "varying",
    "varying_axes",
]

Array = jax.Array
Axis = str | tuple[str, ...] | None


def axis_names(axis: Axis) -> tuple[str, ...]:
    """The names of an axis: none for None, one for a string."""
    return () if axis is None else (axis,) if isinstance(axis, str) else tuple(axis)


def is_bound(axis: Axis) -> bool:
    """Whether we are inside a `shard_map`, `pmap` or `vmap` that names the axis."""
    try:
        axis_size(axis)
    except NameError:
        return False
    return True


def axis_size(axis: Axis) -> int:
    """Number of workers; 1 without an axis."""
    return 1 if axis is None else lax.axis_size(axis)


def axis_index(axis: Axis) -> Array:
    """This worker's number."""
    return jnp.zeros((), jnp.int32) if axis is None else lax.axis_index(axis)


def varying(tree: Any, axis: Axis) -> Any:
    """Marks arrays as differing between workers, where `shard_map` keeps track of that."""
    manual = set(getattr(jax.sharding.get_abstract_mesh(), "manual_axes", ()))

    def mark(x):
        x = jnp.asarray(x)
        missing = tuple(name for name in axis_names(axis) if name in manual and name not in _varying_axes(x))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(mark, tree)


def types_tell(axis: Axis) -> bool:
    """Whether types say what is equal on all workers: inside `shard_map` with its default check_vma=True."""
    names = set(axis_names(axis))
    return bool(names) and names <= _varying_axes(varying(jnp.zeros(()), axis))


def known_equal(tree: Any, axis: Axis) -> list[str]:
    """Paths of the arrays whose types say that they are equal on all workers."""
    names = set(axis_names(axis))
    if not types_tell(axis):
        return []
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [jax.tree_util.keystr(path) for path, x in leaves if not names & _varying_axes(jnp.asarray(x))]


def unknown_axes(tree: Any, axis: Axis, named: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Mesh axes, other than the named ones, over which arrays differ; and over which the compiler may have cut them.

    Both are empty outside of a `shard_map` over `axis`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    manual = tuple(getattr(mesh, "manual_axes", ()))
    if not axis_names(axis) or not set(axis_names(axis)) <= set(manual):
        return [], []
    leaves = [jnp.asarray(x) for x in jax.tree.leaves(tree)]
    differ = {name for x in leaves for name in _varying_axes(x)} - set(named)
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    open_ = [name for name in mesh.axis_names if name not in manual and mesh.shape[name] > 1]
    specs = [str(jax.typeof(x).sharding.spec) for x in leaves]
    cut = lambda name: kinds[name] == jax.sharding.AxisType.Auto or any(f"'{name}'" in spec for spec in specs)
    return sorted(differ), [name for name in open_ if cut(name)]


def varying_axes(tree: Any) -> tuple[str, ...]:
    """All mesh axes along which some array differs, as far as types tell."""
    return tuple(sorted({name for x in jax.tree.leaves(tree) for name in _varying_axes(jnp.asarray(x))}))


def _varying_axes(x: Array) -> frozenset:
    return jax.typeof(x).manual_axis_type.varying


def _gather(x: Array, axis: Axis) -> Array:
    """[n, *x.shape], typed as equal on all workers where the tracing context knows such a type.

    Under `shard_map(check_vma=True)` only the form `to="invarying"` yields a value that the out
    spec P() accepts; under vmap and pmap that form is refused, and the plain one is typed so.
    """
    size = x.shape[-1]
    if _platform() == "tpu" and size % TPU_LANES:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -size % TPU_LANES)])
    if set(axis_names(axis)) <= _varying_axes(x):
        return lax.all_gather(x, axis, to="invarying")[..., :size]
    return lax.all_gather(x, axis)[..., :size]


# XLA for TPU compiles a gather of anything else to an all-reduce of all n parts, at twice the bytes (libtpu 0.0.50).
TPU_LANES = 128


def _platform() -> str:
    """Of the mesh that we are compiled for, where it says so; else of the default backend."""
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    return getattr(device, "platform", None) or jax.default_backend()


_proven_equal = Primitive("proven_equal")
_proven_equal.def_impl(lambda x, **_: x)
mlir.register_lowering(_proven_equal, lambda context, x, **_: [x])


@_proven_equal.def_abstract_eval
def _(x, *, names):
    kind = x.manual_axis_type
    return x.update(manual_axis_type=type(kind)(varying=kind.varying - frozenset(names)))


def _batched_proven_equal(axis_data, args, dims, *, names):
    (x,), (dim,) = args, dims
    if dim is None or axis_data.name not in names:
        return _proven_equal.bind(x, names=names), dim
    # All rows are equal: any of them is the value without the axis.
    return lax.index_in_dim(x, 0, dim, keepdims=False), None


batching.fancy_primitive_batchers[_proven_equal] = _batched_proven_equal


def proven_equal(tree: Any, axis: Axis) -> Any:
    """Retypes arrays as equal on all workers, where the exchange that made them proves it.

    What arrived by point-to-point messages is typed as varying, although every worker ends with the same
    rows. This tells `shard_map(check_vma=True)` and `vmap(out_axes=None)` so; no data moves.
    """
    names = axis_names(axis)
    return jax.tree.map(lambda x: _proven_equal.bind(x, names=names), tree) if names else tree


def send(x: Array, pairs: Sequence[tuple[int, int]], axis: Axis) -> Array:
    """x of worker a at worker b for each listed pair (a, b), zeros elsewhere. Only listed pairs cost bytes.

    Under vmap, where nothing is sent, only whole permutations are allowed: the pairs are completed
    to one, and what was not asked for is dropped.
    """
    if set(axis_names(axis)) <= set(getattr(jax.sharding.get_abstract_mesh(), "manual_axes", ())):
        return lax.ppermute(x, axis, pairs)
    workers = range(axis_size(axis))
    targets = dict(pairs)
    free = sorted(set(workers) - set(targets.values()))
    asked = jnp.asarray([worker not in free for worker in workers])[axis_index(axis)]
    whole = [(worker, targets[worker] if worker in targets else free.pop()) for worker in workers]
    arrived = lax.ppermute(x, axis, whole)
    return jnp.where(asked, arrived, jnp.zeros_like(arrived))


def all_max(x: Array, axis: Axis) -> Array:
    """The largest over the workers, equal on all of them."""
    return x if axis is None else lax.pmax(varying(x, axis), axis)


def all_sum_words(words: Array, axis: Axis) -> Array:
    """Sum of uint32 words over the workers: of bits, where only one worker has any at each place."""
    return lax.psum(words, axis)


def has_ragged() -> bool:
    """Whether the backend compiles `ragged_all_to_all` (XLA's CPU backend does not)."""
    return jax.default_backend() in ("gpu", "tpu")


def ragged_all_to_all(words: Array, counts: Sequence[int], axis: Axis) -> Array:
    """The first counts[i] words of every worker i, one after the other: u32[sum(counts)] on all."""
    n, number = len(counts), axis_index(axis)
    sizes = jnp.asarray(counts, jnp.int32)
    starts = jnp.cumsum(sizes) - sizes
    return lax.ragged_all_to_all(
        words,
        varying(jnp.zeros((sum(counts),), words.dtype), axis),
        varying(jnp.zeros((n,), jnp.int32), axis),
        jnp.full((n,), sizes[number]),
        jnp.full((n,), starts[number]),  # where my words belong, at every receiver
        varying(sizes, axis),
        axis_name=axis,
    )


def all_to_all(tree: Any, axis: Axis) -> Any:
    """Row j of every array goes to worker j: [n, ...] by destination becomes [n, ...] by origin.

    Collectives as in `all_gather`. Each worker sends (n - 1) / n of the bytes of its arrays.
    """
    if axis is None:
        return tree
    leaves, structure = jax.tree.flatten(varying(tree, axis))
    workers = axis_size(axis)
    arrived: list[Any] = [None] * len(leaves)
    for group in _by_width(leaves, [0] * len(leaves)):
        parts = [words.reshape(workers, -1) for words in _in_words([leaves[i] for i in group])]
        lane = jnp.concatenate(parts, axis=1)
        if lane.size:
            # Under vmap, what is equal on all workers would come out with a wrong shape: make it differ by type.
            lane = lane ^ (axis_index(axis) * 0).astype(lane.dtype)
            lane = _all_to_all(lane, axis)
        start = 0
        for i, part in zip(group, parts, strict=True):
            words = lane[:, start : start + part.shape[1]]
            arrived[i] = _from_words(words, leaves[i].dtype).reshape(leaves[i].shape)
            start += part.shape[1]
    return jax.tree.unflatten(structure, arrived)


def _all_to_all(lane: Array, axis: Axis) -> Array:
    if jax.default_backend() == "cpu" and jax.process_count() > 1:
        return _all_to_all_in_turns(lane, axis)
    return lax.all_to_all(lane, axis, split_axis=0, concat_axis=0, tiled=True)


def _all_to_all_in_turns(lane: Array, axis: Axis) -> Array:
    """The all-to-all of rows [n, m] by permutations (see `turns`), for the same bytes."""
    workers, number = axis_size(axis), axis_index(axis)
    plan, parts = turns(workers)
    size = lane.shape[1]
    pieces = jnp.pad(lane, ((0, 0), (0, -size % parts))).reshape(workers, parts, -1)
    arrived = [pieces[number, part] for part in range(parts)]
    places = [[[part if j == i else 0 for part in range(parts)] for j in range(workers)] for i in range(workers)]
    for place, turn in enumerate(plan, start=parts):
        piece = pieces[jnp.asarray(turn.targets)[number], jnp.asarray(turn.parts)[number]]
        # A turn begins when the one before is over: the number of a worker is never negative, which XLA cannot know.
        piece = piece ^ (arrived[-1][:1] & (number >> 31).astype(piece.dtype))
        arrived.append(lax.ppermute(piece, axis, list(enumerate(turn.targets))))
        for origin, (target, part) in enumerate(zip(*turn, strict=True)):
            places[target][origin][part] = place
    return jnp.stack(arrived)[jnp.asarray(places)[number]].reshape(workers, -1)[:, :size]


def sum_scatter(x: Array, axis: Axis) -> Array:
    """sum over the workers of row j of each one's x [n, ...], at worker j; added in the dtype of x."""
    return x[0] if axis is None else lax.psum_scatter(varying(x, axis), axis, scatter_dimension=0)


def all_gather(tree: Any, axis: Axis, inner: tuple[str, ...] = (), buckets: Sequence[int] | None = None) -> Any:
    """Every worker's arrays, stacked on a leading axis of n, in the order of the axis index.

    One collective per bucket and width (8, 16, 32, 64 bits), but few wide entries go along with the narrow ones. Each
    worker contributes exactly the bytes of its arrays; each of the devices on `inner` one part of them.

    Args:
        tree: this worker's arrays.
        axis: mapped axis, or None.
        inner: mapped axes on which the arrays are equal: each device there sends its part, and then they tell
            each other what arrived.
        buckets: number of the bucket of each array; None for a single bucket.
    """
    if axis is None:
        return jax.tree.map(lambda a: a[None], tree)
    leaves, structure = jax.tree.flatten(varying(tree, axis))
    numbers = [0] * len(leaves) if buckets is None else list(buckets)
    gathered: list[Any] = [None] * len(leaves)
    before: Any = None
    for group in _in_turn(_by_width(leaves, numbers), numbers):
        parts = [words.reshape(-1) for words in _in_words([leaves[i] for i in group])]
        lane = jnp.concatenate(parts) if len(parts) > 1 else parts[0]
        if lane.size == 0:
            rows = jnp.zeros((axis_size(axis), 0), lane.dtype)
        else:
            lane = lane if buckets is None else _after(lane, before)
            before = rows = _shared_out(lane, inner, lambda part: _gather(part, axis))
        start = 0
        for i, part in zip(group, parts, strict=True):
            words = _from_words(rows[:, start : start + part.size], leaves[i].dtype)
            gathered[i] = words.reshape(rows.shape[:1] + leaves[i].shape)
            start += part.size
    return jax.tree.unflatten(structure, gathered)


def sent_by_gather(tree: Any, axis: Axis, inner: tuple[str, ...] = (), buckets: Sequence[int] | None = None) -> float:
    """Bytes that a device sends in `all_gather`: (n - 1) times its part, and p - 1 times the n parts that arrived."""
    leaves, workers, devices = jax.tree.leaves(tree), axis_size(axis), axis_size(inner or None)
    sent = 0
    for group in _by_width(leaves, [0] * len(leaves) if buckets is None else buckets):
        width = min(leaves[i].dtype.itemsize for i in group)
        words = sum(leaves[i].nbytes for i in group) // width
        sent += -(-words // devices) * width * ((workers - 1) + (devices - 1) * workers)
    return float(sent)


def _shared_out(lane: Array, inner: tuple[str, ...], exchange: Callable[[Array], Array]) -> Array:
    """exchange(lane), [m] -> [..., m], where each device on `inner` does one part of the lane."""
    devices = axis_size(inner) if inner else 1
    if devices == 1:
        return exchange(lane)
    size = -(-lane.size // devices)
    padded = jnp.pad(lane, (0, size * devices - lane.size))
    start = axis_index(inner).astype(jnp.int32) * size
    parts = _gather(exchange(lax.dynamic_slice_in_dim(padded, start, size)), inner)
    whole = jnp.moveaxis(parts, 0, -2)
    return whole.reshape(*whole.shape[:-2], size * devices)[..., : lane.size]


def all_sum(
    tree: Any,
    axis: Axis,
    weights: Array | None = None,
    inner: tuple[str, ...] = (),
    buckets: Sequence[int] | None = None,
    exact: bool = False,
) -> Any:
    """sum_j weights_j x_j over the workers of each float array, equal on all of them.

    f32 and f64 use one all-reduce. Narrow floats (16 bits) would be added in their own precision,
    or be widened on the wire, depending on the backend; they are summed in two steps instead:
    every worker gets one n-th of the entries from all (all-to-all), adds them in f32, rounds
    once, and sends its part to all (all-gather). The same bytes as an all-reduce of 16 bits. What is
    rounded is the mean, so it cannot overflow; the sum comes out in f32. Who remembers what it sent must not lose that
    rounding: with `exact` the second step brings the mean in f32, so 1.5 times the bytes.

    Args:
        tree: this worker's arrays.
        axis: mapped axis, or None.
        weights: [n], of all workers, with sum one; None for all ones.
        inner, buckets: as for `all_gather`.
        exact: nothing is rounded to less than f32.
    """
    if axis is None:
        return tree if weights is None else jax.tree.map(lambda a: weighted(a, weights[0]), tree)
    leaves, structure = jax.tree.flatten(varying(tree, axis))
    numbers = [0] * len(leaves) if buckets is None else list(buckets)
    mine = None if weights is None else weights[axis_index(axis)]
    summed: list[Any] = [None] * len(leaves)
    before: Any = None
    for group in _in_turn(_groups(range(len(leaves)), key=lambda i: (numbers[i], leaves[i].dtype)), numbers):
        parts = [leaves[i] for i in group]
        parts = parts if buckets is None else _after(parts, before)
        wide = parts[0].dtype.itemsize >= 4
        if sum(part.size for part in parts) == 0:
            totals = [jnp.zeros(part.shape, part.dtype) for part in parts]
        elif wide and not inner:
            totals = lax.psum([weighted(part, mine) for part in parts], axis)
        else:
            lane = jnp.concatenate([part.reshape(-1) for part in parts]) if len(parts) > 1 else parts[0].reshape(-1)
            add = lambda part: (
                lax.psum(weighted(part, mine), axis) if wide else _two_step_sum(part, axis, weights, exact)  # noqa: B023
            )
            total, totals = _shared_out(lane, inner, add), []
            for part in parts:
                totals.append(total[: part.size].reshape(part.shape))
                total = total[part.size :]
        before = totals
        for i, total in zip(group, totals, strict=True):
            summed[i] = total
    return jax.tree.unflatten(structure, summed)


def sent_by_sum(
    tree: Any, axis: Axis, inner: tuple[str, ...] = (), buckets: Sequence[int] | None = None, exact: bool = False
) -> float:
    """Bytes that a device sends in `all_sum`: (n - 1) / n of its part twice, and p - 1 times the sum of it.

    Narrow floats come out of their sum in f32, and so they travel on inner axes.
    """
    leaves, workers, devices = jax.tree.leaves(tree), axis_size(axis), axis_size(inner or None)
    numbers = [0] * len(leaves) if buckets is None else buckets
    sent = 0.0
    for group in _groups(range(len(leaves)), key=lambda i: (numbers[i], leaves[i].dtype)):
        width = leaves[group[0]].dtype.itemsize
        part = -(-sum(leaves[i].size for i in group) // devices)
        cut = part if width >= 4 else -(-part // workers) * workers
        back = 4 if exact and width < 4 else width
        sent += (workers - 1) / workers * cut * (width + back) + (devices - 1) * part * max(width, 4)
    return sent


def _two_step_sum(lane: Array, axis: Axis, weights: Array | None, exact: bool) -> Array:
    workers = axis_size(axis)
    size = lane.size
    lane = jnp.pad(lane, (0, -size % workers))
    chunks = as_words(lane).reshape(workers, -1)
    chunks = _all_to_all(chunks, axis)
    rows = lax.bitcast_convert_type(chunks, lane.dtype).astype(jnp.float32)
    mean = jnp.sum(rows, axis=0) / workers if weights is None else weights.astype(jnp.float32) @ rows
    mean = mean if exact else mean.astype(lane.dtype)
    whole = _gather(as_words(mean), axis).reshape(-1)
    mean = lax.bitcast_convert_type(whole, mean.dtype)[:size].astype(jnp.float32)
    return mean * workers if weights is None else mean


def _in_turn(groups: list[list[int]], numbers: Sequence[int]) -> list[list[int]]:
    """Groups in the order of their buckets; number 0, of small leaves from everywhere, is the last to be ready."""
    return sorted(groups, key=lambda group: (numbers[group[0]] == 0, numbers[group[0]]))


def _after(x: Any, before: Any) -> Any:
    """x, once `before` is there: XLA would else combine the collectives of all buckets into one, which waits for all.

    They share a link, so that taking turns costs nothing.
    """
    return x if before is None else lax.optimization_barrier((x, before))[0]


# At most so many bytes of wide entries are split into the words of a narrow lane, to save another collective.
FEW_BYTES = 2**16


def _by_width(leaves: Sequence[Array], numbers: Sequence[int]) -> list[list[int]]:
    """Places of the leaves that share a lane: of one bucket and width, or few beside narrower ones."""
    whole: list[list[int]] = []
    for places in _groups(range(len(leaves)), key=lambda i: numbers[i]):
        widths = _groups(places, key=lambda i: leaves[i].dtype.itemsize)
        first, *wider = sorted(widths, key=lambda group: leaves[group[0]].dtype.itemsize)
        few = [group for group in wider if sum(leaves[i].nbytes for i in group) <= FEW_BYTES]
        whole += [first + [i for group in few for i in group], *(group for group in wider if group not in few)]
    return whole


def _in_words(leaves: Sequence[Array]) -> list[Array]:
    """Their bits as words of the narrowest of them."""
    kind = as_words(min(leaves, key=lambda leaf: leaf.dtype.itemsize)).dtype
    return [lax.bitcast_convert_type(leaf, kind) for leaf in leaves]


def _from_words(words: Array, dtype: Any) -> Array:
    """[n, m] words as [n, m / ratio] entries."""
    ratio = jnp.dtype(dtype).itemsize // words.dtype.itemsize
    words = words.reshape(len(words), words.shape[1] // ratio, ratio) if ratio > 1 else words
    return lax.bitcast_convert_type(words, dtype)


def _groups(items: Iterable[int], key: Callable[[int], Any]) -> list[list[int]]:
    groups: dict[Any, list[int]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())
