"""Collectives that a compiled module runs, and their bytes.

Bytes follow the models that `jaxcomp.ledger` lists.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
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
    split_list,
    trip_count,
)
from jaxcomp.transfers import DeviceNumbers, pairs_of_send, rendezvous_of, targets, transfer_of, unknown_kind

__all__ = ["SENT", "Module", "Row"]

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
COMPUTES = frozenset(
    [
        "fusion",
        "dot",
        "convolution",
        "custom-call",
        "while",
        "conditional",
        "call",
        "reduce",
        "reduce-window",
        "sort",
        "scatter",
        "gather",
        "fft",
    ]
)
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
    times: int | None
    branch: str
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

    def walk(self, computation: str, times: int | None, branch: str) -> tuple[list[Row], float]:
        """Rows and bytes of a computation and all that it calls."""
        rows: list[Row] = []
        total = 0.0
        for instruction in self.computations.get(computation, {}).values():
            attributes = instruction.attributes
            op = instruction.op.removesuffix("-start")
            if op in SENT or op == "send" or unknown_kind(instruction, False):
                source = self.sources.of(attributes, PACKAGE)
                made = self.rows_of(op, instruction, computation, times, branch)
                beside = self.beside(instruction, computation)
                more = [row._replace(source=source, beside=beside) for row in made]
                rows += more
                total += sum(row.sent_bytes for row in more)
            elif op == "while":
                trips, inside = self.trips(instruction, computation), branch
                if trips is None and self.is_condition(instruction):
                    trips, inside = 1, f"{branch}/{instruction.name}[1]".lstrip("/")
                inner = None if trips is None or times is None else times * trips
                names = called(attributes, "condition") + called(attributes, "body")
                parts = [self.walk(name, inner, inside) for name in names]
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

    def trips(self, loop: Instruction, computation: str) -> int | None:
        """How often a loop runs: as XLA says, or, of a counter that goes up by a constant to another one, by its text.

        XLA for TPU does not say. A counter is an entry of the loop's tuple that begins as a constant, that the body
        replaces by itself and a constant, and that the condition compares with a constant.
        """
        known = trip_count(loop.attributes)
        if known is not None:
            return known
        (condition, *_), (body, *_) = (called(loop.attributes, name) or [""] for name in ("condition", "body"))
        test, after = self.last(condition), self.last(body)
        if test is None or after is None or test.op != "compare" or "direction=LT" not in test.attributes:
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
        (condition, *_), (body, *_) = (called(loop.attributes, name) or [""] for name in ("condition", "body"))
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

    def rows_of(
        self, op: str, instruction: Instruction, computation: str, times: int | None, branch: str
    ) -> Iterator[Row]:
        """Rows of an instruction that communicates, one for each array that it is given."""
        attributes, often = instruction.attributes, 1 if times is None else times
        transfer = transfer_of(instruction) if op == "send" else None
        unknown = unknown_kind(instruction, op in SENT)
        operands = self.contents(instruction, computation)
        if transfer is not None and transfer.op is not None and transfer.groups and operands:
            yield from self.rows_between_slices(transfer.op, instruction, computation, times, branch)
            return
        if op == "send" and pairs_of_send(attributes):
            groups, like = pairs_of_send(attributes), "collective-permute"
        elif op in SENT:
            groups, like = device_groups(op, attributes, self.devices), op
        elif op in ("recv", "infeed"):  # nothing is sent here; what is received was sent by somebody unknown
            if op == "recv" and rendezvous_of(attributes) in self.rendezvous:
                return
            for each in contents_of(instruction.type)[:1]:
                yield Row(f"{UNKNOWN}{unknown}", each.dtype, each.shape, 0, 0, 0.0, times, branch)
            return
        else:
            groups, like = device_groups(op, attributes, 0) if "replica_groups=" in attributes else (), ""
        # A permutation has a group for each of its pairs.
        group = len(groups) if like == "collective-permute" else max(map(len, groups), default=0)
        operands = operands or ([Contents("?", (), 0, 0)] if unknown else [])  # never silently nothing
        for each in operands[:1] if op in ("send", "ragged-all-to-all") else operands:  # then come token, or offsets
            senders = group / self.devices if like == "collective-permute" else 1
            sent = SENT[like](each.num_bytes, group) * senders if like else float(each.physical_bytes)
            yield Row(
                f"{UNKNOWN}{unknown}" if unknown else op,
                each.dtype,
                each.shape,
                group,
                each.num_bytes,
                sent * often,
                times,
                branch,
                True,
                self.places.in_every_slice(groups),
                each.physical_bytes,
            )

    def rows_between_slices(
        self, op: str, instruction: Instruction, computation: str, times: int | None, branch: str
    ) -> Iterator[Row]:
        """The row of a `send` between slices.

        A chip hands b bytes to its host, padding included. In a group of g chips of S slices, a chip sends SENT(b, g)
        by the model of the collective, and SENT(b, S) of it leaves its slice, which sends this for each of its chips
        that take part. With one chip of each slice in a group both are the same.
        """
        transfer = transfer_of(instruction)
        assert transfer is not None
        places, often = self.places, 1 if times is None else times
        each = self.contents(instruction, computation)[0]
        logical = self.before_padding(instruction, computation)
        crossing = tuple(sorted({tuple(dict.fromkeys(number for number, _ in group)) for group in transfer.groups}))
        if op == "collective-permute":
            group = len(transfer.groups)
            sent = each.physical_bytes * group / (self.devices * places.slices)
            from_slice = each.physical_bytes * sum(a != b for (a, _), (b, _) in transfer.groups) / places.slices
        else:
            group = max(map(len, transfer.groups))
            slices = max(map(len, crossing))
            taking_part = sum(map(len, transfer.groups))
            sent = SENT[op](each.physical_bytes, group) * taking_part / (self.devices * places.slices)
            from_slice = SENT[op](each.physical_bytes, slices) * taking_part / places.slices
        yield Row(
            f"{op} between slices",
            logical.dtype,
            logical.shape,
            group,
            logical.num_bytes,
            sent * often,
            times,
            branch,
            True,
            tuple(tuple(places.of(*chip) for chip in members) for members in transfer.groups),
            each.physical_bytes,
            crossing,
            from_slice * often,
        )

    def contents(self, instruction: Instruction, computation: str) -> list[Contents]:
        """Arrays that an instruction is given."""
        known, result = self.computations[computation], []
        for operand in split_list(instruction.operands):
            name = operand.split()[-1].lstrip("%")
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
            name = split_list(instruction.operands)[0].split()[-1].lstrip("%")
            before = self.computations.get(computation, {}).get(name)
            if before is not None and before.op == "fusion":
                computation = next(iter(called(before.attributes, "calls")), "")
                before = next(reversed(self.computations.get(computation, {}).values()), None)
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


def read_by(instruction: Instruction) -> list[str]:
    """Names of the operands of an instruction."""
    return [part.split()[-1].lstrip("%") for part in split_list(instruction.operands)]
