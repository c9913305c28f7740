"""Small language models of several libraries, as they are and as JAX's Explicit axes want them.

What changed is said once for each. `vectors` serves all of them: an operation on single entries (a bias, a scale) may
not have a parameter that is reduced over "data" on one side and an array that is cut over it on the other.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from jax.sharding import PartitionSpec as P

__all__ = ["BATCH", "LENGTH", "MODELS", "VOCABULARY", "Model", "looked_up", "masked", "vectors"]

VOCABULARY, WIDTH, LENGTH, BATCH, HEADS = 256, 64, 32, 16, 4


class Model(NamedTuple):
    """params; logits(params, tokens) as the library has it, and as Explicit axes want it; what that needed."""

    params: Any
    plain: Callable[[Any, Any], Any]
    explicit: Callable[[Any, Any], Any]
    needed: str


def masked(logits: Any, labels: Any, mask: Any) -> Any:
    """Mean over the tokens of a mask. A one-hot product in place of an index: that has a rule on all axes."""
    picked = jnp.sum(jax.nn.log_softmax(logits) * jax.nn.one_hot(labels, VOCABULARY, dtype=logits.dtype), -1)
    return -jnp.sum(mask * picked) / jnp.sum(mask)


def looked_up(table: Any, tokens: Any) -> Any:
    """Rows of a table, cut as the tokens are."""
    return table.at[tokens].get(out_sharding=P(*jax.typeof(tokens).sharding.spec, None))


def vectors(params: Any) -> Any:
    """Biases and scales whole on every device, so that they may be added and multiplied; JAX sums their gradients."""
    return jax.tree.map(lambda x: jax.reshard(x, P()) if x.ndim < 2 else x, params)


# ------------------------------------------------------------------------------------------------
# Flax Linen


class Embed(nn.Embed):
    def __call__(self, inputs: Any) -> Any:
        return looked_up(self.embedding, inputs)


class Linen(nn.Module):
    embed: Any = nn.Embed

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        x = self.embed(VOCABULARY, WIDTH, name="table")(tokens)
        h = nn.relu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x)))
        return nn.Dense(VOCABULARY)(x + nn.Dense(WIDTH)(h))


def linen() -> Model:
    params = Linen().init(jax.random.key(0), jnp.zeros((1, LENGTH), jnp.int32))["params"]
    return Model(
        params,
        lambda params, tokens: Linen().apply({"params": params}, tokens),
        lambda params, tokens: Linen(Embed).apply({"params": vectors(params)}, tokens),
        "`nn.Embed` with `looked_up`; `vectors(params)`",
    )


# ------------------------------------------------------------------------------------------------
# Flax NNX


class NnxEmbed(nnx.Embed):
    def __call__(self, inputs: Any) -> Any:
        return looked_up(self.embedding[...], inputs)


class Nnx(nnx.Module):
    def __init__(self, embed: Any, rngs: Any):
        self.table = embed(VOCABULARY, WIDTH, rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs), nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)
        self.out = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, tokens: Any) -> Any:
        x = self.table(tokens)
        return self.out(x + self.down(nnx.relu(self.up(self.norm(x)))))


def of_nnx() -> Model:
    (graph, params), (other, _) = (nnx.split(Nnx(embed, nnx.Rngs(0))) for embed in (nnx.Embed, NnxEmbed))
    return Model(
        params,
        lambda params, tokens: nnx.merge(graph, params)(tokens),
        lambda params, tokens: nnx.merge(other, vectors(params))(tokens),
        "`nnx.Embed` with `looked_up`; `vectors(params)`",
    )


# ------------------------------------------------------------------------------------------------
# Equinox, where it is installed


def equinox() -> Model | None:
    try:
        import equinox as eqx  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    keys = jax.random.split(jax.random.key(0), 4)
    layers = {
        "table": eqx.nn.Embedding(VOCABULARY, WIDTH, key=keys[0]),
        "norm": eqx.nn.LayerNorm(WIDTH),
        "up": eqx.nn.Linear(WIDTH, 4 * WIDTH, key=keys[1]),
        "down": eqx.nn.Linear(4 * WIDTH, WIDTH, key=keys[2]),
        "out": eqx.nn.Linear(WIDTH, VOCABULARY, key=keys[3]),
    }
    params, static = eqx.partition(layers, eqx.is_array)

    def rest(model: Any, x: Any) -> Any:
        each = lambda layer: jax.vmap(jax.vmap(layer))
        h = jax.nn.relu(each(model["up"])(each(model["norm"])(x)))
        return each(model["out"])(x + each(model["down"])(h))

    def plain(params: Any, tokens: Any) -> Any:
        model = eqx.combine(params, static)
        return rest(model, jax.vmap(jax.vmap(model["table"]))(tokens))

    def explicit(params: Any, tokens: Any) -> Any:
        model = eqx.combine(vectors(params), static)
        return rest(model, looked_up(model["table"].weight, tokens))

    needed = "`looked_up(model.table.weight, tokens)` for `vmap(model.table)`; `vectors(params)`"
    return Model(params, plain, explicit, needed)


# ------------------------------------------------------------------------------------------------
# A GPT of functions


def gpt() -> Model:
    shapes = {
        "table": (VOCABULARY, WIDTH),
        "position": (LENGTH, WIDTH),
        "qkv": (2, WIDTH, 3, HEADS, WIDTH // HEADS),
        "mix": (2, HEADS, WIDTH // HEADS, WIDTH),
        "up": (2, WIDTH, 4 * WIDTH),
        "down": (2, 4 * WIDTH, WIDTH),
    }
    keys = jax.random.split(jax.random.key(0), len(shapes))
    drawn = lambda key, shape: jax.random.normal(key, shape) * 0.05
    params = {name: drawn(key, shape) for key, (name, shape) in zip(keys, shapes.items(), strict=True)}

    def normed(x: Any) -> Any:
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)

    def block(x: Any, layer: Any) -> tuple[Any, None]:
        q, k, v = jnp.moveaxis(jnp.einsum("btd,dkhe->btkhe", normed(x), layer["qkv"]), 2, 0)
        scores = jnp.einsum("bthe,bshe->bhts", q, k) / (WIDTH // HEADS) ** 0.5
        causal = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
        attended = jnp.einsum("bhts,bshe->bthe", jax.nn.softmax(jnp.where(causal, scores, -1e9)), v)
        x = x + jnp.einsum("bthe,hed->btd", attended, layer["mix"])
        return x + jax.nn.gelu(normed(x) @ layer["up"]) @ layer["down"], None

    def logits(params: Any, x: Any) -> Any:
        layers = {name: params[name] for name in ("qkv", "mix", "up", "down")}
        return normed(jax.lax.scan(block, x, layers)[0]) @ params["table"].T

    def explicit(params: Any, tokens: Any) -> Any:
        position = jax.reshard(params["position"], P(None, None))
        return logits(params, looked_up(params["table"], tokens) + position)

    return Model(
        params,
        lambda params, tokens: logits(params, params["table"][tokens] + params["position"]),
        explicit,
        "`looked_up`; `jax.reshard` of the positions, which are added",
    )


MODELS = {"Flax Linen": linen, "Flax NNX": of_nnx, "Equinox": equinox, "GPT of functions": gpt}
