"""Bytes per collective, read from the compiled program: what the machine will really send.

A payload says what should cross (`lane_bytes`); the compiled program says what does. XLA may
widen a narrow float, gather a whole gradient that was sharded, or merge collectives; only its
output is proof. Bytes sent per device (their mean, where devices differ) follow the usual models,
for operands of b bytes at each of g devices:

    all-gather               (g - 1) b            ring
    all-reduce               2 (g - 1) / g b      ring (reduce-scatter, then all-gather)
    reduce-scatter, all-to-all   (g - 1) / g b    ring, pairwise
    collective-permute       b pairs / devices    the mean: only the source of a pair sends
    collective-broadcast     b
"""

import json
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

__all__ = ["Ledger", "Row", "ledger"]

SENT: dict[str, Callable[[int, int], float]] = {
    "all-gather": lambda b, g: (g - 1) * b,
    "all-reduce": lambda b, g: 2 * (g - 1) * b / g,
    "reduce-scatter": lambda b, g: (g - 1) * b / g,
    "all-to-all": lambda b, g: (g - 1) * b / g,
    "ragged-all-to-all": lambda b, g: (g - 1) * b / g,
    "collective-permute": lambda b, g: b,
    "collective-broadcast": lambda b, g: b if g > 1 else 0,
}


class Row(NamedTuple):
    """One operand of one collective.

    op: HLO name, e.g. "all-gather". dtype, shape: of what each device contributes.
    group_size: devices that take part together; for collective-permute, pairs with two ends.
    operand_bytes: bytes each device contributes, once.
    sent_bytes: bytes a device sends, all repetitions included; the mean over the devices.
    times: repetitions by enclosing loops; None if the compiler does not know (counted once).
    branch: which arm of a conditional, "" outside of any. Only one arm of each runs.
    """

    op: str
    dtype: str
    shape: tuple[int, ...]
    group_size: int
    operand_bytes: int
    sent_bytes: float
    times: int | None
    branch: str


class Ledger(NamedTuple):
    """rows: one per operand of each collective; total_bytes: sent per device in one call.

    Of the arms of a conditional the most expensive one is counted.
    """

    rows: tuple[Row, ...]
    total_bytes: float

    def __str__(self) -> str:
        head = ("op", "dtype", "shape", "group", "operand B", "times", "sent B", "branch")
        lines = [
            (
                r.op,
                r.dtype,
                "x".join(map(str, r.shape)) or "scalar",
                str(r.group_size),
                f"{r.operand_bytes:,}",
                "?" if r.times is None else str(r.times),
                f"{r.sent_bytes:,.0f}",
                r.branch,
            )
            for r in self.rows
        ]
        widths = [max(len(row[i]) for row in (head, *lines)) for i in range(len(head))]
        left = (0, 1, 7)
        text = [
            "  ".join(c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
            for row in (head, *lines)
        ]
        return "\n".join([*(line.rstrip() for line in text), f"total: {self.total_bytes:,.0f} bytes sent per device"])


def ledger(fn: Any, *args: Any, **kwargs: Any) -> Ledger:
    """Compiles a function for these arguments and lists its collectives.

    Args:
        fn: a function (jitted here), a jitted function, or something compiled already
            (`jax.jit(f).lower(...).compile()`), which then takes no arguments.
        *args, **kwargs: as for the function; `jax.ShapeDtypeStruct`s will do.

    Returns:
        `Ledger` of one device. Print it for a table.

    >>> import jax, jax.numpy as jnp, jaxcomp as jc
    >>> jc.ledger(lambda x: x + 1, jnp.zeros(3)).total_bytes
    0.0
    """
    if hasattr(fn, "as_text") and hasattr(fn, "runtime_executable") and not (args or kwargs):
        compiled = fn
    else:
        lowered = (fn if hasattr(fn, "lower") else jax.jit(fn)).lower(*args, **kwargs)
        compiled = lowered.compile()
    return read(str(compiled.as_text()))


# ------------------------------------------------------------------------------------------------
# Reading HLO text. Three ways to write replica groups are in use: {{0,1},{2,3}} and
# [groups,size]<=[n] (JAX 0.10), and mesh['data'=2,'model'=2] {'data'} (JAX 0.12).


class Instruction(NamedTuple):
    name: str
    type: str
    op: str
    operands: str
    attributes: str


def read(text: str) -> Ledger:
    """The ledger of a compiled module in HLO text form."""
    module = Module(re.sub(r"/\*.*?\*/", "", text))  # long lists of operands have every fifth numbered
    rows, total = module.walk(module.entry, 1, "")
    return Ledger(tuple(rows), float(total))


class Module:
    def __init__(self, text: str):
        header = text.split("\n", 1)[0]
        partitions = re.search(r"num_partitions=(\d+)", header)
        replicas = re.search(r"replica_count=(\d+)", header)
        self.devices = int(partitions[1] if partitions else 1) * int(replicas[1] if replicas else 1)
        self.computations: dict[str, dict[str, Instruction]] = {}
        self.entry = ""
        current: dict[str, Instruction] = {}
        for line in text.splitlines():
            start = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$", line)
            if start:
                current = self.computations[start[2]] = {}
                self.entry = start[2] if start[1] else self.entry
                continue
            instruction = parse_instruction(line)
            if instruction is not None:
                current[instruction.name] = instruction

    def walk(self, computation: str, times: int | None, branch: str) -> tuple[list[Row], float]:
        """Rows and bytes of a computation and all that it calls."""
        rows: list[Row] = []
        total = 0.0
        for instruction in self.computations.get(computation, {}).values():
            attributes = instruction.attributes
            op = instruction.op.removesuffix("-start")
            if op in SENT:
                more = list(self.rows_of(op, instruction, computation, times, branch))
                rows += more
                total += sum(row.sent_bytes for row in more)
            elif op == "while":
                trips = trip_count(attributes)
                inner = None if trips is None or times is None else times * trips
                parts = [self.walk(called(attributes, part)[0], inner, branch) for part in ("condition", "body")]
                more, sent = [row for rows, _ in parts for row in rows], sum(sent for _, sent in parts)
                rows += more
                total += sent
            elif op == "conditional":
                arms = called(attributes, "branch_computations") or (
                    called(attributes, "true_computation") + called(attributes, "false_computation")
                )
                costs = []
                for number, arm in enumerate(arms):
                    more, sent = self.walk(arm, times, f"{branch}/{instruction.name}[{number}]".lstrip("/"))
                    rows += more
                    costs.append(sent)
                total += max(costs, default=0.0)
            elif op in ("call", "async", "fusion"):
                for target in called(attributes, "to_apply") + called(attributes, "calls"):
                    more, sent = self.walk(target, times, branch)
                    rows += more
                    total += sent
        return rows, total

    def rows_of(self, op: str, instruction: Instruction, computation: str, times: int | None, branch: str):
        group = self.group_size(op, instruction.attributes)
        known = self.computations[computation]
        for operand in split_list(instruction.operands):
            name = operand.split()[-1].lstrip("%")
            # The type stands beside the operand in some prints, else with its definition.
            types = operand if "[" in operand else known[name].type
            for dtype, shape in arrays_of(types):
                size = math.prod(shape) * bits_of(dtype) // 8
                senders = group / self.devices if op == "collective-permute" else 1
                sent = SENT[op](size, group) * senders * (1 if times is None else times)
                yield Row(op, dtype, shape, group, size, sent, times, branch)

    def group_size(self, op: str, attributes: str) -> int:
        if op == "collective-permute":
            pairs = re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", attributes)
            ends = re.findall(r"\{(\d+),(\d+)\}", pairs[1]) if pairs else []
            return sum(a != b for a, b in ends)
        mesh = re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", attributes)
        if mesh:
            sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", mesh[1])}
            used = re.findall(r"'([^']*)'(?::\(\d+\)(\d+))?", mesh[2])
            return math.prod(int(part) if part else sizes[name] for name, part in used)
        iota = re.search(r"replica_groups=\[(\d+),(\d+)\]<=", attributes)
        if iota:
            return int(iota[2])
        listed = re.search(r"replica_groups=\{\{([\d,]+)\}", attributes)
        return listed[1].count(",") + 1 if listed else self.devices


def parse_instruction(line: str) -> Instruction | None:
    """One line of HLO text taken apart; None if it is no instruction."""
    found = re.match(r"\s*(?:ROOT )?%?([\w.\-]+) = ", line)
    if not found:
        return None
    rest = line[found.end() :]
    end = closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    type_, rest = rest[:end], rest[end:].lstrip()
    opening = rest.find("(")
    if opening < 0:
        return None
    end = closing(rest, opening)
    return Instruction(found[1], type_, rest[:opening], rest[opening + 1 : end], rest[end + 1 :])


def closing(text: str, opening: int) -> int:
    """Position of the bracket that closes the one at `opening`."""
    depth = 0
    for i in range(opening, len(text)):
        depth += (text[i] in "([{") - (text[i] in ")]}")
        if depth == 0:
            return i
    return len(text) - 1


def split_list(text: str) -> list[str]:
    """Comma-separated parts, commas inside brackets left alone."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "([{") - (c in ")]}")
        if c == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    return [part for part in [*parts, text[start:].strip()] if part]


def called(attributes: str, kind: str) -> list[str]:
    """Names of the computations that an attribute refers to."""
    found = re.search(rf"\b{kind}=(\{{[^}}]*\}}|%?[\w.\-]+)", attributes)
    return re.findall(r"%?([\w.\-]+)", found[1].strip("{}")) if found else []


def trip_count(attributes: str) -> int | None:
    """How often a loop runs, where XLA found it out; else None."""
    start = attributes.find("backend_config={")
    if start >= 0:
        opening = attributes.index("{", start)
        try:
            config = json.loads(attributes[opening : closing(attributes, opening) + 1])
            return int(config["known_trip_count"]["n"])
        except (ValueError, KeyError, TypeError):
            pass
    return None


def arrays_of(type_: str) -> list[tuple[str, tuple[int, ...]]]:
    """(dtype, shape) of each array in a type; tuples are flattened, layouts ignored."""
    found = re.findall(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,<=]*)\]", type_)
    return [(dtype, tuple(int(n.strip("<=")) for n in dims.split(",") if n)) for dtype, dims in found]


def bits_of(dtype: str) -> int:
    """Bits of one entry of an HLO type; 0 for what has none (tokens)."""
    if dtype == "pred":
        return 8
    number = re.match(r"[a-z]+(\d+)", dtype)
    return int(number[1]) if number else 0
