"""The loss of the whole batch, called once, whose gradient JAX leaves unreduced over the workers.

On a mesh whose axes are Explicit, parameters typed `reduced={"data"}` have gradients typed `unreduced={"data"}`: each
device holds its part of a sum that was not taken, and the program has no collective for it. With parts h_i,

    grad L = sum_i h_i,    g_i = n h_i    is what worker i compresses:    (1/n) sum_i g_i = grad L.

A worker's part counts its own tokens, so g_i is what a loss with `weight=` gives (`transforms.worker_gradients`).
"""

import math
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcomp.arrays import wide
from jaxcomp.jaxprs import CALLS
from jaxcomp.transforms.meshes import not_explicit, place_arguments, unless_in_force, without
from jaxcomp.transforms.worker_gradients import Gradients, Inputs, Problem, is_overflow, kinds_of, own_gradients

__all__ = ["refusal_of", "unreduced_on_mesh"]

NOTE = (
    'value_and_grad(gradients="unreduced"): JAX differentiates the loss with parameters typed reduced over {}. {}Where '
    "JAX has no rule for an operation, or does not know how its result is to lie, either say so in the loss "
    "(out_sharding=, or jax.reshard of the parameter to P() before an operation on single entries), or take the "
    'gradients of each worker by itself, gradients="per_worker".'
)
PLAIN = "Plain jax.grad on these Explicit axes refuses the loss as well ({}). "


class _Refused(Exception):
    """Carries the name of an operation."""


def _replayed(program: Any, values: list[Any]) -> list[Any]:
    """Results of a jaxpr for these values, one operation after the other; raises _Refused for one that fails."""
    jaxpr = program.jaxpr
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*program.consts, *values], strict=True))
    value = lambda x: x.val if isinstance(x, Literal) else known[x]
    for equation in jaxpr.eqns:
        inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
        if equation.primitive.name in CALLS and isinstance(inner, ClosedJaxpr):
            found = _replayed(inner, list(map(value, equation.invars)))
        else:
            given = [x for x in equation.invars if not isinstance(x, Literal)]
            with warnings.catch_warnings():  # JAX would like names for the arguments
                warnings.simplefilter("ignore", DeprecationWarning)
                one = Jaxpr((), given, equation.outvars, [equation], equation.effects)
            try:
                found = jaxpr_as_fun(ClosedJaxpr(one, ()))(*map(value, given))
            except Exception as error:
                raise _Refused(equation.primitive.name) from error
        known.update(zip(equation.outvars, found, strict=True))
    return list(map(value, jaxpr.outvars))


def _which(run: Callable[[Any], Any], whole: Any, typed: Any) -> str:
    """Says which operation of the loss JAX refuses, found by tracing it once more with parameters that are whole."""
    try:
        program = jax.make_jaxpr(run)(whole)
    except Exception as error:
        return PLAIN.format(" ".join(str(error).split())[:160])
    try:
        _replayed(program, jax.tree.leaves(typed))
    except _Refused as refused:
        return f"It refuses {refused}. "
    except Exception:  # which would hide the error that is explained here
        return ""
    return ""


def refusal_of(*args: Any) -> str | None:
    """A sentence on the operation of which JAX cannot leave the gradient unreduced; None where there is none.

    args: as for `unreduced_on_mesh`.
    """
    try:
        jax.eval_shape(lambda: unreduced_on_mesh(*args).grads)
    except Exception as error:
        return getattr(error, "refused", "")
    return None


def unreduced_on_mesh(
    problem: Problem, mesh: Any, workers: tuple[str, ...], inputs: Inputs, scale: Any = None
) -> Gradients:
    """Results like those of `gradients_on_mesh`: messages n h_i, [n, ...]; loss and auxiliary values are plain JAX's.

    Raises:
        ValueError: an axis that is not Explicit; weights of the workers, which a loss of the whole batch has in it.
    """
    how, trained, others = problem.loss, inputs.trained, not_explicit(mesh)
    if others:
        kind = mesh.axis_types[mesh.axis_names.index(others[0])].name
        raise ValueError(
            f'value_and_grad: gradients="unreduced" needs axes of type Explicit; {others[0]!r} is {kind}. '
            'Make the mesh with axis_types=(jax.sharding.AxisType.Explicit,) * n, or say gradients="per_worker"'
        )
    if how.shares:
        raise ValueError(
            'value_and_grad: with gradients="unreduced" the loss is that of the whole batch, and weighs its parts '
            'itself; weights of the workers (weights=, dagc) go with gradients="per_worker"'
        )
    count, parts = math.prod(mesh.shape[axis] for axis in workers), how.micro_batches
    specs = jax.tree.map(lambda x: without(jax.typeof(x).sharding.spec, workers), trained)
    inputs = place_arguments(mesh, workers, inputs)
    lie = lambda x, spec: jax.reshard(x, NamedSharding(mesh, spec))
    rows = jax.tree.map(lambda spec: P(workers, *spec), specs)

    def apart(grads: Any) -> Any:
        """Unreduced gradients as an array [n, ...]. No data moves."""
        ins = jax.tree.map(lambda g: jax.typeof(g).sharding.spec, grads)
        stage = lambda tree: jax.tree.map(lambda g: g[None] * jnp.asarray(count, g.dtype), tree)
        return jax.shard_map(stage, mesh=unless_in_force(mesh), in_specs=(ins,), out_specs=rows, check_vma=False)(grads)

    def zeros(tree: Any) -> Any:
        return jax.tree.map(lambda x, spec: lie(jnp.zeros((count, *x.shape), wide(x.dtype)), spec), tree, rows)

    if parts == 1:
        problem = problem._replace(loss=how._replace(kinds=kinds_of("value_and_grad", "equal")))  # as they are
    whole = jax.tree.map(lie, trained, specs)
    typed = jax.tree.map(lambda x, spec: lie(x, spec.update(reduced=set(workers))), whole, specs)
    factor = how.scale if scale is None else scale
    try:
        own = own_gradients(problem, None, inputs._replace(trained=typed), factor, rows=(apart, zeros))
    except Exception as error:
        run = lambda whole: own_gradients(problem, None, inputs._replace(trained=whole), factor).loss
        refused = _which(run, whole, typed)
        error.add_note(NOTE.format(workers, refused))
        error.refused = refused  # pyright: ignore[reportAttributeAccessIssue]
        raise
    overflow = None if scale is None else is_overflow(own.grads)
    return Gradients(own.loss, own.extra, own.rest, own.grads, overflow, own.kinds)
