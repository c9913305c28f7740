"""DeMo beside its release (github.com/bloc97/DeMo), on least squares.

    python -m experiments.peers.demo CHECKOUT [--steps 60]

CHECKOUT is a clone of the release; torch and einops must be installed. With one worker both are the same method, and
the points are compared. With four the release divides a coefficient by the number of workers that sent it, jc.demo by
that of all, and the losses stand side by side. Bytes: of one worker's message in one step.
"""

import argparse
import importlib.util
from pathlib import Path

import numpy as np

import jaxcomp as jc
from experiments.lib.report import markdown
from experiments.peers.threads import Group, Problem

__all__ = ["main", "released"]

SIZE, RATE, DECAY, K, CHUNK = 64, 0.02, 0.9, 16, 32


def released(checkout: Path, problem: Problem, workers: int, steps: int) -> tuple[np.ndarray, list[float], int]:
    """Points, losses, and bytes that a worker sends in a step, of the release."""
    import torch  # pyright: ignore[reportMissingImports]

    spec = importlib.util.spec_from_file_location("released_demo", checkout / "demo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    group = Group(workers)
    module.dist = group  # pyright: ignore[reportAttributeAccessIssue]

    def worker(rank: int) -> tuple[list[np.ndarray], int]:
        w = torch.nn.Parameter(torch.zeros(SIZE, SIZE))
        options = {"compression_decay": DECAY, "compression_topk": K, "compression_chunk": CHUNK}
        optimizer = module.DeMo([w], lr=RATE, **options)
        points = []
        for _ in range(steps):
            w.grad = torch.from_numpy(problem.gradient(w.detach().numpy(), rank))
            optimizer.step()
            points.append(w.detach().numpy().copy())
        return points, optimizer.data_transmit

    points, sent = group.run(worker)[0]
    return np.stack(points), [problem.loss(w) for w in points], sent


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, nargs="?")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args(arguments)
    if options.checkout is None or not (options.checkout / "demo.py").exists():
        print("skipped: give the path of a checkout of github.com/bloc97/DeMo")
        return
    rows = []
    for workers in (1, 4):
        problem = Problem(workers, SIZE)
        theirs, their_losses, sent = released(options.checkout, problem, workers, options.steps)
        tx = jc.demo(RATE, "data", decay=DECAY, k=K, chunk=CHUNK)
        ours, our_losses = problem.trained(tx, workers, options.steps)
        blocks = (SIZE // CHUNK) ** 2
        bytes_ = blocks * K * (32 + (CHUNK**2 - 1).bit_length()) // 8
        apart = np.abs(theirs - ours) > 1e-4
        rows.append(
            [
                str(workers),
                f"{problem.loss(np.zeros((SIZE, SIZE))):.2f}",
                f"{their_losses[-1]:.3f}",
                f"{our_losses[-1]:.3f}",
                f"{np.mean(apart[0]):.2%}",
                f"{np.mean(apart[-1]):.2%}",
                str(sent),
                str(bytes_),
            ]
        )
    head = ["workers", "first loss", "release", "jc.demo", "apart, step 1", "apart, last", "bytes, release", "bytes"]
    print(markdown(head, rows))


if __name__ == "__main__":
    main()
