"""What a GPU or a TPU makes of the library: parity with the CPU, laws, and times. One device suffices.

parity: each codec with the same input and key on the CPU and on the device, bit by bit. laws: each codec on the device,
decoded in the program that compressed and in another one, mapped and in a loop. times: compress and decompress of long
vectors, in copies of the vector. steps: one update of a GPT's tree at one worker, in copies of the tree, with its
temporary memory, and one of them by kernels. exchanges: the same among all devices, where there are several. op-by-op:
each codec compiled and op by op, in the time that the others leave. Whether codecs are unbiased is not tried, it takes
thousands of draws: tests/compressors/test_laws.py does.

Writes to runs/NAME: config.json, results.json, a table for each part, accelerator.png, and machine.json of the times,
for `jaxcomp plan --machine FILE`; and, from an accelerator with all parts, docs/results/accelerators.md between its
markers. The exit status is 1 if a law is broken or a case fails.
"""

import functools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

import jaxcomp as jc
from experiments.accelerator.laws import BROKEN, LAWS, OP_BY_OP, Round, laws_of, op_by_op_of
from experiments.accelerator.parity import COLUMNS as PARITY
from experiments.accelerator.parity import cpu, parity_of
from experiments.accelerator.parts import PARTS, Done, Part, measured, rows_in
from experiments.accelerator.steps import EXCHANGES, METHODS, Tree, default_tree
from experiments.accelerator.times import COLUMNS as TIMES
from experiments.accelerator.times import default_log2, memory_of, times_of
from experiments.bench.timing import machine
from experiments.bench.trees import gpt_like, num_entries
from experiments.figures import FIGURES, RESULTS, code_of, placed, stamp_of
from experiments.lib.cli import UserError, at_least, common, positive
from experiments.lib.codecs import CODECS, chosen, heavy_tailed
from experiments.lib.run import Columns, Run, parser_of

__all__ = ["main"]

FIGURE = FIGURES["accelerator"]
LAW_ENTRIES = 4_099  # at most: among more entries some code lies so near to a boundary that rounding decides it
KEPT = ("cast", "block_scaled", "eden")  # whose costs depend on their format
KERNELS = 12  # the longest are shown
STEPS: Columns = {
    "method": "{method}",
    "ms": "{ms:.2f}",
    "copies of the tree": "{copies:.2f}",
    "temporary / gradient": "{temporary}",
    "compile s": "{compile_seconds:.1f}",
}


def verdicts(laws: dict[str, str]) -> Columns:
    """A column for each law."""
    return {"codec": "{codec}"} | {words: lambda row, law=law: str(row[law]) for law, words in laws.items()}


TABLES: dict[str, Columns] = {
    "parity": PARITY,
    "laws": verdicts(LAWS),
    "times": TIMES,
    "steps": STEPS,
    "kernels": {"kernel": lambda row: row["kernel"][:70], "ms a step": "{ms:.3f}", "launches a step": "{times:.1f}"},
    "exchanges": {**STEPS, "bytes sent by a device": "{sent_bytes:,.0f}"},
    "op-by-op": verdicts(OP_BY_OP),
}


def main(arguments: Sequence[str]) -> int:
    p = parser_of("accelerator", __doc__)
    p.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="only these parts")
    what = "no case begins later than this; what is left out is named"
    p.add_argument("--minutes", type=positive, default=4.5, help=what)
    p.add_argument("--codecs", nargs="+", default=None, metavar="NAME", help="codecs whose names contain one of these")
    what = "methods of steps and exchanges whose names contain one of these"
    p.add_argument("--methods", nargs="+", default=None, metavar="NAME", help=what)
    p.add_argument("--entries", type=at_least(3), default=100_003, help=f"of parity; laws: at most {LAW_ENTRIES:,}")
    what = "times: 2^this entries; without it at most 27, as the device's memory allows, on a CPU 18"
    p.add_argument("--log2-size", type=at_least(5), default=None, help=what)
    what = "of the GPT; without it and --layers 1024 and 24, fewer layers where memory is short, on a CPU 64 and 2"
    p.add_argument("--width", type=at_least(8), default=None, help=what)
    p.add_argument("--layers", type=at_least(1), default=None, help="of the GPT")
    p.add_argument("--repeats", type=at_least(1), default=10, help="rounds of each time; the median is shown")
    what = f"the step whose kernels are listed: {', '.join(METHODS)}"
    p.add_argument("--kernels", choices=METHODS, default="error_feedback(sidco)", metavar="METHOD", help=what)
    what = "page whose generated part is replaced; without it docs/results/accelerators.md, after a whole run on an "
    p.add_argument("--page", type=Path, default=None, help=f"{what}accelerator")
    common(p, seed=(0, "of vectors and keys"), ratio=(0.001, "of times; parity and laws have 0.1"))
    run = Run(p, arguments, "accelerator")
    o, devices = run.options, jax.devices()
    jax.config.update("jax_enable_compilation_cache", False)  # seconds to compile are measured
    page, parts = page_for(o, devices[0]), parts_of(o, devices)
    run.say(said_of(devices))
    if "exchanges" in o.only and len(devices) == 1:
        run.say(f"Exchanges are left out: they need several devices, and there is 1 ({devices[0].platform}).")
    if not parts:
        return 0
    done = measured(run, parts)
    shown = show(run, done, {name: part.title for name, part in parts.items()}, devices[0].platform)
    if rows := rows_in(done, "times"):
        machine_of(rows, devices[0]).save(run.path("machine.json"))
        run.say(f"machine: {run.path('machine.json')}")
    if page is not None and not run.interrupted:
        lines, stamp = lines_of(run, said_of(devices), shown), stamp_of(FIGURE, machine())
        page.write_text(placed(page.read_text(), "accelerator", lines, stamp))
        run.say(f"page: {page}")
    broken = [row["codec"] for part in ("laws", "op-by-op") for row in rows_in(done, part) if is_broken(row)]
    if broken:
        run.say(f"Laws are broken by {', '.join(dict.fromkeys(broken))}.")
    return run.status or int(bool(broken) or any(outcome.failed for outcome in done.values()))


def machine_of(rows: Sequence[dict[str, Any]], device: Any) -> jc.Machine:
    """The machine whose times these are. The codec of a name holds whatever its ratio or block is."""
    begin = lambda name: name.partition(",")[0].rstrip(")") if name.startswith(KEPT) else name.partition("(")[0]
    codecs = {begin(row["name"]): (row["compress"], row["decompress"], 0.0) for row in rows}
    speed = sorted(row["copy_gbs"] for row in rows)[len(rows) // 2]
    made = {"source": "measured (python -m experiments accelerator)", "date": time.strftime("%Y-%m-%d")}
    plain = {"name": device.device_kind, "bandwidth": 1e9 * speed, "memory": float(memory_of(device) or 0), **made}
    return jc.Machine.from_dict({**plain, "codecs": codecs, "code": code_of(FIGURE)})


def is_broken(row: dict[str, Any]) -> bool:
    return any(row[law].held == BROKEN for law in (*LAWS, *OP_BY_OP) if law in row)


def said_of(devices: Sequence[Any]) -> str:
    """Which devices these are, and what a CPU cannot show."""
    words = f"{len(devices)} device{'s' * (len(devices) > 1)}: {machine()}."
    if devices[0].platform == "cpu":
        words += " This is no accelerator: parity compares the CPU with the CPU, and all times are of the CPU."
    return words


def page_for(o: Any, device: Any) -> Path | None:
    """The page to write; None: this run writes none.

    Raises:
        UserError: --page has no markers.
    """
    whole = not (o.codecs or o.methods) and set(o.only) == set(PARTS)
    page = o.page or (RESULTS / "accelerators.md" if whole and device.platform != "cpu" else None)
    if page is not None and (not page.is_file() or "<!-- end accelerator -->" not in page.read_text()):
        raise UserError(f"--page {page}: no file with the markers <!-- accelerator --> and <!-- end accelerator -->")
    return page


def parts_of(o: Any, devices: Sequence[Any]) -> dict[str, Part]:
    """What is measured, in this order."""
    device, codecs = devices[0], chosen(CODECS, o.codecs, "--codecs")
    methods = chosen(METHODS, o.methods, "--methods")
    host = cpu() if "parity" in o.only else device
    x, few = heavy_tailed(o.entries, o.seed), heavy_tailed(min(o.entries, LAW_ENTRIES), o.seed, subnormal=False)
    log2_size = o.log2_size or default_log2(device)
    width, layers = (asked or default for asked, default in zip((o.width, o.layers), default_tree(device), strict=True))
    others = devices if len(devices) > 1 and "exchanges" in o.only else []
    trees: dict[int, Tree] = {}
    round_of = functools.cache(lambda name: Round(CODECS[name], few, 0.1, o.seed))  # two parts share its programs

    def tree_on(number: int) -> Tree:
        if number not in trees:
            trees.clear()  # of the part before, whose gradients take memory
            trees[number] = Tree(width, layers, list(devices[:number]))
        return trees[number]

    def step(method: str) -> dict[str, Any]:
        return tree_on(1).measure(method, o.repeats, method == o.kernels)

    millions = num_entries(gpt_like(layers, width)) / 1e6
    of_tree = f"a GPT's tree (width {width}, layers {layers}, {millions:.1f} M parameters)"
    parts = {
        "parity": Part(
            codecs,
            lambda name: {"codec": name, **parity_of(CODECS[name], x, 0.1, o.seed, (host, device))},
            f"Parity of {device.platform} with CPU, {o.entries:,} entries",
            "payload: messages of the same vector with the same key. decoded: one message, of the CPU, decoded on "
            "both. ulp: the largest gap in units of the last place, and the share of floats that differ at all; "
            "integers: words, codes and indices. Zeros of different signs are 0 ulp apart.",
        ),
        "laws": Part(
            codecs,
            lambda name: {"codec": name, **laws_of(round_of(name))},
            f"Laws on {device.platform}, {few.size:,} entries",
            "bits: equal. rounding: integers equal, floats as near as sums in another order are. "
            "decoded in one program: with the residual, where compression is compiled beside it. sent + residual = "
            "input: bit for bit, of codecs that copy entries. Unbiasedness is not tried: it takes thousands of draws.",
        ),
        "times": Part(
            codecs,
            lambda name: {"codec": name, **times_of(CODECS[name], log2_size, o.ratio, o.repeats)},
            f"Codecs at 2^{log2_size} entries, ratio {o.ratio:g}",
            f"Medians of {o.repeats} calls by the wall clock, launches included, in turn with a copy (2 x into new "
            "memory), of which copies are multiples.",
        ),
        "steps": Part(
            methods,
            step,
            f"A step of {of_tree} on one device",
            f"Medians of {o.repeats} steps, in turn with a copy of the tree. States are donated. Temporary memory: "
            "besides arguments and results, over the bytes of a gradient.",
        ),
        "exchanges": Part(
            [name for name in EXCHANGES if name in methods and others],
            lambda method: tree_on(len(devices)).measure(method, o.repeats),
            f"A step of {of_tree} on {len(devices)} devices",
            "Bytes by the compiled program, as a ring sends them.",
        ),
        "op-by-op": Part(
            codecs,
            lambda name: {"codec": name, **op_by_op_of(round_of(name))},
            f"Compiled against op by op on {device.platform}, {few.size:,} entries",
            "bits and rounding as for the laws.",
        ),
    }
    return {name: parts[name] for name in PARTS if name in o.only and parts[name].cases}


def show(run: Run, done: Done, titles: dict[str, str], platform: str) -> list[str]:
    """Prints all tables, keeps them and the picture; their names."""
    shown = []
    for name, outcome in done.items():
        rows = outcome.rows
        run.table(titles[name], TABLES[name], rows, outcome.notes, f"{name}.md")
        shown.append(name)
        traced = [row for row in rows if "kernels" in row]
        if traced and not traced[0]["kernels"]:
            run.say(f"Kernels are not listed: a profile of the {platform} backend names none.")
        elif traced:
            whole = sum(row["ms"] for row in traced[0]["kernels"])
            title = f"Kernels of a step with {traced[0]['method']} on one device"
            about = f"{len(traced[0]['kernels'])} names, {whole:.2f} ms of kernels a step; the longest {KERNELS}."
            run.table(title, TABLES["kernels"], traced[0]["kernels"][:KERNELS], about, "kernels.md")
            shown.append("kernels")
    if panels := panels_of(done):
        each = {title: {"xlabel": title.partition(",")[0]} for title in panels}
        run.plot("accelerator.png", panels, machine(), each=each, yscale="log", ylabel="time / time of a copy")
    return shown


def panels_of(done: Done) -> dict[str, dict[str, Any]]:
    """Copies that codecs and steps take."""
    panels: dict[str, dict[str, Any]] = {}
    if rows := rows_in(done, "times"):
        names = [row["codec"] for row in rows]
        panels["codec, in copies of the vector"] = {
            part: (names, [row[part] for row in rows]) for part in ("compress", "decompress")
        }
    if rows := rows_in(done, "steps"):
        copies = ([row["method"] for row in rows], [row["copies"] for row in rows])
        panels["method of a step, in copies of the tree"] = {"step": copies}
    return panels


def lines_of(run: Run, said: str, names: Sequence[str]) -> list[str]:
    """The tables of a run as a section of a page, below what is said of the devices."""
    lines = [said, ""]
    for name in names:
        title, _, rest = run.path(f"{name}.md").read_text().partition("\n")
        lines += [f"### {title}", *rest.rstrip("\n").split("\n"), ""]
    return lines[:-1]
