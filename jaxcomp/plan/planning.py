"""`jc.plan`: measures links and machine, predicts every candidate, tries the best of them, and advises."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcomp.arrays import like_of
from jaxcomp.base import Algorithm
from jaxcomp.checks import is_integer, is_within
from jaxcomp.exchange.axes import axis_names
from jaxcomp.plan import facts as files
from jaxcomp.plan.advise import choose, table, verdict
from jaxcomp.plan.candidates import Candidate, ErrorBound, Limits, candidates_of, dense_candidates, traced
from jaxcomp.plan.clock import MeshClock
from jaxcomp.plan.facts import Facts
from jaxcomp.plan.links import Collective, workers_of
from jaxcomp.plan.measure import Workload, links_of, overlap_on, sample_of, seconds_of_steps, step_of, work_of
from jaxcomp.plan.predict import Advice, rows_of, shared_work, step_seconds, with_expected
from jaxcomp.plan.watch import Watch
from jaxcomp.transforms.arguments import check_wrt, trained_of
from jaxcomp.transforms.meshes import find_devices
from jaxcomp.transforms.value_and_grad import worker_value_and_grad

__all__ = ["Plan", "plan", "plan_on"]

BUDGET = 100.0  # seconds of measuring
FOR_TRYING = 1 / 3  # of the budget, which measuring leaves
ROUNDS = 7  # of the gradient
STEP_ROUNDS = 30  # of whole steps
TRIED = 3  # candidates that are run, besides the first and the best dense one


@dataclasses.dataclass(frozen=True)
class Plan:
    """The advice of `plan`. Print it for the table.

    algorithm, via, bucket_bytes, every: of the advised candidate; `options` holds via and bucket_bytes for
    `compressed_mean` and `value_and_grad`.
    rows: an `Advice` for each candidate; chosen: the advised one.
    facts: what was measured. verdict: the advice in words.
    """

    rows: tuple[Advice, ...]
    chosen: Advice
    facts: Facts
    verdict: str

    @property
    def algorithm(self) -> Algorithm | Mapping[Any, Algorithm]:
        return self.chosen.candidate.algorithm

    @property
    def via(self) -> str:
        return self.chosen.candidate.via

    @property
    def bucket_bytes(self) -> int | None:
        return self.chosen.candidate.bucket_bytes

    @property
    def every(self) -> int:
        return self.chosen.candidate.every

    @property
    def options(self) -> dict[str, Any]:
        return self.chosen.candidate.options

    @property
    def compresses(self) -> bool:
        """Whether the advice is to compress."""
        return not self.chosen.candidate.dense

    @functools.cached_property
    def table(self) -> str:
        """All candidates, the best first."""
        return table(self.rows, self.chosen, self.facts)

    def watch(self, **options: Any) -> Watch:
        """A detector of changes, to be fed in the training loop (see `jaxcomp.plan.watch`)."""
        return Watch(**options)

    def __str__(self) -> str:
        return f"{self.table}\n\n{self.verdict}"


def plan(
    loss: Callable[..., Any],
    params: Any,
    batch: Any,
    *,
    mesh: Mesh | None = None,
    axis_name: Any = "data",
    candidates: Sequence[Candidate] | None = None,
    budget: float | None = None,
    cache: str | Path | None = None,
    max_error: float | None = None,
    max_every: int | None = None,
    tried: int = TRIED,
    wrt: Any = None,
    show: Callable[[str], None] = lambda _: None,
) -> Plan:
    """Measures this machine and its links, and says which exchange makes the fastest step; it may be a dense one.

    What is measured: seconds of each collective that candidates use against size, for each axis (`plan.links`); of
    encoding and decoding this gradient, and what a message of it loses; of loss and gradient; how much of an
    exchange is hidden behind computing. From that the step of every candidate is predicted (`plan.predict`). The best
    few, f32 and the best dense one are run, and the fastest is advised: a dense one unless compressing saves more than
    5 %. Seconds per step are compared, not steps: what compressing loses stands in the table.

    All processes must call it alike, with the same arguments; all get the same advice. The pieces are compiled and run
    apart from the training step, so it may be called before it.

    Args:
        loss: as for `value_and_grad`: (params, *batch) -> mean loss.
        params: parameters on the mesh, or numpy arrays equal on all processes.
        batch: a tuple of arrays for the loss, (x, y) for loss(params, x, y), or a single tree, cut along the leading
            axis.
        mesh: with devices; None: that on which parameters or batch lie.
        axis_name: of the workers: a name or a tuple. Candidates that are hierarchies name axes of the mesh.
        candidates: what is compared; None: `candidates.default_candidates`, and, for workers along several axes,
            `candidates.hierarchies` of these.
        budget: seconds of measuring, 100 by default. Compiling counts. A third is kept for running the best candidates;
            the encoding of those for which no time is left is not measured, and the table says so.
        cache: a JSON file. If it is of this machine, model and candidates, nothing is measured, nor what the budget was
            too short for; else it is written. Steps that were run are kept, too: they are run again where the budget
            was too short for some of them, `tried`, `max_error` or `max_every` is another one, or the file was edited.
            It may be edited (`plan.facts`); for the plan on another link give `tried=0`, since this machine runs steps
            on its own.
        max_error: messages may lose at most this share of |x|^2; None: any.
        max_every: H, most steps that a worker may take from one exchange to the next (`local_updates`). None: an
            exchange at every step, unless candidates are given that say otherwise.
        tried: how many candidates are run besides f32 and the best dense one; 0: prediction alone. Of local updates
            H steps are run.
        wrt: what is trained, as for `value_and_grad`; None: all of `params`. The rest is a constant of the loss.
        show: takes a line about what is being measured.

    Returns:
        `Plan`: `.algorithm`, `.options` (for `value_and_grad` and `compressed_mean`), `.every`, `.table`, `.verdict`,
        `.watch()`. For a single worker nothing is measured: the first dense candidate, or f32 where there is none.

    Raises:
        TypeError, ValueError: no mesh with devices, no such axis, no candidates, arguments out of range, a gradient
            that is not finite, a cache that is no such file.

    >>> import jax, jax.numpy as jnp, jaxcomp as jc
    >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> advice = jc.plan(lambda w, x: jnp.mean((x - w) ** 2), jnp.zeros(2), jnp.ones((4, 2)), mesh=mesh)
    >>> print(advice.verdict)
    do not compress: there is a single worker, so nothing is exchanged
    """
    axis, limits = axis_names(axis_name), Limits(max_error, max_every).check("plan")
    candidates = candidates_of("plan", candidates, axis, max_every)
    if budget is not None and not (is_within(budget, 0) and budget > 0):
        raise ValueError(f"plan: budget must be seconds > 0; got {budget!r}")
    if not is_integer(tried, 0):
        raise ValueError(f"plan: tried must be an integer >= 0; got {tried!r}")
    check_wrt("plan", wrt)
    if wrt is not None:
        what, whole_loss = trained_of(params, wrt, "plan"), loss
        params, rest = what.part(params)
        loss = lambda trained, *batch: whole_loss(what.join(trained, rest), *batch)
    like_of(params)  # refuses what is no parameter, by name
    found = find_devices("plan", mesh, axis, params, batch)
    if not isinstance(found, Mesh):
        raise TypeError(f"plan: mesh must be a jax.sharding.Mesh with devices; got {found!r}")
    clock = MeshClock(found, BUDGET if budget is None else budget)
    if workers_of(axis, clock.sizes) == 1:
        return _alone(candidates)
    batch = batch if isinstance(batch, tuple) else (batch,)
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):  # whatever mesh is in force here
        work = Workload(clock, loss, _placed(params, clock.mesh), batch, axis[0] if len(axis) == 1 else axis)
        return plan_on(work, candidates, limits, cache=cache, tried=tried, show=show)


def _alone(candidates: list[Candidate]) -> Plan:
    facts = Facts({}, {}, {}, {}, 0.0, 0.0, 0.0)
    dense = next((each for each in candidates if each.dense), dense_candidates()[0])
    row = Advice(dense, step_seconds(0.0, 0.0, (0.0, 0.0, 0.0)), 0.0, ErrorBound(0.0, True, False, "none"))
    return Plan((row,), row, facts, "do not compress: there is a single worker, so nothing is exchanged")


def _placed(params: Any, mesh: Mesh) -> Any:
    """On the mesh: where they lie, or whole on every device."""

    def place(x):
        if isinstance(x, jax.Array) and isinstance(x.sharding, NamedSharding) and x.sharding.mesh.shape == mesh.shape:
            return x
        return jax.make_array_from_callback(np.shape(x), NamedSharding(mesh, P()), lambda index: np.asarray(x)[index])

    return jax.tree.map(place, params)


def plan_on(
    work: Workload,
    candidates: list[Candidate],
    limits: Limits,
    *,
    cache: str | Path | None = None,
    tried: int = TRIED,
    show: Callable[[str], None] = lambda _: None,
    thorough: bool = False,
) -> Plan:
    """`plan` of a workload, whose clock keeps programs for the next plan. thorough: the work of all is measured."""
    planner = Planner(work, candidates, limits, show, thorough)
    here = cache if jax.process_index() == 0 else None  # the one process that reads and writes
    text = work.clock.broadcast(None if here is None else files.read_file(here))
    facts = files.from_text(text, str(cache)) if text else None
    if facts is None or dict(facts.about) != planner.about:
        facts = planner.measured()
        if here is not None:
            files.write_file(here, facts)
    rows = planner.rows(candidates, facts)
    options: dict[str, Any] = {name: None if x is None else float(x) for name, x in limits._asdict().items()}
    options["tried"] = int(tried)
    held = facts.trials
    if tried and held is not None and held.seconds and held == files.trials_of(facts, options, held.seconds):
        rows = with_expected([row._replace(measured=held.seconds.get(row.candidate.name)) for row in rows])
    elif tried and work.clock.left() > 0:
        rows, had_time = planner.tried(rows, tried)
        if had_time:  # else another plan may have it
            ran = {row.candidate.name: row.measured for row in rows if row.measured is not None}
            facts = facts._replace(trials=files.trials_of(facts, options, ran))
            if here is not None:
                files.write_file(here, facts)
    chosen = choose(rows)
    return Plan(tuple(rows), chosen, facts, verdict(rows, chosen))


@dataclasses.dataclass(frozen=True)
class Planner:
    """Answers one question: which candidate makes the fastest step of a workload?"""

    work: Workload
    candidates: list[Candidate]
    limits: Limits
    show: Callable[[str], None]
    thorough: bool

    @functools.cached_property
    def like(self) -> Any:
        """Shapes of the gradients of one device."""
        shape = lambda x: jax.ShapeDtypeStruct(x.sharding.shard_shape(x.shape), x.dtype)
        return jax.tree.map(shape, self.work.params)

    @functools.cached_property
    def about(self) -> dict[str, Any]:
        """The machine, the model and the candidates."""
        mesh = self.work.clock.mesh
        return {
            "jax": jax.__version__,
            "device": mesh.devices.flat[0].device_kind,
            "processes": jax.process_count(),
            "axes": self.work.clock.sizes,
            "leaves": files.leaves_to_text(self.like),
            "candidates": [each.name for each in self.candidates],
        }

    @functools.cached_property
    def sent(self) -> dict[str, tuple[Collective, ...] | str]:
        """The collectives of each candidate."""
        work, joined = self.work, self.about["device"] != "cpu"
        trace = lambda: traced(self.candidates, self.like, work.axis, work.clock.sizes, joined=joined)
        return work.clock.keep(("sent", work.loss, work.axis, *self.about["candidates"]), trace)

    def rows(self, candidates: list[Candidate], facts: Facts) -> list[Advice]:
        """Predictions of some of the candidates."""
        return rows_of(candidates, facts, self.like, self.work.axis, self.sent, self.limits)

    def measured(self) -> Facts:
        """All that the candidates need."""
        clock, loss, params, batch, axis = self.work
        budget = max(clock.left(), 1.0)
        self.show("loss and gradient")
        grad = clock.keep(("gradient", loss), lambda: _gradients(loss, clock.mesh, axis))
        gradient, _ = clock.median(lambda: grad(params, *batch)[0], ROUNDS, budget / 15)
        forward = clock.keep(("forward", loss), lambda: jax.jit(lambda params, *batch: loss(params, *batch)))
        share = clock.median(lambda: forward(params, *batch), ROUNDS, budget / 30)[0] / gradient
        collectives = [one for sent in self.sent.values() if not isinstance(sent, str) for one in sent]
        fits = links_of(clock, collectives, budget / 4, self.show)
        self.show("overlap")
        link = fits.get(",".join(axis_names(axis)), {}).get("all_reduce")
        overlap = overlap_on(clock, axis, budget / 15, link)
        facts = Facts(self.about, clock.sizes, fits, {}, gradient, float(np.clip(share, 0.05, 0.95)), overlap)
        grads = sample_of(grad(params, *batch)[1])
        if clock.agreed([not all(np.isfinite(x.astype(np.float32)).all() for x in jax.tree.leaves(grads))])[0]:
            raise ValueError("plan: the gradient of the loss must be finite; it has NaN or infinite entries")
        return self._with_work(facts, grads, budget)

    def _with_work(self, facts: Facts, grads: Any, budget: float) -> Facts:
        """The facts with the work of those candidates that may be the fastest, or of all if it is thorough."""
        clock, step = self.work.clock, lambda each: self.rows([each], facts)[0]
        able = [each for each in self.candidates if not isinstance(self.sent[each.name], str)]
        able = [each for each in able if self.limits.max_every is None or each.every <= self.limits.max_every]
        order = sorted(able, key=lambda each: (not each.dense, step(each).seconds))
        best, reserve = np.inf, budget * FOR_TRYING
        for number, each in enumerate(order):
            left = clock.left() - reserve
            if each.name not in facts.work:
                # What is too slow without any work is not worth compiling. All processes see the same numbers.
                if not self.thorough and (step(each).seconds >= best or (best < np.inf and left < 0)):
                    continue
                self.show(f"encoding of {each.name}")
                bare, most = each._replace(bucket_bytes=None), max(left, 1.0) / 2 / (len(order) - number)
                work = {**facts.work, each.name: work_of(clock, bare, self.work.axis, grads, most)}
                facts = facts._replace(work=shared_work(work, able))
            row = step(each)
            best = best if row.refused else min(best, row.seconds)
        return facts

    def tried(self, rows: list[Advice], tried: int) -> tuple[list[Advice], bool]:
        """The rows, some of them with measured seconds, and whether there was time for all that should be run.

        These are run: the dense candidate without buckets and local steps that is predicted fastest, the first such one
        (f32: what one has without a plan), and the `tried` best others, at most one of them dense. Rows whose work is
        not known come last.
        Local steps, and f32 where it is not the fastest, are left out if three rounds take longer than what is left;
        f32 is then not missed, since what decides is faster. All are compiled first, and then run in turn: what else
        the machine does meanwhile slows all of them.
        """
        clock, steps, had_time = self.work.clock, {}, True
        order = sorted(range(len(rows)), key=lambda i: (rows[i].bound, rows[i].seconds))
        able = [i for i in order if rows[i].refused is None]
        dense = [i for i in able if rows[i].candidate.dense]
        whole = [i for i in dense if not rows[i].candidate.bucket_bytes and rows[i].candidate.every == 1] or dense
        plain = list(dict.fromkeys([whole[0], min(whole)])) if whole else []
        further = [i for i in dense if i not in plain][1:]
        for i in [*plain, *[i for i in able if i not in plain and i not in further][:tried]]:
            candidate, left = rows[i].candidate, clock.left()
            if left <= 0 and steps:
                had_time = False
                break
            optional = candidate.every > 1 or (i in plain[1:] and plain[0] in steps)
            if optional and 3 * candidate.every * rows[i].seconds > left:
                had_time = had_time and candidate.every == 1
                continue
            self.show(f"trying {candidate.name}")
            steps[i] = step_of(self.work, candidate)
            jax.block_until_ready(steps[i]())  # compiles
        if not steps:
            return rows, had_time
        self.show("trying all in turn")
        times = seconds_of_steps(clock, list(steps.values()), STEP_ROUNDS, 0.8 * clock.left())
        for i, seconds in zip(steps, np.median(times, axis=1), strict=True):
            rows[i] = rows[i]._replace(measured=float(seconds))
        return with_expected(rows), had_time


def _gradients(loss: Any, mesh: Any, axis: Any) -> Any:
    """Loss and gradients of all workers, [n, ...], compiled."""
    grad_fn = worker_value_and_grad(loss, mesh, axis)
    return jax.jit(lambda *of: jax.tree.map(lambda x: getattr(x, "rows", x), grad_fn(*of)))
