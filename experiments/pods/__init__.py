"""What crosses between slices of TPUs and hosts of GPUs when a GPT's workers exchange: compiled, without any of them.

The exchange of a GPT's gradients (or of the differences of local steps), by shapes alone. Of several slices or hosts
each is a worker, and its parameters are cut over its chips; of one host each GPU is a worker, and of one slice each row
of chips. Methods named "f32 inside" are hierarchies: dense among those within a host or slice, compressed between them.
For each method: bytes that a chip sends between workers and inside, from the ledger of the program that the
accelerator's compiler made, beside the planner's; seconds on links, computed; memory of a chip; seconds to compile.

`pods maxtext` compiles the training step of MaxText in its place.
"""

from collections.abc import Mapping, Sequence
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
from jaxcomp.plan.machine import platform_of

__all__ = ["METHODS", "SIZES", "Pods", "Size", "chosen", "gpt", "main", "memory_of", "planned", "pods_of", "reported"]

RATES = (10, 25, 100)  # Gbit/s of a host
F32 = jc.direct(jc.identity())
EACH: dict[str, Algorithm] = {
    "f32": F32,
    "bf16": jc.direct(jc.cast("bfloat16")),
    "int4 + error feedback": jc.error_feedback(jc.block_scaled("int4")),
    "top_k(0.01) + error feedback": jc.error_feedback(jc.top_k(0.01)),
    "sidco(0.001) + error feedback": jc.error_feedback(jc.sidco(0.001)),
    "sparse_loco": jc.sparse_loco(),
}
INSIDE = "f32 inside, "
METHODS: dict[str, Algorithm | Mapping[str, Algorithm]] = {
    **EACH,
    **{f"{INSIDE}{name}": {"data": F32, "dcn": EACH[name]} for name in ("int4 + error feedback", "sparse_loco")},
}


class Size(NamedTuple):
    """layers, width; characters: of the vocabulary; length: of a window."""

    layers: int
    width: int
    characters: int = 50_304
    length: int = 2048


SIZES = {"0.1": Size(12, 768), "1.3": Size(24, 2048), "6.7": Size(32, 4096)}  # 10^9 parameters: GPT-3's table


class Pods(NamedTuple):
    """target: a host or a slice, as for `targets.described`; number: how many, joined by a slow network."""

    target: str
    number: int

    @property
    def name(self) -> str:
        return f"{self.number} x {self.target}"

    def mesh(self, levels: bool = False) -> Mesh:
        """The workers, and "ici", over which the parameters of each are cut. Workers are along "dcn", those of a single
        host or slice along "data", those of a hierarchy, where `levels` says so, along both."""
        if self.target == "h100":
            devices, rows, columns = targets.described(f"h100:{self.number}x8"), 8, 1
        else:
            devices = targets.described(self.target, slices=self.number)
            rows, columns = (int(x) for x in self.target.partition(":")[2].split("x"))
        own = lambda device: device.id // 8 if self.target == "h100" else getattr(device, "slice_index", 0)
        placed = np.array([[x for x in devices if own(x) == i] for i in range(self.number)])
        if self.number == 1:
            return Mesh(placed.reshape(rows, columns), ("data", "ici"))
        return (
            Mesh(placed.reshape(-1, rows, columns), ("dcn", "data", "ici")) if levels else Mesh(placed, ("dcn", "ici"))
        )


def pods_of(text: str) -> Pods:
    """Reads "2xv5e:4x4" (slices), "4xh100" (hosts of eight), "h100" (one host) or "v5e:16x16" (one slice).

    Raises:
        UserError: it is none of them.

    >>> pods_of("2xv5e:4x4"), pods_of("h100")
    (Pods(target='v5e:4x4', number=2), Pods(target='h100', number=1))
    """
    number, _, target = text.partition("x") if text[:1].isdigit() else ("1", "", text)
    if not number.isdigit() or not 1 <= int(number) <= 64 or not target.startswith(("h100", "v5e:")):
        raise UserError(
            f"pods must be like 2xv5e:4x4 (slices), 4xh100 (hosts of 8), v5e:4x4 or h100, 64 at most; got {text!r}"
        )
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


def planned(algorithm: Any, like: Any, sizes: Mapping[str, int], platform: str) -> tuple[float, float]:
    """Bytes that the planner counts for the exchange of one chip's shards: over the first of these axes, and over the
    others alone."""
    slow, one = next(iter(sizes)), Candidate("one", algorithm)
    found = collectives_of(one, like, slow, sizes, joined=False, platform=platform)
    both = [[one for one in found if (slow in one.axis.split(",")) == out] for out in (True, False)]
    return sent_bytes(both[0], sizes), sent_bytes(both[1], sizes)


def tried(pods: Pods, size: Size, name: str) -> dict[str, Any]:
    """A row: a method on some pods, for a GPT of some size."""
    algorithm = METHODS[name]
    levels = isinstance(algorithm, Mapping)
    mesh, (params, cut) = pods.mesh(levels), gpt(size)
    workers = {axis: mesh.shape[axis] for axis in mesh.axis_names if axis != "ici"}
    chips, axes = mesh.shape["ici"], tuple(workers)
    about: dict[str, Any] = {"pods": pods.name, "method": name, "workers": mesh.size // chips, "chips": chips}
    rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct((mesh.size // chips, *x.shape), x.dtype), params)
    lead = jax.tree.map(lambda spec: PartitionSpec(axes, *spec), cut)
    axis = algorithm if isinstance(algorithm, Mapping) else axes[0]
    tx = jc.compressed_mean(*((None, algorithm) if levels else (algorithm, axis)), sharded=cut)
    try:
        state, state_specs = jc.init_state(tx, params, mesh.abstract_mesh, axis, cut)
        step = jax.shard_map(
            lambda grads, state: tx.update(jax.tree.map(lambda g: g[0], grads), state),
            mesh=mesh,
            in_specs=(lead, state_specs),
            out_specs=(cut, state_specs),
        )
        state = targets.shapes_on(mesh, state, state_specs)
        args = targets.shapes_on(mesh, rows, lead), state
        program = targets.compiled(targets.donating(step, mesh, (cut, state_specs), 1), *args)
    except UserError:
        raise
    except Exception as error:
        return about | {"error": shortened(error)}
    over = program.ledger.by_axes(mesh)
    between = sum(sent for names, sent in over.items() if axes[0] in names)
    held, shard = sum(num_bytes(x) for x in jax.tree.leaves(args)), shard_of(params, chips)
    made = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shard))  # the direction
    said = planned(algorithm, shard, workers, platform_of(pods.target))
    return about | {
        "dcn": between,
        "ici": sum(over.values()) - between,
        "unknown": program.ledger.unknown_bytes,
        "planned": said[0],
        "planned_ici": said[1],
        "held": held,
        "temporary": program.memory,
        "fits": held + made + program.memory <= memory_of(pods.target),
        "seconds": program.seconds,
    }


def memory_of(target: str) -> float:
    """Bytes of memory of a device.

    >>> memory_of("v5e-256")
    16000000000.0
    """
    return jc.Machine.of(next(name for name in jc.Machine.names() if target.startswith(name))).memory


def num_bytes(x: Any) -> int:
    """Bytes of an array at one device."""
    return int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize


# ------------------------------------------------------------------------------------------------
# The table


def chosen(methods: Mapping[str, Any], words: Sequence[str] | None) -> list[str]:
    """Names of methods that hold one of these words; UserError where none does."""
    names = [name for name in methods if words is None or any(word in name for word in words)]
    if not names:
        raise UserError(f"--only names no method; they are {', '.join(methods)}")
    return names


def cell(form: str, missing: str = "") -> Any:
    return lambda row: missing if "error" in row else form.format(**row)


def on_links(row: dict[str, Any]) -> str:
    """Computed seconds of a round's bytes on the network of a host, which its chips share."""
    if "error" in row or row["pods"].startswith("1 x"):
        return ""
    host = row["dcn"] * (8 if "h100" in row["pods"] else 4)
    return " / ".join(f"{8 * host / (rate * 1e9):.2g}" for rate in RATES)


def inside(row: dict[str, Any]) -> str:
    if "error" in row:
        return ""
    same = "planned_ici" not in row or row["planned_ici"] == row["ici"]
    return f"{row['ici']:,.0f}" + ("" if same else f" (planned {row['planned_ici']:,.0f})")


COLUMNS: Columns = {
    "chips": "{pods}",
    "method": "{method}",
    "bytes a chip sends between workers": cell("{dcn:,.0f}", "does not compile"),
    "times fewer": cell("{fewer:.1f}"),
    "the planner's": cell("{planned:,.0f}"),
    "inside": inside,
    f"s at {' / '.join(map(str, RATES))} Gbit/s a host, computed": on_links,
    "GB a chip holds": cell("{held_gb:.2f}"),
    "temporary": cell("{temporary_gb:.2f}"),
    "fits": lambda row: "" if "error" in row else "yes" if row["fits"] else "no",
    "s to compile": cell("{seconds:.0f}"),
}


def reported(run: Run, title: str, rows: list[dict[str, Any]], dense: str, notes: str) -> int:
    """Keeps and prints the rows, and draws their bytes beside the planner's.

    dense: the method with which the others on the same pods are compared.
    """
    sent = {row["pods"]: row["dcn"] for row in rows if row["method"] == dense and "dcn" in row}
    more = lambda row: {f"{name}_gb": row[name] / 1e9 for name in ("held", "temporary")}
    fewer = lambda row: {"fewer": sent.get(row["pods"], np.nan) / row["dcn"]}
    rows = [row | more(row) | fewer(row) if "dcn" in row else row for row in rows]
    run.keep(rows)
    run.table(title, COLUMNS, rows, notes)
    if known := [row for row in rows if "dcn" in row]:
        run.picture(drawn(known, title), "pods.png")
    for row in rows:
        if "error" in row:
            run.say(f"{row['pods']}, {row['method']}: {row['error']}")
        elif not row["fits"]:
            run.say(f"{row['pods']}, {row['method']}: more than the memory of a chip")
    return run.status


def drawn(rows: list[dict[str, Any]], title: str) -> Any:
    """A panel for each kind of pods: a bar of the compiled program's bytes for each method, and a tick of the
    planner's."""
    from experiments.lib.plots import COLOURS, new_figure

    names = list(dict.fromkeys(row["pods"] for row in rows))
    columns = min(len(names), 2)
    figure, axes = new_figure(columns, height=3.4 * -(-len(names) // columns), rows=-(-len(names) // columns))
    for axis, name in zip(axes, names, strict=False):
        own = [row for row in rows if row["pods"] == name][::-1]  # the first on top
        sent, methods = [row["dcn"] / 1e6 for row in own], [row["method"] for row in own]
        axis.barh(methods, sent, color=COLOURS[6], label="the compiled program")
        axis.plot([row["planned"] / 1e6 for row in own], methods, "|", color=COLOURS[0], ms=18, mew=2, label="planner")
        axis.bar_label(
            axis.containers[0], [f"{x:,.0f}" if x >= 100 else f"{x:.3g}" for x in sent], padding=4, fontsize=8
        )
        axis.set(title=name, xlabel="MB that a chip sends in a round", xscale="log")
        axis.set_xlim(min(sent) / 3, max(sent) * 6)
        axis.tick_params(axis="x", which="minor", labelbottom=False)
        axis.grid(axis="y", visible=False)
    for axis in axes[len(names) :]:
        axis.remove()
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=9)
    figure.suptitle(title)
    return figure


def main(arguments: Sequence[str]) -> int:
    if arguments[:1] == ["maxtext"]:
        from experiments.pods import maxtext

        return maxtext.main(arguments[1:])
    p = parser_of("pods", __doc__)
    p.add_argument("--pods", nargs="+", default=["2xv5e:4x4", "4xh100"], metavar="N", help="2xv5e:16x16, 4xh100, ...")
    p.add_argument("--size", choices=list(SIZES), nargs="+", default=["1.3"], help="parameters of the GPT, in 10^9")
    p.add_argument("--only", nargs="+", default=None, metavar="WORD", help="methods whose name contains one of these")
    run = Run(p, arguments, "pods", resumable=True)
    o = run.options
    every, names = [pods_of(text) for text in o.pods], chosen(METHODS, o.only)
    for pods in every:  # before anything is compiled
        pods.mesh()
    names_of = lambda pods: [name for name in names if pods.number > 1 or not name.startswith(INSIDE)]
    cases = [(size, pods, name) for size in o.size for pods in every for name in names_of(pods)]

    def row_of(case: tuple[str, Pods, str]) -> dict[str, Any]:
        size, pods, name = case
        row = tried(pods, SIZES[size], name)
        return row | {"pods": f"{row['pods']}, {size} G"}

    rows = run.rows_of(cases, lambda case: f"{case[0]} G on {case[1].name}, {case[2]}", row_of)
    notes = (
        "A GPT of so many parameters (1 G: 10^9), its layers stacked, in f32; the exchange of one gradient (or of the "
        "difference of local steps), compiled ahead of time for devices that are not here. Parameters are cut over the "
        "chips of a worker: of a host or slice, where there are several; of a row of chips of a single slice or in a "
        "hierarchy; an H100 there has them whole. Bytes: of the ledger, padding of TPU tiles included, as the planner "
        "counts it. Seconds are computed, not measured: those bytes on the network of a host (8 H100, or 4 chips of a "
        "TPU v5e), without latency or work. GB a chip holds: gradient and state; fits: with the "
        "direction and temporary memory."
    )
    return reported(run, f"The exchange of a GPT, compiled by JAX {jax.__version__}", rows, "f32", notes)
