"""Communication that HLO does not write as a collective: between slices of TPUs, and what is only recognised as such.

**Between slices** XLA compiles one program for all slices, of as many partitions as one slice has chips. What crosses
the network between slices is a pair of `send` and `recv`, by which a chip hands its operand to the host and takes the
result from it; the runtime of the hosts (megascale) does the collective that `_xla_megascale_transfer_type` names,
among the chips of `_xla_megascale_target`:

    "{1,2}x{0:3}"                    chip c of slices 1 and 2, for each c from 0 to 3
    {{100000,200000},{100001,...}}   groups of chips: 100000 s + c is chip c of slice s, counted from one
    {{100000->200000},...}           pairs of a permutation

The text says what a chip hands over, b bytes with their padding, and who takes part; how the runtime moves it is not in
the text, so bytes sent follow the usual models of the collective (see `jaxcomp.ledger`), with the g chips of a group.
A `recv` is the other end of a `send` and counts nothing.

**Unknown** is what communicates, but not in a way that is understood here. The rule: an instruction communicates if it

    is a send or recv of another kind, an infeed or an outfeed,
    is named like a collective (collective-reduce, all-scatter) without being one of the known ones,
    has replica_groups or source_target_pairs (a custom call also: a channel_id),
    is a custom call whose target is named like a communication library, a collective or a callback of the host,
    is a custom call whose backend_config says so: `has_communication` or a `collective_id` (Pallas on TPU),
    `uses_xla_collective_metadata` (Pallas on GPU), nccl, nvshmem,
    is a collective with a quantization among its attributes, which sends fewer bytes than its operand has,
    or is of a kind that is not among the known local ones (LOCAL): what a later compiler invents is not overlooked.

Custom calls of other names (TopK, sorts, Sharding, cuBLAS, cuDNN, FFTs, factorizations, SliceId, ZeroCrop) are local,
and so are AsyncCollectiveStart and AsyncCollectiveDone of libtpu, which begin and end a collective that is listed.
"""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxcomp.hlo import Instruction, without_metadata

__all__ = [
    "BETWEEN_SLICES",
    "DeviceNumbers",
    "Transfer",
    "pairs_of_send",
    "rendezvous_of",
    "transfer_of",
    "unknown_kind",
]

BETWEEN_SLICES = {
    "ALL_REDUCE": "all-reduce",
    "ALL_GATHER": "all-gather",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_TO_ALL": "all-to-all",
    "RAGGED_ALL_TO_ALL": "ragged-all-to-all",
    "ONE_TO_ONE": "collective-permute",
}
MOST = 2**16  # chips of a slice, or slices: what names more is no target
SLICE = 100_000  # a chip's number holds that of its slice, counted from one, times this

# All instructions of HLO that do not communicate by themselves.
NAMES = """
abs acos acosh add add-dependency after-all and asin asinh async atan2 atanh batch-norm-grad batch-norm-inference
batch-norm-training bitcast bitcast-convert broadcast call cbrt ceil cholesky clamp compare complex concatenate
conditional constant convert convolution copy cosh cosine count-leading-zeros custom-call divide domain dot
dynamic-reshape dynamic-slice dynamic-update-slice erf exponential exponential-minus-one fft floor fusion gather
get-dimension-size get-tuple-element imag iota is-finite log log-plus-one logistic map maximum minimum multiply negate
not opt-barrier or pad parameter partition-id popcnt power ragged-dot real reduce reduce-precision reduce-window
remainder replica-id reshape reverse rng rng-bit-generator rng-get-and-update-state round-nearest-afz round-nearest-even
rsqrt scaled-dot scan scatter select select-and-scatter set-dimension-size shift-left shift-right-arithmetic
shift-right-logical sign sine sinh slice sort sqrt stochastic-convert subtract tan tanh topk transpose triangular-solve
tuple while xor
"""
LOCAL = frozenset(NAMES.split())
NAMED_SO = re.compile(
    r"nccl|rccl|nvshmem|megascale|collective|all_?reduce|all_?gather|all_?to_?all|reduce_?scatter|ppermute|multicast"
    r"|remote_?(?:copy|dma)|callback|host_?transfer|(?<![a-z])(?:send|recv|mpi|gloo)(?![a-z])"
)
SAYS_SO = re.compile(
    r'has_communication\W{1,5}true|collective_id\W{1,5}\d|uses_xla_collective_metadata\W{1,5}true|"[^"]*(?:nccl|nvshmem)'
)


class Transfer(NamedTuple):
    """A collective between slices.

    op: the collective that the hosts do, by its HLO name.
    groups: chips that take part together, or pairs, as (slice, chip) counted from zero.
    """

    op: str
    groups: tuple[tuple[tuple[int, int], ...], ...]


class DeviceNumbers:
    """Numbers of a program's devices: their places in the mesh it was compiled for, the last axis fastest.

    A program for several slices numbers the chips of one slice in the order that they have in the mesh; a target
    between slices numbers them by hardware. Where the devices are not known, slices are taken to follow one another.
    """

    def __init__(self, chips: int, slices: int, devices: Sequence[Any] = ()):
        """chips: of one slice; slices: how many, where the devices are not known; devices: in the order of the mesh."""
        self.chips = chips
        rows: dict[int, list[int]] = {}
        for place, device in enumerate(devices):
            rows.setdefault(getattr(device, "slice_index", 0) or 0, []).append(place)
        self.ranked = [rows[number] for number in sorted(rows)]
        if not rows or any(len(row) != chips for row in self.ranked):
            devices = ()
            self.ranked = [list(range(s * chips, (s + 1) * chips)) for s in range(slices)]
        self.by_id = {device.id: place for place, device in enumerate(devices)}
        self.by_hardware = [sorted(row, key=lambda i: devices[i].id if devices else i) for row in self.ranked]

    @property
    def slices(self) -> int:
        return len(self.ranked)

    def in_every_slice(self, groups: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
        """Groups of chips of one slice, as groups of all devices."""
        if self.slices == 1:
            return groups
        return tuple(tuple(row[chip] for chip in group) for row in self.ranked for group in groups)

    def of(self, number: int, chip: int) -> int:
        """The place of a chip of a slice, by hardware numbers from zero."""
        known = self.by_id.get((number + 1) * SLICE + chip)
        return self.by_hardware[number % self.slices][chip % self.chips] if known is None else known


def transfer_of(instruction: Instruction) -> Transfer | None:
    """The collective between slices that a `send` is; None where its name is unknown, or it names no chips of it."""
    kind = re.search(r'_xla_megascale_transfer_type="?(\w+)', instruction.attributes)
    op, groups = BETWEEN_SLICES.get(kind[1]) if kind else None, targets(instruction.attributes)
    pairs = all(len(group) == 2 for group in groups)
    return Transfer(op, groups) if op and groups and (pairs or op != "collective-permute") else None


def targets(text: str) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Groups of chips, or pairs, that a `_xla_megascale_target` in a text names, as (slice, chip) from zero; none where
    it names no chips that there can be."""
    groups = named_in(text)
    exist = all(group and all(0 <= s < MOST and chip < MOST for s, chip in group) for group in groups)
    return groups if exist else ()


def named_in(text: str) -> tuple[tuple[tuple[int, int], ...], ...]:
    """The same, whether there can be such chips or not."""
    product = re.search(r'_xla_megascale_target="?\{([\d,:]+)\}x\{([\d,:]+)\}', text)
    if product:
        slices, chips = ranges(product[1]), ranges(product[2])
        return tuple(tuple((number - 1, chip) for number in slices) for chip in chips)
    listed = re.search(r'_xla_megascale_target="?\{((?:\{[\d,>-]+\},?)+)\}', text)
    if not listed:
        return ()
    groups = [re.findall(r"\d+", group) for group in re.findall(r"\{([^}]*)\}", listed[1])]
    return tuple(tuple((int(n) // SLICE - 1, int(n) % SLICE) for n in group) for group in groups)


def ranges(text: str) -> list[int]:
    """Numbers of a list like 0:3,7; none for what is no such list, or has more than there can be.

    >>> ranges("0:3,7"), ranges("0:3000000000"), ranges("1:")
    ([0, 1, 2, 3, 7], [], [])
    """
    ends = [part.split(":") for part in text.split(",")]
    if not all(1 <= len(part) <= 2 and all(n.isdigit() and int(n) < MOST for n in part) for part in ends):
        return []
    return [n for part in ends for n in range(int(part[0]), int(part[-1]) + 1)]


def pairs_of_send(attributes: str) -> tuple[tuple[int, ...], ...]:
    """Pairs of devices of a `send` that is half of a permutation, as XLA for GPU takes some apart."""
    found = re.search(r'_xla_send_recv_source_target_pairs="?\{((?:\{\d+,\d+\},?)+)\}', attributes)
    ends = re.findall(r"\{(\d+),(\d+)\}", found[1]) if found else []
    return tuple((int(a), int(b)) for a, b in ends if a != b)


def rendezvous_of(attributes: str) -> str:
    """The name that a `send` and its `recv` have in common, or their pairs."""
    found = re.search(r'_xla_host_transfer_rendezvous="?([^",}]+)', attributes)
    return found[1] if found else str(pairs_of_send(attributes))


def unknown_kind(instruction: Instruction, known: bool) -> str | None:
    """Names an instruction that communicates in a way that is not understood; None for any other.

    Args:
        instruction: of any kind.
        known: whether it is one of the known collectives.
    """
    op, attributes = instruction.op.removesuffix("-start"), without_metadata(instruction.attributes)
    if known:
        # A configuration that is switched off is printed, too.
        kinds = re.findall(r"quantiz\w*\W{1,4}(\w*)", attributes, re.IGNORECASE)
        return f"quantized {op}" if any(kind.upper() not in ("NONE", "FALSE", "0", "") for kind in kinds) else None
    if op.endswith(("-done", "-update")):
        return None
    takes_part = "replica_groups=" in attributes or "source_target_pairs={" in attributes
    if op == "custom-call":
        target = re.search(r'custom_call_target="([^"]*)"', attributes)
        target = target[1] if target else op
        if target in ("AsyncCollectiveStart", "AsyncCollectiveDone"):
            return None
        named = NAMED_SO.search(re.sub(r"[\W]+", "_", target.lower()))
        config = attributes.partition("backend_config=")[2]
        return target if named or takes_part or "channel_id=" in attributes or SAYS_SO.search(config) else None
    if op == "send" and pairs_of_send(attributes):
        return None
    if "_xla_megascale_" in attributes:
        return f"{op} between slices"
    if op in ("send", "recv", "infeed", "outfeed"):
        return "host transfer" if op.endswith("feed") or "is_host_transfer=true" in attributes else op
    return op if takes_part or op not in LOCAL else None
