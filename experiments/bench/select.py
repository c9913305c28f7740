"""Selecting the largest entries: thresholds and compaction against sorts, over sizes.

Every method turns d floats into the indices of about `ratio` d of them. "+ residual" is all that error feedback
needs, from the message in a donated buffer to payload and residual. "of it" are the parts of jc.sidco: its fit to a
sample, the count of all entries above a threshold, which marks them, and the indices of what is marked. Each round has
a vector of its own: whether a threshold has to be corrected, by another count, depends on it. Writes to runs/NAME:
config.json, results.json (seconds by log2 d and method), table.md, select.png.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxcomp as jc
from experiments.bench.timing import Fresh, machine, time_all
from experiments.lib.cli import at_least, fraction
from experiments.lib.run import Run, parser_of
from jaxcomp.base import residual
from jaxcomp.compressors.sidco import SAMPLE, STAGES, counting_estimator
from jaxcomp.select import every, indices_of_words, marked_above, words_above

__all__ = ["main", "slope_of"]

READ, SORT, TORCH = "read pass (sum of magnitudes)", "lax.top_k", "torch.topk"
SIDCO, WHOLE = "jc.sidco", "jc.sidco + residual"


class Vectors:
    """x: Laplace entries, d of them, others in each round."""

    def __init__(self, d: int):
        self._draw = jax.jit(lambda i: jax.random.laplace(jax.random.fold_in(jax.random.key(0), i), (d,)))
        self.next_round(0)

    def next_round(self, number: int) -> None:
        self.x = jax.block_until_ready(self._draw(number))


def methods(vectors: Vectors, ratio: float) -> tuple[dict[str, Any], dict[str, float]]:
    """Calls to time, and the temporary memory of the programs behind ours over that of x, for one size."""
    x = vectors.x
    d = x.size
    k = max(1, int(ratio * d))
    key = jax.random.key(1)
    threshold = jnp.quantile(jnp.abs(x[:: max(1, d >> 16)]), 1 - ratio)
    places = min(d, k + k // 4 + 64)
    sidco = jc.sidco(ratio)
    sparsifiers = {
        SIDCO: sidco,
        "jc.sidco pareto": jc.sidco(ratio, law="pareto"),
        "jc.sidco gamma": jc.sidco(ratio, law="gamma"),
        "jc.top_k": jc.top_k(ratio),
        **{f"jc.contrib.{name}": getattr(jc.contrib, name)(ratio) for name in ("dgc", "gaussian_k", "redsync")},
    }
    fit = counting_estimator("exponential", True, STAGES, None).estimate
    stride = max(1, d // SAMPLE - 1) | 1
    in_sample = jnp.int32(max(1, k // stride))

    functions = {
        READ: lambda x: jnp.sum(jnp.abs(x)),
        SORT: lambda x: lax.top_k(jnp.abs(x), k)[1],
        "lax.approx_max_k": lambda x: lax.approx_max_k(jnp.abs(x), k)[1],
        "mask to indices, threshold given": lambda x, t: indices_of_words(words_above(x, t), places, d)[0],
        "of it: fit to a sample": lambda x: fit(key, every(x, stride), in_sample, jnp.float32(ratio), ())[0],
        "of it: count and mark, threshold given": marked_above,
        "of it: indices, marks given": lambda x, words: indices_of_words(words, places, d)[0],
    }
    given = {"threshold given": threshold, "marks given": words_above(x, threshold)}
    for name, compressor in sparsifiers.items():
        state = compressor.init(key, x)
        functions[name] = lambda x, c=compressor, s=state: c.compress(key, x, s)[0]

    def whole(message):
        payload, local = sidco.compress(key, message, sidco.init(key, message))
        return payload, local, residual(sidco, message, payload, ())

    compiled, calls = {}, {}

    def add(name: str, function: Any, *rest: Any) -> None:
        compiled[name] = jax.jit(function).lower(x, *rest).compile()
        calls[name] = lambda: compiled[name](vectors.x, *rest)

    for name, function in functions.items():
        add(name, function, *(value for text, value in given.items() if text in name))
    compiled[WHOLE] = jax.jit(whole, donate_argnums=0).lower(x).compile()
    calls[WHOLE] = Fresh(lambda: jax.block_until_ready(vectors.x + 0), compiled[WHOLE])
    if find_spec("torch") is not None and jax.default_backend() == "cpu":
        import torch  # pyright: ignore[reportMissingImports]

        tensor = lambda: torch.from_numpy(np.array(vectors.x))
        calls[TORCH] = Fresh(tensor, lambda x: torch.topk(x.abs(), k, sorted=False)[1])
    # Last: it gives a lot of memory back to the system, and what runs after it takes twice as long.
    nonzero = lambda x, t: jnp.nonzero(jnp.abs(x) > t, size=places, fill_value=d)[0]
    add("jnp.nonzero, threshold given", nonzero, threshold)
    memory = {name: int(f.memory_analysis().temp_size_in_bytes) / (4 * d) for name, f in compiled.items()}
    return calls, memory


def slope_of(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """Exponent of d, by least squares over sizes from 2^20 on; over all of them if fewer than two are so large.

    >>> round(slope_of([10, 20, 22, 24], [9.0, 1.0, 2.0, 4.0]), 3)
    0.5
    """
    large = [place for place, size in enumerate(sizes) if size >= 20]
    chosen = large if len(large) > 1 else range(len(sizes))
    return float(np.polyfit([sizes[i] for i in chosen], np.log2([seconds[i] for i in chosen]), 1)[0])


def main(arguments: Sequence[str]) -> int:
    p = parser_of("bench select", __doc__)
    p.add_argument("--repeats", type=at_least(1), default=7, help="rounds; the median is shown")
    large: dict[str, Any] = {"default": [18, 20, 22, 24, 26], "metavar": "N", "help": "d = 2^these, of 10 to 30"}
    p.add_argument("--log2-sizes", type=int, choices=range(10, 31), nargs="+", **large)
    p.add_argument("--ratio", type=fraction, default=0.001, help="share of entries to select")
    run = Run(p, arguments, "bench-select")
    o = run.options
    sizes = sorted(set(o.log2_sizes))
    seconds: dict[int, dict[str, float]] = {}
    extra: dict[str, float] = {}
    for size in sizes:
        vectors = Vectors(2**size)
        calls, extra = methods(vectors, o.ratio)
        seconds[size] = time_all(calls, o.repeats, f"2^{size}: ", begin=vectors.next_round)
        del calls, vectors
        run.keep(seconds)

    at = 24 if 24 in sizes else sizes[-1]
    base = seconds[at]
    columns: dict[str, Any] = {
        "method": str,
        **{f"2^{size} ms": lambda name, size=size: f"{1e3 * seconds[size][name]:.2f}" for size in sizes},
        f"2^{at} / read pass": lambda name: f"{base[name] / base[READ]:.1f}",
        **{f"faster than {x}": lambda name, x=x: f"{base[x] / base[name]:.1f} x" for x in (SORT, TORCH) if x in base},
        "extra memory / d words": lambda name: f"{extra[name]:.2f}" if name in extra else "-",
    }
    grows = ""
    if len(sizes) > 1:
        slope = slope_of(sizes, [seconds[size][SIDCO] for size in sizes])
        grows = f" Time of {SIDCO} grows like d^{slope:.2f}{' from 2^20 on' if sizes[-2] >= 20 else ''}."
    notes = (
        f"ratio {o.ratio:g}, Laplace entries, others in each round; medians of {o.repeats}. Read pass: "
        f"{4 * 2**at / 1e9 / base[READ]:.0f} GB/s at 2^{at}.{grows}\n"
        f"Extra memory: temporary buffers of the compiled program at 2^{sizes[-1]}, without arguments and results."
    )
    run.table(f"Selection; {machine()}", columns, base, notes)
    shown = [name for name in base if "given" not in name and not name.startswith("of it") and name != READ]
    curves = {name: ([2.0**size for size in sizes], [1e3 * seconds[size][name] for size in sizes]) for name in shown}
    panels = {f"to select {o.ratio:g} of the entries": curves}
    run.plot("select.png", panels, machine(), xscale="log", yscale="log", xlabel="entries", ylabel="milliseconds")
    return 0
