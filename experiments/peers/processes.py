"""Workers of a peer as processes that torch joins over gloo, and the problem that they solve."""

import argparse
import importlib.util
import pickle
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxcomp as jc

__all__ = ["Problem", "checkout_of", "load", "run_processes"]


def checkout_of(about: str | None, file: str) -> Path:
    """The folder on the command line, which must hold this file."""
    p = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("checkout", type=Path)
    checkout = p.parse_args().checkout
    if not (checkout / file).is_file():
        p.error(f"no {file} in {checkout}")
    return checkout


def load(name: str, path: Path) -> Any:
    """A file of a checkout as a module."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_processes(workers: int, worker: Callable[..., Any], *arguments: Any) -> Any:
    """What worker(rank, *arguments), a function of a module, returns in the first of so many processes."""
    from torch.multiprocessing.spawn import spawn  # pyright: ignore[reportMissingImports]

    with tempfile.TemporaryDirectory() as folder:
        spawn(_process, args=(folder, workers, worker, arguments), nprocs=workers)
        return pickle.loads(Path(folder, "result").read_bytes())


def _process(rank: int, folder: str, workers: int, worker: Callable[..., Any], arguments: tuple) -> None:
    import torch  # pyright: ignore[reportMissingImports]
    import torch.distributed as dist  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", world_size=workers, rank=rank)
    result = worker(rank, *arguments)
    if rank == 0:
        Path(folder, "result").write_bytes(pickle.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


class Problem:
    """Least squares: worker i has A_i [m, d] and B_i = A_i W* + noise; f_i(W) = |A_i W - B_i|^2 / (2 m)."""

    def __init__(self, workers: int, size: int):
        rng = np.random.default_rng(0)
        a = rng.standard_normal((workers, 4 * size, size)) * np.geomspace(1, 0.2, size)
        waves = np.cos(np.outer(np.arange(size), np.arange(size)) / 20)
        b = a @ waves + 0.1 * rng.standard_normal((workers, 4 * size, size))
        self.a, self.b, self.size = a.astype(np.float32), b.astype(np.float32), size

    def gradient(self, w: np.ndarray, worker: int) -> np.ndarray:
        a, b = self.a[worker], self.b[worker]
        return (a.T @ (a @ w - b) / len(a)).astype(np.float32)

    def loss(self, w: np.ndarray) -> float:
        """Mean over the workers."""
        return float(np.mean(np.sum(np.square(self.a @ w - self.b), axis=(1, 2))) / (2 * self.a.shape[1]))

    def trained(self, tx: Any, steps: int) -> np.ndarray:
        """Points [steps, d, d] of an optimizer of ours, workers mapped by vmap."""
        w = jnp.zeros((self.size, self.size))
        state, axes = jc.init_state(tx, w, len(self.a), "data")
        step = jax.jit(jax.vmap(tx.update, in_axes=(0, axes, None), out_axes=(None, axes), axis_name="data"))
        points = []
        for _ in range(steps):
            grads = jnp.stack([self.gradient(np.asarray(w), i) for i in range(len(self.a))])
            updates, state = step(grads, state, w)
            w = optax.apply_updates(w, updates)
            points.append(np.asarray(w))
        return np.stack(points)
