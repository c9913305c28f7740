"""One table: every compressor is a row, and `test_laws.py` holds each row to every law of `base`."""

from typing import NamedTuple

import jax
import numpy as np
import optax

import jaxcomp as jc
from jaxcomp.base import Compressor


class Row(NamedTuple):
    """name: test id; compressor: of one array; exact: copies entries, so sent + residual = x bitwise;
    deterministic: the private key plays no part, shared randomness neither; fixed_length: made for
    an array of D entries (or of at least three, for three block steps); slow: a variant of another row, which only
    `make test-all` runs. Every public factory has a row that is not (tested)."""

    name: str
    compressor: Compressor
    exact: bool
    deterministic: bool
    fixed_length: bool = False
    slow: bool = False


D = 300
P = np.linspace(0.05, 1.0, D)
STEPS = np.linspace(0.05, 0.5, D)
SCHEDULE = jc.warm_up([0.2, 0.05], 1)


WORKERS = 4  # of rows with plans per worker
_rng = np.random.default_rng(0)
_features = _rng.standard_normal((WORKERS, 2 * D, D)) * np.geomspace(0.2, 2, D)
MATRICES = [a.T @ a / (8 * D) + 0.01 * np.eye(D) for a in _features]
DENSE = jc.smoothness.stack([jc.smoothness.dense_of(matrix) for matrix in MATRICES])
CHANCES = jc.smoothness.probabilities(DENSE.diag, D / 5)
VARYING = jc.smoothness.steps(DENSE.diag, 2 * D)
SCALES = jc.smoothness.diagonal_of(np.geomspace(0.1, 10, D))


ROWS = [
    Row("identity", jc.identity(), True, True),
    Row("cast-bf16", jc.cast("bfloat16"), False, True),
    Row("cast-f16", jc.cast("float16"), False, True),
    Row("cast-f16-unscaled", jc.cast("float16", scaled=False), False, True, slow=True),
    Row("cast-e4m3", jc.cast("float8_e4m3fn"), False, True),
    Row("cast-e4m3-blocks", jc.cast("float8_e4m3fn", block_size=64), False, True),
    Row("cast-e4m3-one-scale", jc.cast("float8_e4m3fn", block_size=None), False, True, slow=True),
    Row("cast-e4m3b11fnuz", jc.cast("float8_e4m3b11fnuz"), False, True, slow=True),
    Row("cast-e5m2", jc.cast("float8_e5m2"), False, True, slow=True),
    Row("top_k-ratio", jc.top_k(0.1), True, True),
    Row("top_k-k", jc.top_k(k=7), True, True, slow=True),
    Row("top_k-schedule", jc.top_k(SCHEDULE), True, True),
    Row("rand_k-ratio", jc.rand_k(0.1), False, False),
    Row("rand_k-k", jc.rand_k(k=7), False, False, slow=True),
    Row("rand_k-schedule", jc.rand_k(SCHEDULE, least=0.05), False, False),
    Row("bernoulli-scalar", jc.bernoulli(0.2), False, False),
    Row("bernoulli-array", jc.bernoulli(P), False, False, True),
    Row("dithering-1", jc.dithering(1), False, False, slow=True),
    Row("dithering-7", jc.dithering(7), False, False),
    Row("dithering-one-norm", jc.dithering(7, blocks=1), False, False, slow=True),
    Row("dithering-inf", jc.dithering(3, norm="inf"), False, False, slow=True),
    Row("dithering-blocks", jc.dithering(3, blocks=7), False, False),
    Row("dithering-block_size", jc.dithering(3, block_size=64), False, False, slow=True),
    Row("dithering-steps", jc.dithering(steps=STEPS), False, False, True),
    Row("dithering-block-steps", jc.dithering(steps=[0.1, 0.2, 0.4], blocks=3), False, False, True, slow=True),
    Row("natural", jc.natural(), False, False),
    Row("drive", jc.drive(block=64), False, False),
    Row("drive-least_squares", jc.drive(scale="least_squares"), False, False, slow=True),
    Row("eden-2", jc.eden(2, block=256), False, False),
    Row("eden-fraction", jc.eden(1.5, block=64, scale="least_squares"), False, False, slow=True),
    Row("eden-half", jc.eden(0.5, scale="least_squares"), False, False, slow=True),
    Row("eden-workers", jc.eden(4, block=64, per_worker=True), False, False, slow=True),
    Row("rotate-int4", jc.rotate(jc.block_scaled("int4", rounding="stochastic"), block=32), False, False, slow=True),
    Row("rotate-natural", jc.rotate(jc.natural(), block=64), False, False),
    Row("rotate-workers", jc.rotate(jc.dithering(7), block=128, per_worker=True), False, False, slow=True),
    Row("block_scaled-mxfp8", jc.block_scaled("mxfp8"), False, True, slow=True),
    Row("block_scaled-mxfp8-random", jc.block_scaled("mxfp8", rounding="stochastic"), False, False, slow=True),
    Row("block_scaled-mxfp4", jc.block_scaled("mxfp4", rounding="stochastic"), False, False, slow=True),
    Row("block_scaled-mxfp4-nearest", jc.block_scaled("mxfp4"), False, True, slow=True),
    Row("block_scaled-mxfp4-floor", jc.block_scaled("mxfp4", scale="e8m0-floor"), False, True, slow=True),
    Row("block_scaled-nvfp4", jc.block_scaled("nvfp4", scale="e4m3-best"), False, True, slow=True),
    Row("block_scaled-nvfp4-random", jc.block_scaled("nvfp4", rounding="stochastic"), False, False, slow=True),
    Row("block_scaled-mxint8", jc.block_scaled("mxint8"), False, True, slow=True),
    Row("block_scaled-mxint8-random", jc.block_scaled("mxint8", rounding="stochastic"), False, False, slow=True),
    Row("block_scaled-mxfp6", jc.block_scaled("mxfp6_e3m2", scale="float32"), False, True, slow=True),
    Row("block_scaled-int4", jc.block_scaled("int4", rounding="stochastic"), False, False),
    Row("block_scaled-int4-nearest", jc.block_scaled("int4"), False, True, slow=True),
    Row("block_scaled-int2", jc.block_scaled("int2", block=7), False, True, slow=True),
    Row("block_scaled-int8", jc.block_scaled("int8", scale="e8m0"), False, True, slow=True),
    Row("block_scaled-int8-random", jc.block_scaled("int8", rounding="stochastic"), False, False, slow=True),
    Row("block_scaled-e4m3", jc.block_scaled("e4m3"), False, True, slow=True),
    Row("block_scaled-e4m3-random", jc.block_scaled("e4m3", rounding="stochastic"), False, False, slow=True),
    Row("sidco", jc.sidco(0.05), True, True),
    Row("sidco-published", jc.sidco(0.02, stages=2, adapt=None), True, True, slow=True),
    Row("sidco-pareto", jc.narrow(jc.sidco(0.1, law="pareto"), values="bfloat16"), False, True, slow=True),
    Row("sidco-gamma-climb", jc.sidco(0.02, law="gamma", adapt="climb"), True, True, slow=True),
    Row("dgc", jc.contrib.dgc(0.02), True, False),
    Row("redsync", jc.contrib.redsync(0.1), True, True),
    Row("gaussian_k", jc.contrib.gaussian_k(0.1), True, True),
    Row("hard_threshold", jc.contrib.hard_threshold(1.5, room=0.2), True, True),
    Row("skcompress", jc.skcompress(jc.top_k(0.3), buckets=8), False, True),
    Row("skcompress-recentred", jc.skcompress(jc.top_k(0.3), mode="recentred", buckets=32), False, False),
    Row("skcompress-paper", jc.skcompress(jc.top_k(0.3), mode="paper", buckets=32), False, False, slow=True),
    Row("skcompress-nonzero", jc.skcompress(buckets=8), False, True, slow=True),
    Row("narrow-top_k", jc.narrow(jc.top_k(0.1), values="float16", indices="uint16"), False, True),
    Row("dagc-top_k", jc.dagc([3, 0, 9, 1], 0.1), True, True),
    Row("dagc-sidco", jc.dagc([2, 1, 0, 1], 0.1, sparsifier=jc.sidco), True, True, slow=True),
    Row(
        "dagc-threshold",
        jc.dagc([2, 1, 0, 1], 0.2, sparsifier=jc.contrib.hard_threshold, base=1.5),
        True,
        True,
        slow=True,
    ),
    Row("contract-rand_k", jc.contract(jc.rand_k(0.25)), False, False),
    Row("contract-dithering", jc.contract(jc.dithering(2)), False, False, slow=True),
    Row("count_sketch", jc.count_sketch(0.3), False, False),
    Row("count_sketch-rows", jc.count_sketch(columns=12, rows=5), False, False, slow=True),
    Row("dct-top_k", jc.dct(jc.top_k(0.1), 16), False, True),
    Row("dct-natural", jc.dct(jc.natural()), False, False, slow=True),
    Row("dct-rand_k", jc.dct(jc.rand_k(0.2), 32), False, False, slow=True),
    Row("sign", jc.sign(), False, True),
    Row("sign-blocks", jc.sign(blocks=7), False, True, slow=True),
    Row("sign-l2", jc.sign("l2", block_size=3), False, True, slow=True),
    Row("terngrad", jc.terngrad(), False, False),
    Row("terngrad-blocks", jc.terngrad(block_size=20), False, False, slow=True),
    Row("binned", jc.binned(), False, True),
    Row("binned-1", jc.binned(1, blocks=7), False, True, slow=True),
    Row("binned-3", jc.binned(3, block_size=64), False, True, slow=True),
    Row("chunked", jc.chunked(jc.top_k(k=5), 64), True, True),
    Row("chunked-sidco", jc.chunked(jc.sidco(0.1), 50), True, True, slow=True),
    Row("chunked-schedule", jc.chunked(jc.top_k(SCHEDULE), 50), True, True, slow=True),
    Row("compose-chunked-binned", jc.compose(jc.chunked(jc.top_k(k=5), 64), jc.binned()), False, True),
    Row("compose-chunked-bf16", jc.compose(jc.chunked(jc.top_k(k=5), 64), jc.cast("bfloat16")), False, True, slow=True),
    Row("compose-top_k-bf16", jc.compose(jc.top_k(0.1), jc.cast("bfloat16")), False, True),
    Row("compose-top_k-dithering", jc.compose(jc.top_k(0.1), jc.dithering(15)), False, False),
    Row("compose-rand_k-dithering", jc.compose(jc.rand_k(0.2), jc.dithering(7)), False, False, slow=True),
    Row("compose-identity-natural", jc.compose(jc.identity(), jc.natural()), False, False, slow=True),
    Row("compose-sidco-natural", jc.compose(jc.sidco(0.1), jc.natural()), False, False, slow=True),
    Row("bernoulli-workers", jc.bernoulli(CHANCES, per_worker=True), False, False, True, slow=True),
    Row("dithering-norm-bf16", jc.dithering(7, blocks=7, norm_dtype="bfloat16"), False, False, slow=True),
    Row("dithering-workers", jc.dithering(steps=VARYING, per_worker=True), False, False, True),
    Row(
        "compose-workers",
        jc.compose(jc.bernoulli(CHANCES, per_worker=True), jc.dithering(7)),
        False,
        False,
        True,
        slow=True,
    ),
    Row("precondition-shared-rand_k", jc.precondition(jc.rand_k(0.2), SCALES), False, False, True, slow=True),
    Row("precondition-natural", jc.precondition(jc.natural(), DENSE), False, False, True, slow=True),
    Row(
        "precondition-bernoulli",
        jc.precondition(jc.bernoulli(CHANCES, per_worker=True), DENSE),
        False,
        False,
        True,
    ),
    Row(
        "precondition-dithering",
        jc.precondition(jc.dithering(steps=VARYING, per_worker=True), DENSE),
        False,
        False,
        True,
        slow=True,
    ),
]

# Factories of the front door that make compressors; every one must have a row (tested).
FACTORIES = [
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
    "dgc",
    "dithering",
    "drive",
    "eden",
    "gaussian_k",
    "hard_threshold",
    "identity",
    "narrow",
    "natural",
    "precondition",
    "rand_k",
    "redsync",
    "rotate",
    "sidco",
    "sign",
    "skcompress",
    "terngrad",
    "top_k",
]


# ------------------------------------------------------------------------------------------------
# Methods: what one puts into an optimizer. Every factory of an algorithm or compressor has a row (tested).

AXIS, SIZE = "data", 1100  # entries of the one leaf that is large


def _mean(algorithm, **options):
    return lambda: jc.compressed_mean(algorithm, AXIS, measure=True, **options)


def _local(algorithm):
    return lambda: jc.local_updates(optax.sgd(0.1), optax.sgd(1.0), algorithm, AXIS, every=2)


def _rounds(algorithm):
    return lambda: jc.methods.rounds(algorithm, AXIS)


TOP = jc.top_k(0.1)
_steps = jc.theory.adiana(smoothness=1.0, workers=2, variance=0.1, omega=0.125, mu=0.1)
_wide = jc.smoothness.diagonal_of(np.geomspace(0.1, 10, SIZE))
METHODS = {
    "bernoulli": _mean(jc.diana(jc.bernoulli(0.2))),
    "binned": _mean(jc.error_feedback(jc.binned())),
    "block_scaled": _mean(jc.diana(jc.block_scaled("int4", rounding="stochastic"))),
    "cast": _mean(jc.error_feedback(jc.cast("float8_e4m3fn"))),
    "chunked": _mean(jc.error_feedback(jc.chunked(jc.top_k(k=5), 64))),
    "compose": _mean(jc.error_feedback(jc.compose(TOP, jc.natural()))),
    "contract": _mean(jc.error_feedback(jc.contract(jc.rand_k(0.2)))),
    "count_sketch": _mean(jc.direct(jc.count_sketch(0.3))),
    "dagc": _mean(jc.error_feedback(jc.dagc([3, 1], 0.1)), via="ring"),
    "dct": _mean(jc.error_feedback(jc.dct(TOP, 16))),
    "dgc": _mean(jc.error_feedback(jc.contrib.dgc(0.1))),
    "dithering": _mean(jc.diana(jc.dithering(7))),
    "drive": _mean(jc.error_feedback(jc.drive(block=64))),
    "eden": _mean(jc.direct(jc.eden(2.5, block=64, per_worker=True))),
    "flat": _mean(jc.error_feedback(jc.flat(TOP))),
    "gaussian_k": _mean(jc.error_feedback(jc.contrib.gaussian_k(0.1))),
    "hard_threshold": _mean(jc.error_feedback(jc.contrib.hard_threshold(1.5, room=0.2))),
    "identity": _mean(jc.direct(jc.identity())),
    "narrow": _mean(jc.error_feedback(jc.narrow(TOP, values="float16", indices="uint16"))),
    "natural": _mean(jc.diana(jc.natural())),
    "per_leaf": _mean(jc.error_feedback(jc.per_leaf(TOP)), via="ladder"),
    "precondition": _mean(jc.diana(jc.precondition(jc.rand_k(0.2), _wide))),
    "rand_k": _mean(jc.diana(jc.rand_k(0.2))),
    "redsync": _mean(jc.error_feedback(jc.contrib.redsync(0.1))),
    "rotate": _mean(jc.diana(jc.rotate(jc.natural(), block=64))),
    "sidco": _mean(jc.error_feedback(jc.sidco(0.05))),
    "sign": _mean(jc.error_feedback(jc.sign())),
    "skcompress": _mean(jc.error_feedback(jc.skcompress(jc.top_k(0.3), buckets=8))),
    "terngrad": _mean(jc.diana(jc.terngrad())),
    "top_k": _mean(jc.error_feedback(TOP), via="two_shot"),
    "direct": _mean(jc.direct(TOP)),
    "error_feedback": _mean(jc.error_feedback(TOP), before=optax.clip_by_global_norm(1.0)),
    "diana": _mean(jc.diana(jc.dithering(3), alpha=0.1)),
    "ef21": _mean(jc.ef21(TOP, momentum=0.5, plus=True)),
    "ef_bv": _mean(jc.methods.ef_bv(TOP, shift_step=0.5)),
    "power_sgd": _mean(jc.power_sgd(2, start=2)),
    "loco": _mean(jc.loco(jc.block_scaled("int4", rounding="stochastic"), memory="int8")),
    "majority_vote": _mean(jc.majority_vote()),
    "fetch_sgd": _mean(jc.fetch_sgd(0.1)),
    "by_path": _mean(jc.by_path({"b": jc.direct(jc.identity()), "w": jc.error_feedback(TOP)})),
    "momentum_correction": _mean(jc.contrib.momentum_correction(TOP, clip_norm=1.0, workers=2)),
    "sparse_loco": _local(jc.sparse_loco(k=8, chunk=64)),
    "local_updates": _local(jc.error_feedback(TOP)),
    "demo": lambda: jc.demo(1e-3, AXIS, k=4),
    "onebit_adam": lambda: jc.onebit_adam(1e-3, AXIS, freeze_step=1),
    "zero_one_adam": lambda: jc.zero_one_adam(1e-3, AXIS, freeze_step=1),
    "adiana": _rounds(
        jc.methods.adiana(jc.natural(), jc.theory.adiana(smoothness=1.0, workers=2, variance=0.1, omega=0.125, mu=0.1))
    ),
    "bidirectional": _rounds(jc.methods.descend(jc.methods.bidirectional(jc.diana(jc.natural()), jc.natural()), 0.1)),
    "descend": _rounds(jc.methods.descend(jc.direct(jc.natural()), 0.1)),
    "isega": _rounds(jc.methods.isega(np.full(SIZE, 0.2), _wide, 0.1)),
    "marina": _rounds(jc.methods.marina(jc.rand_k(0.2), 0.1, 0.2)),
}
PARAMS = {"b": (5,), "w": (20, 55)}


def params_of(name):
    """Parameters of two leaves, one large and one small; one vector for methods that have a point."""
    point = name in ("adiana", "bidirectional", "descend", "isega", "marina")
    shapes = (SIZE,) if point else PARAMS
    return jax.tree.map(lambda shape: np.zeros(shape, np.float32), shapes, is_leaf=lambda x: isinstance(x, tuple))
