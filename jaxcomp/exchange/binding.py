"""An algorithm, a place on a mesh, a route and their options: checked, and bound together, once."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from jaxcomp.base import Algorithm, has_role
from jaxcomp.checks import is_whole
from jaxcomp.compressors.tree import choices_of, layout_of
from jaxcomp.exchange.axes import Placement
from jaxcomp.exchange.driver import Exchange
from jaxcomp.exchange.links import check_links
from jaxcomp.exchange.routes import VIAS, Route, route_of
from jaxcomp.exchange.state import frozen
from jaxcomp.groups import Buckets

__all__ = ["exchange_of", "own_weights", "shares_of"]

Array = jax.Array


def exchange_of(
    name: str,
    algorithm: Algorithm,
    placement: Placement,
    via: str | Route,
    root: Array,
    *,
    weights: Any = None,
    bucket_bytes: int | Buckets | None = None,
    **options: Any,
) -> Exchange:
    """Checks that algorithm, route and weights go together, and binds them.

    Raises:
        ValueError: unknown via, or one that cannot carry what the algorithm sends; bad weights, link or bucket_bytes.
    """
    route = route_of(via, name)
    if "link" in options:
        check_links(name, options["link"])
        options["link"] = dict(options["link"]) if isinstance(options["link"], Mapping) else options["link"]
    layout = layout_of(algorithm)
    for part in algorithm.parts or (algorithm,):
        reason = None if part.compressor is None else route.refuses(part.compressor, part.roles)
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
        buckets = bucket_bytes if isinstance(bucket_bytes, Buckets) else Buckets(bucket_bytes)
        if not is_whole(buckets.size):
            needs = "an integer of at least 1, or what jc.buckets makes"
            raise ValueError(f"{name}: bucket_bytes must be {needs}; got {bucket_bytes!r}")
        if algorithm.parts:
            raise ValueError(f"{name}: bucket_bytes does not go with by_path, whose parts share their collectives")
        if not route.buckets:
            why = "it sends one message, cut or coded as a whole, and waits for the whole gradient"
            known = ", ".join(repr(each) for each in VIAS if route_of(each).buckets)
            ways = f"via={known}, and routes of your own that send each message by itself (`buckets` of Route)"
            raise ValueError(f"{name}: bucket_bytes goes with {ways}; got {route.name!r}: {why}")
        layout = layout.in_buckets(int(buckets.size), buckets.order)
    shares = None if weights is None else shares_of(name, weights)
    if not isinstance(root, Tracer):  # words on the host are of no mesh: a state may be made on any
        root = np.asarray(jax.random.key_data(root))  # pyright: ignore[reportAssignmentType]
    return Exchange(
        name,
        algorithm,
        placement,
        route,
        root,
        layout,
        choices_of(algorithm),
        frozen(algorithm.roles),
        any(has_role(algorithm.roles, role) for role in ("memory", "narrow memory", "shift")),
        shares=shares,
        **options,
    )


def own_weights(name: str, algorithm: Algorithm) -> tuple[float, ...] | None:
    """Weights of the workers that a compressor brings; with parts, that those bring which bring some."""
    given = [part.compressor for part in algorithm.parts or (algorithm,)]
    found = {c.spec.weights for c in given if c is not None and c.spec.weights is not None}
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
