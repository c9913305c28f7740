"""Time to compress, to decompress, and to add the messages of several workers, beside passes over memory."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jaxcomp as jc
from experiments.bench.timing import bench_parser, by_part, codec_calls, report, time_all
from experiments.lib.cli import at_least
from jaxcomp.base import accumulate

__all__ = ["main"]


def compressors() -> list:
    return [
        jc.identity(),
        jc.cast("bfloat16"),
        *(jc.cast("float8_e4m3fn", **block) for block in ({}, {"block_size": None})),
        *(make(ratio) for make in (jc.top_k, jc.rand_k) for ratio in (0.001, 0.01)),
        jc.bernoulli(0.001),
        *map(jc.sidco, (0.001, 0.01)),
        *(jc.dithering(levels, block_size=512) for levels in (1, 7)),
        jc.dithering(127, blocks=1),
        jc.dithering(7, norm="inf", blocks=1),
        jc.natural(),
        jc.compose(jc.top_k(0.001), jc.cast("bfloat16")),
        jc.compose(jc.sidco(0.001), jc.dithering(7, blocks=1)),
        jc.contract(jc.rand_k(0.001)),
    ]


def main(arguments: Sequence[str]) -> int:
    p = bench_parser("bench compressors", __doc__, repeats=9)
    p.add_argument("--log2-size", type=at_least(5), default=24, help="d = 2^this entries of a Laplace vector")
    what = "messages that are decoded and added; for several numbers of them, ms a message"
    p.add_argument("--workers", type=at_least(1), nargs="+", default=[4], metavar="N", help=what)
    o = p.parse_args(arguments)
    o.workers = sorted(set(o.workers))

    d, key = 2**o.log2_size, jax.random.key(1)
    x = jax.random.laplace(jax.random.key(0), (d,))
    zeros = jnp.zeros_like(x)
    read, copy = jax.jit(lambda x: jnp.sum(jnp.abs(x))), jax.jit(lambda x: x * 2)
    calls, lanes = {"read": lambda: read(x), "copy": lambda: copy(x)}, {}
    for compressor in compressors():
        name = compressor.spec.name
        codec, payload, shared = codec_calls(name, compressor, x, key)
        add = jax.jit(lambda total, rows, shared, c=compressor: accumulate(c, total, rows, None, shared))
        lanes[name] = jc.lane_bytes(payload) / (4 * d)
        calls |= codec
        for n in o.workers:
            rows = jax.tree.map(lambda a, n=n: jnp.stack([a] * n), payload)
            calls[f"add-{n} {name}"] = lambda f=add, p=rows, s=shared: f(zeros, p, s)
    seconds = time_all(calls, o.repeats)
    read_ms, copy_ms = 1e3 * seconds["read"], 1e3 * seconds["copy"]
    if len(o.workers) == 1:
        added = {f"add {n} ms": f"{{add-{n}:.1f}}" for n in o.workers}
    else:
        added = {f"ms a message, {n}": lambda row, n=n: f"{row[f'add-{n}'] / n:.3f}" for n in o.workers}
    columns: dict[str, Any] = {
        "compressor": "{name}",
        "compress ms": "{compress:.1f}",
        "decompress ms": "{decompress:.1f}",
        **added,
        "/ read pass": lambda row: f"{(row['compress'] + row['decompress']) / read_ms:.1f}",
        "/ copy pass": lambda row: f"{(row['compress'] + row['decompress']) / copy_ms:.1f}",
        "lane B / f32": lambda row: f"{lanes[row['name']]:.5f}",
    }
    notes = (
        f"One read pass, sum|x|: {read_ms:.2f} ms ({4e-6 * d / read_ms:.0f} GB/s). "
        f"One copy pass, 2x into new memory: {copy_ms:.2f} ms ({8e-6 * d / copy_ms:.0f} GB/s).\n"
        f"add: decode {' or '.join(map(str, o.workers))} messages and add them to a sum. "
        "The passes are over compress + decompress. Decompressing writes d floats, so it costs about one copy at least."
    )
    rows = by_part(seconds, ("compress", "decompress", *(f"add-{n}" for n in o.workers)))
    return report(o, f"d = 2^{o.log2_size}, float32", columns, rows, notes)
