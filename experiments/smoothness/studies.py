"""What is compared: each study is a list of setups for one problem."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

import jaxcomp as jc
from experiments.smoothness.problems import Problem
from experiments.smoothness.setups import Setup, make_setup

__all__ = ["STUDIES", "Study"]

Setups = Callable[[Problem, Sequence[float], str, str], list[Setup]]


class Study(NamedTuple):
    """what: one line for the help;  setups(problem, budgets, form, count) -> setups, to the first of which factors
    refer;  budgets: shares of d; none: 1/n."""

    what: str
    setups: Setups
    budgets: tuple[float, ...]
    target: float = 1e-6
    max_rounds: int = 4000


def made(problem: Problem, name: str, budgets: Sequence[float], form: str, **more: Any) -> Setup:
    """A setup in words: a method and a compressor."""
    method, compressor = name.split()
    return make_setup(problem, method, compressor, budgets, form=form, **more)


def pairs(*names: str) -> Setups:
    return lambda problem, budgets, form, count: [made(problem, name, budgets, form) for name in names]


PLAIN, AWARE = ("dcgd", "diana", "adiana"), ("dcgd+", "diana+", "adiana+")
PAPER = pairs(
    *("diana rand", "diana uniform", "diana block", "adiana uniform", "dcgd+ varying", "diana+ rand", "diana+ uniform"),
    *("diana+ varying", "diana+ block", "isega+ rand", "adiana+ rand", "adiana+ varying"),
)
ALL = pairs(
    *(f"{method} {how}" for how in ("rand", "uniform", "block") for method in PLAIN),
    *(f"{method} {how}" for how in ("rand", "uniform", "varying", "block") for method in AWARE),
)


def budget(problem: Problem, budgets: Sequence[float], form: str, count: str) -> list[Setup]:
    """DIANA+ does best with very short messages, plain and accelerated methods with longer ones.

    Where both directions count, rounds do, and so all methods do best with long messages: every method with the
    direction sent back whole, and as a dithering of more and more levels.
    """
    finer = [16 * share for share in budgets]
    names = ["diana uniform", "diana+ varying-16", "adiana uniform-16", "adiana+ varying-16"]
    if count == "both":
        down = [
            made(problem, name.removesuffix("-16") + "-16", finer, form, down=down)
            for name, down in itertools.product([*names, "dcgd+ varying"], ("half", "one", "two"))
        ]
        return pairs(*names)(problem, finer, form, count) + down
    names = ["diana uniform", "diana uniform-16", "diana+ uniform", "diana+ varying", "diana+ varying-16"]
    names += ["adiana uniform", "adiana+ varying", "adiana+ varying-16"]
    return [made(problem, name, budgets if name.startswith("diana+") else finer, form) for name in names]


def variants(problem: Problem, budgets: Sequence[float], form: str, count: str) -> list[Setup]:
    """DIANA+ with other coordinates, and with cheaper matrices."""
    root, d, features = problem.smoothness.matrix_root, problem.d, list(problem.features)
    rotation = np.linalg.qr(np.random.default_rng(0).standard_normal((d, d)))[0]
    eigenbasis = jc.smoothness.stack([jc.smoothness.eigenbasis(m) for m in root @ root])
    rotated = jc.smoothness.stack([jc.smoothness.rotate(m, rotation) for m in root @ root])
    glm = lambda form, **more: jc.smoothness.glm(features, form=form, l2=problem.l2, **more)
    operators = {
        "diana+ varying": None,
        "diana+ varying, eigenbasis": eigenbasis,
        "diana+ uniform, rotated": rotated,
        "diana+ rand": None,
        "diana+ rand, eigenbasis": eigenbasis,
        "diana+ varying, safe diagonal": glm("diagonal"),
        "diana+ varying, low rank d/8": glm("low_rank", rank=max(1, d // 8)),
        "diana+ varying, 4 blocks": glm("block", blocks=4),
    }
    return [made(problem, "diana uniform", budgets, form)] + [
        made(problem, label.split(",")[0], budgets, form, operator=operator, label=label)
        for label, operator in operators.items()
    ]


STUDIES = {
    "compare": Study("the methods and compressors of the papers", PAPER, (0.125, 0.5)),
    "all": Study("every method with every compressor", ALL, (0.125, 0.5)),
    "budget": Study(
        "DIANA with standard dithering against DIANA+ with varying steps, each at its best budget, and what beats both "
        "(--budgets are those of DIANA+; the others take 16 times as much); --count both: in both directions",
        *(budget, (1 / 64, 1 / 32, 1 / 16, 1 / 8), 1e-6, 20000),
    ),
    "variants": Study(
        "eigenbasis, rotation, safe diagonal, low rank", variants, (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1), 1e-6, 40000
    ),
    "theory": Study(
        "the six methods at their theoretical steps, down to rounding",
        pairs(*(f"{m} uniform" for m in ("diana", "dcgd", "adiana")), *(f"{m} varying" for m in AWARE)),
        *((1.0,), 1e-20, 60000),
    ),
    "workers": Study(
        "blocks and varying steps against one norm as n grows, with d/n expected non-zeros (and n norms) a message",
        pairs("diana uniform", "diana+ uniform", "diana+ varying", "diana+ block"),
        *((), 1e-6, 20000),
    ),
}
