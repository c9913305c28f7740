"""Benchmarks: `python -m experiments bench NAME`. Every figure is a ratio within one run."""

import importlib
from collections.abc import Sequence

from experiments.cli import fail

__all__ = ["main"]

BENCHMARKS = {
    "exchange": "exchanges of unequal messages between processes: bytes on the wire, time on a link",
    "compressors": "compress and decompress of every compressor, against one pass over memory",
    "select": "thresholds and compaction against sorts, over sizes",
    "smoothness": "the parts of a DIANA+ round, against the gradients",
}


def main(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        width = max(map(len, BENCHMARKS))
        rows = "\n".join(f"  {name.ljust(width)}  {what}" for name, what in BENCHMARKS.items())
        print(f"usage: python -m experiments bench NAME [options]\n\n{rows}")
        return 0 if arguments else 2
    name, *rest = arguments
    if name not in BENCHMARKS:
        fail(f"unknown benchmark {name!r}; choose from {', '.join(BENCHMARKS)}")
    return importlib.import_module(f"experiments.bench.{name}").main(rest)
