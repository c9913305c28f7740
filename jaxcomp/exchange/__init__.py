"""The exchange between workers: rounds, routes, collectives, and the state that they keep."""

from jaxcomp.exchange.routes import ROUTES, VIAS

__all__ = ["ROUTES", "VIAS"]
