"""Runs a method that chooses where gradients are taken: inside `shard_map`, `pmap` or `vmap(axis_name=...)`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcomp.arrays import root_key
from jaxcomp.base import Algorithm, Compressor, require_algorithm
from jaxcomp.exchange.axes import Axis, axis_names, varying
from jaxcomp.exchange.binding import exchange_of, own_weights
from jaxcomp.exchange.driver import Exchange
from jaxcomp.exchange.links import DEFAULT, Link
from jaxcomp.exchange.routes import Route
from jaxcomp.exchange.state import MeanState
from jaxcomp.groups import join, split
from jaxcomp.transforms.compressed_mean import by_level
from jaxcomp.transforms.worker_gradients import shares_along, weighing

__all__ = ["RoundFunctions", "rounds"]

Array = jax.Array


class RoundFunctions(NamedTuple):
    """init(x) -> state;  step(state, gradient) -> (state, bits);  point(state) -> x.

    gradient(x) is the gradient of the worker's own loss; bits is what this worker sent in the round. The state is laid
    out as that of `compressed_mean`: `state_specs`, `state_axes`, `init_state`, `info` and `redistribute` know it.
    """

    init: Callable[[Any], Any]
    step: Callable[[Any, Callable[[Any], Any]], tuple[Any, Array]]
    point: Callable[[Any], Any]


class _Gradient:
    """A worker's gradient as the last level sees it: the mean over the inner levels, whose states move on."""

    def __init__(
        self, function: Callable[[Any], Any], inner: list[Exchange], states: Sequence[Any], axes: Axis, shares: Any
    ):
        self.function, self.inner, self.states, self.axes, self.shares = function, inner, list(states), axes, shares

    def __call__(self, x: Any) -> Any:
        # Under shard_map the gradient of a replicated x would be the sum of all workers' gradients.
        with weighing(self.axes, self.shares):
            grads = self.function(varying(x, self.axes))
        for i, level in enumerate(self.inner):
            own = grads
            direction, self.states[i] = level.step(self.states[i], lambda groups: split(groups, own))  # noqa: B023
            grads = join(self.states[i].about.groups, direction)
        return grads


def rounds(
    method: Algorithm | None,
    axis_name: Axis | Mapping[Any, Algorithm],
    via: str | Route = "auto",
    *,
    weights: Sequence[float] | Array | None = None,
    seed: int | Array = 0,
    code: str = "fixed",
    link: Link | Mapping[str, Link] = DEFAULT,
) -> RoundFunctions:
    """Binds a method to a mapped axis. What it exchanges goes the same road as in `compressed_mean`.

    Args:
        method: `descend(...)`, `adiana(...)`, `isega(...)`, `marina(...)`; None where axis_name is a mapping.
        axis_name: mapped axis, a tuple of them, or None for a single worker. Or a hierarchy, a mapping from axes to
            algorithms, the last of which is the method: {"ici": jc.direct(jc.identity()), "dcn": adiana(...)}. The
            method then sees, as the gradient of its worker, what the exchange over the first axes brings.
        via, seed, link: as for `compressed_mean`.
        weights: likewise. Loss means over what workers do not have in equal numbers (tokens) are written with
            `jc.mean_over`, which knows them.
        code: of the messages that are counted, as for `code_bits`.

    Returns:
        `RoundFunctions`.

    Raises:
        ValueError: unknown via, or one that cannot carry what the method sends.
        TypeError: an algorithm that does not choose where gradients are taken.

    >>> import jaxcomp as jc
    >>> run = jc.methods.rounds(jc.methods.descend(jc.direct(jc.identity()), 0.1), "data")
    >>> def step(target):
    ...     state, bits = run.step(run.init(jnp.zeros(2)), lambda x: x - target)
    ...     return run.point(state)
    >>> print(jax.vmap(step, axis_name="data", out_axes=None)(jnp.array([[1.0, 2.0], [3.0, 4.0]])))
    [0.2 0.3]
    """
    levels: dict[Any, Any] = dict(axis_name) if isinstance(axis_name, Mapping) else {axis_name: method}
    check_method(list(levels.values())[-1])
    partial = isinstance(axis_name, Mapping)
    *inner_levels, (last, place, key) = by_level(levels, root_key(seed), partial)
    inner = [
        exchange_of("rounds", require_algorithm("rounds", each), placement, via, own, link=link)
        for each, placement, own in inner_levels
    ]
    run = exchange_of("rounds", last, place, via, key, link=link, weights=weights, code=code)
    every = tuple(name for axis in levels for name in axis_names(axis)) or None
    given = {axis: own_weights("rounds", each) for axis, each in levels.items()}
    shares = shares_along("rounds", given if weights is None else given | {place.workers: weights})

    def init(x):
        x = jax.tree.map(jnp.asarray, x)
        state = run.init(x, starts=True)
        return (*(level.init(x) for level in inner), state) if partial else state

    def step(state, gradient):
        *before, own = state if partial else (state,)
        oracle = _Gradient(gradient, inner, before, every, shares)
        _, after = run.step(own, lambda groups: lambda x: split(groups, oracle(join(groups, x))))
        bits = jnp.sum(after.local.counts.code_bits)
        return (*oracle.states, after) if partial else after, bits

    def point(state):
        own: MeanState = state[-1] if partial else state
        return join(own.about.groups, last.point(own.shared.algorithm))

    return RoundFunctions(init, step, point)


def check_method(method: Any) -> None:
    """Raises TypeError unless it is an algorithm that chooses where gradients are taken."""
    if isinstance(method, Algorithm) and method.point is not None:
        return
    if isinstance(method, Algorithm):
        got = "an algorithm without an iterate of its own. Wrap it: jc.methods.descend(algorithm, step_size)"
    else:
        got = f"the compressor {method.spec.name}" if isinstance(method, Compressor) else repr(method)
    raise TypeError(f"rounds needs a method with an iterate: descend, adiana, isega or marina; got {got}")
