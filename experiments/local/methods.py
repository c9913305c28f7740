"""What `python -m experiments local` compares: a compressor by name, how often, and whether in fragments."""

from collections.abc import Callable
from typing import Any, NamedTuple

import optax

import jaxcomp as jc
from experiments.lib.cli import UserError
from experiments.lib.methods import METHODS
from jaxcomp.base import Algorithm

__all__ = ["NAMES", "Setup", "parse"]

# Codes of differences, besides those of `experiments.lib.methods`.
CODES: dict[str, Callable[[], Algorithm]] = {
    "f32": lambda: jc.direct(jc.identity()),
    "int8": lambda: jc.error_feedback(jc.block_scaled("int8")),
    "int4": lambda: jc.error_feedback(jc.block_scaled("int4")),
    "sparse-loco": jc.sparse_loco,  # 64 of 4096 entries, 2 bits each
}
NAMES = tuple(CODES | METHODS)


class Setup(NamedTuple):
    """One curve.

    label: as it was asked for, with its H. method: of the messages. every, fragments, delay, mixing: as for
    `jc.local_updates`. plain: a data-parallel optimizer with an exchange of gradients at every step.
    """

    label: str
    method: str
    every: int
    fragments: int = 1
    delay: int = 0
    mixing: float = 0.0
    plain: bool = False

    def algorithm(self, ratio: float, levels: int) -> Algorithm:
        return CODES[self.method]() if self.method in CODES else METHODS[self.method].make(ratio, levels)

    def outer(self, rate: float | None = None, momentum: float | None = None) -> optax.GradientTransformation:
        """What follows the mean difference: Nesterov's momentum, as in DiLoCo; None of it for sparse-loco."""
        loco = self.method == "sparse-loco"  # whose memory is a momentum already
        rate = rate or (1.0 if loco else 0.7)
        if momentum is None:
            momentum = 0.0 if loco else 0.9
        return optax.sgd(rate, momentum=momentum or None, nesterov=bool(momentum))

    def transform(self, inner: Any, outer: Any, ratio: float, levels: int, seed: int) -> Any:
        """The optimizer. A plain one steps with `inner` along the mean of all gradients."""
        algorithm = self.algorithm(ratio, levels)
        if self.plain:
            return jc.local_updates(optax.sgd(1.0), inner, algorithm, "data", every=1, seed=seed)
        return jc.local_updates(inner, outer, algorithm, "data", seed=seed, **self.times())

    def times(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("every", "fragments", "delay", "mixing")}


def parse(words: list[str], every: list[int]) -> list[Setup]:
    """The curves that were asked for: each word, for each H.

    words: NAME, stream:NAME (in fragments that arrive later), or ddp:NAME (gradients, at every step).
    """
    found = []
    for word in dict.fromkeys(words):
        kind, colon, name = word.rpartition(":")
        if name not in NAMES or (colon and kind not in ("ddp", "stream")):
            known = ", ".join(NAMES)
            raise UserError(f"unknown method {word!r}; give NAME, stream:NAME or ddp:NAME with one of {known}")
        if kind == "ddp":
            found.append(Setup(word, name, 1, plain=True))
            continue
        for h in dict.fromkeys(every):
            times: tuple[Any, ...] = (min(3, h), min(5, h - 1), 0.5) if kind == "stream" else ()
            found.append(Setup(f"{word} H={h}", name, h, *times))
    return found
