"""Compression methods by name, as the experiments use them."""

from collections.abc import Callable
from typing import NamedTuple

import jaxcomp as jc
from experiments.lib.cli import UserError
from jaxcomp.base import Algorithm

__all__ = ["METHODS", "Method", "algorithm_for"]


class Method(NamedTuple):
    """what: one line for the help; make(ratio, levels) -> algorithm."""

    what: str
    make: Callable[[float, int], Algorithm]


BLOCK = 512  # entries per norm: one norm for a whole layer would be 10 times noisier

METHODS: dict[str, Method] = {
    "dense-f32": Method("all entries in 32 bits", lambda ratio, levels: jc.direct(jc.identity())),
    "dense-bf16": Method("all entries in 16 bits, added in f32", lambda r, s: jc.direct(jc.cast("bfloat16"))),
    "fp8": Method("8 bits with a scale, error feedback", lambda r, s: jc.error_feedback(jc.cast("float8_e4m3fn"))),
    "natural": Method("powers of two, 9 bits", lambda r, s: jc.direct(jc.natural())),
    "dithering": Method(
        "random dithering with --levels levels", lambda r, s: jc.direct(jc.dithering(s, block_size=BLOCK))
    ),
    "diana": Method("DIANA with the same dithering", lambda r, s: jc.diana(jc.dithering(s, block_size=BLOCK))),
    "rand-k": Method("random entries, error feedback", lambda r, s: jc.error_feedback(jc.contract(jc.rand_k(r)))),
    "top-k": Method("largest --ratio of the entries, error feedback", lambda r, s: jc.error_feedback(jc.top_k(r))),
    "sidco": Method("threshold by SIDCo-E, error feedback", lambda r, s: jc.error_feedback(jc.sidco(r))),
    "sidco-p": Method("SIDCo-P, error feedback", lambda r, s: jc.error_feedback(jc.sidco(r, law="pareto"))),
    "sidco-gp": Method("SIDCo-GP, error feedback", lambda r, s: jc.error_feedback(jc.sidco(r, law="gamma"))),
    "sidco-narrow": Method(
        "SIDCo-E in 4 bytes an entry, error feedback",
        lambda r, s: jc.error_feedback(jc.narrow(jc.sidco(r), values="bfloat16", indices="uint16")),
    ),
    "dgc": Method("DGC's sampled threshold, error feedback", lambda r, s: jc.error_feedback(jc.contrib.dgc(r))),
    "redsync": Method("RedSync's binary search, error feedback", lambda r, s: jc.error_feedback(jc.contrib.redsync(r))),
    "gaussian-k": Method("Gaussian-k, error feedback", lambda r, s: jc.error_feedback(jc.contrib.gaussian_k(r))),
    "top-k-bf16": Method(
        "top-k with values in 16 bits, error feedback",
        lambda r, s: jc.error_feedback(jc.compose(jc.top_k(r), jc.cast("bfloat16"))),
    ),
    "power-sgd-1": Method("PowerSGD of rank 1", lambda r, s: jc.power_sgd(1)),
    "power-sgd-2": Method("PowerSGD of rank 2", lambda r, s: jc.power_sgd(2)),
    "power-sgd-4": Method("PowerSGD of rank 4", lambda r, s: jc.power_sgd(4)),
    "eden-1": Method("EDEN with 1 bit", lambda r, s: jc.direct(jc.eden(1))),
    "eden-4": Method("EDEN with 4 bits", lambda r, s: jc.direct(jc.eden(4))),
    "int4": Method("integers of 4 bits, error feedback", lambda r, s: jc.error_feedback(jc.block_scaled("int4"))),
    "mxfp4": Method("MXFP4, error feedback", lambda r, s: jc.error_feedback(jc.block_scaled("mxfp4"))),
    "mxfp8": Method("MXFP8, error feedback", lambda r, s: jc.error_feedback(jc.block_scaled("mxfp8"))),
    "sign": Method("signs with a scale, error feedback", lambda r, s: jc.error_feedback(jc.sign())),
}


def algorithm_for(method: str, ratio: float, levels: int, via: str) -> Algorithm:
    try:
        algorithm = METHODS[method].make(ratio, levels)
        jc.compressed_mean(algorithm, None, via=via)
    except ValueError as error:
        raise UserError(f"{method}: {error}") from None
    return algorithm
