"""The frame around every message, and the reader that trusts nothing.

    magic "JCMP" | version u8 | body length u64 | body | CRC-32 of all before

All integers are little-endian; `varint` is LEB128 (7 bits per byte, low first, at most 9 bytes).
A reader takes bytes only after checking that they are there, so nothing is allocated that the
message does not pay for.
"""

import struct
import zlib

from jaxcomp.wire.errors import WireError

__all__ = ["MAGIC", "VERSION", "Reader", "seal", "unseal", "varint"]

MAGIC = b"JCMP"
VERSION = 1
HEADER = struct.Struct("<4sBQ")
CRC = struct.Struct("<I")


def seal(body: bytes) -> bytes:
    """Puts the frame around a body."""
    head = HEADER.pack(MAGIC, VERSION, len(body))
    return b"".join((head, body, CRC.pack(zlib.crc32(body, zlib.crc32(head)))))


def unseal(data: bytes) -> memoryview:
    """Checks the frame and returns the body without copying it.

    Raises:
        WireError: too short, other magic or version, wrong length, wrong checksum.
    """
    try:
        view = memoryview(data).cast("B")
    except TypeError:
        raise WireError("message", type(data).__name__, "bytes") from None
    least = HEADER.size + CRC.size
    if len(view) < least:
        raise WireError("message length", len(view), f"at least {least} bytes")
    magic, version, length = HEADER.unpack_from(view)
    if magic != MAGIC:
        raise WireError("magic", magic, repr(MAGIC))
    if version != VERSION:
        raise WireError("version", version, str(VERSION))
    if length != len(view) - least:
        raise WireError("body length", length, f"{len(view) - least}, what the message holds")
    (expected,) = CRC.unpack_from(view, len(view) - CRC.size)
    actual = zlib.crc32(view[: -CRC.size])
    if actual != expected:
        raise WireError("checksum", f"{actual:#010x}", f"{expected:#010x}")
    return view[HEADER.size : -CRC.size]


def varint(value: int) -> bytes:
    """LEB128 of a non-negative integer below 2^63."""
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


class Reader:
    """Reads a body front to back; every method names the field it reads in its error."""

    def __init__(self, body: memoryview):
        self.body = body
        self.position = 0

    @property
    def left(self) -> int:
        return len(self.body) - self.position

    def take(self, field: str, size: int) -> memoryview:
        if size > self.left:
            raise WireError(field, f"{size} bytes", f"at most the {self.left} bytes left")
        self.position += size
        return self.body[self.position - size : self.position]

    def byte(self, field: str) -> int:
        return self.take(field, 1)[0]

    def peek(self, field: str) -> int:
        value = self.byte(field)
        self.position -= 1
        return value

    def varint(self, field: str, limit: int = 2**63 - 1) -> int:
        value = 0
        for i in range(9):
            byte = self.byte(field)
            value |= (byte & 0x7F) << (7 * i)
            if byte < 0x80:
                break
        else:
            raise WireError(field, "a varint of more than 9 bytes", "at most 9 bytes")
        if value > limit:
            raise WireError(field, value, f"at most {limit}")
        return value

    def end(self) -> None:
        if self.left:
            raise WireError("end of message", f"{self.left} bytes more", "the end")
