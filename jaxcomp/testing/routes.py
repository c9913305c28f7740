"""The laws of routes: each is a function that raises `LawBroken` with one sentence."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from jaxcomp.algorithms.direct import direct
from jaxcomp.algorithms.error_feedback import error_feedback
from jaxcomp.arrays import as_words, zeros_like
from jaxcomp.base import Algorithm
from jaxcomp.compressors.quantize import dithering
from jaxcomp.compressors.sparsify import top_k
from jaxcomp.exchange.measure import info
from jaxcomp.exchange.routes import GATHER, Route
from jaxcomp.ledger import ledger
from jaxcomp.testing.law import AXIS, all_hold, broken, equal, gradients, on_devices, simulated
from jaxcomp.transforms.compressed_mean import compressed_mean

__all__ = ["ROUTE_LAWS", "check_route"]

SHAPES = {"bias": (7,), "kernel": (40, 50), "long": (9001,)}
PARAMS = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in SHAPES.items()}
ALGORITHMS = {"error_feedback(top_k)": error_feedback(top_k(0.05)), "direct(dithering)": direct(dithering(7))}


def check_route(
    route: Route,
    *,
    workers: Iterable[int] = (2, 3, 4),
    algorithms: dict[str, Algorithm] | None = None,
    laws: Iterable[str] | None = None,
) -> tuple[str, ...]:
    """Holds a route that brings all payloads to all workers to what via="gather" brings.

    Directions are bitwise those of "gather" for each number of workers, under vmap and, where there are so many
    devices, under `shard_map`, where the bytes that the route says are those of the compiled program (`jc.ledger`).
    The route may refuse some numbers of workers by a ValueError, not all.

    Args:
        route: with a `gather`, as `gathering_route` makes it.
        workers: numbers of workers to try.
        algorithms: by name; None: error feedback with top-k, and dithering.
        laws: names of `ROUTE_LAWS`; None: all. Leave out "sent" for a route whose bytes depend on the data.

    Returns:
        The names of the laws that were tried.

    Raises:
        LawBroken: (an AssertionError) with a sentence for each law that does not hold.
        TypeError: no route.
        ValueError: a route without a `gather`, or one that refuses all these numbers of workers.

    >>> import jaxcomp as jc
    >>> from jaxcomp.exchange.routes.route import gathering_route
    >>> shifted = gathering_route("shifted", lambda parcels, way: (
    ...     jax.tree.map(lambda a: jax.numpy.roll(a, 1, 0), GATHER.gather(parcels, way)[0]), 0.0))
    >>> jc.testing.check_route(shifted, workers=[3])  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    jaxcomp.testing.law.LawBroken: the route 'shifted' breaks ...
    """
    if not isinstance(route, Route):
        raise TypeError(f"testing.check_route needs a jaxcomp.exchange.routes.Route; got {route!r}")
    if route.gather is None:
        raise ValueError(f"testing.check_route: the route {route.name!r} does not bring the payloads: it has no gather")
    found = ALGORITHMS if algorithms is None else algorithms
    numbers, refused = [], ""
    for n in workers:
        try:
            jax.eval_shape(*_round_of(simulated, route, next(iter(found.values())), n))
            numbers.append(n)
        except ValueError as error:
            refused = str(error)
    if not numbers:
        raise ValueError(f"testing.check_route: {route.name!r} takes none of these numbers of workers: {refused}")
    tried = Tried(route, found, numbers)
    return all_hold(f"the route {route.name!r}", ROUTE_LAWS, laws, lambda law: ROUTE_LAWS[law](tried))


def _round_of(make: Callable[..., Any], route: Route, algorithm: Algorithm, n: int) -> tuple[Any, ...]:
    """A round among n workers, as `simulated` or `on_devices` makes it, and its arguments."""
    step, state = make(compressed_mean(algorithm, AXIS, via=route), zeros_like(PARAMS), n)
    return step, gradients(PARAMS, n, n), state


class Tried:
    """A route among some numbers of workers. What ran is kept."""

    def __init__(self, route: Route, algorithms: dict[str, Algorithm], numbers: list[int]):
        self.route, self.algorithms = route, algorithms
        self.simulated = [(name, n) for name in algorithms for n in numbers]
        self.placed = [(name, n) for name, n in self.simulated if n <= jax.device_count()]
        self.round = functools.cache(self._round)

    def _round(self, route: Route, make: Callable[..., Any], name: str, n: int) -> tuple[Any, float, Any]:
        """Directions of a round, the bytes that a worker sends, and the program with its arguments."""
        step, *args = _round_of(make, route, self.algorithms[name], n)
        direction, after = step(*args)
        return direction, float(info(after).sent_bytes), (step, *args)


def _same(tried: Tried, make: Callable[..., Any], cases: list[tuple[str, int]], where: str) -> None:
    for name, n in cases:
        got, want = (tried.round(route, make, name, n)[0] for route in (tried.route, GATHER))
        what = f'directions of {name} {where.format(n)} are those of via="gather", bit for bit'
        equal(what, got, want)
        equal(what, *(jax.tree.map(as_words, each) for each in (got, want)))  # signs of zeros


def _gathered(tried: Tried) -> None:
    """All workers get what via="gather" brings, bit for bit and in the order of the workers."""
    _same(tried, simulated, tried.simulated, "among {} workers")


def _on_devices(tried: Tried) -> None:
    """The same under `shard_map`, where there are so many devices."""
    _same(tried, on_devices, tried.placed, "on {} devices")


def sent(tried: Tried) -> None:
    """The bytes that a route says, in the mean over the workers, are those of the compiled program, where there are so
    many devices. Not of a route whose bytes depend on the data.
    """
    for name, n in tried.placed:
        _, said, program = tried.round(tried.route, on_devices, name, n)
        compiled = ledger(*program).total_bytes
        if abs(said - compiled) > 1e-6 * compiled:
            broken(f"a device sends {compiled:,.0f} bytes of {name} among {n}; the route says {said:,.0f}")


ROUTE_LAWS: dict[str, Callable[[Tried], None]] = {"gathered": _gathered, "on devices": _on_devices, "sent": sent}
