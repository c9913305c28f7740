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
from flax.traverse_util import flatten_dict
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook  # pyright: ignore[reportMissingImports]
from torch.nn.parallel import DistributedDataParallel  # pyright: ignore[reportMissingImports]

from experiments.lib.gloo import calm
from experiments.lib.models import Block
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
        dist.barrier()
        calm()


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


class Transformer(torch.nn.Module):
    """`experiments.lib.models.Transformer`, from its parameters."""

    def __init__(self, params: dict[str, Any]):
        super().__init__()
        self.layers = [name for name in params if name.startswith("layer_")]
        leaves = flatten_dict(params, sep="/")
        copied = {name: torch.nn.Parameter(torch.from_numpy(np.array(x))) for name, x in leaves.items()}
        self.weights = torch.nn.ParameterDict(copied)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [n, length]."""
        w = self.weights
        norm = lambda x, name: w[f"{name}/scale"] * x * torch.rsqrt(torch.mean(x * x, -1, keepdim=True) + 1e-6)
        times = lambda x, name: x @ w[f"{name}/kernel"]
        many, length = x.shape
        x = w["embed/embedding"][x.long()] + w["position/embedding"][:length]
        for name in self.layers:
            cut = times(norm(x, f"{name}/norm_1"), f"{name}/qkv").reshape(many, length, 3, Block.heads, -1)
            q, k, v = cut.permute(2, 0, 3, 1, 4)
            mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + times(mixed.transpose(1, 2).reshape(many, length, -1), f"{name}/out")
            hidden = torch.nn.functional.gelu(times(norm(x, f"{name}/norm_2"), f"{name}/up"), approximate="tanh")
            x = x + times(hidden, f"{name}/down")
        return times(norm(x, "norm"), "last")


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
        self.method, self.optimizer, self.rate = method, optimizer, rate
        self.described = {"ledger_bytes": None, "parameters": self.parameters}
        self.start()
        self.step(*next(self.batches(1)))

    def start(self) -> None:
        kind = Transformer if self.architecture == "transformer" else Net
        self.net = kind(jax.tree.map(np.asarray, nnx.to_pure_dict(self.params)))
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
        scores, labels = self.model(torch.from_numpy(x)), torch.from_numpy(y).long()
        loss = torch.nn.functional.cross_entropy(scores.flatten(0, -2), labels.flatten())
        loss.backward()
        self.update.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return float(mean) / dist.get_world_size()

    def right(self, x: np.ndarray, y: np.ndarray) -> int:
        with torch.no_grad():
            return int((self.net(torch.from_numpy(x)).argmax(-1).numpy() == y).sum())
