"""Methods and compressors by name, with their plans and theoretical step sizes for a budget."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxcomp as jc
from experiments.smoothness.problems import Problem
from jaxcomp.smoothness import block_variance, dithering_variance, sparsification_variance
from jaxcomp.theory import StepSizes

__all__ = ["COMPRESSORS", "DOWNLINKS", "METHODS", "Setup", "make_setup"]

METHODS = ("dcgd", "diana", "adiana", "dcgd+", "diana+", "adiana+", "isega+")
# name -> what it does; each takes a budget: expected non-zeros (and norms) over d
COMPRESSORS = {
    "rand": "independent sampling, 32 bits a value; probabilities by smoothness in the + methods",
    "uniform": "dithering with equal steps",
    "varying": "dithering with steps by smoothness (plain methods: equal steps)",
    "uniform-16": "dithering with equal steps, its norm in 16 bits",
    "varying-16": "dithering with steps by smoothness, its norm in 16 bits",
    "block": "dithering in n blocks, a norm and a step each",
}


# name -> levels of the dithering with one norm of 16 bits that a server sends the direction with, over sqrt(d)
DOWNLINKS = {"dense": None, "half": 0.5, "one": 1.0, "two": 2.0}


class Setup(NamedTuple):
    """One method with one compressor, for several budgets at once.

    budgets: shares of d;  make(steps) -> Method, for StepSizes of arrays;  operator: what whitens;  plans: list, one
    for each budget, of what replaces the compressor's shared state;  steps: StepSizes for each budget;
    omega, variance: for each;  down: one of DOWNLINKS.
    """

    label: str
    budgets: list[float]
    make: Callable[[StepSizes], Any]
    operator: Any
    plans: list[Any]
    steps: list[StepSizes]
    omega: list[float]
    variance: list[float]
    down: str = "dense"


class Plan(NamedTuple):
    """What a budget gives: a compressor with its probabilities or steps, its omega, and V for each worker."""

    compressor: Any
    parameters: np.ndarray
    omega: float
    variance: np.ndarray


def plan_of(compressor: str, aware: bool, shifts: bool, diag: np.ndarray, budget: float, mu: float) -> Plan:
    """diag: [n, d] of the operator that whitens (ones without whitening); budget: in entries."""
    n, d = diag.shape
    options: dict[str, Any] = {"method": "diana+" if shifts else "dcgd+", "workers": n, "mu": mu}
    uniform: dict[str, Any] = {"method": "uniform"}
    ones = np.ones(d)
    if compressor == "rand":
        p = jc.smoothness.probabilities(diag, min(budget, d), **(options if aware else uniform))
        variance = np.array([sparsification_variance(row, q) for row, q in zip(diag, p, strict=True)])
        omega = max(sparsification_variance(ones, q) for q in p)
        return Plan(jc.bernoulli(p, per_worker=True), p, omega, variance)
    if compressor == "block":
        blocks = min(n, d)
        h = jc.smoothness.block_steps(diag, budget + blocks, blocks, **(options if aware else uniform))
        variance = np.array([block_variance(row, q) for row, q in zip(diag, h, strict=True)])
        omega = max(block_variance(ones, q) for q in h)
        return Plan(jc.dithering(steps=h, blocks=blocks, per_worker=True), h, omega, variance)
    varying = compressor.startswith("varying") and aware
    short = compressor.endswith("-16")
    norm_dtype, rounded = (jnp.bfloat16, 1 + 2.0**-7) if short else (None, 1.0)
    h = jc.smoothness.steps(diag, budget, **(options if varying else uniform))
    variance = np.array([dithering_variance(row, rounded * q) for row, q in zip(diag, h, strict=True)])
    omega = max(dithering_variance(ones, rounded * q) for q in h)
    return Plan(jc.dithering(steps=h, per_worker=True, norm_dtype=norm_dtype), h, omega, variance)


def downlink_of(down: str, d: int) -> tuple[Any, float]:
    """What a server compresses the direction with, and its omega; (None, 0) where that goes whole."""
    share = DOWNLINKS[down]
    if share is None:
        return None, 0.0
    levels = max(1, round(share * float(np.sqrt(d))))
    compressor = jc.dithering(levels, blocks=1, norm_dtype=jnp.bfloat16)
    return compressor, dithering_variance(np.ones(d), np.full(d, (1 + 2.0**-7) / levels))


def step_sizes(
    problem: Problem, name: str, L: float, variance: float, omega: float, form: str, down_omega: float = 0.0
) -> StepSizes:
    """From `jc.theory`; with independent sampling 1 / (1 + omega) is the smallest probability."""
    if name == "diana" and form == "released":
        return jc.theory.diana_released(smoothness_max=problem.L_max, workers=problem.workers, omega=omega)
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
    budgets: list[float],
    *,
    form: str = "paper",
    operator: Any = None,
    label: str | None = None,
    down: str = "dense",
) -> Setup:
    """A method with a compressor for several budgets, each with its theoretical step sizes.

    Args:
        problem: data and constants.
        method: one of METHODS.
        compressor: one of COMPRESSORS.
        budgets: expected non-zeros of a message as a share of d (blocks: norms come on top).
        form: of the step sizes of DIANA: "paper", "tight" or "released"; the other methods take those of the paper.
        operator: what whitens in the + methods, instead of the exact dense matrices.
        label: for tables and plots.
        down: one of DOWNLINKS; not for ISEGA.
    """
    aware = method.endswith("+")
    name = method.removesuffix("+")
    n, d = problem.workers, problem.d
    if aware:
        operator = problem.smoothness if operator is None else operator
        diag = np.asarray(operator.diag, np.float64)
    else:
        operator, diag = jc.smoothness.diagonal_of(np.ones(d)), np.ones((n, d))
    L = problem.L if not aware or operator is problem.smoothness else jc.smoothness.mean_lambda_max(operator)
    L = min(L, problem.L)
    plans = [plan_of(compressor, aware, name != "dcgd", diag, share * d, problem.l2) for share in budgets]
    below, down_omega = downlink_of(down, d)
    steps, variances = [], []
    for plan in plans:
        variance = float(np.max(plan.variance)) if aware else plan.omega * problem.L_max
        variances.append(variance)
        steps.append(step_sizes(problem, name, L, variance, plan.omega, form, down_omega))
    # The finest plan has the widest levels and the largest capacity: its static shapes serve all budgets.
    chosen = plans[int(np.argmin([plan.omega for plan in plans]))]
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

    def shared_of(plan: Plan) -> Any:
        like = jax.ShapeDtypeStruct((d,), jnp.float64)
        return plan.compressor.init(jax.random.key(0), like).shared

    return Setup(
        label or f"{method} {compressor}" + ("" if below is None else f", down {down}"),
        list(budgets),
        make,
        operator,
        [shared_of(plan) for plan in plans],
        steps,
        [plan.omega for plan in plans],
        variances,
        down,
    )
