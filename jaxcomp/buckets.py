"""In which order the gradients of a loss are ready, for buckets that are exchanged beside the backward pass."""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Jaxpr, Literal

from jaxcomp.checks import is_whole
from jaxcomp.groups import Buckets
from jaxcomp.jaxprs import called_program

__all__ = ["buckets"]


def buckets(size: int, loss: Callable[..., Any], params: Any, *args: Any, has_aux: bool = False, **kwargs: Any) -> Any:
    """Buckets of the leaves in the order in which their gradients are ready, for `bucket_bytes=`.

    A bucket is exchanged once all its gradients are there, and those after it once it is. By default buckets go from
    the last leaf to the first, which is right where leaves stand in the order of use. In a dict they are sorted by
    name: an embedding "wte", say, of which the gradient comes last, would be in the first bucket, and everything would
    wait for it. Here the gradient is traced once, and nothing is computed.

    Args:
        size: bytes of a bucket, at least 1.
        loss: (params, *args, **kwargs) -> scalar, or (scalar, aux) with `has_aux`, as one worker computes it.
        params: tree of arrays, or of their shapes.
        args, kwargs: a batch of it, or its shapes.

    Returns:
        `Buckets`: the size, and the paths of the leaves. Leaves of one instruction (a scan over layers, say) are ready
        at once; they go from the last to the first.

    Raises:
        ValueError: size is no integer of at least 1.

    >>> import jax.numpy as jnp, jaxcomp as jc
    >>> loss = lambda params, x: jnp.sum(jnp.tanh(params["wte"][x] @ params["a"]) @ params["b"])
    >>> params = {"a": jnp.ones((4, 4)), "b": jnp.ones((4, 4)), "wte": jnp.ones((9, 4))}
    >>> jc.buckets(2**25, loss, params, jnp.arange(3)).order
    ("['b']", "['a']", "['wte']")
    """
    if not is_whole(size):
        raise ValueError(f"buckets: size must be an integer of at least 1; got {size!r}")
    gradient = jax.grad(lambda params, args: loss(params, *args, **kwargs), has_aux=has_aux)
    traced = jax.make_jaxpr(lambda params, args: gradient(params, args)[0] if has_aux else gradient(params, args))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    places = _places(traced(params, args).jaxpr)
    order = sorted(range(len(paths)), key=lambda i: (places[i], -i))
    return Buckets(int(size), tuple(paths[i] for i in order))


def _places(jaxpr: Jaxpr) -> list[tuple[int, ...]]:
    """For each output the number of the equation that makes it, and within a call those of the equations inside."""
    made: dict[Any, tuple[int, ...]] = {}
    for number, equation in enumerate(jaxpr.eqns):
        inside = called_program(equation)
        each = [()] * len(equation.outvars) if inside is None else _places(inside)
        made.update((out, (number, *place)) for out, place in zip(equation.outvars, each, strict=True))
    return [() if isinstance(out, Literal) else made.get(out, ()) for out in jaxpr.outvars]
