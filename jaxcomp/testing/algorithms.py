"""The laws of algorithms (`jaxcomp.base`): each is a function that raises `LawBroken` with one sentence."""

import functools
import operator
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp.base import Algorithm, Compressor, Mean, State, advance, has_role, require_algorithm, whole
from jaxcomp.state.by_leaf import by_leaf
from jaxcomp.state.workers import redistribute
from jaxcomp.testing.law import (
    AXIS,
    NOT_TRIED,
    all_hold,
    broken,
    differ,
    equal,
    gradients,
    on_devices,
    same_types,
    simulated,
)
from jaxcomp.transforms.compressed_mean import compressed_mean

__all__ = ["ALGORITHM_LAWS", "check_algorithm"]


class _Run(NamedTuple):
    """An algorithm among some workers under vmap.

    tx: compressed_mean of it. params: shapes. step(grads, state): one round, jitted. state: the first.
    """

    tx: Any
    algorithm: Algorithm
    params: Any
    workers: int
    step: Callable[[Any, Any], tuple[Any, Any]]
    state: Any

    def grads(self, seed: int) -> Any:
        """A row for each worker, which differ."""
        return gradients(self.params, self.workers, seed)


SHAPES = {"bias": (7,), "empty": (0, 3), "scalar": (), "kernel": (40, 50)}


def check_algorithm(
    algorithm: Algorithm,
    *,
    params: Any = None,
    workers: int = 4,
    seed: int = 0,
    laws: Iterable[str] | None = None,
    conserves: bool = False,
) -> tuple[str, ...]:
    """Holds an algorithm to the laws of `jaxcomp.base`, in `compressed_mean` among some workers.

    Directions are like the gradients, equal on all workers and finite; so is what `roles` call shared; gradients with
    NaN, infinities or the largest numbers leave none behind; a round can be replayed; nothing is traced a second time;
    gradients of 16 bits work; on average directions point along the mean gradient; what compressors share moves on by
    `advance`; with as many devices as workers, `shard_map` gives what `vmap` gives; the state can be handed on to fewer
    workers. Where workers differ in what they share, no other law is tried.

    No law sees whether the method is that of its paper, nor, without `conserves`, what a memory holds; nor states of
    compressors whose messages are sent within a `Cond`, nor weights of the workers.

    Args:
        algorithm: whose gradients are taken at the caller's parameters.
        params: a tree of arrays, or of their shapes, of f32; None: a matrix, a vector, a scalar and an empty array.
        workers: at least 2.
        seed: of gradients.
        laws: names of `ALGORITHM_LAWS`; None: all, but for "conserves" that is asked for by the next argument.
        conserves: whether nothing is lost, as with plain error feedback: for equal weights and memories e_i (the fields
            whose role is "memory"), of which the first are zero,
            sum_t direction_t + (1/n) sum_i e_i = sum_t (1/n) sum_i g_i,t, up to rounding. Not of memories in few bits.

    Returns:
        The names of the laws that were tried: "conserves" only where it is asked for.

    Raises:
        LawBroken: (an AssertionError) with a sentence for each law that does not hold.
        TypeError: no algorithm, or one that keeps its own iterate.
        ValueError: fewer than two workers; an unknown law; conserves=True for memories in few bits.

    >>> import jaxcomp as jc
    >>> "replayed" in jc.testing.check_algorithm(jc.error_feedback(jc.top_k(0.1)), laws=["replayed", "non-finite"])
    True
    """
    require_algorithm("testing.check_algorithm", algorithm)
    if workers < 2:
        raise ValueError(f"testing.check_algorithm: workers must be at least 2; got {workers}")
    laws = [law for law in ALGORITHM_LAWS if law != "conserves" or conserves] if laws is None else list(laws)
    if "conserves" in laws and has_role(algorithm.roles, "narrow memory"):
        rounded = "memories in few bits, which are rounded at random; check the same with memory='float32'"
        raise ValueError(f"testing.check_algorithm: conserves=True does not hold of {rounded}")
    if params is None:
        params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}
    params = jax.tree.map(lambda p: jnp.zeros(jnp.shape(p), jnp.result_type(p)), params)
    run = functools.cache(lambda: _run_of(algorithm, params, workers))
    name = repr(algorithm).strip("<>")
    return all_hold(name, ALGORITHM_LAWS, laws, lambda law: ALGORITHM_LAWS[law](run(), seed), before=["shared"])


def _run_of(algorithm: Algorithm, params: Any, workers: int) -> _Run:
    tx = compressed_mean(algorithm, AXIS)
    return _Run(tx, algorithm, params, workers, *simulated(tx, params, workers))


def _like_gradients(run: _Run, seed: int) -> None:
    """Directions have the structure, shapes and dtypes of the gradients, also of 16 bits, and are finite."""
    for dtype in ("float32", "bfloat16"):
        params = jax.tree.map(lambda p: p.astype(dtype), run.params)  # noqa: B023
        own = run if dtype == "float32" else _run_of(run.algorithm, params, run.workers)
        direction, _ = own.step(own.grads(seed), own.state)
        described = lambda tree: jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", tree)
        if described(direction) != described(params):
            broken(f"directions are like the gradients; got {described(direction)} for {described(params)}")
        _finite(f"directions for {dtype} gradients", direction)


def _finite(what: str, tree: Any) -> None:
    if not all(np.isfinite(np.float64(x)).all() for x in jax.tree.leaves(tree)):
        broken(f"{what} are finite; there are NaN or infinite entries")


def _shared(run: _Run, seed: int) -> None:
    """Directions, and state that is shared by its role, are equal on all workers."""
    rows = _rows_of(run, seed)
    for what, tree in (("directions", rows[0]), ("shared fields of the state", rows[1].shared)):
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            leaf = np.asarray(leaf)
            if any(row.tobytes() != leaf[0].tobytes() for row in leaf):
                broken(f"{what} are equal on all workers, bit for bit; {jax.tree_util.keystr(path)} differs")


def _rows_of(run: _Run, seed: int) -> tuple[Any, Any]:
    """Directions and state after two rounds, with a row for each worker also of what should be equal."""
    every = lambda tree: jax.tree.map(lambda x: jnp.broadcast_to(x, (run.workers, *jnp.shape(x))), tree)
    state = type(run.state)(run.state.local, every(run.state.shared), run.state.about)
    step = jax.jit(jax.vmap(run.tx.update, axis_name=AXIS))
    _, state = step(run.grads(seed), state)
    return step(run.grads(seed + 1), state)


def _types(run: _Run, seed: int) -> None:
    """The state after a round has the types of the one before."""
    del seed
    like = jax.tree.map(lambda p: jax.ShapeDtypeStruct((run.workers, *p.shape), p.dtype), run.params)
    same_types("an algorithm", jax.eval_shape(lambda s: s, run.state), jax.eval_shape(run.step, like, run.state)[1])


def _nonfinite(run: _Run, seed: int) -> None:
    """NaN and infinities in a gradient enter neither the direction nor the state."""
    bad = lambda g: (
        g.at[0].set(jnp.nan).at[1].set(jnp.inf) if g.ndim == 1 else g.at[0, 0].set(jnp.nan).at[1, 0].set(-jnp.inf)
    )
    grads = jax.tree.map(lambda g: bad(g) if g.size else g, run.grads(seed))
    direction, state = run.step(grads, run.state)
    _finite("directions for gradients with NaN and infinities", direction)
    _finite("memories after gradients with NaN and infinities", [state.local.algorithm, state.shared.algorithm])


def _largest(run: _Run, seed: int) -> None:
    """Gradients of the largest number leave no infinity behind, in no field of the state, over some rounds."""
    limit = float(jnp.finfo(jnp.float32).max)
    huge = lambda g: jnp.full_like(g, 0.9 * min(limit, float(jnp.finfo(g.dtype).max)))
    state = run.state
    for i in range(3):
        ordinary = run.grads(seed + i)
        direction, state = run.step(jax.tree.map(huge, ordinary) if i < 2 else ordinary, state)
        _finite("directions for gradients near the largest number", direction)
        _finite("fields of the state after such gradients", [state.local.algorithm, state.shared.algorithm])


def _replayed(run: _Run, seed: int) -> None:
    """The same gradients and state give the same bits again."""
    _, state = run.step(run.grads(seed), run.state)
    first, again = (run.step(run.grads(seed + 1), state) for _ in range(2))
    numbers = lambda out: [np.asarray(x).tobytes() for x in jax.tree.leaves(out)]
    if numbers(first) != numbers(again):
        broken("a round can be replayed: the same gradients and state give the same bits; they give others")


def _descends(run: _Run, seed: int, rounds: int = 30) -> None:
    """Summed over some rounds, directions point along the mean gradient."""
    grads, state, total = run.grads(seed), run.state, 0.0
    grads = jax.tree.map(lambda g: g + 1, grads)
    for _ in range(rounds):
        direction, state = run.step(grads, state)
        pairs = zip(jax.tree.leaves(direction), jax.tree.leaves(grads), strict=True)
        total += sum(float(np.sum(np.float64(d) * np.float64(g).mean(0))) for d, g in pairs)
    if not total > 0:
        broken(f"directions point along the mean gradient; over {rounds} rounds their inner product is {total:.6g}")


def _advanced(run: _Run, seed: int) -> str | None:
    """After a round the shared states of compressors are those that `advance` makes of the ones before.

    Once for each message that may have been sent with them. Of states that no message shows as they are kept (within a
    `Cond`, or made anew) nothing is known.
    """
    sent: dict[Any, tuple[Compressor, int]] = {}
    own = _run_of(_watched(run.algorithm, sent), run.params, run.workers)
    numbers = lambda shared: jax.tree.map(lambda x: jax.random.key_data(x) if _is_key(x) else x, shared)
    state = own.state
    for i in range(2):
        before = dict(_states_of(_whole(state, run.algorithm), run.algorithm.roles))
        _, state = own.step(own.grads(seed + i), state)
        after = dict(_states_of(_whole(state, run.algorithm), run.algorithm.roles))
        for place, (compressor, messages) in sent.items():
            shared, found = before[place].shared, ""
            for _ in range(messages):
                shared = advance(compressor, shared)
                found = differ(numbers(after[place].shared), numbers(shared), 1e-6, 1e-7)
                if not found:
                    break
            if found:
                broken(
                    "after a round what compressors share is what advance makes of it, or every round draws the same: "
                    f"keep sent.states; of {compressor.spec.name} in {place[0]}[{place[1]}] {found}"
                )
    return None if sent else NOT_TRIED


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _whole(state: Any, algorithm: Algorithm) -> Any:
    """State of the algorithm as one tree, with leading axes of workers where they differ."""
    return whole(State(state.local.algorithm, state.shared.algorithm), algorithm.roles)


def _states_of(state: Any, roles: Any, path: str = "") -> Iterator[tuple[tuple[str, int], State]]:
    """The states of compressors in that of an algorithm: (field, group) -> `State`."""
    if isinstance(roles, Mapping) and state != ():
        for name, role in roles.items():
            part = state[name] if isinstance(name, int) else getattr(state, name)
            yield from _states_of(part, role, f"{path}.{name}" if path else str(name))
    elif roles == "compressor":
        for i, one in enumerate(state):
            yield (path, i), one


def _watched(algorithm: Algorithm, sent: dict[Any, tuple[Compressor, int]]) -> Algorithm:
    """The same algorithm, which writes down with which compressor the states that it keeps are sent.

    sent: (field, group) of a state -> its compressor, and the number of messages of a round.
    """

    def update(here: Any, grads: Any, state: Any) -> Any:
        kept = list(_states_of(state, algorithm.roles))
        steps, reply, asked = algorithm.update(here, grads, state), None, []
        if not isinstance(steps, Generator):
            return steps
        while True:
            try:
                request = steps.send(reply)
            except StopIteration as end:
                sent.update((place, (compressor, len(asked))) for mean in asked for place, compressor in mean)
                return end.value
            means = [each for each in (request if isinstance(request, list) else [request]) if isinstance(each, Mean)]
            asked += [list(_sent_with(mean, kept)) for mean in means]
            reply = yield request

    return algorithm._replace(update=update)


def _sent_with(mean: Mean, kept: list[Any]) -> Iterator[tuple[Any, Compressor]]:
    for compressor, used in zip(mean.compressors, mean.states, strict=True):
        arrays = jax.tree.leaves(used.shared)
        for place, state in kept:
            own = jax.tree.leaves(state.shared)
            if own and len(own) == len(arrays) and all(map(operator.is_, own, arrays)):
                yield place, compressor


def _conserves(run: _Run, seed: int, rounds: int = 5) -> None:
    """The directions of some rounds and the mean of the memories add up to the mean gradients of these rounds."""
    state, sent, given = run.state, [], []
    for i in range(rounds):
        grads = run.grads(seed + i)
        direction, state = run.step(grads, state)
        sent.append(direction)
        given.append(jax.tree.map(lambda g: np.float64(g).mean(0), grads))
    groups = state.about.groups.groups
    memory = by_leaf(state, tuple(_memories(state.local.algorithm, run.algorithm.roles, groups, run.workers)))
    left = jax.tree.map(lambda e, p: np.float64(e).reshape(run.workers, *p.shape).mean(0), memory, run.params)
    added = lambda trees: jax.tree.map(lambda *x: sum(map(np.float64, x)), *trees)
    said = f"over {rounds} rounds the directions and the mean of the memories add up to the mean gradients (conserves)"
    equal(said, added([*sent, left]), added(given), 1e-5, 1e-5)


def _memories(local: Any, roles: Any, groups: Any, workers: int) -> list[Any]:
    """For each group the sum of the fields whose role is "memory", [workers, 1, ...]."""
    zeros = [jnp.zeros((workers, 1, *group.shape)) for group in groups]  # as it is kept under vmap
    if local == ():
        return zeros
    if roles and all(isinstance(name, int) for name in roles):  # parts of the tree
        of_part = lambda i: [group for group in groups if group.part == i]
        each = {i: iter(_memories(local[i], roles[i], of_part(i), workers)) for i in roles}
        return [next(each[group.part]) for group in groups]
    found = zeros
    for name, role in roles.items():
        part = getattr(local, name)
        if isinstance(role, Mapping):
            found = list(map(operator.add, found, _memories(part, role, groups, workers)))
        elif role == "memory" and part != ():
            found = [one if isinstance(x, tuple) else one + x for one, x in zip(found, part, strict=True)]
    return found


def _worlds(run: _Run, seed: int) -> str | None:
    """`shard_map` gives what `vmap` gives, to rounding. Nothing is tried with fewer devices than workers."""
    if jax.device_count() < run.workers:
        return NOT_TRIED
    step, state = on_devices(run.tx, run.params, run.workers)
    mapped = run.state
    for i in range(2):
        a, state = step(run.grads(seed + i), state)
        b, mapped = run.step(run.grads(seed + i), mapped)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        # Dithering may round a norm, and so a level at its edge, differently when vmapped.
        close = np.isclose(x, y, rtol=1e-4, atol=1e-4)
        if close.size and not close.mean() > 0.999:
            broken(f"shard_map gives what vmap gives; {close.size - close.sum()} of {close.size} entries differ")


def _handed_on(run: _Run, seed: int) -> str | None:
    """The state can be handed on to fewer workers by its roles, unless one is "gradient"."""
    if has_role(run.algorithm.roles, "gradient"):
        return NOT_TRIED
    _, state = run.step(run.grads(seed), run.state)
    fewer = _run_of(run.algorithm, run.params, run.workers - 1)
    new = redistribute(state, fewer.state)
    direction, _ = fewer.step(fewer.grads(seed), new)
    _finite("directions after redistribute to one worker less", direction)


ALGORITHM_LAWS: dict[str, Callable[[_Run, int], str | None]] = {
    "like gradients": _like_gradients,
    "shared": _shared,
    "traced once": _types,
    "non-finite": _nonfinite,
    "largest": _largest,
    "replayed": _replayed,
    "descends": _descends,
    "advanced": _advanced,
    "conserves": _conserves,
    "worlds": _worlds,
    "handed on": _handed_on,
}
