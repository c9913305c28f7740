"""Where arrays are made in a compiled program, and how often its parts are compiled.

XLA for CPU drops `lax.optimization_barrier` before it fuses and orders what it computes. It keeps a condition that it
does not know to hold always, a loop of one step, and a call that says that it is not to be inlined.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import AbstractMesh

from jaxcomp.backend import platform

__all__ = ["always", "called", "computed", "constants", "fast_if", "in_place", "is_shapes", "of_made", "zeros_after"]

Array = jax.Array
Tree = Any


@contextlib.contextmanager
def constants() -> Iterator[None]:
    """What is computed inside, from constants, is a constant of no mesh, whatever is traced, and in any mesh."""
    with jax.ensure_compile_time_eval(), jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        yield


def always(x: Array) -> Array:
    """bool[], true whatever is in x (one entry at least), which XLA does not know."""
    first = x.reshape(-1)[0].astype(jnp.float32)
    return (first <= jnp.inf) | jnp.isnan(first)


def of_made(function: Callable[..., Tree], *args: Any) -> Tree:
    """function(*args), computed before: XLA for CPU would compute them within every loop that reads them, and then find
    their places entry by entry.
    """
    arrays = jax.tree.leaves(args)
    if platform() != "cpu" or not all(a.size for a in arrays) or not any(isinstance(a, Tracer) for a in arrays):
        return function(*args)

    @jax.custom_batching.custom_vmap
    def made(*args):
        shapes = jax.eval_shape(function, *args)

        def other(*args):
            """Arrays that nobody sees, typed as differing over the same axes of a mesh."""
            one = jnp.asarray(sum(a.reshape(-1)[0].astype(jnp.float32) for a in jax.tree.leaves(args)))
            return jax.tree.map(lambda a: jnp.full(a.shape, one.astype(a.dtype)), shapes)

        return lax.cond(always(jax.tree.leaves(args)[0]), function, other, *args)

    @made.def_vmap
    def _(size, batched, *args):
        axes = jax.tree.map(lambda is_batched: 0 if is_batched else None, batched)
        out = of_made(jax.vmap(function, tuple(axes), axis_size=size), *args)
        return out, jax.tree.map(lambda _: True, out)

    return made(*args)


def called(function: Callable[..., Tree]) -> Callable[..., Tree]:
    """The same function, as a call that XLA for CPU leaves in the program: traced once for all equal shapes,
    with the same kernels in each call, and fused with nothing before or after it.
    """

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def body(structure, fixed, *arrays):
        arrays = iter(arrays)
        leaves = [next(arrays) if shape is None else shape for shape in fixed]
        with set_xla_metadata(inlineable="true"):  # not None, which vmap and grad would forget
            return function(*jax.tree.unflatten(structure, leaves))

    def call(*args):
        leaves, structure = jax.tree.flatten(args)
        if platform() != "cpu" or not any(isinstance(a, Tracer) for a in leaves):
            return function(*args)
        fixed = tuple(a if is_shapes(a) else None for a in leaves)
        with set_xla_metadata(inlineable="false"):
            return body(structure, fixed, *(a for a, shape in zip(leaves, fixed, strict=True) if shape is None))

    return call


def computed(x: Array, zero: Array) -> Array:
    """x, as something that was computed before: XLA for CPU writes in place into that, not into a row of an argument.

    zero: i32[], 0, which XLA does not know.
    """
    turn = lambda carry: (carry[0] - 1, -carry[1])
    return lax.while_loop(lambda carry: carry[0] > 0, turn, (zero, x))[1]


def zeros_after(tree: Tree, like: Tree) -> Tree:
    """`zeros_like`, made once the arrays of a tree are there: earlier they would only take memory."""
    arrays = [a for a in jax.tree.leaves(tree) if a.size]
    if not arrays or platform() != "cpu":
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)
    zero = jnp.where(functools.reduce(jnp.logical_and, map(always, arrays)), jnp.float32(0), jnp.float32(1))
    return jax.tree.map(lambda leaf: jnp.full(leaf.shape, zero.astype(leaf.dtype)), like)


def in_place(function: Callable[[Tree, Tree], Tree], memory: Tree, x: Tree) -> Tree:
    """function(memory, x), with shapes and dtypes of the memory: computed once, and in its place.

    XLA would compute what several passes read again in each of them, and keep its terms for that. A loop of one step
    writes it where the memory was, if that is not read any more (a donated state, or zeros made for it), and everything
    else reads it from there. Outside of any program it is computed operation by operation.
    """
    arrays = jax.tree.leaves((memory, x))
    if not any(a.size for a in jax.tree.leaves(x)) or not any(isinstance(a, Tracer) for a in arrays):
        return function(memory, x)
    if platform() != "cpu":
        return lax.optimization_barrier(function(memory, x))

    # What the function closes over must be an argument: custom_vmap refuses what a further vmap would map.
    traced, shape = jax.make_jaxpr(function, return_shape=True)(memory, x)
    structure = jax.tree.structure(shape)

    def of(consts, memory, x):
        return jax.tree.unflatten(structure, jax.core.eval_jaxpr(traced.jaxpr, consts, *jax.tree.leaves((memory, x))))  # pyright: ignore[reportAttributeAccessIssue]

    @jax.custom_batching.custom_vmap
    def once(consts, memory, x):
        steps = jnp.where(always(next(a for a in jax.tree.leaves(x) if a.size)), 1, 0)

        def step(carry):
            i, memory, x = carry
            # What depends on x alone would be computed before the loop, into an array of its own.
            now = jax.tree.map(lambda a: jnp.where(i < steps, a, jnp.zeros((), a.dtype)), x)
            return i + 1, of(consts, memory, now), x

        return lax.while_loop(lambda carry: carry[0] < steps, step, (jnp.zeros((), jnp.int32), memory, x))[1]

    @once.def_vmap
    def _(size, batched, *args):
        axes = jax.tree.map(lambda is_batched: 0 if is_batched else None, batched)
        out = jax.vmap(of, tuple(axes), axis_size=size)(*args)
        return out, jax.tree.map(lambda _: True, out)

    return once(traced.consts, memory, x)


def fast_if(condition: Array, fast: Callable[..., Tree], general: Callable[..., Tree], *operands: Any) -> Tree:
    """general(*operands). On CPU, fast(*operands) where the condition holds; both are equal there.

    XLA for CPU takes ten times as long for the general form. Elsewhere it costs nothing more, while a condition makes a
    GPU wait for its host, and libtpu (0.0.42 to 0.0.50) crashes where a branch hands on operands that are computed in
    the same program.
    """
    if platform() != "cpu":
        return general(*operands)
    return lax.cond(condition, fast, general, *operands)


def is_shapes(tree: Tree) -> bool:
    """Whether there are shapes in a tree instead of arrays."""
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(tree))
