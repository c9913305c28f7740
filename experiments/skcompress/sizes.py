"""Bytes per nonzero, error and speed of each message, and what each part of SKCompress is worth.

Gradients are recorded from training with Adam and compressed by every method. Bytes are those of the message between
hosts without its frame.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxcomp as jc
from experiments.bench.codes import general_coders
from experiments.lib.cli import UserError, at_least, common
from experiments.lib.run import Run, parser_of
from experiments.lib.step import dense
from experiments.skcompress.problems import LOSSES, add_data, linear, read, synthetic
from jaxcomp import codes
from jaxcomp.payloads import Sketch, sketch_bits
from jaxcomp.wire.bitstream import unpack_words
from jaxcomp.wire.frame import FRAME_BYTES

__all__ = ["Measured", "main", "measure_raw"]

SPEED = ("compress", "decompress", "encode", "decode")


class Measured(NamedTuple):
    """One method on one gradient: bytes of keys, values and tables, number of nonzeros, |x - C(x)|^2 / |x|^2,
    |C(x)| / |x|, and seconds of SPEED: the first two in jit, the others on the host (0: not done)."""

    method: str
    keys: float
    values: float
    tables: float
    nonzeros: int
    error: float
    length: float
    seconds: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)

    @property
    def bytes(self) -> float:
        return self.keys + self.values + self.tables


def methods() -> dict[str, Any]:
    """name -> compressor of a vector with many zeros."""
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

    def batch_of(step: int) -> Any:
        return problem.data, np.random.default_rng([seed, 6, step]).integers(0, problem.examples, batch)

    wanted = set(np.linspace(1, steps, number).round().astype(int))
    taken = dense(jnp.asarray(problem.params), problem.gradient, rate, map(batch_of, range(1, steps + 1)))
    return [flat for step, (_, flat) in enumerate(taken, 1) if step in wanted]


# ------------------------------------------------------------------------------------------------
# Messages


def timed(call: Callable[..., Any], *arguments: Any, repeats: int = 3) -> tuple[Any, float]:
    """The result, and the least seconds of some calls after a first one."""
    result, seconds = jax.block_until_ready(call(*arguments)), []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call(*arguments))
        seconds.append(time.perf_counter() - start)
    return result, min(seconds)


def meter(name: str, compressor: Any, d: int) -> Callable[[np.ndarray], list[Measured]]:
    """Measures a method on gradients f32[d]; compiled once."""
    key = jax.random.key(0)
    like = jax.ShapeDtypeStruct((d,), jnp.float32)
    state = compressor.init(key, like)
    compress = jax.jit(lambda x, state: compressor.compress(key, x, state)[0])
    decompress = jax.jit(lambda payload, shared: compressor.decompress(payload, shared, like))
    split = jax.jit(sketch_bits)

    def measure(x: np.ndarray) -> list[Measured]:
        payload, compressing = timed(compress, jnp.asarray(x), state)
        x_hat, decompressing = timed(decompress, payload, state.shared)
        data, encoding = timed(lambda host: jc.wire.encode(host, code="best"), jax.device_get(payload))
        _, decoding = timed(jc.wire.decode, data)
        total = len(data) - FRAME_BYTES
        if isinstance(payload, Sketch):
            keys, values = (int(bits) / 8 for bits in split(payload)[:2])
        else:
            values = int(jc.code_bits(payload.values, code="best")) / 8
            keys = total - values
        # Tables come with all headers, and with the bits that fill the last byte of each part.
        parts = (keys, values, total - keys - values)
        return [measured(name, x, np.asarray(x_hat), parts, (compressing, decompressing, encoding, decoding))]

    return measure


def measured(name: str, x: np.ndarray, x_hat: np.ndarray, parts: tuple[float, float, float], *seconds: Any) -> Measured:
    """parts: bytes of keys, values and tables."""
    wide, near = np.float64(x), np.float64(x_hat)
    size = np.sum(wide**2)
    error, length = np.sum((wide - near) ** 2) / size, np.sqrt(np.sum(near**2) / size)
    return Measured(name, *parts, int(np.count_nonzero(x)), float(error), float(length), *seconds)


def measure_raw(x: np.ndarray) -> list[Measured]:
    """Keys as i32 and values as f32, plain and behind general compressors."""
    keys = np.flatnonzero(x).astype("<i4")
    raw, n = keys.tobytes() + x[keys].astype("<f4").tobytes(), keys.size
    rows = [measured("f32 keys + values", x, x, (4.0 * n, 4.0 * n, 0.0))]
    for name, (pack, unpack) in general_coders(9, 19).items():
        packed, encoding = timed(pack, raw, repeats=1)
        restored, decoding = timed(unpack, packed, repeats=1)
        if restored != raw:
            raise RuntimeError(f"{name} did not restore what it packed")
        halves = [len(pack(half)) for half in (raw[: 4 * n], raw[4 * n :])]
        share = len(packed) * halves[0] / sum(halves)
        rows.append(measured(name, x, x, (share, len(packed) - share, 0.0), (0.0, 0.0, encoding, decoding)))
    return rows


def parts_meter() -> Callable[[np.ndarray], list[Measured]]:
    """The steps from plain Adam to SKCompress, first with the key coders and cells of the papers, then with ours."""

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


def together(rows: Sequence[Measured]) -> Measured:
    """Sums of bytes and nonzeros over gradients, medians of the others."""
    names, *sizes, errors, lengths, seconds = zip(*rows, strict=True)
    keys, values, tables, nonzeros = map(sum, sizes)
    totals = tuple(sum(each) for each in zip(*seconds, strict=True))
    middle = float(np.median(errors)), float(np.median(lengths))
    return Measured(names[0], keys, values, tables, nonzeros, *middle, totals)


# ------------------------------------------------------------------------------------------------

NOTES = """\
B/nonzero: bytes of the message over nonzero entries of the gradient, in parts. values: what tells the bucket of each
key, with its Huffman table; tables: what the buckets stand for, and all headers. error: |x - C(x)|^2 / |x|^2.
length: |C(x)| / |x|.
equal depth: quantile with power=0, the control with as many values in each bucket.
Speed: million nonzeros per second, compress and decompress in jit, encode and decode on the host."""
COLUMNS = {
    "method": "{method}",
    "B/nonzero": lambda row: f"{row.bytes / row.nonzeros:.3f}",
    **{x: lambda row, x=x: f"{getattr(row, x) / row.nonzeros:.3f}" for x in ("keys", "values", "tables")},
    "error": "{error:.4f}",
    "length": "{length:.3f}",
}


def rate(i: int) -> Callable[[Measured], str]:
    return lambda row: f"{row.nonzeros / row.seconds[i] / 1e6:.2f}" if row.seconds[i] else "-"


def main(arguments: Sequence[str]) -> int:
    p = parser_of("skcompress sizes", __doc__)
    add_data(p)
    p.add_argument("--losses", nargs="+", choices=LOSSES, default=["logistic"], help="linear models to record from")
    p.add_argument("--gradients", type=at_least(1), default=3, help="recorded, evenly spaced")
    common(p, "seed", batch=(1600, "examples for each gradient"), steps=60, lr=(0.01, "learning rate of Adam"))
    run = Run(p, arguments, "skcompress-sizes")
    o = run.options
    if o.gradients > o.steps:
        raise UserError(f"--gradients must be at most --steps; got {o.gradients} of {o.steps}")

    rows = synthetic(seed=o.seed) if o.data is None else read(o.data)
    problems = {kind: linear(rows, kind) for kind in o.losses}
    recorded = {kind: record(x, o.batch, o.steps, o.gradients, o.lr, o.seed) for kind, x in problems.items()}
    meters = {"general compressors": measure_raw}
    meters |= {name: meter(name, compressor, rows.d) for name, compressor in methods().items()}
    meters["parts"] = parts_meter()
    cases = [(kind, name) for kind in o.losses for name in meters]

    def measure(case: tuple[str, str]) -> list[Measured]:
        kind, name = case
        found = [meters[name](x) for x in recorded[kind]]
        return [together(some) for some in zip(*found, strict=True)]

    found = dict(zip(cases, run.rows_of(cases, ": ".join, measure), strict=True))
    panels: dict[str, dict[str, Any]] = {}
    for kind, problem in problems.items():
        whole = [row for name in meters if name != "parts" for row in found[kind, name]]
        chain = found[kind, "parts"]
        run.add(*({"problem": problem.name, **row._asdict()} for row in whole + chain))
        each = whole[0].nonzeros // o.gradients
        title = f"{problem.name}: {each:,} nonzeros of {rows.d:,}, {o.gradients} gradients of batches of {o.batch}"
        run.table(title, COLUMNS | {x: rate(i) for i, x in enumerate(SPEED)}, whole, NOTES, f"sizes-{kind}.md")
        run.table("What each part is worth, as released and with ours", COLUMNS, chain, "", f"parts-{kind}.md")
        panels[problem.name] = {}
        for family in dict.fromkeys(row.method.partition(", ")[0] for row in whole if row.error):
            lossy = [row for row in whole if row.error and row.method.partition(", ")[0] == family]
            panels[problem.name][family] = ([x.bytes / x.nonzeros for x in lossy], [x.error for x in lossy])
    labels = {"xlabel": "bytes per nonzero", "ylabel": "relative squared error"}
    run.plot("sizes.png", panels, "Lossy messages; a line goes over numbers of buckets", yscale="log", **labels)
    return 0
