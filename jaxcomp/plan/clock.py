"""Times that all processes of a mesh agree on, of programs that all of them run at once."""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

__all__ = ["MeshClock"]

TURN_SECONDS = 0.05  # for which a short program is repeated in a round
MOST_IN_TURN = 15  # runs


class MeshClock:
    """Measures on a mesh, for so many seconds. Every process must call the same methods in the same order."""

    def __init__(self, mesh: Mesh, seconds: float):
        self.mesh = Mesh(mesh.devices, mesh.axis_names)  # axes that the compiler may use as it likes
        self.sizes = {name: int(size) for name, size in self.mesh.shape.items()}
        self.rows = NamedSharding(self.mesh, P(tuple(mesh.axis_names)))
        self._largest = jax.jit(lambda x: x.max(0), out_shardings=NamedSharding(self.mesh, P()))
        self._kept: dict[Any, Any] = {}
        self.restart(seconds)

    def restart(self, seconds: float) -> None:
        """Sets the seconds that are left from now on."""
        self.end = time.perf_counter() + seconds

    def keep(self, key: Any, make: Callable[[], Any]) -> Any:
        """Returns what `make` made when this key was first asked for: compiled programs, for further plans."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    def local_rows(self, row: Any) -> jax.Array:
        """An array with a leading axis of devices; each device of this process has this row."""
        row = np.asarray(row)
        shape = (self.mesh.devices.size, *row.shape)
        return jax.make_array_from_callback(shape, self.rows, lambda index: row[None])

    def agreed(self, values: Any) -> np.ndarray:
        """The largest over the processes of each number, equal on all of them."""
        whole = self.local_rows(np.asarray(values, np.float32))
        return np.asarray(self._largest(whole).addressable_data(0), np.float64)

    def broadcast(self, text: str | None) -> str | None:
        """The text of the first process on all of them; None if it has none."""
        mine = np.frombuffer((text or "").encode(), np.uint8) if jax.process_index() == 0 else np.zeros(0, np.uint8)
        padded = np.zeros(int(self.agreed([len(mine)])[0]), np.float32)
        padded[: len(mine)] = mine
        return self.agreed(padded).astype(np.uint8).tobytes().decode() if len(padded) else None

    def left(self) -> float:
        """Seconds that may still be used; of the process that has fewest."""
        return float(-self.agreed([time.perf_counter() - self.end])[0])

    def median(self, run: Callable[[], Any], rounds: int = 7, most: float = 5.0) -> tuple[float, float]:
        """Median of the rounds and its standard error, 1.25 s / sqrt(rounds), from the quartiles: s = range / 1.35."""
        (times,) = self.times([run], rounds, most)
        low, middle, high = np.percentile(times, [25, 50, 75])
        return float(middle), float(1.25 * (high - low) / 1.35 / np.sqrt(len(times)))

    def times(
        self,
        runs: Sequence[Callable[[], Any]],
        rounds: int = 7,
        most: float = 5.0,
        before: Callable[[int], None] = lambda _: None,
    ) -> np.ndarray:
        """Seconds of each round of each program at the slowest process, [programs, rounds].

        In a round each program has its turn, in the next one in the opposite order: what changes meanwhile meets all of
        them alike. Where there are several, a turn begins with a run that is not timed, since another program was there
        before. In a turn what is short is run several times, and the median counts: now and then a message waits for a
        core or for an acknowledgement for a hundred times as long as it takes. All processes begin each run together,
        as they do after an exchange.

        Args:
            runs: what is timed; each is run twice before, to compile and to settle.
            rounds: at most so many, at least two; two where they would take more than the seconds `most`.
            before: called with the number of a program before each of its runs, and not timed.
        """

        def once(i: int) -> float:
            before(i)
            self.agreed([0.0])  # nobody starts before the last one is here
            start = time.perf_counter()
            jax.block_until_ready(runs[i]())
            return time.perf_counter() - start

        for i in range(len(runs)):
            once(i)
        first = self.agreed([once(i) for i in range(len(runs))])
        counts = np.clip(TURN_SECONDS // np.maximum(first, 1e-9), 1, MOST_IN_TURN).astype(int)
        found: list[list[float]] = [[] for _ in runs]
        start, number = time.perf_counter(), 0
        while number < rounds:
            for i in range(len(runs))[:: 1 if number % 2 else -1]:
                if len(runs) > 1:
                    once(i)
                found[i].append(float(np.median(self.agreed([once(i) for _ in range(counts[i])]))))
            if number == 0:
                took = self.agreed([time.perf_counter() - start])[0]
                rounds = int(np.clip(most / took, 2, rounds))
            number += 1
        return np.array(found)

    @functools.cached_property
    def launch(self) -> float:
        """Seconds of a program that does next to nothing: what it takes to start any program.

        A step is one program. Its parts are measured as programs of their own, each of which takes that much more.
        """
        row, nothing = self.local_rows(np.zeros(1, np.float32)), jax.jit(lambda x: x + 1)
        return self.median(lambda: nothing(row), 5, 1.0)[0]
