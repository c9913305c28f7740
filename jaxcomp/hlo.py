"""HLO text taken apart: instructions, the computations that they call, their types, and who takes part in a collective.

Three ways to write replica groups are in use: {{0,1},{2,3}} and [groups,size]<=[n] (JAX 0.10), and
mesh['data'=2,'model'=2] {'data'} (JAX 0.12).
"""

import json
import math
import re
from typing import NamedTuple

import numpy as np

__all__ = [
    "Contents",
    "Instruction",
    "Sources",
    "bits_of",
    "called",
    "contents_of",
    "device_groups",
    "parse_instruction",
    "read_by",
    "split_list",
    "trip_count",
    "without_metadata",
]


class Instruction(NamedTuple):
    name: str
    type: str
    op: str
    operands: str
    attributes: str


class Contents(NamedTuple):
    """One array of a type.

    dtype, shape: as HLO writes them.
    num_bytes: of its entries.
    physical_bytes: with the padding of its layout's tiles.
    """

    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    physical_bytes: int


MOST_DEVICES = 2**24
MOST_FRAMES = 256  # of one call stack


def device_groups(op: str, attributes: str, devices: int) -> tuple[tuple[int, ...], ...]:
    """Devices that take part together; of a permutation, the pairs with two ends. devices: of the program."""
    if op == "collective-permute":
        pairs = re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", attributes)
        ends = re.findall(r"\{(\d+),(\d+)\}", pairs[1]) if pairs else []
        return tuple((int(a), int(b)) for a, b in ends if a != b)
    mesh = re.search(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(([^)]*\)?)\))?\s*\{([^}]*)\}", attributes)
    if mesh:
        sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", mesh[1])}
        used = re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", mesh[3])
        numbers = iota(mesh[2]) if mesh[2] else np.arange(math.prod(sizes.values()))
        return as_groups(mesh_groups(numbers, sizes, used))
    regular = re.search(r"replica_groups=(\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)", attributes)
    if regular:
        return as_groups(iota(regular[1]))
    listed = re.search(r"replica_groups=\{((?:\{[\d,]+\},?)+)\}", attributes)
    if listed:
        return tuple(tuple(map(int, part.split(","))) for part in re.findall(r"\{([\d,]+)\}", listed[1]))
    return (tuple(range(devices)),)


def as_groups(rows: np.ndarray) -> tuple[tuple[int, ...], ...]:
    """Rows of an array as tuples of Python integers."""
    return tuple(tuple(map(int, row)) for row in rows)


def iota(text: str) -> np.ndarray:
    """The array that XLA writes as [2,4]<=[4,2]T(1,0): 0, 1, 2, ... as [4,2], transposed, as [2,4]."""
    numbers = lambda part: [int(n) for n in part.split(",") if n]
    found = re.fullmatch(r"\[(\d[\d,]*)\](?:<=\[(\d[\d,]*)\])?(?:T\((\d[\d,]*)\))?", text.strip())
    shape, source, order = (numbers(part) if part else None for part in found.groups()) if found else (None,) * 3
    source = source or shape
    if (
        not (shape and source)
        or not math.prod(source) == math.prod(shape) < MOST_DEVICES
        or (order and sorted(order) != list(range(len(source))))
    ):
        raise ValueError(f"ledger: cannot read the devices {text}")
    array = np.arange(math.prod(source)).reshape(source)
    return (array.transpose(order) if order else array).reshape(shape)


def mesh_groups(devices: np.ndarray, sizes: dict[str, int], used: list[tuple[str, str, str]]) -> np.ndarray:
    """Groups over some axes of a mesh, one a row.

    devices: their numbers in the order of the mesh. sizes: of all axes, in order. used: (axis, before, size): the part
    of an axis that is left when it is cut into [before, size, rest]; before and size are empty for the whole axis.
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
    end = closing(rest, 0) + 1 if rest.startswith("(") else rest.find(" ")
    if end < 0:  # cut off
        return None
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


def read_by(instruction: Instruction) -> list[str]:
    """Names of the operands of an instruction."""
    return [part.split()[-1].lstrip("%") for part in split_list(instruction.operands)]


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


ARRAY = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,<=]*)\](?:\{([\d,]*)(?::([^}]*))?\})?")


def contents_of(type_: str) -> list[Contents]:
    """Each array in a type, with the bytes that its layout takes; tuples are flattened.

    >>> contents_of("bf16[3,200]{1,0:T(8,128)(2,1)}")
    [Contents(dtype='bf16', shape=(3, 200), num_bytes=1200, physical_bytes=4096)]
    """
    result = []
    for dtype, dims, order, layout in ARRAY.findall(type_):
        shape = tuple(int(n.strip("<=")) for n in dims.split(",") if n)
        tile = re.match(r"T\(([\d,]+)\)", layout)
        sizes = list(shape)
        if tile:
            # Dimensions from the major to the minor one. Tiles after the first divide it, and pad nothing.
            sizes = [shape[int(i)] for i in reversed(order.split(",")) if i]
            edges = [int(n) for n in tile[1].split(",")]
            sizes = [1] * (len(edges) - len(sizes)) + sizes
            for place, edge in enumerate(edges, start=len(sizes) - len(edges)):
                sizes[place] += -sizes[place] % edge
        bits = bits_of(dtype)
        result.append(Contents(dtype, shape, math.prod(shape) * bits // 8, math.prod(sizes) * bits // 8))
    return result


class Sources:
    """Lines of programs that instructions come from, out of the tables at the head of a module's text."""

    def __init__(self, text: str):
        quoted, table = r'^(\d+) "(.*)"$', r"^(\d+) \{(.*)\}$"
        self.files = dict(re.findall(quoted, section(text, "FileNames"), re.M))
        self.functions = dict(re.findall(quoted, section(text, "FunctionNames"), re.M))
        entries = lambda name: {
            i: dict(re.findall(r"(\w+)=(\d+)", x)) for i, x in re.findall(table, section(text, name), re.M)
        }
        self.places, self.frames = entries("FileLocations"), entries("StackFrames")

    def of(self, attributes: str, inside: str = "") -> str:
        """The line that an instruction comes from, as "file:line (function)"; "" where the text does not say.

        Args:
            attributes: of the instruction.
            inside: a folder whose lines are passed over, as long as there are others: they stand for who called them.
        """
        file, line = re.search(r'source_file="([^"]*)"', attributes), re.search(r"source_line=(\d+)", attributes)
        if file and line:
            return f"{file[1]}:{line[1]}"
        frame = re.search(r"stack_frame_id=(\d+)", attributes)
        stack = self.stack(frame[1]) if frame else []
        return next((place for place in stack if not (inside and place.startswith(inside))), next(iter(stack), ""))

    def stack(self, frame: str) -> list[str]:
        """Lines of a frame and of those that called it. The text numbers parents from one too high, and none as 1."""
        found: list[str] = []
        while frame in self.frames and len(found) < MOST_FRAMES:
            place = self.places.get(self.frames[frame].get("file_location_id", ""), {})
            function = self.functions.get(place.get("function_name_id", ""), "")
            file = self.files.get(place.get("file_name_id", ""), "?")
            found.append(f"{file}:{place.get('line', '?')}" + (f" ({function})" if function else ""))
            frame = str(int(self.frames[frame].get("parent_frame_id", 1)) - 1)
        return found


def section(text: str, name: str) -> str:
    """The lines of a table at the head of a module's text."""
    found = re.search(rf"^{name}\n((?:.+\n)*)", text, re.M)
    return found[1] if found else ""


def without_metadata(attributes: str) -> str:
    """Attributes without what the user's own names of functions and files stand in."""
    return re.sub(r'metadata=\{(?:[^{}"]|"(?:[^"\\]|\\.)*")*\}', "", attributes)


def bits_of(dtype: str) -> int:
    """Bits of one entry of an HLO type; 0 for what has none (tokens)."""
    if dtype == "pred":
        return 8
    number = re.match(r"[a-z]+(\d+)", dtype)
    return int(number[1]) if number else 0
