"""What the exchanges of a compiled training step wait for, read from its HLO text.

The backward pass is what JAX's transposition made: instructions whose `op_name` has `transpose(` in it. Its work is
counted in the multiply-adds of its matrix products. An exchange can run at the same time as those products that it
does not depend on, directly or through others: that share is what a scheduler may hide it behind. Where the program
has been scheduled with asynchronous collectives (TPU, GPU), the products between `-start` and `-done` are what it is
hidden behind.
"""

import math
import re
from typing import Any, NamedTuple

from jaxcomp.hlo import Instruction, called, contents_of, read_by, split_list
from jaxcomp.program import SENT, Module, Row, rendezvous_of

__all__ = ["Exchange", "exchanges"]


FUSED_START = "async-collective-start"  # XLA's name on TPU for one whose steps are fused with matrix products


class Exchange(NamedTuple):
    """One collective instruction.

    name, op: of the instruction; operand_bytes: contributed by a device, all operands together.
    waits_for: share of the backward pass that must be finished before it can start.
    hidden_behind: share of the backward pass scheduled between its start and its end; None if it is not asynchronous.
    """

    name: str
    op: str
    operand_bytes: int
    waits_for: float
    hidden_behind: float | None


def exchanges(text: str, mesh: Any, axis: str) -> list[Exchange]:
    """The collectives of the main computation that cross an axis, in the order of the program.

    Args:
        text: of a compiled module (`compiled.as_text()`).
        mesh: that it was compiled for.
        axis: of the mesh.
    """
    module = Module(text)
    main = module.computations[module.entry]
    work = {name: backward_work(module, module.entry, instruction) for name, instruction in main.items()}
    total = sum(work.values())
    names, found = list(main), []
    for place, (name, instruction) in enumerate(main.items()):
        rows = [row for row in rows_in(module, module.entry, instruction) if axis in row.axes(mesh)]
        if not rows:
            continue
        waits_for = sum(work[before] for before in ancestors(main, name)) / max(total, 1)
        end = next((other for other in reversed(main.values()) if ends(main, other, name)), None)
        hidden = None
        if end is not None:
            between = names[place + 1 : names.index(end.name)]
            hidden = sum(work[other] for other in between) / max(total, 1)
        size = sum(row.operand_bytes for row in rows)
        found.append(Exchange(name, rows[0].op, size, waits_for, hidden))
    return found


def ends(main: dict[str, Instruction], instruction: Instruction, start: str) -> bool:
    if main[start].op == "send":  # between slices of TPUs; what comes back has the same name
        made = main.get(operands(instruction)[0]) if instruction.op == "recv-done" else None
        return made is not None and rendezvous_of(made.attributes) == rendezvous_of(main[start].attributes)
    if start.startswith(FUSED_START):  # the steps lie in fusions in between
        return instruction.name == start.replace(FUSED_START, FUSED_START.replace("start", "done"))
    return instruction.op.endswith("-done") and start in operands(instruction)


def rows_in(module: Module, computation: str, instruction: Instruction) -> list[Row]:
    """The collectives of one instruction, those in computations that it calls included."""
    op = instruction.op.removesuffix("-start")
    if op in SENT or op == "send":
        return list(module.rows_of(op, instruction, computation))
    if instruction.op in ("call", "async-start") or instruction.name.startswith(FUSED_START):
        return [row for part in parts(instruction) for row in module.walk(part)]
    return []


def parts(instruction: Instruction) -> list[str]:
    """Computations that an instruction runs."""
    kinds = ("calls", "to_apply", "body", "condition", "branch_computations")
    return [name for kind in kinds for name in called(instruction.attributes, kind)]


def operands(instruction: Instruction) -> list[str]:
    """Names of the instructions that it reads or is ordered after."""
    return read_by(instruction) + called(instruction.attributes, "control-predecessors")


def ancestors(main: dict[str, Instruction], name: str) -> set[str]:
    """All instructions that must be finished before this one."""
    seen: set[str] = set()
    waiting = [name]
    while waiting:
        for before in operands(main[waiting.pop()]):
            if before in main and before not in seen:
                seen.add(before)
                waiting.append(before)
    return seen


def backward_work(module: Module, computation: str, instruction: Instruction) -> int:
    """Multiply-adds of the matrix products of the backward pass in an instruction and all that it calls."""
    if instruction.op in ("dot", "convolution"):
        name = re.search(r'op_name="([^"]*)"', instruction.attributes)
        return multiply_adds(module, computation, instruction) if name and "transpose(" in name[1] else 0
    return sum(
        backward_work(module, part, inner)
        for part in parts(instruction)
        for inner in module.computations.get(part, {}).values()
    )


def multiply_adds(module: Module, computation: str, instruction: Instruction) -> int:
    """Of a dot or a convolution: entries of the result, times the terms of the sum in each."""
    left, right = (shape_of(module, computation, operand) for operand in split_list(instruction.operands)[:2])
    if instruction.op == "dot":
        summed = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)
        terms = math.prod(left[int(i)] for i in summed[1].split(",") if i) if summed else 1
    else:
        labels = re.search(r"dim_labels=\w+_(\w+)->", instruction.attributes)
        terms = math.prod(n for n, label in zip(right, labels[1] if labels else "", strict=False) if label != "o")
    return math.prod(contents_of(instruction.type)[0].shape) * terms


def shape_of(module: Module, computation: str, operand: str) -> tuple[int, ...]:
    """The type stands beside the operand in some prints, else with its definition."""
    known = module.computations[computation].get(operand.split()[-1].lstrip("%"))
    found = contents_of(operand if "[" in operand or known is None else known.type)
    return found[0].shape if found else ()
