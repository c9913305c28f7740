"""What a plan needs to know of a machine, measured: links, encoding and decoding, gradients, overlap.

All processes run the same programs at the same time, so that workers which share cores slow each other down here as
they will in training. A time is the median over rounds of the slowest process.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcomp.base import like_of
from jaxcomp.exchange.varying import axis_names
from jaxcomp.layout import DEFAULT, join, plan_of, split
from jaxcomp.plan.candidates import Candidate, plan_for
from jaxcomp.plan.clock import Clock
from jaxcomp.plan.links import Fit, Sample, check_kind, fit
from jaxcomp.plan.offline import Inseparable, evaluate, offline
from jaxcomp.plan.predict import overlap_of

__all__ = ["Encoding", "encoding_at", "largest", "links_of", "local_rows", "overlap_on", "sweep", "tree_seconds"]

Array = jax.Array
LEAST_BYTES = 256  # of an operand in a sweep
STEP = 8  # from one size to the next
MOST_BYTES = 2**26


# ------------------------------------------------------------------------------------------------
# Links


def _program(kind: str, axis: Any, workers: int) -> Callable[[Array], Array]:
    """A collective of an array of words whose length is a multiple of n; what it returns has one row at each worker."""
    ring = [(i, (i + 1) % workers) for i in range(workers)]
    rows = lambda x: x.reshape(workers, -1)
    return {
        "all_reduce": lambda x: lax.psum(x, axis),
        "all_gather": lambda x: lax.all_gather(x, axis, tiled=True),
        "all_to_all": lambda x: lax.all_to_all(rows(x), axis, 0, 0, tiled=True),
        "reduce_scatter": lambda x: lax.psum_scatter(rows(x), axis, scatter_dimension=0),
        "permute": lambda x: lax.ppermute(x, axis, ring),
    }[kind]


def local_rows(clock: Clock, rows: Callable[[], np.ndarray]) -> Array:
    """An array with a leading axis of devices, each row at its device."""
    one = rows()
    shape = (clock.mesh.devices.size, *one.shape)
    return jax.make_array_from_callback(shape, clock.rows, lambda index: one[None])


def _mapped(clock: Clock, one: Callable) -> Callable:
    """A function of one device's arrays as a compiled one of rows; results are rows, too."""

    def body(*args):
        out = one(*jax.tree.map(lambda x: x[0], args))
        return jax.tree.map(lambda x: jnp.asarray(x)[None], out)

    rows = P(tuple(clock.mesh.axis_names))
    return jax.jit(jax.shard_map(body, mesh=clock.mesh, in_specs=rows, out_specs=rows, check_vma=False))


def _sweeper(clock: Clock, kind: str, axis: Any, workers: int, words: int) -> tuple[Callable, Array]:
    x = local_rows(clock, lambda: np.ones(words, np.float32))
    return _mapped(clock, _program(kind, axis, workers)), x


def sweep(clock: Clock, kind: str, axis: Any, most_bytes: float, seconds: float) -> Fit:
    """Latency and bandwidth of one collective on one axis.

    Args:
        clock: of the mesh.
        kind: one of `links.KINDS`.
        axis: its name, or a tuple of names.
        most_bytes: the largest operand that candidates need; sizes go down from it by factors of 8.
        seconds: larger sizes are left out once they would take longer.
    """
    check_kind("sweep", kind)
    workers = int(np.prod([clock.mesh.shape[name] for name in axis_names(axis)]))
    most = int(np.clip(most_bytes, STEP**2 * LEAST_BYTES, MOST_BYTES))
    sizes = [LEAST_BYTES, *sorted({most // STEP**i for i in range(4)} - {LEAST_BYTES})]
    samples: list[Sample] = []
    for size in sizes:
        words = max(size // 4 // workers, 1) * workers
        if len(samples) > 1 and samples[-1].seconds * words * 4 / samples[-1].operand_bytes * 3 > seconds:
            break
        key = ("sweep", kind, axis, words)
        run, x = clock.keep(key, lambda words=words: _sweeper(clock, kind, axis, workers, words))
        middle, error = clock.median(lambda run=run, x=x: run(x), 9, seconds / 4)
        samples.append(Sample(workers, float(4 * words), middle, error))
    return fit(kind, samples)


def links_of(
    clock: Clock, wanted: Mapping[tuple[str, str], float], seconds: float, show: Callable[[str], None]
) -> dict[str, dict[str, Fit]]:
    """A fit for each axis and kind; wanted: (axis, kind) -> bytes of the largest operand."""
    found: dict[str, dict[str, Fit]] = {}
    for (axis, kind), most in sorted(wanted.items()):
        show(f"{kind} over {axis}")
        found.setdefault(axis, {})[kind] = sweep(clock, kind, tuple(axis.split(",")), most, seconds / len(wanted))
    return found


# ------------------------------------------------------------------------------------------------
# Encoding and decoding


class Encoding(NamedTuple):
    """Of one candidate at one size. encode: seconds to compress; all: with decoding n messages and the memory; error:
    |C(x) - x|^2 / |x|^2 of this message, None where there is no compressor."""

    entries: int
    encode: float
    all: float
    error: float | None


def encoding_at(
    clock: Clock, candidate: Candidate, axis: Any, gradient: np.ndarray, seconds: float, apart: bool = True
) -> Encoding:
    """Measures the work of one exchange without its network, on a gradient of one array.

    Args:
        clock, axis: where.
        candidate: whose collectives are replaced by what they would bring (`offline`).
        gradient: f32[d] of this process.
        seconds: most time for the rounds.
        apart: whether compressing is measured apart, and what a message loses.
    """
    key = ("encoding", candidate.name, axis, gradient.size)
    encode = error = None
    if apart:
        compress, lost = clock.keep((*key, "compress"), lambda: _compressing(clock, candidate, axis, gradient))
        error = lost
        encode = 0.0 if compress is None else clock.median(compress, 5, seconds / 3)[0]
    run = clock.keep((*key, "all"), lambda: _working(clock, candidate, axis, gradient))
    whole = clock.median(run, 7, seconds / 2)[0] if run is not None else encode or 0.0
    return Encoding(gradient.size, min(whole if encode is None else encode, whole), whole, error)


def _working(clock: Clock, candidate: Candidate, axis: Any, gradient: np.ndarray) -> Callable[[], Any] | None:
    """A round without its network, to be timed; None where it cannot be had."""
    tx = candidate.transformation(axis)
    sizes = {name: int(clock.mesh.shape[name]) for name in clock.mesh.axis_names}
    mine = _state_of_first(tx, gradient, sizes)
    try:
        program, received = offline(lambda s, g: tx.update(g, s), sizes, mine, gradient)
    except Inseparable:
        return None
    rows = [local_rows(clock, lambda x=x: np.asarray(x)) for x in jax.tree.leaves((received, mine, gradient))]
    structure = jax.tree.structure((received, mine, gradient))

    def one(number, *leaves):
        received, state, gradient = jax.tree.unflatten(structure, leaves)
        return jax.tree.leaves(program(number, received, state, gradient))

    number = local_rows(clock, lambda: np.asarray(0, np.int32))
    run = _mapped(clock, one)
    return lambda: run(number, *rows)


def _state_of_first(tx: Any, gradient: np.ndarray, sizes: dict[str, int]) -> Any:
    """The state of the first worker, as `tx.init` makes it where the axes are bound."""
    traced, like = jax.make_jaxpr(tx.init, axis_env=list(sizes.items()), return_shape=True)(gradient)

    def refuse(*_):
        raise Inseparable("a collective within init")

    first = lambda gradient: evaluate(traced.jaxpr, traced.consts, [gradient], jnp.zeros((), jnp.int32), refuse)
    leaves = [np.asarray(x) for x in jax.jit(first)(gradient)]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _compressing(
    clock: Clock, candidate: Candidate, axis: Any, gradient: np.ndarray
) -> tuple[Callable[[], Any] | None, float | None]:
    """Compressing, to be timed, and the relative squared error; None where there is no compressor."""
    workers = int(np.prod([clock.mesh.shape[name] for name in axis_names(axis)]))
    plan = plan_for(candidate, gradient, workers)
    compressor = getattr(candidate.algorithm, "compressor", None)
    if plan is None or compressor is None:
        return None, None

    def compress(x):
        parts = split(plan, x)
        state = compressor.init(jax.random.key(0), like_of(parts))
        payload, _ = compressor.compress(jax.random.key(1), parts, state)
        return parts, payload, state.shared

    def error(x):
        parts, payload, shared = compress(x)
        back = compressor.decompress(payload, shared, like_of(parts))
        square = lambda tree: sum(jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree))
        return square(jax.tree.map(lambda a, b: a - b, parts, back)) / jnp.maximum(square(parts), 1e-30)

    x = local_rows(clock, lambda: gradient)
    run = _mapped(clock, lambda x: jax.tree.leaves(compress(x)[1]))
    lost = clock.agreed(np.asarray(_mapped(clock, error)(x).addressable_data(0)))[0]
    return lambda: run(x), float(lost)


def tree_seconds(clock: Clock, params: Any, seconds: float) -> float:
    """Seconds to lay a tree out as vectors and back, as every candidate has to."""
    plan = plan_of(DEFAULT, like_of(params))
    if len(jax.tree.leaves(params)) < 2:
        return 0.0
    run = clock.keep(("tree", plan), lambda: _laying_out(clock, params, plan))
    return clock.median(run, 5, seconds)[0]


def _laying_out(clock: Clock, params: Any, plan: Any) -> Callable[[], Any]:
    rows = [local_rows(clock, lambda x=x: np.zeros(x.shape, x.dtype)) for x in jax.tree.leaves(params)]
    structure = jax.tree.structure(params)

    def one(*leaves):
        parts = split(plan, jax.tree.unflatten(structure, leaves))
        return jax.tree.leaves(join(plan, lax.optimization_barrier(parts)))

    run = _mapped(clock, one)
    return lambda: run(*rows)


# ------------------------------------------------------------------------------------------------
# Overlap


def overlap_on(clock: Clock, axis: Any, seconds: float) -> float:
    """e of `predict`, for matrix products and an all-reduce that do not wait for each other."""
    workers = int(np.prod([clock.mesh.shape[name] for name in axis_names(axis)]))
    if workers < 2:
        return 0.0
    x = local_rows(clock, lambda: np.ones(2**18, np.float32))
    a = local_rows(clock, lambda: np.eye(128, dtype=np.float32))
    number = lambda n: jax.make_array_from_callback(
        (), NamedSharding(clock.mesh, P()), lambda index: np.asarray(n, np.int32)
    )
    compute = lambda n, a: lax.fori_loop(0, n, lambda i, b: b @ a, a)
    rows = P(tuple(clock.mesh.axis_names))

    def program(computes: bool, exchanges: bool):
        def body(n, a, x):
            first = compute(n, a[0])[None] if computes else a
            second = lax.psum(x, axis_names(axis)) if exchanges else x
            return first, second

        mapped = jax.shard_map(body, mesh=clock.mesh, in_specs=(P(), rows, rows), out_specs=rows, check_vma=False)
        return jax.jit(mapped)

    kept = lambda *which: clock.keep(("overlap", axis, which), lambda: program(*which))
    exchange, alone, together = kept(False, True), kept(True, False), kept(True, True)
    exchanging = clock.median(lambda: exchange(number(0), a, x), 7, seconds / 3)[0]
    trial = clock.median(lambda: alone(number(200), a, x), 3, seconds / 6)[0]
    loops = number(int(np.clip(200 * exchanging / max(trial, 1e-6), 10, 10**6)))
    computing = clock.median(lambda: alone(loops, a, x), 5, seconds / 4)[0]
    both = clock.median(lambda: together(loops, a, x), 7, seconds / 3)[0]
    return overlap_of(computing, exchanging, both)


def largest(collectives: Sequence[Any]) -> dict[tuple[str, str], float]:
    """(axis, kind) -> bytes of the largest operand."""
    found: dict[tuple[str, str], float] = {}
    for one in collectives:
        found[one.axis, one.kind] = max(found.get((one.axis, one.kind), 0.0), one.operand_bytes)
    return found
