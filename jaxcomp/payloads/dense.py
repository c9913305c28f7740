"""Plain numbers, with a scale or without. Bits, words and bytes: those of the arrays.

Records on the wire:

    1 Dense       record of an array or a payload
    2 Scaled      array values | array scale
"""

from typing import Any, NamedTuple

import numpy as np

from jaxcomp.backend_gpu import TOGETHER
from jaxcomp.payloads.registry import (
    Choices,
    Coding,
    Family,
    code_bits,
    encode_message,
    lane_bytes,
    num_entries,
    per_tile,
    read_record,
    register,
    same_everywhere,
    unpack_message,
    write_record,
)
from jaxcomp.payloads.words import Coded, Cursor, uncoded, uncoded_like
from jaxcomp.wire.errors import WireError
from jaxcomp.wire.format import is_float, read_array, write_array
from jaxcomp.wire.frame import Reader, Writer

__all__ = ["DENSE", "SCALED", "Dense", "Scaled"]

Array = Any  # of JAX inside jit, of NumPy once decoded from bytes
DENSE, SCALED = 1, 2


class Dense(NamedTuple):
    """values: float[m]. Plain numbers: all entries, or those of an index set that both ends know."""

    values: Any


class Scaled(NamedTuple):
    """values: narrow float[d];  scale: f32[], or f32[b], one for each block of entries; powers of two.

    x_hat = values * scale.
    """

    values: Array
    scale: Array


# ------------------------------------------------------------------------------------------------
# Dense


def _codings(payload: Dense, code: str) -> Choices:
    values = payload.values
    if hasattr(values, "dtype"):
        return Choices([Coding(DENSE, (code,), 8 * values.size * values.dtype.itemsize)])
    return Choices([Coding(DENSE, (code,), 0)], lambda: code_bits(values, code=code))


def _check(payload: Dense) -> None:
    pass


def _write(out: Writer, payload: Dense, coding: Coding) -> None:
    write_record(out, payload.values)


def _read(reader: Reader) -> Dense:
    return Dense(read_record(reader))


def _pack(payload: Dense) -> Coded:
    return uncoded(payload) if hasattr(payload.values, "dtype") else encode_message(payload.values)


def _unpack(cursor: Cursor, like: Dense) -> Dense:
    return Dense(cursor.array(like.values) if hasattr(like.values, "dtype") else unpack_message(cursor, like.values))


def _entries(payload: Dense) -> Any:
    return payload.values.size if hasattr(payload.values, "dtype") else num_entries(payload.values)


# ------------------------------------------------------------------------------------------------
# Scaled


def _scaled_codings(payload: Scaled, code: str) -> Choices:
    return Choices([Coding(SCALED, (code,), 8 * lane_bytes(payload))])


def _check_scaled(payload: Scaled) -> None:
    for name, array in payload._asdict().items():
        if not isinstance(array, np.ndarray) or not is_float(array.dtype):
            raise WireError(f"Scaled.{name} dtype", getattr(array, "dtype", type(array).__name__), "a float")
    if payload.scale.ndim > 1:
        raise WireError("Scaled.scale ndim", payload.scale.ndim, "0 or 1")


def _write_scaled(out: Writer, payload: Scaled, coding: Coding) -> None:
    write_array(out, payload.values)
    write_array(out, payload.scale)


def _read_scaled(reader: Reader) -> Scaled:
    return Scaled(read_array(reader, "Scaled.values"), read_array(reader, "Scaled.scale"))


def _per_tile(payload: Dense) -> list[int]:
    return [TOGETHER] if hasattr(payload.values, "dtype") else per_tile(payload.values)


register(
    Family(
        type=Dense,
        codings=_codings,
        check=_check,
        write=_write,
        readers={DENSE: _read},
        pack=_pack,
        unpack=_unpack,
        entries=_entries,
        limits=same_everywhere,
        per_tile=_per_tile,
    )
)
register(
    Family(
        type=Scaled,
        codings=_scaled_codings,
        check=_check_scaled,
        write=_write_scaled,
        readers={SCALED: _read_scaled},
        pack=uncoded,
        unpack=uncoded_like,
        entries=lambda payload: payload.values.size,
        limits=same_everywhere,
        per_tile=lambda payload: [TOGETHER, 0],
    )
)
