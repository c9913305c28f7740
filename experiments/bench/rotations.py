"""Rotations, and what is built on them, as multiples of a copy of the vector."""

from collections.abc import Sequence
from pathlib import Path

from experiments.bench.timing import machine, time_all
from experiments.lib.cli import Parser, at_least
from experiments.lib.report import new_console, show

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    p = Parser(prog="python -m experiments bench rotations", description=__doc__)
    p.add_argument("--log2-size", type=at_least(5), default=24, help="d = 2^this entries of a Laplace vector")
    p.add_argument("--log2-blocks", type=at_least(1), nargs="*", default=[7, 12], help="blocks of 2^this entries")
    p.add_argument("--repeats", type=at_least(1), default=9, help="rounds; the median of the ratios is shown")
    p.add_argument("--markdown", type=Path, default=None, help="keep the table in this file")
    options = p.parse_args(arguments)

    import jax

    import jaxcomp as jc
    from jaxcomp.compressors.hadamard import rotation_of

    d = 2**options.log2_size
    key = jax.random.key(1)
    x = jax.random.laplace(jax.random.key(0), (d,))
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    copy = jax.jit(lambda x: x * 2)
    calls = {"copy": lambda: copy(x)}
    for log in options.log2_blocks:
        rotation = rotation_of(d, 2**log)
        forward, backward = jax.jit(rotation.forward), jax.jit(rotation.backward)
        calls[f"rotate, blocks of 2^{log}"] = lambda f=forward: f(x, key)
        calls[f"rotate back, blocks of 2^{log}"] = lambda f=backward: f(x, key)
    formats = [jc.block_scaled(name) for name in ("mxfp8", "mxfp4", "nvfp4", "int8", "int4")]
    for compressor in (jc.drive(), jc.eden(2), jc.eden(4), jc.rotate(jc.block_scaled("int4")), *formats):
        state = compressor.init(key, like)
        compress = jax.jit(lambda x, state, c=compressor: c.compress(key, x, state)[0])
        decompress = jax.jit(lambda payload, shared, c=compressor: c.decompress(payload, shared, like))
        payload = compress(x, state)
        calls[f"compress {compressor.spec.name}"] = lambda f=compress, s=state: f(x, s)
        calls[f"decompress {compressor.spec.name}"] = lambda f=decompress, a=payload, s=state.shared: f(a, s)
    console = new_console()
    with console.status("compiling") as status:
        seconds = time_all(calls, options.repeats, status.update)
    rows = [[name, f"{1e3 * time:.1f}", f"{time / seconds['copy']:.2f}"] for name, time in seconds.items()]
    title = f"d = 2^{options.log2_size}, float32; {machine()}"
    show(console, title, ["what", "ms", "/ copy pass"], rows, "", options.markdown)
    return 0
