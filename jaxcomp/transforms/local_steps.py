"""Steps of local updates inside any `jax.jit`: the loss is written as for one device.

It runs in two stages (`transforms.meshes`): loss and gradient of each worker at its own parameters; then each device
steps with its own shard, and exchanges it where a round ends. Nothing crosses between workers in a step without an
exchange, the loss neither. With a weight W_it of each step (say tokens) a worker's difference counts what its steps
since the last exchange counted (`local_updates`, weighted):

    theta <- outer(theta, sum_i W_i (theta - theta_i) / sum_i W_i),   W_i = sum_t W_it
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxcomp.base import Algorithm
from jaxcomp.exchange.axes import Axis, axis_names, is_bound
from jaxcomp.exchange.state import state_dataclass
from jaxcomp.state.moments import LocalMomentsState
from jaxcomp.state.specs import init_state, names_of, state_specs
from jaxcomp.transforms.arguments import Trained, call_of, check_cut
from jaxcomp.transforms.local_updates import LocalUpdatesState, local_updates
from jaxcomp.transforms.meshes import (
    DATA,
    find_devices,
    find_mesh,
    find_specs,
    if_cut,
    own_gradients_on_mesh,
    resharded,
    spec_tree,
    unless_in_force,
    warn_if_alone,
    without,
)
from jaxcomp.transforms.worker_gradients import Inputs, Loss, Problem, WorkerResult, check_loss_options, own_gradients

__all__ = ["LocalSteps", "LocalStepsState", "local_steps"]

Array = jax.Array
P = PartitionSpec
NAME = "local_steps"


@state_dataclass
@dataclasses.dataclass
class LocalStepsState:
    """The state of `local_steps`.

    exchange: of `local_updates`, which `info`, `state_specs`, `redistribute` find in it. specs: how each leaf of the
    parameters is cut over the mesh; () where none is. Static.
    """

    exchange: LocalUpdatesState | LocalMomentsState
    specs: tuple[PartitionSpec, ...] = dataclasses.field(metadata={"static": True})

    @property
    def point(self) -> Any:
        """The point that all workers share: the one to test, and to keep."""
        return self.exchange.point


@dataclasses.dataclass(frozen=True, eq=False)
class LocalSteps:
    """The functions that `local_steps` returns.

    init(params) -> own, state; (own, state, *batch, **named) -> (loss, own, state), or ((loss, aux), own, state).
    """

    loss: Loss
    transform: Callable[[Any], optax.GradientTransformationExtraArgs]
    mesh: Mesh | AbstractMesh | None
    axis: Any
    param_specs: Any
    axis_is_named: bool

    @property
    def workers(self) -> tuple[str, ...]:
        """All axes over which the batch is cut."""
        return axis_names(names_of(self.axis))

    @property
    def owners(self) -> tuple[str, ...]:
        """The axes over which parameters differ: those of the last level."""
        return axis_names(list(self.axis)[-1]) if isinstance(self.axis, Mapping) else self.workers

    def init(self, params: Any) -> tuple[Any, LocalStepsState]:
        """Each worker's own parameters, behind a leading axis of workers, and the state. Call it outside of jit.

        Args:
            params: of all workers, placed on the mesh if they are cut over some of its axes.

        Raises:
            ValueError: how parameters are cut cannot be known (see `param_specs`), or the mesh has no such axis.
        """
        mesh = find_devices(NAME, self.mesh, self.workers, params) if self.workers else None
        if mesh is None:
            one = jax.jit(lambda tree: jax.tree.map(lambda x: jnp.asarray(x)[None], tree))
            return one(params), LocalStepsState(self.transform(_NO_AXIS).init(params), ())  # pyright: ignore
        specs = if_cut(find_specs(NAME, params, mesh, self.workers, self.param_specs), mesh)
        tree = spec_tree(specs, params)
        state, _ = init_state(self.transform(tree), params, mesh, self.axis, tree)
        rows = self._rows(specs, params, self.owners)
        count = _count(mesh, self.owners)
        spread = lambda tree: jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *jnp.shape(x))), tree)
        if isinstance(mesh, AbstractMesh):
            return jax.jit(spread)(params), LocalStepsState(state, specs)
        # Spelled as a step spells what it gives back, so that it compiles once: with explicit axes as long as the array
        # has axes, and else not longer than need be, with no axis for what is empty.
        explicit = AxisType.Explicit in mesh.axis_types

        def there(spec: P, x: Any) -> NamedSharding:
            rest = (None,) * (1 + jnp.ndim(x) - len(spec)) if explicit else ()
            return NamedSharding(mesh, P(*spec, *rest) if explicit or np.size(x) else P())

        where = jax.tree.map(there, rows, params)
        return jax.jit(spread, out_shardings=where)(params), LocalStepsState(state, specs)

    def __call__(self, own: Any, state: LocalStepsState, /, *batch: Any, **named: Any) -> Any:
        """One step of every worker.

        Args:
            own: parameters of each worker, from `init` or the step before.
            state: likewise.
            batch: arrays (trees of them) whose leading axis is cut into one part for each worker.
            named: keyword arguments, whole and equal on all workers.

        Returns:
            loss f[workers] of each (or (loss, aux), with a leading axis of workers), own, state.
        """
        if not isinstance(state, LocalStepsState):
            raise TypeError(
                f"{NAME}: call it as step(own, state, *batch), with both from init; got {type(state).__name__}"
            )
        if self.workers and is_bound(self.workers):
            raise ValueError(f"{NAME}: inside shard_map or vmap over {self.workers} use jc.local_updates")
        mesh = find_mesh(NAME, self.mesh, self.workers, own, batch, named) if self.workers else None
        _check_own(own, state.point, 1 if mesh is None else _count(mesh, self.owners))
        call, cut, whole, variables = call_of(NAME, self.loss.batch, self.loss.keys, batch, named)
        if variables:
            raise TypeError(
                f"{NAME}: keyword arguments must be arrays or fixed; got Flax NNX variables. Give random keys"
            )
        problem, inputs = Problem(self.loss, Trained(None, ()), call), Inputs(own, [], cut, whole)
        if mesh is None:
            out = _alone(self, problem, inputs, state)
            warn_if_alone(NAME, names_of(self.axis), self.axis_is_named)
            return out
        check_cut(NAME, self.loss.batch, batch, named, call, mesh, self.workers)
        return _on_mesh(self, problem, mesh, inputs, state)

    def _out(self, found: WorkerResult) -> Any:
        return (found.loss, jax.tree.map(lambda x: x[:, 0], found.extra)) if self.loss.has_aux else found.loss

    def _rows(self, specs: tuple[PartitionSpec, ...], tree: Any, axes: tuple[str, ...]) -> Any:
        """Specs of the leaves of a tree behind a leading axis of workers."""
        leaves, structure = jax.tree.flatten(tree)
        each = specs or (P(),) * len(leaves)
        return jax.tree.unflatten(structure, [P(axes, *without(spec, self.workers)) for spec in each])


_NO_AXIS: Any = object()


def local_steps(
    loss: Callable[..., Any],
    inner: optax.GradientTransformation,
    outer: optax.GradientTransformation,
    algorithm: Algorithm | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    axis_name: Axis | Mapping[Any, Algorithm] = DATA,
    *,
    every: int,
    has_aux: bool = False,
    weight: bool | Callable[..., Any] | None = None,
    batch: int | str | Sequence[int | str] | None = None,
    keys: str | Sequence[str] | None = None,
    param_specs: Any = None,
    **options: Any,
) -> LocalSteps:
    """Whole training steps of `local_updates`, called inside any `jax.jit` on arrays that lie on a mesh.

    The loss is written as for one device: it sees the part of the batch of one worker and the parameters of that
    worker, which the compiler may have cut over other mesh axes.

    Args:
        loss: (params, *batch, **named) -> mean loss of this part of the batch; or (loss, auxiliary values).
        inner, outer, algorithm, every: as for `local_updates`.
        mesh: None: that of `jax.set_mesh`, else that on which parameters or batch lie; without any, a single worker,
            with a warning where axis_name is given and there are several devices.
        axis_name: mesh axis of the workers, a tuple of them, or a hierarchy, as for `local_updates`.
        has_aux: whether the loss returns auxiliary values, too.
        weight: what the part of the batch counts, as for `value_and_grad`. Losses that are returned stay each worker's
            own mean, and so do steps; the difference of a worker counts what its steps since the last exchange counted.
            None: all workers count alike.
        batch, keys: as for `value_and_grad`.
        param_specs: PartitionSpecs of the parameters, a prefix tree of them. None: as the arrays lie that are given to
            `init`.
        options: fragments, delay, mixing, moments, moments_algorithm, via, weights, seed, measure, link and
            bucket_bytes of `local_updates`.

    Returns:
        `LocalSteps`. Test `state.point`, which all workers share.

    Raises:
        TypeError, ValueError: as `local_updates`, when built; and when called: a batch that cannot be cut evenly, no
            such mesh axis.

    >>> import jax, jax.numpy as jnp, optax, jaxcomp as jc
    >>> loss = lambda w, x, y: jnp.mean((x @ w - y) ** 2)
    >>> step = jc.local_steps(loss, optax.sgd(0.1), optax.sgd(1.0), jc.direct(jc.identity()), every=2)
    >>> own, state = step.init(jnp.zeros(2))
    >>> for _ in range(2):
    ...     value, own, state = jax.jit(step)(own, state, jnp.eye(2), jnp.array([1.0, 2.0]))
    >>> print(value.round(3), state.point)
    [2.025] [0.19 0.38]
    """
    axis_is_named = axis_name is not DATA
    axis_name = axis_name if axis_is_named else str(axis_name)
    how = check_loss_options(NAME, loss, has_aux=has_aux, weight=weight, aux="each", keys=keys, batch=batch)
    options["weighted"] = how.weighted
    single = {key: value for key, value in options.items() if key != "weights"}

    def transform(sharded: Any) -> optax.GradientTransformationExtraArgs:
        if sharded is _NO_AXIS:
            last = list(axis_name.values())[-1] if isinstance(axis_name, Mapping) else algorithm
            return local_updates(inner, outer, last, None, every=every, **single)
        return local_updates(inner, outer, algorithm, axis_name, every=every, sharded=sharded, **options)

    transform(None)  # says what does not fit while it is built
    return LocalSteps(how, transform, mesh, axis_name, param_specs, axis_is_named)


_WHY = "in local steps it would exchange at every step"


@functools.partial(jax.jit, static_argnums=(0, 1))
def _alone(self: LocalSteps, problem: Problem, inputs: Inputs, state: LocalStepsState) -> Any:
    mine = inputs._replace(trained=jax.tree.map(lambda x: x[0], inputs.trained))
    found = own_gradients(problem, None, mine)
    found = jax.tree.map(lambda x: x[None], found._replace(kinds=()))
    own, after = _stepped(self.transform(_NO_AXIS), inputs.trained, found.grads, found.weight, state.exchange)
    return self._out(found), own, LocalStepsState(after, state.specs)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _on_mesh(self: LocalSteps, problem: Problem, mesh: Any, inputs: Inputs, state: LocalStepsState) -> Any:
    """The two stages."""
    own = inputs.trained
    place = lambda tree, specs: jax.tree.map(lambda x, spec: resharded(x, spec, mesh), tree, specs)
    rows, each = (self._rows(state.specs, own, axes) for axes in (self.owners, self.workers))
    own = place(own, rows)
    found = own_gradients_on_mesh(problem, mesh, self.workers, self.owners, inputs._replace(trained=own), _WHY)
    tx, point = self.transform(spec_tree(state.specs, own)), state.exchange.point
    made = state_specs(state.exchange, self.axis, params=point, specs=spec_tree(state.specs, own))
    step, given_mesh = functools.partial(_stepped, tx), unless_in_force(mesh)
    ins = rows, each, P(self.workers), made
    step = jax.shard_map(step, mesh=given_mesh, in_specs=ins, out_specs=(rows, made))
    own, after = step(own, place(found.grads, each), found.weight, state.exchange)
    return self._out(found), own, LocalStepsState(after, state.specs)


def _stepped(tx: Any, own: Any, grads: Any, weight: Any, state: Any) -> tuple[Any, Any]:
    mine, grads, weight = jax.tree.map(lambda x: x[0], (own, grads, weight))
    more = {} if weight is None else {"weight": weight}
    updates, state = tx.update(grads, state, mine, **more)
    return jax.tree.map(lambda x: x[None], optax.apply_updates(mine, updates)), state


def _count(mesh: Any, axes: tuple[str, ...]) -> int:
    return math.prod(mesh.shape[name] for name in axes)


def _check_own(own: Any, point: Any, count: int) -> None:
    """Raises ValueError where these are not the parameters of each worker."""
    for (path, leaf), shared in zip(jax.tree_util.tree_leaves_with_path(own), jax.tree.leaves(point), strict=False):
        if np.shape(leaf) != (count, *shared.shape):
            raise ValueError(
                f"{NAME}: own{jax.tree_util.keystr(path)} must have shape {(count, *shared.shape)}, a leading axis of "
                f"{count} workers; got {np.shape(leaf)}. Take own from step.init, or from the step before; it is not "
                "the tree of parameters that init was given."
            )
