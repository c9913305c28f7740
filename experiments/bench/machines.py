"""What codecs cost on a machine, by its compiler: the figures of `jaxcomp/plan/machines.json` for H100s and TPUs.

Copies of 2^27 entries, and on an H100 the seconds that launches and waits take besides: of the text that XLA makes
(`experiments.lib.kernels`), at the speeds of an H200. On TPUs: cycles that libtpu estimates over those of a copy; it
has none for scatters, so decoding takes at least half a copy. `python -m experiments accelerator` measures instead.
Writes to runs/NAME: config.json, results.json, table.md and machine.json, for `jaxcomp plan --machine FILE`.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

from experiments.lib import targets  # first: it sets what JAX reads of the environment  # isort: skip
import jax
import jax.numpy as jnp

import jaxcomp as jc
from experiments.bench.text import BANDWIDTH, FLOPS, LAUNCH, TREES, WAIT, codec, on_one, step_case
from experiments.figures import Figure, code_of
from experiments.lib.cli import at_least
from experiments.lib.codecs import chosen
from experiments.lib.kernels import counted, cycles
from experiments.lib.report import Columns
from experiments.lib.run import Run, parser_of
from jaxcomp.base import Algorithm, Compressor

__all__ = ["CODECS", "main"]

CODECS: dict[str, Callable[[], Compressor]] = {
    "top_k": lambda: jc.top_k(0.01),
    "sidco": lambda: jc.sidco(0.01),
    "cast(bfloat16": lambda: jc.cast("bfloat16"),
    "cast(float8": lambda: jc.cast("float8_e4m3fn"),
    "dithering": lambda: jc.dithering(7, block_size=512),
    "sign": jc.sign,
    "eden(4": lambda: jc.eden(4),
    "narrow": lambda: jc.narrow(jc.sidco(0.001), values="bfloat16", indices="uint16"),
    **{f"block_scaled({name}": lambda name=name: jc.block_scaled(name) for name in ("int4", "int8", "mxfp8", "mxfp4")},
    "natural": jc.natural,
    "drive": jc.drive,
    "chunked": lambda: jc.chunked(jc.top_k(k=64), 4096),
    "skcompress": lambda: jc.skcompress(jc.top_k(0.01)),
    "rand_k": lambda: jc.rand_k(0.01),
    "terngrad": jc.terngrad,
    "rotate": lambda: jc.rotate(jc.block_scaled("int4")),
    "count_sketch": lambda: jc.count_sketch(0.01),
}
# Without a compressor: a step of a GPT's tree counts, as compressing.
ALGORITHMS: dict[str, Callable[[], Algorithm]] = {"power_sgd": lambda: jc.power_sgd(2), "sparse_loco": jc.sparse_loco}
TURNS = {"chunked": 2, "sparse_loco": 2}
MEMORY = {"h100": 80e9, "v5e": 16e9, "v6e": 32e9, "v5p": 95e9, "v4": 32e9}
H100 = 3.35 / 4.8  # bandwidth of its memory over that of an H200, on which a copy was measured
SCATTERS = 0.5  # copies of decoding, at least: what is written


def cost_of(mesh: Any, case: Any, turns: int, copy: float) -> tuple[float, float]:
    """Copies, and seconds besides. copy: cycles of a copy; 0 on GPUs."""
    function, args = case.make(mesh)
    text = targets.compiled(function, *args).text
    if copy:
        return cycles(text, turns) / copy, 0.0
    found, whole = counted(text, turns), 8 * case.size
    moved = sum(k.slower * (k.read + k.written) * k.times for k in found.kernels)
    return moved / whole, max(found.seconds(BANDWIDTH, FLOPS, LAUNCH, WAIT) - moved / BANDWIDTH, 0.0)


def row_of(mesh: Any, name: str, size: int, copy: float) -> dict[str, Any]:
    turns = TURNS.get(name, 0)
    if name in ALGORITHMS:
        first, other = cost_of(mesh, step_case(ALGORITHMS[name], *TREES[290]), turns, copy), (0.0, 0.0)
    else:
        parts = [codec(part, CODECS[name], size) for part in ("compress", "decompress")]
        first, other = (cost_of(mesh, case, turns, copy) for case in parts)
    least = SCATTERS if copy and name in CODECS else 0.0
    return {"codec": name, "compress": first[0], "decompress": max(other[0], least), "besides": first[1] + other[1]}


COLUMNS: Columns = {
    "codec": "{codec}",
    "compress, copies": "{compress:.3g}",
    "decompress, copies": "{decompress:.3g}",
    "besides, us": lambda row: f"{1e6 * row['besides']:.3g}",
}


def main(arguments: Sequence[str]) -> int:
    p = parser_of("bench machines", __doc__)
    p.add_argument("--target", default="h100", help="h100, v5e:2x2, v6e:2x2, v5p:2x2x1, v4:2x2x1")
    p.add_argument("--only", nargs="+", default=None, metavar="WORD", help="codecs whose name contains one of these")
    p.add_argument("--log2-size", type=at_least(10), default=27, help="of the vectors of codecs")
    run = Run(p, arguments, "bench-machines")
    o = run.options
    mesh = targets.mesh_on(targets.described(o.target)[:1], {"data": 1})
    kind, size = o.target.partition(":")[0], 2**o.log2_size
    names = chosen([*CODECS, *ALGORITHMS], o.only, "--only")
    copy, bandwidth = 0.0, BANDWIDTH * H100
    source = (
        "computed: copy as on an H200, by the ratio of 3.35 to 4.8 TB/s in the data sheets, codecs counted in the text "
    )
    source += "that XLA makes for an H100 (python -m experiments bench machines)"
    if kind != "h100":
        like = targets.shapes_on(mesh, jax.ShapeDtypeStruct((size,), jnp.float32))
        compiled: Any = on_one(mesh, lambda x: 2 * x).lower(like).compile()
        copy = float(cycles(compiled.as_text()))
        bandwidth = 8 * size / compiled.cost_analysis()["optimal_seconds"]
        source = "computed: cycles that libtpu estimates; nothing was measured"
    rows = run.rows_of(names, str, lambda name: row_of(mesh, name, size, copy))
    run.keep(rows)
    codecs = {row["codec"]: (row["compress"], row["decompress"], row["besides"]) for row in rows}
    plain = {"name": kind, "bandwidth": bandwidth, "memory": MEMORY[kind], "codecs": codecs, "source": source}
    made = {"date": time.strftime("%Y-%m-%d"), "code": code_of(Figure("", "", "bench/machines.py", 0))}
    jc.Machine.from_dict({**plain, **made}).save(run.path("machine.json"))
    run.table(f"Codecs on {kind}, by its compiler: 2^{o.log2_size} entries", COLUMNS, rows, source)
    run.say(f"machine: {run.path('machine.json')}")
    return run.status
