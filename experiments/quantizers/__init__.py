"""Error of the mean of n workers against bits an entry, and speed: all quantizers and rotations, and those of releases.

NMSE = |mean_i C(x_i) - mean_i x_i|^2 / mean_i |x_i|^2.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

import jaxcomp as jc
from experiments.bench.timing import bench_parser, codec_calls, report, time_all
from experiments.lib.cli import UserError, at_least, common
from experiments.lib.report import new_console
from experiments.lib.run import draw_panels
from experiments.lib.step import dense
from experiments.lib.text import read_characters
from experiments.lib.transformer import LAYOUTS, Sizes, initial, mean_loss
from experiments.quantizers.released import RELEASED, Released
from jaxcomp.base import State, accumulate, for_worker

__all__ = ["main"]

APART = {"EDEN, least squares", "integers, stochastic", "MX, sound", "NVFP4, sound", "e4m3"}  # in the table alone
SCALES: dict[str, Any] = {"xscale": "log", "yscale": "log", "ticks": (0.5, 1, 2, 3, 4, 8)}
SCALES["xlabel"] = "bits an entry, scales included"


def families() -> dict[str, list]:
    """Lines of the figure: what belongs together, in the order of its bits. EDEN comes first."""
    scaled, bits = jc.block_scaled, (2, 3, 4, 8)
    mx = ("mxfp4", "mxfp6", "mxfp6_e3m2", "mxfp8", "mxfp8_e5m2", "mxint8")
    shared = lambda b: jc.eden(b) if b > 1 else jc.drive()
    return {
        "EDEN, a rotation each": [jc.eden(b, per_worker=True) for b in (0.5, 1, 1.5, 2, 3, 4, 8)],
        "DRIVE and EDEN, one rotation": [shared(b) for b in (1, 2, 3, 4, 8)],
        "EDEN, least squares": [jc.eden(b, scale="least_squares") for b in (1, 2, 3, 4, 8)],
        "integers": [scaled(f"int{b}") for b in bits],
        "integers, blocks of 32": [scaled(f"int{b}", block=32) for b in bits],
        "integers, stochastic": [scaled(f"int{b}", rounding="stochastic") for b in bits],
        "rotated integers": [jc.rotate(scaled(f"int{b}"), per_worker=True) for b in bits],
        "dithering": [jc.dithering(s, norm="inf", block_size=128, norm_dtype="bfloat16") for s in (1, 3, 7, 127)],
        "MX, sound": [scaled(name, scale="e8m0") for name in mx],
        "MX, best scale": [scaled(name, scale="e8m0-best") for name in mx],
        "MX as released": [scaled(name, scale="e8m0-floor") for name in mx],
        "NVFP4, best scale": [scaled("nvfp4", scale="e4m3-best")],
        "NVFP4, sound": [scaled("nvfp4", scale="e4m3")],
        "NVFP4 as released": [scaled("nvfp4", scale="e4m3-nearest")],
        "e4m3": [scaled("e4m3")],
    }


# ------------------------------------------------------------------------------------------------
# Vectors of n workers, f32[n, d]


def sources_of(workers: int, size: int, seed: int, text: Path | None, steps: int) -> dict[str, np.ndarray]:
    normal = lambda which: np.random.default_rng([seed, which]).standard_normal((workers, size)).astype(np.float32)
    laplace = np.random.default_rng([seed, 3]).laplace(size=(workers, size)).astype(np.float32)
    heavy = np.exp(3 * normal(4)) * np.sign(normal(5))
    return {
        "normal": normal(1),
        "laplace": laplace,
        "lognormal": np.exp(normal(2)),
        "lognormal of 3": heavy,
        "transformer": transformer(workers, size, seed, text, steps),
    }


def transformer(workers: int, size: int, seed: int, text: Path | None, steps: int) -> np.ndarray:
    """The first `size` entries of the gradients of the workers, each on 16 windows of its own, after so many steps."""
    codes, characters = read_characters(text)
    grad = jax.grad(lambda params, windows: mean_loss(params, windows, LAYOUTS["data"]))

    def windows(step: int, worker: int) -> np.ndarray:
        starts = np.random.default_rng([seed, step, worker]).integers(0, len(codes) - 65, 16)
        return codes[starts[:, None] + np.arange(65)]

    params = jax.tree.map(jnp.asarray, initial(Sizes(characters, 64, 64, 4, 3), seed))
    for params, _ in dense(params, grad, 2e-3, ((windows(number, 0),) for number in range(steps))):  # noqa: B007, B020
        pass
    flat = jax.jit(lambda params, windows: ravel_pytree(grad(params, windows))[0])
    rows = np.stack([flat(params, windows(steps, 1 + i)) for i in range(workers)])
    if rows.shape[1] < size:
        raise UserError(f"the transformer has {rows.shape[1]:,} parameters; --log2-size must be at most 17")
    return rows[:, :size]


# ------------------------------------------------------------------------------------------------


class Quantizer(NamedTuple):
    """bits: an entry, scales included;  mean: of what workers sent, (xs f[n, d], key) -> f[d];  calls: (x, key) ->
    what compresses and what decompresses x, one function of both for a release, which packs nothing."""

    family: str
    name: str
    bits: float
    mean: Callable
    calls: Callable


def ours(family: str, compressor: Any, d: int) -> Quantizer:
    x, key = jax.ShapeDtypeStruct((d,), jnp.float32), jax.eval_shape(lambda: jax.random.key(0))
    payload = jax.eval_shape(lambda x, key: jc.roundtrip(compressor, x, key=key)[1], x, key)

    def mean(xs, key):  # by hand: `jc.direct` refuses codes without a bound
        workers = jnp.arange(len(xs))
        state = compressor.init(key, xs[0])

        def send(worker, key, x):
            mine = for_worker(compressor, state.shared, worker, len(xs))
            return compressor.compress(key, x, State(state.local, mine))[0]

        payloads = jax.vmap(send)(workers, jax.random.split(key, len(xs)), xs)
        return accumulate(compressor, jnp.zeros_like(xs[0]), payloads, None, state.shared) / len(xs)

    calls = lambda x, key: codec_calls("", compressor, x, key)[0].values()
    return Quantizer(family, compressor.spec.name, 8 * jc.lane_bytes(payload) / d, mean, calls)


def theirs(release: Released) -> Quantizer:
    run = jax.jit(release.run)
    mean = lambda xs, key: jnp.mean(jax.vmap(run)(jax.random.split(key, len(xs)), xs), axis=0)
    whose = release.name.split()[0]
    return Quantizer(f"{whose}, released", release.name, release.bits, mean, lambda x, key: [lambda: run(key, x)])


def quantizers(d: int, only: Sequence[str] | None = None) -> list[Quantizer]:
    """Those whose own names, or whose families', contain one of these words, in upper or lower case."""
    found = [ours(family, c, d) for family, some in families().items() for c in some] + list(map(theirs, RELEASED))
    if only is None:
        return found
    has = lambda q, word: word.lower() in f"{q.family}\n{q.name}".lower()
    if missing := [word for word in only if not any(has(q, word) for q in found)]:
        known = "; ".join(dict.fromkeys(q.family for q in found))
        raise UserError(f"--only {missing[0]}: no quantizer and no family has that in its name; families: {known}")
    return [q for q in found if any(has(q, word) for word in only)]


def error_of(q: Quantizer, xs: np.ndarray, key: Any) -> float:
    """NMSE."""
    mean, wide = np.asarray(jax.jit(q.mean)(xs, key), np.float64), xs.astype(np.float64)
    return float(np.sum(np.square(mean - wide.mean(0))) / np.mean(np.sum(np.square(wide), axis=1)))


def seconds_of(chosen: Sequence[Quantizer], size: int, repeats: int, seed: int) -> list[list[float]]:
    """To compress and to decompress a normal vector, all in turn."""
    x, key = jax.random.normal(jax.random.key(seed), (size,)), jax.random.key(seed)
    calls = {f"{q.name} {i}": call for q in chosen for i, call in enumerate(q.calls(x, key))}
    seconds = time_all(calls, repeats)
    return [[seconds[f"{q.name} {i}"] for i in (0, 1) if f"{q.name} {i}" in seconds] for q in chosen]


def main(arguments: Sequence[str]) -> int:
    p = bench_parser("quantizers", __doc__, repeats=9)
    p.add_argument("--log2-size", type=at_least(11), default=17, help="d = 2^this entries")
    p.add_argument("--log2-timed", type=at_least(11), default=22, help="entries of the vector for the times")
    p.add_argument("--steps", type=at_least(0), default=100, help="training steps before gradients are taken")
    p.add_argument("--text", type=Path, default=None, help="what the transformer reads; the library's source without")
    common(p, "seed", workers=10)
    p.add_argument(
        "--only",
        nargs="+",
        default=None,
        metavar="WORD",
        help="those with one of these in their name or their family's",
    )
    p.add_argument("--plot", type=Path, default=None, help="draw a figure into this file")
    o = p.parse_args(arguments)

    chosen, rows = quantizers(2**o.log2_size, o.only), []
    sources = sources_of(o.workers, 2**o.log2_size, o.seed, o.text, o.steps)
    with new_console().status("") as status:
        for q, seconds in zip(chosen, seconds_of(chosen, 2**o.log2_timed, o.repeats, o.seed), strict=True):
            status.update(q.name)
            row = {"family": q.family, "name": q.name, "bits": q.bits, "speed": 2**o.log2_timed / sum(seconds) / 1e6}
            row["ms"] = [f"{1e3 * s:.1f}" for s in seconds] if len(seconds) == 2 else ["", ""]
            row["errors"] = {name: error_of(q, xs, jax.random.key(o.seed)) for name, xs in sources.items()}
            rows.append(row)
    columns = {
        "quantizer": "{name}",
        "bits / entry": "{bits:.3f}",
        **{f"NMSE {name}": f"{{errors[{name}]:.3g}}" for name in sources},
        "compress ms": "{ms[0]}",
        "decompress ms": "{ms[1]}",
        "M entries / s": "{speed:.0f}",
    }
    notes = (
        f"NMSE of the mean of {o.workers} workers, over the mean of |x_i|^2. Bits are those of the lanes, scales "
        f"included. Gradients are those of a transformer of 3 layers after {o.steps} steps. Times are of "
        f"2^{o.log2_timed} entries, medians of {o.repeats} rounds in turn; speed is that of both together. Releases "
        f"pack nothing here."
    )
    rows.sort(key=lambda row: (round(row["bits"]), row["bits"], row["name"]))
    report(o, f"{o.workers} workers, d = 2^{o.log2_size}", columns, rows, notes)
    if o.plot is not None:
        panels = {name: lines(rows, lambda row, name=name: row["errors"][name]) for name in sources}
        draw_panels(o.plot, panels, ylabel=f"NMSE of the mean of {o.workers} workers", **SCALES)
        panels = {"compress and decompress": lines(rows, lambda row: row["speed"])}
        draw_panels(o.plot.with_stem(f"{o.plot.stem}-speed"), panels, ylabel="million entries a second", **SCALES)
    return 0


def lines(rows: list[dict], value: Callable[[dict], float]) -> dict[str, tuple]:
    """A curve over bits for each family of the figures."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row["family"] not in APART:
            curves.setdefault(row["family"], []).append((row["bits"], value(row)))
    return {family: tuple(zip(*sorted(points), strict=True)) for family, points in curves.items()}
