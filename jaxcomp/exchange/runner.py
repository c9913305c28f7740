"""One round of an algorithm at one worker: the state is opened, the algorithm runs, the state is put away.

`Runner` is what `compressed_mean`, `rounds` and every other outer form use, so that weights, routes and hierarchies are
the same in all of them.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomp.base import Algorithm, State, key_data, wide, wrap_key
from jaxcomp.exchange.info import Errors, no_counts, no_errors, nonfinite
from jaxcomp.exchange.links import DEFAULT, Link
from jaxcomp.exchange.placement import Placement, is_missing
from jaxcomp.exchange.round import Round, Way
from jaxcomp.exchange.routes import VIAS, Route, route_of
from jaxcomp.exchange.state import About, MeanLocal, MeanShared, MeanState, at_device, frozen, local_rows, off_device
from jaxcomp.exchange.varying import axis_index, axis_size, is_bound, varying
from jaxcomp.layout import DEFAULT as DEFAULT_LAYOUT
from jaxcomp.layout import Layout, Plan, plan_of, split

__all__ = ["Runner", "runner"]

Array = jax.Array


class Runner(NamedTuple):
    """An algorithm bound to a place on a mesh and to a route.

    name: of the outer form, for errors. shares: weights of the workers, with sum one, or None. root: key of both kinds
    of randomness. measure: errors are measured in one of so many rounds; 0 for never. code: whose bits are
    counted; None: what is cheap.
    """

    name: str
    algorithm: Algorithm
    placement: Placement
    route: Route
    root: Array
    layout: Layout
    link: Link = DEFAULT
    shares: np.ndarray | None = None
    measure: int = 0
    code: str | None = None

    def init(self, tree: Any, *, starts: bool = False) -> MeanState:
        """The state for gradients like `tree`; or, if it starts there, of a method with this point."""
        axis = self.placement.workers
        workers = axis_size(axis) if is_bound(axis) else local_rows(axis)
        plan = plan_of(self.route.layout(self.layout, workers), tree)
        shared_key, private_key = jax.random.split(self.root)
        route = State()
        if self.algorithm.compressor is not None:
            shared_key, route_key = jax.random.split(shared_key)
            route = self.route.init(route_key, self.algorithm.compressor, plan.like)
        state = self.algorithm.init(shared_key, split(plan, tree) if starts else plan.like)
        zero = jnp.zeros((), jnp.int32)
        local = MeanLocal(state.local, route.local, no_counts())
        shared = MeanShared(zero, key_data(private_key), zero, state.shared, route.shared)
        return off_device(local, shared, self._about(plan))

    def step(self, state: Any, given: Callable[[Plan], tuple[Any, list[Array]]]) -> tuple[Any, MeanState]:
        """One round.

        Args:
            state: of this device.
            given: plan -> (what `Algorithm.update` takes for gradients, arrays whose non-finite entries count).

        Returns:
            What `Algorithm.update` returns, and the state after the round.
        """
        local, shared, plan = self._opened(state)
        grads, arrays = given(plan)
        measured = shared.count % self.measure == 0 if self.measure else None
        exchange = Round(self._way(plan), State(local.route, shared.route), measured)
        out, new = self.algorithm.update(self._key(shared), grads, State(local.algorithm, shared.algorithm), exchange)
        route, counts = exchange.outcome
        errors = self._errors(measured, counts.errors, arrays, local.counts.errors)
        local = MeanLocal(new.local, route.local, counts._replace(errors=errors))
        workers = jnp.asarray(exchange.size, jnp.int32)
        shared = MeanShared(shared.count + 1, shared.key, workers, new.shared, route.shared)
        return out, off_device(local, shared, state.about)

    def _opened(self, state: Any) -> tuple[MeanLocal, MeanShared, Plan]:
        place = self.placement
        missing = is_missing(place)
        if missing:
            raise ValueError(
                f"{self.name}: no axis named {missing!r} is bound here; call it inside jax.shard_map, jax.pmap or "
                "jax.vmap(axis_name=...)"
            )
        workers = axis_size(place.workers)
        if self.shares is not None and len(self.shares) != workers:
            raise ValueError(f"{self.name}: {len(self.shares)} weights for {workers} workers on axis {place.workers!r}")
        local, shared = at_device(self.name, state, place.identity, frozen(self.algorithm.roles))
        plan = state.about.plan
        here = plan_of(self.route.layout(self.layout, workers), plan.tree)
        if plan != here:
            shapes = lambda plan: [x.shape for x in jax.tree.leaves(plan.like)]
            raise ValueError(
                f"{self.name}: the state was made for another route, layout or number of workers: its vectors are "
                f"{shapes(plan)}, and here, for {workers} workers, {shapes(here)}. Make it with jc.init_state."
            )
        return local, shared, plan

    def _about(self, plan: Plan) -> About:
        return About(self.placement.identity, plan, frozen(self.algorithm.roles))

    def _key(self, shared: MeanShared) -> Array:
        """Private to this worker and round: any round can be replayed."""
        key = jax.random.fold_in(wrap_key(shared.key), shared.count)
        if self.placement.outer:
            key = jax.random.fold_in(key, axis_index(self.placement.outer))
        return jax.random.fold_in(key, axis_index(self.placement.workers))

    def _way(self, plan: Plan) -> Way:
        dtype = wide(*plan.dtypes)
        weights = None if self.shares is None else jnp.asarray(self.shares, dtype)
        buckets = None if self.layout.bucket_bytes is None else plan.buckets
        exact = _has_role(self.algorithm.roles, "memory") or _has_role(self.algorithm.roles, "shift")
        return Way(self.placement, self.route, self.link, weights, buckets, exact, self.code)

    def _errors(self, measured: Array | None, errors: Errors, arrays: list[Array], before: Errors) -> Errors:
        """Those of this round, or of the last one in which they were measured."""
        if measured is None:
            return no_errors()
        every = self.placement.every
        none = varying(jnp.zeros((), jnp.float32), every)
        bad = lax.cond(measured, lambda: varying(nonfinite(arrays), every), lambda: none)
        return jax.tree.map(lambda a, b: jnp.where(measured, a, b), errors._replace(nonfinite=bad), before)


def _has_role(roles: Any, role: str) -> bool:
    values = roles.values() if hasattr(roles, "values") else [roles]
    return any(value == role or (hasattr(value, "values") and _has_role(value, role)) for value in values)


def runner(
    name: str,
    algorithm: Algorithm,
    placement: Placement,
    via: str,
    root: Array,
    *,
    weights: Any = None,
    bucket_bytes: int | None = None,
    **options: Any,
) -> Runner:
    """Checks that algorithm, route and weights go together, and binds them.

    Raises:
        ValueError: unknown via, or one that cannot carry what the algorithm sends; bad weights or bucket_bytes.
    """
    if via not in VIAS:
        raise ValueError(f"{name}: via must be one of {', '.join(map(repr, VIAS))}; got {via!r}")
    route = route_of(via)
    lifted = algorithm.compressor
    layout = algorithm.layout or DEFAULT_LAYOUT
    if lifted is not None:
        layout, base = lifted.spec.lifted or (layout, lifted)
        as_given = base if layout == (base.spec.layout or DEFAULT_LAYOUT) else lifted
        reason = route.refuses(as_given, algorithm.roles)
        if reason:
            raise ValueError(f"{name}: {reason}")
        weights = lifted.spec.weights if weights is None else weights
    if bucket_bytes is not None:
        if isinstance(bucket_bytes, bool) or not isinstance(bucket_bytes, (int, np.integer)) or bucket_bytes < 1:
            raise ValueError(f"{name}: bucket_bytes must be an integer of at least 1; got {bucket_bytes!r}")
        if via not in ("auto", "sum", "gather"):
            raise ValueError(f'{name}: bucket_bytes goes with via="auto", "sum" and "gather"; got {via!r}')
        layout = layout.in_buckets(int(bucket_bytes))
    shares = None if weights is None else _shares(name, weights)
    return Runner(name, algorithm, placement, route, root, layout, shares=shares, **options)


def _shares(name: str, weights: Sequence[float]) -> np.ndarray:
    values = np.asarray(weights, np.float64)
    if values.ndim != 1 or not np.all(np.isfinite(values)) or np.any(values < 0) or not values.sum() > 0:
        raise ValueError(f"{name}: weights must be n numbers >= 0, not all zero; got {weights}")
    return values / values.sum()
