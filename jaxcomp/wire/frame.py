"""The frame around every message, and the reader that trusts nothing.

    magic "JCMP" | version u8 | body length u64 | body | CRC-32 of all before

Version 2 is that. In version 4 the length of a text (varint) and the text, UTF-8, stand before the body: which
compressors made the message, with their options, such as levels and sizes of blocks. Version 3 was the same with other
words of `eden` and `drive`, and is refused.
All integers are little-endian; `varint` is LEB128 (7 bits per byte, low first, at most 9 bytes).
A reader takes bytes only after checking that they are there, and makes arrays only within the limits of the whole
message (`limits`), so nothing is allocated that the message does not pay for.
"""

import struct
import zlib

from jaxcomp.wire.errors import WireError
from jaxcomp.wire.limits import FREE_BYTES, PAD_BYTES, PART_BYTES, STREAM_BYTES, missing

__all__ = ["FRAME_BYTES", "MAGIC", "VERSION", "Reader", "Writer", "open_frame", "seal", "unseal", "varint"]

MAGIC = b"JCMP"
PLAIN, VERSION = 2, 4
MOST_TEXT = 1000  # bytes
HEADER = struct.Struct("<4sBQ")
CRC = struct.Struct("<I")
FRAME_BYTES = HEADER.size + CRC.size


def seal(body: bytes, made: str = "") -> bytes:
    """Puts the frame around a body. made: by which compressors; "" for a message of version 2, without."""
    text = made.encode()
    if len(text) > MOST_TEXT:
        text = made[: MOST_TEXT // 8].encode() + f"... with checksum {zlib.crc32(text):08x}".encode()
    head = HEADER.pack(MAGIC, VERSION if text else PLAIN, len(body)) + (varint(len(text)) + text if text else b"")
    return b"".join((head, body, CRC.pack(zlib.crc32(body, zlib.crc32(head)))))


def unseal(data: bytes) -> memoryview:
    """Checks the frame and returns the body without copying it (see `open_frame`)."""
    return open_frame(data)[1]


def open_frame(data: bytes) -> tuple[str, memoryview]:
    """Checks the frame, and returns by which compressors a message was made and its body, without copying it.

    Raises:
        WireError: too short, other magic or version, wrong length, wrong checksum.
    """
    try:
        view = memoryview(data).cast("B")
    except TypeError:
        raise WireError("message", type(data).__name__, "bytes") from None
    if len(view) < FRAME_BYTES:
        raise WireError("message length", len(view), f"at least {FRAME_BYTES} bytes")
    magic, version, length = HEADER.unpack_from(view)
    if magic != MAGIC:
        raise WireError("magic", magic, repr(MAGIC))
    if version not in (PLAIN, VERSION):
        raise WireError("version", version, f"{PLAIN} or {VERSION}")
    text, start = b"", HEADER.size
    if version == VERSION:
        reader = Reader(view[start : len(view) - CRC.size])
        text = bytes(reader.take("options", reader.varint("options length", MOST_TEXT)))
        start += reader.position
    if length != len(view) - start - CRC.size:
        raise WireError("body length", len(view) - start - CRC.size, f"{length}, as the header says")
    (expected,) = CRC.unpack_from(view, len(view) - CRC.size)
    actual = zlib.crc32(view[: -CRC.size])
    if actual != expected:
        raise WireError("checksum", f"{actual:#010x}", f"{expected:#010x}")
    try:
        return text.decode(), view[start : -CRC.size]
    except UnicodeDecodeError:
        raise WireError("options", text, "UTF-8") from None


def varint(value: int) -> bytes:
    """LEB128 of a non-negative integer below 2^63."""
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


class Writer:
    """Collects a body, and what it will ask of its reader.

    code: "fixed", "elias" or "best".  depth: of the record that is being written.
    """

    def __init__(self, code: str = "fixed"):
        self.code, self.depth, self.work = code, 0, 0
        self.parts: list[bytes] = []

    def add(self, *parts: bytes) -> None:
        self.parts += parts

    def byte(self, value: int) -> None:
        self.parts.append(bytes([value]))

    def varint(self, *values: int) -> None:
        self.parts += [varint(value) for value in values]

    def stream(self, data: bytes) -> None:
        """Entropy-coded bytes behind their number."""
        self.work += STREAM_BYTES
        self.parts += [varint(len(data)), data]

    def body(self, memory: int) -> tuple[bytes, int]:
        """All of it, for a payload whose arrays have `memory` bytes; and how many zeros it had to be filled with."""
        body = b"".join(self.parts)
        filler = missing(len(body) + FRAME_BYTES, memory, self.work)
        return body + bytes(filler), filler


class Reader:
    """Reads a body front to back; every method names the field it reads in its error.

    depth: of the record that is being read.
    """

    def __init__(self, body: memoryview):
        self.body = body
        self.position = 0
        self.depth = 0
        self.memory, self.work = 0, 0

    @property
    def left(self) -> int:
        return len(self.body) - self.position

    @property
    def spare(self) -> int:
        """Bytes of arrays that may still be made."""
        return PAD_BYTES * (len(self.body) + FRAME_BYTES) - self.memory

    def make(self, field: str, size: int) -> None:
        """Counts an array of `size` bytes that is about to be made."""
        if size > self.spare:
            allowed = f"at most {self.spare}: {PAD_BYTES} times the length of the message"
            raise WireError(field, f"an array of {size} bytes", allowed)
        self.memory += size

    def part(self, cost: int = PART_BYTES) -> None:
        """Counts a record, or whatever else costs time."""
        self.work += cost
        most = FREE_BYTES + len(self.body) + FRAME_BYTES
        if self.work > most:
            raise WireError("number of parts and streams", f"work for {self.work} bytes", f"at most {most}")

    def take(self, field: str, size: int) -> memoryview:
        begin, end = self.position, self.position + size
        if end > len(self.body):
            raise WireError(field, f"{size} bytes", f"at most the {self.left} bytes left")
        self.position = end
        return self.body[begin:end]

    def peek(self, field: str) -> int:
        if self.position >= len(self.body):
            raise WireError(field, "1 bytes", "at most the 0 bytes left")
        return self.body[self.position]

    def byte(self, field: str, low: int = 0, high: int = 255) -> int:
        value = self.peek(field)
        if not low <= value <= high:
            raise WireError(field, value, f"{low} .. {high}")
        self.position += 1
        return value

    def varint(self, field: str, limit: int = 2**63 - 1) -> int:
        byte = self.byte(field)
        value, shift = byte & 0x7F, 7
        while byte >= 0x80:
            if shift == 63:
                raise WireError(field, "a varint of more than 9 bytes", "at most 9 bytes")
            byte = self.byte(field)
            value |= (byte & 0x7F) << shift
            shift += 7
        if value > limit:
            raise WireError(field, value, f"at most {limit}")
        return value

    def stream(self, field: str, limit: int | None = None) -> memoryview:
        """Entropy-coded bytes behind their number."""
        self.part(STREAM_BYTES)
        most = self.left if limit is None else min(self.left, limit)
        return self.take(field, self.varint(f"{field} bytes", most))

    def zeros(self, field: str, size: int) -> None:
        """Filler."""
        if size and self.take(field, size).tobytes().strip(b"\0"):
            raise WireError(field, "bytes that are not zero", "zeros")

    def end(self) -> None:
        """Checks that nothing follows but the zeros that the message lacked."""
        filler = missing(self.position + FRAME_BYTES, self.memory, self.work)
        if self.left != filler:
            raise WireError("end of message", f"{self.left} bytes more", f"the end after {filler} bytes of filler")
        self.zeros("end of message", filler)
