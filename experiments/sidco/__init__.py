"""SIDCo and its rivals: `python -m experiments sidco NAME`. Their speed is `bench select`."""

import importlib
from collections.abc import Sequence

from experiments.cli import fail

__all__ = ["main"]

PARTS = {
    "quality": "how near the share of entries sent comes to the target, on known laws and recorded gradients",
    "training": "loss and accuracy of each method, at equal steps and at equal bytes",
}


def main(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        width = max(map(len, PARTS))
        rows = "\n".join(f"  {name.ljust(width)}  {what}" for name, what in PARTS.items())
        print(f"usage: python -m experiments sidco NAME [options]\n\n{rows}\n\nTheir speed: bench select.")
        return 0 if arguments else 2
    name, *rest = arguments
    if name not in PARTS:
        fail(f"unknown part {name!r} of sidco; choose from {', '.join(PARTS)}")
    return importlib.import_module(f"experiments.sidco.{name}").main(rest)
