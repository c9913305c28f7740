"""Smoothness matrices of local data: the preprocessing pass, operators, and what follows from them."""

from jaxcomp.smoothness.curvature import ggn_diagonal, hutchinson_diagonal, network_operator
from jaxcomp.smoothness.estimate import glm
from jaxcomp.smoothness.operator import (
    Blocks,
    DenseMatrix,
    Diagonal,
    LowRank,
    Softmax,
    blocks_of,
    dense_of,
    diagonal_of,
    eigenbasis,
    rotate,
    row,
    stack,
)
from jaxcomp.smoothness.preprocess import mean_lambda_max, preprocess
from jaxcomp.smoothness.sampling import (
    block_steps,
    block_variance,
    dithering_variance,
    exact_probabilities,
    expected_nonzeros,
    probabilities,
    rand_k_variance,
    sparsification_variance,
    steps,
)
from jaxcomp.smoothness.sources import assign, open_source
from jaxcomp.smoothness.store import describe, load, save

__all__ = [
    "Blocks",
    "DenseMatrix",
    "Diagonal",
    "LowRank",
    "Softmax",
    "assign",
    "block_steps",
    "block_variance",
    "blocks_of",
    "dense_of",
    "describe",
    "diagonal_of",
    "dithering_variance",
    "eigenbasis",
    "exact_probabilities",
    "expected_nonzeros",
    "ggn_diagonal",
    "glm",
    "hutchinson_diagonal",
    "load",
    "mean_lambda_max",
    "network_operator",
    "open_source",
    "preprocess",
    "probabilities",
    "rand_k_variance",
    "rotate",
    "row",
    "save",
    "sparsification_variance",
    "stack",
    "steps",
]
