"""Runs a `Method` among workers: inside `shard_map`, `pmap` or `vmap(axis_name=...)`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcomp.algorithms.method import Exchange, Method
from jaxcomp.base import State, accumulate, key_data, root_key, wide_like, wrap_key
from jaxcomp.exchange.lanes import Axis, axis_index, axis_size, is_bound, varying
from jaxcomp.exchange.layout import MeanLocal, MeanShared, local_rows, with_rows
from jaxcomp.exchange.meet import VIAS, How
from jaxcomp.exchange.meet import meet as bring_together
from jaxcomp.payloads import code_bits

__all__ = ["Rounds", "rounds"]


class Rounds(NamedTuple):
    """init(x) -> state;  step(state, gradient) -> (state, bits);  point(state) -> x.

    gradient(x) is the gradient of the worker's own loss; bits is what this worker sent in the round. The state is laid
    out as that of `compressed_mean`: `state_specs`, `state_axes` and `init_state` know it.
    """

    init: Callable[[Any], State]
    step: Callable[[State, Callable[[Any], Any]], tuple[State, jax.Array]]
    point: Callable[[State], Any]


def rounds(method: Method, axis_name: Axis, via: str = "auto", *, seed: int | jax.Array = 0, code: str = "elias"):
    """Binds a method to a mapped axis.

    Args:
        method: `descend(...)`, `adiana(...)`, `isega(...)`, `marina(...)`.
        axis_name: mapped axis, or None for a single worker.
        via: as for `compressed_mean`.
        seed: int or key for both kinds of randomness.
        code: of the messages that are counted, as for `code_bits`.

    Returns:
        `Rounds`.

    Raises:
        ValueError: unknown via.

    >>> import jaxcomp as jc
    >>> run = jc.rounds(jc.descend(jc.direct(jc.identity()), 0.1), "data")
    >>> def step(target):
    ...     state, bits = run.step(run.init(jnp.zeros(2)), lambda x: x - target)
    ...     return run.point(state)
    >>> print(jax.vmap(step, axis_name="data", out_axes=None)(jnp.array([[1.0, 2.0], [3.0, 4.0]])))
    [0.2 0.3]
    """
    ways = [way for way in VIAS if way != "two_shot"]
    if via not in ways:
        raise ValueError(f"rounds: via must be one of {', '.join(map(repr, ways))}; got {via!r}")
    root = root_key(seed)

    def init(x):
        shared_key, private_key = jax.random.split(root)
        x = jax.tree.map(jnp.asarray, x)
        state = method.init(shared_key, x)
        local = with_rows(state.local, local_rows(axis_name))
        if is_bound(axis_name):
            local = varying(local, axis_name)
        shared = MeanShared(jnp.zeros((), jnp.int32), key_data(private_key), state.shared)
        return State(MeanLocal(local, None), shared)

    def meet(payloads, linear):
        met = bring_together(via, payloads, None, axis_name, linear, how=How(exact=True))

        def decoder(stacked):
            def decode(compressor, shared, like):
                zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), wide_like(like))
                total = accumulate(compressor, zeros, stacked, None, shared)
                return jax.tree.map(lambda t: t * met.scale, total)

            return decode

        return tuple(decoder(one) for one in met.payloads)

    def bits(payloads):
        total = sum((jnp.asarray(code_bits(one, code=code)).astype(jnp.float32) for one in payloads), jnp.float32(0))
        return varying(total, axis_name)

    def step(state, gradient):
        if not is_bound(axis_name):
            raise ValueError(f"rounds: no axis named {axis_name!r} is bound here; map the step over the workers")
        count, key, shared, _ = state.shared
        local = varying(jax.tree.map(lambda a: a[0], state.local.algorithm), axis_name)
        private = jax.random.fold_in(jax.random.fold_in(wrap_key(key), count), axis_index(axis_name))
        exchange = Exchange(axis_index(axis_name), axis_size(axis_name), meet, bits)

        def own(x):  # under shard_map a replicated x would give the sum of all workers' gradients
            return gradient(varying(x, axis_name))

        new, sent = method.step(private, State(local, shared), own, exchange)
        rows = jax.tree.map(lambda a: a[None], varying(new.local, axis_name))
        return State(MeanLocal(rows, None), MeanShared(count + 1, key, new.shared)), sent

    return Rounds(init, step, lambda state: method.point(state.shared.algorithm))
