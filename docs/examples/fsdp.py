"""Fully sharded data parallelism: parameters, moments and directions are cut over the four workers themselves."""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
import jax
import jax.numpy as jnp
import optax
from jax import NamedSharding, P
from jax.sharding import AxisType

import jaxcomp as jc

mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
WIDTH, DEPTH = 128, 4


def loss_fn(params, x, y):
    def layer(x, weights):
        return x + jnp.tanh(x @ weights), None

    x, _ = jax.lax.scan(layer, x @ params["into"], params["layers"])
    return jnp.mean((x @ params["out"] - y) ** 2)


keys = jax.random.split(jax.random.key(0), 3)
shapes = {"into": (8, WIDTH), "layers": (DEPTH, WIDTH, WIDTH), "out": (WIDTH, 4)}
cuts = {"into": P(None, "data"), "layers": P(None, None, "data"), "out": P("data")}
params = {name: jax.random.normal(key, shapes[name]) / 16 for key, name in zip(keys, shapes, strict=True)}
params = {name: jax.device_put(x, NamedSharding(mesh, cuts[name])) for name, x in params.items()}
optimizer = optax.adam(1e-3)
grad_fn = jc.value_and_grad(loss_fn, jc.error_feedback(jc.top_k(0.05)), axis_name="data")
state = {"params": params, "optimizer": optimizer.init(params), "exchange": grad_fn.init(params)}


@jax.jit
def train_step(state, x, y):
    loss, grads, exchange = grad_fn(state["params"], state["exchange"], x, y)
    updates, moments = optimizer.update(grads, state["optimizer"])
    return loss, {"params": optax.apply_updates(state["params"], updates), "optimizer": moments, "exchange": exchange}


x = jax.random.normal(jax.random.key(1), (256, 8))
x, y = jax.device_put((x, jnp.sin(x[:, :4])), NamedSharding(mesh, P("data")))
for _ in range(40):
    loss, state = train_step(state, x, y)
print(loss)
