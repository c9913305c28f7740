"""The payload of a tree: one message with all small leaves, and a payload for each large one.

Record on the wire, which stands in no other record:

    5 Leaves      record dense | number varint | records
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

__all__ = ["LEAVES", "Leaves"]

LEAVES = 5


class Leaves(NamedTuple):
    """dense: one message with all small leaves;  leaves: a payload for each large one, none of them `Leaves`."""

    dense: Dense
    leaves: tuple[Any, ...]


def _codings(payload: Leaves, code: str) -> Choices:
    parts = (payload.dense, *payload.leaves)
    return Choices([Coding(LEAVES, (code,), 0)], lambda: sum(code_bits(part, code=code) for part in parts))


def _check(payload: Leaves) -> None:
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


def _write(out: Writer, payload: Leaves, coding: Coding) -> None:
    _not_inside(out.depth)
    write_record(out, payload.dense)
    out.varint(len(payload.leaves))
    for leaf in payload.leaves:
        write_record(out, leaf)


def _read(reader: Reader) -> Leaves:
    _not_inside(reader.depth)
    dense = read_record(reader)
    number = reader.varint("Leaves number", min(reader.left, MAX_LEAVES))
    return Leaves(dense, tuple([read_record(reader) for _ in range(number)]))


def _pack(payload: Leaves) -> Coded:
    return joined([encode_message(payload.dense), *map(encode_message, payload.leaves)])


def _unpack(cursor: Cursor, like: Leaves) -> Leaves:
    dense = unpack_message(cursor, like.dense)
    return Leaves(dense, tuple([unpack_message(cursor, leaf) for leaf in like.leaves]))


def _entries(payload: Leaves) -> Any:
    total = 0
    for part in (payload.dense, *payload.leaves):
        count = num_entries(part)
        if count is None:
            return None
        total = total + count
    return total


def _limits(payload: Leaves, lengths: Any) -> list:
    if not isinstance(lengths, Leaves):
        return same_everywhere(payload, lengths)
    return [*[None] * len(jax.tree.leaves(payload.dense)), *limits(payload.leaves, lengths.leaves)]


register(
    Family(
        type=Leaves,
        codings=_codings,
        check=_check,
        write=_write,
        readers={LEAVES: _read},
        pack=_pack,
        unpack=_unpack,
        entries=_entries,
        limits=_limits,
    )
)
