"""Methods that keep their own iterate, what runs them, and `lift`, with which one writes an algorithm.

Step sizes and proximal operators for them stand in `jc.theory` and `jc.prox`.
"""

from jaxcomp.algorithms import adiana, bidirectional, descend, ef_bv, isega, marina
from jaxcomp.compressors.vector import lift
from jaxcomp.transforms.rounds import Rounds, rounds

__all__ = [
    "Rounds",
    "adiana",
    "bidirectional",
    "descend",
    "ef_bv",
    "isega",
    "lift",
    "marina",
    "rounds",
]
