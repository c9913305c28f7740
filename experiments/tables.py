"""The tables of compressors, algorithms, methods and optimizers in docs/reference, made from the code.

`python -m experiments.tables` prints them; with --write it puts them into their pages between their
markers. A test compares the two.
"""

import re
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxcomp as jc
from experiments.lib.report import markdown
from jaxcomp.base import Compressor

__all__ = ["PAGES", "placed", "tables"]

REFERENCE = Path(__file__).parent.parent / "docs" / "reference"
PAGES = [REFERENCE / f"{name}.md" for name in ("compressors", "algorithms", "methods", "transforms")]

D = 2**20

# call | what it does | omega | alpha (as formulas; the figures beside them are computed)
COMPRESSORS = """\
jc.identity() | everything | 0 | 1
jc.cast("bfloat16") | rounds to 16 bits | | 1 - 2^-16
jc.cast("float8_e4m3fn") | rounds to 8 bits, a scale for every 512 entries | | 1 - 2^-8 - 512 t^2
jc.top_k(0.01) | largest magnitudes | | k / d
jc.rand_k(0.01) | random entries, same on all workers | d / k - 1 |
jc.bernoulli(0.01) | each entry with its own probability | max 1 / p - 1 |
jc.sidco(0.01) | above a fitted threshold | | at least 1 / d
jc.narrow(jc.sidco(0.01), values="bfloat16", indices="uint16") | the same in 4 bytes | | at least 1 / d, less rounding
jc.chunked(jc.top_k(k=64), 4096) | largest magnitudes of each chunk | | that of C for a chunk
jc.binned(2) | bins around the mean, their means as values | | 1.5 / 32 for blocks of 1024
jc.compose(jc.chunked(jc.top_k(k=64), 4096), jc.binned(2)) | SparseLoCo's message | | a1 a2
jc.sign() | signs, a scale for every 1024 entries | | 1 / 1024
jc.terngrad() | 0 or +- the largest of 512, at random | (sqrt 512 - 1) / 2 |
jc.dct(jc.chunked(jc.top_k(k=4), 64)) | of cosine coefficients | | that of C
jc.count_sketch(0.01) | each entry added to a counter | (d - 1) / counters |
jc.dgc(0.01) | above the quantile of a sample | | at least 1 / d
jc.redsync(0.01) | above a point between mean and maximum | | at least 1 / d
jc.gaussian_k(0.01) | above a normal quantile | | at least 1 / d
jc.hard_threshold(5.0) | above a fixed threshold | | at least 1 / d
jc.skcompress(jc.top_k(0.01)) | the same, values in 16 quantile buckets | | a / k
jc.skcompress(jc.top_k(0.01), mode="recentred") | the same, values in MinMaxSketches | | a / k
jc.skcompress(jc.top_k(0.01), mode="paper") | SKCompress as released | |
jc.dagc([4, 1], 0.01) | largest magnitudes, a ratio for each worker | | min k_i / d
jc.dithering(7) | random rounding to levels, a norm for every 512 entries | e - 1 if e >= 2 else e^2 / 4 |
jc.dithering(7, blocks=1) | the same with one norm (QSGD) | the same, which grows with d |
jc.dithering(1, norm_dtype="bfloat16") | the same, norms in 16 bits, rounded up | as dithering |
jc.block_scaled("mxfp8") | MX: e4m3, a power of two for every 32 | | (1 - u^2) / (1 + 31 r)
jc.block_scaled("mxfp4") | MX: e2m1, a power of two for every 32 | | (1 - u^2) / (1 + 31 r)
jc.block_scaled("nvfp4", scale="e4m3-best") | e2m1, an e4m3 scale for every 16 | | (1 - u^2) / (1 + 15 r)
jc.block_scaled("int4") | integers, a bf16 scale for every 128 | | (1 - u^2) / (1 + 127 r)
jc.block_scaled("int4", rounding="stochastic") | the same, rounded at random | root of a quadratic |
jc.rotate(jc.block_scaled("int4")) | the same of rotated blocks of 4096 | that of C | that of C
jc.drive() | signs of rotated blocks | | 1 - 1 / 2t
jc.eden(2) | centroids of the normal law in rotated blocks | | 1 - E / t
jc.eden(0.5, scale="least_squares") | signs of half of the rotated entries | | b / 2
jc.natural() | random rounding to powers of two | 1 / 8 | 7 / 8
jc.contract(jc.rand_k(0.01)) | unbiased, scaled to contract | | 1 / (1 + omega)
jc.precondition(jc.dithering(7), S) | C of the whitened vector | that of C, in the norm of S |
jc.compose(jc.top_k(0.01), jc.dithering(127)) | selects, then compresses the values | (1 + w1)(1 + w2) - 1
    | a1 a2, or a1 (1 - w2)
"""

# call | what a worker sends | direction | what the compressor must be | example; a line goes on where it is indented
ALGORITHMS = """\
jc.direct(c) | C(g) | mean of C(g) | a known omega or alpha | jc.direct(jc.natural())
jc.error_feedback(c, decay=1.0) | C(e + g), keeps the rest as e | mean of what was sent | a contraction (alpha)
    | jc.error_feedback(jc.top_k(0.01))
jc.loco(c, beta=0.8) | C(e + g), e <- beta e + (1 - beta) times the rest | mean of what was sent
    | a known omega or alpha | jc.loco(jc.block_scaled("int4"), memory="int8")
jc.diana(c, alpha=None) | C(g - h), moves h by alpha C(g - h) | mean shift + mean of what was sent
    | unbiased (omega) | jc.diana(jc.dithering(7))
jc.ef21(c, momentum=0.0, plus=False) | C(g - h), moves h by all of it | mean shift, after it moved
    | a contraction (alpha) | jc.ef21(jc.top_k(0.01))
jc.ef_bv(c) | C(g - h), moves h by lambda C(g - h) | mean shift + nu mean of what was sent
    | omega or alpha known | jc.ef_bv(jc.dithering(7))
jc.momentum_correction(c, momentum=0.9) | C(v + u), u <- m u + g, keeps the rest as v | mean of what was sent
    | a contraction (alpha) | jc.momentum_correction(jc.dgc(0.01))
jc.majority_vote(momentum=0.9) | sign(m), m <- mu m + (1 - mu) g | what most voted for: -1, 0 or 1
    | none: it has its own | jc.majority_vote()
jc.fetch_sgd(ratio, sketch=0.1, momentum=0.9) | a count sketch, summed
    | largest entries of the summed sketches with momentum | none: it has its own | jc.fetch_sgd(0.01)
jc.power_sgd(rank=1, min_ratio=2.0, start=0) | (e + g) Q, then (e + g)^T P: thin factors, summed
    | P Q^T, the rest stays in e | none: it has its own | jc.power_sgd(4)
jc.sparse_loco(k=64) | k of each 4096 entries of 0.95 e + g in 2 bits, keeps the rest as e
    | mean of what was sent | none: it has its own | jc.sparse_loco()
"""

# call | what a worker sends | what comes of it | functions of jc.theory
METHODS = """\
jc.descend(algorithm, gamma) | what the algorithm sends | x <- prox(x - gamma direction) | dcgd, diana
jc.bidirectional(algorithm, down) | what the algorithm sends | what comes back is down(direction) | dcgd, diana
jc.adiana(c, step_sizes) | C(grad(x) - h) and C'(grad(w) - h) | DIANA with Nesterov's acceleration | adiana
jc.isega(p, S, gamma) | sampled entries of S^(-1/2)(g - h) | shifts take over what was sampled | isega
jc.marina(c, gamma, full) | C of the gradient's change, or all of it | for non-convex losses | marina
"""

# call | what a worker sends | what it remembers | the step | example
OPTIMIZERS = """\
jc.demo(rate, axis, k=32, chunk=64) | largest cosine coefficients of each chunk of its momentum
    | the momentum, without what was sent | sign of the mean | jc.demo(1e-3, "data")
jc.onebit_adam(rate, axis, freeze_step=..., compressor=sign())
    | gradients up to freeze_step, then C(b1 m + (1 - b1) g + e) | e, and with two shots that of what comes back
    | Adam, whose variance then stands still | jc.onebit_adam(1e-3, "data", freeze_step=100)
jc.zero_one_adam(rate, axis, freeze_step=..., compressor=sign())
    | C(u / G + e) of its steps u since the last exchange; gradients where the variance is due | e, u and its own point
    | Adam, with local steps between exchanges | jc.zero_one_adam(1e-3, "data", freeze_step=100)
"""


def rows_in(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")] for line in text.replace("\n    |", " |").splitlines()]


def message(compressor: Compressor, x: jax.Array) -> tuple[Any, jax.Array]:
    """The payload, and the bits of its best code."""
    _, payload = jc.roundtrip(compressor, x, key=jax.random.key(1))
    return payload, jnp.asarray(jc.code_bits(payload), jnp.float32)


def bound(formula: str, value: Any) -> str:
    """A formula and what it is at D entries."""
    if value is None:
        return "-"
    figure = f"{value(D):.3g}"
    return figure if formula in ("", figure) else f"{formula} = {figure}"


def compressor_rows() -> list[list[str]]:
    rows = []
    x = jnp.asarray(jax.random.laplace(jax.random.key(0), (D,)))
    for call, what, omega, alpha in rows_in(COMPRESSORS):
        compressor = eval(call, {"jc": jc, "S": jc.smoothness.diagonal_of(1.0 / np.arange(1, D + 1))})
        spec = compressor.spec
        payload, code_bits = jax.jit(message, static_argnums=0)(compressor, x)
        bits = (f"{8 * jc.lane_bytes(payload) / D:.3g}", f"{float(code_bits) / D:.3g}")
        route = "sum" if spec.linear else "gather" if compressor.lengths is None else "fastest"
        bounds = (bound(omega, spec.omega), bound(alpha, spec.alpha))
        rows.append([f"`{call}`", what, *bounds, type(payload).__name__, *bits, route])
    return rows


def checked_rows(text: str) -> list[list[str]]:
    """Rows that end with an example, which must run."""
    rows = rows_in(text)
    for *_, example in rows:
        eval(example, {"jc": jc})
    return [[f"`{call}`", *rest, f"`{example}`"] for call, *rest, example in rows]


def algorithm_rows() -> list[list[str]]:
    return checked_rows(ALGORITHMS)


def optimizer_rows() -> list[list[str]]:
    return checked_rows(OPTIMIZERS)


def tables() -> dict[str, str]:
    """Marker -> markdown."""
    methods = ["method", "worker sends", "what it does", "`jc.theory`"]
    compressors = ["compressor", "sends", "omega", "alpha", "payload", "lane bits/entry", "code bits/entry", "auto"]
    algorithms = ["algorithm", "worker sends", "direction", "compressor must be", "for example"]
    optimizers = ["optimizer", "worker sends", "it remembers", "step", "for example"]
    return {
        "compressors": markdown(compressors, compressor_rows()),
        "algorithms": markdown(algorithms, algorithm_rows()),
        "methods": markdown(methods, [[f"`{call}`", *rest] for call, *rest in rows_in(METHODS)]),
        "optimizers": markdown(optimizers, optimizer_rows()),
    }


def placed(text: str, made: dict[str, str]) -> str:
    """The text of a page with each table between its markers. made: `tables()`."""
    for name, table in made.items():
        begin, end = f"<!-- table: {name} -->", "<!-- end -->"
        pattern = re.escape(begin) + ".*?" + re.escape(end)
        text = re.sub(pattern, lambda _, t=table, b=begin, e=end: f"{b}\n{t}\n{e}", text, flags=re.DOTALL)
    return text


def main(arguments: list[str]) -> None:
    made = tables()
    if arguments == ["--write"]:
        for page in PAGES:
            page.write_text(placed(page.read_text(), made))
    else:
        print("\n\n".join(made.values()))


if __name__ == "__main__":
    main(sys.argv[1:])
