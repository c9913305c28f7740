"""Methods that keep their own iterate, and what runs them.

Step sizes and proximal operators for them stand in `theory` and `prox`.
"""

from jaxcomp import prox, theory
from jaxcomp.algorithms import adiana, bidirectional, descend, ef_bv, isega, marina
from jaxcomp.transforms.rounds import Rounds, rounds

__all__ = [
    "Rounds",
    "adiana",
    "bidirectional",
    "descend",
    "ef_bv",
    "isega",
    "marina",
    "prox",
    "rounds",
    "theory",
]
