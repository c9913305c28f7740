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
import numpy as np

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
    counted: whether it is part of the total; not in an arm of a conditional that a dearer arm outweighs.
    groups: numbers of the devices that take part together; for collective-permute, its pairs.
    """

    op: str
    dtype: str
    shape: tuple[int, ...]
    group_size: int
    operand_bytes: int
    sent_bytes: float
    times: int | None
    branch: str
    counted: bool = True
    groups: tuple[tuple[int, ...], ...] = ()

    def axes(self, mesh: Any) -> tuple[str, ...]:
        """The axes of a mesh that it crosses: those along which devices of one group differ.

        Args:
            mesh: `jax.sharding.Mesh` that the program was compiled for, or its abstract mesh. Programs number the
                devices in its order, the last axis fastest.

        Returns:
            Names in the order of the mesh; none for groups of one device.

        Raises:
            ValueError: the program has more devices than the mesh.
        """
        names, sizes = tuple(mesh.shape), tuple(mesh.shape.values())
        crossed = set()
        for group in self.groups:
            if max(group) >= math.prod(sizes):
                raise ValueError(f"ledger: device {max(group)} of the program is not in a mesh of {math.prod(sizes)}")
            places = np.array(np.unravel_index(np.array(group), sizes))
            crossed |= {name for name, place in zip(names, places, strict=True) if np.ptp(place)}
        return tuple(name for name in names if name in crossed)


class Ledger(NamedTuple):
    """rows: one per operand of each collective; total_bytes: sent per device in one call.

    Of the arms of a conditional the most expensive one is counted. A loop that runs nobody knows how often is counted
    once: the total is then a lower bound (`is_bound`), and is printed as "at least".
    """

    rows: tuple[Row, ...]
    total_bytes: float

    @property
    def is_bound(self) -> bool:
        """Whether the total is only a lower bound: something crosses in a loop of unknown length."""
        return any(row.times is None and row.sent_bytes > 0 for row in self.rows)

    def by_axes(self, mesh: Any) -> dict[tuple[str, ...], float]:
        """Bytes sent per device over each combination of mesh axes; together they are `total_bytes`.

        Args:
            mesh: as for `Row.axes`.

        >>> import jax, jax.numpy as jnp, jaxcomp as jc
        >>> jc.ledger(lambda x: x + 1, jnp.zeros(3)).by_axes(jax.sharding.AbstractMesh((1,), ("data",)))
        {}
        """
        sent: dict[tuple[str, ...], float] = {}
        for row in self.rows:
            if row.counted:
                axes = row.axes(mesh)
                sent[axes] = sent.get(axes, 0.0) + row.sent_bytes
        return sent

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
        least = "at least " if self.is_bound else ""
        total = f"total: {least}{self.total_bytes:,.0f} bytes sent per device"
        return "\n".join([*(line.rstrip() for line in text), total])


def ledger(fn: Any, *args: Any, **kwargs: Any) -> Ledger:
    """Compiles a function for these arguments and lists its collectives.

    Args:
        fn: a function (jitted here), a jitted function, or something compiled already
            (`jax.jit(f).lower(...).compile()`), which then takes no arguments.
        *args, **kwargs: as for the function; `jax.ShapeDtypeStruct`s will do.

    Returns:
        `Ledger` of one device. Print it for a table; `by_axes(mesh)` tells what crosses which axes of a mesh.

    >>> import jax, jax.numpy as jnp, jaxcomp as jc
    >>> jc.ledger(lambda x: x + 1, jnp.zeros(3)).total_bytes
    0.0
    """
    if hasattr(fn, "as_text") and hasattr(fn, "runtime_executable") and not (args or kwargs):
        compiled = fn
    elif not callable(fn):
        raise TypeError(f"ledger: call it as ledger(step, *arguments), with the function itself; got {type(fn)}")
    else:
        compiled = (fn if hasattr(fn, "lower") else jax.jit(fn)).lower(*args, **kwargs).compile()
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
    module = Module(text)
    rows, total = module.walk(module.entry, 1, "")
    return Ledger(tuple(rows), float(total))


class Module:
    def __init__(self, text: str):
        header = text.split("\n", 1)[0]
        partitions = re.search(r"num_partitions=(\d+)", header)
        replicas = re.search(r"replica_count=(\d+)", header)
        self.devices = int(partitions[1] if partitions else 1) * int(replicas[1] if replicas else 1)
        self.computations: dict[str, dict[str, Instruction]] = {}
        self.channels: set[str] = set()  # of collectives in fusions that were counted
        self.entry = ""
        current: dict[str, Instruction] = {}
        for line in re.sub(r"/\*.*?\*/", "", text).splitlines():  # long lists have every fifth operand numbered
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
                inside = [
                    self.walk(arm, times, f"{branch}/{instruction.name}[{number}]".lstrip("/"))
                    for number, arm in enumerate(arms)
                ]
                dearest = max(range(len(arms)), key=lambda number: inside[number][1], default=0)
                for number, (more, sent) in enumerate(inside):
                    rows += more if number == dearest else [row._replace(counted=False) for row in more]
                    total += sent if number == dearest else 0.0
            elif op in ("call", "async", "fusion"):
                for target in called(attributes, "to_apply") + called(attributes, "calls"):
                    if op == "fusion" and self.seen_before(target):
                        continue
                    more, sent = self.walk(target, times, branch)
                    rows += more
                    total += sent
        return rows, total

    def seen_before(self, computation: str) -> bool:
        """Whether a fusion only goes on with a collective that another one has started.

        On TPU, matrix products are fused with the steps of an asynchronous collective, and each such fusion names it.
        """
        inside = self.computations.get(computation, {}).values()
        inside = [i.attributes for i in inside if i.op.removesuffix("-start") in SENT]
        channels = {found[1] for found in (re.search(r"channel_id=(\d+)", text) for text in inside) if found}
        known = bool(channels) and channels <= self.channels
        self.channels |= channels
        return known

    def rows_of(self, op: str, instruction: Instruction, computation: str, times: int | None, branch: str):
        groups = self.groups(op, instruction.attributes)
        # A permutation has a group for each of its pairs.
        group = len(groups) if op == "collective-permute" else max(map(len, groups))
        known = self.computations[computation]
        for operand in split_list(instruction.operands):
            name = operand.split()[-1].lstrip("%")
            # The type stands beside the operand in some prints, else with its definition.
            types = operand if "[" in operand else known[name].type
            for dtype, shape in arrays_of(types):
                size = math.prod(shape) * bits_of(dtype) // 8
                senders = group / self.devices if op == "collective-permute" else 1
                sent = SENT[op](size, group) * senders * (1 if times is None else times)
                yield Row(op, dtype, shape, group, size, sent, times, branch, True, groups)

    def groups(self, op: str, attributes: str) -> tuple[tuple[int, ...], ...]:
        """Devices that take part together; of a permutation, the pairs with two ends."""
        if op == "collective-permute":
            pairs = re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", attributes)
            ends = re.findall(r"\{(\d+),(\d+)\}", pairs[1]) if pairs else []
            return tuple((int(a), int(b)) for a, b in ends if a != b)
        mesh = re.search(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(([^)]*\)?)\))?\s*\{([^}]*)\}", attributes)
        if mesh:
            sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", mesh[1])}
            used = re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", mesh[3])
            devices = iota(mesh[2]) if mesh[2] else np.arange(math.prod(sizes.values()))
            return as_groups(mesh_groups(devices, sizes, used))
        regular = re.search(r"replica_groups=(\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)", attributes)
        if regular:
            return as_groups(iota(regular[1]))
        listed = re.search(r"replica_groups=\{((?:\{[\d,]+\},?)+)\}", attributes)
        if listed:
            return tuple(tuple(map(int, part.split(","))) for part in re.findall(r"\{([\d,]+)\}", listed[1]))
        return (tuple(range(self.devices)),)


def as_groups(rows: np.ndarray) -> tuple[tuple[int, ...], ...]:
    """Rows of an array as tuples of Python integers."""
    return tuple(tuple(map(int, row)) for row in rows)


def iota(text: str) -> np.ndarray:
    """The array that XLA writes as [2,4]<=[4,2]T(1,0): 0, 1, 2, ... as [4,2], transposed, as [2,4]."""
    numbers = lambda part: [int(n) for n in part.split(",")]
    found = re.fullmatch(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?", text.strip())
    if not found:
        raise ValueError(f"ledger: cannot read the devices {text}")
    shape, source, order = found.groups()
    source = numbers(source or shape)
    array = np.arange(math.prod(source)).reshape(source)
    return (array.transpose(numbers(order)) if order else array).reshape(numbers(shape))


def mesh_groups(devices: np.ndarray, sizes: dict[str, int], used: list[tuple[str, str, str]]) -> np.ndarray:
    """Groups over some axes of a mesh, one a row.

    Args:
        devices: their numbers in the order of the mesh.
        sizes: of all axes, in order.
        used: (axis, before, size): the part of an axis that is left when it is cut into [before, size, rest]; before
            and size are empty for the whole axis.
    """
    lengths: list[int] = []
    together: list[bool] = []
    for name, size in sizes.items():
        done = 1
        for before, part in sorted((int(b or 1), int(p or size)) for axis, b, p in used if axis == name):
            lengths += [before // done, part]
            together += [False, True]
            done = before * part
        lengths.append(size // done)
        together.append(False)
    order = sorted(range(len(lengths)), key=lambda i: together[i])
    members = math.prod(n for n, inside in zip(lengths, together, strict=True) if inside)
    return devices.reshape(lengths).transpose(order).reshape(-1, members)


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
