"""Sharded models: each device compresses its own shard, and only payloads cross the slow axis.

Trains a small transformer on characters over a mesh (data, other) of virtual or real devices, with parameters
sharded over the other axis as FSDP or as tensor parallelism does, or whole at each worker. Writes to runs/NAME:
config.json, metrics.jsonl (a line for each logged step), results.json, collectives.md (what crosses which axis,
read from the compiled program), table.md, sharded.png.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.lib.cli import Parser, at_least, choose_new
from experiments.lib.folders import Journal, run_options, start_run, write_json
from experiments.lib.report import new_console, show

__all__ = ["main"]

DEFAULT_METHODS = ["dense-f32", "dense-bf16", "top-k", "sidco", "dithering"]
WINDOW = 10  # logged steps that a loss is averaged over


def parser() -> Parser:
    from experiments.lib.methods import METHODS
    from experiments.lib.text import add_options
    from experiments.lib.transformer import LAYOUTS
    from experiments.sharded.step import AXIS_TYPES

    p = Parser(prog="python -m experiments sharded", description=(__doc__ or "").split("\n\n")[0])
    p.add_argument("--layout", nargs="+", choices=LAYOUTS, default=["fsdp", "tensor"], help="where parameters lie")
    p.add_argument("--mesh", nargs=2, type=at_least(1), default=[2, 2], metavar=("DATA", "OTHER"), help="its shape")
    p.add_argument("--axis-types", choices=AXIS_TYPES, default="auto", help="of the mesh; all axes are manual anyway")
    p.add_argument("--methods", nargs="+", choices=METHODS, default=DEFAULT_METHODS, metavar="METHOD", help="exchanges")
    p.add_argument("--steps", type=at_least(1), default=300, help="steps of each run")
    add_options(p, batch=32, width=64, layers=2, lr=3e-3)
    p.add_argument("--log-every", type=at_least(1), default=5, help="steps between lines of metrics.jsonl")
    run_options(p, "sharded")
    return p


def main(arguments: Sequence[str]) -> int:
    options = vars(parser().parse_args(arguments))
    name, runs = options.pop("name"), options.pop("runs")

    from experiments.lib.text import text_of
    from experiments.lib.training import find_devices
    from experiments.lib.transformer import Sizes
    from experiments.sharded.step import check_sizes

    o = options
    shape = tuple(o["mesh"])
    find_devices(shape[0] * shape[1])
    text = text_of(o["text"])
    sizes = Sizes(text.characters, o["length"], o["width"], o["heads"], o["layers"])
    check_sizes(sizes, o["batch"], shape)
    folder = choose_new(runs, name, "sharded")
    start_run(folder, o)
    journal = Journal(folder)
    console = new_console()
    console.print(f"{text.name}: {len(text.codes):,} characters; mesh {shape}; writing to {folder}", highlight=False)
    rows, lines, crossed = [], [], []
    try:
        for layout in dict.fromkeys(o["layout"]):
            for method in dict.fromkeys(o["methods"]):
                row, more, table = train(layout, method, text, sizes, o, journal, console)
                rows.append(row)
                lines += more
                crossed += table
                write_json(folder / "results.json", rows)
    except KeyboardInterrupt:
        console.print("interrupted")
    if rows:
        report(rows, lines, crossed, o, folder, console)
    return 0


def train(layout: str, method: str, text: Any, sizes: Any, o: dict[str, Any], journal: Any, console: Any) -> tuple:
    """One method with one layout: its row, its logged lines, the cells of its collectives."""
    import optax

    from experiments.lib.methods import METHODS
    from experiments.lib.transformer import DATA
    from experiments.sharded.step import Program, crossings, mesh_for

    mesh = mesh_for(layout, tuple(o["mesh"]), o["axis_types"])
    algorithm = METHODS[method].make(o["ratio"], o["levels"])
    program = Program(layout, mesh, algorithm, sizes, o["batch"], optax.adam(o["lr"]))
    lines, seconds, params, state = [], [], None, None
    for number, (loss, took, params, state) in enumerate(program.run(text, o["seed"], o["steps"]), 1):  # noqa: B007
        seconds.append(took)
        if number % o["log_every"] == 0 or number in (1, o["steps"]):
            lines.append({"layout": layout, "method": method, "step": number, "loss": loss, "seconds": took})
            journal.add(lines[-1])
    size = program.payload_bytes(state)
    row = {
        "layout": layout,
        "method": method,
        "loss": float(np.mean([line["loss"] for line in lines[-WINDOW:]])),
        "test_loss": program.test(params, text),
        "lane_bytes": size["lane_bytes"],
        "payload_sent_bytes": size["sent_bytes"],
        "data_bytes": program.over_data(),
        "other_bytes": program.over(program.layout.axes[1:]) if program.layout.axis else 0.0,
        "largest_over_data": max(
            (c.largest_bytes for c in crossings(program.ledger, mesh) if DATA in c.axes), default=0
        ),
        "gradient_bytes": 4 * program.num_params,
        "seconds": float(np.median(seconds[1:] or seconds)),
        "parameters": program.num_params,
    }
    console.print(
        f"{layout}, {method}: loss {row['loss']:.4f}, test {row['test_loss']:.4f}, over data {row['data_bytes']:,.0f} "
        f"B per step and device, of which payloads {row['payload_sent_bytes']:,.0f} B",
        highlight=False,
    )
    cells = [
        [
            layout,
            method,
            " x ".join(c.axes),
            c.op,
            c.dtype,
            str(c.number),
            f"{c.largest_bytes:,}",
            f"{c.sent_bytes:,.0f}",
        ]
        for c in crossings(program.ledger, mesh)
    ]
    return row, lines, cells


def report(
    rows: list[dict[str, Any]],
    lines: list[dict[str, Any]],
    crossed: list[list[str]],
    o: dict[str, Any],
    folder: Path,
    console: Any,
) -> None:
    head = ["layout", "method", "over", "collective", "dtype", "operands", "largest B", "sent B"]
    show(console, "What crosses which axis", head, crossed, CROSSING_NOTES, folder / "collectives.md")
    dense = {row["layout"]: row["data_bytes"] for row in rows if row["method"] == "dense-f32"}
    table = [
        [
            row["layout"],
            row["method"],
            f"{row['loss']:.4f}",
            f"{row['test_loss']:.4f}",
            f"{row['lane_bytes']:,.0f}",
            f"{row['data_bytes']:,.0f}",
            f"{dense[row['layout']] / row['data_bytes']:.1f} x"
            if row["layout"] in dense and row["data_bytes"]
            else "-",
            "all" if row["data_bytes"] == row["payload_sent_bytes"] else f"{row['payload_sent_bytes']:,.0f}",
            f"{row['other_bytes']:,.0f}",
            f"{1e3 * row['seconds']:.1f}",
        ]
        for row in rows
    ]
    title = f"{folder.name}: {rows[0]['parameters']:,} parameters, mesh {o['mesh'][0]} x {o['mesh'][1]}"
    show(console, title, HEAD, table, NOTES, folder / "table.md")
    console.print(f"plot: {draw(lines, o, folder)}")


HEAD = [
    "layout",
    "method",
    "final loss",
    "test loss",
    "lane B",
    "over data B",
    "vs f32",
    "payload",
    "over other B",
    "ms/step",
]
NOTES = """\
Per device and step. lane B: bytes of the payload of its own shard. over data B: what it sends over the slow axis, read
from the compiled program, without the 4-byte loss. payload: what of this is compressed gradient by the library's own
count; the rest would be a gather of something else. over other B: gathered parameters and scattered gradients (fsdp),
sums of activations (tensor). final loss: training loss, mean of the last 10 logged steps. ms/step: median; all devices
share this machine."""
CROSSING_NOTES = """\
Read from the compiled program. over: mesh axes along which the devices of a group differ. operands: arrays that take
part. largest B: bytes that a device contributes to the largest of them. sent B: per device and step (ring model)."""


def draw(lines: list[dict[str, Any]], o: dict[str, Any], folder: Path) -> Path:
    from experiments.lib.plots import LINES, new_figure, running_mean, save

    layouts = list(dict.fromkeys(line["layout"] for line in lines))
    figure, axes = new_figure(len(layouts))
    for axis, layout in zip(axes, layouts, strict=True):
        for look, method in zip(LINES, dict.fromkeys(line["method"] for line in lines), strict=False):
            mine = [line for line in lines if (line["layout"], line["method"]) == (layout, method)]
            if mine:
                losses = running_mean(np.array([line["loss"] for line in mine]), WINDOW)
                every = max(1, len(mine) // 6)
                axis.plot([line["step"] for line in mine], losses, label=method, markevery=every, markersize=5, **look)
        axis.set(xlabel="step", ylabel=f"training loss (mean of {WINDOW} logged steps)", title=layout)
    axes[0].legend()
    mesh = " x ".join(map(str, o["mesh"]))
    figure.suptitle(f"transformer on characters, mesh {mesh}, Adam {o['lr']:g}, ratio {o['ratio']:g}", fontsize=10)
    path = folder / "sharded.png"
    save(figure, path)
    return path
