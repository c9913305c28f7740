"""The compiled training step of a sharded transformer: what crosses which axis, and running it."""

import functools
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomp as jc
from experiments.lib.cli import UserError
from experiments.lib.step import training_step
from experiments.lib.text import Text, windows
from experiments.lib.transformer import DATA, LAYOUTS, Sizes, initial, mean_loss
from jaxcomp.base import Algorithm

__all__ = ["LOSS_BYTES", "Program", "mesh_for", "sizes_of"]

LOSS_BYTES = 4  # the mean of the loss over workers, one f32 in an all-reduce


def mesh_for(layout: str, shape: Sequence[int], axis_type: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    """Mesh of (data, other) devices; of the layout "data" only the first axis."""
    axes = LAYOUTS[layout].axes
    lengths = tuple(shape[: len(axes)])
    devices = jax.devices()[: math.prod(lengths)]
    return jax.make_mesh(lengths, axes, axis_types=(axis_type,) * len(axes), devices=devices)


def sizes_of(o: Any, characters: int, shape: Sequence[int]) -> Sizes:
    """Of the transformer that the options ask for. Raises UserError if something cannot be cut evenly."""
    if o.width % o.heads:
        raise UserError(f"--width {o.width} is not a multiple of --heads {o.heads}")
    for name in ("width", "heads"):
        if getattr(o, name) % shape[1]:
            raise UserError(f"--{name} {getattr(o, name)} cannot be cut into {shape[1]} equal parts")
    if o.batch % math.prod(shape):
        raise UserError(f"--batch {o.batch} cannot be split among {math.prod(shape)} devices")
    return Sizes(characters, o.length, o.width, o.heads, o.layers)


class Program:
    """One method with one layout on a mesh: compiled once, run from any seed."""

    def __init__(
        self, layout: str, mesh: Any, algorithm: Algorithm, sizes: Sizes, batch: int, optimizer: Any, **options: Any
    ):
        """options: more arguments of `jc.compressed_mean`, for instance bucket_bytes."""
        self.layout, self.mesh, self.sizes, self.batch = LAYOUTS[layout], mesh, sizes, batch
        mean = jc.compressed_mean(algorithm, DATA, sharded=self.layout.axis, **options)
        self.transform = optax.chain(mean, optimizer)
        like = initial(sizes, 0)
        self.num_params = sum(leaf.size for leaf in jax.tree.leaves(like))
        self.specs = self.layout.specs(like)
        self.like = self.typed(like, self.specs)
        state, self.state_specs = self.initial_state(self.like, mesh.abstract_mesh)
        self.state_like = self.typed(state, self.state_specs)

    @functools.cached_property
    def compiled(self) -> Any:
        """(params, state, windows) -> (params, state, loss), each device with its shards."""
        step = training_step(self.transform, lambda params, tokens: mean_loss(params, tokens, self.layout), DATA)
        specs = (self.specs, self.state_specs)
        mapped = jax.shard_map(step, mesh=self.mesh, in_specs=(*specs, self.layout.batch), out_specs=(*specs, P()))
        tokens = jax.ShapeDtypeStruct((self.batch, self.sizes.length + 1), jnp.int32)
        arguments = (self.like, self.state_like, self.typed(tokens, self.layout.batch))
        return jax.jit(mapped, donate_argnums=(0, 1)).lower(*arguments).compile()

    @functools.cached_property
    def ledger(self) -> jc.Ledger:
        return jc.ledger(self.compiled)

    def initial_state(self, params: Any, mesh: Any) -> tuple[Any, Any]:
        return jc.init_state(self.transform, params, mesh, DATA, self.specs)

    def start(self, seed: int) -> tuple[Any, Any]:
        """Parameters and state of the optimizer, each shard on its devices."""
        place = lambda x, spec: jax.device_put(x, NamedSharding(self.mesh, spec))
        params = jax.tree.map(place, initial(self.sizes, seed), self.specs)
        return params, self.initial_state(params, self.mesh)[0]

    def typed(self, tree: Any, specs: Any) -> Any:
        """Shapes and dtypes with the places where the arrays will lie. The devices need not be there."""
        place = lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(self.mesh, spec))
        return jax.tree.map(place, tree, specs)

    def run(self, text: Text, seed: int, steps: int) -> Iterator[tuple[float, float, Any, Any]]:
        """(loss before the update, seconds, params, state) of each step."""
        (params, state), step = self.start(seed), self.compiled
        for number in range(1, steps + 1):
            begin = time.perf_counter()
            chosen = windows(text.codes[: text.train], self.batch, self.sizes.length, seed, number)
            tokens = jax.device_put(chosen, NamedSharding(self.mesh, self.layout.batch))
            params, state, loss = jax.block_until_ready(step(params, state, tokens))
            yield float(loss), time.perf_counter() - begin, params, state

    def test(self, params: Any, text: Text) -> float:
        """Mean loss on 64 windows that lie evenly over the test text."""
        codes, length = text.codes[text.train :], self.sizes.length
        starts = np.linspace(0, len(codes) - length - 1, 64).astype(int)
        chosen = codes[starts[:, None] + np.arange(length + 1)]
        whole = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), params)
        return float(jax.jit(lambda p, w: mean_loss(p, w, LAYOUTS["data"]))(whole, chosen))

    def over_data(self) -> float:
        """Bytes that a device sends over "data" or any axes with it, by the compiled program, without the loss."""
        workers = self.mesh.shape[DATA]
        total = sum(sent for axes, sent in self.ledger.by_axes(self.mesh).items() if DATA in axes)
        return total - 2 * (workers - 1) / workers * LOSS_BYTES
