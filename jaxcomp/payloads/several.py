"""Payloads that describe one vector together: parts in codes of different widths, a factor beside codes.

Bits, words and bytes: those of the parts. Record on the wire:

    17 Several     number u8 | records
"""

from typing import Any, NamedTuple

import numpy as np

from jaxcomp.payloads.registry import (
    Choices,
    Coding,
    Family,
    code_bits,
    encode_message,
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

__all__ = ["SEVERAL", "Several"]

SEVERAL = 17
MOST = 8  # parts


class Several(NamedTuple):
    """parts: 1 to 8 payloads, in an order that both ends know, none of them `Leaves`."""

    parts: tuple[Any, ...]


def _codings(payload: Several, code: str) -> Choices:
    return Choices([Coding(SEVERAL, (code,), 0)], lambda: sum(code_bits(part, code=code) for part in payload.parts))


def _check(payload: Several) -> None:
    if not 1 <= len(payload.parts) <= MOST:
        raise WireError("Several number", len(payload.parts), f"1 .. {MOST}")
    if any(isinstance(part, np.ndarray) for part in payload.parts):
        raise WireError("Several part", "a bare array", "a payload")


def _write(out: Writer, payload: Several, coding: Coding) -> None:
    out.byte(len(payload.parts))
    for part in payload.parts:
        write_record(out, part)


def _read(reader: Reader) -> Several:
    number = reader.byte("Several number")
    if not 1 <= number <= MOST:
        raise WireError("Several number", number, f"1 .. {MOST}")
    return Several(tuple([read_record(reader) for _ in range(number)]))


def _pack(payload: Several) -> Coded:
    return joined([encode_message(part) for part in payload.parts])


def _unpack(cursor: Cursor, like: Several) -> Several:
    return Several(tuple([unpack_message(cursor, part) for part in like.parts]))


def _entries(payload: Several) -> Any:
    total: Any = 0
    for part in payload.parts:
        count = num_entries(part)
        if count is None:
            return None
        total = total + count
    return total


def _per_tile(payload: Several) -> list[int]:
    return [held for part in payload.parts for held in per_tile(part)]


register(
    Family(
        type=Several,
        codings=_codings,
        check=_check,
        write=_write,
        readers={SEVERAL: _read},
        pack=_pack,
        unpack=_unpack,
        entries=_entries,
        limits=same_everywhere,
        per_tile=_per_tile,
    )
)
