"""Limits on what a message may ask of its reader.

Every limit is in proportion to the length of the message, so that none can ask for more than it pays for:

    memory   the arrays of the payload hold at most PAD_BYTES bytes for each byte of the message
    work     each record counts PART_BYTES and each entropy-coded stream STREAM_BYTES; what they add up to may exceed
             the length of the message by FREE_BYTES

A message that is too short for its payload (very many small parts, or arrays of which hardly anything is sent) ends
with as many zeros as it lacks (`missing`). Hardly any does.

With them any message is decoded or refused within 50 ms and 1 ms a kB on one core, in at most PAD_BYTES times its
length and WORKSPACE bytes of memory.
"""

__all__ = [
    "FREE_BYTES",
    "MAX_BYTES",
    "MAX_DEPTH",
    "MAX_DIMS",
    "MAX_GROUPS",
    "MAX_LEAVES",
    "MAX_STREAM",
    "PAD_BYTES",
    "PART_BYTES",
    "STREAM_BYTES",
    "WORKSPACE",
    "missing",
    "unpaid",
]

MAX_DEPTH = 8
MAX_DIMS = 8
MAX_GROUPS = 2**36  # of 32 codes
MAX_LEAVES = 4096
MAX_STREAM = 2**27  # bytes of a key or level stream: its bits are counted in i32
MAX_BYTES = 2**48  # of an array, zero dimensions counted as one
PAD_BYTES = 64
PART_BYTES = 64
STREAM_BYTES = 512
FREE_BYTES = 2**14
WORKSPACE = 2**19  # for the part that is being decoded, whatever the length


def missing(length: int, memory: int, work: int) -> int:
    """Zeros that a message of so many bytes lacks.

    >>> missing(1000, memory=64_000, work=0), missing(1000, memory=64_001, work=0)
    (0, 1)
    """
    return max(0, -(-memory // PAD_BYTES) - length, work - FREE_BYTES - length)


def unpaid(size: int, paid: int) -> int:
    """Filler without which `paid` bytes would ask for an array of `size` bytes."""
    return max(0, -(-size // PAD_BYTES) - paid)
