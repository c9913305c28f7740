"""A program that exchanges, without its exchanges: what the work beside them takes.

The program is traced, and each collective in it is replaced: what a worker would have sent becomes a result, what
it would have received an argument. All else stays, so nothing can be left out by the compiler that the
program with its collectives needs.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

__all__ = ["Arrival", "Halves", "Inseparable", "evaluate", "offline", "settled"]

SUMS = {"psum", "psum2", "psum_invariant", "reduce_scatter"}
COLLECTIVES = SUMS | {
    "all_gather",
    "all_gather_invariant",
    "all_to_all",
    "pmax",
    "pmin",
    "ppermute",
    "ragged_all_to_all",
}
PARTS = {"all_to_all", "ppermute", "ragged_all_to_all", "reduce_scatter"}  # bring what no worker has alone
CALLS = {"closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "jit", "pjit", "remat2", "checkpoint"}


class Inseparable(ValueError):
    """A program whose exchanges depend on what is computed between them: no work is left without them."""


class Arrival(NamedTuple):
    """The result of one collective: its name, shape and dtype, and how many operands are added up in it."""

    name: str
    shape: tuple[int, ...]
    dtype: Any
    times: int

    @property
    def is_part(self) -> bool:
        """Whether workers receive different parts, so that results are not those of this worker's operand."""
        return self.name in PARTS


class Halves(NamedTuple):
    """A worker's program without its network, cut where it waits for the network.

    early(number, *leaves) -> kept: what does not need anything that is received; leaves: of the arguments.
    late(received, kept) -> rest: all else.
    outcome(kept, rest) -> (sent, results).
    arrivals: what is received, in the order of what is sent (`settled` makes it out of that).
    """

    early: Callable[..., list[jax.Array]]
    late: Callable[..., list[jax.Array]]
    outcome: Callable[[Sequence[Any], Sequence[Any]], tuple[list[Any], list[Any]]]
    arrivals: tuple[Arrival, ...]

    def whole(self, number: Any, received: Sequence[Any], *args: Any) -> tuple[list[Any], list[Any]]:
        """Runs both halves: returns what is sent, and the leaves of what the program returns."""
        kept = self.early(number, *jax.tree.leaves(args))
        return self.outcome(kept, self.late(received, kept))


def offline(fn: Callable, axes: Mapping[str, int], *args: Any) -> Halves:
    """The program of one worker without its network.

    Args:
        fn: of one worker, to be mapped over the axes; returns a tree of arrays.
        axes: name -> workers of each.
        *args: of one worker.

    Raises:
        Inseparable: a collective lies within a conditional or a loop.
    """
    traced = jax.make_jaxpr(fn, axis_env=list(axes.items()))(*args)
    leaves, number = jax.tree.leaves(args), jnp.zeros((), jnp.int32)

    def run(number, receive, leaves):
        sent: list[Any] = []

        def exchange(name, operands, outcomes, over):
            sent.extend(operands)
            return receive(name, operands, outcomes, over)

        return sent, evaluate(traced.jaxpr, traced.consts, leaves, number, exchange)

    found: list[Arrival] = []

    def record(name, operands, outcomes, over):
        del operands
        times = math.prod(axes[axis] for axis in over) if name in SUMS else 1
        found.extend(Arrival(name, x.shape, x.dtype, times) for x in outcomes)
        return [jnp.zeros(x.shape, x.dtype) for x in outcomes]

    jax.eval_shape(lambda *leaves: run(number, record, leaves), *leaves)

    def program(received, number, *leaves):
        left = list(received)
        return run(number, lambda name, operands, outcomes, over: [left.pop(0) for _ in outcomes], leaves)

    shapes = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in found]
    return _halves(jax.make_jaxpr(program)(shapes, number, *leaves), tuple(found))


def _halves(closed: Any, arrivals: tuple[Arrival, ...]) -> Halves:
    """Cuts a program whose first inputs are what is received, and whose first outputs are what is sent."""
    jaxpr, count = closed.jaxpr, len(arrivals)
    is_literal = lambda x: isinstance(x, core.Literal)
    waits, parts = set(jaxpr.invars[:count]), ([], [])
    for eqn in jaxpr.eqns:
        is_late = any(not is_literal(x) and x in waits for x in eqn.invars)
        parts[is_late].append(eqn)
        waits.update(eqn.outvars if is_late else ())
    outs = [x for x in jaxpr.outvars if not is_literal(x)]
    used = [x for eqn in parts[1] for x in eqn.invars if not is_literal(x)]
    kept = [x for x in dict.fromkeys([*used, *outs]) if x not in waits and x not in jaxpr.constvars]
    rest = [x for x in dict.fromkeys(outs) if x in waits]
    consts = dict(zip(jaxpr.constvars, closed.consts, strict=True))

    def early(number, *args):
        values = consts | dict(zip(jaxpr.invars[count:], [number, *args], strict=True))
        _follow(parts[0], values)
        return [values[x] for x in kept]

    def late(received, held):
        values = consts | dict(zip([*jaxpr.invars[:count], *kept], [*received, *held], strict=True))
        _follow(parts[1], values)
        return [values[x] for x in rest]

    def outcome(held, after):
        values = consts | dict(zip([*kept, *rest], [*held, *after], strict=True))
        found = [x.val if is_literal(x) else values[x] for x in jaxpr.outvars]
        return found[:count], found[count:]

    return Halves(early, late, outcome, arrivals)


def _follow(equations: Any, values: dict[Any, Any]) -> None:
    for eqn in equations:
        operands = [x.val if isinstance(x, core.Literal) else values[x] for x in eqn.invars]
        values.update(zip(eqn.outvars, _bound(eqn, operands), strict=True))


def _bound(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
    return results if eqn.primitive.multiple_results else [results]


def settled(
    arrivals: Sequence[Arrival], send: Callable[[list[np.ndarray]], Sequence[Any]], agree: Callable[[bool], Any] = bool
) -> list[np.ndarray]:
    """Arrays that a worker receives where all send the same, with the shapes and the kind of content that it expects.

    Args:
        arrivals: see `Halves`.
        send: received -> what is sent then, which may depend on what was received before it.
        agree: whether something still changes, out of whether it does here; of several processes it must say the same.

    >>> settled([Arrival("psum", (2,), np.float32, 3)], lambda _: [np.array([1.0, 2.0], np.float32)])
    [array([3., 6.], dtype=float32)]
    """
    received = [np.zeros(each.shape, each.dtype) for each in arrivals]
    while True:
        before = received
        received = [
            (np.resize(np.asarray(x), each.shape) * np.asarray(each.times, each.dtype)).astype(each.dtype)
            for each, x in zip(arrivals, send(received), strict=True)
        ]
        same = all(a.tobytes() == b.tobytes() for a, b in zip(before, received, strict=True))
        if not agree(not same):
            return received


def evaluate(jaxpr: Any, consts: Any, args: Any, number: Any, exchange: Callable) -> list[Any]:
    """Results of a traced program, each collective done by exchange(name, operands, outcomes, axes) instead."""
    values: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
    read = lambda x: x.val if isinstance(x, core.Literal) else values[x]
    for eqn in jaxpr.eqns:
        operands, name = [read(x) for x in eqn.invars], eqn.primitive.name
        inner = next((eqn.params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in eqn.params), None)
        if name in COLLECTIVES:
            over = eqn.params.get("axes", eqn.params.get("axis_name"))
            over = over if isinstance(over, tuple | list) else (over,)
            results = exchange(name, operands, [x.aval for x in eqn.outvars], over)
        elif name == "axis_index":
            results = [number]
        elif name in CALLS and inner is not None:
            closed = hasattr(inner, "consts")
            results = evaluate(
                inner.jaxpr if closed else inner, inner.consts if closed else (), operands, number, exchange
            )
        else:
            if any(collective_in(part) for part in jaxprs_of(eqn.params)):
                raise Inseparable(f"a collective within {name}")
            results = _bound(eqn, operands)
        values.update(zip(eqn.outvars, results, strict=True))
    return [read(x) for x in jaxpr.outvars]


def jaxprs_of(params: Any) -> list[Any]:
    """The programs within the parameters of an equation."""
    leaves = jax.tree.leaves(params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr"))
    return [getattr(leaf, "jaxpr", leaf) for leaf in leaves if hasattr(leaf, "eqns") or hasattr(leaf, "jaxpr")]


def collective_in(jaxpr: Any) -> bool:
    """Whether a program, or one within it, has a collective."""
    return any(
        eqn.primitive.name in COLLECTIVES | {"axis_index"} or any(map(collective_in, jaxprs_of(eqn.params)))
        for eqn in jaxpr.eqns
    )
