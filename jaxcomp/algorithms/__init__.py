"""Distributed methods: what one worker does in a round. One file each."""

from jaxcomp.algorithms.adiana import adiana
from jaxcomp.algorithms.bidirectional import bidirectional
from jaxcomp.algorithms.by_path import by_path
from jaxcomp.algorithms.diana import diana
from jaxcomp.algorithms.direct import direct
from jaxcomp.algorithms.ef_bv import ef21, ef_bv
from jaxcomp.algorithms.error_feedback import error_feedback
from jaxcomp.algorithms.fetch_sgd import fetch_sgd
from jaxcomp.algorithms.isega import isega
from jaxcomp.algorithms.loco import loco
from jaxcomp.algorithms.majority_vote import majority_vote
from jaxcomp.algorithms.marina import marina
from jaxcomp.algorithms.method import descend
from jaxcomp.algorithms.power_sgd import power_sgd
from jaxcomp.algorithms.sparse_loco import sparse_loco

__all__ = [
    "adiana",
    "bidirectional",
    "by_path",
    "descend",
    "diana",
    "direct",
    "ef21",
    "ef_bv",
    "error_feedback",
    "fetch_sgd",
    "isega",
    "loco",
    "majority_vote",
    "marina",
    "power_sgd",
    "sparse_loco",
]
