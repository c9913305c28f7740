"""Both directions compressed: what a server sends back to the workers goes through a compressor as well."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcomp.arrays import key_data, like_of, wide_like, wrap_key
from jaxcomp.base import Algorithm, Compressor, State, advance, check_algorithm, check_compressor
from jaxcomp.compressors.vector import lift
from jaxcomp.payloads import by_row, code_bits

__all__ = ["Down", "bidirectional", "check_down", "send_down", "start_down"]

Array = jax.Array


class Down(NamedTuple):
    """What the messages to all workers are made with: all of it is shared.

    key uint32[2], rounds i32[];  bits f32[]: of the last message, as a code;  local, shared: of the compressor.
    """

    key: Array
    rounds: Array
    bits: Array
    local: Any
    shared: Any


class BidirectionalLocal(NamedTuple):
    algorithm: Any


class BidirectionalShared(NamedTuple):
    algorithm: Any
    down: Down


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
    if check_algorithm("bidirectional", algorithm).parts:
        raise ValueError("bidirectional: put it into each part of by_path, not around it; got an algorithm of parts")
    check_down("bidirectional", down)
    down = lift(down)

    def init(shared_key, like):
        down_key, shared_key = jax.random.split(shared_key)
        state = algorithm.init(shared_key, like)
        shared = BidirectionalShared(state.shared, start_down(down_key, down, like))
        return State(BidirectionalLocal(state.local), shared)

    def update(key, grads, state, exchange):
        direction, inner = algorithm.update(key, grads, state.part("algorithm"), exchange)
        direction, after = send_down(down, state.shared.down, direction, code)
        return direction, state.replace(algorithm=inner, down=after)

    roles = {"algorithm": algorithm.roles, "down": "coin"}
    return algorithm._replace(init=init, update=update, roles=roles, sparse=False)


def check_down(name: str, down: Any) -> None:
    """Raises ValueError unless a compressor can serve on the way down."""
    spec = check_compressor(name, down)
    if spec.omega is None:
        cure = " Take jc.dithering or jc.natural."
        raise ValueError(f"{name}: what goes down must be unbiased (omega known); {spec.name} is not.{cure}")
    if down.for_worker is not None:
        raise ValueError(f"{name}: what goes down is one message for all workers; {spec.name} has a plan for each")


def start_down(key: Array, down: Compressor, like: Any) -> Down:
    """State before the first message down, for directions like `like`; down: lifted."""
    init_key, key = jax.random.split(key)
    state = down.init(init_key, wide_like(like_of(like)))
    return Down(key_data(key), jnp.zeros((), jnp.int32), jnp.zeros((), jnp.float32), state.local, state.shared)


def send_down(down: Compressor, state: Down, direction: Any, code: str = "fixed") -> tuple[Any, Down]:
    """A direction as it arrives at the workers, and the state for the next one; down: lifted."""
    key = jax.random.fold_in(wrap_key(state.key), state.rounds)
    payload, local = down.compress(key, direction, State(state.local, state.shared))
    arrived = down.decompress(payload, state.shared, like_of(direction))
    bits = by_row(functools.partial(code_bits, code=code), payload, direction)
    return arrived, Down(state.key, state.rounds + 1, bits, local, advance(down, state.shared))
