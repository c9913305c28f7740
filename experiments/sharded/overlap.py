"""Buckets: exchanges that may start while the backward pass still runs.

Compiles the training step of a small transformer without buckets and with buckets of several sizes, and reads from the
compiled program what each exchange waits for. With --topology the program is compiled for a TPU (which need not
be there, only the package libtpu), where the exchanges are asynchronous and the schedule says what they are hidden
behind; else it runs, too, on virtual or real devices, and is timed. Writes to runs/NAME: config.json, results.json,
exchanges.md, table.md.
"""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.lib.cli import Parser, UserError, at_least, choose_new
from experiments.lib.folders import run_options, start_run, write_json
from experiments.lib.report import new_console, show

__all__ = ["main"]


def parser() -> Parser:
    from experiments.lib.methods import METHODS
    from experiments.lib.text import add_options

    p = Parser(prog="python -m experiments overlap", description=(__doc__ or "").split("\n\n")[0])
    p.add_argument(
        "--methods", nargs="+", choices=METHODS, default=["dense-f32", "top-k", "dithering"], metavar="METHOD"
    )
    what = "bytes of gradient in a bucket; 0: no buckets"
    p.add_argument("--buckets", nargs="+", type=at_least(0), default=[0, 2**20, 2**18], metavar="BYTES", help=what)
    p.add_argument("--workers", type=at_least(2), default=2, help="data-parallel workers, one device each")
    p.add_argument(
        "--topology", default=None, help="compile for this TPU topology, for instance v5e:2x2, and do not run"
    )
    p.add_argument("--steps", type=at_least(2), default=30, help="timed steps of each program")
    add_options(p, batch=8, width=128, layers=4, lr=1e-3)
    run_options(p, "overlap")
    return p


def topology_mesh(name: str, workers: int) -> Any:
    """A mesh of TPUs that need not be there."""
    import jax
    from jax.experimental import topologies
    from jax.sharding import AxisType

    from experiments.lib.transformer import DATA

    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # there is no metadata server to ask about this machine
    try:
        topology = topologies.get_topology_desc(platform="tpu", topology_name=name)
    except Exception as error:  # whatever the plugin or its absence raises
        raise UserError(f"cannot compile for TPU topology {name}: {str(error).splitlines()[0]}") from None
    devices = np.array(topology.devices)
    if len(devices) < workers:
        raise UserError(f"topology {name} has {len(devices)} devices; --workers {workers} need more")
    return jax.sharding.Mesh(devices[:workers], (DATA,), axis_types=(AxisType.Auto,))


def main(arguments: Sequence[str]) -> int:
    options = vars(parser().parse_args(arguments))
    name, runs = options.pop("name"), options.pop("runs")

    import optax

    from experiments.lib.methods import METHODS
    from experiments.lib.text import text_of
    from experiments.lib.training import find_devices
    from experiments.lib.transformer import DATA, Sizes
    from experiments.sharded.dependencies import exchanges
    from experiments.sharded.step import LOSS_BYTES, Program, check_sizes, mesh_for

    o = options
    text = text_of(o["text"])
    sizes = Sizes(text.characters, o["length"], o["width"], o["heads"], o["layers"])
    check_sizes(sizes, o["batch"], (o["workers"], 1))
    if o["topology"]:
        mesh = topology_mesh(o["topology"], o["workers"])
    else:
        find_devices(o["workers"])
        mesh = mesh_for("data", (o["workers"], 1))
    folder = choose_new(runs, name, "overlap")
    start_run(folder, o)
    console = new_console()
    results, cells = [], []
    for method in dict.fromkeys(o["methods"]):
        programs = {}
        for bucket in dict.fromkeys(o["buckets"]):
            algorithm = METHODS[method].make(o["ratio"], o["levels"])
            more = {"bucket_bytes": bucket} if bucket else {}
            program = Program("data", mesh, algorithm, sizes, o["batch"], optax.adam(o["lr"]), **more)
            found = [e for e in exchanges(program.compiled.as_text(), mesh, DATA) if e.operand_bytes > LOSS_BYTES]
            programs[bucket] = program
            results.append({"method": method, "bucket_bytes": bucket, "parameters": program.num_params})
            results[-1]["exchanges"] = [exchange._asdict() for exchange in found]
            cells += [
                [
                    method,
                    f"{bucket:,}",
                    exchange.op,
                    f"{exchange.operand_bytes:,}",
                    f"{1 - exchange.waits_for:.0%}",
                    "-" if exchange.hidden_behind is None else f"{exchange.hidden_behind:.0%}",
                ]
                for exchange in found
            ]
        if not o["topology"]:
            times = interleaved(programs, text, o)
            for row in results:
                if row["method"] == method:
                    row["seconds"] = times[row["bucket_bytes"]]
        write_json(folder / "results.json", results)
    head = ["method", "bucket B", "exchange", "operand B", "free of it", "hidden behind"]
    show(console, "What each exchange waits for", head, cells, NOTES, folder / "exchanges.md")
    where = o["topology"] or f"{o['workers']} devices ({mesh.devices.flat[0].platform})"
    title = f"{folder.name}: {results[0]['parameters']:,} parameters, {where}"
    head = ["method", "bucket B", "exchanges", "free of it, mean", "hidden behind, sum", "ms/step (quartiles)"]
    show(console, title, head, [summary(row) for row in results], SUMMARY_NOTES, folder / "table.md")
    return 0


def interleaved(programs: dict[int, Any], text: Any, o: dict[str, Any]) -> dict[int, list[float]]:
    """Seconds of each step of each program, in turn, so that what else the machine does falls on all alike."""
    runs = {bucket: program.run(text, o["seed"], o["steps"] + 2) for bucket, program in programs.items()}
    times: dict[int, list[float]] = {bucket: [] for bucket in programs}
    for _ in range(o["steps"] + 2):
        for bucket, run in runs.items():
            times[bucket].append(next(run)[1])
    return {bucket: seconds[2:] for bucket, seconds in times.items()}


def weighted(exchanges: list[dict[str, Any]], key: str) -> float:
    total = sum(exchange["operand_bytes"] for exchange in exchanges)
    return sum(exchange["operand_bytes"] * exchange[key] for exchange in exchanges) / max(total, 1)


def summary(row: dict[str, Any]) -> list[str]:
    found = row["exchanges"]
    hidden = [exchange["hidden_behind"] for exchange in found if exchange["hidden_behind"] is not None]
    time = "-"
    if row.get("seconds"):
        low, middle, high = 1e3 * np.percentile(row["seconds"], [25, 50, 75])
        time = f"{middle:.1f} ({low:.1f} to {high:.1f})"
    free = 1 - weighted(found, "waits_for")
    return [
        row["method"],
        f"{row['bucket_bytes']:,}",
        str(len(found)),
        f"{free:.0%}",
        f"{sum(hidden):.0%}" if hidden else "-",
        time,
    ]


NOTES = """\
An exchange for each bucket and dtype, and one for small leaves; bucket 0: no buckets. free of it: share of the
backward pass's matrix products that the exchange does not depend on, so that they may run at the same time. hidden
behind: share that the compiler has scheduled between start and end of the exchange; - where the program has no
asynchronous collectives (XLA's CPU backend)."""
SUMMARY_NOTES = """\
free of it: mean over the exchanges, weighted by bytes. hidden behind, sum: may exceed 100 % where exchanges overlap
one another. ms/step: median and quartiles, programs in turn; all devices share this machine."""
