"""An algorithm is bound to a place on a mesh and to a route, once it is known that they go together."""

from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from jaxcomp.base import Algorithm
from jaxcomp.exchange.links import check_link
from jaxcomp.exchange.placement import Placement
from jaxcomp.exchange.routes import VIAS, Route, route_of
from jaxcomp.exchange.runner import Runner
from jaxcomp.exchange.state import frozen
from jaxcomp.layout import DEFAULT, layout_of

__all__ = ["bind", "own_weights", "shares_of"]

Array = jax.Array


def bind(
    name: str,
    algorithm: Algorithm,
    placement: Placement,
    via: str | Route,
    root: Array,
    *,
    weights: Any = None,
    bucket_bytes: int | None = None,
    **options: Any,
) -> Runner:
    """Checks that algorithm, route and weights go together, and binds them.

    Raises:
        ValueError: unknown via, or one that cannot carry what the algorithm sends; bad weights, link or bucket_bytes.
    """
    if not isinstance(via, Route) and via not in VIAS:
        raise ValueError(f"{name}: via must be one of {', '.join(map(repr, VIAS))}; got {via!r}")
    route = via if isinstance(via, Route) else route_of(via)
    if "link" in options:
        check_link(name, options["link"])
    layout = layout_of(algorithm)
    for part in algorithm.parts or (algorithm,):
        reason = refusal(route, part)
        if reason:
            raise ValueError(f"{name}: {reason}")
    if algorithm.compressor is None and route.layout is not None and route.layout(layout, 1).unit == "chunks":
        known = route.name in VIAS
        what = f'via="{route.name}"' if known else "a mean of which each worker keeps the shard of its parameters"
        cure = 'Use via="auto"' if known else "Use direct(...) or error_feedback(...)"
        cuts = f"{what} cuts all leaves together into chunks"
        needs = "this algorithm needs them as they are (by_path, PowerSGD, FetchSGD and the like)"
        raise ValueError(f"{name}: {cuts}; {needs}. {cure}")
    if weights is None:
        weights = own_weights(name, algorithm)
    if bucket_bytes is not None:
        if isinstance(bucket_bytes, bool) or not isinstance(bucket_bytes, (int, np.integer)) or bucket_bytes < 1:
            raise ValueError(f"{name}: bucket_bytes must be an integer of at least 1; got {bucket_bytes!r}")
        if algorithm.parts:
            raise ValueError(f"{name}: bucket_bytes does not go with by_path, whose parts share their collectives")
        if via not in ("auto", "sum", "gather"):
            raise ValueError(f'{name}: bucket_bytes goes with via="auto", "sum" and "gather"; got {via!r}')
        layout = layout.in_buckets(int(bucket_bytes))
    shares = None if weights is None else shares_of(name, weights)
    if not isinstance(root, Tracer):  # words on the host are of no mesh: a state may be made on any
        root = np.asarray(jax.random.key_data(root))  # pyright: ignore[reportAssignmentType]
    roles = frozen(algorithm.roles)
    return Runner(name, algorithm, placement, route, root, layout, roles, shares=shares, **options)


def refusal(route: Route, algorithm: Algorithm) -> str | None:
    """Why a route cannot carry what an algorithm sends; None where it can."""
    lifted = algorithm.compressor
    if lifted is None:
        return None
    layout, base = lifted.spec.lifted or (layout_of(algorithm), lifted)
    as_given = base if layout == (base.spec.layout or DEFAULT) else lifted
    return route.refuses(as_given, algorithm.roles)


def own_weights(name: str, algorithm: Algorithm) -> tuple[float, ...] | None:
    """Those of the workers that a compressor brings; with parts, that those bring which bring some."""
    lifted = [part.compressor for part in algorithm.parts or (algorithm,)]
    found = {c.spec.weights for c in lifted if c is not None and c.spec.weights is not None}
    if len(found) > 1:
        raise ValueError(f"{name}: compressors of parts of the tree bring different weights of the workers: {found}")
    return found.pop() if found else None


def shares_of(name: str, weights: Any) -> np.ndarray:
    """Weights of the workers divided by their sum, f64[n].

    Raises:
        ValueError: they are no vector, or one of them is negative or not finite, or all are zero.
    """
    values = np.asarray(weights, np.float64)
    if values.ndim != 1 or not np.all(np.isfinite(values)) or np.any(values < 0) or not values.sum() > 0:
        raise ValueError(f"{name}: weights must be n numbers >= 0, not all zero; got {weights}")
    return values / values.sum()
