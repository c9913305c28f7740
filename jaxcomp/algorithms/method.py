"""Methods that choose where gradients are taken: an `Algorithm` does not, accelerated ones do.

A `Method` keeps the iterate itself and calls a gradient oracle of its worker. `exchange.rounds` runs it
inside `shard_map` or `vmap`; `descend` makes one of any `Algorithm`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jaxcomp.base import Algorithm, Compressor, State, for_worker
from jaxcomp.prox import Prox

__all__ = ["Exchange", "Method", "descend", "move", "view"]

Array = jax.Array


class Exchange(NamedTuple):
    """What a method may do with others, handed to its `step`.

    worker, workers: number of this worker, and how many there are.
    meet(payloads) -> decoders: one collective for a tuple of payloads; each decoder is a function
        (compressor, shared, like) -> mean over the workers of what they sent.
    bits(payloads) -> bits of the messages of this worker.
    """

    worker: Array
    workers: int
    meet: Callable[..., tuple[Callable[[Compressor, Any, Any], Any], ...]]
    bits: Callable[[tuple], Array]


class Method(NamedTuple):
    """A distributed method with its own iterate, as pure functions.

    init(shared_key, x) -> State
    step(key, state, gradient, exchange) -> (state, bits): gradient(x) is the gradient of this worker's
        loss; key is private to worker and round.
    point(shared) -> x, the iterate that converges.
    """

    init: Callable[[Array, Any], State]
    step: Callable[[Array, State, Callable[[Any], Any], Exchange], tuple[State, Array]]
    point: Callable[[Any], Any]


def move(x: Any, direction: Any, step: Any, prox: Prox | None) -> Any:
    """prox(x - step direction, step)."""
    x = jax.tree.map(lambda a, d: a - (step * d).astype(a.dtype), x, direction)
    return x if prox is None else prox(x, step)


def view(compressor: Compressor, shared: Any, exchange: Exchange) -> Any:
    """The compressor's shared state as this worker uses it."""
    return for_worker(compressor, shared, exchange.worker, exchange.workers)


class DescendShared(NamedTuple):
    x: Any
    algorithm: Any


def descend(algorithm: Algorithm, step_size: float | Array, *, prox: Prox | None = None) -> Method:
    """x <- prox(x - gamma direction), with the direction of an algorithm: omega and alpha are its own.

    With `direct` this is DCGD, with `diana` DIANA, and with a preconditioned compressor DCGD+ and DIANA+.

    Args:
        algorithm: `direct`, `diana`, ...
        step_size: gamma, above 0. A JAX array (for sweeps inside jit) is not checked.
        prox: of a regulariser (`jaxcomp.prox`), for composite problems.

    Raises:
        ValueError: step_size is not above 0.

    >>> import jaxcomp as jc
    >>> method = jc.descend(jc.direct(jc.identity()), 0.5)
    >>> run = jc.rounds(method, None)
    >>> state = run.init(jax.numpy.ones(2))
    >>> state, _ = run.step(state, lambda x: x)
    >>> print(run.point(state))
    [0.5 0.5]
    """
    if not isinstance(step_size, jax.Array) and not step_size > 0:
        raise ValueError(f"descend: step_size must be above 0; got {step_size}")

    def init(shared_key, x):
        state = algorithm.init(shared_key, x)
        return State(state.local, DescendShared(x, state.shared))

    def step(key, state, gradient, exchange):
        x, shared = state.shared
        mine = shared._replace(compressor=view(algorithm.compressor, shared.compressor, exchange))
        payload, local = algorithm.send(key, gradient(x), State(state.local, mine))
        (decode,) = exchange.meet((payload,), algorithm.compressor.spec.linear)
        mean = decode(algorithm.compressor, shared.compressor, x)
        direction, shared = algorithm.receive(mean, shared)
        x = move(x, direction, step_size, prox)
        return State(local, DescendShared(x, shared)), exchange.bits((payload,))

    return Method(init, step, lambda shared: shared.x)
