"""SKCompress and its rivals: `python -m experiments skcompress NAME`. Its speed in jit is `bench skcompress`."""

from collections.abc import Sequence

from experiments.lib.cli import dispatch

__all__ = ["main"]

PARTS = {
    "sizes": "bytes per nonzero, error and speed of each message on recorded gradients, and what each part is worth",
    "training": "loss of linear models and a network, at equal steps and at equal bytes",
}


def main(arguments: Sequence[str]) -> int:
    return dispatch("skcompress", __name__, PARTS, arguments)
