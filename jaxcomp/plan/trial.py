"""Candidates that are run for real: seconds per step of loss, gradient and exchange, or of local steps with theirs."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcomp.base import check_algorithm
from jaxcomp.exchange.axes import axis_names
from jaxcomp.plan.advise import Row, with_expected
from jaxcomp.plan.candidates import Candidate
from jaxcomp.plan.clock import Clock
from jaxcomp.plan.facts import Facts, trials_of
from jaxcomp.state.specs import init_state
from jaxcomp.transforms.local_updates import local_updates
from jaxcomp.transforms.value_and_grad import value_and_grad

__all__ = ["Step", "held_rows", "seconds_of_steps", "step_of", "tried_rows"]

ROUNDS = 30
RATE = 1e-6  # of local steps: what they reach does not matter, and must stay finite


def tried_rows(
    clock: Clock,
    rows: list[Row],
    loss: Callable[..., Any],
    params: Any,
    batch: tuple,
    mesh: Mesh,
    axis: Any,
    tried: int,
    show: Callable[[str], None],
) -> tuple[list[Row], bool]:
    """The rows, some of them with measured seconds, and whether there was time for all that should be run.

    These are run: the dense candidate without buckets and local steps that is predicted fastest, the first such one
    (f32: what one has without a plan), and the `tried` best others, at most one of them dense. Rows whose work is not
    known come last.
    Local steps, and f32 where it is not the fastest, are left out if three rounds take longer than what is left; f32 is
    then not missed, since what decides is faster. All are compiled first, and then run in turn: what else the machine
    does meanwhile slows all of them.
    """
    order = sorted(range(len(rows)), key=lambda i: (rows[i].bound, rows[i].seconds))
    able = [i for i in order if rows[i].refused is None and _can_run(rows[i].candidate, params, mesh, axis)]
    dense = [i for i in able if rows[i].candidate.dense]
    whole = [i for i in dense if not rows[i].candidate.bucket_bytes and rows[i].candidate.every == 1] or dense
    plain = list(dict.fromkeys([whole[0], min(whole)])) if whole else []
    further = [i for i in dense if i not in plain][1:]
    steps, had_time = dict[int, Step](), True
    for i in [*plain, *[i for i in able if i not in plain and i not in further][:tried]]:
        left = clock.left()
        if left <= 0 and steps:
            had_time = False
            break
        optional = rows[i].candidate.every > 1 or (i in plain[1:] and plain[0] in steps)
        if optional and 3 * rows[i].candidate.every * rows[i].seconds > left:
            had_time = had_time and rows[i].candidate.every == 1
            continue
        show(f"trying {rows[i].candidate.name}")
        steps[i] = step_of(clock, rows[i].candidate, loss, params, batch, mesh, axis)
        jax.block_until_ready(steps[i]())  # compiles
    if not steps:
        return rows, had_time
    show("trying all in turn")
    times = seconds_of_steps(clock, list(steps.values()), ROUNDS, 0.8 * clock.left())
    for i, seconds in zip(steps, np.median(times, axis=1), strict=True):
        rows[i] = rows[i]._replace(measured=float(seconds))
    return with_expected(rows), had_time


def held_rows(rows: Sequence[Row], facts: Facts, options: Mapping[str, Any]) -> list[Row] | None:
    """The rows with the measured seconds that the facts hold.

    None where they hold none that were run with these options, or where they were edited since: a step that was run
    says nothing about another link.
    """
    held = facts.trials
    if held is None or trials_of(facts, options, held.seconds) != held:
        return None
    rows = [row._replace(measured=held.seconds.get(row.candidate.name)) for row in rows]
    return with_expected(rows) if any(row.measured is not None for row in rows) else None


class Step:
    """A step of a candidate, of local updates H steps with their exchange, to be timed again and again.

    run: takes and returns what a step changes. state: what it is before the first one.

    There is one batch, so its gradient comes again and again. An error memory would grow in the direction of that
    gradient alone, as in no training, until thresholds that are fitted to it miss: each run begins with the same state.
    What an algorithm does only now and then is therefore timed as in its first step.
    """

    def __init__(self, run: Callable[[Any], tuple[Any, Any]], state: Any, every: int):
        self.run, self.every = run, every
        self.first = _copied(state)
        self.state = state

    def __call__(self) -> Any:
        out, self.state = self.run(self.state)
        return out

    def restart(self) -> None:
        """Back to the state of the beginning."""
        self.state = jax.block_until_ready(_copied(self.first))


def seconds_of_steps(clock: Clock, steps: list[Step], rounds: int, most: float) -> np.ndarray:
    """Seconds per step of each in each round, [steps, rounds], at the slowest process."""
    times = clock.interleaved(steps, rounds, most, lambda i: steps[i].restart())
    return times / np.array([[step.every] for step in steps])


def step_of(
    clock: Clock, candidate: Candidate, loss: Callable[..., Any], params: Any, batch: tuple, mesh: Mesh, axis: Any
) -> Step:
    """The step of a candidate; the same object for the same one."""
    make = _local_steps if candidate.every > 1 else _steps
    return clock.keep(("step", loss, candidate.name), lambda: make(candidate, loss, params, batch, mesh, axis))


@jax.jit
def _copied(tree: Any) -> Any:
    return jax.tree.map(jnp.copy, tree)


def _can_run(candidate: Candidate, params: Any, mesh: Mesh, axis: Any) -> bool:
    """Local steps are run where every worker has whole parameters of its own."""
    whole = all(x.sharding.is_fully_replicated for x in jax.tree.leaves(params))
    workers = set(mesh.axis_names) == set(axis_names(axis))
    return candidate.every == 1 or (whole and workers and not isinstance(candidate.algorithm, Mapping))


def _steps(candidate: Candidate, loss: Callable, params: Any, batch: tuple, mesh: Mesh, axis: Any) -> Step:
    levels = candidate.algorithm
    given = (None, mesh, levels) if isinstance(levels, Mapping) else (levels, mesh, axis)
    grad_fn = value_and_grad(loss, *given, **candidate.options)
    step = jax.jit(lambda params, state, *batch: grad_fn(params, state, *batch), donate_argnums=1)

    def run(state):
        value, grads, state = step(params, state, *batch)
        return (value, grads), state

    return Step(run, grad_fn.init(params), 1)


def _local_steps(candidate: Candidate, loss: Callable, params: Any, batch: tuple, mesh: Mesh, axis: Any) -> Step:
    """H steps of SGD at each worker, in the last of which they exchange differences."""
    algorithm, every = check_algorithm("plan", candidate.algorithm), candidate.every
    tx = local_updates(optax.sgd(RATE), optax.sgd(1.0), algorithm, axis, every=every, **candidate.options)
    state, specs = init_state(tx, params, mesh, axis)
    rows = P(axis_names(axis))
    count = mesh.devices.size
    spread = jax.jit(
        lambda tree: jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *x.shape)), tree),
        out_shardings=NamedSharding(mesh, rows),
    )

    def one(own, state, *batch):
        mine = jax.tree.map(lambda x: x[0], own)
        value, grads = jax.value_and_grad(loss)(mine, *batch)
        updates, state = tx.update(grads, state, mine)
        return jax.tree.map(lambda x: x[None], optax.apply_updates(mine, updates)), state, value[None]

    placed = tuple(jax.tree.map(lambda x: _placed(x, mesh, rows), each) for each in batch)
    mapped = jax.shard_map(
        one, mesh=mesh, in_specs=(rows, specs, *(rows for _ in batch)), out_specs=(rows, specs, rows)
    )
    step = jax.jit(mapped, donate_argnums=(0, 1))

    def run(held):
        for _ in range(every):
            *held, value = jax.block_until_ready(step(*held, *placed))
        return value, tuple(held)

    return Step(run, (spread(params), state), every)


def _placed(x: Any, mesh: Mesh, spec: P) -> Any:
    """Cut along its first axis, where it is not yet on the mesh."""
    if isinstance(x, jax.Array) and isinstance(x.sharding, NamedSharding):
        return x
    return jax.make_array_from_callback(np.shape(x), NamedSharding(mesh, spec), lambda index: np.asarray(x)[index])
