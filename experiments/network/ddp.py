"""PyTorch's DistributedDataParallel over gloo, with its own compression hooks, as a peer.

The same model from the same parameters with the same batches: with plain DDP the losses are those of `lax.pmean`.
"""

import os
from typing import Any

import jax
import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import torch.distributed as dist  # pyright: ignore[reportMissingImports]
from flax import nnx
from flax.traverse_util import flatten_dict
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook  # pyright: ignore[reportMissingImports]
from torch.nn import functional  # pyright: ignore[reportMissingImports]
from torch.nn.parallel import DistributedDataParallel  # pyright: ignore[reportMissingImports]

from experiments.lib.gloo import calm
from experiments.lib.models import Block
from experiments.network.training import Training

__all__ = ["Peer", "join"]

RANK = 4  # of PowerSGD's matrices
PORT = 29_500  # on the first host, where nothing else listens


def join(address: str) -> None:
    """The process group of all hosts, once. address: of the first one."""
    if not dist.is_initialized():
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
        torch.set_num_threads(1)
        host = address.rpartition(":")[0]
        here = {"world_size": jax.process_count(), "rank": jax.process_index()}
        dist.init_process_group("gloo", init_method=f"tcp://{host}:{PORT}", **here)
        dist.barrier()
        calm()


class Net(torch.nn.Module):
    """A Flax model for images, or the transformer, of `experiments.lib.models`, from its parameters."""

    def __init__(self, params: dict[str, Any]):
        super().__init__()
        self.layers = list(params)
        # Kernels of convolutions in PyTorch's order, in which PowerSGD takes them for matrices.
        ordered = lambda x: np.array(x.transpose(3, 2, 0, 1) if x.ndim == 4 else x, order="C")
        leaves = {name: torch.from_numpy(ordered(x)) for name, x in flatten_dict(params, sep="/").items()}
        self.weights = torch.nn.ParameterDict({name: torch.nn.Parameter(x) for name, x in leaves.items()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [n, height, width, channels], or [n, length]."""
        return self.of_text(x) if "embed" in self.layers else self.of_images(x)

    def of_images(self, x: torch.Tensor) -> torch.Tensor:
        for name in (name for name in ("first", "second", "third", "last") if name in self.layers):
            kernel, bias = self.weights[f"{name}/kernel"], self.weights[f"{name}/bias"]
            if kernel.ndim == 4:
                x = torch.relu(functional.conv2d(x.permute(0, 3, 1, 2), kernel, bias, padding="same"))
                x = functional.max_pool2d(x, 2).permute(0, 2, 3, 1)
            else:
                x = x.flatten(1) @ kernel + bias
                x = x if name == "last" else torch.relu(x)
        return x

    def of_text(self, x: torch.Tensor) -> torch.Tensor:
        w = self.weights
        norm = lambda x, name: w[f"{name}/scale"] * x * torch.rsqrt(torch.mean(x * x, -1, keepdim=True) + 1e-6)
        times = lambda x, name: x @ w[f"{name}/kernel"]
        many, length = x.shape
        x = w["embed/embedding"][x.long()] + w["position/embedding"][:length]
        for name in (name for name in self.layers if name.startswith("layer_")):
            cut = times(norm(x, f"{name}/norm_1"), f"{name}/qkv").reshape(many, length, 3, Block.heads, -1)
            q, k, v = cut.permute(2, 0, 3, 1, 4)
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + times(mixed.transpose(1, 2).reshape(many, length, -1), f"{name}/out")
            hidden = functional.gelu(times(norm(x, f"{name}/norm_2"), f"{name}/up"), approximate="tanh")
            x = x + times(hidden, f"{name}/down")
        return times(norm(x, "norm"), "last")


def bf16_hook(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # pyright: ignore[reportPrivateImportUsage]
    """All-reduce in bfloat16, as `default_hooks.bf16_compress_hook` does, which is refused without NCCL."""
    narrow = (bucket.buffer() / dist.get_world_size()).to(torch.bfloat16)
    work: Any = dist.all_reduce(narrow, async_op=True)
    return work.get_future().then(lambda done: bucket.buffer().copy_(done.value()[0]))


class Peer(Training):
    """One of `experiments.network.methods.PEERS`."""

    def __init__(self, task: Any):
        super().__init__(task)
        self.start()
        self.step(*next(self.batches(1)))

    def start(self) -> None:
        self.net = Net(jax.tree.map(np.asarray, nnx.to_pure_dict(self.params)))
        method, rate, params = self.task.method, self.task.rate, self.net.parameters()
        # Of several buckets PowerSGD's second all-reduces would start in an order of their own on each host, and gloo
        # would wait for ever.
        self.model = DistributedDataParallel(self.net, bucket_cap_mb=2**10 if method == "ddp-powersgd" else None)
        if method == "ddp-bf16":
            self.model.register_comm_hook(None, bf16_hook)
        elif method == "ddp-powersgd":
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=RANK, start_powerSGD_iter=2)
            self.model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        adam = self.task.optimizer == "adam"
        self.update = torch.optim.Adam(params, rate) if adam else torch.optim.SGD(params, rate, momentum=0.9)

    def step(self, x: np.ndarray, y: np.ndarray) -> float:
        self.update.zero_grad()
        scores, labels = self.model(torch.from_numpy(x)), torch.from_numpy(y).long()
        loss = functional.cross_entropy(scores.flatten(0, -2), labels.flatten())
        loss.backward()
        self.update.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return float(mean) / dist.get_world_size()
