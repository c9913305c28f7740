"""One file per family; every factory returns a `base.Compressor`."""

from jaxcomp.compressors.combine import compose, contract
from jaxcomp.compressors.dense import cast, identity, natural
from jaxcomp.compressors.quantize import dithering
from jaxcomp.compressors.sidco import sidco
from jaxcomp.compressors.sparsify import bernoulli, rand_k, top_k
from jaxcomp.compressors.tree import flat, lift, per_leaf

__all__ = [
    "bernoulli",
    "cast",
    "compose",
    "contract",
    "dithering",
    "flat",
    "identity",
    "lift",
    "natural",
    "per_leaf",
    "rand_k",
    "sidco",
    "top_k",
]
