"""Payloads of several parts: `Several`, which describe one vector together, and `Leaves`, those of a tree.

Bits, words and bytes are those of the parts. Records on the wire, of which `Leaves` stands in no other:

    5 Leaves      record dense | number varint | records
   17 Several     number u8 | records
"""

from typing import Any, NamedTuple

import jax
import numpy as np

from jaxcomp.payloads.registry import (
    Choices,
    Coding,
    Dense,
    Family,
    code_bits,
    encode_message,
    limits,
    num_entries,
    per_tile,
    read_record,
    register,
    same_everywhere,
    unpack_message,
    write_record,
)
from jaxcomp.payloads.words import Coded, Cursor, joined
from jaxcomp.wire.errors import WireError
from jaxcomp.wire.frame import Reader, Writer
from jaxcomp.wire.limits import MAX_LEAVES

__all__ = ["LEAVES", "SEVERAL", "Leaves", "Several"]

LEAVES, SEVERAL = 5, 17
MOST = 8  # parts of `Several`


class Several(NamedTuple):
    """parts: 1 to 8 payloads, in an order that both ends know, none of them `Leaves`: codes of different widths, a
    factor beside codes.
    """

    parts: tuple[Any, ...]


class Leaves(NamedTuple):
    """dense: one message with all small leaves;  leaves: a payload for each large one, none of them `Leaves`."""

    dense: Dense
    leaves: tuple[Any, ...]

    @property
    def parts(self) -> tuple[Any, ...]:
        """All payloads, that of the small leaves first."""
        return (self.dense, *self.leaves)


def _bits(payload: Any, code: str) -> Any:
    return sum(code_bits(part, code=code) for part in payload.parts)


def _pack(payload: Any) -> Coded:
    return joined([encode_message(part) for part in payload.parts])


def _unpack(cursor: Cursor, like: Any) -> tuple[Any, ...]:
    return tuple([unpack_message(cursor, part) for part in like.parts])


def _entries(payload: Any) -> Any:
    counts: list[Any] = [num_entries(part) for part in payload.parts]
    return None if any(count is None for count in counts) else sum(counts)


def _check_several(payload: Several) -> None:
    if not 1 <= len(payload.parts) <= MOST:
        raise WireError("Several number", len(payload.parts), f"1 .. {MOST}")
    if any(isinstance(part, np.ndarray) for part in payload.parts):
        raise WireError("Several part", "a bare array", "a payload")


def _write_several(out: Writer, payload: Several, coding: Coding) -> None:
    out.byte(len(payload.parts))
    for part in payload.parts:
        write_record(out, part)


def _read_several(reader: Reader) -> Several:
    number = reader.byte("Several number", 1, MOST)
    return Several(tuple([read_record(reader) for _ in range(number)]))


def _check_leaves(payload: Leaves) -> None:
    dense, leaves = payload
    if not isinstance(dense, Dense) or not isinstance(dense.values, np.ndarray):
        raise WireError("Leaves.dense", type(dense).__name__, "Dense numbers")
    if len(leaves) > MAX_LEAVES:
        raise WireError("Leaves number", len(leaves), f"at most {MAX_LEAVES}")
    if any(isinstance(leaf, np.ndarray) for leaf in leaves):
        raise WireError("Leaves leaf", "a bare array", "a payload")


def _not_inside(depth: int) -> None:
    if depth > 1:
        raise WireError("Leaves", "inside of another payload", "the whole message")


def _write_leaves(out: Writer, payload: Leaves, coding: Coding) -> None:
    _not_inside(out.depth)
    write_record(out, payload.dense)
    out.varint(len(payload.leaves))
    for leaf in payload.leaves:
        write_record(out, leaf)


def _read_leaves(reader: Reader) -> Leaves:
    _not_inside(reader.depth)
    dense = read_record(reader)
    number = reader.varint("Leaves number", min(reader.left, MAX_LEAVES))
    return Leaves(dense, tuple([read_record(reader) for _ in range(number)]))


def _limits_of_leaves(payload: Leaves, lengths: Any) -> list:
    if not isinstance(lengths, Leaves):
        return same_everywhere(payload, lengths)
    return [*[None] * len(jax.tree.leaves(payload.dense)), *limits(payload.leaves, lengths.leaves)]


def _unpack_leaves(cursor: Cursor, like: Leaves) -> Leaves:
    dense, *leaves = _unpack(cursor, like)
    return Leaves(dense, tuple(leaves))


register(
    Family(
        type=Several,
        codings=lambda payload, code: Choices([Coding(SEVERAL, (code,), 0)], lambda: _bits(payload, code)),
        check=_check_several,
        write=_write_several,
        readers={SEVERAL: _read_several},
        pack=_pack,
        unpack=lambda cursor, like: Several(_unpack(cursor, like)),
        entries=_entries,
        per_tile=lambda payload: [held for part in payload.parts for held in per_tile(part)],
    )
)
register(
    Family(
        type=Leaves,
        codings=lambda payload, code: Choices([Coding(LEAVES, (code,), 0)], lambda: _bits(payload, code)),
        check=_check_leaves,
        write=_write_leaves,
        readers={LEAVES: _read_leaves},
        pack=_pack,
        unpack=_unpack_leaves,
        entries=_entries,
        limits=_limits_of_leaves,
    )
)
