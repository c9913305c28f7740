"""Coding of keys and levels, in jit and on the host, as multiples of one sort of as many floats.

Also what a message costs in bytes, against zlib and zstd (where `zstandard` is installed) on its raw arrays, and what
the switch of `via="ladder"` costs inside `shard_map`.
"""

import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from experiments.bench.timing import machine, time_all
from experiments.lib.cli import Parser, at_least
from experiments.lib.report import new_console, show

__all__ = ["main"]

HEAD = ["code", "bits / nonzero", "encode ms", "decode ms", "encode / sort", "decode / sort"]
RAW = "i32 and f32"


def main(arguments: Sequence[str]) -> int:
    p = Parser(prog="python -m experiments bench codes", description=(__doc__ or "").split("\n\n")[0])
    p.add_argument("--nonzeros", type=at_least(100), default=10**6, help="entries of the message")
    p.add_argument("--gap", type=at_least(2), default=100, help="mean distance between their indices")
    p.add_argument("--repeats", type=at_least(1), default=5, help="rounds; the median is shown")
    p.add_argument("--markdown", type=Path, default=None, help="keep the table in this file")
    options = p.parse_args(arguments)

    import jax
    import jax.numpy as jnp
    import numpy as np

    import jaxcomp as jc
    from jaxcomp import codes
    from jaxcomp.packing import pack
    from jaxcomp.payloads import Quantized, Sparse, decode_message, encode_message

    n = options.nonzeros
    rng = np.random.default_rng(0)
    keys = (np.cumsum(rng.geometric(1 / options.gap, n)) - 1).astype(np.int32)
    values = rng.standard_normal(n).astype(np.float32)
    counts = np.array([n], np.int32)
    payload = Sparse(values, keys)
    levels = np.minimum(np.abs(rng.standard_normal(n) * 2).astype(np.uint32), 7)
    quantized = Quantized(np.ones(1, np.float32), np.asarray(pack(jnp.asarray(levels), 3)))

    calls: dict[str, Callable[[], Any]] = {}
    sizes: dict[str, float] = {}

    def pair(name: str, encode: Callable[[], Any], decode: Callable[[Any], Any], bits: Callable[[Any], float]) -> None:
        coded = encode()
        sizes[name] = bits(coded)
        calls[f"encode {name}"] = encode
        calls[f"decode {name}"] = lambda: decode(coded)

    floats = jnp.asarray(values)
    sort = jax.jit(jnp.sort)
    calls["sort"] = lambda: sort(floats)
    device_keys, device_counts = jnp.asarray(keys), jnp.asarray(counts)
    for coder in codes.CODERS:
        encode = jax.jit(lambda k, c, coder=coder: codes.encode_keys(k, c, coder=coder))
        decode = jax.jit(lambda w, c, coder=coder: codes.decode_keys(w, c, n, coder=coder))
        pair(
            f"jit keys, {coder}",
            lambda f=encode: f(device_keys, device_counts),
            lambda coded, f=decode: f(coded[0], device_counts),
            lambda coded: int(coded[1]),
        )
    for name, one in {"sparse": payload, "levels": quantized}.items():
        device = jax.tree.map(jnp.asarray, one)
        encode = jax.jit(encode_message)
        decode = jax.jit(lambda words, like=one: decode_message(words, like))
        pair(
            f"jit message, {name}",
            lambda f=encode, x=device: f(x),
            lambda coded, f=decode: f(coded.words),
            lambda coded: 32 * int(coded.used),
        )
        for code in ("fixed", "elias", "best"):
            pair(
                f"host message, {name}, {code}",
                lambda x=one, code=code: jc.wire.encode(x, code=code),
                jc.wire.decode,
                lambda message: 8 * len(message),
            )
    raw = keys.tobytes() + values.tobytes()
    packers: dict[str, tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]] = {
        "zlib -6": (zlib.compress, zlib.decompress)
    }
    try:
        import zstandard
    except ImportError:
        zstandard = None
    if zstandard is not None:
        unpack = zstandard.ZstdDecompressor().decompress
        for level in (3, 19):
            packers[f"zstd -{level}"] = (zstandard.ZstdCompressor(level=level).compress, unpack)
    for name, (encode, decode) in packers.items():
        pair(f"{name} on {RAW}", lambda f=encode: f(raw), decode, lambda data: 8 * len(data))

    console = new_console()
    with console.status("compiling") as status:
        seconds = time_all(calls, options.repeats, status.update)
    table = []
    for name, bits in sizes.items():
        encode, decode = seconds[f"encode {name}"], seconds[f"decode {name}"]
        table.append(
            [
                name,
                f"{bits / n:.2f}",
                f"{1e3 * encode:.1f}",
                f"{1e3 * decode:.1f}",
                f"{encode / seconds['sort']:.2f}",
                f"{decode / seconds['sort']:.2f}",
            ]
        )
    notes = (
        f"One jnp.sort of {n:,} floats: {1e3 * seconds['sort']:.1f} ms. Keys: indices alone, geometric gaps. "
        f"Sparse: with f32 values, {8 * len(raw) / n:.0f} bits raw. Levels: {n:,} levels 0 .. 7 of a half-normal, "
        "3 bits raw."
    )
    show(console, f"{n:,} nonzeros, mean gap {options.gap}; {machine()}", HEAD, table, notes, options.markdown)
    show(console, 'via="ladder" inside shard_map, top-k messages', *switch_cost(options.repeats))
    return 0


def switch_cost(repeats: int) -> tuple[list[str], list[list[str]], str]:
    """An all-gather alone, and as one branch of a switch, on the devices there are."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import AxisType, PartitionSpec

    from jaxcomp.exchange.collectives import all_max
    from jaxcomp.exchange.lanes import all_gather
    from jaxcomp.exchange.routes.ladder import rungs

    devices = len(jax.devices())
    mesh = jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,))
    calls: dict[str, Callable[[], Any]] = {}
    for words in (1000, 1_000_000):
        steps = rungs(words)
        lane = jnp.ones((devices, words), jnp.uint32)

        def plain(x, steps=steps):
            return all_gather(x[0, : steps[-1]], "data")

        def switched(x, steps=steps):
            need = all_max(x[0, 0].astype(jnp.int32) + (steps[-2] if len(steps) > 1 else 0), "data")
            rung = jnp.searchsorted(jnp.asarray(steps, jnp.int32), need).astype(jnp.int32)
            pads = lambda step: ((0, 0), (0, steps[-1] - step))
            arms = [lambda x, step=step: jnp.pad(all_gather(x[:step], "data"), pads(step)) for step in steps]
            return jax.lax.switch(rung, arms, x[0])

        for name, run in (("gather", plain), ("switch", switched)):
            step = jax.shard_map(run, mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec())
            step = jax.jit(step)
            calls[f"{name} {words}"] = lambda f=step, x=lane: f(x)
    seconds = time_all(calls, repeats)
    rows = [
        [f"{words:,} words", f"{1e3 * gather:.2f}", f"{1e3 * switch:.2f}", f"{1e3 * (switch - gather):.2f}"]
        for words in (1000, 1_000_000)
        for gather, switch in [(seconds[f"gather {words}"], seconds[f"switch {words}"])]
    ]
    notes = f"{devices} device(s). The switch has about twenty arms and a pmax before it; both gather the same words."
    return ["lane", "gather ms", "switch ms", "difference ms"], rows, notes
