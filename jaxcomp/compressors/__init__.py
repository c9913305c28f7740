"""One file per family; every factory returns a `base.Compressor`."""

from jaxcomp.compressors.bernoulli import bernoulli
from jaxcomp.compressors.binned import binned
from jaxcomp.compressors.block_scaled import block_scaled
from jaxcomp.compressors.chunked import chunked
from jaxcomp.compressors.combine import compose, contract, narrow
from jaxcomp.compressors.count_sketch import count_sketch
from jaxcomp.compressors.dagc import Selector, dagc, set_amounts
from jaxcomp.compressors.dct import dct
from jaxcomp.compressors.dense import cast, identity, natural
from jaxcomp.compressors.eden import drive, eden
from jaxcomp.compressors.precondition import precondition, refresh
from jaxcomp.compressors.quantize import dithering
from jaxcomp.compressors.rand_k import rand_k
from jaxcomp.compressors.rotate import rotate
from jaxcomp.compressors.roundtrip import roundtrip
from jaxcomp.compressors.schedule import warm_up
from jaxcomp.compressors.sidco import sidco
from jaxcomp.compressors.signs import sign, terngrad
from jaxcomp.compressors.skcompress import skcompress
from jaxcomp.compressors.sparsify import top_k
from jaxcomp.compressors.tree import flat, per_leaf

__all__ = [
    "Selector",
    "bernoulli",
    "binned",
    "block_scaled",
    "cast",
    "chunked",
    "compose",
    "contract",
    "count_sketch",
    "dagc",
    "dct",
    "dithering",
    "drive",
    "eden",
    "flat",
    "identity",
    "narrow",
    "natural",
    "per_leaf",
    "precondition",
    "rand_k",
    "refresh",
    "rotate",
    "roundtrip",
    "set_amounts",
    "sidco",
    "sign",
    "skcompress",
    "terngrad",
    "top_k",
    "warm_up",
]
