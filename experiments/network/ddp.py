"""PyTorch's DistributedDataParallel over gloo, with its own compression hooks, as a peer.

The same model from the same parameters with the same batches: with plain DDP the losses are those of `lax.pmean`.
"""

import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import torch.distributed as dist  # pyright: ignore[reportMissingImports]
from flax import nnx
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook  # pyright: ignore[reportMissingImports]
from torch.nn.parallel import DistributedDataParallel  # pyright: ignore[reportMissingImports]

from experiments.lib.cli import UserError
from experiments.lib.models import MODELS
from experiments.network.training import Training

__all__ = ["Peer", "join"]

RANK = 4  # of PowerSGD's matrices
PORT = 29_500  # on the first host, where nothing else listens


def join(address: str, workers: int, number: int) -> None:
    """The process group of all hosts, once."""
    if not dist.is_initialized():
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
        torch.set_num_threads(1)
        host = address.rpartition(":")[0]
        dist.init_process_group("gloo", init_method=f"tcp://{host}:{PORT}", world_size=workers, rank=number)


class Net(torch.nn.Module):
    """A Flax model for images of `experiments.lib.models`, layer by layer, from its parameters."""

    def __init__(self, params: dict[str, dict[str, np.ndarray]]):
        super().__init__()
        self.names = [name for name in ("first", "second", "third", "last") if name in params]
        for name in self.names:
            kernel, bias = params[name]["kernel"], params[name]["bias"]
            if kernel.ndim == 4:
                height, width, inputs, outputs = kernel.shape
                layer = torch.nn.Conv2d(inputs, outputs, (height, width), padding="same")
                kernel = kernel.transpose(3, 2, 0, 1)
            else:
                layer = torch.nn.Linear(*kernel.shape)
                kernel = kernel.T
            layer.load_state_dict({"weight": torch.from_numpy(kernel.copy()), "bias": torch.from_numpy(bias.copy())})
            self.add_module(name, layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [n, height, width, channels]."""
        x = x.permute(0, 3, 1, 2)
        flat = False
        for name in self.names:
            layer = getattr(self, name)
            if not flat and isinstance(layer, torch.nn.Linear):
                x, flat = x.permute(0, 2, 3, 1).flatten(1), True
            x = layer(x)
            if name == "last":
                break
            x = torch.relu(x)
            if isinstance(layer, torch.nn.Conv2d):
                x = torch.nn.functional.max_pool2d(x, 2)
        return x


def bf16_hook(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # pyright: ignore[reportPrivateImportUsage]
    """All-reduce in bfloat16, as `default_hooks.bf16_compress_hook` does, which is refused without NCCL."""
    narrow = (bucket.buffer() / dist.get_world_size()).to(torch.bfloat16)
    work: Any = dist.all_reduce(narrow, async_op=True)
    return work.get_future().then(lambda done: bucket.buffer().copy_(done.value()[0]))


OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "adam": lambda params, rate: torch.optim.Adam(params, rate),
    "sgd": lambda params, rate: torch.optim.SGD(params, rate, momentum=0.9),
}


class Peer(Training):
    """One of `experiments.network.methods.PEERS`."""

    def __init__(
        self, number: int, method: str, ratio: float, levels: int, optimizer: str, rate: float, **options: Any
    ):
        super().__init__(number, **options)
        if self.architecture not in MODELS:
            raise UserError(f"{method} trains the models {', '.join(MODELS)}; got {self.architecture}")
        self.method, self.optimizer, self.rate = method, optimizer, rate
        self.described = {"ledger_bytes": None, "parameters": self.parameters}
        self.start()
        self.step(*next(self.batches(1)))

    def start(self) -> None:
        self.net = Net(jax.tree.map(np.asarray, nnx.to_pure_dict(self.params)))
        # Of several buckets PowerSGD's second all-reduces would start in an order of their own on each host, and gloo
        # would wait for ever.
        self.model = DistributedDataParallel(self.net, bucket_cap_mb=2**10 if self.method == "ddp-powersgd" else None)
        if self.method == "ddp-bf16":
            self.model.register_comm_hook(None, bf16_hook)
        elif self.method == "ddp-powersgd":
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=RANK, start_powerSGD_iter=2)
            self.model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        self.update = OPTIMIZERS[self.optimizer](self.net.parameters(), self.rate)

    def step(self, x: np.ndarray, y: np.ndarray) -> float:
        self.update.zero_grad()
        loss = torch.nn.functional.cross_entropy(self.model(torch.from_numpy(x)), torch.from_numpy(y).long())
        loss.backward()
        self.update.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return float(mean) / dist.get_world_size()

    def right(self, x: np.ndarray, y: np.ndarray) -> int:
        with torch.no_grad():
            return int((self.net(torch.from_numpy(x)).argmax(-1).numpy() == y).sum())
