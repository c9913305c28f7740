"""Time to compress, to decompress, and to add the messages of several workers, beside passes over memory."""

from collections.abc import Sequence
from pathlib import Path

from experiments.bench.timing import machine, time_all
from experiments.lib.cli import Parser, at_least
from experiments.lib.report import new_console, show

__all__ = ["main"]

HEAD = ["compressor", "compress ms", "decompress ms", "add {} ms", "/ read pass", "/ copy pass", "lane B / f32"]


def compressors() -> list:
    import jaxcomp as jc

    return [
        jc.identity(),
        jc.cast("bfloat16"),
        jc.cast("float8_e4m3fn"),
        jc.cast("float8_e4m3fn", block_size=None),
        jc.top_k(0.001),
        jc.top_k(0.01),
        jc.rand_k(0.001),
        jc.rand_k(0.01),
        jc.bernoulli(0.001),
        jc.sidco(0.001),
        jc.sidco(0.01),
        jc.dithering(1, block_size=512),
        jc.dithering(7, block_size=512),
        jc.dithering(127, blocks=1),
        jc.dithering(7, norm="inf", blocks=1),
        jc.natural(),
        jc.compose(jc.top_k(0.001), jc.cast("bfloat16")),
        jc.compose(jc.sidco(0.001), jc.dithering(7, blocks=1)),
        jc.contract(jc.rand_k(0.001)),
    ]


def main(arguments: Sequence[str]) -> int:
    p = Parser(prog="python -m experiments bench compressors", description=__doc__)
    p.add_argument("--log2-size", type=at_least(5), default=24, help="d = 2^this entries of a Laplace vector")
    p.add_argument("--workers", type=at_least(1), default=4, help="messages that are decoded and added")
    p.add_argument("--repeats", type=at_least(1), default=9, help="rounds; the median is shown")
    p.add_argument("--markdown", type=Path, default=None, help="keep the table in this file")
    options = p.parse_args(arguments)

    import jax
    import jax.numpy as jnp

    import jaxcomp as jc
    from jaxcomp.base import accumulate

    d = 2**options.log2_size
    x = jax.random.laplace(jax.random.key(0), (d,))
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    key = jax.random.key(1)
    read = jax.jit(lambda x: jnp.sum(jnp.abs(x)))
    copy = jax.jit(lambda x: x * 2)
    calls = {"read": lambda: read(x), "copy": lambda: copy(x)}
    zeros = jnp.zeros_like(x)
    lanes = {}
    for compressor in compressors():
        name = compressor.spec.name
        state = compressor.init(key, like)
        compress = jax.jit(lambda x, key, state, c=compressor: c.compress(key, x, state))
        decompress = jax.jit(lambda payload, shared, c=compressor: c.decompress(payload, shared, like))
        add = jax.jit(lambda total, rows, shared, c=compressor: accumulate(c, total, rows, None, shared))
        payload, _ = compress(x, key, state)
        rows = jax.tree.map(lambda a: jnp.stack([a] * options.workers), payload)
        lanes[name] = jc.lane_bytes(payload)
        calls[f"compress {name}"] = lambda f=compress, s=state: f(x, key, s)
        calls[f"decompress {name}"] = lambda f=decompress, p=payload, s=state.shared: f(p, s)
        calls[f"add {name}"] = lambda f=add, p=rows, s=state.shared: f(zeros, p, s)

    console = new_console()
    with console.status("compiling") as status:
        seconds = time_all(calls, options.repeats, status.update)
    gigabytes = 4 * d / 1e9
    table = []
    for name, lane in lanes.items():
        compress, decompress = seconds[f"compress {name}"], seconds[f"decompress {name}"]
        both = compress + decompress
        table.append(
            [
                name,
                f"{1e3 * compress:.1f}",
                f"{1e3 * decompress:.1f}",
                f"{1e3 * seconds[f'add {name}']:.1f}",
                f"{both / seconds['read']:.1f}",
                f"{both / seconds['copy']:.1f}",
                f"{lane / (4 * d):.5f}",
            ]
        )
    read_speed, copy_speed = gigabytes / seconds["read"], 2 * gigabytes / seconds["copy"]
    notes = (
        f"One read pass, sum|x|: {1e3 * seconds['read']:.2f} ms ({read_speed:.0f} GB/s). "
        f"One copy pass, 2x into new memory: {1e3 * seconds['copy']:.2f} ms ({copy_speed:.0f} GB/s).\n"
        f"add {options.workers}: decode so many messages and add them to a sum. "
        "The passes are over compress + decompress. Decompressing writes d floats, so it costs about one copy at least."
    )
    head = [title.format(options.workers) for title in HEAD]
    show(console, f"d = 2^{options.log2_size}, float32; {machine()}", head, table, notes, options.markdown)
    return 0
