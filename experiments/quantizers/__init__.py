"""Error of the mean of n workers against bits an entry, and speed: all quantizers and rotations, and those of releases.

NMSE = |mean_i C(x_i) - mean_i x_i|^2 / mean_i |x_i|^2.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

import jaxcomp as jc
from experiments.bench.timing import bench_parser, codec_calls, report, time_all
from experiments.lib.cli import at_least
from experiments.lib.folders import write_json
from experiments.lib.report import new_console
from experiments.lib.run import draw_panels
from experiments.lib.step import dense
from experiments.lib.text import read_characters
from experiments.lib.transformer import LAYOUTS, Sizes, initial, mean_loss
from experiments.quantizers.released import RELEASED
from jaxcomp.base import State, for_worker

__all__ = ["main"]

BITS: dict[str, Any] = {"xlabel": "bits an entry, scales included", "xscale": "log", "ticks": (0.5, 1, 2, 3, 4, 8)}


def families() -> dict[str, list]:
    """Lines of the figure: what belongs together, in the order of its bits. EDEN comes first."""
    scaled, bits = jc.block_scaled, (2, 3, 4, 8)
    mx = ("mxfp4", "mxfp6", "mxfp8")
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
        "MX, sound": [scaled(name) for name in mx],
        "MX, best scale": [scaled(name, scale="e8m0-best") for name in mx],
        "MX as released": [scaled(name, scale="e8m0-floor") for name in mx],
        "NVFP4, best scale": [scaled("nvfp4", scale="e4m3-best")],
        "NVFP4, sound": [scaled("nvfp4")],
        "NVFP4 as released": [scaled("nvfp4", scale="e4m3-nearest")],
        "e4m3": [scaled("e4m3")],
    }


# ------------------------------------------------------------------------------------------------
# Vectors of n workers, f32[n, d]


def normal(workers: int, size: int, seed: int) -> np.ndarray:
    return np.random.default_rng([seed, 1]).standard_normal((workers, size)).astype(np.float32)


def lognormal(workers: int, size: int, seed: int) -> np.ndarray:
    return np.exp(np.random.default_rng([seed, 2]).standard_normal((workers, size))).astype(np.float32)


def transformer(workers: int, size: int, seed: int, text: Path | None, steps: int) -> np.ndarray:
    """The first `size` entries of the gradients of the workers, each on 16 windows of its own, after so many steps."""
    codes, characters = read_characters(text)
    params = jax.tree.map(jnp.asarray, initial(Sizes(characters, 64, 64, 4, 3), seed))
    grad = jax.grad(lambda params, windows: mean_loss(params, windows, LAYOUTS["data"]))

    def windows(step: int, worker: int) -> np.ndarray:
        starts = np.random.default_rng([seed, step, worker]).integers(0, len(codes) - 65, 16)
        return codes[starts[:, None] + np.arange(65)]

    start = params
    for params, _ in dense(start, grad, 2e-3, ((windows(number, 0),) for number in range(steps))):  # noqa: B007
        pass
    flat = jax.jit(lambda params, windows: ravel_pytree(grad(params, windows))[0])
    rows = [np.asarray(flat(params, jnp.asarray(windows(steps, 1 + i)))) for i in range(workers)]
    if rows[0].size < size:
        raise ValueError(f"the transformer has {rows[0].size} parameters; got size={size}")
    return np.stack(rows)[:, :size]


# ------------------------------------------------------------------------------------------------


def mean_by(compressor: Any) -> Callable:
    """(xs f[n, d], key) -> the mean of what the workers sent."""

    def run(xs, key):
        shared, private = jax.random.split(key)
        like = jax.ShapeDtypeStruct(xs.shape[1:], xs.dtype)
        state = compressor.init(shared, like)

        def one(args):
            i, x = args
            mine = for_worker(compressor, state.shared, i, xs.shape[0])
            payload, _ = compressor.compress(jax.random.fold_in(private, i), x, State(state.local, mine))
            return compressor.decompress(payload, mine, like)

        return jnp.mean(jax.lax.map(one, (jnp.arange(xs.shape[0]), xs)), axis=0)

    return run


def mean_of_released(release: Any) -> Callable:
    """The same for a function (key, x) -> x_hat."""

    def run(xs, key):
        keys = jax.random.split(key, xs.shape[0])
        return jnp.mean(jax.lax.map(lambda args: release.run(*args), (keys, xs)), axis=0)

    return run


class Quantizer(NamedTuple):
    """bits: an entry, scales included;  mean: of what workers sent, (xs, key) -> f[d];  calls: (x, key) -> what
    compresses and what decompresses x, one function of both for a release, which packs nothing."""

    family: str
    name: str
    bits: float
    mean: Callable
    calls: Callable


def quantizers(d: int, wanted: Callable[[str], bool]) -> Iterator[Quantizer]:
    """All of these families."""
    x, key = jax.ShapeDtypeStruct((d,), jnp.float32), jax.eval_shape(lambda: jax.random.key(0))
    for family, compressors in families().items():
        for compressor in compressors if wanted(family) else ():
            payload = jax.eval_shape(lambda x, key, c=compressor: jc.roundtrip(c, x, key=key)[1], x, key)
            calls = lambda x, key, c=compressor: codec_calls("", c, x, key)[0].values()
            bits = 8 * jc.lane_bytes(payload) / d
            yield Quantizer(family, compressor.spec.name, bits, mean_by(compressor), calls)
    for release in RELEASED if wanted("released") else ():
        whose = "CGX" if release.name.startswith("CGX") else release.name.split()[0]
        run = jax.jit(release.run)
        calls = lambda x, key, run=run: [lambda: run(key, x)]
        yield Quantizer(f"{whose}, released", release.name, release.bits, mean_of_released(release), calls)


def errors_of(run: Callable, sources: dict[str, np.ndarray], seed: int) -> dict[str, float]:
    """NMSE for each source."""
    compiled, errors = jax.jit(run), {}
    for name, xs in sources.items():
        mean = np.asarray(compiled(xs, jax.random.key(seed)), np.float64)
        wide = xs.astype(np.float64)
        errors[name] = float(np.sum(np.square(mean - wide.mean(0))) / np.mean(np.sum(np.square(wide), axis=1)))
    return errors


def seconds_of(chosen: Sequence[Quantizer], size: int, repeats: int, seed: int) -> list[list[float]]:
    """To compress and to decompress a normal vector, all in turn."""
    x, key = jnp.asarray(normal(1, size, seed)[0]), jax.random.key(seed)
    calls = {f"{q.name} {i}": call for q in chosen for i, call in enumerate(q.calls(x, key))}
    seconds = time_all(calls, repeats)
    return [[seconds[f"{q.name} {i}"] for i in (0, 1) if f"{q.name} {i}" in seconds] for q in chosen]


def main(arguments: Sequence[str]) -> int:
    p = bench_parser("quantizers", __doc__, repeats=9)
    p.add_argument("--log2-size", type=at_least(11), default=17, help="d = 2^this entries")
    p.add_argument("--log2-timed", type=at_least(11), default=22, help="entries of the vector for the times")
    p.add_argument("--workers", type=at_least(1), default=10)
    p.add_argument("--steps", type=at_least(0), default=100, help="training steps before gradients are taken")
    p.add_argument("--text", type=Path, default=None, help="what the transformer reads; the library's source without")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--only", nargs="*", default=None, help="families whose names contain one of these")
    p.add_argument("--json", type=Path, default=None, help="keep the figures in this file")
    p.add_argument("--plot", type=Path, default=None, help="draw a figure into this file")
    o = p.parse_args(arguments)

    n, d = o.workers, 2**o.log2_size
    sources = {
        "normal": normal(n, d, o.seed),
        "lognormal": lognormal(n, d, o.seed),
        "transformer": transformer(n, d, o.seed, o.text, o.steps),
    }
    chosen = list(quantizers(d, lambda family: o.only is None or any(part in family for part in o.only)))
    seconds, records = seconds_of(chosen, 2**o.log2_timed, o.repeats, o.seed), []
    with new_console().status("compiling") as status:
        for q, times in zip(chosen, seconds, strict=True):
            status.update(q.name)
            errors, speed = errors_of(q.mean, sources, o.seed), 2**o.log2_timed / sum(times) / 1e6
            ms = [1e3 * s for s in times] if len(times) == 2 else None
            records.append(
                {"family": q.family, "name": q.name, "bits": q.bits, "errors": errors, "ms": ms, "speed": speed}
            )
    columns = {
        "quantizer": "{name}",
        "bits / entry": "{bits:.3f}",
        **{f"NMSE {name}": f"{{errors[{name}]:.3g}}" for name in sources},
        "compress ms": lambda row: f"{row['ms'][0]:.1f}" if row["ms"] else "",
        "decompress ms": lambda row: f"{row['ms'][1]:.1f}" if row["ms"] else "",
        "M entries / s": "{speed:.0f}",
    }
    notes = (
        f"NMSE of the mean of {n} workers, over the mean of |x_i|^2. Bits are those of the lanes, scales included. "
        f"Gradients are those of a transformer of 3 layers after {o.steps} steps. Times are of 2^{o.log2_timed} "
        f"entries, medians of {o.repeats} rounds in turn; speed is that of both together. Releases pack nothing here."
    )
    rows = sorted(records, key=lambda r: (round(r["bits"]), r["bits"], r["name"]))
    report(o, f"{n} workers, d = 2^{o.log2_size}", columns, rows, notes)
    if o.json is not None:
        write_json(o.json, records)
    if o.plot is not None:
        draw(records, list(sources), n, o.plot)
        draw_speed(records, o.plot.with_stem(f"{o.plot.stem}-speed"))
    return 0


APART = {"EDEN, least squares", "integers, stochastic", "MX, sound", "NVFP4, sound", "e4m3"}  # in the table alone


def lines(records: list[dict], value: Callable[[dict], float]) -> dict[str, tuple]:
    """A curve over bits for each family of the figures."""
    families = dict.fromkeys(r["family"] for r in records if r["family"] not in APART)
    points = {f: sorted((r["bits"], value(r)) for r in records if r["family"] == f) for f in families}
    return {family: tuple(zip(*each, strict=True)) for family, each in points.items()}


def draw(records: list[dict], sources: list[str], workers: int, path: Path) -> None:
    """One panel for each source, one line for each family."""
    panels = {source: lines(records, lambda r, source=source: r["errors"][source]) for source in sources}
    draw_panels(path, panels, ylabel=f"NMSE of the mean of {workers} workers", yscale="log", **BITS)


def draw_speed(records: list[dict], path: Path) -> None:
    """The same families: how fast they are."""
    panels = {"compress and decompress": lines(records, lambda r: r["speed"])}
    draw_panels(path, panels, ylabel="million entries a second", yscale="log", **BITS)
