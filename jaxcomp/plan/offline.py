"""A program that exchanges, without its exchanges: what the work beside them takes.

The program is traced, and each collective in it is replaced: what a worker would have sent becomes a result, what
it would have received an argument. All else stays, so nothing can be left out by the compiler that the
program with its collectives needs.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

__all__ = ["Inseparable", "evaluate", "offline"]

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
CALLS = {"closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "jit", "pjit", "remat2", "checkpoint"}


class Inseparable(ValueError):
    """A program whose exchanges depend on what is computed between them: no work is left without them."""


def offline(fn: Callable, axes: Mapping[str, int], *args: Any) -> tuple[Callable, list[jax.Array]]:
    """The program of one worker without its network.

    Args:
        fn: of one worker, to be mapped over the axes; returns a tree of arrays.
        axes: name -> workers of each.
        *args: of one worker.

    Returns:
        A function to jit, of `(number, received, *args)`, that returns `(sent, results)`; and what is received where
        all workers send the same, which has the shapes and the kind of content that the program expects.

    Raises:
        Inseparable: a collective lies within a conditional or a loop.
    """
    traced = jax.make_jaxpr(fn, axis_env=list(axes.items()))(*args)

    def run(number, receive, *args):
        sent: list[Any] = []

        def exchange(name, operands, outcomes, over):
            sent.extend(operands)
            return receive(name, operands, outcomes, over)

        results = evaluate(traced.jaxpr, traced.consts, jax.tree.leaves(args), number, exchange)
        return sent, results

    def same_from_all(name, operands, outcomes, over):
        times = math.prod(axes[axis] for axis in over) if name in SUMS else 1
        return [times * jnp.resize(x, outcome.shape) for x, outcome in zip(operands, outcomes, strict=True)]

    def first(*args):
        received: list[Any] = []

        def receive(*call):
            outcomes = same_from_all(*call)
            received.extend(outcomes)
            return outcomes

        run(jnp.zeros((), jnp.int32), receive, *args)
        return received

    def program(number, received, *args):
        left = list(received)
        return run(number, lambda name, operands, outcomes, over: [left.pop(0) for _ in outcomes], *args)

    return program, jax.jit(first)(*args)


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
            results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
            results = results if eqn.primitive.multiple_results else [results]
        values.update(zip(eqn.outvars, results, strict=True))
    return [read(x) for x in jaxpr.outvars]


def jaxprs_of(params: Any) -> list[Any]:
    leaves = jax.tree.leaves(params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr"))
    return [getattr(leaf, "jaxpr", leaf) for leaf in leaves if hasattr(leaf, "eqns") or hasattr(leaf, "jaxpr")]


def collective_in(jaxpr: Any) -> bool:
    return any(
        eqn.primitive.name in COLLECTIVES | {"axis_index"} or any(map(collective_in, jaxprs_of(eqn.params)))
        for eqn in jaxpr.eqns
    )
