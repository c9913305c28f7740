"""SIDCo and its rivals: `python -m experiments sidco NAME`. Their speed is `bench select`."""

from collections.abc import Sequence

from experiments.lib.cli import dispatch

__all__ = ["main"]

PARTS = {
    "quality": "how near the share of entries sent comes to the target, on known laws and recorded gradients",
    "training": "loss and accuracy of each method, at equal steps and at equal bytes",
}


def main(arguments: Sequence[str]) -> int:
    return dispatch("sidco", __name__, PARTS, arguments)
