"""PowerSGD beside torch's hook for DistributedDataParallel, as it is installed (extra `peers`).

    python -m experiments.peers.power_sgd [--steps 50] [--rank 2] [--start 10]

Two processes train a small network with torch's DDP over gloo and its `powerSGD_hook`; `jc.power_sgd` trains the same
network on the same batches from the same parameters and the same first Q, and takes its gradients at its own points.
Prints the largest difference of the parameters after each tenth of the steps.

Both compute in 64 bits. Error feedback sends one direction and then the next one that has grown largest, so it is
sensitive: it makes a difference about 1.3 times as large in every step here, and that of rounding in 32 bits
(--bits 32) grows from 1e-7 to some 1e-3 in forty. The loss is a sum over rows, since the hook adds 1e-8 to the norms of
its Gram-Schmidt, and these should be large.
"""

import argparse
import itertools
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxcomp as jc
from experiments.lib.report import markdown

__all__ = ["main", "ours", "released"]

WORKERS, SIZES, ROWS, RATE = 2, (24, 40, 32, 8), 64, 0.05 / 64
Params = dict[str, np.ndarray]


def start(dtype: str, seed: int = 0) -> Params:
    """Weights [out, in] and biases of a network with tanh."""
    rng = np.random.default_rng(seed)
    params = {}
    for i, (inputs, outputs) in enumerate(itertools.pairwise(SIZES)):
        params[f"{i}.weight"] = (rng.standard_normal((outputs, inputs)) / np.sqrt(inputs)).astype(dtype)
        params[f"{i}.bias"] = np.zeros(outputs, dtype)
    return params


def batches(steps: int, dtype: str, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets, [steps, workers, rows, ...]: each worker draws around a centre of its own."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((steps, WORKERS, ROWS, SIZES[0])) + rng.standard_normal((1, WORKERS, 1, SIZES[0]))
    y = np.tanh(x @ rng.standard_normal((SIZES[0], SIZES[-1])) / 4)
    return x.astype(dtype), y.astype(dtype)


def _worker(number: int, folder: str, steps: int, rank: int, first: int, dtype: str) -> None:
    """Trains, and the first process writes what came of each step and the first Q."""
    import torch  # pyright: ignore[reportMissingImports]
    import torch.distributed as dist  # pyright: ignore[reportMissingImports]
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hook  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(1)
    torch.set_default_dtype(getattr(torch, dtype))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", world_size=WORKERS, rank=number)
    model = torch.nn.Sequential()
    for i, (inputs, outputs) in enumerate(itertools.pairwise(SIZES)):
        model.add_module(str(i), torch.nn.Linear(inputs, outputs))
        if i < len(SIZES) - 2:
            model.add_module(f"tanh{i}", torch.nn.Tanh())
    model.load_state_dict({name: torch.from_numpy(value.copy()) for name, value in start(dtype).items()})
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    names = {id(p): name for name, p in model.named_parameters()}
    state = hook.PowerSGDState(None, rank, start_powerSGD_iter=first)
    order: list[str] = []

    def reducing(state, bucket):  # torch allows no other annotation than its own
        order[:] = [names[id(p)] for p in bucket.parameters()]
        return hook.powerSGD_hook(state, bucket)

    parallel.register_comm_hook(state, reducing)
    x, y = (torch.from_numpy(a[:, number].copy()) for a in batches(steps, dtype))
    found: dict[str, list[np.ndarray]] = {name: [] for name in names.values()}
    for t in range(steps):
        parallel.zero_grad()
        torch.sum((parallel(x[t]) - y[t]) ** 2).backward()
        with torch.no_grad():
            for name, p in model.named_parameters():
                assert p.grad is not None  # after backward()
                p -= RATE * p.grad
                found[name].append(p.numpy().copy())
    if number == 0:
        # The normal numbers that the hook drew in its first compressed round, in the order of its bucket.
        torch.manual_seed(np.random.RandomState(0).randint(1_000_000_000))
        q = {}
        for name in order:
            rows, columns = (*start(dtype)[name].shape, 1)[:2]
            each = min(rows, columns, rank)
            if columns > 1 and each * (rows + columns) * state.min_compression_rate < rows * columns:
                q[f"q {name}"] = torch.randn(columns, each).numpy()
        np.savez(Path(folder) / "found.npz", **{name: np.stack(v) for name, v in found.items()}, **q)
    dist.barrier()
    dist.destroy_process_group()


def released(steps: int, rank: int, first: int, dtype: str) -> tuple[Params, Params]:
    """Parameters [steps, ...] of torch's hook, and its first Q of each matrix that it compresses."""
    from torch.multiprocessing.spawn import spawn  # pyright: ignore[reportMissingImports]

    with tempfile.TemporaryDirectory() as folder:
        spawn(_worker, args=(folder, steps, rank, first, dtype), nprocs=WORKERS)
        with np.load(Path(folder) / "found.npz") as file:
            found = dict(file)
    q = {name.removeprefix("q "): found.pop(name) for name in list(found) if name.startswith("q ")}
    return found, q


def with_first(state: Any, q: Params, names: list[str]) -> Any:
    """The state with the given right factors; names: of the leaves, in their order."""
    stacks = []
    for old, group in zip(state.shared.algorithm.q, state.about.plan.groups, strict=True):
        rows = [jnp.asarray(q.get(names[i], row)) for i, row in zip(group.leaves, old, strict=True)]
        stacks.append(jnp.stack(rows))
    algorithm = state.shared.algorithm._replace(q=tuple(stacks))
    return type(state)(state.local, state.shared._replace(algorithm=algorithm), state.about)


def ours(steps: int, rank: int, first: int, dtype: str, q: Params) -> Params:
    """Parameters [steps, ...] with `jc.power_sgd`, workers mapped by vmap."""
    params = jax.tree.map(jnp.asarray, start(dtype))
    tx = jc.compressed_mean(jc.power_sgd(rank, start=first, dense_below=0), "data")
    state, axes = jc.init_state(tx, params, WORKERS, "data")
    state = with_first(state, q, sorted(params))

    def loss(params: Any, x: Any, y: Any) -> Any:
        for i in range(len(SIZES) - 1):
            x = x @ params[f"{i}.weight"].T + params[f"{i}.bias"]
            x = jnp.tanh(x) if i < len(SIZES) - 2 else x
        return jnp.sum((x - y) ** 2)

    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        direction, state = tx.update(jax.grad(loss)(params, x, y), state)
        return jax.tree.map(lambda p, d: p - RATE * d, params, direction), state

    step = jax.jit(jax.vmap(step, (None, axes, 0, 0), (None, axes), axis_name="data"))
    found = []
    for x, y in zip(*batches(steps, dtype), strict=True):
        params, state = step(params, state, x, y)
        found.append(params)
    return {name: np.stack([np.asarray(each[name]) for each in found]) for name in params}


def main(arguments: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--steps", type=int, default=50)
    p.add_argument("--rank", type=int, default=2)
    p.add_argument("--start", type=int, default=10, help="dense steps in the beginning; torch needs at least 2")
    p.add_argument("--bits", type=int, choices=[32, 64], default=64)
    p.add_argument("--atol", type=float, default=1e-4)
    o = p.parse_args(arguments)
    try:
        import torch  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError:
        print("skipped: torch is not installed; pip install 'jaxcomp[peers]'")
        return 0
    dtype = f"float{o.bits}"
    theirs, q = released(o.steps, o.rank, o.start, dtype)
    with jax.enable_x64(o.bits == 64):
        mine = ours(o.steps, o.rank, o.start, dtype, q)
    apart = np.max([np.abs(mine[k] - theirs[k]).reshape(o.steps, -1).max(1) for k in mine], axis=0)
    moved = np.max([np.abs(theirs[k] - start(dtype)[k]).reshape(o.steps, -1).max(1) for k in mine], axis=0)
    chosen = range(max(1, o.steps // 10) - 1, o.steps, max(1, o.steps // 10))
    rows = [[str(t + 1), f"{apart[t]:.1e}", f"{moved[t]:.2f}"] for t in chosen]
    print(markdown(["step", "largest difference", "way from the start"], rows))
    compressed = ", ".join(sorted(q))
    print(f"rank {o.rank}, compressed from step {o.start + 1}: {compressed}; at most {apart.max():.1e} apart")
    return int(not apart.max() < o.atol)


if __name__ == "__main__":
    sys.exit(main())
