"""Coding of keys and levels, in jit and on the host, as multiples of one sort of as many floats.

Also what a message costs in bytes, against zlib and zstd (where `zstandard` is installed) on its raw arrays, and what
the switch of `via="ladder"` costs inside `shard_map`.
"""

import functools
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import jaxcomp as jc
from experiments.bench.timing import bench_parser, by_part, report, time_all
from experiments.lib.cli import at_least
from experiments.lib.report import new_console, show
from experiments.lib.training import find_mesh
from jaxcomp import codes
from jaxcomp.exchange.collectives import all_max, gather_tree
from jaxcomp.exchange.routes.ladder import rungs
from jaxcomp.packing import pack
from jaxcomp.payloads import Quantized, Sparse, decode_message, encode_message

__all__ = ["general_coders", "main"]


# encode(), decode(coded), and bits(coded).
Pair = tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], float]]


def main(arguments: Sequence[str]) -> int:
    p = bench_parser("bench codes", __doc__, repeats=5)
    p.add_argument("--nonzeros", type=at_least(100), default=10**6, help="entries of the message")
    p.add_argument("--gap", type=at_least(2), default=100, help="mean distance between their indices")
    o = p.parse_args(arguments)

    n, rng = o.nonzeros, np.random.default_rng(0)
    keys = (np.cumsum(rng.geometric(1 / o.gap, n)) - 1).astype(np.int32)
    values = rng.standard_normal(n).astype(np.float32)
    levels = np.minimum(np.abs(rng.standard_normal(n) * 2).astype(np.uint32), 7)
    quantized = Quantized(np.ones(1, np.float32), np.asarray(pack(jnp.asarray(levels), 3)))
    raw = keys.tobytes() + values.tobytes()
    pairs = of_keys(keys) | of_messages({"sparse": Sparse(values, keys), "levels": quantized})
    for name, (encode, decode) in general_coders(6, 3, 19).items():
        pairs[f"{name} on i32 and f32"] = functools.partial(encode, raw), decode, lambda data: 8 * len(data)

    floats, sort = jnp.asarray(values), jax.jit(jnp.sort)
    calls: dict[str, Callable[[], Any]] = {"sort": lambda: sort(floats)}
    bits: dict[str, float] = {}
    for name, (encode, decode, bits_of) in pairs.items():
        coded = encode()
        bits[name] = bits_of(coded) / n
        calls |= {f"encode {name}": encode, f"decode {name}": functools.partial(decode, coded)}
    seconds = time_all(calls, o.repeats)
    sort_ms = 1e3 * seconds["sort"]
    columns = {
        "code": "{name}",
        "bits / nonzero": lambda row: f"{bits[row['name']]:.2f}",
        "encode ms": "{encode:.1f}",
        "decode ms": "{decode:.1f}",
        "encode / sort": lambda row: f"{row['encode'] / sort_ms:.2f}",
        "decode / sort": lambda row: f"{row['decode'] / sort_ms:.2f}",
    }
    notes = (
        f"One jnp.sort of {n:,} floats: {sort_ms:.1f} ms. Keys: indices alone, geometric gaps. "
        f"Sparse: with f32 values, {8 * len(raw) / n:.0f} bits raw. Levels: {n:,} levels 0 .. 7 of a half-normal, "
        "3 bits raw."
    )
    report(o, f"{n:,} nonzeros, mean gap {o.gap}", columns, by_part(seconds, ("encode", "decode")), notes)
    switch_cost(o.repeats)
    return 0


def of_keys(keys: np.ndarray) -> dict[str, Pair]:
    """Every coder of indices, in jit."""
    device, counts = jnp.asarray(keys), jnp.full(1, keys.size, jnp.int32)
    found = {}
    for coder in codes.CODERS:
        encode = jax.jit(functools.partial(codes.encode_keys, coder=coder))
        decode = jax.jit(functools.partial(codes.decode_keys, size=keys.size, coder=coder))
        back = lambda coded, decode=decode: decode(coded[0], counts)
        found[f"jit keys, {coder}"] = functools.partial(encode, device, counts), back, lambda coded: int(coded[1])
    return found


def of_messages(payloads: dict[str, Any]) -> dict[str, Pair]:
    """Whole messages, in jit and as bytes of the host."""
    found = {}
    for name, payload in payloads.items():
        encode = functools.partial(jax.jit(encode_message), jax.tree.map(jnp.asarray, payload))
        decode = jax.jit(lambda words, like=payload: decode_message(words, like))
        back = lambda coded, decode=decode: decode(coded.words)
        found[f"jit message, {name}"] = encode, back, lambda coded: 32 * int(coded.used)
        for code in ("fixed", "elias", "best"):
            encode = functools.partial(jc.wire.encode, payload, code=code)
            found[f"host message, {name}, {code}"] = encode, jc.wire.decode, lambda message: 8 * len(message)
    return found


Coder = tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]


def general_coders(zlib_level: int, *zstd_levels: int) -> dict[str, Coder]:
    """name -> encode and decode, of zlib and, where it is installed, of zstd."""
    coders: dict[str, Coder] = {f"zlib -{zlib_level}": (lambda x: zlib.compress(x, zlib_level), zlib.decompress)}
    try:
        import zstandard
    except ImportError:
        return coders
    unpack = zstandard.ZstdDecompressor().decompress
    return coders | {f"zstd -{i}": (zstandard.ZstdCompressor(level=i).compress, unpack) for i in zstd_levels}


def switch_cost(repeats: int) -> None:
    """An all-gather alone, and as one branch of a switch, on the devices there are."""
    mesh = find_mesh(None)
    devices = mesh.size
    calls: dict[str, Callable[[], Any]] = {}
    for words in (1000, 1_000_000):
        steps = rungs(words)

        def plain(x, steps=steps):
            return gather_tree(x[0, : steps[-1]], "data")

        def switched(x, steps=steps):
            need = all_max(x[0, 0].astype(jnp.int32) + steps[-2], "data")
            rung = jnp.searchsorted(jnp.asarray(steps, jnp.int32), need).astype(jnp.int32)
            pads = lambda step: ((0, 0), (0, steps[-1] - step))
            arms = [lambda x, step=step: jnp.pad(gather_tree(x[:step], "data"), pads(step)) for step in steps]
            return jax.lax.switch(rung, arms, x[0])

        for name, run in (("gather", plain), ("switch", switched)):
            step = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=P("data"), out_specs=P()))
            lane = jnp.ones((devices, words), jnp.uint32)
            calls[f"{name} {words:,} words"] = functools.partial(step, lane)
    rows = by_part(time_all(calls, repeats), ("gather", "switch"))
    columns = {
        "lane": "{name}",
        "gather ms": "{gather:.2f}",
        "switch ms": "{switch:.2f}",
        "difference ms": lambda row: f"{row['switch'] - row['gather']:.2f}",
    }
    notes = f"{devices} device(s). The switch has about twenty arms and a pmax before it; both gather the same words."
    show(new_console(), 'via="ladder" inside shard_map, top-k messages', columns, rows, notes)
