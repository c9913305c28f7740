"""How payloads meet. `lanes` is the only module that names `lax` collectives."""

from jaxcomp.exchange.layout import init_state, per_worker, state_axes, state_specs
from jaxcomp.exchange.links import Link
from jaxcomp.exchange.measure import Info, info
from jaxcomp.exchange.meet import CHOICES, VIAS, Met, gather, sums
from jaxcomp.exchange.rounds import Rounds, rounds
from jaxcomp.exchange.transform import compressed_mean

__all__ = [
    "CHOICES",
    "VIAS",
    "Info",
    "Link",
    "Met",
    "Rounds",
    "compressed_mean",
    "gather",
    "info",
    "init_state",
    "per_worker",
    "rounds",
    "state_axes",
    "state_specs",
    "sums",
]
