"""What codecs and steps move on an H100, counted in the text that its compiler makes: copies, kernels, waits, memory.

A copy reads and writes the vector (or the tree) once. "counted" are the bytes of all kernels over those of a copy.
"estimated" adds what a launch, a wait of the host and a narrow row cost, and is in copies, too; beside it stands what
was measured on an H200, where it was. Nothing runs: codecs of 2^27 entries compile in seconds.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from experiments.lib import targets  # first: it sets what JAX reads of the environment  # isort: skip
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import jaxcomp as jc
from experiments.bench.trees import gpt_like, num_entries
from experiments.lib.cli import at_least
from experiments.lib.codecs import chosen
from experiments.lib.errors import shortened
from experiments.lib.kernels import Counted, counted
from experiments.lib.report import Columns
from experiments.lib.run import Run, parser_of
from jaxcomp.base import Algorithm, Compressor, State, for_worker

__all__ = ["MEASURED", "cases", "codec", "main", "on_one", "row_of", "step_case"]

# Of an H200: bytes a second of a copy; seconds of a kernel that does next to nothing, and of a wait of the host (both
# fitted to top_k, 256 kernels and one wait, and to sidco, 54 and four); products in f32 without tensor cores.
BANDWIDTH, LAUNCH, WAIT, FLOPS = 4.07e12, 4.1e-6, 7e-6, 40e12
RATIO = 0.001
# Copies measured on an H200, 2^27 entries, in November 2026, of older code (docs/results/accelerators.md).
MEASURED = {
    "compress sidco": 1.8,
    "compress top_k": 4.9,
    "compress dithering(7)": 1.25,
    "compress int8": 1.5,
    "compress int4": 1.5,
    "compress mxfp8": 2.2,
    "compress nvfp4": 2.2,
    "compress natural": 1.3,
    "compress eden(4)": 9.9,
    "compress eden(1)": 7.9,
    "compress drive": 8.0,
    "compress chunked": 32.0,
    "compress dct": 30.0,
    "compress skcompress": 9.3,
    "compress skcompress, recentred": 7.7,
    "compress count_sketch": 5.3,
    "decompress sidco": 0.8,
    "decompress top_k": 0.8,
    "decompress dithering(7)": 0.7,
    "decompress int8": 0.7,
    "decompress int4": 0.7,
    "decompress nvfp4": 1.5,
    "decompress natural": 1.4,
    "decompress eden(4)": 5.7,
    "decompress count_sketch": 4.5,
    "step 74 leaves, error_feedback(sidco)": 12.9,
    "step 74 leaves, error_feedback(top_k)": 13.0,
    "step 74 leaves, error_feedback(int4)": 11.7,
    "step 74 leaves, direct(dithering)": 2.8,
    # Less what direct(identity) takes, 3.0 ms: to hand over 290 leaves and more.
    "step 290 leaves, error_feedback(sidco)": 11.6,
    "step 290 leaves, error_feedback(top_k)": 10.8,
    "step 290 leaves, error_feedback(int4)": 6.6,
    "step 290 leaves, direct(dithering)": 12.3,
    "step 290 leaves, sparse_loco": 36.5,
}

CODECS: dict[str, Callable[[], Compressor]] = {
    "sidco": lambda: jc.sidco(RATIO),
    "top_k": lambda: jc.top_k(RATIO),
    "chunked": lambda: jc.chunked(jc.top_k(k=64), 4096),
    "dct": lambda: jc.dct(jc.chunked(jc.top_k(k=64), 4096)),
    "skcompress": lambda: jc.skcompress(jc.top_k(RATIO)),
    "skcompress, recentred": lambda: jc.skcompress(jc.top_k(RATIO), mode="recentred"),
    "dithering(7)": lambda: jc.dithering(7),
    "natural": jc.natural,
    **{name: lambda name=name: jc.block_scaled(name) for name in ("int8", "int4", "mxfp8", "mxfp4", "nvfp4")},
    "eden(4)": lambda: jc.eden(4),
    "eden(1)": lambda: jc.eden(1),
    "drive": jc.drive,
    "count_sketch": lambda: jc.count_sketch(RATIO),
}
# Turns of loops whose number is not in the text, on Laplace or normal entries (none where nothing is said).
TURNS = {"chunked": 2, "dct": 2, "sparse_loco": 2}
STEPS: dict[str, Callable[[], Algorithm]] = {
    "error_feedback(sidco)": lambda: jc.error_feedback(jc.sidco(RATIO)),
    "error_feedback(top_k)": lambda: jc.error_feedback(jc.top_k(RATIO)),
    "error_feedback(int4)": lambda: jc.error_feedback(jc.block_scaled("int4")),
    "direct(dithering)": lambda: jc.direct(jc.dithering(7)),
    "sparse_loco": jc.sparse_loco,
}
TREES = {290: (24, 1024), 74: (6, 4096)}  # leaves: layers and width of a GPT
WORKERS = {16: 22, 256: 18}  # simulated by vmap: log2 of their entries


class Case(NamedTuple):
    """make(mesh): a function and shapes of its arguments; size: entries of what a copy is of."""

    make: Callable[[Any], tuple[Any, tuple[Any, ...]]]
    size: int


def on_one(mesh: Any, function: Callable[..., Any]) -> Any:
    """Of one device, as a program for it."""
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))


def codec(part: str, make: Callable[[], Compressor], size: int, workers: int = 0) -> Case:
    """part: "compress" or "decompress"; workers: simulated by vmap, with so many entries each."""
    like = jax.ShapeDtypeStruct((size,), jnp.float32)

    def build(mesh: Any) -> tuple[Any, tuple[Any, ...]]:
        compressor = make()
        key = jax.eval_shape(lambda: jax.random.key(0))
        state = jax.eval_shape(lambda key: compressor.init(key, like), key)

        def compress(key, x, state):
            mine = State(state.local, for_worker(compressor, state.shared, 0))
            return compressor.compress(key, x, mine)[0]

        if part == "decompress":
            payload = jax.eval_shape(compress, key, like, state)
            function = lambda payload, shared: compressor.decompress(payload, for_worker(compressor, shared, 0), like)
            return on_one(mesh, function), targets.shapes_on(mesh, (payload, state.shared))
        if not workers:
            return on_one(mesh, compress), targets.shapes_on(mesh, (key, like, state))
        keys = jax.eval_shape(lambda key: jax.random.split(key, workers), key)
        each = jax.vmap(compress, in_axes=(0, 0, None))
        rows = jax.ShapeDtypeStruct((workers, size), jnp.float32)
        return on_one(mesh, each), targets.shapes_on(mesh, (keys, rows, state))

    return Case(build, size * max(workers, 1))


def step_case(make: Callable[[], Algorithm], layers: int, width: int) -> Case:
    like = gpt_like(layers, width)

    def build(mesh: Any) -> tuple[Any, tuple[Any, ...]]:
        return targets.update_on(mesh, jc.compressed_mean(make(), "data"), like)

    return Case(build, num_entries(like))


def cases(log2_size: int) -> dict[str, Case]:
    both = ("compress", "decompress")
    parts = {f"{part} {name}": codec(part, make, 2**log2_size) for part in both for name, make in CODECS.items()}
    workers = {
        f"{count} workers by vmap, {name}": codec("compress", CODECS[name], 2**log2, count)
        for count, log2 in WORKERS.items()
        for name in ("sidco", "top_k", "dithering(7)")
    }
    steps = {
        f"step {leaves} leaves, {name}": step_case(make, *tree)
        for leaves, tree in TREES.items()
        for name, make in STEPS.items()
    }
    return parts | workers | steps


def row_of(name: str, case: Case, device: Any, turns: int) -> dict[str, Any]:
    """What the text of a case says."""
    mesh = targets.mesh_on([device], {"data": 1})
    about: dict[str, Any] = {"case": name}
    try:
        function, args = case.make(mesh)
        program = targets.compiled(function, *args)
    except Exception as error:
        return about | {"error": shortened(error)}
    found, copy = counted(program.text, turns), 8 * case.size
    return about | {
        "copies": found.bytes / copy,
        "estimate": seconds_of(found) / (copy / BANDWIDTH),
        "measured": MEASURED.get(name) if case.size >= 2**27 else None,
        "kernels": found.launches,
        "waits": found.waits,
        "memory": program.memory / 4 / case.size,
        "lines": program.lines,
        "seconds": program.seconds,
        "largest": [(k.name, k.times, k.read, k.written) for k in _largest(found)],
    }


def seconds_of(found: Counted) -> float:
    return found.seconds(BANDWIDTH, FLOPS, LAUNCH, WAIT)


def _largest(found: Counted, count: int = 12) -> list[Any]:
    return sorted(found.kernels, key=lambda k: -(k.read + k.written) * k.times)[:count]


COLUMNS: Columns = {
    "case": "{case}",
    "counted, copies": lambda row: _shown(row, "copies", ".2f"),
    "estimated, copies": lambda row: _shown(row, "estimate", ".2f"),
    "measured (older code)": lambda row: _shown(row, "measured", ".2f"),
    "estimated / measured": lambda row: f"{row['estimate'] / row['measured']:.2f}" if row.get("measured") else "",
    "kernels": lambda row: _shown(row, "kernels", ","),
    "waits": lambda row: _shown(row, "waits", ""),
    "temporary memory": lambda row: _shown(row, "memory", ".2f"),
    "lines": lambda row: _shown(row, "lines", ","),
    "s": lambda row: _shown(row, "seconds", ".1f"),
}


def _shown(row: dict[str, Any], key: str, form: str) -> str:
    """A figure of a row; nothing of a row that has none, as of a case that did not compile."""
    return "" if row.get(key) is None else f"{row[key]:{form}}"


def main(arguments: Sequence[str]) -> int:
    p = parser_of("bench text", __doc__)
    p.add_argument("--only", nargs="+", default=None, metavar="WORD", help="cases whose name contains one of these")
    p.add_argument("--log2-size", type=at_least(10), default=27, help="of the vectors of codecs")
    p.add_argument("--turns", type=at_least(0), default=None, help="of loops whose number of turns is not in the text")
    p.add_argument("--kernels", action="store_true", help="also list what the largest kernels of each case move")
    run = Run(p, arguments, "bench-text")
    o = run.options
    device, every = targets.described("h100")[0], cases(o.log2_size)
    names = chosen(every, o.only, "--only")
    turns = lambda name: next((n for word, n in TURNS.items() if word in name), 0) if o.turns is None else o.turns
    rows = run.rows_of(names, str, lambda name: row_of(name, every[name], device, turns(name)))
    run.keep(rows)
    notes = (
        f"Codecs: 2^{o.log2_size} entries; 16 workers have 2^{WORKERS[16]} each, 256 have 2^{WORKERS[256]}. Of a step "
        "the tree has 310.7 M entries in 290 leaves, or 1,241.8 M in 74. "
        f"Estimated: {BANDWIDTH / 1e12:.2f} TB/s, {1e6 * LAUNCH:.1f} us for each kernel, {1e6 * WAIT:.0f} for each "
        "wait. "
        "Temporary memory in vectors, or gradients. Lines of StableHLO. s: to trace and compile, on this machine."
    )
    run.table(f"In the text compiled by JAX {jax.__version__} for one H100", COLUMNS, rows, notes)
    for row in rows:
        if "error" in row:
            run.say(f"{row['case']}: {row['error']}")
        elif o.kernels:
            run.say(f"\n{row['case']}:")
            for name, times, read, written in row["largest"]:
                run.say(f"  {times:>4} x  read {read / 2**20:>9,.1f} MiB, written {written / 2**20:>9,.1f}  {name}")
    return run.status
