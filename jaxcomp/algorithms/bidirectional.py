"""Both directions compressed: what a server sends back to the workers goes through a compressor as well."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcomp.arrays import key_data, like_of, wide_like, wrap_key
from jaxcomp.backend import made
from jaxcomp.base import (
    Algorithm,
    Compressor,
    Round,
    State,
    advance,
    check_compressor,
    keys_of,
    require_algorithm,
    stepped,
)
from jaxcomp.compressors.tree import each_of
from jaxcomp.factories import factory
from jaxcomp.payloads import counted

__all__ = ["Down", "bidirectional", "check_down", "send_down", "start_down"]

Array = jax.Array


class Down(NamedTuple):
    """Memory and compressor of the messages to all workers: all of it is shared.

    key uint32[2], rounds i32[];  bits f32[]: of the last message, as a code;  local, shared: of the compressor.
    """

    key: Array
    rounds: Array
    bits: Array
    local: Any
    shared: Any


class BidirectionalState(NamedTuple):
    """algorithm: its state.  down: of the messages to all workers."""

    algorithm: Any
    down: Down


@factory
def bidirectional(algorithm: Algorithm, down: Compressor, *, code: str = "fixed") -> Algorithm:
    """The direction of an algorithm as it arrives when a server compresses it once more: C_down(direction).

    For a server with n workers: they send what the algorithm sends, and get C_down(direction) back, from which each
    moves its copy of the iterate. The mean of the shifts stays with the server. Where the direction vanishes at the
    optimum (`diana`; `direct` for losses with a common optimum) nothing more is needed: E C(g) = g and
    E|C(g)|^2 <= (1 + omega_down) E|g|^2, so every bound on E|g|^2 grows by 1 + omega_down, and gamma shrinks by it:
    `theory.dcgd` and `theory.diana` take down_omega.

    The randomness is shared and the direction is equal on all workers, so everyone here knows C_down(direction)
    without a server, and no byte more is sent. Its bits are kept as `down.bits` of the shared state; they
    are not among those of `jc.info`, which are of what workers send.

    Args:
        algorithm: `direct`, `diana`, `ef_bv` with an unbiased compressor, ...
        down: unbiased (omega known), of one array or of trees.
        code: in which the bits are counted, as for `code_bits`; "fixed" costs least.

    Raises:
        ValueError: the compressor down is biased, or has a plan for each worker; an algorithm of parts (`by_path`).
        TypeError: what is given is no algorithm, or no compressor.

    Reference: Philippenko, Dieuleveut 2020 (Artemis), without a memory on the way down; the step size is ours.

    >>> import jaxcomp as jc
    >>> method = jc.methods.bidirectional(jc.diana(jc.dithering(7)), jc.dithering(15))
    """
    if require_algorithm("bidirectional", algorithm).parts:
        raise ValueError("bidirectional: put it into each part of by_path, not around it; got an algorithm of parts")
    check_down("bidirectional", down)

    def init(here, like):
        down_key, shared_key = jax.random.split(here.key)
        inner = algorithm.init(here._replace(key=shared_key), like)
        return BidirectionalState(inner, start_down(here._replace(key=down_key), down, like))

    def update(here, grads, state):
        direction, inner = yield from stepped(algorithm.update(here, grads, state.algorithm))
        direction, after = send_down(here, down, state.down, direction, code)
        return direction, BidirectionalState(inner, after)

    roles = {"algorithm": algorithm.roles, "down": "coin"}
    return algorithm._replace(init=init, update=update, roles=roles)


def check_down(name: str, down: Any) -> None:
    """Raises ValueError unless a compressor can serve on the way down."""
    spec = check_compressor(name, down)
    if spec.omega is None:
        cure = " Take jc.dithering or jc.natural."
        raise ValueError(f"{name}: what goes down must be unbiased (omega known); {spec.name} is not.{cure}")
    if down.for_worker is not None:
        raise ValueError(f"{name}: what goes down is one message for all workers; {spec.name} has a plan for each")


def start_down(here: Round, down: Compressor, like: Any) -> Down:
    """State before the first message down, for directions like `like`."""
    init_key, key = jax.random.split(here.key)
    states = here._replace(key=init_key).start(wide_like(like_of(like)), each_of(down, here.groups))
    local, shared = tuple(s.local for s in states), tuple(s.shared for s in states)
    return Down(key_data(key), jnp.zeros((), jnp.int32), jnp.zeros((), jnp.float32), local, shared)


def send_down(here: Round, down: Compressor, state: Down, direction: Any, code: str = "fixed") -> tuple[Any, Down]:
    """A direction as it arrives at the workers, and the state for the next one."""
    keys = keys_of(jax.random.fold_in(wrap_key(state.key), state.rounds), here.groups)
    arrived, local, shared, bits = [], [], [], jnp.zeros((), jnp.float32)
    each = zip(each_of(down, here.groups), keys, made(direction), state.local, state.shared, strict=True)
    for c, key, x, *both in each:
        payload, after = c.compress(key, x, State(*both))
        arrived.append(c.decompress(payload, both[1], like_of(x)))
        bits = bits + counted(payload, x, code)[1]
        local.append(after)
        shared.append(advance(c, both[1]))
    return tuple(arrived), Down(state.key, state.rounds + 1, bits, tuple(local), tuple(shared))
