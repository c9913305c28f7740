"""Payloads as bytes: frame, limits and dispatch. The records stand with each family (`jaxcomp.payloads`)."""

from typing import Any

import jax
import numpy as np

import jaxcomp.factories as factories  # whole only once it is called, as payloads
from jaxcomp import payloads  # whole only once it is called: families of payloads import the other files of `wire`
from jaxcomp.wire.errors import WireError
from jaxcomp.wire.format import ARRAY
from jaxcomp.wire.frame import Reader, Writer, open_frame, seal

__all__ = ["decode", "encode"]


def encode(payload: Any, *, code: str = "fixed", compressor: Any = None) -> bytes:
    """The message as it travels between hosts: framed, versioned, checksummed.

    Args:
        payload: of one worker, with concrete arrays.
        code: "fixed": levels and indices in a fixed number of bits; "elias": gaps and levels in
            Elias omega codes; "best": for each part of the message whatever is shortest of these and the
            key coders and Huffman codes of `jaxcomp.codes`.
        compressor: that made it, or several: its name and options (levels, sizes of blocks) then stand in the header,
            and `decode` refuses the message where they are others there. None: nothing is said.

    Returns:
        bytes; `8 * len` is `code_bits(payload, code=code)` plus at most 7 bits per array and the frame. A message that
        is too short for what it asks of its reader ends with zeros (`wire.limits`); "best" is then "fixed" where that
        is shorter.

    Raises:
        ValueError: unknown code.
        TypeError: not a payload, or not one that `decode` would take.

    >>> import jaxcomp as jc
    >>> message = jc.wire.encode(jc.payloads.Dense(np.float32([1, 2])))
    >>> len(message), jc.wire.decode(message).values
    (30, array([1., 2.], dtype=float32))
    >>> _, payload = jc.roundtrip(jc.dithering(7), np.ones(3, np.float32), key=jax.random.key(0))
    >>> message = jc.wire.encode(payload, compressor=jc.dithering(7))
    >>> jc.wire.decode(message, compressor=jc.dithering(5))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    jaxcomp.wire.errors.WireError: wire: compressor must be dithering(levels=5), as here; got dithering(levels=7)
    """
    payload = jax.tree.map(np.asarray, jax.device_get(payload))
    if code not in payloads.CODES:
        raise ValueError(f"wire.encode: code must be one of {', '.join(payloads.CODES)}; got {code!r}")
    if isinstance(payload, np.ndarray):
        raise TypeError("wire.encode: ndarray is not a payload")
    out = Writer(code)
    try:
        payloads.write_record(out, payload)
    except WireError as error:
        raise TypeError(f"wire.encode: {error.field} must be {error.allowed}; got {error.got}") from None
    body, filler = out.body(payloads.lane_bytes(payload))
    if filler and code == "best":  # very many short streams
        plain = encode(payload, compressor=compressor)
        return min(seal(body, _made(compressor)), plain, key=len)
    return seal(body, _made(compressor))


def _made(compressor: Any) -> str:
    """Text of the header for these compressors."""
    each = () if compressor is None else (compressor,) if hasattr(compressor, "spec") else compressor
    return ", ".join(dict.fromkeys(map(factories.described, each)))


def decode(data: bytes, *, compressor: Any = None) -> Any:
    """The payload of a message, with NumPy arrays.

    Args:
        data: the message.
        compressor: by which it is to be read, or several. A message whose header names other options is refused; one
            without (format version 2, or encoded without a compressor) is read as it is.

    Takes at most 50 ms and 1 ms a kB on one core, and PAD_BYTES times the length of the message in memory, whatever it
    claims (`wire.limits`).

    Raises:
        WireError: the bytes are not a message that `encode` could have made. Says which field
            was wrong, what was found and what is allowed.
    """
    made, body = open_frame(data)
    if compressor is not None and made and made != open_frame(seal(b"", _made(compressor)))[0]:
        raise WireError("compressor", made, f"{_made(compressor)}, as here")
    reader = Reader(body)
    payload = payloads.read_record(reader)
    if isinstance(payload, np.ndarray):
        raise WireError("payload type", ARRAY, "a payload, not a bare array")
    reader.end()
    return payload
