"""How the messages of all workers become their mean: one file for each route, and "auto", which chooses."""

from jaxcomp.exchange.routes.concat import CONCAT
from jaxcomp.exchange.routes.gather import GATHER
from jaxcomp.exchange.routes.ladder import LADDER
from jaxcomp.exchange.routes.ragged import RAGGED
from jaxcomp.exchange.routes.ring import RING
from jaxcomp.exchange.routes.route import (
    AUTO,
    NAMES,
    ROUTES,
    Arrived,
    Carried,
    Parcel,
    Route,
    Way,
    costs,
    route_number,
    two_shots_pay,
)
from jaxcomp.exchange.routes.scatter import SCATTER
from jaxcomp.exchange.routes.sum import SUM
from jaxcomp.exchange.routes.two_shot import TWO_SHOT

__all__ = [
    "NAMES",
    "ROUTES",
    "SCATTER",
    "VIAS",
    "Arrived",
    "Carried",
    "Parcel",
    "Route",
    "Way",
    "costs",
    "route_number",
    "route_of",
    "two_shots_pay",
]

# In this order `Info.route` numbers them.
ROUTES |= {route.name: route for route in (SUM, GATHER, CONCAT, RING, RAGGED, LADDER, TWO_SHOT)}
VIAS = ("auto", *ROUTES)
NAMES += [*ROUTES, SCATTER.name]


def route_of(via: str | Route, name: str = "") -> Route:
    """The route that a user asked for, or gives.

    Raises:
        ValueError: there is none of that name; named after the function `name`.

    >>> route_of("ring").name
    'ring'
    """
    if isinstance(via, Route):
        return via
    if via not in VIAS:
        raise ValueError(f"{name and f'{name}: '}via must be one of {', '.join(map(repr, VIAS))}; got {via!r}")
    return AUTO if via == "auto" else ROUTES[via]
