"""Methods that keep their own iterate, and what runs them; step sizes and proximal operators for them."""

from jaxcomp import prox, theory
from jaxcomp.algorithms import adiana, bidirectional, descend, ef_bv, isega, marina
from jaxcomp.transforms.rounds import Rounds, rounds

__all__ = ["Rounds", "adiana", "bidirectional", "descend", "ef_bv", "isega", "marina", "prox", "rounds", "theory"]
