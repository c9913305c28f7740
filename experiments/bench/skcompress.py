"""SKCompress in jit and as bytes: compress, decompress, encode and decode, against one sort of as many floats."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

import jaxcomp as jc
from experiments.bench.timing import bench_parser, by_part, codec_calls, report, time_all
from experiments.lib.cli import at_least

__all__ = ["main"]

PARTS = ("compress", "decompress", "encode", "decode")


def main(arguments: Sequence[str]) -> int:
    p = bench_parser("bench skcompress", __doc__, repeats=5)
    p.add_argument("--nonzeros", type=at_least(1000), default=1_000_000, help="entries that are not zero")
    o = p.parse_args(arguments)

    n, d, key = o.nonzeros, 10 * o.nonzeros, jax.random.key(1)
    rng, x = np.random.default_rng(0), np.zeros(d, np.float32)
    x[rng.choice(d, n, replace=False)] = rng.standard_t(3, n)
    floats, sort = jax.random.normal(key, (n,)), jax.jit(jnp.sort)
    calls, bits = {"sort": lambda: sort(floats)}, {}
    for mode in ("quantile", "recentred", "paper"):
        codec, payload, _ = codec_calls(mode, jc.skcompress(mode=mode, room=0.1), jnp.asarray(x), key)
        host = jax.device_get(payload)
        data = jc.wire.encode(host)
        bits[mode] = 8 * len(data) / n
        calls |= codec | {f"encode {mode}": lambda m=host: jc.wire.encode(m)}
        calls[f"decode {mode}"] = lambda m=data: jc.wire.decode(m)
    seconds = time_all(calls, o.repeats)
    sort_ms = 1e3 * seconds["sort"]
    columns = {
        "mode": "{name}",
        **{f"{part} ms": f"{{{part}:.0f}}" for part in PARTS},
        "compress + decompress / sort": lambda row: f"{(row['compress'] + row['decompress']) / sort_ms:.2f}",
        "encode / sort": lambda row: f"{row['encode'] / sort_ms:.2f}",
        "decode / sort": lambda row: f"{row['decode'] / sort_ms:.2f}",
    }
    notes = (
        f"One jnp.sort of {n:,} floats: {sort_ms:.0f} ms. "
        f"Bits per nonzero: {', '.join(f'{mode} {value:.2f}' for mode, value in bits.items())}.\n"
        "compress: from a vector, its nonzeros found; decompress: to a vector. encode and decode: on the host, NumPy."
    )
    return report(o, f"{n:,} nonzeros of {d:,}, float32", columns, by_part(seconds, PARTS), notes)
