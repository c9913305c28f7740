"""Bytes per nonzero, error and speed of each message, and what each part of SKCompress is worth.

Gradients are recorded from training with Adam and compressed by every method. Bytes are those of the message between
hosts without its frame; encode and decode make and read them on the host, compress and decompress run in jit.
"""

import functools
import timeit
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxcomp as jc
from experiments.bench.codes import general_coders
from experiments.lib.cli import at_least, common
from experiments.lib.data import add_rows
from experiments.lib.run import Run, parser_of
from experiments.lib.step import dense
from experiments.skcompress.problems import linear, read, synthetic
from jaxcomp import codes
from jaxcomp.payloads import Sketch, sketch_bits
from jaxcomp.wire.bitstream import unpack_words
from jaxcomp.wire.frame import FRAME_BYTES

__all__ = ["Measured", "main", "measure_raw"]

GRADIENTS, REPEATS = 3, 3  # gradients recorded; calls timed after a first one
SPEEDS = ("compress", "decompress", "encode", "decode")
UNTIMED = (0.0,) * len(SPEEDS)


class Measured(NamedTuple):
    """One method on one gradient: bytes of keys, values and tables, number of nonzeros, |x - C(x)|^2 / |x|^2,
    seconds of SPEEDS (0: not done)."""

    method: str
    keys: float
    values: float
    tables: float
    nonzeros: int
    error: float
    seconds: tuple[float, ...]

    @property
    def bytes(self) -> float:
        return self.keys + self.values + self.tables


def measured(
    name: str, x: np.ndarray, x_hat: np.ndarray, keys: float, values: float, tables: float, seconds: Any = UNTIMED
) -> Measured:
    wide = np.float64(x)
    error = np.sum((wide - x_hat) ** 2) / np.sum(wide**2)
    return Measured(name, keys, values, tables, int(np.count_nonzero(x)), float(error), seconds)


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


def record(problem: Any, batch: int, steps: int, seed: int) -> list[np.ndarray]:
    """GRADIENTS f32[d] of batches, evenly spaced over so many steps of Adam."""
    numbers = range(1, steps + 1)
    chosen = (np.random.default_rng([seed, 6, step]).integers(0, problem.examples, batch) for step in numbers)
    taken = dense(jnp.asarray(problem.params), problem.gradient, 0.01, ((problem.data, rows) for rows in chosen))
    wanted = set(np.linspace(1, steps, GRADIENTS).round().astype(int))
    return [flat for step, (_, flat) in zip(numbers, taken, strict=True) if step in wanted]


# ------------------------------------------------------------------------------------------------
# Messages


def timed(call: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
    """The result, and the least seconds of REPEATS calls after a first one."""
    run = lambda: jax.block_until_ready(call(*arguments))
    return run(), min(timeit.repeat(run, number=1, repeat=REPEATS))


compress = jax.jit(lambda compressor, x, state: compressor.compress(jax.random.key(0), x, state)[0], static_argnums=0)
decompress = jax.jit(lambda compressor, *what: compressor.decompress(*what), static_argnums=(0, 3))


def measure_method(name: str, compressor: Any, x: np.ndarray) -> list[Measured]:
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    state = compressor.init(jax.random.key(0), like)
    sent, compressing = timed(compress, compressor, jnp.asarray(x), state)
    x_hat, decompressing = timed(decompress, compressor, sent, state.shared, like)
    payload = jax.device_get(sent)
    data, encoding = timed(lambda: jc.wire.encode(payload, code="best"))
    _, decoding = timed(jc.wire.decode, data)
    total = len(data) - FRAME_BYTES
    if isinstance(payload, Sketch):
        keys, values = (int(bits) / 8 for bits in sketch_bits(payload)[:2])
    else:  # of a short vector values are sent as they are
        plain = isinstance(payload.values, np.ndarray)
        bits = 32 * np.count_nonzero(payload.values) if plain else jc.code_bits(payload.values, code="best")
        values = int(bits) / 8
        keys = total - values
    # Tables come with all headers, and with the bits that fill the last byte of each part.
    seconds = (compressing, decompressing, encoding, decoding)
    return [measured(name, x, np.asarray(x_hat), keys, values, total - keys - values, seconds)]


def measure_raw(x: np.ndarray) -> list[Measured]:
    """Keys as i32 and values as f32, plain and behind general compressors."""
    keys = np.flatnonzero(x).astype("<i4")
    halves = [keys.tobytes(), x[keys].astype("<f4").tobytes()]
    rows = [measured("f32 keys + values", x, x, 4 * keys.size, 4 * keys.size, 0)]
    raw = b"".join(halves)
    for name, (pack, unpack) in general_coders(9, 19).items():
        packed, encoding = timed(pack, raw)
        restored, decoding = timed(unpack, packed)
        if restored != raw:
            raise RuntimeError(f"{name} did not restore what it packed")
        total, (of_keys, of_values) = len(packed), (len(pack(half)) for half in halves)
        share = total * of_keys / (of_keys + of_values)
        rows.append(measured(name, x, x, share, total - share, 0, (0.0, 0.0, encoding, decoding)))
    return rows


# The steps from plain Adam to SKCompress, first with the key coders and cells of the papers, then with ours: the mode
# (None: without loss), the coder of the keys ("": 32 bits each), and whether cells are Huffman-coded.
CHAIN: dict[str, tuple[str | None, str, bool]] = {
    "Adam": (None, "", False),
    "+ keys, SketchML's": (None, "sketchml", False),
    "+ MinMaxSketch, midpoints": ("paper", "sketchml", False),
    "+ adaptive keys, Huffman: as released": ("paper", "released", True),
    "Adam + keys, ours": (None, "best", False),
    "+ quantile, 256 means": ("quantile", "best", False),
    "+ MinMaxSketch, recentred": ("recentred", "best", False),
    "+ Huffman": ("recentred", "best", True),
}


encode = jax.jit(codes.encode_keys, static_argnames="coder")
decode = jax.jit(codes.decode_keys, static_argnames=("size", "coder"))


def key_seconds(coder: str, keys: Any, counts: Any) -> tuple[float, ...]:
    """As in SPEEDS, of the lists of keys alone, coded in jit."""
    (coded, *_), encoding = timed(lambda: encode(keys, counts, coder=coder))
    _, decoding = timed(lambda: decode(coded, counts, size=keys.size, coder=coder))
    return 0.0, 0.0, encoding, decoding


@functools.partial(jax.jit, static_argnums=0)
def sketched(mode: str, x: Any) -> Any:
    """C(x) and the payload of a step of CHAIN."""
    return jc.roundtrip(jc.skcompress(mode=mode, buckets=256, power=0, room=1.0), x, key=jax.random.key(0))


def measure_chain(x: np.ndarray) -> list[Measured]:
    """The steps of CHAIN."""
    rows, present = [], np.flatnonzero(x).astype(np.int32)
    for name, (mode, coder, huffman) in CHAIN.items():
        x_hat, keys, counts, values, tables = x, present, np.array([present.size], np.int32), 32 * present.size, 0
        if mode is not None:
            x_hat, payload = jax.device_get(sketched(mode, x))
        if mode is not None and isinstance(payload, Sketch):  # else values as they are, of a short vector
            keys, counts, (_, values, tables) = payload.keys, payload.counts, map(int, sketch_bits(payload))
            if not huffman:  # cells take whole bytes with SketchML's key coder
                used = np.max(np.flatnonzero(unpack_words(payload.cells)), initial=-1) + 1
                values = used * (8 if coder == "sketchml" else payload.cells.shape[0])
        lists = int(codes.key_bits(keys, counts, coder=coder)) if coder else 32 * keys.size
        seconds = key_seconds(coder, keys, counts) if coder else UNTIMED
        rows.append(measured(name, x, x_hat, lists / 8, values / 8, tables / 8, seconds))
    return rows


def together(rows: Sequence[Measured]) -> Measured:
    """Sums of bytes, nonzeros and seconds over gradients, the median of their errors."""
    names, *sizes, errors, seconds = zip(*rows, strict=True)
    keys, values, tables, nonzeros = map(sum, sizes)
    total = tuple(map(sum, zip(*seconds, strict=True)))
    return Measured(names[0], keys, values, tables, nonzeros, float(np.median(errors)), total)


# ------------------------------------------------------------------------------------------------

NOTES = """\
B/nonzero: bytes of the message over nonzero entries of the gradient, in parts. values: what tells the bucket of each
key, with its Huffman table, or 4 bytes each of a vector too short for buckets; tables: what the buckets stand for, and
all headers. error: |x - C(x)|^2 / |x|^2.
equal depth: quantile with power=0, the control with as many values in each bucket.
Speeds: million nonzeros of the gradient per second; compress and decompress in jit, encode and decode on the host."""
COLUMNS: dict[str, Any] = {
    "method": "{method}",
    "B/nonzero": lambda row: f"{row.bytes / row.nonzeros:.3f}",
    **{x: lambda row, x=x: f"{getattr(row, x) / row.nonzeros:.3f}" for x in ("keys", "values", "tables")},
    "error": "{error:.4f}",
}
PARTS = """\
SketchML is "+ MinMaxSketch, midpoints". Keys encoded, decoded: million nonzeros per second, the lists of keys alone, by
their coder in jit, without the cells."""


def speed(place: int) -> Callable[[Measured], str]:
    return lambda row: f"{row.nonzeros / row.seconds[place] / 1e6:.2f}" if row.seconds[place] else "-"


def main(arguments: Sequence[str]) -> int:
    p = parser_of("skcompress sizes", __doc__)
    add_rows(p, "a synthetic set")
    steps = {"type": at_least(GRADIENTS), "default": 60, "help": f"of Adam; {GRADIENTS} gradients are recorded"}
    common(p, "seed", batch=(1600, "examples for each gradient"), steps=steps)
    run = Run(p, arguments, "skcompress-sizes")
    o = run.options
    problem = linear(synthetic(seed=o.seed) if o.data is None else read(o.data), "logistic")
    recorded = record(problem, o.batch, o.steps, o.seed)
    meters = {name: functools.partial(measure_method, name, compressor) for name, compressor in methods().items()}
    meters = {"general compressors": measure_raw, **meters, "parts": measure_chain}

    def measure(name: str) -> list[Measured]:
        return [together(rows) for rows in zip(*map(meters[name], recorded), strict=True)]

    found = dict(zip(meters, run.rows_of(list(meters), str, measure), strict=False))
    chain = found.pop("parts", [])
    whole = [row for rows in found.values() for row in rows]
    run.add(*(row._asdict() for row in whole + chain))
    each = f"{whole[0].nonzeros // GRADIENTS:,} nonzeros of {problem.params.size:,}"
    title = f"{problem.name}: {each}, {GRADIENTS} gradients of batches of {o.batch}"
    run.table(title, COLUMNS | {name: speed(place) for place, name in enumerate(SPEEDS)}, whole, NOTES)
    parts = COLUMNS | {"keys encoded": speed(2), "keys decoded": speed(3)}
    if chain:  # not interrupted
        run.table("What each part is worth, as released and with ours", parts, chain, PARTS, "parts.md")
    families: dict[str, list[Measured]] = {}
    for row in whole:
        if row.error:
            families.setdefault(row.method.partition(", ")[0], []).append(row)
    curves = {name: ([x.bytes / x.nonzeros for x in rows], [x.error for x in rows]) for name, rows in families.items()}
    labels = {"xlabel": "bytes per nonzero", "ylabel": "relative squared error"}
    about = "Lossy messages; a line goes over numbers of buckets"
    run.plot("sizes.png", {problem.name: curves}, about, yscale="log", **labels)
    return run.status
