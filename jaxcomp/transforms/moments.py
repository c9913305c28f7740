"""Moments of the inner optimizers, averaged at their own, slower rates (DES-LOC).

At the steps t with t mod K_j = 0, after the step itself, for moment j of worker i and the point u that all share:

    Delta_i = u - u_i,   u <- u - mean_i C(Delta_i),   u_i <- u.

Squares (Adam's nu) are projected: u <- max(u - mean_i C(Delta_i), 0). No u_i is negative, and neither is their mean, to
which the projected point is at least as near. Nothing is lost by it: the next differences are taken from the point as
it was projected, which all workers know. Where the point is zero a worker keeps its own entry.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcomp.arrays import bounded, finite, rounded_to, wide_like
from jaxcomp.backend import either
from jaxcomp.checks import is_integer
from jaxcomp.exchange.axes import Axis, varying
from jaxcomp.exchange.driver import idle
from jaxcomp.state.moments import SQUARES, Moment, Places, moment_of, moment_places, own_where_zero, replaced_by

__all__ = ["MomentAveraging", "away_from", "check_moments", "moved", "numbers_of", "own_moment", "started_at"]

Array = jax.Array


def check_moments(name: str, moments: Any, algorithm: Any) -> tuple[tuple[str, int], ...]:
    """Names and periods, sorted; raises where they are none."""
    if moments is None:
        if algorithm is not None:
            raise ValueError(f'{name}: moments_algorithm needs moments, say moments={{"mu": 90, "nu": 180}}')
        return ()
    fits = isinstance(moments, Mapping) and len(moments) > 0 and all(isinstance(each, str) for each in moments)
    if not fits or not all(is_integer(period, 1) for period in moments.values()):
        raise ValueError(
            f"{name}: moments must be a dictionary from names of fields to integers of at least 1, the steps from one "
            f'averaging to the next, say {{"mu": 90, "nu": 180}}; got {moments!r}'
        )
    return tuple(sorted((each, int(period)) for each, period in moments.items()))


class MomentAveraging(NamedTuple):
    """The moments of a transformation.

    name: of it, for errors. periods: pairs of a name and K_j, sorted. mean(j, leaves): of the differences of moment j,
    which has these leaves. workers: axis over which they differ.
    """

    name: str
    periods: tuple[tuple[str, int], ...]
    mean: Callable[[int, tuple[int, ...]], optax.GradientTransformationExtraArgs]
    workers: Axis

    def init(self, inner: Any, params: Any) -> dict[str, Moment]:
        """The shared points, where the inner optimizers begin."""
        places, found = moment_places(self.name, inner, params, dict(self.periods)), {}
        for j, (name, _) in enumerate(self.periods):
            start = moment_of(inner, places[name], params)
            mean = self.mean(j, numbers_of(places[name]))
            found[name] = Moment(started_at(start), mean.init(wide_like(start)))
        return found

    def update(
        self, now: Any, inner: Any, params: Any, moments: dict[str, Moment], weighed: Callable[[int, Any], Any]
    ) -> tuple[Any, dict[str, Moment], list[Any]]:
        """The state of the inner optimizer after step `now`, the moments, and which of them were averaged.

        weighed(j, differences): times what this worker counts.
        """
        places, after, due = moment_places(self.name, inner, params, dict(self.periods)), {}, []
        for j, (name, period) in enumerate(self.periods):
            due.append(now % period == 0)
            mean = self.mean(j, numbers_of(places[name]))

            def averaged(before, name=name, mean=mean, j=j):
                own, moment = before
                direction, state = mean.update(weighed(j, away_from(moment.point, own)), moment.mean)
                point = moved(name, moment.point, direction)
                return varying(own_moment(name, point, own), self.workers), Moment(point, state)

            def left(before):
                own, moment = before
                return own, moment._replace(mean=idle(moment.mean))

            own = varying(moment_of(inner, places[name], params), self.workers)
            own, after[name] = either(due[-1], averaged, left, (own, moments[name]))
            inner = replaced_by(inner, places[name], own)
        return inner, after, due


def started_at(tree: Any) -> Any:
    """A copy that all workers share from now on, in the dtype of sums."""
    return jax.tree.map(lambda x, like: jnp.array(x, like.dtype, copy=True), tree, wide_like(tree))


def numbers_of(places: Places) -> tuple[int, ...]:
    """Numbers of the parameters that have the moment."""
    return tuple(i for i, place in enumerate(places) if place is not None)


def away_from(point: Any, own: Any) -> Any:
    """u - u_i: how far the moment of a worker is from the shared one."""
    return jax.tree.map(lambda u, x: u - x.astype(u.dtype), point, own)


def moved(name: str, point: Any, direction: Any) -> Any:
    """u - direction, which is the mean difference; squares are not negative."""
    least = lambda u: jnp.maximum(u, 0) if name in SQUARES else u
    return jax.tree.map(lambda u, d: least(bounded(u - d.astype(u.dtype))), point, direction)


def own_moment(name: str, point: Any, own: Any) -> Any:
    """The moment of a worker after an averaging, in its dtype."""
    return jax.tree.map(lambda u, x: own_where_zero(name, rounded_to(u, x.dtype), finite(x)), point, own)
