"""Payloads, which cross the wire: a NamedTuple of arrays for each kind of message, and all that depends on the kind.

A payload holds nothing that both ends know already (d, k, the number of levels, seeds). Each family of payloads is one
file: its type, its codings and their bits, its words in jit, its bytes on the host. Sizes, `wire` and `exchange`
dispatch on these types (`registry`), never on the compressor. A field `values` may itself hold a payload: that is how
`compose` nests them.

Three measures of the size of a payload, never mixed. `lane_bytes`: what a collective moves, from the shapes alone,
exact. `code_bits`: what the code that is asked for needs ("fixed" by default), from its content. Wire bytes are the
third: len(wire.encode(payload)) = code_bits / 8, rounded up to whole bytes in each array, plus the frame.
"""

from jaxcomp.payloads.chunks import Chunks
from jaxcomp.payloads.local import LocalIndices, global_indices, local_indices
from jaxcomp.payloads.quantized import Quantized
from jaxcomp.payloads.registry import (
    CODES,
    Choices,
    Coding,
    Dense,
    Family,
    Scaled,
    cheap_bits,
    code_bits,
    counted,
    decode_message,
    encode_message,
    highest_indices,
    lane_bytes,
    limits,
    num_entries,
    per_tile,
    plain_entries,
    read_record,
    register,
    shortest,
    write_record,
)
from jaxcomp.payloads.several import Leaves, Several
from jaxcomp.payloads.sketch import Sketch, SketchBits, sketch_bits
from jaxcomp.payloads.sparse import Sparse
from jaxcomp.payloads.words import Coded, from_words, num_words, to_words

__all__ = [
    "CODES",
    "Choices",
    "Chunks",
    "Coded",
    "Coding",
    "Dense",
    "Family",
    "Leaves",
    "LocalIndices",
    "Quantized",
    "Scaled",
    "Several",
    "Sketch",
    "SketchBits",
    "Sparse",
    "cheap_bits",
    "code_bits",
    "counted",
    "decode_message",
    "encode_message",
    "from_words",
    "global_indices",
    "highest_indices",
    "lane_bytes",
    "limits",
    "local_indices",
    "num_entries",
    "num_words",
    "per_tile",
    "plain_entries",
    "read_record",
    "register",
    "shortest",
    "sketch_bits",
    "to_words",
    "write_record",
]
