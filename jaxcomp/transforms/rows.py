"""Holds the gradients of all workers outside of `shard_map`, as rows that nothing can mix, and takes their mean.

    worker_value_and_grad -> WorkerGradients [n, ...] --before, at each row--> rows --exchange on the mesh--> direction

A row is the gradient of one worker. To a transformation of optax an array [n, ...] would be one gradient, whose norm is
that of all workers together. So what is handed out is a type on which no arithmetic is defined: what must see each
worker's own gradient is given to the mean, as `before`, and everything else stands behind it.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from jaxcomp.exchange.axes import Placement, axis_index, check_own, is_bound, local_rows, varying
from jaxcomp.exchange.driver import own_at_device, own_off_device
from jaxcomp.exchange.state import OwnState
from jaxcomp.state.specs import is_names
from jaxcomp.transforms.meshes import exchange_on_mesh, init_on_mesh, on_mesh

__all__ = ["BeforeState", "WorkerGradients", "with_before", "with_rows"]

Transformation = optax.GradientTransformationExtraArgs


CURE = (
    "A transformation would take them for one gradient. Put it behind the mean, optax.chain(jc.compressed_mean(...), "
    "transformation), or say that each worker applies it to its own gradient, jc.compressed_mean(..., "
    "before=transformation); micro-batches are jc.worker_value_and_grad(..., micro_batches=k). They are no argument "
    "and no result of jax.jit: take gradient and update in one. The array of all rows is .rows"
)


class WorkerGradients:
    """Holds the gradients of one parameter at all workers, [n, ...], each row that of one worker.

    `worker_value_and_grad` returns one for each parameter, and `compressed_mean` takes them where its axis is not
    bound. Shape and dtype are those of the parameter, so that masks and labels by shape say the same of both. Every
    arithmetic raises ValueError. It is no JAX type: it cannot be an argument or a result of `jax.jit`, so take gradient
    and update in one jitted step, or hand `rows` over and mark them again.

    Args:
        rows: array [n, ...].

    Raises:
        ValueError: rows has no leading axis.

    >>> import jax.numpy as jnp, jaxcomp as jc
    >>> grads = jc.WorkerGradients(jnp.ones((4, 3)))
    >>> grads, grads.rows.shape
    (WorkerGradients(4 workers, float32[3]), (4, 3))
    """

    __slots__ = ("rows",)
    __array_ufunc__ = None

    def __init__(self, rows: Any):
        if not hasattr(rows, "shape") or not rows.shape:
            raise ValueError(f"WorkerGradients: rows must be an array [n, ...], a row for each worker; got {rows!r}")
        self.rows = rows

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter."""
        return self.rows.shape[1:]

    @property
    def ndim(self) -> int:
        """Number of dimensions of the parameter."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of entries of the parameter."""
        return self.rows.size // max(self.rows.shape[0], 1)

    @property
    def dtype(self) -> Any:
        """Dtype of the gradients."""
        return self.rows.dtype

    def __repr__(self) -> str:
        return f"WorkerGradients({self.rows.shape[0]} workers, {jnp.dtype(self.dtype).name}{list(self.shape)})"

    def __str__(self) -> str:
        return f"{self!r}, which are the gradients of all workers before their mean. {CURE}"

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise ValueError(f"arithmetic on {self}")  # JAX would put a text of its own in place of a TypeError

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(f"{name} of {self}")

    __jax_array__ = property(_refuse)  # JAX asks whether it is there, and would say something else
    __array__ = __getitem__ = __iter__ = __len__ = __bool__ = __float__ = _refuse
    __neg__ = __pos__ = __abs__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __matmul__ = __rmatmul__ = _refuse


# ------------------------------------------------------------------------------------------------
# What each worker does to its own gradient


class EachTransform(NamedTuple):
    """The state of `before`, at each worker."""

    transform: Any


class BeforeState(NamedTuple):
    """own: the state of `before` at each worker. mean: of the exchange."""

    own: OwnState
    mean: Any


ROLES = (("transform", "compressor"),)  # a new worker takes over the state of worker i mod n


def with_before(before: Any, inside: Transformation, axes: tuple[str, ...]) -> Transformation:
    """The mean of gradients that each worker has transformed, where the axes are bound."""
    place = _placement(axes)
    before = optax.with_extra_args_support(before)

    def init(params):
        return BeforeState(_started(before, params, place), inside.init(params))

    def update(grads, state, params=None, **extra):
        check_own(grads, place.workers)
        kept = own_at_device("compressed_mean", state.own, place).transform
        grads, kept = before.update(grads, kept, params, **extra)
        direction, mean = inside.update(grads, state.mean, params, **extra)
        return direction, BeforeState(own_off_device(EachTransform(kept), place, ROLES), mean)

    return Transformation(init, update)  # pyright: ignore[reportArgumentType]


def _placement(axes: tuple[str, ...]) -> Placement:
    return Placement(axes or None, partial=bool(axes))


def _started(before: Any, params: Any, place: Placement, count: int | None = None) -> OwnState:
    """The first state of `before` at each worker, with random keys of its own."""
    axis = place.workers
    is_key = lambda x: jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)

    def one(worker):
        state = EachTransform(before.init(params))
        return jax.tree.map(lambda x: jax.random.fold_in(x, worker) if is_key(x) else jnp.asarray(x), state)

    if is_bound(axis):
        local = varying(jax.tree.map(lambda x: x[None], one(axis_index(axis))), axis)
    else:
        local = jax.vmap(one)(jnp.arange(local_rows(axis) if count is None else count))
    return OwnState(local, place.identity, ROLES)


# ------------------------------------------------------------------------------------------------
# Where the axes are not bound


def with_rows(
    name: str, mean: Transformation, inside: Transformation, axes: tuple[str, ...], sharded: Any, before: Any = None
) -> Transformation:
    """The mean where the axes of the workers are not bound: it takes `WorkerGradients`, and runs on their mesh.

    mean, inside: where they are bound, without and with `before`.
    """
    specs = None if is_names(sharded) else sharded
    before = None if before is None else optax.with_extra_args_support(before)

    def init(params):
        arrays = jax.tree.leaves(params)
        eager = arrays and not any(isinstance(x, Tracer | jax.ShapeDtypeStruct) for x in arrays)
        mesh = (
            on_mesh(axes, params) if eager and not is_bound(axes) and (sharded is None or specs is not None) else None
        )
        if mesh is None:
            return inside.init(params)
        state = init_on_mesh(mean, mesh, axes, specs, params)
        if before is None:
            return state
        # Of the whole parameters, however they are cut.
        place = _placement(axes)
        count = math.prod(mesh.shape[axis] for axis in axes)
        make = jax.jit(lambda params: _started(before, params, place, count).local)
        return BeforeState(OwnState(make(params), place.identity, ROLES), state)

    def update(grads, state, params=None, **extra):
        mesh, rows = _rows_on_mesh(name, axes, grads, params)
        if before is None:
            return exchange_on_mesh(mean, mesh, axes, specs, rows, state)
        one = lambda g, kept: before.update(g, kept, params, **extra)
        rows, kept = jax.vmap(one)(rows, state.own.local.transform)
        direction, after = exchange_on_mesh(mean, mesh, axes, specs, rows, state.mean)
        return direction, BeforeState(OwnState(EachTransform(kept), state.own.placement, state.own.roles), after)

    return Transformation(init, update)  # pyright: ignore[reportArgumentType]


def _rows_on_mesh(name: str, axes: tuple[str, ...], grads: Any, params: Any) -> tuple[Any, Any]:
    """The mesh of the workers, and the arrays [n, ...] of all rows."""
    leaves = jax.tree.leaves(grads)
    rows = jax.tree.map(lambda g: g.rows if isinstance(g, WorkerGradients) else g, grads)
    mesh = on_mesh(axes, rows)
    marked = [isinstance(g, WorkerGradients) for g in leaves]
    here = f"{name}: no axis named {', '.join(map(repr, axes))} is bound here"
    if mesh is None or not any(marked):
        got = leaves[:3] if any(marked) else [jnp.shape(g) for g in leaves][:3]
        raise ValueError(
            f"{here}; call it inside jax.shard_map, jax.pmap or jax.vmap(axis_name=...), or give it the gradients of "
            "jc.worker_value_and_grad, which lie on a mesh with that axis; arrays [n, ...] of your own are marked as "
            f"such by jc.WorkerGradients(array); got {got}"
        )
    count = math.prod(mesh.shape[axis] for axis in axes)
    whole = None if params is None else jax.tree.leaves(params)
    for i, (path, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(grads)):
        where = f"gradients{jax.tree_util.keystr(path)}"
        if not marked[i]:
            raise ValueError(
                f"{here}, and {where} is an array that a transformation before the mean has made, while others are "
                "still the gradients of all workers. Put the transformation behind the mean, or give it to the mean: "
                "jc.compressed_mean(..., before=transformation)"
            )
        expected = None if whole is None or len(whole) != len(leaves) else jnp.shape(whole[i])
        if leaf.rows.shape[0] != count or (expected is not None and leaf.shape != expected):
            raise ValueError(
                f"{here}, and {where} must hold the gradients of all {count} workers, [{count}, ...]; got shape "
                f"{leaf.rows.shape}{'' if expected is None else f' for a parameter of shape {expected}'}"
            )
    return mesh, rows
