"""Payloads as bytes: frame, limits and dispatch. The records stand with each family (`jaxcomp.payloads`)."""

from typing import Any

import jax
import numpy as np

from jaxcomp import payloads  # whole only once it is called: families of payloads import the other files of `wire`
from jaxcomp.wire.errors import WireError
from jaxcomp.wire.format import ARRAY
from jaxcomp.wire.frame import Reader, Writer, seal, unseal

__all__ = ["decode", "encode"]


def encode(payload: Any, *, code: str = "fixed") -> bytes:
    """The message as it travels between hosts: framed, versioned, checksummed.

    Args:
        payload: of one worker, with concrete arrays.
        code: "fixed": levels and indices in a fixed number of bits; "elias": gaps and levels in
            Elias omega codes; "best": for each part of the message whatever is shortest of these and the
            key coders and Huffman codes of `jaxcomp.codes`.

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
        plain = encode(payload)
        return min(seal(body), plain, key=len)
    return seal(body)


def decode(data: bytes) -> Any:
    """The payload of a message, with NumPy arrays.

    Takes at most 50 ms and 1 ms a kB on one core, and PAD_BYTES times the length of the message in memory, whatever it
    claims (`wire.limits`).

    Raises:
        WireError: the bytes are not a message that `encode` could have made. Says which field
            was wrong, what was found and what is allowed.
    """
    reader = Reader(unseal(data))
    payload = payloads.read_record(reader)
    if isinstance(payload, np.ndarray):
        raise WireError("payload type", ARRAY, "a payload, not a bare array")
    reader.end()
    return payload
