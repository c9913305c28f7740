"""How payloads meet. `lanes` is the only module that names `lax` collectives."""

from jaxcomp.exchange.meet import VIAS, Met, gather, sums
from jaxcomp.exchange.rounds import Rounds, rounds
from jaxcomp.exchange.transform import Info, compressed_mean, info, init_state, per_worker, state_axes, state_specs

__all__ = [
    "VIAS",
    "Info",
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
