"""The collectives of a traced program, and the program without them: the work beside its exchanges.

To leave the exchanges out, each collective is replaced: what a worker would have sent becomes a result, what it would
have received an argument. All else stays, so nothing can be left out by the compiler that the program with its
collectives needs.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jaxcomp.exchange.axes import axis_names
from jaxcomp.jaxprs import CALLS, called_program, inner_of
from jaxcomp.plan.links import Collective

__all__ = ["Arrival", "Halves", "Inseparable", "collectives_in", "offline", "settled"]

SUMS = ("psum", "psum2", "psum_invariant")
KIND_OF = dict.fromkeys((*SUMS, "pmax", "pmin"), "all_reduce") | {
    "all_gather": "all_gather",
    "all_gather_invariant": "all_gather",
    "all_to_all": "all_to_all",
    "ragged_all_to_all": "all_to_all",
    "reduce_scatter": "reduce_scatter",
    "ppermute": "permute",
}


def _axes(eqn: Any) -> tuple[Any, ...]:
    return axis_names(eqn.params.get("axes", eqn.params.get("axis_name")))


def _variables(eqn: Any) -> list[Any]:
    return [x for x in eqn.invars if not isinstance(x, core.Literal)]


# ------------------------------------------------------------------------------------------------
# Its collectives


def collectives_in(jaxpr: Any, joined: bool = True, times: int = 1) -> list[Collective]:
    """The collectives of a traced program that runs so many times, in its order.

    Of the branches of a conditional the one with most bytes is taken; what stands in a loop of unknown length is
    counted once. joined: whether sums that follow one another and do not wait for each other are one, as compilers for
    GPUs and TPUs make of them; a CPU runs the operands of a joined sum one after the other, each with messages of its
    own.
    """
    found: list[Collective] = []
    is_open, after = False, set()  # whether the last one is a sum that others may join, and all that waits for it
    for eqn in jaxpr.eqns:
        name, waits = eqn.primitive.name, not after.isdisjoint(_variables(eqn))
        if name in KIND_OF:
            sizes = [float(x.aval.size * x.aval.dtype.itemsize) for x in eqn.invars if hasattr(x.aval, "dtype")]
            if not _axes(eqn) or not sum(sizes):
                continue
            axis = ",".join(map(str, _axes(eqn)))
            new = [Collective(KIND_OF[name], size, axis, times) for size in ([sum(sizes)] if joined else sizes) if size]
            if joined and is_open and not waits and name in SUMS and found[-1][::2] == new[0][::2]:
                found[-1] = found[-1]._replace(operand_bytes=found[-1].operand_bytes + sum(sizes))
                after.update(eqn.outvars)
            else:
                found += new
                is_open, after = name in SUMS, set(eqn.outvars)
            continue
        more = times * eqn.params["length"] if name == "scan" else times
        inner = [collectives_in(each, joined, more) for each in inner_of(eqn)]
        if name == "cond":
            inner = [max(inner, key=lambda arm: sum(x.operand_bytes * x.times for x in arm))]
        if any(inner):
            found += [one for each in inner for one in each]
            is_open, after = False, set()
        elif waits or name == "cond":
            after.update(eqn.outvars)
    return found


# ------------------------------------------------------------------------------------------------
# The same without them


class Inseparable(ValueError):
    """A program whose exchanges depend on what is computed between them: no work is left without them."""


class Arrival(NamedTuple):
    """One array that a collective brings. times: how many operands are added up in it."""

    kind: str
    shape: tuple[int, ...]
    dtype: Any
    times: int

    @property
    def is_part(self) -> bool:
        """Whether workers receive different parts, so that results are not those of this worker's operand."""
        return self.kind in ("all_to_all", "permute", "reduce_scatter")


class Halves(NamedTuple):
    """A worker's program without its network, cut where it waits for the network.

    early(number, *leaves of the arguments) -> kept: what does not need anything that is received.
    late(received, kept) -> rest: all else.
    outcome(kept, rest) -> what is sent, and leaves of what the program returns.
    arrivals: what is received, in the order of what is sent (`settled` makes it out of that).
    structure: of what the program returns.
    """

    early: Callable[..., list[jax.Array]]
    late: Callable[..., list[jax.Array]]
    outcome: Callable[..., list[Any]]
    arrivals: tuple[Arrival, ...]
    structure: Any

    def both(self, kept: Sequence[Any], rest: Sequence[Any]) -> tuple[list[Any], Any]:
        """Puts together what is sent, and what the program returns, from both halves."""
        found, count = self.outcome(kept, rest), len(self.arrivals)
        return found[:count], jax.tree.unflatten(self.structure, found[count:])

    def whole(self, number: Any, received: Sequence[Any], *args: Any) -> tuple[list[Any], Any]:
        """Runs both halves: what is sent, and what the program returns."""
        kept = self.early(number, *jax.tree.leaves(args))
        return self.both(kept, self.late(received, kept))


def _halves(program: Any, arrivals: tuple[Arrival, ...], structure: Any) -> Halves:
    """Cuts a program whose first inputs are what is received, and whose first outputs are what is sent."""
    jaxpr, count = program.jaxpr, len(arrivals)
    waiting, early, late = set(jaxpr.invars[:count]), [], []
    for eqn in jaxpr.eqns:
        is_late = not waiting.isdisjoint(_variables(eqn))
        (late if is_late else early).append(eqn)
        waiting.update(eqn.outvars if is_late else ())
    outs = [x for x in jaxpr.outvars if not isinstance(x, core.Literal)]
    used = dict.fromkeys([*(x for eqn in late for x in _variables(eqn)), *outs])
    kept = [x for x in used if x not in waiting and x not in jaxpr.constvars]
    rest = [x for x in dict.fromkeys(outs) if x in waiting]

    def part(equations: list[Any], inputs: list[Any], outputs: list[Any]) -> Callable[..., list[Any]]:
        own = jaxpr.replace(invars=inputs, outvars=outputs, eqns=equations)
        run = core.jaxpr_as_fun(core.ClosedJaxpr(own, program.consts))
        return lambda *given: run(*jax.tree.leaves(given))

    return Halves(
        part(early, jaxpr.invars[count:], kept),
        part(late, [*jaxpr.invars[:count], *kept], rest),
        part([], [*kept, *rest], jaxpr.outvars),
        arrivals,
        structure,
    )


def offline(fn: Callable, axes: Mapping[str, int], *args: Any) -> Halves:
    """The program of one worker without its network. fn: to be mapped over the axes; args: of one worker.

    Raises:
        Inseparable: a collective lies within a conditional or a loop.
    """
    traced, out = jax.make_jaxpr(fn, axis_env=list(axes.items()), return_shape=True)(*args)
    jaxpr, leaves, arrivals = traced.jaxpr, jax.tree.leaves(args), list[Arrival]()
    for eqn in _exchanges(jaxpr):
        name = eqn.primitive.name
        adds = name in SUMS or name == "reduce_scatter"
        times = math.prod(axes[axis] for axis in _axes(eqn)) if adds else 1
        arrivals += [Arrival(KIND_OF[name], x.aval.shape, x.aval.dtype, times) for x in eqn.outvars]

    def program(received, number, *leaves):
        left, sent = iter(received), list[Any]()

        def exchange(eqn, operands):
            sent.extend(operands)
            return [next(left) for _ in eqn.outvars]

        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*traced.consts, *leaves], strict=True))
        _follow(jaxpr.eqns, values, number, exchange)
        return sent + [_read(values, x) for x in jaxpr.outvars]

    shapes = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in arrivals]
    made = jax.make_jaxpr(program)(shapes, jnp.zeros((), jnp.int32), *leaves)
    return _halves(made, tuple(arrivals), jax.tree.structure(out))


def _exchanges(jaxpr: Any) -> Iterator[Any]:
    """The collectives that `_follow` meets, in its order."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in KIND_OF:
            yield eqn
        elif (inner := called_program(eqn)) is not None:
            yield from _exchanges(inner)


def _read(values: Mapping[Any, Any], x: Any) -> Any:
    return x.val if isinstance(x, core.Literal) else values[x]


def _follow(equations: Any, values: dict[Any, Any], number: Any, exchange: Callable[[Any, Any], list[Any]]) -> None:
    """Computes equations in their order, into `values`; collectives are done by exchange(equation, operands)."""
    for eqn in equations:
        operands, name = [_read(values, x) for x in eqn.invars], eqn.primitive.name
        called = next((eqn.params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in eqn.params), None)
        if name in KIND_OF:
            results = exchange(eqn, operands)
        elif name == "axis_index":
            results = [number]
        elif name in CALLS and called is not None:
            jaxpr, constants = getattr(called, "jaxpr", called), getattr(called, "consts", ())
            inner = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *operands], strict=True))
            _follow(jaxpr.eqns, inner, number, exchange)
            results = [_read(inner, x) for x in jaxpr.outvars]
        else:
            if any(map(_needs_axes, inner_of(eqn))):
                raise Inseparable(f"a collective within {name}")
            results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
            results = results if eqn.primitive.multiple_results else [results]
        values.update(zip(eqn.outvars, results, strict=True))


def _needs_axes(jaxpr: Any) -> bool:
    """Whether a program, or one within it, has a collective or asks for the number of its worker."""
    names = {*KIND_OF, "axis_index"}
    return any(eqn.primitive.name in names or any(map(_needs_axes, inner_of(eqn))) for eqn in jaxpr.eqns)


def settled(
    arrivals: Sequence[Arrival], send: Callable[[list[np.ndarray]], Sequence[Any]], agree: Callable[[bool], Any] = bool
) -> list[np.ndarray]:
    """Makes up what a worker receives where all send the same, of the shapes and the content that it expects.

    send: received -> what is sent then, which may depend on what was received before it. agree: whether something still
    changes, out of whether it does here; of several processes it must say the same.

    >>> settled([Arrival("all_reduce", (2,), np.float32, 3)], lambda _: [np.array([1.0, 2.0], np.float32)])
    [array([3., 6.], dtype=float32)]
    """
    received = [np.zeros(each.shape, each.dtype) for each in arrivals]
    while True:
        before, pairs = received, zip(arrivals, send(received), strict=True)
        received = [
            (np.resize(np.asarray(x), each.shape) * np.asarray(each.times, each.dtype)).astype(each.dtype)
            for each, x in pairs
        ]
        same = all(a.tobytes() == b.tobytes() for a, b in zip(before, received, strict=True))
        if not agree(not same):
            return received
