"""A small causal transformer whose parameters may be shards, with every exchange of shards written out.

Three layouts of a mesh ("data", other); in all of them every parameter is cut over the other axis, none is stored
twice:

    data     no other axis: whole parameters at each worker.
    fsdp     a parameter is gathered over "fsdp" right before its use, whose transpose scatters (and adds) its gradient.
             The batch is split over both axes.
    tensor   heads and hidden units are split over "model" and used where they lie; one sum after attention and one
             after the hidden layer (Shoeybi et al. 2019, section 3). The rest is gathered as in fsdp, so that its
             gradient, too, crosses the slow axis once, not once per device. The batch is split over "data" alone.

Run `mean_loss` inside `jax.shard_map` with all axes manual and `check_vma=True`: which sums the backward pass needs
follows from the types.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

__all__ = ["LAYOUTS", "Layout", "Sizes", "initial", "mean_loss"]

Array = jax.Array
DATA = "data"


class Sizes(NamedTuple):
    """characters, length of a window, width, heads, layers. Hidden units: 4 times the width."""

    characters: int
    length: int
    width: int
    heads: int
    layers: int


class Block(NamedTuple):
    """Parameters of a layer, in the order of their use."""

    first_scale: Any
    qkv: Any
    out: Any
    second_scale: Any
    up: Any
    down: Any


class Params(NamedTuple):
    """All parameters in the order of their use: the last gradients come first out of the backward pass, as
    `bucket_bytes` of `jc.compressed_mean` expects."""

    embed: Any
    position: Any
    layers: list[Block]
    last_scale: Any
    head: Any


# Which dimension of each parameter is cut: by fsdp, by tensor.
CUTS = {
    "embed": (1, 1),  # [characters, width]
    "position": (1, 1),  # [length, width]
    "first_scale": (0, 0),  # [width]
    "qkv": (0, 2),  # [width, 3, heads, size]
    "out": (2, 0),  # [heads, size, width]
    "second_scale": (0, 0),  # [width]
    "up": (0, 1),  # [width, 4 width]
    "down": (1, 0),  # [4 width, width]
    "last_scale": (0, 0),  # [width]
    "head": (0, 0),  # [width, characters]
}


class Layout(NamedTuple):
    """axis: that parameters are shards over, None without; in_place: those that are used as they lie."""

    name: str
    axis: str | None
    in_place: frozenset[str]

    @property
    def axes(self) -> tuple[str, ...]:
        """Of the mesh."""
        return (DATA,) if self.axis is None else (DATA, self.axis)

    @property
    def batch(self) -> P:
        """How examples are split."""
        return P(self.axes) if self.name == "fsdp" else P(DATA)

    def cut(self, name: str) -> int:
        return CUTS[name][self.name == "tensor"]

    def specs(self, params: Any) -> Any:
        """PartitionSpecs of the parameters, a tree like them."""

        def spec(path, leaf):
            cut = self.cut(path[-1].name)
            return P() if self.axis is None else P(*(self.axis if i == cut else None for i in range(leaf.ndim)))

        return jax.tree_util.tree_map_with_path(spec, params)

    def take(self, params: Params | Block, name: str) -> Array:
        """A parameter as the computation of this device needs it."""
        leaf = getattr(params, name)
        if self.axis is None or name in self.in_place:
            return leaf
        # Gathered for different examples (fsdp) it is typed as each device's own, so that gradients are added; for the
        # same examples (tensor) as equal, so that a gradient is whole already and only cut.
        to = "varying" if self.name == "fsdp" else "invarying"
        return lax.all_gather(leaf, self.axis, axis=self.cut(name), tiled=True, to=to)

    def total(self, x: Array) -> Array:
        """Sum of what the devices computed with their heads or hidden units."""
        return lax.psum(x, self.axis) if self.in_place else x


LAYOUTS = {
    "data": Layout("data", None, frozenset()),
    "fsdp": Layout("fsdp", "fsdp", frozenset()),
    "tensor": Layout("tensor", "model", frozenset({"qkv", "out", "up", "down"})),
}


def initial(sizes: Sizes, seed: int) -> Params:
    """Whole parameters in f32, as NumPy arrays."""
    size, hidden = sizes.width // sizes.heads, 4 * sizes.width
    rng = np.random.default_rng([seed, 5])
    normal = lambda *shape, fan: (rng.standard_normal(shape) / math.sqrt(fan)).astype(np.float32)
    ones = lambda: np.ones(sizes.width, np.float32)
    deep = 2 * sizes.layers  # residual branches that add up
    layer = lambda: Block(
        first_scale=ones(),
        qkv=normal(sizes.width, 3, sizes.heads, size, fan=sizes.width),
        out=normal(sizes.heads, size, sizes.width, fan=sizes.width * deep),
        second_scale=ones(),
        up=normal(sizes.width, hidden, fan=sizes.width),
        down=normal(hidden, sizes.width, fan=hidden * deep),
    )
    return Params(
        embed=normal(sizes.characters, sizes.width, fan=sizes.width),
        position=normal(sizes.length, sizes.width, fan=sizes.width),
        layers=[layer() for _ in range(sizes.layers)],
        last_scale=ones(),
        head=normal(sizes.width, sizes.characters, fan=sizes.width),
    )


def mean_loss(params: Params, windows: Array, layout: Layout) -> Array:
    """Cross entropy of the next character: mean over the examples of one data worker, f32[].

    params: this device's shards. windows: i32[n, length + 1], this device's examples.
    """
    scores = jax.nn.log_softmax(logits(params, windows[:, :-1], layout))
    loss = -jnp.mean(jnp.take_along_axis(scores, windows[:, 1:, None], axis=-1))
    return lax.pmean(loss, layout.axis) if layout.name == "fsdp" else loss


def logits(params: Params, tokens: Array, layout: Layout) -> Array:
    """f32[n, length, characters]."""
    length = tokens.shape[1]
    x = layout.take(params, "embed")[tokens] + layout.take(params, "position")[:length]
    for layer in params.layers:
        q, k, v = jnp.einsum("ntd,dchs->cnhts", normed(x, layout.take(layer, "first_scale")), layout.take(layer, "qkv"))
        weights = jnp.einsum("nhts,nhus->nhtu", q, k) / math.sqrt(q.shape[-1])
        weights = jax.nn.softmax(jnp.where(jnp.tri(length, dtype=bool), weights, -1e30))
        mixed = jnp.einsum("nhtu,nhus->nhts", weights, v)
        x = x + layout.total(jnp.einsum("nhts,hsd->ntd", mixed, layout.take(layer, "out")))
        hidden = jax.nn.gelu(normed(x, layout.take(layer, "second_scale")) @ layout.take(layer, "up"))
        x = x + layout.total(hidden @ layout.take(layer, "down"))
    return normed(x, layout.take(params, "last_scale")) @ layout.take(params, "head")


def normed(x: Array, scale: Array) -> Array:
    """x / its root mean square, times the scale."""
    return x * lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6) * scale
