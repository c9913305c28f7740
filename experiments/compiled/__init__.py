"""What the compilers of GPUs and TPUs make of each method, on a machine that has neither.

Each codec, algorithm, route and whole step is compiled for described devices and for the CPU: whether it compiles, the
bytes that a device sends beside the CPU's program, temporary memory, lines of StableHLO, seconds.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from experiments.lib import targets  # first: it sets what JAX reads of the environment  # isort: skip
import jax
from jax.sharding import Mesh

from experiments.compiled.cases import ALGORITHMS, FORMS, ROUTES, Case, codec, length_of, update
from experiments.lib.cli import UserError
from experiments.lib.codecs import CODECS, chosen
from experiments.lib.errors import shortened
from experiments.lib.report import Columns
from experiments.lib.run import Run, parser_of
from jaxcomp.exchange.collectives import TPU_LANES, TPU_SUBLANES

__all__ = ["RATIO", "Made", "all_cases", "made", "main"]

RATIO = 0.01  # of sparse codecs
TILE_BYTES = 4 * TPU_LANES * TPU_SUBLANES


def all_cases() -> dict[str, Case]:
    """Every case by its name."""
    cases = [codec(name, each.make(length_of(name), RATIO)) for name, each in CODECS.items()]
    cases += [update(name, algorithm) for name, algorithm in ALGORITHMS.items()]
    cases += [update(f"via={via}", algorithm, via) for via, algorithm in ROUTES.items()]
    return {case.name: case for case in (*cases, *FORMS.values())}


class Made(NamedTuple):
    """A compiled case, the mesh it was compiled for, and the shapes of its arguments."""

    program: targets.Program
    mesh: Mesh
    args: tuple[Any, ...]

    def sent(self, padding: int = 0) -> float:
        """Bytes that a device sends over the axis of the workers. padding: bytes that each array that crosses may have
        more than here."""
        sent = 0.0
        for row in self.program.ledger.rows:
            if row.counted and "data" in row.axes(self.mesh):
                sent += row.sent_bytes * (1 + padding / max(row.operand_bytes, 1))
        return sent


def made(case: Case, devices: Sequence[Any]) -> Made:
    """The case, compiled for these devices."""
    function, args = case.on(list(devices))
    return Made(targets.compiled(function, *args), targets.mesh_on(list(devices), case.axes), args)


def padding_on(target: str) -> int:
    """Bytes by which an array that crosses may be longer on a target than on a CPU: on TPUs they fill tiles."""
    return 0 if target.startswith("h100") else TILE_BYTES


@functools.lru_cache(maxsize=1)  # for all targets of a case
def on_cpu(case: Case) -> Made:
    return made(case, jax.devices("cpu"))


def tried(case: Case, name: str) -> dict[str, Any]:
    """A row: the case on a target, beside the CPU."""
    about: dict[str, Any] = {"case": case.name, "target": name}
    try:
        got = made(case, targets.described(name))
    except UserError:
        raise
    except Exception as error:
        return about | {"error": shortened(error)}
    about |= {
        "lines": got.program.lines,
        "seconds": got.program.seconds,
        "memory": got.program.memory / 4 / case.entries,
        "sent": got.sent(),
        "aliased": got.program.aliased,
    }
    try:
        cpu = on_cpu(case)
        about |= {"cpu": cpu.sent(), "at_most": cpu.sent(padding_on(name))}
    except ValueError as error:  # what a CPU does not have
        about["cpu_lacks"] = shortened(error)
    return about


def verdict(row: dict[str, Any]) -> str:
    if "error" in row:
        return ""
    if "cpu" not in row:
        return "not on CPU"
    if row["sent"] == row["cpu"]:
        return "equal"
    tiles = ", tiles" if row["cpu"] < row["sent"] <= row["at_most"] else ""
    return f"{row['sent'] / max(row['cpu'], 1):.4g} times{tiles}"


COLUMNS: Columns = {
    "case": "{case}",
    "target": "{target}",
    "compiles": lambda row: "no" if "error" in row else "yes",
    "bytes a device sends": lambda row: "" if "error" in row else f"{row['sent']:,.0f}",
    "against the CPU's": verdict,
    "temporary memory": lambda row: "" if "error" in row else f"{row['memory']:.2f}",
    "lines": lambda row: "" if "error" in row else f"{row['lines']:,}",
    "s": lambda row: "" if "error" in row else f"{row['seconds']:.1f}",
}


def main(arguments: Sequence[str]) -> int:
    p = parser_of("compiled", __doc__)
    p.add_argument(
        "--targets",
        nargs="+",
        default=["h100", "v5e:2x2"],
        metavar="NAME",
        help="h100, h100:HOSTSxDEVICES, v5e:2x2, v5e:4x4",
    )
    p.add_argument("--only", nargs="+", default=None, metavar="WORD", help="cases whose name contains one of these")
    run = Run(p, arguments, "compiled")
    o = run.options
    for name in o.targets:  # before anything is compiled
        if package := targets.lacks(name):
            raise UserError(f"--targets {name} needs the package {package}; in a clone: pip install '.[accelerators]'")
        targets.described(name)
    jax.config.update("jax_num_cpu_devices", 4)
    every = all_cases()
    pairs = [(every[name], target) for name in chosen(every, o.only, "--only") for target in o.targets]
    rows = run.rows_of(pairs, lambda pair: f"{pair[0].name}, {pair[1]}", lambda pair: tried(*pair))
    run.keep(rows)
    notes = (
        "Compiled ahead of time for described devices, codecs for one of them and the others for four. "
        "Bytes: those over the axis of the workers, from the ledger of the compiled program; on TPUs each array that "
        f"crosses fills tiles, with at most {TILE_BYTES:,} bytes of padding. Temporary memory in gradients; "
        "libtpu does not count what stays on the chip. Lines of StableHLO. s: to trace and compile, on this machine."
    )
    run.table(f"Compiled by JAX {jax.__version__}", COLUMNS, rows, notes)
    for row in rows:
        if "error" in row:
            run.say(f"{row['case']}, {row['target']}: {row['error']}")
    return run.status
