"""Sharded models: each device compresses its own shard, and only payloads cross the slow axis.

Trains a small transformer on characters over a mesh (data, other) of virtual or real devices, with parameters
sharded over the other axis as FSDP or as tensor parallelism does, or whole at each worker. Writes to runs/NAME:
config.json, metrics.jsonl (a line for each logged step), results.json, collectives.md (what crosses which axis,
read from the compiled program), table.md, sharded.png.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import optax

from experiments.lib.cli import at_least, common
from experiments.lib.methods import METHODS
from experiments.lib.plots import running_mean
from experiments.lib.run import Run, parser_of
from experiments.lib.text import add_options, text_of
from experiments.lib.training import find_devices
from experiments.lib.transformer import DATA, LAYOUTS, Sizes
from experiments.sharded.step import Program, check_sizes, crossings, mesh_for

__all__ = ["main"]

WINDOW = 10  # logged steps that a loss is averaged over
CROSSING_COLUMNS = {
    "layout": "{layout}",
    "method": "{method}",
    "over": lambda row: " x ".join(row["axes"]),
    "collective": "{op}",
    "dtype": "{dtype}",
    "operands": "{number}",
    "largest B": "{largest_bytes:,}",
    "sent B": "{sent_bytes:,.0f}",
}
CROSSING_NOTES = """\
Read from the compiled program. over: mesh axes along which the devices of a group differ. operands: arrays that take
part. largest B: bytes that a device contributes to the largest of them. sent B: per device and step (ring model)."""
COLUMNS = {
    "layout": "{layout}",
    "method": "{method}",
    "final loss": "{loss:.4f}",
    "test loss": "{test_loss:.4f}",
    "lane B": "{lane_bytes:,.0f}",
    "over data B": "{data_bytes:,.0f}",
    "vs f32": "{vs}",
    "payload": lambda row: (
        "all" if row["data_bytes"] == row["payload_sent_bytes"] else f"{row['payload_sent_bytes']:,.0f}"
    ),
    "over other B": "{other_bytes:,.0f}",
    "ms/step": lambda row: f"{1e3 * row['seconds']:.1f}",
}
NOTES = """\
Per device and step. lane B: bytes of the payload of its own shard. over data B: what it sends over the slow axis, read
from the compiled program, without the 4-byte loss. payload: what of this is compressed gradient by the library's own
count; the rest would be a gather of something else. over other B: gathered parameters and scattered gradients (fsdp),
sums of activations (tensor). final loss: training loss, mean of the last 10 logged steps. ms/step: median; all devices
share this machine."""


def main(arguments: Sequence[str]) -> int:
    p = parser_of("sharded", __doc__)
    p.add_argument("--layout", nargs="+", choices=LAYOUTS, default=["fsdp", "tensor"], help="where parameters lie")
    p.add_argument("--mesh", nargs=2, type=at_least(1), default=[2, 2], metavar=("DATA", "OTHER"), help="its shape")
    methods = ["dense-f32", "dense-bf16", "top-k", "sidco", "dithering"]
    p.add_argument("--methods", nargs="+", choices=METHODS, default=methods, metavar="METHOD", help="exchanges")
    add_options(p, batch=32, width=64, layers=2, lr=3e-3)
    common(p, "steps", log_every=5)
    run = Run(p, arguments, "sharded")
    o, shape = run.options, tuple(run.options.mesh)

    find_devices(shape[0] * shape[1])
    text = text_of(o.text)
    sizes = Sizes(text.characters, o.length, o.width, o.heads, o.layers)
    check_sizes(sizes, o.batch, shape)
    run.say(f"{text.name}: {len(text.codes):,} characters; mesh {shape}; writing to {run.folder}")
    logged: list[dict[str, Any]] = []
    crossed: list[dict[str, Any]] = []

    def measure(case: tuple[str, str]) -> dict[str, Any]:
        row, some, crossing = train(run, *case, text, sizes)
        logged.extend(some)
        crossed.extend(crossing)
        return row

    cases = list(itertools.product(dict.fromkeys(o.layout), dict.fromkeys(o.methods)))
    rows = run.rows_of(cases, ", ".join, measure, partial=True)
    run.keep(rows)
    run.table("What crosses which axis", CROSSING_COLUMNS, crossed, CROSSING_NOTES, "collectives.md")
    dense = {row["layout"]: row["data_bytes"] for row in rows if row["method"] == "dense-f32"}
    for row in rows:
        known = row["layout"] in dense and row["data_bytes"]
        row["vs"] = f"{dense[row['layout']] / row['data_bytes']:.1f} x" if known else "-"
    title = f"{run.folder.name}: {rows[0]['parameters']:,} parameters, mesh {shape[0]} x {shape[1]}"
    run.table(title, COLUMNS, rows, NOTES)
    panels: dict[str, dict[str, Any]] = {}
    for layout, method in cases[: len(rows)]:
        mine = [line for line in logged if (line["layout"], line["method"]) == (layout, method)]
        losses = running_mean(np.array([line["loss"] for line in mine]), WINDOW)
        panels.setdefault(layout, {})[method] = ([line["step"] for line in mine], losses)
    title = f"transformer on characters, mesh {shape[0]} x {shape[1]}, Adam {o.lr:g}, ratio {o.ratio:g}"
    run.plot("sharded.png", panels, title, xlabel="step", ylabel=f"training loss (mean of {WINDOW} logged steps)")
    return 0


def train(run: Run, layout: str, method: str, text: Any, sizes: Sizes) -> tuple[dict[str, Any], list, list]:
    """One method with one layout: its row, its logged lines, and what crosses which axis."""
    o, mesh = run.options, mesh_for(layout, tuple(run.options.mesh))
    about = {"layout": layout, "method": method}
    program = Program(layout, mesh, METHODS[method].make(o.ratio, o.levels), sizes, o.batch, optax.adam(o.lr))
    logged, seconds, params, state = [], [], None, None
    for number, (loss, took, params, state) in enumerate(program.run(text, o.seed, o.steps), 1):  # noqa: B007
        seconds.append(took)
        if number % o.log_every == 0 or number in (1, o.steps):
            logged.append({**about, "step": number, "loss": loss, "seconds": took})
            run.add(logged[-1])
    size = program.payload_bytes(state)
    crossing = [{**about, **c._asdict()} for c in crossings(program.ledger, mesh)]
    row = {
        **about,
        "loss": float(np.mean([line["loss"] for line in logged[-WINDOW:]])),
        "test_loss": program.test(params, text),
        "lane_bytes": size["lane_bytes"],
        "payload_sent_bytes": size["sent_bytes"],
        "data_bytes": program.over_data(),
        "other_bytes": program.over(program.layout.axes[1:]) if program.layout.axis else 0.0,
        "largest_over_data": max((c["largest_bytes"] for c in crossing if DATA in c["axes"]), default=0),
        "gradient_bytes": 4 * program.num_params,
        "seconds": float(np.median(seconds[1:] or seconds)),
        "parameters": program.num_params,
    }
    return row, logged, crossing
