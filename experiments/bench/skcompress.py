"""SKCompress in jit and as bytes: compress, decompress, encode and decode, against one sort of as many floats."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from experiments.bench.timing import machine, time_all
from experiments.lib.cli import Parser, at_least
from experiments.lib.report import new_console, show

__all__ = ["main"]

PARTS = ["compress", "decompress", "encode", "decode"]
HEAD = ["mode", *(f"{part} ms" for part in PARTS), "compress + decompress / sort", "encode / sort", "decode / sort"]


def main(arguments: Sequence[str]) -> int:
    p = Parser(prog="python -m experiments bench skcompress", description=__doc__)
    p.add_argument("--nonzeros", type=at_least(1000), default=1_000_000, help="entries that are not zero")
    p.add_argument("--spread", type=at_least(1), default=10, help="length of the vector over its nonzeros")
    p.add_argument("--repeats", type=at_least(1), default=5, help="rounds; the median is shown")
    p.add_argument("--markdown", type=Path, default=None, help="keep the table in this file")
    o = p.parse_args(arguments)

    import jax
    import jax.numpy as jnp

    import jaxcomp as jc

    n, d, key = o.nonzeros, o.nonzeros * o.spread, jax.random.key(1)
    x = np.zeros(d, np.float32)
    rng = np.random.default_rng(0)
    x[rng.choice(d, n, replace=False)] = rng.standard_t(3, n)
    x, like = jnp.asarray(x), jax.ShapeDtypeStruct((d,), jnp.float32)
    floats, sort = jax.random.normal(key, (n,)), jax.jit(jnp.sort)
    calls = {"sort": lambda: sort(floats)}
    bits = {}
    for mode in ("quantile", "recentred", "paper"):
        compressor = jc.skcompress(mode=mode, room=1 / o.spread)
        state = compressor.init(key, like)
        compress = jax.jit(lambda x, state, c=compressor: c.compress(key, x, state))
        decompress = jax.jit(lambda payload, shared, c=compressor: c.decompress(payload, shared, like))
        payload, _ = compress(x, state)
        host = jax.device_get(payload)
        data = jc.wire.encode(host)
        bits[mode] = 8 * len(data) / n
        calls[f"compress {mode}"] = lambda f=compress, s=state: f(x, s)
        calls[f"decompress {mode}"] = lambda f=decompress, m=payload, s=state.shared: f(m, s)
        calls[f"encode {mode}"] = lambda m=host: jc.wire.encode(m)
        calls[f"decode {mode}"] = lambda m=data: jc.wire.decode(m)

    console = new_console()
    with console.status("compiling") as status:
        seconds = time_all(calls, o.repeats, status.update)
    table = []
    for mode in bits:
        times = [seconds[f"{part} {mode}"] for part in PARTS]
        ratios = [sum(times[:2]) / seconds["sort"], *(time / seconds["sort"] for time in times[2:])]
        table.append([mode, *(f"{1e3 * time:.0f}" for time in times), *(f"{ratio:.2f}" for ratio in ratios)])
    notes = (
        f"One jnp.sort of {n:,} floats: {1e3 * seconds['sort']:.0f} ms. "
        f"Bits per nonzero: {', '.join(f'{mode} {value:.2f}' for mode, value in bits.items())}.\n"
        "compress: from a vector, its nonzeros found; decompress: to a vector. encode and decode: on the host, NumPy."
    )
    show(console, f"{n:,} nonzeros of {d:,}, float32; {machine()}", HEAD, table, notes, o.markdown)
    return 0
