"""Timing of jitted functions, several of them in turn, so that all see the same machine."""

import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

__all__ = ["Fresh", "machine", "time_all"]


class Fresh(NamedTuple):
    """A call that consumes its argument (a donated buffer): it is made anew each time, outside of the clock."""

    make: Callable[[], Any]
    run: Callable[[Any], Any]

    def __call__(self) -> Any:
        return self.run(self.make())


def time_all(calls: dict[str, Callable[[], Any]], repeats: int, show: Callable[[str], None] = lambda _: None) -> dict:
    """Median seconds of each call. Compiled and run once first, then in turn, round after round."""
    for name, call in calls.items():
        show(f"compiling {name}")
        jax.block_until_ready(call())
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(repeats):
        show(f"round {i + 1} of {repeats}")
        for name, call in calls.items():
            arguments, run = ((call.make(),), call.run) if isinstance(call, Fresh) else ((), call)
            start = time.perf_counter()
            result = jax.block_until_ready(run(*arguments))
            seconds[name].append(time.perf_counter() - start)
            del result, arguments
    return {name: float(np.median(values)) for name, values in seconds.items()}


def machine() -> str:
    """Where the figures come from."""
    device = jax.devices()[0]
    return f"JAX {jax.__version__} on {device.device_kind}, {os.cpu_count()} cores"
