"""Payloads as bytes: one encoder (`writing`) and one decoder (`reading`) per payload type, both by dispatch."""

from typing import Any

import jax
import numpy as np

from jaxcomp.wire.errors import WireError
from jaxcomp.wire.frame import Reader, seal, unseal
from jaxcomp.wire.nodes import ARRAY, MAX_DEPTH
from jaxcomp.wire.reading import read
from jaxcomp.wire.writing import CODES, write

__all__ = ["decode", "encode"]


def encode(payload: Any, *, code: str = "fixed") -> bytes:
    """The message as it travels between hosts: framed, versioned, checksummed.

    Args:
        payload: of one worker, with concrete arrays.
        code: "fixed": levels and indices in a fixed number of bits; "elias": gaps and levels in
            Elias omega codes; "best": for each part of the message whatever is shortest of these and the
            key coders and Huffman codes of `jaxcomp.codes`.

    Returns:
        bytes; `8 * len` is `code_bits(payload, code=code)` plus at most 7 bits per array and the frame.

    Raises:
        ValueError: unknown code.
        TypeError: not a payload, or an array of a dtype that no payload has.

    >>> import jaxcomp as jc
    >>> message = jc.wire.encode(jc.payloads.Dense(np.float32([1, 2])))
    >>> len(message), jc.wire.decode(message).values
    (30, array([1., 2.], dtype=float32))
    """
    payload = jax.tree.map(np.asarray, jax.device_get(payload))
    parts: list[bytes] = []
    if code not in CODES:
        raise ValueError(f"wire.encode: code must be one of {', '.join(CODES)}; got {code!r}")
    if type(payload) not in CODES[code]:
        raise TypeError(f"wire.encode: {type(payload).__name__} is not a payload")
    write(payload, parts, CODES[code])
    return seal(b"".join(parts))


def decode(data: bytes) -> Any:
    """The payload of a message, with NumPy arrays.

    Memory stays below PAD_BYTES times the length of the message, whatever it claims.

    Raises:
        WireError: the bytes are not a message that `encode` could have made. Says which field
            was wrong, what was found and what is allowed.
    """
    reader = Reader(unseal(data))
    payload = read(reader, MAX_DEPTH)
    if isinstance(payload, np.ndarray):
        raise WireError("payload type", ARRAY, "a payload, not a bare array")
    reader.end()
    return payload
