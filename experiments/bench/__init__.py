"""Benchmarks: `python -m experiments bench NAME`. Every figure is a ratio within one run."""

from collections.abc import Sequence

from experiments.lib.cli import dispatch

__all__ = ["main"]

BENCHMARKS = {
    "exchange": "exchanges of unequal messages between processes: bytes on the wire, time on a link",
    "codes": "keys and levels in jit and on the host, against a sort, zlib and zstd",
    "compressors": "compress and decompress of every compressor, against one pass over memory",
    "plan": "seconds of jc.plan for 10 M parameters, and how much of its table it measures",
    "rotations": "rotations, EDEN and block-scaled numbers, against a copy",
    "select": "thresholds and compaction against sorts, over sizes",
    "skcompress": "sketches and quantile buckets in jit and as bytes, against one sort of as many floats",
    "step": "one update of a GPT's tree: time and memory beside a plain pmean",
    "trees": "a GPT's whole tree: compile time and memory, beside a plain psum",
    "smoothness": "the parts of a DIANA+ round, against the gradients",
    "wire": "the worst time and memory of decoding mutated messages",
}


def main(arguments: Sequence[str]) -> int:
    return dispatch("bench", __name__, BENCHMARKS, arguments)
