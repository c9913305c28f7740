"""`jc.plan`: measures links and machine, predicts every candidate, tries the best of them, and advises."""

import dataclasses
import functools
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcomp.arrays import like_of
from jaxcomp.backend import platform
from jaxcomp.base import Algorithm
from jaxcomp.exchange.axes import axis_names
from jaxcomp.plan import facts as files
from jaxcomp.plan.advise import Row, choose, predicted, shared_work, table, verdict, without_twins
from jaxcomp.plan.candidates import (
    Candidate,
    Loss,
    check_candidates,
    check_every,
    check_max_error,
    default_candidates,
    dense_candidates,
    hierarchies,
    is_amount,
    traced,
)
from jaxcomp.plan.clock import Clock
from jaxcomp.plan.facts import Facts
from jaxcomp.plan.links import Collective
from jaxcomp.plan.measure import largest, links_of, overlap_on, sample_of, work_of
from jaxcomp.plan.predict import step_seconds
from jaxcomp.plan.trial import held_rows, tried_rows
from jaxcomp.plan.watch import Watch
from jaxcomp.transforms.meshes import find_devices
from jaxcomp.transforms.value_and_grad import worker_value_and_grad

__all__ = ["Plan", "plan", "plan_on"]

BUDGET = 100.0  # seconds of measuring
FOR_TRYING = 1 / 3  # of the budget, which measuring leaves
ROUNDS = 7  # of the gradient
TRIED = 3  # candidates that are run, besides the first and the best dense one


@dataclasses.dataclass(frozen=True)
class Plan:
    """The advice of `plan`. Print it for the table.

    algorithm, via, bucket_bytes, every: of the advised candidate; `options` holds via and bucket_bytes for
    `compressed_mean` and `value_and_grad`.
    rows: a `Row` for each candidate; chosen: the advised one.
    facts: what was measured. verdict: the advice in words.
    """

    rows: tuple[Row, ...]
    chosen: Row
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
        return table(self.rows, self.chosen)

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
    axis = axis_names(axis_name)
    if candidates is None:
        candidates = [*default_candidates(1 if max_every is None else max_every), *hierarchies(axis)]
    candidates = _checked(candidates, budget, max_error, max_every, tried)
    like_of(params)  # refuses what is no parameter, by name
    found = find_devices("plan", mesh, axis, params, batch)
    if not isinstance(found, Mesh):
        raise TypeError(f"plan: mesh must be a jax.sharding.Mesh with devices; got {found!r}")
    batch = batch if isinstance(batch, tuple) else (batch,)
    clock = Clock(found, BUDGET if budget is None else budget)
    if int(np.prod([found.shape[name] for name in axis])) == 1:
        return _alone(candidates)
    own = axis[0] if len(axis) == 1 else axis
    options = {"cache": cache, "max_error": max_error, "max_every": max_every, "tried": tried, "show": show}
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):  # whatever mesh is in force here
        return plan_on(clock, loss, params, batch, own, candidates, **options)


def plan_on(
    clock: Clock,
    loss: Callable[..., Any],
    params: Any,
    batch: tuple,
    axis: Any,
    candidates: list[Candidate],
    *,
    cache: str | Path | None = None,
    max_error: float | None = None,
    max_every: int | None = None,
    tried: int = TRIED,
    show: Callable[[str], None] = lambda _: None,
    thorough: bool = False,
) -> Plan:
    """`plan` with a clock that keeps compiled programs for the next plan. thorough: measures the work of all."""
    mesh = clock.mesh
    params = jax.tree.map(lambda x: _placed(x, mesh), params)
    like = jax.tree.map(_at_device, params)
    sizes = {name: int(mesh.shape[name]) for name in mesh.axis_names}
    joined = platform(mesh) != "cpu"
    trace = lambda: traced(candidates, like, axis, sizes, joined=joined)
    sent = clock.keep(("sent", loss, axis, tuple(each.name for each in candidates)), trace)
    limits = {"max_error": max_error, "max_every": max_every}
    about = _about(mesh, like, candidates, sizes)
    text = clock.broadcast(files.read(cache) if cache is not None and jax.process_index() == 0 else None)
    known = files.from_text(text, str(cache)) if text else None
    if known is None or dict(known.about) != about:
        known = _measured(clock, loss, params, batch, like, axis, candidates, sent, about, limits, show, thorough)
        if cache is not None and jax.process_index() == 0:
            files.write(cache, known)
    rows = [predicted(each, known, like, axis, collectives=sent[each.name], **limits) for each in candidates]
    rows = without_twins(rows, like, axis, sizes)
    options = {"tried": int(tried), "max_error": None if max_error is None else float(max_error)}
    options["max_every"] = None if max_every is None else int(max_every)
    held = held_rows(rows, known, options) if tried else None
    if held is not None:
        rows = held
    elif tried and clock.left() > 0:
        rows, had_time = tried_rows(clock, rows, loss, params, batch, mesh, axis, tried, show)
        if had_time:  # else another plan may have it
            ran = {row.candidate.name: row.measured for row in rows if row.measured is not None}
            known = known._replace(trials=files.trials_of(known, options, ran))
            if cache is not None and jax.process_index() == 0:
                files.write(cache, known)
    chosen = choose(rows)
    return Plan(tuple(rows), chosen, known, verdict(rows, chosen))


def _checked(
    candidates: Sequence[Candidate], budget: Any, max_error: Any, max_every: Any, tried: int
) -> list[Candidate]:
    candidates = check_candidates("plan", candidates)
    if budget is not None and not (is_amount(budget) and 0 < budget < math.inf):
        raise ValueError(f"plan: budget must be seconds > 0; got {budget!r}")
    check_max_error("plan", max_error)
    check_every("plan", max_every)
    if isinstance(tried, bool) or not isinstance(tried, numbers.Integral) or tried < 0:
        raise ValueError(f"plan: tried must be an integer >= 0; got {tried!r}")
    return candidates


def _alone(candidates: list[Candidate]) -> Plan:
    facts = Facts({}, {}, {}, {}, 0.0, 0.0, 0.0)
    dense = next((each for each in candidates if each.dense), dense_candidates()[0])
    row = Row(dense, step_seconds(0.0, 0.0, []), 0.0, Loss(0.0, True, False, "none"))
    return Plan((row,), row, facts, "do not compress: there is a single worker, so nothing is exchanged")


def _placed(x: Any, mesh: Mesh) -> Any:
    """On the mesh: where it lies, or whole on every device."""
    if isinstance(x, jax.Array) and isinstance(x.sharding, NamedSharding) and x.sharding.mesh.shape == mesh.shape:
        return x
    whole = NamedSharding(mesh, P())
    return jax.make_array_from_callback(np.shape(x), whole, lambda index: np.asarray(x)[index])


def _at_device(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.sharding.shard_shape(x.shape), x.dtype)


def _about(mesh: Mesh, like: Any, candidates: list[Candidate], sizes: dict[str, int]) -> dict[str, Any]:
    return {
        "jax": jax.__version__,
        "device": mesh.devices.flat[0].device_kind,
        "processes": jax.process_count(),
        "axes": sizes,
        "leaves": files.leaves_to_text(like),
        "candidates": [each.name for each in candidates],
    }


# ------------------------------------------------------------------------------------------------
# Measuring


def _measured(
    clock: Clock,
    loss: Callable,
    params: Any,
    batch: tuple,
    like: Any,
    axis: Any,
    candidates: list[Candidate],
    sent: dict[str, tuple[Collective, ...]],
    about: dict[str, Any],
    limits: dict[str, Any],
    show: Callable[[str], None],
    thorough: bool = False,
) -> Facts:
    """Measures what the candidates need; with `thorough` the work of all, else of those that may be the fastest."""
    budget = max(clock.left(), 1.0)
    show("loss and gradient")
    grad = clock.keep(("gradient", loss), lambda: jax.jit(worker_value_and_grad(loss, clock.mesh, axis)))
    gradient, _ = clock.median(lambda: grad(params, *batch)[0], ROUNDS, budget / 15)
    forward = clock.keep(("forward", loss), lambda: jax.jit(lambda params, *batch: loss(params, *batch)))
    share = float(np.clip(clock.median(lambda: forward(params, *batch), ROUNDS, budget / 30)[0] / gradient, 0.05, 0.95))
    wanted = largest([one for each in sent.values() for one in each])
    fits = links_of(clock, wanted, budget / 4, show)
    show("overlap")
    link = fits.get(",".join(axis_names(axis)), {}).get("all_reduce")
    overlap = overlap_on(clock, axis, budget / 15, link)
    known = Facts(about, about["axes"], fits, {}, gradient, share, overlap)
    grads = sample_of(grad(params, *batch)[1])
    if clock.agreed([not all(np.isfinite(x.astype(np.float32)).all() for x in jax.tree.leaves(grads))])[0]:
        raise ValueError("plan: the gradient of the loss must be finite; it has NaN or infinite entries")
    step = lambda each: predicted(each, known, like, axis, collectives=sent[each.name], **limits)
    allowed = [each for each in candidates if limits["max_every"] is None or each.every <= limits["max_every"]]
    order = sorted(allowed, key=lambda each: (not each.dense, step(each).seconds))
    best, reserve = np.inf, budget * FOR_TRYING
    for number, each in enumerate(order):
        left = clock.left() - reserve
        if each.name not in known.work:
            # What is too slow without any work is not worth compiling. All processes see the same numbers.
            if not thorough and (step(each).seconds >= best or (best < np.inf and left < 0)):
                continue
            show(f"encoding of {each.name}")
            bare, most = each._replace(bucket_bytes=None), max(left, 1.0) / 2 / (len(order) - number)
            work = {**known.work, each.name: work_of(clock, bare, axis, grads, most)}
            known = known._replace(work=shared_work(work, allowed))
        row = step(each)
        best = best if row.refused else min(best, row.seconds)
    return known
