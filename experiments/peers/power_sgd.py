"""PowerSGD beside torch's hook for DistributedDataParallel, as it is installed (extra `peers`).

    python -m experiments.peers.power_sgd [--rank 2] [--batched] [--no-error-feedback]

Two processes train a small network with torch's DDP over gloo and its `powerSGD_hook`, or `batched_powerSGD_hook`;
`jc.power_sgd` trains the same
network on the same batches from the same parameters and the same first Q, and takes its gradients at its own points.
Prints the largest difference of the parameters after each tenth of the steps; the exit status is 1 if it is 1e-4.

Both compute in 64 bits. Error feedback sends one direction and then the next one that has grown largest, so it is
sensitive: it makes a difference about 1.3 times as large in every step here, and that of rounding in 32 bits would grow
from 1e-7 to some 1e-3 in forty. The loss is a sum over rows, since the hook adds 1e-8 to the norms of its Gram-Schmidt,
and these should be large.
"""

import argparse
import importlib.util
import itertools
import math
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxcomp as jc
from experiments.lib.report import markdown
from experiments.peers.processes import run_processes

__all__ = ["main", "ours", "released"]

WORKERS, SIZES, ROWS, RATE = 2, (24, 40, 32, 8), 64, 0.05 / 64
STEPS, DENSE_STEPS = 50, 10  # the latter before compression; torch needs at least 2
BUCKET = "the bucket"
CLOSE = 1e-4  # what passes as equal
Params = dict[str, np.ndarray]


def start() -> Params:
    """Weights [out, in] and biases of a network with tanh."""
    rng, params = np.random.default_rng(0), {}
    for i, (inputs, outputs) in enumerate(itertools.pairwise(SIZES)):
        params[f"{i}.weight"] = rng.standard_normal((outputs, inputs)) / np.sqrt(inputs)
        params[f"{i}.bias"] = np.zeros(outputs)
    return params


def batches() -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets, [steps, workers, rows, ...]: each worker draws around a centre of its own."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((STEPS, WORKERS, ROWS, SIZES[0])) + rng.standard_normal((1, WORKERS, 1, SIZES[0]))
    return x, np.tanh(x @ rng.standard_normal((SIZES[0], SIZES[-1])) / 4)


def released(number: int, rank: int, batched: bool, feedback: bool) -> tuple[list[Params], Params, list[str]]:
    """Parameters after each step of torch's hook, its first Q of each matrix that it compresses (of the batched hook
    under BUCKET), and the parameters in the order of its bucket."""
    import torch  # pyright: ignore[reportMissingImports]
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hook  # pyright: ignore[reportMissingImports]

    torch.set_default_dtype(torch.float64)
    model = torch.nn.Sequential()
    for i, (inputs, outputs) in enumerate(itertools.pairwise(SIZES)):
        model.add_module(str(i), torch.nn.Linear(inputs, outputs))
        if i < len(SIZES) - 2:
            model.add_module(f"tanh{i}", torch.nn.Tanh())
    model.load_state_dict({name: torch.from_numpy(value) for name, value in start().items()})
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    names = {id(p): name for name, p in model.named_parameters()}
    state = hook.PowerSGDState(None, rank, start_powerSGD_iter=DENSE_STEPS, use_error_feedback=feedback)
    run = hook.batched_powerSGD_hook if batched else hook.powerSGD_hook
    # Of stacks alone: the batched hook gives it a matrix, and raises (torch 2.13).
    made_orthogonal = hook._orthogonalize
    hook._orthogonalize = lambda q, epsilon=0: made_orthogonal(q[None] if q.ndim == 2 else q, epsilon)
    order: list[str] = []

    def reducing(state, bucket):  # torch allows no other annotation than its own
        order[:] = [names[id(p)] for p in bucket.parameters()]
        return run(state, bucket)

    parallel.register_comm_hook(state, reducing)
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    found = []
    for x, y in zip(*(torch.from_numpy(a[:, number]) for a in batches()), strict=True):
        optimizer.zero_grad()
        torch.sum((parallel(x) - y) ** 2).backward()
        optimizer.step()
        found.append({name: p.detach().numpy().copy() for name, p in model.named_parameters()})
    # The normal numbers that the hook drew in its first compressed round, in the order of its bucket.
    torch.manual_seed(np.random.RandomState(0).randint(1_000_000_000))
    q = {}
    if batched:
        side = math.isqrt(sum(value.size for value in found[0].values()) - 1) + 1
        return found, {BUCKET: torch.randn(side, rank).numpy()}, order
    for name in order:
        rows, columns = (*found[0][name].shape, 1)[:2]
        each = min(rows, columns, rank)
        if columns > 1 and each * (rows + columns) * state.min_compression_rate < rows * columns:
            q[name] = torch.randn(columns, each).numpy()
    return found, q, order


def ours(rank: int, q: Params, order: list[str], batched: bool, feedback: bool) -> list[Params]:
    """Parameters after each step with `jc.power_sgd`, workers mapped by vmap, from the given right factors.

    order: of the parameters in the tree, a list, so that the square matrix is that of torch's bucket.
    """
    params = [jnp.asarray(start()[name]) for name in order]
    options: dict[str, Any] = {"batched": batched, "error_feedback": feedback}
    tx = jc.compressed_mean(jc.power_sgd(rank, start=DENSE_STEPS, dense_below=0, **options), "data")
    state, axes = jc.init_state(tx, params, WORKERS, "data")
    names = lambda group: [BUCKET] if batched else [order[i] for i in group.leaves]
    stacks = [
        jnp.stack([jnp.asarray(q.get(name, row)) for name, row in zip(names(group), old, strict=True)])
        if group.is_stack
        else old
        for old, group in zip(state.shared.algorithm.q, state.about.groups.groups, strict=True)
    ]
    algorithm = state.shared.algorithm._replace(q=tuple(stacks))
    state = type(state)(state.local, state.shared._replace(algorithm=algorithm), state.about)

    def loss(params: Any, x: Any, y: Any) -> Any:
        params = dict(zip(order, params, strict=True))
        for i in range(len(SIZES) - 1):
            x = x @ params[f"{i}.weight"].T + params[f"{i}.bias"]
            x = jnp.tanh(x) if i < len(SIZES) - 2 else x
        return jnp.sum((x - y) ** 2)

    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        direction, state = tx.update(jax.grad(loss)(params, x, y), state)
        return jax.tree.map(lambda p, d: p - RATE * d, params, direction), state

    step = jax.jit(jax.vmap(step, (None, axes, 0, 0), (None, axes), axis_name="data"))
    found = []
    for x, y in zip(*batches(), strict=True):
        params, state = step(params, state, x, y)
        found.append(dict(zip(order, jax.device_get(params), strict=True)))
    return found


def main(arguments: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rank", type=int, default=2)
    p.add_argument("--batched", action="store_true", help="the whole bucket as one square matrix")
    p.add_argument("--no-error-feedback", action="store_true")
    o = p.parse_args(arguments)
    options = (o.batched, not o.no_error_feedback)
    if importlib.util.find_spec("torch") is None:
        print("skipped: torch is not installed; pip install 'jaxcomp[peers]'")
        return 0
    theirs, q, order = run_processes(WORKERS, released, o.rank, *options)
    with jax.enable_x64(True):
        mine = ours(o.rank, q, order, *options)
    far = lambda one, other: max(float(np.max(np.abs(one[name] - other[name]))) for name in one)
    apart = [far(one, other) for one, other in zip(mine, theirs, strict=True)]
    marks = range(STEPS // 10, STEPS + 1, STEPS // 10)
    rows = [[f"{t}", f"{apart[t - 1]:.1e}", f"{far(theirs[t - 1], start()):.2f}"] for t in marks]
    print(markdown(["step", "largest difference", "way from the start"], rows))
    compressed = ", ".join(sorted(q))
    print(f"rank {o.rank}, compressed from step {DENSE_STEPS + 1}: {compressed}; at most {max(apart):.1e} apart")
    return int(not max(apart) < CLOSE)


if __name__ == "__main__":
    sys.exit(main())
