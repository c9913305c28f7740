"""What a compiled program of a GPU moves, counted in its text: kernels, bytes that they read and write, waits.

An instruction of the scheduled text is a kernel, unless it only names what is there. It reads its operands and writes
its results; of a fusion that cuts, gathers, updates or scatters only what it touches counts. An access to a single
entry touches a sector of 32 bytes. A loop counts as often as its text says that it turns. Where no number is in the
text, the host waits for the loop's condition, and the caller says how often it turns; of a condition that the host
waits for, the arm of "true" counts, which in this library is the one that is expected.
"""

import math
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

from jaxcomp.hlo import Contents, Instruction, bits_of, called, contents_of, read_by, trip_count
from jaxcomp.program import Module

__all__ = ["Counted", "Kernel", "counted", "cycles"]

NAMES = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"}
NAMES |= {"optimization-barrier", "add-dependency", "domain"}
SECTOR = 32
CACHED = 2**17  # bytes of a table that stays beside the units that read it
# Rows of at most 32 entries, reduced by a warp each, pass at 55 % of the bandwidth (SIDCo's marks, on an H200).
NARROW, SLOWER = 32, 1.8
# A sort passes so often over what it sorts; measured on an H200: 9 (2^27 entries) to 16 (rows of 2^12).
SORT_PASSES = 12


Visit = Callable[[str, Instruction, int], None]


class Kernel(NamedTuple):
    """name: of the instruction; read, written: bytes each time; flops: of products of matrices; times: how often;
    slower: than memory alone would be."""

    name: str
    op: str
    read: float
    written: float
    flops: float
    times: int
    slower: float = 1.0


class Counted(NamedTuple):
    """kernels: each with its repetitions; waits: how often the host waits for a condition."""

    kernels: tuple[Kernel, ...]
    waits: int

    @property
    def launches(self) -> int:
        return sum(kernel.times for kernel in self.kernels)

    @property
    def bytes(self) -> float:
        return sum((kernel.read + kernel.written) * kernel.times for kernel in self.kernels)

    def seconds(self, bandwidth: float, flops: float, launch: float, wait: float) -> float:
        """By a simple model: a kernel takes the longest of memory, arithmetic and its launch, and each wait adds."""
        memory = lambda k: k.slower * (k.read + k.written) / bandwidth
        return sum(k.times * max(memory(k), k.flops / flops, launch) for k in self.kernels) + wait * self.waits


def counted(text: str, turns: int = 0) -> Counted:
    """turns: of each loop whose number of turns is not in the text."""
    module = Module(text)
    kernels: list[Kernel] = []
    add = lambda computation, each, times: kernels.append(_kernel(module, computation, each, times))
    waits = _walk(module, module.entry, 1, turns, add)
    return Counted(tuple(kernels), waits)


def cycles(text: str, turns: int = 0) -> int:
    """Cycles that the compiler of TPUs estimates for a program. turns: as for `counted`."""
    module, found = Module(text), list[int]()

    def add(computation: str, each: Instruction, times: int) -> None:
        del computation
        own = re.search(r'"estimated_cycles":"(\d+)"', each.attributes)
        found.append(times * int(own[1]) if own else 0)

    _walk(module, module.entry, 1, turns, add)
    return sum(found)


def _walk(module: Module, computation: str, times: int, turns: int, visit: Visit) -> int:
    """Calls visit(computation, instruction, times) for all that runs; returns how often the host waits."""
    waits = 0
    for each in module.computations.get(computation, {}).values():
        op, attributes = each.op, each.attributes
        if op in NAMES or op.endswith("-done"):
            continue
        if op == "while":
            known = trip_count(attributes)
            # `backend.only_if` carries a truth value, and is not expected to be needed.
            rounds = (0 if "pred[" in each.type else turns) if known is None else known
            waits += times * (rounds + 1) * (known is None)
            for name in called(attributes, "body"):
                waits += _walk(module, name, times * rounds, turns, visit)
            for name in called(attributes, "condition"):
                if known is None:
                    waits += _walk(module, name, times * (rounds + 1), turns, visit)
        elif op == "conditional":
            arms = called(attributes, "true_computation") or called(attributes, "branch_computations")[-1:]
            waits += times
            for name in arms:
                waits += _walk(module, name, times, turns, visit)
        elif op == "call":
            for name in called(attributes, "to_apply"):
                waits += _walk(module, name, times, turns, visit)
        else:
            visit(computation, each, times)
    return waits


def _size(contents: Iterable[Contents]) -> float:
    return float(sum(each.num_bytes for each in contents))


def _kernel(module: Module, computation: str, each: Instruction, times: int) -> Kernel:
    known = module.computations[computation]
    operands = [_type(known, name) for name in read_by(each)]
    if each.op == "sort" or (each.op == "fusion" and _holds(module, each, "sort")):
        once = _size(contents_of(each.type))
        return Kernel(each.name, "sort", SORT_PASSES * once, SORT_PASSES * once, 0.0, times)
    if each.op == "fusion":
        (inner,) = called(each.attributes, "calls")[:1]
        read, written = _of_fusion(module.computations[inner])
        slower = SLOWER if _has_narrow_rows(module.computations[inner]) else 1.0
        return Kernel(each.name, each.op, read, written, _flops(module, inner), times, slower)
    if each.op == "dynamic-update-slice":
        update = _size(contents_of(operands[1]))
        return Kernel(each.name, each.op, update, update, 0.0, times)
    if each.op in ("dynamic-slice", "slice"):
        result = _size(contents_of(each.type))
        return Kernel(each.name, each.op, result, result, 0.0, times)
    read = sum(_size(contents_of(text)) for text in operands)
    written = _size(contents_of(each.type))
    return Kernel(each.name, each.op, read, written, _flops_of(each, known), times)


def _type(known: dict[str, Instruction], name: str) -> str:
    return known[name].type if name in known else ""


def _has_narrow_rows(known: dict[str, Instruction]) -> bool:
    """Whether a fusion ends in sums over at most `NARROW` neighbours."""
    root = list(known.values())[-1]
    ends = [known[name] for name in read_by(root)] if root.op == "tuple" else [root]
    for each in (_through(known, end.name) for end in ends):
        shape = contents_of(_type(known, read_by(each)[0]))[0].shape if each.op == "reduce" else ()
        if (
            shape
            and 1 < shape[-1] <= NARROW
            and re.search(rf"dimensions=\{{(?:\d,)*{len(shape) - 1}\}}", each.attributes)
        ):
            return True
    return False


def _holds(module: Module, fusion: Instruction, op: str) -> bool:
    return any(i.op == op for name in called(fusion.attributes, "calls") for i in module.computations[name].values())


def _flops(module: Module, computation: str) -> float:
    known = module.computations[computation]
    inside = sum(_flops_of(each, known) for each in known.values())
    nested = [name for each in known.values() if each.op == "fusion" for name in called(each.attributes, "calls")]
    return inside + sum(_flops(module, name) for name in nested)


def _flops_of(each: Instruction, known: dict[str, Instruction]) -> float:
    """Of a product of matrices: twice the entries of the result times those that are summed for each. Products of
    numbers of 16 bits, on tensor cores, are fifteen times as fast as those in f32 without them, and count so much less.
    """
    gemm = each.op == "custom-call" and "gemm" in each.attributes
    if each.op != "dot" and not gemm:
        return 0.0
    kind, left = contents_of(_type(known, read_by(each)[0]))[0][:2]
    found = re.search(r'lhs_contracting_dim(?:ension)?s"?[=:]\s*[\[{]([^\]}]*)[\]}]', each.attributes)
    dims = [int(n) for n in re.findall(r"\d+", found[1])] if found else [len(left) - 1]
    fifteenths = 6 if "bf16_bf16_f32_x6" in each.attributes else 1 if kind in ("bf16", "f16") else 15
    cheaper = fifteenths / 15
    return 2.0 * math.prod(contents_of(each.type)[0].shape) * math.prod(left[n] for n in dims) * cheaper


# ------------------------------------------------------------------------------------------------
# Fusions: from the results back to what is read for them


def _of_fusion(known: dict[str, Instruction]) -> tuple[float, float]:
    """Bytes read and written."""
    order = list(known)
    need: dict[str, float] = dict.fromkeys(
        order, 0.0
    )  # entries of each that somebody asks for, touched bytes of params
    scattered: dict[str, float] = {}  # bytes of sectors that are read of it
    results = read_by(known[order[-1]]) if known[order[-1]].op == "tuple" else [order[-1]]
    written = 0.0
    for name in results:
        written += _demanded(known, name, need)
    for name in reversed(order):
        each = known[name]
        if each.op not in ("parameter", "constant", "tuple") and need[name]:
            _ask(known, each, need, scattered)
    read = 0.0
    for name, each in known.items():
        if each.op == "parameter":
            whole = contents_of(each.type)
            if whole:
                size = _size(whole)
                read += min(size, need[name] * bits_of(whole[0].dtype) / 8) + scattered.get(name, 0.0)
    return read, written


def _through(known: dict[str, Instruction], name: str) -> Instruction:
    """What a chain of bitcasts names."""
    each = known[name]
    while each.op in ("bitcast", "reshape", "copy") and read_by(each)[0] in known:
        each = known[read_by(each)[0]]
    return each


def _demanded(known: dict[str, Instruction], name: str, need: dict[str, float]) -> float:
    """Asks for a result of the fusion: all of it, or what is put into its place. Returns the bytes written."""
    each = _through(known, name)
    if each.op in ("dynamic-update-slice", "scatter"):
        # In place: XLA writes an instruction for the copy where it is not.
        inputs = read_by(each)
        update = inputs[1] if each.op == "dynamic-update-slice" else inputs[-1]
        for other in inputs[1:]:
            need[other] = max(need[other], _entries(known[other]))
        contents = contents_of(known[update].type)[0]
        if each.op == "dynamic-update-slice":
            return float(contents.num_bytes)
        window = _window(each.attributes, contents.shape)
        wide = window * bits_of(contents.dtype) / 8
        writes = contents.num_bytes / wide
        if "unique_indices=true" in each.attributes:  # no place is written twice; updates for none are dropped
            writes = min(writes, _entries(each) / window)
        return writes * max(wide, SECTOR)
    need[each.name] = max(need[each.name], _entries(each))
    return _size(contents_of(known[name].type))


def _window(attributes: str, shape: tuple[int, ...]) -> int:
    """Entries of a window of a scatter's updates."""
    found = re.search(r"update_window_dims=\{([\d,]*)\}", attributes)
    return math.prod(shape[int(n)] for n in found[1].split(",") if n) if found else 1


def _entries(each: Instruction) -> float:
    return float(max((math.prod(x.shape) for x in contents_of(each.type)), default=0))


def _follows(broadcast: Instruction) -> bool:
    """Whether part of the rows of what is broadcast is read for part of the rows of the result."""
    first = next((axis for axis, size in enumerate(contents_of(broadcast.type)[0].shape) if size > 1), 0)
    found = re.search(r"dimensions=\{([\d,]*)\}", broadcast.attributes)
    return found is not None and str(first) in found[1].split(",")


def _read_for(known: dict[str, Instruction], name: str) -> tuple[float, bool]:
    """Entries of all that is read to compute a value; whether it depends on where it stands, too."""
    found, left = {name}, [name]
    while left:
        more = [other for other in read_by(known[left.pop()]) if other in known and other not in found]
        found.update(more)
        left += more
    read = sum(_entries(known[each]) for each in found if known[each].op == "parameter")
    return read, any(known[each].op == "iota" for each in found)


def _ask(known: dict[str, Instruction], each: Instruction, need: dict[str, float], scattered: dict[str, float]) -> None:
    """What an instruction needs of its operands for the entries that are asked of it."""
    asked, inputs = need[each.name], [name for name in read_by(each) if name in known]
    share = asked / max(_entries(each), 1.0)
    for place, name in enumerate(inputs):
        whole = _entries(known[name])
        if each.op == "gather" and place == 0:
            found = re.search(r"slice_sizes=\{([\d,]*)\}", each.attributes)
            window = math.prod(int(n) for n in found[1].split(",") if n) if found else 1
            source = _through(known, name)
            wide = bits_of(contents_of(source.type)[0].dtype) / 8
            distinct, by_place = _read_for(known, inputs[1])
            if 0 < distinct < asked / window:  # neighbours read one place, or, by their own place, neighbouring ones
                more = asked if by_place else distinct * window
            elif source.op == "parameter" and window * wide < SECTOR and whole * wide > CACHED:
                scattered[source.name] = scattered.get(source.name, 0.0) + asked / window * SECTOR
                continue
            else:
                more = asked
        elif each.op in ("slice", "dynamic-slice") and place == 0:
            more = asked
        elif each.op in ("dynamic-slice", "dynamic-update-slice") and place > 0 and whole == 1:
            more = 1.0
        elif (each.op == "broadcast" and not _follows(each)) or each.op in ("concatenate", "pad"):
            more = min(whole, asked)
        else:
            more = whole * share
        # Several slices of one operand may be of different parts; anything else asks for the same entries again.
        apart = each.op in ("slice", "dynamic-slice", "gather")
        need[name] = min(whole, need[name] + more) if apart else max(need[name], min(whole, more))
