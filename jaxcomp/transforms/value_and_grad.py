"""`jax.value_and_grad` whose gradient is the mean of what all workers sent, inside any `jax.jit`.

It runs in two stages (`transforms.stages`), so that the loss may be sharded by the compiler. `worker_value_and_grad` is
the first one alone.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from jaxcomp.base import Algorithm, check_algorithm
from jaxcomp.exchange.axes import Axis, axis_names, is_bound
from jaxcomp.exchange.driver import own_weights, shares_of
from jaxcomp.exchange.links import DEFAULT, Link
from jaxcomp.exchange.routes import Route
from jaxcomp.exchange.state import kept, means_in
from jaxcomp.state.specs import names_of, per_worker
from jaxcomp.transforms.compressed_mean import compressed_mean, levels_of
from jaxcomp.transforms.loss_scale import DynamicScale, LossScale, after_step, check_scale, fresh_scale, select
from jaxcomp.transforms.meshes import find_mesh, find_specs, is_cut
from jaxcomp.transforms.stages import check_batch, exchange_on_mesh, gradients_on_mesh, init_on_mesh, same_on_mesh
from jaxcomp.transforms.trained import check_all_trained, like_params, trained_of, write_back
from jaxcomp.transforms.worker_gradients import Gradients, Loss, Trained, kinds_of, worker_gradients

__all__ = ["GradientState", "ValueAndGrad", "value_and_grad", "worker_value_and_grad"]

Array = jax.Array


@kept
@dataclasses.dataclass
class GradientState:
    """The state of `value_and_grad`.

    exchange: of `compressed_mean`, which `info`, `state_specs`, `redistribute` find in it. specs: how each trained leaf
    is cut over the mesh; () where none is. Static. loss_scale: `LossScale` where it is dynamic, else ().
    """

    exchange: Any
    specs: tuple[PartitionSpec, ...] = dataclasses.field(metadata={"static": True})
    loss_scale: Any = ()


@dataclasses.dataclass(frozen=True, eq=False)
class ValueAndGrad:
    """The functions that `value_and_grad` returns.

    init(params) -> state; (params, state, *batch, **named) -> (loss, grads, state), or ((loss, aux), grads, state).
    """

    loss: Loss
    transform: Callable[[Any], Any]
    mesh: Mesh | AbstractMesh | None
    axis: Axis
    wrt: Any
    param_specs: Any

    def init(self, params: Any) -> GradientState:
        """The state for these parameters, each worker's part on its own device.

        Args:
            params: as they will be given to each step, placed on the mesh if they are cut over some of its axes.

        Raises:
            ValueError: how parameters are cut cannot be known (see `param_specs`), or the mesh has no such axis.
        """
        trained, _ = trained_of(params, self.wrt).part(params)
        if is_bound(self.axis) and self.axis is not None:
            return GradientState(self.transform(None).init(trained), (), self._scale())
        mesh = self._mesh(trained)
        if mesh is None:
            return GradientState(self._single().init(trained), (), self._scale())
        specs = self._specs(params, trained, mesh)
        tree = _like_tree(specs, trained)
        exchange = init_on_mesh(self.transform(tree), mesh, self.axis, tree, trained)
        return GradientState(exchange, specs, self._scale(mesh))

    def _scale(self, mesh: Any = None) -> Any:
        """The loss scale to begin with; () where it is not dynamic."""
        how = self.loss.scale
        if not isinstance(how, DynamicScale):
            return ()
        return fresh_scale(how) if mesh is None else same_on_mesh(lambda: fresh_scale(how), mesh)

    def __call__(self, params: Any, state: GradientState, /, *batch: Any, **named: Any) -> Any:
        """Loss and gradient at `params`, exchanged among all workers.

        Args:
            params: of all workers, or shards of them.
            state: from `init` or the step before.
            batch: arrays (trees of them) whose leading axis is cut into one part for each worker.
            named: keyword arguments, whole and equal on all workers.

        Returns:
            loss (or (loss, aux)), gradients like `params`, state.
        """
        _check_call(params, state, self.loss, named)
        what = trained_of(params, self.wrt)
        trained, rest = what.part(params)
        if is_bound(self.axis) and self.axis is not None:
            out = _here(self, what, self.axis, trained, rest, state, batch, named)
        else:
            mesh = self._mesh(trained, batch)
            if mesh is None:
                out = _alone(self, what, trained, rest, state, batch, named)
            else:
                check_batch("value_and_grad", batch, mesh, axis_names(self.axis))
                out = _on_mesh(self, what, mesh, trained, rest, state, batch, named)
        (loss, aux, new, grads, _), state = out
        write_back(params, what, self.wrt, rest, new)
        return (loss, aux) if self.loss.has_aux else loss, like_params(params, what, grads), state

    def _mesh(self, *trees: Any) -> Mesh | AbstractMesh | None:
        names = axis_names(self.axis)
        return find_mesh("value_and_grad", self.mesh, names, *trees) if names else None

    def _specs(self, params: Any, trained: Any, mesh: Any) -> tuple[PartitionSpec, ...]:
        """Specs of the trained leaves; () where none is cut."""
        whole = params if self.param_specs is not None else trained
        found = find_specs("value_and_grad", whole, mesh, axis_names(self.axis), self.param_specs)
        names = trained_of(params, self.wrt).names
        if self.param_specs is not None and names:
            by_name = {name: spec for name, spec in zip(names, found, strict=True) if name is not None}
            found = tuple(by_name[name] for name in sorted(by_name))
        return found if any(is_cut(spec, mesh) for spec in found) else ()

    def _single(self) -> Any:
        """The exchange of a single worker."""
        return self.transform(_NO_AXIS)


_NO_AXIS: Any = object()


def value_and_grad(
    loss: Callable[..., Any],
    algorithm: Algorithm | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    axis_name: Axis | Mapping[Any, Algorithm] = "data",
    *,
    has_aux: bool = False,
    aux: Any = "mean",
    wrt: Any = None,
    param_specs: Any = None,
    micro_batches: int = 1,
    loss_scale: float | DynamicScale | None = None,
    keys: str | Sequence[str] = (),
    via: str | Route = "auto",
    weights: Sequence[float] | Array | None = None,
    seed: int | Array = 0,
    measure: bool | int = False,
    link: Link = DEFAULT,
    bucket_bytes: int | None = None,
) -> ValueAndGrad:
    """Loss and gradient as `jax.value_and_grad` gives them, with a compressed exchange between the workers.

    g = A(g_1, ..., g_n): g_i is the gradient of the mean loss of worker i's part of the batch, A the algorithm. With
    `direct(identity())` it is the gradient of the mean loss of the whole batch.

    Call it inside any `jax.jit`, on arrays that lie on a mesh; or inside `shard_map`, `pmap` or `vmap` that bind
    axis_name. Without a mesh there is a single worker. The loss is written as for one device: it sees the part of the
    batch of one worker, and the whole parameters, which the compiler may have cut over other mesh axes.

    Args:
        loss: (params, *batch, **named) -> mean loss of this part of the batch; or (loss, auxiliary values).
        algorithm: `direct`, `error_feedback`, ...; None where axis_name is a mapping.
        mesh: None: that of `jax.set_mesh`, else that on which parameters or batch lie.
        axis_name: mesh axis of the workers, a tuple of them, or a mapping from axes to algorithms, as for
            `compressed_mean`; None for a single worker.
        has_aux: whether the loss returns auxiliary values, too.
        aux: what becomes of them: "mean" over the workers (BatchNorm statistics), "sum" (counts), "each": a leading
            axis of workers (times micro-batches); or a prefix tree of these.
        wrt: type of the nodes of `params` that are trained, where not all are: `flax.nnx.Param` for an NNX model. Other
            variables that the loss changes (BatchNorm statistics, counters of random keys) are averaged and written
            back; random keys among them are another one for each worker.
        param_specs: PartitionSpecs of the parameters, a prefix tree of them. None: as the arrays lie that are given to
            `init`.
        micro_batches: into how many pieces each worker cuts its part of the batch; gradients are added up in f32, and
            exchanged once.
        loss_scale: the loss is multiplied by it and the gradient divided, in f32, which it then keeps until after the
            exchange; for 16-bit floats. `jc.DynamicScale()` finds the largest scale without overflow by itself: a step
            with a gradient that is not finite at some worker gives zeros, leaves the state of the exchange as it was,
            and sets `state.loss_scale.finite` to False, by which the optimizer skips it, too::

                tx = optax.transforms.conditionally_mask(
                    tx, lambda step, finite, **_: finite, forward_extra_args=True
                )
                updates, opt_state = tx.update(grads, opt_state, params, finite=state.loss_scale.finite)
        keys: names of the keyword arguments that hold random keys, of which each worker and micro-batch gets its own.
        via, weights, seed, measure, link, bucket_bytes: as for `compressed_mean`. Loss and averaged auxiliary values
            are weighted as gradients are, by `weights` or those that the compressor brings (`dagc`).

    Returns:
        `ValueAndGrad`: init(params) -> state; (params, state, *batch, **named) -> (loss, grads, state), or
        ((loss, aux), grads, state). Positional arguments after the state are cut along their leading axis, keyword
        arguments are given whole to each worker. Gradients are laid out like the parameters; with `wrt`, what is not
        trained is None.

    Raises:
        TypeError, ValueError: as `compressed_mean`, when built; and when called: a batch that cannot be cut evenly,
            parameters whose layout is not known, no such mesh axis.

    >>> import jax, jax.numpy as jnp, jaxcomp as jc
    >>> loss = lambda w, x, y: jnp.mean((x @ w - y) ** 2)
    >>> grad_fn = jc.value_and_grad(loss, jc.error_feedback(jc.top_k(k=1)))
    >>> w, x, y = jnp.zeros(2), jnp.eye(2), jnp.array([1.0, 2.0])
    >>> value, grads, state = jax.jit(grad_fn)(w, grad_fn.init(w), x, y)
    >>> print(value, grads)
    2.5 [ 0. -2.]
    """
    levels = levels_of(algorithm, axis_name, weights, "value_and_grad")
    for each in levels.values():
        check_algorithm("value_and_grad", each)
    given = {axis: own_weights("value_and_grad", each) if weights is None else weights for axis, each in levels.items()}
    how = _checked("value_and_grad", loss, has_aux, aux, micro_batches, loss_scale, keys, given)
    if wrt is not None and not isinstance(wrt, type):
        raise TypeError(f"value_and_grad: wrt must be a type of nodes of the parameters, say nnx.Param; got {wrt!r}")
    options: dict[str, Any] = {"seed": seed, "measure": measure, "link": link, "bucket_bytes": bucket_bytes}

    def transform(sharded: Any) -> Any:
        if sharded is _NO_AXIS:
            last = algorithm if not isinstance(axis_name, Mapping) else list(axis_name.values())[-1]
            return compressed_mean(last, None, via, **options)
        return compressed_mean(algorithm, axis_name, via, weights, sharded=sharded, **options)

    transform(None)  # says what else does not fit while it is built
    return ValueAndGrad(how, transform, mesh, names_of(axis_name), wrt, param_specs)


def worker_value_and_grad(
    loss: Callable[..., Any],
    mesh: Mesh | AbstractMesh | None = None,
    axis_name: Axis = "data",
    *,
    has_aux: bool = False,
    aux: Any = "mean",
    micro_batches: int = 1,
    loss_scale: float | None = None,
    keys: str | Sequence[str] = (),
    weights: Sequence[float] | Array | None = None,
) -> Callable[..., Any]:
    """`jax.value_and_grad` with the gradient of each worker by itself, for a loop that keeps all state in optax.

    grads[i] = g_i, the gradient of the mean loss of worker i's part of the batch: an array [n, ...] for each parameter,
    each row at its worker. Nothing of it crosses. `compressed_mean` takes such gradients where its axis is not bound::

        tx = optax.chain(jc.compressed_mean(algorithm, "data"), optax.adamw(1e-3))
        loss, grads = jc.worker_value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)

    Args:
        loss, mesh, axis_name, has_aux, aux, micro_batches, loss_scale, keys: as for `value_and_grad`.
        weights: of the workers in the mean of loss and auxiliary values.

    Returns:
        (params, *batch, **named) -> (loss, grads), or ((loss, aux), grads).

    Raises:
        ValueError: there is no mesh, or no such axis; a batch that cannot be cut evenly.

    >>> import jax, jax.numpy as jnp, jaxcomp as jc
    >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> grad_fn = jc.worker_value_and_grad(lambda w, x: jnp.mean((x - w) ** 2), mesh)
    >>> loss, grads = jax.jit(grad_fn)(jnp.zeros(2), jnp.array([[1.0, 2.0]]))
    >>> print(loss, grads)
    2.5 [[-1. -2.]]
    """
    name = "worker_value_and_grad"
    if isinstance(loss_scale, DynamicScale):
        raise TypeError(f"{name}: loss_scale must be a number; a dynamic one needs the state of value_and_grad")
    how = _checked(name, loss, has_aux, aux, micro_batches, loss_scale, keys, {axis_name: weights})
    workers = axis_names(axis_name)

    def value_and_grad(params, /, *batch, **named):
        found = find_mesh(name, mesh, workers, params, batch)
        if found is None:
            raise ValueError(
                f"{name}: there is no mesh; give mesh=, or call jax.set_mesh(mesh), or place arrays on one"
            )
        check_batch(name, batch, found, workers)
        check_all_trained(name, params, "Take jc.value_and_grad(loss, algorithm, wrt=nnx.Param)")
        made = _first_stage(how, found, workers, params, batch, named)
        return (made.loss, made.aux) if has_aux else made.loss, made.grads

    return value_and_grad


def _checked(
    name: str, loss: Any, has_aux: bool, aux: Any, micro_batches: int, loss_scale: Any, keys: Any, weights: dict
) -> Loss:
    if not callable(loss):
        raise TypeError(f"{name}: loss must be a function; got {loss!r}")
    if isinstance(micro_batches, bool) or not isinstance(micro_batches, (int, np.integer)) or micro_batches < 1:
        raise ValueError(f"{name}: micro_batches must be an integer of at least 1; got {micro_batches!r}")
    loss_scale = check_scale(name, loss_scale)
    keys = (keys,) if isinstance(keys, str) else keys
    if not isinstance(keys, Sequence) or not all(isinstance(key, str) for key in keys):
        raise TypeError(f"{name}: keys must be names of keyword arguments; got {keys!r}")
    given = {axis: each for axis, each in weights.items() if each is not None}
    shares = tuple((axis, tuple(shares_of(name, each).tolist())) for axis, each in given.items())
    return Loss(loss, has_aux, kinds_of(name, aux), int(micro_batches), loss_scale, tuple(keys), shares)


# ------------------------------------------------------------------------------------------------
# Where it runs


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _first_stage(how: Loss, mesh: Any, workers: tuple[str, ...], params: Any, batch: Any, named: Any) -> Gradients:
    return gradients_on_mesh(how, Trained(None, ()), mesh, workers, params, [], batch, named)


def _here(
    self: ValueAndGrad, what: Trained, axis: Axis, trained: Any, rest: Any, state: GradientState, batch: Any, named: Any
) -> tuple[Gradients, GradientState]:
    """Inside a `shard_map`, `pmap` or `vmap` of the user's; or at a single worker."""
    factor = _factor(state)
    found = worker_gradients(self.loss, what, axis, per_worker(trained, axis), rest, batch, named, factor)
    tx = self.transform(None) if axis_names(axis) else self._single()
    return _after(self, found, trained, rest, state, tx.update(found.grads, state.exchange))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _alone(self: ValueAndGrad, what: Trained, *arrays: Any) -> tuple[Gradients, GradientState]:
    return _here(self, what, None, *arrays)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _on_mesh(
    self: ValueAndGrad, what: Trained, mesh: Any, trained: Any, rest: Any, state: GradientState, batch: Any, named: Any
) -> tuple[Gradients, GradientState]:
    """The two stages."""
    found = gradients_on_mesh(self.loss, what, mesh, self.axis, trained, rest, batch, named, _factor(state))
    tree = _like_tree(state.specs, trained)
    new = exchange_on_mesh(self.transform(tree), mesh, self.axis, tree, found.grads, state.exchange)
    return _after(self, found, trained, rest, state, new)


def _factor(state: GradientState) -> Any:
    """Factor of the loss, where that is dynamic."""
    return state.loss_scale.scale if isinstance(state.loss_scale, LossScale) else None


def _after(
    self: ValueAndGrad, found: Gradients, trained: Any, rest: Any, state: GradientState, new: tuple[Any, Any]
) -> tuple[Gradients, GradientState]:
    """Gradients as they are returned, and the next state. A step that overflowed changes the loss scale alone."""
    how, scale = self.loss.scale, state.loss_scale
    if isinstance(how, DynamicScale):
        finite = found.overflows == 0
        new, scale = select(finite, new, state.exchange), after_step(how, scale, finite)
        kept = [now if now is None else jnp.where(finite, now, old) for now, old in zip(found.rest, rest, strict=True)]
        found = found._replace(rest=kept)
    return found._replace(grads=_like_dtypes(new[0], trained)), GradientState(new[1], state.specs, scale)


def _like_dtypes(grads: Any, params: Any) -> Any:
    return jax.tree.map(lambda g, x: g.astype(jnp.result_type(x)), grads, params)


def _like_tree(specs: tuple[PartitionSpec, ...], tree: Any) -> Any:
    return jax.tree.unflatten(jax.tree.structure(tree), specs) if specs else None


def _check_call(params: Any, state: Any, how: Loss, named: Mapping[str, Any]) -> None:
    if not isinstance(state, GradientState):
        got = "the state first" if isinstance(params, GradientState) else f"{type(state).__name__}"
        raise TypeError(
            "value_and_grad: call it as grad_fn(params, state, *batch), with state from grad_fn.init(params); "
            f"got {got}"
        )
    if not means_in(state):
        raise TypeError("value_and_grad: the state must be that of grad_fn.init(params); got one without an exchange")
    if isinstance(how.scale, DynamicScale) != isinstance(state.loss_scale, LossScale):
        raise TypeError(
            "value_and_grad: the state must be that of grad_fn.init(params), with the same loss_scale; got one "
            f"{'without' if isinstance(how.scale, DynamicScale) else 'with'} a dynamic scale"
        )
    missing = [name for name in how.keys if name not in named]
    if missing:
        raise TypeError(f"value_and_grad: keys names the keyword argument {missing[0]!r}, which was not given")
