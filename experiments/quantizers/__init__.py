"""Error of the mean of n workers against bits an entry: all quantizers and rotations, and those of releases.

NMSE = |mean_i C(x_i) - mean_i x_i|^2 / mean_i |x_i|^2.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.lib.cli import Parser, at_least
from experiments.lib.folders import write_json
from experiments.lib.report import new_console, show

__all__ = ["main"]


def families() -> dict[str, list]:
    """Lines of the figure: what belongs together, in the order of its bits. EDEN comes first."""
    import jaxcomp as jc

    scaled, bits = jc.block_scaled, (2, 3, 4, 8)
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
        "MX, sound": [scaled(name) for name in ("mxfp4", "mxfp6", "mxfp8")],
        "MX, best scale": [scaled(name, scale="e8m0-best") for name in ("mxfp4", "mxfp6", "mxfp8")],
        "MX as released": [scaled(name, scale="e8m0-floor") for name in ("mxfp4", "mxfp6", "mxfp8")],
        "NVFP4, best scale": [scaled("nvfp4", scale="e4m3-best")],
        "NVFP4, sound": [scaled("nvfp4")],
        "NVFP4 as released": [scaled("nvfp4", scale="e4m3-nearest")],
        "e4m3": [scaled("e4m3")],
    }


def mean_by(compressor: Any) -> Callable:
    """(xs f[n, d], key) -> the mean of what the workers sent, and the payload of the last one."""
    import jax
    import jax.numpy as jnp

    from jaxcomp.base import State, for_worker

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
    import jax
    import jax.numpy as jnp

    def run(xs, key):
        keys = jax.random.split(key, xs.shape[0])
        return jnp.mean(jax.lax.map(lambda args: release.run(*args), (keys, xs)), axis=0)

    return run


def measure(run: Callable, sources: dict[str, np.ndarray], seed: int) -> tuple[dict[str, float], float]:
    """NMSE for each source, and nanoseconds an entry to compress and decompress."""
    import jax

    compiled, errors, seconds = jax.jit(run), {}, []
    for name, xs in sources.items():
        for repeat in range(2):
            start = time.perf_counter()
            mean = np.asarray(compiled(xs, jax.random.key(seed)), np.float64)
            if repeat:
                seconds.append(time.perf_counter() - start)
        wide = xs.astype(np.float64)
        errors[name] = float(np.sum(np.square(mean - wide.mean(0))) / np.mean(np.sum(np.square(wide), axis=1)))
    return errors, 1e9 * min(seconds) / next(iter(sources.values())).size


def main(arguments: Sequence[str]) -> int:
    p = Parser(prog="python -m experiments quantizers", description=__doc__)
    p.add_argument("--log2-size", type=at_least(11), default=17, help="d = 2^this entries")
    p.add_argument("--workers", type=at_least(1), default=10)
    p.add_argument("--steps", type=at_least(0), default=100, help="training steps before gradients are taken")
    p.add_argument("--text", type=Path, default=None, help="what the transformer reads; the library's source without")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--only", nargs="*", default=None, help="families whose names contain one of these")
    p.add_argument("--markdown", type=Path, default=None, help="keep the table in this file")
    p.add_argument("--json", type=Path, default=None, help="keep the figures in this file")
    p.add_argument("--plot", type=Path, default=None, help="draw a figure into this file")
    options = p.parse_args(arguments)

    import jax
    import jax.numpy as jnp

    import jaxcomp as jc
    from experiments.bench.timing import machine
    from experiments.quantizers.released import RELEASED
    from experiments.quantizers.sources import lognormal, normal, transformer

    n, d = options.workers, 2**options.log2_size
    sources = {
        "normal": normal(n, d, options.seed),
        "lognormal": lognormal(n, d, options.seed),
        "transformer": transformer(n, d, options.seed, options.text, options.steps),
    }
    records = []
    wanted = lambda family: options.only is None or any(part in family for part in options.only)
    console = new_console()

    def record(family: str, name: str, bits: float, run: Callable) -> None:
        errors, nanoseconds = measure(run, sources, options.seed)
        records.append({"family": family, "name": name, "bits": bits, "errors": errors, "ns": nanoseconds})

    with console.status("compiling") as status:
        for family, compressors in families().items():
            for compressor in compressors if wanted(family) else ():
                status.update(compressor.spec.name)
                x = jax.ShapeDtypeStruct((d,), jnp.float32)
                key = jax.eval_shape(lambda: jax.random.key(0))
                payload = jax.eval_shape(lambda x, key, c=compressor: jc.roundtrip(c, x, key=key)[1], x, key)
                record(family, compressor.spec.name, 8 * jc.lane_bytes(payload) / d, mean_by(compressor))
        for release in RELEASED if wanted("released") else ():
            status.update(release.name)
            family = "CGX, released" if release.name.startswith("CGX") else f"{release.name.split()[0]}, released"
            record(family, release.name, release.bits, mean_of_released(release))
    rows = [
        [r["name"], f"{r['bits']:.3f}", *(f"{r['errors'][name]:.3g}" for name in sources), f"{r['ns']:.1f}"]
        for r in sorted(records, key=lambda r: (round(r["bits"]), r["bits"], r["name"]))
    ]
    head = ["quantizer", "bits / entry", *(f"NMSE {name}" for name in sources), "ns / entry"]
    notes = (
        f"NMSE of the mean of {n} workers, over the mean of |x_i|^2. Bits are those of the lanes, scales included. "
        f"Gradients are those of a transformer of 3 layers after {options.steps} steps. ns: compress and decompress."
    )
    show(console, f"{n} workers, d = 2^{options.log2_size}; {machine()}", head, rows, notes, options.markdown)
    if options.json is not None:
        write_json(options.json, records)
    if options.plot is not None:
        draw(records, list(sources), n, options.plot)
    return 0


APART = {"EDEN, least squares", "integers, stochastic", "MX, sound", "NVFP4, sound", "e4m3"}  # in the table alone
GREYS = ["#4D4D4D", "#8C8C8C", "#B3B3B3", "#000000"]


def draw(records: list[dict], sources: list[str], workers: int, path: Path) -> None:
    """One panel for each source, one line for each family; releases in grey, with hollow marks."""
    from experiments.lib.plots import LINES, new_figure, save

    figure, panels = new_figure(len(sources), height=5.6)
    names = [name for name in dict.fromkeys(r["family"] for r in records) if name not in APART]
    ours = [name for name in names if "released" not in name]
    styles: dict[str, dict] = {name: LINES[i % len(LINES)] for i, name in enumerate(ours)}
    for i, name in enumerate(name for name in names if name not in ours):
        styles[name] = {"color": GREYS[i % 4], "marker": "osD^vP"[i % 6], "linestyle": ":", "markerfacecolor": "white"}
    for axis, source in zip(panels, sources, strict=True):
        for family in names:
            points = sorted((r["bits"], r["errors"][source]) for r in records if r["family"] == family)
            axis.plot(*zip(*points, strict=True), label=family, markersize=6, **styles[family])
        axis.set(title=source, xlabel="bits an entry, scales included", yscale="log", xscale="log")
        axis.set_xticks([0.5, 1, 2, 3, 4, 6, 8], ["0.5", "1", "2", "3", "4", "6", "8"])
        axis.minorticks_off()
    panels[0].set_ylabel(f"NMSE of the mean of {workers} workers")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=9)
    save(figure, path)
