"""Many optimizer steps at each worker, then one compressed exchange of how far each of them came.

Step t (counted from one) of worker i, with theta the point that all workers share:

    1.  theta_i <- theta_i + inner(gradient_i)                                      at every step
    2.  where the difference of a fragment is taken:   Delta_i = theta - theta_i
    3.  `delay` steps later, where the fragment is merged:
            theta   <- outer(theta, mean_i C(Delta_i))
            theta_i <- (1 - mixing) theta + mixing theta_i
    4.  every K_j steps, for moment j of the inner optimizer, where asked for (`transforms.moments`):
            u <- mean of u_i,   u_i <- u

Fragment p of P is merged at the steps t > delay with t mod H = floor((p + 1) H / P) mod H, H = `every`, from the
difference of step t - delay. With one fragment and no delay that is DiLoCo (Douillard et al. 2023): every H steps all
parameters. With fragments, delay and mixing it is its streaming form (Douillard et al. 2025).

Each fragment has a mean of its own: the road of `compressed_mean`, with its algorithms, routes, hierarchies and shards.
With periods for its moments it is DES-LOC (Iacob et al. 2025).
The steps in between run no collective: it stands inside a `lax.cond` on the count of steps, equal on all workers, or on
GPUs inside a loop of at most one turn (`backend.either`).
"""

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from jaxcomp.arrays import constants, root_key, rounded_to, stored, wide, wide_like, zeros_like
from jaxcomp.backend import either, not_before
from jaxcomp.base import Algorithm, require_algorithm
from jaxcomp.checks import is_integer
from jaxcomp.exchange.axes import Axis, Placement, axis_names, axis_size, is_bound, known_equal, varying
from jaxcomp.exchange.binding import own_weights
from jaxcomp.exchange.collectives import sum_arrays
from jaxcomp.exchange.driver import idle, own_at_device, own_off_device
from jaxcomp.exchange.links import DEFAULT, Link
from jaxcomp.exchange.routes import Route
from jaxcomp.exchange.state import OwnState, means_in
from jaxcomp.groups import Buckets, warn_if_dense, without_dense_warning
from jaxcomp.state.moments import LocalMomentsState, moment_places
from jaxcomp.state.specs import is_names
from jaxcomp.transforms.compressed_mean import MISSING, levels_of, means_over
from jaxcomp.transforms.meshes import axes_in
from jaxcomp.transforms.moments import MomentAveraging, check_moments, numbers_of, started_at
from jaxcomp.transforms.worker_gradients import not_zero, share_of_worker, shares_along, times

__all__ = [
    "MOMENTS",
    "LocalUpdatesState",
    "Timetable",
    "check_times",
    "cut",
    "difference_of",
    "fragments_of",
    "is_exact",
    "local_updates",
    "mixed",
    "negative_of",
    "replaced",
    "towards",
    "updates_to",
]

Array = jax.Array
NAME = "local_updates"
MOMENTS = 2**30  # keys of their means are numbered from here, those of fragments from 0
ROLES = (("inner", "compressor"), ("pending", "memory"), ("counts", "memory"))


class Own(NamedTuple):
    """inner: of the inner optimizer; pending: differences of each fragment that are on their way, () without delay;
    counts: what the steps since the last difference of each fragment (and of each moment) count, and those of the
    pending ones; () where all workers count alike."""

    inner: Any
    pending: tuple[Any, ...]
    counts: tuple[tuple[Array, ...], ...] = ()


class LocalUpdatesState(NamedTuple):
    """Memory of `local_updates`.

    count: i32[], steps so far.
    point: theta, like the parameters, in f32 (f64 for f64 parameters): equal on all workers.
    outer: of the outer optimizer, for each fragment.
    groups: of the means of gradients over the first axes of a hierarchy, () without.
    means: of the exchange of each fragment.
    own: inner optimizer and differences on their way, of each worker.
    """

    count: Array
    point: Any
    outer: tuple[Any, ...]
    groups: Any
    means: tuple[Any, ...]
    own: OwnState


def local_updates(
    inner: optax.GradientTransformation,
    outer: optax.GradientTransformation,
    algorithm: Algorithm | None = None,
    axis_name: Axis | Mapping[Any, Algorithm] = MISSING,
    *,
    every: int,
    fragments: int = 1,
    delay: int = 0,
    mixing: float = 0.0,
    moments: Mapping[str, int] | None = None,
    moments_algorithm: Algorithm | None = None,
    via: str | Route = "auto",
    weights: Sequence[float] | Array | None = None,
    seed: int | Array = 0,
    measure: bool | int = False,
    link: Link | Mapping[str, Link] = DEFAULT,
    sharded: Any = None,
    bucket_bytes: int | Buckets | None = None,
    weighted: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Steps of an inner optimizer at each worker; every H steps a compressed exchange of parameter differences.

    theta <- outer(theta, mean_i C(theta - theta_i)),   theta_i <- (1 - mixing) theta + mixing theta_i.

    `update(grads, state, params)` takes the parameters of the worker itself, which differ between workers: give them a
    leading axis of workers and pass each worker its row. What it returns leads to the parameters
    after the step. Right after an exchange (without mixing) they are the shared point: bitwise, but for entries that
    an optax update, a sum of two floats, cannot reach; these are at most one rounding of the larger of the two numbers
    away, and start the next round from there.

    With every=1 and without delay and mixing the difference is the inner update itself, not rounded:
    local_updates(optax.sgd(1.0), outer, algorithm, axis, every=1) is chain(compressed_mean(algorithm, axis), outer).

    Args:
        inner: any optax optimizer; its state stays with the worker.
        outer: any optax optimizer; its gradient is the mean difference. DiLoCo takes
            optax.sgd(0.7, momentum=0.9, nesterov=True). Its schedules count exchanges, those of `inner` count steps.
        algorithm: `error_feedback`, `diana`, `direct`, ... of the differences; None where axis_name is a mapping.
        axis_name: as for `compressed_mean`. A mapping from axes to algorithms is a hierarchy: gradients are exchanged
            over the first axes at every step, differences over the last axis.
        every: H, steps from one exchange of a fragment to the next, at least 1.
        fragments: P, parts of about equal size that the leaves are split into, in their order, each with its own time;
            at most `every`, and at most as many as there are leaves.
        delay: steps from taking a difference to merging it; 0 .. every - 1. Its exchange stands in the step that
            merges it; beside the steps in between it runs in a program that has them all and says their numbers (`at`,
            below), and by `local_process`. What a worker does in them is lost without mixing.
        mixing: share of a worker's own parameters that it keeps when it merges, in [0, 1).
        moments: field of the inner optimizer's state -> steps K_j from one averaging of it to the next, at least 1, say
            {"mu": 3 * H, "nu": 6 * H} for AdamW (DES-LOC); a field may lie anywhere in the state, as floats like the
            parameters, or like some of them (`optax.contrib.muon` has mu of all and nu of the rest). None: the state
            stays with the worker.
        moments_algorithm: of the differences of moments; None: as of those of parameters (in a hierarchy: the last).
        via, weights, seed, measure, link, sharded, bucket_bytes: as for `compressed_mean`.
        weighted: whether update takes `weight`, a number >= 0: what the batch of this step counts at this worker (its
            tokens, say). The mean of the differences is then sum_i W_i Delta_i / sum_i W_i, with W_i the weights of the
            steps since the last difference (times those of `weights`); n W_i Delta_i / sum_i W_i is what is compressed
            and remembered. One number more crosses with an exchange, and none in between. Not with a hierarchy.
            A mean of moments counts the steps since the last one of that moment.

    Returns:
        `optax.GradientTransformationExtraArgs` with a `LocalUpdatesState`; with moments it is a `LocalMomentsState`,
        whose shared moments take four bytes for each entry of each moment, and so does a memory of their algorithm.
        `info` of a step without an exchange says zero bytes.

    Raises:
        TypeError: no axis_name, or no algorithm.
        ValueError: arguments out of range; at trace time: no params, an unbound axis, parameters or gradients that are
            equal on all workers, too many fragments, moments that the inner optimizer does not have, Muon with
            matrices that are cut (it orthogonalizes whole ones).

    A moment has a shared point u of its own, and its compressed difference to that crosses, as that of a fragment does:
    u <- u - mean_i C(u - u_i), u_i <- u, after the step. Right after it, workers have equal moments. Squares (fields
    named nu, nu_max, sum_of_squares, v, e_g, e_x) stay above zero: the point is projected, and where it is zero, as a
    lossy mean may make it, a worker keeps its own entry. A non-finite entry of a moment counts as the shared one, and
    is replaced by it. What error feedback remembers of a moment is sent an averaging later, when beta^K of it is left:
    with long periods take an algorithm that forgets, say direct(block_scaled("int8", rounding="stochastic")).

    A program that has several steps and knows their numbers t, counted from one, says each as `update(..., at=t)`, a
    Python integer. Then no conditional stands around an exchange: a step without one has none, and one with `delay`
    runs beside the steps in between, where the compiler schedules it so. Times repeat every H steps: a program of H
    steps that says at = H + 1 .. 2 H is that of every round but the first.

    Non-finite entries of a difference count as zero, so they stay with their worker; no sum leads that away from a NaN:
    wrap `inner` in `optax.apply_if_finite`. Gradients are accumulated inside: inner=optax.MultiSteps(optimizer, k).

    Reference: Douillard et al. 2023 (DiLoCo), algorithm 1; Douillard et al. 2025 (Streaming DiLoCo), algorithm 2; Iacob
    et al. 2025 (DES-LOC, arXiv 2505.22549), which averages at the start of step t + 1 what is averaged here at the end
    of step t, uncompressed and without an outer optimizer; Thérien et al. 2025 (MuLoCo, arXiv 2505.23725): Muon inside.
    A fragment is merged only once a difference of it was taken, after `delay` steps.

    >>> import jax, jax.numpy as jnp, optax, jaxcomp as jc
    >>> tx = jc.local_updates(optax.sgd(0.5), optax.sgd(1.0), jc.direct(jc.identity()), "data", every=2)
    >>> def two_steps(target):
    ...     w = jc.per_worker(jnp.zeros(()), "data")
    ...     state = tx.init(w)
    ...     for _ in range(2):
    ...         updates, state = tx.update(w - target, state, w)
    ...         w = w + updates
    ...     return w
    >>> print(jax.vmap(two_steps, axis_name="data")(jnp.array([1.0, 3.0])))
    [1.5 1.5]
    """
    check_times(NAME, every, fragments, delay, mixing)
    _check_optimizers(inner=inner, outer=outer)
    levels = levels_of(algorithm, axis_name, weights, NAME)
    if weighted and len(levels) > 1:
        raise ValueError(f"{NAME}: weighted goes with one axis of workers; got a hierarchy over {tuple(levels)}")
    periods = check_moments(NAME, moments, moments_algorithm)
    options = {"weights": weights, "measure": measure, "link": link, "bucket_bytes": bucket_bytes}
    partial = sharded is not None or isinstance(axis_name, Mapping)
    last = len(levels) - 1
    with contextlib.nullcontext() if isinstance(seed, Tracer) else constants():
        root = root_key(seed)
        keys = [jax.random.fold_in(root, p) for p in range(fragments)] if fragments > 1 else [root]
        keys_of_moments = [jax.random.fold_in(root, MOMENTS + j) for j in range(len(periods))]
    others = (("every", every), ("fragments", fragments), ("delay", delay), ("mixing", mixing), ("outer", outer))
    others = (*others, ("moments", periods)) if periods else others
    of_moments = levels if moments_algorithm is None else levels | {list(levels)[last]: moments_algorithm}
    for each in (*levels.values(), *of_moments.values()):
        require_algorithm(NAME, each)
    specs_of = lambda numbers: sharded if is_names(sharded) else cut(sharded, numbers)

    def means_of(levels: dict[Any, Any], keys: list[Array], others: list[Any]) -> Callable[..., Any]:
        """(number, its leaves) -> the mean of differences of a fragment or a moment, built once."""

        @functools.cache
        def mean(number: int, numbers: tuple[int, ...]) -> optax.GradientTransformationExtraArgs:
            given = {"chosen": (last,), "others": others[number], **options}
            with constants():  # keys, wherever the leaves come from
                return means_over(NAME, levels, via, keys[number], specs_of(numbers), partial, **given)

        return mean

    mean = means_of(levels, keys, [others] * fragments)
    mean_of_moment = means_of(of_moments, keys_of_moments, [(("moment", each),) for each in periods])
    groups = optax.identity()
    if last:
        groups = means_over(NAME, levels, via, root, sharded, partial, chosen=range(last), **options)
    mean(0, (0,))  # checks the arguments
    if periods:
        mean_of_moment(0, (0,))
    axis, of_last = list(levels.items())[last]
    shares = shares_along(NAME, {axis: own_weights(NAME, of_last) if weights is None else weights})
    parts = _LocalUpdates(
        optax.with_extra_args_support(inner),
        optax.with_extra_args_support(outer),
        optax.with_extra_args_support(groups),
        mean,
        Placement(axis, (), _axes_of(sharded), (), partial),
        Timetable(int(every), int(fragments), int(delay)),
        float(mixing),
        shares if weighted else None,
        MomentAveraging(NAME, periods, mean_of_moment, axis),
        sharded,
    )
    return optax.GradientTransformationExtraArgs(parts.init, parts.update)  # pyright: ignore[reportArgumentType]


# ------------------------------------------------------------------------------------------------
# Consecutive fragments of a tree, of about equal size, and the steps at which each of them is exchanged


class Timetable(NamedTuple):
    """When fragment p of P is merged: at the steps t > delay with t mod every = floor((p + 1) every / P) mod every.

    every, fragments, delay: as for `local_updates`. Steps are counted from one, and may be traced.

    >>> times = Timetable(6, 2, 1)
    >>> [[t for t in range(1, 13) if times.merges(p, t)] for p in range(2)]
    [[3, 9], [6, 12]]
    >>> [[t for t in range(1, 13) if times.takes(p, t)] for p in range(2)]
    [[2, 8], [5, 11]]
    """

    every: int
    fragments: int
    delay: int

    def place(self, fragment: int) -> int:
        """t mod every at which it is merged."""
        return (fragment + 1) * self.every // self.fragments % self.every

    def merges(self, fragment: int, step: Any) -> Any:
        """Whether the fragment is merged at this step."""
        return (step % self.every == self.place(fragment)) & (step > self.delay)

    def takes(self, fragment: int, step: Any) -> Any:
        """Whether the difference of the fragment is taken at this step, to be merged `delay` steps later."""
        return (step + self.delay) % self.every == self.place(fragment)


def fragments_of(tree: Any, number: int) -> tuple[tuple[int, ...], ...]:
    """Numbers of the leaves of each fragment: consecutive, none empty, each nearest to an equal share of what is left.

    Raises:
        ValueError: fewer leaves than fragments.

    >>> fragments_of([jnp.zeros(4), jnp.zeros(3), jnp.zeros(1), jnp.zeros(9)], 2)
    ((0, 1, 2), (3,))
    """
    sizes = [math.prod(jnp.shape(leaf)) for leaf in jax.tree.leaves(tree)]
    if number == 1:
        return (tuple(range(len(sizes))),)
    if len(sizes) < number:
        raise ValueError(f"local_updates: fragments must be at most the number of leaves, {len(sizes)}; got {number}")
    ends = [0]
    for left in range(number, 1, -1):  # fragments, of about equal parts of what is left
        share = sum(sizes[ends[-1] :]) / left
        distance = lambda end: abs(sum(sizes[ends[-1] : end]) - share)  # noqa: B023
        ends.append(min(range(ends[-1] + 1, len(sizes) - left + 2), key=distance))
    ends.append(len(sizes))
    return tuple(tuple(range(a, b)) for a, b in itertools.pairwise(ends))


def cut(tree: Any, numbers: tuple[int, ...]) -> Any:
    """The tree with `optax.MaskedNode` in place of the leaves that are not of this fragment: optax passes over these.

    >>> cut({"a": 1, "b": 2}, (1,))
    {'a': MaskedNode(), 'b': 2}
    """
    leaves, structure = jax.tree.flatten(tree)
    if len(numbers) == len(leaves):
        return tree
    return jax.tree.unflatten(structure, [x if i in numbers else optax.MaskedNode() for i, x in enumerate(leaves)])


def replaced(tree: Any, numbers: tuple[int, ...], part: Any) -> Any:
    """The tree with the leaves of a fragment taken from `part`, which `cut` made."""
    leaves, structure = jax.tree.flatten(tree)
    for i, leaf in zip(numbers, jax.tree.leaves(part), strict=True):
        leaves[i] = leaf
    return jax.tree.unflatten(structure, leaves)


def check_times(name: str, every: int, fragments: int, delay: int, mixing: float) -> None:
    """Raises ValueError unless the times of an outer form go together."""
    whole = lambda x, least, most: is_integer(x, least) and x <= most
    if not whole(every, 1, 2**30):
        raise ValueError(f"{name}: every must be an integer of at least 1; got {every!r}")
    if not whole(fragments, 1, every):
        raise ValueError(f"{name}: fragments must be an integer in 1 .. every = {every}; got {fragments!r}")
    if not whole(delay, 0, every - 1):
        raise ValueError(f"{name}: delay must be an integer in 0 .. every - 1 = {every - 1}; got {delay!r}")
    if not isinstance(mixing, int | float | np.number) or not 0 <= mixing < 1:
        raise ValueError(f"{name}: mixing must be in [0, 1); got {mixing!r}")


def _check_optimizers(**optimizers: Any) -> None:
    for what, value in optimizers.items():
        if not (callable(getattr(value, "init", None)) and callable(getattr(value, "update", None))):
            raise TypeError(f"{NAME}: {what} must be an optax optimizer; got {value!r}")


def _axes_of(sharded: Any) -> tuple[str, ...]:
    """All mesh axes that cut some parameter."""
    if is_names(sharded):
        return axis_names(sharded)
    return tuple(sorted({name for spec in jax.tree.leaves(sharded) for name in axes_in(spec)}))


# ------------------------------------------------------------------------------------------------
# What a step does


class _LocalUpdates(NamedTuple):
    """The parts of the transformation.

    groups: the means of gradients over the first axes of a hierarchy. mean(number, leaves): of the differences of a
    fragment. place: where workers differ. shares: of workers in a mean, as `share_of_worker` takes them; None where
    steps have no weights. moments: of the inner optimizer. sharded: how parameters are cut.
    """

    inner: optax.GradientTransformationExtraArgs
    outer: optax.GradientTransformationExtraArgs
    groups: optax.GradientTransformationExtraArgs
    mean: Callable[[int, tuple[int, ...]], optax.GradientTransformationExtraArgs]
    place: Placement
    times: Timetable
    mixing: float
    shares: Any
    moments: MomentAveraging
    sharded: Any

    @property
    def exact(self) -> bool:
        """Whether workers are at the shared point before every step, so that the inner update is the difference."""
        return is_exact(self.times, self.mixing)

    def init(self, params: Any) -> LocalUpdatesState | LocalMomentsState:
        inner = self.inner.init(params)
        like = wide_like(params)
        point = started_at(params)
        fragments = fragments_of(like, self.times.fragments)
        pending = tuple(zeros_like(cut(like, numbers)) for numbers in fragments) if self.times.delay else ()
        with without_dense_warning():  # of a fragment, whose leaves may all be small beside the others
            means = tuple(self.mean(p, numbers).init(cut(like, numbers)) for p, numbers in enumerate(fragments))
        warn_if_dense(NAME, *(mean.about.groups for mean in means_in(means)))
        state = LocalUpdatesState(
            jnp.zeros((), jnp.int32),
            point,
            tuple(self.outer.init(cut(point, numbers)) for numbers in fragments),
            self.groups.init(params),
            means,
            own_off_device(Own(inner, pending, self._no_counts()), self.place, ROLES),
        )
        return LocalMomentsState(*state, self.moments.init(inner, params)) if self.moments.periods else state

    def _no_counts(self) -> tuple[tuple[Array, ...], ...]:
        if self.shares is None:
            return ()
        zeros = lambda number: (jnp.zeros((), jnp.float32),) * number
        since = zeros(self.times.fragments + len(self.moments.periods))
        return (since, zeros(self.times.fragments)) if self.times.delay else (since,)

    def update(
        self, grads: Any, state: Any, params: Any = None, *, weight: Any = None, at: int | None = None, **extra: Any
    ) -> tuple[Any, LocalUpdatesState | LocalMomentsState]:
        self._check(grads, state, params, weight)
        if at is not None and not is_integer(at, 1):
            raise ValueError(f"{NAME}: at must be the number of this step, an integer of at least 1; got {at!r}")
        own: Own = own_at_device(NAME, state.own, self.place)
        _check_whole_matrices(own.inner, params, self.sharded)
        since, waiting = ([list(each) for each in own.counts] + [[], []])[:2]
        since = [each + jnp.asarray(weight, jnp.float32) for each in since]
        count = state.count + 1
        now = count if at is None else int(at)
        grads, groups = self.groups.update(grads, state.groups, params)
        updates, inner = self.inner.update(grads, own.inner, params, **extra)
        updates = varying(updates, self.place.workers)
        point, outer, means, pending = state.point, [], [], []
        for p, numbers in enumerate(fragments_of(params, self.times.fragments)):
            part = lambda tree: cut(tree, numbers)  # noqa: B023
            before = _Fragment(part(point), state.outer[p], state.means[p], part(updates))
            mine = (waiting or since)[p] if since else None
            here = _Here(part(params), own.pending[p] if own.pending else None, mine)
            merges = taken = self.times.merges(p, now)
            merged = functools.partial(self._merged, self.mean(p, numbers))
            new = either(merges, merged, self._left, before, here)
            if own.pending:  # not taken where it is merged, so that point and updates are those before
                taken, reached = self.times.takes(p, now), (new.point, here.params, new.updates)
                pending.append(either(taken, _taken, lambda old: old, here.pending, *reached))
                new = new._replace(updates=not_before(pending[-1], new.updates))
            if waiting:
                waiting[p] = jnp.where(taken, since[p], waiting[p])
            if since:
                since[p] = jnp.where(taken, 0, since[p])
            point, updates = replaced(point, numbers, new.point), replaced(updates, numbers, new.updates)
            outer.append(new.outer)
            means.append(new.mean)
        moments = []
        if self.moments.periods:
            first = self.times.fragments  # of its counts
            weighed = lambda j, delta: self._weighed(delta, since[first + j] if since else None)
            inner, *others, due = self.moments.update(now, inner, params, state.moments, weighed)
            moments = others
            if since:
                since[first:] = [jnp.where(now, 0, each) for now, each in zip(due, since[first:], strict=True)]
        counts = tuple(tuple(each) for each in (since, waiting) if each)
        kept = own_off_device(Own(inner, tuple(pending), counts), self.place, ROLES)
        return updates, type(state)(count, point, tuple(outer), groups, tuple(means), kept, *moments)

    def _merged(self, mean: Any, before: "_Fragment", here: "_Here") -> "_Fragment":
        """The exchange of a fragment and what comes of it."""
        after = None if self.exact else _applied(here.params, before.updates)
        if here.pending is not None:
            difference = here.pending
        elif after is None:
            # Without a step in between, the difference is the inner update itself, before it was rounded.
            difference = negative_of(before.updates, before.point)
        else:
            difference = difference_of(before.point, after)
        direction, state = mean.update(self._weighed(difference, here.weight), before.mean)
        step, outer = self.outer.update(direction, before.outer, before.point)
        point = optax.apply_updates(before.point, step)
        updates = updates_to(point, step, here.params, after, self.mixing)
        return _Fragment(point, outer, state, varying(updates, self.place.workers))

    def _weighed(self, delta: Any, weight: Any) -> Any:
        """The difference times n W_i / sum_i W_i, where steps have weights."""
        if weight is None:
            return delta
        axis = self.place.workers
        share = jnp.asarray(share_of_worker(axis, self.shares), weight.dtype)
        whole = sum_arrays([share * weight], axis)[0] if axis_names(axis) else weight
        return jax.tree.map(lambda x: times(x, weight / not_zero(whole)), delta)

    def _left(self, before: "_Fragment") -> "_Fragment":
        """A step without an exchange, in which nothing is sent."""
        return before._replace(mean=idle(before.mean))

    def _check(self, grads: Any, state: Any, params: Any, weight: Any) -> None:
        if (weight is None) != (self.shares is None):
            what = (
                "with weighted=True update needs weight=, a number" if weight is None else "weight needs weighted=True"
            )
            raise ValueError(f"{NAME}: {what}")
        if weight is not None and jnp.shape(weight):
            raise ValueError(f"{NAME}: weight must be a number, say mask.sum(); got shape {jnp.shape(weight)}")
        if params is None:
            raise ValueError(f"{NAME}: update needs params, this worker's own: tx.update(grads, state, params)")
        axis = self.place.workers
        if not is_bound(axis):
            raise ValueError(
                f"{NAME}: no axis named {axis!r} is bound here; call it inside jax.shard_map, jax.pmap or "
                "jax.vmap(axis_name=...)"
            )
        expected = LocalMomentsState if self.moments.periods else LocalUpdatesState
        if not isinstance(state, expected):
            raise ValueError(f"{NAME}: expected a {expected.__name__}; got {type(state).__name__}")
        equal = known_equal(params, axis) if axis_size(axis) > 1 else []
        if equal:
            raise ValueError(
                f"{NAME}: params{equal[0]} is typed as equal on all workers of axis {axis!r}. Each worker steps from "
                "parameters of its own: give them a leading axis of workers and pass them by P(axis_name)."
            )


def _check_whole_matrices(inner: Any, params: Any, sharded: Any) -> None:
    """Raises ValueError where Muon would take a shard of a matrix for a matrix."""
    is_muon = lambda node: isinstance(node, optax.contrib.MuonState)
    found = [] if sharded is None else [node for node in jax.tree.leaves(inner, is_leaf=is_muon) if is_muon(node)]
    leaves = jax.tree_util.tree_leaves_with_path(params)
    specs = jax.tree.leaves(sharded)
    axes_of_leaf = [_axes_of(sharded if is_names(sharded) else specs[i]) for i in range(len(leaves))] if found else []
    for node in (each for each in found if jax.tree.leaves(each.mu)):
        for i in numbers_of(moment_places(NAME, node, params, {"mu": 1})["mu"]):
            axes = axes_of_leaf[i]
            if axes and is_bound(axes) and axis_size(axes) > 1:
                raise ValueError(
                    f"{NAME}: optax.contrib.muon orthogonalizes whole matrices, and params"
                    f"{jax.tree_util.keystr(leaves[i][0])} is cut over {', '.join(axes)}: each device would "
                    "orthogonalize its own part. Keep that matrix whole, or let AdamW take it "
                    "(muon_weight_dimension_numbers)"
                )


class _Fragment(NamedTuple):
    """Changes of a fragment by an exchange."""

    point: Any
    outer: Any
    mean: Any
    updates: Any


class _Here(NamedTuple):
    """A worker's parameters before the inner step, its difference on its way (None without delay), and what the one
    that is merged counts (None where all count alike)."""

    params: Any
    pending: Any
    weight: Any


def _taken(old: Any, point: Any, params: Any, updates: Any) -> Any:
    """The difference of a worker after its inner step, in the place of the last one."""
    return difference_of(point, _applied(params, updates))


def difference_of(point: Any, mine: Any) -> Any:
    """theta_at_start - theta_i: how far the worker came, from where it started: theta rounded as its parameters are."""
    start = lambda theta, p: rounded_to(theta, p.dtype).astype(theta.dtype)
    return jax.tree.map(lambda theta, p: start(theta, p) - p.astype(theta.dtype), point, mine)


def is_exact(times: Timetable, mixing: float) -> bool:
    """Whether workers are at the shared point before every step, so that the inner update is the difference."""
    return times.every == 1 and not mixing


def negative_of(updates: Any, point: Any) -> Any:
    """The difference of a worker that was at the shared point: its inner update, before it was rounded."""
    return jax.tree.map(lambda u, theta: -u.astype(theta.dtype), updates, point)


def updates_to(point: Any, step: Any, params: Any, after: Any, mixing: float) -> Any:
    """The updates of a worker's parameters when a fragment is merged.

    point, step: the shared point, and what led to it. after: where the worker is after its inner step; None where it
    was at the shared point before.
    """

    def followed(theta: Array, u: Array, p: Array) -> Array:
        # Parameters in 16 bits would not follow the sum of small steps, which the point keeps.
        return u.astype(p.dtype) if p.dtype == theta.dtype else towards(p, rounded_to(theta, p.dtype))

    if after is None:
        return jax.tree.map(followed, point, step, params)
    return jax.tree.map(lambda theta, p, mine: towards(p, mixed(theta, mine, mixing)), point, params, after)


def _applied(params: Any, updates: Any) -> Any:
    """`optax.apply_updates`, rounded as parameters are when they are stored, also where a compiler would not yet."""
    wider = lambda x: stored(x).astype(wide(x.dtype))
    widened = lambda tree: jax.tree.map(lambda x: wider(jnp.asarray(x)), tree)
    after = optax.apply_updates(widened(params), widened(updates))
    return jax.tree.map(lambda x, p: rounded_to(x, jnp.asarray(p).dtype), after, params)


def mixed(theta: Array, mine: Array, mixing: float) -> Array:
    """(1 - mixing) theta + mixing theta_i, in the dtype of theta_i."""
    share = lambda x: jnp.asarray(x, theta.dtype)
    both = share(1 - mixing) * theta + share(mixing) * mine.astype(theta.dtype) if mixing else theta
    return rounded_to(both, mine.dtype)


def towards(params: Array, target: Array) -> Array:
    """u with params + u = target, where such a u exists; else as near as one rounding of the larger of the two.

    >>> params, target = jnp.float32(0.1), jnp.float32(-1e-9)
    >>> print(params + towards(params, target) == target, jnp.abs(params + towards(params, target) - target) < 1e-8)
    False True
    """
    kind, wider = params.dtype, wide(params.dtype)
    plus = lambda a, b: rounded_to(a.astype(wider) + b.astype(wider), kind)  # rounded each time, by any compiler
    step = plus(target, -params)
    return plus(step, plus(target, -plus(params, step)))
