"""`jax.value_and_grad` whose gradient is the mean of what all workers sent, inside any `jax.jit`.

It runs in two stages (`transforms.meshes`), so that the loss may be sharded by the compiler. `worker_value_and_grad` is
the first one alone.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from jaxcomp.base import Algorithm, require_algorithm
from jaxcomp.exchange.axes import Axis, axis_names, is_bound
from jaxcomp.exchange.binding import own_weights
from jaxcomp.exchange.links import DEFAULT, Link
from jaxcomp.exchange.routes import Route
from jaxcomp.exchange.state import MeanState, state_dataclass
from jaxcomp.groups import Buckets
from jaxcomp.state.specs import names_of, per_worker
from jaxcomp.transforms.arguments import (
    Trained,
    check_all_trained,
    check_cut,
    check_wrt,
    like_params,
    trained_of,
    write_back,
)
from jaxcomp.transforms.compressed_mean import compressed_mean, levels_of
from jaxcomp.transforms.loss_scale import DynamicScale, LossScale, after_step, check_scale, fresh_scale, select
from jaxcomp.transforms.meshes import (
    DATA,
    exchange_on_mesh,
    find_mesh,
    find_specs,
    gradients_on_mesh,
    if_cut,
    init_on_mesh,
    not_explicit,
    same_on_mesh,
    spec_tree,
    warn_if_alone,
    warn_if_cut_otherwise,
    warn_of_lookups,
    warn_of_whole,
)
from jaxcomp.transforms.rows import WorkerGradients
from jaxcomp.transforms.unreduced import refusal_of, unreduced_on_mesh
from jaxcomp.transforms.worker_gradients import (
    Gradients,
    Inputs,
    Loss,
    Problem,
    check_loss_options,
    problem_of,
    shares_along,
    worker_gradients,
)

__all__ = ["GradientState", "ValueAndGrad", "value_and_grad", "worker_value_and_grad"]

Array = jax.Array


@state_dataclass
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
    gradients: str
    axis_is_named: bool

    def init(self, params: Any) -> GradientState:
        """The state for these parameters, each worker's part on its own device.

        Args:
            params: as they will be given to each step, placed on the mesh if they are cut over some of its axes.

        Raises:
            ValueError: how parameters are cut cannot be known (see `param_specs`), or the mesh has no such axis.
        """
        what = trained_of(params, self.wrt)
        trained, _ = what.part(params)
        if is_bound(self.axis) and self.axis is not None:
            return GradientState(self.transform(None).init(trained), (), self._scale())
        mesh = self._mesh(trained)
        if mesh is None:
            return GradientState(self.transform(_NO_AXIS).init(trained), (), self._scale())
        specs = self._specs(params, what, trained, mesh)
        warn_of_whole(axis_names(self.axis), specs, trained)
        tree = spec_tree(specs, trained)
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
            named: keyword arguments, whole and equal on all workers; random keys are another one for each.

        Returns:
            loss (or (loss, aux)), gradients like `params`, state.
        """
        _check_call(params, state, self.loss)
        problem, inputs = problem_of("value_and_grad", self.loss, self.wrt, params, batch, named)
        if is_bound(self.axis) and self.axis is not None:
            if self.gradients == "unreduced":
                raise ValueError(
                    f'value_and_grad: gradients="unreduced" goes with plain jax.jit; here {self.axis} is bound by '
                    'shard_map, pmap or vmap. Say gradients="per_worker"'
                )
            out = _here(self, problem, self.axis, inputs, state)
        else:
            mesh = self._mesh(inputs.trained, inputs.cut)
            if mesh is None:
                out = _alone(self, problem, inputs, state)
                warn_if_alone("value_and_grad", self.axis, self.axis_is_named)
            else:
                check_cut("value_and_grad", self.loss.batch, batch, named, problem.call, mesh, axis_names(self.axis))
                warn_if_cut_otherwise(state.specs, mesh, inputs.trained)
                out = _on_mesh(self, problem, mesh, inputs, state)
        (loss, aux, new, grads, *_), state = out
        _put_back(problem, params, (batch, named), inputs.rest, new)
        return (loss, aux) if self.loss.has_aux else loss, like_params(problem.trained, grads), state

    def _mesh(self, *trees: Any) -> Mesh | AbstractMesh | None:
        names = axis_names(self.axis)
        return find_mesh("value_and_grad", self.mesh, names, *trees) if names else None

    def _specs(self, params: Any, what: Trained, trained: Any, mesh: Any) -> tuple[PartitionSpec, ...]:
        """Specs of the trained leaves; () where none is cut."""
        whole = params if self.param_specs is not None else trained
        found = find_specs("value_and_grad", whole, mesh, axis_names(self.axis), self.param_specs)
        if self.param_specs is not None and what.names:
            by_name = {name: spec for name, spec in zip(what.names, found, strict=True) if isinstance(name, str)}
            found = tuple(by_name[name] for name in sorted(by_name))
        return if_cut(found, mesh)


_NO_AXIS: Any = object()
PER_WORKER = (
    "value_and_grad: the loss is called on each worker's part of the batch, since JAX cannot leave the gradient of the "
    'whole batch unreduced on this mesh. {}Say gradients="per_worker" if that is meant: parts that do not count alike '
    'then need weight=. gradients="unreduced" shows the error'
)


def value_and_grad(
    loss: Callable[..., Any],
    algorithm: Algorithm | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    axis_name: Axis | Mapping[Any, Algorithm] = DATA,
    *,
    has_aux: bool = False,
    weight: bool | Callable[..., Any] | None = None,
    aux: Any = "mean",
    batch: int | str | Sequence[int | str] | None = None,
    wrt: Any = None,
    param_specs: Any = None,
    micro_batches: int = 1,
    loss_scale: float | DynamicScale | None = None,
    keys: str | Sequence[str] | None = None,
    via: str | Route = "auto",
    weights: Sequence[float] | Array | None = None,
    seed: int | Array = 0,
    measure: bool | int = False,
    link: Link | Mapping[str, Link] = DEFAULT,
    bucket_bytes: int | Buckets | None = None,
    gradients: str = "auto",
) -> ValueAndGrad:
    """Loss and gradient as `jax.value_and_grad` gives them, with a compressed exchange between the workers.

    g = A(g_1, ..., g_n): g_i is the gradient of the mean loss of worker i's part of the batch, A the algorithm. With
    `direct(identity())` it is the gradient of the mean loss of the whole batch.

    Call it inside any `jax.jit`, on arrays that lie on a mesh; or inside `shard_map`, `pmap` or `vmap` that bind
    axis_name. Without a mesh there is a single worker, with a warning where axis_name is given and there are several
    devices. The loss is written as for one device: it sees the part of the batch of one worker, and the whole
    parameters, which the compiler may have cut over other mesh axes.

    A mean over what workers do not have in equal numbers, say over the tokens that a mask leaves, needs their number.
    Either say it, `weight=lambda tokens, mask: mask.sum()`, or write the mean as `jc.mean_over(losses, mask, "data")`.
    With a weight W_i, the loss l_i being the mean over so much,

        L = sum_i W_i l_i / sum_i W_i,   g_i = n W_i grad l_i / sum_i W_i,   (1/n) sum_i g_i = grad L.

    So g_i is compressed, and what a memory or a shift holds is in the units of the whole gradient. Micro-batches count
    by their weights, too. With `weights=` p_i (or those of `dagc`) a token of worker i counts p_i: W_i is p_i W_i in L.
    A worker whose weight is 0 may have the loss NaN; where all weights are 0, loss and gradient are 0.
    `jc.check_loss(loss, params, batch, mesh)` tells whether a loss is one whose parts may be taken apart.

    Args:
        loss: (params, *batch, **named) -> mean loss of this part of the batch; or (loss, auxiliary values).
        algorithm: `direct`, `error_feedback`, ...; None where axis_name is a mapping.
        mesh: None: that of `jax.set_mesh`, else that on which parameters or batch lie. Give it where the loss names the
            axis of the workers in sharding constraints, P("data", None, "model"): such a loss is called on a mesh of
            the same devices in which that axis has length 1. For meshes whose axes are Auto.
        axis_name: mesh axis of the workers, a tuple of them, or a mapping from axes to algorithms, as for
            `compressed_mean`; None for a single worker.
        has_aux: whether the loss returns auxiliary values, too.
        weight: what the part of the batch counts, a number >= 0, constant to the gradient: a function (*batch, **named)
            -> weight; or True, where the loss returns (loss, weight), with has_aux ((loss, weight), aux). None: all
            parts count alike. With `weights` or parameters in f16 it counts after the gradient is taken: then a loss
            that adds something up over the workers itself takes `jc.mean_over` in its place.
        aux: what becomes of auxiliary values: "mean" over the workers, weighted as the loss is; "unweighted": the plain
            mean (statistics of a BatchNorm without a mask); "sum" (counts); "concat": values of each example, those of
            the whole batch in its order; "equal": the same on all workers (a counter, statistics of a synchronized
            BatchNorm); "each": a leading axis of workers (times micro-batches). A prefix tree of these, or a mapping
            from paths to them, {"logits": "concat", "batch_stats/.*/mean": "unweighted", ".*": "mean"}: a path that is
            written out, else the first regular expression that is found in it.
        batch: the arguments that are cut, along their leading axes: numbers of positional and names of keyword
            arguments of the call, (0, "mask") say. None: all positional ones, which then have to have one length.
        wrt: what is trained, where not all of `params` is: a type of nodes, `flax.nnx.Param` for an NNX model; a
            function of a leaf, `eqx.is_inexact_array` for one of Equinox; a function (path, node), such as the filters
            of NNX; or a tuple of these, any of which may choose. Other NNX variables that the loss changes (BatchNorm
            statistics, counters of random keys) are averaged, all workers alike, and written back; random keys among
            them are another one for each worker. So is an `nnx.Rngs` that is given by keyword.
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
            None: all that have the dtype of keys; what looks like an untyped one is refused. (): none, all workers have
            the same.
        via, seed, measure, link, bucket_bytes: as for `compressed_mean`.
        weights: likewise; loss and averaged auxiliary values are weighted as gradients are.
        gradients: "per_worker": as above. "unreduced": the loss is called once, on the whole batch, and JAX leaves its
            gradient unreduced over the workers: masks, class weights, contrastive losses, statistics and auxiliary
            values are plain JAX's, and need no `weight` nor `aux`. On a mesh whose axes are Explicit, outside of
            `shard_map`, for operations for which JAX has a rule: products yes, convolutions not. "auto": "unreduced" on
            such a mesh, without `weight`, `aux` and `weights` (nor `dagc`), which are said of workers; else
            "per_worker", with a warning where JAX refuses an operation of the loss.

    Returns:
        `ValueAndGrad`: init(params) -> state; (params, state, *batch, **named) -> (loss, grads, state), or
        ((loss, aux), grads, state). Positional arguments after the state are cut along their leading axis, keyword
        arguments are given whole to each worker, and as they are where they are no arrays (train=True; another
        value compiles anew, so give numbers that change as arrays). Gradients are laid out like the parameters; with
        `wrt`, what is not trained is None.

    Raises:
        TypeError, ValueError: as `compressed_mean`, when built; and when called: a batch that cannot be cut evenly, or
            positional arguments that may not all be batch; parameters whose layout is not known; no such mesh axis.

    >>> import jax, jax.numpy as jnp, jaxcomp as jc
    >>> loss = lambda w, x, y: jnp.mean((x @ w - y) ** 2)
    >>> grad_fn = jc.value_and_grad(loss, jc.error_feedback(jc.top_k(k=1)))
    >>> w, x, y = jnp.zeros(2), jnp.eye(2), jnp.array([1.0, 2.0])
    >>> value, grads, state = jax.jit(grad_fn)(w, grad_fn.init(w), x, y)
    >>> print(value, grads)
    2.5 [ 0. -2.]
    """
    axis_is_named = axis_name is not DATA
    axis_name = axis_name if axis_is_named else str(axis_name)
    levels = levels_of(algorithm, axis_name, weights, "value_and_grad")
    for each in levels.values():
        require_algorithm("value_and_grad", each)
    given = {axis: own_weights("value_and_grad", each) if weights is None else weights for axis, each in levels.items()}
    how = check_loss_options(
        "value_and_grad",
        loss,
        has_aux=has_aux,
        weight=weight,
        aux=aux,
        micro_batches=micro_batches,
        loss_scale=check_scale("value_and_grad", loss_scale),
        keys=keys,
        shares=shares_along("value_and_grad", given),
        batch=batch,
    )
    check_wrt("value_and_grad", wrt)
    if gradients not in ("auto", "per_worker", "unreduced"):
        raise ValueError(f'value_and_grad: gradients must be "auto", "per_worker" or "unreduced"; got {gradients!r}')
    options: dict[str, Any] = {"seed": seed, "measure": measure, "link": link, "bucket_bytes": bucket_bytes}

    @functools.cache
    def built(specs: tuple[Any, ...], structure: Any) -> Any:
        if specs == (_NO_AXIS,):
            last = algorithm if not isinstance(axis_name, Mapping) else list(axis_name.values())[-1]
            return compressed_mean(last, None, via, **options)
        sharded = jax.tree.unflatten(structure, specs)
        return compressed_mean(algorithm, axis_name, via, weights, sharded=sharded, **options)

    def transform(sharded: Any) -> Any:
        """The exchange of parameters that are cut so: built once, not in each trace."""
        specs, structure = jax.tree.flatten(sharded)
        return built(tuple(specs), structure)

    transform(None)  # says what else does not fit while it is built
    return ValueAndGrad(how, transform, mesh, names_of(axis_name), wrt, param_specs, gradients, axis_is_named)


def worker_value_and_grad(
    loss: Callable[..., Any],
    mesh: Mesh | AbstractMesh | None = None,
    axis_name: Axis = "data",
    *,
    has_aux: bool = False,
    weight: bool | Callable[..., Any] | None = None,
    aux: Any = "mean",
    batch: int | str | Sequence[int | str] | None = None,
    wrt: Any = None,
    micro_batches: int = 1,
    loss_scale: float | None = None,
    keys: str | Sequence[str] | None = None,
    weights: Sequence[float] | Array | None = None,
) -> Callable[..., Any]:
    """`jax.value_and_grad` with the gradient of each worker by itself, for a loop that keeps all state in optax.

    rows[i] = g_i, the gradient of the mean loss of worker i's part of the batch, times n W_i / sum_j W_j with a weight:
    `WorkerGradients` for each parameter, with rows [n, ...], each row at its worker. Nothing of it crosses.
    `compressed_mean` takes such gradients where its axis is not bound, in the same `jax.jit`; whatever else would mix
    the rows of several workers raises ValueError::

        tx = optax.chain(jc.compressed_mean(algorithm, "data"), optax.adamw(1e-3))
        loss, grads = jc.worker_value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)

    Args:
        loss, mesh, axis_name, has_aux, weight, aux, batch, wrt, micro_batches, loss_scale, keys: as for
            `value_and_grad`.
        weights: of the workers in the mean of loss and auxiliary values: those of the `compressed_mean`.

    Returns:
        (params, *batch, **named) -> (loss, grads), or ((loss, aux), grads), grads a tree of `WorkerGradients`.

    Raises:
        ValueError: there is no mesh, or no such axis; a batch that cannot be cut evenly.

    >>> import jax, jax.numpy as jnp, jaxcomp as jc
    >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> grad_fn = jc.worker_value_and_grad(lambda w, x: jnp.mean((x - w) ** 2), mesh)
    >>> loss, grads = grad_fn(jnp.zeros(2), jnp.array([[1.0, 2.0]]))
    >>> print(loss, grads.rows)
    2.5 [[-1. -2.]]
    """
    name = "worker_value_and_grad"
    if isinstance(loss_scale, DynamicScale):
        raise TypeError(f"{name}: loss_scale must be a number; a dynamic one needs the state of value_and_grad")
    how = check_loss_options(
        name,
        loss,
        has_aux=has_aux,
        weight=weight,
        aux=aux,
        micro_batches=micro_batches,
        loss_scale=check_scale(name, loss_scale),
        keys=keys,
        shares=shares_along(name, {axis_name: weights}),
        batch=batch,
    )
    check_wrt(name, wrt)
    workers = axis_names(axis_name)

    def value_and_grad(params, /, *batch, **named):
        found = find_mesh(name, mesh, workers, params, batch, named)
        if found is None:
            raise ValueError(
                f"{name}: there is no mesh; give mesh=, or call jax.set_mesh(mesh), or place arrays on one"
            )
        if wrt is None:
            check_all_trained(name, params, "Say wrt=nnx.Param")
        problem, inputs = problem_of(name, how, wrt, params, batch, named)
        check_cut(name, how.batch, batch, named, problem.call, found, workers)
        made = _first_stage(problem, found, workers, inputs)
        _put_back(problem, params, (batch, named), inputs.rest, made.rest)
        grads = like_params(problem.trained, jax.tree.map(WorkerGradients, made.grads))
        return (made.loss, made.aux) if has_aux else made.loss, grads

    return value_and_grad


# ------------------------------------------------------------------------------------------------
# Where it runs


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _first_stage(problem: Problem, mesh: Any, workers: tuple[str, ...], inputs: Inputs) -> Gradients:
    return gradients_on_mesh(problem, mesh, workers, inputs)._replace(kinds=())


def _here(
    self: ValueAndGrad, problem: Problem, axis: Axis, inputs: Inputs, state: GradientState
) -> tuple[Gradients, GradientState]:
    """Inside a `shard_map`, `pmap` or `vmap` of the user's; or at a single worker."""
    own = inputs._replace(trained=per_worker(inputs.trained, axis))
    found = worker_gradients(problem, axis, own, _factor(state))
    tx = self.transform(None if axis_names(axis) else _NO_AXIS)
    return _after(self, found, inputs, state, tx.update(found.grads, state.exchange))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _alone(self: ValueAndGrad, problem: Problem, *arrays: Any) -> tuple[Gradients, GradientState]:
    return _here(self, problem, None, *arrays)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _on_mesh(
    self: ValueAndGrad, problem: Problem, mesh: Any, inputs: Inputs, state: GradientState
) -> tuple[Gradients, GradientState]:
    """The two stages."""
    workers, factor = axis_names(self.axis), _factor(state)
    stage = unreduced_on_mesh if self.gradients == "unreduced" else gradients_on_mesh
    if self.gradients == "auto" and not (not_explicit(mesh) or self.loss.tells_of_parts):
        refused = refusal_of(problem, mesh, workers, inputs, factor)
        stage = unreduced_on_mesh if refused is None else gradients_on_mesh
        if refused is not None:
            warnings.warn(PER_WORKER.format(refused), stacklevel=2)
    run = lambda trained: stage(problem, mesh, workers, inputs._replace(trained=trained), factor)
    warn_of_lookups(lambda trained: run(trained).loss, mesh, workers, state.specs, inputs.trained)
    found = run(inputs.trained)
    tree = spec_tree(state.specs, inputs.trained)
    new = exchange_on_mesh(self.transform(tree), mesh, self.axis, tree, found.grads, state.exchange)
    return _after(self, found, inputs, state, new)


def _put_back(problem: Problem, params: Any, arguments: Any, rest: list[Any], new: list[Any]) -> None:
    """New values of NNX variables, into the model and the keyword arguments that were given."""
    what, call = problem.trained, problem.call
    count = len(rest) - call.num_states
    is_rest = [name is None and what.is_own(i) for i, name in enumerate(what.names)]
    write_back(params, is_rest, rest[:count], new[:count])
    write_back(arguments, [place == "state" for place in call.places], rest[count:], new[count:])


def _factor(state: GradientState) -> Any:
    """Factor of the loss, where that is dynamic."""
    return state.loss_scale.scale if isinstance(state.loss_scale, LossScale) else None


def _after(
    self: ValueAndGrad, found: Gradients, inputs: Inputs, state: GradientState, new: tuple[Any, Any]
) -> tuple[Gradients, GradientState]:
    """Gradients as they are returned, and the next state. A step that overflowed changes the loss scale alone."""
    how, scale = self.loss.scale, state.loss_scale
    if isinstance(how, DynamicScale):
        finite = found.overflows == 0
        new, scale = select(finite, new, state.exchange), after_step(how, scale, finite)
        pairs = zip(found.rest, inputs.rest, strict=True)
        found = found._replace(rest=[now if now is None else jnp.where(finite, now, old) for now, old in pairs])
    grads = jax.tree.map(lambda g, x: g.astype(jnp.result_type(x)), new[0], inputs.trained)
    found = found._replace(grads=grads, kinds=())
    return found, GradientState(new[1], state.specs, scale)


def _check_call(params: Any, state: Any, how: Loss) -> None:
    if not isinstance(state, GradientState):
        got = "the state first" if isinstance(params, GradientState) else f"{type(state).__name__}"
        raise TypeError(
            "value_and_grad: call it as grad_fn(params, state, *batch), with state from grad_fn.init(params); "
            f"got {got}"
        )
    is_mean = lambda node: isinstance(node, MeanState)
    if not any(map(is_mean, jax.tree.leaves(state.exchange, is_leaf=is_mean))):
        raise TypeError("value_and_grad: the state must be that of grad_fn.init(params); got one without an exchange")
    if isinstance(how.scale, DynamicScale) != isinstance(state.loss_scale, LossScale):
        raise TypeError(
            "value_and_grad: the state must be that of grad_fn.init(params), with the same loss_scale; got one "
            f"{'without' if isinstance(how.scale, DynamicScale) else 'with'} a dynamic scale"
        )
