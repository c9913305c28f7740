"""One worker of local updates as a process of its own: exchanges run in a thread while the next steps are computed.

Every message crosses as the bytes of `jc.wire`. What comes of it is what `local_updates` with via="gather" makes of the
same steps, to the bit where both round alike, though that waits for each exchange: a difference is taken at step t,
handed to the thread, and merged at step t + delay; only then the worker waits, if it is not there yet.
"""

import functools
import json
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import optax

from jaxcomp.arrays import root_key, wide_like, wrap_key
from jaxcomp.base import Algorithm, Compressor, Round, State, answered, require_algorithm, sides, whole
from jaxcomp.checks import is_integer
from jaxcomp.compressors.tree import each_of
from jaxcomp.exchange.agreement import Options, check_equal, greeting, greeting_of, merged, probe
from jaxcomp.exchange.axes import Placement
from jaxcomp.exchange.binding import exchange_of, own_weights
from jaxcomp.groups import join, split
from jaxcomp.payloads import CODES
from jaxcomp.state.moments import moment_of, moment_places, replaced_by
from jaxcomp.transforms.bytes_exchange import BytesExchange, Gather
from jaxcomp.transforms.local_updates import (
    MOMENTS,
    Timetable,
    check_times,
    cut,
    difference_of,
    fragments_of,
    is_exact,
    negative_of,
    replaced,
    updates_to,
)
from jaxcomp.transforms.moments import away_from, check_moments, moved, numbers_of, own_moment, started_at

__all__ = ["LocalProcess", "local_process"]

Array = jax.Array
NAME = "local_process"


def local_process(
    inner: optax.GradientTransformation,
    outer: optax.GradientTransformation,
    algorithm: Algorithm,
    gather: Gather,
    index: int,
    size: int,
    *,
    every: int,
    fragments: int = 1,
    delay: int = 0,
    mixing: float = 0.0,
    moments: Mapping[str, int] | None = None,
    moments_algorithm: Algorithm | None = None,
    seed: int | Array = 0,
    code: str = "best",
) -> "LocalProcess":
    """One worker of `local_updates` on the host, whose exchanges run in a thread beside its steps.

    Args:
        inner, outer, algorithm, every, fragments, delay, mixing, moments, moments_algorithm: as for `local_updates`. A
            step that averages a moment waits for it, and for the differences that were sent before.
        gather: bytes of this worker -> a list of those of all workers in their order, its own among them. Called in
            one thread, one call after the other, and equally often, in the same order, by every worker: once after
            `start`, with the options, and then for each message.
        index, size: number of this worker, and how many there are.
        seed: equal on all workers.
        code: of the messages, as for `wire.encode`. "best" is for sparse ones; of a million entries in four bits it
            takes 0.25 s to save a tenth of what "fixed" sends.

    Returns:
        `LocalProcess`; close it, or use it as a context. Workers weigh alike, or as the compressor says (`dagc`);
        parameters are whole at each of them.

    Raises:
        TypeError, ValueError: as `local_updates`; index is not below size, or the compressor brings weights of another
            number of workers. From a step: workers were built with other options, which the message names; gather
            returned no list of as many messages as there are workers, not this worker's own in its place, or messages
            of another exchange or of other shapes.

    >>> import jax.numpy as jnp, optax, jaxcomp as jc
    >>> alone = lambda message: [message]
    >>> with jc.local_process(optax.sgd(0.5), optax.sgd(1.0), jc.direct(jc.identity()), alone, 0, 1, every=2) as worker:
    ...     w = worker.start(jnp.zeros(2))
    ...     for _ in range(2):
    ...         w = worker.step(w - jnp.array([1.0, 3.0]), w)
    >>> print(w, worker.point)
    [0.75 2.25] [0.75 2.25]
    """
    check_times(NAME, every, fragments, delay, mixing)
    for what, value, least in (("size", size, 1), ("index", index, 0)):
        if not is_integer(value, least):
            raise ValueError(f"{NAME}: {what} must be an integer of at least {least}; got {value!r}")
    if index >= size:
        raise ValueError(f"{NAME}: index must be in 0 .. size - 1 = {size - 1}; got {index}")
    if code not in CODES:
        raise ValueError(f"{NAME}: code must be one of {', '.join(CODES)}; got {code!r}")
    periods = check_moments(NAME, moments, moments_algorithm)
    for each in (algorithm,) if moments_algorithm is None else (algorithm, moments_algorithm):
        weights = own_weights(NAME, require_algorithm(NAME, each))
        if weights is not None and len(weights) != size:
            raise ValueError(f"{NAME}: size must be {len(weights)}, as many as the compressor has weights; got {size}")
    times, place = Timetable(int(every), int(fragments), int(delay)), (int(index), int(size))
    shared = periods, algorithm if moments_algorithm is None else moments_algorithm
    return LocalProcess(inner, outer, algorithm, gather, place, times, float(mixing), seed, code, shared)


class _Part(NamedTuple):
    """One fragment, or one moment.

    numbers: of its leaves. algorithm, link: of its exchange. compressors: of its groups. split, join: to groups and
    back, compiled. mean, outer: states. pending: what the thread makes of the difference on its way.
    """

    numbers: tuple[int, ...]
    algorithm: Algorithm
    link: BytesExchange
    compressors: tuple[Compressor, ...]
    split: Callable[[Any], Any]
    join: Callable[[Any], Any]
    mean: Any
    outer: Any
    pending: "Future | None" = None


class LocalProcess:
    """The functions that `local_process` returns.

    point: theta, which all workers share. moments: name -> the moment that all share. sent_bytes: of this worker's
    messages so far, to all others. waited: seconds that steps spent waiting for exchanges so far. waited_for_start:
    seconds until the options of all workers were here.
    """

    def __init__(
        self,
        inner: optax.GradientTransformation,
        outer: optax.GradientTransformation,
        algorithm: Algorithm,
        gather: Gather,
        place: tuple[int, int],
        times: Timetable,
        mixing: float,
        seed: Any,
        code: str,
        moments: tuple[tuple[tuple[str, int], ...], Algorithm],
    ):
        self._outer, self._algorithm, self._times, self._mixing = outer, algorithm, times, mixing
        link_of = lambda algorithm: BytesExchange(gather, *place, code, own_weights(NAME, algorithm))
        self._periods, self._of_moments = moments
        self._link, self._place = link_of(algorithm), place
        self._link_of_moments = self._link if self._of_moments is algorithm else link_of(self._of_moments)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=NAME)
        self._root = root_key(seed)
        self._count, self._parts, self.point = 0, [], None
        self.waited = self.waited_for_start = 0.0
        self._greeting: Future | None = None
        times_of = {"every": times.every, "fragments": times.fragments, "delay": times.delay, "mixing": mixing}
        times_of |= {"moments": self._periods} if self._periods else {}
        self._others = tuple((times_of | {"size": place[1], "message code": code}).items())

        self._exact = exact = is_exact(times, self._mixing)

        def step(grads, state, params):
            updates, state = inner.update(grads, state, params)
            return optax.apply_updates(params, updates), state, updates if exact else None

        self._inner, self._step, self._merge = inner, jax.jit(step), jax.jit(self._merged)
        self._take, self._negative = jax.jit(difference_of), jax.jit(negative_of)
        self._moments: dict[str, _Part] = {}
        self.moments: dict[str, Any] = {}
        self._away = jax.jit(away_from)
        self._average = jax.jit(self._averaged, static_argnums=0)

    @property
    def sent_bytes(self) -> int:
        return sum(link.sent_bytes for link in {self._link, self._link_of_moments})

    def metrics(self) -> dict[str, int | float]:
        """Plain numbers for a logger: steps, bytes sent and seconds waited so far.

        waited: for exchanges that were not there when a step needed them. waited_for_start: for the greetings of all.
        Who waits least is the slowest worker, for which the others wait.
        """
        return {
            "steps": self._count,
            "sent_bytes": self.sent_bytes,
            "waited": self.waited,
            "waited_for_start": self.waited_for_start,
        }

    def start(self, params: Any) -> Any:
        """Begins at these parameters, equal on all workers; returns them.

        In the thread all workers exchange their options; where these differ, the first step or exchange raises.
        """
        like, self.point = wide_like(params), started_at(params)
        self._state, self._count = self._inner.init(params), 0
        self._parts, options = [], []
        others = (*self._others, ("outer", probe(self._outer)))
        for p, numbers in enumerate(fragments_of(params, self._times.fragments)):
            root = jax.random.fold_in(self._root, p) if self._times.fragments > 1 else self._root
            outer = self._outer.init(cut(self.point, numbers))
            part, own = self._part(self._algorithm, self._link, numbers, cut(like, numbers), root, others, outer)
            self._parts.append(part)
            options.append(own)
        places = moment_places(NAME, self._state, params, dict(self._periods))
        for j, (name, _) in enumerate(self._periods):
            start, numbers = moment_of(self._state, places[name], params), numbers_of(places[name])
            like, root = wide_like(start), jax.random.fold_in(self._root, MOMENTS + j)
            self.moments[name] = started_at(start)
            part, own = self._part(self._of_moments, self._link_of_moments, numbers, like, root, others, ())
            self._moments[name] = part
            options.append(own)
        self._places = places
        self._greeting = self._thread.submit(self._greeted, merged(options))
        return params

    def _part(
        self, algorithm: Algorithm, link: BytesExchange, numbers: Any, like: Any, root: Array, others: Any, outer: Any
    ) -> tuple[_Part, Any]:
        """A fragment or moment before its first exchange, and the options of that."""
        run = exchange_of(NAME, algorithm, Placement(None), "gather", root, others=others)
        mean = run.init(like)
        apart, together = (jax.jit(functools.partial(function, mean.about.groups)) for function in (split, join))
        compressors = each_of(algorithm, mean.about.groups.groups)
        part = _Part(numbers, algorithm, link, compressors, apart, together, mean, outer)
        return part, json.loads(run.options(mean.about.groups))

    def _greeted(self, options: Options) -> None:
        """In the thread: sends the options, and compares those of all workers."""
        began = time.perf_counter()
        arrived = self._link.gathered(greeting(options))
        self.waited_for_start = time.perf_counter() - began
        each = [greeting_of(NAME, worker, data) for worker, data in enumerate(arrived)]
        check_equal(NAME, each, [f"worker {worker}" for worker in range(len(each))])

    def step(self, grads: Any, params: Any) -> Any:
        """The parameters after a step with this gradient."""
        if not self._parts or self._greeting is None:
            raise ValueError(f"{NAME}: call start(params) before the first step")
        if self._greeting.done():
            self._greeting.result()  # raises where options differ
        self._count += 1
        after, self._state, updates = self._step(grads, self._state, params)
        for p, part in enumerate(self._parts):
            if self._times.takes(p, self._count):
                here = cut(self.point, part.numbers)
                if self._exact:  # without a step in between: the inner update itself, before it was rounded
                    difference = self._negative(cut(updates, part.numbers), here)
                else:
                    difference = self._take(here, cut(after, part.numbers))
                self._parts[p] = part = part._replace(pending=self._thread.submit(self._exchanged, part, difference))
            if self._times.merges(p, self._count) and part.pending is not None:
                after = self._joined(p, part, params, after)
        self._average_moments(params)
        return after

    def _average_moments(self, params: Any) -> None:
        """Sends all moments that are due, then waits for them."""
        own = lambda name: moment_of(self._state, self._places[name], params)
        due = [name for name, period in self._periods if self._count % period == 0]
        away = {name: self._away(self.moments[name], own(name)) for name in due}
        sent = {name: self._thread.submit(self._exchanged, self._moments[name], away[name]) for name in due}
        for name in due:
            direction, mean = self._waited_for(sent[name])
            self.moments[name], mine = self._average(name, self.moments[name], direction, own(name))
            self._state = replaced_by(self._state, self._places[name], mine)
            self._moments[name] = self._moments[name]._replace(mean=mean)

    def _averaged(self, name: str, point: Any, direction: Any, own: Any) -> tuple[Any, Any]:
        point = moved(name, point, direction)
        return point, own_moment(name, point, own)

    def _waited_for(self, pending: Future) -> Any:
        began = time.perf_counter()
        found = pending.result()
        self.waited += time.perf_counter() - began
        return found

    def _joined(self, p: int, part: _Part, before: Any, after: Any) -> Any:
        assert part.pending is not None
        direction, mean = self._waited_for(part.pending)
        here = [cut(tree, part.numbers) for tree in (self.point, before, after)]
        point, outer, mine = self._merge(direction, part.outer, *here)
        self._parts[p] = part._replace(mean=mean, outer=outer, pending=None)
        self.point = replaced(self.point, part.numbers, point)
        return replaced(after, part.numbers, mine)

    def _merged(self, direction: Any, outer: Any, point: Any, before: Any, after: Any) -> tuple[Any, Any, Any]:
        step, outer = self._outer.update(direction, outer, point)
        point = optax.apply_updates(point, step)
        updates = updates_to(point, step, before, None if self._exact else after, self._mixing)
        return point, outer, optax.apply_updates(before, updates)

    def _exchanged(self, part: _Part, difference: Any) -> tuple[Any, Any]:
        """In the thread: the mean of what all workers sent, and the state of the mean."""
        assert self._greeting is not None
        self._greeting.result()  # made in this thread before
        local, shared = part.mean.local, part.mean.shared
        key = jax.random.fold_in(jax.random.fold_in(wrap_key(shared.key), shared.count), self._place[0])
        roles, groups = part.algorithm.roles, part.mean.about.groups.groups
        mine = whole(State(jax.tree.map(lambda x: x[0], local.algorithm), shared.algorithm), roles)
        here = Round(key, groups, part.compressors, part.link.index, part.link.size)
        steps = part.algorithm.update(here, part.split(difference), mine)
        direction, after = answered(steps, part.link.answer)
        new = sides(after, roles)
        local = local._replace(algorithm=jax.tree.map(lambda x: x[None], new.local))
        shared = shared._replace(count=shared.count + 1, algorithm=new.shared)
        return jax.block_until_ready((part.join(direction), type(part.mean)(local, shared, part.mean.about)))

    def state(self) -> dict[str, Any]:
        """All that this worker remembers, as arrays. Waits for its exchanges on their way, which it keeps, too."""
        parts = [(q.mean, q.outer, None if q.pending is None else q.pending.result()) for q in self._parts]
        found = {"count": self._count, "point": self.point, "inner": self._state, "parts": parts}
        moments = {name: (self.moments[name], part.mean) for name, part in self._moments.items()}
        return found | ({"moments": moments} if moments else {})

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on from what `state` returned; call it after `start`."""
        self._count, self.point, self._state = int(state["count"]), state["point"], state["inner"]
        for p, (mean, outer, arrived) in enumerate(state["parts"]):
            pending = None
            if arrived is not None:
                pending = Future()
                pending.set_result(arrived)
            self._parts[p] = self._parts[p]._replace(mean=mean, outer=outer, pending=pending)
        for name, (point, mean) in state.get("moments", {}).items():
            self.moments[name], self._moments[name] = point, self._moments[name]._replace(mean=mean)

    def close(self) -> None:
        """Waits for the exchanges on their way, which the others wait for, too."""
        self._thread.shutdown(wait=True)

    def __enter__(self) -> "LocalProcess":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()
