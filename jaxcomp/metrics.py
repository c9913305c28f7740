"""Plain numbers, by name, of what the last round cost: for TensorBoard, W&B, Prometheus and JSON."""

import math
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from jaxcomp.exchange.measure import info
from jaxcomp.exchange.state import means_in

__all__ = ["metrics"]


def metrics(state: Any, *, prefix: str = "") -> dict[str, int | float]:
    """Reads the numbers of the last round from a state, as Python numbers that any logger takes.

    Several exchanges in one state (parts, fragments, levels) are added up as `info` does. What was not measured is left
    out. Nothing is exchanged: among several processes each reads the rows of its own workers, so one of them may call
    it alone.

    Args:
        state: as for `info`, outside of jit.
        prefix: put before each name, say "exchange/".

    Returns:
        rounds: so far. workers: that took part in the last round (0 before the first). lane_bytes, code_bits,
        sent_bytes, achieved_ratio, relative_error: means over the workers here, as in `Info`. overflow, nonfinite,
        searches: sums over them. total_sent_bytes, total_code_bits: of all rounds.

    Raises:
        TypeError: the state is traced. ValueError: as `info`.

    >>> import jax.numpy as jnp, jaxcomp as jc
    >>> tx = jc.compressed_mean(jc.direct(jc.top_k(k=1)), axis_name=None)
    >>> grads = jnp.array([3.0, 4.0])
    >>> _, state = tx.update(grads, tx.init(grads))
    >>> jc.metrics(state, prefix="exchange/")["exchange/lane_bytes"]
    8.0
    """
    if any(isinstance(leaf, Tracer | jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(state)):
        raise TypeError("metrics: the state must hold numbers; call it outside of jit, on what a step returned")
    found, shared = info(state), [mean.shared for mean in means_in(state)]
    most = lambda name: max(int(np.max(_here(getattr(each, name)), initial=0)) for each in shared)
    numbers = {"rounds": most("count"), "workers": most("workers")}
    numbers |= {name: float(value) for name, value in found._asdict().items() if name not in ("route", "rounds")}
    return {f"{prefix}{name}": value for name, value in numbers.items() if not math.isnan(value)}


def _here(x: Any) -> np.ndarray:
    return np.asarray(x.addressable_data(0) if isinstance(x, jax.Array) else x)
