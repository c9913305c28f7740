"""Buckets: exchanges that may start while the backward pass still runs.

Compiles the training step of a small transformer without buckets and with buckets of several sizes, and reads from the
compiled program what each exchange waits for. With --topology the program is compiled for a TPU (which need not
be there, only the package libtpu), where the exchanges are asynchronous and the schedule says what they are hidden
behind; else it runs, too, on virtual or real devices, and is timed. Writes to runs/NAME: config.json, results.json
(every exchange), table.md.
"""

import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AxisType

from experiments.lib.cli import UserError, at_least
from experiments.lib.methods import METHODS
from experiments.lib.run import Run, parser_of
from experiments.lib.text import add_options, text_of
from experiments.lib.training import find_devices
from experiments.lib.transformer import DATA
from experiments.sharded.dependencies import Exchange, exchanges
from experiments.sharded.step import LOSS_BYTES, Program, mesh_for, sizes_of

__all__ = ["main"]

COLUMNS = {
    "method": "{method}",
    "bucket B": "{bucket_bytes:,}",
    "exchanges": "{number}",
    "free of it, mean": "{mean:.0%}",
    "least to most": "{least:.0%} to {most:.0%}",
    "hidden behind": "{hidden}",
    "ms/step (quartiles)": lambda row: quartiles(row.get("seconds")),
}
NOTES = """\
free of it: share of the backward pass's matrix products that an exchange does not depend on; the mean is weighted by
bytes. hidden behind: how many exchanges are asynchronous, and the sum of the shares scheduled between their starts and
ends; - where none is (XLA's CPU backend). ms/step: programs in turn; all devices share this machine."""


def figures(found: list[Exchange]) -> dict[str, Any]:
    """The cells of the exchanges of one program."""
    free = [1 - exchange.waits_for for exchange in found]
    hidden = [exchange.hidden_behind for exchange in found if exchange.hidden_behind is not None]
    row = {"number": len(found), "least": min(free), "most": max(free)}
    row["mean"] = float(np.average(free, weights=[exchange.operand_bytes for exchange in found]))
    return row | {"hidden": f"{len(hidden)}: {sum(hidden):.0%}" if hidden else "-"}


def quartiles(seconds: list[float] | None) -> str:
    return "{1:.1f} ({0:.1f} to {2:.1f})".format(*(1e3 * np.percentile(seconds, [25, 50, 75]))) if seconds else "-"


def topology_mesh(name: str, workers: int) -> Any:
    """A mesh of TPUs that need not be there."""
    from jax.experimental import topologies

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
    p = parser_of("overlap", __doc__)
    methods = ["dense-f32", "top-k", "dithering"]
    p.add_argument("--methods", nargs="+", choices=METHODS, default=methods, metavar="METHOD", help="exchanges")
    what = "bytes of gradient in a bucket; 0: no buckets"
    p.add_argument("--buckets", nargs="+", type=at_least(0), default=[0, 2**20, 2**18], metavar="BYTES", help=what)
    p.add_argument("--workers", type=at_least(2), default=2, help="data-parallel workers, one device each")
    p.add_argument("--topology", default=None, help="compile for this TPU, for instance v5e:2x2, and do not run")
    p.add_argument("--steps", type=at_least(2), default=30, help="timed steps of each program")
    add_options(p, batch=8, width=128, layers=4, lr=1e-3)
    run = Run(p, arguments, "overlap")
    o = run.options

    text = text_of(o.text)
    sizes = sizes_of(o, text.characters, (o.workers, 1))
    if o.topology:
        mesh = topology_mesh(o.topology, o.workers)
    else:
        find_devices(o.workers, instead="--topology v5e:2x2, which compiles only")
        mesh = mesh_for("data", (o.workers, 1))

    def measure(method: str) -> list[dict[str, Any]]:
        """A row for each size of buckets."""
        rows, programs = [], []
        for bucket in dict.fromkeys(o.buckets):
            algorithm = METHODS[method].make(o.ratio, o.levels)
            adam = optax.adam(o.lr)
            programs.append(Program("data", mesh, algorithm, sizes, o.batch, adam, bucket_bytes=bucket or None))
            found = exchanges(programs[-1].compiled.as_text(), mesh, DATA)
            found = [exchange for exchange in found if exchange.operand_bytes > LOSS_BYTES]
            rows.append({"method": method, "bucket_bytes": bucket, **figures(found)})
            rows[-1]["exchanges"] = [exchange._asdict() for exchange in found]
        if not o.topology:
            for row, seconds in zip(rows, interleaved(programs, text, o.seed, o.steps), strict=True):
                row["seconds"] = seconds
        return [row | {"parameters": programs[0].num_params} for row in rows]

    results = [row for rows in run.rows_of(list(dict.fromkeys(o.methods)), str, measure) for row in rows]
    run.keep(results)
    where = o.topology or f"{o.workers} devices ({mesh.devices.flat[0].platform})"
    run.table(f"{run.folder.name}: {results[0]['parameters']:,} parameters, {where}", COLUMNS, results, NOTES)
    return run.status


def interleaved(programs: list[Program], text: Any, seed: int, steps: int) -> list[list[float]]:
    """Seconds of each step of each program, in turn, so that what else the machine does falls on all alike."""
    runs = [program.run(text, seed, steps + 2) for program in programs]
    times = [[next(run)[1] for run in runs] for _ in range(steps + 2)]
    return [list(each) for each in zip(*times[2:], strict=True)]
