"""Workers of a peer as threads of one process: what these releases use of `torch.distributed`, with a barrier."""

import argparse
import importlib.util
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxcomp as jc

__all__ = ["Group", "Problem", "load", "options_of"]


def options_of(about: str | None, repository: str, file: str, arguments: list[str] | None, **numbers: int) -> Any:
    """The path of a checkout and --NAME for each number; None, and a line that says so, without the checkout.

    file: that a checkout of the repository holds.
    """
    p = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("checkout", type=Path, nargs="?")
    for name, default in numbers.items():
        p.add_argument(f"--{name}", type=int, default=default)
    o = p.parse_args(arguments)
    if o.checkout is not None and (o.checkout / file).exists():
        return o
    print(f"skipped: give the path of a checkout of github.com/{repository}")
    return None


def load(name: str, path: Path) -> Any:
    """A file of a checkout as a module."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Group:
    """Stands for `torch.distributed`, or for `deepspeed.comm`, in a released file."""

    ProcessGroup = object

    def __init__(self, size: int):
        self.size, self.board = size, [None] * size
        self.barrier, self.here = threading.Barrier(size), threading.local()

    def run(self, worker: Callable[[int], Any]) -> list[Any]:
        """worker(rank) in a thread for each rank; what they return. The first exception is raised again."""
        results, errors = [None] * self.size, []

        def one(rank: int) -> None:
            self.here.rank = rank
            try:
                results[rank] = worker(rank)
            except Exception as error:
                errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results

    def shared(self, mine: Any) -> list[Any]:
        """What all workers brought."""
        self.barrier.wait()
        self.board[self.here.rank] = mine
        self.barrier.wait()
        every = list(self.board)
        self.barrier.wait()
        return every

    def is_initialized(self) -> bool:
        return True

    def get_world_size(self, group: Any = None) -> int:
        return self.size

    def get_rank(self, group: Any = None) -> int:
        return self.here.rank

    def new_group(self, ranks: Any) -> None:
        return None

    def all_gather(self, out: list[Any], mine: Any, group: Any = None, async_op: bool = False) -> "Group":
        for place, row in zip(out, self.shared(mine.clone()), strict=True):
            place.copy_(row.reshape(place.shape))
        return self

    def all_to_all_single(self, out: Any, mine: Any, group: Any = None) -> None:
        for j, rows in enumerate(self.shared(mine.clone())):
            out[j].copy_(rows[self.here.rank])

    def wait(self) -> None:
        """Of a handle."""


class Problem:
    """Least squares: worker i has A_i [m, d] and B_i = A_i W* + noise; f_i(W) = |A_i W - B_i|^2 / (2 m)."""

    def __init__(self, workers: int, size: int, seed: int = 0):
        rng = np.random.default_rng(seed)
        a = rng.standard_normal((workers, 4 * size, size)) * np.geomspace(1, 0.2, size)
        waves = np.cos(np.outer(np.arange(size), np.arange(size)) / 20)
        b = a @ waves + 0.1 * rng.standard_normal((workers, 4 * size, size))
        self.a, self.b, self.size = a.astype(np.float32), b.astype(np.float32), size

    def gradient(self, w: np.ndarray, worker: int) -> np.ndarray:
        a, b = self.a[worker], self.b[worker]
        return (a.T @ (a @ w - b) / len(a)).astype(np.float32)

    def loss(self, w: np.ndarray) -> float:
        """Mean over the workers."""
        each = [np.sum(np.square(a @ w - b)) / (2 * len(a)) for a, b in zip(self.a, self.b, strict=True)]
        return float(np.mean(each))

    def trained(self, tx: Any, workers: int, steps: int, axis: str = "data") -> tuple[np.ndarray, list[float]]:
        """Points [steps, d, d] and losses of an optimizer of ours, workers mapped by vmap."""
        w: Any = {"w": jnp.zeros((self.size, self.size))}
        state, axes = jc.init_state(tx, w, workers, axis)
        step = jax.jit(jax.vmap(tx.update, in_axes=(0, axes, None), out_axes=(None, axes), axis_name=axis))
        points, losses = [], []
        for _ in range(steps):
            grads = jnp.stack([self.gradient(np.asarray(w["w"]), i) for i in range(workers)])
            updates, state = step({"w": grads}, state, w)
            w = optax.apply_updates(w, updates)
            points.append(np.asarray(w["w"]))
            losses.append(self.loss(points[-1]))
        return np.stack(points), losses
