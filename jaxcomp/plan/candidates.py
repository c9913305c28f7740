"""Candidates of a plan: an algorithm, its route, buckets and local steps; what it sends, and what it loses.

What a candidate exchanges is read from its traced program: every collective with its operands, so that a prediction
holds for routes, hierarchies and algorithms that were written after it.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp.algorithms import direct, error_feedback, power_sgd
from jaxcomp.arrays import like_of
from jaxcomp.base import Algorithm, check_algorithm
from jaxcomp.compressors import block_scaled, cast, dithering, eden, identity, narrow, sidco, sign, top_k
from jaxcomp.compressors.checks import is_number
from jaxcomp.compressors.tree import layout_of
from jaxcomp.compressors.vector import alpha_of, omega_of
from jaxcomp.exchange.axes import axis_names
from jaxcomp.exchange.routes import route_of
from jaxcomp.groups import TooLong, groups_of
from jaxcomp.plan.links import KINDS, Collective, workers_of
from jaxcomp.transforms.compressed_mean import compressed_mean

__all__ = [
    "Candidate",
    "Loss",
    "check_candidates",
    "check_every",
    "check_max_error",
    "collectives_of",
    "default_candidates",
    "dense_candidates",
    "hierarchies",
    "is_amount",
    "loss_of",
    "plan_for",
    "sent_bytes",
    "traced",
]

USEFUL = 1e-4  # least alpha whose bound on transient steps says something
NAMES = {
    "psum": "all_reduce",
    "psum2": "all_reduce",
    "psum_invariant": "all_reduce",
    "pmax": "all_reduce",
    "pmin": "all_reduce",
    "all_gather": "all_gather",
    "all_gather_invariant": "all_gather",
    "all_to_all": "all_to_all",
    "ragged_all_to_all": "all_to_all",
    "reduce_scatter": "reduce_scatter",
    "ppermute": "permute",
}


class Candidate(NamedTuple):
    """One way to train.

    name: in tables.
    algorithm: as for `compressed_mean`; or a mapping from mesh axes to algorithms, a hierarchy.
    via, bucket_bytes: as for `compressed_mean`.
    every: H, steps at each worker to an exchange (`local_updates`); 1: an exchange at every step.
    dense: whether it sends every entry in 16 bits or more.
    """

    name: str
    algorithm: Algorithm | Mapping[Any, Algorithm]
    via: str = "auto"
    bucket_bytes: int | None = None
    every: int = 1
    dense: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """Options of `compressed_mean` and `value_and_grad`, besides the algorithm."""
        return {"via": self.via} | ({"bucket_bytes": self.bucket_bytes} if self.bucket_bytes else {})

    def in_buckets(self, size: int) -> "Candidate":
        """The same with an exchange for each bucket of so many bytes."""
        return self._replace(name=f"{self.name}, {size / 2**20:g} MiB", bucket_bytes=size)

    def with_every(self, every: int) -> "Candidate":
        """The same with so many steps to an exchange."""
        return self._replace(name=f"{self.name}, H={every}", every=every)

    def transformation(self, axis: Any, **options: Any) -> Any:
        """The candidate's `compressed_mean` over an axis."""
        options = {**self.options, **options}
        if isinstance(self.algorithm, Mapping):
            return compressed_mean(None, self.algorithm, **options)
        return compressed_mean(check_algorithm("plan", self.algorithm), axis, **options)


def dense_candidates() -> list[Candidate]:
    """All entries, in f32 and bf16, by their best routes."""
    bf16 = direct(cast("bfloat16"))
    return [
        Candidate("f32", direct(identity()), dense=True),
        Candidate("bf16", bf16, dense=True),
        Candidate("bf16:two_shot", bf16, "two_shot", dense=True),
    ]


def default_candidates(max_every: int = 1) -> list[Candidate]:
    """Candidates where the user names none: dense first, then codes, sparse messages, factors and buckets.

    Args:
        max_every: H; where it is more than one, local updates with 4, 16, .. and at most so many steps, too.
    """
    check_every("default_candidates", max_every)
    dense = dense_candidates()
    quarter, hundredth = direct(dithering(7, block_size=512)), error_feedback(sidco(0.01))
    sparse = Candidate("sidco(0.01)+ef", hundredth)
    every_step = [
        *dense,
        Candidate("fp8+ef:two_shot", error_feedback(cast("float8_e4m3fn")), "two_shot"),
        Candidate("dithering(7):two_shot", quarter, "two_shot"),
        Candidate("dithering(7):gather", quarter, "gather"),
        Candidate("block_scaled(int4)+ef:two_shot", error_feedback(block_scaled("int4")), "two_shot"),
        Candidate("eden(4):two_shot", direct(eden(4)), "two_shot"),
        Candidate("sign+ef:two_shot", error_feedback(sign()), "two_shot"),
        Candidate("top_k(0.01)+ef", error_feedback(top_k(0.01))),
        sparse,
        Candidate("sidco(0.01)+ef:two_shot", hundredth, "two_shot"),
        Candidate("sidco(0.001)+ef", error_feedback(sidco(0.001))),
        Candidate("narrow(sidco(0.001))+ef", error_feedback(narrow(sidco(0.001), values="bfloat16", indices="uint16"))),
        Candidate("power_sgd(2)", power_sgd(2)),
        Candidate("power_sgd(4)", power_sgd(4)),
        *(each.in_buckets(2**size) for each in (dense[0], sparse) for size in (22, 24)),
    ]
    return every_step + [each.with_every(steps) for steps in _lengths(max_every) for each in (dense[0], sparse)]


def hierarchies(axes: Sequence[Any]) -> list[Candidate]:
    """Hierarchies for workers along several axes: dense within all but one, then sparse along that one, for each one.

    >>> [each.name for each in hierarchies(("dcn", "ici"))]
    ['f32 over ici, sidco(0.01)+ef over dcn', 'f32 over dcn, sidco(0.01)+ef over ici']
    """
    found = []
    for last in axes if len(axes) > 1 else ():
        within = [name for name in axes if name != last]
        levels = {
            tuple(within) if len(within) > 1 else within[0]: direct(identity()),
            last: error_feedback(sidco(0.01)),
        }
        found.append(Candidate(f"f32 over {', '.join(map(str, within))}, sidco(0.01)+ef over {last}", levels))
    return found


def _lengths(most: int) -> list[int]:
    """4, 16, .. and the largest one.

    >>> _lengths(1), _lengths(16), _lengths(20)
    ([], [4, 16], [4, 16, 20])
    """
    powers = [4**i for i in range(1, 16) if 4**i < most]
    return [*powers, most] if most > 1 else []


def check_every(name: str, max_every: Any) -> None:
    """Raises ValueError unless it is None or an integer of at least 1."""
    whole = isinstance(max_every, int | np.integer) and not isinstance(max_every, bool)
    if max_every is not None and (not whole or max_every < 1):
        raise ValueError(f"{name}: max_every must be an integer of at least 1; got {max_every!r}")


def check_candidates(name: str, candidates: Any) -> list[Candidate]:
    """The candidates as a list; TypeError unless there are some, ValueError unless their names differ."""
    found = list(candidates) if isinstance(candidates, Iterable) else []
    if not found or not all(isinstance(each, Candidate) for each in found):
        raise TypeError(f"{name}: candidates must be a list of jc.Candidate, not empty; got {candidates!r}")
    names = [each.name for each in found]
    if len(set(names)) < len(names):
        raise ValueError(f"{name}: candidates must have different names; got {names}")
    return found


def is_amount(value: Any) -> bool:
    """Whether it is a real number >= 0, of Python or numpy; NaN is none, infinity is one."""
    return is_number(value) and bool(value >= 0)


def check_max_error(name: str, max_error: Any) -> None:
    """Raises ValueError unless it is None or a number >= 0."""
    if max_error is not None and not is_amount(max_error):
        raise ValueError(f"{name}: max_error must be a number >= 0; got {max_error!r}")


# ------------------------------------------------------------------------------------------------
# What it sends


def collectives_of(
    candidate: Candidate, like: Any, axis: Any, sizes: Mapping[str, int], *, joined: bool = True
) -> tuple[Collective, ...]:
    """The collectives of one exchange, from its traced program.

    Of the branches of a conditional the one with most bytes is taken; what stands in a loop of unknown length is
    counted once.

    Args:
        candidate: see `Candidate`.
        like: shapes of the gradients of one device, a tree.
        axis: of the workers, a name or a tuple; of a hierarchy the mapping has the axes.
        sizes: axis -> workers.
        joined: whether sums that do not wait for each other are one, as GPUs and TPUs run them; a CPU runs the operands
            of a joined sum one after the other, each with messages of its own.

    >>> import jax.numpy as jnp
    >>> collectives_of(dense_candidates()[0], jnp.zeros(5000), "data", {"data": 4})
    (Collective(kind='all_reduce', operand_bytes=20000.0, axis='data', times=1),)
    """
    transform = candidate.transformation(axis)

    def exchange(grads):
        return transform.update(grads, transform.init(jax.tree.map(jnp.zeros_like, grads)))[0]

    traced = jax.make_jaxpr(exchange, axis_env=list(sizes.items()))(like_of(like))
    return tuple(_collectives(traced.jaxpr, 1, joined))


def traced(
    candidates: Sequence[Candidate],
    like: Any,
    axis: Any,
    sizes: Mapping[str, int],
    *,
    joined: bool = True,
    refused: dict[str, str] | None = None,
) -> dict[str, tuple[Collective, ...]]:
    """The collectives of each by its name. Candidates that differ in H alone have the same.

    refused: takes the name of each candidate that cannot carry so many entries, and why, in the place of an error.
    """
    found: dict[str, tuple[Collective, ...]] = {}
    refused, strict = ({}, True) if refused is None else (refused, False)
    for i, each in enumerate(candidates):
        same = lambda one: one.algorithm is each.algorithm and one[2:4] == each[2:4]  # noqa: B023
        first = next((one.name for one in candidates[:i] if same(one)), None)
        if first in refused:
            refused[each.name] = refused[first]
        elif first is not None:
            found[each.name] = found[first]
        else:
            try:
                found[each.name] = collectives_of(each, like, axis, sizes, joined=joined)
            except TooLong as error:
                if strict:
                    raise
                refused[each.name] = str(error)
    return found


def _collectives(jaxpr: Any, times: int, joined: bool) -> list[Collective]:
    """Collectives in the order of the program. Sums in a row that do not wait for each other count as one, as compilers
    join them."""
    found: list[Collective] = []
    after: dict[Any, int] = {}  # variable -> how many collectives it waits for, by the number of the last one
    joinable = -1  # number of the last collective, where a sum may be joined to it
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        waits = max((after.get(x, -1) for x in equation.invars if not hasattr(x, "val")), default=-1)
        if name in NAMES:
            held = [x.aval for x in equation.invars if hasattr(x.aval, "dtype")]
            each_bytes = [float(math.prod(x.shape) * x.dtype.itemsize) for x in held]
            held_bytes = sum(each_bytes)
            axis = ",".join(map(str, axis_names(params.get("axes", params.get("axis_name")))))
            if not axis or not held_bytes:
                continue
            one = Collective(NAMES[name], held_bytes, axis, times)
            if not joined:
                found += [one._replace(operand_bytes=size) for size in each_bytes if size]
                after.update(dict.fromkeys(equation.outvars, len(found) - 1))
                continue
            last = found[-1] if found and joinable == len(found) - 1 and waits < joinable else None
            if last is not None and "sum" in name and last[::2] == one[::2] and last.times == times:
                found[-1] = last._replace(operand_bytes=last.operand_bytes + held_bytes)
            else:
                found.append(one)
                joinable = len(found) - 1 if "sum" in name else -1
        elif name == "cond":
            arms = [_collectives(getattr(arm, "jaxpr", arm), times, joined) for arm in params["branches"]]
            found += max(arms, key=lambda arm: sum(each.operand_bytes * each.times for each in arm), default=[])
        else:
            more = times * params["length"] if name == "scan" else times
            for inner in jax.tree.leaves(params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
                if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                    found += _collectives(getattr(inner, "jaxpr", inner), more, joined)
        here = len(found) - 1 if name in NAMES or name == "cond" or len(found) - 1 > joinable >= 0 else waits
        after.update(dict.fromkeys(equation.outvars, here))
    return found


def sent_bytes(collectives: Sequence[Collective], sizes: Mapping[str, int]) -> float:
    """Bytes that a worker sends in them, as the ledger counts."""
    return sum(x.times * KINDS[x.kind].sent(x.operand_bytes, workers_of(x.axis, sizes)) for x in collectives)


# ------------------------------------------------------------------------------------------------
# What it loses


class Loss(NamedTuple):
    """The loss of one message by theory.

    bound: on E|C(x) - x|^2 / |x|^2: omega, or 1 - alpha; None where neither is known.
    unbiased: whether it is omega. memory: whether what is lost is sent later.
    words: the effect on training.
    """

    bound: float | None
    unbiased: bool
    memory: bool
    words: str

    @property
    def is_useful(self) -> bool:
        """Whether the bound says something of the steps that training takes."""
        return self.bound is not None and (self.unbiased or 1 - self.bound >= USEFUL)


def plan_for(candidate: Candidate, like: Any, workers: int) -> Any:
    """How a candidate lays out a tree; None for a hierarchy."""
    if isinstance(candidate.algorithm, Mapping):
        return None
    layout, route = layout_of(candidate.algorithm), route_of(candidate.via)
    return groups_of(layout if route.layout is None else route.layout(layout, workers), like_of(like))


def loss_of(candidate: Candidate, like: Any, workers: int) -> Loss:
    """The error that theory bounds, and its effect.

    Unbiased C with omega: the mean of n messages has at most omega / n times the mean |g_i|^2 as additional variance.
    Contraction with alpha and error feedback: what is lost comes later; the leading term of the stochastic rate is that
    without compression, a term of higher order grows with 1 / alpha (Stich and Karimireddy 2020), alpha = 1 - bound.
    """
    if candidate.dense:
        return Loss(0.0, True, False, "none, or rounding to 16 bits")
    plan = plan_for(candidate, like, workers)
    algorithm = None if plan is None else candidate.algorithm
    compressor = getattr(algorithm, "compressor", None)
    roles = getattr(algorithm, "roles", {})
    memory = any("memory" in str(role) for role in roles.values())
    late = f"; gradients are of points up to {candidate.every - 1} steps apart" if candidate.every > 1 else ""
    if plan is None or compressor is None:
        return Loss(None, False, memory, "no bound is known" + late)
    if compressor.spec.omega is not None:
        omega = float(omega_of(compressor, plan.like))
        words = f"unbiased: at most {omega / workers:.3g} times the mean |g|^2 more variance" + late
        return Loss(omega, True, memory, words)
    if compressor.spec.alpha is None:
        return Loss(None, False, memory, "no bound is known" + late)
    alpha = float(alpha_of(compressor, plan.like))
    if memory:
        times = f"sent later: at most {1 / max(alpha, USEFUL):.3g} times as many transient steps"
        words = times if alpha >= USEFUL else "sent later; theory has no useful bound"
    else:
        words = f"biased: at most {1 - alpha:.3g} of |g|^2 is lost"
    return Loss(1 - alpha, False, memory, words + late)
