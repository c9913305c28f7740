"""Laws of tests/laws.py that need no draws, on the device: each codec by itself, and each law in turn."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.accelerator.parity import Difference, difference
from experiments.lib.codecs import Codec
from jaxcomp.base import State, for_worker, residual

__all__ = ["BROKEN", "LAWS", "OP_BY_OP", "Round", "Verdict", "laws_of", "op_by_op_of", "verdict"]

LAWS = {
    "apart": "decoded in one program = in another",
    "vmap": "vmap = loop",
    "sum": "sent + residual = input",
}
OP_BY_OP = {"jit": "jit = op by op"}  # by itself: op by op, dozens of programs are compiled for a codec
BROKEN = "BROKEN"
CLOSE, PRECISE = 2.0**-21, 1e-6  # of the largest entry, and of each: rounding of sums in another order


class Verdict(NamedTuple):
    """held: "bits", "rounding" (floats within CLOSE or PRECISE, integers equal), BROKEN, or "-" where the law says
    nothing of this codec; by: how far apart both sides are."""

    held: str
    by: Difference

    def __str__(self) -> str:
        return self.held if self.held in ("bits", "-") else f"{self.held}: {self.by}"


def verdict(one: Any, other: Any, bitwise: bool = False, scale: float = 0.0) -> Verdict:
    """Of a law by which two trees are equal; bitwise: rounding is no excuse; scale: of the numbers that arrays which
    are smaller were computed from."""
    by = difference(one, other)
    if not by.floats and not by.integers:
        return Verdict("bits", by)
    floats = [(np.float64(a), np.float64(b)) for a, b in pairs(one, other) if jnp.issubdtype(a.dtype, jnp.floating)]
    near = lambda a, b: np.allclose(a, b, rtol=PRECISE, atol=CLOSE * np.max(np.abs(b), initial=scale), equal_nan=True)
    within = not bitwise and not by.integers and all(near(a, b) for a, b in floats)
    return Verdict("rounding" if within else BROKEN, by)


def pairs(one: Any, other: Any) -> Any:
    return zip(*(map(np.asarray, jax.tree.leaves(tree)) for tree in (one, other)), strict=True)


class Round:
    """One round of a codec with a vector on the default device, as a whole and in parts, each compiled once."""

    def __init__(self, codec: Codec, host: np.ndarray, ratio: float, seed: int):
        self.compressor, self.exact, self.host = codec.make(host.size, ratio), codec.exact, host
        self.like, self.x, self.key = (
            jax.ShapeDtypeStruct(host.shape, host.dtype),
            jnp.asarray(host),
            jax.random.key(seed),
        )
        self.jitted, self.alone = jax.jit(self.whole), jax.jit(self.decoded)

    def state(self, key: Any) -> State:
        state = self.compressor.init(key, self.like)
        return State(state.local, for_worker(self.compressor, state.shared, 0))

    def whole(self, x: Any, key: Any) -> tuple[Any, Any, Any]:
        """Payload, what it decodes to, and what is left."""
        state = self.state(key)
        payload, _ = self.compressor.compress(jax.random.fold_in(key, 1), x, state)
        decoded = self.compressor.decompress(payload, state.shared, self.like)
        return payload, decoded, residual(self.compressor, x, payload, state.shared)

    def decoded(self, payload: Any, key: Any) -> Any:
        """By a receiver, to whose program the payload is an argument."""
        return self.compressor.decompress(payload, self.state(key).shared, self.like)


def laws_of(run: Round) -> dict[str, Verdict]:
    """A verdict for each of LAWS."""
    x, host = run.x, run.host
    payload, decoded, rest = run.jitted(x, run.key)
    received = np.asarray(run.alone(payload, run.key))
    xs, keys = jnp.stack([x, x[::-1], 2 * x]), jax.random.split(run.key, 3)
    mapped = jax.jit(jax.vmap(lambda x, key: run.whole(x, key)[1]))(xs, keys)
    looped = np.stack([run.jitted(x, key)[1] for x, key in zip(xs, keys, strict=True)])
    whole = np.asarray(decoded) + np.asarray(rest)  # in NumPy, since devices may take subnormal sums as zeros
    return {
        # What is left is computed beside the payload: a rounding that a compiler removes there is missing in it.
        "apart": verdict((decoded, rest), (received, host - received), scale=float(np.max(np.abs(host)))),
        "vmap": verdict(mapped, looped),
        "sum": verdict(whole, host, bitwise=True) if run.exact else Verdict("-", Difference(0, 0, 0)),
    }


def op_by_op_of(run: Round) -> dict[str, Verdict]:
    """A verdict for each of OP_BY_OP."""
    return {"jit": verdict(run.jitted(run.x, run.key)[:2], run.whole(run.x, run.key)[:2])}
