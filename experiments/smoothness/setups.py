"""Studies of methods and compressors by name, with their plans and theoretical step sizes for a budget.

Compressors, each for a budget of expected non-zeros (and norms):

    rand                 independent sampling, 32 bits a value; probabilities by smoothness in the + methods
    uniform, varying     dithering with equal steps, with steps by smoothness (plain methods: equal ones)
    uniform-16 and so on the same with its norm in 16 bits
    block                dithering in n blocks, a norm and a step each
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxcomp as jc
from experiments.smoothness.problems import Problem
from jaxcomp.smoothness import block_variance, dithering_variance, sparsification_variance
from jaxcomp.theory import StepSizes

__all__ = ["STUDIES", "Setup", "Study", "make_setup"]

ROUNDED = 1 + 2.0**-7  # a norm in bfloat16, rounded up, over the norm


class Setup(NamedTuple):
    """One method with one compressor, for several budgets at once.

    budgets: shares of d;  make(steps) -> Method, for StepSizes of arrays;  operator: what whitens;  plans: list, one
    for each budget, of what replaces the compressor's shared state;  steps: StepSizes for each budget.
    """

    label: str
    budgets: list[float]
    make: Callable[[StepSizes], Any]
    operator: Any
    plans: list[Any]
    steps: list[StepSizes]


def plan_of(compressor: str, method: str, diag: np.ndarray, budget: float, mu: float) -> tuple[Any, float, float]:
    """What a budget gives: a compressor, its omega, and the largest variance of a worker in its operator.

    method: of the design; diag: [n, d] of the operator that whitens (ones without one); budget: in entries.
    """
    n, d = diag.shape
    kind, _, short = compressor.partition("-")
    options: dict[str, Any] = {"method": "uniform" if kind == "uniform" else method, "workers": n, "mu": mu}
    if kind == "rand":
        each, variance_of = jc.smoothness.probabilities(diag, min(budget, d), **options), sparsification_variance
        made = jc.bernoulli(each, per_worker=True)
    elif kind == "block":
        blocks, variance_of = min(n, d), block_variance
        each = jc.smoothness.block_steps(diag, budget + blocks, blocks, **options)
        made = jc.dithering(steps=each, blocks=blocks, per_worker=True)
    else:
        each = jc.smoothness.steps(diag, budget, **options)
        made = jc.dithering(steps=each, per_worker=True, norm_dtype=jnp.bfloat16 if short else None)
        variance_of = lambda row, h: dithering_variance(row, (ROUNDED if short else 1.0) * h)
    omega = max(variance_of(np.ones(d), row) for row in each)
    return made, omega, max(map(variance_of, diag, each))


def make_setup(
    problem: Problem, label: str, budgets: Sequence[float], *, operator: Any = None, down: bool = False
) -> Setup:
    """A method with a compressor for several budgets, each with its theoretical step sizes.

    Args:
        problem: data and constants.
        label: a method (dcgd, diana, adiana, plain or with a +) and a compressor as the head of this file names them;
            after a comma what else is to be said.
        budgets: expected non-zeros of a message as a share of d (blocks: norms come on top).
        operator: what whitens in the + methods, instead of the exact dense matrices.
        down: the server sends the direction as a dithering with sqrt(d) levels and a norm of 16 bits; else whole.
    """
    method, compressor = label.partition(",")[0].split()
    name, aware = method.removesuffix("+"), method.endswith("+")
    d, L, scale, design = problem.d, problem.L, 1.0, "dcgd+" if name == "dcgd" else "diana+"
    if not aware:
        operator, scale, design = jc.smoothness.diagonal_of(np.ones(d)), problem.L_max, "uniform"
    elif operator is None:
        operator = problem.smoothness
    else:
        L = min(jc.smoothness.mean_lambda_max(operator), L)
    diag = np.broadcast_to(np.asarray(operator.diag, np.float64), (problem.workers, d))
    plans = [plan_of(compressor, design, diag, share * d, problem.l2) for share in budgets]
    compressors, omegas, variances = zip(*plans, strict=True)
    below, given = None, {"smoothness": L, "workers": problem.workers, "mu": problem.l2}
    if down:
        levels = round(float(np.sqrt(d)))
        below = jc.dithering(levels, blocks=1, norm_dtype=jnp.bfloat16)
        given["down_omega"] = dithering_variance(np.ones(d), np.full(d, ROUNDED / levels))
    sizes_of = getattr(jc.theory, name)
    if name == "dcgd":  # which has no shifts to learn
        steps = [sizes_of(variance=scale * variance, **given) for variance in variances]
    else:
        steps = [sizes_of(variance=scale * V, omega=omega, **given) for V, omega in zip(variances, omegas, strict=True)]
    # The finest plan has the widest levels and the largest capacity: its static shapes serve all budgets.
    finest = compressors[int(np.argmin(omegas))]
    wrapped = jc.precondition(finest, operator, dtype=jnp.float32 if compressor == "rand" else None)

    def make(s: StepSizes) -> Any:
        if name == "adiana":
            return jc.methods.adiana(wrapped, s, down=below, code="best")
        up = jc.direct(wrapped) if name == "dcgd" else jc.diana(wrapped, alpha=s.alpha)
        return jc.methods.descend(up if below is None else jc.methods.bidirectional(up, below, code="best"), s.gamma)

    like = jax.ShapeDtypeStruct((d,), jnp.float64)
    shared = [each.init(jax.random.key(0), like).shared for each in compressors]
    return Setup(f"{label}, both ways" if down else label, list(budgets), make, operator, shared, steps)


# ------------------------------------------------------------------------------------------------
# Studies: lists of setups for one problem

Setups = Callable[[Problem, Sequence[float], str], list[Setup]]


class Study(NamedTuple):
    """what: one line for the help;  setups(problem, budgets, count) -> setups, to the first of which factors refer;
    budgets: shares of d; none: 1/n."""

    what: str
    setups: Setups
    budgets: tuple[float, ...]
    target: float = 1e-6
    max_rounds: int = 20000


def pairs(*names: str) -> Setups:
    return lambda problem, budgets, count: [make_setup(problem, name, budgets) for name in names]


PLAIN, AWARE = ("dcgd", "diana", "adiana"), ("dcgd+", "diana+", "adiana+")
ALL = pairs(
    *(f"{method} {how}" for how in ("rand", "uniform", "block") for method in PLAIN),
    *(f"{method} {how}" for how in ("rand", "uniform", "varying", "block") for method in AWARE),
)


def budget(problem: Problem, budgets: Sequence[float], count: str) -> list[Setup]:
    """DIANA+ does best with very short messages, plain and accelerated methods with longer ones.

    Where both directions count, rounds do, and so all methods do best with long messages: every method with the
    direction sent back whole, and as a dithering.
    """
    finer = [16 * share for share in budgets]
    if count == "both":
        names = ("diana uniform", "diana+ varying-16", "adiana uniform-16", "adiana+ varying-16")
        short = ("diana uniform-16", *names[1:], "dcgd+ varying-16")
        return pairs(*names)(problem, finer, count) + [make_setup(problem, name, finer, down=True) for name in short]
    names = ("diana uniform", "diana uniform-16", "diana+ uniform", "diana+ varying", "diana+ varying-16")
    names += ("adiana uniform", "adiana+ varying", "adiana+ varying-16")
    finest = finer + [factor * max(finer) for factor in (2, 4, 8)]  # where plain ADIANA has its best one
    grids = {"diana+": budgets, "adiana": finest}
    return [make_setup(problem, name, grids.get(name.split()[0], finer)) for name in names]


def variants(problem: Problem, budgets: Sequence[float], count: str) -> list[Setup]:
    """DIANA+ with other coordinates, and with cheaper matrices."""
    root, d = problem.smoothness.matrix_root, problem.d
    rotation = np.linalg.qr(np.random.default_rng(0).standard_normal((d, d)))[0]
    eigenbasis = jc.smoothness.stack([jc.smoothness.eigenbasis(m) for m in root @ root])
    rotated = jc.smoothness.stack([jc.smoothness.rotate(m, rotation) for m in root @ root])
    glm = lambda form, **more: jc.smoothness.glm(list(problem.features), form=form, l2=problem.l2, **more)
    operators = {
        "diana uniform": None,
        "diana+ varying": None,
        "diana+ varying, eigenbasis": eigenbasis,
        "diana+ uniform, rotated": rotated,
        "diana+ rand": None,
        "diana+ rand, eigenbasis": eigenbasis,
        "diana+ varying, safe diagonal": glm("diagonal"),
        "diana+ varying, low rank d/8": glm("low_rank", rank=max(1, d // 8)),
        "diana+ varying, 4 blocks": glm("block", blocks=4),
    }
    return [make_setup(problem, label, budgets, operator=operator) for label, operator in operators.items()]


STUDIES = {
    "all": Study("every method with every compressor", ALL, (0.125, 0.5), max_rounds=4000),
    "budget": Study(
        "DIANA with standard dithering against DIANA+ with varying steps, each at its best budget, and what beats both "
        "(--budgets are those of DIANA+; the others take 16 times as much); --count both: in both directions",
        *(budget, (1 / 64, 1 / 32, 1 / 16, 1 / 8)),
    ),
    "variants": Study(
        "eigenbasis, rotation, safe diagonal, low rank", variants, (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1), max_rounds=40000
    ),
    "theory": Study(
        "the six methods at their theoretical steps, down to rounding",
        pairs(*(f"{m} uniform" for m in ("diana", "dcgd", "adiana")), *(f"{m} varying" for m in AWARE)),
        *((1.0,), 1e-20, 60000),
    ),
    "workers": Study(
        "blocks and varying steps against one norm as n grows, with d/n expected non-zeros (and n norms) a message",
        pairs("diana uniform", "diana+ uniform", "diana+ varying", "diana+ block"),
        (),
    ),
}
