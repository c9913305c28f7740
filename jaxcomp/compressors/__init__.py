"""One file per family; every factory returns a `base.Compressor`."""

from jaxcomp.compressors.combine import compose, contract, narrow
from jaxcomp.compressors.dagc import Selector, dagc
from jaxcomp.compressors.dense import cast, identity, natural
from jaxcomp.compressors.dgc import dgc, warm_up
from jaxcomp.compressors.precondition import precondition, refresh
from jaxcomp.compressors.quantize import dithering
from jaxcomp.compressors.sidco import sidco
from jaxcomp.compressors.skcompress import skcompress
from jaxcomp.compressors.sparsify import bernoulli, rand_k, top_k
from jaxcomp.compressors.threshold import gaussian_k, hard_threshold, redsync
from jaxcomp.compressors.parts import lift
from jaxcomp.compressors.tree import flat, per_leaf

__all__ = [
    "Selector",
    "bernoulli",
    "cast",
    "compose",
    "contract",
    "dagc",
    "dgc",
    "dithering",
    "flat",
    "gaussian_k",
    "hard_threshold",
    "identity",
    "lift",
    "narrow",
    "natural",
    "per_leaf",
    "precondition",
    "rand_k",
    "redsync",
    "refresh",
    "sidco",
    "skcompress",
    "top_k",
    "warm_up",
]
