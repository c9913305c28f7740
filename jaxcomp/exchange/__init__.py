"""How payloads meet. `lanes` is the only module that names `lax` collectives."""

from jaxcomp.exchange.collectives import pmean, psum_scatter
from jaxcomp.exchange.elastic import redistribute
from jaxcomp.exchange.layout import init_state, per_worker, state_axes, state_specs
from jaxcomp.exchange.links import Link
from jaxcomp.exchange.measure import Info, info
from jaxcomp.exchange.meet import CHOICES, VIAS, Met, gather, sums
from jaxcomp.exchange.replicas import ReplicaDrift, check_replicas, fingerprint, fingerprints, skip_nonfinite
from jaxcomp.exchange.rounds import Rounds, rounds
from jaxcomp.exchange.transform import compressed_mean

__all__ = [
    "CHOICES",
    "VIAS",
    "Info",
    "Link",
    "Met",
    "ReplicaDrift",
    "Rounds",
    "check_replicas",
    "compressed_mean",
    "fingerprint",
    "fingerprints",
    "gather",
    "info",
    "init_state",
    "per_worker",
    "pmean",
    "psum_scatter",
    "redistribute",
    "rounds",
    "skip_nonfinite",
    "state_axes",
    "state_specs",
    "sums",
]
