"""Measures what a plan needs to know of a machine: links, encoding and decoding, overlap, whole steps.

All processes run the same programs at the same time, so that workers which share cores slow each other down here as
they will in training. A time is the median over rounds of the slowest process, less what it takes to start a program: a
training step is a single one.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxcomp.exchange.axes import axis_names
from jaxcomp.plan.candidates import Candidate, sent_back
from jaxcomp.plan.clock import MeshClock
from jaxcomp.plan.facts import Line, Work
from jaxcomp.plan.links import Collective, Fit, Timing, fit, workers_of
from jaxcomp.plan.predict import overlap_of
from jaxcomp.plan.programs import Halves, Inseparable, offline, settled
from jaxcomp.transforms.local_steps import local_steps
from jaxcomp.transforms.value_and_grad import value_and_grad

__all__ = ["Step", "Workload", "links_of", "overlap_on", "sample_of", "seconds_of_steps", "step_of", "sweep", "work_of"]

Array = jax.Array
LEAST_BYTES = 256  # of an operand in a sweep
STEP = 8  # from one size to the next
MOST_BYTES = 2**26
ROUNDS = 5  # of encoding and of decoding
LEAST_OVERLAP, MOST_OVERLAP = 2**10, 2**18  # words that are exchanged beside a computation
MOST_ENTRIES = 2**24  # of a gradient whose encoding is measured
RATE = 1e-6  # of local steps: what they reach does not matter, and must stay finite


def _mapped(clock: MeshClock, one: Callable) -> Any:
    """A function of one device's arrays as a compiled one of rows; results are rows, too."""

    def body(*args):
        out = one(*jax.tree.map(lambda x: x[0], args))
        return jax.tree.map(lambda x: jnp.asarray(x)[None], out)

    rows = P(tuple(clock.mesh.axis_names))
    return jax.jit(jax.shard_map(body, mesh=clock.mesh, in_specs=rows, out_specs=rows, check_vma=False))


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


def sweep(clock: MeshClock, kind: str, axis: Any, most_bytes: float, seconds: float) -> list[Timing]:
    """Times of one collective of operands of at most so many bytes, and of an eighth of that, and so on.

    seconds: larger sizes are left out once they would take longer.
    """
    workers, timings = workers_of(axis, clock.sizes), list[Timing]()
    most = int(np.clip(most_bytes, STEP**2 * LEAST_BYTES, MOST_BYTES))
    for size in sorted({LEAST_BYTES, *(most // STEP**i for i in range(4))}):
        words = max(size // 4 // workers, 1) * workers
        if len(timings) > 1 and timings[-1].seconds * words * 4 / timings[-1].operand_bytes * 3 > seconds:
            break
        run = clock.keep(("sweep", kind, axis), lambda: _mapped(clock, _program(kind, axis, workers)))
        x = clock.local_rows(np.ones(words, np.float32))
        middle, error = clock.median(lambda run=run, x=x: run(x), 9, seconds / 4)
        timings.append(Timing(workers, float(4 * words), max(middle - clock.launch, middle / 10), error))
    return timings


def links_of(
    clock: MeshClock, collectives: Iterable[Collective], seconds: float, show: Callable[[str], None]
) -> dict[str, dict[str, Fit]]:
    """A fit for each axis and kind of the collectives, up to their largest operands: axis -> kind -> fit."""
    wanted: dict[tuple[str, str], float] = {}
    for one in collectives:
        wanted[one.axis, one.kind] = max(wanted.get((one.axis, one.kind), 0.0), one.operand_bytes)
    found: dict[str, dict[str, Fit]] = {}
    for (axis, kind), most in sorted(wanted.items()):
        show(f"{kind} over {axis}")
        timings = sweep(clock, kind, tuple(axis.split(",")), most, seconds / len(wanted))
        found.setdefault(axis, {})[kind] = fit(kind, timings)
    return found


def overlap_on(clock: MeshClock, axis: Any, seconds: float, link: Fit | None = None) -> float:
    """e of `predict`, for matrix products and an all-reduce that do not wait for each other.

    link: of all-reduces. On a slow one shorter operands are exchanged, so that the seconds hold several rounds.
    """
    workers, words = workers_of(axis, clock.sizes), MOST_OVERLAP
    while link is not None and words > LEAST_OVERLAP and link.seconds(4.0 * words, workers).mean > seconds / 30:
        words //= 2

    def program(exchanges: bool) -> Any:
        def body(loops, a, x):
            product = lax.fori_loop(0, loops, lambda i, b: jnp.matmul(b, a, precision="highest"), a)
            return product, lax.psum(x, axis_names(axis)) if exchanges else x

        return _mapped(clock, body)

    alone = clock.keep(("overlap", axis, False), lambda: program(False))
    both = clock.keep(("overlap", axis, True), lambda: program(True))
    a, x = clock.local_rows(np.eye(128, dtype=np.float32)), clock.local_rows(np.ones(words, np.float32))
    loops = lambda number: clock.local_rows(np.int32(number))
    timed = lambda run, number, rounds, share: clock.median(lambda: run(number, a, x), rounds, seconds * share)[0]
    exchanging = timed(both, loops(0), 7, 1 / 3)
    trial = timed(alone, loops(200), 3, 1 / 6)
    as_long = loops(np.clip(200 * exchanging / max(trial, 1e-6), 10, 10**6))
    return overlap_of(timed(alone, as_long, 5, 1 / 4), exchanging, timed(both, as_long, 7, 1 / 3))


# ------------------------------------------------------------------------------------------------
# Encoding and decoding


def sample_of(grads: Any, most: int = MOST_ENTRIES) -> Any:
    """The gradient of this process's first device; of a larger one an equal share of the longest axis of each leaf.

    >>> jax.tree.map(np.shape, sample_of({"w": np.ones((4, 30)), "b": np.ones(30)}, 100))
    {'b': (20,), 'w': (4, 20)}
    """
    whole = jax.tree.map(lambda x: np.asarray(x.addressable_data(0) if isinstance(x, Array) else x), grads)
    share = most / max(sum(x.size for x in jax.tree.leaves(whole)), 1)

    def cut(x):
        if share >= 1 or not x.ndim:
            return x
        axis = int(np.argmax(x.shape))
        return np.ascontiguousarray(np.take(x, range(math.ceil(share * x.shape[axis])), axis))

    return jax.tree.map(cut, whole)


def work_of(clock: MeshClock, candidate: Candidate, axis: Any, grads: Any, seconds: float) -> Work:
    """The work of one exchange without its network, and what a message of this process's gradients loses.

    Collectives are replaced by what they would bring (`offline`). Encoding is what needs nothing that is received; all
    else is decoding. Both follow the number of entries. seconds: most time for the rounds.
    """
    entries = float(sum(x.size for x in jax.tree.leaves(grads)))
    runs, error = clock.keep(("work", candidate.name, axis), lambda: _working(clock, candidate, axis, grads))
    times = [max(clock.median(run, ROUNDS, seconds / 2)[0] - clock.launch, 0.0) for run in runs]
    line = lambda seconds: Line(0.0, seconds / entries if entries else 0.0)
    return Work(line(sum(times[:1])), line(sum(times)), error)


def _working(clock: MeshClock, candidate: Candidate, axis: Any, grads: Any) -> tuple[list[Any], float | None]:
    """Both halves of a round without its network, to be timed, none if it has none; and its relative squared error."""
    tx = candidate.transformation(axis)
    first = np.int32(0)  # the number of a worker
    try:
        begin = offline(tx.init, clock.sizes, grads)
        if begin.arrivals:
            raise Inseparable("a collective within init")
        state = jax.tree.map(np.asarray, jax.jit(begin.whole)(first, [], grads)[1])
        halves = offline(lambda state, grads: tx.update(grads, state), clock.sizes, state, grads)
    except Inseparable:
        return [], _lost(clock, sent_back(candidate, grads, workers_of(axis, clock.sizes)), grads)
    given = [clock.local_rows(x) for x in (first, *jax.tree.leaves((state, grads)))]
    early, late = _compiled(clock, halves, given)
    kept = early(*given)
    placed = lambda received: [clock.local_rows(x) for x in received]
    here = lambda tree: jax.tree.map(lambda x: np.asarray(x.addressable_data(0))[0], tree)
    send = lambda received: here(halves.both(kept, late(placed(received), kept))[0])
    brought = placed(settled(halves.arrivals, send, lambda changed: clock.agreed([changed])[0] > 0))
    if any(each.is_part for each in halves.arrivals):
        back = sent_back(candidate, grads, workers_of(axis, clock.sizes))
    else:
        back = here(halves.both(kept, late(brought, kept))[1][0])
    return [lambda: early(*given), lambda: late(brought, kept)], _lost(clock, back, grads)


def _compiled(clock: MeshClock, halves: Halves, given: list[Any]) -> tuple[Callable, Callable]:
    """Both halves of a round, compiled at the same time: that is most of what measuring takes."""
    early, late = _mapped(clock, halves.early), _mapped(clock, halves.late)
    rows = lambda x, *axes: jax.ShapeDtypeStruct((*axes, *x.shape), x.dtype, sharding=clock.rows)
    brought = [rows(each, clock.mesh.devices.size) for each in halves.arrivals]
    kept = [rows(x) for x in jax.eval_shape(early, *given)]
    lowered = early.lower(*given), late.lower(brought, kept)
    with ThreadPoolExecutor(len(lowered)) as pool:
        first, second = pool.map(lambda one: one.compile(), lowered)
    return first, second


def _lost(clock: MeshClock, back: Any, grads: Any) -> float | None:
    """|back - grads|^2 / |grads|^2, the largest of the processes; None without any."""
    if back is None:
        return None
    square = lambda tree: sum(float(np.sum(np.square(x, dtype=np.float64))) for x in jax.tree.leaves(tree))
    wide = lambda tree: jax.tree.map(lambda x: np.asarray(x).astype(np.float32), tree)
    lost = jax.tree.map(np.subtract, wide(back), wide(grads))
    return float(clock.agreed([square(lost) / max(square(wide(grads)), 1e-30)])[0])


# ------------------------------------------------------------------------------------------------
# Whole steps


class Workload(NamedTuple):
    """A training whose steps are timed. params: on the mesh of the clock; axis: of the workers."""

    clock: MeshClock
    loss: Callable[..., Any]
    params: Any
    batch: tuple
    axis: Any


class Step:
    """A step of a candidate, of local updates H steps with their exchange, to be timed again and again.

    run: takes and returns what a step changes. state: what it is before the first one.

    There is one batch, so its gradient comes again and again. An error memory would grow in the direction of that
    gradient alone, as in no training, until thresholds that are fitted to it miss: each run begins with the same state.
    What an algorithm does only now and then is therefore timed as in its first step.
    """

    def __init__(self, run: Callable[[Any], tuple[Any, Any]], state: Any, every: int):
        self.run, self.every, self.first = run, every, state
        self.restart()

    def __call__(self) -> Any:
        for _ in range(self.every):
            out, self.state = jax.block_until_ready(self.run(self.state))
        return out

    def restart(self) -> None:
        """Back to the state of the beginning."""
        self.state = jax.block_until_ready(_copied(self.first))


@jax.jit
def _copied(tree: Any) -> Any:
    return jax.tree.map(jnp.copy, tree)


def step_of(work: Workload, candidate: Candidate) -> Step:
    """The step of a candidate; the same object for the same one."""
    clock, loss, params, batch, axis = work
    algorithm, axis = candidate.placed(axis)
    where = (algorithm, clock.mesh, axis)

    def every_step() -> Step:
        grad_fn = value_and_grad(loss, *where, **candidate.options)

        def one(state, params, *batch):
            value, grads, state = grad_fn(params, state, *batch)
            return (value, grads), state

        run = jax.jit(one, donate_argnums=0)
        return Step(lambda state: run(state, params, *batch), grad_fn.init(params), 1)

    def local() -> Step:
        every = candidate.every
        steps = local_steps(loss, optax.sgd(RATE), optax.sgd(1.0), *where, every=every, **candidate.options)

        def one(state, *batch):
            value, *state = steps(*state, *batch)
            return value, tuple(state)

        run = jax.jit(one, donate_argnums=0)
        return Step(lambda state: run(state, *batch), steps.init(params), every)

    return clock.keep(("step", loss, candidate.name), every_step if candidate.every == 1 else local)


def seconds_of_steps(clock: MeshClock, steps: Sequence[Step], rounds: int, most: float) -> np.ndarray:
    """Seconds per step of each in each round, [steps, rounds], at the slowest process."""
    times = clock.times(steps, rounds, most, lambda i: steps[i].restart())
    return times / np.array([[step.every] for step in steps])
