"""What is compared: each study is a list of setups for one problem."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

import jaxcomp as jc
from experiments.smoothness.problems import Problem
from experiments.smoothness.setups import Setup, make_setup

__all__ = ["STUDIES", "Study"]


class Study(NamedTuple):
    """what: one line for the help;  setups(problem, budgets, form, count) -> setups, to the first of which factors
    refer;  budgets: shares of d; none: 1/n."""

    what: str
    setups: Callable[[Problem, Sequence[float], str, str], list[Setup]]
    budgets: tuple[float, ...]
    target: float = 1e-6
    max_rounds: int = 4000


PAPER = [
    ("diana", "rand"),
    ("diana", "uniform"),
    ("diana", "block"),
    ("adiana", "uniform"),
    ("dcgd+", "varying"),
    ("diana+", "rand"),
    ("diana+", "uniform"),
    ("diana+", "varying"),
    ("diana+", "block"),
    ("isega+", "rand"),
    ("adiana+", "rand"),
    ("adiana+", "varying"),
]
ALL = [(method, how) for how in ("rand", "uniform", "block") for method in ("dcgd", "diana", "adiana")] + [
    (method, how) for how in ("rand", "uniform", "varying", "block") for method in ("dcgd+", "diana+", "adiana+")
]


def pairs(names: list[tuple[str, str]]) -> Callable[[Problem, Sequence[float], str, str], list[Setup]]:
    def setups(problem, budgets, form, count):
        return [make_setup(problem, method, how, list(budgets), form=form) for method, how in names]

    return setups


def budget(problem: Problem, budgets: Sequence[float], form: str, count: str) -> list[Setup]:
    """DIANA+ does best with very short messages, plain and accelerated methods with longer ones.

    Where both directions count, rounds do, and so all methods do best with long messages.
    """
    if count == "both":
        return both(problem, [16 * share for share in budgets], form)
    finer = [16 * share for share in budgets]
    names = [("diana", "uniform"), ("diana", "uniform-16"), ("diana+", "uniform"), ("diana+", "varying")]
    names += [("diana+", "varying-16"), ("adiana", "uniform"), ("adiana+", "varying"), ("adiana+", "varying-16")]
    return [
        make_setup(problem, method, how, list(budgets) if method == "diana+" else finer, form=form)
        for method, how in names
    ]


def both(problem: Problem, budgets: list[float], form: str) -> list[Setup]:
    """Every method with the direction sent back whole, and as a dithering of more and more levels."""
    names = [("diana", "uniform"), ("diana+", "varying-16"), ("adiana", "uniform-16"), ("adiana+", "varying-16")]
    setups = [make_setup(problem, method, how, budgets, form=form) for method, how in names]
    names += [("dcgd+", "varying-16")]
    return setups + [
        make_setup(problem, method, how.removesuffix("-16") + "-16", budgets, form=form, down=down)
        for method, how in names
        for down in ("half", "one", "two")
    ]


def variants(problem: Problem, budgets: Sequence[float], form: str, count: str) -> list[Setup]:
    """DIANA+ with other coordinates, and with cheaper matrices."""
    matrices, d = problem.matrices, problem.d
    rng = np.random.default_rng(0)
    rotation = np.linalg.qr(rng.standard_normal((d, d)))[0]
    features = list(problem.features)
    operators: dict[str, tuple[str, Any]] = {
        "diana+ varying": ("varying", None),
        "diana+ varying, eigenbasis": (
            "varying",
            jc.smoothness.stack([jc.smoothness.eigenbasis(m) for m in matrices]),
        ),
        "diana+ uniform, rotated": (
            "uniform",
            jc.smoothness.stack([jc.smoothness.rotate(m, rotation) for m in matrices]),
        ),
        "diana+ rand": ("rand", None),
        "diana+ rand, eigenbasis": ("rand", jc.smoothness.stack([jc.smoothness.eigenbasis(m) for m in matrices])),
        "diana+ varying, safe diagonal": ("varying", jc.smoothness.glm(features, form="diagonal", l2=problem.l2)),
        "diana+ varying, low rank d/8": (
            "varying",
            jc.smoothness.glm(features, form="low_rank", rank=max(1, d // 8), l2=problem.l2),
        ),
        "diana+ varying, 4 blocks": ("varying", jc.smoothness.glm(features, form="block", blocks=4, l2=problem.l2)),
    }
    return [make_setup(problem, "diana", "uniform", list(budgets), form=form)] + [
        make_setup(problem, "diana+", how, list(budgets), form=form, operator=operator, label=label)
        for label, (how, operator) in operators.items()
    ]


STUDIES = {
    "compare": Study("the methods and compressors of the papers", pairs(PAPER), (0.125, 0.5)),
    "all": Study("every method with every compressor", pairs(ALL), (0.125, 0.5)),
    "budget": Study(
        "DIANA with standard dithering against DIANA+ with varying steps, each at its best budget, and what beats both "
        "(--budgets are those of DIANA+; the others take 16 times as much); --count both: in both directions",
        budget,
        (1 / 64, 1 / 32, 1 / 16, 1 / 8),
        max_rounds=20000,
    ),
    "variants": Study(
        "eigenbasis, rotation, safe diagonal, low rank", variants, (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1), 1e-6, 40000
    ),
    "theory": Study(
        "the six methods at their theoretical steps, down to rounding",
        pairs(
            [(m, "uniform") for m in ("diana", "dcgd", "adiana")]
            + [(m, "varying") for m in ("dcgd+", "diana+", "adiana+")]
        ),
        (1.0,),
        1e-20,
        60000,
    ),
    "workers": Study(
        "blocks and varying steps against one norm as n grows, with d/n expected non-zeros (and n norms) a message",
        pairs([("diana", "uniform"), ("diana+", "uniform"), ("diana+", "varying"), ("diana+", "block")]),
        (),
        max_rounds=20000,
    ),
}
