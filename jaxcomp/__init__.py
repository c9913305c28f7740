"""Gradient compression for JAX.

Compressors are pure functions, joined with an algorithm and chained into any optax optimizer::

    tx = optax.chain(
        jc.compressed_mean(jc.error_feedback(jc.sidco(0.001)), axis_name="data"),
        optax.adamw(1e-3),
    )

What is listed here is public. Everything else may change without notice.
"""

from jaxcomp import allocate, payloads, prox, smoothness, theory, wire
from jaxcomp.algorithms import (
    adiana,
    descend,
    diana,
    direct,
    error_feedback,
    isega,
    marina,
    momentum_correction,
)
from jaxcomp.amounts import set_amounts
from jaxcomp.base import Algorithm, Compressor, Spec, State, roundtrip
from jaxcomp.bits import code_bits, lane_bytes
from jaxcomp.compressors import (
    bernoulli,
    cast,
    compose,
    contract,
    dagc,
    dgc,
    dithering,
    flat,
    gaussian_k,
    hard_threshold,
    identity,
    narrow,
    natural,
    per_leaf,
    precondition,
    rand_k,
    redsync,
    refresh,
    sidco,
    skcompress,
    top_k,
    warm_up,
)
from jaxcomp.exchange import Info, Link, compressed_mean, info, init_state, per_worker, rounds, state_axes, state_specs
from jaxcomp.ledger import Ledger, ledger
from jaxcomp.wire import WireError

__version__ = "0.1.0"

__all__ = [
    "Algorithm",
    "Compressor",
    "Info",
    "Ledger",
    "Link",
    "Spec",
    "State",
    "WireError",
    "adiana",
    "allocate",
    "bernoulli",
    "cast",
    "code_bits",
    "compose",
    "compressed_mean",
    "contract",
    "dagc",
    "descend",
    "dgc",
    "diana",
    "direct",
    "dithering",
    "error_feedback",
    "flat",
    "gaussian_k",
    "hard_threshold",
    "identity",
    "info",
    "init_state",
    "isega",
    "lane_bytes",
    "ledger",
    "marina",
    "momentum_correction",
    "narrow",
    "natural",
    "payloads",
    "per_leaf",
    "per_worker",
    "precondition",
    "prox",
    "rand_k",
    "redsync",
    "refresh",
    "rounds",
    "roundtrip",
    "set_amounts",
    "sidco",
    "skcompress",
    "smoothness",
    "state_axes",
    "state_specs",
    "theory",
    "top_k",
    "warm_up",
    "wire",
]
