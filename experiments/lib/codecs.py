"""A codec for each public factory of compressors, for experiments that go through all of them."""

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import numpy as np

import jaxcomp as jc
from experiments.lib.cli import UserError
from jaxcomp.base import Compressor

__all__ = ["CODECS", "Codec", "chosen", "heavy_tailed"]

WEIGHTS = [3, 0, 9, 1]  # examples of four workers, for `dagc`


class Codec(NamedTuple):
    """make(d, ratio): a compressor of f32[d] that keeps this share of the entries, if it is one that leaves some out;
    exact: what it sends are copies of entries, so that sent + residual = input, bit for bit."""

    make: Callable[[int, float], Compressor]
    exact: bool = False


# The options are those of quick rows of tests/laws.py, as far as these are good for any length. Where time ends,
# it ends for the last ones.
CODECS: dict[str, Codec] = {
    "identity": Codec(lambda d, ratio: jc.identity(), exact=True),
    "cast": Codec(lambda d, ratio: jc.cast("bfloat16")),
    "top_k": Codec(lambda d, ratio: jc.top_k(ratio), exact=True),
    "sidco": Codec(lambda d, ratio: jc.sidco(ratio), exact=True),
    "dithering": Codec(lambda d, ratio: jc.dithering(7)),
    "block_scaled": Codec(lambda d, ratio: jc.block_scaled("int4", rounding="stochastic")),
    "natural": Codec(lambda d, ratio: jc.natural()),
    "rand_k": Codec(lambda d, ratio: jc.rand_k(ratio)),
    "eden": Codec(lambda d, ratio: jc.eden(4)),
    "sign": Codec(lambda d, ratio: jc.sign()),
    "skcompress": Codec(lambda d, ratio: jc.skcompress(jc.top_k(ratio), buckets=8)),
    "chunked": Codec(lambda d, ratio: jc.chunked(jc.top_k(k=5), 64), exact=True),
    "narrow": Codec(lambda d, ratio: jc.narrow(jc.top_k(ratio), values="float16", indices="uint16")),
    "cast-e4m3": Codec(lambda d, ratio: jc.cast("float8_e4m3fn")),
    "block_scaled-mxfp4": Codec(lambda d, ratio: jc.block_scaled("mxfp4")),
    "count_sketch": Codec(lambda d, ratio: jc.count_sketch(ratio)),
    "precondition": Codec(lambda d, ratio: jc.precondition(jc.natural(), scales(d))),
    "bernoulli": Codec(lambda d, ratio: jc.bernoulli(ratio)),
    "drive": Codec(lambda d, ratio: jc.drive()),
    "rotate": Codec(lambda d, ratio: jc.rotate(jc.natural())),
    "dgc": Codec(lambda d, ratio: jc.contrib.dgc(ratio), exact=True),
    "redsync": Codec(lambda d, ratio: jc.contrib.redsync(ratio), exact=True),
    "gaussian_k": Codec(lambda d, ratio: jc.contrib.gaussian_k(ratio), exact=True),
    "hard_threshold": Codec(lambda d, ratio: jc.contrib.hard_threshold(1.5, room=0.2), exact=True),
    "skcompress-recentred": Codec(lambda d, ratio: jc.skcompress(jc.top_k(ratio), mode="recentred", buckets=32)),
    "dagc": Codec(lambda d, ratio: jc.dagc(WEIGHTS, ratio), exact=True),
    "contract": Codec(lambda d, ratio: jc.contract(jc.rand_k(ratio))),
    "dct": Codec(lambda d, ratio: jc.dct(jc.top_k(ratio), 16)),
    "terngrad": Codec(lambda d, ratio: jc.terngrad()),
    "binned": Codec(lambda d, ratio: jc.binned()),
    "compose": Codec(lambda d, ratio: jc.compose(jc.top_k(ratio), jc.cast("bfloat16"))),
}


def scales(d: int) -> Any:
    """Smoothness constants of the entries, from 0.1 to 10, as a diagonal matrix."""
    return jc.smoothness.diagonal_of(np.geomspace(0.1, 10, d))


def chosen(names: Collection[str], parts: Collection[str] | None, option: str) -> list[str]:
    """The names that contain one of the parts; all of them without parts.

    Raises:
        UserError: a part is in no name.
    """
    for part in parts or ():
        if not any(part in name for name in names):
            raise UserError(f"{option}: no name contains {part!r}; choose from {', '.join(names)}")
    return [name for name in names if parts is None or any(part in name for part in parts)]


def heavy_tailed(d: int, seed: int, subnormal: bool = True) -> np.ndarray:
    """f32[d] by Student's law with 3 degrees of freedom; of a hundred entries one is zero, and one is subnormal."""
    rng = np.random.default_rng(seed)
    x, places = rng.standard_t(3, d).astype(np.float32), rng.random(d)
    x[places < 0.01] = 0
    x[(places >= 0.01) & (places < 0.02)] *= np.float32(1e-39 if subnormal else 1)
    return x
