"""What `python -m experiments local` compares: a compressor, how often, in fragments or not, and the optimizers."""

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax
from optax.contrib import MuonDimensionNumbers

import jaxcomp as jc
from experiments.lib.cli import UserError
from experiments.lib.methods import METHODS
from jaxcomp.base import Algorithm

__all__ = ["INNERS", "NAMES", "Setup", "parse"]

# Codes of differences, besides those of `experiments.lib.methods`.
CODES: dict[str, Callable[[], Algorithm]] = {
    "f32": lambda: jc.direct(jc.identity()),
    "int8": lambda: jc.error_feedback(jc.block_scaled("int8")),
    "int8-unbiased": lambda: jc.direct(jc.block_scaled("int8", rounding="stochastic")),  # which remembers nothing
    "int4": lambda: jc.error_feedback(jc.block_scaled("int4")),
    "int2": lambda: jc.error_feedback(jc.block_scaled("int2"), decay=0.9),  # "linear" in MuLoCo
    "binned2": lambda: jc.error_feedback(jc.binned(2), decay=0.9),  # "statistical" in MuLoCo
    "sparse-loco": jc.sparse_loco,  # 64 of 4096 entries, 2 bits each
}
NAMES = tuple(CODES | METHODS)
# Axes of the matrices that Muon takes of `experiments.lib.transformer`: queries, keys and values are one each. What is
# not named (embeddings, scales, the head) takes AdamW.
MATRICES = {
    "qkv": MuonDimensionNumbers(0, (2, 3)),
    "out": MuonDimensionNumbers((0, 1), 2),
    "up": MuonDimensionNumbers(0, 1),
    "down": MuonDimensionNumbers(0, 1),
}
DECAY, RMS = 0.1, 0.2  # of weights; of Muon's updates, so that its rates are those of AdamW


def adamw(rate: Any) -> optax.GradientTransformation:
    return optax.adamw(rate, weight_decay=DECAY)


def muon(rate: Any) -> optax.GradientTransformation:
    """Muon for the matrices of the layers, AdamW for the rest."""
    axes = lambda params: jax.tree_util.tree_map_with_path(lambda path, _: MATRICES.get(path[-1].name), params)
    options: dict[str, Any] = {"weight_decay": DECAY, "adam_weight_decay": DECAY, "consistent_rms": RMS}
    return optax.contrib.muon(rate, muon_weight_dimension_numbers=axes, **options)


INNERS: dict[str, Callable[[Any], optax.GradientTransformation]] = {"adamw": adamw, "muon": muon}


class Setup(NamedTuple):
    """One curve.

    label: as it was asked for, with its H. method: of the messages. every, fragments, delay, mixing: as for
    `jc.local_updates`. plain: a data-parallel optimizer with an exchange of gradients at every step. inner: optimizer
    of the steps. lr, outer_lr, outer_momentum: its rate, and those of the outer optimizer; None: those of all curves.
    mu, nu: rounds from one averaging of the moments of that name to the next; 0: never. code: their method.
    """

    label: str
    method: str
    every: int
    fragments: int = 1
    delay: int = 0
    mixing: float = 0.0
    plain: bool = False
    inner: str = "adamw"
    lr: float | None = None
    outer_lr: float | None = None
    outer_momentum: float | None = None
    mu: int = 0
    nu: int = 0
    code: str = ""

    @property
    def rates(self) -> tuple[Any, ...]:
        """The inner optimizer with its rates, and those of the outer one."""
        return self.inner, self.lr, self.outer_lr, self.outer_momentum

    @property
    def is_dense(self) -> bool:
        """Whether it exchanges whole differences in f32 and nothing else: what codes and moments are compared with."""
        whole = (self.method, self.fragments, self.delay, self.mixing) == ("f32", 1, 0, 0.0)
        return whole and not (self.plain or self.moments)

    def algorithm(self, ratio: float, levels: int) -> Algorithm:
        return _algorithm(self.method, ratio, levels)

    def of_moments(self, ratio: float, levels: int) -> Algorithm:
        """That of their differences."""
        return _algorithm(self.code or self.method, ratio, levels)

    def outer(self, rate: float | None = None, momentum: float | None = None) -> optax.GradientTransformation:
        """What follows the mean difference: Nesterov's momentum, as in DiLoCo; None of it for sparse-loco."""
        loco = self.method == "sparse-loco"  # whose memory is a momentum already
        rate = self.outer_lr or rate or (1.0 if loco else 0.7)
        momentum = momentum if self.outer_momentum is None else self.outer_momentum
        if momentum is None:
            momentum = 0.0 if loco else 0.9
        return optax.sgd(rate, momentum=momentum or None, nesterov=bool(momentum))

    def transform(self, inner: Any, outer: Any, ratio: float, levels: int, seed: int) -> Any:
        """The optimizer. A plain one steps with `inner` along the mean of all gradients."""
        algorithm = self.algorithm(ratio, levels)
        if self.plain:
            return jc.local_updates(optax.sgd(1.0), inner, algorithm, "data", every=1, seed=seed)
        more: dict[str, Any] = {"moments_algorithm": self.of_moments(ratio, levels)} if self.moments else {}
        return jc.local_updates(inner, outer, algorithm, "data", seed=seed, **self.times(), **more)

    def times(self) -> dict[str, Any]:
        found: dict[str, Any] = {name: getattr(self, name) for name in ("every", "fragments", "delay", "mixing")}
        return found | ({"moments": self.moments} if self.moments else {})

    @property
    def moments(self) -> dict[str, int]:
        """Steps from one averaging of these moments to the next."""
        return {name: self.every * rounds for name, rounds in (("mu", self.mu), ("nu", self.nu)) if rounds}


def _algorithm(name: str, ratio: float, levels: int) -> Algorithm:
    return CODES[name]() if name in CODES else METHODS[name].make(ratio, levels)


def parse(
    words: list[str], every: list[int], inner: list[str] | None = None, moments: list[str] | None = None
) -> list[Setup]:
    """The curves that were asked for: each word, for each H, inner optimizer and rhythm of moments.

    words: NAME, stream:NAME (in fragments that arrive later), or ddp:NAME (gradients, at every step).
    inner: OPTIMIZER[:RATE[:OUTER_RATE[:OUTER_MOMENTUM]]]. moments: "none", or MU:NU[:NAME], each a
    number of rounds, and the compressor of their differences, by default that of the parameters.
    """
    found = []
    optimizers = {word: _inner(word) for word in inner or ["adamw"]}
    rhythms = {word: _rhythm(word) for word in moments or ["none"]}
    for word, (optimizer, own) in itertools.product(dict.fromkeys(words), optimizers.items()):
        kind, colon, name = word.rpartition(":")
        if name not in NAMES or (colon and kind not in ("ddp", "stream")):
            known = ", ".join(NAMES)
            raise UserError(f"unknown method {word!r}; give NAME, stream:NAME or ddp:NAME with one of {known}")
        label = word if optimizer == "adamw" else f"{optimizer} {word}"
        if kind == "ddp":
            found.append(Setup(label, name, 1, plain=True, **own))
            continue
        for h, (rhythm, (mu, nu, code)) in itertools.product(dict.fromkeys(every), rhythms.items()):
            times: tuple[Any, ...] = (min(3, h), min(5, h - 1), 0.5) if kind == "stream" else ()
            end = f" moments {rhythm}" if mu or nu else ""
            found.append(Setup(f"{label} H={h}{end}", name, h, *times, **own, mu=mu, nu=nu, code=code))
    return found


def _inner(word: str) -> dict[str, Any]:
    """OPTIMIZER[:RATE[:OUTER_RATE[:OUTER_MOMENTUM]]] as fields of a `Setup`."""
    name, *numbers = word.split(":")
    fields = ("lr", "outer_lr", "outer_momentum")
    least = (lambda x: 0 < x < math.inf, lambda x: 0 < x < math.inf, lambda x: 0 <= x < 1)
    try:
        rates = [float(number) for number in numbers]
    except ValueError:
        rates = [math.nan]
    fits = len(rates) <= len(fields) and all(within(x) for within, x in zip(least, rates, strict=False))
    if name not in INNERS or not fits:
        raise UserError(
            f"--inner takes OPTIMIZER[:RATE[:OUTER_RATE[:OUTER_MOMENTUM]]] with one of {', '.join(INNERS)}, rates "
            f"above 0 and a momentum in [0, 1); got {word!r}"
        )
    return {"inner": name, **dict(zip(fields, rates, strict=False))}


def _rhythm(word: str) -> tuple[int, int, str]:
    """MU:NU[:NAME] in rounds; none: never."""
    if word == "none":
        return 0, 0, ""
    rounds, codes = word.split(":")[:2], word.split(":")[2:]
    fits = len(rounds) == 2 and len(codes) <= 1 and all(each.isdecimal() and int(each) >= 1 for each in rounds)
    if not fits or not set(codes) <= set(NAMES):
        raise UserError(
            '--moments takes "none" or MU:NU[:METHOD], two numbers of rounds of at least 1, and one of '
            f"{', '.join(NAMES)}; got {word!r}"
        )
    return int(rounds[0]), int(rounds[1]), "".join(codes)
