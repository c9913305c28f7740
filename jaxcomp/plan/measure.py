"""Measures what a plan needs to know of a machine: links, encoding and decoding, overlap.

All processes run the same programs at the same time, so that workers which share cores slow each other down here as
they will in training. A time is the median over rounds of the slowest process, less what it takes to start a program: a
training step is a single one.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcomp.arrays import like_of
from jaxcomp.base import Round, keys_of
from jaxcomp.compressors.tree import each_of
from jaxcomp.exchange.axes import axis_names
from jaxcomp.groups import join, split
from jaxcomp.plan.candidates import Candidate, plan_for
from jaxcomp.plan.clock import Clock
from jaxcomp.plan.facts import Work
from jaxcomp.plan.links import Fit, Sample, check_kind, fit
from jaxcomp.plan.offline import Halves, Inseparable, evaluate, offline, settled
from jaxcomp.plan.predict import line_through, overlap_of

__all__ = ["largest", "links_of", "local_rows", "overlap_on", "sample_of", "sweep", "work_of"]

Array = jax.Array
LEAST_BYTES = 256  # of an operand in a sweep
STEP = 8  # from one size to the next
MOST_BYTES = 2**26
ROUNDS = 5  # of encoding and of decoding
LEAST_OVERLAP, MOST_OVERLAP = 2**10, 2**18  # words that are exchanged beside a computation
MOST_ENTRIES = 2**24  # of a gradient whose encoding is measured


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


def _mapped(clock: Clock, one: Callable) -> Any:
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
        samples.append(Sample(workers, float(4 * words), max(middle - clock.launch, middle / 10), error))
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


def sample_of(grads: Any, most: int = MOST_ENTRIES) -> Any:
    """The gradient of this process's first device; of a larger one an equal share of the longest axis of each leaf.

    >>> jax.tree.map(np.shape, sample_of({"w": np.ones((4, 30)), "b": np.ones(30)}, 100))
    {'b': (20,), 'w': (4, 20)}
    """
    whole = jax.tree.map(lambda x: np.asarray(x.addressable_data(0) if isinstance(x, jax.Array) else x), grads)
    share = most / max(sum(x.size for x in jax.tree.leaves(whole)), 1)

    def cut(x):
        if share >= 1 or not x.ndim:
            return x
        axis = int(np.argmax(x.shape))
        return np.ascontiguousarray(np.take(x, range(math.ceil(share * x.shape[axis])), axis))

    return jax.tree.map(cut, whole)


def work_of(clock: Clock, candidate: Candidate, axis: Any, grads: Any, seconds: float) -> Work:
    """The work of one exchange without its network, and what a message loses.

    Encoding is what needs nothing that is received; all else is decoding. Both follow the number of entries.

    Args:
        clock, axis: where.
        candidate: whose collectives are replaced by what they would bring (`offline`).
        grads: tree of numpy arrays, of this process.
        seconds: most time for the rounds.
    """
    entries = float(sum(x.size for x in jax.tree.leaves(grads)))
    make = lambda: _working(clock, candidate, axis, grads)
    first, second, error = clock.keep(("work", candidate.name, axis), make)
    alone = lambda run: max(clock.median(run, ROUNDS, seconds / 2)[0] - clock.launch, 0.0)
    times = [0.0 if run is None else alone(run) for run in (first, second)]
    return Work(line_through([(entries, times[0])]), line_through([(entries, sum(times))]), error)


def _working(clock: Clock, candidate: Candidate, axis: Any, grads: Any) -> tuple[Any, Any, float | None]:
    """The two halves of a round without its network, to be timed, or None; and its relative squared error."""
    tx = candidate.transformation(axis)
    sizes = {name: int(clock.mesh.shape[name]) for name in clock.mesh.axis_names}
    try:
        state = _state_of_first(tx, grads, sizes)
        halves = offline(lambda s, g: tx.update(g, s), sizes, state, grads)
    except Inseparable:
        return None, None, _lost(clock, candidate, axis, grads)
    place = lambda x: local_rows(clock, lambda: np.asarray(x))
    here = lambda tree: [np.asarray(x.addressable_data(0))[0] for x in tree]
    given = [place(x) for x in (np.int32(0), *jax.tree.leaves((state, grads)))]
    early, late = _compiled(clock, halves, given)
    kept = early(*given)
    send = lambda received: here(halves.outcome(kept, late([place(x) for x in received], kept))[0])
    received = settled(halves.arrivals, send, lambda changed: clock.agreed([changed])[0] > 0)
    brought = [place(x) for x in received]
    results = halves.outcome(kept, late(brought, kept))[1]
    if any(each.is_part for each in halves.arrivals):
        error = _lost(clock, candidate, axis, grads)
    else:
        count = len(jax.tree.leaves(grads))
        error = _difference(clock, here(results[:count]), jax.tree.leaves(grads))
    return lambda: early(*given), lambda: late(brought, kept), error


def _compiled(clock: Clock, halves: Halves, given: list[Any]) -> tuple[Callable, Callable]:
    """Compiles the two halves of a round at the same time, which is most of the time of measuring."""
    early, late = _mapped(clock, halves.early), _mapped(clock, halves.late)
    rows = lambda x, *axes: jax.ShapeDtypeStruct((*axes, *x.shape), x.dtype, sharding=clock.rows)
    brought = [rows(each, clock.mesh.devices.size) for each in halves.arrivals]
    kept = [rows(x) for x in jax.eval_shape(early, *given)]
    lowered = early.lower(*given), late.lower(brought, kept)
    with ThreadPoolExecutor(len(lowered)) as pool:
        first, second = pool.map(lambda one: one.compile(), lowered)
    return first, second


def _difference(clock: Clock, found: list[Any], given: list[Any]) -> float:
    """|found - given|^2 / |given|^2, the largest of the processes."""
    square = lambda x: float(np.sum(np.square(x, dtype=np.float64)))
    lost = sum(square(a.astype(np.float32) - b.astype(np.float32)) for a, b in zip(found, given, strict=True))
    return float(clock.agreed([lost / max(sum(square(b.astype(np.float32)) for b in given), 1e-30)])[0])


def _state_of_first(tx: Any, grads: Any, sizes: dict[str, int]) -> Any:
    """The state of the first worker, as `tx.init` makes it where the axes are bound."""
    traced, like = jax.make_jaxpr(tx.init, axis_env=list(sizes.items()), return_shape=True)(grads)

    def refuse(*_):
        raise Inseparable("a collective within init")

    first = lambda *leaves: evaluate(traced.jaxpr, traced.consts, leaves, jnp.zeros((), jnp.int32), refuse)
    leaves = [np.asarray(x) for x in jax.jit(first)(*jax.tree.leaves(grads))]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _lost(clock: Clock, candidate: Candidate, axis: Any, grads: Any) -> float | None:
    """Relative squared error of one message; None without a compressor."""
    workers = int(np.prod([clock.mesh.shape[name] for name in axis_names(axis)]))
    plan = plan_for(candidate, grads, workers)
    compressor = getattr(candidate.algorithm, "compressor", None)
    if plan is None or compressor is None:
        return None

    compressors = each_of(compressor, plan.groups)
    here = Round(jax.random.key(0), plan.groups, compressors)

    @jax.jit
    def back(grads):
        arrays = split(plan, grads)
        like, keys = like_of(arrays), keys_of(jax.random.key(1), plan.groups)
        states, found = here.start(like), []
        for c, key, x, state, shape in zip(compressors, keys, arrays, states, like, strict=True):
            payload, _ = c.compress(key, x, state)
            found.append(c.decompress(payload, state.shared, shape))
        return join(plan, tuple(found))

    found = [np.asarray(x) for x in jax.tree.leaves(back(grads))]
    return _difference(clock, found, jax.tree.leaves(grads))


# ------------------------------------------------------------------------------------------------
# Overlap


def overlap_on(clock: Clock, axis: Any, seconds: float, link: Fit | None = None) -> float:
    """e of `predict`, for matrix products and an all-reduce that do not wait for each other.

    link: of all-reduces. On a slow one shorter operands are exchanged, so that the seconds hold several rounds.
    """
    workers = int(np.prod([clock.mesh.shape[name] for name in axis_names(axis)]))
    if workers < 2:
        return 0.0
    words = MOST_OVERLAP
    while link is not None and words > LEAST_OVERLAP and link.seconds(4.0 * words, workers).mean > seconds / 30:
        words //= 2
    x = local_rows(clock, lambda: np.ones(words, np.float32))
    a = local_rows(clock, lambda: np.eye(128, dtype=np.float32))
    number = lambda n: jax.make_array_from_callback(
        (), NamedSharding(clock.mesh, P()), lambda index: np.asarray(n, np.int32)
    )
    compute = lambda n, a: lax.fori_loop(0, n, lambda i, b: jnp.matmul(b, a, precision="highest"), a)
    rows = P(tuple(clock.mesh.axis_names))

    def program(computes: bool, exchanges: bool):
        def body(n, a, x):
            first = compute(n, a[0])[None] if computes else a
            second = lax.psum(x, axis_names(axis)) if exchanges else x
            return first, second

        mapped = jax.shard_map(body, mesh=clock.mesh, in_specs=(P(), rows, rows), out_specs=rows, check_vma=False)
        return jax.jit(mapped)

    kept = lambda *which: clock.keep(("overlap", axis, words, which), lambda: program(*which))
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
