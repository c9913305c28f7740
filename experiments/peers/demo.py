"""DeMo beside its release (github.com/bloc97/DeMo), on least squares.

    python -m experiments.peers.demo CHECKOUT

CHECKOUT is a clone of the release; torch and einops must be installed. The release divides a coefficient by the number
of workers that sent it, as jc.demo does unless it is asked for mean="all". The points are compared, and the losses of
both means stand beside that of the release.
"""

import functools
from pathlib import Path

import numpy as np

import jaxcomp as jc
from experiments.lib.report import markdown
from experiments.lib.run import cells
from experiments.peers.processes import Problem, checkout_of, load, run_processes

__all__ = ["main", "released"]

SIZE, STEPS, RATE, DECAY, K, CHUNK = 64, 60, 0.02, 0.9, 16, 32
COLUMNS = {
    "workers": "{workers}",
    "first loss": "{first:.2f}",
    "release": "{theirs:.3f}",
    "jc.demo": "{ours:.3f}",
    'mean="all"': "{of_all:.3f}",
    "apart, step 1": "{apart[0]:.2%}",
    "apart, last": "{apart[1]:.2%}",
}


def released(rank: int, checkout: Path, problem: Problem) -> np.ndarray:
    """Points of the release."""
    import torch  # pyright: ignore[reportMissingImports]

    w = torch.nn.Parameter(torch.zeros(SIZE, SIZE))
    options = {"compression_decay": DECAY, "compression_topk": K, "compression_chunk": CHUNK}
    optimizer = load("released_demo", checkout / "demo.py").DeMo([w], lr=RATE, **options)
    points = []
    for _ in range(STEPS):
        w.grad = torch.from_numpy(problem.gradient(w.detach().numpy(), rank))
        optimizer.step()
        points.append(w.detach().numpy().copy())
    return np.stack(points)


def main() -> None:
    checkout, rows = checkout_of(__doc__, "demo.py"), []
    for workers in (1, 4):
        problem = Problem(workers, SIZE)
        theirs = run_processes(workers, released, checkout, problem)
        demo = functools.partial(jc.demo, RATE, "data", decay=DECAY, k=K, chunk=CHUNK)
        ours, of_all = problem.trained(demo(), STEPS), problem.trained(demo(mean="all"), STEPS)
        apart = np.abs(theirs - ours) > 1e-4
        row = {"workers": workers, "first": problem.loss(np.zeros((SIZE, SIZE))), "theirs": problem.loss(theirs[-1])}
        row |= {
            "ours": problem.loss(ours[-1]),
            "of_all": problem.loss(of_all[-1]),
            "apart": (np.mean(apart[0]), np.mean(apart[-1])),
        }
        rows.append(row)
    print(markdown(list(COLUMNS), cells(COLUMNS, rows)))


if __name__ == "__main__":
    main()
