"""Bytes per nonzero, error and speed of each message, and what each part of SKCompress is worth.

Gradients are recorded from training with Adam and compressed by every method. Bytes are those of the message between
hosts without its frame.
"""

import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.lib.cli import Parser, UserError, at_least, choose_new, positive
from experiments.lib.data import FILES
from experiments.lib.folders import Journal, run_options, start_run
from experiments.lib.report import new_console, progress_bar, show

__all__ = ["Measured", "main", "meter", "record"]

FRAME = 17  # bytes of `wire.frame`


class Measured(NamedTuple):
    """One method on one gradient: bytes of keys, values and tables, number of nonzeros, |x - C(x)|^2 / |x|^2,
    |C(x)| / |x|, and seconds to compress and decompress in jit, to encode and decode on the host (0: not done)."""

    method: str
    keys: float
    values: float
    tables: float
    nonzeros: int
    error: float
    length: float
    seconds: tuple[float, float, float, float]

    @property
    def bytes(self) -> float:
        return self.keys + self.values + self.tables


def methods() -> dict[str, Any]:
    """name -> compressor of a vector with many zeros."""
    import jaxcomp as jc

    whole: dict[str, Any] = {"room": 1.0}
    return {
        "SKCompress as released": jc.skcompress(mode="paper", **whole),
        "recentred sketch": jc.skcompress(mode="recentred", **whole),
        "recentred sketch, 64 buckets": jc.skcompress(mode="recentred", buckets=64, **whole),
        **{f"equal depth, {q} buckets": jc.skcompress(buckets=q, power=0, **whole) for q in (8, 16, 32, 64)},
        **{f"quantile, {q} buckets": jc.skcompress(buckets=q, **whole) for q in (4, 8, 16, 32, 64)},
        "top-k 0.05 + dithering 7": jc.compose(jc.top_k(0.05), jc.dithering(7, norm="inf", blocks=1)),
        "top-k 0.05 + quantile": jc.skcompress(jc.top_k(0.05)),
    }


def record(problem: Any, batch: int, steps: int, number: int, rate: float, seed: int) -> list[np.ndarray]:
    """`number` gradients f32[d] of batches, evenly spaced over so many steps of Adam."""
    import jax.numpy as jnp

    from experiments.lib.step import dense

    def batch_of(step: int) -> Any:
        return problem.data, np.random.default_rng([seed, 6, step]).integers(0, problem.examples, batch)

    wanted = set(np.linspace(1, steps, number).round().astype(int))
    taken = dense(jnp.asarray(problem.params), problem.gradient, rate, map(batch_of, range(1, steps + 1)))
    return [flat for step, (_, flat) in enumerate(taken, 1) if step in wanted]


def timed(call: Callable[[], Any], repeats: int = 3) -> tuple[Any, float]:
    """The result, and the least seconds of some calls after a first one."""
    import jax

    result, seconds = jax.block_until_ready(call()), []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - start)
    return result, min(seconds)


def meter(name: str, compressor: Any, d: int) -> Callable[[np.ndarray], Measured]:
    """Measures a method on gradients f32[d]; compiled once."""
    import jax
    import jax.numpy as jnp

    import jaxcomp as jc
    from jaxcomp.payloads import Sketch, sketch_bits

    key = jax.random.key(0)
    like = jax.ShapeDtypeStruct((d,), jnp.float32)
    state = compressor.init(key, like)
    compress = jax.jit(lambda x, state: compressor.compress(key, x, state)[0])
    decompress = jax.jit(lambda payload, shared: compressor.decompress(payload, shared, like))
    split = jax.jit(sketch_bits)

    def measure(x: np.ndarray) -> Measured:
        vector = jnp.asarray(x)
        payload, compressing = timed(lambda: compress(vector, state))
        x_hat, decompressing = timed(lambda: decompress(payload, state.shared))
        host = jax.device_get(payload)
        data, encoding = timed(lambda: jc.wire.encode(host, code="best"))
        _, decoding = timed(lambda: jc.wire.decode(data))
        total = len(data) - FRAME
        if isinstance(payload, Sketch):
            keys, values = (int(bits) / 8 for bits in split(payload)[:2])
        else:
            values = int(jc.code_bits(payload.values, code="best")) / 8
            keys = total - values
        # Tables come with all headers, and with the bits that fill the last byte of each part.
        seconds = (compressing, decompressing, encoding, decoding)
        return measured(name, x, np.asarray(x_hat), (keys, values, total - keys - values), seconds)

    return measure


NO_SECONDS = (0.0, 0.0, 0.0, 0.0)


def measured(
    name: str, x: np.ndarray, x_hat: np.ndarray, parts: tuple[float, float, float], seconds: Any = NO_SECONDS
) -> Measured:
    size, error = np.sum(np.float64(x) ** 2), np.sum((np.float64(x) - np.float64(x_hat)) ** 2)
    length = np.sqrt(np.sum(np.float64(x_hat) ** 2) / size)
    return Measured(name, *parts, int(np.count_nonzero(x)), float(error / size), float(length), seconds)


def measure_raw(x: np.ndarray) -> list[Measured]:
    """Keys as i32 and values as f32, plain and behind general compressors."""
    keys = np.flatnonzero(x).astype("<i4")
    raw = keys.tobytes() + x[keys].astype("<f4").tobytes()
    coders: dict[str, Any] = {"zlib -9": (lambda data: zlib.compress(data, 9), zlib.decompress)}
    try:
        import zstandard

        coders["zstd -19"] = (zstandard.ZstdCompressor(19).compress, zstandard.ZstdDecompressor().decompress)
    except ImportError:
        pass
    n = keys.size
    rows = [measured("f32 keys + values", x, x, (4.0 * n, 4.0 * n, 0.0))]
    for name, (pack, unpack) in coders.items():
        packed, encoding = timed(lambda pack=pack: pack(raw), repeats=1)
        restored, decoding = timed(lambda unpack=unpack, packed=packed: unpack(packed), repeats=1)
        if restored != raw:
            raise RuntimeError(f"{name} did not restore what it packed")
        halves = [len(pack(half)) for half in (raw[: 4 * n], raw[4 * n :])]
        share = len(packed) * halves[0] / sum(halves)
        seconds = (0.0, 0.0, encoding, decoding)
        rows.append(measured(name, x, x, (share, len(packed) - share, 0.0), seconds))
    return rows


def parts_meter(d: int) -> Callable[[np.ndarray], list[Measured]]:
    """The steps from plain Adam to SKCompress, first with the key coders and cells of the papers, then with ours."""
    import jax

    import jaxcomp as jc
    from jaxcomp import codes
    from jaxcomp.payloads import sketch_bits
    from jaxcomp.wire.bitstream import unpack_words

    def run_of(mode: str) -> Callable[..., Any]:
        compressor = jc.skcompress(mode=mode, buckets=256, power=0, room=1.0)
        roundtrip = lambda x: jc.roundtrip(compressor, x, key=jax.random.key(0))
        return jax.jit(lambda x: (*roundtrip(x), sketch_bits(roundtrip(x)[1])))

    runs = {mode: run_of(mode) for mode in ("paper", "quantile", "recentred")}

    def measure(x: np.ndarray) -> list[Measured]:
        keys = np.flatnonzero(x).astype(np.int32)
        n, done = keys.size, {mode: jax.device_get(run(x)) for mode, run in runs.items()}

        def exact(name: str, coder: str) -> Measured:
            bits = codes.key_bits(keys, np.array([n], np.int32), coder=coder)
            return measured(name, x, x, (int(bits) / 8, 4.0 * n, 0.0))

        def of(name: str, mode: str, coder: str, huffman: bool) -> Measured:
            """With the cells in a fixed number of bits (whole bytes with SketchML's key coder), or Huffman-coded."""
            x_hat, payload, parts = done[mode]
            used = np.max(np.flatnonzero(unpack_words(payload.cells)), initial=-1) + 1
            width = 8 if coder == "sketchml" else payload.cells.shape[0]
            lists = int(codes.key_bits(payload.keys, payload.counts, coder=coder)) / 8
            values = int(parts.values) / 8 if huffman else int(used) * width / 8
            return measured(name, x, x_hat, (lists, values, int(parts.tables) / 8))

        return [
            measured("Adam", x, x, (4.0 * n, 4.0 * n, 0.0)),
            exact("+ keys, SketchML's", "sketchml"),
            of("+ MinMaxSketch, midpoints", "paper", "sketchml", False),
            of("+ adaptive keys, Huffman: as released", "paper", "released", True),
            exact("Adam + keys, ours", "best"),
            of("+ quantile, 256 means", "quantile", "best", False),
            of("+ MinMaxSketch, recentred", "recentred", "best", False),
            of("+ Huffman", "recentred", "best", True),
        ]

    return measure


HEAD = ["method", "B/nonzero", "keys", "values", "tables", "error", "length"]
SPEED = ["compress", "decompress", "encode", "decode"]
NOTES = """\
B/nonzero: bytes of the message over nonzero entries of the gradient, in parts. values: what tells the bucket of each
key, with its Huffman table; tables: what the buckets stand for, and all headers. error: |x - C(x)|^2 / |x|^2.
length: |C(x)| / |x|.
equal depth: quantile with power=0, the control with as many values in each bucket.
Speed: million nonzeros per second, compress and decompress in jit, encode and decode on the host."""


def together(rows: list[Measured]) -> Measured:
    """Sums of bytes and nonzeros over gradients, medians of the others."""
    middle = lambda values: float(np.median(values))
    seconds = [sum(row.seconds[i] for row in rows) for i in range(4)]
    return Measured(
        rows[0].method,
        sum(row.keys for row in rows),
        sum(row.values for row in rows),
        sum(row.tables for row in rows),
        sum(row.nonzeros for row in rows),
        middle([row.error for row in rows]),
        middle([row.length for row in rows]),
        (seconds[0], seconds[1], seconds[2], seconds[3]),
    )


def cells(row: Measured, speed: bool = True) -> list[str]:
    n = row.nonzeros
    parts = [f"{part / n:.3f}" for part in (row.bytes, row.keys, row.values, row.tables)]
    rates = [f"{n / seconds / 1e6:.2f}" if seconds else "-" for seconds in row.seconds] if speed else []
    return [row.method, *parts, f"{row.error:.4f}", f"{row.length:.3f}", *rates]


def main(arguments: Sequence[str]) -> int:
    from experiments.skcompress.problems import LOSSES

    p = Parser(prog="python -m experiments skcompress sizes", description=(__doc__ or "").split("\n\n")[0])
    p.add_argument("--data", type=Path, default=None, help=f"{FILES}; without it a synthetic set")
    p.add_argument("--losses", nargs="+", choices=LOSSES, default=["logistic"], help="linear models to record from")
    p.add_argument("--batch", type=at_least(1), default=1600, help="examples for each gradient")
    p.add_argument("--steps", type=at_least(1), default=60, help="of training")
    p.add_argument("--gradients", type=at_least(1), default=3, help="recorded, evenly spaced")
    p.add_argument("--lr", type=positive, default=0.01, help="learning rate of Adam")
    p.add_argument("--seed", type=at_least(0), default=0, help="of data and batches")
    run_options(p, "skcompress-sizes")
    o = p.parse_args(arguments)
    if o.gradients > o.steps:
        raise UserError(f"--gradients must be at most --steps; got {o.gradients} of {o.steps}")

    from experiments.skcompress.problems import linear, read, synthetic

    console, folder = new_console(), choose_new(o.runs, o.name, "skcompress-sizes")
    results: dict[str, tuple[list[Measured], list[Measured]]] = {}
    with progress_bar(console, "") as bar:
        task = bar.add_task("reading", total=len(o.losses) * (1 + o.gradients * (len(methods()) + 2)))
        rows = synthetic(seed=o.seed) if o.data is None else read(o.data)
        table = {name: meter(name, compressor, rows.d) for name, compressor in methods().items()}
        parts = parts_meter(rows.d)
        for kind in o.losses:
            problem = linear(rows, kind)
            bar.update(task, description=f"recording {problem.name}")
            gradients = record(problem, o.batch, o.steps, o.gradients, o.lr, o.seed)
            bar.advance(task)
            sizes: dict[str, list[Measured]] = {}
            steps: dict[str, list[Measured]] = {}
            for x in gradients:
                for row in measure_raw(x):
                    sizes.setdefault(row.method, []).append(row)
                bar.advance(task)
                for name, measure in table.items():
                    bar.update(task, description=f"{kind}: {name}")
                    sizes.setdefault(name, []).append(measure(x))
                    bar.advance(task)
                for row in parts(x):
                    steps.setdefault(row.method, []).append(row)
                bar.advance(task)
            results[problem.name] = [together(r) for r in sizes.values()], [together(r) for r in steps.values()]

    start_run(folder, vars(o))
    journal = Journal(folder)
    for name, (whole, chain) in results.items():
        journal.add(*({"problem": name, **row._asdict()} for row in whole + chain))
    for i, (name, (whole, chain)) in enumerate(results.items()):
        nonzeros = whole[0].nonzeros // o.gradients
        title = f"{name}: {nonzeros:,} nonzeros of {rows.d:,}, batches of {o.batch}, mean of {o.gradients} gradients"
        show(console, title, HEAD + SPEED, [cells(row) for row in whole], NOTES, folder / f"sizes-{o.losses[i]}.md")
        title = "What each part is worth, as released and with ours"
        show(console, title, HEAD, [cells(row, False) for row in chain], "", folder / f"parts-{o.losses[i]}.md")
    console.print(f"plot: {plot(results, folder / 'sizes.png')}")
    return 0


def plot(results: dict[str, tuple[list[Measured], list[Measured]]], path: Path) -> Path:
    """Error against bytes of every lossy method, and the bytes of each step in parts."""
    from experiments.lib.plots import COLOURS, LINES, new_figure, save

    figure, axes = new_figure(2, rows=len(results), height=5.4 * len(results))
    for (name, (whole, parts)), left, right in zip(results.items(), axes[::2], axes[1::2], strict=True):
        place = lambda row: (row.bytes / row.nonzeros, row.error)
        lines = {"quantile": "quantile, 4 .. 64 buckets", "equal depth": "equal depth, 8 .. 64 buckets"}
        for look, (start, label) in zip(LINES, lines.items(), strict=False):
            points = [place(row) for row in whole if row.method.startswith(start)]
            left.plot(*zip(*points, strict=True), label=label, **look)
        others = [row for row in whole if row.error > 0 and not row.method.startswith(tuple(lines))]
        for look, row in zip(LINES[2:], others, strict=False):
            left.plot(*place(row), label=row.method, **(look | {"linestyle": "none", "markersize": 9}))
        left.set(xlabel="bytes per nonzero", ylabel="relative squared error", yscale="log", title=name)
        left.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2)
        heights = np.arange(len(parts))
        start = np.zeros(len(parts))
        kinds = zip(("keys", "values", "tables"), COLOURS[1:4], ("", "//", ".."), strict=True)
        for part, colour, hatch in kinds:
            width = np.array([getattr(row, part) / row.nonzeros for row in parts])
            right.barh(heights, width, left=start, label=part, color=colour, hatch=hatch, edgecolor="white")
            start += width
        right.set_yticks(heights, [row.method for row in parts])
        right.invert_yaxis()
        right.set(xlabel="bytes per nonzero", title="what each part is worth")
        right.legend(fontsize=8)
    save(figure, path)
    return path
