"""One worker's part before anything is exchanged: its loss, its gradient, its auxiliary values.

    l_ij, W_ij    loss of micro-batch j of worker i, and what it counts: 1, or its weight (tokens, say)
    p_i           share of worker i: 1 / n, or `weights` divided by their sum
    D             sum_i p_i sum_j W_ij: one number, summed over the workers

    L   = sum_i p_i sum_j W_ij l_ij / D          the loss of the whole batch
    g_i = sum_j W_ij grad l_ij / D               the message of worker i:  sum_i p_i g_i = grad L

So the mean of the messages, by the shares with which the exchange takes it, is the gradient of the whole batch. With
W = 1 and k micro-batches D = k, and g_i is the gradient of the worker's own mean. Else g_i is that gradient times
W_i / D: what is compressed, remembered (e_i) or learned (a shift h_i) is in the units of the whole gradient, and a
later W does not weigh it once more. Workers are therefore heterogeneous in their tokens, too. A weight of a worker
(`weights`, those of `dagc`) multiplies its tokens: a token of worker i counts p_i. W is a constant to the gradient;
`mean_over` is differentiated where it depends on parameters, too.

It runs where the axes of the workers are bound, or without any. Only scalars and what is declared as joint crosses
between workers here; gradients stay as they are.
"""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomp.arrays import bounded, wide
from jaxcomp.checks import is_integer
from jaxcomp.exchange.axes import Axis, axis_index, axis_names, axis_size, is_bound, varying, varying_axes
from jaxcomp.exchange.binding import shares_of
from jaxcomp.exchange.collectives import sum_arrays
from jaxcomp.transforms.arguments import Call, Trained, call_of, is_key, names_whole_arrays, trained_of, weight_of
from jaxcomp.transforms.loss_scale import DynamicScale

__all__ = [
    "KINDS",
    "Gradients",
    "Inputs",
    "Loss",
    "Problem",
    "WorkerResult",
    "check_loss_options",
    "is_overflow",
    "kinds_of",
    "mean_over",
    "not_zero",
    "own_gradients",
    "problem_of",
    "share_of_worker",
    "shares_along",
    "stand_in",
    "times",
    "weighing",
    "worker_gradients",
]

Array = jax.Array
KINDS = ("mean", "unweighted", "sum", "each", "concat", "equal")
ROWS = ("each", "concat")  # kinds of which every worker keeps its own


class Loss(NamedTuple):
    """A loss and how it is differentiated. Static.

    function(params, *batch, **named) -> loss; with has_aux (loss, auxiliary values); with weight=True (loss, weight) in
    the place of the loss; otherwise weight(*batch, **named), or None. kinds: see `kinds_of`. keys: names of the keyword
    arguments that hold random keys, None: by dtype. shares: (axis, those of the workers along it, with sum one), of the
    axes along which they are not equal. batch: arguments that are cut, None: the positional ones.
    """

    function: Callable[..., Any]
    has_aux: bool
    weight: Any
    kinds: Any
    micro_batches: int
    scale: float | DynamicScale | None
    keys: tuple[str, ...] | None
    shares: tuple[tuple[Axis, tuple[float, ...]], ...]
    batch: tuple[Any, ...] | None

    @property
    def weighted(self) -> bool:
        """Whether micro-batches and workers count by a weight."""
        return self.weight is not None

    @property
    def tells_of_parts(self) -> bool:
        """Whether an option says something of the workers' parts of the batch."""
        return self.weighted or bool(self.shares) or self.kinds != kinds_of("value_and_grad", "mean")


class Problem(NamedTuple):
    """A loss, the leaves of the parameters that are trained, and how its other arguments are put together. Static."""

    loss: Loss
    trained: Trained
    call: Call


class Inputs(NamedTuple):
    """The arrays that a loss is called with.

    trained, rest: of the parameters (`Trained.part`); rest ends with those of Flax NNX variables among the other
    arguments. cut: of the batch. whole: equal on all workers.
    """

    trained: Any
    rest: list[Any]
    cut: list[Any]
    whole: list[Any]


class WorkerResult(NamedTuple):
    """One worker's results. loss, grads: of its own mean; grads of weight times that where they were asked for so.
    extra: auxiliary values. rest: new values of what is not trained, None where it did not change. weight: f32[], what
    its part of the batch counts; None where all count alike. kinds: of the leaves of extra.
    """

    loss: Array
    extra: Any
    rest: list[Any]
    grads: Any
    weight: Any
    kinds: tuple[str, ...]


class Gradients(NamedTuple):
    """loss, aux: of all workers together. rest: new values of what is not trained, None where it did not change.
    grads: of this worker alone. overflows: f32[], workers with a gradient that is not finite; None where the loss scale
    does not follow them. kinds: of the leaves of aux.
    """

    loss: Array
    aux: Any
    rest: list[Any]
    grads: Any
    overflows: Any
    kinds: tuple[str, ...] = ()


# ------------------------------------------------------------------------------------------------
# Options


def check_loss_options(
    name: str,
    loss: Any,
    *,
    has_aux: bool = False,
    weight: Any = None,
    aux: Any = "mean",
    micro_batches: int = 1,
    loss_scale: Any = None,
    keys: Any = None,
    shares: tuple[tuple[Axis, tuple[float, ...]], ...] = (),
    batch: Any = None,
) -> Loss:
    """The loss with its options; TypeError or ValueError where one of them cannot be."""
    if not callable(loss):
        raise TypeError(f"{name}: loss must be a function; got {loss!r}")
    if not is_integer(micro_batches):
        raise ValueError(f"{name}: micro_batches must be an integer of at least 1; got {micro_batches!r}")
    if weight is False:
        weight = None
    if not (weight is None or weight is True or callable(weight)):
        raise TypeError(
            f"{name}: weight must be True, for a loss that returns (loss, weight), or a function (*batch, **named) -> "
            f"weight; got {weight!r}. Weights of the workers themselves are weights="
        )
    keys = (keys,) if isinstance(keys, str) else keys
    if keys is not None and not (isinstance(keys, Sequence) and all(isinstance(key, str) for key in keys)):
        raise TypeError(f"{name}: keys must be names of keyword arguments; got {keys!r}")
    batch = (batch,) if isinstance(batch, str | int) else batch
    is_name = lambda x: isinstance(x, str) or (isinstance(x, int) and not isinstance(x, bool))
    if batch is not None and not (isinstance(batch, Sequence) and all(map(is_name, batch))):
        raise TypeError(
            f"{name}: batch must be numbers of positional and names of keyword arguments, say (0, 'mask'); got "
            f"{batch!r}"
        )
    return Loss(
        loss,
        has_aux,
        weight,
        kinds_of(name, aux),
        int(micro_batches),
        loss_scale,
        None if keys is None else tuple(keys),
        shares,
        None if batch is None else tuple(batch),
    )


def kinds_of(name: str, aux: Any) -> Any:
    """Kinds of auxiliary values in a form that has a hash: (patterns, kinds), or (structure, kinds) of a prefix tree;
    ValueError unless each kind is one of KINDS."""
    by_path = isinstance(aux, Mapping) and all(isinstance(each, str) for each in (*aux, *aux.values()))
    leaves, structure = jax.tree.flatten(aux, is_leaf=lambda kind: kind is None)
    wrong = [kind for kind in leaves if kind not in KINDS]
    if wrong:
        named = ", ".join(f'"{kind}"' for kind in KINDS[:-1])
        raise ValueError(
            f'{name}: aux must be {named} or "{KINDS[-1]}", a tree of them, or a mapping from paths to them; got '
            f"{wrong[0]!r}"
        )
    if not by_path:
        return structure, tuple(leaves)
    for pattern in aux:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{name}: a path of aux must be a regular expression; got {pattern!r}: {error}") from None
    return tuple(aux), tuple(aux.values())


def _kinds_for(kinds: Any, extra: Any) -> tuple[str, ...]:
    """The kind of each leaf of auxiliary values. A path that is written out goes before one that is found in it."""
    where, given = kinds
    if not isinstance(where, tuple):
        prefix = jax.tree.unflatten(where, given)
        return tuple(
            jax.tree.leaves(jax.tree.map(lambda kind, tree: jax.tree.map(lambda _: kind, tree), prefix, extra))
        )
    found = []
    for path, _ in jax.tree_util.tree_leaves_with_path(extra):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        exact = [i for i, pattern in enumerate(where) if name == pattern or name.startswith(f"{pattern}/")]
        fits = exact or [i for i, pattern in enumerate(where) if re.search(pattern, name)]
        if not fits:
            raise ValueError(f"value_and_grad: aux must say what becomes of {name!r}; it has the paths {list(where)}")
        found.append(given[max(fits, key=lambda i: len(where[i])) if exact else fits[0]])
    return tuple(found)


def problem_of(
    name: str, loss: Loss, wrt: Any, params: Any, batch: tuple[Any, ...], named: Mapping[str, Any]
) -> tuple[Problem, Inputs]:
    """Sorts what one call of the loss is given."""
    what = trained_of(params, wrt, name)
    trained, rest = what.part(params)
    call, cut, whole, state = call_of(name, loss.batch, loss.keys, batch, named)
    return Problem(loss, what, call), Inputs(trained, [*rest, *state], cut, whole)


# ------------------------------------------------------------------------------------------------
# A mean over the entries of all workers


class _Calling(NamedTuple):
    """The caller of a loss. axes: of the workers, () where it is called by hand. shares: of each. refusal: why no mean
    over them can be taken."""

    axes: tuple[str, ...] = ()
    shares: tuple[tuple[Axis, tuple[float, ...]], ...] = ()
    refusal: str = ""


# A context that jax.jit knows of: a loss that is compiled by itself is traced again in another one.
_calling = jax.make_user_context(_Calling())


def weighing(axis: Axis, shares: Any = (), refusal: str = "") -> Any:
    """A context in which `mean_over` knows the workers and their shares, or is refused."""
    return _calling(_Calling(axis_names(axis), tuple(shares), refusal))


def stand_in(name: str) -> str:
    """The axis along which workers lie while a loss sees an axis of length 1 under their name."""
    return f"jc_{name}"


def mean_over(x: Array, mask: Array | None = None, axis: Axis = "data") -> Array:
    """Takes the mean of entries over all workers, each entry counted by a mask: for use inside of a loss.

    M = sum_i sum_e m_ie x_ie / sum_i sum_e m_ie, over the workers i along `axis` and the entries e of each.

    The loss of each worker is then that of the whole batch, and so is the mean over the workers of its gradients,
    n d(S_i) / W - n M d(W_i) / W with S_i, W_i the two sums of worker i and W = sum_i W_i; the backward pass has no
    collective. A loss may have several such means, with other masks, and functions of them. Where `axis` is not bound,
    on one device, it is the plain mean.

    Shares of the workers (`weights=`, those of `dagc`) weigh their entries where the loss is called by
    `value_and_grad`, `worker_value_and_grad` or `methods.rounds`; by hand, in `shard_map` or `vmap`, all count alike.

    Args:
        x: real or bool[...], say the loss of each token.
        mask: what each entry counts, >= 0, of a shape that broadcasts to that of x. None: one.
        axis: mesh axis (or axes) of the workers.

    Returns:
        Scalar of the dtype of x (f32 for bools and integers), summed in f32; 0 where nothing counts. Entries that do
        not count may be NaN.

    Raises:
        ValueError: a mask that does not fit; an axis that is not that of the workers; inside of micro-batches or of
            local steps, where the mean of all entries is not known: return (loss, weight) there, with weight=True.

    >>> import jax, jax.numpy as jnp, jaxcomp as jc
    >>> x, mask = jnp.array([[1.0, 2.0], [3.0, 9.0]]), jnp.array([[1, 1], [1, 0]])
    >>> print(jc.mean_over(x, mask), jax.vmap(jc.mean_over, axis_name="data")(x, mask))
    2.0 [2. 2.]
    """
    here: _Calling = _calling.value  # pyright: ignore[reportAssignmentType]
    x = jnp.asarray(x)
    mask = jnp.ones((), x.dtype) if mask is None else jnp.asarray(mask)
    try:
        fits = np.broadcast_shapes(x.shape, mask.shape) == x.shape
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(f"mean_over: the mask must broadcast to the shape {x.shape} of x; got {mask.shape}")
    names = tuple(stand_in(name) if stand_in(name) in here.axes else name for name in axis_names(axis))
    if here.refusal:
        raise ValueError(f"mean_over: {here.refusal}. Return (loss, weight) instead, with weight=True")
    if here.axes and set(names) != set(here.axes):
        raise ValueError(f"mean_over: axis must be {here.axes}, that of the workers; got {axis!r}")
    manual = getattr(jax.sharding.get_abstract_mesh(), "manual_axes", ())
    if manual and not set(names) <= set(manual):
        raise ValueError(f"mean_over: axis must be among those of the shard_map, {tuple(manual)}; got {axis!r}")
    kind = wide(x.dtype if jnp.issubdtype(x.dtype, jnp.floating) else jnp.float32)
    counts = jnp.broadcast_to(mask, x.shape).astype(kind)
    total = jnp.sum(jnp.where(counts != 0, x.astype(kind) * counts, 0))
    bound = names if names and is_bound(names) else None
    found = _ratio(total, jnp.sum(counts), axis_names(bound), here.shares if here.axes else ())
    return found.astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else found


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def _ratio(total: Array, count: Array, axes: Any, shares: Any) -> Array:
    """sum_i p_i S_i / sum_i p_i W_i, of which each worker differentiates its own terms alone."""
    return _ratio_of(total, count, axes, shares)[0]


def _ratio_of(total: Array, count: Array, axes: Any, shares: Any) -> tuple[Array, Array]:
    both = varying(jnp.stack([total, count]), axes)
    if axes:
        (both,) = sum_arrays([both * jnp.asarray(share_of_worker(axes, shares), both.dtype)], axes)
        both = varying(both, axes)
    whole = jnp.where(both[1] == 0, 1, both[1])
    return both[0] / whole, whole


@_ratio.defjvp
def _(axes, shares, given, tangents):
    (total, count) = given
    mean, whole = _ratio_of(total, count, axes, shares)
    return mean, (tangents[0] - mean * tangents[1]) / whole


# ------------------------------------------------------------------------------------------------
# One worker


def own_gradients(
    problem: Problem,
    axis: Axis,
    inputs: Inputs,
    factor: Any = None,
    refusal: str = "",
    rows: tuple[Callable[[Any], Any], Callable[[Any], Any]] | None = None,
    number: Any = None,
    times_weight: bool = False,
) -> WorkerResult:
    """Loss and gradient of this worker's part of the batch, with what it counts. No collective.

    Args:
        problem: see there.
        axis: of the workers, bound; None for a single one.
        inputs: with this worker's part of the batch.
        factor: of the loss, None for 1. Gradients are divided by it, in f32, which they keep.
        refusal: see `mean_over`.
        rows: (what is made of a gradient before anything else, zeros of that form for a tree of parameters).
        number: of this worker; None: as the axis has it.
        times_weight: gradients are those of weight times the loss. What a loss adds up over the workers then counts by
            their weights, too: the transpose of such a sum adds the workers' parts before anybody could weigh them.
    """
    how, call = problem.loss, problem.call
    trained, rest, whole = inputs.trained, inputs.rest, inputs.whole
    number, parts = axis_index(axis) if number is None else number, how.micro_batches
    if axis_names(axis):
        mine = lambda key: jax.random.fold_in(key, number)
        rest = [_each_key(mine, leaf) if is_key(leaf) else leaf for leaf in rest]  # of scanned layers there are several

    def arguments(rest, cut, j):
        """(batch, named) of micro-batch j, with the keys of this worker."""
        own = lambda x: _each_key(lambda key: jax.random.fold_in(jax.random.fold_in(key, number), j), x)
        mine = [own(x) if split else x for x, split in zip(whole, call.are_keys, strict=True)]
        return call.join(cut, mine, rest[len(rest) - call.num_states :])

    def one(rest, cut, j):
        grads, out = _differentiated(problem, trained, rest, lambda: arguments(rest, cut, j), factor, times_weight)
        return (grads if rows is None else rows[0](grads)), out

    why = refusal or ("inside of micro_batches it would see one of them alone" if parts > 1 else "")
    with weighing(axis, how.shares, why):
        if parts == 1:
            first = inputs.cut
            grads, (loss, extra, new, weight) = one(rest, first, 0)
            extra = jax.tree.map(lambda x: jnp.asarray(x)[None], extra)
            weights = None if weight is None else weight[None]
            if weight is not None:  # a worker without tokens has 0 / 0
                loss = jnp.where(weight != 0, loss, 0)
                counts = (lambda g: (weight != 0) | jnp.isfinite(g)) if times_weight else lambda _: weight != 0
                grads = jax.tree.map(lambda g: jnp.where(counts(g), g, 0), grads)
        else:
            cut = _micro_batches(inputs.cut, parts, how.batch is None)
            first = [x[0] for x in cut]
            zeros = jax.tree.map(_wide_zeros, trained) if rows is None else rows[1](trained)
            grads, loss, extra, new, weights = _accumulated(zeros, rest, cut, parts, one, times_weight)
        kinds = _kinds_for(how.kinds, extra)
        doubled = lambda: _doubled(problem, trained, rest, lambda cut: arguments(rest, cut, 0), first)
        examples = [x.shape[0] for x in first[:1] if x.ndim]
        extra = _of_micro_batches(kinds, extra, weights, examples, doubled)
    if factor is not None:
        grads = jax.tree.map(lambda g: g.astype(wide(g.dtype)) / jnp.asarray(factor, wide(g.dtype)), grads)
    elif parts > 1:
        grads = jax.tree.map(lambda g, x: bounded(g, x.dtype), grads, trained)
    return WorkerResult(loss, extra, new, grads, None if weights is None else jnp.sum(weights), kinds)


def _accumulated(
    zeros: Any, rest: list[Any], cut: list[Any], parts: int, one: Callable[..., Any], times_weight: bool
) -> Any:
    """Gradient and loss of the worker's own mean, auxiliary values and weights of each micro-batch [k, ...], and the
    last values of what is not trained.

    With weights the sums are of W_j g_j and W_j l_j, and are divided by that of W_j; not that of the gradients if they
    are to be those of the weight times the mean.
    """

    def add(carry, given):
        total, rest = carry
        j, part = given
        grads, (loss, extra, new, weight) = one(rest, part, j)
        if times_weight:
            grads = jax.tree.map(lambda g: jnp.where((weight != 0) | jnp.isfinite(g), g, 0), grads)
        elif weight is not None:
            grads = jax.tree.map(lambda g: times(g, weight), grads)
        total = jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, grads)
        rest = [old if leaf is None else leaf for old, leaf in zip(rest, new, strict=True)]
        return (total, rest), (loss, extra, weight)

    (total, new), (losses, extra, weights) = lax.scan(add, (zeros, rest), (jnp.arange(parts), cut))
    new = [None if is_key(leaf) else leaf for leaf in new]
    count = parts if weights is None else not_zero(jnp.sum(weights))
    loss = jnp.mean(losses) if weights is None else jnp.sum(times(losses, weights)) / count
    return (
        total if times_weight else jax.tree.map(lambda t: t / jnp.asarray(count, t.dtype), total),
        loss.astype(losses.dtype),
        extra,
        new,
        weights,
    )


def _differentiated(
    problem: Problem,
    trained: Any,
    rest: list[Any],
    arguments: Callable[[], Any],
    factor: Any,
    times_weight: bool,
) -> Any:
    """Gradients, and (loss, auxiliary values, new values of what is not trained, weight) of one micro-batch."""
    what = problem.trained

    def scaled(trained):
        mine = arguments()  # variables are made where they are changed
        tree, loss, extra, weight = _called(problem, trained, rest, mine)
        after = [*(what.part(tree)[1] if what.names else []), *problem.call.pick(mine, "state")]
        kept = lambda old, new: new is old or is_key(old)
        new = [None if kept(a, b) else jnp.asarray(b, a.dtype) for a, b in zip(rest, after, strict=True)]
        out = (loss, extra, new, weight)
        if times_weight:
            loss = times(loss, weight)
        if factor is None:
            return loss, out
        return loss.astype(wide(loss.dtype)) * jnp.asarray(factor, wide(loss.dtype)), out

    return jax.grad(scaled, has_aux=True)(trained)


def _called(problem: Problem, trained: Any, rest: list[Any], arguments: Any) -> Any:
    """The tree of parameters after one call of the loss, loss, auxiliary values, weight."""
    how, tree, (batch, named) = problem.loss, problem.trained.join(trained, rest), arguments
    here: _Calling = _calling.value  # pyright: ignore[reportAssignmentType]
    pieces = how.micro_batches * axis_size(here.axes)
    with names_whole_arrays(how.batch, batch, named, pieces):
        out, extra, weight = how.function(tree, *batch, **named), None, None
    if how.has_aux:
        out, extra = _pair(out, "with has_aux=True", "(loss, auxiliary values)")
    if how.weight is True:
        form = "((loss, weight), auxiliary values)" if how.has_aux else "(loss, weight)"
        out, weight = _pair(out, "with weight=True", form)
    elif how.weight is not None:
        weight = weight_of(how.weight, batch, named)
    if isinstance(out, (tuple, list, dict)):
        raise TypeError(
            f"value_and_grad: the loss must return a number; got a {type(out).__name__}. Say has_aux=True for (loss, "
            "auxiliary values), weight=True for (loss, weight)"
        )
    loss = jnp.asarray(out)
    if weight is not None:
        weight = jnp.asarray(weight)
        if weight.shape:
            raise ValueError(f"value_and_grad: weight must be a number, say mask.sum(); got shape {weight.shape}")
        weight = lax.stop_gradient(weight.astype(wide(loss.dtype)))
    return tree, loss, extra, weight


def _pair(out: Any, when: str, form: str) -> Any:
    if not (isinstance(out, tuple) and len(out) == 2):
        raise TypeError(f"value_and_grad: {when} the loss must return {form}; got a {type(out).__name__}")
    return out


def times(x: Array, factor: Any) -> Array:
    """x times a factor (one, or one for each), in f32 or wider; 0 where that is 0, also of NaN."""
    kind = wide(x.dtype)
    factor = jnp.asarray(factor, kind)
    return jnp.where(factor != 0, x.astype(kind) * factor, 0)


def not_zero(x: Array) -> Array:
    """x, or one where it is zero: what a sum of nothing is divided by."""
    return jnp.where(x == 0, 1, x)


def _each_key(split: Callable[[Array], Array], keys: Array) -> Array:
    """Splits one random key, typed or not, or each of an array of them."""
    for _ in range(keys.ndim - (0 if is_key(keys) else 1)):
        split = jax.vmap(split)
    return split(keys)


def _micro_batches(arrays: list[Array], parts: int, by_position: bool) -> list[Array]:
    """[b, ...] as [parts, b / parts, ...]. Every parts-th example: a batch that is cut along a mesh axis stays where it
    is."""
    lengths = list(dict.fromkeys(x.shape[0] if x.ndim else 0 for x in arrays))
    if by_position and len(lengths) > 1:
        raise ValueError(
            "value_and_grad: positional arguments are batch, and micro_batches cuts them along their leading axis; got "
            f"lengths {lengths}. Give what is no batch by keyword, or say batch=(0, 1) for the first two"
        )
    for length in lengths:
        if length % parts:
            raise ValueError(
                f"value_and_grad: micro_batches must divide the {length} examples of each worker; got {parts}"
            )
    cut = lambda x: jnp.moveaxis(x.reshape(x.shape[0] // parts, parts, *x.shape[1:]), 1, 0)
    return [cut(x) for x in arrays]


def _wide_zeros(x: Array) -> Array:
    return varying(jnp.zeros_like(x, dtype=wide(x.dtype)), varying_axes(x))


# ------------------------------------------------------------------------------------------------
# Auxiliary values


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _of_micro_batches(
    kinds: tuple[str, ...], extra: Any, weights: Any, examples: Sequence[int], doubled: Callable[[], list[Any]]
) -> Any:
    """Auxiliary values [k, ...] of this worker's micro-batches, as one.

    examples: of a micro-batch, [] where that is not known. doubled: shapes of the values of a batch twice as long; None
    where the loss does not take one.
    """
    leaves, structure = jax.tree.flatten(extra)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(extra)]
    for i, (kind, x) in enumerate(zip(kinds, leaves, strict=True)):
        if kind in ("mean", "unweighted") and not _is_float(x):
            raise ValueError(
                f'value_and_grad: the auxiliary values{paths[i]} of dtype {x.dtype} have no mean; say aux="sum", '
                '"each" or "concat" for them, or "equal" if they are the same on all workers, as a counter (aux may be '
                "a tree like the auxiliary values, or a mapping from paths)"
            )
        length = x.shape[1] if x.ndim > 1 else None
        if kind == "concat" and (length is None or (examples and length != examples[0])):
            raise ValueError(
                f'value_and_grad: aux="concat" is for values of each example; got{paths[i]} of shape {x.shape[1:]}'
            )
        if kind == "mean" and length and examples and length % examples[0] == 0:
            shapes = doubled()
            by_example = length == examples[0] if shapes is None else shapes[i].shape[:1] != (length,)
            if by_example:
                raise ValueError(
                    f"value_and_grad: the auxiliary values{paths[i]} of shape {x.shape[1:]} are one for each example "
                    'of this worker, and other workers have other examples: say aux="concat" to have those of the '
                    'whole batch, "each" for a row of each worker, or take their mean in the loss. aux={"path": '
                    '"concat", ".*": "mean"} says it for some of them'
                )
    return jax.tree.unflatten(structure, [_joined(k, x, weights) for k, x in zip(kinds, leaves, strict=True)])


def _joined(kind: str, x: Array, weights: Any) -> Array:
    if kind == "each":
        return x
    if kind == "concat":  # `_micro_batches`, the other way
        return jnp.moveaxis(x, 0, 1).reshape(-1, *x.shape[2:])
    if kind == "sum":
        return jnp.sum(x, axis=0)
    if kind == "equal":
        return x[-1]
    if kind == "unweighted" or weights is None:
        return jnp.mean(x, axis=0, dtype=wide(x.dtype)).astype(x.dtype)
    each = weights.reshape(-1, *[1] * (x.ndim - 1))
    return (jnp.sum(times(x, each), axis=0) / not_zero(jnp.sum(weights)).astype(wide(x.dtype))).astype(x.dtype)


def _doubled(problem: Problem, trained: Any, rest: list[Any], arguments: Any, cut: list[Any]) -> Any:
    """Shapes of the auxiliary values of a batch twice as long; None where the loss does not take one."""
    run = lambda: _called(problem, trained, rest, arguments([jnp.concatenate([x, x]) for x in cut]))[2]
    try:
        return jax.tree.leaves(jax.eval_shape(run))
    except Exception:  # whatever a loss raises that was written for one length
        return None


# ------------------------------------------------------------------------------------------------
# All workers


def worker_gradients(
    problem: Problem, axis: Axis, inputs: Inputs, scale: Array | None = None, number: Any = None
) -> Gradients:
    """The message of this worker (see above), and what all workers together know of loss and auxiliary values.

    Args:
        problem, axis, inputs, number: as for `own_gradients`.
        scale: f32[], of the loss, where `how.scale` is a `DynamicScale`.
    """
    how = problem.loss
    trained, rest, whole, scale = varying((inputs.trained, inputs.rest, inputs.whole, scale), axis)
    factor = scale if isinstance(how.scale, DynamicScale) else how.scale
    # Numbers of 16 bits that have few exponents, and shares, weigh gradients afterwards.
    wide_enough = all(jnp.finfo(x.dtype).maxexp >= 64 for x in jax.tree.leaves(trained) if _is_float(x))
    times_weight = how.weighted and not how.shares and wide_enough and bool(axis_names(axis))
    inputs = Inputs(trained, rest, inputs.cut, whole)
    own = own_gradients(problem, axis, inputs, factor, number=number, times_weight=times_weight)
    share = share_of_worker(axis, how.shares)
    counts = share if own.weight is None else jnp.asarray(share, own.weight.dtype) * own.weight
    overflow = None if scale is None else is_overflow(own.grads) * jnp.asarray(counts != 0, jnp.float32)
    kept = [None if x is None else "unweighted" if _is_float(x) else "equal" for x in own.rest]
    kinds = ("mean", list(own.kinds), kept, None if scale is None else "sum")
    leaves, structure = jax.tree.flatten(own.extra)
    together = _together((own.loss, leaves, own.rest, overflow), kinds, axis, counts, how.weighted, number)
    (loss, leaves, rest, overflows), total = together
    grads = own.grads
    if own.weight is not None:
        part = (1 if times_weight else own.weight) / not_zero(total)
        is_kept = factor is not None  # in f32, until after the exchange
        grads = jax.tree.map(lambda g: times(g, part) if is_kept else bounded(times(g, part), g.dtype), grads)
    return Gradients(loss, jax.tree.unflatten(structure, leaves), rest, grads, overflows, own.kinds)


def is_overflow(grads: Any) -> Array:
    """f32[]: one if any entry is NaN or infinite."""
    finite = [jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]
    return 1.0 - jnp.all(jnp.stack(finite)).astype(jnp.float32) if finite else jnp.zeros((), jnp.float32)


def shares_along(name: str, weights: Mapping[Axis, Any]) -> tuple[tuple[Axis, tuple[float, ...]], ...]:
    """Shares of the workers along each axis along which they have weights."""
    given = {axis: each for axis, each in weights.items() if each is not None}
    return tuple((axis, tuple(shares_of(name, each).tolist())) for axis, each in given.items())


def share_of_worker(axis: Axis, shares: tuple[tuple[Axis, tuple[float, ...]], ...]) -> Any:
    """Share of this worker in a mean over the workers."""
    rest = axis_size(axis)
    share: Any = 1.0
    for along, each in shares:
        workers = axis_size(along)
        if len(each) != workers:
            raise ValueError(f"weights must be {workers} numbers, one for each worker; got {len(each)}")
        share, rest = share * jnp.asarray(np.asarray(each))[axis_index(along)], rest // workers
    return share / rest


def _together(tree: Any, kinds: Any, axis: Axis, counts: Any, is_weighted: bool, number: Any = None) -> tuple[Any, Any]:
    """Facts of all workers together, by one sum of all of it; and the sum of `counts`, where they are weights.

    kinds: of KINDS. counts: those of this worker in a "mean": shares, with sum one, or weights.
    """
    if not axis_names(axis):
        return tree, counts
    leaves, structure = jax.tree.flatten(tree)
    number, size = axis_index(axis) if number is None else number, axis_size(axis)
    names = jax.tree.leaves(kinds)

    def mine(kind, x):
        if kind in ("mean", "unweighted"):
            return times(x, 1 / size if kind == "unweighted" else counts)  # a worker that does not count may have NaN
        if kind == "sum":
            return x
        x = jax.random.key_data(x) if is_key(x) else x.astype(jnp.int32) if x.dtype == bool else x
        return jnp.where(number == 0, x, jnp.zeros_like(x))

    def found(kind, x, total, whole):
        if kind == "mean" and is_weighted:
            total = total / not_zero(whole).astype(total.dtype)
        return jax.random.wrap_key_data(total, impl=jax.random.key_impl(x)) if is_key(x) else total.astype(x.dtype)

    own = {i: mine(kind, x) for i, (kind, x) in enumerate(zip(names, leaves, strict=True)) if kind not in ROWS}
    sums = sum_arrays([*own.values(), *([counts] if is_weighted else [])], axis)
    whole = sums.pop() if is_weighted else None
    summed = dict(zip(own, sums, strict=True))
    joint = [found(names[i], x, summed[i], whole) if i in summed else x for i, x in enumerate(leaves)]
    return jax.tree.unflatten(structure, joint), whole
