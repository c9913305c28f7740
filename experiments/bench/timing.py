"""What benchmarks share: functions timed in turn, so that all see the same machine, and the table of their times."""

import ctypes
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.lib.cli import Parser, at_least
from experiments.lib.report import Columns, new_console, show
from experiments.lib.run import parser_of
from jaxcomp.base import State, for_worker

__all__ = ["Fresh", "bench_parser", "by_part", "codec_calls", "keep_memory", "machine", "report", "rounds_of"]
__all__ += ["time_all"]

# Numbers and values of mallopt(3): as MALLOC_TRIM_THRESHOLD_ (-1: never), _TOP_PAD_, _MMAP_MAX_ and _ARENA_MAX.
KEPT = {-1: -1, -2: 2**28, -4: 0, -8: 1}

Calls = dict[str, Callable[[], Any]]


class Fresh(NamedTuple):
    """A call that consumes its argument (a donated buffer): it is made anew each time, outside of the clock."""

    make: Callable[[], Any]
    run: Callable[[Any], Any]

    def __call__(self) -> Any:
        return self.run(self.make())


def keep_memory() -> bool:
    """Has glibc keep large arrays that are given back, to be called before JAX computes; False without glibc.

    It would return them to the system at once, which clears the pages of the next ones.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return all(mallopt(number, value) == 1 for number, value in KEPT.items())


def bench_parser(name: str, about: str | None, repeats: int | None = None) -> Parser:
    """With --markdown, and with --repeats where there is a default of it."""
    p = parser_of(name, about)
    if repeats is not None:
        p.add_argument("--repeats", type=at_least(1), default=repeats, help="rounds; the median is shown")
    p.add_argument("--markdown", type=Path, default=None, help="keep the table in this file")
    return p


def time_all(calls: Calls, repeats: int, what: str = "", **options: Any) -> dict[str, float]:
    """Median seconds of each call of `rounds_of`."""
    return {name: float(np.median(values)) for name, values in rounds_of(calls, repeats, what, **options).items()}


def rounds_of(
    calls: Calls, repeats: int, what: str = "", begin: Callable[[int], Any] | None = None, quiet: bool = False
) -> dict[str, list[float]]:
    """Seconds of each call in each round. Compiled and run once first, then in turn, round after round.

    begin(i): called at the start of round i. quiet: without a status line, where another one says what goes on.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    with new_console(quiet).status("") as status:
        for name, call in calls.items():
            status.update(f"{what}compiling {name}")
            jax.block_until_ready(call())
        for i in range(repeats):
            status.update(f"{what}round {i + 1} of {repeats}")
            if begin is not None:
                begin(i)
            for name, call in calls.items():
                arguments, run = ((call.make(),), call.run) if isinstance(call, Fresh) else ((), call)
                start = time.perf_counter()
                result = jax.block_until_ready(run(*arguments))
                seconds[name].append(time.perf_counter() - start)
                del result, arguments
    return seconds


def codec_calls(name: str, compressor: Any, x: jax.Array, key: jax.Array) -> tuple[Calls, Any, Any]:
    """Calls "compress NAME" and "decompress NAME", both jitted; the payload of x, and one worker's shared state."""
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    state = compressor.init(key, like)
    state = State(state.local, for_worker(compressor, state.shared, 0))
    compress = jax.jit(lambda x, key, state: compressor.compress(key, x, state)[0])
    decompress = jax.jit(lambda payload, shared: compressor.decompress(payload, shared, like))
    payload = compress(x, key, state)
    calls = {
        f"compress {name}": lambda: compress(x, key, state),
        f"decompress {name}": lambda: decompress(payload, state.shared),
    }
    return calls, payload, state.shared


def by_part(seconds: dict[str, float], parts: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each NAME of the calls "PART NAME": its name, and the milliseconds of each part."""
    names = [name.removeprefix(f"{parts[0]} ") for name in seconds if name.startswith(f"{parts[0]} ")]
    return [{"name": name, **{part: 1e3 * seconds[f"{part} {name}"] for part in parts}} for name in names]


def machine() -> str:
    """Where the figures come from."""
    device = jax.devices()[0]
    return f"JAX {jax.__version__} on {device.device_kind}, {os.cpu_count()} cores"


def report(options: Any, title: str, columns: Columns, rows: Iterable[Any], notes: str = "") -> int:
    """Shows the table, keeps it where --markdown says, and gives the exit status."""
    show(new_console(), f"{title}; {machine()}", columns, rows, notes, options.markdown)
    return 0
