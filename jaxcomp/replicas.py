"""Are all workers still the same? Fingerprints of what should be equal, and steps that are skipped by all or none.

Data-parallel training relies on parameters and shared state that are bitwise equal on all workers, and never compares
them. A flipped bit, a nondeterministic kernel or a restart from different files then spoils it without a word. One
32-bit fingerprint from each worker every so many steps finds that out.
"""

import collections
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jaxcomp.arrays import as_words
from jaxcomp.exchange.agreement import check_options
from jaxcomp.exchange.axes import axis_names, axis_size, is_bound, unknown_axes
from jaxcomp.exchange.collectives import all_max, gather_tree
from jaxcomp.hashing import fmix32
from jaxcomp.state.specs import Marks, lay_out, names_of

__all__ = ["ReplicaDrift", "check_options", "fingerprint", "fingerprints", "skip_nonfinite"]  # and `jc.check_replicas`

Array = jax.Array


class ReplicaDrift(RuntimeError):
    """Workers hold different parameters or shared state. workers: those that differ from the majority."""

    def __init__(self, message: str, workers: tuple[int, ...]):
        super().__init__(message)
        self.workers = workers


def fingerprint(tree: Any, axis_name: Any = None, specs: Any = None) -> Array:
    """u32[] of all bits of a tree that should be equal on all workers: sum over words of mix(mix(place) ^ word).

    Arrays that differ between workers (local state of `compressed_mean` and `rounds`, gradients that `optax.MultiSteps`
    accumulates) are left out. Trees that differ in one bit have different fingerprints; of two that differ in more,
    one in 2^32 pairs has the same.

    Args:
        tree: anything made of arrays.
        axis_name: axes along which it should be equal; shared state of levels and shards that differs there is left
            out.
        specs: as for `fingerprints`.

    >>> import jax.numpy as jnp
    >>> bool(fingerprint(jnp.array([0.0, 1.0])) == fingerprint(jnp.array([1.0, 0.0])))
    False
    """
    return _mark(_kinds(tree, names_of(axis_name), specs).get(frozenset(), []))


def _kinds(tree: Any, axis: Any, specs: Any) -> dict[frozenset[str], list[tuple[int, Array]]]:
    """The numbered arrays of a tree, by those of the axes along which they may differ; not those that differ anyway."""
    along = frozenset(axis_names(axis))
    if specs is None:
        local = lambda axes, outer: frozenset((*outer, *axis_names(axes))) if along else LOCAL
        differ = lay_out(tree, axis, Marks(local, shared=frozenset, rest=lambda leaf: frozenset()))
    else:
        names_in = lambda spec: frozenset(name for entry in spec for name in axis_names(entry))
        every = lambda spec, part: jax.tree.map(lambda _: names_in(spec), part)
        try:
            differ = jax.tree.map(every, specs, tree)
        except ValueError as error:
            raise ValueError(f"fingerprints: specs must be those of the tree, as in in_specs: {error}") from None
    kinds = collections.defaultdict(list)
    for number, (leaf, names) in enumerate(zip(jax.tree.leaves(tree), jax.tree.leaves(differ), strict=True)):
        if names != LOCAL and (not along or not along <= names):
            kinds[names & along].append((number, leaf))
    return kinds


LOCAL = frozenset(["some axis"])  # of local state, where no axis is named


def _mark(leaves: list[tuple[int, Array]]) -> Array:
    total = jnp.uint32(0)
    for number, leaf in leaves:
        words = _words(jnp.asarray(leaf))
        places = fmix32(lax.iota(jnp.uint32, words.size) ^ fmix32(jnp.uint32(number + 1)))
        total = total + jnp.sum(fmix32(places ^ words), dtype=jnp.uint32)
    return total


def _words(x: Array) -> Array:
    """The bits of any array as uint32 words; narrower entries fill a word each."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.concatenate([_words(x.real), _words(x.imag)])
    if x.dtype == jnp.bool_:
        return x.reshape(-1).astype(jnp.uint32)
    width = x.dtype.itemsize
    if width < 1 or (jnp.issubdtype(x.dtype, jnp.integer) and jnp.iinfo(x.dtype).bits < 8):
        return x.reshape(-1).astype(jnp.int32).astype(jnp.uint32)
    x = x.reshape(-1)
    words = as_words(x) if width < 4 else lax.bitcast_convert_type(x, jnp.uint32)
    return words.reshape(-1).astype(jnp.uint32)


def fingerprints(tree: Any, axis_name: Any, specs: Any = None) -> Array:
    """The `fingerprint` of every worker, u32[n], equal on all of them: an exchange of one word, or a few.

    What differs over some of the axes and is equal along the others (in a hierarchy the shared state of each group, and
    memories of the level between groups) has a word of its own: it is compared within each set of devices that should
    hold the same, and who differs from the majority of its set gets another fingerprint.

    Call it inside the mapped function, with parameters and optimizer state, every so many steps, and give the result to
    `check_replicas` on the host.

    Args:
        tree: anything that should be equal on all workers; what is known to be local is left out.
        axis_name: mapped axis, a tuple of them, or the mapping given to `compressed_mean`. Workers are numbered as JAX
            does along these axes, the last one fastest.
        specs: PartitionSpecs of the tree, as in in_specs: which arrays differ over which axes. Needed where parameters
            are sharded over one of the axes, say ("data", "model"); without them only states of `compressed_mean` are
            known to differ. Along "data" alone they are not needed: each group along "model" then has fingerprints of
            its own, to be returned as fingerprints(...)[None] with out_specs P("model").

    Raises:
        ValueError: unbound axis; specs of another tree, or by which everything differs.

    >>> import jax, jax.numpy as jnp, jaxcomp as jc
    >>> compare = lambda w: jc.replicas.fingerprints(w, "data")
    >>> marks = jax.vmap(compare, axis_name="data", out_axes=None)(jnp.array([1.0, 1.0, 2.0]))
    >>> print(marks[0] == marks[1], marks[0] == marks[2])
    True False
    """
    axis = names_of(axis_name)
    if not is_bound(axis):
        raise ValueError(f"fingerprints: no axis named {axis!r} is bound here")
    kinds = _kinds(tree, axis, specs)
    if specs is not None and not kinds:
        raise ValueError(f"fingerprints: by specs everything differs along {axis!r}, so there is nothing to compare")
    everywhere = kinds.pop(frozenset(), [])
    marks = gather_tree(jnp.stack([_mark(everywhere), *map(_mark, kinds.values())]), axis)
    sizes = [axis_size(name) for name in axis_names(axis)]
    total = marks[:, 0]
    for i, names in enumerate(kinds, 1):
        places = [size if name in names else 1 for name, size in zip(axis_names(axis), sizes, strict=True)]
        numbers = np.arange(math.prod(places), dtype=np.int32).reshape(places)
        total = total + _odd_ones(marks[:, i], np.broadcast_to(numbers, sizes).reshape(-1))
    return total


def _odd_ones(marks: Array, sets: np.ndarray) -> Array:
    """Zero for those whose mark is that of more than half of their set: u32[n], u32[n] of marks."""
    together = jnp.asarray(sets[:, None] == sets[None, :])
    same = jnp.sum(together & (marks[:, None] == marks[None, :]), axis=1)
    return jnp.where(2 * same > jnp.sum(together, axis=1), jnp.uint32(0), fmix32(marks) | jnp.uint32(1))


def check_replicas(fingerprints: Any, *, step: int | None = None) -> None:
    """Raises if the workers' fingerprints differ.

    Args:
        fingerprints: u32[n], of `fingerprints`; or [groups, n], where workers are compared within each group.
        step: for the message.

    Raises:
        ReplicaDrift: naming the workers that differ from the majority, or all where there is none (of two copies that
            differ, both); of the first group that has any.

    >>> check_replicas([7, 7, 9, 7], step=40)
    Traceback (most recent call last):
    jaxcomp.replicas.ReplicaDrift: step 40: parameters or shared state of worker 2 differ from the other 3's
    """
    marks = np.asarray(fingerprints)
    when = "" if step is None else f"step {step}: "
    if marks.ndim > 1:
        for number, row in enumerate(marks.reshape(-1, marks.shape[-1])):
            _check(row, f"{when}group {number}: ")
    else:
        _check(marks.reshape(-1), when)


def _check(row: np.ndarray, when: str) -> None:
    marks = row.tolist()
    counts = collections.Counter(marks).most_common()
    if len(counts) <= 1:
        return
    common, holders = counts[0]
    if 2 * holders > len(marks):
        odd = tuple(i for i, mark in enumerate(marks) if mark != common)
        who = f"worker {odd[0]} differ" if len(odd) == 1 else f"workers {', '.join(map(str, odd))} differ"
        raise ReplicaDrift(f"{when}parameters or shared state of {who} from the other {holders}'s", odd)
    groups = collections.defaultdict(list)
    for i, mark in enumerate(marks):
        groups[mark].append(i)
    parts = " | ".join(", ".join(map(str, group)) for group in groups.values())
    raise ReplicaDrift(
        f"{when}parameters or shared state differ between workers {parts}, and no group is a majority",
        tuple(range(len(marks))),
    )


class SkipState(NamedTuple):
    """inner: of the wrapped optimizer; skipped: i32[], steps that were skipped so far."""

    inner: Any
    skipped: Array


def skip_nonfinite(tx: optax.GradientTransformation, axis_name: Any) -> optax.GradientTransformationExtraArgs:
    """Skips a step everywhere if a gradient is NaN or infinite anywhere.

    Without it `compressed_mean` masks such entries: they count as zero, and are counted. With it all workers agree, by
    an exchange of one word, and either all take the step or none does: updates are zero and nothing of the state of
    `tx` changes, memories and moments included.

    Args:
        tx: the whole optimizer, `compressed_mean` included.
        axis_name: all mapped axes over which gradients differ: those of the workers (the mapping given to
            `compressed_mean` will do) and those along which parameters are sharded, say ("data", "model").

    Returns:
        Transformation with a `SkipState`.

    Raises:
        ValueError: unbound axis; gradients that differ over another axis, as far as types tell.

    >>> import jax, jax.numpy as jnp, optax, jaxcomp as jc
    >>> tx = optax.chain(jc.compressed_mean(jc.direct(jc.identity()), "data"), optax.sgd(1.0))
    >>> tx = jc.replicas.skip_nonfinite(tx, "data")
    >>> def step(grads):
    ...     updates, state = tx.update(grads, tx.init(grads))
    ...     return updates, state.skipped
    >>> print(*jax.vmap(step, axis_name="data", out_axes=None)(jnp.array([[1.0, 2.0], [3.0, jnp.nan]])))
    [0. 0.] 1
    """
    tx = optax.with_extra_args_support(tx)
    axis = names_of(axis_name)

    def init(params):
        return SkipState(tx.init(params), jnp.zeros((), jnp.int32))

    def update(grads, state, params=None, **extra):
        if not is_bound(axis):
            raise ValueError(f"skip_nonfinite: no axis named {axis!r} is bound here")
        others, _ = unknown_axes(grads, axis, axis_names(axis))
        if others:
            raise ValueError(
                f"skip_nonfinite: gradients differ over mesh axis {others[0]!r}, too, so that some devices would skip "
                f"and others not: give axis_name={(*axis_names(axis), *others)}"
            )
        bad = [~jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]
        mine = jnp.any(jnp.stack(bad)) if bad else jnp.zeros((), bool)
        skip = all_max(mine.astype(jnp.int32), axis) > 0
        updates, inner = tx.update(grads, state.inner, params, **extra)
        updates = jax.tree.map(lambda u: jnp.where(skip, jnp.zeros_like(u), u), updates)
        inner = jax.tree.map(lambda old, new: jnp.where(skip, old, new), state.inner, inner)
        return updates, SkipState(inner, state.skipped + skip.astype(jnp.int32))

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]
