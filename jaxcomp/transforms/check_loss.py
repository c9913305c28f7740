"""Is the mean of the workers' losses the loss of the whole batch? Asked once, before a run.

    L, G      loss and gradient of the whole batch, by one worker
    l, g_i    loss as it is returned, and message of each worker, for its part of the batch

The way of the workers is right where l = L and (1/n) sum_i g_i = G. Else G is compared with all sums of the messages,
min_c |sum_i c_i g_i - G|: what c is tells which kind of loss it is.

    c_i = 1                  a sum over the examples
    sum_i c_i = 1, unequal   a mean over what workers do not have in equal numbers (tokens)
    no c                     examples are compared with each other: contrastive losses, statistics of the batch
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp.exchange.axes import Axis, axis_names
from jaxcomp.transforms.arguments import check_cut, check_wrt
from jaxcomp.transforms.local_steps import LocalSteps
from jaxcomp.transforms.meshes import find_mesh, gradients_on_mesh
from jaxcomp.transforms.value_and_grad import ValueAndGrad
from jaxcomp.transforms.worker_gradients import Gradients, check_loss_options, problem_of, worker_gradients

__all__ = ["LossCheck", "check_loss"]

NAME = "check_loss"


class LossCheck(NamedTuple):
    """loss: of the whole batch. workers: as the workers find it. gradient_error: |mean of g_i - G| / |G|."""

    loss: float
    workers: float
    gradient_error: float

    def __str__(self) -> str:
        return (
            f"The loss of the whole batch is {self.loss:.6g}, and that of the workers together {self.workers:.6g}; "
            f"their gradients differ by {self.gradient_error:.1e} of the norm."
        )


def check_loss(
    loss: Callable[..., Any] | ValueAndGrad,
    params: Any,
    batch: Any,
    mesh: Any = None,
    axis_name: Axis = "data",
    *,
    named: Mapping[str, Any] | None = None,
    tolerance: float | None = None,
    wrt: Any = None,
    **options: Any,
) -> LossCheck:
    """Compares the loss and gradient of a whole batch with what workers find who have a part of it each.

    Call it once, before a run, on a batch in which workers have unequal parts (masks, lengths), and with a loss that
    draws no random numbers. It compiles the loss twice.

    Args:
        loss: (params, *batch, **named) -> loss; or what `value_and_grad` made of it, whose options are then taken.
        params: as they are given to the loss.
        batch: tuple of the positional arguments of the loss, or the one there is.
        mesh: as for `value_and_grad`.
        axis_name: mesh axis of the workers, a tuple of them.
        named: keyword arguments of the loss.
        tolerance: of relative differences. None: 1e-3; 3e-2 where a gradient has 16 bits.
        wrt: as for `value_and_grad`.
        options: has_aux, weight, aux, batch, micro_batches, keys of `value_and_grad`.

    Returns:
        `LossCheck`, where the two agree.

    Raises:
        ValueError: they do not. The message says which kind of loss it is, and what to do.

    >>> import jax, jax.numpy as jnp, jaxcomp as jc
    >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> loss = lambda w, x, mask: jnp.sum(mask * (x - w) ** 2) / jnp.sum(mask)
    >>> print(jc.check_loss(loss, jnp.zeros(()), (jnp.ones(4), jnp.array([1.0, 1.0, 0.0, 0.0])), mesh).gradient_error)
    0.0
    """
    if isinstance(loss, ValueAndGrad):
        how, wrt, mesh, axis_name = loss.loss._replace(scale=None, shares=()), loss.wrt, mesh or loss.mesh, loss.axis
        if options:
            raise TypeError(
                f"{NAME}: options are those of the value_and_grad that was given; got {next(iter(options))!r}"
            )
    elif isinstance(loss, LocalSteps):
        raise TypeError(f"{NAME}: give it the loss itself, with the options of the loss; got local_steps(...)")
    else:
        how = check_loss_options(NAME, loss, **options)
    check_wrt(NAME, wrt)
    workers, named = axis_names(axis_name), dict(named or {})
    batch = batch if isinstance(batch, tuple) else (batch,)
    found = find_mesh(NAME, mesh, workers, params, batch, named)
    if found is None or not workers:
        raise ValueError(f"{NAME}: there is no mesh; give mesh=, or call jax.set_mesh(mesh), or place arrays on one")
    problem, inputs = problem_of(NAME, how, wrt, params, batch, named)
    check_cut(NAME, how.batch, batch, named, problem.call, found, workers)
    alone = problem._replace(loss=how._replace(micro_batches=1))

    @jax.jit
    def whole(inputs):
        one = lambda cut: worker_gradients(alone, axis_name, inputs._replace(cut=cut))._replace(kinds=())
        for name in workers:
            one = functools.partial(_row, jax.vmap(one, axis_name=name, axis_size=1))
        return one(inputs.cut)

    kinds: list[str] = []

    @jax.jit
    def parts(inputs):
        out = gradients_on_mesh(problem, found, workers, inputs)
        kinds[:] = out.kinds
        return out._replace(kinds=())

    ours, theirs = jax.device_get((whole(inputs), parts(inputs)))
    return _compared(ours, theirs, kinds, tolerance, workers[0] if len(workers) == 1 else workers)


def _row(function: Callable[..., Any], cut: list[Any]) -> Any:
    """The only row of what a function over an axis of one worker returns."""
    return jax.tree.map(lambda x: x[0], function([x[None] for x in cut]))


def _compared(whole: Gradients, parts: Gradients, kinds: list[str], tolerance: float | None, axis: Any) -> LossCheck:
    short = any(jnp.dtype(g.dtype).itemsize < 4 for g in jax.tree.leaves(whole.grads))
    tolerance = (3e-2 if short else 1e-3) if tolerance is None else tolerance
    wide = lambda x: np.asarray(x, np.float64)
    target = np.concatenate([wide(g).reshape(-1) for g in jax.tree.leaves(whole.grads)] or [np.zeros(0)])
    rows = [wide(g).reshape(len(g), -1) for g in jax.tree.leaves(parts.grads)]
    rows = np.concatenate(rows or [np.zeros((1, 0))], axis=1)
    size = float(np.linalg.norm(target)) or 1.0
    error = float(np.linalg.norm(rows.mean(0) - target) / size)
    found = LossCheck(float(wide(whole.loss)), float(wide(parts.loss)), error)
    same = np.isclose(found.loss, found.workers, rtol=tolerance, atol=1e-12)
    if not (same and error <= tolerance):
        raise ValueError(f"{NAME}: {found} {_words(rows, target, size, tolerance, found, axis)}")
    leaves = jax.tree_util.tree_leaves_with_path(whole.aux)
    for kind, (path, ours), theirs in zip(kinds, leaves, jax.tree.leaves(parts.aux), strict=True):
        if kind != "each" and not np.allclose(wide(ours), wide(theirs), rtol=tolerance, atol=tolerance):
            raise ValueError(
                f'{NAME}: the auxiliary values{jax.tree_util.keystr(path)} of the whole batch are not those that aux="'
                f'{kind}" makes of the workers\'. "mean" counts workers as the loss does, "unweighted" all alike; '
                '"sum" is for counts, "concat" for values of each example, "equal" for what is the same on all workers'
            )
    return found


def _words(rows: np.ndarray, target: np.ndarray, size: float, tolerance: float, found: LossCheck, axis: Any) -> str:
    """Names the kind of loss, and the cure."""
    workers = len(rows)
    weights, _, rank, _ = np.linalg.lstsq(rows.T, target, rcond=None)
    outside = np.linalg.norm(weights @ rows - target) / size
    clear = rank == workers < len(target)  # else some sum of the messages is the gradient of any loss
    number = "x.shape[0]" if axis is None else f"jax.lax.axis_size({axis!r})"
    a_sum = (
        "The loss is a sum over the examples: every worker sums its part, and the mean over the workers is a share of "
        f"the sum. Divide by the number of examples, or multiply by {number}."
    )
    a_mean = (
        "The loss divides by what workers do not have in equal numbers, a sum over a mask, say. Tell that number: "
        f"weight=lambda *batch: mask.sum(); or write the mean as jc.mean_over(losses, mask, {axis!r})."
    )
    compared = (
        "It is not made of what the workers' examples give one by one: the loss compares examples with each other, or "
        "takes statistics of the batch. Of a contrastive loss gather what is compared, inside of it: "
        f"z = jax.lax.all_gather(z, {axis!r}, tiled=True) is exact. A BatchNorm is exact if it knows the axis, "
        f"nnx.BatchNorm(..., axis_name={axis!r}); without it, each worker has the statistics of its part. "
        "Beside a sum over the workers in the loss, weight= is not exact with weights= or f16: write "
        f"jc.mean_over(losses, mask, {axis!r})."
    )
    if np.isclose(found.loss, workers * found.workers, rtol=tolerance) and np.allclose(
        rows.sum(0), target, rtol=0, atol=tolerance * size
    ):
        return a_sum
    if not clear:
        return f"With {len(target)} parameters that differ it cannot be told why. Either: {a_mean} Or: {compared}"
    if outside > tolerance:
        return compared
    if np.isclose(weights.sum(), 1, atol=tolerance):
        counts = ", ".join(f"{weight:.3g}" for weight in weights)
        return f"{a_mean} The whole batch counts the workers' parts as [{counts}], and here they count alike."
    return f"It is {weights.mean():.3g} times the sum of what the workers find, not their mean. {a_sum}"
