"""A few fields and some strings of bytes as one message.

    "jcP1" | CRC-32 of the rest, u32 | length of the header, u32 | header: JSON [fields, lengths] | strings of bytes

Numbers are little-endian. A float crosses as the shortest decimal that gives it back, so no bit of it changes.
"""

import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxcomp.wire import WireError

__all__ = ["packed", "unpacked"]

MAGIC = b"jcP1"
HEAD = struct.Struct("<4sII")
MOST_HEADER_BYTES = 2**24


def packed(fields: Mapping[str, Any], blobs: Sequence[bytes] = ()) -> bytes:
    """Fields and strings of bytes as one.

    Args:
        fields: by name, what JSON can hold.
        blobs: strings of bytes.

    >>> unpacked(packed({"round": 3, "norm": float("inf")}, [b"one", b""]))
    ({'round': 3, 'norm': inf}, [b'one', b''])
    """
    header = json.dumps([dict(fields), [len(blob) for blob in blobs]]).encode()
    body = b"".join([header, *blobs])
    return HEAD.pack(MAGIC, zlib.crc32(body), len(header)) + body


def unpacked(data: bytes) -> tuple[dict[str, Any], list[bytes]]:
    """The fields and strings of bytes of `packed`.

    Raises:
        WireError: the bytes are not such a message, or were changed on the way.
    """
    if len(data) < HEAD.size:
        raise WireError("message length", len(data), f"at least {HEAD.size}")
    magic, check, length = HEAD.unpack_from(data)
    body = memoryview(data)[HEAD.size :]
    if magic != MAGIC:
        raise WireError("magic", bytes(magic), repr(MAGIC))
    if length > min(len(body), MOST_HEADER_BYTES):
        raise WireError("header length", length, f"at most {min(len(body), MOST_HEADER_BYTES)}")
    if zlib.crc32(body) != check:
        raise WireError("checksum", f"{zlib.crc32(body):08x}", f"{check:08x}")
    try:
        fields, sizes = json.loads(bytes(body[:length]))
        right = isinstance(fields, dict) and isinstance(sizes, list)
    except (ValueError, TypeError, RecursionError):
        right = False
    if not right or not all(isinstance(size, int) and not isinstance(size, bool) and size >= 0 for size in sizes):
        raise WireError("header", "something else", "JSON of a mapping and a list of lengths")
    if sum(sizes) != len(body) - length:
        raise WireError("body length", len(body) - length, f"the {sum(sizes)} bytes that the header names")
    blobs, at = [], length
    for size in sizes:
        blobs.append(bytes(body[at : at + size]))
        at += size
    return fields, blobs
