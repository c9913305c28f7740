"""Collectives that a compiled module runs, and their bytes.

Bytes follow the models that `jaxcomp.ledger` lists.
"""

import collections
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxcomp.hlo import (
    Contents,
    Instruction,
    Sources,
    called,
    contents_of,
    device_groups,
    parse_instruction,
    read_by,
    split_list,
    trip_count,
)
from jaxcomp.transfers import DeviceNumbers, Transfer, pairs_of_send, rendezvous_of, targets, transfer_of, unknown_kind

__all__ = ["SENT", "UNKNOWN", "Module", "Row", "total_of"]

SENT: dict[str, Callable[[int, int], float]] = {
    "all-gather": lambda b, g: (g - 1) * b,
    "all-reduce": lambda b, g: 2 * (g - 1) * b / g,
    "reduce-scatter": lambda b, g: (g - 1) * b / g,
    "all-to-all": lambda b, g: (g - 1) * b / g,
    "ragged-all-to-all": lambda b, g: (g - 1) * b / g,
    "collective-permute": lambda b, g: b,
    "collective-broadcast": lambda b, g: b if g > 1 else 0,
}

UNKNOWN = "unknown: "
# Instructions that take time: others move nothing, or little.
TAKES_TIME = "call conditional convolution custom-call dot fft fusion gather reduce reduce-window scatter sort while"
COMPUTES = frozenset(TAKES_TIME.split())
PACKAGE = f"{Path(__file__).parent}/"


class Row(NamedTuple):
    """One operand of one collective.

    op: HLO name, e.g. "all-gather"; "all-gather between slices" of TPUs; "unknown: ..." where the ledger knows only
        that something communicates.
    dtype, shape: of what each device contributes.
    group_size: devices that take part together; for collective-permute, pairs with two ends.
    operand_bytes: bytes each device contributes, once, without padding.
    sent_bytes: bytes a device sends, all repetitions included; the mean over the devices. Between slices the padding is
        sent, too. Of what is unknown: as many as it contributes with its padding, which may be more or fewer.
    times: repetitions by enclosing loops; None if the compiler does not know (counted once).
    branch: which arm of a conditional, "" outside of any. Only one arm of each runs. A loop of at most one turn
        is an arm, too.
    counted: whether it is part of the total; not in an arm of a conditional that a dearer arm outweighs.
    groups: numbers of the devices that take part together; for collective-permute, its pairs; none where unknown.
    physical_bytes: operand_bytes with the padding of its layout: on TPUs the last two dimensions fill whole tiles, of
        8 x 128 for 32 bits.
    slices: numbers of the slices of TPUs that send to each other (their `slice_index`), one tuple for each group of
        them; for collective-permute, from which to which.
    slice_bytes: bytes that all chips of a slice send to other slices, all repetitions included; the mean over the
        slices.
    source: line of the program that it comes from, as "file:line (function)": of the caller, where it is one of
        jaxcomp. "" where the compiler does not say.
    beside: how many instructions that compute are scheduled between its start and its end, and so may run beside it;
        None where it has no start and end of its own, or the text is no schedule.
    """

    op: str
    dtype: str
    shape: tuple[int, ...]
    group_size: int
    operand_bytes: int
    sent_bytes: float
    times: int | None = 1
    branch: str = ""
    counted: bool = True
    groups: tuple[tuple[int, ...], ...] = ()
    physical_bytes: int = 0
    slices: tuple[tuple[int, ...], ...] = ()
    slice_bytes: float = 0.0
    source: str = ""
    beside: int | None = None

    @property
    def is_unknown(self) -> bool:
        """Whether the ledger knows only that it communicates, not what it sends to whom."""
        return self.op.startswith(UNKNOWN)

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


class Module:
    """A module in HLO text form. devices: how many there are; of several slices, in each."""

    def __init__(self, text: str, devices: Sequence[Any] = ()):
        header = text.split("\n", 1)[0]
        partitions = re.search(r"num_partitions=(\d+)", header)
        replicas = re.search(r"replica_count=(\d+)", header)
        self.devices = int(partitions[1] if partitions else 1) * int(replicas[1] if replicas else 1)
        self.computations: dict[str, dict[str, Instruction]] = {}
        self.is_scheduled = "is_scheduled=true" in header
        self.sources = Sources(text.partition("\n%")[0])
        self.channels: set[str] = set()  # of collectives in fusions that were counted
        self.readers: dict[str, dict[str, list[str]]] = {}  # attributes of what reads each instruction of a computation
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
        sends = [i.attributes for known in self.computations.values() for i in known.values() if i.op == "send"]
        self.rendezvous = {rendezvous_of(attributes) for attributes in sends}
        named = [number for attributes in sends for group in targets(attributes) for number, _ in group]
        self.places = DeviceNumbers(self.devices, max(named, default=0) + 1, devices)

    def walk(self, computation: str, times: int | None = 1, branch: str = "") -> list[Row]:
        """Rows of a computation and all that it calls."""
        rows: list[Row] = []
        for instruction in self.computations.get(computation, {}).values():
            attributes = instruction.attributes
            op = instruction.op.removesuffix("-start")
            if op in SENT or op == "send" or unknown_kind(instruction, False):
                source, beside = self.source_of(instruction, computation), self.beside(instruction, computation)
                often = 1 if times is None else times
                for row in self.rows_of(op, instruction, computation):
                    sent, from_slice = row.sent_bytes * often, row.slice_bytes * often
                    row = row._replace(sent_bytes=sent, slice_bytes=from_slice, times=times, branch=branch)
                    rows.append(row._replace(source=source, beside=beside))
            elif op == "while":
                trips, inside = self.trips(instruction, computation), branch
                if trips is None and self.is_condition(instruction):
                    trips, inside = 1, f"{branch}/{instruction.name}[1]".lstrip("/")
                inner = None if trips is None or times is None else times * trips
                for name in condition_and_body(instruction):
                    rows += self.walk(name, inner, inside)
            elif op == "conditional":
                arms = called(attributes, "branch_computations") or (
                    called(attributes, "true_computation") + called(attributes, "false_computation")
                )
                inside = [
                    self.walk(arm, times, f"{branch}/{instruction.name}[{number}]".lstrip("/"))
                    for number, arm in enumerate(arms)
                ]
                dearest = max(inside, key=total_of, default=[])
                for more in inside:
                    rows += more if more is dearest else [row._replace(counted=False) for row in more]
            elif op in ("call", "async", "fusion"):
                for target in called(attributes, "to_apply") + called(attributes, "calls"):
                    if op != "fusion" or not self.seen_before(target):
                        rows += self.walk(target, times, branch)
        return rows

    def trips(self, loop: Instruction, computation: str) -> int | None:
        """How often a loop runs: as XLA says, or, of a counter that goes up by a constant to another one, by its text.

        XLA for TPU does not say. A counter is an entry of the loop's tuple that begins as a constant, that the body
        replaces by itself and a constant, and that the condition compares with a constant.
        """
        known = trip_count(loop.attributes)
        if known is not None:
            return known
        condition, body = condition_and_body(loop)
        test = self.last(condition)
        if test is None or self.last(body) is None or test.op != "compare" or "direction=LT" not in test.attributes:
            return None
        one, other = (read_by(test) + ["", ""])[:2]
        place, stop = self.entry_of_tuple(one, condition), self.constant(other, condition)
        before, each = (self.at(name, place, where) for name, where in ((read_by(loop)[0], computation), ("", body)))
        step = self.computations[body].get(each)
        if place is None or stop is None or step is None or step.op != "add":
            return None
        parts = read_by(step)
        by = [self.constant(part, body) for part in parts if self.entry_of_tuple(part, body) != place]
        start = self.constant(before, computation)
        if len(parts) != 2 or len(by) != 1 or not by[0] or by[0] < 0 or start is None:
            return None
        return max(0, -(-(stop - start) // by[0]))

    def is_condition(self, loop: Instruction) -> bool:
        """Whether a loop has at most one turn: a truth value that its body replaces by false is its condition."""
        condition, body = condition_and_body(loop)
        test = self.last(condition)
        place = self.entry_of_tuple(test.name, condition) if test is not None else None
        after = self.at("", place, body) if self.last(body) is not None else ""
        found = self.behind_copies(after, body) if after else None
        return found is not None and found.op == "constant" and found.operands.strip() == "false"

    def last(self, computation: str) -> Instruction | None:
        """The result of a computation, which stands last."""
        return next(reversed(self.computations.get(computation, {}).values()), None)

    def at(self, name: str, place: int | None, computation: str) -> str:
        """Name of an entry of a tuple (the result of the computation, without a name); "" where there is none."""
        made = self.computations[computation].get(name) if name else self.last(computation)
        parts = read_by(made) if made is not None and made.op == "tuple" else []
        return parts[place] if place is not None and place < len(parts) else ""

    def behind_copies(self, name: str, computation: str) -> Instruction | None:
        """The instruction of which another one is a copy, or itself."""
        found = self.computations[computation].get(name)
        while found is not None and found.op in ("copy", "bitcast", "reshape"):
            found = self.computations[computation].get(read_by(found)[0])
        return found

    def entry_of_tuple(self, name: str, computation: str) -> int | None:
        """The entry of the parameter of a computation that an instruction is; None for any other."""
        found = self.behind_copies(name, computation)
        if found is None or found.op != "get-tuple-element":
            return None
        of, index = self.computations[computation].get(read_by(found)[0]), re.search(r"index=(\d+)", found.attributes)
        return int(index[1]) if index and of is not None and of.op == "parameter" else None

    def constant(self, name: str, computation: str) -> int | None:
        """The integer that an instruction is; None for any other."""
        found = self.behind_copies(name, computation)
        is_whole = found is not None and found.op == "constant" and re.fullmatch(r"-?\d+", found.operands.strip())
        return int(found.operands) if found is not None and is_whole else None

    def source_of(self, instruction: Instruction, computation: str) -> str:
        """The line that an instruction comes from; where the text does not say it, of what XLA puts behind an argument,
        the line of the first one that reads it."""
        found = self.sources.of(instruction.attributes, PACKAGE)
        if found:
            return found
        if computation not in self.readers:
            self.readers[computation] = collections.defaultdict(list)
            for other in self.computations[computation].values():
                for name in read_by(other):
                    self.readers[computation][name].append(other.attributes)
        readers = self.readers[computation][instruction.name]
        return next(filter(None, (self.sources.of(attributes, PACKAGE) for attributes in readers)), "")

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

    def beside(self, instruction: Instruction, computation: str) -> int | None:
        """How many instructions that compute are scheduled between the start of a collective and its end.

        That of a `send` is the `recv-done` of what comes back under the same name.
        """
        every = list(self.computations[computation].values())
        starts, first = instruction.op.endswith("-start") or instruction.op == "send", every.index(instruction)
        if not (self.is_scheduled and starts):
            return None
        begun = {instruction.name}
        if instruction.op == "send":
            name = rendezvous_of(instruction.attributes)
            begun |= {i.name for i in every if i.op == "recv" and rendezvous_of(i.attributes) == name}
        ends = [n for n, i in enumerate(every) if i.op.endswith("-done") and begun & set(read_by(i))]
        ends = [n for n in ends if every[n].op != "send-done"]
        return sum(i.op in COMPUTES for i in every[first : max(ends)]) if ends else None

    def rows_of(self, op: str, instruction: Instruction, computation: str) -> Iterator[Row]:
        """Rows of an instruction that communicates and runs once, one for each array that it is given."""
        attributes, unknown = instruction.attributes, unknown_kind(instruction, op in SENT)
        pairs, transfer = ((), None) if op != "send" else (pairs_of_send(attributes), transfer_of(instruction))
        operands = self.contents(instruction, computation)
        if transfer is not None and operands:
            yield self.row_between_slices(transfer, operands[0], self.before_padding(instruction, computation))
            return
        if pairs:
            groups, like = pairs, "collective-permute"
        elif op in SENT:
            groups, like = device_groups(op, attributes, self.devices), op
        elif op in ("recv", "infeed"):  # nothing is sent here; what is received was sent by somebody unknown
            if op == "infeed" or rendezvous_of(attributes) not in self.rendezvous:
                for each in contents_of(instruction.type)[:1]:
                    yield Row(f"{UNKNOWN}{unknown}", each.dtype, each.shape, 0, 0, 0.0)
            return
        else:
            groups, like = device_groups(op, attributes, 0) if "replica_groups=" in attributes else (), ""
        # A permutation has a group for each of its pairs.
        group = len(groups) if like == "collective-permute" else max(map(len, groups), default=0)
        operands = operands or ([Contents("?", (), 0, 0)] if unknown else [])  # never silently nothing
        for each in operands[:1] if op in ("send", "ragged-all-to-all") else operands:  # then come token, or offsets
            senders = group / self.devices if like == "collective-permute" else 1
            yield Row(
                f"{UNKNOWN}{unknown}" if unknown else op,
                each.dtype,
                each.shape,
                group,
                each.num_bytes,
                SENT[like](each.num_bytes, group) * senders if like else float(each.physical_bytes),
                groups=self.places.in_every_slice(groups),
                physical_bytes=each.physical_bytes,
            )

    def row_between_slices(self, transfer: Transfer, handed: Contents, logical: Contents) -> Row:
        """The row of a `send` between slices. handed: to the host; logical: what it was before it was padded.

        A chip hands b bytes to its host, padding included. In a group of g chips of S slices, a chip sends SENT(b, g)
        by the model of the collective, and SENT(b, S) of it leaves its slice, which sends this for each of its chips
        that take part. With one chip of each slice in a group both are the same.
        """
        (op, groups), places, b = transfer, self.places, handed.physical_bytes
        crossing = tuple(sorted({tuple(dict.fromkeys(number for number, _ in group)) for group in groups}))
        if op == "collective-permute":
            group, leaving = len(groups), sum(a != b for (a, _), (b, _) in groups)
            sent, from_slice = b * group, b * leaving
        else:
            group, taking_part = max(map(len, groups)), sum(map(len, groups))
            sent = SENT[op](b, group) * taking_part
            from_slice = SENT[op](b, max(map(len, crossing))) * taking_part
        return Row(
            f"{op} between slices",
            logical.dtype,
            logical.shape,
            group,
            logical.num_bytes,
            sent / (self.devices * places.slices),
            groups=tuple(tuple(places.of(*chip) for chip in members) for members in groups),
            physical_bytes=b,
            slices=crossing,
            slice_bytes=from_slice / places.slices,
        )

    def contents(self, instruction: Instruction, computation: str) -> list[Contents]:
        """Arrays that an instruction is given."""
        known, result = self.computations[computation], []
        for operand, name in zip(split_list(instruction.operands), read_by(instruction), strict=True):
            # The type stands beside the operand in some prints, else with its definition.
            result += contents_of(operand if "[" in operand else known[name].type if name in known else "")
        return [each for each in result if each.dtype != "token"]

    def before_padding(self, instruction: Instruction, computation: str) -> Contents:
        """The array that a `send` carries, as it was before XLA padded it to whole tiles.

        XLA hands over tiles, f32[n,8,128], which it makes of another array by operations that move nothing but padding.
        """
        smallest, seen = self.contents(instruction, computation)[0], set()
        while instruction.operands and (computation, instruction.name) not in seen:
            seen.add((computation, instruction.name))
            before = self.computations.get(computation, {}).get(read_by(instruction)[0])
            if before is not None and before.op == "fusion":
                computation = next(iter(called(before.attributes, "calls")), "")
                before = self.last(computation)
            arrays = contents_of(before.type) if before is not None else []
            if before is None or not arrays or arrays[0].dtype != smallest.dtype:
                break
            if math.prod(arrays[0].shape) <= math.prod(smallest.shape):
                smallest = arrays[0]
            padding = before.op == "custom-call" and '"ZeroCrop"' in before.attributes
            if not padding and before.op not in ("bitcast", "copy", "copy-done", "copy-start", "reshape"):
                break
            instruction = before
        return smallest


def condition_and_body(loop: Instruction) -> tuple[str, str]:
    """Names of the two computations of a loop; "" where the text does not say."""
    condition, body = ((*called(loop.attributes, name), "")[0] for name in ("condition", "body"))
    return condition, body


def total_of(rows: Iterable[Row]) -> float:
    """Bytes that a device sends: of the rows that are counted."""
    return float(sum(row.sent_bytes for row in rows if row.counted))
