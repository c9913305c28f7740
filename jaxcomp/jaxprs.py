"""Programs within the equations of a traced one."""

from typing import Any

import jax

__all__ = ["CALLS", "called_program", "inner_of"]

# Equations that run one program once, with their own arguments.
CALLS = ("closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "jit", "pjit", "remat2", "checkpoint")


def inner_of(equation: Any) -> list[Any]:
    """The programs within an equation.

    >>> import jax.numpy as jnp
    >>> traced = jax.make_jaxpr(lambda x: jax.lax.cond(x > 0, jnp.sin, jnp.cos, x))(1.0)
    >>> len(inner_of(traced.eqns[-1])), called_program(traced.eqns[-1])
    (2, None)
    """
    is_program = lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
    leaves = jax.tree.leaves(equation.params, is_leaf=is_program)
    return [getattr(leaf, "jaxpr", leaf) for leaf in leaves if is_program(leaf)]


def called_program(equation: Any) -> Any:
    """The program that an equation runs once, from beginning to end; None for any other equation."""
    return next(iter(inner_of(equation)), None) if equation.primitive.name in CALLS else None
