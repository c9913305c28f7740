"""The same input and key on two devices: how far apart the messages are, and what is decoded from one of them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.lib.cli import UserError
from experiments.lib.codecs import Codec
from jaxcomp.base import State, for_worker

__all__ = ["COLUMNS", "Difference", "cpu", "difference", "parity_of"]


class Difference(NamedTuple):
    """ulps: the largest gap of two floats, in units of the last place of their type (how many numbers lie between
    them, and one); floats, integers: share of each kind that differs."""

    ulps: int
    floats: float
    integers: float

    def __str__(self) -> str:
        said = [f"{self.ulps:,} ulp in {100 * self.floats:.2g} % of the floats"] if self.floats else []
        said += [f"{100 * self.integers:.2g} % of the integers"] if self.integers else []
        return ", ".join(said) or "equal"


COLUMNS = {
    "codec": "{codec}",
    "payload": lambda row: str(row["payload"]),
    "decoded": lambda row: str(row["decoded"]),
}


def cpu() -> Any:
    """The device that others are compared with.

    Raises:
        UserError: JAX was told to use no CPU.
    """
    try:
        return jax.devices("cpu")[0]
    except RuntimeError:
        cure = "add cpu to JAX_PLATFORMS (for instance JAX_PLATFORMS=cuda,cpu), or leave parity out of --only"
        raise UserError(f"parity compares with the CPU, which JAX_PLATFORMS leaves out; {cure}") from None


def order_of(x: np.ndarray) -> np.ndarray:
    """The number of each float among all floats of its type, from 0 at zero; i64.

    >>> order_of(np.float32([0, -0.0, 1e-45, -1e-45])).tolist()
    [0, 0, 1, -1]
    """
    bits = x.view(f"i{x.itemsize}").astype(np.int64)
    return np.where(bits < 0, -(2 ** (8 * x.itemsize - 1)) - bits, bits)


def difference(one: Any, other: Any) -> Difference:
    """Of two trees of equal shapes and dtypes, bit by bit: zeros of different signs are unequal, and 0 ulp apart."""
    ulps, unequal, sizes = 0, {"f": 0, "i": 0}, {"f": 0, "i": 0}
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        a, b = (np.ascontiguousarray(x).reshape(-1) for x in (a, b))
        kind = "f" if jnp.issubdtype(a.dtype, jnp.floating) else "i"
        sizes[kind] += a.size
        unequal[kind] += int(np.sum(a.view(f"u{a.itemsize}") != b.view(f"u{b.itemsize}")))
        if kind == "f" and a.size:
            ulps = max(ulps, int(np.max(np.abs(order_of(a) - order_of(b)))))
    return Difference(ulps, unequal["f"] / max(sizes["f"], 1), unequal["i"] / max(sizes["i"], 1))


class Side:
    """A codec on one device, with programs of its own: what the library chooses depends on the device."""

    def __init__(self, codec: Codec, x: np.ndarray, ratio: float, seed: int, device: Any):
        self.device, self.like = device, jax.ShapeDtypeStruct(x.shape, x.dtype)
        self.compressor, self.x, self.seed = codec.make(x.size, ratio), x, seed

    def message(self) -> Any:
        compress = lambda x, key: self.compressor.compress(jax.random.fold_in(key, 1), x, self.state(key))[0]
        return self.run(compress, self.x)

    def decoded(self, payload: Any) -> Any:
        """What a payload, perhaps of another device, decodes to on this one."""
        return self.run(
            lambda payload, key: self.compressor.decompress(payload, self.state(key).shared, self.like), payload
        )

    def run(self, program: Callable[[Any, Any], Any], argument: Any) -> Any:
        with jax.default_device(self.device):
            given = jax.device_put((argument, jax.random.key(self.seed)), self.device)
            return jax.device_get(jax.jit(program)(*given))

    def state(self, key: Any) -> State:
        """Of the first of the workers."""
        state = self.compressor.init(key, self.like)
        return State(state.local, for_worker(self.compressor, state.shared, 0))


def parity_of(codec: Codec, x: np.ndarray, ratio: float, seed: int, devices: tuple[Any, Any]) -> dict[str, Difference]:
    """payload: of both devices; decoded: what both make of the first one's payload."""
    one, other = (Side(codec, x, ratio, seed, device) for device in devices)
    message = one.message()
    return {
        "payload": difference(message, other.message()),
        "decoded": difference(one.decoded(message), other.decoded(message)),
    }
