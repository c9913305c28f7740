"""Times that all processes of a mesh agree on, of programs that all of them run at once."""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

__all__ = ["Clock"]

TURN_SECONDS = 0.05  # for which a short program is repeated in a round
MOST_IN_TURN = 15  # runs


class Clock:
    """Measures on a mesh. Every process must call the same methods in the same order.

    Args:
        mesh: with devices.
        seconds: after which `left` is zero.
    """

    def __init__(self, mesh: Mesh, seconds: float):
        self.mesh = Mesh(mesh.devices, mesh.axis_names)  # axes that the compiler may use as it likes
        self.rows = NamedSharding(self.mesh, P(tuple(mesh.axis_names)))
        self._largest = jax.jit(lambda x: x.max(0), out_shardings=NamedSharding(self.mesh, P()))
        self.end = time.perf_counter() + seconds
        self.kept: dict[Any, Any] = {}

    def keep(self, key: Any, make: Callable[[], Any]) -> Any:
        """Returns what `make` returned when this key was first asked for: compiled programs, for further plans."""
        if key not in self.kept:
            self.kept[key] = make()
        return self.kept[key]

    def restart(self, seconds: float) -> None:
        """Sets the seconds that are left from now on."""
        self.end = time.perf_counter() + seconds

    def agreed(self, values: Any) -> np.ndarray:
        """The largest over the processes of each number, equal on all of them."""
        values = np.asarray(values, np.float32).reshape(-1)
        shape = (self.mesh.devices.size, values.size)
        whole = jax.make_array_from_callback(shape, self.rows, lambda index: values[None])
        return np.asarray(self._largest(whole).addressable_data(0), np.float64)

    def left(self) -> float:
        """Seconds that may still be used; of the process that has fewest."""
        return float(-self.agreed([time.perf_counter() - self.end])[0])

    def times(self, run: Callable[[], Any], rounds: int = 7, most: float = 5.0) -> np.ndarray:
        """Seconds of each round at the slowest process.

        In a round what is short is run several times, and the median counts: now and then a message waits for a core or
        for an acknowledgement for a hundred times as long as it takes. All processes begin each run together, as they
        do after an exchange.

        Args:
            run: what is timed; it is run twice before, to compile and to settle.
            rounds: at most so many; at least two.
            most: seconds for all rounds, after which there are no more than two.
        """
        return self.interleaved([run], rounds, most)[0]

    def interleaved(
        self,
        runs: Sequence[Callable[[], Any]],
        rounds: int = 7,
        most: float = 5.0,
        before: Callable[[int], None] = lambda _: None,
    ) -> np.ndarray:
        """`times` of each of several programs, [programs, rounds]: what changes meanwhile meets all of them alike.

        In a round each has its turn, in the next one in the opposite order. Where there are several, a turn begins with
        a run that is not timed, since another program was there before.

        Args:
            runs, rounds, most: as above.
            before: called with the number of a program before each of its runs, and not timed.
        """
        for i, run in enumerate(runs):
            before(i)
            jax.block_until_ready(run())
        first = np.maximum(self.agreed([self._once(run) for run in runs]), 1e-9)
        counts = np.clip(TURN_SECONDS // first, 1, MOST_IN_TURN).astype(int)
        several = len(runs) > 1
        begin = self.agreed([self._once(lambda: self.agreed([0.0]))])  # what it takes to begin together
        begin = begin + self.agreed([self._once(lambda i=i: before(i)) for i in range(len(runs))])
        rounds = int(np.clip(most / np.sum((first + begin) * (counts + several)), 2, rounds))
        found = [np.zeros((rounds, count)) for count in counts]

        def timed(i: int) -> float:
            before(i)
            return self._once(runs[i])

        for number in range(rounds):
            for i in range(len(runs))[:: 1 if number % 2 else -1]:
                if several:
                    timed(i)
                found[i][number] = [timed(i) for _ in range(counts[i])]
        return np.stack([np.median(self.agreed(each).reshape(each.shape), axis=1) for each in found])

    @functools.cached_property
    def launch(self) -> float:
        """Seconds of a program that does next to nothing: what it takes to start any program.

        A step is one program. Its parts are measured as programs of their own, each of which takes that much more.
        """
        shape = (self.mesh.devices.size, 1)
        row = jax.make_array_from_callback(shape, self.rows, lambda index: np.zeros((1, 1), np.float32))
        nothing = jax.jit(lambda x: x + 1)
        return self.median(lambda: nothing(row), 5, 1.0)[0]

    def _once(self, run: Callable[[], Any]) -> float:
        self.agreed([0.0])  # nobody starts before the last one is here
        start = time.perf_counter()
        jax.block_until_ready(run())
        return time.perf_counter() - start

    def median(self, run: Callable[[], Any], rounds: int = 7, most: float = 5.0) -> tuple[float, float]:
        """Median of the rounds and its standard error, 1.25 s / sqrt(rounds), from the quartiles: s = range / 1.35."""
        times = self.times(run, rounds, most)
        low, middle, high = np.percentile(times, [25, 50, 75])
        return float(middle), float(1.25 * (high - low) / 1.35 / np.sqrt(len(times)))

    def broadcast(self, text: str | None) -> str | None:
        """The text of the first process on all of them; None if it has none."""
        mine = np.frombuffer((text or "").encode(), np.uint8) if jax.process_index() == 0 else np.zeros(0, np.uint8)
        size = int(self.agreed([len(mine)])[0])
        if size == 0:
            return None
        padded = np.zeros(size, np.float32)
        padded[: len(mine)] = mine
        return self.agreed(padded).astype(np.uint8).tobytes().decode()
