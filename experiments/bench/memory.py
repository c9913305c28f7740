"""Bytes a parameter that a step of the exchange holds: its state between steps, and its peak, by method and by route;
and the seconds that it takes to trace and compile.

One update of a GPT's tree, compiled for four H100 and for four chips of a TPU v5e and not run. The peak is all of a
device: gradients in f32 (4 bytes), the state, which is donated, the direction (4 bytes), and temporary arrays, among
them the messages of all workers. Parameters and the optimizer's state are not in it.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from experiments.lib import targets  # first: it sets what JAX reads of the environment  # isort: skip
import jax

import jaxcomp as jc
from experiments.bench.trees import gpt_like, num_entries
from experiments.lib.cli import at_least
from experiments.lib.codecs import chosen
from experiments.lib.errors import shortened
from experiments.lib.report import Columns
from experiments.lib.run import Run, parser_of
from jaxcomp.base import Algorithm

__all__ = ["main"]

WORKERS = 4
TARGETS = {"H100": "h100", "v5e": "v5e:2x2"}


class Case(NamedTuple):
    """A method on a route; options: of `compressed_mean`."""

    make: Callable[[], Algorithm]
    via: str = "auto"
    options: tuple[tuple[str, Any], ...] = ()


def _feedback(compressor: Callable[[], Any], memory: str = "float32") -> Callable[[], Algorithm]:
    return lambda: jc.error_feedback(compressor(), memory=memory)


INT4 = lambda: jc.block_scaled("int4")
TOP_K = lambda: jc.top_k(0.001)
BUCKETS = (("bucket_bytes", 2**24),)
CASES: dict[str, Case] = {
    "f32": Case(lambda: jc.direct(jc.identity())),
    "bfloat16": Case(lambda: jc.direct(jc.cast("bfloat16"))),
    "dithering(7)": Case(lambda: jc.direct(jc.dithering(7))),
    "dithering(7), two shots": Case(lambda: jc.direct(jc.dithering(7)), "two_shot"),
    "diana(dithering(7))": Case(lambda: jc.diana(jc.dithering(7))),
    "natural": Case(lambda: jc.direct(jc.natural())),
    "eden(4)": Case(lambda: jc.direct(jc.eden(4))),
    "error_feedback(top_k)": Case(_feedback(TOP_K)),
    "error_feedback(top_k), memory bfloat16": Case(_feedback(TOP_K, "bfloat16")),
    "error_feedback(top_k), memory int8": Case(_feedback(TOP_K, "int8")),
    "error_feedback(sidco)": Case(_feedback(lambda: jc.sidco(0.001))),
    "error_feedback(int4)": Case(_feedback(INT4)),
    "error_feedback(nvfp4)": Case(_feedback(lambda: jc.block_scaled("nvfp4"))),
    "error_feedback(skcompress)": Case(_feedback(lambda: jc.skcompress(TOP_K()))),
    "error_feedback(int4), buckets of 16 MB": Case(_feedback(INT4), options=BUCKETS),
    "error_feedback(int4), two shots": Case(_feedback(INT4), "two_shot"),
    "error_feedback(int4), memory bfloat16": Case(_feedback(INT4, "bfloat16")),
    "error_feedback(int4), memory int8": Case(_feedback(INT4, "int8")),
    "loco(int4)": Case(lambda: jc.loco(INT4())),
    "loco(int4), memory int8": Case(lambda: jc.loco(INT4(), memory="int8")),
    "loco(int4), memory int8, buckets of 16 MB": Case(lambda: jc.loco(INT4(), memory="int8"), options=BUCKETS),
    "power_sgd(4)": Case(lambda: jc.power_sgd(4)),
    "power_sgd(4), memory bfloat16": Case(lambda: jc.power_sgd(4, memory="bfloat16")),
    "sparse_loco": Case(jc.sparse_loco),
    "sparse_loco, memory int8": Case(lambda: jc.sparse_loco(memory="int8")),
    "ef21(top_k), not whole at first": Case(lambda: jc.ef21(TOP_K(), whole_start=False)),
    "momentum_correction(top_k)": Case(lambda: jc.contrib.momentum_correction(TOP_K())),
    "fetch_sgd": Case(lambda: jc.fetch_sgd(0.001)),
}


def row_of(name: str, layers: int, width: int, labels: Sequence[str]) -> dict[str, Any]:
    case, like = CASES[name], gpt_like(layers, width)
    row: dict[str, Any] = {"case": name}
    for label in labels:
        mesh = targets.mesh_on(targets.described(TARGETS[label]), {"data": WORKERS})
        each = lambda n: n / num_entries(like)
        try:
            tx = jc.compressed_mean(case.make(), "data", case.via, **dict(case.options))
            step, args = targets.update_on(mesh, tx, like)
            program, state = targets.compiled(step, *args), args[1]
        except Exception as error:
            row[f"{label} error"] = shortened(error)
            continue
        held = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(state))
        row |= {"state": each(held), f"{label} peak": each(program.peak), f"{label} temporary": each(program.memory)}
        row[f"{label} seconds"] = program.seconds
        row.setdefault("sent", each(program.ledger.total_bytes))
    return row


def _shown(key: str) -> Callable[[dict[str, Any]], str]:
    return lambda row: f"{row[key]:.2f}" if key in row else "error"


def _columns(labels: Sequence[str]) -> Columns:
    each = {
        f"{label}, {what}": _shown(f"{label} {what}") for label in labels for what in ("peak", "temporary", "seconds")
    }
    return {"method": "{case}", "state": _shown("state"), "sent": _shown("sent"), **each}


def main(arguments: Sequence[str]) -> int:
    p = parser_of("bench memory", __doc__)
    p.add_argument("--only", nargs="+", default=None, metavar="WORD", help="methods whose name contains one of these")
    p.add_argument("--layers", type=at_least(1), default=4, help="of the GPT")
    p.add_argument("--width", type=at_least(64), default=1024, help="of its layers")
    p.add_argument("--target", nargs="+", choices=TARGETS, default=list(TARGETS), help="which of the two")
    run = Run(p, arguments, "bench-memory")
    o = run.options
    for label in o.target:
        targets.described(TARGETS[label])  # refused before anything is compiled
    names = chosen(CASES, o.only, "--only")
    rows = run.rows_of(names, str, lambda name: row_of(name, o.layers, o.width, o.target))
    run.keep(rows)
    like = gpt_like(o.layers, o.width)
    notes = (
        f"{num_entries(like):,} parameters in {len(jax.tree.leaves(like))} leaves, {WORKERS} workers, ratio 0.001; JAX "
        f"{jax.__version__}. sent: by a device in a step. Peak: gradients and direction (8 bytes), state, and what is "
        "temporary. Seconds: to trace and compile, on this machine."
    )
    run.table("Bytes a parameter of a device", _columns(o.target), rows, notes)
    for row in rows:
        for label in o.target:
            if f"{label} error" in row:
                run.say(f"{row['case']}, {label}: {row[f'{label} error']}")
    return run.status
