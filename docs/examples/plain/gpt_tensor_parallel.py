"""A GPT under plain jax.jit, on four devices: matrices are split over "model", the batch over "data"."""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
import jax
import jax.numpy as jnp
import optax
from jax import NamedSharding, P
from jax.sharding import AxisType

LAYERS, WIDTH, HEADS, LENGTH, SYMBOLS = 2, 64, 4, 32, 64
mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)  # two workers of two devices
SHAPES = {
    "embed": ((SYMBOLS, WIDTH), P()),
    "qkv": ((LAYERS, WIDTH, 3, HEADS, WIDTH // HEADS), P(None, None, None, "model")),
    "out": ((LAYERS, HEADS, WIDTH // HEADS, WIDTH), P(None, "model")),
    "up": ((LAYERS, WIDTH, 4 * WIDTH), P(None, None, "model")),
    "down": ((LAYERS, 4 * WIDTH, WIDTH), P(None, "model")),
}


def normalized(x):
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


def block(x, layer):
    q, k, v = jnp.einsum("btw,wchd->cbthd", normalized(x), layer["qkv"])
    x += jnp.einsum("bthd,hdw->btw", jax.nn.dot_product_attention(q, k, v, is_causal=True), layer["out"])
    return x + jax.nn.gelu(normalized(x) @ layer["up"]) @ layer["down"], None


def loss_fn(params, tokens):
    layers = {name: params[name] for name in ("qkv", "out", "up", "down")}
    x, _ = jax.lax.scan(block, params["embed"][tokens[:, :-1]], layers)
    return optax.softmax_cross_entropy_with_integer_labels(normalized(x) @ params["embed"].T, tokens[:, 1:]).mean()


params = {}
for key, (name, (shape, spec)) in zip(jax.random.split(jax.random.key(0), len(SHAPES)), SHAPES.items(), strict=True):
    params[name] = jax.device_put(0.1 * jax.random.normal(key, shape), NamedSharding(mesh, spec))
optimizer = optax.adam(3e-3)
state = {"params": params, "optimizer": optimizer.init(params)}


@jax.jit
def train_step(state, tokens):
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], tokens)
    updates, moments = optimizer.update(grads, state["optimizer"])
    return loss, {"params": optax.apply_updates(state["params"], updates), "optimizer": moments}


tokens = jax.device_put(jnp.arange(8 * LENGTH + 8).reshape(8, -1) ** 2 % SYMBOLS, NamedSharding(mesh, P("data")))
for _ in range(20):
    loss, state = train_step(state, tokens)
print(loss)
