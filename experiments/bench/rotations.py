"""Rotations, and what is built on them, as multiples of a copy of the vector."""

from collections.abc import Sequence

import jax

import jaxcomp as jc
from experiments.bench.timing import bench_parser, codec_calls, report, time_all
from experiments.lib.cli import at_least
from jaxcomp.compressors.hadamard import rotation_of

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    p = bench_parser("bench rotations", __doc__, repeats=9)
    p.add_argument("--log2-size", type=at_least(5), default=24, help="d = 2^this entries of a Laplace vector")
    o = p.parse_args(arguments)

    d, key = 2**o.log2_size, jax.random.key(1)
    x = jax.random.laplace(jax.random.key(0), (d,))
    copy = jax.jit(lambda x: x * 2)
    calls = {"copy": lambda: copy(x)}
    for log in (7, 12):
        rotation = rotation_of(d, 2**log)
        for what, function in {"rotate": rotation.forward, "rotate back": rotation.backward}.items():
            jitted = jax.jit(function)
            calls[f"{what}, blocks of 2^{log}"] = lambda f=jitted: f(x, key)
    formats = [jc.block_scaled(name) for name in ("mxfp8", "mxfp4", "nvfp4", "int8", "int4")]
    for compressor in (jc.drive(), jc.eden(2), jc.eden(4), jc.rotate(jc.block_scaled("int4")), *formats):
        calls |= codec_calls(compressor.spec.name, compressor, x, key)[0]
    seconds = time_all(calls, o.repeats)
    rows = [{"name": name, "ms": 1e3 * s, "copies": s / seconds["copy"]} for name, s in seconds.items()]
    columns = {"what": "{name}", "ms": "{ms:.1f}", "/ copy pass": "{copies:.2f}"}
    return report(o, f"d = 2^{o.log2_size}, float32", columns, rows)
