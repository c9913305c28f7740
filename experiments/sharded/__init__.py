"""Sharded models: each device compresses its own shard, and only payloads cross the slow axis.

Trains a small transformer on characters over a mesh (data, other) of virtual or real devices, with parameters
sharded over the other axis as FSDP or as tensor parallelism does, or whole at each worker. Writes to runs/NAME:
config.json, results.json, table.md, sharded.png.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import optax

import jaxcomp as jc
from experiments.lib.cli import at_least, common
from experiments.lib.methods import METHODS
from experiments.lib.plots import running_mean
from experiments.lib.run import Run, parser_of
from experiments.lib.text import Text, add_options, text_of
from experiments.lib.training import find_devices
from experiments.lib.transformer import LAYOUTS, Sizes
from experiments.sharded.step import Program, mesh_for, sizes_of

__all__ = ["main"]

WINDOW = 50  # steps that a loss is averaged over
COLUMNS = {
    "layout": "{layout}",
    "method": "{method}",
    "final loss": "{loss:.4f}",
    "test loss": "{test_loss:.4f}",
    "over data B": "{data_bytes:,.0f}",
    "vs f32": "{vs}",
    "payload B": "{payload_bytes:,.0f}",
    "over other B": "{other_bytes:,.0f}",
    "ms/step": "{ms:.1f}",
}
NOTES = f"""\
Per device and step. over data B: what it sends over the slow axis, read from the compiled program, without the 4-byte
loss. payload B: what of this is compressed gradient by the library's own count; the rest would be a gather of something
else. over other B: gathered parameters and scattered gradients (fsdp), sums of activations (tensor). final loss:
training loss, mean of the last {WINDOW} steps. ms/step: median; all devices share this machine."""


def main(arguments: Sequence[str]) -> int:
    p = parser_of("sharded", __doc__)
    p.add_argument("--layout", nargs="+", choices=LAYOUTS, default=["fsdp", "tensor"], help="where parameters lie")
    p.add_argument("--mesh", nargs=2, type=at_least(1), default=[2, 2], metavar=("DATA", "OTHER"), help="its shape")
    methods = ["dense-f32", "dense-bf16", "top-k", "sidco", "dithering"]
    p.add_argument("--methods", nargs="+", choices=METHODS, default=methods, metavar="METHOD", help="exchanges")
    add_options(p, batch=32, width=64, layers=2, lr=3e-3)
    common(p, "steps")
    run = Run(p, arguments, "sharded")
    o = run.options

    find_devices(math.prod(o.mesh), asked="--mesh {} {}".format(*o.mesh), instead="--mesh 1 {}")
    text = text_of(o.text)
    sizes = sizes_of(o, text.characters, o.mesh)
    cases = list(itertools.product(dict.fromkeys(o.layout), dict.fromkeys(o.methods)))
    rows = run.rows_of(cases, ", ".join, lambda case: train(case[0], case[1], o, text, sizes))
    run.keep(rows)
    dense = {row["layout"]: row["data_bytes"] for row in rows if row["method"] == "dense-f32"}
    for row in rows:
        known = row["layout"] in dense and row["data_bytes"]
        row["vs"] = f"{dense[row['layout']] / row['data_bytes']:.1f} x" if known else "-"
    mesh = "{} x {}".format(*o.mesh)
    run.table(f"{run.folder.name}: {rows[0]['parameters']:,} parameters, mesh {mesh}", COLUMNS, rows, NOTES)
    panels: dict[str, dict[str, Any]] = {}
    for row in rows:
        losses = running_mean(np.array(row["losses"]), WINDOW)
        panels.setdefault(row["layout"], {})[row["method"]] = (1 + np.arange(o.steps), losses)
    title = f"transformer on characters, mesh {mesh}, Adam {o.lr:g}, ratio {o.ratio:g}"
    run.plot("sharded.png", panels, title, xlabel="step", ylabel=f"training loss (mean of {WINDOW} steps)")
    return run.status


def train(layout: str, method: str, o: Any, text: Text, sizes: Sizes) -> dict[str, Any]:
    """The row of one method with one layout."""
    mesh = mesh_for(layout, o.mesh)
    program = Program(layout, mesh, METHODS[method].make(o.ratio, o.levels), sizes, o.batch, optax.adam(o.lr))
    losses, seconds, params, state = [], [], None, None
    for loss, took, params, state in program.run(text, o.seed, o.steps):  # noqa: B007
        losses.append(loss)
        seconds.append(took)
    return {
        "layout": layout,
        "method": method,
        "loss": float(np.mean(losses[-WINDOW:])),
        "test_loss": program.test(params, text),
        "data_bytes": program.over_data(),
        "payload_bytes": float(jc.info(state).sent_bytes),
        "other_bytes": program.ledger.by_axes(mesh).get(program.layout.axes[1:], 0.0),
        "ms": 1e3 * float(np.median(seconds[1:] or seconds)),
        "parameters": program.num_params,
        "losses": losses,
    }
