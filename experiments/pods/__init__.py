"""What crosses between slices of TPUs and hosts of GPUs when a GPT's workers exchange: compiled, without any of them.

The exchange of a GPT's gradients (or of the differences of local steps), by shapes alone: each slice or host is a
worker, and its parameters are cut over its chips. For each method: bytes that a chip sends over the network between
workers ("dcn") and inside ("ici"), from the ledger of the program that the accelerator's compiler made, beside the
planner's figure; seconds on links; memory of a chip; seconds to compile.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from experiments.lib import targets  # first: it sets what JAX reads of the environment  # isort: skip
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

import jaxcomp as jc
from experiments.lib.cli import UserError
from experiments.lib.errors import shortened
from experiments.lib.report import Columns
from experiments.lib.run import Run, parser_of
from jaxcomp.base import Algorithm
from jaxcomp.plan.candidates import Candidate, collectives_of, sent_bytes

__all__ = ["METHODS", "SIZES", "Pods", "Size", "gpt", "main", "pods_of", "tried"]

RATES = (10, 25, 100)  # Gbit/s of a host
METHODS: dict[str, Algorithm] = {
    "f32": jc.direct(jc.identity()),
    "bf16": jc.direct(jc.cast("bfloat16")),
    "int4 + error feedback": jc.error_feedback(jc.block_scaled("int4")),
    "top_k(0.01) + error feedback": jc.error_feedback(jc.top_k(0.01)),
    "sidco(0.001) + error feedback": jc.error_feedback(jc.sidco(0.001)),
    "sparse_loco": jc.sparse_loco(),
}


class Size(NamedTuple):
    """layers, width; characters: of the vocabulary; length: of a window."""

    layers: int
    width: int
    characters: int = 50_304
    length: int = 2048


SIZES = {"0.1": Size(12, 768), "1.3": Size(24, 2048), "6.7": Size(32, 4096)}  # 10^9 parameters: GPT-3's table
DEVICE_BYTES = {"h100": 80e9, "v5e": 16e9}
HOST_CHIPS = {"h100": 8, "v5e": 4}


class Pods(NamedTuple):
    """Workers joined by a slow network. target: of one worker, as for `targets.described`; workers: how many."""

    target: str
    workers: int

    @property
    def name(self) -> str:
        return f"{self.workers} x {self.target}"

    @property
    def kind(self) -> str:
        return self.target.partition(":")[0]

    def mesh(self) -> Mesh:
        if self.kind == "h100":
            devices = targets.described(f"h100:{self.workers}x8")
        else:
            devices = targets.described(self.target, slices=self.workers)
        rows = [[device for device in devices if slice_of(device, i, self)] for i in range(self.workers)]
        return Mesh(np.array(rows), ("dcn", "ici"))


def slice_of(device: Any, number: int, pods: Pods) -> bool:
    """Whether a device is of a worker."""
    own = device.id // 8 if pods.kind == "h100" else device.slice_index
    return own == number


def pods_of(text: str) -> Pods:
    """Reads "2xv5e:4x4" (slices), "4xh100" (hosts of eight).

    Raises:
        UserError: it is neither.

    >>> pods_of("2xv5e:4x4")
    Pods(target='v5e:4x4', workers=2)
    """
    number, _, target = text.partition("x")
    if not number.isdigit() or not 2 <= int(number) <= 64 or not target.startswith(("h100", "v5e:")):
        raise UserError(f"pods must be like 2xv5e:4x4 (slices) or 4xh100 (hosts of 8), 2 to 64 of them; got {text!r}")
    if target.startswith("h100") and target != "h100":
        raise UserError(f"a host has 8 H100: say {number}xh100; got {text!r}")
    return Pods(target, int(number))


def gpt(size: Size) -> tuple[Any, Any]:
    """Shapes of the parameters of a GPT with its layers stacked, and how they are cut over "ici"."""
    w, layers = size.width, size.layers
    shapes = {
        "embed": (size.characters, w),
        "position": (size.length, w),
        "qkv": (layers, w, 3 * w),
        "out": (layers, w, w),
        "up": (layers, w, 4 * w),
        "down": (layers, 4 * w, w),
        "scales": (layers, 4, w),
        "last_scale": (2, w),
    }
    cut = {name: PartitionSpec(*(None,) * (len(shape) - 1), "ici") for name, shape in shapes.items()}
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}, cut


def shard_of(like: Any, chips: int) -> Any:
    """Shapes of what one chip holds."""
    cut = lambda x: jax.ShapeDtypeStruct((*x.shape[:-1], x.shape[-1] // chips), x.dtype)
    return jax.tree.map(cut, like)


def planned(algorithm: Algorithm, like: Any, mesh: Mesh) -> float:
    """Bytes over "dcn" that the planner counts for the exchange of one chip's shards, without the padding of tiles."""
    sizes = {"dcn": mesh.shape["dcn"]}
    return sent_bytes(collectives_of(Candidate("one", algorithm), like, "dcn", sizes, joined=False), sizes)


def tried(pods: Pods, size: Size, name: str) -> dict[str, Any]:
    """A row: a method on some pods."""
    mesh, (params, cut) = pods.mesh(), gpt(size)
    about: dict[str, Any] = {"pods": pods.name, "method": name, "chips": mesh.size}
    rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct((pods.workers, *x.shape), x.dtype), params)
    lead = jax.tree.map(lambda spec: PartitionSpec("dcn", *spec), cut)
    algorithm = METHODS[name]
    tx = jc.compressed_mean(algorithm, "dcn", sharded=cut)
    try:
        state, state_specs = jc.init_state(tx, params, mesh.abstract_mesh, "dcn", cut)
        step = jax.shard_map(
            lambda grads, state: tx.update(jax.tree.map(lambda g: g[0], grads), state),
            mesh=mesh,
            in_specs=(lead, state_specs),
            out_specs=(cut, state_specs),
        )
        state = targets.shapes_on(mesh, state, state_specs)
        args = targets.shapes_on(mesh, rows, lead), state
        program = targets.compiled(jax.jit(step, donate_argnums=1), *args)
    except UserError:
        raise
    except Exception as error:
        return about | {"error": shortened(error)}
    axes = program.ledger.by_axes(mesh)
    over = lambda axis: sum(sent for names, sent in axes.items() if axis in names)
    held = sum(num_bytes(x) for x in jax.tree.leaves(args))
    return about | {
        "dcn": over("dcn"),
        "ici": axes.get(("ici",), 0.0),
        "unknown": program.ledger.unknown_bytes,
        "planned": planned(algorithm, shard_of(params, mesh.shape["ici"]), mesh),
        "held": held,
        "temporary": program.memory,
        "fits": held + program.memory <= DEVICE_BYTES[pods.kind],
        "seconds": program.seconds,
    }


def num_bytes(x: Any) -> int:
    """Bytes of an array at one device."""
    return int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize


def with_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with how many times fewer bytes they send than f32 on the same pods."""
    dense = {row["pods"]: row["dcn"] for row in rows if row["method"] == "f32" and "dcn" in row}
    return [row | {"fewer": dense.get(row["pods"], np.nan) / row["dcn"]} if "dcn" in row else row for row in rows]


def cell(form: str, missing: str = "") -> Any:
    return lambda row: missing if "error" in row else form.format(**row)


def on_links(row: dict[str, Any]) -> str:
    """Seconds of a round's bytes on the network of a host, which its chips share."""
    if "error" in row:
        return ""
    host = row["dcn"] * HOST_CHIPS["h100" if "h100" in row["pods"] else "v5e"]
    return " / ".join(f"{8 * host / (rate * 1e9):.2g}" for rate in RATES)


COLUMNS: Columns = {
    "workers": "{pods}",
    "method": "{method}",
    "bytes a chip sends between workers": cell("{dcn:,.0f}", "does not compile"),
    "times fewer": cell("{fewer:.1f}"),
    "the planner's": cell("{planned:,.0f}"),
    "inside": cell("{ici:,.0f}"),
    f"s at {' / '.join(map(str, RATES))} Gbit/s a host": on_links,
    "GB a chip holds": cell("{held_gb:.2f}"),
    "temporary": cell("{temporary_gb:.2f}"),
    "s to compile": cell("{seconds:.0f}"),
}


def main(arguments: Sequence[str]) -> int:
    p = parser_of("pods", __doc__)
    p.add_argument("--pods", nargs="+", default=["2xv5e:4x4", "4xh100"], metavar="N", help="2xv5e:16x16, 4xh100, ...")
    p.add_argument("--size", choices=list(SIZES), default="1.3", help="parameters of the GPT, in 10^9")
    p.add_argument("--only", nargs="+", default=None, metavar="WORD", help="methods whose name contains one of these")
    run = Run(p, arguments, "pods")
    o = run.options
    every, size = [pods_of(text) for text in o.pods], SIZES[o.size]
    names = [name for name in METHODS if o.only is None or any(word in name for word in o.only)]
    if not names:
        raise UserError(f"--only names no method; they are {', '.join(METHODS)}")
    for pods in every:  # before anything is compiled
        pods.mesh()
    cases = [(pods, name) for pods in every for name in names]
    rows = run.rows_of(cases, lambda case: f"{case[0].name}, {case[1]}", lambda case: tried(case[0], size, case[1]))
    rows = with_ratios(rows)
    rows = [row | {f"{k}_gb": row[k] / 1e9 for k in ("held", "temporary")} if "dcn" in row else row for row in rows]
    run.keep(rows)
    notes = (
        f"A GPT of {o.size} G parameters, its layers stacked, in f32, cut over the chips of each worker; the exchange "
        "of one gradient (or of the difference of local steps), compiled ahead of time for devices that are not here. "
        "Bytes: of the ledger, padding of TPU tiles included; the planner's are without. Seconds: those bytes on the "
        "network of a host (8 H100, or 4 chips of a TPU v5e), without latency or work. GB a chip holds: gradient and "
        "state."
    )
    run.table(f"Pods, compiled by JAX {jax.__version__}", COLUMNS, rows, notes)
    known = [row for row in rows if "dcn" in row]
    panels = {}
    for pods in every:
        own = [row for row in known if row["pods"] == pods.name]
        panels[pods.name] = {
            "the compiled program": ([row["method"] for row in own], [row["dcn"] for row in own]),
            "the planner": ([row["method"] for row in own], [row["planned"] for row in own]),
        }
    if known:
        run.plot(
            "pods.png", panels, f"GPT of {o.size} G parameters", ylabel="bytes a chip sends in a round", yscale="log"
        )
    for row in rows:
        if "error" in row:
            run.say(f"{row['pods']}, {row['method']}: {row['error']}")
        elif not row["fits"]:
            run.say(f"{row['pods']}, {row['method']}: more than the memory of a chip")
    return run.status
