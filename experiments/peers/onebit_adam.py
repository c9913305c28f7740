"""1-bit Adam beside DeepSpeed's (github.com/microsoft/DeepSpeed), on least squares.

    python -m experiments.peers.onebit_adam CHECKOUT [--steps 300] [--freeze 100]

CHECKOUT is a clone of the release; torch must be installed. Its optimizer and its compressed backend are run as they
are, with workers as threads and NumPy's packing of bits in the place of the compiled one. Both have four workers
and two shots. The release has one scale for the whole message of a worker, jc.onebit_adam with sign("l2", blocks=1) one
for each chunk of it, and by default one for every 1024 entries, with the mean magnitude for a scale and corrected bias.
The learning rate falls to zero.
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
from experiments.peers.threads import Group, Problem, load, options_of

__all__ = ["main", "released"]

SIZE, WORKERS, RATE, B2 = 32, 4, 0.01, 0.98
FILE = "deepspeed/runtime/fp16/onebit/adam.py"


class Packer:
    """Signs as bits, most significant first, for DeepSpeed's compiled operator; and back as +-1."""

    def load(self) -> "Packer":
        return self

    def packbits(self, buffer: Any, size: int, rank: int) -> Any:
        import torch  # pyright: ignore[reportMissingImports]

        return torch.from_numpy(np.packbits(buffer.numpy() >= 0))

    def unpackbits(self, buffer: Any, size: int, rank: int) -> Any:
        import torch  # pyright: ignore[reportMissingImports]

        return torch.from_numpy(np.unpackbits(buffer.numpy()).astype(np.float32) * 2 - 1)


def _module(checkout: Path, group: Group) -> Any:
    """Their `adam`, which reads their `compressed`, with stand-ins for what they import of the rest."""
    accelerator = types.SimpleNamespace(empty_cache=lambda: None, current_device_name=lambda: "cpu")
    stand_ins = {
        "deepspeed": {"comm": group},
        "deepspeed.comm": {name: getattr(group, name) for name in dir(group) if not name.startswith("_")},
        "deepspeed.accelerator": {"get_accelerator": lambda: accelerator},
        "deepspeed.utils": {},
        "deepspeed.utils.torch": {"required_torch_version": lambda **_: True},
        "deepspeed.ops": {},
        "deepspeed.ops.op_builder": {"PackbitsBuilder": Packer},
        "deepspeed.runtime": {},
        "deepspeed.runtime.comm": {},
    }
    for name, members in stand_ins.items():
        module = types.ModuleType(name)
        module.__path__ = []
        module.__dict__.update(members)
        sys.modules[name] = module

    load("deepspeed.runtime.comm.compressed", checkout / "deepspeed/runtime/comm/compressed.py")
    return load("deepspeed_onebit_adam", checkout / FILE)


def released(checkout: Path, problem: Problem, steps: int, freeze: int) -> list[float]:
    """Losses of the release. Its first step makes buffers and updates nothing, so freeze_step is one more."""
    import torch  # pyright: ignore[reportMissingImports]

    group = Group(WORKERS)
    adam = _module(checkout, group)

    def worker(rank: int) -> list[float]:
        w = torch.nn.Parameter(torch.zeros(SIZE, SIZE))
        engine = types.SimpleNamespace(mpu=None, local_rank=rank, enable_backward_allreduce=True)
        optimizer = adam.OnebitAdam(
            [w], engine, lr=RATE, freeze_step=freeze + 1, betas=(0.9, B2), comm_backend_name="compressed"
        )
        w.grad = torch.zeros_like(w)
        optimizer.step()
        losses = []
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = RATE * (1 - step / steps)
            gradient = problem.gradient(w.detach().numpy(), rank)
            if engine.enable_backward_allreduce:  # the engine averages while the warm-up lasts
                gradient = np.mean(group.shared(gradient), axis=0)
            w.grad = torch.from_numpy(gradient)
            optimizer.step()
            losses.append(problem.loss(w.detach().numpy()))
        return losses

    return group.run(worker)[0]


def main(arguments: list[str] | None = None) -> None:
    o = options_of(__doc__, "microsoft/DeepSpeed", FILE, arguments, steps=300, freeze=100)
    if o is None:
        return
    problem = Problem(WORKERS, SIZE)
    adam = functools.partial(jc.onebit_adam, optax.linear_schedule(RATE, 0.0, o.steps), "data", b2=B2)
    whole = {"bias_correction": False, "compressor": jc.sign("l2", blocks=1)}
    ours = {
        'jc.onebit_adam, sign("l2", blocks=1), no correction': adam(freeze_step=o.freeze, **whole),
        "jc.onebit_adam": adam(freeze_step=o.freeze),
        "jc.onebit_adam, never compressed": adam(freeze_step=10**6),
    }
    losses = {"DeepSpeed": released(o.checkout, problem, o.steps, o.freeze)}
    losses |= {name: problem.trained(tx, WORKERS, o.steps)[1] for name, tx in ours.items()}
    marks = sorted({1, o.freeze, o.freeze + 10, (o.freeze + o.steps) // 2, o.steps})
    rows = [[name, *(f"{each[mark - 1]:.5f}" for mark in marks)] for name, each in losses.items()]
    print(markdown(["loss after step", *map(str, marks)], rows))


if __name__ == "__main__":
    main()
