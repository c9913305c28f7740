"""Methods and compressors by name, with their plans and theoretical step sizes for a budget.

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

__all__ = ["DOWNLINKS", "Setup", "make_setup"]

# name -> levels of the dithering with one norm of 16 bits that a server sends the direction with, over sqrt(d)
DOWNLINKS = {"dense": None, "half": 0.5, "one": 1.0, "two": 2.0}
ROUNDED = 1 + 2.0**-7  # a norm in bfloat16, rounded up, over the norm


class Setup(NamedTuple):
    """One method with one compressor, for several budgets at once.

    budgets: shares of d;  make(steps) -> Method, for StepSizes of arrays;  operator: what whitens;  plans: list, one
    for each budget, of what replaces the compressor's shared state;  steps: StepSizes for each budget;  omega: each.
    """

    label: str
    budgets: list[float]
    make: Callable[[StepSizes], Any]
    operator: Any
    plans: list[Any]
    steps: list[StepSizes]
    omega: list[float]


class Plan(NamedTuple):
    """What a budget gives: a compressor with its probabilities or steps, its omega, and the largest V of a worker."""

    compressor: Any
    parameters: np.ndarray
    omega: float
    variance: float


def plan_of(compressor: str, aware: bool, shifts: bool, diag: np.ndarray, budget: float, mu: float) -> Plan:
    """diag: [n, d] of the operator that whitens (ones without whitening); budget: in entries."""
    n, d = diag.shape
    by_smoothness = aware and not compressor.startswith("uniform")
    options: dict[str, Any] = {"method": "diana+" if shifts else "dcgd+", "workers": n, "mu": mu}
    options = options if by_smoothness else {"method": "uniform"}
    kind, _, short = compressor.partition("-")
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
    return Plan(made, each, omega, max(map(variance_of, diag, each)))


def downlink_of(down: str, d: int) -> tuple[Any, float]:
    """What a server compresses the direction with, and its omega; (None, 0) where that goes whole."""
    share = DOWNLINKS[down]
    if share is None:
        return None, 0.0
    levels = max(1, round(share * float(np.sqrt(d))))
    compressor = jc.dithering(levels, blocks=1, norm_dtype=jnp.bfloat16)
    return compressor, dithering_variance(np.ones(d), np.full(d, ROUNDED / levels))


def step_sizes(
    problem: Problem, name: str, L: float, variance: float, omega: float, form: str, down_omega: float
) -> StepSizes:
    """From `jc.theory`; with independent sampling 1 / (1 + omega) is the smallest probability."""
    given = {"smoothness": L, "workers": problem.workers, "variance": variance, "mu": problem.l2}
    if name == "dcgd":
        return jc.theory.dcgd(down_omega=down_omega, **given)
    if name == "diana":
        return jc.theory.diana(omega=omega, tight=form == "tight", down_omega=down_omega, **given)
    if name == "adiana":
        return jc.theory.adiana(omega=omega, down_omega=down_omega, **given)
    return jc.theory.isega(smallest_probability=1 / (1 + omega), **given)


def make_setup(
    problem: Problem,
    method: str,
    compressor: str,
    budgets: Sequence[float],
    *,
    form: str = "paper",
    operator: Any = None,
    label: str | None = None,
    down: str = "dense",
) -> Setup:
    """A method with a compressor for several budgets, each with its theoretical step sizes.

    Args:
        problem: data and constants.
        method: dcgd, diana, adiana, plain or with a +, or isega+.
        compressor: as the head of this file names them.
        budgets: expected non-zeros of a message as a share of d (blocks: norms come on top).
        form: of the step sizes of DIANA: "paper" or "tight"; the other methods take those of the paper.
        operator: what whitens in the + methods, instead of the exact dense matrices.
        label: for tables and plots.
        down: one of DOWNLINKS; not for ISEGA.
    """
    name, aware = method.removesuffix("+"), method.endswith("+")
    n, d = problem.workers, problem.d
    L = problem.L
    if not aware:
        operator, diag = jc.smoothness.diagonal_of(np.ones(d)), np.ones((n, d))
    else:
        if operator is None:
            operator = problem.smoothness
        else:
            L = min(jc.smoothness.mean_lambda_max(operator), L)
        diag = np.asarray(operator.diag, np.float64)
    plans = [plan_of(compressor, aware, name != "dcgd", diag, share * d, problem.l2) for share in budgets]
    below, down_omega = downlink_of(down, d)
    steps = [
        step_sizes(problem, name, L, p.variance if aware else p.omega * problem.L_max, p.omega, form, down_omega)
        for p in plans
    ]
    # The finest plan has the widest levels and the largest capacity: its static shapes serve all budgets.
    chosen = min(plans, key=lambda plan: plan.omega)
    dtype = jnp.float32 if compressor == "rand" else None
    wrapped = jc.precondition(chosen.compressor, operator, dtype=dtype)
    both = lambda algorithm: algorithm if below is None else jc.bidirectional(algorithm, below, code="best")

    def make(s: StepSizes) -> Any:
        if name == "dcgd":
            return jc.descend(both(jc.direct(wrapped)), s.gamma)
        if name == "diana":
            return jc.descend(both(jc.diana(wrapped, alpha=s.alpha)), s.gamma)
        if name == "adiana":
            return jc.adiana(wrapped, s, down=below, code="best")
        return jc.isega(chosen.parameters, operator, s.gamma, dtype=dtype)

    like = jax.ShapeDtypeStruct((d,), jnp.float64)
    shared = [plan.compressor.init(jax.random.key(0), like).shared for plan in plans]
    label = label or f"{method} {compressor}" + ("" if below is None else f", down {down}")
    return Setup(label, list(budgets), make, operator, shared, steps, [plan.omega for plan in plans])
