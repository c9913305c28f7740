"""DeMo beside its release (github.com/bloc97/DeMo), on least squares.

    python -m experiments.peers.demo CHECKOUT [--steps 60]

CHECKOUT is a clone of the release; torch and einops must be installed. With one worker both are the same method, and
the points are compared. With four the release divides a coefficient by the number of workers that sent it, jc.demo by
that of all, and the losses stand side by side. Bytes: of one worker's message in one step.
"""

from pathlib import Path

import numpy as np

import jaxcomp as jc
from experiments.lib.report import markdown
from experiments.lib.run import cells
from experiments.peers.threads import Group, Problem, load, options_of

__all__ = ["main", "released"]

SIZE, RATE, DECAY, K, CHUNK = 64, 0.02, 0.9, 16, 32
COLUMNS = {
    "workers": "{workers}",
    "first loss": "{first:.2f}",
    "release": "{theirs:.3f}",
    "jc.demo": "{ours:.3f}",
    "apart, step 1": "{apart[0]:.2%}",
    "apart, last": "{apart[1]:.2%}",
    "bytes, release": "{sent}",
    "bytes": "{bytes}",
}


def released(checkout: Path, problem: Problem, workers: int, steps: int) -> tuple[np.ndarray, list[float], int]:
    """Points, losses, and bytes that a worker sends in a step, of the release."""
    import torch  # pyright: ignore[reportMissingImports]

    module = load("released_demo", checkout / "demo.py")
    group = module.dist = Group(workers)

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
    o = options_of(__doc__, "bloc97/DeMo", "demo.py", arguments, steps=60)
    if o is None:
        return
    rows = []
    for workers in (1, 4):
        problem = Problem(workers, SIZE)
        theirs, their_losses, sent = released(o.checkout, problem, workers, o.steps)
        ours, our_losses = problem.trained(jc.demo(RATE, "data", decay=DECAY, k=K, chunk=CHUNK), workers, o.steps)
        apart = np.abs(theirs - ours) > 1e-4
        row = {"workers": workers, "first": problem.loss(np.zeros((SIZE, SIZE))), "theirs": their_losses[-1]}
        row |= {"ours": our_losses[-1], "apart": (np.mean(apart[0]), np.mean(apart[-1])), "sent": sent}
        row["bytes"] = (SIZE // CHUNK) ** 2 * K * (32 + (CHUNK**2 - 1).bit_length()) // 8
        rows.append(row)
    print(markdown(list(COLUMNS), cells(COLUMNS, rows)))


if __name__ == "__main__":
    main()
