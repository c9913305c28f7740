"""Another number of workers: what n of them remember, handed on to n', by the roles of its parts."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

from jaxcomp.algorithms.narrow import Narrow
from jaxcomp.arrays import is_left_out
from jaxcomp.exchange.rearrange import (
    LeadingAxes,
    Misfit,
    Move,
    change_of,
    check_shapes,
    each_leaf,
    join_lead,
    kept_groups,
    map_alike,
    modulo,
    on_host,
    placed,
    split_lead,
    taken_over,
)
from jaxcomp.exchange.spread import pooled
from jaxcomp.exchange.state import MeanState, OwnState, check_rows, is_mean, is_own, means_in
from jaxcomp.paths import same_leaves
from jaxcomp.state.moments import LocalMomentsState, moment_of, moment_places, own_where_zero, replaced_by

__all__ = ["redistribute"]


def redistribute(old: Any, new: Any, *, keep: str = "sum") -> Any:
    """The state of an optimizer for another number of workers, with nothing lost of what they remember.

    Memories and velocities (what was not sent yet) keep their sum over the workers exactly: new workers start with
    zero, and what those that are gone remembered is added to what the others do. A sum of floats is seldom a float, so
    the last worker or two take what rounding leaves over, instead of memories of their own; so two workers are as good
    as 48 bits, four as 72, while a single one has to round. Memories in fewer bits (`memory="int8"`) are read, handed
    on so, and rounded to nearest. DIANA's shifts start from their mean, which all know.
    Where their number stays, workers keep their shifts. Adaptive state of compressors (stages of SIDCo) is taken over
    from worker i mod n. Parameters, moments, counters and keys stay as they are; measurements are those of the new
    state, and so are plans for each worker (ratios, matrices) that have another shape there. What `optax.MultiSteps`
    has accumulated is handed on as a memory is. Where workers share moments (`local_updates` with moments), new ones
    begin with the shared ones and the rest of the inner optimizer's state of worker i mod n; without, with all of that.

    In a hierarchy any axis may have another length: the workers of the first level are those of all groups together;
    group j goes on from the mean shift of group j mod the old number, and from the mean of the groups' momenta. With
    sharded parameters each shard keeps its own sum. The number of shards may change, too, if parameters are cut along
    one mesh axis: memories and shifts are put together and cut anew.

    The direction is a mean over the workers: with fewer workers an unchanged sum of memories is delivered in larger
    portions. keep="mean" multiplies memories by n' / n, so that what is still to be delivered stays what it was (with
    equal weights).

    Args:
        old: state for n workers: arrays on this host (NumPy, or JAX arrays that are addressable or replicated).
        new: state freshly made for n' workers by `init_state`, with the same optimizer.
        keep: "sum" or "mean".

    Returns:
        State for n' workers, laid out like `new`, some arrays of which it holds.

    Raises:
        ValueError: the states are of different optimizers or parameters; a part of an algorithm's state has no role
            (`Algorithm.roles`), or one that does not fit it, or that no other worker could go on from; a state has lost
            all rows but one; parameters are in other shards and cut along several mesh axes, via="two_shot", or FSDP.

    >>> import jax.numpy as jnp, jaxcomp as jc
    >>> tx = jc.compressed_mean(jc.error_feedback(jc.top_k(k=1)), "data")
    >>> old, axes = jc.init_state(tx, jnp.zeros(2), 2, "data")
    >>> step = jax.vmap(tx.update, in_axes=(0, axes), out_axes=(None, axes), axis_name="data")
    >>> _, old = jax.jit(step)(jnp.array([[3.0, 1.0], [4.0, 2.0]]), old)
    >>> new, _ = jc.init_state(tx, jnp.zeros(2), 3, "data")
    >>> print(jc.redistribute(old, new).local.algorithm.memory[0][:, 0])
    [[0. 1.]
     [0. 2.]
     [0. 0.]]
    """
    if keep not in ("sum", "mean"):
        raise ValueError(f'redistribute: keep must be "sum" or "mean"; got {keep!r}')
    try:
        return _optimizer(old, new, keep)
    except Misfit as misfit:
        where = f"at {misfit.path}: " if misfit.path else ""
        raise ValueError(f"redistribute: {where}{misfit.what}") from None


def _optimizer(old: Any, new: Any, keep: str) -> Any:
    rows = lambda node: (node.about.placement.names, _rows(node) // _groups(node))
    sizes = [dict(map(rows, means_in(tree))) for tree in (old, new)]

    def one(old, new):
        if is_mean(old) or is_own(old):
            return _mean(old, new, sizes, keep) if is_mean(old) else _own(old, new, keep)
        if isinstance(old, optax.MultiStepsState):
            return _steps(old, new, walk, keep)
        if isinstance(old, LocalMomentsState):
            return _moments(old, new, walk)
        return placed(on_host(old), new)

    def walk(old, new):
        kinds = (optax.MultiStepsState, LocalMomentsState)
        special = lambda node: is_mean(node) or is_own(node) or isinstance(node, kinds)
        return map_alike(one, old, new, special)

    return walk(old, new)


def _moments(old: LocalMomentsState, new: Any, walk: Callable[[Any, Any], Any]) -> LocalMomentsState:
    """Redistributes it as a tuple; workers that are new begin with the shared moments."""
    if not isinstance(new, LocalMomentsState) or set(old.moments) != set(new.moments):
        raise Misfit("the two states are of different optimizers: they share different moments")
    found = LocalMomentsState(*walk(tuple(old), tuple(new)))
    inner, before = found.own.local.inner, jax.tree.leaves(old.own.local)
    known = np.shape(before[0])[0] if before else 0
    lead = np.ndim(
        next(iter(found.moments.values())).mean.local.counts.size
    )  # under vmap rows have an axis of their own
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x)[lead:], x.dtype), inner)
    places = moment_places("redistribute", one, found.point, found.moments)
    for name, moment in found.moments.items():

        def begun(u, rows):
            rows = np.array(on_host(rows))
            shared = np.asarray(jax.numpy.asarray(on_host(u)).astype(rows.dtype))
            rows[known:] = own_where_zero(name, shared[None], rows[known:], np)  # noqa: B023
            return rows

        own = moment_of(inner, places[name], found.point)
        own = jax.tree.map(lambda u, rows: placed(begun(u, rows), rows), moment.point, own)
        inner = replaced_by(inner, places[name], own)
    own = found.own
    return found._replace(own=OwnState(own.local._replace(inner=inner), own.placement, own.roles))


def _own(old: OwnState, new: OwnState, keep: str) -> OwnState:
    """Redistributes an `OwnState`: "memory" keeps its sum, the rest is that of worker i mod n."""
    if not is_own(new) or (old.placement, old.roles) != (new.placement, new.roles):
        raise Misfit(f"the two states are of different optimizers: one has {old.placement}, the other does not")

    def moved(role, old, new):
        rows, workers = on_host(old), np.shape(new)[0]
        return placed(pooled(rows, workers, keep) if role == "memory" else modulo(rows, (workers,)), new)

    fields = {
        name: map_alike(functools.partial(moved, role), getattr(old.local, name), getattr(new.local, name))
        for name, role in old.roles
    }
    return OwnState(type(new.local)(**fields), new.placement, new.roles)


def _rows(mean: MeanState) -> int:
    return np.shape(mean.local.counts.size)[0]


def _groups(mean: MeanState) -> int:
    """Groups and shards together."""
    return np.shape(mean.shared.count)[0] if mean.about.placement.outer else 1


def _cut(mean: MeanState, sizes: dict[tuple[str, ...], int]) -> LeadingAxes:
    later = mean.about.placement.later
    if not set(later) <= set(sizes):
        raise Misfit("one level of a hierarchy; give the state of the whole optimizer")
    groups = math.prod(sizes[axes] for axes in later)
    return LeadingAxes(groups, _groups(mean) // groups, sizes[mean.about.placement.names])


def _mean(old: MeanState, new: MeanState, sizes: list[dict], keep: str) -> MeanState:
    for state in (old, new):
        try:
            check_rows("", state)
        except ValueError as error:
            raise Misfit(str(error).removeprefix(": ")) from None
    same = lambda a, b: (a.placement, a.roles) == (b.placement, b.roles) and same_leaves(a.groups.tree, b.groups.tree)
    if old.about.placement.shards != new.about.placement.shards and old.about.roles == new.about.roles:
        where = lambda shards: f"cut over {', '.join(shards)}" if shards else "whole"
        one, other = (where(state.about.placement.shards) for state in (old, new))
        raise Misfit(
            f"the parameters are {one} in the one and {other} in the other (a mesh axis of length 1 cuts "
            "nothing). jc.compressed_mean(..., sharded=specs) with jc.init_state names the axis whatever its length, "
            "and its shards may become fewer, down to one"
        )
    if not same(old.about, new.about):
        raise Misfit(
            f"the two states are of different optimizers or parameters: {old.about.placement} with "
            f"{dict(old.about.roles)}, and {new.about.placement} with {dict(new.about.roles)}"
        )
    place = old.about.placement
    cuts = [_cut(state, size) for state, size in zip((old, new), sizes, strict=True)]
    owners = (old.about.owners, new.about.owners)
    move = Move(cuts[0], cuts[1], keep, place.shards, bool(place.outer), old.about.groups, new.about.groups, owners)
    check_shapes(move)
    mine, fresh = ((state.local.algorithm, state.shared.algorithm) for state in (old, new))
    local, shared = _by_roles(old.about.roles, mine, fresh, move)
    route_local, route_shared = _route(old, new, move)
    same_key = {
        name: kept_groups(getattr(old.shared, name), getattr(new.shared, name), move) for name in ("count", "key")
    }
    return MeanState(
        new.local._replace(algorithm=local, route=route_local),
        new.shared._replace(algorithm=shared, route=route_shared, **same_key),
        new.about,
    )


def _by_roles(roles: tuple, old: tuple[Any, Any], new: tuple[Any, Any], move: Move) -> tuple[Any, Any]:
    """Local and shared side of the state of an algorithm (`base.sides`), field by field."""
    if _is_empty(old) or _is_empty(new):  # of a part of the tree that has no leaf
        return new
    if roles and isinstance(roles[0][0], int):
        return _by_part(roles, old, new, move)
    local, shared = new
    for name, role in roles:
        if not hasattr(local, name):
            continue  # a role for nothing
        before, after = ((getattr(mine, name), getattr(ours, name)) for mine, ours in (old, new))
        if _is_empty(before) and _is_empty(after):
            continue
        if isinstance(role, tuple):
            mine, ours = _by_roles(role, before, after, move)
        else:
            _check_role(name, role, before, move)
            mine, ours = _ROLES[role](name, before, after, move)
        local, shared = local._replace(**{name: mine}), shared._replace(**{name: ours})
    return local, shared


Pair = tuple[Any, Any]  # local and shared side of one field, () where there is nothing


def _is_empty(pair: Pair) -> bool:
    return all(map(is_left_out, pair))


def _check_role(name: str, role: Any, pair: Pair, move: Move) -> None:
    """Refuses a field that is not laid out like the gradients where such are moved."""
    rows = (math.prod(move.old), math.prod(move.old[:2]) if move.leads else 1)
    in_leaves = role in ("memory", "average", "shift") or (move.leads and role in ("momentum", "iterate"))
    for part, lead in zip(pair, rows, strict=True):
        if in_leaves and not is_left_out(part) and not _is_laid_out(part, lead, move):
            raise Misfit(
                f"{name} has the role {role!r}, and is not laid out like the gradients. A number of one worker is "
                "added up over the workers (base.Sum) and kept as 'coin'"
            )


def _is_laid_out(part: Any, lead: int, move: Move) -> bool:
    """Whether it is an array for each group, or () for what is left out."""
    like = move.before.like
    same = lambda x, array: is_left_out(x) or math.prod(np.shape(x)) == lead * math.prod(array.shape)
    arrays = type(part) is tuple and all(is_left_out(x) or hasattr(x, "shape") for x in part)
    return arrays and len(part) == len(like) and all(map(same, part, like))


def _by_part(roles: tuple, old: Any, new: Any, move: Move) -> tuple[Any, Any]:
    """Redistributes algorithms of parts of the tree, each with the groups of its part; without leaves, no state."""
    done = []
    for i, role in roles:
        mine, fresh = (old[0][i], old[1][i]), (new[0][i], new[1][i])
        part = move._replace(before=move.before.part(i), after=move.after.part(i))
        done.append(_by_roles(role, mine, fresh, part))
    return tuple(local for local, _ in done), tuple(shared for _, shared in done)


def _memory(name: str, old: Pair, new: Pair, move: Move) -> Pair:
    """All workers with the same shard, of whatever group, are one pool: their directions are averaged in the end."""
    groups, _, workers = move.new

    def one(rows):
        pool = pooled(join_lead(rows.swapaxes(1, 2), 2), groups * workers, move.keep)
        return split_lead(pool, (groups, workers)).swapaxes(1, 2)

    return each_leaf(old[0], new[0], move, one), ()


def _narrow_memory(name: str, old: Pair, new: Pair, move: Move) -> Pair:
    """Read, handed on as a memory is, and rounded once more."""
    is_narrow = lambda node: isinstance(node, Narrow)
    if not all(map(is_narrow, jax.tree.leaves(old[0], is_leaf=is_narrow))):
        raise Misfit(f'{name} has the role "narrow memory", and is no `Narrow`')
    before, after = _widened(old[0], move.before.like), _widened(new[0], move.after.like)
    _check_role(name, "memory", (before, ()), move)
    wide, _ = _memory(name, (before, ()), (jax.tree.map(jax.numpy.asarray, after), ()), move)
    place = lambda x, like: Narrow(*map(placed, Narrow.of(np.asarray(x), kind=like.kind), like))
    return jax.tree.map(place, wide, new[0]), ()


def _widened(memories: tuple[Narrow, ...], like: Any) -> tuple[np.ndarray, ...]:
    """The numbers of each group, without what fills the last block up."""
    each = zip(memories, like, strict=False)  # other numbers of groups are refused with the memory
    return tuple(Narrow(*map(on_host, narrow)).values(math.prod(x.shape)) for narrow, x in each)


def _average(name: str, old: Pair, new: Pair, move: Move) -> Pair:
    """Keeps the rows where the number of workers stays; others start from the mean of all."""

    def one(rows):
        if (move.old.groups, move.old.workers) != (move.new.groups, move.new.workers):
            rows = rows.mean((0, 2), dtype=np.float64, keepdims=True).astype(rows.dtype)
        return modulo(rows, move.new)

    return each_leaf(old[0], new[0], move, one), ()


def _shift(name: str, old: Pair, new: Pair, move: Move) -> Pair:
    """Workers of group j: those of group j mod the old number, if they are as many; else they start from its mean."""
    shared = _momentum(name, old, new, move, mean=False)[1]
    if move.old.workers == move.new.workers:
        return each_leaf(old[0], new[0], move, lambda rows: modulo(rows, move.new)), shared
    lead = move.old[:2] if move.leads else (1, 1)

    def start(rows):
        rows = modulo(rows, move.new[:2])[:, :, None]
        return np.broadcast_to(rows, (*move.new, *rows.shape[3:]))

    return each_leaf(old[1], new[0], move, start, lead), shared


def _momentum(name: str, old: Pair, new: Pair, move: Move, mean: bool = True) -> Pair:
    """Takes the momentum of group j mod their old number; or, where there are other groups, the mean of all."""
    if not move.leads:
        if _is_laid_out(old[1], 1, move):  # in vectors whose padding may depend on the number of workers
            return (), each_leaf(old[1], new[1], move, lambda rows: rows, (1, 1), single=True)
        if [np.shape(x) for x in jax.tree.leaves(old[1])] != [np.shape(x) for x in jax.tree.leaves(new[1])]:
            raise Misfit(f"{name} has other shapes for other workers, and is not laid out like the gradients")
        return (), kept_groups(old[1], new[1], move)

    def one(rows):
        if mean and move.old.groups != move.new.groups:
            rows = rows.mean(0, dtype=np.float64, keepdims=True).astype(rows.dtype)
        return modulo(rows, move.new[:2])

    return (), each_leaf(old[1], new[1], move, one, move.old[:2])


def _coin(name: str, old: Pair, new: Pair, move: Move) -> Pair:
    return (), kept_groups(old[1], new[1], move)


def _gradient(name: str, old: Pair, new: Pair, move: Move) -> Pair:
    raise Misfit(
        f"{name} is the last gradient of each worker, from which no other worker can go on; begin anew at the point "
        "that the method reached"
    )


def _compressor(name: str, old: Pair, new: Pair, move: Move) -> Pair:
    return _by_vector(taken_over, old[0], new[0], move), _by_vector(kept_groups, old[1], new[1], move)


def _by_vector(one: Callable, old: Any, new: Any, move: Move) -> Any:
    """Redistributes between groups of other leaves, from the group that has most of the same leaves."""
    before, states = move.before.groups, []
    for group, fresh in zip(move.after.groups, new, strict=True):
        common = [0 if other.small else len(set(group.leaves) & set(other.leaves)) for other in before]
        found = max(range(len(common)), key=common.__getitem__, default=None)
        known = found is not None and common[found] and not group.small
        states.append(one(old[found], fresh, move) if known else fresh)
    return tuple(states)


_ROLES: dict[str, Callable[..., Pair]] = {
    "memory": _memory,
    "narrow memory": _narrow_memory,
    "average": _average,
    "shift": _shift,
    "momentum": _momentum,
    "iterate": functools.partial(_momentum, mean=False),
    "coin": _coin,
    "gradient": _gradient,
    "compressor": _compressor,
}


def _route(old: MeanState, new: MeanState, move: Move) -> tuple[Any, Any]:
    """Redistributes the memories of two shots: chunks of one vector, cut into other chunks, the last with padding."""
    mine, fresh = old.local.route, new.local.route
    if is_left_out(mine):  # as many workers as before were gathered
        return fresh, new.shared.route
    if is_left_out(fresh):
        raise Misfit(
            'via="auto" took two shots among the old workers, with a memory of the mean at each, and gathers among the '
            'new ones, who have none. Make the new state with via="two_shot"'
        )
    shared = kept_groups(old.shared.route, new.shared.route, move)
    if not hasattr(mine, "memory"):
        return taken_over(mine, fresh, move), shared
    groups, shards, workers = move.new
    if move.old.shards != shards:
        raise Misfit(f'{change_of(move)}; not supported for via="two_shot", which remembers chunks of shards')
    rows = split_lead(on_host(mine.memory), move.old)
    vectors = pooled(rows.reshape(*rows.shape[:2], math.prod(rows.shape[2:])), groups, move.keep)
    cut = np.zeros((groups, shards, workers * math.prod(np.shape(fresh.memory)[1:])), rows.dtype)
    size = min(cut.shape[-1], vectors.shape[-1])
    cut[..., :size] = vectors[..., :size]
    memory = placed(cut.reshape(np.shape(fresh.memory)), fresh.memory)
    others = [name for name in mine._fields if name != "memory"]
    rest = {name: taken_over(getattr(mine, name), getattr(fresh, name), move) for name in others}
    return fresh._replace(memory=memory, **rest), shared


def _steps(old: Any, new: Any, walk: Any, keep: str) -> Any:
    """Redistributes the sums of `optax.MultiSteps`: [n p, ...] for parameters [p, ...], or [n, p, ...]."""
    means = lambda state: means_in(state.inner_opt_state)
    if not means(old):  # behind the mean, where all workers accumulate the same
        return type(old)(*map(walk, old, new))
    workers, target = (_rows(means(state)[0]) for state in (old, new))

    def one(old, new):
        rows = on_host(old)
        rows = split_lead(rows, (workers, len(rows) // workers))
        return placed(join_lead(pooled(rows, target, keep), 2), new)

    rest = type(old)(*map(walk, old._replace(acc_grads=()), new._replace(acc_grads=())))
    return rest._replace(acc_grads=map_alike(one, old.acc_grads, new.acc_grads))
