"""Methods that keep their own iterate, and what runs them.

Step sizes and proximal operators for them stand in `jc.theory` and `jc.prox`.
"""

from jaxcomp.algorithms import adiana, bidirectional, descend, ef_bv, isega, marina
from jaxcomp.transforms.rounds import RoundFunctions, rounds

__all__ = [
    "RoundFunctions",
    "adiana",
    "bidirectional",
    "descend",
    "ef_bv",
    "isega",
    "marina",
    "rounds",
]
