"""One worker's part before anything is exchanged: its loss, its gradient, its auxiliary values.

    scaled, pullback = vjp(s L_i)     micro-batch by micro-batch, s the loss scale
    g_i = (1 / s k) sum_j grad L_ij   in f32 (f64 for f64 parameters) where k micro-batches are added up

It runs where the axes of the workers are bound, or without any. Only scalars and what is declared as averaged crosses
between workers here; gradients stay as they are.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomp.arrays import bounded, wide
from jaxcomp.exchange.axes import Axis, axis_index, axis_names, axis_size, varying, varying_axes
from jaxcomp.exchange.collectives import sum_arrays
from jaxcomp.transforms.loss_scale import DynamicScale

__all__ = ["KINDS", "Gradients", "Loss", "Trained", "kinds_of", "worker_gradients"]

Array = jax.Array
KINDS = ("mean", "sum", "each")


class Loss(NamedTuple):
    """A loss and how it is differentiated. Static.

    function(params, *batch, **named) -> loss, or (loss, auxiliary values) with has_aux. kinds: structure and leaves of
    a prefix tree of the auxiliary values with one of KINDS for each (`kinds_of`). keys: names of the keyword arguments
    that hold random keys. shares: (axis, those of the workers along it, with sum one), of the axes along which they are
    not equal.
    """

    function: Callable[..., Any]
    has_aux: bool
    kinds: tuple[Any, tuple[str, ...]]
    micro_batches: int
    scale: float | DynamicScale | None
    keys: tuple[str, ...]
    shares: tuple[tuple[Axis, tuple[float, ...]], ...]


class Trained(NamedTuple):
    """Choice of the leaves of a tree of parameters that are trained. Static.

    structure: of the tree. names: for each leaf its path if it is trained, else None; () where all are.
    """

    structure: Any
    names: tuple[str | None, ...]

    def join(self, trained: Any, rest: list[Any]) -> Any:
        """The tree of parameters with these leaves."""
        if not self.names:
            return trained
        others = iter(rest)
        leaves = [next(others) if name is None else trained[name] for name in self.names]
        return jax.tree.unflatten(self.structure, leaves)

    def part(self, params: Any) -> tuple[Any, list[Any]]:
        """The trained leaves, by their paths (or the tree itself where all are trained), and the others."""
        if not self.names:
            return params, []
        pairs = list(zip(self.names, jax.tree.leaves(params), strict=True))
        return {n: leaf for n, leaf in pairs if n is not None}, [leaf for n, leaf in pairs if n is None]


class Gradients(NamedTuple):
    """loss, aux: of all workers together. rest: new values of what is not trained, None where it did not change.
    grads: of this worker alone. overflows: f32[], workers with a gradient that is not finite; None where the loss scale
    does not follow them.
    """

    loss: Array
    aux: Any
    rest: list[Any]
    grads: Any
    overflows: Any


def kinds_of(name: str, kinds: Any) -> tuple[Any, tuple[str, ...]]:
    """Structure and leaves, which can be hashed; ValueError unless every leaf is one of KINDS."""
    leaves, structure = jax.tree.flatten(kinds, is_leaf=lambda kind: kind is None)
    wrong = [kind for kind in leaves if kind not in KINDS]
    if wrong:
        raise ValueError(f'{name}: aux must be "mean", "sum" or "each", or a tree of them; got {wrong[0]!r}')
    return structure, tuple(leaves)


def worker_gradients(
    how: Loss,
    what: Trained,
    axis: Axis,
    trained: Any,
    rest: list[Any],
    batch: tuple[Any, ...],
    named: dict[str, Any],
    scale: Array | None = None,
) -> Gradients:
    """The gradient of this worker's loss, and what all workers together know of loss and auxiliary values.

    Args:
        how, what: see there.
        axis: of the workers, bound; None for a single one.
        trained, rest: see `Trained.part`.
        batch: this worker's part.
        named: keyword arguments, equal on all workers.
        scale: f32[], of the loss, where `how.scale` is a `DynamicScale`.
    """
    number = axis_index(axis)
    trained, rest, named, scale = varying((trained, rest, named, scale), axis)
    factor = scale if isinstance(how.scale, DynamicScale) else how.scale
    if axis_names(axis):
        rest = [jax.random.fold_in(leaf, number) if _is_key(leaf) else leaf for leaf in rest]
    parts = how.micro_batches

    def one(rest, part, j):
        own = dict(named)
        for name in how.keys:
            own[name] = jax.tree.map(lambda key: jax.random.fold_in(jax.random.fold_in(key, number), j), named[name])
        return _differentiated(how, what, trained, rest, part, own, factor)

    if parts == 1:
        grads, (loss, extra, new) = one(rest, batch, 0)
        extra = jax.tree.map(lambda x: jnp.asarray(x)[None], extra)
    else:
        cut = jax.tree.map(lambda x: _micro_batches(x, parts), batch)
        zeros = jax.tree.map(_wide_zeros, trained)

        def add(carry, given):
            total, rest = carry
            j, part = given
            grads, (loss, extra, new) = one(rest, part, j)
            total = jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, grads)
            rest = [old if leaf is None else leaf for old, leaf in zip(rest, new, strict=True)]
            return (total, rest), (loss, extra)

        (total, new), (losses, extra) = lax.scan(add, (zeros, rest), (jnp.arange(parts), cut))
        loss = jnp.mean(losses)
        new = [None if _is_key(leaf) else leaf for leaf in new]
        grads = jax.tree.map(lambda t: t / parts, total)
    if factor is not None:
        grads = jax.tree.map(lambda g: g.astype(wide(g.dtype)) / jnp.asarray(factor, wide(g.dtype)), grads)
    elif parts > 1:
        grads = jax.tree.map(lambda g, x: bounded(g, x.dtype), grads, trained)
    kinds = jax.tree.map(lambda kind, tree: jax.tree.map(lambda _: kind, tree), jax.tree.unflatten(*how.kinds), extra)
    aux = jax.tree.map(_of_micro_batches, kinds, extra)
    share = _share(axis, how.shares)
    overflow = None if scale is None else _is_overflow(grads) * jnp.asarray(share > 0, jnp.float32)
    kept = [None if x is None else "same" if _is_float(x) else "first" for x in new]
    kinds = ("mean", kinds, kept, None if scale is None else "sum")
    loss, aux, new, overflows = _together((loss, aux, new, overflow), kinds, axis, share)
    return Gradients(loss, aux, new, grads, overflows)


def _is_overflow(grads: Any) -> Array:
    """f32[]: one if any entry is NaN or infinite."""
    finite = [jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]
    return 1.0 - jnp.all(jnp.stack(finite)).astype(jnp.float32) if finite else jnp.zeros((), jnp.float32)


def _differentiated(
    how: Loss, what: Trained, trained: Any, rest: list[Any], part: Any, named: dict[str, Any], factor: Any
) -> Any:
    """Gradients, and (loss, auxiliary values, new values of what is not trained) of one micro-batch."""

    def scaled(trained):
        tree = what.join(trained, rest)
        out = how.function(tree, *part, **named)
        loss, extra = _pair(out) if how.has_aux else (out, None)
        if isinstance(loss, tuple | list | dict):
            raise TypeError(
                f"value_and_grad: the loss must return a number; got a {type(loss).__name__}. With auxiliary values "
                "beside it, say has_aux=True"
            )
        loss = jnp.asarray(loss)
        after = what.part(tree)[1] if what.names else []
        kept = lambda old, new: new is old or _is_key(old)
        new = [None if kept(a, b) else jnp.asarray(b, a.dtype) for a, b in zip(rest, after, strict=True)]
        if factor is None:
            return loss, (loss, extra, new)
        return loss.astype(wide(loss.dtype)) * jnp.asarray(factor, wide(loss.dtype)), (loss, extra, new)

    return jax.grad(scaled, has_aux=True)(trained)


def _pair(out: Any) -> Any:
    if not (isinstance(out, tuple) and len(out) == 2):
        raise TypeError(
            "value_and_grad: with has_aux=True the loss must return (loss, auxiliary values); got a "
            f"{type(out).__name__}"
        )
    return out


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _micro_batches(x: Array, parts: int) -> Array:
    """[b, ...] as [parts, b / parts, ...]. Every parts-th example: a batch that is cut along a mesh axis stays where it
    is."""
    if x.shape[0] % parts:
        raise ValueError(
            f"value_and_grad: micro_batches must divide the {x.shape[0]} examples of each worker; got {parts}"
        )
    return jnp.moveaxis(x.reshape(x.shape[0] // parts, parts, *x.shape[1:]), 1, 0)


def _wide_zeros(x: Array) -> Array:
    return varying(jnp.zeros_like(x, dtype=wide(x.dtype)), varying_axes(x))


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _of_micro_batches(kind: str, x: Array) -> Array:
    """Means of auxiliary values [k, ...] of this worker's micro-batches."""
    if kind == "each":
        return x
    if kind == "sum":
        return jnp.sum(x, axis=0)
    if not _is_float(x):
        raise ValueError(
            f'value_and_grad: auxiliary values of dtype {x.dtype} have no mean; say aux="sum" or aux="each" for them '
            "(aux may be a tree like the auxiliary values)"
        )
    return jnp.mean(x, axis=0, dtype=wide(x.dtype)).astype(x.dtype)


def _share(axis: Axis, shares: tuple[tuple[Axis, tuple[float, ...]], ...]) -> Any:
    """Share of this worker in a mean over the workers."""
    rest = axis_size(axis)
    share: Any = 1.0
    for along, each in shares:
        workers = axis_size(along)
        if len(each) != workers:
            raise ValueError(f"weights must be {workers} numbers, one for each worker; got {len(each)}")
        share, rest = share * jnp.asarray(np.asarray(each))[axis_index(along)], rest // workers
    return share / rest


def _together(tree: Any, kinds: Any, axis: Axis, share: Any) -> Any:
    """Facts of all workers together, by one sum of all of it.

    kinds: "mean" with the share of each worker; "same": the plain mean; "sum"; "first": that of worker 0, for counters
    that are equal anyway; "each": left as it is.
    """
    if not axis_names(axis):
        return tree
    leaves, structure = jax.tree.flatten(tree)
    number, size = axis_index(axis), axis_size(axis)
    names = jax.tree.leaves(kinds)

    def mine(kind, x):
        if kind in ("mean", "same"):
            weight = jnp.asarray(1 / size if kind == "same" else share, wide(x.dtype))
            return jnp.where(weight > 0, x.astype(weight.dtype) * weight, 0)  # a worker without a share may have NaN
        return x if kind == "sum" else jnp.where(number == 0, x, jnp.zeros_like(x))

    own = {i: mine(kind, x) for i, (kind, x) in enumerate(zip(names, leaves, strict=True)) if kind != "each"}
    summed = dict(zip(own, sum_arrays(list(own.values()), axis), strict=True))
    joint = [summed[i].astype(x.dtype) if i in summed else x for i, x in enumerate(leaves)]
    return jax.tree.unflatten(structure, joint)
