"""Coding of keys and levels, in jit and on the host, as multiples of one sort of as many floats.

Also what a message costs in bytes, against zlib and zstd (where `zstandard` is installed) on its raw arrays, and what
the switch of `via="ladder"` costs inside `shard_map`.
"""

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxcomp as jc
from experiments.bench.timing import bench_parser, report, time_all
from experiments.lib.cli import at_least
from experiments.lib.report import new_console, show
from jaxcomp import codes
from jaxcomp.exchange.collectives import all_max
from jaxcomp.exchange.lanes import all_gather
from jaxcomp.exchange.routes.ladder import rungs
from jaxcomp.packing import pack
from jaxcomp.payloads import Quantized, Sparse, decode_message, encode_message

__all__ = ["general_coders", "main"]


class Pair(NamedTuple):
    """encode() -> coded;  decode(coded);  bits(coded)."""

    name: str
    encode: Callable[[], Any]
    decode: Callable[[Any], Any]
    bits: Callable[[Any], float]


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

    pairs = [*of_keys(keys), *of_messages({"sparse": Sparse(values, keys), "levels": quantized})]
    raw = keys.tobytes() + values.tobytes()
    for name, (encode, decode) in general_coders(6, 3, 19).items():
        pairs.append(Pair(f"{name} on i32 and f32", lambda f=encode: f(raw), decode, lambda data: 8 * len(data)))
    floats, sort = jnp.asarray(values), jax.jit(jnp.sort)
    calls, bits = {"sort": lambda: sort(floats)}, {}
    for pair in pairs:
        coded = pair.encode()
        bits[pair.name] = pair.bits(coded) / n
        calls[f"encode {pair.name}"] = pair.encode
        calls[f"decode {pair.name}"] = lambda f=pair.decode, coded=coded: f(coded)
    ms = {name: 1e3 * s for name, s in time_all(calls, o.repeats).items()}
    rows = [{"name": x, "bits": bits[x], "encode": ms[f"encode {x}"], "decode": ms[f"decode {x}"]} for x in bits]
    columns = {
        "code": "{name}",
        "bits / nonzero": "{bits:.2f}",
        "encode ms": "{encode:.1f}",
        "decode ms": "{decode:.1f}",
        "encode / sort": lambda row: f"{row['encode'] / ms['sort']:.2f}",
        "decode / sort": lambda row: f"{row['decode'] / ms['sort']:.2f}",
    }
    notes = (
        f"One jnp.sort of {n:,} floats: {ms['sort']:.1f} ms. Keys: indices alone, geometric gaps. "
        f"Sparse: with f32 values, {8 * len(raw) / n:.0f} bits raw. Levels: {n:,} levels 0 .. 7 of a half-normal, "
        "3 bits raw."
    )
    report(o, f"{n:,} nonzeros, mean gap {o.gap}", columns, rows, notes)
    switch_cost(o.repeats)
    return 0


def of_keys(keys: np.ndarray) -> Iterator[Pair]:
    """Every coder of indices, in jit."""
    n = keys.size
    device, counts = jnp.asarray(keys), jnp.full(1, n, jnp.int32)
    for coder in codes.CODERS:
        encode = jax.jit(lambda k, c, coder=coder: codes.encode_keys(k, c, coder=coder))
        decode = jax.jit(lambda w, c, coder=coder: codes.decode_keys(w, c, n, coder=coder))
        yield Pair(
            f"jit keys, {coder}",
            lambda f=encode: f(device, counts),
            lambda coded, f=decode: f(coded[0], counts),
            lambda coded: int(coded[1]),
        )


def of_messages(payloads: dict[str, Any]) -> Iterator[Pair]:
    """Whole messages, in jit and as bytes of the host."""
    for name, payload in payloads.items():
        device = jax.tree.map(jnp.asarray, payload)
        encode = jax.jit(encode_message)
        decode = jax.jit(lambda words, like=payload: decode_message(words, like))
        yield Pair(
            f"jit message, {name}",
            lambda f=encode, x=device: f(x),
            lambda coded, f=decode: f(coded.words),
            lambda coded: 32 * int(coded.used),
        )
        for code in ("fixed", "elias", "best"):
            encode = lambda x=payload, code=code: jc.wire.encode(x, code=code)
            yield Pair(f"host message, {name}, {code}", encode, jc.wire.decode, lambda message: 8 * len(message))


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
            step = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=P("data"), out_specs=P()))
            calls[f"{name} {words}"] = lambda f=step, x=lane: f(x)
    ms = {name: 1e3 * s for name, s in time_all(calls, repeats).items()}
    rows = [{"words": w, "gather": ms[f"gather {w}"], "switch": ms[f"switch {w}"]} for w in (1000, 1_000_000)]
    columns = {
        "lane": "{words:,} words",
        "gather ms": "{gather:.2f}",
        "switch ms": "{switch:.2f}",
        "difference ms": lambda row: f"{row['switch'] - row['gather']:.2f}",
    }
    notes = f"{devices} device(s). The switch has about twenty arms and a pmax before it; both gather the same words."
    show(new_console(), 'via="ladder" inside shard_map, top-k messages', columns, rows, notes)
