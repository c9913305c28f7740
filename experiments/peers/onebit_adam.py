"""1-bit Adam beside DeepSpeed's (github.com/microsoft/DeepSpeed), on least squares.

    python -m experiments.peers.onebit_adam CHECKOUT

CHECKOUT is a clone of the release; torch must be installed. Its optimizer and its compressed backend are run as they
are, over gloo, with NumPy's packing of bits in the place of the compiled one. Both have four workers and two shots.
The release has one scale for the whole message of a worker, jc.onebit_adam with sign("l2", blocks=1) one for each
chunk of it, and by default one for every 1024 entries, with the mean magnitude for a scale and corrected bias. The
learning rate falls to zero.
"""

import functools
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import optax

import jaxcomp as jc
from experiments.lib.report import markdown
from experiments.peers.processes import Problem, checkout_of, load, run_processes

__all__ = ["main", "released"]

SIZE, WORKERS, STEPS, FREEZE, RATE, B2 = 32, 4, 300, 100, 0.01, 0.98
FILE = "deepspeed/runtime/fp16/onebit/adam.py"


def _module(checkout: Path) -> Any:
    """Their `adam`, which reads their `compressed`, with stand-ins for what they import of the rest."""
    import torch  # pyright: ignore[reportMissingImports]
    import torch.distributed as dist  # pyright: ignore[reportMissingImports]

    def gathered(out, mine, group):  # gloo wants equal shapes
        dist.all_gather(out, mine.reshape(out[0].shape), group=group)

    # For the compiled operator: signs as bits, most significant first, and back as +-1.
    packer = types.SimpleNamespace(
        packbits=lambda signs, *_: torch.from_numpy(np.packbits(signs.numpy() >= 0)),
        unpackbits=lambda bits, *_: torch.from_numpy(np.unpackbits(bits.numpy()).astype(np.float32) * 2 - 1),
    )
    builder = types.SimpleNamespace(load=lambda: packer)
    accelerator = types.SimpleNamespace(empty_cache=lambda: None, current_device_name=lambda: "cpu")
    comm = vars(dist) | {"all_gather": gathered}
    stand_ins = {
        "deepspeed": {"comm": types.SimpleNamespace(**comm)},
        "deepspeed.comm": comm,
        "deepspeed.accelerator": {"get_accelerator": lambda: accelerator},
        "deepspeed.utils.torch": {"required_torch_version": lambda **_: True},
        "deepspeed.ops.op_builder": {"PackbitsBuilder": lambda: builder},
        **{name: {} for name in ("deepspeed.utils", "deepspeed.ops", "deepspeed.runtime", "deepspeed.runtime.comm")},
    }
    for name, members in stand_ins.items():
        module = sys.modules[name] = types.ModuleType(name)
        module.__dict__.update(members, __name__=name, __path__=[])
    load("deepspeed.runtime.comm.compressed", checkout / "deepspeed/runtime/comm/compressed.py")
    return load("deepspeed_onebit_adam", checkout / FILE)


def released(rank: int, checkout: Path, problem: Problem) -> np.ndarray:
    """Points of the release. Its first step makes buffers and updates nothing, so freeze_step is one more."""
    import torch  # pyright: ignore[reportMissingImports]
    import torch.distributed as dist  # pyright: ignore[reportMissingImports]

    w = torch.nn.Parameter(torch.zeros(SIZE, SIZE))
    engine = types.SimpleNamespace(mpu=None, local_rank=rank, enable_backward_allreduce=True)
    options = {"lr": RATE, "freeze_step": FREEZE + 1, "betas": (0.9, B2), "comm_backend_name": "compressed"}
    optimizer = _module(checkout).OnebitAdam([w], engine, **options)
    w.grad = torch.zeros_like(w)
    optimizer.step()
    points = []
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = RATE * (1 - step / STEPS)
        w.grad = torch.from_numpy(problem.gradient(w.detach().numpy(), rank))
        if engine.enable_backward_allreduce:  # the engine averages while the warm-up lasts
            dist.all_reduce(w.grad)
            w.grad /= WORKERS
        optimizer.step()
        points.append(w.detach().numpy().copy())
    return np.stack(points)


def main() -> None:
    checkout = checkout_of(__doc__, FILE)
    problem = Problem(WORKERS, SIZE)
    adam = functools.partial(jc.onebit_adam, optax.linear_schedule(RATE, 0.0, STEPS), "data", b2=B2)
    whole = {"bias_correction": False, "compressor": jc.sign("l2", blocks=1)}
    ours = {
        'jc.onebit_adam, sign("l2", blocks=1), no correction': adam(freeze_step=FREEZE, **whole),
        "jc.onebit_adam": adam(freeze_step=FREEZE),
        "jc.onebit_adam, never compressed": adam(freeze_step=10**6),
    }
    points = {"DeepSpeed": run_processes(WORKERS, released, checkout, problem)}
    points |= {name: problem.trained(tx, STEPS) for name, tx in ours.items()}
    marks = (1, FREEZE, FREEZE + 10, (FREEZE + STEPS) // 2, STEPS)
    rows = [[name, *(f"{problem.loss(each[mark - 1]):.5f}" for mark in marks)] for name, each in points.items()]
    print(markdown(["loss after step", *map(str, marks)], rows))


if __name__ == "__main__":
    main()
